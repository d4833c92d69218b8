"""How many nodes pay off, and what nodes and calls cost."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from headgate.planning.pools.concurrency import ThresholdLimits
from headgate.planning.pools.targets import Targets, newsvendor_nodes, nodes_for

HOUR_S = 3_600


@given(
    buckets=st.lists(st.integers(0, 50).map(float), min_size=1, max_size=20),
    node_takes=st.integers(1, 20).map(float),
    node_usd=st.integers(1, 20).map(float),
    spill_usd=st.integers(1, 5).map(float),
)
def test_so_many_nodes_pay_as_make_the_whole_bill_smallest(
    buckets: list[float], node_takes: float, node_usd: float, spill_usd: float
) -> None:
    """Each node saves no more than the one before, so adding while it pays finds the best."""

    def bill(nodes: int) -> float:
        spilled = sum(max(0.0, amount - nodes * node_takes) for amount in buckets)
        return nodes * node_usd * len(buckets) + spilled * spill_usd

    nodes = newsvendor_nodes(buckets, node_takes, node_usd, spill_usd, most=12)
    assert bill(nodes) == pytest.approx(min(bill(n) for n in range(13)))


def test_where_there_are_no_calls_the_peak_is_rented() -> None:
    assert newsvendor_nodes([1.0, 9.0], 4.0, 1.0, inf, most=9) == 3
    assert newsvendor_nodes([1.0, 9.0], 4.0, 1.0, inf, most=2) == 2
    assert newsvendor_nodes([0.0], 4.0, 1.0, inf, most=9) == 0


def test_whole_nodes_are_not_rounded_up() -> None:
    assert nodes_for(3 * 0.1, 0.1) == 3


SMALL = Pool(0, "small", Tier.DEDICATED, slots=9, is_elastic=True, usd_per_hour=HOUR_S * 2.0)
LARGE = replace(SMALL, id=1, name="large", usd_per_hour=HOUR_S * 3.0)
CHEAP = Pool(2, "cheap", Tier.SERVERLESS, faas=FaasPlatform(1 << 30, usd_per_request=0.1))
DEAR = Pool(3, "dear", Tier.SERVERLESS, faas=FaasPlatform(1 << 30, usd_per_request=0.2))


def declared(pools: tuple[Pool, ...], exec_ns: tuple[int, ...], latency_ns: int) -> App:
    variants = tuple(
        Variant(i, pool.name, 0, (pool.id,), Profile((ns,), (1.0, 2.0)), concurrency=9)
        for i, (pool, ns) in enumerate(zip(pools, exec_ns, strict=True))
    )
    recommend = Function(0, "f", variants)
    pipeline = Pipeline(0, "p", (Stage(recommend),), Slo(latency_ns))
    return App((recommend,), (pipeline,), pools)


def targets_of(app: App) -> Targets:
    return Targets(app, ThresholdLimits(app))


def test_node_and_faas_targets_are_cheapest_first() -> None:
    """The larger instance costs half as much again, but answers twice as many."""
    app = declared((SMALL, LARGE, DEAR, CHEAP), (20, 10, 10, 10), latency_ns=40)
    app = replace(app, pools=(SMALL, LARGE, replace(DEAR, id=2), replace(CHEAP, id=3)))
    targets = targets_of(app)
    assert [target.pool.name for target in targets.nodes[0]] == ["large", "small"]
    assert [target.limit for target in targets.nodes[0]] == [4, 2]
    assert [target.pool.name for target in targets.faas[0]] == ["cheap", "dear"]
    assert targets.spill_usd(0) == pytest.approx(0.1)


def test_what_is_late_even_alone_comes_last() -> None:
    app = declared((SMALL, LARGE, CHEAP), (20, 10, 10), latency_ns=15)
    nodes = targets_of(app).nodes[0]
    assert [(target.pool.name, target.limit) for target in nodes] == [
        ("large", 1),
        ("small", 0),
    ]


def test_without_a_platform_one_at_a_time_is_better_than_none() -> None:
    app = declared((SMALL,), (20,), latency_ns=15)
    (target,) = targets_of(app).nodes[0]
    assert target.limit == 1
    assert targets_of(app).spill_usd(0) == inf


def test_what_can_be_rented_is_in_the_same_order() -> None:
    own = replace(SMALL, id=0, name="own", is_elastic=False)
    app = declared((own, replace(SMALL, id=1), replace(LARGE, id=2)), (20, 20, 10), latency_ns=40)
    targets = targets_of(app)
    assert [target.pool.name for target in targets.nodes[0]] == ["large", "own", "small"]
    assert [target.pool.name for target in targets.elastic(0)] == ["large", "small"]
    assert targets.cheapest_elastic(0) == targets.nodes[0][0]
    assert targets_of(declared((own,), (20,), latency_ns=40)).cheapest_elastic(0) is None
