"""The same comparison over several seeds: means, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite, nan
from statistics import fmean
from typing import Final

from headgate.metrics.confidence import mean_interval
from headgate.metrics.sheet import Column, Quantity, Sheet, format_column
from headgate.metrics.summary import Summary

_COLUMNS: Final[tuple[tuple[str, str, Quantity, Callable[[Summary], float]], ...]] = (
    ("met", "slo_attainment", "share", lambda summary: summary.slo_attainment),
    ("goodput", "goodput_rps", "rate", lambda summary: summary.goodput_rps),
    ("wait", "mean_wait_ms", "time_ms", lambda summary: summary.mean_wait_ms),
    ("p99", "p99_ms", "time_ms", lambda summary: summary.p99_ms),
    ("cold", "cold_request_share", "share", lambda summary: summary.cold_request_share),
    ("busy", "utilisation", "share", lambda summary: summary.utilisation),
    ("cost", "cost_usd", "usd", lambda summary: summary.cost_usd),
)


def spread_sheet(rows: Sequence[tuple[str, Sequence[Summary]]]) -> Sheet:
    """Return one row per policy: means over its seeds with half the 95 % interval."""
    columns = [format_column("", "text", [label for label, _ in rows])]
    for title, _, quantity, value in _COLUMNS:
        pairs = [_mean_and_half([value(summary) for summary in runs]) for _, runs in rows]
        columns.append(_column(title, quantity, pairs))
    return Sheet("Means over seeds, with half their 95 % interval", tuple(columns))


def spread_json(runs: Sequence[Summary]) -> dict[str, object]:
    """Return mean and half interval of what the sheet shows."""
    found: dict[str, object] = {}
    for _, name, _, value in _COLUMNS:
        mean, half = _mean_and_half([value(summary) for summary in runs])
        found[name] = {"mean": mean, "half_interval": half}
    return found


def mean_summary(runs: Sequence[Summary]) -> Summary:
    """Return a summary that has the means of what the comparison plots."""
    return replace(
        runs[0],
        slo_attainment=_mean([run.slo_attainment for run in runs]),
        mean_wait_ms=_mean([run.mean_wait_ms for run in runs]),
        cost_usd=_mean([run.cost_usd for run in runs]),
    )


def _mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return nan, nan
    interval = mean_interval(finite)
    return interval.mean, interval.high - interval.mean


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if isfinite(value)]
    return fmean(finite) if finite else nan


def _column(title: str, quantity: Quantity, pairs: Sequence[tuple[float, float]]) -> Column:
    """Means and halves in one unit and with the same decimals, side by side in one cell."""
    both = format_column(title, quantity, [number for pair in pairs for number in pair])
    means, halves = both.cells[::2], both.cells[1::2]
    width = max(map(len, halves))
    cells = (f"{mean} ±{half:>{width}}" for mean, half in zip(means, halves, strict=True))
    return Column(title, both.unit, tuple(cells))
