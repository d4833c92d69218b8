"""`headgate forecast`: scores forecasts of arrivals by what they cost at equal violations."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import Final

import click
import numpy as np
from rich.text import Text

from headgate.cli.options import (
    WorkloadOptions,
    duration_option,
    json_option,
    seed_option,
    traces_option,
)
from headgate.cli.options import (
    duration_ns as read_duration,
)
from headgate.cli.output import Progress, show, show_json
from headgate.cli.workload import TRACE, read_process
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.rng import stream
from headgate.core.units import (
    format_duration,
    parse_duration,
    parse_fraction,
    parse_price_per_hour,
)
from headgate.metrics.format import format_values, percent, significant
from headgate.metrics.table import Column, ReportTable, format_column
from headgate.planning.capacity.backtest import (
    Adjustment,
    Backtest,
    ForecastScore,
    ReplayModel,
    forecast_rates,
    known_rates,
    ranked,
    split_counts,
)
from headgate.planning.capacity.mix import Floats, Ints
from headgate.planning.forecast import forecast_rules
from headgate.workload import Arrivals, ClosedLoop, mix

PERFECT: Final = "perfect"
_DURATION_NS: Final = 3600 * SECOND_NS  # of generated arrivals
_BUCKETS_MAX: Final = 1_000_000
_WINDOW_BUCKETS: Final = 30
_SEASONAL: Final = "seasonal"
_SEASONS: Final = 4  # that a rule with a given period remembers
_HISTORY_BUCKETS: Final = 4_320  # in which a period is searched: three days of minutes
_LATENCY_FACTOR: Final = 5  # the default objective, in service times


def share(text: str) -> float:
    """Parse a share of requests between 0 and 1, both excluded."""
    value = parse_fraction(text, where="--level")
    if not 0.0 < value < 1.0:
        problem = "must be above 0 and below 100%"
        raise ConfigError(problem, where="--level", value=text, allowed="1%, 0.001")
    return value


def set_up_time(text: str) -> int:
    """Parse a duration that may be zero."""
    return parse_duration(text, where="--setup-time")


def price(text: str) -> float:
    """Parse the price of a backend."""
    return parse_price_per_hour(text, where="--price")


@click.command("forecast")
@click.argument("trace", required=False)
@click.option(
    "--arrivals",
    multiple=True,
    metavar="PROCESS",
    help="Generate requests instead, such as poisson:rate=50/s. May be repeated.",
)
@click.option(
    "duration_ns",
    "--duration",
    type=read_duration,
    metavar="S",
    help="When arrivals stop: seconds, or 10min. Default: the whole trace, or 1h.",
)
@click.option("--sort", is_flag=True, help="Sort the rows of a trace that is not in order of time.")
@click.option(
    "setup_ns",
    "--setup-time",
    type=set_up_time,
    default="10s",
    metavar="TIME",
    help="From the decision to start a backend until it serves. Default: 10s.",
)
@duration_option(
    "bucket_ns",
    "--bucket",
    "Time over which arrivals are counted, and after which is decided again. Default: 10s.",
    default="10s",
)
@duration_option(
    "window_ns",
    "--window",
    f"How far back a forecast looks. Default: {_WINDOW_BUCKETS} buckets.",
)
@duration_option(
    "period_ns",
    "--period",
    "Period of the seasonal forecast. Default: found in what was seen so far.",
)
@duration_option(
    "service_ns",
    "--service-time",
    "Mean time that a backend serves a request. Default: 100ms.",
    default="100ms",
)
@duration_option(
    "latency_ns",
    "--latency",
    f"Latency objective. Default: {_LATENCY_FACTOR} service times.",
)
@click.option(
    "--level",
    type=share,
    default="1%",
    metavar="SHARE",
    help="Share of requests that violate the objective, for all forecasters alike. Default: 1%.",
)
@click.option(
    "--by",
    type=click.Choice(("scale", "margin")),
    default="scale",
    help="Adjust forecasts to the level by a factor, or by a rate that is added. Default: scale.",
)
@click.option(
    "--backends-max",
    type=click.IntRange(min=1, max=4_000),
    default=1_000,
    metavar="N",
    help="Backends in the pool. Default: 1000.",
)
@click.option(
    "--frontends",
    type=click.IntRange(min=1, max=1_000),
    default=1,
    metavar="F",
    help="Frontends that each forecast from their part of the requests. Default: 1.",
)
@click.option(
    "usd_per_hour",
    "--price",
    type=price,
    metavar="PRICE",
    help="Price of a backend, such as $0.50/h.",
)
@traces_option
@seed_option
@json_option
def command(
    trace: str | None,
    arrivals: tuple[str, ...],
    duration_ns: int | None,
    sort: bool,
    setup_ns: int,
    bucket_ns: int,
    window_ns: int | None,
    period_ns: int | None,
    service_ns: int,
    latency_ns: int | None,
    level: float,
    by: Adjustment,
    backends_max: int,
    frontends: int,
    usd_per_hour: float | None,
    traces: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Score forecasters by the backend-time they need on TRACE at equal violations.

    TRACE is a file, or a name in the directory of traces. Each forecaster decides, bucket by
    bucket, how many backends will be ready one set-up time later. Its forecasts are adjusted by one
    factor until the same share of requests violates the objective; the cheapest is the best.

    \b
    headgate forecast requests.csv --setup-time 30s --service-time 200ms --price '$0.50/h'
    headgate forecast --arrivals mmpp:rates=10/s+100/s,stay=5min+1min --duration 3h
    """
    model = _model(bucket_ns, setup_ns, service_ns, latency_ns, level, backends_max)
    window_ns = _WINDOW_BUCKETS * bucket_ns if window_ns is None else window_ns
    _check_length("--window", window_ns, bucket_ns)
    _check_length("--period", period_ns, bucket_ns)
    options = WorkloadOptions(duration_ns=duration_ns, sort=sort, traces=traces)
    requests = _requests(trace, arrivals, options, seed)
    where = ", ".join(arrivals) if trace is None else trace
    counts = _counts(requests, model, where)
    backtest = Backtest(counts, model, by)
    slices = split_counts(counts, frontends, stream(seed, "frontends").getrandbits(63))
    forecasts = _forecasts(slices, model, window_ns, period_ns)
    scores = ranked([backtest.score(name, rates) for name, rates in forecasts.items()])
    perfect = backtest.score(PERFECT, known_rates(counts, model))
    if as_json:
        content = {
            "trace": trace,
            "arrivals": list(arrivals),
            "requests": len(requests),
            "duration_s": requests.duration_ns / SECOND_NS,
            "buckets": len(counts),
            "bucket_s": bucket_ns / SECOND_NS,
            "setup_s": setup_ns / SECOND_NS,
            "service_s": service_ns / SECOND_NS,
            "latency_s": model.latency_ns / SECOND_NS,
            "window_s": window_ns / SECOND_NS,
            "frontends": frontends,
            "level": level,
            "by": by,
            "forecasters": [_to_json(score, usd_per_hour) for score in scores],
            PERFECT: _to_json(perfect, usd_per_hour),
        }
        show_json(content)
    else:
        _show(where, requests, model, by, [*scores, perfect], usd_per_hour)


def _check_length(option: str, value_ns: int | None, bucket_ns: int) -> None:
    """Raise `ConfigError` if an option is shorter than a bucket."""
    if value_ns is not None and value_ns < bucket_ns:
        value, allowed = format_duration(value_ns), f"at least {format_duration(bucket_ns)}"
        raise ConfigError("is shorter than a bucket", where=option, value=value, allowed=allowed)


def _model(
    bucket_ns: int,
    setup_ns: int,
    service_ns: int,
    latency_ns: int | None,
    level: float,
    backends_max: int,
) -> ReplayModel:
    latency_ns = _LATENCY_FACTOR * service_ns if latency_ns is None else latency_ns
    if latency_ns < service_ns:
        allowed = f"at least {format_duration(service_ns)}, the service time"
        value = format_duration(latency_ns)
        raise ConfigError("no request meets it", where="--latency", value=value, allowed=allowed)
    return ReplayModel(bucket_ns, setup_ns, service_ns, latency_ns, level, backends_max)


def _requests(
    trace: str | None, arrivals: tuple[str, ...], options: WorkloadOptions, seed: int
) -> Arrivals:
    """Return the requests of the trace, or those of all processes."""
    if (trace is not None) == bool(arrivals):
        problem = "is given with a trace" if arrivals else "there are no requests to forecast"
        where = "--arrivals" if arrivals else None
        raise ConfigError(problem, where=where, allowed="either TRACE or --arrivals PROCESS")
    processes = arrivals if trace is None else (f"{TRACE}{trace}",)
    where = "--arrivals" if trace is None else "TRACE"
    parts: list[Arrivals] = []
    for index, process in enumerate(processes):
        part = read_process(process, options, _DURATION_NS, seed, index, where=where)
        if isinstance(part, ClosedLoop):
            problem = "is a closed loop, whose requests depend on the responses"
            raise ConfigError(problem, where=where, value=process, allowed="poisson, mmpp, stepped")
        parts.append(part)
    return mix(parts) if len(parts) > 1 else parts[0]


def _counts(requests: Arrivals, model: ReplayModel, where: str) -> Ints:
    """Return the arrivals in each whole bucket."""
    buckets = requests.duration_ns // model.bucket_ns
    if buckets > _BUCKETS_MAX:
        problem = f"has {buckets:,} buckets"
        allowed = f"up to {_BUCKETS_MAX:,}: a longer --bucket, or a --duration"
        raise ConfigError(problem, where=where, allowed=allowed)
    counts = np.bincount(requests.times_ns // model.bucket_ns, minlength=buckets)[:buckets]
    if not counts[model.lead :].sum():
        problem = "has no requests after the first backends could be ready"
        least = format_duration((model.lead + 1) * model.bucket_ns)
        raise ConfigError(problem, where=where, allowed=f"requests in more than the first {least}")
    return counts.astype(np.int64)


def _forecasts(
    slices: Ints, model: ReplayModel, window_ns: int, period_ns: int | None
) -> dict[str, Floats]:
    """Return the forecasts of each rule: the highest of all frontends, which each see a slice."""
    period = None if period_ns is None else period_ns / model.bucket_ns
    history_ns = _HISTORY_BUCKETS * model.bucket_ns if period_ns is None else _SEASONS * period_ns
    highest: dict[str, Floats] = {}
    with Progress("forecasting", len(slices)) as progress:
        for done, counts in enumerate(slices, 1):
            for name, rule in forecast_rules(period).items():
                memory_ns = max(window_ns, history_ns) if name == _SEASONAL else window_ns
                rates = forecast_rates(counts, rule, model, memory_ns) * len(slices)
                highest[name] = np.maximum(highest.get(name, rates), rates)
            progress.update(done)
    return highest


def _to_json(score: ForecastScore, usd_per_hour: float | None) -> dict[str, object]:
    return {
        "name": score.name,
        "is_reached": score.is_reached,
        "backend_hours": score.backend_hours,
        "cost_usd": None if usd_per_hour is None else score.backend_hours * usd_per_hour,
        "adjustment": score.adjustment,
        "violations": score.violations,
        "starts": score.starts,
        "error": score.error,
    }


def _show(
    where: str,
    requests: Arrivals,
    model: ReplayModel,
    by: Adjustment,
    scores: Sequence[ForecastScore],
    usd_per_hour: float | None,
) -> None:
    setting = (
        f"set-up {format_duration(model.setup_ns)}, buckets of {format_duration(model.bucket_ns)},"
        f" {format_duration(model.service_ns)} of service within"
        f" {format_duration(model.latency_ns)}"
    )
    rate = significant(requests.mean_rate_per_s)
    show(Text(f"{where}: {len(requests):,} requests, {rate}/s; {setting}\n", "bold"))
    show(_table(by, scores, usd_per_hour))
    for line in (
        f"ranked by backend-time at {percent(model.level)} violations",
        f"{PERFECT}: every bucket is known in advance, and so is its noise, which costs starts",
        "error: of the forecasts before they are adjusted; it is not the score",
    ):
        show(Text(line))
    missed = [score for score in scores if not score.is_reached]
    for score in missed:
        least = percent(score.violations)
        show(Text(f"{score.name}: {least} violations with the largest {by}", "yellow"))
    if missed and by == "scale":
        show(Text("no factor raises a forecast of 0: try --by margin", "yellow"))


def _table(
    by: Adjustment, scores: Sequence[ForecastScore], usd_per_hour: float | None
) -> ReportTable:
    hours = [score.backend_hours if score.is_reached else nan for score in scores]
    columns = [
        format_column("forecaster", "text", [score.name for score in scores]),
        Column("backend-time", "h", format_values("rate", hours)[1]),
    ]
    if usd_per_hour is not None:
        columns.append(format_column("cost", "usd", [each * usd_per_hour for each in hours]))
    best = min((each for each in hours[:-1] if not isnan(each)), default=nan)
    columns.append(format_column("above best", "share", [each / best - 1.0 for each in hours]))
    adjustments = [score.adjustment if score.is_reached else nan for score in scores]
    starts = [score.starts if score.is_reached else nan for score in scores]
    columns += [
        format_column(by, "rate" if by == "margin" else "index", adjustments),
        format_column("starts", "count", starts),
        format_column("error", "share", [score.error for score in scores]),
    ]
    return ReportTable("", tuple(columns))
