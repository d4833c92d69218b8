from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_runs import Row, Span, busy_run, make_run, node

from headgate.core.clock import MILLISECOND_NS
from headgate.core.states import Outcome
from headgate.metrics.columns import RunColumns
from headgate.metrics.report.chrome_trace import assign_tracks
from headgate.metrics.report.plots import (
    TimeBins,
    arrival_rps,
    busy_share,
    goodput_rps,
    outcomes_by_arrival,
    time_bins,
)

FOUR = TimeBins(250 * MILLISECOND_NS, 4)


def test_outcomes_and_rates_per_bin() -> None:
    rows = [
        Row(0, 0, 260),
        Row(249, 249, 400, Outcome.LATE),
        Row(250, None, 250, Outcome.REJECTED),
        Row(999, 999, 1000),
    ]
    run = make_run(rows)
    counts = outcomes_by_arrival(run, FOUR)
    assert counts[Outcome.MET].tolist() == [1, 0, 0, 1]
    assert counts[Outcome.LATE].tolist() == [1, 0, 0, 0]
    assert counts[Outcome.REJECTED].tolist() == [0, 1, 0, 0]
    assert arrival_rps(run, FOUR).tolist() == [8, 4, 0, 4]
    assert goodput_rps(run, FOUR).tolist() == [0, 4, 0, 4]


def test_bins_cover_the_run() -> None:
    run = busy_run()
    bins = time_bins(run)
    assert bins.edges_ns[-1] >= run.end_ns
    assert int(outcomes_by_arrival(run, bins).sum()) == len(run.requests)


@pytest.mark.parametrize(
    ("spans", "up", "busy", "expected"),
    [
        # One span over a bin and a half.
        ([Span(0, 125, 500)], 1000, 375, [0.5, 1, 0, 0]),
        # Two slots, both at work in the second bin only.
        ([Span(0, 0, 500), Span(0, 250, 500)], 1000, 375, [0.5, 1, 0, 0]),
        # A serverless pool that had two instances on average, one of them at work.
        ([Span(0, 0, 1000)], 2000, 1000, [0.5, 0.5, 0.5, 0.5]),
        ([], 1000, 0, [0, 0, 0, 0]),
    ],
)
def test_busy_share(spans: list[Span], up: int, busy: int, expected: list[float]) -> None:
    run = make_run([], spans, [node(up=up, busy=busy)])
    assert busy_share(run, FOUR)[0] == pytest.approx(np.array(expected))


spans_strategy = st.lists(
    st.builds(
        lambda at, start, length: Span(at, start, start + length),
        st.integers(0, 2),
        st.integers(0, 500),
        st.integers(0, 400),
    ),
    max_size=40,
)


def _run_of(spans: list[Span]) -> RunColumns:
    return make_run([], spans, [node(str(index), busy=10**9) for index in range(3)])


@given(spans_strategy)
def test_work_in_bins_is_the_work_of_the_spans(spans: list[Span]) -> None:
    """With nodes so busy that nothing is clipped, the shares times the bin add up to the work."""
    spans = [span for span in spans if span.node == 0][:1]
    share = busy_share(_run_of(spans), FOUR)
    assert share.sum() * 250 == pytest.approx(sum(span.end - span.start for span in spans))


@given(spans_strategy, st.integers(0, 50))
def test_spans_of_one_track_never_overlap(spans: list[Span], limit: int) -> None:
    columns = _run_of(spans).spans
    tracks = assign_tracks(columns, limit)
    assert len(tracks.rows) == min(limit, len(spans))
    assert tracks.left_out == len(spans) - len(tracks.rows)
    free_ns: dict[tuple[int, int], int] = {}
    for row, track in zip(tracks.rows.tolist(), tracks.tracks, strict=True):
        key = (int(columns.node[row]), track)
        assert free_ns.get(key, 0) <= columns.start_ns[row]
        free_ns[key] = int(columns.end_ns[row])


def test_a_node_with_one_slot_has_one_track() -> None:
    tracks = assign_tracks(_run_of([Span(0, 0, 10), Span(0, 10, 20), Span(1, 5, 9)]).spans, 10)
    assert set(tracks.tracks) == {0}
