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
from typing import Final, final

from headgate.core.actions import Action
from headgate.core.clock import NEVER_NS
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
from headgate.core.model import UNLIMITED, App
from headgate.core.orders import Orders
from headgate.core.policy import Context, Plan, Policy, PolicyConfig, PolicyKind, Target
from headgate.core.records import Instance, Node
from headgate.core.scheduler.batches import BatchHandlers, Quarantine
from headgate.core.scheduler.fleet import PROBE, FleetHandlers, LoadFailures
from headgate.core.scheduler.policy_hooks import FORGOTTEN, OFFER_AGAIN, PolicyHooks, PolicyRecovery
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.scheduler.validate import Validator
from headgate.core.states import InstanceState
from headgate.core.view import View, room_bytes

_STOPPED: Final = (InstanceState.DRAINING, InstanceState.GONE)


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
        if state.fault is not None:
            self._recovery.on_fault()
        state.needs_finish = (
            self._always_finishes or len(view.load_failures) > 0 or not self._quarantine.is_empty
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


def reconcile(view: View, orders: Orders, plan: Plan) -> list[Instance]:
    """Start the instances that a plan lacks, stop those that it does not want; return starts.

    This is the slow time scale, and the same for every policy. O(targets + instances of their
    variants + instances on free nodes); for each target that lacks instances it looks at the free
    nodes of its pool that have memory left for any target.
    """
    reconciliation = _Reconciliation(view, orders, plan)
    for target in plan.targets:
        reconciliation.apply(target)
    return reconciliation.started


@final
class _Candidate:
    """A free node, and the memory that it has or can free."""

    __slots__ = ("node", "room_bytes")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.room_bytes = room_bytes(node)


@final
class _Reconciliation:
    """One pass over the targets of a plan: instances and nodes are listed once for all of them."""

    def __init__(self, view: View, orders: Orders, plan: Plan) -> None:
        self._view = view
        self._orders = orders
        variants = view.app.variants
        sizes = [variants[target.variant_id].profile.memory_bytes for target in plan.targets]
        self._size_min_bytes = min(sizes, default=0)  # of an instance of any target
        self._grouped: set[int] = set()  # variant ids
        # By variant, pool and shape id, oldest first.
        self._groups: dict[tuple[int, int, int], list[Instance]] = {}
        self._candidates: dict[int, list[_Candidate]] = {}  # by pool id, in the order of free nodes
        self.started: list[Instance] = []

    def apply(self, target: Target) -> None:
        """Start or stop instances of one target."""
        group = self._group(target)
        # Orders for earlier targets may have stopped some to make room.
        present = [i for i in group if i.state not in _STOPPED]
        missing = target.count - len(present)
        if missing > 0 and target.is_shared:
            self._start_anywhere(target, len(present), group)
        elif missing > 0:
            self._start(target, missing, group)
        elif missing < 0:
            has_order = target.is_shared or target.rented_max < UNLIMITED
            order = _common_stop_order if has_order else _stop_order
            for instance in sorted(present, key=order)[:-missing]:
                if instance.running == 0 or target.drains:
                    self._orders.stop(instance)
                    self._candidates.pop(target.pool_id, None)  # its node has room again

    def _group(self, target: Target) -> list[Instance]:
        variant_id = target.variant_id
        if variant_id not in self._grouped:
            self._grouped.add(variant_id)
            for instance in self._view.instances_of[variant_id].values():
                key = (variant_id, instance.pool.id, instance.shape_id)
                self._groups.setdefault(key, []).append(instance)
        return self._groups.setdefault((variant_id, target.pool_id, target.shape_id), [])

    def _start(self, target: Target, count: int, group: list[Instance]) -> None:
        view, shape_id = self._view, target.shape_id
        variant = view.app.variants[target.variant_id]
        if variant.id in view.load_failures:
            return
        free, need_bytes = view.free_by_pool[target.pool_id], variant.profile.memory_bytes
        before = count
        may_rent = target.rented_max - self._rented(target)
        for held_max in range(target.per_node_max):  # first one to every node, then a second one
            for candidate in self._candidates_of(target.pool_id):
                node = candidate.node
                if count == 0:
                    break
                if need_bytes > candidate.room_bytes or node.id not in free:
                    continue
                if variant.id in node.instances and _count(node, variant.id, shape_id) > held_max:
                    continue
                if not node.instances and may_rent <= 0:
                    continue
                if view.can_make_room(node, variant, shape_id):
                    may_rent -= not node.instances
                    group.append(self._orders.start(variant, node, shape_id))
                    self.started.append(group[-1])
                    candidate.room_bytes = room_bytes(node)
                    count -= 1
        if count < before:
            self._keep_candidates(target.pool_id, self._candidates_of(target.pool_id))

    def _rented(self, target: Target) -> int:
        """Number of nodes of a pool that hold instances, where that matters."""
        if target.rented_max == UNLIMITED:
            return 0
        nodes = self._view.nodes.values()
        return sum(1 for node in nodes if node.pool.id == target.pool_id and node.instances)

    def _start_anywhere(self, target: Target, present: int, group: list[Instance]) -> None:
        """Order the instances that a shared pool lacks, each by its number."""
        view = self._view
        variant = view.app.variants[target.variant_id]
        pool = view.app.pools[target.pool_id]
        if variant.id not in view.load_failures:
            for nth in range(present + 1, target.count + 1):
                group.append(self._orders.start_anywhere(variant, pool, target.shape_id, nth))
                self.started.append(group[-1])

    def _candidates_of(self, pool_id: int) -> list[_Candidate]:
        if pool_id not in self._candidates:
            nodes = list(self._view.free_by_pool[pool_id].values())
            if self._view.app.pools[pool_id].is_elastic:
                nodes.sort(key=lambda node: (not node.instances, node.id))  # rented ones first
            self._keep_candidates(pool_id, [_Candidate(node) for node in nodes])
        return self._candidates[pool_id]

    def _keep_candidates(self, pool_id: int, candidates: list[_Candidate]) -> None:
        """Keep those that have memory for the smallest target. Starts only ever take memory."""
        least = self._size_min_bytes
        self._candidates[pool_id] = [c for c in candidates if c.room_bytes >= least]


def _count(node: Node, variant_id: int, shape_id: int) -> int:
    return sum(1 for i in node.by_variant.get(variant_id, ()) if i.shape_id == shape_id)


def _common_stop_order(instance: Instance) -> tuple[int, int, int]:
    """The same for all Schedulers and variants: those without a node first, then node by node.

    So Schedulers stop the same instances, and nodes that are rented become empty.
    """
    node_id = NEVER_NS if instance.node is None else instance.node.id
    return (-node_id, 0, instance.id)


def _stop_order(instance: Instance) -> tuple[int, int, int]:
    """Starting instances stop first, warm idle ones next; among equals the least recently used."""
    if instance.running:
        order = 2
    else:
        order = 0 if instance.state == InstanceState.STARTING else 1
    return (order, instance.last_used_ns, instance.id)
