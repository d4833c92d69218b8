"""One seed, one random world: is a policy, and all that is under it, right in it?

A failure is reported as the command that repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from traceback import extract_tb
from typing import Final, final

from headgate.core.actions import Action
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.events import Event
from headgate.core.log import LogEntry, replay
from headgate.core.outcome import OUTCOME_NAMES
from headgate.core.policy import PolicyConfig, PolicyKind
from headgate.core.rng import stream
from headgate.core.wire import Wire, to_wire
from headgate.policies import find_policy
from headgate.sim.checkers import Checkers, all_checkers
from headgate.sim.clients import LoopClients, Straggler
from headgate.sim.hooks import Client, Observer
from headgate.sim.random_case import Case, random_case
from headgate.sim.run import Setup, build_schedulers, simulate

_LIMIT_NS: Final = 3_600 * SECOND_NS  # long after the last fault: what is open now stays open

_EVENTS_MAX: Final = 100_000  # far more than any of these worlds needs


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """What was checked, what happened, and what was wrong."""

    policy: str
    seed: int
    checks: tuple[str, ...]
    failures: tuple[str, ...]
    events: Mapping[str, int]  # how often each kind of event was handled
    outcomes: Mapping[str, int]

    @property
    def is_ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures

    @property
    def line(self) -> str:
        """The command that repeats it."""
        return f"headgate fuzz --policy {self.policy} --seed {self.seed}"

    def __str__(self) -> str:
        return "\n  ".join((self.line, *(self.failures or ("ok",))))


def fuzz(policy: str, seed: int) -> FuzzReport:
    """Run a policy in the world of this seed, twice, under all checkers; then replay its log.

    >>> fuzz("balance", seed=1).is_ok
    True
    """
    return fuzz_kind(policy, find_policy(policy), seed)


def fuzz_kind(
    name: str, kind: PolicyKind, seed: int, *, survives_faults: bool = False
) -> FuzzReport:
    """Do the same to a policy that need not be one of the package's, nor free of faults."""
    case = random_case(kind.takes, seed)
    setup = replace(_setup(case, kind, seed), survives_faults=survives_faults)
    first = _Log(case.schedulers)
    checkers = all_checkers(
        case.app,
        duplicates="duplicate" in case.plan.kinds,
        losses="lose" in case.plan.kinds,
        thinks=case.decision_ns > 0 or case.work_unit_ns > 0,
        drained=True,
        events_max=_EVENTS_MAX,
    )
    failures: list[str] = []
    try:
        run = simulate(
            setup, case.arrivals, clients=_clients(case), observer=_Both(first, checkers)
        )
        checkers.finish(run)
        failures.extend(checkers.violations)
        failures.extend(_differences(first, setup, case))
        outcomes = Counter(OUTCOME_NAMES[outcome] for outcome in run.requests.outcome)
    except Exception as error:  # whatever it is, the seed must be told
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        failures.append(f"{type(error).__name__}: {error} ({where})")
        outcomes = Counter()
    checks = (*checkers.names, "validate", "determinism", "replay")
    return FuzzReport(name, seed, checks, tuple(failures), first.counts(), outcomes)


def _setup(case: Case, kind: PolicyKind, seed: int) -> Setup:
    return Setup(
        case.app,
        kind,
        _config(case, kind, seed),
        seed=seed,
        truth=case.truth,
        schedulers=case.schedulers,
        decision_ns=case.decision_ns,
        work_unit_ns=case.work_unit_ns,
        announces=case.announces,
        validate=True,
        records_spans=True,
        faults=case.plan.troubles(),
        limit_ns=_LIMIT_NS,
    )


def _config(case: Case, kind: PolicyKind, seed: int) -> PolicyConfig:
    """Draw settings near their defaults: rare paths of a policy hide behind large numbers."""
    rng = stream(seed, "config")
    drawn: dict[str, object] = {}
    for field in fields(kind.config):
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
        return kind.config(**drawn)
    except ConfigError:  # then it does not take them together
        return kind.config()


def _clients(case: Case) -> list[Client]:
    loops: list[Client] = [] if case.loop is None else [LoopClients(case.loop, case.app)]
    return [*loops, Straggler(case.arrivals.duration_ns)]


def _differences(first: _Log, setup: Setup, case: Case) -> list[str]:
    """Run it again, without validation, and replay every Scheduler's log: all must be the same."""
    second = _Log(case.schedulers)
    again = replace(setup, validate=False)
    simulate(again, case.arrivals, clients=_clients(case), observer=second)
    found: list[str] = []
    if first.wires != second.wires:
        pairs = zip_longest(first.wires, second.wires)
        one, other = next((a, b) for a, b in pairs if a != b)
        found.append(f"determinism: first {one}, then {other}")
    for scheduler, entries in zip(build_schedulers(again), first.entries, strict=True):
        result = replay(entries, scheduler)
        if result.first_difference is not None:
            found.append(f"replay: {result.first_difference}")
    return found


@final
class _Log(Observer):
    """Every event and action, as they were when they came about."""

    def __init__(self, schedulers: int) -> None:
        self.wires: list[tuple[int, int, Wire, list[Wire]]] = []
        self.entries: list[list[LogEntry]] = [[] for _ in range(schedulers)]

    def saw(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Write it down."""
        wire, wires = to_wire(event), [to_wire(action) for action in actions]
        self.wires.append((now_ns, scheduler, wire, wires))
        self.entries[scheduler].append(LogEntry(len(self.wires), now_ns, event, actions))

    def counts(self) -> Counter[str]:
        """How often each kind of event was handled."""
        return Counter(str(wire[0]) for _, _, wire, _ in self.wires)


@final
class _Both(Observer):
    """Logs, then checks: a checker that raises leaves the log complete."""

    def __init__(self, log: _Log, checkers: Checkers) -> None:
        self._log = log
        self._checkers = checkers

    def saw(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Pass it on."""
        self._log.saw(now_ns, scheduler, event, actions)
        self._checkers.saw(now_ns, scheduler, event, actions)
