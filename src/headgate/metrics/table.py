"""Formatted tables of summaries, for the terminal and for the HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import nan
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headgate.metrics.format import Quantity, format_cell, format_values
from headgate.metrics.summary import GroupSummary, ResourceSummary, Summary

WIDE: Final = 10_000  # columns of text that goes to a file: it is not wrapped
_GAP: Final = 2  # blanks between two columns

# Title, quantity and attribute of each column.
Fields = tuple[tuple[str, Quantity, str], ...]
_GROUP: Final[Fields] = (
    ("", "text", "name"),
    ("requests", "count", "requests"),
    ("met", "share", "slo_attainment"),
    ("kept", "share", "admitted_kept"),
    ("wait", "time_ms", "mean_wait_ms"),
    ("p99", "time_ms", "p99_ms"),
    ("service", "share", "service_share"),
)
_RESOURCE: Final[Fields] = (
    ("", "text", "name"),
    ("pool", "text", "pool"),
    ("tier", "text", "tier"),
    ("up", "time_ms", "up_ms"),
    ("busy", "share", "utilisation"),
    ("cold starts", "count", "cold_starts"),
    ("loads", "count", "loads"),
    ("usage", "usd", "usage_usd"),
    ("allocation", "usd", "allocation_usd"),
)
_COMPARISON: Final[Fields] = (
    ("met", "share", "slo_attainment"),
    ("kept", "share", "admitted_kept"),
    ("goodput", "rate", "goodput_rps"),
    ("wait", "time_ms", "mean_wait_ms"),
    ("p99", "time_ms", "p99_ms"),
    ("cold", "count", "cold_starts"),
    ("busy", "share", "utilisation"),
    ("cost", "usd", "cost_usd"),
    ("per 1000", "usd", "cost_per_1000_met_usd"),
)
_SUMMARY: Final[Fields] = (
    ("requests", "count", "requests"),
    ("met", "count", "met"),
    ("late", "count", "late"),
    ("rejected", "count", "rejected"),
    ("would reject", "count", "would_reject"),
    ("expired", "count", "expired"),
    ("failed", "count", "failed"),
    ("cancelled", "count", "cancelled"),
    ("SLO attainment", "share", "slo_attainment"),
    ("admitted kept", "share", "admitted_kept"),
    ("goodput", "rate", "goodput_rps"),
    ("throughput", "rate", "throughput_rps"),
    ("latency mean", "time_ms", "mean_ms"),
    ("latency p50", "time_ms", "p50_ms"),
    ("latency p90", "time_ms", "p90_ms"),
    ("latency p99", "time_ms", "p99_ms"),
    ("latency p99.9", "time_ms", "p999_ms"),
    ("wait mean", "time_ms", "mean_wait_ms"),
    ("wait p99", "time_ms", "p99_wait_ms"),
    ("makespan", "time_ms", "makespan_ms"),
    ("cold starts", "count", "cold_starts"),
    ("weight loads", "count", "loads"),
    ("cold requests", "share", "cold_request_share"),
    ("utilisation", "share", "utilisation"),
    ("cost, allocation", "usd", "cost_allocation_usd"),
    ("cost, usage only", "usd", "cost_usage_usd"),
    ("cost per 1000 met", "usd", "cost_per_1000_met_usd"),
    ("fairness (Jain)", "index", "fairness"),
)
# Without the row that is 0 unless admission was only observed.
_ENFORCED_SUMMARY: Final[Fields] = tuple(row for row in _SUMMARY if row[2] != "would_reject")


@dataclass(frozen=True, slots=True)
class Column:
    """One formatted column. `unit` may be empty."""

    title: str
    unit: str
    cells: tuple[str, ...]
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of equally long columns. `title` may be empty.

    A rich console of any width can print it: columns that do not fit are printed below, with the
    first column repeated, so that nothing is cut off.
    """

    title: str
    columns: tuple[Column, ...]

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(zip(*(column.cells for column in self.columns), strict=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title and as many tables as the width requires."""
        if self.title:
            yield Text(self.title, style="bold")
        for columns in _blocks(self.columns, options.max_width):
            yield _rich_table(columns)
            yield ""


def format_column(title: str, quantity: Quantity, values: Sequence[float | str]) -> Column:
    unit, cells = format_values(quantity, values)
    return Column(title, unit, cells, is_text=quantity == "text")


def field_columns(fields: Fields, rows: Sequence[object]) -> tuple[Column, ...]:
    """Return a column per field, with the attribute of every row; none for a row that is None."""
    return tuple(
        format_column(title, quantity, [nan if row is None else getattr(row, name) for row in rows])
        for title, quantity, name in fields
    )


def comparison_table(rows: Sequence[tuple[str, Summary]]) -> ReportTable:
    """Return one row per labelled run, with the numbers by which policies are compared."""
    labels = format_column("", "text", [label for label, _ in rows])
    columns = field_columns(_COMPARISON, [summary for _, summary in rows])
    return ReportTable("Comparison", (labels, *columns))


def summary_table(summary: Summary) -> ReportTable:
    """Return one run as rows of name, value and unit."""
    fields = _SUMMARY if summary.would_reject else _ENFORCED_SUMMARY
    columns = field_columns(fields, [summary])
    return ReportTable(
        "Summary",
        (
            Column("", "", tuple(column.title for column in columns), is_text=True),
            Column("", "", tuple(column.cells[0] for column in columns)),
            Column("", "", tuple(column.unit for column in columns), is_text=True),
        ),
    )


def group_table(title: str, rows: Sequence[GroupSummary]) -> ReportTable:
    """Return one row per client or per pipeline."""
    return ReportTable(title, field_columns(_GROUP, rows))


def resource_table(rows: Sequence[ResourceSummary]) -> ReportTable:
    """Return one row per node or serverless pool."""
    return ReportTable("Resources", field_columns(_RESOURCE, rows))


def rows_table(rows: Sequence[Mapping[str, object]], title: str = "") -> ReportTable:
    """Return a table of plain values with a column for every key, in order of appearance."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = []
    for key in keys:
        values = [row.get(key) for row in rows]
        is_number = all(value is None or isinstance(value, int | float) for value in values)
        cells = tuple(map(format_cell, values))
        columns.append(Column(key.replace("_", " "), "", cells, is_text=not is_number))
    return ReportTable(title, tuple(columns))


def render(*renderables: RenderableType, width: int = WIDE, has_colour: bool = False) -> str:
    """Return tables and texts as a console prints them, without blanks at the ends of lines.

    A rich console that writes to a closed pipe would end the process itself: it writes to memory.
    """
    console = Console(
        file=StringIO(),
        force_terminal=has_colour,
        no_color=not has_colour,
        width=width,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _blocks(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    first = columns[0]
    block, used = [first], _width(first)
    for column in columns[1:]:
        if len(block) > 1 and used + _GAP + _width(column) > width:
            yield block
            block, used = [first], _width(first)
        block.append(column)
        used += _GAP + _width(column)
    yield block


def _rich_table(columns: Sequence[Column]) -> Table:
    """Return a rich table; cells are printed verbatim, never interpreted as markup."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(column.title for column in columns),
        header_style="bold",
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),  # the box itself draws one blank between columns
    )
    for column in columns:
        header = Text(f"{column.title}\n{column.unit}" if column.unit else column.title)
        table.add_column(
            header,
            justify="left" if column.is_text else "right",
            no_wrap=True,
            min_width=_width(column),
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _width(column: Column) -> int:
    return max(cell_len(text) for text in (column.title, column.unit, *column.cells))
