"""A remote call runs in a thread and results in exactly one event."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine

import pytest
from remote_rig import Rig, remote_call, task

from headgate.core.events import BatchFailed, BatchLost, BatchRefused, Event, Refusal
from headgate.functions.tensor import TaskResult
from headgate.live.pools.remote_pool import CallResult, Done, Failed, Lost, Refused, RemoteCall

MS = 1_000_000


def run(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario())


def test_results_are_in_the_order_of_tasks() -> None:
    """A task without a result has failed; the others have not."""

    def call(remote_call: RemoteCall) -> CallResult:
        return Done([TaskResult(3, [], is_unsure=True), TaskResult(1, [])], 2 * MS)

    async def scenario() -> None:
        rig = Rig(call)
        rig.pool.send(time.monotonic_ns(), remote_call(7, [task(1), task(2), task(3)]))
        assert rig.pool.in_flight == 1
        await rig.until(lambda: bool(rig.ran))
        (ran,) = rig.ran
        assert (ran.batch_id, [result.task_id for result in ran.results]) == (7, [1, 2, 3])
        assert [result.status for result in ran.results] == [200, 500, 200]
        assert ran.results[2].is_unsure
        assert 0 < ran.ended_ns - ran.began_ns <= 2 * MS
        assert rig.events == []
        assert rig.pool.in_flight == 0
        assert rig.pool.outcomes["finished"] == 1

    run(scenario)


@pytest.mark.parametrize(
    ("call_result", "expected", "outcome"),
    [
        (Failed("it broke"), BatchFailed, "failed"),
        (Lost("cut off"), BatchLost, "lost"),
        (Refused(Refusal.THROTTLED, "429"), BatchRefused, "throttled"),
        (Refused(Refusal.GONE, "nobody there"), BatchRefused, "refused"),
        (Refused(Refusal.TOO_LARGE, "far too much"), BatchRefused, "refused"),
    ],
)
def test_other_outcomes_are_one_event(
    call_result: CallResult, expected: type[Event], outcome: str
) -> None:
    async def scenario() -> None:
        rig = Rig(lambda _: call_result)
        rig.pool.send(time.monotonic_ns(), remote_call(4))
        await rig.until(lambda: bool(rig.events))
        (event,) = rig.events
        assert type(event) is expected
        assert rig.ran == []
        assert rig.pool.outcomes[outcome] == 1
        # A call that has not run costs nothing; one that may have run is billed.
        assert len(rig.billed_ns) == (0 if isinstance(call_result, Refused) else 1)

    run(scenario)


@pytest.mark.parametrize(
    ("hang_ns", "deadline_ns", "is_hard"),
    [(50 * MS, 10**18, False), (10**10, -1_000 * MS, True)],  # a grace of one second has passed
)
def test_timed_out_call_is_lost_and_its_late_reply_dropped(
    hang_ns: int, deadline_ns: int, is_hard: bool
) -> None:
    may_go_on = threading.Event()

    def call(remote_call: RemoteCall) -> CallResult:
        may_go_on.wait(60)
        return Done([TaskResult(0, [])], MS)

    async def scenario() -> None:
        rig = Rig(call, hang_ns=hang_ns)
        now_ns = time.monotonic_ns()
        due_ns = now_ns + deadline_ns if is_hard else deadline_ns
        rig.pool.send(now_ns, remote_call(1, deadline_ns=due_ns, is_hard=is_hard))
        await rig.until(lambda: bool(rig.events))
        assert isinstance(rig.events[0], BatchLost)
        assert rig.pool.in_flight == 0
        may_go_on.set()
        await rig.until(lambda: rig.pool.threads.busy == 0)
        assert (len(rig.events), rig.ran) == (1, [])

    run(scenario)


def test_call_without_a_free_thread_is_throttled() -> None:
    may_go_on = threading.Event()
    begun: list[int] = []

    def call(remote_call: RemoteCall) -> CallResult:
        begun.append(remote_call.batch_id)
        may_go_on.wait(60)
        return Done([TaskResult(0, [])], MS)

    async def scenario() -> None:
        rig = Rig(call, threads=2)
        now_ns = time.monotonic_ns()
        for batch_id in range(3):
            rig.pool.send(now_ns, remote_call(batch_id))
        refused = [(e.batch_id, e.reason) for e in rig.events if isinstance(e, BatchRefused)]
        assert refused == [(2, Refusal.THROTTLED)]
        may_go_on.set()
        await rig.until(lambda: len(rig.ran) == 2)
        assert sorted(begun) == [0, 1]

    run(scenario)


def test_cold_start_is_recorded_and_billed() -> None:
    def call(remote_call: RemoteCall) -> CallResult:
        time.sleep(0.03)
        return Done([TaskResult(0, [])], MS, is_cold=remote_call.batch_id == 0)

    async def scenario() -> None:
        rig = Rig(call)
        rig.pool.send(time.monotonic_ns(), remote_call(0))
        await rig.until(lambda: len(rig.ran) == 1)
        rig.pool.send(time.monotonic_ns(), remote_call(1))
        await rig.until(lambda: len(rig.ran) == 2)
        cold_ns, warm_ns = rig.billed_ns
        assert cold_ns >= 30 * MS
        assert warm_ns == MS
        ((function, start_ns),) = rig.starts
        assert function == "f"
        assert start_ns >= 28 * MS

    run(scenario)


def test_warnings_are_rate_limited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        rig = Rig(lambda _: Failed("as ever"))
        for batch_id in range(3):
            rig.pool.send(time.monotonic_ns(), remote_call(batch_id))
        await rig.until(lambda: len(rig.events) == 3)

    caplog.set_level(logging.DEBUG, "headgate")
    run(scenario)
    reported = [(record.levelname, record.getMessage()) for record in caplog.records]
    again = ("DEBUG", "pool cloud: as ever")
    assert reported == [("WARNING", "pool cloud: as ever"), again, again]
