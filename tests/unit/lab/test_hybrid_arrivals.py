"""Arrivals of the hybrid experiments: scaled to a peak, or generated with given statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.lab.experiments.hybrid_renting.environment import (
    PEAK_STEP_NS,
    TRACES,
    TraceSource,
    busiest_per_s,
    draw_arrivals,
)
from headgate.lab.experiments.hybrid_traces import traces_directory

NAMES = [trace.name for trace in TRACES]
HUGE_PER_S = 1_000.0  # thinning hides dispersion; this rate is high enough to measure it


@pytest.mark.parametrize("trace", TRACES, ids=NAMES)
def test_generated_arrivals_resemble_the_trace(trace: TraceSource) -> None:
    """The dispersion due to rate changes grows with the scale; the Poisson part does not."""
    arrivals = draw_arrivals(trace, trace.peak_per_s, None, seed=1)
    counts = np.bincount(arrivals.times_ns // PEAK_STEP_NS, minlength=trace.length_s // 10)
    idc = counts.var() / counts.mean()
    scale = arrivals.mean_rate_per_s / trace.mean_per_s
    assert arrivals.duration_ns == trace.length_s * SECOND_NS
    assert 0.75 < scale < 2.0
    assert 0.75 < idc / (1 + (trace.idc_10s - 1) * scale) < 1.35


@pytest.mark.parametrize("trace", TRACES, ids=NAMES)
def test_peak_rate_is_as_requested(trace: TraceSource) -> None:
    for peak_per_s in (22.0, HUGE_PER_S):
        arrivals = draw_arrivals(trace, peak_per_s, None)
        noise = 4 * (peak_per_s / 10) ** 0.5 / peak_per_s
        assert busiest_per_s(arrivals) == pytest.approx(peak_per_s, rel=max(noise, 0.02))


def test_seeds_differ_and_repeat() -> None:
    first, again, other = (draw_arrivals.__wrapped__(TRACES[5], 22.0, None, s) for s in (0, 0, 1))
    assert first.times_ns.tolist() == again.times_ns.tolist()
    assert len(first) != len(other)


def test_directory_without_traces_is_an_error(tmp_path: Path) -> None:
    assert traces_directory({"HEADGATE_TRACES": str(tmp_path)}) == tmp_path
    with pytest.raises(ConfigError, match="no such trace"):
        draw_arrivals(TRACES[0], 22.0, tmp_path)


def test_window_is_cut_out_of_the_trace(tmp_path: Path) -> None:
    """The file has one row per second; only rows of the window are used, bursts included."""
    trace = TraceSource("toy", TRACES[0].file, 100, 50, 0, 0, 0, 0)
    rows = [1000] * 100 + [10] * 40 + [100] * 10 + [1000] * 100
    path = tmp_path / f"{trace.file}.csv"
    path.write_text("rps\n" + "\n".join(map(str, rows)), encoding="utf-8")
    arrivals = draw_arrivals(trace, 100.0, tmp_path)
    assert len(arrivals) == 40 * 10 + 10 * 100
    assert arrivals.duration_ns == 50 * SECOND_NS
