"""Every function has nodes of its own, in proportion to its load.

The *exclusive* policy of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022,
chapter 6), which models a container per model: a FIFO queue per function, on nodes that run nothing
else, so each node pays one cold start. Nodes are divided in proportion to request rate x time per
request, updated every `adapt_every` arrivals. A queue with more than `steal_factor` times the
backlog of another (queued work per node; the thesis uses 150 %) steals one of its nodes when that
becomes free, unless that would only reverse the imbalance. The thesis states the direction the
wrong way round: the longer queue must gain the node.

If there are more functions than nodes, a function without a node takes the node of a function whose
oldest queued task is younger. Cost per decision: O(functions), and O(functions x nodes) when nodes
are divided anew.

>>> from headgate.policies import find_policy
>>> find_policy("exclusive").config().steal_factor
1.5
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import final

from headgate.core.policy import (
    NOT_NEGATIVE,
    Context,
    LazyDeletions,
    Policy,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Node, Task
from headgate.core.states import TaskState


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `exclusive`."""

    # Arrivals between rebalancings; 0: only when nodes join or leave.
    adapt_every: int = field(default=200, metadata=NOT_NEGATIVE)
    # Ratio of backlogs above which a queue steals a node; 0: never.
    steal_factor: float = field(default=1.5, metadata=NOT_NEGATIVE)


@final
class _Partition:
    """A function's queue, its nodes, and its work since the last rebalancing."""

    __slots__ = ("exec_ns", "function_id", "node_ids", "queue", "withdrawals", "work_ns")

    def __init__(self, function_id: int, exec_ns: int) -> None:
        self.function_id = function_id
        self.exec_ns = exec_ns
        self.queue: deque[Task] = deque()
        self.withdrawals = LazyDeletions()
        self.node_ids: list[int] = []
        self.work_ns = 0

    def head(self) -> Task | None:
        """The oldest queued task."""
        while self.queue and self.queue[0].state != TaskState.READY:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def backlog_ns(self, nodes: int) -> float:
        """Queued work per node, if it had this many nodes."""
        return len(self.queue) * self.exec_ns / nodes if nodes else float("inf")


@final
class Exclusive(Policy):
    """A queue and a set of nodes per function."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._steal_factor = config.steal_factor
        self._adapt_every = config.adapt_every
        self._arrivals_left = config.adapt_every
        self._partitions = [_Partition(f.id, f.reference_exec_ns) for f in self.view.app.functions]
        self._owner: dict[int, _Partition] = {}

    def on_node_joined(self, node: Node) -> None:
        self._rebalance()

    def on_node_lost(self, node: Node) -> None:
        self._owner.pop(node.id).node_ids.remove(node.id)
        self._rebalance()

    def on_task_ready(self, task: Task) -> None:
        partition = self._partitions[task.function.id]
        partition.queue.append(task)
        partition.work_ns += partition.exec_ns
        self._arrivals_left -= 1
        if self._arrivals_left == 0:
            self._arrivals_left = self._adapt_every
            self._rebalance()
        self._serve(partition)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        partition = self._partitions[task.function.id]
        partition.queue.appendleft(task)
        self._serve(partition)

    def on_task_withdrawn(self, task: Task) -> None:
        partition = self._partitions[task.function.id]
        partition.withdrawals.withdraw_from(partition.queue)

    def on_capacity(self, node: Node) -> None:
        owner = self._owner.get(node.id)
        if owner is not None and node.id in self.view.free_nodes:
            self._serve(self._next_user(owner, node))

    def _serve(self, partition: _Partition) -> None:
        """Dispatch the queue of a function to its free nodes and to nodes it may take over."""
        while (task := partition.head()) is not None:
            node = self._free_node(partition) or self._take_node(partition)
            if node is None:
                return
            partition.queue.popleft()
            self.orders.dispatch([task], node)

    def _free_node(self, partition: _Partition) -> Node | None:
        for node_id in partition.node_ids:
            node = self.view.free_nodes.get(node_id)
            if node is not None and self.view.can_take(node, partition.function_id):
                return node
        return None

    def _take_node(self, partition: _Partition) -> Node | None:
        """Take over an idle node of another function: by stealing, or if this one has no node."""
        for node in self.view.free_nodes.values():
            owner = self._owner.get(node.id)
            if owner is None or owner is partition or owner.head() is not None:
                continue
            if (not partition.node_ids or self._may_steal(partition, owner)) and self.view.can_take(
                node, partition.function_id
            ):
                self._move(node.id, owner, partition)
                return node
        return None

    def _may_steal(self, thief: _Partition, owner: _Partition) -> bool:
        mine, theirs = len(thief.node_ids), len(owner.node_ids)
        if not self._steal_factor or theirs < 2:
            return False
        has_more_backlog = thief.backlog_ns(mine) > self._steal_factor * owner.backlog_ns(theirs)
        return has_more_backlog and thief.backlog_ns(mine + 1) >= owner.backlog_ns(theirs - 1)

    def _next_user(self, owner: _Partition, node: Node) -> _Partition:
        """The function that uses a node of `owner` that has become free."""
        head = owner.head()
        for partition in self._partitions:
            theirs = partition.head()
            if (
                theirs is None
                or partition is owner
                or not self.view.can_take(node, partition.function_id)
            ):
                continue
            if partition.node_ids:
                may_take = self._may_steal(partition, owner)
            else:
                may_take = head is None or theirs.request.arrival_ns < head.request.arrival_ns
            if may_take:
                self._move(node.id, owner, partition)
                return partition
        return owner

    def _rebalance(self) -> None:
        """Divide the nodes in proportion to work, moving as few of them as possible."""
        nodes = [node.id for node in self.view.nodes.values() if node.id not in self._owner]
        up = [n for n in nodes if self.view.nodes[n].state]
        demand = [float(partition.work_ns) for partition in self._partitions]
        wanted = apportion(len(self._owner) + len(up), demand)
        for partition, count in zip(self._partitions, wanted, strict=True):
            while len(partition.node_ids) > count:
                node_id = partition.node_ids.pop()
                del self._owner[node_id]
                up.append(node_id)
            partition.work_ns //= 2  # recent work counts for more
        up.sort()
        for partition, count in zip(self._partitions, wanted, strict=True):
            while len(partition.node_ids) < count and up:
                self._give(up.pop(0), partition)
        for partition in self._partitions:
            self._serve(partition)

    def _move(self, node_id: int, owner: _Partition, partition: _Partition) -> None:
        owner.node_ids.remove(node_id)
        self._give(node_id, partition)

    def _give(self, node_id: int, partition: _Partition) -> None:
        partition.node_ids.append(node_id)
        self._owner[node_id] = partition


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers proportional to `weights`, by the largest-remainder method.

    Each entry gets at least one as far as `total` allows. Equal weights, or all zeros, give equal
    shares; ties go to the earlier entry.

    >>> apportion(4, [1.0, 1.0])
    [2, 2]
    >>> apportion(4, [9.0, 1.0])
    [3, 1]
    >>> apportion(2, [1.0, 1.0, 5.0])
    [1, 0, 1]
    >>> apportion(7, [100.0, 0.1, 0.1, 0.1, 0.1])
    [3, 1, 1, 1, 1]
    """
    count = len(weights)
    if total <= count:
        chosen = sorted(range(count), key=lambda i: (-weights[i], i))[:total]
        return [1 if i in chosen else 0 for i in range(count)]
    whole = sum(weights)
    shares = [total * w / whole if whole > 0 else total / count for w in weights]
    parts = [max(1, int(share)) for share in shares]
    while sum(parts) > total:  # the minimum of one each exceeded the total
        richest = max(
            range(count), key=lambda i: (parts[i] - shares[i] if parts[i] > 1 else -inf, i)
        )
        parts[richest] -= 1
    while sum(parts) < total:
        neediest = max(range(count), key=lambda i: (shares[i] - parts[i], -i))
        parts[neediest] += 1
    return parts


POLICY = PolicyKind(Exclusive, Config)
