"""How often a configuration that was planned at arrival is not the one that a dispatch calls for.

`orion` and `aquatope` plan a request once. When one of its stages is dispatched, time has passed,
other requests wait, and other resources are free. `PlanMisses` watches a run and asks, for every
dispatch, what the frontier of the rest would choose now: in the time left, for at
most as many items as wait, among what fits the free compute. A planned batch size is a limit: fewer
items may wait. A plan *misses* for the first of these reasons that holds:

- `room`: no node with a free slot has the compute for it;
- `late`: the request cannot end in time with it, and can with another one; or it is late in any
  case, and another one ends sooner;
- `cost`: another one is in time and costs less;
- `batch`: fewer items wait than the planned batch has, and everything else is right.

The paper with which these rates are compared (ESG, HPDC 2024) prints such rates; the parts of it
that are known do not define them.

The observer drives a second Scheduler, which is in the same state, with the events of the run. So
the policy under test counts nothing and does not know. Before each of several dispatches of one
decision, the state is that after all of them with the later ones undone. Compute is compared where
batches hold it; where instances hold it, every configuration fits a node with a free slot. Batches
of later stages are no larger than the items that wait now, as in `esg`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Final, Protocol, final, runtime_checkable

from headgate.core.actions import Action, Dispatch
from headgate.core.clock import NEVER_NS
from headgate.core.errors import ConfigError
from headgate.core.events import Event
from headgate.core.model import App, Pipeline
from headgate.core.records import STAGES_MAX, Request
from headgate.core.states import TaskState
from headgate.core.view import View
from headgate.planning.frontier.candidates import node_candidates, pipeline_graph, priced, visits
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, build_scheduler

REASONS: Final = ("room", "late", "cost", "batch")


@runtime_checkable
class PlansAhead(Protocol):
    """A policy that plans all stages of a request before the first is dispatched."""

    def plan_of(self, request: Request) -> Sequence[StageConfig]:
        """Return the configurations of an open request, by stage."""


@dataclass(slots=True)
class StageMisses:
    """The dispatches of one stage, and how many missed the plan, by reason."""

    dispatches: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@final
class _FreeCompute:
    """The free compute of nodes with a free slot, as it was before the last dispatches."""

    def __init__(self, view: View) -> None:
        self._view = view
        # By node id: pool, vCPUs and GPU share that are free; None: compute is no limit here.
        self._free: dict[int, tuple[int, int | None, int]] = {}
        for node in view.free_nodes.values():
            self._set(node.id, 0, 0)

    def _set(self, node_id: int, cpu_milli: int, gpu_sevenths: int) -> None:
        node = self._view.nodes[node_id]
        if not node.counts_batches:
            self._free[node_id] = (node.pool.id, None, 0)
            return
        self._free[node_id] = (
            node.pool.id,
            node.pool.cpu_milli - node.cpu_milli_used + cpu_milli,
            node.pool.gpu_sevenths - node.gpu_sevenths_used + gpu_sevenths,
        )

    def undo(self, sent: Dispatch) -> None:
        """Free what a dispatch took."""
        if sent.node_id is None or sent.node_id not in self._view.nodes:
            return
        shape = self._view.app.variants[sent.variant_id].shapes[sent.shape_id].shape
        if sent.node_id not in self._free:
            self._set(sent.node_id, 0, 0)
        pool_id, cpu_milli, gpu_sevenths = self._free[sent.node_id]
        if cpu_milli is not None:
            free = (pool_id, cpu_milli + shape.cpu_milli, gpu_sevenths + shape.gpu_sevenths)
            self._free[sent.node_id] = free

    def fit(self, config: StageConfig) -> bool:
        """Whether a node has the compute for a configuration."""
        return any(
            pool_id == config.place
            and (
                cpu_milli is None
                or (config.cpu_milli <= cpu_milli and config.gpu_sevenths <= gpu_sevenths)
            )
            for pool_id, cpu_milli, gpu_sevenths in self._free.values()
        )


@final
class PlanMisses(Observer):
    """Counts the misses of a run of one Scheduler. Raises `ConfigError` if nothing is planned."""

    def __init__(self, setup: Setup) -> None:
        self._scheduler = build_scheduler(setup, 0)
        policy = self._scheduler.policy
        if not isinstance(policy, PlansAhead):
            name = type(policy).__name__.lower()
            raise ConfigError(f"{name} plans nothing at arrival", allowed="aquatope, orion")
        self._policy = policy
        app = priced(setup.app)
        self._frontiers = [_frontier(app, pipeline) for pipeline in app.pipelines]
        self.stages = [[StageMisses() for _ in pipeline.stages] for pipeline in app.pipelines]

    @property
    def miss_rate(self) -> float:
        """Share of all dispatches that missed the plan; NaN without any."""
        return self.rate_of(*REASONS)

    def rate_of(self, *reasons: str) -> float:
        """Share of all dispatches that missed the plan for one of these reasons."""
        counts = [stage.reasons for each in self.stages for stage in each]
        return self._share(sum(count[reason] for count in counts for reason in reasons))

    def _share(self, count: int) -> float:
        dispatches = sum(stage.dispatches for each in self.stages for stage in each)
        return count / dispatches if dispatches else nan

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Handle the event as well, and judge the dispatches that it led to."""
        own = self._scheduler.handle(now_ns, event)
        assert len(own) == len(actions), "the second Scheduler decides otherwise"
        sent = [action for action in own if isinstance(action, Dispatch)]
        if not sent:
            return
        free = _FreeCompute(self._scheduler.view)
        waiting: Counter[tuple[int, int]] = Counter()  # items undone, by pipeline and stage
        for dispatch in reversed(sent):
            free.undo(dispatch)
            request = self._scheduler.view.requests.get(dispatch.task_ids[0] // STAGES_MAX)
            if request is None:
                continue
            stage = dispatch.task_ids[0] % STAGES_MAX
            key = (request.pipeline.id, stage)
            waiting[key] += dispatch.items
            items_max = waiting[key] + self._ready(*key)
            planned = self._policy.plan_of(request)[stage]
            counts = self.stages[key[0]][stage]
            counts.dispatches += 1
            reason = self._judge(request, stage, planned, items_max, free)
            if reason:
                counts.reasons[reason] += 1

    def _ready(self, pipeline_id: int, stage: int) -> int:
        """Items that wait at a stage after the event. O(open requests)."""
        return sum(
            request.items
            for request in self._scheduler.view.requests.values()
            if request.pipeline.id == pipeline_id
            and request.tasks[stage].state == TaskState.READY
            and not request.tasks[stage].must_run_alone
        )

    def _judge(
        self, request: Request, stage: int, planned: StageConfig, waiting: int, free: _FreeCompute
    ) -> str:
        """Return why the plan of a request is not what its stage calls for; empty if it is."""
        if not free.fit(planned):
            return "room"
        # As it can run: with what waits, or with more than planned in a request of many items.
        key = (planned.build, planned.place, planned.shape_id)
        size = max(min(planned.batch, waiting), request.items)

        def fits(config: StageConfig) -> bool:
            return config.batch >= request.items and free.fit(config)

        def is_planned(config: StageConfig) -> bool:
            return config.batch == size and (config.build, config.place, config.shape_id) == key

        frontier = self._frontiers[request.pipeline.id].capped(waiting)
        left_ns = request.deadline_ns
        if left_ns < NEVER_NS:
            left_ns -= self._scheduler.view.now_ns
        possible = [config for config in frontier.configs[stage] if fits(config)]
        own = [config for config in possible if is_planned(config)]
        least = _least_cost(frontier, stage, possible, left_ns)
        if least is None:
            soonest_ns = _soonest_ns(frontier, stage, possible)
            if soonest_ns < _soonest_ns(frontier, stage, own):
                return "late"
        else:
            cost = _least_cost(frontier, stage, own, left_ns)
            if cost is None:
                return "late"
            if cost > least:
                return "cost"
        return "batch" if size < planned.batch else ""


def _frontier(app: App, pipeline: Pipeline) -> PipelineFrontier:
    candidates = node_candidates(app, pipeline)
    return PipelineFrontier(pipeline_graph(pipeline), candidates, visits=visits(pipeline))


def _least_cost(
    frontier: PipelineFrontier, stage: int, configs: Sequence[StageConfig], left_ns: int
) -> int | None:
    """Return the least cost of a stage and all behind it in the time left; None: none is in time.

    Each configuration is priced with the frontier of the rest. O(configurations log points).
    """
    rests = frontier.rest(stage)
    costs: list[int] = []
    for config in configs:
        rest = rests[config.place]
        index = rest.cheapest_within(left_ns - config.time_ns)
        if index is not None:
            costs.append(frontier.weighted_cost(stage, config) + rest.costs[index])
    return min(costs, default=None)


def _soonest_ns(frontier: PipelineFrontier, stage: int, configs: Sequence[StageConfig]) -> int:
    """Return the least time of a stage and all behind it; `NEVER_NS` without a configuration."""
    rests = frontier.rest(stage)
    return min((c.time_ns + rests[c.place].fastest_ns for c in configs), default=NEVER_NS)
