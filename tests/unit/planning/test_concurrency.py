"""Concurrency limits of nodes by each rule, and the budgets of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.planning.pools.concurrency import (
    FixedLimits,
    KneeLimits,
    ThresholdLimits,
    budgets_ns,
    largest_concurrency,
    rate_per_s,
    shares_of_remaining_path,
    tightest_objectives_ns,
)

POOL = Pool(0, "node", slots=20)


def function(id: int, exec_ns: int) -> Function:
    profile = Profile((exec_ns, 2 * exec_ns), slowdown=(1.0, 2.0))
    return Function(id, f"f{id}", (Variant(id, f"v{id}", id, (0,), profile, concurrency=20),))


def app(*pipelines: Pipeline) -> App:
    functions = {stage.function.id: stage.function for p in pipelines for stage in p.stages}
    return App(tuple(functions[id] for id in sorted(functions)), pipelines, (POOL,))


@given(
    exec_ns=st.integers(1, 100),
    slowdown=st.lists(st.floats(1.0, 9.0), min_size=1, max_size=6).map(sorted),
    allowed_ns=st.integers(0, 1_000),
    most=st.integers(1, 30),
)
def test_the_largest_concurrency_is_what_trying_all_finds(
    exec_ns: int, slowdown: list[float], allowed_ns: int, most: int
) -> None:
    profile = Profile((exec_ns,), (1.0, *slowdown[1:]))
    in_time = [c for c in range(1, most + 1) if profile.time_ns(1, c) <= allowed_ns]
    assert largest_concurrency(profile, allowed_ns, most) == max(in_time, default=0)


def test_the_paper_s_two_instances_hold_five_each() -> None:
    for lone_ms, objective_ms in ((36, 200), (26, 150)):
        profile = Profile((lone_ms,), tuple(float(c) for c in range(1, 21)))
        assert largest_concurrency(profile, objective_ms, most=20) == 5


def test_a_node_that_holds_none_answers_none() -> None:
    assert rate_per_s(Profile((10,)), 0) == 0.0


def test_an_objective_is_shared_out_along_the_longest_path() -> None:
    """10 then 30, or 10 then 10: the second branch has no more time than the first leaves it."""
    first, long, short = (function(i, ns) for i, ns in enumerate((10, 30, 10)))
    stages = (Stage(first), Stage(long, (0,)), Stage(short, (0,)))
    forked = Pipeline(0, "p", stages, Slo(200))
    assert budgets_ns(app(forked)) == [50, 150, 100]
    assert shares_of_remaining_path(forked) == [10 / 40, 1.0, 1.0]


def test_the_tightest_pipeline_counts() -> None:
    shared = function(0, 10)
    pipelines = tuple(
        Pipeline(i, f"p{i}", (Stage(shared),), Slo(ns)) for i, ns in enumerate((90, NEVER_NS, 60))
    )
    assert budgets_ns(app(*pipelines)) == [60]


@pytest.mark.parametrize(
    ("margin", "network_ns", "items", "limit"),
    [
        (1.0, 0, 1, 6),
        (1.2, 0, 1, 5),
        (1.0, 5, 1, 5),  # there and back
        (1.0, 0, 2, 3),
        (9.0, 0, 1, 0),
    ],
)
def test_the_threshold_rule(margin: float, network_ns: int, items: int, limit: int) -> None:
    """An objective of 60 for something that takes 10 alone and c times that among c."""
    declared = app(Pipeline(0, "p", (Stage(function(0, 10)),), Slo(60)))
    pool = replace(POOL, network_ns=network_ns)
    assert ThresholdLimits(declared, margin).limit(pool, declared.variants[0], items) == limit


def test_without_objective_a_node_takes_what_it_has_slots_for() -> None:
    declared = app(Pipeline(0, "p", (Stage(function(0, 10)),)))
    assert ThresholdLimits(declared).limit(POOL, declared.variants[0]) == 20


def test_no_rule_exceeds_the_slots_of_a_node_or_the_batches_of_an_instance() -> None:
    declared = app(Pipeline(0, "p", (Stage(function(0, 10)),), Slo(1_000)))
    (wide,) = declared.variants
    narrow, flat = replace(wide, id=1, concurrency=3), Profile((10,))
    small = replace(POOL, id=1, slots=4)
    for limits in (ThresholdLimits(declared), FixedLimits(99), FixedLimits(0)):
        found = [limits.limit(pool, build) for pool in (POOL, small) for build in (wide, narrow)]
        assert found == [20, 3, 4, 3]
    knee = KneeLimits(declared)
    narrow, wide = replace(narrow, profile=flat), replace(wide, profile=flat)
    found = [knee.limit(pool, build) for pool in (POOL, small) for build in (wide, narrow)]
    assert found == [20, 3, 4, 3]


def test_a_number_that_was_set_is_the_limit() -> None:
    assert FixedLimits(2).limit(POOL, function(0, 10).variants[0]) == 2


def test_the_knee_is_within_the_tightest_objective_of_a_whole_pipeline() -> None:
    """Alone 10; four at once take 13, which is too much of 14: see `knee_concurrency`."""
    profile = Profile((10,), (1.0, 1.05, 1.1, 1.3))
    variant = Variant(0, "v", 0, (0,), profile, concurrency=4)
    measured, other = Function(0, "f", (variant,)), function(1, 10)
    stages = (Stage(measured), Stage(other, (0,)))

    def knee(*objectives_ns: int, default_ns: int = NEVER_NS) -> int:
        declared = app(*(Pipeline(i, "p", stages, Slo(ns)) for i, ns in enumerate(objectives_ns)))
        assert tightest_objectives_ns(declared) == [min(objectives_ns)] * 2
        return KneeLimits(declared, default_ns).limit(POOL, variant)

    assert knee(NEVER_NS) == knee(1_000) == 4
    assert knee(1_000, 14) == knee(NEVER_NS, default_ns=14) < 4
    assert knee(1_000, default_ns=14) == 4  # the default is for functions without an objective


def test_variants_on_a_node_have_one_limit() -> None:
    """Where slowdown was measured, more at once must add throughput; one limit serves all."""
    declared = app(Pipeline(0, "p", (Stage(function(0, 10)),)))
    measured = replace(declared.variants[0], concurrency=1)
    unmeasured = replace(measured, id=1, profile=Profile((10,)))
    limits = KneeLimits(declared)
    assert (limits.limit(POOL, unmeasured), limits.node_limit(POOL, [unmeasured])) == (1, 1)
    assert [limits.node_limit(POOL, [unmeasured] * count) for count in (3, 20, 30)] == [3, 20, 20]
    assert (limits.limit(POOL, measured), limits.node_limit(POOL, [measured])) == (1, 1)
    assert 1 <= limits.node_limit(POOL, [measured, unmeasured]) <= 20


def test_batches_and_concurrency_compete_for_the_time_of_a_stage() -> None:
    """Alone a batch of 8 fits half of the budget, three at once are twice as slow and fit one."""
    batches = Profile(tuple(range(100, 170, 10)), slowdown=(1.0, 1.5, 2.0))
    for latency_ns, expected in ((320, 1), (10_000, 3)):
        function_ = Function(0, "f", (Variant(0, "v", 0, (0,), batches, concurrency=3),))
        pipeline = Pipeline(0, "p", (Stage(function_),), Slo(latency_ns))
        limits = KneeLimits(App((function_,), (pipeline,), (POOL,)))
        assert limits.node_limit(replace(POOL, slots=3), list(function_.variants)) == expected


def test_a_variant_counts_by_the_part_of_its_function_that_runs_on_the_pool() -> None:
    """The second is late beside others here, but nearly all of it runs on another pool."""
    other = replace(POOL, id=1)
    only_here = Variant(0, "v", 0, (0,), Profile((100,)), concurrency=4)
    late = Variant(1, "slow", 1, (0,), Profile((90,), (1.0, 1.2, 1.4, 1.6)), concurrency=4)
    fast = Variant(2, "fast", 1, (1,), Profile((1,)))
    for variants, expected in (((late,), 1), ((late, fast), 4)):
        functions = (Function(0, "f", (only_here,)), Function(1, "g", variants))
        pipelines = tuple(
            Pipeline(f.id, f.name, (Stage(f),), Slo(ns))
            for f, ns in zip(functions, (10_000, 100), strict=True)
        )
        limits = KneeLimits(App(functions, pipelines, (POOL, other)))
        assert limits.node_limit(replace(POOL, slots=4), [only_here, late]) == expected


def test_batches_that_do_not_slow_each_other_down_share_a_node_in_any_case() -> None:
    """Seed 400033. Of an objective of 100, 80 are needed whether the others run or not."""
    tight = Function(0, "f", (Variant(0, "v", 0, (0,), Profile((80,)), concurrency=8),))
    limits = KneeLimits(App((tight,), (Pipeline(0, "p", (Stage(tight),), Slo(100)),), (POOL,)))
    assert limits.node_limit(replace(POOL, slots=8), list(tight.variants)) == 8


def test_a_function_that_is_rarely_called_does_not_limit_the_others() -> None:
    """Seed 200099. The first has 1.6 times the throughput with four at once, the second less."""
    first = Function(
        0, "f", (Variant(0, "v", 0, (0,), Profile((240,), (1.0, 1.5, 2.0, 2.5)), concurrency=4),)
    )
    steep = Profile((40, 40), (1.0, 2.2, 3.4, 4.6))
    second = Function(1, "g", (Variant(1, "w", 1, (0,), steep, concurrency=4),))
    variants, pool = [*first.variants, *second.variants], replace(POOL, slots=4)
    for probability, expected in ((0.1, 4), (1.0, 1)):
        unsure = Stage(second, (0,), only_if_unsure=True, unsure_probability=probability)
        often = (unsure,) if probability < 1.0 else tuple(Stage(second) for _ in range(30))
        pipeline = Pipeline(0, "p", (Stage(first), *often), Slo(100_000))
        limits = KneeLimits(App((first, second), (pipeline,), (pool,)))
        assert limits.node_limit(pool, variants) == expected
