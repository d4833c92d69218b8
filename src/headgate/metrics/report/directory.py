"""Everything about one run in one directory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from headgate.metrics.columns import RunColumns
from headgate.metrics.report.chrome_trace import write_chrome_trace
from headgate.metrics.report.html_report import Picture, run_page
from headgate.metrics.report.json_report import write_json
from headgate.metrics.report.parquet_report import write_parquet
from headgate.metrics.report.plots import run_plots
from headgate.metrics.report.style import save_png, to_svg
from headgate.metrics.summary import Summary


def write_report(
    directory: Path,
    run: RunColumns,
    summary: Summary,
    meta: Mapping[str, object],
    *,
    title: str = "Headgate report",
) -> tuple[Path, ...]:
    """Write all reports that the installed extras allow and return their paths.

    `summary.json`, `trace.json` and `report.html` always; `requests.parquet` with pyarrow; the
    plots, as PNG files and in the page, with matplotlib. The same run gives the same files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [
        write_json(directory / "summary.json", summary, meta),
        write_chrome_trace(directory / "trace.json", run),
    ]
    if find_spec("pyarrow") is not None:
        paths.append(write_parquet(directory / "requests.parquet", run))
    pictures = []
    if find_spec("matplotlib") is not None:
        for plot in run_plots(run):
            pictures.append(Picture(plot.caption, to_svg(plot.figure, plot.name)))
            paths.append(save_png(plot.figure, directory / f"{plot.name}.png"))
    else:
        meta = {**meta, "plots": "need matplotlib: pip install headgate[report]"}
    page = directory / "report.html"
    page.write_text(run_page(title, summary, meta, pictures), encoding="utf-8")
    return (page, *paths)
