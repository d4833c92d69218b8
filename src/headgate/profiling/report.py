"""What a characterisation says, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.metrics.report.comparison_plots import Curve, characterisation_figure
from headgate.planning.capacity.sizing import knee_cores, largest_concurrency
from headgate.planning.latency_model import Characterisation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Objective:
    """What the response time must stay within, and for how many of the requests."""

    latency_ms: float
    quantile: float


def findings(found: Characterisation, objective: Objective | None = None) -> list[str]:
    """Return one sentence per finding, the most useful first."""
    return [
        *_alone(found),
        *(_held(found, objective) if objective is not None else ()),
        *_start(found),
        *_surface(found),
    ]


def _alone(found: Characterisation) -> Iterator[str]:
    few, best = found.cores[0], knee_cores(found)
    text = f"A lone request takes {_ms(found.time_ms(few, 1))} on {_cores(few)}"
    if best != few:
        text += f" and {_ms(found.time_ms(best, 1))} on {_cores(best)}"
    most = found.cores[-1]
    if best < most:
        text += f"; more make it no faster (up to {most:.3g} were tried)"
    yield f"{text}."


def _held(found: Characterisation, objective: Objective) -> Iterator[str]:
    limit = f"{_ms(objective.latency_ms)} at p{100 * objective.quantile:g}"
    for cores in found.cores:
        held = largest_concurrency(found, cores, objective.latency_ms, objective.quantile)
        if held == 0:
            yield f"{_cores(cores, capital=True)} cannot answer even one request within {limit}."
        elif held == found.concurrencies[-1]:
            yield f"{_cores(cores, capital=True)} can hold all {held} at once within {limit}."
        else:
            yield f"{_cores(cores, capital=True)} can hold {held} at once within {limit}."


def _start(found: Characterisation) -> Iterator[str]:
    cold = found.cold_start
    if cold is not None:
        parts = {
            "process": cold.process_ms,
            "imports": cold.imports_ms,
            "fetching the model": cold.fetch_ms,
            "loading it": cold.load_ms,
            "the first call": cold.first_call_ms,
        }
        longest = max(parts, key=lambda part: parts[part])
        yield f"A cold start takes {_ms(cold.total_ms)}, {_ms(parts[longest])} of it {longest}."
    if found.peak_memory_bytes is not None:
        yield f"It holds {found.peak_memory_bytes / 2**20:,.0f} MiB of memory at most."


def _surface(found: Characterisation) -> Iterator[str]:
    surface = found.surface
    if surface.mean_error is None or surface.max_error is None:
        yield "There are too few points to say how far off the surface is between them."
    else:
        mean, most = 100 * surface.mean_error, 100 * surface.max_error
        error = f"an error of {mean:.0f} % on average and {most:.0f} % at most"
        yield f"The surface ({surface.form}) tells points that it was not shown with {error}."


def _cores(cores: float, *, capital: bool = False) -> str:
    if cores == 1:
        return "One core" if capital else "one core"
    return f"{cores:.3g} cores"


def _ms(time_ms: float) -> str:
    return f"{time_ms:,.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"


# The picture of a characterisation.


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
