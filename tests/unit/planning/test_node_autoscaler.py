"""The node autoscaler: how many nodes to rent in which elastic pool."""

from __future__ import annotations

from dataclasses import replace

from headgate.core.clock import SECOND_NS
from headgate.core.model import (
    App,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.policy import Target
from headgate.planning.autoscaling.rent_or_call import NodeAutoscaler
from headgate.planning.pools.targets import choose_faas_target

MS = 1_000_000
S = SECOND_NS
OWN = Pool(0, "own", Tier.DEDICATED, nodes=4)
# A node does ten in a second, for 0.001 USD; a call of 100 ms costs 0.0002 USD: from five on.
RENTED = replace(OWN, is_elastic=True, boot_ns=100 * S, usd_per_hour=3.6)
CLOUD = Pool(1, "cloud", Tier.SERVERLESS, faas=FaasPlatform(1 << 30, usd_per_gb_s=0.002))


def make_app(*pools: Pool, functions: int = 1, warm: int = 0) -> App:
    """Every function takes 100 ms on every pool."""
    profile = Profile((100 * MS,))
    ids = tuple(pool.id for pool in pools)
    made = tuple(
        Function(id, f"f{id}", (Variant(id, f"f{id}", id, ids, profile),), prewarm_nodes=warm)
        for id in range(functions)
    )
    slo = Slo(S)
    return App(made, tuple(Pipeline(f.id, f.name, (Stage(f),), slo) for f in made), pools)


def make_autoscaler(app: App) -> NodeAutoscaler:
    targets = [choose_faas_target(app, f) for f in app.functions]
    return NodeAutoscaler(app, targets)


def load(
    app: App,
    seconds: int,
    rate_per_s: int,
    *,
    pipeline: int = 0,
    without: tuple[int, ...] = (),
    shares_nodes: bool = True,
) -> list[int]:
    """How many are wanted of each function at the end."""
    targets = [choose_faas_target(app, f) for f in app.functions]
    autoscaler = NodeAutoscaler(app, targets, shares_nodes=shares_nodes)
    for second in range(seconds):
        for number in range(rate_per_s):
            autoscaler.on_arrival(second * S + number * S // rate_per_s, app.pipelines[pipeline], 1)
        desired = autoscaler.targets((second + 1) * S, without)
    return [target.count for target in desired]


def test_what_is_ours_is_not_rented() -> None:
    autoscaler = make_autoscaler(make_app(OWN, CLOUD))
    assert not autoscaler.is_needed
    assert autoscaler.targets(S, ()) == ()


def test_it_begins_with_what_is_to_be_warm() -> None:
    autoscaler = make_autoscaler(make_app(RENTED, CLOUD, warm=2))
    assert autoscaler.is_needed
    assert autoscaler.targets(0, ()) == (Target(0, 0, 2),)


def test_warm_everywhere_is_no_more_than_there_is() -> None:
    autoscaler = make_autoscaler(make_app(RENTED, CLOUD, warm=99))
    assert autoscaler.targets(0, ()) == (Target(0, 0, 4),)


def test_with_a_platform_nothing_is_rented_that_does_not_pay() -> None:
    assert load(make_app(RENTED, CLOUD), 600, 3) == [0]
    assert load(make_app(RENTED, CLOUD), 600, 9) == [1]
    assert load(make_app(RENTED, CLOUD), 600, 18) == [2]


def test_what_runs_nowhere_else_always_has_a_node() -> None:
    assert load(make_app(RENTED), 600, 0, without=(0,)) == [1]
    assert load(make_app(RENTED, CLOUD), 600, 0, without=(0,)) == [1]
    assert load(make_app(RENTED, CLOUD), 600, 0) == [0]


def test_without_a_platform_as_many_as_are_needed() -> None:
    """A miss is expensive: even a node with little use is rented."""
    assert load(make_app(RENTED), 600, 22) == [3]


def test_what_can_wait_for_a_boot_has_a_node_while_requests_arrive() -> None:
    """An objective of ten minutes, a boot of 100 s, and nodes that stop when idle for a minute."""
    app = make_app(replace(RENTED, idle_timeout_ns=60 * S))
    (pipeline,) = app.pipelines
    patient = replace(app, pipelines=(replace(pipeline, slo=Slo(600 * S)),))
    for each, left in ((app, 1), (patient, 0)):
        autoscaler = make_autoscaler(each)
        autoscaler.on_arrival(300 * S, each.pipelines[0], 1)
        (while_asked_for,) = autoscaler.targets(310 * S, (0,))
        (later,) = autoscaler.targets(361 * S, (0,))
        assert (while_asked_for.count, later.count) == (1, left)
        (waited_for,) = autoscaler.targets(362 * S, (0,), (0,))
        assert waited_for.count == 1


def test_nodes_without_a_price_are_rented_all_the_same() -> None:
    """Without a price, nodes follow the demand: they are rented when needed, else released."""
    free = replace(RENTED, usd_per_hour=0.0)
    assert load(make_app(free), 600, 22) == [3]
    assert load(make_app(free), 600, 0) == [0]


def test_a_function_that_nobody_asks_for_is_on_no_node() -> None:
    app = make_app(RENTED, CLOUD, functions=2)
    assert load(app, 1_200, 9, pipeline=1) == [0, 1]


def in_turn(app: App) -> App:
    stages = tuple(Stage(f) for f in app.functions)
    return replace(app, pipelines=(Pipeline(0, "both", stages, Slo(S)),))


def test_functions_that_share_nodes_are_on_as_many_as_all_of_them_need() -> None:
    """Nine a second of each, and a node does ten of any."""
    both = in_turn(make_app(RENTED, CLOUD, functions=2))
    assert load(both, 600, 9) == [2, 2]
    assert load(both, 600, 9, shares_nodes=False) == [1, 1]  # on nodes of their own


def test_functions_that_a_node_cannot_hold_together_divide_the_nodes() -> None:
    app = make_app(replace(RENTED, memory_bytes=3), CLOUD, functions=2)
    functions = tuple(
        replace(f, variants=(replace(f.variants[0], profile=Profile((100 * MS,), memory_bytes=2)),))
        for f in app.functions
    )
    assert load(in_turn(replace(app, functions=functions)), 600, 9) == [1, 1]


def test_a_node_that_runs_several_at_once_is_worth_more() -> None:
    """Four at once without slowing down: forty a second, so twenty need but one."""
    app = make_app(replace(RENTED, slots=4), CLOUD)
    (function,) = app.functions
    wide = replace(function, variants=(replace(function.variants[0], concurrency=4),))
    app = replace(app, functions=(wide,), pipelines=(Pipeline(0, "p", (Stage(wide),), Slo(S)),))
    assert load(app, 600, 20) == [1]
    assert load(make_app(RENTED, CLOUD), 600, 20) == [2]


def with_profile(app: App, profile: Profile) -> App:
    (function,) = app.functions
    made = replace(function, variants=(replace(function.variants[0], profile=profile),))
    return replace(app, functions=(made,), pipelines=(Pipeline(0, "p", (Stage(made),), Slo(S)),))


def test_a_node_that_runs_batches_is_worth_more() -> None:
    """Two take as long as one, so a node does twenty in a second; four would be late."""
    profile = Profile((100 * MS, 100 * MS, 700 * MS, 700 * MS))
    assert load(with_profile(make_app(RENTED, CLOUD), profile), 600, 18) == [1]
    assert load(with_profile(make_app(RENTED), profile), 600, 18) == [2]  # with room for bursts
    assert load(make_app(RENTED), 600, 18) == [3]


def test_what_is_ours_is_used_first() -> None:
    """Two static nodes serve twenty per second: of thirty, ten are left, enough for one node."""
    ours = replace(OWN, id=2, nodes=2)
    rented, cloud = RENTED, CLOUD
    assert load(make_app(rented, cloud, ours), 600, 18) == [0]
    assert load(make_app(rented, cloud, ours), 600, 29) == [1]


def test_nodes_that_are_too_slow_for_the_objective_are_no_help() -> None:
    slow = replace(OWN, id=2, nodes=2)
    app = make_app(RENTED, CLOUD, slow)
    (function,) = app.functions
    fast = replace(function.variants[0], pool_ids=(0, 1))
    late = Variant(1, "late", 0, (2,), Profile((1_100 * MS,)))
    made = replace(function, variants=(fast, late))
    app = replace(app, functions=(made,), pipelines=(Pipeline(0, "p", (Stage(made),), Slo(S)),))
    assert load(app, 600, 18) == [2]


def test_what_is_ours_is_for_who_asks() -> None:
    ours = replace(OWN, id=2, nodes=2)
    assert load(make_app(RENTED, CLOUD, ours, functions=2), 600, 18) == [0, 0]


def test_of_two_pools_the_second_takes_what_the_first_cannot() -> None:
    """One cheap node does ten in a second; of twenty-seven, seventeen are left for the others."""
    cheap = replace(RENTED, nodes=1, usd_per_hour=1.0)
    dear = replace(RENTED, id=2, nodes=4)
    app = make_app(cheap, CLOUD, dear)
    assert load(app, 600, 27) == [1, 2]
    assert load(app, 600, 9) == [1, 0]


def test_of_a_refused_request_the_stage_counts_that_could_not_be_in_time() -> None:
    """Seed 400035. Nodes for the other stages would be idle."""
    app = in_turn(make_app(RENTED, functions=2))
    (pipeline,) = app.pipelines
    autoscaler = make_autoscaler(app)
    for second in range(1_200):
        for number in range(9):
            autoscaler.on_arrival(second * S + number * S // 9, pipeline, 1, stages=(1,))
        counts = [target.count for target in autoscaler.targets((second + 1) * S, ())]
    first, second_ = counts
    assert first == 0
    assert second_ >= 1
