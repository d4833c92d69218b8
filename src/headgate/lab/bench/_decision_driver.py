"""A driver of one Scheduler in memory, which times `Scheduler.handle` and nothing else.

The driver is correct, not a mock: every node has a `Backend`, orders take the time of their
profiles in virtual time, timers fire, and every order ends in exactly one event. So the state in
which a decision is timed is one that a policy can really get into. What is missing of the
simulator's driver (faults, FaaS, network, prices, records) costs nothing here.

A `DecisionCase` says how large the application is and how loaded its fleet:

- *idle*: a tenth of the capacity is offered, and hardly anything waits;
- *busy*: every node works, and as many requests wait as the case says. Whenever a request is
  answered, another one arrives;
- *split*: half of the functions run on half of the nodes, which are busy as above; the other half
  is idle. Whoever looks at every queue for every free node is found out here.

Weights are *resident* on every node, in as far as `INSTANCES_MAX` allows, or memory is under
*pressure*: a node holds the weights of four functions, and those of twelve more in host memory.
Objectives are far away, so that nothing is rejected and the queue has the length of the case.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import log
from time import perf_counter, perf_counter_ns
from typing import Final, Literal, final

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    PlacedAction,
    ReportFault,
    SetTimer,
    Settle,
    StartInstance,
)
from headgate.core.backend import Backend, Effect, Ended, IdleTimer, instance_of
from headgate.core.clock import HOUR_NS, MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.events import (
    BatchFinished,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    NodeJoined,
    Rank,
    RequestArrived,
    TimerFired,
    TimerKey,
    WeightsLoaded,
)
from headgate.core.ids import first_id
from headgate.core.model import (
    UNLIMITED,
    App,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Variant,
)
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome

Fleet = Literal["idle", "busy", "split"]
Weights = Literal["resident", "pressure"]

FLEETS: Final[tuple[Fleet, ...]] = ("idle", "busy", "split")
WEIGHTS: Final[tuple[Weights, ...]] = ("resident", "pressure")
INSTANCES_MAX: Final = 100_000  # of all nodes, before the first request: 1,000 x 1,000 is too many
_EXEC_NS: Final = tuple(10 * MILLISECOND_NS * (4 + 3 * items) // 7 for items in range(1, 5))
_COLD_START_NS: Final = 200 * MILLISECOND_NS
_SWAP_IN_NS: Final = 20 * MILLISECOND_NS
_IDLE_LOAD: Final = 0.1
_ANSWERS_MIN: Final = 500  # before anything is measured
_ON_DEVICE: Final = 4  # functions whose weights fit on a device, under pressure
_ON_HOST: Final = 12
_RETURN_NS: Final = MILLISECOND_NS  # the next request follows an answer within this time
_PAUSE_NS: Final = SECOND_NS  # after a rejection


@dataclass(frozen=True, slots=True)
class DecisionCase:
    """The size of an application, and the state of its fleet."""

    nodes: int
    functions: int
    waiting: int = 0  # requests; of an idle fleet none
    stages: int = 1  # of each pipeline, one after the other
    fleet: Fleet = "busy"
    weights: Weights = "resident"

    @property
    def is_possible(self) -> bool:
        return self.fleet != "split" or min(self.nodes, self.functions) >= 2


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of `Scheduler.handle` in nanoseconds, and the state in which they were measured."""

    arrivals: list[int] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)  # starts, loads, timers
    waiting: int = 0
    instances: int = 0

    @property
    def together(self) -> list[int]:
        return self.arrivals + self.completions


def make_app(case: DecisionCase) -> App:
    """Return as many pipelines as functions, each a chain that begins with a function of its own.

    Where the fleet is split, a chain stays within its half.
    """
    halves = 2 if case.fleet == "split" else 1
    is_under_pressure = case.weights == "pressure"
    held = max(1, min(_ON_DEVICE, case.functions // halves // 2))
    pools = tuple(
        Pool(
            half,
            f"pool{half}",
            nodes=(case.nodes + half) // halves,
            memory_bytes=held if is_under_pressure else UNLIMITED,
            host_memory_bytes=_ON_HOST if is_under_pressure else 0,
        )
        for half in range(halves)
    )
    profile = Profile(
        _EXEC_NS,
        cold_start_ns=_COLD_START_NS,
        swap_in_ns=_SWAP_IN_NS,
        memory_bytes=1 if is_under_pressure else 0,
    )
    functions = tuple(
        Function(id, f"f{id}", (Variant(id, f"f{id}", id, (id % halves,), profile),))
        for id in range(case.functions)
    )
    pipelines = tuple(
        Pipeline(id, f"p{id}", _chain(functions, id, case.stages, halves), _slo(id))
        for id in range(case.functions)
    )
    return App(functions, pipelines, pools)


def _chain(
    functions: tuple[Function, ...], first: int, stages: int, step: int
) -> tuple[Stage, ...]:
    same_pool = [f for f in functions if f.id % step == first % step]
    begin = same_pool.index(functions[first])
    chosen = (same_pool[(begin + number) % len(same_pool)] for number in range(stages))
    return tuple(
        Stage(function, (number - 1,) if number else (), name=f"s{number}")
        for number, function in enumerate(chosen)
    )


def _slo(pipeline_id: int) -> Slo:
    """Objectives differ, so that the order of deadlines is not the order of arrival."""
    return Slo(10 * HOUR_NS + pipeline_id * 37 % 101 * SECOND_NS)


@final
@dataclass(frozen=True, slots=True)
class _Job:
    """An order that a node has begun."""

    node_id: int
    order: Action


@final
@dataclass(frozen=True, slots=True)
class _Timer:
    key: TimerKey
    token: int


@final
@dataclass(frozen=True, slots=True)
class _Send:
    """The load generator sends a request."""

    pipeline: int
    is_repeated: bool  # another one follows when it has ended


_Item = Event | _Job | _Timer | _Send


@final
class TimedDriver:
    """Drives one Scheduler through a case. `timings` has the times since they were last cleared."""

    def __init__(
        self,
        case: DecisionCase,
        kind: PolicyKind,
        config: PolicyConfig | None = None,
        *,
        validate: bool = False,
    ) -> None:
        self._case = case
        self._app = app = make_app(case)
        # One of two gateways, because the instances that are resident from the start are the
        # other's, which leaves before the first request.
        self.scheduler = Scheduler(
            app, kind, config, rng=stream(0, "policy/0"), index=0, peers=2, validate=validate
        )
        self._rng = stream(0, "load")
        self._heap: list[tuple[int, int, int, _Item]] = []
        self._sequence = 0
        self._backends: list[Backend] = []
        self._timers: dict[TimerKey, int] = {}
        self._repeated: dict[int, int] = {}  # by request id: its pipeline, if another one follows
        self._requests = 0
        self._unanswered = _ANSWERS_MIN  # until the fleet is in the state of its case
        self._tasks_in_flight = 0
        self._open = 0
        self.now_ns = 0
        self.outcomes: Counter[int] = Counter()
        self.timings = Timings()

    @property
    def waiting(self) -> int:
        """Requests that are admitted and not running: a chain has one task at a time."""
        return self._open - self._tasks_in_flight

    @property
    def is_steady(self) -> bool:
        """Whether all requests that filled the queue, or as many others, have been answered.

        Only then do stages and deadlines in the queue have the mixture that they have for ever.
        """
        return self._unanswered <= 0

    def join_nodes(self) -> None:
        for pool in self._app.pools:
            for number in range(pool.nodes):
                self._backends.append(Backend(pool, self._app.variants))
                self._handle(NodeJoined(len(self._backends) - 1, pool.id, f"{pool.name}-{number}"))

    def load_weights(self, is_late: Callable[[], bool] = lambda: False) -> None:
        """Make functions resident before the first request, evenly; stop early if it gets late."""
        first = id = first_id(1)  # of the other one
        for round in range(self._case.functions):
            for node_id, backend in enumerate(self._backends):
                if is_late() or id - first >= INSTANCES_MAX:
                    return
                node = self.scheduler.view.nodes[node_id]
                halves = len(self._app.pools)
                count = (self._case.functions + halves - 1 - node.pool.id) // halves
                function_id = (node_id + round) % count * halves + node.pool.id
                variant = node.variants[function_id]
                if round >= count or variant is None:
                    continue
                memory = node.memory_used_bytes + variant.profile.memory_bytes
                if memory > node.pool.memory_bytes or variant.id in node.instances:
                    continue
                start = StartInstance(id, variant.id, node.pool.id, node_id)
                backend.handle(self.now_ns, start)
                backend.handle(self.now_ns, Ended(start))
                self._handle(InstanceAppeared(id, variant.id, node_id))
                id += 1

    def send_requests(self) -> None:
        """Send what keeps the fleet in the state of the case, from now on."""
        self._handle(GatewaysChanged(1))
        pools = self._app.pools
        for pool in pools:
            is_idle = self._case.fleet == "idle" or (self._case.fleet == "split" and pool.id == 1)
            if is_idle:
                self._send_next_idle(pool)
                continue
            for _ in range(self._case.waiting + pool.nodes * len(_EXEC_NS)):
                self._unanswered += 1
                at_ns = self.now_ns + self._rng.randrange(100 * MILLISECOND_NS)
                self._push(at_ns, Rank.ARRIVAL, _Send(self._pipeline_on(pool), is_repeated=True))

    def _pool_of(self, pipeline_id: int) -> Pool:
        return self._app.pools[pipeline_id % len(self._app.pools)]

    def _pipeline_on(self, pool: Pool) -> int:
        halves = len(self._app.pools)
        count = (len(self._app.pipelines) + halves - 1 - pool.id) // halves
        return self._rng.randrange(count) * halves + pool.id

    def _send_next_idle(self, pool: Pool) -> None:
        """Send the next of the Poisson arrivals for an idle pool, each of which sends another."""
        interval_ns = _EXEC_NS[0] * self._case.stages / (_IDLE_LOAD * pool.nodes)
        at_ns = self.now_ns + int(-log(1.0 - self._rng.random()) * interval_ns)
        self._push(at_ns, Rank.ARRIVAL, _Send(self._pipeline_on(pool), is_repeated=False))

    def run(self, events: int, is_late: Callable[[], bool] = lambda: False) -> None:
        """Handle this many items of the event queue, or fewer if it gets late or there are none."""
        for _ in range(events):
            if not self._heap or is_late():
                return
            self.now_ns, _, _, item = heappop(self._heap)
            self._process(item)

    def _process(self, item: _Item) -> None:
        if isinstance(item, _Job):
            backend = self._backends[item.node_id]
            effects = backend.handle(self.now_ns, Ended(item.order))
            self._apply(item.node_id, effects)
            self._handle(self._ended_event(item))
        elif isinstance(item, _Send):
            request_id = self._requests
            self._requests += 1
            self._open += 1
            if item.is_repeated:
                self._repeated[request_id] = item.pipeline
            else:
                self._send_next_idle(self._pool_of(item.pipeline))
            self._handle(RequestArrived(request_id, item.pipeline))
        elif isinstance(item, _Timer):
            if self._timers.get(item.key) == item.token:
                del self._timers[item.key]
                self._handle(TimerFired(item.key))
        else:
            self._handle(item)

    def _ended_event(self, job: _Job) -> Event:
        order = job.order
        if isinstance(order, Dispatch):
            self._tasks_in_flight -= len(order.task_ids)
            return BatchFinished(order.batch_id)
        if isinstance(order, StartInstance):
            return InstanceStarted(order.instance_id, job.node_id)
        return WeightsLoaded(instance_of(order))

    def _handle(self, event: Event) -> None:
        """Have the Scheduler handle an event, which is timed, and carry out its actions."""
        handle, now_ns = self.scheduler.handle, self.now_ns
        began_ns = perf_counter_ns()
        actions = handle(now_ns, event)
        took_ns = perf_counter_ns() - began_ns
        if isinstance(event, RequestArrived):
            self.timings.arrivals.append(took_ns)
        elif isinstance(event, BatchFinished):
            self.timings.completions.append(took_ns)
        else:
            self.timings.others.append(took_ns)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Settle):
            self._on_settled(action)
        elif isinstance(action, SetTimer):
            self._sequence += 1
            self._timers[action.key] = self._sequence
            timer = _Timer(action.key, self._sequence)
            self._push(max(self.now_ns, action.at_ns), Rank.TIMER, timer)
        elif isinstance(action, CancelTimer):
            self._timers.pop(action.key, None)
        elif isinstance(action, ReportFault):
            raise ConfigError(f"the policy failed in {action.hook}: {action.error}")
        else:
            assert isinstance(action, PlacedAction)
            if action.node_id is None:
                raise ConfigError("cannot measure a policy that lets pools choose nodes")
            if isinstance(action, Dispatch):
                self._tasks_in_flight += len(action.task_ids)
            self._apply(action.node_id, self._backends[action.node_id].handle(self.now_ns, action))

    def _on_settled(self, action: Settle) -> None:
        self._open -= 1
        self._unanswered -= 1
        outcome = action.settlement.outcome
        self.outcomes[outcome] += 1
        pipeline = self._repeated.pop(action.request_id, None)
        if pipeline is not None:
            pause_ns = 0 if outcome <= Outcome.LATE else _PAUSE_NS
            at_ns = self.now_ns + pause_ns + self._rng.randrange(_RETURN_NS)
            following = self._pipeline_on(self._pool_of(pipeline))
            self._push(at_ns, Rank.ARRIVAL, _Send(following, is_repeated=True))

    def _apply(self, node_id: int, effects: list[Effect]) -> None:
        for effect in effects:
            assert not isinstance(effect, IdleTimer), "no pool has an idle timeout"
            if isinstance(effect, Event):
                self._push(self.now_ns, Rank.COMPLETION, effect)
            else:
                job = _Job(node_id, effect)
                self._push(self.now_ns + self._length_ns(job), Rank.COMPLETION, job)

    def _length_ns(self, job: _Job) -> int:
        order = job.order
        profile = self._backends[job.node_id].instances[instance_of(order)].variant.profile
        if isinstance(order, Dispatch):
            return profile.exec_ns[order.items - 1]
        return profile.cold_start_ns if isinstance(order, StartInstance) else profile.swap_in_ns

    def _push(self, at_ns: int, rank: int, item: _Item) -> None:
        self._sequence += 1
        heappush(self._heap, (at_ns, rank, self._sequence, item))


def measure(
    case: DecisionCase,
    kind: PolicyKind,
    config: PolicyConfig | None = None,
    *,
    events: int = 4_000,
    limit_s: float = 10.0,
) -> Timings:
    """Bring a fleet into the state of a case, and time the decisions of the next events.

    Loading weights, filling the queue and measuring take at most `limit_s` each, so that a policy
    which is slow at a size is measured all the same; `waiting` and `instances` say how far it came.
    """
    driver = TimedDriver(case, kind, config)
    driver.join_nodes()
    driver.load_weights(_after(limit_s))
    driver.send_requests()
    is_late = _after(limit_s)
    while not driver.is_steady and not is_late():
        driver.run(100, is_late)
    gc.collect()
    gc.freeze()  # what was built so far is not searched again while the clock runs
    try:
        driver.timings = Timings()
        driver.run(events, _after(limit_s))
    finally:
        gc.unfreeze()
    done = driver.timings
    instances = len(driver.scheduler.view.instances)
    return Timings(done.arrivals, done.completions, done.others, driver.waiting, instances)


def _after(limit_s: float) -> Callable[[], bool]:
    end_s = perf_counter() + limit_s
    return lambda: perf_counter() > end_s
