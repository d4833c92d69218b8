"""Output of commands: tables and text on stdout, JSON, and a progress bar on stderr."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headgate.lab.experiments.experiment import Check, Result
from headgate.metrics.summary import Summary
from headgate.metrics.table import MISSING, Column, ReportTable, TableView, summary_table

if TYPE_CHECKING:
    import rich.progress


_WIDE: Final = 10_000  # output to a file is not wrapped
_GAP: Final = 4  # columns between two blocks of a summary
_PATIENCE_S: Final = 1.0  # before a progress bar appears


def show(*renderables: RenderableType) -> None:
    """Print, with colour and wrapped on a terminal, otherwise plain and unwrapped.

    The text is rendered first and written at once, because a rich console that writes to a closed
    pipe would end the process itself.
    """
    is_terminal = sys.stdout.isatty()
    console = Console(
        file=StringIO(),
        force_terminal=has_colour(),
        no_color=not has_colour(),
        width=shutil.get_terminal_size().columns if is_terminal else _WIDE,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    click.echo("\n".join(lines))


def hanging_indent(label: str, width: int, text: str | Text, style: str = "") -> RenderableType:
    """Return text beside a label; wrapped lines are indented to the width of the label."""
    grid = Table.grid()
    grid.add_column(width=width, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(label, style), text if isinstance(text, Text) else Text(text))
    return grid


def show_assumed(times: Mapping[str, str]) -> None:
    """Print which execution times were assumed, if any: the results depend on them."""
    if times:
        listed = ", ".join(f"{name} {time}" for name, time in times.items())
        show(Text(f"assumed, because nobody has measured it: {listed}", "yellow"))


def show_json(content: object) -> None:
    """Print JSON; NaN and infinities become null."""
    click.echo(json.dumps(json_value(content), indent=2, allow_nan=False))


def json_value(content: object) -> object:
    """Return the value as JSON can represent it.

    >>> json_value({"p99_ms": float("nan"), "waits": (1.5, 2)})
    {'p99_ms': None, 'waits': [1.5, 2]}
    """
    if isinstance(content, Mapping):
        return {str(key): json_value(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [json_value(value) for value in content]
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if content is None or isinstance(content, str | int):
        return content
    return str(content)


def has_colour() -> bool:
    """Whether stdout is a terminal that wants colour (https://no-color.org)."""
    wants = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wants and sys.stdout.isatty()


def rows_table(rows: Sequence[Mapping[str, object]], title: str = "") -> TableView:
    """Return a table of plain values with a column for every key, in order of appearance."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return TableView(ReportTable(title, tuple(_column(key, rows) for key in keys)), title)


def cell(value: object) -> str:
    """Format one value for people.

    >>> cell(1234567), cell(0.123456), cell(None), cell(True), cell([1, 2.5])
    ('1,234,567', '0.1235', '-', 'yes', '1, 2.5')
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(cell(inner) for inner in value)
    return str(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _column(key: str, rows: Sequence[Mapping[str, object]]) -> Column:
    values = [row.get(key) for row in rows]
    is_number = all(value is None or isinstance(value, int | float) for value in values)
    return Column(key.replace("_", " "), "", tuple(map(cell, values)), is_text=not is_number)


class SummaryView:
    """The numbers of one run in up to three blocks side by side, as the terminal's width allows."""

    def __init__(self, summary: Summary) -> None:
        self._rows = summary_table(summary).rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one table without rules."""
        widths = [max(len(row[part]) for row in self._rows) for part in range(3)]
        block_width = sum(widths) + 2
        blocks = max(1, min(3, (options.max_width + _GAP) // (block_width + _GAP)))
        height = -(-len(self._rows) // blocks)
        table = Table.grid()
        for block in range(blocks):
            last = _GAP if block < blocks - 1 else 0
            table.add_column(width=widths[0] + 1, no_wrap=True)
            table.add_column(width=widths[1], no_wrap=True, justify="right")
            table.add_column(width=1)
            table.add_column(width=widths[2] + last, no_wrap=True)
        for line in range(height):
            cells: list[str] = []
            for name, value, unit in self._rows[line::height]:
                cells += [name, value, "", unit]
            table.add_row(*map(Text, cells))
        yield table
        yield ""


def show_list(titles: Sequence[tuple[str, str]], usage: str) -> None:
    """Print names with their titles, and how to use them."""
    width = max((len(name) for name, _ in titles), default=0) + 2
    for name, title in titles:
        show(hanging_indent(name, width, title, "bold"))
    show(Text(f"\n{usage}"))


def show_result(result: Result, title: str, explained: str) -> None:
    """Print the tables and checks of an experiment or benchmark.

    `explained` says where to read about checks that do not hold.
    """
    tables = [list(rows) for _, rows in groupby(result.rows, key=tuple)]
    show(Text(f"{result.name}: {title}\n", style="bold"))
    show(*(rows_table(rows) for rows in tables))
    show(*_check_lines(result.checks))
    for path in result.figures:
        show(Text(f"written: {path}"))
    failing = len(result.failing)
    total = len(result.checks)
    if failing:
        summary = f"{failing} of {total} checks do not hold: {explained}"
        show(Text(summary, style="bold red"))
    elif total:
        show(Text(f"all {total} checks hold", style="bold green"))


def _check_lines(checks: Sequence[Check]) -> Iterator[RenderableType]:
    """Yield two lines for a check, or one if the measured value is the expected one."""
    for check in checks:
        mark, style = ("✓", "bold green") if check.holds else ("✗", "bold red")
        expected, measured = cell(check.expected), cell(check.measured)
        source = (f"  ({check.source})", "dim")
        if check.holds and expected == measured:
            text = Text.assemble(f"{check.claim}: {measured}, as expected", source)
            yield hanging_indent(mark, 2, text, style)
        else:
            yield hanging_indent(mark, 2, Text.assemble(check.claim, source), style)
            yield hanging_indent("", 2, f"expected {expected}, measured {measured}")
    if checks:
        yield ""


class Progress:
    """A progress bar on stderr, for work that takes longer than a second, if it is a terminal.

    Use it as a context manager, and call `update` as work gets done. The bar is started by a
    thread of its own, so work that reports nothing still shows elapsed time. It is erased at the
    end.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = _new_bar()
            self._task = self._bar.add_task(title, total=total)
            self._timer = threading.Timer(_PATIENCE_S, self._bar.start)
            self._timer.daemon = True

    def update(self, done: int) -> None:
        """Set how much of the total is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def describe(self, title: str, done: int | None = None, total: int | None = None) -> None:
        """Change the title, and how much is done of which total."""
        if self._bar is not None:
            self._bar.update(self._task, description=title, completed=done, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._timer.cancel()
            self._timer.join()  # now the bar has started, or never will
            if self._bar.live.is_started:
                self._bar.stop()


def _new_bar() -> rich.progress.Progress:
    from rich import progress  # noqa: PLC0415  # takes a tenth of a second
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=30),
        progress.TaskProgressColumn(show_speed=False),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=5,
        transient=True,
    )
