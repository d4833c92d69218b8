"""The hooks of a policy, called so that whatever they raise ends with them.

An exception in a hook is a fault of the policy. The event goes on all the same: the books are
complete, and others get their hooks. `RequestHandlers.fault` has the rest of it. Hooks that are
called for every request are spelled out where they are called, because a call costs more than all
of this.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import MILLISECOND_NS, MINUTE_NS
from headgate.core.policy import Policy
from headgate.core.records import Instance, Node, Task
from headgate.core.scheduler.requests import RequestHandlers
from headgate.core.scheduler.state import StateWriter
from headgate.core.states import NodeState, TaskState
from headgate.core.view import View


@final
class PolicyHooks:
    """Calls what is called rarely."""

    def __init__(self, view: View, policy: Policy, requests: RequestHandlers) -> None:
        self._view = view
        self._policy = policy
        self._requests = requests

    def task_returned(self, task: Task) -> None:
        """A task is ready again."""
        try:
            self._policy.on_task_returned(task)
        except Exception as error:
            self._requests.fault("on_task_returned", error, task)

    def capacity(self, node: Node) -> None:
        """A node may have become able to take more, if it is there."""
        if node.state == NodeState.UP:
            try:
                self._policy.on_capacity(node)
            except Exception as error:
                self._requests.fault("on_capacity", error)

    def offer_nodes(self) -> None:
        """Whatever is free may be used: those who wait have changed."""
        for node in list(self._view.free_nodes.values()):
            if node.id in self._view.free_nodes:
                self.capacity(node)

    def pool_open(self, pool_id: int) -> None:
        """A pool that picks its own instances can take a call."""
        try:
            self._policy.on_pool_available(pool_id)
        except Exception as error:
            self._requests.fault("on_pool_open", error)

    def instance_started(self, instance: Instance) -> None:
        """An instance is ready to run."""
        try:
            self._policy.on_instance_started(instance)
        except Exception as error:
            self._requests.fault("on_instance_started", error)

    def instance_gone(self, instance: Instance) -> None:
        """An instance is not there any more."""
        try:
            self._policy.on_instance_gone(instance)
        except Exception as error:
            self._requests.fault("on_instance_gone", error)

    def node_joined(self, node: Node) -> None:
        """A node is there."""
        try:
            self._policy.on_node_joined(node)
        except Exception as error:
            self._requests.fault("on_node_joined", error)

    def node_lost(self, node: Node) -> None:
        """A node is gone."""
        try:
            self._policy.on_node_lost(node)
        except Exception as error:
            self._requests.fault("on_node_lost", error)

    def timer(self, name: str, number: int) -> None:
        """A timer set by the policy has fired."""
        try:
            self._policy.on_timer(name, number)
        except Exception as error:
            self._requests.fault("on_timer", error)


# After a fault of the policy: nobody waits for ever for what the policy may have forgotten.
#
# A hook that raised may not have used what it was offered, so whatever is free is offered again
# after a moment. It may also have lost a task that it had taken out of its queue, or a node. What
# a policy has forgotten cannot be seen from outside; but from the first fault on, a task that has
# been ready for a minute or two without being sent out fails.


OFFER: Final = "offer_again"  # the timers
FORGOTTEN: Final = "forgotten"
OFFER_AFTER_NS: Final = 100 * MILLISECOND_NS
FORGOTTEN_AFTER_NS: Final = MINUTE_NS


@final
class PolicyRecovery:
    """Looks after those who wait, once the policy cannot be trusted to."""

    def __init__(
        self, view: View, ledger: StateWriter, requests: RequestHandlers, hooks: PolicyHooks
    ) -> None:
        self._view = view
        self._ledger = ledger
        self._requests = requests
        self._hooks = hooks
        self._waiting: list[tuple[Task, int]] = []  # with how often each had been sent out

    def watch(self, is_fault: bool) -> None:
        """After an event, from the first fault on: see to it that somebody looks again."""
        view = self._view
        if not view.requests:
            return
        if is_fault and (OFFER, 0) not in view.timers:
            self._ledger.set_timer((OFFER, 0), view.now_ns + OFFER_AFTER_NS)
        if (FORGOTTEN, 0) not in view.timers:
            self._ledger.set_timer((FORGOTTEN, 0), view.now_ns + FORGOTTEN_AFTER_NS)
            self._waiting = [
                (task, _tries(task))
                for request in view.requests.values()
                for task in request.tasks
                if task.state == TaskState.READY
            ]

    def offer_again(self) -> None:
        """The hook that raised may have had yet to use what is free."""
        self._hooks.offer_nodes()
        for pool in self._view.app.pools:
            if self._view.is_pool_available(pool.id):
                self._hooks.pool_open(pool.id)

    def fail_forgotten(self) -> None:
        """Who was waiting the last time, and has not been sent out since, is served by nobody."""
        waiting, self._waiting = self._waiting, []
        for task, tries in waiting:
            if _tries(task) == tries:
                self._requests.fail_if_ready(task)


def _tries(task: Task) -> int:
    return task.attempts_made + task.refusals
