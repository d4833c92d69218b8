"""The plan of a pipeline: the cheapest configuration of each stage, and the frontier it is from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.text import Text

from headgate.cli.options import OutputPath, writing
from headgate.cli.output import hanging_indent, show, show_json
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.model import App, Pipeline
from headgate.metrics.format import ms, percent, significant, usd
from headgate.metrics.report.style import (
    BLUE,
    INK,
    MUTED,
    VERMILION,
    escape_label,
    new_axes,
    save_png,
    style_axes,
)
from headgate.metrics.table import Column, ReportTable, format_column
from headgate.planning.frontier.candidates import conflict, pipeline_frontier
from headgate.planning.frontier.configs import COST_UNITS_PER_USD, StageConfig
from headgate.planning.frontier.pipeline import PipelineFrontier, PipelinePlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLOT_WIDTH: Final = 64  # characters
_PLOT_HEIGHT: Final = 12
_MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The options of the plan of a pipeline."""

    pipeline: str | None = None
    batch_max: int | None = None
    cold: bool = False
    figure: Path | None = None


def pipeline_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the plan of a pipeline: one parameter, `pipeline_options`."""

    @click.option(
        "--pipeline",
        metavar="NAME",
        help="Plan the stages of this pipeline instead. Default: all, if each has several stages.",
    )
    @click.option(
        "--batch-max",
        type=click.IntRange(min=1),
        metavar="N",
        help="For a pipeline: batches of at most N requests. Default: as declared.",
    )
    @click.option("--cold", is_flag=True, help="For a pipeline: every stage starts cold.")
    @click.option(
        "--figure",
        type=OutputPath(),
        metavar="FILE",
        help="For a pipeline: write a PNG of the plan.",
    )
    @wraps(command)
    def collect(**values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(PipelineOptions)}
        return command(**values, pipeline_options=PipelineOptions(**own))

    return collect


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan, in the units of the output."""

    name: str
    function: str
    variant: str
    pool: str
    config: StageConfig
    time_ms: float
    ends_ms: float
    slack_ms: float  # how much later it may end for the rest, at its fastest, to be in time
    usd_per_million: float


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """A pipeline with its frontier, the plan within its objective, and the plan's stages."""

    pipeline: Pipeline
    frontier: PipelineFrontier
    plan: PipelinePlan
    stages: tuple[StagePlan, ...]

    @property
    def slo_ms(self) -> float:
        return self.pipeline.slo.latency_ns / MILLISECOND_NS

    @property
    def slo_usd(self) -> float | None:
        """The cost objective, in USD per million requests; None if there is none."""
        limit = self.pipeline.slo.cost_usd
        return limit * _MILLION if limit < inf else None

    @property
    def aim(self) -> str:
        """The objectives of the plan."""
        limit = self.slo_usd
        return ms(self.slo_ms) + (f" and {usd(limit)} per million" if limit is not None else "")

    @property
    def points(self) -> list[tuple[float, float]]:
        """Time in ms and cost in USD per million requests of each point."""
        whole = self.frontier.whole
        return [
            (time_ns / MILLISECOND_NS, _usd_per_million(cost))
            for time_ns, cost in zip(whole.times_ns, whole.costs, strict=True)
        ]

    @property
    def point(self) -> tuple[float, float]:
        """The point of the plan."""
        return self.plan.time_ns / MILLISECOND_NS, _usd_per_million(self.plan.cost)


def plan_pipelines(app: App, where: str, options: PipelineOptions, *, as_json: bool) -> int:
    """Plan one pipeline, or all that have an objective, and print or draw the plans."""
    figure = options.figure
    planned = [
        plan_pipeline(app, each, where, batch_max=options.batch_max, is_cold=options.cold)
        for each in _selected(app, where, options.pipeline)
    ]
    if figure is not None and len(planned) > 1:
        names = ", ".join(each.pipeline.name for each in planned)
        raise ConfigError("needs one pipeline", where="--figure", allowed=f"--pipeline: {names}")
    with writing(figure, "--figure"):
        if figure is not None:
            save_png(draw(planned[0]), figure)
    if as_json:
        show_json({"app": where, "pipelines": [plan_json(each) for each in planned]})
        return 0
    for number, each in enumerate(planned):
        if number:
            show(Text(""))
        _show(where, each)
    if figure is not None:
        show(Text(f"\nwritten: {figure}"))
    return 0


def plan_pipeline(
    app: App,
    pipeline: Pipeline,
    where: str,
    *,
    batch_max: int | None = None,
    is_cold: bool = False,
) -> PlannedPipeline:
    """Return the plan of a pipeline. Raises `ConfigError` if none is within its objectives.

    A cost objective is the most that one request may cost, so with one, stages that run only
    sometimes count in full: that is what admission does with them.
    """
    key, slo = f"pipelines.{pipeline.name}", pipeline.slo
    has_limit = slo.cost_usd < inf
    try:
        frontier = pipeline_frontier(app, pipeline, is_cold=is_cold, counts_every_stage=has_limit)
        if batch_max is not None:
            frontier = frontier.capped(batch_max)
    except ConfigError as error:
        raise error.located(where, key) from None
    try:
        plan = frontier.plan(slo.latency_ns)
    except ConfigError as error:
        raise error.located(where, f"{key}.slo") from None
    problem = conflict(frontier, slo) if has_limit else None
    if problem is not None:
        raise problem.located(where, f"{key}.slo")
    stages = tuple(
        _stage_plan(app, pipeline, frontier, plan, index) for index in range(len(pipeline.stages))
    )
    return PlannedPipeline(pipeline, frontier, plan, stages)


def _selected(app: App, where: str, name: str | None) -> list[Pipeline]:
    """Return the pipeline of this name, or all that have an objective."""
    known = {pipeline.name: pipeline for pipeline in app.pipelines}
    if name is not None and name not in known:
        raise unknown_name_error("pipeline", name, known, where="--pipeline", key=None)
    wanted = [known[name]] if name is not None else list(app.pipelines)
    bounded = [pipeline for pipeline in wanted if pipeline.slo.latency_ns != NEVER_NS]
    if not bounded:
        key = f"pipelines.{wanted[0].name}.slo"
        raise ConfigError("has no latency", where=where, key=key, allowed="{latency: 200ms}")
    return bounded


def _stage_plan(
    app: App, pipeline: Pipeline, frontier: PipelineFrontier, plan: PipelinePlan, index: int
) -> StagePlan:
    config = plan.configs[index]
    latest_ns = pipeline.slo.latency_ns - frontier.fastest_rest_ns(index, config.place)
    return StagePlan(
        frontier.graph.names[index],
        pipeline.stages[index].function.name,
        app.variants[config.build].name,
        app.pools[config.place].name,
        config,
        config.time_ns / MILLISECOND_NS,
        plan.ends_ns[index] / MILLISECOND_NS,
        (latest_ns - plan.ends_ns[index]) / MILLISECOND_NS,
        _usd_per_million(frontier.weighted_cost(index, config)),
    )


def _usd_per_million(cost: int) -> float:
    return cost * _MILLION / COST_UNITS_PER_USD


def _show(where: str, planned: PlannedPipeline) -> None:
    quantile, limit = planned.pipeline.slo.quantile, planned.slo_usd
    aim = f"{ms(planned.slo_ms)} at {percent(quantile)}"
    aim += f" and {usd(limit)} per million" if limit is not None else ""
    show(Text(f"{where}: {planned.pipeline.name} within {aim}\n", "bold"))
    show(stage_table(planned))
    if len(planned.frontier.whole) > 1:
        show(Text("\n".join(plot(planned))), Text(""))
    show(*(hanging_indent("-", 2, sentence) for sentence in sentences(planned)))


def stage_table(planned: PlannedPipeline) -> ReportTable:
    """Return one row per stage."""
    stages = planned.stages
    configs = [stage.config for stage in stages]
    columns = [
        format_column("stage", "text", [stage.name for stage in stages]),
        format_column("variant", "text", [stage.variant for stage in stages]),
        format_column("pool", "text", [stage.pool for stage in stages]),
        format_column("batch", "count", [config.batch for config in configs]),
    ]
    if any(config.cpu_milli for config in configs):
        vcpus = [significant(c.cpu_milli / 1000) if c.cpu_milli else "-" for c in configs]
        columns.append(Column("vCPUs", "", tuple(vcpus)))
    if any(config.gpu_sevenths for config in configs):
        shares = [f"{c.gpu_sevenths}/7" if c.gpu_sevenths else "-" for c in configs]
        columns.append(Column("GPU", "", tuple(shares)))
    columns += [
        format_column("takes", "time_ms", [stage.time_ms for stage in stages]),
        format_column("ends", "time_ms", [stage.ends_ms for stage in stages]),
        format_column("slack", "time_ms", [stage.slack_ms for stage in stages]),
        format_column("per million", "usd", [stage.usd_per_million for stage in stages]),
    ]
    return ReportTable("Stages", tuple(columns))


def sentences(planned: PlannedPipeline) -> list[str]:
    """Say what the plan takes and costs, what a faster or a slower one would, and what counts."""
    time_ms, cost = planned.point
    points = planned.points
    index = points.index((time_ms, cost))
    lines = [
        f"The cheapest plan within {planned.aim}: a request takes {ms(time_ms)} and costs "
        f"{usd(cost)} per million."
    ]
    if len(points) == 1:
        lines.append("No other plan is faster or cheaper.")
    if index:
        fastest_ms, fastest_usd = points[0]
        lines.append(f"The fastest plan takes {ms(fastest_ms)} and costs {usd(fastest_usd)}.")
    if index + 1 < len(points):
        next_ms, next_usd = points[index + 1]
        saved = percent(1 - next_usd / cost) if cost else percent(0.0)
        lines.append(f"The next cheaper plan takes {ms(next_ms)} and costs {saved} less.")
    lines.append(
        "Slack is how much later a stage may end with the objective still in reach, the stages "
        "after it at their fastest."
    )
    lines.append("Times are those of the profile, with each batch alone on its node.")
    if max(stage.config.batch for stage in planned.stages) > 1:
        lines.append("Costs count on full batches (--batch-max 1: on none).")
    if planned.slo_usd is not None and any(s.only_if_unsure for s in planned.pipeline.stages):
        lines.append("Costs are those of a request that needs every stage, as its objective is.")
    if not planned.frontier.is_exact:
        lines.append(
            "The pipeline is too wide for the exact frontier: a cheaper plan may exist "
            "(docs/frontier.md)."
        )
    return lines


def plot(planned: PlannedPipeline) -> list[str]:
    """Draw the frontier in characters: its points, the plan among them, and the objective.

    Columns are times, rows are costs. A point that shares its cell with the plan is hidden by it.
    """
    points, chosen = planned.points, planned.point
    low_ms, high_ms = points[0][0], max(points[-1][0], planned.slo_ms)
    costs = [cost for _, cost in points]
    low_usd, high_usd = min(costs), max(costs)

    def column(time_ms: float) -> int:
        return _scaled(time_ms, low_ms, high_ms, _PLOT_WIDTH - 1)

    def row(cost: float) -> int:
        return _PLOT_HEIGHT - 1 - _scaled(cost, low_usd, high_usd, _PLOT_HEIGHT - 1)

    grid = [[" "] * _PLOT_WIDTH for _ in range(_PLOT_HEIGHT)]
    for cells in grid:
        cells[column(planned.slo_ms)] = "│"
    for time_ms, cost in points:
        grid[row(cost)][column(time_ms)] = "·" if time_ms <= planned.slo_ms else "×"
    grid[row(chosen[1])][column(chosen[0])] = "●"
    labels = [usd(high_usd), *[""] * (_PLOT_HEIGHT - 2), usd(low_usd)]
    width = max(len(label) for label in labels)
    lines = [
        f"{label:>{width}} ┤{''.join(cells).rstrip()}"
        for label, cells in zip(labels, grid, strict=True)
    ]
    axis = ["─"] * _PLOT_WIDTH
    axis[column(planned.slo_ms)] = "┴"
    ends = f"{ms(low_ms)}{ms(high_ms):>{_PLOT_WIDTH - len(ms(low_ms))}}"
    return [
        f"Cost per million over time: · in time, × too late, ● the plan, │ {ms(planned.slo_ms)}",
        *lines,
        f"{'':>{width}} └{''.join(axis)}",
        f"{'':>{width}}  {ends}",
    ]


def _scaled(value: float, low: float, high: float, steps: int) -> int:
    return 0 if high <= low else round((value - low) / (high - low) * steps)


def draw(planned: PlannedPipeline) -> Figure:
    """Draw the frontier with the objective and the plan on it. Needs matplotlib."""
    figure, axes = new_axes()
    points = planned.points
    x, y = [time_ms for time_ms, _ in points], [cost for _, cost in points]
    high_ms = 1.05 * max(x[-1], planned.slo_ms)
    axes.plot([*x, high_ms], [*y, y[-1]], color=BLUE, drawstyle="steps-post", linewidth=1.2)
    axes.plot(x, y, "o", color=BLUE, markersize=3)
    axes.axvline(planned.slo_ms, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"objective {ms(planned.slo_ms)}",
        (planned.slo_ms, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color=MUTED,
    )
    time_ms, cost = planned.point
    axes.plot([time_ms], [cost], "o", color=VERMILION, markersize=8)
    axes.annotate(
        escape_label(f"{ms(time_ms)}, {usd(cost)}"),
        (time_ms, cost),
        xytext=(6, 8),
        textcoords="offset points",
        fontsize=9,
        color=INK,
    )
    axes.set_xlim(0.0, high_ms)
    axes.set_ylim(0.0, 1.1 * max(*y, 1e-12))
    style_axes(
        axes,
        title=f"{planned.pipeline.name}: plans that are not dominated",
        x_label="time of a request (ms)",
        y_label="cost per million requests ($)",
        grid="both",
    )
    return figure


def plan_json(planned: PlannedPipeline) -> dict[str, object]:
    """Return the plan and all points of the frontier."""
    time_ms, cost = planned.point
    return {
        "pipeline": planned.pipeline.name,
        "slo_ms": planned.slo_ms,
        "slo_usd_per_million": planned.slo_usd,
        "time_ms": time_ms,
        "usd_per_million": cost,
        "is_exact": planned.frontier.is_exact,
        "stages": [_stage_json(stage) for stage in planned.stages],
        "frontier": [{"time_ms": t, "usd_per_million": c} for t, c in planned.points],
    }


def _stage_json(stage: StagePlan) -> dict[str, object]:
    return {
        "stage": stage.name,
        "function": stage.function,
        "variant": stage.variant,
        "pool": stage.pool,
        "batch": stage.config.batch,
        "cpus": stage.config.cpu_milli / 1000,
        "gpu_sevenths": stage.config.gpu_sevenths,
        "start_ms": stage.config.start_ns / MILLISECOND_NS,
        "time_ms": stage.time_ms,
        "ends_ms": stage.ends_ms,
        "slack_ms": stage.slack_ms,
        "usd_per_million": stage.usd_per_million,
    }
