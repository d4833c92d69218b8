"""Small applications, observers, and a simulation of them under all checkers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.core.actions import Action
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.events import Event
from headgate.core.model import (
    App,
    Client,
    FaasPlatform,
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
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy
from headgate.sim.checkers import Checkers, all_checkers
from headgate.sim.clients import DrainWatcher
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.interfaces import Observer, SimClient
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals, constant_column

MS = MILLISECOND_NS
GPU = Pool(0, "gpu")
CLOUD = Pool(1, "cloud", Tier.SERVERLESS, faas=FaasPlatform(memory_bytes=1024**3))


def make_app(
    *,
    exec_ms: Sequence[int] = (10,),
    start_ms: int = 0,
    pools: tuple[Pool, ...] = (GPU,),
    latency_ms: int | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    clients: int = 1,
    slowdown: tuple[float, ...] = (1.0,),
    memory_bytes: int = 0,
    concurrency: int = 1,
) -> App:
    """Return an app with one pipeline of one stage per function; all functions run on all pools."""
    functions = []
    for id, ms in enumerate(exec_ms):
        profile = Profile((ms * MS,), slowdown, start_ms * MS, memory_bytes=memory_bytes)
        pool_ids = tuple(pool.id for pool in pools)
        variant = Variant(id, f"v{id}", id, pool_ids, profile, concurrency=concurrency)
        functions.append(Function(id, f"f{id}", (variant,)))
    slo = Slo(NEVER_NS if latency_ms is None else latency_ms * MS)
    pipelines = tuple(Pipeline(f.id, f"p{f.id}", (Stage(f),), slo) for f in functions)
    named = tuple(Client(i, f"c{i}") for i in range(clients))
    return App(tuple(functions), pipelines, pools, named, limits)


def at_ms(*times_ms: int) -> Arrivals:
    """Return requests of one client for the first pipeline, at these times."""
    times_ns = np.array([ms * MS for ms in times_ms], dtype=np.int64)
    zeros = constant_column(len(times_ns))
    return Arrivals(times_ns, 10**6 * MS, zeros, zeros, ("p0",), ("c0",))


class RecordingObserver(Observer):
    """Records every event, with its time, and all actions."""

    def __init__(self) -> None:
        self.events: list[tuple[int, Event]] = []
        self.handled: list[tuple[int, int, Event]] = []  # time, Scheduler, event
        self.actions: list[Action] = []
        self.entries: list[tuple[int, Event, list[Action]]] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.events.append((now_ns, event))
        self.handled.append((now_ns, scheduler, event))
        self.entries.append((now_ns, event, actions))
        self.actions.extend(actions)

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for _, event in self.events)


class CheckedObserver(RecordingObserver):
    """Records a run, and checks it."""

    def __init__(self, checkers: Checkers) -> None:
        super().__init__()
        self._checkers = checkers

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        super().on_event(now_ns, scheduler, event, actions)
        self._checkers.on_event(now_ns, scheduler, event, actions)

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        self._checkers.on_gateway_crashed(now_ns, scheduler)

    def on_turned_away(self, now_ns: int, request_id: int, pipeline: int) -> None:
        self._checkers.on_turned_away(now_ns, request_id, pipeline)

    def finish(self, columns: RunColumns) -> None:
        """Check the columns of the run; raise if there was any violation."""
        self._checkers.finish(columns)
        self._checkers.raise_if_any()


def run(
    app: App,
    arrivals: Arrivals | None,
    *faults: Fault,
    policy: PolicyKind | None = None,
    config: PolicyConfig | None = None,
    clients: Sequence[SimClient] = (),
    schedulers: int = 1,
    membership_delay_ns: int = 0,
    decision_ns: int = 0,
    arrival_ns: int = 0,
    refusal_ns: int = 0,
    drain_ns: int = 0,
) -> tuple[RunColumns, RecordingObserver]:
    """Simulate in `validate` mode, under all checkers, until nothing is in flight.

    At least until `drain_ns`, if that is later than the last arrival and the last fault.
    """
    plan = FaultPlan(faults).check(app, schedulers)
    setup = Setup(
        app,
        find_policy("balance") if policy is None else policy,
        config,
        schedulers=schedulers,
        membership_delay_ns=membership_delay_ns,
        decision_ns=decision_ns,
        arrival_ns=arrival_ns,
        refusal_ns=refusal_ns,
        validate=True,
        records_spans=True,
        faults=plan.actions(),
        limit_ns=10**6 * MS,
    )
    checkers = all_checkers(
        app,
        allows_duplicates="duplicate" in plan.kinds,
        allows_losses="lose" in plan.kinds,
        has_decision_cost=decision_ns > 0,
        is_drained=True,
    )
    observer = CheckedObserver(checkers)
    last_ns = int(arrivals.times_ns[-1]) if arrivals is not None else 0
    watcher = DrainWatcher(max(plan.end_ns, last_ns, drain_ns))
    columns = simulate(setup, arrivals, clients=[*clients, watcher], observer=observer)
    observer.finish(columns)
    return columns, observer


def waits_ms(columns: RunColumns) -> list[float]:
    """Return the time of each request from arrival to end."""
    requests = columns.requests
    took_ns: list[int] = (requests.finished_ns - requests.arrival_ns).tolist()
    return [ns / MS for ns in took_ns]
