"""A FaaS target: which platform, and the time and cost of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from headgate.core.view import View
from headgate.planning.pools.targets import FaasTarget, choose_faas_target, faas_targets

MS = 1_000_000
S = SECOND_NS
TERMS = FaasPlatform(1 << 30, usd_per_gb_s=1.0, keep_alive_ns=600 * S)


def cloud(id: int, platform: FaasPlatform = TERMS, network_ms: int = 0) -> Pool:
    return Pool(id, f"c{id}", Tier.SERVERLESS, nodes=0, network_ns=network_ms * MS, faas=platform)


def app_of(*places: tuple[Pool, int], latency_ms: int = 1_000) -> App:
    """One function, with a variant for each pool and its time there in milliseconds."""
    variants = tuple(
        Variant(id, pool.name, 0, (pool.id,), Profile((exec_ms * MS,), cold_start_ns=2 * S))
        for id, (pool, exec_ms) in enumerate(places)
    )
    function = Function(0, "f", variants)
    slo = Slo(latency_ms * MS)
    pipelines = (Pipeline(0, "p", (Stage(function),), slo),)
    return App((function,), pipelines, tuple(pool for pool, _ in places))


def found(app: App) -> FaasTarget | None:
    return choose_faas_target(app, app.functions[0])


def test_a_function_that_runs_on_nodes_alone_has_none() -> None:
    assert found(app_of((Pool(0, "node"), 100))) is None


def test_of_those_that_are_in_time_it_is_the_cheapest() -> None:
    """The second takes twice as long at a third of the price."""
    cheap = replace(TERMS, usd_per_gb_s=1 / 3)
    app = app_of((cloud(0), 100), (cloud(1, cheap), 200))
    best = found(app)
    assert best is not None
    assert (best.pool.id, best.variant.id) == (1, 1)


def test_the_way_there_and_back_counts() -> None:
    """The cheaper one is 500 ms away, each way."""
    cheap = replace(TERMS, usd_per_gb_s=1 / 3)
    best = found(app_of((cloud(0), 100), (cloud(1, cheap, network_ms=500), 200)))
    assert best is not None
    assert (best.pool.id, best.call_ns) == (0, 100 * MS)


def test_the_fastest_where_none_is_in_time_and_there_is_nothing_else() -> None:
    cheap = replace(TERMS, usd_per_gb_s=1 / 10)
    best = found(app_of((cloud(0), 100), (cloud(1, cheap), 200), latency_ms=50))
    assert best is not None
    assert best.pool.id == 0


def test_none_where_none_is_in_time_and_there_are_nodes() -> None:
    assert found(app_of((Pool(0, "node"), 40), (cloud(1), 100), latency_ms=50)) is None


def test_a_call_costs_its_length() -> None:
    best = found(app_of((cloud(0, network_ms=5), 100)))
    assert best is not None
    assert best.call_ns == 110 * MS
    assert best.call_usd == pytest.approx(0.1)


def test_every_build_on_every_platform_is_a_target() -> None:
    """Two builds run on the first platform, one of them on the second as well."""
    app = app_of((cloud(0), 100), (cloud(1), 200))
    (function,) = app.functions
    first, second = function.variants
    both = replace(function, variants=(first, replace(second, pool_ids=(0, 1))))
    assert [(t.pool.id, t.variant.id) for t in faas_targets(app, both)] == [(0, 0), (0, 1), (1, 1)]


def test_our_own_calls_in_flight_count_towards_the_platform_s_limit() -> None:
    app = app_of((cloud(0, replace(TERMS, concurrency_max=2)), 100))
    view, best = View(app), found(app)
    assert best is not None
    breaker = view.breakers[0]
    assert breaker is not None
    assert best.is_available(view)
    breaker.in_flight = 1
    assert best.is_below_concurrency_max(view)
    breaker.in_flight = 2
    assert not best.is_below_concurrency_max(view)
