"""Variants that cannot be started: backed off from, probed now and then, and waited for by nobody.

A start that fails would be ordered again at once by any policy that knows no better, because the
task that needs it is still there. So the core keeps a circuit breaker per variant, the same for
every policy. While it is open no order may start the variant, and the view says so wherever a
policy asks (`View.can_take`, `View.is_barred`). When the back-off has passed the core itself orders
one start, the probe; success closes the breaker, failure doubles the back-off. So a function
recovers without traffic, and traffic costs no starts.

A function of which nothing is up and nothing may be started is *unloadable*: requests that need it
are turned away at the door, and those that are open fail, rather than wait for nothing.

Not concerned are platforms that pick their own instances, and pools whose nodes a Broker hands out
to several Schedulers: there a start may also fail because others have taken all nodes.
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
    Outcome,
    Rejection,
    RequestState,
    TaskState,
)
from headgate.core.view import View

PROBE: Final = "probe"  # the timer, by variant id
_WAITING: Final = (TaskState.BLOCKED, TaskState.READY, TaskState.HELD)
_DOUBLINGS_MAX: Final = 30  # so that no shift gets out of hand; the bound is reached long before


@final
class LoadFailures:
    """Records failed starts, orders probes, and settles who would wait in vain."""

    def __init__(
        self,
        view: View,
        ledger: StateWriter,
        residents: InstanceWriter,
        requests: RequestHandlers,
        hooks: PolicyHooks,
        *,
        picks_nodes: bool,
        spills: list[bool],
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._residents = residents
        self._requests = requests
        self._hooks = hooks
        self._limits = view.app.limits
        self._picks_nodes = picks_nodes  # else a Broker does, and starts fail for want of nodes
        self._spills = spills  # by function id: the policy sends it to a platform as well
        # By function id: the variants that policies start on nodes.
        self._on_nodes: list[list[int]] = [[] for _ in view.app.functions]
        for pool, variants in zip(view.app.pools, view.variants_by_pool, strict=True):
            for variant in variants:
                if variant is not None and pool.faas is None:
                    self._on_nodes[variant.function_id].append(variant.id)

    # --- what happens --------------------------------------------------------------------------

    def reported(self, now_ns: int, event: LoadFailed) -> None:
        """A node says that it cannot load a variant."""
        view = self._view
        node = view.nodes.get(event.node_id)
        if node is None:
            raise DriverError(f"there is no node {event.node_id}")
        if not 0 <= event.variant_id < len(view.app.variants):
            raise DriverError(f"node {event.node_id}: no variant {event.variant_id}")
        view.now_ns = now_ns
        variant = view.app.variants[event.variant_id]
        if node.state != NodeState.UP or _is_up(node, variant.id):
            view.events_ignored += 1  # it crossed the loss of the node, or a start that went well
            return
        self._record(variant, node.id, event.reason, is_probe=False)

    def gone(self, instance: Instance, was_starting: bool, reason: str) -> None:
        """An instance is gone. If it was being started on a node that is up, that has failed.

        A probe has failed even if its node went down with it: that may have been its doing.
        """
        node = instance.node
        if not was_starting or node is None:
            return
        failure = self._view.load_failures.get(instance.variant.id)
        is_probe = failure is not None and failure.probe_id == instance.id
        if is_probe or node.state == NodeState.UP:
            self._record(instance.variant, node.id, reason, is_probe=is_probe)

    def started(self, variant: Variant) -> None:
        """A start has gone well: whatever it was, it is over."""
        if self._view.load_failures.pop(variant.id, None) is not None:
            self._ledger.cancel_timer((PROBE, variant.id))
            self._view.unloadable.discard(variant.function_id)

    def _record(self, variant: Variant, node_id: int, reason: str, *, is_probe: bool) -> None:
        if not self._picks_nodes:
            return
        failure = self._view.load_failures.get(variant.id)
        if failure is None:
            failure = self._view.load_failures[variant.id] = LoadFailure(reason, node_id)
            self._ledger.has_afterthoughts = True
        failure.reason = reason
        failure.node_id = node_id
        if failure.failures and not is_probe:
            return  # it was on its way when the first one failed: the same failure
        failure.failures += 1
        self._wait(variant, failure)

    def _wait(self, variant: Variant, failure: LoadFailure) -> None:
        """Leave the variant alone: twice as long with each failure in a row."""
        limits = self._limits
        doublings = min(failure.failures - 1, _DOUBLINGS_MAX)
        backoff_ns = min(limits.start_backoff_ns << doublings, limits.start_backoff_max_ns)
        failure.probe_id = None
        failure.retry_at_ns = self._view.now_ns + backoff_ns
        self._ledger.set_timer((PROBE, variant.id), failure.retry_at_ns)

    # --- probes --------------------------------------------------------------------------------

    def probe(self, variant_id: int) -> None:
        """The back-off has passed: try it once, if there is a place for that."""
        view = self._view
        variant = view.app.variants[variant_id]
        failure = view.load_failures[variant_id]
        places = [
            node
            for node in view.nodes.values()
            if node.state == NodeState.UP and node.pool.id in variant.pool_ids
        ]
        node = self._place(places, variant, failure)
        if node is not None:
            failure.node_id = node.id
            failure.probe_id = self._residents.start_instance(variant, node.pool, node).id
            expected_ns = max(view.start_ns(node, variant), self._limits.start_backoff_ns)
            failure.retry_at_ns = view.now_ns + expected_ns
        elif places and all(_is_up(node, variant_id) for node in places):
            self.started(variant)  # it is wherever it can be: that is proof enough
        else:
            self._wait(variant, failure)

    def _place(self, places: list[Node], variant: Variant, failure: LoadFailure) -> Node | None:
        """The node that a probe disturbs least, and not where it failed last if that can be."""
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
                node.memory_used_bytes + need_bytes > node.pool.memory_bytes,  # others are evicted
                node.pool.is_elastic and not node.instances,  # it is paid for from now on
                node.id not in view.free_nodes,
                node.running,
            ),
            default=None,
        )

    # --- who waits in vain ---------------------------------------------------------------------

    def review(self) -> None:
        """After an event: look after probes that were called off, and who waits in vain now.

        O(nodes) for each variant that cannot be loaded.
        """
        view = self._view
        news: list[int] = []
        for variant_id, failure in view.load_failures.items():
            variant = view.app.variants[variant_id]
            if failure.probe_id is not None:
                probe = view.instances.get(failure.probe_id)
                if probe is None or probe.state == InstanceState.DRAINING:
                    self._wait(variant, failure)
            function_id = variant.function_id
            if self._may_come(function_id):
                view.unloadable.discard(function_id)
            elif function_id not in view.unloadable:
                view.unloadable.add(function_id)
                news.append(function_id)
        if news:
            self._settle_waiting(news)

    def _may_come(self, function_id: int) -> bool:
        """Whether the function is up somewhere, or may be started other than by a probe."""
        failures = self._view.load_failures
        if self._spills[function_id]:
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
        """Fail whatever needs one of these functions; then offer the nodes to those behind it."""
        view = self._view
        for request in list(view.requests.values()):
            if request.state != RequestState.OPEN:
                continue
            for task in request.tasks:
                if task.state in _WAITING and task.function.id in function_ids:
                    retry_ns = view.load_retry_ns(request.pipeline)
                    self._requests.settle_early(
                        request, Outcome.FAILED, Rejection.LOAD_FAILED, retry_ns
                    )
                    break
        self._hooks.offer_nodes()


def _is_up(node: Node, variant_id: int) -> bool:
    instance = node.instances.get(variant_id)
    return instance is not None and instance.state != InstanceState.STARTING
