"""Aquatope: one configuration for each stage, found offline and kept for every request.

Zhou, Zhang and Delimitrou, "AQUATOPE: QoS-and-Uncertainty-Aware Resource Management for Multi-stage
Serverless Workflows" (ASPLOS 2023), as the comparison in "ESG" (HPDC 2024) frames it: Bayesian
optimisation finds the configurations of an application offline, and nothing is decided at run time.
Recalled from both; rules marked [own] are ours.

- `configs` has the configuration of every stage of a pipeline. `headgate.lab.aquatope` finds them:
  it minimises the cost of simulated runs in which the objective holds.
- A pipeline without any has the cheapest plan in time by the profiles alone, as if every node were
  idle and every batch full; the fastest one if none is in time [own].
- A batch has as many items as wait, up to the configured size. A request of more items than the
  configuration can take runs in the smallest shape that takes it [own].
- Dispatch is that of `esg` (`policies/_stages.py`): warm instances, locality, home nodes, a recheck
  list. The smallest shape is taken where the configured one fits nowhere twice in a row. Successors
  are started ahead [own: Aquatope forecasts how many containers to keep warm].

Cost per decision: O(free nodes) for each queue. No work is reported.

>>> from headgate.policies import find_policy
>>> choice = StageChoice("photo", "deblur", "deblur", "gpu", shape=1, batch=4)
>>> find_policy("aquatope").config(configs=(str(choice),))
Config(configs=('photo deblur: deblur on gpu, shape 1, batch 4',), prewarm=True)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.core.model import App, Pipeline
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.core.records import Request, Task
from headgate.planning.frontier.candidates import visits
from headgate.planning.frontier.configs import InfeasibleError, StageConfig
from headgate.planning.frontier.graph import StageGraph
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.policies._stages import Path, StagePolicy, StageQueue, planned_path

_TOLERANCE: Final = 0.01  # what a plan by the profiles may cost more than the cheapest


@dataclass(frozen=True)
class StageChoice:
    """The configuration of one stage of a pipeline, by names.

    >>> StageChoice.parse("photo deblur: deblur on gpu, shape 1, batch 4")
    StageChoice(pipeline='photo', stage='deblur', variant='deblur', pool='gpu', shape=1, batch=4)
    """

    pipeline: str
    stage: str  # its name, or that of its function if it has none
    variant: str
    pool: str
    shape: int = 0  # number of the variant's shape; 0: its own
    batch: int = 1  # items

    @classmethod
    def parse(cls, text: str) -> StageChoice:
        """Return what a text says, which is that of `str`. Raises `ConfigError`."""
        found = re.fullmatch(r"(\S+) (\S+): (\S+) on (\S+), shape (\d+), batch (\d+)", text)
        if found is None:
            allowed = "PIPELINE STAGE: VARIANT on POOL, shape 0, batch 1"
            raise ConfigError("is no configuration", key="configs", value=text, allowed=allowed)
        pipeline, stage, variant, pool, shape, batch = found.groups()
        return cls(pipeline, stage, variant, pool, int(shape), int(batch))

    def __str__(self) -> str:
        what = f"{self.variant} on {self.pool}, shape {self.shape}, batch {self.batch}"
        return f"{self.pipeline} {self.stage}: {what}"


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `aquatope`."""

    # One text for every stage of a pipeline: see `StageChoice`.
    configs: tuple[str, ...] = ()
    prewarm: bool = True  # start successors on the node of their predecessor

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.configs:
            StageChoice.parse(text)


@final
class Aquatope(StagePolicy):
    """Runs every stage in its one configuration."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, prewarms=config.prewarm)
        app = self.view.app
        by_pipeline: dict[str, list[StageChoice]] = {each.name: [] for each in app.pipelines}
        for choice in map(StageChoice.parse, config.configs):
            if choice.pipeline not in by_pipeline:
                allowed = ", ".join(by_pipeline)
                raise _error("unknown pipeline", choice.pipeline, allowed)
            by_pipeline[choice.pipeline].append(choice)
        self._plans: list[tuple[StageConfig, ...]] = []  # by pipeline id
        for pipeline, graph, candidates in zip(
            app.pipelines, self.graphs, self.candidates, strict=True
        ):
            choices = by_pipeline[pipeline.name]
            if choices:
                self._plans.append(_chosen(app, graph, candidates, choices))
            else:
                self._plans.append(_by_profiles(pipeline, graph, candidates))

    def plan_of(self, request: Request) -> tuple[StageConfig, ...]:
        """The configurations of a request, by stage."""
        return self._plans[request.pipeline.id]

    def paths_for(self, queue: StageQueue, head: Task) -> list[Path]:
        """The configuration of the stage, and nothing else; nothing at all for too many items."""
        path = planned_path(queue, self._plans[queue.pipeline_id])
        times = self.view.app.variants[path[0].build].shapes[path[0].shape_id]
        return [path] if head.request.items <= len(times.exec_ns) else []


def _by_profiles(
    pipeline: Pipeline, graph: StageGraph, candidates: Sequence[Sequence[StageConfig]]
) -> tuple[StageConfig, ...]:
    """Return the cheapest plan within the objective of a pipeline, or the fastest one."""
    frontier = PipelineFrontier(graph, candidates, visits=visits(pipeline), tolerance=_TOLERANCE)
    try:
        return frontier.plan(pipeline.slo.latency_ns).configs
    except InfeasibleError:
        return frontier.plan_at(0).configs


def _chosen(
    app: App,
    graph: StageGraph,
    candidates: Sequence[Sequence[StageConfig]],
    choices: Sequence[StageChoice],
) -> tuple[StageConfig, ...]:
    """Return the candidates that are named. Raises `ConfigError` unless every stage has one."""
    by_stage = {choice.stage: choice for choice in choices}
    for choice in choices:
        if choice.stage not in graph.names:
            raise _error("unknown stage", choice.stage, ", ".join(graph.names))
        if by_stage[choice.stage] is not choice:
            raise _error("has two configurations", choice.stage, "one for each stage")
    missing = [name for name in graph.names if name not in by_stage]
    if missing:
        allowed = f"all stages of {choices[0].pipeline}, or none"
        raise _error("has no configuration", missing[0], allowed)
    return tuple(
        _candidate(app, configs, by_stage[name])
        for name, configs in zip(graph.names, candidates, strict=True)
    )


def _candidate(app: App, configs: Sequence[StageConfig], choice: StageChoice) -> StageConfig:
    wanted = (choice.variant, choice.pool, choice.shape, choice.batch)
    batches: dict[tuple[str, str, int], int] = {}
    for config in configs:
        key = (app.variants[config.build].name, app.pools[config.place].name, config.shape_id)
        if (*key, config.batch) == wanted:
            return config
        batches[key] = max(config.batch, batches.get(key, 0))
    allowed = ", ".join(
        f"{variant} on {pool} in shape {shape} with batch 1 to {batch}"
        for (variant, pool, shape), batch in batches.items()
    )
    raise _error("does not exist", str(choice), allowed)


def _error(problem: str, value: str, allowed: str) -> ConfigError:
    return ConfigError(problem, key="policy.configs", value=value, allowed=allowed)


POLICY = PolicyKind(Aquatope, Config, Capabilities(batches=True, mixed_pools=True))
