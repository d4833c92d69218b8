"""The driver: order of events, timers, and execution of actions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from time import monotonic_ns

import pytest

from headgate.core.actions import (
    Action,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportWouldReject,
    Settle,
    StartInstance,
)
from headgate.core.events import (
    BatchFinished,
    Event,
    InstanceStarted,
    NodeJoined,
    RequestArrived,
    RequestCancelled,
)
from headgate.core.model import (
    OBSERVE,
    App,
    Function,
    Limits,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Variant,
)
from headgate.core.policy import Policy, PolicyConfig, PolicyKind
from headgate.core.records import Node, Request, Task
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome, Settlement
from headgate.live.driver import ARRIVALS_PER_TURN, Driver
from headgate.policies import find_policy

MS = 1_000_000


def make_app(slo: Slo | None = None) -> App:
    profile = Profile(exec_ns=(MS,) * 4)
    function = Function(0, "f", (Variant(0, "f", 0, (0,), profile),), prewarm_nodes=1)
    pipeline = Pipeline(0, "f", (Stage(function),), slo or Slo())
    return App((function,), (pipeline,), (Pool(0, "local"),))


class Rig:
    """A driver whose executor only records actions."""

    def __init__(self, app: App | None = None, kind: PolicyKind | None = None) -> None:
        self.done: list[Action] = []
        self.recorded: list[Event] = []
        self.faults: list[str] = []
        self.driver = Driver(
            Scheduler(app or make_app(), kind or find_policy("headgate"), validate=True),
            self,
            asyncio.get_running_loop(),
            record=lambda now_ns, event, actions: self.recorded.append(event),
            count_fault=self.faults.append,
        )

    def open_requests(self) -> Collection[int]:
        return ()

    def fail(self, request_ids: Collection[int]) -> None:
        raise AssertionError(request_ids)

    def abort(self, error: BaseException) -> None:
        raise error

    def settle(self, now_ns: int, action: Settle) -> None:
        self.done.append(action)

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        self.done.append(action)

    def count_would_reject(self, action: ReportWouldReject) -> None:
        self.done.append(action)

    def keep_warm(self, action: KeepWarm) -> None:
        self.done.append(action)

    def execute(self, action: PlacedAction) -> None:
        self.done.append(action)
        if isinstance(action, StartInstance):
            self.driver.post(InstanceStarted(action.instance_id, 0))


def names(things: list[Event] | list[Action]) -> list[str]:
    return [type(thing).__name__ for thing in things]


def test_events_are_handled_in_the_next_iteration() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.driver.post(NodeJoined(0, 0, "n"))
        assert rig.done == []
        await asyncio.sleep(0)
        assert names(rig.done) == ["StartInstance"]

    asyncio.run(scenario())


def test_events_that_end_work_come_first() -> None:
    """Two requests are in the inbox when the batch before them returns.

    They are batched together.
    """

    async def scenario() -> None:
        rig = Rig()
        for event in (NodeJoined(0, 0, "n"), RequestArrived(0, 0)):
            rig.driver.post(event)
            await asyncio.sleep(0.001)
        rig.driver.post(RequestArrived(1, 0))
        rig.driver.post(BatchFinished(0))
        await asyncio.sleep(0)
        assert names(rig.recorded[-2:]) == ["BatchFinished", "RequestArrived"]
        assert names(rig.done) == ["StartInstance", "Dispatch", "Settle", "Dispatch"]
        assert rig.faults == []

    asyncio.run(scenario())


def test_workers_are_heard_between_new_requests() -> None:
    """1. A batch runs. 2. Many requests come at once. 3. It ends after the first of them were
    handled: it does not wait for the others. 4. One of these is cancelled meanwhile.
    """

    async def scenario() -> None:
        rig = Rig(kind=find_policy("balance"))
        for event in (NodeJoined(0, 0, "n"), RequestArrived(0, 0)):
            rig.driver.post(event)
            await asyncio.sleep(0.001)
        del rig.recorded[:]
        for number in range(1, 2 * ARRIVALS_PER_TURN + 1):
            rig.driver.post(RequestArrived(number, 0))
        last = 2 * ARRIVALS_PER_TURN
        rig.driver.post(RequestCancelled(last))
        await asyncio.sleep(0)
        assert names(rig.recorded) == ["RequestArrived"] * ARRIVALS_PER_TURN
        rig.driver.post(BatchFinished(0))
        await asyncio.sleep(0)
        handled = rig.recorded[ARRIVALS_PER_TURN:]
        arrived = ["RequestArrived"] * ARRIVALS_PER_TURN
        assert names(handled) == ["BatchFinished", *arrived, "RequestCancelled"]
        numbers = [e.request_id for e in rig.recorded if isinstance(e, RequestArrived)]
        assert numbers == list(range(1, last + 1))
        assert rig.faults == []

    asyncio.run(scenario())


def test_timer_never_fires_early() -> None:
    """A request expires at its deadline, 5 ms from now, to the nanosecond or after."""

    async def scenario() -> None:
        rig = Rig(make_app(Slo(latency_ns=5 * MS, is_hard=True)), find_policy("balance"))
        began_ns = monotonic_ns()
        rig.driver.post(RequestArrived(0, 0))  # there is no node
        while not rig.done:
            await asyncio.sleep(0.0005)
        assert monotonic_ns() - began_ns >= 5 * MS
        (settled,) = rig.done
        assert isinstance(settled, Settle)
        assert settled.settlement.outcome == Outcome.EXPIRED

    asyncio.run(scenario())


def test_stopped_driver_cancels_its_timers() -> None:
    async def scenario() -> None:
        rig = Rig(make_app(Slo(latency_ns=5 * MS, is_hard=True)), find_policy("balance"))
        rig.driver.post(RequestArrived(0, 0))
        await asyncio.sleep(0)
        rig.driver.stop()
        await asyncio.sleep(0.01)
        assert rig.done == []

    asyncio.run(scenario())


class Rogue(Policy):
    """A policy that rejects twice."""

    def on_arrival(self, request: Request) -> None:
        self.orders.reject(request, Settlement(Outcome.REJECTED, "no"))
        self.orders.reject(request, Settlement(Outcome.REJECTED, "and no again"))

    def on_task_ready(self, task: Task) -> None:
        pass

    def on_capacity(self, node: Node) -> None:
        pass


def test_observed_rejections_are_reported_to_the_executor() -> None:
    """Admission is only observed: the policy may order twice, and the request stays open."""

    async def scenario() -> None:
        app = replace(make_app(), limits=Limits(admission=OBSERVE))
        rig = Rig(app, PolicyKind(Rogue, PolicyConfig))
        rig.driver.post(RequestArrived(0, 0))
        await asyncio.sleep(0)
        assert names(rig.done) == ["ReportWouldReject"]
        assert list(rig.driver.scheduler.view.requests) == [0]
        assert rig.faults == []

    asyncio.run(scenario())


def test_policy_error_keeps_earlier_actions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        rig = Rig(kind=PolicyKind(Rogue, PolicyConfig))
        rig.driver.post(RequestArrived(0, 0))
        await asyncio.sleep(0)
        assert names(rig.done) == ["Settle"]
        assert rig.faults == ["policy"]
        assert len(caplog.messages) == 1

    asyncio.run(scenario())


class CountedArrival(RequestArrived):  # type: ignore[misc]
    """Counts how often the driver looks at requests before the Scheduler has them."""

    looks = 0

    @property
    def rank(self) -> int:  # type: ignore[override]
        CountedArrival.looks += 1
        return RequestArrived.rank


def test_requests_that_wait_for_their_turn_cost_nothing() -> None:
    """A thousand at once are looked at once each, and not in every turn before their own."""

    async def scenario() -> None:
        rig = Rig()
        count = 250 * ARRIVALS_PER_TURN
        for number in range(count):
            rig.driver.post(CountedArrival(number, 0))
        while len(rig.recorded) < count:
            await asyncio.sleep(0)
        rig.driver.stop()

    CountedArrival.looks = 0
    asyncio.run(scenario())
    assert CountedArrival.looks <= 250 * ARRIVALS_PER_TURN
