"""The hooks of a policy, called so that whatever they raise ends with them.

An exception in a hook is a fault of the policy. The event goes on all the same: the books are
complete, and others get their hooks. `Requests.fault` has the rest of it. Hooks that are called
for every request are spelled out where they are called, because a call costs more than all of this.
"""

from __future__ import annotations

from typing import final

from headgate.core.lifecycle import NodeState
from headgate.core.policy import Policy
from headgate.core.records import Instance, Node, Task
from headgate.core.requests import Requests
from headgate.core.view import View


@final
class Hooks:
    """Calls what is called rarely."""

    def __init__(self, view: View, policy: Policy, requests: Requests) -> None:
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
            self._policy.on_pool_open(pool_id)
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
