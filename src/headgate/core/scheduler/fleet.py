"""Handlers of the events about nodes, instances and weights, and start back-off."""

from __future__ import annotations

from typing import Final, final

from headgate.core.backend import NEVER_TRIED, NO_ROOM, STARTED_ALREADY
from headgate.core.errors import DriverError
from headgate.core.events import (
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    LoadFailed,
    NodeJoined,
    NodeLost,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import Variant
from headgate.core.records import Instance, LoadFailure, Node
from headgate.core.scheduler.policy_hooks import PolicyHooks
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.states import InstanceState, NodeState, RequestState, Residency, TaskState
from headgate.core.view import View, has_free_room, has_ready

PROBE: Final = "probe"  # the timer, by variant id
_WAITING: Final = (TaskState.BLOCKED, TaskState.READY, TaskState.HELD)
_DOUBLINGS_MAX: Final = 30  # bounds the shift; the back-off reaches its own bound long before


@final
class LoadFailures:
    """Start back-off: variants that fail to start are not started again until a probe succeeds.

    Most policies would order a failed start again at once, because the task that needs it still
    waits. So the core keeps a circuit breaker per variant, the same for every policy. While it is
    open, no order may start the variant, and the view says so (`View.can_take`, `View.is_barred`).
    When the back-off has elapsed, the core itself orders one start, the probe: success closes the
    breaker, failure doubles the back-off. So a function recovers without traffic, and traffic
    causes no starts.

    A function that has no instance and none of whose variants may be started is *unloadable*: new
    requests that need it are rejected and open ones fail, instead of waiting in vain.

    FaaS pools are not concerned. Where a Broker grants nodes, a start that never got one says
    nothing about its variant (`NEVER_TRIED`), and a probe is the first instance of its function,
    whichever Scheduler orders it.
    """

    def __init__(
        self,
        view: View,
        state: StateWriter,
        instances: InstanceWriter,
        requests: RequestHandlers,
        hooks: PolicyHooks,
        *,
        picks_nodes: bool,
        uses_faas: list[bool],
    ) -> None:
        self._view = view
        self._state = state
        self._instances = instances
        self._requests = requests
        self._hooks = hooks
        self._limits = view.app.limits
        self._picks_nodes = picks_nodes  # else a Broker does, and starts fail for lack of nodes
        self._uses_faas = uses_faas  # by function id: the policy also dispatches it to FaaS pools
        # By function id: the variants that run on nodes.
        self._on_nodes: list[list[int]] = [[] for _ in view.app.functions]
        for variant in view.app.variants:
            if any(view.app.pools[id].faas is None for id in variant.pool_ids):
                self._on_nodes[variant.function_id].append(variant.id)

    def reported(self, now_ns: int, event: LoadFailed) -> None:
        """Record that a node reports a variant as not loadable."""
        view = self._view
        node = view.nodes.get(event.node_id)
        if node is None:
            raise DriverError(f"unknown node {event.node_id}")
        if not 0 <= event.variant_id < len(view.app.variants):
            raise DriverError(f"node {event.node_id}: unknown variant {event.variant_id}")
        view.now_ns = now_ns
        variant = view.app.variants[event.variant_id]
        if node.state != NodeState.UP or has_ready(node, variant.id):
            view.events_ignored += 1  # it crossed the loss of the node, or a successful start
            return
        self._record(variant, node.id, event.reason, is_probe=False)

    def instance_gone(self, instance: Instance, was_starting: bool, reason: str) -> None:
        """Record a failed start if an instance is gone that was starting on a node that is up.

        A probe has failed even if its node went down with it: the probe may have been the cause.
        A start for which another Scheduler has left no memory says nothing about its variant.
        """
        node = instance.node
        if not was_starting or reason in NEVER_TRIED:
            return
        failure = self._view.load_failures.get(instance.variant.id)
        is_probe = failure is not None and failure.probe_id == instance.id
        if node is None:  # the Broker has not told which one it was
            self._record(instance.variant, None, reason, is_probe=is_probe)
        elif is_probe or node.state == NodeState.UP:
            self._record(instance.variant, node.id, reason, is_probe=is_probe)

    def started(self, variant: Variant) -> None:
        """Close the breaker of a variant after a successful start."""
        if self._view.load_failures.pop(variant.id, None) is not None:
            self._state.cancel_timer((PROBE, variant.id))
            self._view.unloadable.discard(variant.function_id)

    def _record(
        self, variant: Variant, node_id: int | None, reason: str, *, is_probe: bool
    ) -> None:
        failure = self._view.load_failures.get(variant.id)
        if failure is None:
            failure = self._view.load_failures[variant.id] = LoadFailure(reason, node_id)
            self._state.needs_finish = True
        failure.reason = reason
        failure.node_id = node_id
        if failure.failures and not is_probe:
            return  # this start was under way when the first one failed: the same failure
        failure.failures += 1
        self._back_off(variant, failure)

    def _back_off(self, variant: Variant, failure: LoadFailure) -> None:
        """Set the time of the next probe: the back-off doubles with each consecutive failure."""
        limits = self._limits
        doublings = min(failure.failures - 1, _DOUBLINGS_MAX)
        backoff_ns = min(limits.start_backoff_ns << doublings, limits.start_backoff_max_ns)
        failure.probe_id = None
        failure.retry_at_ns = self._view.now_ns + backoff_ns
        self._state.set_timer((PROBE, variant.id), failure.retry_at_ns)

    def probe(self, variant_id: int) -> None:
        """Start one instance after the back-off, if there is a node for it."""
        view = self._view
        variant = view.app.variants[variant_id]
        failure = view.load_failures[variant_id]
        if not self._picks_nodes:
            self._probe_anywhere(variant, failure)
            return
        places = [
            node
            for node in view.nodes.values()
            if node.state == NodeState.UP and node.pool.id in variant.pool_ids
        ]
        node = self._choose_node(places, variant, failure)
        if node is not None:
            failure.node_id = node.id
            failure.probe_id = self._instances.start_instance(variant, node.pool, node).id
            expected_ns = max(view.start_ns(node, variant), self._limits.start_backoff_ns)
            failure.retry_at_ns = view.now_ns + expected_ns
        elif places and all(has_ready(node, variant_id) for node in places):
            self.started(variant)  # every node of its pools runs it: that proves that it loads
        else:
            self._back_off(variant, failure)

    def _probe_anywhere(self, variant: Variant, failure: LoadFailure) -> None:
        """Order the first instance of a function from a Broker: all Schedulers try it together."""
        pools = [self._view.app.pools[pool_id] for pool_id in variant.pool_ids]
        pool = next(pool for pool in pools if pool.faas is None)
        failure.probe_id = self._instances.start_instance(variant, pool, None, nth=1).id
        expected_ns = max(variant.profile.cold_start_ns, self._limits.start_backoff_ns)
        failure.retry_at_ns = self._view.now_ns + expected_ns

    def _choose_node(
        self, places: list[Node], variant: Variant, failure: LoadFailure
    ) -> Node | None:
        """The node that a probe disturbs least, if possible not the one where it failed last."""
        view = self._view
        candidates = [
            node
            for node in places
            if variant.id not in node.instances and view.can_make_room(node, variant)
        ]
        need_bytes = variant.profile.memory_bytes
        return min(
            candidates,
            key=lambda node: (
                node.id == failure.node_id,
                node.memory_used_bytes + need_bytes > node.pool.memory_bytes,  # needs an eviction
                node.pool.is_elastic and not node.instances,  # would have to be rented
                node.id not in view.free_nodes,
                node.running,
            ),
            default=None,
        )

    def review(self) -> None:
        """After an event: reschedule cancelled probes, and find functions that became unloadable.

        O(instances of its function) for each variant that is in back-off.
        """
        view = self._view
        newly_unloadable: list[int] = []
        for variant_id, failure in view.load_failures.items():
            variant = view.app.variants[variant_id]
            if failure.probe_id is not None:
                probe = view.instances.get(failure.probe_id)
                if probe is None or probe.state == InstanceState.DRAINING:
                    self._back_off(variant, failure)
            function_id = variant.function_id
            if self._is_loadable(function_id):
                view.unloadable.discard(function_id)
            elif function_id not in view.unloadable:
                view.unloadable.add(function_id)
                newly_unloadable.append(function_id)
        if newly_unloadable:
            self._settle_waiting(newly_unloadable)

    def _is_loadable(self, function_id: int) -> bool:
        """Whether the function has an instance, or may be started other than by a probe."""
        failures = self._view.load_failures
        if self._uses_faas[function_id]:
            return True
        if any(variant_id not in failures for variant_id in self._on_nodes[function_id]):
            return True
        for variant in self._view.app.functions[function_id].variants:
            failure = failures.get(variant.id)
            for instance in self._view.instances_of[variant.id].values():
                is_probe = failure is not None and instance.id == failure.probe_id
                if instance.node is not None and not is_probe:
                    return True
        return False

    def _settle_waiting(self, function_ids: list[int]) -> None:
        """Fail the requests that need one of these functions, then offer nodes to the others."""
        view = self._view
        for request in list(view.requests.values()):
            if request.state != RequestState.OPEN:
                continue
            for task in request.tasks:
                if task.state in _WAITING and task.function.id in function_ids:
                    self._requests.fail_unloadable(request)
                    break
        self._hooks.offer_nodes()


@final
class FleetHandlers:
    """Handles the events about nodes, instances and weights."""

    def __init__(
        self, view: View, instances: InstanceWriter, hooks: PolicyHooks, failures: LoadFailures
    ) -> None:
        self._view = view
        self._instances = instances
        self._hooks = hooks
        self._failures = failures
        # By instance id: what other Schedulers have started, and what had no room on its node yet.
        self._crossed: dict[int, InstanceAppeared] = {}

    def node_joined(self, now_ns: int, event: NodeJoined) -> None:
        """Add a node that joined or came back, with the instances on it."""
        view = self._view
        node = view.nodes.get(event.node_id)
        if node is not None and node.state == NodeState.UP:
            raise DriverError(f"node {event.node_id} has joined already")
        if not 0 <= event.pool_id < len(view.app.pools):
            raise DriverError(f"node {event.node_id}: unknown pool {event.pool_id}")
        if node is not None and node.pool.id != event.pool_id:
            raise DriverError(f"node {event.node_id} has come back to another pool")
        present = self._present_instances(event)
        view.now_ns = now_ns
        if node is None:
            pool = view.app.pools[event.pool_id]
            node = Node(event.node_id, event.name, pool, view.variants_by_pool[pool.id])
            view.nodes[node.id] = node
        node.state = NodeState.UP
        self._instances.list_if_free(node)
        adopted = [
            self._instances.adopt_instance(instance_id, variant, node, shape_id)
            for instance_id, variant, shape_id in present
            if has_free_room(node, variant, shape_id)
        ]
        self._hooks.node_joined(node)
        for instance in adopted:
            self._failures.started(instance.variant)
            self._hooks.instance_started(instance)
        self._hooks.capacity(node)

    def _present_instances(self, event: NodeJoined) -> list[tuple[int, Variant, int]]:
        """The instances on a node that joins: id, variant and shape id of each.

        They may be our own: a node that was lost because its connection broke has kept them.
        """
        view, flat, present = self._view, event.instances, []
        if len(flat) % 3:
            raise DriverError(f"node {event.node_id}: incomplete instances {flat}")
        for place in range(0, len(flat), 3):
            instance_id, variant_id, shape_id = flat[place], flat[place + 1], flat[place + 2]
            if not self._instances.has_issued_instance(instance_id):
                raise DriverError(f"instance {instance_id} was never started")
            if instance_id in view.instances or not 0 <= variant_id < len(view.app.variants):
                raise DriverError(f"instance {instance_id} cannot be on node {event.node_id}")
            variant = view.app.variants[variant_id]
            if not 0 <= shape_id < len(variant.shapes):
                raise DriverError(f"instance {instance_id}: unknown shape {shape_id}")
            present.append((instance_id, variant, shape_id))
        return present

    def node_lost(self, now_ns: int, event: NodeLost) -> None:
        """Remove a node and its instances; its batches end in events of their own."""
        node = self._known_node(event.node_id)
        self._view.now_ns = now_ns
        if node.state != NodeState.UP:
            self._view.events_ignored += 1
            return
        for event_id in [id for id, each in self._crossed.items() if each.node_id == node.id]:
            del self._crossed[event_id]
        gone = self._instances.lose_node(node)
        for instance in gone:
            self._failures.instance_gone(instance, True, "its node died")
        for instance in gone:
            self._hooks.instance_gone(instance)
        self._hooks.node_lost(node)

    def _known_node(self, node_id: int) -> Node:
        node = self._view.nodes.get(node_id)
        if node is None:
            raise DriverError(f"unknown node {node_id}")
        return node

    def instance_started(self, now_ns: int, event: InstanceStarted) -> None:
        """Mark an instance that this Scheduler started as ready."""
        node = self._known_node(event.node_id)
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.node not in (None, node):
            raise DriverError(f"instance {event.instance_id} was not ordered on {node.name}")
        if instance is not None and instance.node is None:
            self._check_grant(instance, node)
        self._view.now_ns = now_ns
        if instance is None:
            return
        if instance.state == InstanceState.DRAINING:  # the start was called off, and has ended now
            self._instances.end_preparing(instance)
            self._hooks.capacity(node)
            return
        if instance.state != InstanceState.STARTING or node.state != NodeState.UP:
            self._view.events_ignored += 1
            return
        self._instances.instance_started(instance, node)
        self._failures.started(instance.variant)
        self._hooks.instance_started(instance)
        self._hooks.capacity(node)

    def _check_grant(self, instance: Instance, node: Node) -> None:
        if not has_free_room(node, instance.variant, instance.shape_id):
            raise DriverError(f"{node.name} holds too much for {instance.variant.name}")

    def instance_appeared(self, now_ns: int, event: InstanceAppeared) -> None:
        """Add an instance that another Scheduler started and this one may use too.

        It may be our own: of a node that was lost because its connection broke, and has come back.
        """
        node = self._known_node(event.node_id)
        if not self._instances.has_issued_instance(event.instance_id):
            raise DriverError(f"instance {event.instance_id} was never started")
        if event.instance_id in self._view.instances:
            raise DriverError(f"instance {event.instance_id} appeared twice")
        if not 0 <= event.variant_id < len(self._view.app.variants):
            raise DriverError(f"instance {event.instance_id}: unknown variant {event.variant_id}")
        variant = self._view.app.variants[event.variant_id]
        if not 0 <= event.shape_id < len(variant.shapes):
            raise DriverError(f"instance {event.instance_id}: unknown shape {event.shape_id}")
        self._view.now_ns = now_ns
        if node.state != NodeState.UP:
            self._view.events_ignored += 1  # it crossed the loss of its node
            return
        if not has_free_room(node, variant, event.shape_id):
            # It crossed our own start, which the node will refuse, or the end of another instance.
            self._crossed[event.instance_id] = event
            return
        instance = self._instances.adopt_instance(event.instance_id, variant, node, event.shape_id)
        self._failures.started(variant)
        self._hooks.instance_started(instance)
        self._hooks.capacity(node)

    def instance_stopped(self, now_ns: int, event: InstanceStopped) -> None:
        """Remove an instance, whatever the reason."""
        instance = self._known_instance(event.instance_id)
        self._view.now_ns = now_ns
        self._crossed.pop(event.instance_id, None)
        if instance is None:
            return
        was_starting = instance.state == InstanceState.STARTING
        self._instances.instance_gone(instance)
        self._failures.instance_gone(instance, was_starting, event.reason)
        node = instance.node
        adopted = [] if node is None else self._adopt_crossed(node)
        if was_starting and node is not None:
            is_unknown = instance.variant.id not in node.instances  # the one that was started
            if event.reason == NO_ROOM or (event.reason == STARTED_ALREADY and is_unknown):
                self._instances.back_off_from(node)  # or it would be ordered again at once
        self._hooks.instance_gone(instance)
        self._failures.review()
        for other in adopted:
            self._failures.started(other.variant)
            self._hooks.instance_started(other)
        if instance.node is not None:
            self._hooks.capacity(instance.node)

    def _adopt_crossed(self, node: Node) -> list[Instance]:
        """Add what other Schedulers have started on a node, as far as there is room for it now."""
        adopted: list[Instance] = []
        for event in [each for each in self._crossed.values() if each.node_id == node.id]:
            id, variant = event.instance_id, self._view.app.variants[event.variant_id]
            if has_free_room(node, variant, event.shape_id):
                del self._crossed[id]
                adopted.append(self._instances.adopt_instance(id, variant, node, event.shape_id))
        return adopted

    def use_changed(self, now_ns: int, event: InstanceUseChanged) -> None:
        """Mark an instance as in use, or as not in use."""
        instance = self._known_instance(event.instance_id)
        self._view.now_ns = now_ns
        if instance is not None:
            instance.is_in_use = event.is_in_use

    def gateways_changed(self, now_ns: int, event: GatewaysChanged) -> None:
        """Note how many gateways there are."""
        if event.count < 1:
            raise DriverError(f"there are {event.count} gateways, and this is one")
        self._view.now_ns = now_ns
        if event.count > 1:
            self._instances.has_peers = True
        if event.count != self._view.gateways:
            self._view.gateways = event.count
            self._hooks.gateways_changed()

    def _known_instance(self, instance_id: int) -> Instance | None:
        """The instance that an event names; None if it is gone already."""
        instance = self._view.instances.get(instance_id)
        if instance is None:
            if not self._instances.has_issued_instance(instance_id):
                raise DriverError(f"instance {instance_id} was never started")
            self._view.events_ignored += 1
        return instance

    def weights_loaded(self, now_ns: int, event: WeightsLoaded) -> None:
        """Weights are on the device: loaded as ordered, or an eviction did not happen."""
        instance = self._known_instance(event.instance_id)
        if instance is not None and instance.state == InstanceState.STARTING:
            raise DriverError(f"instance {event.instance_id} is starting, not loading")
        self._view.now_ns = now_ns
        if instance is None or instance.node is None:
            return
        if instance.residency == Residency.HOST:
            self._instances.mark_on_device(instance, instance.node)
        self._instances.end_preparing(instance)
        self._hooks.capacity(instance.node)

    def weights_evicted(self, now_ns: int, event: WeightsEvicted) -> None:
        """Note the eviction if another Scheduler ordered it.

        The state has assumed an eviction of our own since it was ordered.
        """
        instance = self._known_instance(event.instance_id)
        self._view.now_ns = now_ns
        if instance is None or instance.node is None or instance.is_preparing:
            return
        if instance.residency == Residency.DEVICE:
            self._instances.mark_on_host(instance, instance.node)
