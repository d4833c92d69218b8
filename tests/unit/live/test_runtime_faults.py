"""A runtime whose parts fail: a call is answered once, and other calls are unaffected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headgate.config import from_spec
from headgate.core.event_log import Wire, to_wire
from headgate.core.events import BatchLost, InstanceStarted, InstanceStopped, RequestCancelled
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
from headgate.functions.tensor import Block, Signature, TaskInputs, TaskResult, Tensor
from headgate.live.call import INTERNAL, Call
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.http.responses import error_of
from headgate.live.ipc import worker_link as links
from headgate.live.ipc.messages import (
    BatchRan,
    EventMessage,
    Hello,
    MeasuredFunction,
    RunBatch,
    frame,
)
from headgate.live.ipc.shared_memory import Arena
from headgate.live.ipc.worker_link import WorkerLink
from headgate.live.runtime import Runtime
from headgate.live.telemetry.metrics import Metrics
from headgate.live.telemetry.spans import SpanTracer

NODE = NodeSpec(0, 0, "n1", [])
SPEC = {
    "functions": {"f": {"code": "nowhere:F", "exec_time": "1ms", "cold_start": "1ms"}},
    "pools": {"local": {"tier": "dedicated"}},
    "policy": "balance",
}


def boom(*arguments: object) -> None:
    raise ZeroDivisionError("planted")


class FakeLink:
    """A worker that executes everything at once, or fails."""

    def __init__(self, runtime: Runtime) -> None:
        self.node = NODE
        self.hello = Hello(0, 1, [MeasuredFunction("f", Signature(), (), 0, 0)])
        self.runtime = runtime
        self.breaks = 0
        self.deaths = 0  # it ends with its next batches, and comes back
        self.load_breaks = 0  # its next starts cannot be sent
        self.load_deaths = 0  # it ends with its next starts, and comes back
        self.ran: list[RunBatch] = []

    def run(self, message: RunBatch) -> None:
        if self.breaks:
            self.breaks -= 1
            raise ValueError("too large")
        self.ran.append(message)
        if self.deaths:
            self.deaths -= 1
            asyncio.get_running_loop().call_soon(self._die, message.batch_id)
            return
        results = [TaskResult(task.task_id, []) for task in message.tasks]
        ran = BatchRan(message.batch_id, 1, 2, results)
        asyncio.get_running_loop().call_soon(self.runtime.on_batch_ran, 0, ran)

    def _die(self, *batch_ids: int) -> None:
        self.runtime.on_worker_lost(cast(WorkerLink, self), list(batch_ids))
        self.runtime.on_worker_joined(cast(WorkerLink, self))

    def send_action(self, wire: Wire) -> None:
        assert wire[0] == "StartInstance"
        if self.load_breaks:
            self.load_breaks -= 1
            raise ValueError("planted")
        if self.load_deaths:
            self.load_deaths -= 1
            asyncio.get_running_loop().call_soon(self._die)
            return
        started = InstanceStarted(cast(int, wire[1]), 0)
        asyncio.get_running_loop().call_soon(self.runtime.on_event, started)


class Rig:
    def __init__(self, tmp_path: Path, tracer: SpanTracer | None = None) -> None:
        config = from_spec(SPEC, "app.yaml")
        spec = config.spec
        self.metrics = Metrics(config.app)
        self.runtime = Runtime(
            tmp_path,
            Deployment(cast(dict[str, Any], spec), str(tmp_path), [NODE]),
            arena_bytes=65_536,
            log_path=None,
            metrics=self.metrics,
            tracer=tracer,
        )
        self.link = FakeLink(self.runtime)
        self.answered: list[Call] = []
        self.runtime.on_worker_joined(cast(WorkerLink, self.link))

    def call(self, on_answer: Callable[[Call], None] | None = None) -> Call:
        call = Call(0, [], 1, on_answer or self.answered.append)
        call.arrived_ns = self.runtime.now_ns()
        self.runtime.submit(call)
        return call

    async def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(4_000):
            if is_so():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it never came to be")

    async def serve(self, count: int) -> list[int | None]:
        calls = [self.call() for _ in range(count)]
        await self.until(lambda: not self.runtime.open_requests())
        assert sorted(call.request_id for call in self.answered) == [c.request_id for c in calls]
        return [outcome_of(call) for call in calls]


def outcome_of(call: Call) -> int | None:
    return None if call.settlement is None else call.settlement.outcome


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@pytest.mark.parametrize("broken", ["trace", "metrics"])
def test_failing_observers_change_nothing(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces and metrics: the response is sent as usual."""
    if broken == "metrics":
        monkeypatch.setattr(Metrics, "settled", boom)

    async def scenario() -> None:
        begin = boom if broken == "trace" else print
        tracer = SimpleNamespace(begin=begin, end=lambda call: None)
        rig = Rig(tmp_path, cast(SpanTracer, tracer))
        assert await rig.serve(20) == [Outcome.MET] * 20
        assert rig.metrics.faults == {broken: 20}
        await rig.runtime.stop()

    run(scenario)


def test_margins_of_the_policy_are_gauges(tmp_path: Path) -> None:
    """By model; a policy that keeps none, and a runtime that is only starting, have none."""

    async def scenario() -> None:
        rig = Rig(tmp_path)
        assert rig.runtime.gauge_snapshot().admission_margin == {}
        assert rig.runtime._driver is not None
        rig.runtime._driver.scheduler.policy.admission_margins = [0.25]
        assert rig.runtime.gauge_snapshot().admission_margin == {"f": 0.25}
        await rig.runtime.stop()

    run(scenario)


def test_ignored_events_are_counted(tmp_path: Path) -> None:
    """A cancellation that crosses the response."""

    async def scenario() -> None:
        rig = Rig(tmp_path)
        await rig.serve(1)
        assert rig.runtime.gauge_snapshot().events_ignored == 0
        assert rig.runtime._driver is not None
        rig.runtime._driver.post(RequestCancelled(0))
        await rig.until(lambda: rig.runtime.gauge_snapshot().events_ignored == 1)
        await rig.runtime.stop()

    run(scenario)


def test_failing_front_end_does_not_affect_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        observed: list[int | None] = []

        def breaks_once(call: Call) -> None:
            observed.append(outcome_of(call))
            if len(observed) == 1:
                boom()

        for _ in range(5):
            rig.call()
        broken = rig.call(breaks_once)
        for _ in range(5):
            rig.call()
        await rig.until(lambda: len(rig.answered) == 10)
        await rig.until(lambda: len(observed) == 2)
        assert [outcome_of(call) for call in rig.answered] == [Outcome.MET] * 10
        # the second time it is asked to answer with 500
        assert observed == [Outcome.MET, Outcome.FAILED]
        refused = error_of(broken, GatewayConfig(), b"")
        assert refused is not None
        assert (refused.status, refused.reason) == (500, INTERNAL)
        await rig.runtime.stop()

    run(scenario)


@pytest.mark.parametrize(
    ("runs_functions", "outcome"), [(True, Outcome.FAILED), (False, Outcome.MET)]
)
def test_only_a_process_that_runs_functions_dies_of_them(
    tmp_path: Path, runs_functions: bool, outcome: int
) -> None:
    """It dies twice with a request: a worker may well have died of that, a Ray host has not."""

    async def scenario() -> None:
        rig = Rig(tmp_path)
        rig.link.hello.runs_functions = runs_functions
        rig.link.deaths = 2
        assert await rig.serve(1) == [outcome]
        await rig.runtime.stop()

    run(scenario)


def test_the_log_names_what_a_lost_worker_was_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        assert await rig.serve(1) == [Outcome.MET]
        rig.link._die()
        assert "was lost" not in caplog.text, "it was idle"
        rig.link.deaths = 1
        rig.call()
        await rig.until(lambda: not rig.runtime.open_requests())
        assert caplog.text.count("worker n1 was lost while running 'f'") == 1
        await rig.runtime.stop()

    run(scenario)


def test_the_end_of_the_runtime_loses_no_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        monkeypatch.setattr(rig.link, "run", rig.link.ran.append)  # it never ends
        rig.call()
        await rig.until(lambda: bool(rig.link.ran))
        await rig.runtime.stop()
        rig.runtime.on_worker_lost(cast(WorkerLink, rig.link), [rig.link.ran[0].batch_id])
        assert "was lost" not in caplog.text

    run(scenario)


def test_start_on_a_worker_that_dies_while_it_loads_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        rig.link.load_deaths = 1
        assert await rig.serve(1) == [Outcome.MET]
        assert (rig.link.load_deaths, rig.runtime._starts) == (0, {})
        await rig.runtime.stop()

    run(scenario)


def test_unsent_start_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        rig.link.load_breaks = 1
        assert await rig.serve(1) == [Outcome.MET]
        assert rig.metrics.faults == {"order": 1}
        assert rig.runtime._starts == {}
        await rig.runtime.stop()

    run(scenario)


def test_unsent_batch_is_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        rig.link.breaks = 3
        assert await rig.serve(6) == [Outcome.MET] * 6
        assert rig.metrics.faults == {"dispatch": 3}
        await rig.runtime.stop()

    run(scenario)


def test_result_that_cannot_be_stored_fails_its_own_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        kept = rig.runtime._stage_outputs.store

        def store(call: Call, stage: int, outputs: list[Tensor]) -> None:
            if call.request_id == 2:
                boom()
            kept(call, stage, outputs)

        monkeypatch.setattr(rig.runtime._stage_outputs, "store", store)
        outcomes = await rig.serve(5)
        met = Outcome.MET
        assert outcomes == [met, met, Outcome.FAILED, met, met]
        assert rig.metrics.faults == {"result": 1}
        await rig.runtime.stop()

    run(scenario)


def test_failing_cost_accounting_does_not_hold_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        monkeypatch.setattr(rig.runtime._costs, "on_batch_ran", boom)
        assert await rig.serve(5) == [Outcome.MET] * 5
        await rig.runtime.stop()

    run(scenario)


def test_abort_answers_open_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        calls = [rig.call() for _ in range(5)]
        rig.runtime.abort(RuntimeError("enough"))
        assert rig.answered == calls
        for call in calls:
            refused = error_of(call, GatewayConfig(), b"")
            assert refused is not None
            assert (refused.status, refused.retry_ns > 0) == (503, True)
        await asyncio.sleep(0.05)  # results that were on their way are dropped
        assert rig.answered == calls
        with pytest.raises(RuntimeError, match="enough"):
            rig.runtime.failure.result()
        await rig.runtime.stop()

    run(scenario)


class Transport:
    def __init__(self) -> None:
        self.is_broken = False
        self.is_aborted = False
        self.written = 0

    def write(self, data: bytes) -> None:
        if self.is_broken:
            boom()
        self.written += 1

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_aborted = True


class BrokenListener:
    def __init__(self) -> None:
        self.reports: list[object] = []

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        boom()

    def on_event(self, event: object) -> None:
        self.reports.append(event)
        if len(self.reports) == 1:
            boom()

    def on_worker_event(self, link: WorkerLink, event: object) -> None:
        self.on_event(event)

    def on_function_loaded(self, function: object) -> None:
        boom()

    def on_worker_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        boom()


def make_link(
    listener: object, transport: Transport, faults: list[str]
) -> tuple[WorkerLink, Arena, Arena]:
    arena, peer_arena = Arena.create(65_536), Arena.create(65_536)
    link = WorkerLink(NODE, Hello(0, 0, []), cast(Any, listener), arena, peer_arena, faults.append)
    link.connection_made(cast(asyncio.Transport, transport))
    return link, arena, peer_arena


def test_failing_listener_does_not_stop_the_link() -> None:
    async def scenario() -> None:
        listener, transport, faults = BrokenListener(), Transport(), list[str]()
        link, _, peer_arena = make_link(listener, transport, faults)
        reports = [
            frame(EventMessage(to_wire(InstanceStopped(number, "x")))) for number in range(2)
        ]
        link.data_received(reports[0] + frame(BatchRan(5, 0, 0, [])) + reports[1])
        assert [type(report) for report in listener.reports] == [
            InstanceStopped,
            BatchLost,  # the results of batch 5 could not be handled
            InstanceStopped,
        ]
        assert not transport.is_aborted
        link.connection_lost(None)
        assert faults == ["report", "report", "report"]
        with pytest.raises(ValueError, match=r"released|closed"):
            peer_arena.view(Block(0, 1))  # its memory is released all the same

    run(scenario)


def test_too_large_batch_leaves_no_block_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        transport, faults = Transport(), list[str]()
        link, arena, _ = make_link(BrokenListener(), transport, faults)
        monkeypatch.setattr(links, "MESSAGE_BYTES_MAX", 100_000)
        big = Tensor("x", "UINT8", (50_000,), memoryview(bytes(50_000)))
        tasks = [TaskInputs(number * STAGES_MAX, 1, [big]) for number in range(5)]
        with pytest.raises(ValueError, match="at most 100000"):
            link.run(RunBatch(1, 0, 0, 5, tasks))
        assert transport.written == 0
        assert arena.allocate(memoryview(bytes(60_000))) is not None  # all of it is free again
        link.connection_lost(None)

    run(scenario)


def test_failed_write_ends_the_connection() -> None:
    async def scenario() -> None:
        transport, faults = Transport(), list[str]()
        link, _, _ = make_link(BrokenListener(), transport, faults)
        transport.is_broken = True
        link.run(RunBatch(1, 0, 0, 1, [TaskInputs(0, 1, [])]))  # lost with the connection
        assert transport.is_aborted
        assert faults == ["worker_connection"]
        link.connection_lost(None)

    run(scenario)
