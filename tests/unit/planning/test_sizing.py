"""The concurrency threshold of an instance type, and the memory size of a function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.config.prices import read_prices
from headgate.core.model import MIB, FaasOffering, InstanceType
from headgate.planning.capacity.latency_model import Characterisation, Point
from headgate.planning.capacity.sizing import (
    cheapest_size,
    faas_sizes,
    instance_capacity,
    knee_cores,
    knee_size,
    largest_concurrency,
)

PAPER = Characterisation.surrogate()


@pytest.fixture(scope="module")
def platform() -> FaasOffering:
    return read_prices().platforms[0]


def test_the_thresholds_of_the_paper() -> None:
    """Five requests at once on 2 cores within 200 ms, and five on 8 cores within 150 ms."""
    assert largest_concurrency(PAPER, 2, 200) == 5
    assert largest_concurrency(PAPER, 8, 150) == 5


def test_a_request_that_is_too_slow_alone_is_held_by_nothing() -> None:
    assert largest_concurrency(PAPER, 2, 35) == 0
    assert largest_concurrency(PAPER, 2, 37) == 1
    assert largest_concurrency(PAPER, 2, 37, overhead_ms=2) == 0


def test_no_more_than_were_measured() -> None:
    assert largest_concurrency(PAPER, 8, 1e9) == 20
    held = instance_capacity(PAPER, InstanceType("any", 8, 1 << 40, 1.0), 1e9, 0.99)
    assert (held.threshold, held.is_lower_bound, held.is_extrapolated) == (20, True, False)
    assert instance_capacity(
        PAPER, InstanceType("any", 16, 1 << 40, 1.0), 150, 0.99
    ).is_extrapolated


def test_the_quantile_counts() -> None:
    """The tail of what was measured: three at once at the median, one at the 99th percentile."""
    points = tuple(Point(2, c, 1, 12.0 * c, 10.0 * c, 20.0 * c, 30.0 * c, 100) for c in (1, 2, 3))
    tailed = Characterisation("f", "machine", points)
    assert largest_concurrency(tailed, 2, 40, quantile=0.5) == 3
    assert largest_concurrency(tailed, 2, 40, quantile=0.95) == 2
    assert largest_concurrency(tailed, 2, 40, quantile=0.99) == 1
    place = instance_capacity(tailed, InstanceType("any", 2, 1 << 40, 1.0), 40, 0.95)
    assert place.within == (0.995, 0.95)  # 30 ms and 60 ms at 99 %, 40 ms at 95 %
    assert place.times_ms == (12.0, 24.0)  # means


def test_what_has_no_room_holds_nothing(platform: FaasOffering) -> None:
    large = replace(PAPER, peak_memory_bytes=5000 * MIB)
    assert (
        instance_capacity(large, InstanceType("small", 8, 4000 * MIB, 1.0), 150, 0.99).threshold
        == 0
    )
    rows = faas_sizes(large, platform, 150)
    assert next(row.memory_bytes // MIB for row in rows if row.has_enough_memory) == 5120
    cheapest = cheapest_size(rows)
    assert cheapest is not None
    assert cheapest.memory_bytes == 5120 * MIB


def test_the_knee_of_the_paper(platform: FaasOffering) -> None:
    """Four cores; of the sizes, 6.5 GiB, at a price 35 % below that of the largest."""
    assert knee_cores(PAPER) == 4
    rows = faas_sizes(PAPER, platform, 150)
    knee = knee_size(rows)
    assert knee is not None
    assert knee.memory_bytes == 6656 * MIB
    assert 1 - knee.usd_per_s / rows[-1].usd_per_s == pytest.approx(0.35)
    assert knee.run_ms <= 1.05 * rows[-1].run_ms


def test_the_knee_gives_way_to_the_objective(platform: FaasOffering) -> None:
    """Where 5 % slower than the best is too slow, the smallest size that is fast enough."""
    rows = faas_sizes(PAPER, platform, 36.2)  # 26 ms and the network
    knee = knee_size(rows)
    assert knee is not None
    assert knee.memory_bytes == 7168 * MIB
    rows = faas_sizes(PAPER, platform, 30)
    assert knee_size(rows) is None
    assert cheapest_size(rows) is None


def test_of_sizes_at_one_price_the_faster_is_the_cheapest(platform: FaasOffering) -> None:
    """In steps of a second, all sizes take one step; without a price for memory all cost alike."""
    terms = replace(platform.terms, usd_per_gb_s=0.0)
    rows = faas_sizes(PAPER, replace(platform, terms=terms), 150)
    cheapest = cheapest_size(rows)
    assert cheapest is not None
    assert cheapest.time_ms == min(row.time_ms for row in rows)


@given(
    slo_ms=st.floats(1, 1_000),
    cores=st.floats(0.5, 16),
    quantile=st.sampled_from((0.5, 0.9, 0.99)),
)
def test_the_threshold_is_the_last_within(slo_ms: float, cores: float, quantile: float) -> None:
    held = largest_concurrency(PAPER, cores, slo_ms, quantile)
    assert held == 0 or PAPER.time_ms(cores, held, 1, quantile) <= slo_ms
    assert held == 20 or PAPER.time_ms(cores, held + 1, 1, quantile) > slo_ms
