"""Nodes that other gateways keep busy, and that get no batch for a while.

Gateways that share nodes do not see each other's batches. A node without a free slot refuses a
batch; the gateway then asks another node, and this one later: the sooner, the sooner its own most
urgent task must start, by the square of that time. So it is the most urgent task of all gateways
that is likely to get the next free slot, without a message between them. For the same reason a slot
that is free again is left to the others for a moment, unless the own task is urgent. Single
gateways never hold a node back.
"""

from __future__ import annotations

from math import inf
from random import Random
from typing import Final, final

from headgate.core.records import Batch, Node
from headgate.core.view import View
from headgate.planning.constants import (
    REFUSALS_MAX,
    RETRY_GROWTH,
    RETRY_MAX,
    RETRY_MIN,
    RETRY_MIN_NS,
    RETRY_SLACK,
    YIELD,
    YIELD_BATCHES_MAX,
)
from headgate.planning.dispatch.task_queues import TaskQueues
from headgate.planning.pools.builds import Builds

TRY_AGAIN: Final = "try_again"  # the timer with which a node is asked again; its number is its id


@final
class BusyNodes:
    """By node: how many batches of ours it may run while others have its other slots.

    What it answers is when to ask a node again, or None: to set a timer is the caller's part.
    """

    def __init__(self, view: View, builds: Builds, queues: TaskQueues, rng: Random) -> None:
        self._view = view
        self._builds = builds
        self._queues = queues
        self._rng = rng
        self.allowed: dict[int, int] = {}  # by node id; empty while none is held back
        self._refused_id: int | None = None  # of the batch that was refused just now
        self._batch_ns = [0.0] * len(view.app.pools)  # by pool id: time of our last batch there
        # Batches of a gateway that is gone may still run.
        self.has_had_peers = view.gateways > 1

    def on_gateways_changed(self) -> None:
        """Remember that there were other gateways."""
        self.has_had_peers = self.has_had_peers or self._view.gateways > 1

    def on_refused(self, batch: Batch) -> bool:
        """Hold back the node that was too busy for a batch; whether it is to be asked again.

        If not, the node has no reason to be busy, or the batch was refused too often. Then the
        Scheduler backs off, and counts the refusal.
        """
        node = batch.node
        if not self.has_had_peers or node is None:
            return False
        if max(task.busy_refusals for task in batch.tasks) >= REFUSALS_MAX:
            return False
        self.hold_back(node)
        self._refused_id = batch.id
        return True

    def on_ended(self, batch: Batch) -> int | None:
        """When to ask the node again that has refused a batch; None if it has not.

        Its tasks are queued again: until they are, nothing is known of how urgent they are.
        """
        if not self.has_had_peers or batch.node is None:
            return None
        pool_id, batch_ns = batch.node.pool.id, self._builds.build_of(batch).lane_ns(batch.items)
        self._batch_ns[pool_id] = batch_ns
        if batch.id != self._refused_id:
            return None
        self._refused_id = None
        refusals = max(task.busy_refusals for task in batch.tasks)
        return self.retry_at_ns(self._slack_ns(pool_id), batch_ns, refusals)

    def on_freed(self, node: Node) -> int | None:
        """Hold back a node with a free slot that is left to others; when to ask it then.

        None: the slot can be used at once.
        """
        if self._view.gateways == 1:
            return None
        pool_id = node.pool.id
        slack_ns = self._slack_ns(pool_id)
        if slack_ns == inf and not self._builds.has_promises(pool_id):
            return None
        if slack_ns < inf and not self._builds.is_left_to_others(pool_id):
            return None
        at_ns = self.yield_until_ns(node, slack_ns, self._mean_batch_ns(pool_id))
        if at_ns is not None:
            self.hold_back(node)
        return at_ns

    def on_asked_again(self, node: Node) -> int | None:
        """Allow a node one batch more; when to ask once more, if it is held back even then."""
        if not self.allow_one_more(node):
            return None
        pool_id = node.pool.id
        return self.retry_at_ns(self._slack_ns(pool_id), self._mean_batch_ns(pool_id))

    def is_held_back(self, node: Node) -> bool:
        """Whether a node runs as much as it may."""
        return bool(self.allowed) and node.running >= self.allowed.get(node.id, node.slots)

    def forget(self, node: Node) -> None:
        """A node is gone."""
        self.allowed.pop(node.id, None)

    def hold_back(self, node: Node) -> None:
        """Send a node no more than what it runs."""
        self.allowed[node.id] = node.running

    def allow_one_more(self, node: Node) -> bool:
        """Allow one batch more on a node; whether it is still held back then."""
        allowed = self.allowed.get(node.id)
        if allowed is None or allowed + 1 >= node.slots:
            self.allowed.pop(node.id, None)
            return False
        self.allowed[node.id] = allowed + 1
        return True

    def retry_at_ns(self, slack_ns: float, batch_ns: float, refusals: int = 0) -> int:
        """When to ask a node again, if the most urgent task can wait for `slack_ns`."""
        # The longer it has been refused, the longer the batches that keep the node busy.
        growth = 1.0 + RETRY_GROWTH * refusals
        least_ns, most_ns = growth * RETRY_MIN * batch_ns, growth * RETRY_MAX * batch_ns
        urgency_ns = RETRY_SLACK * slack_ns * (slack_ns / batch_ns)
        wait_ns = min(most_ns, max(least_ns, urgency_ns))
        wait_ns = max(RETRY_MIN_NS, wait_ns * self._rng.uniform(0.75, 1.25))
        return self._view.now_ns + int(wait_ns)

    def yield_until_ns(self, node: Node, slack_ns: float, batch_ns: float) -> int | None:
        """Until when to leave a slot that is free again to more urgent tasks; None: not at all."""
        wait_ns = YIELD * min(slack_ns, YIELD_BATCHES_MAX * batch_ns)
        if wait_ns < RETRY_MIN_NS or self.is_held_back(node):
            return None
        return self._view.now_ns + int(wait_ns)

    def _mean_batch_ns(self, pool_id: int) -> float:
        """Time of a batch on a pool: of those that are promised, or of the last one."""
        last_ns = max(float(RETRY_MIN_NS), self._batch_ns[pool_id])
        return self._builds.calendars[pool_id].mean_batch_ns(last_ns)

    def _slack_ns(self, pool_id: int) -> float:
        """Time until the most urgent promised task of a pool must start; endless if none waits."""
        queue = self._queues.promised_heads[pool_id].first()
        if queue is None:
            return inf
        return max(0.0, float(queue.head_key()[3] - self._view.now_ns))
