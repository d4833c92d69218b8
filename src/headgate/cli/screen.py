"""What goes to stdout: tables and text for people, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from io import StringIO
from typing import Final

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDE: Final = 10_000  # nobody wraps what goes to a file


def show(*things: RenderableType) -> None:
    """Print: with colour and within the width of a terminal, else plain and unwrapped.

    It is rendered first and written at once, because a rich console that meets a closed pipe
    would end the process itself.
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
        for thing in things:
            console.print(thing)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    click.echo("\n".join(lines))


def hanging(label: str, width: int, text: str | Text, style: str = "") -> RenderableType:
    """Return text beside a label; where it wraps, it stays beside it."""
    grid = Table.grid()
    grid.add_column(width=width, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(label, style), text if isinstance(text, Text) else Text(text))
    return grid


def show_assumed(times: Mapping[str, str]) -> None:
    """Print which times were assumed, if any: a result is worth no more than they are."""
    if times:
        told = ", ".join(f"{name} {time}" for name, time in times.items())
        show(Text(f"assumed, because nobody has measured it: {told}", "yellow"))


def show_json(content: object) -> None:
    """Print JSON; what is not a number becomes null."""
    click.echo(json.dumps(plain(content), indent=2, allow_nan=False))


def plain(content: object) -> object:
    """Return what JSON can carry.

    >>> plain({"p99_ms": float("nan"), "waits": (1.5, 2)})
    {'p99_ms': None, 'waits': [1.5, 2]}
    """
    if isinstance(content, Mapping):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [plain(value) for value in content]
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if content is None or isinstance(content, str | int):
        return content
    return str(content)


def has_colour() -> bool:
    """Whether stdout is a terminal that wants colour (https://no-color.org)."""
    wants = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wants and sys.stdout.isatty()
