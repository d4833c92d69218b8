"""`headgate profile`: measures latency by cores, concurrency and batch size, and cold starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
from rich.text import Text

from headgate.cli.app_loading import base_directory, load_app
from headgate.cli.options import (
    OutputPath,
    check_not_read,
    duration_option,
    json_option,
    writing,
)
from headgate.cli.output import Progress, show, show_json
from headgate.config import AppConfig
from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.units import parse_fraction
from headgate.metrics.format import json_value
from headgate.metrics.report.style import new_figure, save_png
from headgate.metrics.table import rows_table
from headgate.planning.capacity.latency_model import Characterisation, Point
from headgate.profiling.probe_client import ProbeTask
from headgate.profiling.profile_file import read_tables, to_profile_json
from headgate.profiling.profiler import (
    ProfileResult,
    ProfilerSettings,
    profile,
    this_machine,
    usable_cores,
)
from headgate.profiling.report import Objective, profile_figure, summarise

CONCURRENCY: Final = "1,2,3,5,8,12,20"
BATCH_MAX: Final = 8  # by default
COUNT_MAX: Final = 1_000
OUT: Final = Path("profile.json")


def counts(option: str) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of `1,2,4` for an option; the numbers are sorted and distinct."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = sorted({int(part) for part in text.split(",")})
        except ValueError:
            numbers = [0]
        if numbers[0] < 1 or numbers[-1] > COUNT_MAX:
            allowed = f"whole numbers from 1 to {COUNT_MAX}, such as 1,2,4"
            raise ConfigError("is not a list of counts", where=option, value=text, allowed=allowed)
        return tuple(numbers)

    return read


def precision(text: str) -> float:
    """Parse a share above zero, such as `5%`."""
    value = parse_fraction(text, where="--precision")
    if value == 0:
        problem = "must be more than zero"
        raise ConfigError(problem, where="--precision", value=text, allowed="5%, 1%")
    return value


def store_location(text: str) -> str:
    """Parse the location of a model store: any text that is not blank."""
    if not text.strip():
        allowed = "a directory, s3://bucket/prefix"
        raise ConfigError("is empty", where="--store", value=text, allowed=allowed)
    return text


@click.command("profile")
@click.argument("app", required=False)
@click.option("--function", metavar="NAME", help="Function to profile, if APP has several.")
@click.option(
    "--cores",
    type=counts("--cores"),
    metavar="N,N,...",
    help="Core counts to measure. Default: 1, 2, 4, ... up to all cores.",
)
@click.option(
    "--concurrency",
    type=counts("--concurrency"),
    metavar="N,N,...",
    default=CONCURRENCY,
    help=f"Numbers of concurrent requests to measure. Default: {CONCURRENCY}.",
)
@click.option(
    "batches",
    "--batch",
    type=counts("--batch"),
    metavar="N,N,...",
    help="Batch sizes to measure. Default: 1, and 8 if the function supports it.",
)
@duration_option(
    "budget_ns",
    "--budget",
    "Time limit, even if --precision is not reached. Default: 60s.",
    default="60s",
)
@click.option(
    "--precision",
    type=precision,
    default="5%",
    metavar="SHARE",
    help="Half width of the confidence interval (95 %) of each median. Default: 5%.",
)
@click.option(
    "--store",
    type=store_location,
    metavar="DIR|s3://...",
    help="Include fetching the model from this store in cold starts.",
)
@duration_option(
    "slo_ns",
    "--slo",
    "Latency objective at p99. Default: that of APP.",
    metavar="LATENCY",
)
@click.option(
    "--author", metavar="NAME", help="Author of the measurement, recorded in the profile."
)
@click.option(
    "--out",
    type=OutputPath(),
    default=OUT,
    metavar="FILE",
    help="File for the profile. Default: profile.json.",
)
@click.option(
    "--figure",
    type=OutputPath(),
    metavar="FILE",
    help="File for the plot. Default: beside --out, as PNG.",
)
@click.option(
    "tables",
    "--import",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="TABLE",
    help="Import a CSV of latencies instead of measuring. May be repeated.",
)
@json_option
def command(
    app: str | None,
    function: str | None,
    cores: tuple[int, ...] | None,
    concurrency: tuple[int, ...],
    batches: tuple[int, ...] | None,
    budget_ns: int,
    precision: float,
    store: str | None,
    slo_ns: int | None,
    author: str | None,
    out: Path,
    figure: Path | None,
    tables: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measure a function of APP on this machine, and write its profile and a plot of it.

    A profile has response times by cores, concurrency and batch size (each measured in a process of
    its own on pinned cores), the phases of a cold start, and memory. Or import tables that were
    measured elsewhere.

    \b
    headgate profile app.yaml --budget 30s
    headgate profile --import cpu_concurrency_latency.csv --function recommender --slo 50ms
    """
    _check(app, tables, out, figure)
    objective = None if slo_ns is None else Objective(slo_ns / MILLISECOND_NS, 0.99)
    measured: ProfileResult | None = None
    if app is None:
        characterisation = read_tables(tables, function)
        document = {
            **characterisation.to_json(),
            "imported": [path.name for path in tables],
            "by": author,
        }
    else:
        config = load_app(app)
        task, batch_max = _task(config, app, function)
        settings = ProfilerSettings(
            _cores(cores),
            concurrency,
            batches or tuple(sorted({1, min(BATCH_MAX, batch_max)})),
            budget_ns / SECOND_NS,
            precision,
            store,
        )
        measured = _measure(task, settings)
        characterisation = measured.characterisation
        at = datetime.now(UTC).isoformat(timespec="seconds")
        document = to_profile_json(measured, settings, this_machine(), at=at, by=author)
        objective = objective or _objective(config, task.function)
    plot = _write(document, characterisation, objective, out, figure)
    if as_json:
        show_json(document)
    else:
        written = [path for path in (out, plot) if path is not None]
        _show(characterisation, measured, objective, written)


def _check(app: str | None, tables: tuple[Path, ...], out: Path, figure: Path | None) -> None:
    """Refuse arguments that cannot work before the run rather than after it."""
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
        raise ConfigError("is also the file of the plot", where="--out", value=str(out),
                          allowed="profile.json")  # fmt: skip
    if figure is not None:
        new_figure()


def _task(config: AppConfig, where: str, function: str | None) -> tuple[ProbeTask, int]:
    """Return the function to measure, and the largest batch it is served with."""
    served = {}
    for each in config.app.functions:
        for variant in reversed(each.variants):  # so that the first one that can be served counts
            source = config.sources[variant.id]
            if source is not None:
                served[each.name] = source
    if not served:
        problem = "has no function with `model` or `code` to measure"
        raise ConfigError(problem, where=where, key="functions")
    if function is None and len(served) > 1:
        problem = "is required: the application has several functions"
        raise ConfigError(problem, where=where, key="--function", allowed=", ".join(served))
    name = function or next(iter(served))
    if name not in served:
        raise unknown_name_error("function", name, served, where=where, key="--function")
    source = served[name]
    base = str(base_directory(where))
    task = ProbeTask(name, source.model, source.code, dict(source.options), base)
    return task, source.batch_max


def _cores(cores: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the core counts to measure, by default powers of two and all that are usable."""
    available = len(usable_cores())
    if cores is None:
        return (*(1 << power for power in range((available - 1).bit_length())), available)
    if cores[-1] > available:
        problem = f"this machine has {available} usable core{'' if available == 1 else 's'}"
        raise ConfigError(problem, where="--cores", value=cores[-1], allowed=f"1 to {available}")
    return cores


def _measure(task: ProbeTask, settings: ProfilerSettings) -> ProfileResult:
    with Progress(f"profiling {task.function}") as progress:
        return profile(
            task,
            settings,
            this_machine().cpu,
            lambda title, done, total: progress.describe(f"{task.function}: {title}", done, total),
        )


def _objective(config: AppConfig, function: str) -> Objective | None:
    """Return the objective of the pipeline that consists of the function alone, if any."""
    for pipeline in config.app.pipelines:
        names = [stage.function.name for stage in pipeline.stages]
        if names == [function] and pipeline.slo.latency_ns < NEVER_NS:
            return Objective(pipeline.slo.latency_ns / 1e6, pipeline.slo.quantile)
    return None


def _write(
    document: dict[str, object],
    characterisation: Characterisation,
    objective: Objective | None,
    out: Path,
    figure: Path | None,
) -> Path | None:
    """Write both files; return the path of the plot, if matplotlib is installed."""
    with writing(out, "--out"):
        out.write_text(json.dumps(json_value(document), indent=1) + "\n", encoding="utf-8")
    if figure is None and find_spec("matplotlib") is None:
        return None
    figure = figure or out.with_suffix(".png")
    latency_ms = objective.latency_ms if objective is not None else None
    plot = profile_figure(characterisation, latency_ms)
    with writing(figure, "--figure"):
        return save_png(plot, figure)


def _show(
    characterisation: Characterisation,
    measured: ProfileResult | None,
    objective: Objective | None,
    written: list[Path],
) -> None:
    title = f"{characterisation.function} on {characterisation.device}: response times in ms\n"
    show(Text(title, "bold"))
    show(rows_table([_row(point) for point in characterisation.points]))
    for sentence in summarise(characterisation, objective):
        show(Text(sentence))
    if measured is not None and not measured.batches:
        note = "The function takes one item at a time: larger batches were not measured."
        show(Text(note, "yellow"))
    if measured is not None and measured.skipped:
        first = measured.skipped[0]
        example = f"{first.cores} cores, {first.concurrency} at once, batch {first.batch}"
        skipped = f"{len(measured.skipped)} grid points were not measured (the first: {example})"
        show(Text(f"Out of time: {skipped}. A longer --budget helps.", "yellow"))
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
