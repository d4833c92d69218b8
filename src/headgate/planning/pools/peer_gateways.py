"""Several gateways that share pools and talk to nobody: what one of them can count on.

Of each pool, a part (`GatewayShare`). A gateway knows how many they are, F, and what it is offered
itself. The others are taken to be offered as much (Swayam, Middleware 2017: L = F x L') and to
admit as large a part of it. Of the pool's lanes they use that much, and no more than their equal
parts: the rest is for this gateway. So a gateway has nearly the whole of a pool that is idle, and
in overload each has 1/F of it: what all promise together is what the pool can do. The offered load
is followed within a few objectives, or all gateways would promise the whole pool after a step of
the load. The part that is admitted is followed slowly: it matters where 1/F of a pool is so little
that nobody could promise anything, and then what nobody uses is promised again.

Of the nodes, those that others do not keep busy (`BusyNodes`). Gateways do not see each other's
batches. A node without a free slot refuses a batch; the gateway then asks another node, and this
one later: the sooner, the sooner its own most urgent task must start. So it is the most urgent task
of all gateways that is likely to get the next free slot, without a message between them. Single
gateways never hold a node back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random
from typing import Final, final

from headgate.core.records import Node
from headgate.core.view import View
from headgate.planning.forecast import OfferedLoad
from headgate.planning.pools.calendar import Calendar

_MEMORY: Final = 10  # time constant of the load estimate, in objectives
_MEMORY_SLOW: Final = 50  # of the part that is admitted
_CAUTION_MAX: Final = 2.0
_CAUTION_STEP: Final = 0.1  # per promise that was not kept
_REVIEW: Final = 8  # arrivals between two divisions
_STEPS: Final = 64  # parts are multiples of 1/64: a calendar is rebuilt when its part changes

RETRY_MIN_NS: Final = 100_000
# A node is asked again after a part of the time until the most urgent task must start, within these
# parts of the time of a batch.
_RETRY_SLACK: Final = 1 / 8
_RETRY_MIN: Final = 1 / 16
_RETRY_MAX: Final = 1 / 2
_YIELD: Final = 1 / 32  # of that time, for which a slot that is free again is left to others
_YIELD_BATCHES_MAX: Final = 4


@final
class GatewayShare:
    """Sets the part of the calendars of one pool, by what is offered to the pool here."""

    def __init__(self, calendar: Calendar, own: Sequence[Calendar], objective_ns: float) -> None:
        self._calendar = calendar
        self._own = own  # of builds with fewer lanes than the pool
        self._offered = OfferedLoad(int(_MEMORY * objective_ns), int(objective_ns) // 10)
        slow_ns, prior_ns = int(_MEMORY_SLOW * objective_ns), int(_MEMORY * objective_ns)
        self._offered_slow = OfferedLoad(slow_ns, prior_ns)
        self._admitted_slow = OfferedLoad(slow_ns, prior_ns)
        self._until_review = self._arrivals = 0
        self._was_contended = False  # when the pool was divided last
        self._caution = 1.0  # divides the part in overload, learnt from promises that were broken

    def observe(self, now_ns: int, work_ns: float, gateways: int) -> None:
        """Record work that was offered to the pool."""
        self._offered.observe(now_ns, work_ns)
        self._offered_slow.observe(now_ns, work_ns)
        self._until_review -= 1
        if self._until_review < 0:
            self._arrivals += 1
            self._until_review = min(_REVIEW, self._arrivals // 8)
            self.divide(now_ns, gateways)

    def on_admitted(self, now_ns: int, work_ns: float) -> None:
        """Record that it was admitted."""
        self._admitted_slow.observe(now_ns, work_ns)

    def on_settled(self, allowed: float, *, was_kept: bool) -> None:
        """Learn from what became of a promise: so many may be broken."""
        if not self._was_contended:
            return
        step = -_CAUTION_STEP * allowed if was_kept else _CAUTION_STEP
        self._caution = min(_CAUTION_MAX, max(1.0, self._caution + step))

    def is_contended(self, now_ns: int, gateways: int) -> bool:
        """Whether all gateways together are offered more than there is."""
        return self._offered.erlangs(now_ns) * gateways >= self._calendar.lanes

    def divide(self, now_ns: int, gateways: int) -> None:
        """Divide the pool among so many gateways."""
        load = self._offered.erlangs(now_ns) / max(1, self._calendar.lanes)
        self._was_contended = load * gateways >= 1.0
        if self._was_contended:
            offered_slow = max(1e-9, self._offered_slow.erlangs(now_ns))
            load *= min(1.0, self._admitted_slow.erlangs(now_ns) / offered_slow)
        caution = self._caution if self._was_contended else 1.0
        part = part_of(load, gateways) / caution
        for calendar in (self._calendar, *self._own):
            calendar.share(part)


def part_of(load: float, gateways: int) -> float:
    """The part of a pool for a gateway that admits a load, relative to the whole pool.

    >>> part_of(0.0, 8), part_of(0.0625, 8), part_of(0.125, 8), part_of(0.5, 8), part_of(0.5, 1)
    (1.0, 0.5625, 0.125, 0.125, 1.0)
    """
    if gateways == 1:
        return 1.0
    used = (gateways - 1) * min(load, 1.0 / gateways)
    return max(1.0 / gateways, round(_STEPS * (1.0 - used)) / _STEPS)


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
