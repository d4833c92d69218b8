"""The rules of the seam: repeatable to the bit, ordered, and thinking is reported, not timed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.actions import SetTimer
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
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
from headgate.core.log import replay
from headgate.core.model import Limits, Pool, Slo, Stage
from headgate.core.policy import Plan, Policy, PolicyKind
from headgate.core.records import Node, Request, Task
from headgate.core.rng import stream
from headgate.core.scheduler import Scheduler
from headgate.core.wire import Wire

from .rig import Rig, wires
from .toys import Fifo, Puppet, make_app, make_function

COMPLETIONS = [
    BatchFinished(0),
    BatchFailed(0, ""),
    BatchRefused(0, Refusal.BUSY),
    BatchLost(0),
    InstanceStarted(0, 0),
    InstanceAppeared(0, 0, 0),
    InstanceStopped(0, ""),
    WeightsLoaded(0),
    WeightsEvicted(0),
    NodeJoined(0, 0, ""),
    NodeLost(0),
]
ARRIVALS = [RequestArrived(0, 0), RequestAnnounced(0, 0, 0, 0), RequestCancelled(0)]


def test_at_one_instant_completions_come_before_arrivals_before_timers() -> None:
    """Each kind of event has its place, and every kind is named here."""
    assert {event.rank for event in COMPLETIONS} == {Rank.COMPLETION}
    assert {event.rank for event in ARRIVALS} == {Rank.ARRIVAL}
    assert TimerFired(("x", 0)).rank == Rank.TIMER
    assert Rank.COMPLETION < Rank.ARRIVAL < Rank.TIMER
    assert len(Event.__subclasses__()) == len(COMPLETIONS) + len(ARRIVALS) + 1


def play(seed: int, rig: Rig, steps: int = 60) -> list[list[Wire]]:
    """Let a rough world answer: everything that is ordered ends, this way or that, some day."""
    rng = Random(seed)
    owed: list[Event] = []
    answers: list[list[Wire]] = []
    now_ns = request_id = 0
    for _ in range(steps):
        now_ns += rng.randrange(5)
        event: Event
        if owed and rng.random() < 0.6:
            event = owed.pop(rng.randrange(len(owed)))
        elif request_id and rng.random() < 0.2:
            event = RequestCancelled(rng.randrange(request_id))
        else:
            event = RequestArrived(request_id, 0, items=rng.randrange(1, 3))
            request_id += 1
        answers.append(rig.at(now_ns, event))
        owed.extend(_consequences(answers[-1], rng))
    return answers


def _consequences(answer: list[Wire], rng: Random) -> list[Event]:
    events: list[Event] = []
    for name, *fields in answer:
        number = fields[0] if isinstance(fields[0], int) else 0
        if name == "Dispatch":
            unsure = tuple(fields[2]) if isinstance(fields[2], list) and rng.random() < 0.5 else ()
            ends = [
                BatchFinished(number, unsure),
                BatchFinished(number, unsure),
                BatchFailed(number, "broke"),
                BatchRefused(number, rng.randrange(5)),
                BatchLost(number),
            ]
            events += rng.choices(ends, k=rng.choice((1, 1, 1, 2)))  # some messages come twice
        elif name == "StartInstance":
            node_id = fields[3] if isinstance(fields[3], int) else 0
            is_well = rng.random() < 0.8
            events.append(
                InstanceStarted(number, node_id) if is_well else InstanceStopped(number, "broke")
            )
        elif name == "StopInstance":
            events.append(InstanceStopped(number, "ordered"))
        elif name == "LoadWeights":
            events.append(WeightsLoaded(number))
        elif name == "EvictWeights":
            events.append(WeightsEvicted(number))
        elif name == "SetTimer" and isinstance(fields[0], list):
            events.append(TimerFired((str(fields[0][0]), int(fields[0][1]))))
    return events


def rough_app() -> Rig:
    light, heavy, last = (
        make_function(i, memory_bytes=60, output_bytes=5, is_idempotent=i != 2) for i in range(3)
    )
    stages = [Stage(light), Stage(heavy, (0,), only_if_unsure=True), Stage(last), Stage(last, (1, 2))]
    app = make_app(
        light,
        heavy,
        last,
        stages=stages,
        slo=Slo(latency_ns=60, gives_up=True),
        pools=[Pool(0, "gpu", slots=2, memory_bytes=130, host_memory_bytes=60)],
        limits=Limits(backoff_ns=3, refusals_max=3, lost_after=50.0, open_requests_max=12),
    )
    return Rig(app, nodes=3)


@given(seed=st.integers(0, 2**32))
def test_whatever_the_world_does_the_books_balance_and_the_log_replays(seed: int) -> None:
    """Same events, same actions, to the bit; `validate` finds nothing on the way."""
    rig = rough_app()
    play(seed, rig)
    rig.check()
    kind = PolicyKind(Fifo)
    result = replay(rig.entries, Scheduler(rig.scheduler.app, kind, rng=stream(7, "p")))
    assert (result.events, result.first_difference) == (len(rig.entries), None)


class Dice(Policy):
    """Rejects at random."""

    def on_arrival(self, request: Request) -> None:
        if self.rng.random() < 0.5:
            self.orders.reject(request, "unlucky")

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
    rig = make_rig(make_app(), Puppet)
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
    """Nothing depends on the absolute time: the same story, later, has the same actions."""
    early, late = Rig(make_app()), Rig(make_app())
    assert early.at(0, event) == late.at(10**12, event)
