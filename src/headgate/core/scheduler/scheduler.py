"""The Scheduler: events in, actions out.

    Scheduler.handle(now_ns, event) -> list[Action]

This is the seam that everything hangs on. It is synchronous, total and deterministic: the same
seed, configuration and sequence of (now_ns, event) give the same actions, to the bit. It reads no
clock, awaits nothing and opens nothing. The simulator and the live runtime are two small drivers
of it, so a decision is written once and a live incident replays as a unit test.

What every policy needs is here: lifecycles, conservation (every request ends in exactly one
outcome), retries, timers, cancellation, legality. What policies differ in is behind the hooks of
`Policy`. A few rules that are easy to miss:

- Work that is out cannot be un-started. So cancelling is a state, not an exception: the request is
  settled at once, its tasks become DROPPED, and when the batch comes back its result is thrown
  away. The slot is free only then.
- *Refused* means it never ran, so the task may always be tried again. *Failed* and *lost* mean it
  ran or may have run, so it is repeated only if the function is idempotent, attempts are left and
  the deadline has not passed.
- Messages may be duplicated, and may cross ours. An event about something that has already ended
  is ignored and counted (`View.events_ignored`). An event about something that never was is the
  driver's error.
- A place that has just refused is left alone for a moment (`Limits.backoff_ns`), or a policy that
  knows no better would offer it the same batch for ever at the same instant. A variant that cannot
  be started is left alone for longer: see `load_failures`.
- Who may have killed a worker is not tried again in company: see `quarantine`.
- A hook that raises is a fault of the policy, and nobody else's: the event is handled to its end,
  whatever the hook was about fails, and only then `handle` raises.
"""

from __future__ import annotations

from random import Random
from typing import final

from headgate.core.actions import Action
from headgate.core.errors import DriverError
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    RequestAnnounced,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    TimerKey,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App
from headgate.core.orders import Orders
from headgate.core.policy import Context, Policy, PolicyConfig, PolicyKind
from headgate.core.scheduler.batches import BatchHandlers, Quarantine
from headgate.core.scheduler.fleet import FleetHandlers, reconcile
from headgate.core.scheduler.load_failures import PROBE, LoadFailures
from headgate.core.scheduler.policy_hooks import FORGOTTEN, OFFER, PolicyHooks, PolicyRecovery
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.scheduler.validate import Validator
from headgate.core.view import View


@final
class Scheduler:
    """One per gateway. `index` of `peers` tells it apart from others that share its pools."""

    def __init__(
        self,
        app: App,
        kind: PolicyKind,
        config: PolicyConfig | None = None,
        *,
        rng: Random | None = None,
        index: int = 0,
        peers: int = 1,
        validate: bool = False,
    ) -> None:
        self.app = app
        self.view = View(app)
        self._ledger = StateWriter(self.view, ids_start=index, ids_step=peers)
        self._residents = InstanceWriter(self.view, self._ledger, ids_start=index, ids_step=peers)
        self._orders = Orders(self.view, self._ledger, self._residents)
        context = Context(self.view, self._orders, rng if rng is not None else Random(0))
        self.policy: Policy = kind.build(context, config if config is not None else kind.config())
        self._requests = RequestHandlers(self.view, self._ledger, self.policy)
        self._hooks = PolicyHooks(self.view, self.policy, self._requests)
        self._quarantine = Quarantine(self.view, self._ledger, self._requests, self._hooks)
        self._attempts = BatchHandlers(
            self.view, self._ledger, self.policy, self._requests, self._hooks, self._quarantine
        )
        self._failures = LoadFailures(
            self.view,
            self._ledger,
            self._residents,
            self._requests,
            self._hooks,
            picks_nodes=not kind.capabilities.multi_gateway,
            spills=_spills(app, kind, self.policy),
        )
        self._fleet = FleetHandlers(self.view, self._residents, self._hooks, self._failures)
        self._recovery = PolicyRecovery(self.view, self._ledger, self._requests, self._hooks)
        self._validator = Validator(self.view) if validate else None
        self._plan_every_ns = self.policy.plan_every_ns
        self._early = self._ledger.actions  # what the policy ordered while it was being made
        wishes = any(s is not None and bool(s.wishes) for s in self.view.breakers)
        self._is_new = wishes or bool(self._early)
        self._ledger.has_begun = not self._is_new
        self._is_thoughtful = validate or self._plan_every_ns > 0
        self._ledger.has_afterthoughts = self._is_thoughtful or self._is_new

    @property
    def work(self) -> int:
        """What the policy has reported to have computed so far, in its own units."""
        return self._ledger.work

    @property
    def actions_so_far(self) -> list[Action]:
        """What was ordered at the last event, also if an exception ended the handling of it."""
        return self._ledger.actions

    def handle(self, now_ns: int, event: Event) -> list[Action]:
        """Take one event into account and return what is to be done about it.

        `now_ns` never decreases. Raises `DriverError` for an event that cannot have happened; it
        has changed nothing. Raises `PolicyError`, once the event has been handled to its end, if
        a hook of the policy raised anything; the error carries all actions of the event, which
        are to be carried out like any others.
        """
        if now_ns < self.view.now_ns:
            raise DriverError(f"time went back from {self.view.now_ns} to {now_ns}")
        actions: list[Action] = []
        ledger = self._ledger
        ledger.actions = actions
        # Most frequent first: a compiled build makes this a chain of pointer comparisons.
        if isinstance(event, BatchFinished):
            self._attempts.finished(now_ns, event)
        elif isinstance(event, RequestArrived):
            self._requests.arrived(now_ns, event)
        elif isinstance(event, TimerFired):
            self._timer_fired(now_ns, event.key)
        else:
            self._handle_rare(now_ns, event)
        if ledger.has_afterthoughts:
            self._finish_event(now_ns, actions)
        return actions

    def _finish_event(self, now_ns: int, actions: list[Action]) -> None:
        """What most events have no need of. Raises the fault of the event, if there was one."""
        view, ledger = self.view, self._ledger
        if self._is_new:
            self._is_new = False
            ledger.actions = self._early
            ledger.begin()
            ledger.actions = actions
            actions[:0] = self._early
        if view.load_failures:
            self._failures.review()
        if not self._quarantine.is_empty:
            self._quarantine.release()
        if self._plan_every_ns and ("plan", 0) not in view.timers:
            ledger.set_timer(("plan", 0), now_ns + self._plan_every_ns)
        if view.policy_faults:
            self._recovery.watch(ledger.fault is not None)
        ledger.has_afterthoughts = (
            self._is_thoughtful
            or view.policy_faults > 0
            or len(view.load_failures) > 0
            or not self._quarantine.is_empty
        )
        if self._validator is not None:
            self._validator.check()
        fault, ledger.fault = ledger.fault, None
        if fault is not None:
            fault.actions = actions
            raise fault

    def _handle_rare(self, now_ns: int, event: Event) -> None:
        if isinstance(event, BatchRefused):
            self._attempts.refused(now_ns, event)
        elif isinstance(event, BatchFailed):
            self._attempts.failed(now_ns, event)
        elif isinstance(event, BatchLost):
            self._attempts.lost(now_ns, event)
        elif isinstance(event, RequestCancelled):
            self._requests.cancelled(now_ns, event)
        elif isinstance(event, RequestAnnounced):
            self._requests.announced(now_ns, event)
        elif isinstance(event, InstanceStarted):
            self._fleet.instance_started(now_ns, event)
        elif isinstance(event, InstanceStopped):
            self._fleet.instance_stopped(now_ns, event)
        elif isinstance(event, InstanceAppeared):
            self._fleet.instance_appeared(now_ns, event)
        elif isinstance(event, LoadFailed):
            self._failures.reported(now_ns, event)
        elif isinstance(event, WeightsLoaded):
            self._fleet.weights_loaded(now_ns, event)
        elif isinstance(event, WeightsEvicted):
            self._fleet.weights_evicted(now_ns, event)
        elif isinstance(event, NodeJoined):
            self._fleet.node_joined(now_ns, event)
        elif isinstance(event, NodeLost):
            self._fleet.node_lost(now_ns, event)
        else:
            raise DriverError(f"unknown event {type(event).__name__}")

    def _timer_fired(self, now_ns: int, key: TimerKey) -> None:
        view = self.view
        at_ns = view.timers.get(key)
        view.now_ns = now_ns
        if at_ns is None or at_ns > now_ns:  # cancelled or set anew while this was on its way
            view.events_ignored += 1
            return
        del view.timers[key]
        name, number = key
        if name == "deadline":
            self._requests.deadline_passed(number)
        elif name == "unblock":
            node = view.nodes[number]
            self._residents.offer_node(node)
            self._hooks.capacity(node)
        elif name == "unblock_pool":
            spillway = view.breakers[number]
            assert spillway is not None
            spillway.to_half_open(now_ns)
            self._ledger.arm_pool_timer(spillway)
            if spillway.allows_call(now_ns):
                self._hooks.pool_open(number)
        elif name == "lost":
            self._attempts.given_up(number)
        elif name == PROBE:
            self._failures.probe(number)
        elif name == "plan":
            self._plan()
        elif name == OFFER:
            self._recovery.offer_again()
        elif name == FORGOTTEN:
            self._recovery.fail_forgotten()
        else:
            self._hooks.timer(name, number)

    def _plan(self) -> None:
        try:
            reconcile(self.view, self._orders, self.policy.plan())
        except Exception as error:
            self._requests.fault("plan", error)


def _spills(app: App, kind: PolicyKind, policy: Policy) -> list[bool]:
    """By function id: whether the policy sends it to a platform that it runs on."""
    platforms = {pool.id for pool in app.pools if pool.faas is not None}
    return [
        kind.capabilities.serverless
        and any(platforms.intersection(variant.pool_ids) for variant in function.variants)
        and policy.spills(function.id)
        for function in app.functions
    ]
