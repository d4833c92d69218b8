from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.workload.arrivals import Arrivals, RequestTerms, arrivals_at, is_constant
from headgate.workload.generators import poisson, stepped
from headgate.workload.transforms import (
    assign,
    mix,
    named,
    rescale_rate,
    scale_time,
    shift,
    superpose,
    window,
)


def small(*times_ns: int, duration_ns: int = 100) -> Arrivals:
    return arrivals_at(np.array(times_ns, dtype=np.int64), duration_ns)


def labelled(*rows: tuple[int, str, int]) -> Arrivals:
    """Return arrivals of (time, pipeline, items)."""
    names = tuple(dict.fromkeys(name for _, name, _ in rows))
    return Arrivals(
        np.array([time for time, _, _ in rows]),
        100,
        np.array([names.index(name) for _, name, _ in rows], dtype=np.int32),
        np.zeros(len(rows), dtype=np.int32),
        names,
        items=np.array([items for _, _, items in rows], dtype=np.int32),
    )


def rows_of(arrivals: Arrivals) -> list[tuple[int, str, int]]:
    names = [arrivals.pipelines[index] for index in arrivals.pipeline]
    return list(zip(arrivals.times_ns.tolist(), names, arrivals.sizes.tolist(), strict=True))


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
def test_rescaling_the_rate_keeps_the_shape_and_the_duration(factor: float) -> None:
    arrivals = stepped([20.0, 100.0, 20.0], 100 * SECOND_NS, 300 * SECOND_NS, seed=1)
    rescaled = rescale_rate(arrivals, factor, seed=2)
    steps = [np.bincount(a.times_ns // (100 * SECOND_NS)) for a in (arrivals, rescaled)]
    assert rescaled.duration_ns == arrivals.duration_ns
    assert steps[1] / steps[0] == pytest.approx([factor] * 3, rel=0.1)


def test_rescaling_by_one_changes_nothing() -> None:
    arrivals = labelled((1, "a", 3), (5, "b", 1))
    assert rows_of(rescale_rate(arrivals, 1.0, seed=0)) == rows_of(arrivals)


def test_copies_keep_their_names_and_precede_the_next_arrival() -> None:
    rescaled = rescale_rate(labelled((10, "a", 3), (50, "b", 1)), 3.0, seed=0)
    rows = rows_of(rescaled)
    assert [row[1:] for row in rows] == [("a", 3)] * 3 + [("b", 1)] * 3
    assert rows[0][0] == 10
    assert rows[3][0] == 50
    assert all(10 <= time < 50 for time, _, _ in rows[:3])


def test_thinning_keeps_arrivals_where_they_were() -> None:
    arrivals = poisson(100.0, 10 * SECOND_NS, seed=1)
    thinned = rescale_rate(arrivals, 0.5, seed=2)
    assert np.isin(thinned.times_ns, arrivals.times_ns).all()
    assert is_constant(thinned.pipeline)


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0, 2.5])
def test_superposing_keeps_shape_duration_and_the_share_of_each_pipeline(factor: float) -> None:
    times = stepped([20.0, 100.0, 20.0], 100 * SECOND_NS, 300 * SECOND_NS, seed=1)
    arrivals = assign(times, {"a": 5.0, "b": 1.0}, seed=3)
    more = superpose(arrivals, factor, seed=2)
    steps = [np.bincount(a.times_ns // (100 * SECOND_NS)) for a in (arrivals, more)]
    assert more.duration_ns == arrivals.duration_ns
    assert steps[1] / steps[0] == pytest.approx([factor] * 3, rel=0.1)
    counts = [np.bincount(a.pipeline) for a in (arrivals, more)]
    assert counts[1] == pytest.approx(factor * counts[0], abs=1)


def test_superposed_poisson_arrivals_are_poisson_and_copies_are_not() -> None:
    """The index of dispersion: the variance of the counts of a short time over their mean."""
    arrivals = poisson(40.0, 300 * SECOND_NS, seed=1)
    dispersion = {}
    for scaled in (superpose, rescale_rate):
        counts = np.bincount(scaled(arrivals, 3.0, seed=2).times_ns // (SECOND_NS // 5))
        dispersion[scaled.__name__] = counts.var() / counts.mean()
    assert dispersion["superpose"] == pytest.approx(1.0, abs=0.15)
    assert dispersion["rescale_rate"] > 2


def test_terms_of_requests_move_with_them() -> None:
    terms = RequestTerms(
        np.array([0, 7, 0]), np.array([0, 0, 9]), np.array([0.5, 0.0, 0.0]), np.array([1, 2, 3])
    )
    arrivals = replace(small(10, 20, 90), terms=terms)
    for moved in (superpose(arrivals, 2.0, seed=1), mix([arrivals, small(15)])):
        assert moved.terms is not None
        rows = zip(
            moved.terms.timeout_ns.tolist(),
            moved.terms.cancel_ns.tolist(),
            moved.terms.cost_usd.tolist(),
            moved.terms.payload_bytes.tolist(),
            strict=True,
        )
        assert set(rows) - {(0, 0, 0.0, 0)} == {(0, 0, 0.5, 1), (7, 0, 0.0, 2), (0, 9, 0.0, 3)}
    assert superpose(small(5), 1.0, seed=0).terms is None
    with pytest.raises(ConfigError, match="timeout_ns"):
        replace(small(1), terms=terms)


def test_scale_time_multiplies_times_and_duration() -> None:
    scaled = scale_time(small(0, 10, 99), 2.5)
    assert scaled.times_ns.tolist() == [0, 25, 248]
    assert scaled.duration_ns == 250


@given(st.lists(st.integers(0, 99), max_size=20), st.floats(1e-6, 1e6))
def test_scaled_arrivals_stay_in_the_window(times_ns: list[int], factor: float) -> None:
    assert len(scale_time(small(*sorted(times_ns)), factor)) == len(times_ns)


def test_shift_moves_the_window_too() -> None:
    assert shift(small(5), 20).times_ns.tolist() == [25]
    assert shift(small(5), 20).duration_ns == 120
    assert shift(small(5), -5).times_ns.tolist() == [0]
    with pytest.raises(ConfigError, match="before 0"):
        shift(small(5), -6)


def test_a_window_is_half_open_and_starts_at_zero() -> None:
    part = window(small(9, 10, 19, 20), 10, 20)
    assert part.times_ns.tolist() == [0, 9]
    assert part.duration_ns == 10


@pytest.mark.parametrize(("start_ns", "end_ns"), [(-1, 5), (5, 5), (5, 101)])
def test_an_invalid_window_is_refused(start_ns: int, end_ns: int) -> None:
    with pytest.raises(ConfigError, match="is not a valid window"):
        window(small(1), start_ns, end_ns)


def test_mixing_merges_names_and_keeps_the_order_of_ties() -> None:
    mixed = mix([labelled((5, "b", 2), (7, "a", 1)), named(small(5, 6, duration_ns=200), "a")])
    assert rows_of(mixed) == [(5, "b", 2), (5, "a", 1), (6, "a", 1), (7, "a", 1)]
    assert mixed.pipelines == ("b", "a")
    assert mixed.duration_ns == 200


def test_mixing_one_pipeline_keeps_constant_columns() -> None:
    mixed = mix([small(1, 2), small(3)])
    assert is_constant(mixed.pipeline)
    assert mixed.items is None


@given(st.lists(st.lists(st.integers(0, 99), max_size=10).map(sorted), min_size=1, max_size=4))
def test_mixing_loses_nothing(parts: list[list[int]]) -> None:
    mixed = mix([named(small(*times), f"p{index}") for index, times in enumerate(parts)])
    assert mixed.times_ns.tolist() == sorted(time for times in parts for time in times)
    for index, times in enumerate(parts):
        of_part = mixed.times_ns[mixed.pipeline == mixed.pipelines.index(f"p{index}")]
        assert of_part.tolist() == times


def test_assignment_follows_the_weights() -> None:
    arrivals = assign(
        poisson(1000.0, 20 * SECOND_NS, seed=1), {"a": 1, "b": 0, "c": 3}, {"x": 1, "y": 1}, seed=2
    )
    shares = np.bincount(arrivals.pipeline, minlength=3) / len(arrivals)
    assert shares == pytest.approx([0.25, 0, 0.75], abs=0.015)
    assert np.corrcoef(arrivals.pipeline, arrivals.client)[0, 1] == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("inf")}])
def test_invalid_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        assign(small(1), weights, seed=0)
