"""The HTML report of the demonstration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.lab.demo.hybrid import DemoResult
from headgate.lab.figures import draw_responses
from headgate.lab.harness import RunResult
from headgate.metrics.format import percent
from headgate.metrics.report.style import Plot, new_figure, style_axes
from headgate.metrics.report.write import write_page
from headgate.metrics.table import Column, ReportTable, rows_table
from headgate.profiling.report import profile_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, str]


def run_rows(result: DemoResult) -> list[Row]:
    """Return rows per policy: predicted, live, and simulated with the live run's times."""
    return [
        _row(run.policy.label, source, run_result)
        for run in result.runs
        for source, run_result in (
            ("predicted", run.predicted),
            ("live", run.live),
            ("simulated", run.simulated),
        )
        if run_result is not None
    ]


def write_demo_page(result: DemoResult, plan_sentences: Sequence[str], directory: Path) -> Path:
    """Write `report.html`, and its plots if matplotlib is installed; return its path."""
    planned = result.planned
    meta: dict[str, object] = {
        "machine": planned.scale.measured.device,
        "request size": f"{planned.scale.sessions} sessions",
        "SLO": f"{planned.scale.slo_ms:g} ms",
    }
    tiles = {
        f"SLO attainment, {run.policy.label}": percent(run.live.attainment)
        for run in result.runs
        if run.live is not None
    }
    tables = [
        _table("Runs", run_rows(result)),
        rows_table(check_rows(result), "Live, simulated and planned"),
        _table("The plan", [{"": sentence} for sentence in plan_sentences]),
    ]
    title = "Hybrid serving on this machine"
    return write_page(directory, title, meta, tiles, _plots(result), tables)[0]


def check_rows(result: DemoResult) -> list[dict[str, object]]:
    """Return rows per check that live, simulated and planned results agree."""
    return [
        {"claim": c.claim, "expected": c.expected, "measured": c.measured, "holds": c.holds}
        for c in result.checks
    ]


def _plots(result: DemoResult) -> Iterator[Plot]:
    scale = result.planned.scale
    yield Plot("profile", "Profile", profile_figure(scale.measured, scale.slo_ms))
    yield Plot("runs", "Live requests; late ones are red", response_figure(result))


def response_figure(result: DemoResult) -> Figure:
    """Plot the response time of every request, a panel per live run."""
    live_runs = [(run.policy.label, run.live) for run in result.runs if run.live is not None]
    figure = new_figure(2.2 * len(live_runs))
    panels = figure.subplots(len(live_runs), 1, sharex=True, sharey=True, squeeze=False)
    for axes, (label, live) in zip(panels[:, 0], live_runs, strict=True):
        draw_responses(axes, live.times, result.planned.scale.slo_ms)
        style_axes(axes, title=label, x_label="s", y_label="ms")
    return figure


def _row(label: str, source: str, result: RunResult) -> Row:
    return {
        "": label,
        "source": source,
        "in time": f"{result.attainment:.1%}",
        "p50 ms": f"{result.times.percentile_ms(0.5):.0f}",
        "p99 ms": f"{result.times.percentile_ms(0.99):.0f}",
        "unserved": str(result.unserved),
        "to functions": f"{result.on_functions:.1%}",
        "cold": str(result.functions.cold_starts),
        "functions $/1000": f"{1000 * result.functions.usd / result.requests:.5f}",
    }


def _table(title: str, rows: Sequence[Row]) -> ReportTable:
    return ReportTable(
        title,
        tuple(
            Column(key, "", tuple(row[key] for row in rows), is_text=key in ("", "source"))
            for key in rows[0]
        ),
    )
