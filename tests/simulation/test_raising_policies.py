"""Policies whose hooks raise: each request has one outcome, nothing leaks, and the log replays."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headgate.core.actions import Action, ReportFault
from headgate.core.errors import PolicyError
from headgate.core.event_log import LogEntry, replay
from headgate.core.events import Event
from headgate.core.model import Pool
from headgate.core.policy import Context, Policy, PolicyConfig, PolicyKind
from headgate.core.records import Request
from headgate.core.states import Outcome
from headgate.policies import find_policy, policy_names
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.fuzz import fuzz_kind
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, build_scheduler, simulate

from .apps import MS, at_ms, make_app
from .policies import SPILL

HOOKS = sorted(name for name in vars(Policy) if name.startswith("on_") or name == "plan")


class HookError(Exception):
    """Raised by a faulty hook."""


def faulty(kind: PolicyKind, hooks: list[str], probability: float) -> PolicyKind:
    """Return the policy with hooks that raise at random, before or after their work."""

    def __init__(self: Any, context: Context, config: PolicyConfig) -> None:
        kind.make.__init__(self, context, config)
        self.fault_rng = Random(7)

    def raising(name: str) -> Callable[..., object]:
        hook = getattr(kind.make, name)

        def raising_hook(self: Any, *arguments: object) -> object:
            draw = self.fault_rng.random()
            if draw < probability:
                raise HookError(name)
            result = hook(self, *arguments)
            if draw > 1 - probability:
                raise (
                    PolicyError(f"{name} fails") if draw > 1 - probability / 2 else HookError(self)
                )
            return result

        return raising_hook

    body = {"__init__": __init__} | {name: raising(name) for name in hooks}
    return PolicyKind(type("Faulty", (kind.make,), body), kind.config, kind.capabilities)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", policy_names())
def test_every_request_has_one_outcome_whatever_hook_raises(policy: str, seed: int) -> None:
    """In random cases, under all checkers and in `validate` mode; repeated, and replayed."""
    kind = faulty(find_policy(policy), HOOKS, 0.1)
    report = fuzz_kind(policy, kind, 100 * seed, survives_faults=True)
    assert report.is_ok, str(report)


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_may_always_raise(hook: str) -> None:
    for seed in range(6):
        report = fuzz_kind(hook, faulty(SPILL, [hook], 1.0), seed, survives_faults=True)
        assert report.is_ok, str(report)


class Log(Observer):
    """Records the log entries that a live gateway would write."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.entries.append(LogEntry(len(self.entries), now_ns, event, actions))


def simulate_logged() -> tuple[Setup, Log]:
    app = make_app(exec_ms=(10,))
    plan = FaultPlan((Fault("crash", 40 * MS, until_ns=50 * MS, node=0),))
    kind = faulty(find_policy("balance"), HOOKS, 0.2)
    setup = Setup(app, kind, faults=plan.actions(), survives_faults=True)
    log = Log()
    simulate(setup, at_ms(*range(0, 400, 4)), observer=log)
    return setup, log


def test_policy_faults_are_logged_and_replayed() -> None:
    setup, log = simulate_logged()
    scheduler = build_scheduler(setup, 0)
    faults = [a for entry in log.entries for a in entry.actions if isinstance(a, ReportFault)]
    assert {fault.hook for fault in faults} >= {"on_task_ready", "on_capacity"}
    assert {fault.error for fault in faults} >= {"HookError", "on_capacity fails"}
    result = replay(log.entries, scheduler)
    assert (result.events, result.first_difference) == (len(log.entries), None)
    assert scheduler.view.policy_faults == len(faults)


def test_a_log_with_faults_differs_from_a_faultless_policy() -> None:
    setup, log = simulate_logged()
    scheduler = build_scheduler(Setup(setup.app, find_policy("balance")), 0)
    first = next(e.seq for e in log.entries if any(isinstance(a, ReportFault) for a in e.actions))
    difference = replay(log.entries, scheduler).first_difference
    assert difference is not None
    assert difference.seq == first


def test_after_a_fault_requests_may_wait_for_as_long_as_before() -> None:
    """Sixty requests of ten seconds each, a minute after the fault, on one node."""

    def on_arrival(self: Policy, request: Request) -> None:
        if request.id == 0:
            raise HookError

    kind = find_policy("balance")
    raises_once = type("RaisesOnce", (kind.make,), {"on_arrival": on_arrival})
    app = make_app(exec_ms=(10_000,), pools=(Pool(0, "gpu"),))
    setup = Setup(app, PolicyKind(raises_once, kind.config), survives_faults=True)
    run = simulate(setup, at_ms(0, *([70_000] * 60)))
    assert run.requests.outcome.tolist() == [Outcome.FAILED, *([Outcome.MET] * 60)]


def test_without_survives_faults_the_first_policy_error_ends_the_run() -> None:
    kind = faulty(find_policy("balance"), ["on_capacity"], 1.0)
    with pytest.raises(PolicyError, match="on_capacity raised HookError") as caught:
        simulate(Setup(make_app(), kind), at_ms(0))
    assert isinstance(caught.value.__cause__, HookError)
