"""A FaaS target: which platform, the time of a call, and the warm instances to keep."""

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
from headgate.planning.targets import FaasTarget, choose_faas_target

MS = 1_000_000
S = SECOND_NS
MEMORY_NS = 3_600 * S
TERMS = FaasPlatform(1 << 30, usd_per_gb_s=1.0, keep_alive_ns=600 * S)


def cloud(id: int, platform: FaasPlatform = TERMS, network_ms: int = 0) -> Pool:
    return Pool(id, f"c{id}", Tier.SERVERLESS, nodes=0, network_ns=network_ms * MS, faas=platform)


def app_of(*places: tuple[Pool, int], latency_ms: int = 1_000, burst: float = 1.0) -> App:
    """One function, with a variant for each pool and its time there in milliseconds."""
    variants = tuple(
        Variant(id, pool.name, 0, (pool.id,), Profile((exec_ms * MS,), cold_start_ns=2 * S))
        for id, (pool, exec_ms) in enumerate(places)
    )
    function = Function(0, "f", variants)
    slo = Slo(latency_ms * MS, rate_tolerance=burst)
    pipelines = (Pipeline(0, "p", (Stage(function),), slo),)
    return App((function,), pipelines, tuple(pool for pool, _ in places))


def found(app: App) -> FaasTarget | None:
    return choose_faas_target(app, app.functions[0], MEMORY_NS)


def target(platform: FaasPlatform = TERMS, **options: float) -> FaasTarget:
    """Calls of 100 ms."""
    target = found(app_of((cloud(0, platform), 100), **options))  # type: ignore[arg-type]
    assert target is not None
    return target


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
    assert target().call_usd == pytest.approx(0.1)


def test_what_was_never_needed_is_not_kept() -> None:
    assert target().desired_warm(0) == 0


def test_more_are_kept_than_were_ever_needed_of_late() -> None:
    one = target()
    one.observe_demand(0, 8.0)
    one.observe_demand(S, 2.0)
    assert 8 < one.desired_warm(S) <= 12


def test_a_burst_that_is_to_be_met_is_provided_for() -> None:
    one = target(burst=3.0)
    one.observe_demand(0, 8.0)
    assert one.desired_warm(0) == 24


def test_never_more_than_the_platform_runs() -> None:
    one = target(replace(TERMS, concurrency_max=5))
    one.observe_demand(0, 8.0)
    assert one.desired_warm(0) == 5


def test_a_burst_fades_and_is_forgotten_at_last() -> None:
    one = target()
    one.observe_demand(0, 8.0)
    targets = [one.desired_warm(hour * MEMORY_NS) for hour in range(8)]
    assert targets == sorted(targets, reverse=True)
    assert targets[1] in (3, 4)  # 10 / e
    assert targets[-1] == 0


def busy(platform: FaasPlatform, share: float) -> FaasTarget:
    """One instance, in use for this share of the last hours."""
    one = target(platform)
    for second in range(0, 5 * 3_600, 10):
        for _ in range(int(share * 100)):
            one.on_call(second * S)
            one.warm_pool.on_return(second * S, ran=True)
    return one


PROVISIONED = replace(TERMS, provisioned_usd_per_gb_s=0.25, provisioned_run_usd_per_gb_s=0.5)


def test_provisioned_where_it_is_not_sold_is_never_cheaper() -> None:
    assert not busy(TERMS, 1.0).is_provisioned_cheaper(1)


def test_nothing_is_not_provisioned() -> None:
    assert not busy(PROVISIONED, 1.0).is_provisioned_cheaper(0)


@pytest.mark.parametrize(("share", "is_cheaper"), [(0.0, False), (0.4, False), (0.6, True)])
def test_an_instance_is_provisioned_if_it_is_busy_often_enough(
    share: float, is_cheaper: bool
) -> None:
    """It costs a quarter while it waits, and runs at half the price: from one half on it pays."""
    assert busy(PROVISIONED, share).is_provisioned_cheaper(1) == is_cheaper


def test_of_more_instances_each_is_busy_less() -> None:
    assert not busy(PROVISIONED, 0.9).is_provisioned_cheaper(2)


def test_where_calls_that_keep_one_awake_are_dear_it_is_provisioned_though_idle() -> None:
    """A call every 300 s, at 90 USD, is dearer than 0.25 USD a second."""
    dear = replace(PROVISIONED, usd_per_request=90.0)
    assert target(dear).is_provisioned_cheaper(1)
    assert not target(replace(dear, usd_per_request=60.0)).is_provisioned_cheaper(1)


def test_where_none_stays_only_provisioned_ones_can_be_kept() -> None:
    assert target(replace(PROVISIONED, keep_alive_ns=0)).is_provisioned_cheaper(1)
