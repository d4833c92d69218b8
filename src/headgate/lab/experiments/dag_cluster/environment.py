"""The clusters, DAGs and objectives of chapter 4 of the thesis, as far as its table can be decoded.

The thesis (EECS-2022-88) prints a table of goodputs, not the DAGs, nodes and units behind it. The
printed numbers are quotients: 1200 requests, one per millisecond, over the time until all are
served. So FIFO served a request per 5 ms, of which 3, 7, 12 and 16 were within 20, 40, 60 and
80 ms; Clockwork one per 12 ms, of which 1, 3, 5 and 6 were. The smallest system that we know of
that comes close is this one. Three functions side by side, each loaded in 1 ms:

    function   on a CPU node   on the GPU node
    detect     9 ms            7 ms
    resize     6 ms            2 ms
    classify   not at all      3 ms

on two CPU nodes and one GPU node. A whole DAG on the GPU node takes 12 ms, and no CPU node runs a
whole one. FIFO, which sends each function to the next free node, takes 5 ms. A CPU node costs
1 unit per millisecond and the GPU node 5, so a whole DAG on the GPU costs 60 units: the cost
objective, which is always met, as in the table.

For the sweep of load the cluster is twice as large, GPU builds run batches of up to 16 (an item
more takes 15 % of the time of the first), and there is a second DAG, `thumbnail`, which runs
resize and then classify, and must answer within half the time. Half of the requests are for each.
Arrivals are Poisson. The load is relative to the capacity without batches, by the fluid bound
(`headgate.lab.regret.fluid`), so that 2x is beyond what the thesis's own rows could serve; with
full batches the cluster serves about four times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from headgate.core.actions import Action, Dispatch
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.events import Event
from headgate.core.model import (
    ENFORCE,
    App,
    Function,
    Limits,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.records import STAGES_MAX
from headgate.core.states import Outcome
from headgate.lab.harness import Case, Environment, PolicyCase
from headgate.lab.regret.fluid import Demand, FluidModel
from headgate.metrics.columns import RunColumns
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.workload import assign, poisson
from headgate.workload.arrivals import arrivals_at

UNIT_USD: Final = 1e-7
COST_UNITS: Final = 60
REQUESTS: Final = 1200  # of table 4.1, one per millisecond
LATENCIES_MS: Final = (20, 40, 60, 80)
DETECT, RESIZE, CLASSIFY = "detect", "resize", "classify"
PHOTO, THUMBNAIL = "photo", "thumbnail"
_FUNCTIONS: Final = ((DETECT, 9, 7), (RESIZE, 6, 2), (CLASSIFY, None, 3))  # ms on CPU and GPU
_LOAD_MS: Final = 1
_CPU_UNITS_PER_MS: Final = 1
_GPU_UNITS_PER_MS: Final = 5
BATCH_MAX: Final = 16
_MORE: Final = 0.15  # of the time of the first item, per further item on a GPU
_SHORTEST_LATENCY: Final = 0.5  # of the objective of `photo`: that of `thumbnail`

# Which profiles are wrong: true over profiled time, by function.
RIGHT: Final = "right"
WRONG: Final = "wrong by 20 %"
OPTIMISTIC: Final = f"{DETECT} 10x too optimistic"
SCALES: Final = {RIGHT: (), WRONG: (1.2, 0.8, 1.2), OPTIMISTIC: (10.0, 1.0, 1.0)}


@dataclass(frozen=True, slots=True)
class TableScenario:
    """A row of table 4.1: one DAG, 1200 requests in 1200 ms."""

    latency_ms: int
    admission: str = ENFORCE

    def environment(self, seed: int) -> Environment:
        slo = Slo(self.latency_ms * MILLISECOND_NS, cost_usd=COST_UNITS * UNIT_USD)
        functions = _functions(batch_max=1)
        pipelines = (Pipeline(0, PHOTO, tuple(Stage(f) for f in functions), slo),)
        limits = Limits(admission=self.admission)
        app = App(functions, pipelines, _pools(1), limits=limits)
        times_ns = np.arange(REQUESTS, dtype=np.int64) * MILLISECOND_NS
        arrivals = arrivals_at(times_ns, REQUESTS * MILLISECOND_NS)
        named = assign(arrivals, {PHOTO: 1.0}, {app.clients[0].name: 1.0}, seed=0)
        return Environment(app, named)


@dataclass(frozen=True, slots=True)
class LoadScenario:
    """The larger cluster under a multiple of its capacity."""

    latency_ms: int
    load: float
    profiles: str = RIGHT
    seconds: float = 2.0

    def environment(self, seed: int) -> Environment:
        app = self.app()
        duration_ns = int(self.seconds * SECOND_NS)
        scale = SCALES[self.profiles]
        capacity = capacity_per_s(self.app(batch_max=1))
        drawn = poisson(self.load * capacity, duration_ns, seed=seed)
        mix = {PHOTO: 1.0, THUMBNAIL: 1.0}
        arrivals = assign(drawn, mix, {app.clients[0].name: 1.0}, seed=seed)
        return Environment(app, arrivals, GroundTruthConfig(scale=scale))

    def app(self, batch_max: int = BATCH_MAX) -> App:
        functions = _functions(batch_max)
        by_name = {function.name: function for function in functions}
        cost_usd = COST_UNITS * UNIT_USD
        latency_ns = self.latency_ms * MILLISECOND_NS
        photo = tuple(Stage(f) for f in functions)
        thumbnail = (Stage(by_name[RESIZE]), Stage(by_name[CLASSIFY], (0,)))
        short_ns = int(_SHORTEST_LATENCY * latency_ns)
        pipelines = (
            Pipeline(0, PHOTO, photo, Slo(latency_ns, cost_usd=cost_usd)),
            Pipeline(1, THUMBNAIL, thumbnail, Slo(short_ns, cost_usd=cost_usd)),
        )
        return App(functions, pipelines, _pools(2))


def capacity_per_s(app: App) -> float:
    """Requests per second of the mix that the cluster can serve, by the fluid bound."""
    mix = [Demand(pipeline, 1.0) for pipeline in app.pipelines]
    return len(mix) * FluidModel(app, SECOND_NS).capacity(mix)


def _pools(times: int) -> tuple[Pool, Pool]:
    per_hour = 3_600_000 * UNIT_USD
    cpu_usd, gpu_usd = _CPU_UNITS_PER_MS * per_hour, _GPU_UNITS_PER_MS * per_hour
    return (
        Pool(0, "cpu", Tier.DEDICATED, 2 * times, gpu_sevenths=0, usd_per_hour=cpu_usd),
        Pool(1, "gpu", Tier.GPU, times, usd_per_hour=gpu_usd),
    )


def _functions(batch_max: int) -> tuple[Function, ...]:
    functions: list[Function] = []
    variants = 0
    for id, (name, cpu_ms, gpu_ms) in enumerate(_FUNCTIONS):
        builds: list[Variant] = []
        for pool_id, (time_ms, more) in enumerate(((cpu_ms, 1.0), (gpu_ms, _MORE))):
            if time_ms is not None:
                first_ns = time_ms * MILLISECOND_NS
                times_ns = tuple(int(first_ns * (1 + more * n)) for n in range(batch_max))
                profile = Profile(times_ns, cold_start_ns=_LOAD_MS * MILLISECOND_NS)
                build = f"{name}/{('cpu', 'gpu')[pool_id]}"
                builds.append(Variant(variants, build, id, (pool_id,), profile))
                variants += 1
        functions.append(Function(id, name, tuple(builds)))
    return tuple(functions)


class CostObserver(Observer):
    """Adds up, by request, what the batches that it was in held of nodes."""

    def __init__(self, app: App, scale: tuple[float, ...]) -> None:
        self._app = app
        self._scale = scale or (1.0,) * len(app.functions)
        self.usd: dict[int, float] = {}

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                variant = self._app.variants[action.variant_id]
                exec_ns = int(variant.exec_ns(action.items) * self._scale[variant.function_id])
                pool = self._app.pools[action.pool_id]
                each_usd = pool.batch_usd(variant.shape, exec_ns) / len(action.task_ids)
                for task_id in action.task_ids:
                    request_id = task_id // STAGES_MAX
                    self.usd[request_id] = self.usd.get(request_id, 0.0) + each_usd


@dataclass(frozen=True, slots=True)
class DagResult:
    """What became of the requests of one run."""

    requests: int
    admitted: int
    kept: int  # of them: in time
    kept_by_pipeline: tuple[float, ...]  # share of the admitted ones; 1 if none was
    hits: int  # in time and within the cost objective
    cheap: int  # within the cost objective, whenever they were answered
    in_window: int  # hits that were answered before the last arrival could be
    window_s: float
    drain_s: float  # until the last request was answered
    cost_units: float  # of all batches

    @property
    def goodput(self) -> float:
        """Hits per second within the window."""
        return self.in_window / self.window_s

    @property
    def kept_share(self) -> float:
        """Share of the admitted requests that were in time; late, expired and failed are not."""
        return self.kept / self.admitted if self.admitted else 1.0

    @property
    def units_per_hit(self) -> float:
        return self.cost_units / self.hits if self.hits else float("nan")


def run_table(case: Case[TableScenario], seed: int) -> DagResult:
    """Run a row of table 4.1. At the top level of a module, for worker processes."""
    return _run(case.policy, case.scenario.environment(seed), seed)


def run_load(case: Case[LoadScenario], seed: int) -> DagResult:
    """Run a policy under a load. At the top level of a module, for worker processes."""
    return _run(case.policy, case.scenario.environment(seed), seed)


def _run(policy: PolicyCase, environment: Environment, seed: int) -> DagResult:
    observer = CostObserver(environment.app, environment.truth.scale)
    return _result(environment.simulate(policy, seed, observer=observer), observer.usd)


def _result(run: RunColumns, usd: dict[int, float]) -> DagResult:
    requests = run.requests
    is_met = requests.outcome == Outcome.MET
    is_admitted = requests.outcome != Outcome.REJECTED
    is_answered = requests.outcome <= Outcome.LATE
    costs = np.array([usd.get(id, 0.0) for id in range(len(requests))])
    is_cheap = costs <= COST_UNITS * UNIT_USD * (1 + 1e-9)
    is_hit = is_met & is_cheap
    shares = []
    for pipeline in range(len(run.pipelines)):
        own = is_admitted & (requests.pipeline == pipeline)
        shares.append(float(is_met[own].mean()) if own.any() else 1.0)
    return DagResult(
        requests=len(requests),
        admitted=int(is_admitted.sum()),
        kept=int(is_met.sum()),
        kept_by_pipeline=tuple(shares),
        hits=int(is_hit.sum()),
        cheap=int((is_answered & is_cheap).sum()),
        in_window=int((is_hit & (requests.finished_ns <= run.window_ns)).sum()),
        window_s=run.window_ns / SECOND_NS,
        drain_s=run.end_ns / SECOND_NS,
        cost_units=sum(usd.values()) / UNIT_USD,
    )
