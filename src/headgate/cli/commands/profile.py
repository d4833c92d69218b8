"""`headgate profile`: how long a function takes, alone and in company, and how it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
from rich.text import Text

from headgate.cli.app_loading import load_app
from headgate.cli.options import OutputPath, check_not_read, json_option, writing
from headgate.cli.output import Progress, plain, rows_table, show, show_json
from headgate.config import AppConfig
from headgate.config.errors import unknown_name_error
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.units import parse_duration, parse_fraction
from headgate.metrics.report.style import new_figure, save_png
from headgate.planning.latency_model import Characterisation, Point
from headgate.profiling.csv_import import read_tables
from headgate.profiling.machine import this_machine, usable_cores
from headgate.profiling.probe_client import ProbeTask
from headgate.profiling.profile_file import to_profile_json
from headgate.profiling.profiler import ProfileResult, ProfilerSettings, profile
from headgate.profiling.report import Objective, profile_figure, summarise

CONCURRENCY: Final = "1,2,3,5,8,12,20"
BATCH_MAX: Final = 8  # by default
COUNT_MAX: Final = 1_000
OUT: Final = Path("profile.json")


def counts(option: str) -> Callable[[str], tuple[int, ...]]:
    """Return what reads `1,2,4` for an option: in order, each once."""

    def read(text: str) -> tuple[int, ...]:
        try:
            found = sorted({int(part) for part in text.split(",")})
        except ValueError:
            found = [0]
        if found[0] < 1 or found[-1] > COUNT_MAX:
            allowed = f"whole numbers from 1 to {COUNT_MAX}, such as 1,2,4"
            raise ConfigError("are no counts", where=option, value=text, allowed=allowed)
        return tuple(found)

    return read


def duration_s(option: str) -> Callable[[str], float]:
    """Return what reads `60s` for an option: longer than zero."""

    def read(text: str) -> float:
        duration_ns = parse_duration(text, where=option)
        if duration_ns == 0:
            problem = "must be longer than zero"
            raise ConfigError(problem, where=option, value=text, allowed="200ms, 60s")
        return duration_ns / 1e9

    return read


def precision(text: str) -> float:
    """Read `5%`."""
    value = parse_fraction(text, where="--precision")
    if value == 0:
        problem = "nothing is known that well"
        raise ConfigError(problem, where="--precision", value=text, allowed="5%, 1%")
    return value


@dataclass(frozen=True, slots=True)
class Grid:
    """Where to measure, as the command line says it; None is up to the machine and the model."""

    cores: tuple[int, ...] | None
    concurrency: tuple[int, ...]
    batches: tuple[int, ...] | None


@click.command("profile")
@click.argument("app", required=False)
@click.option("--function", metavar="NAME", help="Which one, where there are several.")
@click.option(
    "--cores",
    type=counts("--cores"),
    metavar="N,N,...",
    help="Default: 1, 2, 4, ... up to all there are.",
)
@click.option(
    "--concurrency",
    type=counts("--concurrency"),
    metavar="N,N,...",
    default=CONCURRENCY,
    help=f"Default: {CONCURRENCY}.",
)
@click.option(
    "batches",
    "--batch",
    type=counts("--batch"),
    metavar="N,N,...",
    help="Default: 1, and 8 if it can.",
)
@click.option(
    "--budget",
    type=duration_s("--budget"),
    default="60s",
    metavar="TIME",
    help="When to end, even if not everything is known so well. Default: 60s.",
)
@click.option(
    "--precision",
    type=precision,
    default="5%",
    metavar="SHARE",
    help="A place is done when its median is known so well (95 % confidence). Default: 5%.",
)
@click.option("--store", metavar="DIR|s3://...", help="Fetch the model from there in a cold start.")
@click.option(
    "--slo",
    type=duration_s("--slo"),
    metavar="LATENCY",
    help="Objective, at p99. Default: that of APP.",
)
@click.option("--by", metavar="NAME", help="Who measured, for the file.")
@click.option(
    "--out", type=OutputPath(), default=OUT, metavar="FILE", help="Default: profile.json."
)
@click.option("--figure", type=OutputPath(), metavar="FILE", help="Default: beside --out, as PNG.")
@click.option(
    "tables",
    "--import",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="TABLE",
    help="Measure nothing: read a CSV of times. May be repeated.",
)
@json_option
def command(
    app: str | None,
    function: str | None,
    cores: tuple[int, ...] | None,
    concurrency: tuple[int, ...],
    batches: tuple[int, ...] | None,
    budget: float,
    precision: float,
    store: str | None,
    slo: float | None,
    by: str | None,
    out: Path,
    figure: Path | None,
    tables: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measure a function of APP on this machine, and write its profile and a picture of it.

    Response times over cores, requests at once and batch, each function in a process of its own on
    pinned cores; a cold start in its parts; memory. Or read tables that were measured elsewhere.

    \b
    headgate profile app.yaml --budget 30s
    headgate profile --import cpu_concurrency_latency.csv --function recommender --slo 50ms
    """
    _check(app, tables, out, figure)
    objective = None if slo is None else Objective(1e3 * slo, 0.99)
    measured: ProfileResult | None = None
    if app is None:
        found = read_tables(tables, function)
        document = {**found.to_json(), "imported": [path.name for path in tables], "by": by}
    else:
        loaded = load_app(app)
        task, batch_max = _task(loaded, app, function)
        settings = _settings(Grid(cores, concurrency, batches), budget, precision, store, batch_max)
        measured = _measure(task, settings)
        found = measured.characterisation
        at = datetime.now(UTC).isoformat(timespec="seconds")
        document = to_profile_json(measured, settings, this_machine(), at=at, by=by)
        objective = objective or _objective(loaded, task.function)
    drawn = _write(document, found, objective, out, figure)
    if as_json:
        show_json(document)
    else:
        _show(found, measured, objective, [path for path in (out, drawn) if path is not None])


def _check(app: str | None, tables: tuple[Path, ...], out: Path, figure: Path | None) -> None:
    """Refuse what cannot come to a good end, now rather than after a long run."""
    if bool(tables) == (app is not None):
        allowed = "headgate profile APP, or headgate profile --import TABLE"
        raise ConfigError("needs an application or tables, not both", where="profile",
                          allowed=allowed)  # fmt: skip
    read = [*tables, *([Path(app)] if app is not None else [])]
    for path, option in ((out, "--out"), (figure, "--figure")):
        check_not_read(path, option, read)
        if path is not None and not path.parent.is_dir():
            raise ConfigError("cannot be written there", where=option, value=str(path))
    if (figure or out.with_suffix(".png")).resolve() == out.resolve():
        raise ConfigError("is where the figure goes", where="--out", value=str(out),
                          allowed="profile.json")  # fmt: skip
    if figure is not None:
        new_figure()


def _task(loaded: AppConfig, where: str, function: str | None) -> tuple[ProbeTask, int]:
    """Return what is to be measured, and the largest batch it is served with."""
    served = {}
    for each in loaded.app.functions:
        for variant in reversed(each.variants):  # the first one that can be served
            source = loaded.sources[variant.id]
            if source is not None:
                served[each.name] = source
    if not served:
        problem = "has no function with `model` or `code`: there is nothing to measure"
        raise ConfigError(problem, where=where, key="functions")
    if function is None and len(served) > 1:
        problem = "there are several: say which"
        raise ConfigError(problem, where=where, key="--function", allowed=", ".join(served))
    name = function or next(iter(served))
    if name not in served:
        raise unknown_name_error("function", name, served, where=where, key="--function")
    source = served[name]
    is_file = where.endswith((".yaml", ".yml"))
    base = Path(where).resolve().parent if is_file else Path.cwd()
    task = ProbeTask(name, source.model, source.code, dict(source.options), str(base))
    return task, source.batch


def _settings(
    grid: Grid, budget_s: float, precision: float, store: str | None, batch_max: int
) -> ProfilerSettings:
    there = len(usable_cores())
    cores = grid.cores
    if cores is None:
        cores = (*(1 << power for power in range((there - 1).bit_length())), there)
    if cores[-1] > there:
        has = f"this machine has {there} core{'' if there == 1 else 's'} to use"
        raise ConfigError(has, where="--cores", value=cores[-1], allowed=f"1 to {there}")
    if store is not None and not store.strip():
        allowed = "a directory, s3://bucket/prefix"
        raise ConfigError("is empty", where="--store", value=store, allowed=allowed)
    batches = grid.batches or tuple(sorted({1, min(BATCH_MAX, batch_max)}))
    return ProfilerSettings(cores, grid.concurrency, batches, budget_s, precision, store)


def _measure(task: ProbeTask, settings: ProfilerSettings) -> ProfileResult:
    with Progress(f"profiling {task.function}") as progress:
        return profile(
            task,
            settings,
            this_machine().cpu,
            lambda title, done, total: progress.say(f"{task.function}: {title}", done, total),
        )


def _objective(loaded: AppConfig, function: str) -> Objective | None:
    """Return the objective of the function where it is all of a pipeline."""
    for pipeline in loaded.app.pipelines:
        names = [stage.function.name for stage in pipeline.stages]
        if names == [function] and pipeline.slo.latency_ns < NEVER_NS:
            return Objective(pipeline.slo.latency_ns / 1e6, pipeline.slo.quantile)
    return None


def _write(
    document: dict[str, object],
    found: Characterisation,
    objective: Objective | None,
    out: Path,
    figure: Path | None,
) -> Path | None:
    """Write both files; return where the figure is, if plots can be made."""
    with writing(out, "--out"):
        out.write_text(json.dumps(plain(document), indent=1) + "\n", encoding="utf-8")
    if figure is None and find_spec("matplotlib") is None:
        return None
    figure = figure or out.with_suffix(".png")
    drawn = profile_figure(found, objective.latency_ms if objective is not None else None)
    with writing(figure, "--figure"):
        return save_png(drawn, figure)


def _show(
    found: Characterisation,
    measured: ProfileResult | None,
    objective: Objective | None,
    written: list[Path],
) -> None:
    show(Text(f"{found.function} on {found.device}: response times in ms\n", "bold"))
    show(rows_table([_row(point) for point in found.points]))
    for sentence in summarise(found, objective):
        show(Text(sentence))
    if measured is not None and not measured.batches:
        show(Text("It takes one item at a time: larger batches were not measured.", "yellow"))
    if measured is not None and measured.skipped:
        first = measured.skipped[0]
        example = f"{first.cores} cores, {first.concurrency} at once, batch {first.batch}"
        missing = f"{len(measured.skipped)} places were not measured (the first: {example})"
        show(Text(f"For want of time {missing}: --budget gives it more.", "yellow"))
    show(Text(f"written: {', '.join(map(str, written))}"))


def _row(point: Point) -> dict[str, object]:
    row: dict[str, object] = {
        "cores": round(point.cores, 3),
        "at_once": point.concurrency,
        "batch": point.batch,
        "p50": point.p50_ms,
    }
    if point.p50_low_ms is not None and point.p50_high_ms is not None:
        half = (point.p50_high_ms - point.p50_low_ms) / 2
        row["±_%"] = round(100 * half / point.p50_ms, 1)
    return {**row, "p95": point.p95_ms, "p99": point.p99_ms, "samples": point.samples or None}
