"""Fuzzing of policies: random applications, workloads and faults, under all checkers.

`fuzz` runs a policy in the random case of a seed, twice, and replays its log: the run must keep
every rule and be deterministic. A failure is reported as the command that repeats it.

Random cases are small and stay within the capabilities of the policy. Times lie on a coarse grid
in half of the cases, so that events coincide, and limits are tight, so that they are reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from math import inf
from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import Final, final

import numpy as np

from headgate.core.actions import Action
from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import LogEntry, Wire, replay, to_wire
from headgate.core.events import Event
from headgate.core.model import (
    ENFORCE,
    LAMBDA_PAYLOAD_BYTES_MAX,
    OBSERVE,
    ONE_CPU_MILLI,
    UNLIMITED,
    App,
    BreakerConfig,
    FaasPlatform,
    Function,
    Host,
    Limits,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.model import Client as DeclaredClient
from headgate.core.policy import Capabilities, PolicyConfig, PolicyKind
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import OUTCOME_NAMES
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy
from headgate.sim.checkers import Checkers, all_checkers
from headgate.sim.clients import DrainWatcher, LoopClients
from headgate.sim.faults import FaultPlan, random_plan
from headgate.sim.ground_truth import DISTRIBUTIONS, GroundTruthConfig
from headgate.sim.interfaces import Observer, SimClient
from headgate.sim.run import Setup, build_scheduler, simulate
from headgate.workload import Arrivals, ClosedLoop, ConcurrencyStep

_GIGABYTE = 1024**3
_ON_HOST: Final = 0.15  # share of cases whose pools share the CPUs of one machine
_LIMIT_NS: Final = 3_600 * SECOND_NS  # long after the last fault: an open request stays open
_EVENTS_MAX: Final = 1_000_000  # a policy that asks again every 25 us does so for seconds


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """The result of one seed: the checks made, their failures, and counts of what was covered."""

    policy: str
    seed: int
    checks: tuple[str, ...]
    failures: tuple[str, ...]
    events: Mapping[str, int]  # how often each kind of event was handled
    outcomes: Mapping[str, int]

    @property
    def is_ok(self) -> bool:
        """Whether no check has failed."""
        return not self.failures

    @property
    def command(self) -> str:
        """The command that repeats this case."""
        return f"headgate fuzz --policy {self.policy} --seed {self.seed}"

    def __str__(self) -> str:
        return "\n  ".join((self.command, *(self.failures or ("ok",))))


def fuzz(policy: str, seed: int) -> FuzzReport:
    """Run a policy in the random case of a seed, twice, under all checkers; then replay its log.

    >>> fuzz("balance", seed=1).is_ok
    True
    """
    return fuzz_kind(policy, find_policy(policy), seed)


def fuzz_kind(
    name: str, kind: PolicyKind, seed: int, *, survives_faults: bool = False
) -> FuzzReport:
    """Do the same with a policy that need not be registered.

    With `survives_faults` the run continues after a `PolicyError`, as a live gateway does.
    """
    case = random_case(kind.capabilities, seed)
    setup = replace(_setup(case, kind, seed), survives_faults=survives_faults)
    first = _Log()
    checkers = all_checkers(
        case.app,
        allows_duplicates="duplicate" in case.plan.kinds,
        allows_losses="lose" in case.plan.kinds,
        has_decision_cost=case.decision_ns > 0 or case.work_unit_ns > 0,
        is_drained=True,
        limit_ns=_LIMIT_NS,
        events_max=_EVENTS_MAX,
    )
    failures: list[str] = []
    try:
        run = simulate(
            setup, case.arrivals, clients=_clients(case), observer=_LogThenCheck(first, checkers)
        )
        checkers.finish(run)
        failures.extend(checkers.violations)
        failures.extend(_differences(first, setup, case))
        outcomes = Counter(OUTCOME_NAMES[outcome] for outcome in run.requests.outcome)
    except Exception as error:  # any error must be reported together with its seed
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        failures.append(f"{type(error).__name__}: {error} ({where})")
        outcomes = Counter()
    checks = (*checkers.names, "validate", "determinism", "replay")
    return FuzzReport(name, seed, checks, tuple(failures), first.counts(), outcomes)


def run_case(kind: PolicyKind, seed: int, observer: Observer) -> RunColumns:
    """Simulate the random case of a seed once, under an observer and without checkers."""
    case = random_case(kind.capabilities, seed)
    setup = _setup(case, kind, seed)
    return simulate(setup, case.arrivals, clients=_clients(case), observer=observer)


@dataclass(frozen=True, slots=True)
class RandomCase:
    """Everything that determines a run, except its policy."""

    app: App
    arrivals: Arrivals
    loop: ClosedLoop | None
    plan: FaultPlan
    truth: GroundTruthConfig
    schedulers: int
    membership_delay_ns: int
    decision_ns: int
    work_unit_ns: int
    announces: bool


def random_case(capabilities: Capabilities, seed: int) -> RandomCase:
    """Return the case of a seed, which a policy of these capabilities must handle."""
    rng = stream(seed, "case")
    schedulers = rng.randint(1, 3) if capabilities.multi_gateway else 1
    if capabilities.retries_busy:
        schedulers = stream(seed, "gateways").randint(1, 3)
    is_shared = capabilities.multi_gateway or schedulers > 1
    generator = _AppGenerator(capabilities, schedulers, rng)
    app = _with_small_payloads(generator.app(), stream(seed, "calls"))
    app = _with_operator_choices(app, stream(seed, "operator"))
    app = _with_shapes(app, stream(seed, "shapes"))
    duration_ns = rng.randint(50, 500) * MILLISECOND_NS
    # Requests are announced with the ids they will have, so no others may be sent in between.
    announces = capabilities.clairvoyance and rng.random() < 0.5
    crashing = schedulers if is_shared else 0
    intensity = rng.choice((0.0, 0.5, 1.5))
    plan = random_plan(app, duration_ns, seed, intensity=intensity, gateways=crashing)
    delays = stream(seed, "delays")
    if is_shared:
        app = _with_idle_timeouts(app, delays, must_retire="crash_gateway" in plan.kinds)
    if announces:
        plan = FaultPlan(tuple(fault for fault in plan.faults if fault.kind != "burst"))
    return RandomCase(
        app=app,
        arrivals=_arrivals(app, duration_ns, rng),
        loop=None if announces or rng.random() < 0.7 else _loop(app, duration_ns, rng),
        plan=plan,
        truth=GroundTruthConfig(distribution=rng.choice(("exact", *DISTRIBUTIONS)), cv=0.5),
        schedulers=schedulers,
        membership_delay_ns=delays.choice((0, 1, 40)) * MILLISECOND_NS,
        decision_ns=rng.choice((0, 0, 0, 100_000, MILLISECOND_NS)),
        work_unit_ns=rng.choice((0, 1_000)),
        announces=announces,
    )


@final
class _AppGenerator:
    """Draws the parts of a random application."""

    def __init__(self, capabilities: Capabilities, schedulers: int, rng: Random) -> None:
        self._capabilities = capabilities
        self._rng = rng
        # A node that several Schedulers share holds one instance at a time (see `Broker`).
        self._is_shared = schedulers > 1
        self._variants = 0

    def app(self) -> App:
        """Draw the whole application."""
        rng = self._rng
        count = rng.randint(1, 2) if self._capabilities.mixed_pools else 1
        drawn = [self._pool(i) for i in range(count)]
        if self._capabilities.serverless:
            drawn.append(self._serverless(len(drawn)))
        functions = tuple(self._function(i, drawn) for i in range(rng.randint(1, 4)))
        pools = tuple(self._with_memory(pool, functions) for pool in drawn)
        pipelines = tuple(self._pipeline(i, functions) for i in range(rng.randint(1, 3)))
        clients = tuple(
            DeclaredClient(i, f"c{i}", rng.choice((1.0, 2.0))) for i in range(rng.randint(1, 3))
        )
        return App(functions, pipelines, self._on_host(pools), clients, self._limits())

    def _on_host(self, pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
        """Put all pools on one host, now and then."""
        rng = Random()
        rng.setstate(self._rng.getstate())  # a copy: the seeds of what was found stay what they are
        if rng.random() >= _ON_HOST:
            return pools
        host = Host(0, "host", rng.randint(1, 3) * ONE_CPU_MILLI)
        return tuple(replace(pool, host=host) for pool in pools)

    def _pool(self, id: int) -> Pool:
        rng = self._rng
        limits_compute = rng.random() < 0.3
        pool = Pool(
            id,
            f"pool{id}-",
            nodes=rng.randint(1, 4),
            slots=1 if self._is_shared else rng.choice((1, 1, 2, 3)),
            queue_max=rng.choice((0, 0, 2)),
            cpu_milli=4_000 if limits_compute else UNLIMITED,
            gpu_sevenths=7 if limits_compute else UNLIMITED,
            idle_timeout_ns=rng.choice((NEVER_NS, NEVER_NS, 30 * MILLISECOND_NS)),
            usd_per_hour=1.0,
            network_ns=rng.choice((0, 0, MILLISECOND_NS, 300_000)),
            bytes_per_s=rng.choice((0.0, 1e9)),
        )
        if self._capabilities.serverless and not self._is_shared and rng.random() < 0.5:
            boot_ns = rng.choice((0, 5, 100)) * MILLISECOND_NS
            return replace(pool, is_elastic=True, boot_ns=boot_ns)
        return pool

    def _serverless(self, id: int) -> Pool:
        rng = self._rng
        platform = FaasPlatform(
            memory_bytes=_GIGABYTE,
            concurrency_max=rng.randint(1, 5),
            burst_concurrency=rng.randint(1, 5),
            burst_refill_per_s=rng.choice((1.0, 100.0)),
            keep_alive_ns=rng.choice((10, 1_000)) * MILLISECOND_NS,
            usd_per_gb_s=1e-5,
            usd_per_request=1e-7,
        )
        breaker = BreakerConfig(
            failure_threshold=rng.randint(1, 5),
            cooldown_ns=rng.choice((5, 100)) * MILLISECOND_NS,
            # Short enough for requests that only a failing platform can run to fail within the run.
            cooldown_max_ns=1_000 * MILLISECOND_NS,
            usd_per_minute=rng.choice((inf, inf, 5e-5)),
        )
        return Pool(
            id,
            f"cloud{id}-",
            Tier.SERVERLESS,
            network_ns=rng.choice((0, MILLISECOND_NS)),
            faas=platform,
            breaker=breaker,
        )

    def _with_memory(self, pool: Pool, functions: tuple[Function, ...]) -> Pool:
        """Limit the memory of a pool's nodes: between the largest variant and all variants."""
        rng = self._rng
        sizes = [
            v.profile.memory_bytes for f in functions for v in f.variants if pool.id in v.pool_ids
        ]
        if pool.faas is not None or self._is_shared or not sizes or rng.random() < 0.4:
            return pool
        return replace(
            pool,
            memory_bytes=rng.randint(max(sizes), sum(sizes)),
            host_memory_bytes=rng.choice((0, sum(sizes) // 2)),
        )

    def _function(self, id: int, pools: list[Pool]) -> Function:
        rng = self._rng
        own = [pool for pool in pools if pool.faas is None]
        targets = rng.sample(own, rng.randint(1, len(own)))
        targets += [pool for pool in pools if pool.faas is not None]
        base_ns = rng.randint(1, 20) * MILLISECOND_NS
        items_max = rng.randint(1, 4)
        variants = tuple(self._variant(id, pool, base_ns, items_max) for pool in targets)
        is_idempotent = rng.random() < 0.8
        warm = rng.choice((0, 1, 2)) if self._capabilities.serverless else 0
        return Function(id, f"f{id}", variants, is_idempotent, warm)

    def _variant(self, function_id: int, pool: Pool, base_ns: int, items_max: int) -> Variant:
        rng = self._rng
        factor = rng.choice((1, 1, 3))
        profile = Profile(
            exec_ns=tuple(base_ns * factor * (3 + items) // 4 for items in range(1, items_max + 1)),
            slowdown=rng.choice(((1.0,), (1.0, 1.5), (1.0, 1.0, 1.3))),
            cold_start_ns=rng.choice((0, 5, 30)) * MILLISECOND_NS,
            swap_in_ns=rng.choice((0, 2)) * MILLISECOND_NS,
            memory_bytes=rng.randint(1, 4) * _GIGABYTE,
            output_bytes=rng.choice((0, 1_000_000)),
        )
        shape = Shape(rng.choice((500, 2_000, 4_000)), rng.randint(1, 7))
        id = self._variants
        self._variants += 1
        concurrency = rng.randint(1, pool.slots)
        return Variant(id, f"v{id}", function_id, (pool.id,), profile, shape, concurrency)

    def _pipeline(self, id: int, functions: tuple[Function, ...]) -> Pipeline:
        rng = self._rng
        stages: list[Stage] = []
        for index in range(rng.choice((1, 1, 2, 3, 4)) if self._capabilities.pipelines else 1):
            after = tuple(before for before in range(index) if rng.random() < 0.6)
            is_cascade = bool(after) and rng.random() < 0.3
            function = rng.choice(functions)
            stages.append(Stage(function, after, is_cascade, 0.5 if is_cascade else 1.0))
        latency_ns = rng.choice((NEVER_NS, rng.randint(10, 300) * MILLISECOND_NS))
        return Pipeline(id, f"p{id}", tuple(stages), Slo(latency_ns, is_hard=rng.random() < 0.4))

    def _limits(self) -> Limits:
        rng = self._rng
        return Limits(
            attempts_max=rng.randint(1, 3),
            refusals_max=rng.choice((3, 64)),
            backoff_ns=rng.choice((0, 1, 1, 5)) * MILLISECOND_NS,
            timeout_factor=rng.choice((0.0, 2.0, 10.0)),
            open_requests_max=rng.choice((10, 1_000, 1_000)),
            timeout_floor_ns=rng.choice((0, 50)) * MILLISECOND_NS,
            start_backoff_ns=rng.choice((1, 20)) * MILLISECOND_NS,
            start_backoff_max_ns=rng.choice((20, 200)) * MILLISECOND_NS,
        )


def _with_operator_choices(app: App, rng: Random) -> App:
    """Only observe admission in some cases, and declare priorities of clients in some."""
    limits = replace(app.limits, admission=rng.choice((ENFORCE, ENFORCE, OBSERVE)))
    priorities = rng.choice(((0,), (-1, 0, 2)))
    clients = tuple(replace(client, priority=rng.choice(priorities)) for client in app.clients)
    return replace(app, limits=limits, clients=clients)


def _with_shapes(app: App, rng: Random) -> App:
    """Let some pools bind shapes at the start of an instance, and variants run in several shapes.

    Some are slowed down by others on the same node.
    A larger shape is faster; one of them is so fast only for small batches that it has no others.
    """
    pools = tuple(replace(pool, compute=rng.choice((0, 0, 1, 2))) for pool in app.pools)
    functions = []
    for function in app.functions:
        variants = []
        for variant in function.variants:
            exec_ns = variant.profile.exec_ns
            larger = tuple(max(1, time_ns // 2) for time_ns in exec_ns)
            more = (
                ShapeTimes(Shape(rng.choice((1_000, 3_000)), rng.randint(1, 7)), larger),
                ShapeTimes(Shape(4_000, 7), larger[: rng.randint(1, len(larger))]),
            )
            factors = tuple(rng.choice((1.0, 1.2, 1.5)) for _ in app.functions)
            variants.append(
                replace(
                    variant,
                    more_shapes=more[: rng.randint(0, 2)],
                    interference=factors if rng.random() < 0.3 else (),
                )
            )
        functions.append(replace(function, variants=tuple(variants)))
    return _with_functions(replace(app, pools=pools), functions)


def _with_idle_timeouts(app: App, rng: Random, *, must_retire: bool) -> App:
    """Let instances of some variants leave service after a while, and retire after another.

    All must retire where gateways crash: nobody else may know what to do with their instances.
    """
    never = () if must_retire else (NEVER_NS,)

    def timed(variant: Variant) -> Variant:
        unused_ns = rng.choice((*never, 5 * MILLISECOND_NS, 50 * MILLISECOND_NS))
        retire_ns = rng.choice((*never, MILLISECOND_NS, 60 * MILLISECOND_NS))
        return replace(variant, unused_after_ns=unused_ns, retire_after_ns=retire_ns)

    functions = [replace(f, variants=tuple(timed(v) for v in f.variants)) for f in app.functions]
    return _with_functions(app, functions)


def _with_functions(app: App, functions: list[Function]) -> App:
    by_id = {function.id: function for function in functions}
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(s, function=by_id[s.function.id]) for s in pipeline.stages),
        )
        for pipeline in app.pipelines
    )
    return replace(app, functions=tuple(functions), pipelines=pipelines)


def _with_small_payloads(app: App, rng: Random) -> App:
    """Limit the payload of calls to 500 kB, in some cases: less than the largest output."""
    payload_bytes_max = rng.choice((LAMBDA_PAYLOAD_BYTES_MAX, 500_000))
    pools = tuple(
        pool
        if pool.faas is None
        else replace(pool, faas=replace(pool.faas, payload_bytes_max=payload_bytes_max))
        for pool in app.pools
    )
    return replace(app, pools=pools)


def _arrivals(app: App, duration_ns: int, rng: Random) -> Arrivals:
    count = rng.randint(1, 50)
    grid_ns = rng.choice((1, 5 * MILLISECOND_NS))
    times_ns = sorted(rng.randrange(duration_ns) // grid_ns * grid_ns for _ in range(count))
    pipelines = [rng.randrange(len(app.pipelines)) for _ in range(count)]
    has_sizes = rng.random() < 0.5
    return Arrivals(
        np.array(times_ns, dtype=np.int64),
        duration_ns,
        np.array(pipelines, dtype=np.int32),
        np.array([rng.randrange(len(app.clients)) for _ in range(count)], dtype=np.int32),
        tuple(pipeline.name for pipeline in app.pipelines),
        tuple(client.name for client in app.clients),
        np.array([_items(app, p, has_sizes, rng) for p in pipelines], dtype=np.int32),
    )


def _items(app: App, pipeline: int, has_sizes: bool, rng: Random) -> int:
    """Draw a request size that every variant that may run the request can take."""
    functions = [stage.function for stage in app.pipelines[pipeline].stages]
    largest = min(v.profile.items_max for f in functions for v in f.variants)
    return rng.randint(1, largest) if has_sizes else 1


def _loop(app: App, duration_ns: int, rng: Random) -> ClosedLoop:
    steps = (
        ConcurrencyStep(0, rng.randint(0, 5)),
        ConcurrencyStep(duration_ns // 2, rng.randint(0, 5)),
    )
    return ClosedLoop(
        steps,
        duration_ns,
        think_ns=rng.choice((0, 1, 20)) * MILLISECOND_NS,
        pipeline=rng.choice(app.pipelines).name,
        client=rng.choice(app.clients).name,
        requests_max=30,
    )


def _setup(case: RandomCase, kind: PolicyKind, seed: int) -> Setup:
    return Setup(
        case.app,
        kind,
        _config(case, kind, seed),
        seed=seed,
        truth=case.truth,
        schedulers=case.schedulers,
        membership_delay_ns=case.membership_delay_ns,
        decision_ns=case.decision_ns,
        work_unit_ns=case.work_unit_ns,
        announces=case.announces,
        validate=True,
        records_spans=True,
        faults=case.plan.actions(),
        limit_ns=_LIMIT_NS,
    )


def _config(case: RandomCase, kind: PolicyKind, seed: int) -> PolicyConfig:
    """Draw settings near or below their defaults: large limits would hide rare paths."""
    rng = stream(seed, "config")
    drawn: dict[str, object] = {}
    # The policy's own settings first: what they draw does not depend on those that it inherits.
    own = kind.config.__annotations__
    for field in sorted(fields(kind.config), key=lambda setting: setting.name not in own):
        default = field.default
        if field.name == "batch_max":
            drawn[field.name] = rng.choice((1, 2, 8))
        elif isinstance(default, bool):
            drawn[field.name] = case.announces if field.name == "clairvoyant" else default
        elif isinstance(default, int):
            drawn[field.name] = rng.choice((default, 2 * default, max(1, default // 40)))
        elif isinstance(default, float):
            drawn[field.name] = rng.choice((default, 1.5 * default))
    try:
        config = kind.config(**drawn)
        Scheduler(case.app, kind, config)
    except ConfigError:  # the policy does not allow this combination, or not in this application
        return kind.config()
    return config


def _clients(case: RandomCase) -> list[SimClient]:
    loops: list[SimClient] = [] if case.loop is None else [LoopClients(case.loop, case.app)]
    return [*loops, DrainWatcher(case.arrivals.duration_ns)]


def _differences(first: _Log, setup: Setup, case: RandomCase) -> list[str]:
    """Repeat the run without validation and replay every Scheduler's log; return differences."""
    second = _Log()
    unvalidated = replace(setup, validate=False)
    simulate(unvalidated, case.arrivals, clients=_clients(case), observer=second)
    differences: list[str] = []
    if first.wires != second.wires:
        pairs = zip_longest(first.wires, second.wires)
        one, other = next((a, b) for a, b in pairs if a != b)
        differences.append(f"determinism: first {one}, then {other}")
    for index, entries in first.entries.items():
        result = replay(entries, build_scheduler(unvalidated, index))
        if result.first_difference is not None:
            differences.append(f"replay: {result.first_difference}")
    return differences


@final
class _Log(Observer):
    """Records every event and action, encoded at once because objects may change later."""

    def __init__(self) -> None:
        self.wires: list[tuple[int, int, Wire, list[Wire]]] = []
        self.entries: dict[int, list[LogEntry]] = {}  # by Scheduler

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        wire, wires = to_wire(event), [to_wire(action) for action in actions]
        self.wires.append((now_ns, scheduler, wire, wires))
        entry = LogEntry(len(self.wires), now_ns, event, actions)
        self.entries.setdefault(scheduler, []).append(entry)

    def counts(self) -> Counter[str]:
        """Return how often each kind of event was handled."""
        return Counter(str(wire[0]) for _, _, wire, _ in self.wires)


@final
class _LogThenCheck(Observer):
    """Logs an event before checking it, so that the log is complete if a checker raises."""

    def __init__(self, log: _Log, checkers: Checkers) -> None:
        self._log = log
        self._checkers = checkers

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self._log.on_event(now_ns, scheduler, event, actions)
        self._checkers.on_event(now_ns, scheduler, event, actions)

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        self._checkers.on_gateway_crashed(now_ns, scheduler)

    def on_turned_away(self, now_ns: int, request_id: int, pipeline: int) -> None:
        self._checkers.on_turned_away(now_ns, request_id, pipeline)
