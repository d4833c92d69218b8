"""`headgate plan`: from a profile, an objective, prices and a load to what to rent, and why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
import yaml
from rich.text import Text

from headgate.app import from_spec
from headgate.app.brief import brief
from headgate.app.names import unknown
from headgate.app.prices import read_prices
from headgate.cli.application import load_app
from headgate.cli.files import check_not_read, writing
from headgate.cli.options import (
    OutputPath,
    app_argument,
    json_option,
    seed_option,
    workload_options,
)
from headgate.cli.plan.application import planned_spec, with_workload
from headgate.cli.plan.declared import declared
from headgate.cli.plan.load import load_of
from headgate.cli.plan.tables import instance_rows, plan_json, size_rows
from headgate.cli.plan.words import infeasible_words, sentences
from headgate.cli.rows import rows_table
from headgate.cli.screen import hanging, show, show_json
from headgate.cli.workload import WorkloadOptions, choose_workload, trace_files
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Function, Pipeline
from headgate.core.offers import FunctionPlatform
from headgate.core.units import parse_size
from headgate.planning.characterisation import Characterisation
from headgate.planning.plan import INSTANCES_MAX, Infeasible, Plan, Terms, make_plan
from headgate.planning.sizing import knee_cores
from headgate.profiling import read_profile


@click.command("plan")
@app_argument
@click.option(
    "--profile",
    metavar="FILE",
    help="What was measured. Default: APP.profile.json, or profile.json.",
)
@workload_options
@click.option(
    "--prices", multiple=True, metavar="FILE", help="Prices instead of our own. May be repeated."
)
@click.option(
    "--instance",
    "instances",
    multiple=True,
    metavar="TYPE",
    help="Consider this instance type, such as ml.c5.large or ml.*. May be repeated.",
)
@click.option(
    "--instances-max",
    type=click.IntRange(min=1, max=1_000),
    default=INSTANCES_MAX,
    metavar="N",
    help=f"Rent no more than N instances. Default: {INSTANCES_MAX}.",
)
@click.option("--no-functions", is_flag=True, help="Do without functions.")
@click.option(
    "--size",
    default="knee",
    metavar="SIZE",
    help="Of functions: knee (as fast as any), cheapest, or such as 6656MiB. Default: knee.",
)
@seed_option
@click.option(
    "--write", type=OutputPath(), metavar="FILE", help="Write the planned application, beside APP."
)
@json_option
def command(
    app: str,
    profile: str | None,
    trace: str | None,
    arrivals: tuple[str, ...],
    duration_ns: int | None,
    sort: bool,
    traces: Path | None,
    prices: tuple[str, ...],
    instances: tuple[str, ...],
    instances_max: int,
    no_functions: bool,
    size: str,
    seed: int,
    write: Path | None,
    as_json: bool,
) -> int:
    """Plan for APP: which machines, how many, which functions for the rest, and why.

    Exits with 1 if the load needs more than may be rented, and with 2 if the objective cannot be
    met at any scale.

    \b
    headgate plan app.yaml
    headgate plan app.yaml --arrivals poisson:rate=50/s --duration 1h --instance 'ml.*'
    headgate plan app.yaml --write planned.yaml && headgate simulate planned.yaml
    """
    loaded = load_app(app)
    measured_at = _find_profile(profile, app)
    measured = read_profile(measured_at)
    function, pipeline = _subject(loaded.app, measured, str(measured_at), app)
    listed = read_prices(prices)
    offers = listed.instances_named(instances, "--instance")
    platform = None if no_functions else next(iter(listed.platforms), None)
    options = WorkloadOptions(trace, arrivals, duration_ns, sort, traces)
    slo_ms = pipeline.slo.latency_ns / MILLISECOND_NS
    workload = choose_workload(loaded, app, options, seed)
    terms = Terms(
        slo_ms=slo_ms,
        quantile=pipeline.slo.quantile,
        load=load_of(
            workload, loaded.app, function, slo_ms, measured.time_ms(measured.cores[-1], 1)
        ),
        instances_max=instances_max,
        size=_size(size, platform),
        start_ms=max(v.profile.start_ns for v in function.variants) / MILLISECOND_NS,
    )
    plan = make_plan(measured, offers, platform, terms)
    if isinstance(plan, Infeasible):
        problem = infeasible_words(plan, slo_ms, pipeline.slo.quantile)
        raise ConfigError(problem, where=app, key=f"pipelines.{pipeline.name}.slo")
    words = sentences(plan, measured, declared(loaded.app, function, measured, plan), listed)
    if write is not None:
        read = [Path(app), measured_at, *map(Path, prices), *trace_files(loaded, options)]
        check_not_read(write, "--write", read)
        spec = with_workload(planned_spec(loaded, function, measured, plan), pipeline, options)
        _write(write, spec, words)
    if as_json:
        facts = [asdict(fact) for fact in listed.facts]
        head = {"app": app, "function": function.name, "knee_cores": knee_cores(measured)}
        show_json({**head, **plan_json(plan), "words": words, "prices": facts})
    else:
        _show(app, function, plan, words, write)
    return 0 if plan.is_enough else 1


def _find_profile(given: str | None, app: str) -> Path:
    """The file that is named, or the one beside APP, or what `headgate profile` writes here."""
    if given is not None:
        return Path(given)
    beside = Path(app).with_suffix(".profile.json")
    found = next((path for path in (beside, Path("profile.json")) if path.exists()), None)
    if found is None:
        allowed = f"--profile FILE, as headgate profile {app} writes it"
        raise ConfigError("there is no profile", where=str(beside), allowed=allowed)
    return found


def _subject(
    app: App, measured: Characterisation, where: str, reference: str
) -> tuple[Function, Pipeline]:
    """The function that was measured, and the pipeline whose objective it has to meet."""
    known = {function.name: function for function in app.functions}
    function = known.get(measured.function)
    if function is None:
        raise unknown("function", measured.function, known, where=where, key="function")
    alone = [p for p in app.pipelines if [s.function for s in p.stages] == [function]]
    if not alone:
        problem = "is never the only stage of a pipeline, so it has no objective of its own"
        raise ConfigError(problem, where=reference, key="functions", value=function.name)
    pipeline = min(alone, key=lambda p: p.slo.latency_ns)
    if pipeline.slo.latency_ns == NEVER_NS:
        key = f"pipelines.{pipeline.name}.slo"
        raise ConfigError("has no latency", where=reference, key=key, allowed="{latency: 200ms}")
    return function, pipeline


def _size(text: str, platform: FunctionPlatform | None) -> str:
    """The size of functions as `Terms` has it."""
    if text in ("knee", "cheapest"):
        return text
    size = parse_size(text, where="--size")
    sizes = platform.sizes_bytes if platform is not None else ()
    if size not in sizes:
        allowed = ", ".join(["knee", "cheapest", *(f"{each >> 20}MiB" for each in sizes)])
        raise ConfigError("is no size to choose", where="--size", value=text, allowed=allowed)
    return str(size)


def _write(path: Path, spec: dict[str, object], words: list[str]) -> None:
    from_spec(spec, str(path))  # whatever is wrong with it is said now
    text = yaml.safe_dump(brief(spec), sort_keys=False, default_flow_style=None, width=100)
    with writing(path, "--write"):
        path.write_text(f"# {words[0]}\n{text}", encoding="utf-8")


def _show(app: str, function: Function, plan: Plan, words: list[str], write: Path | None) -> None:
    aim = f"{plan.terms.slo_ms:g} ms at {100 * plan.terms.quantile:g} %"
    show(Text(f"{app}: {function.name} within {aim}\n", "bold"))
    show(rows_table(instance_rows(plan), "Instances"))
    if plan.sizes:
        name = plan.platform.name if plan.platform is not None else ""
        show(rows_table(size_rows(plan), f"Functions of {name}"))
    show(*(hanging("-", 2, sentence) for sentence in words))
    if write is not None:
        show(Text(f"\ntry it: headgate simulate {write} --policy threshold"))
