"""Every function has nodes of its own, shared out by how much work it brings.

The *exclusive* policy of "Making the Most of Serverless Accelerators" (Berkeley thesis, 2022,
chapter 6), which is what a container per model amounts to: a queue per function, first come first
served, on nodes that run nothing else, so each node pays one cold start. Nodes are shared out in
proportion to request rate x time per request, counted afresh every `adapt_every` arrivals. A queue
that is more than `steal_factor` times as full as another (waiting work per node; the thesis uses
150 %) steals a node of its as that becomes free, unless that would only turn the tables. The thesis
words the direction backwards: the fuller queue must gain.

Where there are more functions than nodes, one without a node takes the node of whichever function
has had its turn: its head has waited longer than theirs. Cost per decision: O(functions), and
O(functions x nodes) when nodes are shared out.

>>> from headgate.policies import find_policy
>>> find_policy("exclusive").config().steal_factor
1.5
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

from headgate.core.errors import ConfigError
from headgate.core.lazy_deletion import LazyDeletions, sweep
from headgate.core.policy import Context, Policy, PolicyConfig, PolicyKind
from headgate.core.records import Node, Task
from headgate.core.states import TaskState
from headgate.planning.placement import apportion


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `exclusive`."""

    adapt_every: int = 200  # arrivals between two sharings-out; 0: only when nodes come or go
    steal_factor: float = 1.5  # how much fuller a queue must be to steal; 0: never

    def __post_init__(self) -> None:
        if self.adapt_every < 0:
            raise ConfigError("must not be negative", key="adapt_every", value=self.adapt_every)
        if self.steal_factor < 0:
            raise ConfigError("must not be negative", key="steal_factor", value=self.steal_factor)


@final
class _Share:
    """A function's queue, its nodes, and the work it brought since the last sharing-out."""

    __slots__ = ("exec_ns", "function_id", "node_ids", "queue", "withdrawals", "work_ns")

    def __init__(self, function_id: int, exec_ns: int) -> None:
        self.function_id = function_id
        self.exec_ns = exec_ns
        self.queue: deque[Task] = deque()
        self.withdrawals = LazyDeletions()
        self.node_ids: list[int] = []
        self.work_ns = 0

    def head(self) -> Task | None:
        """The task that has waited longest."""
        while self.queue and self.queue[0].state != TaskState.READY:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def fullness(self, nodes: int) -> float:
        """Waiting work per node, if it had so many."""
        return len(self.queue) * self.exec_ns / nodes if nodes else float("inf")


@final
class Exclusive(Policy):
    """A queue and a set of nodes per function."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._steal_factor = config.steal_factor
        self._adapt_every = config.adapt_every
        self._arrivals_left = config.adapt_every
        self._shares = [_Share(f.id, f.reference_exec_ns) for f in self.view.app.functions]
        self._owner: dict[int, _Share] = {}

    def on_node_joined(self, node: Node) -> None:
        self._share_out()

    def on_node_lost(self, node: Node) -> None:
        self._owner.pop(node.id).node_ids.remove(node.id)
        self._share_out()

    def on_task_ready(self, task: Task) -> None:
        share = self._shares[task.function.id]
        share.queue.append(task)
        share.work_ns += share.exec_ns
        self._arrivals_left -= 1
        if self._arrivals_left == 0:
            self._arrivals_left = self._adapt_every
            self._share_out()
        self._serve(share)

    def on_task_returned(self, task: Task) -> None:
        share = self._shares[task.function.id]
        share.queue.appendleft(task)
        self._serve(share)

    def on_task_withdrawn(self, task: Task) -> None:
        share = self._shares[task.function.id]
        if share.withdrawals.add(len(share.queue)):
            sweep(share.queue)

    def on_capacity(self, node: Node) -> None:
        owner = self._owner.get(node.id)
        if owner is not None and node.id in self.view.free_nodes:
            self._serve(self._heir(owner, node))

    def _serve(self, share: _Share) -> None:
        """Give what this function has waiting to its free nodes, then see whether to take more."""
        while (task := share.head()) is not None:
            node = self._free_node(share) or self._take_node(share)
            if node is None:
                return
            share.queue.popleft()
            self.orders.dispatch([task], node)

    def _free_node(self, share: _Share) -> Node | None:
        for node_id in share.node_ids:
            node = self.view.free_nodes.get(node_id)
            if node is not None and self.view.can_take(node, share.function_id):
                return node
        return None

    def _take_node(self, share: _Share) -> Node | None:
        """An idle node of a function that can spare it: by stealing, or because we have none."""
        for node in self.view.free_nodes.values():
            owner = self._owner.get(node.id)
            if owner is None or owner is share or owner.head() is not None:
                continue
            if (not share.node_ids or self._may_steal(share, owner)) and self.view.can_take(
                node, share.function_id
            ):
                self._move(node.id, owner, share)
                return node
        return None

    def _may_steal(self, thief: _Share, owner: _Share) -> bool:
        mine, theirs = len(thief.node_ids), len(owner.node_ids)
        if not self._steal_factor or theirs < 2:
            return False
        is_fuller = thief.fullness(mine) > self._steal_factor * owner.fullness(theirs)
        return is_fuller and thief.fullness(mine + 1) >= owner.fullness(theirs - 1)

    def _heir(self, owner: _Share, node: Node) -> _Share:
        """Who may use a node of this owner's that has become free."""
        head = owner.head()
        for share in self._shares:
            theirs = share.head()
            if theirs is None or share is owner or not self.view.can_take(node, share.function_id):
                continue
            if share.node_ids:
                may_take = self._may_steal(share, owner)
            else:
                may_take = head is None or theirs.request.arrival_ns < head.request.arrival_ns
            if may_take:
                self._move(node.id, owner, share)
                return share
        return owner

    def _share_out(self) -> None:
        """Hand the nodes out anew, in proportion to work; keep in place what can stay."""
        nodes = [node.id for node in self.view.nodes.values() if node.id not in self._owner]
        up = [n for n in nodes if self.view.nodes[n].state]
        demand = [float(share.work_ns) for share in self._shares]
        wanted = apportion(len(self._owner) + len(up), demand)
        for share, count in zip(self._shares, wanted, strict=True):
            while len(share.node_ids) > count:
                node_id = share.node_ids.pop()
                del self._owner[node_id]
                up.append(node_id)
            share.work_ns //= 2  # recent work counts for more
        up.sort()
        for share, count in zip(self._shares, wanted, strict=True):
            while len(share.node_ids) < count and up:
                self._give(up.pop(0), share)
        for share in self._shares:
            self._serve(share)

    def _move(self, node_id: int, owner: _Share, share: _Share) -> None:
        owner.node_ids.remove(node_id)
        self._give(node_id, share)

    def _give(self, node_id: int, share: _Share) -> None:
        share.node_ids.append(node_id)
        self._owner[node_id] = share


POLICY = PolicyKind(Exclusive, Config)
