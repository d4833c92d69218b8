"""Output of commands: tables and text on stdout, JSON, and a progress bar on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, Self

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headgate.lab.experiments import Check, Result
from headgate.metrics.format import format_cell, json_value
from headgate.metrics.summary import Summary
from headgate.metrics.table import WIDE, render, rows_table, summary_table

if TYPE_CHECKING:
    import rich.progress


_GAP: Final = 4  # columns between two blocks of a summary
_PATIENCE_S: Final = 1.0  # before a progress bar appears


def show(*renderables: RenderableType) -> None:
    """Print, with colour and wrapped on a terminal, otherwise plain and unwrapped."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    click.echo(render(*renderables, width=width, has_colour=has_colour()))


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


def has_colour() -> bool:
    """Whether stdout is a terminal that wants colour (https://no-color.org)."""
    wants = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wants and sys.stdout.isatty()


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


def show_list(titles: Sequence[tuple[str, str]], usage: str, *, as_json: bool) -> None:
    """Print names with their titles, and how to use them."""
    if as_json:
        show_json([{"name": name, "title": title} for name, title in titles])
        return
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
    show(*_summary_lines(result, explained))


def _check_lines(checks: Sequence[Check]) -> Iterator[RenderableType]:
    """Yield two lines for a check, or one if the measured value is the expected one."""
    for check in checks:
        mark, style = _mark(check)
        expected, measured = format_cell(check.expected), format_cell(check.measured)
        source = (f"  ({check.source})", "dim")
        if check.holds and expected == measured:
            text = Text.assemble(f"{check.claim}: {measured}, as expected", source)
            yield hanging_indent(mark, 2, text, style)
        else:
            yield hanging_indent(mark, 2, Text.assemble(check.claim, source), style)
            yield hanging_indent("", 2, f"expected {expected}, measured {measured}")
        if check.known is not None:
            verb = "known not to hold, and holds" if check.holds else "known"
            yield hanging_indent("", 2, f"{verb}: {check.known}")
    if checks:
        yield ""


def _mark(check: Check) -> tuple[str, str]:
    """Return the mark of a check and its style: what needs attention is red."""
    if check.known is None:
        return ("✓", "bold green") if check.holds else ("✗", "bold red")
    return ("✓", "bold red") if check.holds else ("≠", "bold yellow")


def _summary_lines(result: Result, explained: str) -> Iterator[Text]:
    """Yield what all checks come to; `explained` says where to read about those that fail."""
    total, failing, known = len(result.checks), len(result.failing), len(result.known)
    if failing:
        yield Text(f"{failing} of {total} checks do not hold: {explained}", style="bold red")
    if result.outdated:
        summary = f"{len(result.outdated)} of {total} checks are known not to hold, and do"
        yield Text(summary, style="bold red")
    if known:
        pages = ", ".join(sorted({check.known for check in result.known if check.known}))
        summary = f"{known} of {total} checks are of claims that are known not to hold: {pages}"
        yield Text(summary, style="bold yellow")
    if total and not failing and not result.outdated:
        others = "other " if known else ""
        yield Text(f"all {total - known} {others}checks hold", style="bold green")


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

    def __exit__(self, *error: object) -> None:
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
