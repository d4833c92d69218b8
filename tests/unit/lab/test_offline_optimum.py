"""The clairvoyant's cost, compared with an exhaustive search in small cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.clock import HOUR_NS, MINUTE_NS, SECOND_NS
from headgate.lab.experiments.hybrid_renting.environment import SMALL, InstanceSetting
from headgate.lab.experiments.hybrid_renting.offline_optimum import Clairvoyant, clairvoyant

# Five requests fit into a step of 1.8 s: the backlog is a whole number, and nothing is rounded.
ENVIRONMENT = replace(SMALL, slo_ms=180, boot_ns=2 * SECOND_NS, start_ns=0)
PER_STEP = 5


def solve(setting: InstanceSetting, counts: Sequence[int]) -> Clairvoyant:
    """Return the clairvoyant optimum for the arrivals of each step."""
    times_ns = np.repeat(np.arange(len(counts)) * setting.slo_ns, counts)
    return clairvoyant(setting, times_ns, len(counts) * setting.slo_ns)


def cost_of(setting: InstanceSetting, counts: Sequence[int], levels: Sequence[int]) -> float:
    """Return the cost of given numbers of instances per step, counted request by request."""
    usd, before, waiting = 0.0, levels[0], 0
    rent_usd = setting.usd_per_hour / HOUR_NS
    for step, (count, level) in enumerate(zip(counts, levels, strict=True)):
        ready_ns = min(step * setting.slo_ns, setting.boot_ns + setting.start_ns)
        usd += rent_usd * (level * setting.slo_ns + max(0, level - before) * ready_ns)
        before, room = level, PER_STEP * level
        served = min(waiting, room)
        usd += (waiting - served) * setting.usd_per_call
        waiting = count - min(count, room - served)
    return usd + waiting * setting.usd_per_call


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=5, max_size=5))
def test_clairvoyant_cost_is_the_minimum(counts: list[int]) -> None:
    """Three instances serve the arrivals of two steps in one, so more than three never help."""
    least_usd = min(cost_of(ENVIRONMENT, counts, levels) for levels in product(range(4), repeat=5))
    assert solve(ENVIRONMENT, counts).cost_usd == pytest.approx(least_usd, abs=1e-12)


def test_no_arrivals_cost_nothing() -> None:
    results = solve(ENVIRONMENT, [0, 0, 0])
    assert (results.cost_usd, results.instances) == (0.0, (0, 0, 0))


def test_steady_load_uses_instances_and_a_single_burst_functions() -> None:
    steady = solve(SMALL, [11] * 200)  # just under the capacity of two instances
    assert steady.instances[1:] == (2,) * 199
    assert steady.functions_usd == 0.0
    lone = solve(SMALL, [0] * 100 + [60] + [0] * 99)
    assert lone.dedicated_usd == pytest.approx(0.0)
    assert lone.functions_usd == pytest.approx(60 * SMALL.usd_per_call)


def test_longer_boot_never_lowers_the_cost() -> None:
    counts = [4] * 60 + [30] * 100 + [4] * 60
    costs = [
        solve(replace(SMALL, boot_ns=boot * MINUTE_NS), counts).cost_usd for boot in (0, 1, 3, 10)
    ]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_cost_is_that_of_the_returned_instances() -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(np.where(np.arange(300) % 150 < 60, 14.0, 3.0)).tolist()
    results = solve(ENVIRONMENT, counts)
    assert results.cost_usd == pytest.approx(cost_of(ENVIRONMENT, counts, results.instances))
    assert 0 < results.functions_usd < results.cost_usd
