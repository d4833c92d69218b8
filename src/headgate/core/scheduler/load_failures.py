"""Start back-off: variants that fail to start are not started again until a probe succeeds.

Most policies would order a failed start again at once, because the task that needs it still waits.
So the core keeps a circuit breaker per variant, the same for every policy. While it is open, no
order may start the variant, and the view says so (`View.can_take`, `View.is_barred`). When the
back-off has elapsed, the core itself orders one start, the probe: success closes the breaker,
failure doubles the back-off. So a function recovers without traffic, and traffic causes no starts.

A function that has no instance and none of whose variants may be started is *unloadable*: new
requests that need it are rejected and open ones fail, instead of waiting in vain.

FaaS pools are not concerned, and neither are pools whose nodes a Broker grants to several
Schedulers: there a start may also fail because other Schedulers hold all nodes.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.errors import DriverError
from headgate.core.events import LoadFailed
from headgate.core.model import Variant
from headgate.core.records import Instance, LoadFailure, Node
from headgate.core.scheduler.policy_hooks import PolicyHooks
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.states import (
    InstanceState,
    NodeState,
    RequestState,
    TaskState,
)
from headgate.core.view import View

PROBE: Final = "probe"  # the timer, by variant id
_WAITING: Final = (TaskState.BLOCKED, TaskState.READY, TaskState.HELD)
_DOUBLINGS_MAX: Final = 30  # bounds the shift; the back-off reaches its own bound long before


@final
class LoadFailures:
    """Records failed starts, orders probes, and settles requests for unloadable functions."""

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
        for pool, variants in zip(view.app.pools, view.variants_by_pool, strict=True):
            for variant in variants:
                if variant is not None and pool.faas is None:
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
        if node.state != NodeState.UP or _is_up(node, variant.id):
            view.events_ignored += 1  # it crossed the loss of the node, or a successful start
            return
        self._record(variant, node.id, event.reason, is_probe=False)

    def instance_gone(self, instance: Instance, was_starting: bool, reason: str) -> None:
        """Record a failed start if an instance is gone that was starting on a node that is up.

        A probe has failed even if its node went down with it: the probe may have been the cause.
        """
        node = instance.node
        if not was_starting or node is None:
            return
        failure = self._view.load_failures.get(instance.variant.id)
        is_probe = failure is not None and failure.probe_id == instance.id
        if is_probe or node.state == NodeState.UP:
            self._record(instance.variant, node.id, reason, is_probe=is_probe)

    def started(self, variant: Variant) -> None:
        """Close the breaker of a variant after a successful start."""
        if self._view.load_failures.pop(variant.id, None) is not None:
            self._state.cancel_timer((PROBE, variant.id))
            self._view.unloadable.discard(variant.function_id)

    def _record(self, variant: Variant, node_id: int, reason: str, *, is_probe: bool) -> None:
        if not self._picks_nodes:
            return
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
        elif places and all(_is_up(node, variant_id) for node in places):
            self.started(variant)  # every node of its pools runs it: that proves that it loads
        else:
            self._back_off(variant, failure)

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

        O(nodes) for each variant that is in back-off.
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
            for node in self._view.nodes.values():
                instance = node.instances.get(variant.id)
                if instance is not None and (failure is None or instance.id != failure.probe_id):
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


def _is_up(node: Node, variant_id: int) -> bool:
    instance = node.instances.get(variant_id)
    return instance is not None and instance.state != InstanceState.STARTING
