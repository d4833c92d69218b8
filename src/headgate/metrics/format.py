"""Numbers for people: in the cells of a table, in sentences, and in JSON.

The values of a column share one unit and one number of decimals, so that they can be compared at a
glance (`format_values`). A value in a sentence has its unit and three significant digits
(`format_value`). Quantities with units that are read back are in `headgate.core.units`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import floor, isfinite, log10
from typing import Final, Literal

Quantity = Literal["text", "count", "share", "time_ms", "rate", "usd", "bytes", "index"]
MISSING: Final = "-"
_UNITS: Final[Mapping[Quantity, tuple[str, float]]] = {  # the unit, and the factor to it
    "share": ("%", 100.0),
    "rate": ("/s", 1.0),
    "usd": ("$", 1.0),
    "bytes": ("MiB", 2.0**-20),
}


def format_values(quantity: Quantity, values: Sequence[float | str]) -> tuple[str, tuple[str, ...]]:
    """Return the unit of a column and its cells, all with the same number of decimals.

    >>> format_values("time_ms", [0.5, 12.25, float("nan")])
    ('ms', ('0.50', '12.25', '-'))
    >>> format_values("share", [0.98766, 0.99996, 1.0])
    ('%', ('98.77', '99.99', '100.00'))
    """
    if quantity == "text":
        return "", tuple(map(str, values))
    numbers = [float(value) for value in values]
    unit, factor = _unit(quantity, max((abs(x) for x in numbers if isfinite(x)), default=0.0))
    numbers = [_percentage(x) if quantity == "share" else x * factor for x in numbers]
    decimals = _decimals(quantity, [abs(x) for x in numbers if isfinite(x) and x])
    return unit, tuple(f"{x:,.{decimals}f}" if isfinite(x) else MISSING for x in numbers)


def format_value(quantity: Quantity, value: float) -> str:
    """Return one number with its unit. A share is never rounded up to 100 %.

    >>> [format_value("time_ms", ms) for ms in (0.02, 26.64, 144.0, 2500.0)]
    ['20 µs', '26.6 ms', '144 ms', '2.5 s']
    >>> [format_value("share", share) for share in (0.98766, 0.99996, 1.0, 0.00001, 0.0)]
    ['98.77 %', '99.99 %', '100 %', 'under 0.01 %', '0 %']
    >>> [format_value("usd", usd) for usd in (0.085, 1234.5, 0.00251)]
    ['$0.085', '$1,234.50', '$0.00251']
    """
    if not isfinite(value):
        return MISSING
    if quantity == "share":
        if 0.0 < value < 0.0001:
            return "under 0.01 %"
        return f"{_percentage(value):g} %"
    if quantity == "usd":
        return f"${value:,.2f}" if value >= 1.0 else f"${significant(value)}"
    if quantity == "time_ms" and value >= 1_000.0:
        return f"{significant(value / 1e3)} s"
    unit, factor = _unit(quantity, value)
    gap = "" if quantity == "rate" else " "
    return f"{significant(value * factor)}{gap}{unit}".rstrip()


ms = partial(format_value, "time_ms")
percent = partial(format_value, "share")
usd = partial(format_value, "usd")
per_second = partial(format_value, "rate")


def _percentage(share: float) -> float:
    """Return a share in per cent with two decimals, and 100 only if it is all."""
    if not isfinite(share):
        return share
    percentage = round(100.0 * share, 2)
    return 99.99 if percentage == 100.0 and share < 1.0 else percentage


def significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, and with all digits before its point.

    >>> significant(7.5612), significant(2991.3), significant(999.7), significant(0.5)
    ('7.56', '2,991', '1,000', '0.5')
    """
    if not isfinite(value):
        return MISSING
    if value and abs(value) < 1e-9:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - floor(log10(abs(value)))) if value else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def about(share: float) -> str:
    """Return a share as a whole percentage.

    >>> about(0.4186)
    '42 %'
    """
    return f"{100 * share:.0f} %"


def format_cell(value: object) -> str:
    """Return any plain value as text.

    >>> [format_cell(value) for value in (1234567, 0.123456, None, True, [1, 2.5])]
    ['1,234,567', '0.1235', '-', 'yes', '1, 2.5']
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return significant(value, 4)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_cell(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(format_cell, value))
    return str(value)


def json_value(value: object) -> object:
    """Return a value as JSON can represent it: NaN and infinities are null.

    >>> json_value({"p99_ms": float("nan"), "waits": (1.5, 2)})
    {'p99_ms': None, 'waits': [1.5, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _unit(quantity: Quantity, largest: float) -> tuple[str, float]:
    """Return the unit to print, and the factor that converts values to it."""
    if quantity == "time_ms":
        if largest < 1.0:
            return ("µs", 1000.0) if largest else ("ms", 1.0)
        return ("ms", 1.0) if largest < 10_000.0 else ("s", 0.001)
    return _UNITS.get(quantity, ("", 1.0))


def _decimals(quantity: Quantity, sizes: Sequence[float]) -> int:
    """Return the number of decimals: at least three significant digits of the largest value."""
    if quantity in ("share", "index"):
        return 2 if quantity == "share" else 3
    if quantity in ("count", "bytes") or not sizes:
        return 0
    largest_digits = floor(log10(max(sizes))) + 1
    smallest_digits = floor(log10(min(sizes))) + 1
    if quantity == "usd":  # prices differ by orders of magnitude, and all their digits count
        return min(6, max(2, 3 - smallest_digits))
    return min(3, max(0, 3 - largest_digits, 2 - smallest_digits))
