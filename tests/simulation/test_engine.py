"""The engine: network and decision delays, the order of events, and processor sharing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headgate.core.events import InstanceStopped, RequestArrived, WeightsEvicted
from headgate.core.model import App, Limits, Pool
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Batch, Node, Request, Task
from headgate.core.states import Outcome
from headgate.policies import srtf
from headgate.sim.clients import HedgingClient
from headgate.sim.faults import Fault
from headgate.sim.run import Setup, simulate

from .apps import MS, at_ms, make_app, run, waits_ms


@pytest.mark.parametrize(("network_ms", "decision_ms"), [(0, 0), (0, 2), (3, 0), (3, 2)])
def test_network_delay_and_decision_cost_add_up(network_ms: int, decision_ms: int) -> None:
    """The network twice; and one decision to dispatch, one to settle."""
    app = make_app(pools=(Pool(0, "gpu", network_ns=network_ms * MS),))
    columns, _ = run(app, at_ms(50), decision_ns=decision_ms * MS)
    assert waits_ms(columns) == [10 + 2 * network_ms + 2 * decision_ms]


def test_events_keep_their_order_during_a_decision() -> None:
    """1. The decision about request 0 takes from 1 to 2. 2. Request 1 arrives meanwhile, and waits.

    3. Request 2 arrives at the instant at which the decision ends, and is handled after request 1.
    """
    client = HedgingClient([MS, 2 * MS], copies=1)
    _, observer = run(make_app(), at_ms(1, 1), clients=[client], decision_ns=MS)
    ids = [event.request_id for _, event in observer.events if isinstance(event, RequestArrived)]
    assert ids == sorted(ids)


def test_requests_arrive_with_the_priority_that_they_claim() -> None:
    """The default is 0; a column of priorities reaches the Scheduler row by row."""
    for priority, expected in ((None, [0, 0, 0]), (np.array([3, 0, 7], np.int32), [3, 0, 7])):
        arrivals = replace(at_ms(1, 2, 3), priority=priority)
        _, observer = run(make_app(), arrivals)
        arrived = [event for _, event in observer.events if isinstance(event, RequestArrived)]
        assert [event.priority for event in arrived] == expected


def test_a_deadline_counts_from_the_arrival_not_from_its_handling() -> None:
    """All arrive at 50 with deadline 63. Handled at 50, 52 and 54, they are answered from 62 on."""
    app = make_app(pools=(Pool(0, "gpu", nodes=3),), latency_ms=13)
    columns, _ = run(app, at_ms(50, 50, 50), decision_ns=2 * MS)
    assert columns.requests.outcome.tolist() == [Outcome.MET, Outcome.LATE, Outcome.LATE]


def test_announcements_cost_no_time() -> None:
    config = srtf.Config(clairvoyant=True)
    setup = Setup(make_app(), srtf.POLICY, config, announces=True, decision_ns=MS)
    columns = simulate(setup, at_ms(*range(0, 500, 20)))
    assert columns.requests.outcome.tolist() == [Outcome.MET] * 25


def shared(*slowdown: float) -> App:
    """Return an app with one node of three slots, whose concurrent batches slow each other down."""
    pools = (Pool(0, "gpu", slots=3),)
    return make_app(pools=pools, slowdown=slowdown, concurrency=3)


def test_a_concurrent_job_delays_the_completion() -> None:
    """Alone the first would end at 10. From 5 on both run at half speed, from 15 one runs alone."""
    columns, _ = run(shared(1.0, 2.0), at_ms(0, 5))
    assert waits_ms(columns) == [15.0, 15.0]


def test_a_rescheduled_completion_does_not_happen_at_the_old_time() -> None:
    """The other job is shorter and ends first: until then the old completion must not happen."""
    app = make_app(
        exec_ms=(10, 6), pools=(Pool(0, "gpu", slots=2),), slowdown=(1.0, 2.0), concurrency=1
    )
    columns, _ = run(app, at_ms(0), Fault("burst", MS, pipeline=1, count=1))
    assert waits_ms(columns) == [16.0, 12.0]  # 1 alone, 12 shared, 3 alone


def test_a_concurrent_job_without_interference_delays_nothing() -> None:
    """The second job reschedules the completion to the same time: it must happen once."""
    columns, _ = run(shared(1.0, 1.0, 1.5), at_ms(0, 5))
    assert waits_ms(columns) == [10.0, 10.0]


def interfering(*, slots: int = 2) -> App:
    """Two functions of 10 ms: the first, and only that, takes twice as long beside the second."""
    app = make_app(exec_ms=(10, 10), pools=(Pool(0, "gpu", slots=slots),))
    factors = ((1.0, 2.0), ())
    functions = tuple(
        replace(f, variants=(replace(f.variants[0], interference=factors[f.id]),))
        for f in app.functions
    )
    pipelines = tuple(
        replace(p, stages=(replace(p.stages[0], function=functions[p.id]),)) for p in app.pipelines
    )
    return replace(app, functions=functions, pipelines=pipelines)


def test_only_a_batch_of_an_interfering_function_slows_a_batch_down() -> None:
    """The second arrives at 4 and runs until 14. Meanwhile the first does 5 ms of work, then 1."""
    columns, _ = run(interfering(), at_ms(0), Fault("burst", 4 * MS, pipeline=1, count=1))
    assert waits_ms(columns) == [15.0, 10.0]
    columns, _ = run(interfering(slots=1), at_ms(0), Fault("burst", 4 * MS, pipeline=1, count=1))
    assert waits_ms(columns) == [10.0, 16.0]


class Stopper(Policy):
    """Dispatches a task to a node that is busy with a start, then stops the task's instance."""

    def on_task_ready(self, task: Task) -> None:
        node = self.view.nodes[0]
        self.orders.start(self.view.app.variants[1], node)
        batch = self.orders.dispatch([task], node)
        assert batch.instance is not None
        self.orders.stop(batch.instance)

    def on_capacity(self, node: Node) -> None:
        pass


def test_a_draining_instance_stops_when_its_last_batch_is_cancelled() -> None:
    """The start of the instance has not begun at 5, so it stops then, and not after the start."""
    app = make_app(exec_ms=(10, 10), start_ms=10)
    cancel = Fault("cancel", 5 * MS, share=1.0)
    columns, observer = run(app, at_ms(0), cancel, policy=PolicyKind(Stopper))
    assert columns.requests.outcome.tolist() == [Outcome.CANCELLED]
    stopped = [
        (now_ns, event.instance_id)
        for now_ns, event in observer.events
        if isinstance(event, InstanceStopped)
    ]
    assert stopped == [(5 * MS, 1)]


class Evicter(Policy):
    """Runs one task at a time, and evicts the instance when the batch ends or is lost."""

    def on_task_ready(self, task: Task) -> None:
        if task.attempts_made == 0:
            self.orders.dispatch([task], self.view.nodes[0])

    def on_capacity(self, node: Node) -> None:
        pass

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.instance is not None:
            self.orders.evict(batch.instance)


def test_weights_are_evicted_after_the_end_of_an_abandoned_batch() -> None:
    """Timed out at 12, although it runs until 20: the weights are evicted then, not before."""
    pool = Pool(0, "gpu", memory_bytes=1, host_memory_bytes=1)
    limits = Limits(timeout_factor=1.2, timeout_floor_ns=0, attempts_max=1)
    app = make_app(limits=limits, pools=(pool,), memory_bytes=1)
    columns, observer = run(
        app,
        at_ms(1),
        Fault("slow", 0, until_ns=2 * MS, node=0, factor=2.0),
        policy=PolicyKind(Evicter),
    )
    assert columns.requests.outcome.tolist() == [Outcome.FAILED]
    evicted = [now_ns for now_ns, event in observer.events if isinstance(event, WeightsEvicted)]
    assert evicted == [21 * MS]


class WithMargin(Policy):
    """Widens the margin of a pipeline with each of its requests."""

    def on_arrival(self, request: Request) -> None:
        if not self.admission_margins:
            self.admission_margins = [0.5] * len(self.view.app.pipelines)
        self.admission_margins[request.pipeline.id] += 1.0

    def on_task_ready(self, task: Task) -> None:
        self.orders.dispatch([task], self.view.nodes[0])

    def on_capacity(self, node: Node) -> None:
        pass


def test_the_margins_of_a_policy_are_in_the_columns() -> None:
    app = make_app(exec_ms=(10, 10))
    columns, _ = run(app, at_ms(1, 20), policy=PolicyKind(WithMargin))
    assert columns.admission_margins == (2.5, 0.5)
    without, _ = run(app, at_ms(1, 20))
    assert without.admission_margins == ()
