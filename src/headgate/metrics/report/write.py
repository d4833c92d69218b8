"""Writes the report of one run into a directory: JSON, Chrome trace, Parquet, plots and HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.states import OUTCOME_NAMES
from headgate.metrics.columns import NOWHERE, Int8, Int32, Int64, RunColumns
from headgate.metrics.report.chrome_trace import write_chrome_trace
from headgate.metrics.report.html import Picture, Tile, html_page, summary_tiles
from headgate.metrics.report.plots import run_plots
from headgate.metrics.report.style import Plot, save_png, to_svg
from headgate.metrics.summary import Summary
from headgate.metrics.table import ReportTable, group_table, resource_table, summary_table

if TYPE_CHECKING:
    import pyarrow

_ROW_GROUP: Final = 1 << 20  # rows written at a time: bounds the memory


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
    """Return these rows of the requests as an Arrow record batch."""
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
    tiles: Iterable[Tile],
    plots: Iterable[Plot],
    tables: Iterable[ReportTable],
) -> list[Path]:
    """Write `report.html` and its plots as PNG files; return the paths, the page first.

    Plots are drawn only if matplotlib is installed: `plots` should be a generator.
    """
    pictures: list[Picture] = []
    page = directory / "report.html"
    paths = [page]
    if find_spec("matplotlib") is not None:
        for plot in plots:
            pictures.append(Picture(plot.caption, to_svg(plot.figure, plot.name)))
            paths.append(save_png(plot.figure, directory / f"{plot.name}.png"))
    else:
        meta = {**meta, "plots": "need matplotlib: pip install headgate[report]"}
    page.write_text(html_page(title, meta, tiles, pictures, tables), encoding="utf-8")
    return paths
