"""Writes the report of one run into a directory: JSON, Chrome trace, Parquet, plots and HTML.

The HTML page is self-contained: key figures, plots, tables. No scripts, no external files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.states import OUTCOME_NAMES
from headgate.metrics.columns import NOWHERE, Int8, Int32, Int64, RunColumns
from headgate.metrics.format import ms, per_second, percent, usd
from headgate.metrics.report.chrome_trace import write_chrome_trace
from headgate.metrics.report.plots import run_plots
from headgate.metrics.report.style import Plot, save_png, to_svg
from headgate.metrics.summary import Summary
from headgate.metrics.table import ReportTable, group_table, resource_table, summary_table

if TYPE_CHECKING:
    import pyarrow

_ROWS_MAX: Final = 200  # rows of a table; all rows are in summary.json
_ROW_GROUP: Final = 1 << 20  # rows written at a time: bounds the memory


def summary_tiles(summary: Summary) -> dict[str, str]:
    """Return the key figures of a run, by name."""
    return {
        "SLO attainment": percent(summary.slo_attainment),
        "admitted kept": percent(summary.admitted_kept),
        "goodput": per_second(summary.goodput_rps),
        "latency p99": ms(summary.p99_ms),
        "mean wait": ms(summary.mean_wait_ms),
        "utilisation": percent(summary.utilisation),
        "cost": usd(summary.cost_usd),
        "per 1000 met": usd(summary.cost_per_1000_met_usd),
    }


def html_page(
    title: str,
    meta: Mapping[str, object],
    tiles: Mapping[str, str],
    pictures: Mapping[str, str],
    tables: Iterable[ReportTable],
) -> str:
    """Return a whole page. All text is escaped; only the pictures are inserted verbatim.

    `tiles` are the key figures by name, and `pictures` the `<svg>` elements by caption.
    """
    rendered = [_table_html(table) for table in tables] or [""]
    metadata = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in meta.items()
    )
    parts = (
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # The policy makes the browser enforce that the page loads nothing and runs nothing.
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1><dl>{metadata}</dl></header>",
        f'<main><section class="tiles">{"".join(starmap(_tile_html, tiles.items()))}</section>',
        f'<section class="plots">{"".join(starmap(_picture_html, pictures.items()))}</section>',
        f'<section class="tables">{rendered[0]}<div>{"".join(rendered[1:])}</div></section>',
        "</main></body></html>",
    )
    return "\n".join(parts) + "\n"


def _tile_html(name: str, value: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _picture_html(caption: str, svg: str) -> str:
    caption = escape(caption)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>\n"


def _table_html(table: ReportTable) -> str:
    if not table.rows:
        return ""
    classes = ["text" if column.is_text else "number" for column in table.columns]
    header = "".join(
        f'<th class="{kind}" scope="col">{escape(column.title)}'
        f"<small>{escape(column.unit)}</small></th>"
        for kind, column in zip(classes, table.columns, strict=True)
    )
    has_header = any(column.title for column in table.columns)
    body = "".join(f"<tr>{_row_html(classes, row)}</tr>\n" for row in table.rows[:_ROWS_MAX])
    hidden = len(table.rows) - _ROWS_MAX
    note = f"<p>{hidden:,} more rows are in summary.json</p>" if hidden > 0 else ""
    return (
        f'<div class="table"><h2>{escape(table.title)}</h2><table>'
        + (f"<thead><tr>{header}</tr></thead>" if has_header else "")
        + f"<tbody>{body}</tbody></table>{note}</div>\n"
    )


def _row_html(classes: Sequence[str], row: Sequence[str]) -> str:
    return "".join(
        f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(classes, row, strict=True)
    )


_STYLE: Final = """
:root { color-scheme: light dark; --page: #f4f6f8; --card: #fff; --ink: #1f2933;
  --muted: #5f6b7a; --line: #dfe4ea; font-size: 15px; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --card: #1d232b; --ink: #e6eaef; --muted: #9aa5b1; --line: #323b46; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 100rem; padding: 2rem 1.5rem 4rem; background: var(--page);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: break-word; }
h2 { margin: 0 0 .6rem; font-size: 1.05rem; }
dl { margin: .4rem 0 0; }
dl div { display: inline-block; margin-right: 1.6rem; }
dt, dd { display: inline; margin: 0; overflow-wrap: break-word; }
dt { color: var(--muted); margin-right: .45rem; }
section { margin-top: .8rem; }
.tiles, .tables { display: grid; gap: 0 .8rem; align-items: start; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); margin-top: 1.6rem; }
.tile, .table { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .9rem 1.1rem; margin-bottom: .8rem; min-width: 0; overflow-x: auto; }
.tile b { display: block; font-size: 1.25rem; line-height: 1.3; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { overflow-wrap: anywhere; }
.tile span, figcaption, small, p { color: var(--muted); font-size: .85rem; }
.plots { column-gap: .8rem; }
figure { margin: 0 0 .8rem; padding: .9rem; background: #fff; border: 1px solid var(--line);
  border-radius: 10px; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: #5f6b7a; margin-top: .4rem; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .25rem 0 .25rem 1.2rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; }
th small { display: block; font-weight: 400; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.text { text-align: left; }
@media (min-width: 48rem) {
  .tables { grid-template-columns: max-content minmax(0, 1fr); }
}
@media (min-width: 75rem) {
  .plots { columns: 2; }
}
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --muted: #444; --line: #bbb;
    font-size: 10px; }
  body { max-width: none; padding: 0; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  .plots { columns: 2; }
  .tables { display: block; }
  .table { overflow: visible; }
  .tile, tr { break-inside: avoid; }
}
"""


def write_json(path: Path, summary: Summary, meta: Mapping[str, object]) -> Path:
    """Write `{"meta": ..., "summary": ...}`; values of `meta` that JSON lacks become strings.

    `meta` says which run the summary describes.
    """
    document = {"meta": dict(meta), "summary": summary.to_json()}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, run: RunColumns) -> Path:
    """Write one row per request, for notebooks and SQL; unknown values are null. Needs pyarrow."""
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra, imported when it is asked for
    except ImportError:
        raise ConfigError("needs pyarrow: pip install headgate[parquet]", where=str(path)) from None
    schema = request_batch(run, slice(0, 0)).schema
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, len(run.requests), _ROW_GROUP):
            writer.write_batch(request_batch(run, slice(first, first + _ROW_GROUP)))
    return path


def request_batch(run: RunColumns, rows: slice) -> pyarrow.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415 - see write_parquet

    def instants(times_ns: Int64) -> pyarrow.Array:
        return pa.array(times_ns[rows], mask=times_ns[rows] == NEVER_NS)

    def names(index: Int8 | Int32, labels: tuple[str, ...]) -> pyarrow.Array:
        known = pa.array(index[rows], mask=index[rows] == NOWHERE)
        return pa.DictionaryArray.from_arrays(known, pa.array(labels, pa.string()))

    requests = run.requests
    columns = {
        "request": pa.array(np.arange(*rows.indices(len(requests)), dtype=np.int64)),
        "arrival_ns": instants(requests.arrival_ns),
        "started_ns": instants(requests.started_ns),
        "finished_ns": instants(requests.finished_ns),
        "deadline_ns": instants(requests.deadline_ns),
        "outcome": names(requests.outcome, OUTCOME_NAMES),
        "pipeline": names(requests.pipeline, run.pipelines),
        "client": names(requests.client, run.clients),
        "attempts": pa.array(requests.attempts[rows]),
        "cold": pa.array(requests.cold[rows].astype(np.bool_)),
        "would_reject": pa.array(requests.would_reject[rows].astype(np.bool_)),
        "pool": names(requests.pool, run.pools),
        "node": names(requests.node, tuple(use.name for use in run.resources)),
    }
    return pa.RecordBatch.from_pydict(columns)


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
    plots, as PNG files and in the page, with matplotlib. Equal runs give equal files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [
        write_json(directory / "summary.json", summary, meta),
        write_chrome_trace(directory / "trace.json", run),
    ]
    if find_spec("pyarrow") is not None:
        paths.append(write_parquet(directory / "requests.parquet", run))
    tables = (
        summary_table(summary),
        group_table("Pipelines", summary.pipelines),
        group_table("Clients", summary.clients),
        resource_table(summary.resources),
    )
    tiles = summary_tiles(summary)
    page, *plots = write_page(directory, title, meta, tiles, run_plots(run), tables)
    return (page, *paths, *plots)


def write_page(
    directory: Path,
    title: str,
    meta: Mapping[str, object],
    tiles: Mapping[str, str],
    plots: Iterable[Plot],
    tables: Iterable[ReportTable],
) -> list[Path]:
    """Write `report.html` and its plots as PNG files; return the paths, the page first.

    Plots are drawn only if matplotlib is installed: `plots` should be a generator.
    """
    pictures: dict[str, str] = {}
    page = directory / "report.html"
    paths = [page]
    if find_spec("matplotlib") is not None:
        for plot in plots:
            pictures[plot.caption] = to_svg(plot.figure, plot.name)
            paths.append(save_png(plot.figure, directory / f"{plot.name}.png"))
    else:
        meta = {**meta, "plots": "need matplotlib: pip install headgate[report]"}
    page.write_text(html_page(title, meta, tiles, pictures, tables), encoding="utf-8")
    return paths
