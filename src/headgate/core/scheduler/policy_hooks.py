"""Calls of a policy's hooks that contain exceptions, and recovery after a fault of the policy.

An exception in a hook is a fault of the policy. The event is handled to its end all the same: the
state is complete, and the other hooks are called. `RequestHandlers.fault` records the fault and
fails the tasks concerned. Hooks that are called for every request are called inline with the same
`try`, because one more function call would cost more than all the rest.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import MILLISECOND_NS, MINUTE_NS
from headgate.core.policy import Policy
from headgate.core.records import Batch, Instance, Node, Task
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import StateWriter
from headgate.core.states import NodeState, TaskState
from headgate.core.view import View

OFFER_AGAIN: Final = "offer_again"  # names of the timers of `PolicyRecovery`
FORGOTTEN: Final = "forgotten"
OFFER_AFTER_NS: Final = 100 * MILLISECOND_NS
FORGOTTEN_AFTER_NS: Final = MINUTE_NS


@final
class PolicyHooks:
    """Calls the hooks that are called rarely."""

    def __init__(self, view: View, policy: Policy, requests: RequestHandlers) -> None:
        self._view = view
        self._policy = policy
        self._requests = requests

    def task_returned(self, task: Task, reason: int | None) -> None:
        """Call `on_task_returned`."""
        try:
            self._policy.on_task_returned(task, reason)
        except Exception as error:
            self._requests.fault("on_task_returned", error, task)

    def backs_off(self, batch: Batch) -> bool:
        """Call `backs_off`; a policy that raises does."""
        try:
            return self._policy.backs_off(batch)
        except Exception as error:
            self._requests.fault("backs_off", error)
            return True

    def capacity(self, node: Node) -> None:
        """Call `on_capacity` if the node is up."""
        if node.state == NodeState.UP:
            try:
                self._policy.on_capacity(node)
            except Exception as error:
                self._requests.fault("on_capacity", error)

    def offer_nodes(self) -> None:
        """Call `on_capacity` for every free node: the set of waiting tasks has changed."""
        for node in list(self._view.free_nodes.values()):
            if node.id in self._view.free_nodes:
                self.capacity(node)

    def pool_available(self, pool_id: int) -> None:
        """Call `on_pool_available`."""
        try:
            self._policy.on_pool_available(pool_id)
        except Exception as error:
            self._requests.fault("on_pool_available", error)

    def instance_started(self, instance: Instance) -> None:
        """Call `on_instance_started`."""
        try:
            self._policy.on_instance_started(instance)
        except Exception as error:
            self._requests.fault("on_instance_started", error)

    def instance_gone(self, instance: Instance) -> None:
        """Call `on_instance_gone`."""
        try:
            self._policy.on_instance_gone(instance)
        except Exception as error:
            self._requests.fault("on_instance_gone", error)

    def node_joined(self, node: Node) -> None:
        """Call `on_node_joined`."""
        try:
            self._policy.on_node_joined(node)
        except Exception as error:
            self._requests.fault("on_node_joined", error)

    def node_lost(self, node: Node) -> None:
        """Call `on_node_lost`."""
        try:
            self._policy.on_node_lost(node)
        except Exception as error:
            self._requests.fault("on_node_lost", error)

    def gateways_changed(self) -> None:
        """Call `on_gateways_changed`."""
        try:
            self._policy.on_gateways_changed()
        except Exception as error:
            self._requests.fault("on_gateways_changed", error)

    def timer(self, name: str, number: int) -> None:
        """Call `on_timer`."""
        try:
            self._policy.on_timer(name, number)
        except Exception as error:
            self._requests.fault("on_timer", error)


@final
class PolicyRecovery:
    """After a fault of the policy, ensures that no task waits for ever.

    A hook that raised may not have used the capacity it was offered, so all free capacity is
    offered again after a moment. The hook may also have lost a task that it had dequeued, or a
    node. What a policy has lost cannot be observed from outside, so a task that is ready at a fault
    fails if it has not been dispatched a minute or two later. Tasks that become ready after that
    may wait as long as ever: one fault must not change for good who is served.
    """

    def __init__(
        self, view: View, state: StateWriter, requests: RequestHandlers, hooks: PolicyHooks
    ) -> None:
        self._view = view
        self._state = state
        self._requests = requests
        self._hooks = hooks
        self._waiting: list[tuple[Task, int]] = []  # ready tasks, each with its tries so far
        self._is_outdated = False  # there has been a fault since they were listed
        self._fault_ns = 0  # when the last one was

    def on_fault(self) -> None:
        """After an event with a fault: set the timers of the checks below."""
        view = self._view
        if not view.requests:
            return
        self._fault_ns = view.now_ns
        if (OFFER_AGAIN, 0) not in view.timers:
            self._state.set_timer((OFFER_AGAIN, 0), view.now_ns + OFFER_AFTER_NS)
        if (FORGOTTEN, 0) in view.timers:
            self._is_outdated = True  # to list them at every fault would cost too much
        else:
            self._list_waiting()

    def _list_waiting(self) -> None:
        """List what may have been ready at the last fault, to be checked after a while."""
        view = self._view
        self._state.set_timer((FORGOTTEN, 0), view.now_ns + FORGOTTEN_AFTER_NS)
        self._waiting = [
            (task, _tries(task))
            for request in view.requests.values()
            if request.arrival_ns <= self._fault_ns
            for task in request.tasks
            if task.state == TaskState.READY
        ]

    def offer_again(self) -> None:
        """Offer all free capacity again, because the hook that raised may not have used it."""
        self._hooks.offer_nodes()
        for pool in self._view.app.pools:
            if self._view.is_pool_available(pool.id):
                self._hooks.pool_available(pool.id)

    def fail_forgotten(self) -> None:
        """Fail the tasks that were ready when they were listed and have not been dispatched since.

        If there has been a fault in between, those that were ready then have their time from now.
        """
        waiting, self._waiting = self._waiting, []
        for task, tries in waiting:
            if _tries(task) == tries:
                self._requests.fail_if_ready(task)
        is_outdated, self._is_outdated = self._is_outdated, False
        if is_outdated and self._view.requests:
            self._list_waiting()


def _tries(task: Task) -> int:
    return task.attempts_made + task.refusals + task.busy_refusals
