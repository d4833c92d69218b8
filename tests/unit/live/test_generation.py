"""How a supervisor starts what has ended again, and what it says of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.config import declare
from headgate.live import supervisor as generations
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.ipc.crash_markers import LOAD, MEASURE, CrashMarkers
from headgate.live.supervisor import ProcessGroup, problems_line


class FakeChild:
    """A process that ends when a test says so."""

    started: list[FakeChild] = []  # noqa: RUF012

    def __init__(
        self, name: str, module: str, arguments: list[str], *, keeps: list[int] | None = None
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.started_s = CLOCK[0]
        self.heard_s: float | None = None
        self.said = b""
        self.status: int | None = None
        self.told: list[signal.Signals] = []
        self.held_bytes = 0
        FakeChild.started.append(self)

    def hear(self) -> None:
        if self.status is None and self.heard_s is not None:
            self.heard_s = CLOCK[0]

    def ended(self) -> int | None:
        return self.status

    def tell(self, number: signal.Signals) -> None:
        self.told.append(number)

    def private_bytes(self) -> int:
        return self.held_bytes

    def wait(self, limit_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


CLOCK = [0.0]


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    yield from made(monkeypatch, 0)


def made(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[ProcessGroup]:
    monkeypatch.setattr(generations, "ChildProcess", FakeChild)
    monkeypatch.setattr(generations, "monotonic", lambda: CLOCK[0])
    CLOCK[0] = 1000.0
    FakeChild.started = []
    loaded = declare(
        functions={name: {"code": f"m:{name}", "exec_time": "1ms"} for name in ("good", "bad")},
        pools={"cpu": {"memory": "1GB"}},
    )
    assignment = Deployment(loaded.spec, ".", [NodeSpec(0, 0, "cpu1", [])])
    running = ProcessGroup(number, assignment, http_fd=3, log_path=None)
    try:
        yield running
    finally:
        running.close()


def latest(name: str) -> FakeChild:
    return [child for child in FakeChild.started if child.name == name][-1]


def time_to_restart_s(generation: ProcessGroup, name: str, status: int = -11) -> float:
    """End a child; return how long it takes until it is started again."""
    ended = latest(name)
    ended.status = status
    began_s = CLOCK[0]
    while latest(name) is ended:
        assert generation.look() is None
        if latest(name) is ended:
            CLOCK[0] += 0.125
    return CLOCK[0] - began_s


@pytest.mark.parametrize("name", ["cpu1", "gateway"])
def test_one_restart_is_immediate_and_the_next_ones_wait(
    generation: ProcessGroup, name: str
) -> None:
    latest("gateway").said = b"{}\n"
    generation.look()
    delays_s = [time_to_restart_s(generation, name) for _ in range(8)]
    assert delays_s == [0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0]
    CLOCK[0] += 31
    assert [time_to_restart_s(generation, name) for _ in range(2)] == [0.0, 0.25]


def test_one_that_dies_now_and_then_is_back_soon(generation: ProcessGroup) -> None:
    """Every eight seconds: never at once more than once in thirty seconds, never for long."""
    delays_s = []
    for _ in range(20):
        delays_s.append(time_to_restart_s(generation, "cpu1"))
        CLOCK[0] += 8
    assert delays_s[0] == 0.0
    assert 0.0 not in delays_s[1:]
    assert max(delays_s) <= 1.0


def test_whoever_was_loading_is_named_and_remembered(
    generation: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    markers: CrashMarkers = generation._markers
    with markers.during(LOAD, 0, 1):
        time_to_restart_s(generation, "cpu1", -11)
    assert "worker cpu1 died (signal 11, SIGSEGV) while loading 'bad'" in caplog.text
    assert markers.suspicion(LOAD, 1) == "ProcessDied: signal 11, SIGSEGV while it was loaded"
    with markers.during(MEASURE, 0, 0):
        time_to_restart_s(generation, "cpu1", 3)
    assert "worker cpu1 died (exit status 3) while measuring 'good'" in caplog.text
    assert markers.suspicion(MEASURE, 0)
    assert not markers.suspicion(LOAD, 0)
    time_to_restart_s(generation, "cpu1", -9)
    assert "worker cpu1 died (signal 9, SIGKILL); it is started again" in caplog.text


@pytest.mark.parametrize(
    ("trouble", "problem"),
    [
        ("memory", "MemoryError: loading takes more memory than the pool has"),
        ("silence", "TimeoutError: loading takes too long"),
        ("never heard", "TimeoutError: loading takes too long"),
        ("ended itself", "TimeoutError: loading takes too long"),
    ],
)
def test_why_it_was_ended_is_what_is_wrong_with_the_load(
    generation: ProcessGroup, caplog: pytest.LogCaptureFixture, trouble: str, problem: str
) -> None:
    worker = latest("cpu1")
    with generation._markers.during(LOAD, 0, 1):
        if trouble == "memory":
            worker.held_bytes = 2 << 30
        elif trouble == "silence":
            worker.heard_s, worker.hear = CLOCK[0], lambda: None  # type: ignore[method-assign]
            CLOCK[0] += 61
        elif trouble == "never heard":
            CLOCK[0] += 61
        for _ in range(3):
            generation.look()
        is_killed = trouble != "ended itself"
        assert worker.told == [signal.SIGKILL] * is_killed
        assert caplog.text.count("is ended") == is_killed
        time_to_restart_s(generation, "cpu1", -9 if is_killed else 70)
    assert generation._markers.suspicion(LOAD, 1) == problem


def test_a_first_start_ends_for_bad_input_and_later_ones_do_not(
    generation: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = latest("gateway")
    assert gateway.arguments[-2:] == ["--loads-needed", "one"]
    gateway.said, gateway.status = problems_line(["good: no", "bad: no"]), 78
    assert generation.look() == 2
    assert generation.problems == ["good: no", "bad: no"]
    gateway.said, gateway.status = b"{}\n", None
    assert generation.look() is None
    gateway.status = -9
    generation.look()
    again = latest("gateway")
    assert again is not gateway
    assert again.arguments[-2:] == ["--loads-needed", "none"]
    again.said, again.status = problems_line(["the log cannot be written"]), 78
    assert generation.look() is None
    assert "the log cannot be written" in caplog.text


def test_after_a_change_all_functions_must_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for generation in made(monkeypatch, 1):
        assert latest("gateway").arguments[-2:] == ["--loads-needed", "all"]
        assert generation.greeting is None
