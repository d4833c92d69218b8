"""Rows of plain values (what JSON would carry) as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headgate.metrics.sheet import MISSING, Column, Sheet
from headgate.metrics.tables import SheetTable


def rows_table(rows: Sequence[Mapping[str, object]], title: str = "") -> SheetTable:
    """Return a table with a column for every key, in order of appearance."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return SheetTable(Sheet(title, tuple(_column(key, rows) for key in keys)), title)


def cell(value: object) -> str:
    """Write one value for people.

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
