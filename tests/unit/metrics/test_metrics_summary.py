from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_runs import Row, busy_run, make_run, node

from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.metrics.summary import Summary, missed_at_start, summarise
from headgate.metrics.table import render, summary_table

EVERY_OUTCOME = [
    Row(0, 10, 50, Outcome.MET),
    Row(0, 20, 90, Outcome.MET),
    Row(0, 30, 150, Outcome.LATE),
    Row(5, None, 5, Outcome.REJECTED),
    Row(5, None, 105, Outcome.EXPIRED),
    Row(5, 45, 65, Outcome.FAILED),
    Row(5, None, 30, Outcome.CANCELLED),
]


def test_counts_and_shares_of_every_outcome() -> None:
    """Two of six that count were MET; of five admitted and not cancelled, two were MET."""
    summary = summarise(make_run(EVERY_OUTCOME))
    counts = [getattr(summary, name) for name in OUTCOME_NAMES]
    assert counts == [2, 1, 1, 1, 1, 1]
    assert summary.requests == 7
    assert summary.slo_attainment == pytest.approx(2 / 6)
    assert summary.admitted_kept == pytest.approx(2 / 5)


def test_misses_at_the_start_are_those_before_the_first_result() -> None:
    """Of the first pipeline two; the second was answered at once, the third never."""
    first = [
        Row(0, 0, 50, Outcome.LATE),
        Row(10, None, 10, Outcome.REJECTED),
        Row(20, None, 30, Outcome.CANCELLED),
        Row(30, 50, 60),
        Row(55, None, 55, Outcome.REJECTED),
    ]
    others = [Row(0, 0, 1, pipeline=1), Row(2, None, 2, Outcome.REJECTED, pipeline=1)]
    never = [Row(0, None, 0, Outcome.REJECTED, pipeline=2)]
    assert missed_at_start(make_run(first + others + never).requests) == 2
    assert missed_at_start(make_run([]).requests) == 0


def test_latency_of_answered_and_wait_of_started_requests() -> None:
    summary = summarise(make_run(EVERY_OUTCOME))
    assert summary.mean_ms == pytest.approx((50 + 90 + 150) / 3)
    assert (summary.p50_ms, summary.p90_ms, summary.p999_ms) == (90, 150, 150)
    assert summary.mean_wait_ms == pytest.approx((10 + 20 + 30 + 40) / 4)
    assert summary.p99_wait_ms == 40
    assert summary.makespan_ms == 150


def test_goodput_counts_only_responses_inside_the_window() -> None:
    """One MET inside the window, one exactly at its end (outside), one LATE inside, one after."""
    rows = [
        Row(0, 0, 1999),
        Row(1950, 1950, 2000),
        Row(0, 0, 500, Outcome.LATE),
        Row(1990, 1990, 2050),
    ]
    summary = summarise(make_run(rows, window_ms=2000, end_ms=2050))
    assert summary.goodput_rps == pytest.approx(0.5)
    assert summary.throughput_rps == pytest.approx(1.0)


def test_costs_and_utilisation_add_up() -> None:
    rows = [Row(0, 0, 10, cold=1), Row(0, 10, 20), Row(0, None, 0, Outcome.REJECTED)]
    resources = [node("a", busy=1000), node("b", up=3000, busy=0)]
    summary = summarise(make_run(rows, (), resources))
    assert (summary.cost_usage_usd, summary.cost_allocation_usd, summary.cost_usd) == (1, 2, 2)
    assert summary.cost_per_1000_met_usd == pytest.approx(1000.0)
    assert summary.utilisation == pytest.approx(0.25)
    assert [row.utilisation for row in summary.resources] == [1.0, 0.0]
    assert (summary.cold_starts, summary.loads) == (2, 4)
    assert summary.cold_request_share == pytest.approx(0.5)


def test_summaries_by_client() -> None:
    """The web client is served for 30 of 40 ms; the mobile one waits, and one is rejected."""
    rows = [
        Row(0, 0, 10, client=0),
        Row(0, 0, 20, client=0),
        Row(0, 10, 20, client=1),
        Row(0, None, 0, Outcome.REJECTED, client=1),
    ]
    web, mobile = summarise(make_run(rows)).clients
    assert (web.name, web.requests, web.met, web.slo_attainment) == ("web", 2, 2, 1.0)
    assert (web.mean_wait_ms, web.p99_ms, web.service_share) == (0, 20, 0.75)
    assert (mobile.requests, mobile.slo_attainment, mobile.mean_wait_ms) == (2, 0.5, 10)
    assert (web.admitted, web.admitted_kept, mobile.admitted, mobile.admitted_kept) == (2, 1, 1, 1)
    assert (web.pace, mobile.pace) == (1.0, 0.25)  # half speed, and half of the requests rejected


def test_promises_by_pipeline() -> None:
    """One of two admitted requests was kept; both would have been rejected, one was."""
    rows = [Row(0, 0, 10), Row(0, 0, 20, Outcome.LATE), Row(0, None, 0, Outcome.REJECTED)]
    run = make_run(rows)
    would_reject = np.array([1, 1, 0], np.int8)
    run = replace(
        run,
        requests=replace(run.requests, would_reject=would_reject),
        admission_margins=(0.25, 3.0),
    )
    summary = summarise(run)
    classify, detect = summary.pipelines
    assert (classify.admitted, classify.admitted_kept, classify.would_reject) == (2, 0.5, 2)
    assert (classify.admission_margin, detect.admission_margin) == (0.25, 3.0)
    assert math.isnan(detect.admitted_kept) and summary.clients[0].admission_margin is None
    assert summary.would_reject == 2
    assert "would reject" in render(summary_table(summary))
    assert "would reject" not in render(summary_table(summarise(make_run(rows))))


def test_starving_a_client_is_unfair_even_if_it_never_waits() -> None:
    """Rejecting all requests of one of two clients gives the worst index of two."""
    rows = [Row(0, 0, 10), Row(0, None, 0, Outcome.REJECTED, client=1)]
    assert summarise(make_run(rows)).fairness == pytest.approx(0.5)
    assert summarise(make_run([Row(0, 0, 10), Row(0, 0, 30, client=1)])).fairness == 1.0


def test_summary_of_an_empty_run() -> None:
    """Without requests there is no attainment and no latency: nothing was in time."""
    summary = summarise(make_run([]))
    assert math.isnan(summary.slo_attainment) and math.isnan(summary.admitted_kept)
    assert summary.fairness == 1
    assert math.isnan(summary.p99_ms)
    assert math.isnan(summary.cost_per_1000_met_usd)
    assert (summary.goodput_rps, summary.utilisation, summary.makespan_ms) == (0, 0, 0)
    assert summarise(make_run([], window_ms=0, end_ms=0)).goodput_rps == 0


def test_json_is_strict() -> None:
    """No NaN, which strict JSON parsers refuse, and no numpy types."""
    for run in (busy_run(), make_run([])):
        document = summarise(run).to_json()
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        assert set(document) == set(Summary.__dataclass_fields__)
    assert summarise(make_run([])).to_json()["p99_ms"] is None


rows = st.lists(
    st.builds(
        lambda arrival, wait, service, outcome, group, client: Row(
            arrival,
            arrival + wait if outcome in (0, 1, 4) else None,
            arrival + wait + service,
            outcome,
            group,
            client,
        ),
        st.integers(0, 900),
        st.integers(0, 300),
        st.integers(0, 300),
        st.integers(0, 5),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(rows)
def test_counts_and_shares_add_up(requests: list[Row]) -> None:
    summary = summarise(make_run(requests, clients=("a", "b", "c")))
    assert sum(getattr(summary, name) for name in OUTCOME_NAMES) == summary.requests
    if not math.isnan(summary.admitted_kept):
        assert summary.slo_attainment <= summary.admitted_kept <= 1
    assert summary.goodput_rps <= summary.throughput_rps
    assert 1 / 3 - 1e-9 <= summary.fairness <= 1
    for groups in (summary.clients, summary.pipelines):
        assert sum(group.requests for group in groups) == summary.requests
        assert sum(group.met for group in groups) == summary.met
        assert sum(group.service_share for group in groups) == pytest.approx(1) or all(
            group.service_share == 0 for group in groups
        )
        worst_ms = [group.p99_ms for group in groups if not math.isnan(group.p99_ms)]
        assert not worst_ms or summary.p99_ms <= max(worst_ms)


@given(rows, st.integers(0, 10_000))
def test_a_constant_shift_changes_no_latency(requests: list[Row], shift: int) -> None:
    later = [
        replace(
            row,
            arrival=row.arrival + shift,
            started=None if row.started is None else row.started + shift,
            finished=row.finished + shift,
        )
        for row in requests
    ]
    before = summarise(make_run(requests, window_ms=0, clients=("a", "b", "c"))).to_json()
    after = summarise(make_run(later, window_ms=0, clients=("a", "b", "c"))).to_json()
    assert before == after


def test_many_groups_are_split_as_few_are() -> None:
    """More groups than fit the 16-bit sort key take another path to the same rows."""
    requests = [Row(0, 0, 10 + i, client=70_000 - i) for i in range(5)]
    names = [str(index) for index in range(70_001)]
    clients = summarise(make_run(requests, clients=names)).clients
    assert [clients[70_000 - i].p99_ms for i in range(5)] == [10, 11, 12, 13, 14]
