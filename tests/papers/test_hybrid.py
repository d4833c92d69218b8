"""The HiPS'21 experiments: the failing claims are those that the page documents."""

from __future__ import annotations

from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from paper_page import quick_result

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import MIB
from headgate.lab.experiments._hybrid_app import SURROGATE, characterise
from headgate.lab.experiments.hybrid_characterisation import best_threshold
from headgate.lab.experiments.hybrid_waves.environment import (
    LEAST,
    MOST,
    BurstPhase,
    BurstScenario,
    lead_in_ns,
    make_phases,
    plan_of,
    scatter,
    setting_of,
    wave_sizes,
    waves,
)
from headgate.lab.experiments.hybrid_waves.spill import cold_share
from headgate.lab.harness import PolicyCase, RequestTimes, RunResult, TierUse, request_times
from headgate.policies.threshold import Config as ThresholdConfig

FIGURES = {"hybrid-characterisation": 4, "hybrid-200ms": 8, "hybrid-150ms": 7}
_SECONDS = tuple(BurstPhase(4 * SECOND_NS, is_bursty) for is_bursty in (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_failing_claims_are_those_known(name: str, tmp_path: Path) -> None:
    result = quick_result(name, tmp_path)
    assert (result.failing, result.outdated) == ([], [])
    assert len(result.figures) == FIGURES[name]


@pytest.mark.parametrize("cores", [2, 8])
def test_decisions_of_the_paper_follow_from_the_surrogate(cores: int) -> None:
    plan = plan_of(setting_of(SURROGATE, cores))
    assert plan.threshold == 5
    assert plan.knee_cores == 4
    assert plan.selected is not None
    assert plan.selected.memory_bytes == 6656 * MIB
    saving = 1 - plan.selected.usd_per_s / plan.sizes[-1].usd_per_s
    assert saving == pytest.approx(0.35)


def test_network_delay_close_to_the_sla_leaves_no_size() -> None:
    """5 ms of network are most of 6.8 ms; the plan selects no size."""
    plan = plan_of(setting_of("recommender", 8))
    assert plan.selected is None
    assert plan.memory_mb * MIB == plan.sizes[-1].memory_bytes


def test_wave_sizes_cover_the_range_of_the_paper() -> None:
    phases = make_phases(10 * MINUTE_NS)
    sizes = wave_sizes(phases, SECOND_NS, seed=3)
    assert len(sizes) == sum(phase.length_ns for phase in phases) // SECOND_NS
    assert set(sizes) == set(range(LEAST, MOST + 1))
    assert sizes == wave_sizes(phases, SECOND_NS, seed=3) != wave_sizes(phases, SECOND_NS, seed=4)
    assert set(sizes[: lead_in_ns(phases, SECOND_NS) // SECOND_NS]) == {LEAST}, (
        "a run starts with a calm phase"
    )


def test_lead_in_ends_at_the_first_burst() -> None:
    """Also if the calm phase is no whole number of waves."""
    period_ns = 1_574_750_000
    phases = make_phases(MINUTE_NS)
    begins_ns = lead_in_ns(phases, period_ns)
    times_ns = waves(wave_sizes(phases, period_ns, seed=0), period_ns).times_ns
    before = int(np.count_nonzero(times_ns < begins_ns))
    assert before == LEAST * (phases[0].length_ns // period_ns)


def test_response_time_without_functions_is_proportional_to_wave_size() -> None:
    """RT = c x 36 ms on 2 cores by the surface, and a wave completes before the next."""
    sizes, requests = _observe(PolicyCase("dedicated_only"))
    expected = np.repeat([36.0 * size for size in sizes], sizes)
    assert requests.response_ms == pytest.approx(expected)
    assert (requests.is_met == (expected <= 200)).all()


def test_requests_beyond_the_threshold_go_to_functions() -> None:
    """1. Five requests of each wave go to the instance; they take 180 ms.
    2. The others go to functions: 26.6 ms on 3.76 cores plus 5 ms of network, plus cold start.
    """
    sizes, requests = _observe(PolicyCase.of("threshold", threshold=5))
    on_instance = requests.only(requests.on_machines)
    on_functions = requests.only(requests.on_functions)
    assert len(on_instance.is_met) == 5 * len(sizes)
    assert on_instance.response_ms == pytest.approx(180.0)
    assert len(on_functions.is_met) == sum(sizes) - 5 * len(sizes)
    single_ms = 16 + 40 / (6656 / 1769) + 5
    expected = np.where(on_functions.is_cold, 2_500 + single_ms, single_ms)
    assert on_functions.response_ms == pytest.approx(expected, abs=1e-3)
    assert on_functions.is_cold.any()
    assert not on_functions.is_cold.all()
    assert (requests.is_met == ~requests.is_cold).all()


def test_warm_functions_avoid_cold_starts_in_bursts() -> None:
    warm = PolicyCase.of("threshold", threshold=5, warm_instances=MOST - 5, plan_every_ns=SECOND_NS)
    _, requests = _observe(warm)
    assert not requests.is_cold.any()
    with pytest.raises(ConfigError, match="warm_instances"):
        ThresholdConfig(warm_instances=-1)


@pytest.mark.parametrize("source", ["bert", "classification", "recommender"])
def test_scatter_is_measured_near_the_concurrency_limit(source: str) -> None:
    setting = setting_of(source, 2)
    cv = scatter(setting).cv
    drawn = exp(sqrt(log(1 + cv * cv)) * NormalDist().inv_cdf(0.99))
    ratios = [p.p99_ms / p.p50_ms for p in characterise(source).points if p.cores == 2]
    assert min(abs(drawn - ratio) for ratio in ratios) < 1e-9
    assert scatter(setting_of(SURROGATE, 2)).distribution == "exact"


def test_best_threshold_is_the_cheapest_that_meets_the_quantile() -> None:
    runs = {1: [_measured(1.0, 3.0)], 2: [_measured(0.995, 2.0)], 3: [_measured(0.9, 1.0)]}
    assert best_threshold(runs) == 2
    assert best_threshold({1: [_measured(0.5, 1.0)], 2: [_measured(0.6, 9.0)]}) == 2


def test_cold_share_is_over_violations_of_all_runs() -> None:
    cold = RunResult(requests=100, met=70, cold_violations=30)
    other = RunResult(requests=100, met=90)
    assert cold_share([cold, other]) == 0.75
    assert cold_share([_measured(1.0, 1.0)]) == 0.0


def _observe(policy: PolicyCase) -> tuple[list[int], RequestTimes]:
    """Run calm and burst phases on the surrogate with 2 cores; return sizes and requests."""
    scenario = BurstScenario(setting_of(SURROGATE, 2), 6656, (*_SECONDS, *_SECONDS))
    run = scenario.environment(0).simulate(policy, 0)
    return scenario.wave_sizes(0), request_times(run)[0]


def _measured(attainment: float, usd_per_1000: float) -> RunResult:
    met = round(1000 * attainment)
    return RunResult(1000, met, machines=TierUse(usd=usd_per_1000 * met / 1000))
