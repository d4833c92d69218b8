"""Fault injection: fault plans as data, and what each kind of fault does to a run.

A plan is part of the input of a run, as the arrivals are: the same plan causes the same faults, so
a run that fails can be repeated bit for bit. Plans are written down in Python, or drawn from a seed
(`random_plan`). Every plan ends: windows close and nodes return, so every request that is open then
must still be settled.

`FaultPlan.actions` turns a plan into `FaultAction` objects, which `Setup.faults` takes. They hold
no state of a run, so that the same setup can be run again. This module is never compiled, so tests
may extend `FaultAction` also where the simulator's loop is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import prod
from random import Random
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.core.model import App
from headgate.core.rng import stream
from headgate.sim.engine import Engine

# The attributes of `SimNode` that count the faults in force on it.
COUNTERS: Final[Mapping[str, str]] = {
    "lose": "lose_faults",
    "duplicate": "duplicate_faults",
    "refuse": "refuse_faults",
    "break": "break_faults",
    "break_starts": "break_start_faults",
}


class FaultAction:
    """The beginning or the end of a fault, applied to a running engine."""

    __slots__ = ()

    def apply(self, engine: Engine, now_ns: int) -> None:
        """Change the engine, or what it simulates, as the fault demands."""


@final
@dataclass(frozen=True, slots=True)
class SetFault(FaultAction):
    """Sets how many faults of one kind are in force on one node, platform or function.

    The number is set, not incremented and decremented, so that overlapping windows leave nothing
    behind, not even the rounding error of a factor and its inverse.
    """

    kind: str
    target: int
    in_force: int
    factor: float  # the product over all faults in force

    def apply(self, engine: Engine, now_ns: int) -> None:
        if self.kind == "throttle":
            engine.platforms[self.target].throttles = self.in_force
            return
        if self.kind == "crash_gateway":
            (engine.crash_gateway if self.in_force else engine.restart_gateway)(now_ns, self.target)
            return
        if self.kind == "cannot_load":
            unloadable = engine.truth.unloadable
            (unloadable.add if self.in_force else unloadable.discard)(self.target)
            return
        node = engine.nodes[self.target]
        if self.kind == "slow":
            node.slow_factor = self.factor
        elif self.kind != "crash":
            setattr(node, COUNTERS[self.kind], self.in_force)
        elif self.in_force:
            engine.crash(now_ns, node)
        else:
            engine.join(now_ns, node)


@final
@dataclass(frozen=True, slots=True)
class Instant(FaultAction):
    """A fault without an end: cancelled or poisonous requests, a burst, or a wrong profile."""

    fault: Fault

    def apply(self, engine: Engine, now_ns: int) -> None:
        fault = self.fault
        if fault.share is not None:
            is_poison = fault.kind == "poison"
            rng = stream(now_ns, "poison" if is_poison else "cancellations")
            for request_id in engine.open_requests():
                if rng.random() < fault.share:
                    if is_poison:  # a node that runs the request from now on crashes
                        engine.poisonous_requests.add(request_id)
                    else:
                        engine.cancel(now_ns, request_id)
        elif fault.pipeline is not None and fault.count is not None:
            for _ in range(fault.count):  # they arrive unless the run is over by then
                engine.submit(now_ns, fault.pipeline, client=0)
        elif fault.function is not None and fault.factor is not None:
            scale = engine.truth.scale
            scale.extend([1.0] * (fault.function + 1 - len(scale)))
            scale[fault.function] *= fault.factor


# The fields that each kind of fault has besides `at_ns`. A kind with `until_ns` is a window.
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "crash": ("until_ns", "node"),  # the node is down, and everything on it is lost
    "slow": ("until_ns", "node", "factor"),  # jobs that begin on the node take `factor` times
    "lose": ("until_ns", "node"),  # completions of the node are never reported
    "duplicate": ("until_ns", "node"),  # completions of the node are reported twice
    "refuse": ("until_ns", "node"),  # the node refuses batches
    "break": ("until_ns", "node"),  # batches on the node fail when they end
    "break_starts": ("until_ns", "node"),  # no instance can be started on the node
    "throttle": ("until_ns", "pool"),  # a serverless pool throttles every call
    "cannot_load": ("until_ns", "function"),  # no instance of the function can start, anywhere
    "crash_gateway": ("until_ns", "gateway"),  # its open requests fail; then another replaces it
    "cancel": ("share",),  # this share of the open requests is cancelled
    "poison": ("share",),  # this share of the open requests crashes every node that runs it
    "burst": ("pipeline", "count"),  # `count` additional requests arrive at once
    "wrong_profile": ("function", "factor"),  # the function takes `factor` times from now on
}
_NODE_KINDS: Final = tuple(kind for kind, needs in KINDS.items() if "node" in needs)
_FAULTS_MEAN: Final = 4.0  # number of faults of a random plan of intensity 1
_FAULTS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `KINDS` says which of the fields each kind has; the others must be absent.

    >>> Fault("slow", at_ns=0, until_ns=5, node=1)
    Traceback (most recent call last):
    ...
    headgate.core.errors.ConfigError: slow.factor: is missing
    """

    kind: str
    at_ns: int
    until_ns: int | None = None
    node: int | None = None  # index in the run: the nodes of the first pool come first
    pool: int | None = None
    gateway: int | None = None
    function: int | None = None
    pipeline: int | None = None
    factor: float | None = None
    share: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            allowed = ", ".join(KINDS)
            raise ConfigError("unknown kind of fault", key="kind", value=self.kind, allowed=allowed)
        if self.at_ns < 0:
            raise ConfigError("must not be negative", key=f"{self.kind}.at_ns", value=self.at_ns)
        for name in _FIELDS:
            value = getattr(self, name)
            if (value is not None) != (name in KINDS[self.kind]):
                problem = "is missing" if value is None else "does not apply to this kind of fault"
                raise ConfigError(problem, key=f"{self.kind}.{name}", value=value)
            if value is not None:
                self._check(name, value)

    def _check(self, name: str, value: float) -> None:
        if name == "share":
            is_valid, allowed = 0 < value <= 1, "more than 0, at most 1"
        elif name == "factor":
            is_valid, allowed = value > 0, "more than 0"
        else:
            least = {"until_ns": self.at_ns + 1, "count": 1}.get(name, 0)
            is_valid, allowed = value >= least, f"{least} or more"
        if not is_valid:
            key = f"{self.kind}.{name}"
            raise ConfigError("is out of range", key=key, value=value, allowed=allowed)

    @property
    def end_ns(self) -> int:
        """When the fault is over; for an instantaneous fault, when it happens."""
        return self.at_ns if self.until_ns is None else self.until_ns


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A set of faults, in any order; windows of one kind on one target may overlap."""

    faults: tuple[Fault, ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of faults in this plan."""
        return frozenset(fault.kind for fault in self.faults)

    @property
    def end_ns(self) -> int:
        """When the last fault is over."""
        return max((fault.end_ns for fault in self.faults), default=0)

    def actions(self) -> tuple[tuple[int, FaultAction], ...]:
        """Return the plan as timed actions, in order of time, as `Setup.faults` takes it."""
        actions: list[tuple[int, FaultAction]] = []
        windows: dict[tuple[str, int], list[Fault]] = {}
        for fault in self.faults:
            targets = (fault.node, fault.pool, fault.gateway, fault.function)
            target = next((each for each in targets if each is not None), None)
            if fault.until_ns is None or target is None:
                actions.append((fault.at_ns, Instant(fault)))
            else:
                windows.setdefault((fault.kind, target), []).append(fault)
        for (kind, target), group in windows.items():
            for at_ns in sorted({ns for fault in group for ns in (fault.at_ns, fault.end_ns)}):
                in_force = [fault for fault in group if fault.at_ns <= at_ns < fault.end_ns]
                factor = prod(fault.factor or 1.0 for fault in in_force)
                actions.append((at_ns, SetFault(kind, target, len(in_force), factor)))
        return tuple(sorted(actions, key=lambda pair: pair[0]))

    def check(self, app: App, gateways: int = 1) -> FaultPlan:
        """Return the plan; raise `ConfigError` if a fault has a target that does not exist."""
        limits = {
            "gateway": gateways,
            "node": _node_count(app),
            "pool": len(app.pools),
            "function": len(app.functions),
            "pipeline": len(app.pipelines),
        }
        for number, fault in enumerate(self.faults):
            for name, limit in limits.items():
                value = getattr(fault, name)
                if value is not None and value >= limit:
                    key, allowed = f"faults[{number}].{name}", f"0 to {limit - 1}"
                    raise ConfigError("does not exist", key=key, value=value, allowed=allowed)
            if fault.pool is not None and app.pools[fault.pool].faas is None:
                key, name = f"faults[{number}].pool", app.pools[fault.pool].name
                raise ConfigError("is not a serverless pool", key=key, value=name)
        return self


def random_plan(
    app: App, duration_ns: int, seed: int, *, intensity: float = 1.0, gateways: int = 0
) -> FaultPlan:
    """Return a random plan for a run of that length. All its faults are over by `duration_ns`.

    `gateways` is the number of those that may crash, perhaps all at once.

    Completions are lost only if the Scheduler has timeouts (`Limits.timeout_factor`): without
    them a request whose completion is lost stays open for ever, as specified.

    >>> random_plan(App((), (), ()), 1_000, seed=7).faults
    ()
    """
    rng = stream(seed, "faults")
    generators = _FaultGenerator(app, max(8, duration_ns), rng).generators()
    faults: list[Fault] = []
    if generators and intensity > 0:
        for _ in range(round(rng.expovariate(1.0 / (_FAULTS_MEAN * intensity)))):
            faults.extend(rng.choice(generators)())
    if gateways and intensity > 0:
        faults = [*_gateway_crashes(gateways, max(8, duration_ns), seed), *faults]
    return FaultPlan(tuple(faults[:_FAULTS_MAX]))


def _gateway_crashes(gateways: int, duration_ns: int, seed: int) -> list[Fault]:
    """Draw crashes of gateways, from a stream of their own: the other faults stay as they are."""
    rng = stream(seed, "gateways")
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        at_ns = rng.randrange(duration_ns - 1)
        until_ns = rng.randint(at_ns + 1, duration_ns)
        gateway = rng.randrange(gateways)
        faults.append(Fault("crash_gateway", at_ns, until_ns=until_ns, gateway=gateway))
    return faults


def swizzle(kind: str, nodes: list[int], begin_ns: int, end_ns: int, rng: Random) -> list[Fault]:
    """Begin a fault on these nodes one by one, then end it one by one in another order.

    FoundationDB's swizzle-clogging: each subset of healthy nodes differs from the previous one by
    one node, so that a run meets many more subsets than if the fault began everywhere at once.
    """
    middle_ns = (begin_ns + end_ns) // 2
    factor = rng.choice((4.0, 50.0)) if kind == "slow" else None
    return [
        Fault(
            kind,
            rng.randrange(begin_ns, middle_ns),
            until_ns=rng.randrange(middle_ns, end_ns),
            node=node,
            factor=factor,
        )
        for node in nodes
    ]


@final
class _FaultGenerator:
    """Draws random faults that apply to an application."""

    def __init__(self, app: App, duration_ns: int, rng: Random) -> None:
        self._app = app
        self._duration_ns = duration_ns
        self._rng = rng
        self._nodes = _node_count(app)
        self._platforms = [pool.id for pool in app.pools if pool.faas is not None]
        self._kinds = [
            kind for kind in _NODE_KINDS if kind != "lose" or app.limits.timeout_factor > 0
        ]

    def generators(self) -> list[Callable[[], list[Fault]]]:
        """Return the methods that apply, each repeated according to its weight in the draw."""
        return (
            [self.node] * (4 if self._nodes else 0)
            + [self.many_nodes] * (1 if self._nodes > 1 else 0)
            + [self.platform] * (2 if self._platforms else 0)
            + [self.requests] * (2 if self._app.pipelines else 0)
            + [self.profile] * (1 if self._app.functions else 0)
            + [self.function] * (1 if self._app.functions and self._nodes else 0)
        )

    def node(self) -> list[Fault]:
        """Draw a fault of one node."""
        rng = self._rng
        kind = rng.choice(self._kinds)
        at_ns, until_ns = self._window()
        factor = rng.choice((0.5, 3.0, 20.0)) if kind == "slow" else None
        node = rng.randrange(self._nodes)
        return [Fault(kind, at_ns, until_ns=until_ns, node=node, factor=factor)]

    def many_nodes(self) -> list[Fault]:
        """Draw a fault that befalls several nodes, one after the other."""
        rng = self._rng
        nodes = rng.sample(range(self._nodes), rng.randint(2, self._nodes))
        begin_ns = rng.randrange(self._duration_ns // 2)
        end_ns = rng.randint(begin_ns + self._duration_ns // 2, self._duration_ns)
        return swizzle(rng.choice(self._kinds), nodes, begin_ns, end_ns, rng)

    def platform(self) -> list[Fault]:
        """Draw a window in which a serverless pool throttles every call."""
        at_ns, until_ns = self._window()
        return [Fault("throttle", at_ns, until_ns=until_ns, pool=self._rng.choice(self._platforms))]

    def requests(self) -> list[Fault]:
        """Draw cancellations, poisonous requests or a burst of requests."""
        rng = self._rng
        at_ns = rng.randrange(self._duration_ns)
        kind = rng.choice(("cancel", "poison", "burst"))
        if kind != "burst":
            return [Fault(kind, at_ns, share=rng.choice((0.2, 0.5, 1.0)))]
        pipeline = rng.randrange(len(self._app.pipelines))
        return [Fault("burst", at_ns, pipeline=pipeline, count=rng.randint(1, 10))]

    def profile(self) -> list[Fault]:
        """Draw a function that becomes slower or faster than its profile says."""
        rng = self._rng
        function = rng.randrange(len(self._app.functions))
        factor = rng.choice((0.3, 2.0, 10.0))
        at_ns = rng.randrange(self._duration_ns)
        return [Fault("wrong_profile", at_ns, function=function, factor=factor)]

    def function(self) -> list[Fault]:
        """Draw a window in which a function cannot be loaded, perhaps with a node that rejoins.

        A node that joins within the window reports the function as not loadable.
        """
        rng = self._rng
        at_ns, until_ns = self._window()
        function = rng.randrange(len(self._app.functions))
        faults = [Fault("cannot_load", at_ns, until_ns=until_ns, function=function)]
        if rng.random() < 0.5:
            back_ns = rng.randint(at_ns, until_ns - 1)
            if back_ns > 0:
                node = rng.randrange(self._nodes)
                crash_ns = rng.randrange(back_ns)
                faults.append(Fault("crash", crash_ns, until_ns=back_ns, node=node))
        return faults

    def _window(self) -> tuple[int, int]:
        at_ns = self._rng.randrange(self._duration_ns - 1)
        longest_ns = self._duration_ns // 3 + 1
        return at_ns, self._rng.randint(at_ns + 1, min(self._duration_ns, at_ns + longest_ns))


_FIELDS: Final = tuple(field.name for field in fields(Fault) if field.name not in ("kind", "at_ns"))


def _node_count(app: App) -> int:
    return sum(pool.nodes for pool in app.pools if pool.faas is None)
