"""Functions that cannot be loaded, in a worker.

Named, backed off, and tried in a separate process.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from worker_rig import Gateway, row, worker

from headgate.core.actions import StartInstance
from headgate.core.event_log import from_wire
from headgate.core.events import BatchRefused, Event, InstanceStarted, InstanceStopped, Refusal
from headgate.live.ipc.crash_markers import LOAD, MEASURE, CrashMarkers
from headgate.live.ipc.messages import EventMessage, FunctionLoaded, MeasuredFunction, Message
from headgate.live.worker.trial_load import run_trial

CODE = '''
import ctypes, os, sys, time
from pathlib import Path
import numpy as np
from headgate.functions import Model

HERE = Path(__file__).parent

class Flaky(Model):
    """Breaks in its own way until there is a file called `fixed`; each load leaves a line."""
    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}
    def load(self):
        with (HERE / "loads.txt").open("a") as file:
            file.write(f"{os.getpid()} {type(self).__name__}\\n")
        if not (HERE / "fixed").exists():
            self.break_down()
    def break_down(self):
        pass
    def predict(self, batch):
        return {"y": batch["x"]}

class Healthy(Flaky): pass

class Raises(Flaky):
    def break_down(self):
        raise OSError("no weights\\ntoday")

class RaisesNews(Flaky):
    """Says something else each time."""
    def break_down(self):
        raise OSError(f"no weights at {time.time_ns()}")

class Exits(Flaky):
    def break_down(self):
        sys.exit("enough")

class Dies(Flaky):
    def break_down(self):
        os._exit(0)

class Crashes(Flaky):
    def break_down(self):
        ctypes.string_at(0)

class Hangs(Flaky):
    def break_down(self):
        time.sleep(1000)

class Eats(Flaky):
    def break_down(self):
        self.eaten = []
        while True:
            self.eaten.append(np.ones(1_000_000))

class Slow(Flaky):
    def break_down(self):
        time.sleep(0.7)
        raise OSError("after a while")

class Fickle(Flaky):
    """Loads when it is looked at first, and not again."""
    def load(self):
        Flaky.load(self)
        if (HERE / "loads.txt").read_text().count("Fickle") > 1:
            raise OSError("not again")

class CrashesMeasured(Flaky):
    def predict(self, batch):
        ctypes.string_at(0)
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "loads.py").write_text(CODE)
    return tmp_path


def functions(*names: str, **more: object) -> dict[str, object]:
    return {name.lower(): {"code": f"loads:{name}", "exec_time": "1ms", **more} for name in names}


def loads(base: Path, name: str) -> list[int]:
    """Return the processes in which a function was loaded, one entry per load."""
    path = base / "loads.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[0]) for line in lines if line.split()[1] == name]


def problems(gateway: Gateway) -> dict[str, str]:
    return {measured.function: measured.problem for measured in gateway.hello.functions}


def start(gateway: Gateway, instance_id: int, variant_id: int) -> InstanceStarted | str:
    """Return the event of a start: a started instance, or why there is none."""
    gateway.order(StartInstance(instance_id, variant_id, 0, 0))
    while True:
        message: Message = gateway.receive()
        if isinstance(message, EventMessage):
            event = from_wire(message.wire)
            if isinstance(event, InstanceStopped):
                return event.reason
            assert isinstance(event, InstanceStarted)
            return event


def start_until_it_works(gateway: Gateway, variant_id: int) -> int:
    """Start an instance repeatedly; return how many starts failed before one succeeded."""
    until_s = time.monotonic() + 30.0
    for count in range(100_000):
        if isinstance(start(gateway, 100 + count, variant_id), InstanceStarted):
            return count
        assert time.monotonic() < until_s, "it never started"
        time.sleep(0.05)
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "problem"),
    [("Raises", "OSError: no weights today"), ("Exits", "SystemExit: enough")],
)
def test_failing_load_runs_once_per_backoff(base: Path, name: str, problem: str) -> None:
    """200 starts are requested; the traceback is logged once.

    Another function is served meanwhile.
    """
    with worker(base, functions("Healthy", name)) as process:
        gateway = process.gateway()
        assert problems(gateway) == {"healthy": "", name.lower(): problem}
        gateway.start(0, 0)
        began_s = time.monotonic()
        for number in range(200):
            assert start(gateway, number + 1, 1) == problem
        assert gateway.arrays(gateway.ask(row(5))[0])["y"].tolist() == [5]
        assert len(loads(base, name)) <= 2 + (time.monotonic() - began_s)
        assert process.has_logged("Traceback")
        assert process.errors().count("Traceback") == 1
        assert process.errors().count(problem) <= 4


def test_traceback_of_a_failing_load_is_logged_once(base: Path) -> None:
    with worker(base, functions("RaisesNews")) as process:
        gateway = process.gateway()
        until_s = time.monotonic() + 60
        instance_id = 0
        while len(loads(base, "RaisesNews")) < 3:
            assert "OSError: no weights at " in str(start(gateway, instance_id, 0))
            instance_id += 1
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert process.errors().count("Traceback") == 1


def test_recovered_function_is_announced_to_every_gateway(base: Path) -> None:
    with worker(base, functions("Raises")) as process:
        gateway, other = process.gateway(), process.gateway()
        (measured,) = gateway.hello.functions
        assert (measured.problem, measured.signature.inputs) == ("OSError: no weights today", ())
        (base / "fixed").touch()
        start_until_it_works(gateway, 0)
        message = other.receive()
        assert isinstance(message, FunctionLoaded)
        assert (message.function.problem, message.function.signature.inputs[0].name) == ("", "x")
        later: MeasuredFunction = process.gateway().hello.functions[0]
        assert later == message.function


def test_later_load_failure_is_in_the_next_hello(base: Path) -> None:
    """And batches that waited for such an instance are refused."""
    with worker(base, functions("Fickle")) as process:
        gateway = process.gateway()
        assert problems(gateway) == {"fickle": ""}
        gateway.start(0, 0)  # the cached model
        gateway.order(StartInstance(1, 0, 0, 0))
        gateway.run(row(1), batch_id=1, instance_id=1)
        events = [gateway.event(Event), gateway.event(Event)]  # in either order
        assert {type(event) for event in events} == {BatchRefused, InstanceStopped}
        assert {getattr(event, "reason", "") for event in events} == {
            Refusal.GONE,
            "OSError: not again",
        }
        assert problems(process.gateway()) == {"fickle": "OSError: not again"}
        assert gateway.ask(row(1))[0].status == 200


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; sys.exit(3)", "SystemExit: code: 'odd:F': cannot be imported: SystemExit: 3"),
        ("raise OSError('no\nway')", "SyntaxError: code: 'odd:F': cannot be imported: SyntaxError"),
        ("F = 3", "ConfigError: code: 'odd:F': is neither a Model nor a function"),
        ("from headgate.functions import Model\nclass F(Model):\n  def __init__(self): exit(0)",
         "SystemExit: options: 'odd:F': cannot be created: SystemExit: 0"),
        ("from headgate.functions import Model\nclass F(Model):\n  inputs = {'x': 'FP32[3]'}",
         "ConfigError: F: x: (3,): does not count items in its first dimension"),
    ],
    ids=["exits", "syntax", "no-model", "made", "signature"],
)  # fmt: skip
def test_errors_in_user_code_are_load_failures(base: Path, code: str, problem: str) -> None:
    (base / "odd.py").write_text(code)
    declared = functions("Healthy") | {"odd": {"code": "odd:F", "exec_time": "1ms"}}
    with worker(base, declared) as process:
        gateway = process.gateway()
        assert problems(gateway)["odd"].startswith(problem)
        assert problems(gateway)["healthy"] == ""


def test_invalid_model_file_is_named(base: Path) -> None:
    (base / "bad.onnx").write_bytes(b"not a model")
    with worker(base, functions("Healthy") | {"bad": {"model": "bad.onnx"}}) as process:
        assert "bad.onnx: cannot be loaded: " in problems(process.gateway())["bad"]


@pytest.mark.parametrize(
    ("name", "status"), [("Dies", 0), ("Crashes", -11), ("Hangs", 70)], ids=str
)
def test_crashing_load_is_named_and_not_repeated(base: Path, name: str, status: int) -> None:
    """The supervisor finds the crash marker.

    The next worker serves the others and starts a trial.
    """
    declared = functions("Healthy", name)
    arguments = ("--hang-s", "0.1")
    markers = CrashMarkers(base)
    with worker(base, declared, arguments=arguments) as process:
        assert process.process.wait(60) == status
    assert markers.take_interrupted(0) == [(LOAD, 1)]
    markers.mark_suspect(LOAD, 1, "ProcessDied: as the supervisor says")
    with worker(base, declared, arguments=arguments) as process:
        gateway = process.gateway()
        expected = {"healthy": "", name.lower(): "ProcessDied: as the supervisor says"}
        assert problems(gateway) == expected
        gateway.start(0, 0)
        assert start(gateway, 1, 1) == "ProcessDied: as the supervisor says"
        (base / "fixed").touch()  # its trial may fail before this, or not
        assert gateway.ask(row(5))[0].status == 200
        start_until_it_works(gateway, 1)
        assert gateway.ask(row(6), instance_id=0)[0].status == 200
        pids = loads(base, name)
        assert pids[-1] == process.process.pid
        assert process.process.pid not in pids[:-1]
        assert not markers.suspect_reason(LOAD, 1)


def test_slowly_failing_load_is_tried_in_a_separate_process(base: Path) -> None:
    """Each load of it occupies a slot of its worker: the first one is the last."""
    with worker(base, functions("Slow", "Healthy")) as process:
        gateway = process.gateway()
        gateway.start(0, 1)
        until_s = time.monotonic() + 60
        instance_id = 1
        while len(loads(base, "Slow")) < 3:
            assert start(gateway, instance_id, 0) == "OSError: after a while"
            instance_id += 1
            assert gateway.ask(row(5))[0].status == 200
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert loads(base, "Slow").count(process.process.pid) == 1
        assert process.errors().count("Traceback") == 1


def test_function_that_crashes_when_measured_is_served_unmeasured(base: Path) -> None:
    declared = {"crashes": {"code": "loads:CrashesMeasured"}}
    markers = CrashMarkers(base)
    with worker(base, declared) as process:
        assert process.process.wait(60) == -11
    assert markers.take_interrupted(0) == [(MEASURE, 0)]
    markers.mark_suspect(MEASURE, 0, "ProcessDied: as the supervisor says")
    with worker(base, declared) as process:
        (measured,) = process.gateway().hello.functions
        assert (measured.problem, measured.exec_ns) == ("", ())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Raises", "OSError: no weights today"),
        ("Exits", "SystemExit: enough"),
        ("Dies", "ProcessDied: exit status 0 while loading"),
        ("Crashes", "ProcessDied: signal 11, SIGSEGV while loading"),
        ("Hangs", "TimeoutError: loading timed out"),
        ("Eats", "MemoryError: loading exceeds the memory of the pool"),
        ("Healthy", ""),
    ],
)
def test_trial_load_results(base: Path, name: str, problem: str) -> None:
    with worker(base, functions(name)) as process:  # for its deployment file
        process.process.kill()
    limit_s = 3.0 if name == "Hangs" else 60.0
    assert run_trial(base, 0, limit_s=limit_s, memory_bytes=600 << 20) == problem


def test_unwritable_crash_markers_change_nothing(tmp_path: Path) -> None:
    markers = CrashMarkers(tmp_path / "nowhere")
    with markers.during(LOAD, 0, 1):
        assert markers.take_interrupted(0) == []
    markers.mark_suspect(LOAD, 1, "x")
    assert markers.suspect_reason(LOAD, 1) == ""
    markers.clear_suspect(LOAD, 1)
    assert markers.is_new_failure("x") and markers.is_new_failure("x")
    found = CrashMarkers(tmp_path)
    assert (found.is_new_failure("y"), found.is_new_failure("y")) == (True, False)
    with found.during(LOAD, 3, 7), found.during(MEASURE, 13, 7), found.during(LOAD, 3, 1):
        assert found.take_interrupted(3) == [(LOAD, 1), (LOAD, 7)]
        assert found.take_interrupted(13) == [(MEASURE, 7)]
