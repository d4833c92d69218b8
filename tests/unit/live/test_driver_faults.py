"""Unexpected failures: every request is answered once, and no slot is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from random import Random

import pytest

from headgate.core.actions import (
    Action,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportWouldReject,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.events import (
    BatchFinished,
    Event,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.scheduler.scheduler import Scheduler
from headgate.live.driver import FAULTS_MAX, Driver
from headgate.policies import find_policy

MS = 1_000_000
REQUESTS = 60
Breaks = Callable[[str], bool]


def never(what: str) -> bool:
    return False


def make_app() -> App:
    profile = Profile(exec_ns=(MS,) * 4)
    function = Function(0, "f", (Variant(0, "f", 0, (0,), profile),), prewarm_nodes=1)
    pipeline = Pipeline(0, "f", (Stage(function),), Slo())
    return App((function,), (pipeline,), (Pool(0, "local"),))


class Fragile:
    """A Scheduler that fails on demand, before or after it handles an event."""

    def __init__(self, breaks: Callable[[Event], str]) -> None:
        self._scheduler = Scheduler(make_app(), find_policy("balance"))
        self._breaks = breaks

    @property
    def view(self) -> object:
        return self._scheduler.view

    @property
    def actions_so_far(self) -> list[Action]:
        return self._scheduler.actions_so_far

    def handle(self, now_ns: int, event: Event) -> list[Action]:
        when = self._breaks(event)
        if when == "before":
            self._scheduler._state.actions = []
            raise ZeroDivisionError("a defect of the core")
        actions = self._scheduler.handle(now_ns, event)
        if when == "after":
            raise ZeroDivisionError("a defect of the core")
        return actions


class Rig:
    """An executor that fails on demand, before or after it executes an action."""

    def __init__(
        self,
        breaks: Breaks = never,
        *,
        scheduler: Fragile | None = None,
        record: Callable[[int, Event, list[Action]], None] | None = None,
        recheck_s: float = 120.0,
    ) -> None:
        self.breaks = breaks
        self.calls: dict[int, object] = {}
        self.answers: Counter[int] = Counter()
        self.failed_ids: set[int] = set()
        self.faults: Counter[str] = Counter()
        self.end: BaseException | None = None
        self.loop = asyncio.get_running_loop()
        self.driver = Driver(
            scheduler or Scheduler(make_app(), find_policy("balance"), validate=True),  # type: ignore[arg-type]
            self,
            self.loop,
            record=record,
            count_fault=self.count,
            recheck_s=recheck_s,
        )

    def count(self, kind: str) -> None:
        self.faults[kind] += 1

    def break_at(self, what: str) -> None:
        if self.breaks(what):
            raise ZeroDivisionError(what)

    def ask(self, request_id: int) -> None:
        self.calls[request_id] = None
        self.driver.post(RequestArrived(request_id, 0))

    def answer(self, request_id: int) -> bool:
        if request_id not in self.calls:
            return False
        del self.calls[request_id]
        self.answers[request_id] += 1
        return True

    def settle(self, now_ns: int, action: Settle) -> None:
        self.break_at("settle")
        self.answer(action.request_id)
        self.break_at("settled")

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        self.break_at("dispatch")
        self.loop.call_soon(self.driver.post, BatchFinished(action.batch_id))

    def execute(self, action: PlacedAction) -> None:
        self.break_at("order")
        if isinstance(action, StartInstance):
            self.loop.call_soon(self.driver.post, InstanceStarted(action.instance_id, 0))
        elif isinstance(action, StopInstance):
            self.loop.call_soon(self.driver.post, InstanceStopped(action.instance_id, "told to"))

    def count_would_reject(self, action: ReportWouldReject) -> None:
        raise AssertionError(action.request_id)

    def keep_warm(self, action: KeepWarm) -> None:
        self.break_at("keep_warm")

    def open_requests(self) -> Collection[int]:
        return self.calls.keys()

    def fail(self, request_ids: Collection[int]) -> None:
        for request_id in request_ids:
            if self.answer(request_id):
                self.failed_ids.add(request_id)
        self.break_at("fail")

    def abort(self, error: BaseException) -> None:
        self.end = error
        for request_id in list(self.calls):
            self.answer(request_id)

    async def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(4_000):
            if is_so():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"it never came to be: {self.calls}, {self.answers}")

    async def serve(self, count: int = REQUESTS) -> None:
        """Send requests, some at once, and wait for their responses."""
        self.driver.post(NodeJoined(0, 0, "n"))
        for request_id in range(count):
            self.ask(request_id)
            if request_id % 7 == 0:
                await asyncio.sleep(0)
        await self.until(lambda: not self.calls)
        await asyncio.sleep(0.01)
        assert self.answers == dict.fromkeys(range(count), 1)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "headgate")


@pytest.mark.parametrize("what", ["settle", "settled", "dispatch", "order", "fail"])
def test_executor_that_fails_once(what: str) -> None:
    async def scenario() -> None:
        left = [what]

        def breaks(now: str) -> bool:
            if left == [now]:
                left.clear()
                return True
            return False

        rig = Rig(breaks)
        await rig.serve()
        assert sum(rig.faults.values()) == (what != "fail")
        view = rig.driver.scheduler.view
        assert (len(view.requests), len(view.batches)) == (0, 0)
        rig.driver.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(40))
def test_executor_that_fails_at_random(seed: int) -> None:
    """Whatever fails.

    One response per request, and nothing is left in the state of the Scheduler.
    """

    async def scenario() -> None:
        rng = Random(seed)
        chance = rng.choice([0.05, 0.2, 0.5])
        rig = Rig(lambda what: rng.random() < chance)
        await rig.serve()
        rig.breaks = never
        view = rig.driver.scheduler.view
        await rig.until(lambda: not view.requests and not view.batches)
        before = rig.answers.total()
        rig.ask(REQUESTS)  # the only node is still usable
        await rig.until(lambda: not rig.calls)
        assert rig.answers.total() == before + 1
        assert REQUESTS not in rig.failed_ids
        assert rig.end is None
        rig.driver.stop()

    asyncio.run(scenario())


def test_undeliverable_response_becomes_a_failure() -> None:
    async def scenario() -> None:
        rig = Rig(lambda what: what == "settle")
        await rig.serve()
        assert rig.failed_ids == set(range(REQUESTS))
        assert rig.faults == {"settle": REQUESTS}

    asyncio.run(scenario())


def test_batch_that_cannot_be_sent_fails_after_the_refusal_limit() -> None:
    async def scenario() -> None:
        rig = Rig(lambda what: what == "dispatch")
        await rig.serve(3)
        assert rig.failed_ids == set()  # the Scheduler has settled them after too many refusals
        rig.driver.stop()

    asyncio.run(scenario())


def test_scheduler_failure_does_not_lose_later_events() -> None:
    """Ten requests are in the inbox together; the third makes the Scheduler fail, and is the only
    one to fail.
    """

    async def scenario() -> None:
        def breaks(event: Event) -> str:
            is_third = isinstance(event, RequestArrived) and event.request_id == 2
            return "before" if is_third else ""

        rig = Rig(scheduler=Fragile(breaks))
        rig.driver.post(NodeJoined(0, 0, "n"))
        for request_id in range(10):
            rig.ask(request_id)
        await rig.until(lambda: not rig.calls)
        assert rig.answers == dict.fromkeys(range(10), 1)
        assert rig.failed_ids == {2}
        assert rig.faults == {"scheduler": 1}
        rig.driver.stop()

    asyncio.run(scenario())


def test_actions_before_a_failure_are_executed_and_logged() -> None:
    async def scenario() -> None:
        logged: list[tuple[Event, list[Action]]] = []
        is_first = True

        def breaks(event: Event) -> str:
            nonlocal is_first
            if isinstance(event, BatchFinished) and is_first:
                is_first = False
                return "after"
            return ""

        rig = Rig(
            scheduler=Fragile(breaks),
            record=lambda now_ns, event, actions: logged.append((event, actions)),
        )
        await rig.serve(5)
        assert rig.failed_ids == set()  # the batch was settled, and that action was executed
        actions = next(actions for event, actions in logged if isinstance(event, BatchFinished))
        assert any(isinstance(action, Settle) for action in actions)
        rig.driver.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_scheduler_that_fails_at_random(seed: int) -> None:
    """Every request is answered once: at the latest by the recheck."""

    async def scenario() -> None:
        rng = Random(seed)

        def breaks(event: Event) -> str:
            return rng.choice(("before", "after")) if rng.random() < 0.1 else ""

        rig = Rig(scheduler=Fragile(breaks), recheck_s=0.05)
        await rig.serve()
        rig.driver.stop()

    asyncio.run(scenario())


def test_repeated_scheduler_failures_abort_the_gateway() -> None:
    """After `FAULTS_MAX` in a row all open requests are answered, and the Scheduler is not called
    any more.
    """

    async def scenario() -> None:
        handled = 0

        def breaks(event: Event) -> str:
            nonlocal handled
            handled += isinstance(event, RequestArrived)
            return "before" if isinstance(event, RequestArrived) else ""

        rig = Rig(scheduler=Fragile(breaks))
        for request_id in range(REQUESTS):
            rig.ask(request_id)
        await rig.until(lambda: not rig.calls)
        assert isinstance(rig.end, ZeroDivisionError)
        assert handled == FAULTS_MAX
        assert rig.answers == dict.fromkeys(range(REQUESTS), 1)

    asyncio.run(scenario())


def test_occasional_scheduler_failures_do_not_abort() -> None:
    async def scenario() -> None:
        def breaks(event: Event) -> str:
            is_bad = isinstance(event, RequestArrived) and event.request_id % 2 == 0
            return "before" if is_bad else ""

        rig = Rig(scheduler=Fragile(breaks))
        await rig.serve()
        assert rig.end is None
        assert rig.failed_ids == set(range(0, REQUESTS, 2))
        rig.driver.stop()

    asyncio.run(scenario())


def test_failing_cancellation_is_not_repeated() -> None:
    async def scenario() -> None:
        def breaks(event: Event) -> str:
            return "before" if isinstance(event, RequestCancelled) else ""

        rig = Rig(scheduler=Fragile(breaks))
        rig.ask(0)  # there is no node
        await asyncio.sleep(0)
        rig.driver.post(RequestCancelled(0))
        await rig.until(lambda: not rig.calls)
        assert rig.faults == {"scheduler": 1}
        assert rig.end is None
        rig.driver.stop()

    asyncio.run(scenario())


def test_rejected_arrival_is_answered() -> None:
    """An id out of sequence is rejected, and the Scheduler would never settle it."""

    async def scenario() -> None:
        rig = Rig()
        for request_id in (5, 3):
            rig.ask(request_id)
            await asyncio.sleep(0)
        assert rig.failed_ids == {3}
        assert rig.faults == {"event": 1}
        rig.driver.stop()

    asyncio.run(scenario())


def test_failing_log_does_not_stop_serving() -> None:
    async def scenario() -> None:
        calls = 0

        def record(now_ns: int, event: Event, actions: list[Action]) -> None:
            nonlocal calls
            calls += 1
            raise ZeroDivisionError

        rig = Rig(record=record)
        await rig.serve()
        assert calls == 1
        assert rig.faults == {"event_log": 1}
        rig.driver.stop()

    asyncio.run(scenario())


def test_timer_that_fires_after_its_cancellation() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.driver._fire(("deadline", 7))
        rig.driver.post(TimerFired(("deadline", 7)))  # cancelled after it fired
        await asyncio.sleep(0)
        assert not rig.faults

    asyncio.run(scenario())
