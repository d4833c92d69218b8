"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from headgate.metrics.groups import GroupSummary
from headgate.metrics.sheet import (
    Column,
    Sheet,
    comparison_sheet,
    group_sheet,
    headline_sheet,
    resource_sheet,
)
from headgate.metrics.summary import ResourceSummary, Summary

_GAP: Final = 2  # blanks between two columns


class SheetTable:
    """A sheet that any rich console can print, whatever its width.

    Columns that do not fit are printed below, beside the first column again: nothing is cut off.
    """

    def __init__(self, sheet: Sheet, title: str = "") -> None:
        self._sheet = sheet
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title and as many tables as the width asks for."""
        if self._title:
            yield Text(self._title, style="bold")
        for columns in _blocks(self._sheet.columns, options.max_width):
            yield _rich_table(columns)
            yield ""


def summary_table(rows: Sequence[tuple[str, Summary]]) -> SheetTable:
    """Return a list for one run, or one row per run for several."""
    if len(rows) == 1:
        label, summary = rows[0]
        return SheetTable(headline_sheet(summary), label)
    return SheetTable(comparison_sheet(rows))


def group_table(title: str, rows: Sequence[GroupSummary]) -> SheetTable:
    """Return one row per client or pipeline."""
    return SheetTable(group_sheet(title, rows), title)


def resource_table(rows: Sequence[ResourceSummary]) -> SheetTable:
    """Return one row per node or serverless pool."""
    return SheetTable(resource_sheet(rows), "Resources")


def render(*tables: SheetTable, is_terminal: bool = False, width: int = 10_000) -> str:
    """Return the tables as text, without colour unless it goes to a terminal."""
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
    """Return a rich table; its text is shown as it is, never read as markup."""
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
