"""Runs of the ESG experiment: what is measured, and what an observer sees of every dispatch.

*Called for* is the configuration with which a stage would be dispatched if it were planned at that
instant: the cheapest one that fits a node such that the rest of the pipeline can still end in time,
with batches here and there no larger than the number of requests that wait now; the fastest one
that fits if none can. It is looked up in exact frontiers. A *configuration miss* is a dispatch in
another shape or with another batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from typing import Final, final

import numpy as np

from headgate.core.actions import Action, Dispatch
from headgate.core.clock import MILLISECOND_NS
from headgate.core.events import BatchFinished, Event, RequestArrived
from headgate.core.model import App, Shape
from headgate.core.records import STAGES_MAX
from headgate.lab.experiments.esg_cluster.environment import Cell, ClusterScenario, sized_cell
from headgate.lab.harness import Case, Floats, count_unserved, request_times
from headgate.planning.frontier.candidates import pipeline_frontier
from headgate.planning.frontier.decision import StageDecider, fits_any
from headgate.planning.frontier.pipeline import PipelineFrontier
from headgate.sim.interfaces import Observer

ClusterCase = Case[ClusterScenario]
QUANTILES: Final = (0.5, 0.95, 0.99)
_CURVE: Final = np.linspace(0.0, 1.0, 201)  # quantiles kept of a run, for figures


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One run. Costs are of all requests, the rest of those after the warm-up."""

    requests: int
    hit_rate: float
    unserved: float  # share without a response: rejected, expired, failed
    usd_per_request: float
    usd_per_hit: float
    slo_ratios: tuple[float, ...]  # response time over the objective of those served, quantiles
    overhead_ms: float  # charged per dispatch
    busy: float  # share of the time that the scheduler spends planning
    batch: float  # mean items of a batch
    misses: float  # share of dispatches that are configuration misses; NaN where not observed

    def ratio(self, quantile: float) -> float:
        """Return a quantile of the response time over the objective, of requests served."""
        return float(np.interp(quantile, _CURVE, self.slo_ratios))


def run_cell(case: ClusterCase, seed: int) -> ClusterRun:
    """Run a case and observe every dispatch. At the top level, for worker processes."""
    scenario = case.scenario
    observer = DispatchObserver(
        sized_cell(scenario.profiles, scenario.directory, scenario.cell).app,
        _frontiers(scenario.profiles, scenario.directory, scenario.cell),
    )
    return _run(case, seed, observer)


def run_unobserved(case: ClusterCase, seed: int) -> ClusterRun:
    """Run a case whose faults or false profiles an observer cannot follow."""
    return _run(case, seed, None)


def _run(case: ClusterCase, seed: int, observer: DispatchObserver | None) -> ClusterRun:
    environment = case.scenario.environment(seed)
    columns = environment.simulate(case.policy, seed, observer=observer)
    times, requests = request_times(columns, environment.since_ns)
    count = len(requests)
    served = np.isfinite(times.response_ms) & (requests.outcome <= 1)
    slos_ms = np.array([p.slo.latency_ns / MILLISECOND_NS for p in environment.app.pipelines])[
        requests.pipeline
    ]
    usd = sum(use.allocation_usd for use in columns.resources)
    met = float(times.is_met.mean())
    dispatches = observer.dispatches if observer else 0
    work_ns = columns.work * environment.work_unit_ns
    begin_ns = int(columns.requests.arrival_ns[0])
    return ClusterRun(
        requests=count,
        hit_rate=met,
        unserved=count_unserved(requests.outcome) / count,
        usd_per_request=usd / len(columns.requests),
        usd_per_hit=usd / len(columns.requests) / met if met else nan,
        slo_ratios=_curve((times.response_ms / slos_ms)[served]),
        overhead_ms=work_ns / MILLISECOND_NS / dispatches if dispatches else nan,
        busy=work_ns / (columns.end_ns - begin_ns),
        batch=observer.items / dispatches if observer and dispatches else nan,
        misses=observer.misses / dispatches if observer and dispatches else nan,
    )


def _curve(ratios: Floats) -> tuple[float, ...]:
    if not len(ratios):
        return (nan,) * len(_CURVE)
    return tuple(np.quantile(ratios, _CURVE).tolist())


@cache
def _frontiers(profiles: str, directory: Path | None, cell: Cell) -> list[PipelineFrontier]:
    app = sized_cell(profiles, directory, cell).app
    return [pipeline_frontier(app, pipeline) for pipeline in app.pipelines]


@final
class DispatchObserver(Observer):
    """Counts dispatches, and those in another configuration than the one called for.

    It follows requests, batches and nodes by events and actions: pipelines must be sequences, and
    no batch may be lost.
    """

    def __init__(self, app: App, frontiers: Sequence[PipelineFrontier]) -> None:
        self.dispatches = self.items = self.misses = 0
        self._app = app
        self._frontiers = frontiers
        self._items_max = [
            [max(config.batch for config in each) for each in frontier.configs]
            for frontier in frontiers
        ]
        self._deciders: dict[tuple[int, int, int], StageDecider] = {}  # by pipeline, stage, batch
        self._pool = app.pools[0]
        self._requests: dict[int, tuple[int, int]] = {}  # id -> arrival ns, pipeline id
        self._waiting: Counter[tuple[int, int]] = Counter()  # by pipeline and stage
        self._running: dict[int, Dispatch] = {}  # by batch id
        self._used: list[tuple[int, int]] = [(0, 0)] * self._pool.nodes  # thousandths, sevenths

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        if isinstance(event, RequestArrived):
            self._requests[event.request_id] = (now_ns, event.pipeline)
            self._waiting[event.pipeline, 0] += 1
        elif isinstance(event, BatchFinished):
            self._on_finished(self._running.pop(event.batch_id))
        for action in actions:
            if isinstance(action, Dispatch):
                self._on_dispatch(now_ns, action)

    def _on_finished(self, batch: Dispatch) -> None:
        self._hold(batch, -1)
        for task_id in batch.task_ids:
            request_id, stage = divmod(task_id, STAGES_MAX)
            _, pipeline = self._requests[request_id]
            if stage + 1 < len(self._app.pipelines[pipeline].stages):
                self._waiting[pipeline, stage + 1] += 1

    def _on_dispatch(self, now_ns: int, batch: Dispatch) -> None:
        self.dispatches += 1
        self.items += batch.items
        self.misses += not self._is_called_for(now_ns, batch)
        for task_id in batch.task_ids:
            _, pipeline = self._requests[task_id // STAGES_MAX]
            self._waiting[pipeline, task_id % STAGES_MAX] -= 1
        self._running[batch.batch_id] = batch
        self._hold(batch, 1)

    def _is_called_for(self, now_ns: int, batch: Dispatch) -> bool:
        """Whether a batch has the shape and the size that its oldest request calls for."""
        oldest = min(batch.task_ids, key=lambda task_id: self._requests[task_id // STAGES_MAX])
        arrival_ns, pipeline = self._requests[oldest // STAGES_MAX]
        stage = oldest % STAGES_MAX
        left_ns = arrival_ns + self._app.pipelines[pipeline].slo.latency_ns - now_ns
        fits = fits_any(
            [
                Shape(self._pool.cpu_milli - cpu_milli, self._pool.gpu_sevenths - sevenths)
                for cpu_milli, sevenths in self._used
            ]
        )
        decider = self._decider(pipeline, stage)
        decision = decider.decide(left_ns, fits=fits) or decider.fastest(fits=fits)
        if decision is None:
            return False
        config = decision.config
        return (config.shape_id, config.batch) == (batch.shape_id, batch.items)

    def _decider(self, pipeline: int, stage: int) -> StageDecider:
        """Return the decider for batches of as many items as wait."""
        items = min(self._waiting[pipeline, stage], self._items_max[pipeline][stage])
        key = (pipeline, stage, items)
        decider = self._deciders.get(key)
        if decider is None:
            frontier = self._frontiers[pipeline].capped(items)
            decider = self._deciders[key] = StageDecider(frontier, stage)
        return decider

    def _hold(self, batch: Dispatch, sign: int) -> None:
        assert batch.node_id is not None
        shape = self._app.variants[batch.variant_id].shapes[batch.shape_id].shape
        cpu_milli, sevenths = self._used[batch.node_id]
        self._used[batch.node_id] = (
            cpu_milli + sign * shape.cpu_milli, sevenths + sign * shape.gpu_sevenths
        )  # fmt: skip
