"""Nodes that other gateways keep busy: which are held back, and when they are asked again.

Gateways that share a pool do not see each other's batches. A node without a free slot refuses a
batch; the gateway then asks another node, and this one later: the sooner, the sooner its own most
urgent task must start. So it is the most urgent task of all gateways that is likely to get the next
free slot, without a message between them. Single gateways never hold a node back.
"""

from __future__ import annotations

from math import inf
from random import Random
from typing import Final, final

from headgate.core.records import Node
from headgate.core.view import View

RETRY_MIN_NS: Final = 100_000
# A node is asked again after a part of the time until the most urgent task must start, within these
# parts of the time of a batch.
_RETRY_SLACK: Final = 1 / 8
_RETRY_MIN: Final = 1 / 16
_RETRY_MAX: Final = 1 / 2
_YIELD: Final = 1 / 32  # of that time, for which a slot that is free again is left to others
_YIELD_BATCHES_MAX: Final = 4


@final
class BusyNodes:
    """By node: how many batches of ours it may run while others have its other slots."""

    def __init__(self, view: View, rng: Random) -> None:
        self._view = view
        self._rng = rng
        self._allowed: dict[int, int] = {}  # by node id

    def hold_back(self, node: Node) -> None:
        """Send a node no more than what it runs."""
        self._allowed[node.id] = node.running

    def is_held_back(self, node: Node) -> bool:
        """Whether a node runs as much as it may."""
        return bool(self._allowed) and node.running >= self._allowed.get(node.id, node.slots)

    def allow_one_more(self, node: Node) -> bool:
        """Allow one batch more on a node; whether it is still held back then."""
        allowed = self._allowed.get(node.id)
        if allowed is None or allowed + 1 >= node.slots:
            self._allowed.pop(node.id, None)
            return False
        self._allowed[node.id] = allowed + 1
        return True

    def forget(self, node: Node) -> None:
        """A node is gone."""
        self._allowed.pop(node.id, None)

    def retry_at_ns(self, slack_ns: float, batch_ns: float, refusals: int = 0) -> int:
        """When to ask a node again, if the most urgent task can wait for `slack_ns`."""
        least_ns, most_ns = _RETRY_MIN * batch_ns, _RETRY_MAX * batch_ns
        if slack_ns == inf:  # best effort: the longer it has waited, the less often
            most_ns *= 1.0 + _RETRY_MIN * refusals
        wait_ns = min(most_ns, max(least_ns, _RETRY_SLACK * slack_ns))
        wait_ns = max(RETRY_MIN_NS, wait_ns * self._rng.uniform(0.75, 1.25))
        return self._view.now_ns + int(wait_ns)

    def yield_until_ns(self, node: Node, slack_ns: float, batch_ns: float) -> int | None:
        """Until when to leave a slot that is free again to more urgent tasks; None: not at all."""
        wait_ns = _YIELD * min(slack_ns, _YIELD_BATCHES_MAX * batch_ns)
        if wait_ns < RETRY_MIN_NS or self.is_held_back(node):
            return None
        return self._view.now_ns + int(wait_ns)
