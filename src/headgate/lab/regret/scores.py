"""Scores of a policy in a world, by the definitions of the regret search.

- The *value* of a request is its cost alone, at its cheapest build and in full batches. *Goodput*
  is the value of the requests that were answered in time, and that arrived and ended inside the
  window; its first tenth is left out. Requests without an objective are not scored.
- The *share* is goodput over the fluid bound (`headgate.lab.regret.fluid`). Beside it, the share of
  a tighter bound, in which a class uses only the builds, shapes and batches that can be in time.
- A policy *counts* if it gives each class, a tenant's requests for a pipeline, at least half of
  the class's max-min fair share: whoever starves a class has goodput easily.
- *Kept* is, per pipeline, the share of the admitted requests that were answered in time. It fails
  if even the upper end of its 95 % Wilson interval is below the quantile of the objective. Requests
  count if their deadline is inside the window, so that it is known how each ended.
- *Cost* is the cost of everything held during the window.
- While requests without an objective wait, they must get 5 % of the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Compute, Variant
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.states import Outcome
from headgate.lab.regret.fluid import Demand, FluidModel, item_value
from headgate.lab.regret.worlds import LoadedWorld, has_objective
from headgate.metrics.columns import RunColumns
from headgate.sim.clients import id_of
from headgate.sim.run import Setup, simulate

Bools = NDArray[np.bool_]

WARM_UP: Final = 0.1  # share of the window that is left out at its beginning
LEAST_SHARE: Final = 0.5  # of its max-min share, for every class
BEST_EFFORT_SHARE: Final = 0.05
_BEST_EFFORT_TIME: Final = 0.05  # share of the window for which best effort must wait to be judged
_Z95: Final = 1.959963984540054
_SHORTEST_DEVIATIONS: Final = 3.5


@dataclass(frozen=True, slots=True)
class Kept:
    """How many of the admitted requests of one pipeline were answered in time."""

    pipeline: str
    target: float
    admitted: int
    met: int

    @property
    def share(self) -> float:
        """NaN if nothing was admitted."""
        return self.met / self.admitted if self.admitted else nan

    @property
    def fails(self) -> bool:
        """Whether the quantile was missed, by more than chance explains."""
        return self.admitted > 0 and wilson_upper(self.met, self.admitted) < self.target


def wilson_upper(met: int, count: int) -> float:
    """Upper end of the 95 % Wilson interval of a share.

    >>> round(wilson_upper(95, 100), 4), wilson_upper(10, 10)
    (0.9785, 1.0)
    """
    if met == count:
        return 1.0  # not a rounding error below it: an objective of 100 % is then kept
    share, z2 = met / count, _Z95**2
    centre = share + z2 / (2 * count)
    half = _Z95 * sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (centre + half) / (1 + z2 / count)


@dataclass(frozen=True, slots=True)
class Score:
    """What one policy reached in one world."""

    goodput: float  # value of the requests in time
    share: float  # of the fluid bound
    share_in_time: float  # of the tighter bound, with deadlines
    counts: bool  # whether each class has half of its max-min share
    starved: tuple[str, ...]  # classes that have not, as client/pipeline
    kept: tuple[Kept, ...]  # by pipeline with an objective
    admitted: int
    cost_usd: float
    best_effort: float  # share of the capacity while any waits; NaN where none waits for long

    @property
    def kept_overall(self) -> float:
        """The share of all admitted requests that were answered in time; NaN without any."""
        admitted = sum(each.admitted for each in self.kept)
        return sum(each.met for each in self.kept) / admitted if admitted else nan

    @property
    def keeps(self) -> bool:
        """Whether every pipeline keeps its quantile."""
        return not any(each.fails for each in self.kept)

    @property
    def serves_best_effort(self) -> bool:
        """Whether requests without an objective get their small share."""
        return not self.best_effort < BEST_EFFORT_SHARE


@final
class Judge:
    """Scores runs in one world. The bound and the fair shares are computed once."""

    def __init__(self, world: LoadedWorld) -> None:
        self.world = world
        app, arrivals = world.app, world.arrivals
        self._from_ns = int(WARM_UP * world.window_ns)
        pipeline_ids = [id_of(name, app.pipelines, "pipeline") for name in arrivals.pipelines]
        client_ids = [id_of(name, app.clients, "client") for name in arrivals.clients]
        self._pipeline = np.array(pipeline_ids)[arrivals.pipeline]
        self._client = np.array(client_ids)[arrivals.client]
        self._sizes = np.asarray(arrivals.sizes, dtype=np.float64)
        values = np.array([item_value(app, pipeline) for pipeline in app.pipelines])
        self._is_scored = np.array([has_objective(p) for p in app.pipelines])[self._pipeline]
        self._value = values[self._pipeline] * self._sizes
        self._counted = arrivals.times_ns >= self._from_ns
        self.classes = sorted(
            {(int(c), int(p)) for c, p in zip(self._client, self._pipeline, strict=True)}
        )
        scored = [(c, p) for c, p in self.classes if has_objective(app.pipelines[p])]
        demands = [Demand(app.pipelines[p], self._items(c, p)) for c, p in scored]
        worth = [float(values[p]) for _, p in scored]
        model = FluidModel(app, world.window_ns - self._from_ns, world.truth.scale)
        self.bound = model.best(demands, worth)
        # No batch is faster than this, but for one in some thousands.
        shortest = max(0.0, 1.0 - _SHORTEST_DEVIATIONS * world.truth.cv) if world.truth.cv else 1.0
        self.deadline_bound = model.best(demands, worth, minds_deadlines=True, shortest=shortest)
        pipelines_of = [sum(1 for c, _ in scored if c == client) for client, _ in scored]
        weights = [
            app.clients[c].weight / count
            for (c, _), count in zip(scored, pipelines_of, strict=True)
        ]
        shares = model.max_min_shares(demands, worth, weights)
        self.fair_shares = dict(zip(scored, shares, strict=True))
        self.requests = int(np.count_nonzero(self._is_scored))

    def _items(self, client: int, pipeline: int) -> float:
        rows = self._counted & (self._client == client) & (self._pipeline == pipeline)
        return float(self._sizes[rows].sum())

    def run(self, kind: PolicyKind, config: PolicyConfig | None = None) -> Score:
        """Simulate a policy until the end of the window, and score it."""
        world = self.world
        setup = Setup(
            world.app,
            kind,
            config,
            seed=world.seed,
            truth=world.truth,
            limit_ns=world.window_ns,
            announces=False,
        )
        return self.score(simulate(setup, world.arrivals))

    def score(self, run: RunColumns) -> Score:
        """Score a run that ended with the window, or later."""
        requests, window_ns = run.requests, self.world.window_ns
        rows = len(requests)
        ended = requests.finished_ns < window_ns
        is_met = (requests.outcome == Outcome.MET) & ended
        counted, is_scored = self._counted[:rows], self._is_scored[:rows]
        in_time = is_met & counted & is_scored
        value = np.where(in_time, self._value[:rows], 0.0)
        goodput = float(value.sum())
        app = self.world.app
        starved = tuple(
            f"{app.clients[c].name}/{app.pipelines[p].name}"
            for (c, p), share in self.fair_shares.items()
            if value[(self._client[:rows] == c) & (self._pipeline[:rows] == p)].sum()
            < LEAST_SHARE * share
        )
        is_admitted = (requests.outcome != Outcome.REJECTED) | ~ended
        kept = self._kept(run, counted & is_admitted, is_met)
        return Score(
            goodput=goodput,
            share=goodput / self.bound if self.bound else nan,
            share_in_time=goodput / self.deadline_bound if self.deadline_bound else nan,
            counts=not starved,
            starved=starved,
            kept=kept,
            admitted=int(np.count_nonzero(counted & is_scored & is_admitted)),
            cost_usd=sum(use.allocation_usd for use in run.resources),
            best_effort=self._best_effort(run, ended),
        )

    def _kept(self, run: RunColumns, is_admitted: Bools, is_met: Bools) -> tuple[Kept, ...]:
        requests = run.requests
        is_decided = is_admitted & (requests.deadline_ns <= self.world.window_ns)
        kept: list[Kept] = []
        for pipeline in self.world.app.pipelines:
            if has_objective(pipeline):
                rows = is_decided & (self._pipeline[: len(requests)] == pipeline.id)
                met = int(np.count_nonzero(rows & is_met))
                count = int(np.count_nonzero(rows))
                kept.append(Kept(pipeline.name, pipeline.slo.quantile, count, met))
        return tuple(kept)

    def _best_effort(self, run: RunColumns, ended: Bools) -> float:
        """Share of the capacity that best effort got while any of it waited for its first start.

        The capacity is what the pools could serve of the best-effort mix if they served nothing
        else. What was served counts if it started or ended while some request waited: a batch that
        takes everybody who waits ends the waiting, and is what they waited for.
        """
        requests = run.requests
        rows = ~self._is_scored[: len(requests)]
        if not rows.any():
            return nan
        window_ns = self.world.window_ns
        # A request that is never started, even because it was rejected, waits to the end.
        starts = np.minimum(requests.started_ns[rows], window_ns)
        waits = _union(requests.arrival_ns[rows], starts, self._from_ns)
        waited_ns = sum(end - start for start, end in waits)
        if waited_ns < _BEST_EFFORT_TIME * window_ns:
            return nan
        offered, served = self._best_effort_mix(run, rows, ended, waits)
        model = FluidModel(self.world.app, waited_ns, self.world.truth.scale)
        work = _total_work(offered)
        return _total_work(served) / (model.capacity(offered) * work)

    def _best_effort_mix(
        self, run: RunColumns, rows: Bools, ended: Bools, waits: Sequence[tuple[int, int]]
    ) -> tuple[list[Demand], list[Demand]]:
        requests, app = run.requests, self.world.app
        edges = np.array(waits).reshape(-1)
        started = np.searchsorted(edges, requests.started_ns, side="left") % 2 == 1
        inside = started | (np.searchsorted(edges, requests.finished_ns, side="left") % 2 == 1)
        offered: list[Demand] = []
        served: list[Demand] = []
        for pipeline in app.pipelines:
            own = rows & (self._pipeline[: len(requests)] == pipeline.id)
            sizes = self._sizes[: len(requests)]
            if own.any():
                answered = own & ended & inside & (requests.outcome <= Outcome.LATE)
                offered.append(Demand(pipeline, float(sizes[own].sum())))
                served.append(Demand(pipeline, float(sizes[answered].sum())))
        return offered, served


def _total_work(demands: Sequence[Demand]) -> float:
    """Items weighted by the time of their stages: one number for a mix of pipelines."""
    return sum(
        demand.items * sum(stage.function.reference_exec_ns for stage in demand.pipeline.stages)
        for demand in demands
    )


def _union(
    starts: NDArray[np.int64], ends: NDArray[np.int64], from_ns: int
) -> list[tuple[int, int]]:
    """The union of intervals, from a time on, as disjoint ones in order."""
    order = np.argsort(starts, kind="stable")
    union: list[tuple[int, int]] = []
    for start, end in zip(starts[order].tolist(), ends[order].tolist(), strict=True):
        start = max(start, from_ns)
        if end <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def features(world: LoadedWorld) -> list[str]:
    """Words that describe a world, for people who look for a pattern in the lost ones."""
    app = world.app
    nodes = "+".join(str(p.nodes) for p in app.pools if p.faas is None)
    stages = max(len(p.stages) for p in app.pipelines)
    batch = max(v.profile.items_max for v in app.variants)
    words = [f"nodes={nodes}", f"functions={len(app.functions)}", f"stages={stages}"]
    words += [f"batch={batch}"] if batch > 1 else []
    words += [f"clients={len(app.clients)}"] if len(app.clients) > 1 else []
    has_shapes = any(v.more_shapes for v in app.variants)
    checks: Mapping[str, bool] = {
        "shapes": has_shapes,
        "one-batch": has_shapes and any(_runs_one_batch(v, app) for v in app.variants),
        "per-instance": any(p.compute == Compute.PER_INSTANCE for p in app.pools),
        "resident": any(p.compute == Compute.RESIDENT for p in app.pools),
        "compute-price": any(p.cpu_usd_per_hour for p in app.pools),
        "faas": any(p.faas is not None for p in app.pools),
        "elastic": any(p.is_elastic for p in app.pools),
        "slots": any(p.slots > 1 for p in app.pools),
        "network": any(p.network_ns for p in app.pools),
        "cold": any(v.profile.cold_start_ns for v in app.variants),
        "memory": any(v.profile.memory_bytes for v in app.variants),
        "items": world.arrivals.items is not None,
        "priorities": world.arrivals.priority is not None,
        "best-effort": any(p.slo.latency_ns == NEVER_NS for p in app.pipelines),
        "cascade": any(s.only_if_unsure for p in app.pipelines for s in p.stages),
        "bursts": any(not s.process.startswith("poisson") for s in world.config.workload.streams),
    }
    return words + [word for word, is_present in checks.items() if is_present]


def _runs_one_batch(variant: Variant, app: App) -> bool:
    """Whether an instance runs one batch at a time on nodes that run several."""
    return variant.concurrency == 1 and any(
        app.pools[id].faas is None and app.pools[id].slots > 1 for id in variant.pool_ids
    )
