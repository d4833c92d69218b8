"""The shape and the size of a batch: the cheapest with which the rest of its pipeline is in time.

A variant may run in several shapes (vCPUs and a share of a GPU). Each choice for a stage is priced
with the frontier of everything behind the stage, in the time that is left: so the time of a
pipeline goes to the stages where it saves most. Where compute is paid for while a batch holds it, a
batch waits for more tasks as long as those that are expected make it cheaper.

Times are those that were observed. A stage's own times are scaled for every choice. The frontiers
of what follows are built anew, as far as they contain a stage whose times have drifted, when they
have drifted far; below that, what follows is stretched as a whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import UNLIMITED, Compute, Pipeline
from headgate.core.records import STAGES_MAX, Node, Task
from headgate.core.view import View
from headgate.planning.admission.cost_budgets import CostBudgets
from headgate.planning.constants import DRIFT, RATE_MEMORY_NS
from headgate.planning.forecast import OfferedLoad
from headgate.planning.frontier.candidates import (
    has_choice,
    pipeline_frontier,
    priced,
    stage_candidates,
)
from headgate.planning.frontier.configs import GPU_SEVENTHS_MAX, StageConfig
from headgate.planning.frontier.pareto import Frontier
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds

_RATE_UNIT_NS: Final = 1e9
_NO_COST: Final = 1 << 62
_ALL: Final = (UNLIMITED, UNLIMITED)  # the compute of an idle node, which every shape fits
_IDLE: Final = GPU_SEVENTHS_MAX + 1  # more of a GPU than any shape takes: of an idle node

_Option = tuple[int, int, float, int]  # cost of an item, shape id, profiled time, CPUs
_Options = tuple[float, list[_Option]]  # the least of their times, and all of them


@final
class Choice:
    """A shape for a batch of so many items, and what an item costs."""

    __slots__ = ("cost", "items", "shape_id", "stage_cost")

    def __init__(self, shape_id: int, items: int, cost: int, stage_cost: int) -> None:
        self.shape_id = shape_id
        self.items = items
        self.cost = cost  # from this stage on
        self.stage_cost = stage_cost  # in this stage


@final
class ShapeChooser:
    """Chooses the shapes and sizes of batches, and how long a batch waits for more tasks."""

    def __init__(self, view: View, builds: Builds, budgets: CostBudgets) -> None:
        self._view = view
        self._budgets = budgets
        app = priced(view.app)
        # By pipeline and stage: the first build of each stage that follows.
        self._behind = [_builds_behind(pipeline, builds) for pipeline in app.pipelines]
        self._app = app
        self._frontiers: list[PipelineFrontier | None] = []
        for pipeline in app.pipelines if has_choice(app) else ():
            try:
                self._frontiers.append(pipeline_frontier(app, pipeline))
            except ConfigError:  # a stage fits no pool
                self._frontiers.append(None)
        # By build id: observed over profiled times, as the frontiers have them.
        self._ratios = [1.0 for _ in builds.all]
        self._rests: dict[tuple[int, int, int, int], Frontier | None] = {}
        self._configs: dict[int, dict[int, list[StageConfig]]] = {}  # by build id and items
        # By build id, number of items and free share of a GPU.
        self._options: dict[tuple[int, int, int], _Options] = {}
        self._moving: dict[tuple[int, int, int], float] = {}  # by pool, pipeline and stage
        self._arrivals: dict[int, OfferedLoad] = {}  # by build id, in items per second

    def observe(self, build: Build, items: int) -> None:
        """Record items that are ready to run on a build."""
        if not build.has_choice:
            return
        arrivals = self._arrivals.get(build.id)
        if arrivals is None:
            arrivals = self._arrivals[build.id] = OfferedLoad(RATE_MEMORY_NS, RATE_MEMORY_NS // 20)
        arrivals.observe(self._view.now_ns, items * _RATE_UNIT_NS)

    def on_observed(self, build: Build) -> None:
        """Build frontiers anew in which the times of a build are far from what was observed."""
        if not self._frontiers:
            return
        known, ratio = self._ratios[build.id], build.ratio
        if abs(ratio - known) <= DRIFT * known:
            return
        self._ratios[build.id] = ratio
        for option in [option for option in self._options if option[0] == build.id]:
            del self._options[option]
        for pipeline, frontier in zip(self._app.pipelines, self._frontiers, strict=False):
            stages = [
                i for i, s in enumerate(pipeline.stages) if s.function.id == build.function_id
            ]
            if frontier is None or not stages:
                continue
            for stage in stages:
                frontier = frontier.with_configs(
                    stage, _scaled(frontier.configs[stage], build, ratio / known)
                )
            self._frontiers[pipeline.id] = frontier
            for key in [key for key in self._rests if key[0] == pipeline.id]:
                del self._rests[key]

    def choose(
        self,
        build: Build,
        task: Task,
        waiting: int,
        left_ns: float,
        z: float,
        node: Node | None = None,
    ) -> Choice | None:
        """The cheapest choice for a batch with a task at its head; None if none is in time.

        `waiting` items could be in it, and `left_ns` is the time until the request is due. With a
        node, only what its free compute allows.
        """
        best: Choice | None = None
        stretch, room = self._stretch(task, z), _free_compute(node)
        items = min(waiting, build.items_max)
        while items >= task.request.items:
            below = _NO_COST if best is None else best.cost
            choice = self._cheapest(build, task, items, left_ns, z, stretch, room, inf, below)
            if choice is not None:
                best = choice
            elif best is not None:
                break  # what is faster in every shape is in time too, so it costs more
            if items == 1:
                break
            items = max(task.request.items, items // 2) if items > task.request.items else 0
        return best

    def refine(
        self,
        build: Build,
        task: Task,
        items: int,
        left_ns: float,
        z: float,
        node: Node | None,
        choice: Choice,
    ) -> int:
        """The shape for a batch that came out smaller than it was chosen for: no slower."""
        longest_ns = build.lane_ns_in(choice.items, choice.shape_id, z)
        stretch, room = self._stretch(task, z), _free_compute(node)
        found = self._cheapest(build, task, items, left_ns, z, stretch, room, longest_ns)
        return choice.shape_id if found is None else found.shape_id

    def gains(self, build: Build, task: Task, left_ns: float, z: float, choice: Choice) -> bool:
        """Whether a task costs no more as a member of a batch than alone, and is in time."""
        if self._exceeds(build, task, choice.items, choice.shape_id):
            return False
        rest = self._rest(task, build.pool.id, choice.items)
        if rest is None:
            return True
        stretch = self._stretch(task, z)
        time_ns = build.lane_ns_in(choice.items, choice.shape_id, z)
        after_ns = left_ns - time_ns - choice.items * self._moving_ns(build, task)
        index = bisect_right(rest.times_ns, after_ns / stretch) - 1
        if index < 0:
            return False
        alone = self._cheapest(build, task, task.request.items, left_ns, z, stretch, _ALL)
        return alone is None or choice.stage_cost + rest.costs[index] <= alone.cost

    def _cheapest(
        self,
        build: Build,
        task: Task,
        items: int,
        left_ns: float,
        z: float,
        stretch: float,
        room: tuple[int, int],
        longest_ns: float = inf,
        below: int = _NO_COST,
    ) -> Choice | None:
        """The cheapest shape for so many items that is in time and fits the room; exact.

        None if no shape is, or if none costs less than `below`.
        """
        rest = self._rest(task, build.pool.id, items)
        if rest is None:
            return None
        times_ns, costs = rest.times_ns, rest.costs
        cpu_free, gpu_free = room
        has_budget = task.request.cost_usd < inf
        factor, network_ns = build.factor(z), build.network_ns
        left_ns -= items * self._moving_ns(build, task) + network_ns
        longest_ns = min(left_ns - times_ns[0] * stretch, longest_ns - network_ns) / factor
        fastest_ns, options = self._of(build, items, gpu_free)
        if fastest_ns > longest_ns:
            return None
        # No shape leaves what follows more time than the fastest, and it costs no less than that.
        end = bisect_right(times_ns, int((left_ns - fastest_ns * factor) / stretch))
        least = costs[end - 1]
        best, best_cost, best_own, most = -1, below, 0, below - least
        for cost, shape_id, profiled_ns, cpu_milli in options:
            if cost >= most:
                break
            if cpu_milli > cpu_free or profiled_ns > longest_ns:
                continue
            if has_budget and self._exceeds(build, task, items, shape_id):
                continue
            after_ns = int((left_ns - profiled_ns * factor) / stretch)
            index = bisect_right(times_ns, after_ns, 0, end) - 1
            if index >= 0 and cost + costs[index] < best_cost:
                best, best_cost, best_own = shape_id, cost + costs[index], cost
                most = best_cost - least
        return None if best < 0 else Choice(best, items, best_cost, best_own)

    def _exceeds(self, build: Build, task: Task, items: int, shape_id: int) -> bool:
        """Whether a task cannot pay for its part of a batch."""
        if task.request.cost_usd == inf:
            return False
        own_items = task.request.items
        # What was observed since may make everything too dear: then it has the cheapest.
        most_usd = max(self._budgets.left_usd(task), build.usd(own_items))
        return build.usd_in(own_items, items, shape_id) > most_usd

    def _stretch(self, task: Task, z: float) -> float:
        """What follows a stage takes so many times what its frontier says, by what was observed."""
        behind = self._behind[task.request.pipeline.id][task.id % STAGES_MAX]
        profiled_ns = expected_ns = 0.0
        for build in behind:
            time_ns = build.profiled_ns(1)
            profiled_ns += time_ns * self._ratios[build.id]
            expected_ns += time_ns * build.ratio * (1.0 + z * build.deviation)
        return expected_ns / profiled_ns if profiled_ns > 0.0 else 1.0

    def _moving_ns(self, build: Build, task: Task) -> float:
        """The time to move the input of an item to a node, should it be on another one."""
        if build.pool.bytes_per_s <= 0.0 or not task.stage.after:
            return 0.0
        key = (build.pool.id, task.request.pipeline.id, task.id % STAGES_MAX)
        moving_ns = self._moving.get(key)
        if moving_ns is None:
            stages = task.request.pipeline.stages
            sizes = [stages[i].function.variants[0].profile.output_bytes for i in task.stage.after]
            moving_ns = sum(sizes) / build.pool.bytes_per_s * SECOND_NS
            self._moving[key] = moving_ns
        return moving_ns

    def fastest(self, build: Build, task: Task, node: Node) -> int | None:
        """The shape in which a task alone ends soonest on a node; None if none fits there."""
        cpu_free, gpu_free = _free_compute(node)
        for shape_id in self.by_time(build, task):
            shape = build.variant.shapes[shape_id].shape
            if shape.cpu_milli <= cpu_free and shape.gpu_sevenths <= gpu_free:
                return shape_id
        return None

    def by_time(self, build: Build, task: Task) -> list[int]:
        """The shapes that a task can pay for, the one in which it alone ends soonest first."""
        items = task.request.items
        shape_ids = [
            (build.lane_ns_in(items, shape_id), shape_id)
            for _, shape_id, _, _ in self._of(build, items, GPU_SEVENTHS_MAX)[1]
            if not self._exceeds(build, task, items, shape_id)
        ]
        return [shape_id for _, shape_id in sorted(shape_ids)]

    def hold_until_ns(
        self, build: Build, task: Task, waiting: int, left_ns: float, z: float, cost: int
    ) -> int:
        """Until when a batch should wait for more tasks; 0: it should not.

        It should while a batch with what is expected by then costs less than `cost` an item.
        """
        arrivals = self._arrivals.get(build.id)
        now_ns = self._view.now_ns
        rate = 0.0 if arrivals is None else arrivals.erlangs(now_ns)
        if not is_compute_priced(build) or rate <= 0.0 or waiting >= build.items_max:
            return 0
        stretch = self._stretch(task, z)
        for more in (1, waiting) if waiting > 1 else (1,):
            wait_ns = more / rate * _RATE_UNIT_NS
            items = min(waiting + more, build.items_max)
            later = self._cheapest(build, task, items, left_ns - wait_ns, z, stretch, _ALL)
            if later is not None and later.cost < cost:
                return now_ns + int(_RATE_UNIT_NS / rate)
        return 0

    def _of(self, build: Build, items: int, gpu_free: int) -> _Options:
        """The shapes for a batch with so much of a GPU, the cheapest first, and their least time.

        Without those that another one replaces wherever they fit.
        """
        gpu_free = min(gpu_free, _IDLE)
        options = self._options.get((build.id, items, gpu_free))
        if options is None:
            options = self._useful(build, items, gpu_free)
            self._options[build.id, items, gpu_free] = options
        return options

    def _useful(self, build: Build, items: int, gpu_free: int) -> _Options:
        useful: list[_Option] = []
        times_ns: list[float] = []
        configs = sorted(self._configs_of(build, items), key=lambda each: (each[0], each[1]))
        for cost, time_ns, config in configs:
            cpu_milli = config.cpu_milli
            if config.gpu_sevenths <= gpu_free and not any(
                option[2] <= time_ns and (gpu_free == _IDLE or option[3] <= cpu_milli)
                for option in useful
            ):
                useful.append((cost, config.shape_id, time_ns, cpu_milli))
                times_ns.append(time_ns)
        return min(times_ns, default=inf), useful

    def _configs_of(self, build: Build, items: int) -> list[tuple[int, float, StageConfig]]:
        """Every shape for a batch: the cost of an item, the profiled time, and the configuration.

        The cost is by the times that frontiers have, for it is added to theirs.
        """
        if build.id not in self._configs:
            by_items = self._configs[build.id] = {}
            for config in stage_candidates(self._app, self._app.functions[build.function_id]):
                if (config.build, config.place) == (build.variant.id, build.pool.id):
                    by_items.setdefault(config.batch, []).append(config)
        ratio = self._ratios[build.id]
        return [
            (round(config.cost * ratio), build.profiled_exec_ns(items, config.shape_id), config)
            for config in self._configs[build.id].get(items, ())
        ]

    def _rest(self, task: Task, pool_id: int, items: int) -> Frontier | None:
        """The frontier of what follows a stage, in batches of up to about as many items."""
        pipeline_id, stage = task.request.pipeline.id, task.id % STAGES_MAX
        size = 1 << (items - 1).bit_length()
        key = (pipeline_id, stage, pool_id, size)
        if key not in self._rests:
            frontier = self._frontiers[pipeline_id]
            if frontier is None:
                self._rests[key] = None
            else:
                self._rests[key] = frontier.capped(size).rest(stage).get(pool_id)
        return self._rests[key]


def _builds_behind(pipeline: Pipeline, builds: Builds) -> list[list[Build]]:
    behind: list[set[int]] = [set() for _ in pipeline.stages]
    for index in reversed(range(len(behind))):
        for successor in pipeline.successors[index]:
            behind[index] |= {successor} | behind[successor]
    return [
        [b for i in sorted(later) for b in builds.of_function[pipeline.stages[i].function.id][:1]]
        for later in behind
    ]


def is_compute_priced(build: Build) -> bool:
    """Whether a batch pays for the compute that it holds, besides the node."""
    pool = build.pool
    has_price = pool.cpu_usd_per_hour > 0.0 or pool.gpu_usd_per_hour > 0.0
    return has_price and pool.compute != Compute.RESIDENT


def _scaled(configs: Sequence[StageConfig], build: Build, ratio: float) -> list[StageConfig]:
    """Configurations of which those of a build take so many times as long, and cost as much."""
    own, network_ns = (build.variant.id, build.pool.id), int(build.network_ns)
    return [
        replace(
            config,
            time_ns=round((config.time_ns - network_ns) * ratio) + network_ns,
            cost=round(config.cost * ratio),
        )
        if (config.build, config.place) == own
        else config
        for config in configs
    ]


def _free_compute(node: Node | None) -> tuple[int, int]:
    """CPUs and GPU share that a batch could have on a node, or on an idle one."""
    if node is None:
        return _ALL
    pool = node.pool
    return pool.cpu_milli - node.cpu_milli_used, pool.gpu_sevenths - node.gpu_sevenths_used
