"""Formatted tables of summaries, for the terminal and for the HTML report.

A `ReportTable` holds formatted cells; `TableView` prints one with rich. A column has one unit and
one number of decimals, so that its values can be compared at a glance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Final, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from headgate.metrics.summary import GroupSummary, ResourceSummary, Summary

Quantity = Literal["text", "count", "share", "time_ms", "rate", "usd", "index"]
MISSING: Final = "-"
_GAP: Final = 2  # blanks between two columns


@dataclass(frozen=True, slots=True)
class Column:
    """One formatted column. `unit` may be empty."""

    title: str
    unit: str
    cells: tuple[str, ...]
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A titled table of equally long columns."""

    title: str
    columns: tuple[Column, ...]

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells, row by row."""
        return tuple(zip(*(column.cells for column in self.columns), strict=True))


def comparison_table(rows: Sequence[tuple[str, Summary]]) -> ReportTable:
    """Return one row per labelled run, with the numbers by which policies are compared."""
    summaries = [summary for _, summary in rows]
    return ReportTable(
        "Comparison",
        (
            format_column("", "text", [label for label, _ in rows]),
            format_column("met", "share", [s.slo_attainment for s in summaries]),
            format_column("kept", "share", [s.admitted_kept for s in summaries]),
            format_column("goodput", "rate", [s.goodput_rps for s in summaries]),
            format_column("wait", "time_ms", [s.mean_wait_ms for s in summaries]),
            format_column("p99", "time_ms", [s.p99_ms for s in summaries]),
            format_column("cold", "count", [s.cold_starts for s in summaries]),
            format_column("busy", "share", [s.utilisation for s in summaries]),
            format_column("cost", "usd", [s.cost_usd for s in summaries]),
            format_column("per 1000", "usd", [s.cost_per_1000_met_usd for s in summaries]),
        ),
    )


def summary_table(summary: Summary) -> ReportTable:
    """Return one run as rows of name, value and unit."""
    columns = [
        format_column(title, quantity, [value]) for title, quantity, value in _summary_rows(summary)
    ]
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
    return ReportTable(
        title,
        (
            format_column("", "text", [row.name for row in rows]),
            format_column("requests", "count", [row.requests for row in rows]),
            format_column("met", "share", [row.slo_attainment for row in rows]),
            format_column("wait", "time_ms", [row.mean_wait_ms for row in rows]),
            format_column("p99", "time_ms", [row.p99_ms for row in rows]),
            format_column("service", "share", [row.service_share for row in rows]),
        ),
    )


def resource_table(rows: Sequence[ResourceSummary]) -> ReportTable:
    """Return one row per node or serverless pool."""
    return ReportTable(
        "Resources",
        (
            format_column("", "text", [row.name for row in rows]),
            format_column("pool", "text", [row.pool for row in rows]),
            format_column("tier", "text", [row.tier for row in rows]),
            format_column("up", "time_ms", [row.up_ms for row in rows]),
            format_column("busy", "share", [row.utilisation for row in rows]),
            format_column("cold starts", "count", [row.cold_starts for row in rows]),
            format_column("loads", "count", [row.loads for row in rows]),
            format_column("usage", "usd", [row.usage_usd for row in rows]),
            format_column("allocation", "usd", [row.allocation_usd for row in rows]),
        ),
    )


def format_column(title: str, quantity: Quantity, values: Sequence[float | str]) -> Column:
    """Format values of one quantity with the same unit and the same number of decimals.

    >>> column = format_column("wait", "time_ms", [0.5, 12.25, math.nan])
    >>> column.unit, column.cells
    ('ms', ('0.50', '12.25', '-'))
    """
    if quantity == "text":
        return Column(title, "", tuple(str(value) for value in values), is_text=True)
    numbers = [float(value) for value in values]
    unit, factor = _unit(quantity, max((abs(x) for x in numbers if math.isfinite(x)), default=0.0))
    numbers = [number * factor for number in numbers]
    decimals = _decimals(quantity, [abs(x) for x in numbers if math.isfinite(x) and x])
    cells = (f"{x:,.{decimals}f}" if math.isfinite(x) else MISSING for x in numbers)
    return Column(title, unit, tuple(cells))


def format_value(quantity: Quantity, value: float) -> str:
    """Format one number with its unit.

    >>> format_value("share", 0.98765), format_value("usd", 1234.5), format_value("time_ms", 0.02)
    ('98.77 %', '$1,234.50', '20.0 µs')
    """
    column = format_column("", quantity, [value])
    cell = column.cells[0]
    if cell == MISSING or not column.unit:
        return cell
    return f"${cell}" if column.unit == "$" else f"{cell} {column.unit}"


def _unit(quantity: Quantity, largest: float) -> tuple[str, float]:
    """Return the unit to print, and the factor that converts values to it."""
    if quantity == "time_ms":
        if largest < 1.0:
            return ("µs", 1000.0) if largest else ("ms", 1.0)
        return ("ms", 1.0) if largest < 10_000.0 else ("s", 0.001)
    units = {"share": ("%", 100.0), "rate": ("/s", 1.0), "usd": ("$", 1.0)}
    return units.get(quantity, ("", 1.0))


def _decimals(quantity: Quantity, sizes: Sequence[float]) -> int:
    """Return the number of decimals: at least three significant digits of the largest value."""
    if quantity in ("share", "index"):
        return 2 if quantity == "share" else 3
    if quantity == "count" or not sizes:
        return 0
    largest_digits = math.floor(math.log10(max(sizes))) + 1
    smallest_digits = math.floor(math.log10(min(sizes))) + 1
    wanted = max(3 - largest_digits, 2 - smallest_digits, 2 if quantity == "usd" else 0)
    return min(wanted, 6 if quantity == "usd" else 3)


def _summary_rows(s: Summary) -> tuple[tuple[str, Quantity, float], ...]:
    return (
        ("requests", "count", s.requests),
        ("met", "count", s.met),
        ("late", "count", s.late),
        ("rejected", "count", s.rejected),
        ("expired", "count", s.expired),
        ("failed", "count", s.failed),
        ("cancelled", "count", s.cancelled),
        ("SLO attainment", "share", s.slo_attainment),
        ("admitted kept", "share", s.admitted_kept),
        ("goodput", "rate", s.goodput_rps),
        ("throughput", "rate", s.throughput_rps),
        ("latency mean", "time_ms", s.mean_ms),
        ("latency p50", "time_ms", s.p50_ms),
        ("latency p90", "time_ms", s.p90_ms),
        ("latency p99", "time_ms", s.p99_ms),
        ("latency p99.9", "time_ms", s.p999_ms),
        ("wait mean", "time_ms", s.mean_wait_ms),
        ("wait p99", "time_ms", s.p99_wait_ms),
        ("makespan", "time_ms", s.makespan_ms),
        ("cold starts", "count", s.cold_starts),
        ("weight loads", "count", s.loads),
        ("cold requests", "share", s.cold_request_share),
        ("utilisation", "share", s.utilisation),
        ("cost, allocation", "usd", s.cost_allocation_usd),
        ("cost, usage only", "usd", s.cost_usage_usd),
        ("cost per 1000 met", "usd", s.cost_per_1000_met_usd),
        ("fairness (Jain)", "index", s.fairness),
    )


class TableView:
    """A table that a rich console of any width can print.

    Columns that do not fit are printed below, with the first column repeated: nothing is cut off.
    """

    def __init__(self, table: ReportTable, title: str = "") -> None:
        self._table = table
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title and as many tables as the width requires."""
        if self._title:
            yield Text(self._title, style="bold")
        for columns in _blocks(self._table.columns, options.max_width):
            yield _rich_table(columns)
            yield ""


def summary_view(rows: Sequence[tuple[str, Summary]]) -> TableView:
    """Return name, value and unit for one run, or one row per run for several."""
    if len(rows) == 1:
        label, summary = rows[0]
        return TableView(summary_table(summary), label)
    return TableView(comparison_table(rows))


def group_view(title: str, rows: Sequence[GroupSummary]) -> TableView:
    """Return one row per client or pipeline."""
    return TableView(group_table(title, rows), title)


def resource_view(rows: Sequence[ResourceSummary]) -> TableView:
    """Return one row per node or serverless pool."""
    return TableView(resource_table(rows), "Resources")


def render(*tables: TableView, is_terminal: bool = False, width: int = 10_000) -> str:
    """Return the tables as text, coloured only if `is_terminal`."""
    console = Console(
        file=StringIO(), force_terminal=is_terminal, no_color=not is_terminal, width=width
    )
    with console.capture() as capture:
        console.print(*tables, sep="")
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


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
        table.add_row(*(Text(cell) for cell in row))
    return table


def _width(column: Column) -> int:
    return max(cell_len(text) for text in (column.title, column.unit, *column.cells))
