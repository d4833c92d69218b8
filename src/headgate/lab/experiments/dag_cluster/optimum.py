"""How far admission is from the optimum, on cases small enough to search all schedules.

A case has one DAG of two functions, one after the other or side by side, on a CPU and a GPU node,
and a few requests with a latency and a cost objective. The optimum is the largest number of
requests that a scheduler that knows all arrivals could serve within both: no batches, no
preemption. Every schedule in which no task can start earlier without changing the order is built by
adding tasks in the order of their starts; so the search tries, at each step, every task that is
ready next on every node, and keeps the best count. A state is not searched if it was reached before
with as many requests served, or if it can no longer beat the best count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, final

import numpy as np

from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Tier, Variant
from headgate.core.rng import stream
from headgate.core.states import Outcome
from headgate.lab.experiments.dag_cluster.environment import UNIT_USD, CostObserver
from headgate.lab.harness import Environment, PolicyCase
from headgate.workload import assign
from headgate.workload.arrivals import arrivals_at

_NODES: Final = 2  # one CPU node and one GPU node: node and pool ids are the same
_REQUESTS: Final = 5
_SPAN_MS: Final = 20  # within which they arrive
_UNITS_PER_MS: Final = (1, 5)
_MS: Final = MILLISECOND_NS


@dataclass(frozen=True, slots=True)
class SmallCase:
    """A case: times in whole milliseconds, costs in units."""

    times_ms: tuple[tuple[int, int], ...]  # by stage: on the CPU and on the GPU node
    is_chain: bool  # else the stages are side by side
    arrivals_ms: tuple[int, ...]
    latency_ms: int
    cost_units: int

    def environment(self) -> Environment:
        """The same case for a policy."""
        per_hour = 3_600_000 * UNIT_USD
        pools = tuple(
            Pool(id, name, tier, usd_per_hour=units * per_hour)
            for id, (name, tier, units) in enumerate(
                zip(("cpu", "gpu"), (Tier.DEDICATED, Tier.GPU), _UNITS_PER_MS, strict=True)
            )
        )
        functions = tuple(
            Function(
                id,
                f"f{id}",
                tuple(
                    Variant(_NODES * id + pool, f"f{id}/{pool}", id, (pool,), Profile((ms * _MS,)))
                    for pool, ms in enumerate(times)
                ),
            )
            for id, times in enumerate(self.times_ms)
        )
        stages = tuple(Stage(f, (f.id - 1,) if self.is_chain and f.id else ()) for f in functions)
        slo = Slo(self.latency_ms * _MS, cost_usd=self.cost_units * UNIT_USD)
        app = App(functions, (Pipeline(0, "dag", stages, slo),), pools)
        times_ns = np.array(self.arrivals_ms, dtype=np.int64) * _MS
        arrivals = arrivals_at(times_ns, (_SPAN_MS + 1) * _MS)
        return Environment(app, assign(arrivals, {"dag": 1.0}, {app.clients[0].name: 1.0}, seed=0))


def small_case(seed: int) -> SmallCase:
    """Return the random case of a seed: objectives from tight to loose, up to twice overloaded."""
    rng = stream(seed, "dag-admission")
    times = tuple((rng.randint(3, 12), rng.randint(1, 8)) for _ in range(2))
    is_chain = rng.random() < 0.5
    fastest = [min(each) for each in times]
    length_ms = sum(fastest) if is_chain else max(fastest)
    units = [[ms * price for ms, price in zip(each, _UNITS_PER_MS, strict=True)] for each in times]
    least, most = sum(map(min, units)), sum(map(max, units))
    return SmallCase(
        times,
        is_chain,
        tuple(sorted(rng.randint(0, _SPAN_MS) for _ in range(_REQUESTS))),
        latency_ms=int(length_ms * rng.uniform(1.2, 3.0)) + 1,
        cost_units=_cost_units(rng, least, most),
    )


def _cost_units(rng: Random, least: int, most: int) -> int:
    return rng.randint((least + most) // 2, most + 1)


def served_by(policy: PolicyCase, case: SmallCase) -> int:
    """Return how many requests a policy serves within both objectives."""
    environment = case.environment()
    observer = CostObserver(environment.app, ())
    outcomes = environment.simulate(policy, 0, observer=observer).requests.outcome.tolist()
    limit_usd = case.cost_units * UNIT_USD * (1 + 1e-9)
    return sum(
        outcome == Outcome.MET and observer.usd[id] <= limit_usd
        for id, outcome in enumerate(outcomes)
    )


def optimum(case: SmallCase) -> int:
    """Return the largest number of requests that any schedule serves within both objectives.

    >>> optimum(SmallCase(((9, 2), (9, 2)), True, (0, 0, 0), 8, 100))
    2
    """
    return _Search(case).best


Progress = tuple[int, int, int]  # stages done as bits, when the last of them ends, cost so far


@final
class _Search:
    """Depth-first search over all schedules."""

    def __init__(self, case: SmallCase) -> None:
        self._case = case
        self._stages = range(len(case.times_ms))
        self._all = (1 << len(case.times_ms)) - 1
        self._rest_ms = self._rests()
        self._seen: dict[tuple[object, ...], int] = {}
        self.best = 0
        begun = tuple((0, arrival, 0) for arrival in case.arrivals_ms)
        self._extend((0,) * _NODES, begun, 0, 0)

    def _rests(self) -> list[int]:
        """By stage: the least time that a request needs after it."""
        fastest = [min(each) for each in self._case.times_ms]
        if not self._case.is_chain:
            return [0] * len(fastest)
        return [sum(fastest[stage + 1 :]) for stage in self._stages]

    def _extend(
        self, free_ms: tuple[int, ...], progress: tuple[Progress, ...], last_ms: int, served: int
    ) -> None:
        """Add one more task, that starts no earlier than the last one, in every possible way."""
        self.best = max(self.best, served)
        # Requests with the same arrival and progress are the same, and a node that is free before
        # the last start is as good as one that becomes free then.
        now = tuple(max(each, last_ms) for each in free_ms)
        waiting = tuple(sorted((*p, a) for p, a in self._open(progress, last_ms)))
        key = (now, waiting)
        if served + len(waiting) <= self.best or self._seen.get(key, -1) >= served:
            return
        self._seen[key] = served
        tried: set[tuple[object, ...]] = set()
        for request, (done, ready_ms, cost) in enumerate(progress):
            due_ms = self._case.arrivals_ms[request] + self._case.latency_ms
            for stage in self._next_stages(done):
                for node, time_ms in enumerate(self._case.times_ms[stage]):
                    released = ready_ms if self._case.is_chain else self._case.arrivals_ms[request]
                    start_ms = max(free_ms[node], released)
                    end_ms = start_ms + time_ms
                    spent = cost + time_ms * _UNITS_PER_MS[node]
                    move = (done, ready_ms, cost, due_ms, stage, node)
                    if (
                        start_ms < last_ms
                        or end_ms + self._rest_ms[stage] > due_ms
                        or spent > self._case.cost_units
                        or move in tried
                    ):
                        continue
                    tried.add(move)
                    after = (done | 1 << stage, max(ready_ms, end_ms), spent)
                    is_done = after[0] == self._all
                    self._extend(
                        (*free_ms[:node], end_ms, *free_ms[node + 1 :]),
                        (*progress[:request], after, *progress[request + 1 :]),
                        start_ms,
                        served + is_done,
                    )

    def _open(self, progress: Sequence[Progress], last_ms: int) -> list[tuple[Progress, int]]:
        """The requests that can still be in time, with their arrivals."""
        found = []
        for (done, ready_ms, cost), arrival in zip(progress, self._case.arrivals_ms, strict=True):
            left = [stage for stage in self._stages if not done >> stage & 1]
            if not left:
                continue
            need_ms = min(self._case.times_ms[left[0]]) + self._rest_ms[left[0]]
            released = ready_ms if self._case.is_chain else arrival
            if max(last_ms, released) + need_ms <= arrival + self._case.latency_ms:
                found.append(((done, ready_ms, cost), arrival))
        return found

    def _next_stages(self, done: int) -> list[int]:
        left = [stage for stage in self._stages if not done >> stage & 1]
        return left[:1] if self._case.is_chain else left
