"""The Scheduler: events in, actions out.

    Scheduler.handle(now_ns, event) -> list[Action]

This is the single entry of everything that decides. It is synchronous, total and deterministic: the
same seed, configuration and sequence of (now_ns, event) give the same actions, to the bit. It reads
no clock, awaits nothing and does no I/O. The simulator and the live runtime are two small drivers
of it, so decision logic is written once and a live incident replays as a unit test.

The Scheduler holds what every policy needs: lifecycles, conservation (every request ends in exactly
one outcome), retries, timers, cancellation, checks of legality. What policies differ in is behind
the hooks of `Policy`. A few rules that are easy to miss:

- Work in flight cannot be un-started. So cancellation is a state, not an exception: the request is
  settled at once, its tasks become DROPPED, and when the batch ends its result is discarded. The
  slot is free only then.
- *Refused* means that a batch never ran, so its tasks may always be retried. *Failed* and *lost*
  mean that it ran or may have run, so a task is retried only if its function is idempotent,
  attempts are left and the deadline has not passed.
- Messages may be duplicated, and may cross. An event about something that has already ended is
  ignored and counted (`View.events_ignored`). An event about something that never existed is an
  error of the driver.
- The Scheduler backs off from a node or pool that has just refused (`Limits.backoff_ns`).
  Otherwise a simple policy would send it the same batch at the same instant for ever. The back-off
  of a variant that cannot be started is longer: see `fleet.LoadFailures`.
- A task that may have killed a worker is retried alone: see `batches.Quarantine`.
- A hook that raises is a fault of the policy, and must not harm anything else: the event is handled
  to its end, the task or request that the hook was about fails, and only then `handle` raises.
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
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
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
from headgate.core.ids import first_id
from headgate.core.model import App
from headgate.core.orders import Orders
from headgate.core.policy import Context, Policy, PolicyConfig, PolicyKind
from headgate.core.scheduler.batches import BatchHandlers, Quarantine
from headgate.core.scheduler.fleet import PROBE, FleetHandlers, LoadFailures
from headgate.core.scheduler.policy_hooks import FORGOTTEN, OFFER_AGAIN, PolicyHooks, PolicyRecovery
from headgate.core.scheduler.reconcile import reconcile
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.scheduler.validate import Validator
from headgate.core.view import View


@final
class Scheduler:
    """One per gateway.

    `index` is its own among all Schedulers that ever share its pools: its ids follow from it
    (`ids`). `peers` is the number of gateways at the beginning, itself included; `GatewaysChanged`
    tells of other numbers.
    """

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
        self.view.gateways = peers
        self._state = StateWriter(self.view, first_id(index))
        self._instances = InstanceWriter(self.view, self._state, first_id(index))
        self._instances.has_peers = index > 0 or peers > 1
        self._orders = Orders(self.view, self._state, self._instances)
        context = Context(self.view, self._orders, rng if rng is not None else Random(0))
        self.policy: Policy = kind.make(context, config if config is not None else kind.config())
        self._requests = RequestHandlers(self.view, self._state, self.policy)
        self._hooks = PolicyHooks(self.view, self.policy, self._requests)
        self._quarantine = Quarantine(self.view, self._state, self._requests, self._hooks)
        self._batches = BatchHandlers(
            self.view, self._state, self.policy, self._requests, self._hooks, self._quarantine
        )
        self._failures = LoadFailures(
            self.view,
            self._state,
            self._instances,
            self._requests,
            self._hooks,
            picks_nodes=not kind.capabilities.multi_gateway,
            uses_faas=_faas_functions(app, kind, self.policy),
        )
        self._fleet = FleetHandlers(self.view, self._instances, self._hooks, self._failures)
        self._recovery = PolicyRecovery(self.view, self._state, self._requests, self._hooks)
        self._validator = Validator(self.view) if validate else None
        self._plan_every_ns = self.policy.plan_every_ns
        self._initial_actions = self._state.actions  # ordered by the policy in its constructor
        has_warm_targets = any(b is not None and bool(b.warm_targets) for b in self.view.breakers)
        self._is_new = has_warm_targets or bool(self._initial_actions)
        self._state.has_started = not self._is_new
        self._always_finishes = validate or self._plan_every_ns > 0
        self._state.needs_finish = self._always_finishes or self._is_new

    @property
    def work(self) -> int:
        """Total computation that the policy has reported, in its own units."""
        return self._state.work

    @property
    def actions_so_far(self) -> list[Action]:
        """The actions of the last event, also if an exception ended its handling."""
        return self._state.actions

    def handle(self, now_ns: int, event: Event) -> list[Action]:
        """Handle one event and return the actions that follow from it.

        `now_ns` never decreases. Raises `DriverError` for an event that cannot have happened; such
        an event changes nothing. Raises `PolicyError`, after the event has been handled to its end,
        if a hook of the policy raised an exception; the error carries all actions of the event,
        which the driver must carry out like any others.
        """
        if now_ns < self.view.now_ns:
            raise DriverError(f"time went back from {self.view.now_ns} to {now_ns}")
        actions: list[Action] = []
        state = self._state
        state.actions = actions
        # Most frequent first: a compiled build makes this chain of tests pointer comparisons.
        if isinstance(event, BatchFinished):
            self._batches.finished(now_ns, event)
        elif isinstance(event, RequestArrived):
            self._requests.arrived(now_ns, event)
        elif isinstance(event, TimerFired):
            self._timer_fired(now_ns, event.key)
        else:
            self._handle_rare(now_ns, event)
        if state.needs_finish:
            self._finish_event(now_ns, actions)
        return actions

    def _finish_event(self, now_ns: int, actions: list[Action]) -> None:
        """Post-event work that most events do not need.

        Prepends the actions that the policy ordered in its constructor, reviews load failures and
        quarantine, arms the plan timer, runs the validator. Raises the policy's fault, if any.
        """
        view, state = self.view, self._state
        if self._is_new:
            self._is_new = False
            state.actions = self._initial_actions
            state.start()
            state.actions = actions
            actions[:0] = self._initial_actions
        if view.load_failures:
            self._failures.review()
        if not self._quarantine.is_empty:
            self._quarantine.release()
        if self._plan_every_ns and ("plan", 0) not in view.timers:
            state.set_timer(("plan", 0), now_ns + self._plan_every_ns)
        if view.policy_faults:
            self._recovery.watch(state.fault is not None)
        state.needs_finish = (
            self._always_finishes
            or view.policy_faults > 0
            or len(view.load_failures) > 0
            or not self._quarantine.is_empty
        )
        if self._validator is not None:
            self._validator.check()
        fault, state.fault = state.fault, None
        if fault is not None:
            fault.actions = actions
            raise fault

    def _handle_rare(self, now_ns: int, event: Event) -> None:
        if isinstance(event, BatchRefused):
            self._batches.refused(now_ns, event)
        elif isinstance(event, BatchFailed):
            self._batches.failed(now_ns, event)
        elif isinstance(event, BatchLost):
            self._batches.lost(now_ns, event)
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
        elif isinstance(event, InstanceUseChanged):
            self._fleet.use_changed(now_ns, event)
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
        elif isinstance(event, GatewaysChanged):
            self._fleet.gateways_changed(now_ns, event)
        else:
            raise DriverError(f"unknown event {type(event).__name__}")

    def _timer_fired(self, now_ns: int, key: TimerKey) -> None:
        view = self.view
        at_ns = view.timers.get(key)
        view.now_ns = now_ns
        if at_ns is None or at_ns > now_ns:  # cancelled or reset while this event was on its way
            view.events_ignored += 1
            return
        del view.timers[key]
        name, number = key
        if name == "deadline":
            self._requests.deadline_passed(number)
        elif name == "unblock":
            node = view.nodes[number]
            self._instances.list_if_free(node)
            self._hooks.capacity(node)
        elif name == "unblock_pool":
            breaker = view.breakers[number]
            assert breaker is not None
            breaker.to_half_open(now_ns)
            self._state.arm_pool_timer(breaker)
            if breaker.allows_call(now_ns):
                self._hooks.pool_available(number)
        elif name == "lost":
            self._batches.timed_out(number)
        elif name == PROBE:
            self._failures.probe(number)
        elif name == "plan":
            self._plan()
        elif name == OFFER_AGAIN:
            self._recovery.offer_again()
        elif name == FORGOTTEN:
            self._recovery.fail_forgotten()
        else:
            self._hooks.timer(name, number)

    def _plan(self) -> None:
        try:
            for instance in reconcile(self.view, self._orders, self.policy.plan()):
                self.policy.on_planned_start(instance)
        except Exception as error:
            self._requests.fault("plan", error)


def _faas_functions(app: App, kind: PolicyKind, policy: Policy) -> list[bool]:
    """By function id: whether the policy dispatches the function to a FaaS pool."""
    platforms = {pool.id for pool in app.pools if pool.faas is not None}
    return [
        kind.capabilities.serverless
        and any(platforms.intersection(variant.pool_ids) for variant in function.variants)
        and policy.uses_faas(function.id)
        for function in app.functions
    ]
