"""`headgate plan`: plans capacity for a function, or the configurations of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import nan
from pathlib import Path
from shlex import quote
from typing import Final

import click
import numpy as np
from click.core import ParameterSource
from rich.text import Text

from headgate.cli.app_loading import load_app, with_known_times, write_app
from headgate.cli.options import (
    OutputPath,
    WorkloadOptions,
    app_argument,
    check_not_read,
    json_option,
    seed_option,
    workload_options,
)
from headgate.cli.output import hanging_indent, show, show_json
from headgate.cli.plan_output import (
    Spec,
    current_setup,
    infeasible_text,
    left_out,
    planned_spec,
    sentences,
    with_workload,
)
from headgate.cli.plan_pipeline import PipelineOptions, pipeline_options, plan_pipelines
from headgate.cli.workload import Workload, choose_workload, trace_files
from headgate.config import from_spec
from headgate.config.prices import read_prices
from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.model import App, FaasOffering, Function, Pipeline
from headgate.core.units import format_duration, format_size, parse_size
from headgate.metrics.format import format_cell, ms, percent, significant
from headgate.metrics.table import Column, Fields, ReportTable, field_columns, format_column
from headgate.planning.capacity.latency_model import Characterisation, Point
from headgate.planning.capacity.mix import (
    Ints,
    LoadProfile,
    Mix,
    RateLevel,
    break_even_rate,
    closed_load,
    open_load,
)
from headgate.planning.capacity.plan import (
    INSTANCES_MAX,
    CapacityPlan,
    Infeasible,
    Terms,
    make_plan,
)
from headgate.planning.capacity.sizing import InstanceCapacity, SizeRow, knee_cores
from headgate.profiling.profile_file import read_profile
from headgate.workload import Arrivals, ClosedLoop

# Parameters of the command that say something about one of its two plans only.
_CAPACITY_OPTIONS: Final = (
    "profile", "trace", "arrivals", "duration_ns", "sort", "traces", "prices", "instances",
    "instances_max", "no_functions", "size", "seed", "write",
)  # fmt: skip
_PIPELINE_OPTIONS: Final = ("batch_max", "cold", "figure")
_MIX: Final[Fields] = (
    ("needed", "count", "instances"),
    ("per 1000", "usd", "usd_per_1k"),
    ("met", "share", "attainment"),
)


@click.command("plan")
@app_argument
@click.option(
    "--profile",
    metavar="FILE",
    help="Profile of the function. Default: APP.profile.json, or profile.json.",
)
@workload_options
@click.option(
    "--prices",
    multiple=True,
    metavar="FILE",
    help="Price list in place of the bundled ones. May be repeated.",
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
@click.option("--no-functions", is_flag=True, help="Plan instances only, without functions.")
@click.option(
    "--size",
    default="knee",
    metavar="SIZE",
    help="Function size: knee (as fast as any), cheapest, or a size (6656MiB). Default: knee.",
)
@seed_option
@click.option(
    "--write", type=OutputPath(), metavar="FILE", help="Write the planned application to this file."
)
@pipeline_options
@json_option
def command(
    app: str,
    pipeline_options: PipelineOptions,
    profile: str | None,
    workload_options: WorkloadOptions,
    prices: tuple[str, ...],
    instances: tuple[str, ...],
    instances_max: int,
    no_functions: bool,
    size: str,
    seed: int,
    write: Path | None,
    as_json: bool,
) -> int:
    """Plan capacity for APP: which instances, how many, and which functions for the spillover.

    Exits with 1 if the load needs more than --instances-max, and with 2 if the objective cannot be
    met at any scale. For pipelines of several stages: the cheapest variant, pool and batch size of
    each stage within the objective, from the pipeline's frontier of time and cost.

    \b
    headgate plan app.yaml
    headgate plan app.yaml --pipeline ensemble --figure frontier.png
    headgate plan app.yaml --arrivals poisson:rate=50/s --duration 1h --instance 'ml.*'
    headgate plan app.yaml --write planned.yaml && headgate simulate planned.yaml
    """
    config = load_app(app)
    is_for_stages = all(len(pipeline.stages) > 1 for pipeline in config.app.pipelines)
    if pipeline_options.pipeline is not None or is_for_stages:
        _refuse(_CAPACITY_OPTIONS, "plans capacity, not the stages of a pipeline")
        known = with_known_times(config, app, None).app
        return plan_pipelines(known, app, pipeline_options, as_json=as_json)
    _refuse(_PIPELINE_OPTIONS, "needs --pipeline NAME")
    profile_path = _find_profile(profile, app)
    measured, noisy = _without_noise(read_profile(profile_path), profile_path)
    function, planned = _planned_function(config.app, measured, str(profile_path), app)
    price_list = read_prices(prices)
    offers = price_list.instances_named(instances, "--instance")
    platform = None if no_functions else next(iter(price_list.platforms), None)
    slo_ms = planned.slo.latency_ns / MILLISECOND_NS
    workload = choose_workload(config, app, workload_options, seed)
    isolated_ms = measured.time_ms(measured.cores[-1], 1)
    load = load_profile(workload, config.app, function, slo_ms, isolated_ms)
    start_ms = max(v.profile.cold_start_ns for v in function.variants) / MILLISECOND_NS
    chosen = _size(size, platform)
    terms = Terms(slo_ms, planned.slo.quantile, load, instances_max, chosen, start_ms)
    plan = make_plan(measured, offers, platform, terms)
    if isinstance(plan, Infeasible):
        problem = infeasible_text(plan, slo_ms, planned.slo.quantile)
        raise ConfigError(problem, where=app, key=f"pipelines.{planned.name}.slo")
    now = current_setup(config.app, function, measured, plan)
    explanation = [*sentences(plan, measured, now, price_list), *left_out(measured, noisy)]
    if write is not None:
        inputs = [Path(app), profile_path, *map(Path, prices)]
        check_not_read(write, "--write", [*inputs, *trace_files(config, workload_options)])
        spec = planned_spec(config, function, measured, plan)
        _write(write, with_workload(spec, planned, workload_options), explanation[0])
    if as_json:
        provenance = [asdict(row) for row in price_list.provenance]
        head = {"app": app, "function": function.name, "knee_cores": knee_cores(measured)}
        show_json({**head, **plan_json(plan), "explanation": explanation, "prices": provenance})
    else:
        _show(app, function, plan, explanation, write)
    return 0 if plan.is_enough else 1


def _write(path: Path, spec: Spec, comment: str) -> None:
    from_spec(spec, str(path))  # raises now if the planned application is not valid
    write_app(path, "--write", spec, comment=f"# {comment}\n")


def _refuse(names: Sequence[str], problem: str) -> None:
    """Raise if one of these parameters was given on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            raise click.UsageError(f"{parameter.opts[-1]} {problem}.")


def load_profile(
    workload: Workload, app: App, function: Function, slo_ms: float, isolated_ms: float
) -> LoadProfile:
    """Return the load of the requests that need the function.

    Closed-loop clients with a think time are treated as open-loop arrivals, at the rate that they
    would have if every response took `isolated_ms`.
    """
    others = {
        pipeline.name
        for pipeline in app.pipelines
        if all(stage.function is not function for stage in pipeline.stages)
    }
    loops = [loop for loop in workload.loops if loop.pipeline not in others]
    times_ns = _times_ns(workload.arrivals, others)
    if (len(times_ns) and loops) or len({loop.think_ns for loop in loops}) > 1:
        problem = "mixes closed-loop clients with other requests or think times"
        raise ConfigError(problem, where="the workload", allowed="one kind at a time")
    clients = (
        step.clients for loop in loops for step in loop.steps if step.at_ns < loop.duration_ns
    )
    if not len(times_ns) and not any(clients):
        problem = f"has no requests for {function.name}"
        raise ConfigError(problem, where="the workload", allowed="--arrivals PROCESS, --trace FILE")
    return (
        _closed_load(loops, isolated_ms)
        if loops
        else open_load(times_ns, workload.window_ns, slo_ms)
    )


def _times_ns(arrivals: Arrivals | None, others: set[str]) -> Ints:
    if arrivals is None:
        return np.zeros(0, dtype=np.int64)
    excluded = [index for index, name in enumerate(arrivals.pipelines) if name in others]
    times_ns = arrivals.times_ns
    return times_ns[~np.isin(arrivals.pipeline, excluded)] if excluded else times_ns


def _closed_load(loops: list[ClosedLoop], isolated_ms: float) -> LoadProfile:
    duration_ns = max(loop.duration_ns for loop in loops)
    instants = {0, *(step.at_ns for loop in loops for step in loop.steps)}
    starts_ns = sorted(instant for instant in instants if instant < duration_ns)
    clients = [(start, sum(loop.clients_at(start) for loop in loops)) for start in starts_ns]
    load = closed_load(clients, duration_ns)
    think_s = loops[0].think_ns / SECOND_NS
    if think_s == 0.0:
        return load
    cycle_s = think_s + isolated_ms / 1e3
    return LoadProfile(
        tuple(RateLevel(level.share, rate_per_s=level.clients / cycle_s) for level in load.levels),
        load.duration_s,
        load.rises,
    )


def _find_profile(given: str | None, app: str) -> Path:
    """Return the given file, or the profile beside APP, or the one in the working directory."""
    if given is not None:
        return Path(given)
    beside = Path(app).with_suffix(".profile.json")
    path = next((path for path in (beside, Path("profile.json")) if path.exists()), None)
    if path is None:
        allowed = f"--profile FILE, as headgate profile {app} writes it; or --pipeline NAME"
        allowed += ", which plans by `exec_time`"
        raise ConfigError("there is no profile", where=str(beside), allowed=allowed)
    return path


def _without_noise(
    profile: Characterisation, path: Path
) -> tuple[Characterisation, tuple[Point, ...]]:
    """Return the profile without the rows that are noise, and those rows.

    Raises `ConfigError` if there is nothing left to plan with: plans are made of single items.
    """
    noisy = tuple(point for point in profile.points if point.is_noise)
    if noisy and all(point.is_noise or point.batch > 1 for point in profile.points):
        problem = "is all noise: no row of batch 1 has an interval narrower than its median"
        allowed = "a profile that was measured where nothing else runs, or with a longer --budget"
        raise ConfigError(problem, where=str(path), allowed=allowed)
    return profile.without(noisy), noisy


def _planned_function(
    app: App, measured: Characterisation, where: str, reference: str
) -> tuple[Function, Pipeline]:
    """Return the profiled function, and the pipeline whose objective it has to meet."""
    known = {function.name: function for function in app.functions}
    function = known.get(measured.function)
    if function is None:
        raise unknown_name_error("function", measured.function, known, where=where, key="function")
    pipelines = [p for p in app.pipelines if [s.function for s in p.stages] == [function]]
    if not pipelines:
        problem = "is never the only stage of a pipeline, so it has no objective of its own"
        raise ConfigError(problem, where=reference, key="functions", value=function.name)
    pipeline = min(pipelines, key=lambda p: p.slo.latency_ns)
    if pipeline.slo.latency_ns == NEVER_NS:
        key = f"pipelines.{pipeline.name}.slo"
        raise ConfigError("has no latency", where=reference, key=key, allowed="{latency: 200ms}")
    return function, pipeline


def _size(text: str, platform: FaasOffering | None) -> str:
    """Return the size of functions for `Terms`."""
    if text in ("knee", "cheapest"):
        return text
    size = parse_size(text, where="--size")
    sizes = platform.sizes_bytes if platform is not None else ()
    if size not in sizes:
        allowed = ", ".join(["knee", "cheapest", *(f"{each >> 20}MiB" for each in sizes)])
        raise ConfigError("is not an available size", where="--size", value=text, allowed=allowed)
    return str(size)


def _show(
    app: str, function: Function, plan: CapacityPlan, explanation: list[str], write: Path | None
) -> None:
    aim = f"{ms(plan.terms.slo_ms)} at {percent(plan.terms.quantile)}"
    show(Text(f"{app}: {function.name} within {aim}\n", "bold"))
    show(instance_table(plan))
    if plan.sizes:
        show(size_table(plan))
    show(*(hanging_indent("-", 2, sentence) for sentence in explanation))
    if write is not None:
        show(Text(f"\ntry it: headgate simulate {quote(str(write))} --policy threshold"))


def instance_table(plan: CapacityPlan) -> ReportTable:
    """Return one row per instance type; `>` marks the recommended one."""
    capacities = plan.capacities
    types = [capacity.instance_type for capacity in capacities]
    names = [
        f"{'>' if plan.mix.capacity is capacity else ' '} {offer.name}"
        + ("*" if capacity.is_extrapolated else "")
        for capacity, offer in zip(capacities, types, strict=True)
    ]
    holds = [f"{c.threshold}{'+' if c.is_lower_bound else ''}" for c in capacities]
    return ReportTable(
        "Instances",
        (
            format_column("  instance", "text", names),
            Column("CPUs", "", tuple(significant(offer.cpus) for offer in types)),
            format_column("per hour", "usd", [offer.usd_per_hour for offer in types]),
            format_column("isolated", "time_ms", [c.isolated_ms for c in capacities]),
            Column("holds", "", tuple(holds)),
            format_column("serves", "rate", [c.rate_per_s or nan for c in capacities]),
            format_column("break-even", "rate", [_break_even(plan, c) for c in capacities]),
            *field_columns(_MIX, plan.by_type),
        ),
    )


def size_table(plan: CapacityPlan) -> ReportTable:
    """Return one row per size of functions; `>` marks the recommended one."""
    sizes = plan.sizes
    selected = None if plan.faas is None else plan.faas.row
    names = [
        f"{'>' if row is selected else ' '} {row.memory_bytes >> 20}"
        + ("*" if row.is_extrapolated else "")
        for row in sizes
    ]
    in_time = [
        format_cell(row.is_within_slo) if row.has_enough_memory else "no room" for row in sizes
    ]
    return ReportTable(
        "Functions" if plan.platform is None else f"Functions of {plan.platform.name}",
        (
            Column("  size", "  MiB", tuple(names), is_text=True),
            Column("CPUs", "", tuple(f"{row.cpus:.2f}" for row in sizes)),
            format_column("isolated", "time_ms", [row.time_ms for row in sizes]),
            format_column("per million", "usd", [1e6 * row.usd_per_call for row in sizes]),
            format_column("in time", "text", in_time),
            format_column("is", "text", [", ".join(_names(plan, row)) for row in sizes]),
        ),
    )


def plan_json(plan: CapacityPlan) -> dict[str, object]:
    terms, load = plan.terms, plan.terms.load
    return {
        "slo_ms": terms.slo_ms,
        "quantile": terms.quantile,
        "load": {
            "rate_per_s": load.rate_per_s,
            "peak_per_s": load.peak_per_s,
            "peak_clients": load.peak_clients,
            "duration_s": load.duration_s,
        },
        "instances": [_instance_json(plan, capacity) for capacity in plan.capacities],
        "sizes": [_size_json(plan, row) for row in plan.sizes],
        "mix": _mix_json(plan.mix),
        "functions_alone": _mix_json(plan.faas_only),
        "instances_alone": _mix_json(plan.instances_only),
        "is_enough": plan.is_enough,
        "instances_short": plan.instances_missing,
    }


def _break_even(plan: CapacityPlan, capacity: InstanceCapacity) -> float:
    """Return the rate at which functions cost as much as the instance; NaN without functions."""
    if plan.faas is None:
        return nan
    return break_even_rate(capacity.instance_type.usd_per_hour, plan.faas.row.usd_per_call)


def _names(plan: CapacityPlan, row: SizeRow) -> list[str]:
    return [name for name, one in (("knee", plan.knee), ("cheapest", plan.cheapest)) if one is row]


def _instance_json(plan: CapacityPlan, capacity: InstanceCapacity) -> dict[str, object]:
    return {
        "name": capacity.instance_type.name,
        "cpus": capacity.instance_type.cpus,
        "memory": format_size(capacity.instance_type.memory_bytes),
        "boot_time": format_duration(capacity.instance_type.boot_ns),
        "usd_per_hour": capacity.instance_type.usd_per_hour,
        "threshold": capacity.threshold,
        "is_lower_bound": capacity.is_lower_bound,
        "is_measured": not capacity.is_extrapolated,
        "isolated_ms": capacity.isolated_ms,
        "rate_per_s": capacity.rate_per_s,
        "break_even_per_s": _break_even(plan, capacity),
    }


def _size_json(plan: CapacityPlan, row: SizeRow) -> dict[str, object]:
    return {
        "memory_mib": row.memory_bytes >> 20,
        "cpus": row.cpus,
        "is_measured": not row.is_extrapolated,
        "time_ms": row.time_ms,
        "run_ms": row.run_ms,
        "usd_per_call": row.usd_per_call,
        "is_within": row.is_within_slo,
        "has_room": row.has_enough_memory,
        "is": _names(plan, row),
    }


def _mix_json(mix: Mix | None) -> dict[str, object] | None:
    if mix is None:
        return None
    row = mix.faas.row if mix.faas is not None else None
    return {
        "instance": mix.capacity.instance_type.name if mix.capacity is not None else None,
        "instances": mix.instances,
        "threshold": mix.capacity.threshold if mix.capacity is not None else 0,
        "function_memory_mib": row.memory_bytes >> 20 if row is not None else None,
        "functions_peak": mix.functions_peak,
        "spilled": mix.spilled,
        "cold": mix.cold,
        "attainment": mix.attainment,
        "usd_per_hour": mix.usd_per_hour,
        "usd_per_1k": mix.usd_per_1k,
    }
