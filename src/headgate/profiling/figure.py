"""The picture of a characterisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.metrics.report.characterisation_plot import Curve, characterisation_figure
from headgate.planning.characterisation import Characterisation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def profile_figure(found: Characterisation, slo_ms: float | None = None) -> Figure:
    """Plot medians of single items against requests at once. Needs matplotlib."""
    return characterisation_figure(
        f"{found.function} on {found.device}", curves(found), slo_ms=slo_ms
    )


def curves(found: Characterisation) -> list[Curve]:
    """Return one line per number of cores that single items were measured on."""
    lines = []
    for cores in found.cores:
        points = sorted(
            (point for point in found.points if point.cores == cores and point.batch == 1),
            key=lambda point: point.concurrency,
        )
        lows = [point.p50_low_ms for point in points if point.p50_low_ms is not None]
        highs = [point.p50_high_ms for point in points if point.p50_high_ms is not None]
        is_known = len(lows) == len(highs) == len(points)
        if points:
            lines.append(
                Curve(
                    cores,
                    tuple(point.concurrency for point in points),
                    tuple(point.p50_ms for point in points),
                    tuple(lows) if is_known else (),
                    tuple(highs) if is_known else (),
                )
            )
    return lines
