"""A runtime whose parts break: a call is answered once, and costs nobody else anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from headgate.config import from_spec
from headgate.core.event_log import Wire, to_wire
from headgate.core.events import BatchLost, InstanceStarted, InstanceStopped
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
from headgate.functions.tensor import Block, Signature, Tensor
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
    TaskInputs,
    TaskResult,
    frame,
)
from headgate.live.ipc.shared_memory import Arena
from headgate.live.ipc.worker_link import WorkerLink
from headgate.live.runtime import Runtime

PLACE = NodeSpec(0, 0, "n1", [])
SPEC = {
    "functions": {"f": {"code": "nowhere:F", "exec_time": "1ms", "cold_start": "1ms"}},
    "pools": {"local": {"tier": "dedicated"}},
    "policy": "balance",
}


def boom(*arguments: object) -> None:
    raise ZeroDivisionError("planted")


class FakeLink:
    """A worker that does as it is told at once, or breaks."""

    def __init__(self, runtime: Runtime) -> None:
        self.place = PLACE
        self.hello = Hello(0, 1, [MeasuredFunction("f", Signature(), (), 0, 0)])
        self.runtime = runtime
        self.breaks = 0
        self.ran: list[RunBatch] = []

    def run(self, message: RunBatch) -> None:
        if self.breaks:
            self.breaks -= 1
            raise ValueError("too large")
        self.ran.append(message)
        results = [TaskResult(work.task_id, []) for work in message.works]
        ran = BatchRan(message.batch_id, 1, 2, results)
        asyncio.get_running_loop().call_soon(self.runtime.ran, cast(WorkerLink, self), ran)

    def order(self, wire: Wire) -> None:
        assert wire[0] == "StartInstance"
        started = InstanceStarted(cast(int, wire[1]), 0)
        asyncio.get_running_loop().call_soon(self.runtime.reported, started)


class Rig:
    def __init__(self, tmp_path: Path, **hooks: Callable[[Call], None]) -> None:
        spec = from_spec(SPEC, "app.yaml").spec
        self.faults: Counter[str] = Counter()
        self.runtime = Runtime(
            tmp_path,
            Deployment(cast(dict[str, Any], spec), str(tmp_path), [PLACE]),
            arena_bytes=65_536,
            log_path=None,
            submitted=hooks.get("submitted"),
            settled=hooks.get("settled", lambda call: None),
            started=lambda function, duration_ns: None,
            fault=lambda kind: self.faults.update([kind]),
        )
        self.link = FakeLink(self.runtime)
        self.answered: list[Call] = []
        self.runtime.joined(cast(WorkerLink, self.link))

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
        return [call.outcome for call in calls]


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


@pytest.mark.parametrize("hook", ["submitted", "settled"])
def test_what_only_watches_cannot_break_anything(tmp_path: Path, hook: str) -> None:
    """Traces and metrics: the answer is given as if nothing had happened."""

    async def story() -> None:
        rig = Rig(tmp_path, **{hook: boom})
        assert await rig.serve(20) == [Outcome.MET] * 20
        assert rig.faults == {"trace" if hook == "submitted" else "metrics": 20}
        await rig.runtime.stop()

    run(story)


def test_a_front_end_that_breaks_does_not_stop_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        seen: list[int | None] = []

        def breaks_once(call: Call) -> None:
            seen.append(call.outcome)
            if len(seen) == 1:
                boom()

        for _ in range(5):
            rig.call()
        broken = rig.call(breaks_once)
        for _ in range(5):
            rig.call()
        await rig.until(lambda: len(rig.answered) == 10)
        await rig.until(lambda: len(seen) == 2)
        assert [call.outcome for call in rig.answered] == [Outcome.MET] * 10
        assert seen == [Outcome.MET, Outcome.FAILED]  # and then it was told to answer with 500
        refused = error_of(broken, GatewayConfig(), b"")
        assert refused is not None
        assert (refused.status, refused.reason) == (500, INTERNAL)
        await rig.runtime.stop()

    run(story)


def test_a_batch_that_could_not_be_sent_is_sent_again(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        rig.link.breaks = 3
        assert await rig.serve(6) == [Outcome.MET] * 6
        assert rig.faults == {"dispatch": 3}
        await rig.runtime.stop()

    run(story)


def test_a_result_that_cannot_be_kept_fails_its_own_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        kept = rig.runtime._findings.keep

        def keep(call: Call, stage: int, outputs: list[Tensor]) -> None:
            if call.request_id == 2:
                boom()
            kept(call, stage, outputs)

        monkeypatch.setattr(rig.runtime._findings, "keep", keep)
        outcomes = await rig.serve(5)
        met = Outcome.MET
        assert outcomes == [met, met, Outcome.FAILED, met, met]
        assert rig.faults == {"result": 1}
        await rig.runtime.stop()

    run(story)


def test_books_that_break_do_not_keep_a_batch_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        monkeypatch.setattr(rig.runtime._accounts, "batch_ran", boom)
        assert await rig.serve(5) == [Outcome.MET] * 5
        await rig.runtime.stop()

    run(story)


def test_a_gateway_that_cannot_go_on_answers_what_is_open(tmp_path: Path) -> None:
    async def story() -> None:
        rig = Rig(tmp_path)
        calls = [rig.call() for _ in range(5)]
        rig.runtime.failed(RuntimeError("enough"))
        assert rig.answered == calls
        for call in calls:
            refused = error_of(call, GatewayConfig(), b"")
            assert refused is not None
            assert (refused.status, refused.retry_ns > 0) == (503, True)
        await asyncio.sleep(0.05)  # what was on its way comes to nobody
        assert rig.answered == calls
        with pytest.raises(RuntimeError, match="enough"):
            rig.runtime.failure.result()
        await rig.runtime.stop()

    run(story)


# --- the connection to a worker ------------------------------------------------------------------


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

    def ran(self, link: WorkerLink, message: BatchRan) -> None:
        boom()

    def reported(self, event: object) -> None:
        self.reports.append(event)
        if len(self.reports) == 1:
            boom()

    def learned(self, facts: object) -> None:
        boom()

    def lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        boom()


def make_link(
    listener: object, transport: Transport, faults: list[str]
) -> tuple[WorkerLink, Arena, Arena]:
    own, theirs = Arena.create(65_536), Arena.create(65_536)
    link = WorkerLink(PLACE, Hello(0, 0, []), cast(Any, listener), own, theirs, faults.append)
    link.connection_made(cast(asyncio.Transport, transport))
    return link, own, theirs


def test_whoever_listens_to_a_worker_breaks_and_the_rest_is_heard() -> None:
    async def story() -> None:
        listener, transport, faults = BrokenListener(), Transport(), list[str]()
        link, _, theirs = make_link(listener, transport, faults)
        reports = [
            frame(EventMessage(to_wire(InstanceStopped(number, "x")))) for number in range(2)
        ]
        link.data_received(reports[0] + frame(BatchRan(5, 0, 0, [])) + reports[1])
        assert [type(report) for report in listener.reports] == [
            InstanceStopped,
            BatchLost,  # nobody has heard what became of batch 5
            InstanceStopped,
        ]
        assert not transport.is_aborted
        link.connection_lost(None)
        assert faults == ["report", "report", "report"]
        with pytest.raises(ValueError, match=r"released|closed"):
            theirs.view(Block(0, 1))  # its memory is given back all the same

    run(story)


def test_a_batch_that_is_too_large_leaves_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        transport, faults = Transport(), list[str]()
        link, own, _ = make_link(BrokenListener(), transport, faults)
        monkeypatch.setattr(links, "MESSAGE_BYTES_MAX", 100_000)
        big = Tensor("x", "UINT8", (50_000,), memoryview(bytes(50_000)))
        works = [TaskInputs(number * STAGES_MAX, 1, [big]) for number in range(5)]
        with pytest.raises(ValueError, match="at most 100000"):
            link.run(RunBatch(1, 0, 0, 5, works))
        assert transport.written == 0
        assert own.allocate(memoryview(bytes(60_000))) is not None  # all of it is free again
        link.connection_lost(None)

    run(story)


def test_a_connection_that_cannot_be_written_to_ends() -> None:
    async def story() -> None:
        transport, faults = Transport(), list[str]()
        link, _, _ = make_link(BrokenListener(), transport, faults)
        transport.is_broken = True
        link.run(RunBatch(1, 0, 0, 1, [TaskInputs(0, 1, [])]))  # lost, when the connection is
        assert transport.is_aborted
        assert faults == ["worker_connection"]
        link.connection_lost(None)

    run(story)
