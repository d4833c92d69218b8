"""How many nodes are rented: by the recent load, a forecast, or what they save.

A node answers 2.78 requests per second in time. It costs as much as 1.67 calls per second.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hybrid_rig import BOOT_S, CLOUD, NODES, RENTED, HybridRig

from headgate.core.actions import Dispatch
from headgate.core.clock import SECOND_NS
from headgate.core.events import BatchLost, NodeLost
from headgate.core.records import Instance
from headgate.core.states import InstanceState
from headgate.policies._hybrid import excess_instances

S = SECOND_NS
SCALING = ("autoscale", "spock", "mark", "spandana")


@pytest.mark.parametrize("policy", SCALING)
def test_it_begins_with_as_many_as_are_to_be_warm(policy: str) -> None:
    rig = HybridRig(policy, warm=3)
    assert (rig.instances, rig.ready) == (3, 3)


@pytest.mark.parametrize("policy", SCALING)
def test_a_load_that_fills_two_nodes_comes_to_have_them(policy: str) -> None:
    """5 per second: 1.8 nodes full; with head-room, or a target below 1, it may be three."""
    rig = HybridRig(policy, warm=1)
    rig.load(seconds=400, rate_per_s=5)
    assert 2 <= rig.ready <= 3


@pytest.mark.parametrize("policy", ["spock", "mark", "spandana"])
def test_a_load_that_ends_leaves_nothing(policy: str) -> None:
    rig = HybridRig(policy, warm=2)
    rig.load(seconds=60, rate_per_s=5)
    rig.load(seconds=1_800, rate_per_s=0)
    assert rig.instances == 0


@pytest.mark.parametrize("policy", SCALING)
def test_a_busy_instance_that_is_released_finishes_its_batches(policy: str) -> None:
    rig = HybridRig(policy, warm=2, nodes_min=1)
    assert set(rig.ask(2)) == {0, 1}
    rig.wait(1_800 * S)
    assert rig.instances == 1
    assert set(rig.out.values()) == {0, 1}


@pytest.mark.parametrize("policy", SCALING)
def test_without_functions_one_node_is_always_kept(policy: str) -> None:
    rig = HybridRig(policy, pools=(RENTED,), warm=0)
    rig.load(seconds=60, rate_per_s=0.5)
    rig.load(seconds=1_200, rate_per_s=0)
    assert rig.instances == 1


@pytest.mark.parametrize("policy", ["spock", "mark", "spandana"])
def test_what_nodes_of_ours_take_need_not_be_rented(policy: str) -> None:
    """Three own nodes answer 8.3 per second between them, before any is rented."""
    own = replace(NODES, nodes=3)
    cloud = replace(CLOUD, id=2)
    rig = HybridRig(policy, pools=(own, replace(RENTED, id=1), cloud), warm=3)
    rig.load(seconds=900, rate_per_s=6)
    rented = [i for i in rig.view.instances.values() if i.pool.id == 1]
    assert rented == []


def test_autoscale_acts_after_three_looks_and_the_node_is_there_a_boot_later() -> None:
    rig = HybridRig("autoscale", warm=1)
    rig.load(seconds=179, rate_per_s=3)
    assert rig.instances == 1
    rig.load(seconds=2, rate_per_s=3)
    assert (rig.instances, rig.ready) == (2, 1)
    rig.load(seconds=BOOT_S, rate_per_s=3)
    assert rig.ready == 2


def test_autoscale_removes_slowly() -> None:
    """Fifteen looks."""
    rig = HybridRig("autoscale", warm=3)
    rig.load(seconds=14 * 60, rate_per_s=0.5)
    assert rig.instances == 3
    rig.load(seconds=2 * 60, rate_per_s=0.5)
    assert rig.instances == 1


def test_autoscale_waits_for_the_cooldown() -> None:
    rig = HybridRig(
        "autoscale", out_after=1, out_cooldown_ns=100 * S, plan_every_ns=10 * S, window_ns=10 * S
    )
    rig.load(seconds=15, rate_per_s=3)
    assert rig.instances == 2
    rig.load(seconds=60, rate_per_s=7)
    assert rig.instances == 2
    rig.load(seconds=60, rate_per_s=7)
    assert rig.instances == 4


def test_autoscale_sends_nothing_to_functions() -> None:
    assert HybridRig("autoscale", warm=1).ask(20) == [0] * 8


def test_autoscale_concurrency_follows_the_requests_in_the_system() -> None:
    """Five of eight slots are wanted busy: 12 requests for a minute need 12 / (0.625 x 8) = 3."""
    rig = HybridRig("autoscale_concurrency", warm=2, target=0.625)
    rig.ask(12)
    rig.wait(58 * S)
    assert rig.instances == 3
    while rig.out:
        rig.finish()
    rig.wait(58 * S)
    assert rig.instances == 1
    rig.wait(4 * S)  # nothing has been in the system for a minute
    assert rig.instances == 0
    assert len(rig.ask(1)) == 1


def test_autoscale_concurrency_panics_and_removes_nothing_for_a_minute() -> None:
    """Sixteen requests for six seconds: the last six ask for 16 / 4 = 4 nodes, and one is ready."""
    rig = HybridRig("autoscale_concurrency", warm=1, target=0.5)
    rig.load(seconds=60, rate_per_s=0.5)
    rig.ask(16)
    rig.wait(6 * S)
    assert rig.instances == 4
    while rig.out:
        rig.finish()
    rig.wait(50 * S)
    assert rig.instances == 4
    rig.wait(30 * S)
    assert rig.instances < 4


def test_autoscale_concurrency_forgets_what_is_over() -> None:
    rig = HybridRig("autoscale_concurrency", warm=1, target=0.5)
    rig.load(seconds=120, rate_per_s=5)
    assert rig.instances == 1  # answered at once: nothing is ever in the system for long
    assert rig.ask(20) == [0] * 8


def test_spock_spills_until_the_node_has_booted() -> None:
    rig = HybridRig("spock", warm=1, plan_every_ns=10 * S, window_ns=10 * S)
    rig.load(seconds=21, rate_per_s=3)
    assert (rig.instances, rig.ready) == (2, 1)
    assert rig.ask(6).count(None) == 1
    while rig.out:
        rig.finish()
    rig.load(seconds=BOOT_S, rate_per_s=3)
    assert rig.ready == 2
    assert rig.ask(6).count(None) == 0


def test_spock_holds_what_it_has_for_a_while() -> None:
    rig = HybridRig("spock", warm=2, hold_ns=60 * S, plan_every_ns=10 * S, window_ns=10 * S)
    rig.load(seconds=30, rate_per_s=4)
    rig.load(seconds=50, rate_per_s=0.5)
    assert rig.instances == 2
    rig.load(seconds=30, rate_per_s=0.5)
    assert rig.instances == 1


@pytest.mark.parametrize(("is_predictive", "instances"), [(False, 1), (True, 4)])
def test_spock_may_look_ahead(is_predictive: bool, instances: int) -> None:
    """From 0.4 to 1.8 per second within a minute: after another, a boot, it would be about 3.6."""
    rig = HybridRig("spock", warm=1, is_predictive=is_predictive, target=0.5)
    for rate in range(4, 20, 2):
        rig.load(seconds=8, rate_per_s=rate / 10)
    assert rig.instances == pytest.approx(instances, abs=1)
    assert (rig.instances > 2) == is_predictive


SMALL = replace(RENTED, name="small", nodes=8)
LARGE = replace(RENTED, id=1, name="large", nodes=8)
OUT = replace(CLOUD, id=2)


@pytest.mark.parametrize(("usd_per_hour", "pool"), [(3.0, 1), (4.0, 0)])
def test_mark_takes_the_cheaper_kind(usd_per_hour: float, pool: int) -> None:
    pools = (SMALL, replace(LARGE, usd_per_hour=usd_per_hour), OUT)
    rig = HybridRig("mark", pools=pools, warm=0)
    rig.load(seconds=200, rate_per_s=6.5)
    assert {i.pool.id for i in rig.view.instances.values()} == {pool}
    assert rig.instances == 3  # 6.5 x 1.2 / 2.78, rounded up


def test_mark_keeps_one_node_of_the_cheaper_kind_where_there_are_no_functions() -> None:
    rig = HybridRig("mark", pools=(SMALL, replace(LARGE, usd_per_hour=3.0)), warm=0)
    rig.load(seconds=130, rate_per_s=0.1)
    assert [i.pool.id for i in rig.view.instances.values()] == [1]


def test_mark_leaves_to_functions_what_does_not_pay() -> None:
    """A node pays from 1.67 per second; 1 x 1.2 is less, 2 x 1.2 is more."""
    for rate, instances in ((1, 0), (2, 1)):
        rig = HybridRig("mark", warm=0)
        rig.load(seconds=130, rate_per_s=rate)
        assert rig.instances == instances


def test_mark_rents_above_the_faas_price_if_not_capped() -> None:
    rig = HybridRig("mark", warm=0, cap_at_faas_price=False)
    rig.load(seconds=130, rate_per_s=1)
    assert rig.instances == 1


def test_mark_releases_what_six_plans_in_a_row_did_not_want() -> None:
    rig = HybridRig("mark", warm=3, memory_ns=60 * S)
    rig.load(seconds=61, rate_per_s=6.5)
    assert rig.instances == 3
    rig.load(seconds=5 * 60, rate_per_s=2)
    assert rig.instances == 3
    rig.load(seconds=2 * 60, rate_per_s=2)
    assert rig.instances == 1


@pytest.mark.parametrize(("forecast", "instances"), [("max", 3), ("mean", 2), ("trend", 3)])
def test_mark_forecasts_the_largest_the_mean_or_the_trend(forecast: str, instances: int) -> None:
    """Half a minute at 2 per second and half at 6.5: at most 6.5, on average 4.3, rising."""
    rig = HybridRig("mark", warm=0, forecast=forecast, launch_ns=0)
    rig.load(seconds=31, rate_per_s=2)
    rig.load(seconds=31, rate_per_s=6.5)
    assert rig.instances == instances


@pytest.mark.parametrize(("rate_per_s", "instances"), [(1.5, 0), (2.0, 1), (3.8, 1), (4.6, 2)])
def test_spandana_rents_what_pays_when_the_load_is_steady(
    rate_per_s: float, instances: int
) -> None:
    """0.9 of a node is 2.5 per second, and it pays from 1.67 on."""
    rig = HybridRig("spandana", warm=1)
    rig.load(seconds=95, rate_per_s=rate_per_s)
    assert rig.instances == instances


def test_spandana_rents_less_when_the_same_load_is_volatile() -> None:
    """2 per second on average, but 5 seconds in 20 of 8: a node would be idle for the rest."""
    rig = HybridRig("spandana", warm=1)
    for _ in range(6):
        rig.load(seconds=5, rate_per_s=8)
        rig.load(seconds=15, rate_per_s=0)
    assert rig.instances == 0


def test_spandana_rents_more_with_a_larger_safety_factor() -> None:
    rig = HybridRig("spandana", warm=0, safety=2.0)
    rig.load(seconds=95, rate_per_s=1.5)
    assert rig.instances == 1


def test_spandana_takes_less_when_nodes_are_slower_than_their_profile() -> None:
    """Every answer takes 1.5 times as long as it should: five at once would be late."""
    rig = HybridRig("spandana", pools=(replace(RENTED, nodes=1), CLOUD), nodes_min=1)
    for _ in range(100):
        rig.ask()
        rig.wait(540_000_000)
        rig.finish()
    assert rig.ask(8).count(0) == 3  # 3 x 360 ms x 1.5 = 1.62 s; a fourth would take 2.16 s


def test_spandana_forwards_what_has_waited_too_long_already() -> None:
    """A request that a lost node returns after 1.7 s has no time left for a node, even alone."""
    rig = HybridRig("spandana", pools=(replace(RENTED, nodes=2), CLOUD), warm=2)
    assert rig.ask(1) == [0]
    rig.wait(1_700_000_000)
    rig.tell(NodeLost(0))
    assert [a.node_id for a in rig.tell(BatchLost(0, False)) if isinstance(a, Dispatch)] == [None]


def test_what_is_not_there_yet_goes_first_then_the_idlest_then_the_youngest() -> None:
    view = HybridRig("spock").scheduler.view
    variant = view.app.variants[0]
    for id, (state, running) in enumerate(
        [
            (InstanceState.BUSY, 1),
            (InstanceState.BUSY, 3),
            (InstanceState.IDLE, 0),
            (InstanceState.BUSY, 1),
            (InstanceState.STARTING, 0),
            (InstanceState.DRAINING, 0),
        ]
    ):
        instance = Instance(id, variant, RENTED, None, 0)
        instance.state, instance.running = state, running
        if state != InstanceState.DRAINING:
            view.instances_of[variant.id][id] = instance
    key = (variant.id, RENTED.id)
    assert [i.id for i in excess_instances(view, key, 0)] == [4, 2, 3, 0, 1]
    assert [i.id for i in excess_instances(view, key, 3)] == [4, 2]
    assert excess_instances(view, key, 5) == []
