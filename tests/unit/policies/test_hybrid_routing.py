"""Routing: to a node below its threshold, to FaaS, or into the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hybrid_rig import CLOUD, MS, NODES, RENTED, HybridRig

from headgate.core.actions import Dispatch
from headgate.core.errors import ConfigError
from headgate.core.events import BatchFailed, BatchLost, BatchRefused, NodeJoined, NodeLost, Refusal
from headgate.core.model import LAMBDA_PAYLOAD_BYTES_MAX, BreakerConfig, Pool
from headgate.policies import find_policy

ONE = replace(RENTED, nodes=1)
HYBRIDS = ("threshold", "spock", "mark", "spandana")


@pytest.mark.parametrize("policy", HYBRIDS)
def test_five_are_in_time_and_the_sixth_goes_to_a_function(policy: str) -> None:
    rig = HybridRig(policy, pools=(ONE, CLOUD))
    assert rig.ask(7) == [0, 0, 0, 0, 0, None, None]
    rig.finish(0)
    assert rig.ask(2) == [0, None]


def test_the_threshold_can_be_set() -> None:
    assert HybridRig("threshold", pools=(ONE, CLOUD), threshold=2).ask(3) == [0, 0, None]


def test_a_margin_lowers_the_threshold() -> None:
    """At 1.2 times its time a fifth request would be late: 2.16 s."""
    assert HybridRig("threshold", pools=(ONE, CLOUD), margin=1.2).ask(5) == [0, 0, 0, 0, None]


def test_no_more_than_a_node_has_slots() -> None:
    pools = (replace(ONE, slots=3), CLOUD)
    assert HybridRig("threshold", pools=pools, threshold=9).ask(4) == [0, 0, 0, None]


@pytest.mark.parametrize(("bin_pack", "places"), [(False, [0, 1, 0, 1]), (True, [0, 0, 0, 0])])
def test_least_loaded_first_or_one_after_the_other(bin_pack: bool, places: list[int]) -> None:
    assert HybridRig("threshold", warm=2, bin_pack=bin_pack).ask(4) == places


def test_the_number_of_rented_nodes_is_fixed() -> None:
    rig = HybridRig("threshold", warm=1, nodes=3)
    rig.load(seconds=60, rate_per_s=5)
    assert rig.instances == 3


def test_the_tightest_threshold_of_those_that_share_a_node_holds() -> None:
    """Two functions on one node: it has five requests, whosever they are."""
    rig = HybridRig("threshold", pools=(ONE, CLOUD), functions=2)
    assert rig.ask(3) == [0, 0, 0]
    assert rig.ask(3, function=1) == [0, 0, None]


def test_an_objective_that_no_node_can_keep_leaves_functions() -> None:
    assert HybridRig("threshold", latency_ms=350).ask(2) == [None, None]


def test_without_functions_it_runs_late_rather_than_never() -> None:
    rig = HybridRig("threshold", pools=(ONE,), latency_ms=350)
    assert rig.ask(2) == [0]
    assert rig.finish() == [0]


def closed(policy: str) -> HybridRig:
    """One node that is full, and a breaker that has just opened."""
    rig = HybridRig(policy, pools=(ONE, replace(CLOUD, breaker=BreakerConfig(failure_threshold=1))))
    assert rig.ask(6) == [0, 0, 0, 0, 0, None]
    del rig.out[5]
    actions = rig.tell(BatchFailed(5, "broken"))
    assert not any(isinstance(action, Dispatch) for action in actions)
    return rig


@pytest.mark.parametrize("policy", HYBRIDS)
def test_what_exceeds_the_threshold_waits_for_the_node(policy: str) -> None:
    rig = closed(policy)
    assert rig.ask(1) == []
    assert [rig.finish(), rig.finish(), rig.finish()] == [[0], [0], []]


@pytest.mark.parametrize("policy", HYBRIDS)
def test_or_for_the_breaker_whichever_is_first(policy: str) -> None:
    """After five seconds one call is let through to try."""
    rig = closed(policy)
    rig.ask(1)
    rig.wait(6_000 * MS)
    assert [place for place in rig.out.values() if place is None] == [None]


def test_no_more_calls_are_out_than_the_platform_takes() -> None:
    assert CLOUD.faas is not None
    small = replace(CLOUD, faas=replace(CLOUD.faas, concurrency_max=2))
    rig = HybridRig("serverless_only", pools=(ONE, small))
    assert rig.ask(4) == [None, None]
    assert rig.finish() == [None]


@pytest.mark.parametrize("policy", (*HYBRIDS, "serverless_only"))
@pytest.mark.parametrize(("asked", "kept"), [(0, {}), (3, {(1, 1): (3, False)})])
def test_functions_may_be_kept_warm(
    policy: str, asked: int, kept: dict[tuple[int, int], tuple[int, bool]]
) -> None:
    assert HybridRig(policy, warm_instances=asked).view.kept_warm == kept


def test_no_more_functions_are_kept_warm_than_the_platform_has() -> None:
    rig = HybridRig("threshold", warm_instances=9_999)
    assert rig.view.kept_warm == {(1, 1): (1_000, False)}


TOO_LARGE = LAMBDA_PAYLOAD_BYTES_MAX + 1


@pytest.mark.parametrize("policy", HYBRIDS)
def test_what_no_call_can_carry_waits_for_a_node_and_does_not_block_spilling_of_the_tasks_behind_it(
    policy: str,
) -> None:
    rig = HybridRig(policy, pools=(ONE, CLOUD))
    assert rig.ask(5) == [0, 0, 0, 0, 0]
    assert rig.ask(2, size=TOO_LARGE) == []
    assert rig.ask(2, size=LAMBDA_PAYLOAD_BYTES_MAX) == [None, None]
    assert [rig.finish(), rig.finish(), rig.finish()] == [[0], [0], []]


def test_serverless_only_takes_a_node_for_what_no_call_can_carry() -> None:
    rig = HybridRig("serverless_only", pools=(replace(NODES, nodes=1), CLOUD))
    assert rig.ask(2) == [None, None]
    assert rig.ask(1, size=TOO_LARGE) == [0]
    assert rig.ask(1) == [None]


@pytest.mark.parametrize("policy", [*HYBRIDS, "serverless_only", "headgate"])
def test_what_turns_out_too_large_is_not_spilled_again(policy: str) -> None:
    """The platform said so. It is open to others, and the task waits for the node."""
    rig = HybridRig(policy, pools=(replace(NODES, nodes=1, slots=1), CLOUD))
    rig.ask(12)
    called = [batch_id for batch_id, place in rig.out.items() if place is None]
    assert called
    first = called[0]
    (task,) = rig.view.batches[first].tasks
    del rig.out[first]
    rig.tell(BatchRefused(first, Refusal.TOO_LARGE))
    assert rig.view.is_pool_available(1)
    while task.request.id in rig.view.requests:
        carriers = [id for id, b in rig.view.batches.items() if task in b.tasks]
        assert all(rig.out[id] == 0 for id in carriers)
        rig.finish()
    assert task.attempts_made == 1


@pytest.mark.parametrize("policy", [*HYBRIDS, "serverless_only"])
def test_more_items_than_a_call_takes_wait_for_a_node(policy: str) -> None:
    """On nodes two go together, in a call but one."""
    rig = HybridRig(policy, pools=(replace(NODES, nodes=1, slots=1), CLOUD), items_max=2)
    if policy != "serverless_only":
        assert rig.ask(1) == [0]
    assert rig.ask(1, items=2) == ([0] if policy == "serverless_only" else [])
    assert rig.ask(1) == [None]


@pytest.mark.parametrize("policy", HYBRIDS)
def test_what_was_on_a_lost_node_goes_elsewhere(policy: str) -> None:
    rig = HybridRig(policy, pools=(ONE, CLOUD))
    rig.ask(2)
    rig.tell(NodeLost(0))
    places = [a.node_id for a in rig.tell(BatchLost(0)) if isinstance(a, Dispatch)]
    assert places == [None]
    rig.tell(NodeJoined(0, 0, "node0"))
    assert rig.ask(1) == [0]


def test_a_lost_instance_is_replaced_on_another_node_at_the_next_plan() -> None:
    rig = HybridRig("threshold", warm=1)
    rig.tell(NodeLost(0))
    assert rig.instances == 0
    rig.wait(10_000 * MS)
    assert rig.instances == 1


def test_a_node_of_ours_that_stands_idle_is_made_ready_while_a_function_helps_out() -> None:
    rig = HybridRig("threshold", pools=(replace(NODES, nodes=1), CLOUD), warm=0)
    assert rig.ask(1) == [None]
    assert rig.ask(1) == [0]


def test_dedicated_only_never_spills() -> None:
    """Eight slots: the ninth waits."""
    rig = HybridRig("dedicated_only", pools=(ONE, CLOUD))
    assert rig.ask(9) == [0] * 8
    assert rig.finish() == [0]


def test_dedicated_only_limits_the_concurrency_of_a_node() -> None:
    assert HybridRig("dedicated_only", pools=(ONE, CLOUD), concurrency_max=2).ask(9) == [0, 0]


def test_dedicated_only_rents_at_least_one_node() -> None:
    """Nothing is prewarmed: the first request waits for the boot."""
    rig = HybridRig("dedicated_only", warm=0)
    assert (rig.instances, rig.ask(1)) == (1, [0])


def test_serverless_only_rents_nothing() -> None:
    rig = HybridRig("serverless_only", warm=2)
    assert rig.ask(3) == [None, None, None]
    assert rig.instances == 0


EVERY = ("dedicated_only", "serverless_only", "autoscale", *HYBRIDS)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize(("pool", "place"), [(replace(CLOUD, id=0), None), (ONE, 0)])
def test_where_there_is_no_choice_the_only_place_is_taken(
    policy: str, pool: Pool, place: int | None
) -> None:
    rig = HybridRig(policy, pools=(pool,))
    assert rig.ask(3) == [place] * 3
    rig.load(seconds=90, rate_per_s=0.5)
    assert rig.ask(1) == [place]


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("threshold", {"threshold": -1}),
        ("threshold", {"margin": 0.0}),
        ("dedicated_only", {"nodes": -1}),
        ("dedicated_only", {"plan_every_ns": 0}),
        ("serverless_only", {"warm_instances": -1}),
        ("autoscale", {"target": 0.0}),
        ("autoscale", {"in_cooldown_ns": -1}),
        ("spock", {"window_ns": 0}),
        ("spock", {"hold_ns": -1}),
        ("mark", {"forecast": "lstm"}),
        ("mark", {"plans_held": 0}),
        ("spandana", {"bucket_ns": 0}),
        ("spandana", {"correction_quantile": 1.0}),
    ],
    ids=str,
)
def test_bad_settings_are_named(policy: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        find_policy(policy).config(**settings)
