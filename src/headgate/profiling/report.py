"""Summary of a characterisation, as sentences and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headgate.metrics.format import about, format_value, ms, significant
from headgate.metrics.report.comparison_plots import Curve, characterisation_figure
from headgate.planning.capacity.latency_model import Characterisation
from headgate.planning.capacity.sizing import knee_cores, largest_concurrency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objective: the limit, and the quantile of requests that must meet it."""

    latency_ms: float
    quantile: float


def summarise(profile: Characterisation, objective: Objective | None = None) -> list[str]:
    """Return sentences about a profile, the most useful first."""
    return [
        *_single_request(profile),
        *(_capacity(profile, objective) if objective is not None else ()),
        *_cold_start(profile),
        *_surface(profile),
    ]


def _single_request(profile: Characterisation) -> Iterator[str]:
    fewest, best = profile.cores[0], knee_cores(profile)
    text = f"A single request takes {ms(profile.time_ms(fewest, 1))} on {_cores(fewest)}"
    if best != fewest:
        text += f" and {ms(profile.time_ms(best, 1))} on {_cores(best)}"
    most = profile.cores[-1]
    if best < most:
        text += f"; more cores are no faster (measured up to {significant(most)})"
    yield f"{text}."


def _capacity(profile: Characterisation, objective: Objective) -> Iterator[str]:
    limit = f"{ms(objective.latency_ms)} at p{100 * objective.quantile:g}"
    for cores in profile.cores:
        concurrency = largest_concurrency(profile, cores, objective.latency_ms, objective.quantile)
        more = " or more" if concurrency == profile.concurrencies[-1] else ""
        served = f"can serve {concurrency}{more} at once"
        if concurrency == 0:
            served = "cannot serve even one request"
        yield f"{_cores(cores).capitalize()} {served} within {limit}."


def _cold_start(profile: Characterisation) -> Iterator[str]:
    cold = profile.cold_start
    if cold is not None:
        parts = {
            "starting the process": cold.process_ms,
            "importing modules": cold.imports_ms,
            "fetching the model": cold.fetch_ms,
            "loading the model": cold.load_ms,
            "the first call": cold.first_call_ms,
        }
        longest = max(parts, key=lambda part: parts[part])
        yield f"A cold start takes {ms(cold.total_ms)}, {ms(parts[longest])} of it {longest}."
    if profile.peak_memory_bytes is not None:
        yield f"The peak memory is {format_value('bytes', profile.peak_memory_bytes)}."


def _surface(profile: Characterisation) -> Iterator[str]:
    surface = profile.surface
    if surface.mean_error is None or surface.max_error is None:
        yield "There are too few points to cross-validate the latency surface."
    else:
        mean, most = about(surface.mean_error), about(surface.max_error)
        error = f"an error of {mean} on average and {most} at most"
        yield f"The latency surface ({surface.form}) predicts held-out points with {error}."


def _cores(cores: float) -> str:
    return "one core" if cores == 1 else f"{significant(cores)} cores"


def profile_figure(profile: Characterisation, slo_ms: float | None = None) -> Figure:
    """Plot medians at batch size 1 against concurrency. Needs matplotlib."""
    return characterisation_figure(
        f"{profile.function} on {profile.device}", curves(profile), slo_ms=slo_ms
    )


def curves(profile: Characterisation) -> list[Curve]:
    """Return one curve per number of cores, of the points with batch size 1."""
    lines = []
    for cores in profile.cores:
        points = sorted(
            (point for point in profile.points if point.cores == cores and point.batch == 1),
            key=lambda point: point.concurrency,
        )
        lows = tuple(point.p50_low_ms for point in points if point.p50_low_ms is not None)
        highs = tuple(point.p50_high_ms for point in points if point.p50_high_ms is not None)
        if not len(lows) == len(highs) == len(points):
            lows = highs = ()  # not all intervals are known
        if points:
            concurrencies = tuple(point.concurrency for point in points)
            medians_ms = tuple(point.p50_ms for point in points)
            lines.append(Curve(cores, concurrencies, medians_ms, lows, highs))
    return lines
