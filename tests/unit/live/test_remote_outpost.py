"""A remote call runs in a thread and results in exactly one event."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine

import pytest
from remote_rig import Rig, errand, work

from headgate.core.events import BatchFailed, BatchLost, BatchRefused, Event, Refusal
from headgate.live.ipc.messages import TaskResult
from headgate.live.pools.remote_pool import CallResult, Done, Failed, Lost, Refused, RemoteCall

MS = 1_000_000


def run(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(story())


def test_results_are_in_the_order_of_tasks() -> None:
    """A task without a result has failed; the others have not."""

    def call(errand: RemoteCall) -> CallResult:
        return Done([TaskResult(3, [], is_unsure=True), TaskResult(1, [])], 2 * MS)

    async def story() -> None:
        rig = Rig(call)
        rig.outpost.send(time.monotonic_ns(), errand(7, [work(1), work(2), work(3)]))
        assert rig.outpost.in_flight == 1
        await rig.until(lambda: bool(rig.ran))
        (ran,) = rig.ran
        assert (ran.batch_id, [result.task_id for result in ran.results]) == (7, [1, 2, 3])
        assert [result.status for result in ran.results] == [200, 500, 200]
        assert ran.results[2].is_unsure
        assert 0 < ran.ended_ns - ran.began_ns <= 2 * MS
        assert rig.events == []
        assert rig.outpost.in_flight == 0
        assert rig.outpost.outcomes["finished"] == 1

    run(story)


@pytest.mark.parametrize(
    ("fate", "expected", "outcome"),
    [
        (Failed("it broke"), BatchFailed, "failed"),
        (Lost("cut off"), BatchLost, "lost"),
        (Refused(Refusal.THROTTLED, "429"), BatchRefused, "throttled"),
        (Refused(Refusal.GONE, "nobody there"), BatchRefused, "refused"),
        (Refused(Refusal.TOO_LARGE, "far too much"), BatchRefused, "refused"),
    ],
)
def test_other_outcomes_are_one_event(
    fate: CallResult, expected: type[Event], outcome: str
) -> None:
    async def story() -> None:
        rig = Rig(lambda _: fate)
        rig.outpost.send(time.monotonic_ns(), errand(4))
        await rig.until(lambda: bool(rig.events))
        (event,) = rig.events
        assert type(event) is expected
        assert rig.ran == []
        assert rig.outpost.outcomes[outcome] == 1
        # What never ran costs nothing; what may have is paid for.
        assert len(rig.billed_ns) == (0 if isinstance(fate, Refused) else 1)

    run(story)


@pytest.mark.parametrize(
    ("hang_ns", "deadline_ns", "gives_up"),
    [(50 * MS, 10**18, False), (10**10, -1_000 * MS, True)],  # a second of grace has passed
)
def test_timed_out_call_is_lost_and_its_late_reply_dropped(
    hang_ns: int, deadline_ns: int, gives_up: bool
) -> None:
    may_go_on = threading.Event()

    def call(errand: RemoteCall) -> CallResult:
        may_go_on.wait(60)
        return Done([TaskResult(0, [])], MS)

    async def story() -> None:
        rig = Rig(call, hang_ns=hang_ns)
        now_ns = time.monotonic_ns()
        due_ns = now_ns + deadline_ns if gives_up else deadline_ns
        rig.outpost.send(now_ns, errand(1, deadline_ns=due_ns, gives_up=gives_up))
        await rig.until(lambda: bool(rig.events))
        assert isinstance(rig.events[0], BatchLost)
        assert rig.outpost.in_flight == 0
        may_go_on.set()
        await rig.until(lambda: rig.outpost.threads.busy == 0)
        assert (len(rig.events), rig.ran) == (1, [])

    run(story)


def test_call_without_a_free_thread_is_throttled() -> None:
    may_go_on = threading.Event()
    begun: list[int] = []

    def call(errand: RemoteCall) -> CallResult:
        begun.append(errand.batch_id)
        may_go_on.wait(60)
        return Done([TaskResult(0, [])], MS)

    async def story() -> None:
        rig = Rig(call, threads=2)
        now_ns = time.monotonic_ns()
        for batch_id in range(3):
            rig.outpost.send(now_ns, errand(batch_id))
        refused = [(e.batch_id, e.reason) for e in rig.events if isinstance(e, BatchRefused)]
        assert refused == [(2, Refusal.THROTTLED)]
        may_go_on.set()
        await rig.until(lambda: len(rig.ran) == 2)
        assert sorted(begun) == [0, 1]

    run(story)


def test_cold_start_is_recorded_and_billed() -> None:
    def call(errand: RemoteCall) -> CallResult:
        time.sleep(0.03)
        return Done([TaskResult(0, [])], MS, is_cold=errand.batch_id == 0)

    async def story() -> None:
        rig = Rig(call)
        rig.outpost.send(time.monotonic_ns(), errand(0))
        await rig.until(lambda: len(rig.ran) == 1)
        rig.outpost.send(time.monotonic_ns(), errand(1))
        await rig.until(lambda: len(rig.ran) == 2)
        cold_ns, warm_ns = rig.billed_ns
        assert cold_ns >= 30 * MS
        assert warm_ns == MS
        ((function, start_ns),) = rig.starts
        assert function == "f"
        assert start_ns >= 28 * MS

    run(story)


def test_warnings_are_rate_limited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        rig = Rig(lambda _: Failed("as ever"))
        for batch_id in range(3):
            rig.outpost.send(time.monotonic_ns(), errand(batch_id))
        await rig.until(lambda: len(rig.events) == 3)

    caplog.set_level(logging.DEBUG, "headgate")
    run(story)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    again = ("DEBUG", "pool cloud: as ever")
    assert told == [("WARNING", "pool cloud: as ever"), again, again]
