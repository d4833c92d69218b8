"""`swayam` and `static_partition`, event by event: whom they ask, and what they order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from headgate.core.actions import Action, Dispatch, SetTimer, Settle, StartInstance, StopInstance
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.events import (
    BatchFinished,
    BatchRefused,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.ids import first_id
from headgate.core.model import App, Function, Limits, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.policy import PolicyConfig
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.response_time import least_backends
from headgate.planning.autoscaling.waiting_time import RandomRetry
from headgate.policies import find_policy
from headgate.policies.static_partition import Config as PartitionConfig
from headgate.policies.swayam import Config, Swayam

MS = MILLISECOND_NS
THEIRS = first_id(1)


def make_app(
    *, models: int = 1, nodes: int = 8, warm: int = 0, latency_ms: int = 500, tolerance: float = 2.0
) -> App:
    """Models of 100 ms whose set-up takes a second."""
    pool = Pool(0, "gpu", nodes=nodes)
    functions = []
    for id in range(models):
        profile = Profile((100 * MS,), cold_start_ns=SECOND_NS)
        variant = Variant(id, f"v{id}", id, (0,), profile)
        functions.append(Function(id, f"f{id}", (variant,), prewarm_nodes=warm))
    slo = Slo(latency_ms * MS, 0.99, tolerance)
    pipelines = tuple(Pipeline(f.id, f"p{f.id}", (Stage(f),), slo) for f in functions)
    return App(tuple(functions), pipelines, (pool,), limits=Limits(refusals_max=3))


class Rig:
    """Drives one of two gateways; the other one has started what `backends` says."""

    def __init__(
        self,
        policy: str,
        app: App,
        config: PolicyConfig | None = None,
        *,
        backends: int = 0,
    ) -> None:
        rng = stream(5, "p")
        self.scheduler = Scheduler(app, find_policy(policy), config, rng=rng, peers=2)
        self.first = [a for i in range(app.pools[0].nodes) for a in self.at(0, self._node(i))]
        for number in range(backends):
            self.at(0, InstanceAppeared(THEIRS + number, 0, number))

    def _node(self, id: int) -> NodeJoined:
        return NodeJoined(id, 0, f"n{id}")

    def at(self, now_ms: float, event: Event) -> list[Action]:
        return self.scheduler.handle(int(now_ms * MS), event)

    def needs(self) -> list[int]:
        assert isinstance(self.scheduler.policy, Swayam)
        return self.scheduler.policy.needs

    def set_needs(self, *counts: int) -> None:
        self.needs()[:] = counts

    def plan(self, now_ms: float) -> list[Action]:
        return [a for a in self.at(now_ms, TimerFired(("plan", 0))) if not isinstance(a, SetTimer)]


def sent_to(actions: list[Action]) -> list[int | None]:
    return [action.node_id for action in actions if isinstance(action, Dispatch)]


def starts(actions: list[Action]) -> list[tuple[int, int, int | None]]:
    """Variant and number of each order, and the node that it names: none."""
    return [(a.variant_id, a.nth, a.node_id) for a in actions if isinstance(a, StartInstance)]


def outcomes(actions: list[Action]) -> list[int]:
    return [action.settlement.outcome for action in actions if isinstance(action, Settle)]


def test_requests_go_to_the_first_n_backends_at_random() -> None:
    """Of six that are warm, n is three: the other three receive nothing."""
    rig = Rig("swayam", make_app(), backends=6)
    rig.set_needs(3)
    nodes = []
    for number in range(60):
        (node_id,) = sent_to(rig.at(number, RequestArrived(number, 0)))
        rig.at(number, BatchFinished(number))
        nodes.append(node_id)
    assert set(nodes) == {0, 1, 2}
    assert min(nodes.count(node_id) for node_id in range(3)) > 10


def test_a_backend_that_we_keep_busy_is_not_asked() -> None:
    """The third request waits, and goes to the one that has ended."""
    rig = Rig("swayam", make_app(), backends=2)
    rig.set_needs(2)
    first = sent_to(rig.at(0, RequestArrived(0, 0)))
    second = sent_to(rig.at(1, RequestArrived(1, 0)))
    assert sorted([*first, *second], key=str) == [0, 1]
    assert sent_to(rig.at(2, RequestArrived(2, 0))) == []
    assert sent_to(rig.at(101, BatchFinished(1))) == second


def test_a_busy_backend_refuses_and_another_is_asked_after_the_probe_delay() -> None:
    """As often as it takes: such refusals do not count, and the node stays free for others."""
    rig = Rig("swayam", make_app(), Config(probe_delay_ns=5 * MS), backends=3)
    rig.set_needs(3)
    asked = sent_to(rig.at(0, RequestArrived(0, 0)))
    for number in range(10):
        now_ms = 5 * number
        (timer,) = rig.at(now_ms, BatchRefused(number, Refusal.BUSY))
        assert isinstance(timer, SetTimer)
        assert (timer.key, timer.at_ns) == (("probe_again", 0), (now_ms + 5) * MS)
        assert len(rig.scheduler.view.free_nodes) == 8
        asked += sent_to(rig.at(now_ms + 5, TimerFired(("probe_again", 0))))
    assert len(asked) == 11
    assert all(one != other for one, other in pairwise(asked))


def test_the_way_to_a_node_and_back_is_part_of_the_probe_delay() -> None:
    app = make_app()
    far = replace(app, pools=(replace(app.pools[0], network_ns=4 * MS),))
    rig = Rig("swayam", far, Config(probe_delay_ns=5 * MS), backends=2)
    rig.set_needs(2)
    rig.at(0, RequestArrived(0, 0))
    (timer,) = rig.at(8, BatchRefused(0, Refusal.BUSY))
    assert isinstance(timer, SetTimer)
    assert timer.at_ns == 8 * MS


def test_a_request_that_can_no_longer_meet_its_deadline_is_pruned() -> None:
    """It takes 100 ms and must be answered at 500. At 401 another probe would be in vain."""
    rig = Rig("swayam", make_app(), backends=1)
    rig.at(0, RequestArrived(0, 0))
    assert outcomes(rig.at(400, BatchRefused(0, Refusal.BUSY))) == []
    assert outcomes(rig.at(401, TimerFired(("probe_again", 0)))) == [Outcome.EXPIRED]
    rig.at(500, RequestArrived(1, 0))
    assert outcomes(rig.at(901, BatchRefused(1, Refusal.BUSY))) == [Outcome.EXPIRED]


def test_a_request_whose_client_leaves_is_not_asked_for_again() -> None:
    rig = Rig("swayam", make_app(), backends=1)
    rig.at(0, RequestArrived(0, 0))
    rig.at(1, RequestArrived(1, 0))  # waits behind the first
    rig.at(2, BatchRefused(0, Refusal.BUSY))
    assert outcomes(rig.at(2, RequestCancelled(0))) == [Outcome.CANCELLED]
    assert outcomes(rig.at(2, RequestCancelled(1))) == [Outcome.CANCELLED]
    assert ("probe_again", 0) not in rig.scheduler.view.timers
    assert sent_to(rig.plan(1_000)) == []


def test_without_a_backend_the_first_one_is_ordered_at_once() -> None:
    """Another gateway has ordered it as well: ours is denied, and theirs appears."""
    rig = Rig("swayam", make_app())
    assert starts(rig.at(0, RequestArrived(0, 0))) == [(0, 1, None)]
    assert starts(rig.at(1, RequestArrived(1, 0))) == []
    rig.at(2, InstanceStopped(0, "another gateway has ordered it"))
    sent = sent_to(rig.at(300, InstanceAppeared(THEIRS, 0, 4)))
    assert sent == [4]


def test_backends_that_shall_be_warm_are_ordered_before_the_first_request() -> None:
    rig = Rig("swayam", make_app(warm=3))
    assert starts(rig.first) == [(0, 1, None), (0, 2, None), (0, 3, None)]
    assert rig.needs() == [3]


def test_n_follows_from_our_arrivals_times_the_number_of_gateways() -> None:
    """20 requests/s here, of 100 ms: 4 Erlangs of two gateways, 8 at twice the rate."""
    rig = Rig("swayam", make_app(nodes=40), backends=2)
    found = []
    for seconds in range(40):
        if seconds in (20, 30):
            rig.at(1_000 * seconds, GatewaysChanged(4 if seconds == 20 else 1))
        for number in range(20 * seconds, 20 * seconds + 20):
            rig.at(50 * number, RequestArrived(number, 0))
        rig.plan(1_000 * seconds + 999)
        found.append(rig.needs()[0])
    times, slo = LogNormalTimes(0.1, 0.25), rig.scheduler.app.pipelines[0].slo
    expected = [least_backends(times, r, slo, RandomRetry(0.001)).backends for r in (40, 80, 20)]
    assert [set(found[12:20]), set(found[20:30]), set(found[30:])] == [{n} for n in expected]


def test_what_is_missing_is_ordered_by_number_and_nothing_is_stopped() -> None:
    rig = Rig("swayam", make_app(nodes=40), backends=6)
    for number in range(200):
        rig.at(50 * number, RequestArrived(number, 0))
    ordered = starts(rig.plan(10_000))
    (needed,) = rig.needs()
    assert ordered == [(0, nth, None) for nth in range(7, needed + 1)]
    assert starts(rig.plan(10_100)) == []  # they are on their way
    actions = rig.plan(80_000)  # nothing has arrived for a minute, but they are still on their way
    assert rig.needs() == [0]
    assert not [a for a in actions if isinstance(a, StopInstance) and a.node_id is not None]


def test_an_order_that_waits_for_a_node_is_withdrawn_when_it_is_no_longer_wanted() -> None:
    """The pool is exhausted, so the order has waited for longer than a start takes."""
    rig = Rig("swayam", make_app(nodes=40), backends=1)
    for number in range(100):
        rig.at(50 * number, RequestArrived(number, 0))
    assert starts(rig.plan(5_000))
    rig.set_needs(0)
    for number in range(100):  # the requests have been pruned by then, and nobody waits
        rig.at(70_000, RequestCancelled(number))
    stopped = [a for a in rig.plan(70_000) if isinstance(a, StopInstance)]
    assert stopped
    assert {a.node_id for a in stopped} == {None}


def test_a_model_without_any_backend_takes_one_that_another_does_not_need() -> None:
    """The last in the common order, so that all gateways choose the same one."""
    rig = Rig("swayam", make_app(models=2, nodes=3), backends=3)
    rig.set_needs(2, 0)
    assert starts(rig.at(0, RequestArrived(0, 1))) == [(1, 1, None)]
    assert rig.plan(900) == []  # it may be starting
    rig.at(1_100, RequestArrived(1, 1))
    stopped = [a for a in rig.plan(1_900) if isinstance(a, StopInstance)]
    assert stopped == []  # the request has been pruned: nobody waits any more
    rig.at(2_850, RequestArrived(2, 1))
    stopped = [a for a in rig.plan(2_900) if isinstance(a, StopInstance)]
    assert [a.node_id for a in stopped] == [2]
    rig.at(2_900, InstanceStopped(stopped[0].instance_id, "stopped"))
    rig.at(3_800, RequestArrived(3, 1))
    assert sent_to(rig.at(3_900, InstanceStarted(0, 2))) == [2]


def test_an_objective_below_the_execution_time_is_not_provisioned_for() -> None:
    rig = Rig("swayam", make_app(latency_ms=50), backends=1)
    assert outcomes(rig.at(0, RequestArrived(0, 0))) == [Outcome.EXPIRED]


def test_an_impossible_share_is_reported_when_the_policy_is_made() -> None:
    app = make_app()
    pipeline = replace(app.pipelines[0], slo=Slo(500 * MS, 1.0))
    with pytest.raises(ConfigError, match=r"slo\.quantile: 1\.0: is no share"):
        Scheduler(replace(app, pipelines=(pipeline,)), find_policy("swayam"))
    with pytest.raises(ConfigError, match=r"rate_tolerance: 0\.5: is out of range"):
        Config(rate_tolerance=0.5)


def test_models_have_equal_shares_of_the_nodes_for_good() -> None:
    rig = Rig("static_partition", make_app(models=3, nodes=8))
    counts = ((0, 3), (1, 3), (2, 2))
    expected = [(model, nth, None) for model, most in counts for nth in range(1, most + 1)]
    assert sorted(starts(rig.first), key=str) == expected
    # The second node of every model comes before the third of any.
    assert [nth for _, nth, _ in starts(rig.first)] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_fewer_nodes_may_be_set_but_not_more_than_a_share() -> None:
    for nodes_per_model, expected in ((1, 2), (99, 8)):
        config = PartitionConfig(nodes_per_model=nodes_per_model)
        rig = Rig("static_partition", make_app(models=2, nodes=8), config)
        assert len(starts(rig.first)) == expected


def test_a_model_without_a_node_is_rejected() -> None:
    rig = Rig("static_partition", make_app(models=3, nodes=2))
    assert outcomes(rig.at(0, RequestArrived(0, 2))) == [Outcome.REJECTED]


def test_a_backend_of_a_partition_that_is_gone_is_replaced_while_there_is_load() -> None:
    rig = Rig("static_partition", make_app(models=2, nodes=4))
    for id in range(4):
        rig.at(1, InstanceStarted(id, id))
    rig.at(2, InstanceStopped(2, "crash"))  # the second one of the first model
    assert starts(rig.plan(1_000)) == []
    rig.at(1_100, RequestArrived(0, 0))
    assert starts(rig.plan(2_000)) == [(0, 2, None)]
