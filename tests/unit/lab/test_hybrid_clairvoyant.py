"""The clairvoyant's cost: the least there is, by trying everything where that can be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.clock import HOUR_NS, MINUTE_NS, SECOND_NS
from headgate.lab.experiments.hybrid.environment import SMALL, HybridEnvironment
from headgate.lab.experiments.hybrid.offline_optimum import Clairvoyant, clairvoyant

# Five requests fit into a step of 1.8 s: what is carried is then whole, and nothing is rounded.
WORLD = replace(SMALL, slo_ms=180, boot_ns=2 * SECOND_NS, start_ns=0)
PER_STEP = 5


def solve(world: HybridEnvironment, counts: Sequence[int]) -> Clairvoyant:
    """The cheapest way through so many arrivals in each step."""
    times_ns = np.repeat(np.arange(len(counts)) * world.slo_ns, counts)
    return clairvoyant(world, times_ns, len(counts) * world.slo_ns)


def cost_of(world: HybridEnvironment, counts: Sequence[int], levels: Sequence[int]) -> float:
    """What it costs to have so many instances in each step, worked out request by request."""
    usd, before, waiting = 0.0, levels[0], 0
    rent_usd = world.usd_per_hour / HOUR_NS
    for step, (count, level) in enumerate(zip(counts, levels, strict=True)):
        ready_ns = min(step * world.slo_ns, world.boot_ns + world.start_ns)
        usd += rent_usd * (level * world.slo_ns + max(0, level - before) * ready_ns)
        before, room = level, PER_STEP * level
        served = min(waiting, room)
        usd += (waiting - served) * world.usd_per_call
        waiting = count - min(count, room - served)
    return usd + waiting * world.usd_per_call


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=5, max_size=5))
def test_nothing_is_cheaper_and_something_costs_as_much(counts: list[int]) -> None:
    """Three instances could do two steps' arrivals in one, so more than three never help."""
    least_usd = min(cost_of(WORLD, counts, levels) for levels in product(range(4), repeat=5))
    assert solve(WORLD, counts).cost_usd == pytest.approx(least_usd, abs=1e-12)


def test_no_arrivals_cost_nothing() -> None:
    found = solve(WORLD, [0, 0, 0])
    assert (found.cost_usd, found.instances) == (0.0, (0, 0, 0))


def test_steady_load_is_for_instances_and_a_lone_burst_for_functions() -> None:
    steady = solve(SMALL, [11] * 200)  # just under two instances' worth
    assert steady.instances[1:] == (2,) * 199
    assert steady.functions_usd == 0.0
    lone = solve(SMALL, [0] * 100 + [60] + [0] * 99)
    assert lone.dedicated_usd == pytest.approx(0.0)
    assert lone.functions_usd == pytest.approx(60 * SMALL.usd_per_call)


def test_a_longer_boot_never_makes_it_cheaper() -> None:
    counts = [4] * 60 + [30] * 100 + [4] * 60
    costs = [
        solve(replace(SMALL, boot_ns=boot * MINUTE_NS), counts).cost_usd for boot in (0, 1, 3, 10)
    ]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_the_bill_is_that_of_the_way() -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(np.where(np.arange(300) % 150 < 60, 14.0, 3.0)).tolist()
    found = solve(WORLD, counts)
    assert found.cost_usd == pytest.approx(cost_of(WORLD, counts, found.instances))
    assert 0 < found.functions_usd < found.cost_usd
