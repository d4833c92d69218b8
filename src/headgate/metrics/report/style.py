"""The style of all figures, set on each figure: no global state of matplotlib is changed.

Colours are those of Okabe and Ito, which people with any of the common colour-vision deficiencies
can tell apart; yellow is left out because it is invisible on white. matplotlib is an extra and is
imported when the first figure is made; pyplot is never imported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate.core.clock import HOUR_NS, SECOND_NS
from headgate.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SKY: Final = "#56B4E9"
BLACK: Final = "#333333"
SERIES: Final = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")

INK: Final = "#1f2933"
MUTED: Final = "#5f6b7a"
GRID: Final = "#e3e8ee"
OTHER: Final = "#9aa5b1"  # for series beyond those that have a colour of their own

# In the order of `OUTCOME_NAMES`.
OUTCOME_COLOURS: Final = (GREEN, ORANGE, OTHER, VERMILION, PURPLE, "#d5dbe1")

_SMALL: Final = 9.0
_WIDTH_IN: Final = 8.0
_PNG_DPI: Final = 144


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with its file name and its caption."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The unit of a time axis."""

    unit: str
    unit_ns: int


def time_scale(end_ns: int) -> TimeScale:
    """Return the unit in which an axis up to `end_ns` has short numbers."""
    if end_ns >= 3 * HOUR_NS:
        return TimeScale("h", HOUR_NS)
    if end_ns >= 600 * SECOND_NS:
        return TimeScale("min", 60 * SECOND_NS)
    if end_ns >= SECOND_NS:
        return TimeScale("s", SECOND_NS)
    return TimeScale("ms", SECOND_NS // 1000)


def new_figure(height_in: float = 3.4) -> Figure:
    """Return an empty figure of the common width. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install headgate[report]") from None
    return Figure(figsize=(_WIDTH_IN, height_in), layout="constrained", facecolor="white")


def new_axes(height_in: float = 3.4) -> tuple[Figure, Axes]:
    figure = new_figure(height_in)
    return figure, figure.add_subplot()


def style_axes(
    axes: Axes, *, title: str, x_label: str = "", y_label: str = "", grid: str = "y"
) -> None:
    """Apply the common style to axes. `grid` is "x", "y", "both" or "" for none."""
    axes.set_title(
        escape_label(title), loc="left", fontsize=11, fontweight="bold", color=INK, pad=10
    )
    axes.set_xlabel(escape_label(x_label), fontsize=_SMALL, color=MUTED)
    axes.set_ylabel(escape_label(y_label), fontsize=_SMALL, color=MUTED)
    axes.tick_params(which="both", labelsize=_SMALL, labelcolor=INK, color=OTHER, length=3)
    axes.tick_params(which="minor", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(OTHER)
    axes.set_axisbelow(True)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if grid in (name, "both"):
            axis.grid(True, which="major", color=GRID, linewidth=0.8)


def number_log_axis(axis: Axis) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, ... without exponents; a long one 1, 10, ... only."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415 - an extra

    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
    axis.set_minor_formatter(NullFormatter())


def add_legend(axes: Axes, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Put a legend to the right of the axes, where it covers no data."""
    axes.legend(
        handles,
        [escape_label(label, 28) for label in labels],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=_SMALL,
        labelcolor=INK,
        handlelength=1.4,
    )


def add_legend_below(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], *, columns: int
) -> None:
    """Put one legend for all axes below the figure."""
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=_SMALL,
        labelcolor=INK,
    )


def escape_label(text: str, length_max: int = 60) -> str:
    """Return text that matplotlib draws verbatim, shortened in the middle if it is too long.

    A dollar sign would begin a formula, and a leading underscore would hide a legend entry.

    >>> escape_label("$5"), escape_label("_a")[1:], escape_label("node-001234", 8)
    ('\\\\$5', '_a', 'node…234')
    """
    if len(text) > length_max:  # names often differ only at their ends
        text = f"{text[: length_max // 2]}…{text[len(text) - (length_max - 1) // 2 :]}"
    text = text.replace("$", r"\$")
    return f"\u200a{text}" if text.startswith("_") else text


def save_png(figure: Figure, path: Path) -> Path:
    with _unknown_glyphs_allowed():
        figure.savefig(path, format="png", dpi=_PNG_DPI)
    return path


def to_svg(figure: Figure, prefix: str) -> str:
    """Return the figure as an `<svg>` element that can be embedded in a page beside others.

    Text is drawn as outlines, so that it looks the same everywhere. Ids consist of the prefix and
    a running number instead of random letters, so that equal figures give equal text.
    """
    buffer = StringIO()
    with _unknown_glyphs_allowed():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    numbers = {
        name: f"{prefix}-{number}"
        for number, name in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', text)))
    }
    return re.sub(
        r'(\bid="|href="#|url\(#)([^")]*)',
        lambda match: match[1] + numbers.get(match[2], match[2]),
        text,
    )


@contextmanager
def _unknown_glyphs_allowed() -> Iterator[None]:
    """Ignore warnings about glyphs that the font lacks: such names are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
