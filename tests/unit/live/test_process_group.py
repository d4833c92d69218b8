"""How the supervisor restarts dead processes, and what it logs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.config import declare
from headgate.core.event_log import from_wire
from headgate.core.events import GatewaysChanged
from headgate.live import supervisor
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.ipc.control_channel import ControlChannel
from headgate.live.ipc.crash_markers import LOAD, MEASURE, CrashMarkers
from headgate.live.ipc.messages import EventMessage, Frames
from headgate.live.supervisor import ProcessGroup, problems_line


class FakeChild:
    """A process that exits when a test says so."""

    started: list[FakeChild] = []  # noqa: RUF012

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        *,
        inherited_fds: list[int] | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.started_s = CLOCK[0]
        self.last_output_s: float | None = None
        self.output = b""
        self.status: int | None = None
        self.signals: list[signal.Signals] = []
        self.held_bytes = 0
        self.is_stuck = False  # does not exit when asked to
        FakeChild.started.append(self)

    def poll_output(self) -> None:
        if self.status is None and self.last_output_s is not None:
            self.last_output_s = CLOCK[0]

    def exit_status(self) -> int | None:
        return self.status

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def private_bytes(self) -> int:
        return self.held_bytes

    def wait(self, limit_s: float) -> bool:
        CLOCK[0] += limit_s if self.is_stuck else 0.0
        return not self.is_stuck

    def close(self) -> None:
        pass


CLOCK = [0.0]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    yield from make_group(monkeypatch, 0)


def make_group(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    gateways: int = 1,
    workers: int = 1,
    places: int = 0,
) -> Iterator[ProcessGroup]:
    monkeypatch.setattr(supervisor, "ChildProcess", FakeChild)
    monkeypatch.setattr(supervisor, "monotonic", lambda: CLOCK[0])
    CLOCK[0] = 1000.0
    FakeChild.started = []
    config = declare(
        functions={name: {"code": f"m:{name}", "exec_time": "1ms"} for name in ("good", "bad")},
        pools={"cpu": {"memory": "1GB"}, "ray": {"provider": "ray", "nodes": 1}},
        serve={"gateways": gateways},
    )
    nodes = [NodeSpec(node, 0, f"cpu{node + 1}", []) for node in range(workers)]
    nodes += [NodeSpec(workers + n, 1, f"ray{n + 1}", []) for n in range(places)]
    deployment = Deployment(config.spec, ".", nodes)
    running = ProcessGroup(number, deployment, http_fd=3, begun_fd=4, log_path=None)
    try:
        yield running
    finally:
        running.close()


def latest(name: str) -> FakeChild:
    return [child for child in FakeChild.started if child.name == name][-1]


def time_to_restart_s(group: ProcessGroup, name: str, status: int = -11) -> float:
    """Kill a child; return how long it takes until it is restarted."""
    ended = latest(name)
    ended.status = status
    began_s = CLOCK[0]
    while latest(name) is ended:
        assert group.poll() is None
        if latest(name) is ended:
            CLOCK[0] += 0.125
    return CLOCK[0] - began_s


@pytest.mark.parametrize("name", ["cpu1", "gateway"])
def test_first_restart_is_immediate_and_later_ones_back_off(group: ProcessGroup, name: str) -> None:
    latest("gateway").output = b"{}\n"
    group.poll()
    delays_s = [time_to_restart_s(group, name) for _ in range(8)]
    assert delays_s == [0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0]
    CLOCK[0] += 31
    assert [time_to_restart_s(group, name) for _ in range(2)] == [0.0, 0.25]


def test_occasional_deaths_are_restarted_soon(group: ProcessGroup) -> None:
    """Every eight seconds.

    At most one immediate restart in thirty seconds, and never a long delay.
    """
    delays_s = []
    for _ in range(20):
        delays_s.append(time_to_restart_s(group, "cpu1"))
        CLOCK[0] += 8
    assert delays_s[0] == 0.0
    assert 0.0 not in delays_s[1:]
    assert max(delays_s) <= 1.0


def test_function_that_was_loading_is_named_and_suspect(
    group: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    markers: CrashMarkers = group._markers
    with markers.during(LOAD, 0, 1):
        time_to_restart_s(group, "cpu1", -11)
    assert "worker cpu1 died (signal 11, SIGSEGV) while loading 'bad'" in caplog.text
    assert markers.suspect_reason(LOAD, 1) == "ProcessDied: signal 11, SIGSEGV while loading"
    with markers.during(MEASURE, 0, 0):
        time_to_restart_s(group, "cpu1", 3)
    assert "worker cpu1 died (exit status 3) while measuring 'good'" in caplog.text
    assert markers.suspect_reason(MEASURE, 0)
    assert not markers.suspect_reason(LOAD, 0)
    time_to_restart_s(group, "cpu1", -9)
    assert "worker cpu1 died (signal 9, SIGKILL); restarting" in caplog.text


@pytest.mark.parametrize(
    ("cause", "problem"),
    [
        ("memory", "MemoryError: loading exceeds the memory of the pool"),
        ("late heartbeat", "TimeoutError: loading timed out"),
        ("no heartbeat", "TimeoutError: loading timed out"),
        ("watchdog", "TimeoutError: loading timed out"),
    ],
)
def test_kill_reason_is_the_load_failure(
    group: ProcessGroup, caplog: pytest.LogCaptureFixture, cause: str, problem: str
) -> None:
    worker = latest("cpu1")
    with group._markers.during(LOAD, 0, 1):
        if cause == "memory":
            worker.held_bytes = 2 << 30
        elif cause == "late heartbeat":
            worker.last_output_s, worker.poll_output = CLOCK[0], lambda: None  # type: ignore[method-assign]
            CLOCK[0] += 61
        elif cause == "no heartbeat":
            CLOCK[0] += 61
        for _ in range(3):
            group.poll()
        is_killed = cause != "watchdog"
        assert worker.signals == [signal.SIGKILL] * is_killed
        assert caplog.text.count("is killed") == is_killed
        time_to_restart_s(group, "cpu1", -9 if is_killed else 70)
    assert group._markers.suspect_reason(LOAD, 1) == problem


def test_only_a_first_start_exits_for_bad_input(
    group: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = latest("gateway")
    assert gateway.arguments[-2:] == ["--loads-needed", "one"]
    gateway.output, gateway.status = problems_line(["good: no", "bad: no"]), 78
    assert group.poll() == 2
    assert group.problems == ["good: no", "bad: no"]
    gateway.output, gateway.status = b"{}\n", None
    assert group.poll() is None
    gateway.status = -9
    group.poll()
    again = latest("gateway")
    assert again is not gateway
    assert again.arguments[-2:] == ["--loads-needed", "none"]
    again.output, again.status = problems_line(["the log cannot be written"]), 78
    assert group.poll() is None
    assert "the log cannot be written" in caplog.text


def test_reload_needs_all_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for group in make_group(monkeypatch, 1):
        assert latest("gateway").arguments[-2:] == ["--loads-needed", "all"]
        assert group.ready_line is None


def test_workers_that_do_not_exit_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them that are still importing libraries, say, when the server is stopped."""
    for _ in make_group(monkeypatch, 0, workers=100):
        for child in FakeChild.started:
            child.is_stuck = True
        began_s = CLOCK[0]
    assert CLOCK[0] - began_s <= 2.0


def test_all_nodes_of_ray_have_one_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is watched, restarted and stopped as a worker is, and it may find the settings invalid."""
    for group in make_group(monkeypatch, 0, places=3):
        assert [child.name for child in FakeChild.started] == ["cpu1", "ray host", "gateway"]
        assert time_to_restart_s(group, "ray host") == 0.0
        assert "ray host died (signal 11, SIGSEGV); restarting" in caplog.text
        CLOCK[0] += 61
        group.poll()
        assert latest("ray host").signals == [signal.SIGKILL]
        assert "ray host sends no heartbeat and is killed" in caplog.text
        time_to_restart_s(group, "ray host", -9)
        host = latest("ray host")
        host.output, host.status = b"..." + problems_line(["there is no Ray"]), 78
        assert group.poll() == 2
        assert group.problems == ["there is no Ray"]
    assert latest("ray host").signals == [signal.SIGUSR1]


def told(group: ProcessGroup, slot: int) -> list[int]:
    """Return the numbers of gateways that a gateway has been told since the last call."""
    gateway_sock = CONTROL[group._gateways[slot].index]
    gateway_sock.setblocking(False)
    try:
        data = gateway_sock.recv(65_536)
    except BlockingIOError:
        return []
    events = [from_wire(m.wire) for m in Frames().feed(data) if isinstance(m, EventMessage)]
    assert all(isinstance(event, GatewaysChanged) for event in events)
    return [event.count for event in events if isinstance(event, GatewaysChanged)]


CONTROL: list[socket.socket] = []  # the ends of gateways, by index


def kept_channel() -> ControlChannel:
    """Its gateway's end stays open, though there is no gateway process that inherits it."""
    channel = ControlChannel()
    CONTROL.append(channel.gateway_sock.dup())
    return channel


def test_gateways_are_counted_numbered_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The others start when the first is ready. 2. All are ready: the group is, and each knows
    the number. 3. One dies: the others are told, and it is replaced under another index. 4. It is
    ready: they are told again.
    """
    monkeypatch.setattr(supervisor, "ControlChannel", kept_channel)
    CONTROL.clear()
    for group in make_group(monkeypatch, 0, gateways=3):
        names = [child.name for child in FakeChild.started]
        assert names == ["cpu1", "gateway 0"]
        assert "--http-fd" not in latest("gateway 0").arguments
        assert option("gateway 0", "--loads-needed") == "one"
        assert time_to_restart_s(group, "gateway 0", -9) == 0.0  # before it was ever ready
        assert option("gateway 0", "--loads-needed") == "one"
        FakeChild.started.pop(1)
        latest("gateway 0").output = b"{}\n"
        group.poll()
        assert [child.name for child in FakeChild.started][2:] == ["gateway 1", "gateway 2"]
        before = group.ready_line
        assert before is None
        assert (told(group, 0), told(group, 1)) == ([1], [])
        assert option("gateway 1", "--loads-needed") == "none"
        for name in ("gateway 1", "gateway 2"):
            assert "--listens-when-ready" in latest(name).arguments
            latest(name).output = b"{}\n"
        group.poll()
        assert group.ready_line == b"{}"
        assert [told(group, slot) for slot in range(3)] == [[3], [3], [3]]
        assert time_to_restart_s(group, "gateway 1", -9) == 0.0
        assert option("gateway 1", "--index") == "4"
        assert option("gateway 1", "--gateways") == "3"
        assert [told(group, slot) for slot in range(3)] == [[2], [], [2]]
        latest("gateway 1").output = b"{}\n"
        group.poll()
        assert [told(group, slot) for slot in range(3)] == [[3], [3], [3]]
        group.drain(signal.SIGTERM)
        assert not group.is_drained
        for slot in range(3):
            assert latest(f"gateway {slot}").signals == [signal.SIGTERM]
            latest(f"gateway {slot}").status = 0
        assert group.is_drained
    for sock in CONTROL:
        sock.close()


def option(name: str, option: str) -> str:
    arguments = latest(name).arguments
    return arguments[arguments.index(option) + 1]
