"""Cost objectives: what each stage of a request may cost, so that the whole stays within.

A request with a cost objective may use only what it can pay for. For every stage an amount is *set
aside*: first the least that the stage costs anywhere, then what its promise costs, and once it was
sent what its batch does cost. A stage may cost the objective less what is set aside for the others.

The cost is that of what a request itself holds: its part of the nodes while its batches run, as
long as such batches were observed to take, in the dearest batch that it may be in; or its part of a
call. A cold start counts only where a platform bills it: a call that would be too dear with one is
promised a warm instance. A stage that runs only sometimes counts in full.

With several stages, which of them may use a fast and dear build is a question for the frontier of
the pipeline: the fastest plan within the objective.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.core.records import STAGES_MAX, Request, Task
from headgate.planning.frontier.candidates import pipeline_graph
from headgate.planning.frontier.configs import COST_UNITS_PER_USD, StageConfig, cost_units
from headgate.planning.frontier.pareto import Frontier
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds

_TOLERANCE: Final = 1e-6  # of an objective: sums are rounded, and so are observed times
_RATIO_STEPS: Final = 100  # per unit: a frontier is made anew when an observed ratio has moved by 1


@final
class IdlePlan:
    """How a request would run on an idle system: its latency, and time and cost by stage."""

    __slots__ = ("latency_ns", "stages_ns", "stages_usd")

    def __init__(self, latency_ns: int, stages_ns: list[float], stages_usd: list[float]) -> None:
        self.latency_ns = latency_ns
        self.stages_ns = stages_ns
        self.stages_usd = stages_usd

    @property
    def usd(self) -> float:
        """What the request costs."""
        return sum(self.stages_usd)


@final
class CostBudgets:
    """What is set aside for the stages of requests that have a cost objective."""

    def __init__(self, builds: Builds) -> None:
        self._builds = builds
        self._aside: dict[int, list[float]] = {}  # by request id, by stage
        self.trial_usd: float | None = None  # a trial is under way, with this objective
        # By pipeline and number of items: the ratios that it was made with, and the frontier.
        self._frontiers: dict[tuple[int, int], tuple[tuple[int, ...], Frontier | None]] = {}

    def open(self, request: Request, stages_usd: list[float] | None = None) -> None:
        """Set aside the least that each stage costs, or so much; nothing without an objective."""
        limit_usd = request.cost_usd if self.trial_usd is None else self.trial_usd
        if limit_usd < inf:
            self._aside[request.id] = self._least(request) if stages_usd is None else stages_usd

    def limit_usd(self, request: Request) -> float:
        """The cost objective of a request, or of the trial with it."""
        return request.cost_usd if self.trial_usd is None else self.trial_usd

    def close(self, request_id: int) -> None:
        """Forget a request that is settled."""
        if self._aside:
            self._aside.pop(request_id, None)

    def set_aside(self, task: Task, usd: float) -> None:
        """A task is promised something that costs so much."""
        if not self._aside:
            return
        aside = self._aside.get(task.request.id)
        if aside is not None:
            aside[task.id % STAGES_MAX] = usd

    def on_sent(self, tasks: list[Task], build: Build, items: int, shape_id: int) -> None:
        """A batch was sent, which each of its tasks pays a part of."""
        if not self._aside:
            return
        for task in tasks:
            aside = self._aside.get(task.request.id)
            if aside is not None:
                usd = build.usd_in(task.request.items, items, shape_id)
                aside[task.id % STAGES_MAX] = usd

    def left_usd(self, task: Task) -> float:
        """The most that a task may cost; without end if there is no objective."""
        request = task.request
        limit_usd = request.cost_usd if self.trial_usd is None else self.trial_usd
        if limit_usd == inf:
            return inf
        aside = self._aside.get(request.id) or self._least(request)
        return limit_usd * (1.0 + _TOLERANCE) - sum(aside) + aside[task.id % STAGES_MAX]

    def allows(self, task: Task, build: Build) -> bool:
        """Whether a task can pay for a build."""
        request = task.request
        if self.limit_usd(request) == inf:
            return True
        return request.items <= build.items_max and build.usd(request.items) <= self.left_usd(task)

    def allows_cold(self, task: Task, build: Build) -> bool:
        """Whether a task can pay for a call that starts an instance."""
        if self.limit_usd(task.request) == inf:
            return True
        return build.usd(task.request.items, is_cold=True) <= self.left_usd(task)

    def affordable(self, task: Task) -> list[Build]:
        """The builds of a task that it can pay for; the cheapest one if it can pay for none."""
        builds = self._builds.of_function[task.function.id]
        if task.request.cost_usd == inf:
            return builds
        items = task.request.items
        found = [build for build in builds if self.allows(task, build)]
        fitting = [build for build in builds if items <= build.items_max]
        return found or sorted(fitting, key=lambda build: build.usd(items))[:1]

    def is_below_least(self, request: Request) -> bool:
        """Whether not even the cheapest placement is within the objective, however long it took."""
        return sum(self._least(request)) > request.cost_usd * (1.0 + _TOLERANCE)

    def cheapest_first(self, task: Task) -> list[Build]:
        """The builds of a task, by what it costs on them by their profiles; else as they are."""
        builds = self._builds.of_function[task.function.id]
        if task.request.cost_usd == inf:
            return builds
        items = task.request.items
        fitting = [build for build in builds if items <= build.items_max]
        return sorted(fitting, key=lambda build: build.usd(items) / build.ratio)

    def fits_profiles(self, request: Request, builds: list[Build]) -> bool:
        """Whether a request on these builds, one per stage, is within its objective by profiles."""
        if request.cost_usd == inf:
            return True
        usd = sum(build.usd(request.items) / build.ratio for build in builds)
        return usd <= request.cost_usd * (1.0 + _TOLERANCE)

    def fastest_plan(self, request: Request) -> IdlePlan | None:
        """The fastest way to run a request within its cost objective on an idle system; None: none.

        Without an objective for the cost, it is the fastest one of all.
        """
        frontier = self._frontier(request)
        if frontier is None:
            return None
        limit = inf
        if request.cost_usd < inf:
            limit = request.cost_usd * (1.0 + _TOLERANCE) * COST_UNITS_PER_USD
        # Ascending in time, descending in cost.
        for index, cost in enumerate(frontier.costs):
            if cost <= limit:
                return _plan_at(frontier, index)
        return None

    def cheapest_plan(self, request: Request, latency_ns: float) -> IdlePlan | None:
        """The cheapest way to run a request within a time on an idle system; None: none."""
        frontier = self._frontier(request)
        if frontier is None or latency_ns < frontier.fastest_ns:
            return None
        index = frontier.cheapest_within(int(min(latency_ns, frontier.times_ns[-1])))
        return None if index is None else _plan_at(frontier, index)

    def _least(self, request: Request) -> list[float]:
        """By stage: what it costs on the cheapest build; 0 where none can run it."""
        items = request.items
        return [
            min(
                (
                    build.usd(items)
                    for build in self._builds.of_function[task.function.id]
                    if items <= build.items_max
                ),
                default=0.0,
            )
            for task in request.tasks
        ]

    def _frontier(self, request: Request) -> Frontier | None:
        """Times and costs of a request on an idle system; None if some stage runs nowhere."""
        rows = [self._builds.of_function[task.function.id] for task in request.tasks]
        ratios = tuple(int(_RATIO_STEPS * build.ratio + 0.5) for row in rows for build in row)
        key = (request.pipeline.id, request.items)
        known = self._frontiers.get(key)
        if known is None or known[0] != ratios:
            candidates = [_candidates(row, request.items) for row in rows]
            frontier: Frontier | None = None
            try:
                graph = pipeline_graph(request.pipeline)
                frontier = PipelineFrontier(graph, candidates).whole
            except ConfigError:  # a stage fits no pool
                pass
            known = self._frontiers[key] = (ratios, frontier)
        return known[1]


def _candidates(builds: list[Build], items: int) -> list[StageConfig]:
    """The ways to run a task alone: one for every build, and every shape that can be chosen."""
    return [
        StageConfig(
            time_ns=int(build.lane_ns_in(items, shape_id)),
            cost=cost_units(
                build.usd(items) if not build.has_choice else build.usd_in(items, items, shape_id)
            ),
            build=build.id,
            shape_id=shape_id,
        )
        for build in builds
        if items <= build.items_max
        for shape_id in build.shape_ids
        if items <= build.items_in(shape_id)
    ]


def _plan_at(frontier: Frontier, index: int) -> IdlePlan:
    configs = frontier.configs_at(index)
    stages = sorted(configs)
    return IdlePlan(
        frontier.times_ns[index],
        [float(configs[stage].time_ns) for stage in stages],
        [configs[stage].cost / COST_UNITS_PER_USD for stage in stages],
    )
