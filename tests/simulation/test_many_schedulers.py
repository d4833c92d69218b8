"""Several Schedulers over one pool: a Broker hands nodes out, and nodes refuse what is too much."""

from __future__ import annotations

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.events import BatchRefused, InstanceAppeared, InstanceStarted, InstanceStopped
from headgate.core.model import Limits, Pool
from headgate.core.states import Outcome
from headgate.sim.faults import Fault

from .apps import MS, at_ms, make_app, run, waits_ms
from .policies import SHARE


def test_schedulers_use_each_others_instances() -> None:
    """One node: whoever comes first is granted it, and all are told of what was started there."""
    app = make_app(exec_ms=(1,), start_ms=5)
    columns, seen = run(app, at_ms(*range(0, 60, 3)), policy=SHARE, schedulers=3)
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    assert seen.count(InstanceAppeared) == 2 * seen.count(InstanceStarted) > 0


def test_a_node_refuses_what_a_peer_keeps_it_from() -> None:
    """Schedulers know only of their own batches; the node has one slot and knows of all."""
    app = make_app(pools=(Pool(0, "gpu", nodes=2),), limits=Limits(refusals_max=1_000))
    columns, seen = run(app, at_ms(*range(0, 100, 4)), policy=SHARE, schedulers=2)
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    assert seen.count(BatchRefused) > 0


def test_functions_take_turns_on_a_pool_that_is_too_small() -> None:
    """Three functions, one node: each is started when another was given back."""
    app = make_app(exec_ms=(5, 5, 5), start_ms=1)
    bursts = [Fault("burst", i * MS, pipeline=i, count=2) for i in (1, 2)]
    columns, seen = run(app, at_ms(0), *bursts, policy=SHARE, schedulers=2)
    assert columns.requests.outcome.tolist() == [Outcome.MET] * 5
    assert seen.count(InstanceStopped) > 0


def test_a_start_that_waits_for_a_node_can_be_called_off() -> None:
    """The node is taken until 10. Who wanted another is withdrawn at 5, and so is its start."""
    app = make_app(exec_ms=(10, 10))
    columns, seen = run(
        app,
        at_ms(0),
        Fault("burst", 2 * MS, pipeline=1, count=1),
        Fault("cancel", 5 * MS, share=1.0),
        policy=SHARE,
    )
    assert columns.requests.outcome.tolist() == [Outcome.CANCELLED] * 2
    first = next(event for _, event in seen.events if isinstance(event, InstanceStopped))
    assert (first.instance_id, first.reason) == (1, "the start was cancelled")


def test_a_start_under_way_on_a_node_nobody_was_told_of_can_be_called_off() -> None:
    """Granted at 0 and starting until 8; withdrawn at 5. The node is free again at 8."""
    app = make_app(exec_ms=(10, 10), start_ms=8)
    columns, seen = run(
        app,
        at_ms(0),
        Fault("cancel", 5 * MS, share=1.0),
        Fault("burst", 6 * MS, pipeline=1, count=1),
        policy=SHARE,
    )
    stops = [action for action in seen.actions if isinstance(action, StopInstance)]
    assert [stop.node_id for stop in stops[:1]] == [None]
    assert columns.requests.outcome.tolist() == [Outcome.CANCELLED, Outcome.MET]
    assert waits_ms(columns)[1] == 2 + 8 + 10


def test_a_start_ends_when_the_node_that_was_granted_crashes_under_it() -> None:
    """Its Scheduler does not know which node that was, so the loss of the node tells it nothing."""
    app = make_app(start_ms=8, pools=(Pool(0, "gpu", nodes=2),))
    columns, seen = run(
        app, at_ms(0), Fault("crash", 3 * MS, until_ns=50 * MS, node=0), policy=SHARE, schedulers=2
    )
    assert columns.requests.outcome.tolist() == [Outcome.MET]
    starts = [action for action in seen.actions if isinstance(action, StartInstance)]
    assert len(starts) == 2
    assert waits_ms(columns) == [3 + 1 + 8 + 10]  # asked again after a pause of 1


def test_news_of_an_instance_does_not_outlive_its_node() -> None:
    """Started at 5, crashed and back at once, while the news is on its way to the peers."""
    app = make_app(start_ms=5, pools=(Pool(0, "gpu", network_ns=4 * MS),))
    columns, seen = run(
        app,
        at_ms(0, 1, 2, 3),
        Fault("crash", 6 * MS, until_ns=7 * MS, node=0),
        policy=SHARE,
        schedulers=2,
    )
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    first = next(now_ns for now_ns, event in seen.events if isinstance(event, InstanceAppeared))
    assert first > 9 * MS
