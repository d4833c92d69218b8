"""The levels of a load, and the cheapest mix for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.config.prices import read_prices
from headgate.core.clock import SECOND_NS
from headgate.core.model import InstanceType
from headgate.planning.autoscaling.waiting_time import erlang_b
from headgate.planning.capacity.latency_model import Characterisation
from headgate.planning.capacity.mix import (
    FaasChoice,
    LoadProfile,
    RateLevel,
    Rise,
    best_of_type,
    break_even_rate,
    cheapest_mix,
    closed_load,
    evaluate,
    open_load,
)
from headgate.planning.capacity.plan import CapacityPlan, Infeasible, Terms, make_plan
from headgate.planning.capacity.sizing import (
    InstanceCapacity,
    faas_sizes,
    instance_capacity,
    knee_size,
)
from headgate.workload import Arrivals, parse_arrivals

PAPER = Characterisation.surrogate()
LARGE = InstanceType("large", 2, 1 << 40, 0.1)
PLATFORM = read_prices().platforms[0]


def steady(rate_per_s: float, duration_s: float = 3_600.0) -> LoadProfile:
    return LoadProfile((RateLevel(1.0, rate_per_s=rate_per_s),), duration_s, (Rise(0.0, 0),))


def place(times_ms: tuple[float, ...], usd_per_hour: float = 0.1) -> InstanceCapacity:
    offer = replace(LARGE, usd_per_hour=usd_per_hour)
    within = tuple(1.0 for _ in times_ms)
    return InstanceCapacity(offer, len(times_ms), False, False, times_ms[0], times_ms, within)


def functions(start_ms: float = 2_500.0, concurrency: int = 1_000) -> FaasChoice:
    row = knee_size(faas_sizes(PAPER, PLATFORM, 150))
    assert row is not None
    terms = replace(PLATFORM.sized(row.memory_bytes), concurrency_max=concurrency)
    return FaasChoice(terms, row, start_ms, is_cold_within=False)


def levels_of(spec: str) -> LoadProfile:
    arrivals = parse_arrivals(spec, duration_ns=600 * SECOND_NS, seed=1)
    assert isinstance(arrivals, Arrivals)
    return open_load(arrivals.times_ns, arrivals.duration_ns, slo_ms=100)


def test_chance_is_no_burst() -> None:
    """Counts of a Poisson stream spread by 14 % at 50/s; its rate does not, but for little."""
    rates = [level.rate_per_s for level in levels_of("poisson:rate=50/s").levels]
    assert max(rates) / min(rates) < 1.2
    bursty = levels_of("mmpp:rates=10/s+100/s,stay=20s+10s")
    assert bursty.peak_per_s > 90
    assert min(level.rate_per_s for level in bursty.levels) < 15


@given(st.lists(st.integers(0, 60 * SECOND_NS - 1), min_size=1, max_size=300))
def test_levels_keep_the_mean(instants: list[int]) -> None:
    load = open_load(np.array(sorted(instants)), 60 * SECOND_NS, slo_ms=100)
    assert load.rate_per_s == pytest.approx(len(instants) / 60)
    assert sum(level.share for level in load.levels) == pytest.approx(1)
    rates = [load.levels[rise.level].rate_per_s for rise in load.rises]
    assert rates == sorted(rates)
    assert rates[-1] == load.peak_per_s


def test_clients_that_wait() -> None:
    load = closed_load([(0, 5), (10, 20), (20, 5), (30, 10)], 40)
    assert [(level.share, level.clients) for level in load.levels] == [
        (0.5, 5),
        (0.25, 20),
        (0.25, 10),
    ]
    assert [rise.level for rise in load.rises] == [0, 1]


@given(st.integers(1, 30), st.floats(0.1, 60))
def test_one_request_per_instance_is_erlangs_loss_system(instances: int, load: float) -> None:
    mix = evaluate(steady(load / 0.05), place((50.0,)), instances, None)
    assert mix.spilled == pytest.approx(erlang_b(instances, load), rel=1e-6)
    assert mix.attainment == pytest.approx(1 - mix.spilled)


def test_sharing_an_instance_is_a_queue_with_an_end() -> None:
    """If slowdown is proportional to concurrency, throughput is the same in every state: M/M/1/K.

    At load r, the share that finds all K taken is r^K (1 - r) / (1 - r^(K + 1)).
    """
    mix = evaluate(steady(16.0), place(tuple(50.0 * c for c in range(1, 6))), 1, None)
    r = 0.8
    assert mix.spilled == pytest.approx(r**5 * (1 - r) / (1 - r**6))


def test_what_goes_beyond_is_paid_by_the_call() -> None:
    spill = functions(start_ms=0.0)
    mix = evaluate(steady(100.0), place((50.0,)), 2, spill)
    assert mix.attainment == pytest.approx(1.0)
    calls_usd = 3_600 * 100 * mix.spilled * spill.row.usd_per_call
    assert mix.usd_per_hour == pytest.approx(0.2 + calls_usd)
    assert mix.usd_per_1k == pytest.approx(mix.usd_per_hour / 360)


def test_the_paper_at_twenty_clients() -> None:
    """Five of them on the instance; for the others, functions, or nothing in time."""
    load = closed_load([(0, 20)], 60 * SECOND_NS)
    held = instance_capacity(PAPER, LARGE, 200, 0.99)
    spilling = evaluate(load, held, 1, functions(start_ms=0.0))
    assert spilling.functions_peak == 15
    assert spilling.attainment == 1.0
    assert spilling.rate_per_s == pytest.approx(5 / 0.180 + 15 / 0.03663, rel=1e-3)
    assert evaluate(load, held, 1, None).attainment == 0.0
    assert evaluate(load, held, 4, None).attainment == 1.0


def test_a_platform_has_an_end() -> None:
    """Two functions at once, where ten are needed: a fifth is served."""
    spill = functions(start_ms=0.0, concurrency=2)
    mix = evaluate(steady(10 / (spill.row.run_ms / 1e3)), None, 0, spill)
    assert mix.attainment == pytest.approx(0.2)
    assert mix.functions_peak == 2


def test_cold_starts_by_how_often_functions_are_called() -> None:
    """One call an hour finds nothing warm after ten minutes; ten a second keep one warm."""
    spill = functions()
    rare = evaluate(steady(1 / 3_600, duration_s=100 * 3_600), None, 0, spill)
    assert rare.cold == pytest.approx(1.0, abs=0.01)
    assert rare.attainment == pytest.approx(0.0, abs=0.01)
    busy = evaluate(steady(10.0, duration_s=100 * 3_600), None, 0, spill)
    assert busy.cold < 0.001
    assert rare.usd_per_1k > 50 * busy.usd_per_1k  # the start is on the bill
    unbilled = replace(spill, terms=replace(spill.terms, bills_cold_start=False))
    quiet = evaluate(steady(1 / 3_600, duration_s=100 * 3_600), None, 0, unbilled)
    assert quiet.usd_per_1k == pytest.approx(1e3 * spill.row.usd_per_call)


def test_a_burst_starts_as_many_as_come_while_the_first_starts() -> None:
    """First none spill; then 40/s do, for 2.5 s of start and 27 ms of run: 101 at once."""
    quiet, loud = RateLevel(0.5), RateLevel(0.5, rate_per_s=40.0)
    load = LoadProfile((quiet, loud), 60.0, (Rise(0.0, 0), Rise(30.0, 1)))
    mix = evaluate(load, None, 0, functions())
    assert mix.cold * 40 * 30 == pytest.approx(40 * 2.527, rel=0.02)


def test_break_even() -> None:
    """At the break-even rate, an hour of calls costs an hour of the instance."""
    usd_per_call = functions().row.usd_per_call
    rate = break_even_rate(0.408, usd_per_call)
    assert 3_600 * rate * usd_per_call == pytest.approx(0.408)
    assert rate == pytest.approx(36.3, abs=0.1)


@given(st.floats(0.01, 300), st.sampled_from((0.5, 0.9, 0.99)), st.floats(0.01, 2))
def test_nothing_tried_is_cheaper(rate_per_s: float, quantile: float, usd_per_hour: float) -> None:
    load, spill = steady(rate_per_s), functions()
    held = place((20.0, 35.0, 60.0), usd_per_hour)
    best = best_of_type(load, held, spill, quantile, instances_max=20)
    assert 0 <= best.attainment <= 1 + 1e-9
    for count in range(21):
        other = evaluate(load, held, count, spill)
        if other.attainment >= quantile:
            assert best.attainment >= quantile
            assert best.usd_per_1k <= other.usd_per_1k + 1e-12


def test_the_best_of_many_is_found_without_trying_all() -> None:
    load, held = steady(3_000.0), place((20.0, 35.0, 60.0))
    best = best_of_type(load, held, functions(), 0.99, instances_max=1_000)
    for count in (best.instances - 1, best.instances + 1):
        assert evaluate(load, held, count, functions()).usd_per_1k >= best.usd_per_1k


def test_little_load_is_for_functions_and_much_for_instances() -> None:
    held = [place((20.0, 35.0, 60.0))]
    assert cheapest_mix(steady(0.5), held, functions(), 0.99, 10).instances == 0
    assert cheapest_mix(steady(100.0), held, functions(), 0.99, 10).instances >= 2


def test_infeasible_is_not_the_same_as_too_little() -> None:
    load = steady(500.0)
    never = make_plan(PAPER, [LARGE], PLATFORM, Terms(20.0, 0.99, load))
    assert isinstance(never, Infeasible)
    assert never.fastest_ms == pytest.approx(36.0)  # 26 ms plus network, or 36 ms on two cores
    short = make_plan(PAPER, [LARGE], None, Terms(200.0, 0.99, load, instances_max=3))
    assert isinstance(short, CapacityPlan)
    assert not short.is_enough
    enough = 3 + short.instances_missing
    for count, is_enough in ((enough, True), (enough - 1, False)):
        terms = Terms(200.0, 0.99, load, instances_max=count)
        plan = make_plan(PAPER, [LARGE], None, terms)
        assert isinstance(plan, CapacityPlan)
        assert plan.is_enough is is_enough


def test_what_fits_nowhere_is_infeasible_for_its_memory() -> None:
    huge = replace(PAPER, peak_memory_bytes=1 << 41)
    never = make_plan(huge, [LARGE], PLATFORM, Terms(200.0, 0.99, steady(1.0)))
    assert isinstance(never, Infeasible)
    assert never.needs_bytes == 1 << 41
