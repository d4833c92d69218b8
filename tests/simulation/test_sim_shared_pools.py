"""Several Schedulers share one pool: a Broker grants nodes, and nodes refuse excess batches."""

from __future__ import annotations

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.events import BatchRefused, InstanceAppeared, InstanceStarted, InstanceStopped
from headgate.core.model import Limits, Pool
from headgate.core.states import Outcome
from headgate.policies import find_policy
from headgate.sim.faults import Fault
from headgate.sim.run import Setup, simulate

from .apps import MS, at_ms, make_app, run, waits_ms
from .policies import SHARE


def test_schedulers_use_each_others_instances() -> None:
    """The one node is granted to the first Scheduler; the others learn of the instance on it."""
    app = make_app(exec_ms=(1,), start_ms=5)
    columns, observer = run(app, at_ms(*range(0, 60, 3)), policy=SHARE, schedulers=3)
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    assert observer.count(InstanceAppeared) == 2 * observer.count(InstanceStarted) > 0


def test_a_node_refuses_a_batch_while_a_peer_occupies_it() -> None:
    """A Scheduler knows its own batches only; the node has one slot and knows all batches."""
    app = make_app(pools=(Pool(0, "gpu", nodes=2),), limits=Limits(refusals_max=1_000))
    columns, observer = run(app, at_ms(*range(0, 100, 4)), policy=SHARE, schedulers=2)
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    assert observer.count(BatchRefused) > 0


def test_functions_take_turns_on_a_small_pool() -> None:
    """Three functions, one node: each starts when another has been released."""
    app = make_app(exec_ms=(5, 5, 5), start_ms=1)
    bursts = [Fault("burst", i * MS, pipeline=i, count=2) for i in (1, 2)]
    columns, observer = run(app, at_ms(0), *bursts, policy=SHARE, schedulers=2)
    assert columns.requests.outcome.tolist() == [Outcome.MET] * 5
    assert observer.count(InstanceStopped) > 0


def test_a_start_that_waits_for_a_node_can_be_cancelled() -> None:
    """The node is occupied until 10. The second request is cancelled at 5, and so is its start."""
    app = make_app(exec_ms=(10, 10))
    columns, observer = run(
        app,
        at_ms(0),
        Fault("burst", 2 * MS, pipeline=1, count=1),
        Fault("cancel", 5 * MS, share=1.0),
        policy=SHARE,
    )
    assert columns.requests.outcome.tolist() == [Outcome.CANCELLED] * 2
    first = next(event for _, event in observer.events if isinstance(event, InstanceStopped))
    assert (first.instance_id, first.reason) == (1, "the start was cancelled")


def test_a_start_on_an_unannounced_node_can_be_cancelled() -> None:
    """Granted at 0 and starting until 8; cancelled at 5. The node is free again at 8."""
    app = make_app(exec_ms=(10, 10), start_ms=8)
    columns, observer = run(
        app,
        at_ms(0),
        Fault("cancel", 5 * MS, share=1.0),
        Fault("burst", 6 * MS, pipeline=1, count=1),
        policy=SHARE,
    )
    stops = [action for action in observer.actions if isinstance(action, StopInstance)]
    assert [stop.node_id for stop in stops[:1]] == [None]
    assert columns.requests.outcome.tolist() == [Outcome.CANCELLED, Outcome.MET]
    assert waits_ms(columns)[1] == 2 + 8 + 10


def test_a_start_ends_when_its_granted_node_crashes() -> None:
    """The Scheduler does not know the node yet, so `NodeLost` alone tells it nothing."""
    app = make_app(start_ms=8, pools=(Pool(0, "gpu", nodes=2),))
    columns, observer = run(
        app, at_ms(0), Fault("crash", 3 * MS, until_ns=50 * MS, node=0), policy=SHARE, schedulers=2
    )
    assert columns.requests.outcome.tolist() == [Outcome.MET]
    starts = [action for action in observer.actions if isinstance(action, StartInstance)]
    assert len(starts) == 2
    assert waits_ms(columns) == [3 + 1 + 8 + 10]  # asked again after a pause of 1


def test_a_start_event_in_transit_is_dropped_after_a_crash() -> None:
    """Started at 5; the node crashes and rejoins while the event is on its way to the peers."""
    app = make_app(start_ms=5, pools=(Pool(0, "gpu", network_ns=4 * MS),))
    columns, observer = run(
        app,
        at_ms(0, 1, 2, 3),
        Fault("crash", 6 * MS, until_ns=7 * MS, node=0),
        policy=SHARE,
        schedulers=2,
    )
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
    first = next(now_ns for now_ns, event in observer.events if isinstance(event, InstanceAppeared))
    assert first > 9 * MS


def test_every_gateway_uses_what_another_started_on_a_node_that_holds_one() -> None:
    """Both start the function on the node at once. Who is refused learns of the other's instance.

    Where a node has no room for two, the news of it came too soon and was dropped: every batch of
    that gateway was refused until its requests failed.
    """
    pool = Pool(0, "gpu", nodes=4, memory_bytes=100)
    limits = Limits(refusals_max=1_000)
    app = make_app(exec_ms=(20,), start_ms=300, pools=(pool,), memory_bytes=80, limits=limits)
    setup = Setup(app, find_policy("balance"), schedulers=2)
    columns = simulate(setup, at_ms(*range(0, 2_000, 10)))
    assert set(columns.requests.outcome.tolist()) == {Outcome.MET}
