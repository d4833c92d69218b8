"""Placements on the Pareto curve, and reservations in the gaps of lanes."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_rig import MS, cpu_and_gpu_functions

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import (
    App,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Stage,
    Tier,
    Variant,
)
from headgate.core.records import Node
from headgate.planning.rivals.dag_placements import DagPlacements, NodeReservations

POOLS = (
    Pool(0, "cpu", Tier.DEDICATED, usd_per_hour=3.6),
    Pool(1, "gpu", Tier.GPU, usd_per_hour=18.0),
)


def app_of(times_ms: list[tuple[int, int]], after: list[tuple[int, ...]]) -> App:
    """One pipeline; each function has a build for the CPU and one for the GPU."""
    functions = cpu_and_gpu_functions(times_ms)
    stages = tuple(Stage(f, before) for f, before in zip(functions, after, strict=True))
    return App(functions, (Pipeline(0, "p", stages),), POOLS)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_placements_are_those_that_an_enumeration_leaves(data: st.DataObject) -> None:
    """All r**n maps, less those that another beats: times are longest paths, costs are sums."""
    count = data.draw(st.integers(1, 4))
    time = st.tuples(st.integers(1, 9), st.integers(1, 9))
    times_ms = data.draw(st.lists(time, min_size=count, max_size=count))
    after = [
        tuple(data.draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ())
        for i in range(count)
    ]
    app = app_of(times_ms, after)
    points = set()
    for pools in product((0, 1), repeat=count):
        chosen_ms = [times[pool] for times, pool in zip(times_ms, pools, strict=True)]
        latency_ms = max(app.pipelines[0].longest_to(chosen_ms))
        units = sum((1, 5)[p] * ms for p, ms in zip(pools, chosen_ms, strict=True))
        points.add((latency_ms, units))
    kept = sorted(
        (t, c)
        for t, c in points
        if not any(o != (t, c) and o[0] <= t and o[1] <= c for o in points)
    )
    placements = DagPlacements(app, app.pipelines[0])
    found = zip(placements.times_ns, reversed(placements.costs), strict=True)
    assert [(time / MS, round(cost / 1e9)) for time, cost in found] == kept


def test_both_objectives_hold_for_what_satisfies_them() -> None:
    """The thesis says union: with it, a placement could miss one of the two."""
    app = app_of([(9, 2), (9, 2)], [(), (0,)])
    placements = DagPlacements(app, app.pipelines[0])
    assert [time // MS for time in placements.times_ns] == [4, 11, 18]  # costs 20, 19 and 18 units
    for latency_ms, units, expected in (
        (18, 20, [0, 1, 2]),
        (11, 19, [1]),
        (10, 19, []),
        (3, 99, []),
        (18, 18, [2]),
    ):
        found = placements.satisfying(latency_ms * MS, units * 1e-6, items=1)
        assert list(found) == expected
    assert list(placements.satisfying(NEVER_NS, inf, 1)) == [0, 1, 2]
    assert list(placements.satisfying(18 * MS, 38e-6, items=2)) == [1, 2]  # 19 units each


def test_a_function_that_no_node_runs_is_named() -> None:
    faas = Pool(0, "cloud", Tier.SERVERLESS, nodes=0, faas=FaasPlatform(1 << 30))
    function = Function(0, "f", (Variant(0, "f", 0, (0,), Profile((MS,))),))
    app = App((function,), (Pipeline(0, "p", (Stage(function),)),), (faas,))
    with pytest.raises(ConfigError, match="stage f: has no feasible configuration"):
        DagPlacements(app, app.pipelines[0])


def test_the_earliest_gap_is_reserved() -> None:
    """A node with two lanes: gaps before, between and behind what is reserved."""
    app = app_of([(1, 1)], [()])
    node = Node(0, "gpu1", Pool(0, "gpu", slots=2), app.variants_on(0))
    variant = app.variants[0]
    book = NodeReservations()
    book.add_node(node)

    def starts(ready: int, duration: int) -> tuple[int, int]:
        found = book.reserve(0, node, variant, [], (ready, duration))
        return found.lane, found.start_ns

    assert starts(10, 5) == (0, 10)
    assert starts(10, 5) == (1, 10)
    assert starts(0, 10) == (0, 0)  # it ends when the next begins
    assert starts(0, 11) == (0, 15)  # too long for the gap of lane 1
    assert starts(3, 4) == (1, 3)
    assert book.promised_ns(node, 0) == 35


def test_what_runs_late_pushes_back_what_is_behind_it() -> None:
    app = app_of([(1, 1)], [()])
    node = Node(0, "gpu1", Pool(0, "gpu"), app.variants_on(0))
    variant = app.variants[0]
    book = NodeReservations()
    book.add_node(node)
    first = book.reserve(0, node, variant, [], (0, 10))
    second = book.reserve(0, node, variant, [], (0, 10))
    book.begin(first, 5)  # five late: until 15
    assert second.start_ns == 10
    assert book.reserve(5, node, variant, [], (5, 1)).start_ns == 25
    assert [each.start_ns for each in book.drop_node(node)] == [10, 25]  # the first one runs
