"""The harness: what is counted, where requests ran, and which setting is best."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.lab.experiments._hybrid_app import SURROGATE
from headgate.lab.experiments.hybrid_waves.environment import BurstPhase, BurstScenario, setting_of
from headgate.lab.harness import (
    Environment,
    PolicyCase,
    RunResult,
    TierUse,
    best_setting,
    lognormal_truth,
    request_times,
)

SPILL = PolicyCase.of("threshold", threshold=5)
PHASES = (BurstPhase(4 * SECOND_NS, is_bursty=False), BurstPhase(6 * SECOND_NS, is_bursty=True))


def bursts() -> Environment:
    return BurstScenario(setting_of(SURROGATE, 2), 6656, PHASES).environment(0)


def test_requests_before_the_lead_in_are_not_counted() -> None:
    """Four calm waves of five requests come first; use and cost are those of the whole run."""
    environment = bursts()
    counted = environment.run(SPILL, 0, keeps_times=True)
    whole = replace(environment, since_ns=0).run(SPILL, 0)
    assert whole.requests == counted.requests + 4 * 5
    assert whole.cost_usd == counted.cost_usd > 0
    assert counted.times.arrival_s[0] == 0.0
    assert len(whole.times.arrival_s) == 0, "columns are kept if asked"


def test_result_is_split_by_where_requests_ran() -> None:
    run = bursts().simulate(SPILL, 0)
    times, _ = request_times(run)
    assert (times.on_machines ^ times.on_functions).all()
    for row in np.flatnonzero(times.on_functions):
        assert run.pools[run.requests.pool[row]] == "aws-lambda"
    result = bursts().run(SPILL, 0)
    assert result.machines.requests + result.functions.requests == result.requests
    assert result.machines.met + result.functions.met == result.met
    assert result.machines.attainment == 1.0 > result.functions.attainment
    assert result.cold_violations == result.violations > 0
    assert result.usd_per_1000_met == pytest.approx(1000 * result.cost_usd / result.met)


def test_result_without_requests_has_no_share() -> None:
    result = RunResult(0, 0)
    assert isnan(result.attainment) and isnan(result.usd_per_1000_met)
    assert isnan(TierUse().attainment)


def test_best_setting_is_the_first_of_equals() -> None:
    def result(met: int, usd: float) -> list[RunResult]:
        return [RunResult(100, met, machines=TierUse(usd=usd))]

    def cost(result: RunResult) -> float:
        return result.cost_usd

    assert best_setting({3: result(99, 2.0), 1: result(99, 2.0), 2: result(98, 0)}, 0.99, cost) == 3
    assert best_setting({1: result(50, 1.0), 2: result(60, 9.0)}, 0.99, cost) == 2


def test_settings_are_those_of_the_policy() -> None:
    assert (SPILL.label, PolicyCase.of("threshold", "five", threshold=5).label) == (
        "threshold",
        "five",
    )
    with pytest.raises(ConfigError, match="unknown policy"):
        PolicyCase("no_such_policy").build()


def test_equal_median_and_tail_are_exact_times() -> None:
    assert lognormal_truth(20.0, 20.0, 0.95).distribution == "exact"
    assert lognormal_truth(20.0, 30.0, 0.95).cv > 0
