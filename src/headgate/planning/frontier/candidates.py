"""The candidates of a pipeline's stages from what is declared: variant, pool, shape, batch size.

The time of a candidate is that of a batch alone on its node, with the network both ways. Its cost
is that of one item of a full batch: the part of the node that the batch holds, by the hour, with
what its shape costs besides, or the price of the call. The place of a candidate is its pool: stages
on the same pool are taken to find their data on their node, and data that changes pools moves at
the bandwidth of the receiving one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from math import inf
from operator import attrgetter
from typing import Final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import App, Compute, Function, Pipeline, Pool, Shape, Slo, Variant
from headgate.core.units import format_duration
from headgate.planning.constants import RUNNING_SHARE
from headgate.planning.frontier.configs import (
    COST_UNITS_PER_USD,
    StageConfig,
    check_configs,
    cost_units,
)
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.pipeline import Edge, PipelineFrontier, PipelinePlan

_ROUNDING: Final = 1e-9  # relative: prices are floats, and so is a cost objective
_UNITS_PER_USD_PER_MILLION: Final = COST_UNITS_PER_USD // 10**6
_SIX_DIGITS_UP: Final = Context(prec=6, rounding=ROUND_CEILING)


def pipeline_frontier(
    app: App,
    pipeline: Pipeline,
    *,
    tolerance: float = 0.0,
    is_cold: bool = False,
    counts_every_stage: bool = False,
) -> PipelineFrontier:
    """Return the frontier of a pipeline. Every candidate starts first if `is_cold`.

    Costs are expected ones, or those of a request that needs every stage of a cascade if
    `counts_every_stage`. `build` of a configuration is the id of its variant, `place` that of its
    pool. Raises `ConfigError` if a stage fits no pool.
    """
    return PipelineFrontier(
        pipeline_graph(pipeline),
        [list(stage_candidates(app, stage.function, is_cold=is_cold)) for stage in pipeline.stages],
        edges=list(_edges(app, pipeline)),
        visits=() if counts_every_stage else visits(pipeline),
        tolerance=tolerance,
    )


def conflict(frontier: PipelineFrontier, slo: Slo, noun: str = "plan") -> ConfigError | None:
    """Return the error of objectives that no point meets together; None if one does.

    Points ascend in time and descend in cost, so the cheapest one within the latency is the only
    one to look at. The error names the least cost within the latency, and the least latency within
    the cost. The latency alone must be within reach. `noun` is what a point stands for.

    >>> fast = StageConfig(20_000_000, cost_units(50e-6))
    >>> slow = StageConfig(90_000_000, cost_units(5e-6))
    >>> pipeline = PipelineFrontier(StageGraph([[]]), [[fast, slow]])
    >>> str(conflict(pipeline, Slo(30_000_000, cost_usd=10e-6)))
    "'30ms and $10/1M': no plan meets both (allowed: 30ms with $50/1M, or $10/1M with 90ms)"
    """
    whole = frontier.whole
    index = whole.cheapest_within(slo.latency_ns)
    assert index is not None
    limit = _cost_limit(slo.cost_usd, len(frontier.graph))
    if whole.costs[index] <= limit:
        return None
    latency, cost = format_duration(slo.latency_ns), f"${slo.cost_usd * 1e6:.6g}/1M"
    problem = f"no {noun} meets both"
    pairs = [f"{latency} with {_usd_text(whole.costs[index])}"]
    within = whole.fastest_within(limit)
    if within is None:
        problem += f", and the cheapest costs {_usd_text(whole.costs[-1])}"
    else:
        pairs.append(f"{cost} with {format_duration(whole.times_ns[within])}")
    if not frontier.is_exact:
        problem += ", as far as the frontier of so wide a pipeline is known"
    return ConfigError(problem, value=f"{latency} and {cost}", allowed=", or ".join(pairs))


def unreachable_together(
    app: App, pipeline: Pipeline, factors: Sequence[float], unmeasured: Collection[str]
) -> ConfigError | None:
    """Return the error of objectives that are within reach each alone, and not both; None: none.

    Whatever is not known counts in favour of the objectives: `factors` are by function the least
    that its times may be of its profile, variants in `unmeasured` and stages that run only
    sometimes take no time and cost nothing, and data moves at once.
    """
    slo = pipeline.slo
    if slo.latency_ns == NEVER_NS or slo.cost_usd == inf:
        return None
    candidates = [
        [StageConfig(time_ns=0, cost=0)]
        if stage.only_if_unsure
        else _least_candidates(app, stage.function, factors[stage.function.id], unmeasured)
        for stage in pipeline.stages
    ]
    try:
        frontier = PipelineFrontier(pipeline_graph(pipeline), candidates)
    except ConfigError:  # times or costs beyond a machine word: no plan can be told
        return None
    whole, limit = frontier.whole, _cost_limit(slo.cost_usd, len(candidates))
    if whole.fastest_ns > slo.latency_ns or whole.fastest_within(limit) is None:
        return None
    # What is not exact may miss a placement that is within both.
    return conflict(frontier, slo, "placement") if frontier.is_exact else None


def _least_candidates(
    app: App, function: Function, factor: float, unmeasured: Collection[str]
) -> list[StageConfig]:
    """The candidates of a function at the least that they can take and cost."""
    candidates: list[StageConfig] = []
    for variant in function.variants:
        if variant.name in unmeasured:
            return [StageConfig(time_ns=0, cost=0)]
        for pool in (app.pools[pool_id] for pool_id in variant.pool_ids):
            for times in variant.shapes:
                for items, exec_ns in enumerate(times.exec_ns, start=1):
                    run_ns = int(exec_ns * factor)
                    usd = pool.batch_usd(times.shape, run_ns) / items
                    candidates.append(StageConfig(run_ns + 2 * pool.network_ns, cost_units(usd)))
    return candidates


def _cost_limit(usd: float, stages: int) -> float:
    """An objective in units of cost. Those of stages are whole, each rounded by up to a half."""
    return usd * COST_UNITS_PER_USD * (1.0 + _ROUNDING) + stages


def _usd_text(cost: int) -> str:
    """Return a cost as an objective that it is within: rounded up.

    >>> _usd_text(5_333_333_333)
    '$5.33334/1M'
    """
    per_million = _SIX_DIGITS_UP.divide(cost, _UNITS_PER_USD_PER_MILLION)
    return f"${_SIX_DIGITS_UP.normalize(per_million):f}/1M"


def pipeline_graph(pipeline: Pipeline) -> StageGraph:
    """Return the order of a pipeline's stages; one without a name has that of its function."""
    names = [stage.name or stage.function.name for stage in pipeline.stages]
    return StageGraph([stage.after for stage in pipeline.stages], names)


def priced(app: App) -> App:
    """Return the application, with the same price for every node if nothing has a price.

    Without prices all candidates would cost nothing, and a search could prefer none.
    """
    for pool in app.pools:
        if pool.usd_per_hour or pool.cpu_usd_per_hour or pool.gpu_usd_per_hour or pool.faas:
            return app
    return replace(app, pools=tuple(replace(pool, usd_per_hour=1.0) for pool in app.pools))


def visits(pipeline: Pipeline) -> list[float]:
    """By stage: how often it runs per request. Stages of cascades run only sometimes."""
    expected: list[float] = []
    for stage in pipeline.stages:
        before = max([expected[index] for index in stage.after], default=1.0)
        expected.append(before * stage.unsure_probability if stage.only_if_unsure else 1.0)
    return expected


def node_candidates(app: App, pipeline: Pipeline) -> list[list[StageConfig]]:
    """Return, by stage, the candidates on nodes: without those of FaaS pools.

    Raises `ConfigError` if a stage fits no pool.
    """
    candidates = [
        [c for c in stage_candidates(app, stage.function) if app.pools[c.place].faas is None]
        for stage in pipeline.stages
    ]
    for stage, configs in zip(pipeline.stages, candidates, strict=True):
        check_configs(stage.name or stage.function.name, configs)
    return candidates


def stage_candidates(
    app: App, function: Function, *, is_cold: bool = False
) -> Iterator[StageConfig]:
    """Yield the candidates of a function, with the ids of `pipeline_frontier`."""
    for variant in function.variants:
        for pool_id in variant.pool_ids:
            pool = app.pools[pool_id]
            for shape_id, times in enumerate(variant.shapes):
                if _has_room(pool, variant, times.shape):
                    for items in range(1, len(times.exec_ns) + 1):
                        yield _candidate(pool, variant, shape_id, items, is_cold)


def _has_room(pool: Pool, variant: Variant, shape: Shape) -> bool:
    memory_bytes = pool.memory_bytes if pool.faas is None else pool.faas.memory_bytes
    return pool.has_room_for(shape) and variant.profile.memory_bytes <= memory_bytes


def _candidate(
    pool: Pool, variant: Variant, shape_id: int, batch: int, is_cold: bool
) -> StageConfig:
    shape, run_ns = variant.shapes[shape_id].shape, variant.exec_ns(batch, shape_id)
    start_ns = variant.profile.cold_start_ns if is_cold else 0
    usd = pool.batch_usd(shape, run_ns, start_ns)
    return StageConfig(
        time_ns=start_ns + run_ns + 2 * pool.network_ns,
        cost=cost_units(usd / batch),
        batch=batch,
        cpu_milli=shape.cpu_milli,
        gpu_sevenths=shape.gpu_sevenths,
        build=variant.id,
        place=pool.id,
        start_ns=start_ns,
        shape_id=shape_id,
    )


def _edges(app: App, pipeline: Pipeline) -> Iterator[Edge]:
    """Yield what moving a stage's result to another pool takes: the largest, at the slowest."""
    for index, stage in enumerate(pipeline.stages):
        pools = {app.pools[p] for v in stage.function.variants for p in v.pool_ids}
        speeds = [pool.bytes_per_s for pool in pools if pool.bytes_per_s > 0]
        for before in stage.after:
            variants = pipeline.stages[before].function.variants
            size = max([variant.profile.output_bytes for variant in variants], default=0)
            if size and speeds:
                yield Edge(before, index, remote_ns=int(size / min(speeds) * SECOND_NS))


def has_choice(app: App) -> bool:
    """Whether some variant has several shapes."""
    return any(variant.more_shapes for variant in app.variants)


def planned_shapes(app: App) -> dict[tuple[int, int], int]:
    """The shape that plans reckon with, by variant and pool; what has no choice is left out.

    It is that of the cheapest plan of a pipeline within its objective; if a variant is in several
    pipelines, of the one with the tightest objective. What no plan takes runs as fast as the
    variant that it does take, at the least cost.
    """
    shapes: dict[tuple[int, int], int] = {}
    if not has_choice(app):
        return shapes
    app = priced(app)
    for pipeline in sorted(app.pipelines, key=lambda each: each.slo.latency_ns):
        plan = _plan(app, pipeline)
        for stage, config in zip(pipeline.stages, plan.configs if plan else (), strict=False):
            shapes.setdefault((config.build, config.place), config.shape_id)
            for key, rivals in _by_build(_packed(app, stage.function)).items():
                in_time = [c for c in rivals if c.time_ns <= config.time_ns]
                best = (
                    min(in_time, key=attrgetter("cost"))
                    if in_time
                    else min(rivals, key=attrgetter("time_ns"))
                )
                shapes.setdefault(key, best.shape_id)
    return shapes


def _plan(app: App, pipeline: Pipeline) -> PipelinePlan | None:
    """The cheapest plan within the running share of the objective, or else the fastest."""
    try:
        frontier = PipelineFrontier(
            pipeline_graph(pipeline),
            [_packed(app, stage.function) for stage in pipeline.stages],
            edges=list(_edges(app, pipeline)),
            visits=visits(pipeline),
        )
    except ConfigError:  # a stage fits no pool
        return None
    budget_ns = pipeline.slo.latency_ns
    if budget_ns < NEVER_NS:
        budget_ns = int(RUNNING_SHARE * budget_ns)
    return frontier.plan(max(budget_ns, frontier.whole.fastest_ns))


def _packed(app: App, function: Function) -> list[StageConfig]:
    """The candidates of a function, with the cost of what a node cannot use beside them.

    Where instances have a shape for good, two of 4/7 do not share a GPU, and what the first leaves
    is lost.
    """
    packed: list[StageConfig] = []
    for config in stage_candidates(app, function):
        pool = app.pools[config.place]
        shape = Shape(config.cpu_milli, config.gpu_sevenths)
        if pool.faas is None and pool.compute != Compute.PER_BATCH:
            waste = 1.0 / pool.count_of(shape) / pool.part_of(shape)
            config = replace(config, cost=int(config.cost * waste))
        packed.append(config)
    return packed


def _by_build(configs: Sequence[StageConfig]) -> dict[tuple[int, int], list[StageConfig]]:
    groups: dict[tuple[int, int], list[StageConfig]] = {}
    for config in configs:
        groups.setdefault((config.build, config.place), []).append(config)
    return groups
