"""What the demonstration leaves behind: one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.lab.demo.hybrid import DemoResult
from headgate.lab.demo.runs import DemoRunResult
from headgate.metrics.report.html import Picture, Tile, html_page
from headgate.metrics.report.style import BLUE, INK, VERMILION, new_figure, style_axes, to_svg
from headgate.metrics.table import Column, ReportTable, format_value
from headgate.profiling.report import profile_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, str]


def run_rows(shown: DemoResult) -> list[Row]:
    """Each way of serving: as foretold, live, and as simulated with the live run's times."""
    return [
        _row(run.way.label, how, seen)
        for run in shown.runs
        for how, seen in (
            ("foretold", run.foretold),
            ("live", run.live),
            ("simulated", run.simulated),
        )
        if seen is not None
    ]


def write_page(shown: DemoResult, words: Sequence[str], directory: Path) -> Path:
    """Write `report.html`, with plots where matplotlib is there; return where it is."""
    planned = shown.planned
    meta: dict[str, object] = {
        "machine": planned.scale.measured.device,
        "a request": f"{planned.scale.sessions} sessions",
        "objective": f"{planned.scale.slo_ms:g} ms",
    }
    pictures: list[Picture] = []
    if find_spec("matplotlib") is not None:
        profiled = profile_figure(planned.scale.measured, planned.scale.slo_ms)
        pictures.append(Picture("What was measured", to_svg(profiled, "profile")))
        drawn = response_figure(shown)
        pictures.append(Picture("Each request, live: late ones are red", to_svg(drawn, "runs")))
    else:
        meta["plots"] = "need matplotlib: pip install headgate[report]"
    tiles = [
        Tile(format_value("share", run.live.attainment), f"in time, {run.way.label}")
        for run in shown.runs
        if run.live is not None
    ]
    checks = [
        {
            "claim": c.claim,
            "expected": str(c.expected),
            "was": str(c.measured),
            "holds": "yes" if c.holds else "no",
        }
        for c in shown.checks
    ]
    sheets = [
        _sheet("Runs", run_rows(shown)),
        _sheet("Live, simulated and planned", checks),
        _sheet("The plan", [{"": sentence} for sentence in words]),
    ]
    page = directory / "report.html"
    text = html_page("Hybrid serving on this machine", meta, tiles, pictures, sheets)
    page.write_text(text, encoding="utf-8")
    return page


def response_figure(shown: DemoResult) -> Figure:
    """Plot the response time of every request, one live run above the other."""
    lived = [(run.way.label, run.live) for run in shown.runs if run.live is not None]
    figure = new_figure(2.2 * len(lived))
    panels = figure.subplots(len(lived), 1, sharex=True, sharey=True, squeeze=False)
    for axes, (label, live) in zip(panels[:, 0], lived, strict=True):
        for rows, colour in ((live.is_met, BLUE), (~live.is_met, VERMILION)):
            axes.scatter(live.arrival_s[rows], live.latency_ms[rows], s=6, color=colour)
        axes.axhline(shown.planned.scale.slo_ms, color=INK, linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        style_axes(axes, title=label, x_label="s", y_label="ms")
    return figure


def _row(label: str, how: str, seen: DemoRunResult) -> Row:
    return {
        "": label,
        "how": how,
        "in time": f"{seen.attainment:.1%}",
        "p50 ms": f"{seen.percentile_ms(0.5):.0f}",
        "p99 ms": f"{seen.percentile_ms(0.99):.0f}",
        "unserved": str(seen.unserved),
        "to functions": f"{seen.spilled:.1%}",
        "cold": str(seen.cold_starts),
        "their $/1000": f"{seen.usd_per_1000:.5f}",
    }


def _sheet(title: str, rows: Sequence[Row]) -> ReportTable:
    return ReportTable(
        title,
        tuple(
            Column(key, "", tuple(row[key] for row in rows), is_text=key in ("", "how", "claim"))
            for key in rows[0]
        ),
    )
