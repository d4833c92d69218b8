"""The rules of `Scheduler.handle`: deterministic, ordered, and work is reported, not timed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.actions import (
    Dispatch,
    EvictWeights,
    LoadWeights,
    SetTimer,
    StartInstance,
    StopInstance,
)
from headgate.core.event_log import from_wire, replay
from headgate.core.events import (
    REFUSAL_NAMES,
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Rank,
    Refusal,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import Limits, Pool, Slo, Stage
from headgate.core.policy import Plan, Policy, PolicyKind
from headgate.core.records import Node, Request, Task
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import NodeState, Outcome, Settlement

from .rig import Rig, wires
from .sample_apps import Fifo, Scripted, make_app, make_function

COMPLETIONS = [
    BatchFinished(0),
    BatchFailed(0, ""),
    BatchRefused(0, Refusal.BUSY),
    BatchLost(0),
    InstanceStarted(0, 0),
    InstanceAppeared(0, 0, 0),
    InstanceStopped(0, ""),
    InstanceUseChanged(0, False),
    LoadFailed(0, 0, ""),
    WeightsLoaded(0),
    WeightsEvicted(0),
    NodeJoined(0, 0, ""),
    NodeLost(0),
    GatewaysChanged(1),
]
ARRIVALS = [RequestArrived(0, 0), RequestAnnounced(0, 0, 0, 0), RequestCancelled(0)]


def test_at_one_instant_completions_come_before_arrivals_before_timers() -> None:
    """Each kind of event has its place, and every kind is named here."""
    assert {event.rank for event in COMPLETIONS} == {Rank.COMPLETION}
    assert {event.rank for event in ARRIVALS} == {Rank.ARRIVAL}
    assert TimerFired(("x", 0)).rank == Rank.TIMER
    assert Rank.COMPLETION < Rank.ARRIVAL < Rank.TIMER
    assert len(Event.__subclasses__()) == len(COMPLETIONS) + len(ARRIVALS) + 1


class RandomDriver:
    """A driver that ends every order at a random time with a random result."""

    def __init__(self, seed: int, rig: Rig) -> None:
        self.rig = rig
        self.rng = Random(seed)
        self.now_ns = 0
        self.requests = 0
        self.owed: list[tuple[int, Event]] = []  # not before then

    def run(self, steps: int = 80) -> None:
        for _ in range(steps):
            self.now_ns += self.rng.randrange(6)
            for wire in self.rig.at(self.now_ns, self.next_event()):
                self.owed.extend(self.consequences(*wire))

    def next_event(self) -> Event:
        rng = self.rng
        due = [place for place, (at_ns, _) in enumerate(self.owed) if at_ns <= self.now_ns]
        if due and rng.random() < 0.7:
            return self.take(rng.choice(due))
        if rng.random() < 0.1:
            node = self.rig.view.nodes[rng.randrange(3)]
            is_up = node.state == NodeState.UP
            return NodeLost(node.id) if is_up else NodeJoined(node.id, 0, node.name)
        if self.requests and rng.random() < 0.2:
            return RequestCancelled(rng.randrange(self.requests))
        self.requests += 1
        return RequestArrived(self.requests - 1, 0, items=rng.randrange(1, 3))

    def take(self, place: int) -> Event:
        """Take an event that is owed; those of one instance come in order."""
        number = getattr(self.owed[place][1], "instance_id", None)
        if number is not None:
            numbers = [getattr(event, "instance_id", None) for _, event in self.owed]
            place = numbers.index(number)
        return self.owed.pop(place)[1]

    def consequences(self, name: object, *fields: object) -> list[tuple[int, Event]]:
        action = from_wire([name, *fields])
        if isinstance(action, Dispatch):
            ends = self.ends_of(action)
        elif isinstance(action, StartInstance):
            is_well = self.rng.random() < 0.8 and action.node_id is not None
            started = InstanceStarted(action.instance_id, action.node_id or 0)
            ends = [started if is_well else InstanceStopped(action.instance_id, "broke")]
        elif isinstance(action, StopInstance):
            ends = [InstanceStopped(action.instance_id, "ordered")]
        elif isinstance(action, LoadWeights):
            ends = [WeightsLoaded(action.instance_id)]
        elif isinstance(action, EvictWeights):
            ends = [WeightsEvicted(action.instance_id)]
        elif isinstance(action, SetTimer):
            return [(action.at_ns, TimerFired(action.key))]
        else:
            ends = []
        return [(0, end) for end in ends]

    def ends_of(self, batch: Dispatch) -> list[Event]:
        rng = self.rng
        unsure = tuple(batch.task_ids) if rng.random() < 0.5 else ()
        finished = BatchFinished(batch.batch_id, unsure)
        ends: list[Event] = [
            *[finished] * 9,
            BatchFailed(batch.batch_id, "broke"),
            BatchRefused(batch.batch_id, rng.choice(list(REFUSAL_NAMES))),
            BatchLost(batch.batch_id, node_died=rng.random() < 0.5),
        ]
        return rng.choices(ends, k=rng.choice((1, 1, 1, 2)))  # some messages come twice


def rough_rig() -> Rig:
    light, heavy, last = (
        make_function(i, memory_bytes=60, output_bytes=5, is_idempotent=i != 2) for i in range(3)
    )
    stages = [
        Stage(light),
        Stage(heavy, (0,), only_if_unsure=True),
        Stage(last),
        Stage(last, (1, 2)),
    ]
    app = make_app(
        light,
        heavy,
        last,
        stages=stages,
        slo=Slo(latency_ns=250, is_hard=True),
        pools=[Pool(0, "gpu", slots=2, memory_bytes=130, host_memory_bytes=60)],
        limits=Limits(
            backoff_ns=3,
            refusals_max=3,
            timeout_factor=3.0,
            open_requests_max=12,
            timeout_floor_ns=0,
            start_backoff_ns=10,
            start_backoff_max_ns=40,
        ),
    )
    return Rig(app, nodes=3)


@settings(max_examples=25)  # each checks the whole state eighty times
@given(seed=st.integers(0, 2**32))
def test_under_random_events_the_state_is_consistent_and_the_log_replays(seed: int) -> None:
    """Same events, same actions, to the bit; `validate` finds nothing."""
    rig = rough_rig()
    RandomDriver(seed, rig).run()
    rig.check()
    kind = PolicyKind(Fifo)
    result = replay(rig.entries, Scheduler(rig.scheduler.app, kind, rng=stream(7, "p")))
    assert (result.events, result.first_difference) == (len(rig.entries), None)


class Dice(Policy):
    """Rejects at random."""

    def on_arrival(self, request: Request) -> None:
        if self.rng.random() < 0.5:
            self.orders.reject(request, Settlement(Outcome.REJECTED, "unlucky"))

    def on_task_ready(self, task: Task) -> None:
        pass

    def on_capacity(self, node: Node) -> None:
        pass


def test_a_policys_luck_is_its_seed() -> None:
    def luck(seed: int) -> list[int]:
        scheduler = Scheduler(make_app(), PolicyKind(Dice), rng=stream(seed, "policy"))
        return [len(scheduler.handle(i, RequestArrived(i, 0))) for i in range(50)]

    assert luck(1) == luck(1) != luck(2)


def test_thinking_is_reported_in_units_of_work(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Scripted)
    assert rig.order(0, lambda p: p.orders.report_work(7)) == []
    rig.order(0, lambda p: p.orders.report_work(5))
    assert rig.scheduler.work == 12


def test_an_event_that_is_ignored_still_moves_time(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), nodes=1)
    assert rig.at(7, TimerFired(("forgotten", 1))) == []
    assert (rig.view.now_ns, rig.view.events_ignored) == (7, 1)


class Planner(Fifo):
    """Plans every 100 ns for nothing at all."""

    plan_every_ns = 100

    def plan(self) -> Plan:
        self.orders.report_work(1)
        return Plan()


def test_the_slow_time_scale_is_a_timer(make_rig: type[Rig]) -> None:
    rig = make_rig(make_app(), Planner)
    assert rig.at(5, RequestArrived(0, 0)) == wires(SetTimer(("plan", 0), 105))
    assert rig.at(6, RequestArrived(1, 0)) == []
    assert rig.at(105, TimerFired(("plan", 0))) == wires(SetTimer(("plan", 0), 205))
    assert rig.scheduler.work == 1


@pytest.mark.parametrize("event", [RequestArrived(0, 0), NodeJoined(0, 0, "n0")])
def test_shifting_time_shifts_the_answers(event: Event) -> None:
    """Nothing depends on the absolute time: the same events, later, give the same actions."""
    early, late = Rig(make_app()), Rig(make_app())
    assert early.at(0, event) == late.at(10**12, event)
