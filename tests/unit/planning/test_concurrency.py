"""Thresholds: the largest concurrency within an objective, and the budgets of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.planning.concurrency import (
    Thresholds,
    budgets_ns,
    largest_concurrency,
    rate_per_s,
    shares_of_remaining_path,
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
    ("margin", "fixed", "network_ns", "items", "threshold"),
    [
        (1.0, 0, 0, 1, 6),
        (1.2, 0, 0, 1, 5),
        (1.0, 0, 5, 1, 5),  # there and back
        (1.0, 0, 0, 2, 3),
        (1.0, 9, 0, 1, 9),
        (1.0, 99, 0, 1, 20),  # slots
        (9.0, 0, 0, 1, 0),
    ],
)
def test_thresholds(margin: float, fixed: int, network_ns: int, items: int, threshold: int) -> None:
    """An objective of 60 for something that takes 10 alone and c times that among c."""
    declared = app(Pipeline(0, "p", (Stage(function(0, 10)),), Slo(60)))
    thresholds = Thresholds(declared, margin, fixed)
    pool = replace(POOL, network_ns=network_ns)
    assert thresholds.of(declared.variants[0], pool, items) == threshold


def test_without_objective_a_node_takes_what_it_has_slots_for() -> None:
    declared = app(Pipeline(0, "p", (Stage(function(0, 10)),)))
    assert Thresholds(declared).of(declared.variants[0], POOL) == 20
