"""What experiments and benchmarks found: tables, then every check with expected and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from headgate.cli.rows import cell, rows_table
from headgate.cli.screen import hanging, show
from headgate.experiments.experiment import Check, Result


def show_list(titles: Sequence[tuple[str, str]], usage: str) -> None:
    """Print what there is to choose from, and how to choose."""
    width = max((len(name) for name, _ in titles), default=0) + 2
    for name, title in titles:
        show(hanging(name, width, title, "bold"))
    show(Text(f"\n{usage}"))


def show_result(result: Result, title: str, explained: str) -> None:
    """Print one result. `explained` says where to read about checks that do not hold."""
    tables = [list(rows) for _, rows in groupby(result.rows, key=tuple)]
    show(Text(f"{result.name}: {title}\n", style="bold"))
    show(*(rows_table(rows) for rows in tables))
    show(*_check_lines(result.checks))
    for path in result.figures:
        show(Text(f"written: {path}"))
    failing = len(result.failing)
    total = len(result.checks)
    if failing:
        verdict = f"{failing} of {total} checks do not hold: {explained}"
        show(Text(verdict, style="bold red"))
    elif total:
        show(Text(f"all {total} checks hold", style="bold green"))


def _check_lines(checks: Sequence[Check]) -> Iterator[RenderableType]:
    """Two lines for a check, or one where there is nothing to set side by side."""
    for check in checks:
        mark, style = ("✓", "bold green") if check.holds else ("✗", "bold red")
        expected, measured = cell(check.expected), cell(check.measured)
        source = (f"  ({check.source})", "dim")
        if check.holds and expected == measured:
            text = Text.assemble(f"{check.claim}: {measured}, as expected", source)
            yield hanging(mark, 2, text, style)
        else:
            yield hanging(mark, 2, Text.assemble(check.claim, source), style)
            yield hanging("", 2, f"expected {expected}, measured {measured}")
    if checks:
        yield ""
