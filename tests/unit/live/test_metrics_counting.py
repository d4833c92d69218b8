"""Counting is exact, bounded and cheap."""

from __future__ import annotations

from collections import Counter
from time import process_time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from metrics_rig import ended_call, small_app

from headgate.core.clock import MILLISECOND_NS
from headgate.core.states import Outcome, Rejection
from headgate.live.telemetry.metrics import REASONS_MAX, ROWS_MAX, Histogram, Metrics


def counts(metrics: Metrics) -> Counter[tuple[str, str, str, int]]:
    metrics.fold()
    return Counter(
        {
            (model.name, tenant, reason, outcome): count
            for count, model, tenant, reason, _, outcome in metrics.counted()
        }
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("resnet", "echo")),
            st.sampled_from(("ann", "bob")),
            st.integers(Outcome.MET, Outcome.CANCELLED),
        ),
        max_size=60,
    ),
    st.integers(1, 7),
)
def test_nothing_is_lost_or_counted_twice(rows: list[tuple[str, str, int]], every: int) -> None:
    """However scrapes and requests alternate."""
    metrics = Metrics(small_app())
    for number, (model, tenant, outcome) in enumerate(rows):
        metrics.settled(ended_call(outcome, model=model, tenant=tenant))
        if number % every == 0:
            metrics.fold()
    assert counts(metrics) == Counter((model, tenant, "", o) for model, tenant, o in rows)


def test_full_buffer_is_folded() -> None:
    metrics = Metrics(small_app())
    call = ended_call(Outcome.MET, execute_ms=1)
    for _ in range(2 * ROWS_MAX + 3):
        metrics.settled(call)
    assert counts(metrics) == {("resnet", "ann", "", Outcome.MET): 2 * ROWS_MAX + 3}
    assert metrics.models[0].execute.counts.sum() == 2 * ROWS_MAX + 3


def test_reasons_are_bounded() -> None:
    """A policy that puts numbers into its reasons does not exhaust the memory of the scraper."""
    metrics = Metrics(small_app())
    for number in range(3 * REASONS_MAX):
        call = ended_call(Outcome.REJECTED, reason=f"too late by {number} ms")
        metrics.settled(call)
    observed = counts(metrics)
    assert len(observed) == REASONS_MAX - 1
    assert sum(observed.values()) == 3 * REASONS_MAX
    assert observed["resnet", "ann", "other", Outcome.REJECTED] == 2 * REASONS_MAX + 2


def test_only_rejections_have_a_reason_label() -> None:
    metrics = Metrics(small_app())
    metrics.settled(ended_call(Outcome.FAILED, reason="resnet: it raised"))
    metrics.settled(ended_call(Outcome.REJECTED, reason=Rejection.UNFAIR))
    assert {reason for _, _, reason, _ in counts(metrics)} == {"", Rejection.UNFAIR}


def test_arrival_rate_is_a_mean_over_ten_seconds() -> None:
    metrics = Metrics(small_app())
    for at_ms in range(0, 30_000, 50):
        metrics.settled(ended_call(Outcome.MET, at_ms=at_ms))
    metrics.fold()
    model = metrics.models[0]
    assert model.arrival_rps(30_000 * MILLISECOND_NS) == 20
    assert model.arrival_rps(35_000 * MILLISECOND_NS) == 12
    assert model.arrival_rps(60_000 * MILLISECOND_NS) == 0
    assert len(model.arrivals) <= 20, "only the recent past is kept"


@given(st.lists(st.integers(-30, 30)), st.lists(st.integers(-25, 25), min_size=1, unique=True))
def test_histogram_counts_values_up_to_each_bound(values: list[int], bounds: list[int]) -> None:
    histogram = Histogram(sorted(bounds))
    histogram.add(np.array(values, np.int64))
    for bound, count in histogram.cumulative(unit=1):
        assert count == sum(value <= bound for value in values)
    assert histogram.total == sum(values)


def test_cost_per_request() -> None:
    """Well below two microseconds; the bound is loose, for busy machines."""
    metrics = Metrics(small_app())
    call = ended_call(Outcome.MET, queue_ms=1, execute_ms=2)
    costs_s = []
    for _ in range(5):
        began = process_time()
        for _ in range(2 * ROWS_MAX):
            metrics.settled(call)
        costs_s.append((process_time() - began) / (2 * ROWS_MAX))
    assert min(costs_s) < 3e-6
