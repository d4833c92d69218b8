"""Shares of a pool among classes of requests: a class is one client's requests to one pipeline.

The load that each class offers, admitted or not, is forecast from the recent past, and the pool's
lanes are divided among the clients that are active, max-min fair by weight, and what a client may
use among its pipelines. Clients with a more urgent priority, which the operator declares, come
first, and the others share what those do not ask for. So a class that offers less than its share
gets all it asks for, and what it leaves is lent, to the same client's other pipelines first. The
shares serve three purposes, the first two where the pool is contended:

- *Protection.* A newcomer with a long deadline sees, beside what is booked, the work that classes
  with shorter objectives will bring until then, up to their shares (Littlewood's rule). Otherwise
  bulk requests would book the future, and interactive ones would find it full. A class that offers
  less than its share has the rest of it for its bursts: so much less is reserved for others.
- *Fairness.* A class that has used up its share must leave part of the calendar to the others, and
  one that asks for more than its share a smaller part, even while it has not used it up.
- *Feedback.* What keeps a class from its share need not be work of others that is booked: it may be
  batches that run for longer than the class can wait. So what it is admitted is compared with what
  it is allotted. A class that is *starved*, admitted much less, leaves nothing to others, best
  effort takes no lane for longer than the class can wait, but for its small share, and small
  batches of classes that can wait longer wait for more tasks: a node that runs those one by one
  whenever it is idle has no time left.

How fast the past is forgotten and how much of a share can be saved up follows the objective that is
declared for the pipeline, not the deadline that a client claims. A load measured over twenty times
the claim of a minute would be found too low for many seconds, and the pool not contended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, inf
from operator import attrgetter
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.planning.constants import (
    OBJECTIVE_STEP,
    SHARES_BURST,
    SHARES_MEMORY,
    SHARES_REVIEW,
    STARVED_BELOW,
    USUAL_STEP,
)

_objective_ns: Final = attrgetter("objective_ns")
_window_ns: Final = attrgetter("window_ns")


@final
class ClassLoad:
    """What one class offers to one pool, and what it may use."""

    __slots__ = (
        "_allotted_ns",
        "_alone_ns",
        "_mean_objective_ns",
        "_refused_ns",
        "_since_ns",
        "_updated_ns",
        "_urgency",
        "_urgent_until_ns",
        "_work_ns",
        "allotted",
        "declared_ns",
        "entitled",
        "is_new",
        "is_starved",
        "memory_ns",
        "objective_ns",
        "rank",
        "tokens_ns",
        "weight",
        "window_ns",
    )

    def __init__(
        self,
        now_ns: int,
        objective_ns: float,
        alone_ns: float,
        weight: float,
        declared_ns: float,
        rank: int = 0,
    ) -> None:
        # Of its requests: declared, or what the client claims, which may differ between them.
        self.objective_ns = self._mean_objective_ns = objective_ns
        self._alone_ns = alone_ns  # what one of them takes on an idle system
        self.window_ns = max(0.0, objective_ns - alone_ns)  # how long they can wait for a lane
        self.weight = weight
        self.rank = rank  # the priority that its client was given: the smallest goes first
        self.declared_ns = declared_ns
        self.memory_ns = SHARES_MEMORY * declared_ns
        self.entitled = 0.0  # lanes of its fair share
        self.allotted = 0.0  # of those, what it asks for
        self.tokens_ns = 0.0  # lane time that its share has earned and that it has not used
        self.is_new = True  # the pool was not divided since it came
        self.is_starved = False  # it was admitted much less than it was allotted
        self._work_ns = 0.0
        self._refused_ns = 0.0  # of that
        self._allotted_ns = 0.0  # in the same time
        self._urgency = 0  # the most urgent priority that its client gave of late
        self._urgent_until_ns = 0
        self._since_ns = self._updated_ns = now_ns

    def observe(self, now_ns: int, work_ns: float, objective_ns: float, priority: int = 0) -> None:
        """An arrival brings this much work, and has this objective."""
        self._mean_objective_ns += OBJECTIVE_STEP * (objective_ns - self._mean_objective_ns)
        if priority <= self._urgency or now_ns > self._urgent_until_ns:
            self._urgency = priority
            self._urgent_until_ns = now_ns + int(self.memory_ns)
        elapsed_ns = now_ns - self._updated_ns
        if elapsed_ns:
            fading = exp(-elapsed_ns / self.memory_ns)
            self._work_ns *= fading
            self._refused_ns *= fading
            self._allotted_ns = self._allotted_ns * fading + elapsed_ns * self.allotted
            most_ns = SHARES_BURST * self.entitled * self.declared_ns + work_ns
            saved_ns = self.tokens_ns + elapsed_ns * self.entitled
            self.tokens_ns = saved_ns if saved_ns < most_ns else most_ns
            self._updated_ns = now_ns
        self._work_ns += work_ns

    def on_placed_elsewhere(self, work_ns: float) -> None:
        """The arrival that brought this much work runs in another pool."""
        self._work_ns = max(0.0, self._work_ns - work_ns)

    def on_refused(self, work_ns: float) -> None:
        """The arrival that brought this much work is refused."""
        self._refused_ns += work_ns

    def allot(self, entitled: float, offered: float) -> None:
        """Set its share, of which it gets what it offers; note whether it got much less of late.

        Its objective is what its requests had of late: none binds those that follow.
        """
        self.objective_ns = self._mean_objective_ns
        self.window_ns = max(0.0, self.objective_ns - self._alone_ns)
        self.entitled = entitled
        self.allotted = min(offered, entitled)
        # What takes all of its time on an idle system is not late because of others.
        is_short = self._work_ns - self._refused_ns < STARVED_BELOW * self._allotted_ns
        # Nor is a class starved of which only less has come than was expected.
        is_refused = self._refused_ns >= 1.0
        self.is_starved = is_short and is_refused and self.window_ns > 0.0

    def save_up(self) -> None:
        """Have all that can be saved up: a class that comes was idle, and its share unused."""
        self.tokens_ns = SHARES_BURST * self.entitled * self.declared_ns
        self.is_new = False

    def has_more_urgent(self, priority: int) -> bool:
        """Whether the client has sent requests of late that it finds more urgent."""
        return priority > self._urgency

    def active_until_ns(self) -> int:
        """When it will have sent nothing for so long that no lane is kept within its reach."""
        return self._updated_ns + int(self.memory_ns)

    def offered(self, now_ns: int) -> float:
        """Offered load in lanes."""
        age_ns = now_ns - self._since_ns + 0.5 * self.declared_ns
        span_ns = self.memory_ns * (1.0 - exp(-age_ns / self.memory_ns))
        return self._work_ns * exp((self._updated_ns - now_ns) / self.memory_ns) / span_ns


@final
class PoolShares:
    """The classes that use a pool."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int], ClassLoad] = {}  # by (client, pipeline) id
        self._arrivals = 0
        self._by_objective: list[ClassLoad] = []  # all classes
        self._by_window: list[ClassLoad] = []
        self._objectives_ns: list[float] = []  # ascending
        # Of lanes, and of lanes x objective, by objective; empty until somebody asks.
        self._sums: list[tuple[float, float]] = []
        self._windows_ns: list[float] = []  # of the classes that are active, ascending
        self._window_lanes: list[float] = [0.0]  # sums of lanes, by window
        self._stale_ns = NEVER_NS  # when the first of them will not be active any more
        self.is_contended = False
        self.starved_window_ns = inf  # the shortest of the active classes that are starved
        self.offered_ns = 0.0  # work of all arrivals, admitted or not
        self.offered_lanes = 0.0  # offered load when the pool was divided last
        self.usual_lanes = 0.0  # offered load while the pool is not contended, averaged
        self._calm = 0  # divisions while it was not

    def of_class(self, key: tuple[int, int]) -> ClassLoad | None:
        """The load of a (client, pipeline); None if none of its requests has come yet."""
        return self._classes.get(key)

    def add(self, key: tuple[int, int], load: ClassLoad) -> None:
        """A class has come: the pool is divided anew with its first arrival."""
        self._classes[key] = load
        self._by_objective.append(load)
        self._by_window.append(load)
        self._arrivals = 0

    def observe(
        self,
        now_ns: int,
        load: ClassLoad,
        work_ns: float,
        lanes: float,
        objective_ns: float,
        priority: int = 0,
    ) -> None:
        """Record an arrival of a class, admitted or not."""
        load.observe(now_ns, work_ns, objective_ns, priority)
        self.offered_ns += work_ns
        self._arrivals -= 1
        if self._arrivals < 0:
            self._arrivals = max(SHARES_REVIEW, len(self._classes))
            self._divide(now_ns, lanes)
            if load.is_new:
                load.save_up()

    def has_used_its_share(self, load: ClassLoad, work_ns: float) -> bool:
        """Whether a class has used its share of a pool that has not enough for all.

        That holds for a class that is alone, too: another that comes must find room.
        """
        return self.is_contended and load.tokens_ns < work_ns

    def wants_more(self, load: ClassLoad) -> bool:
        """Whether a class offers more than its share of a pool that has not enough for all.

        One that does not get its share has nothing to leave to others.
        """
        return self.is_contended and load.allotted >= load.entitled and not load.is_starved

    def has_share_to_spare(self, load: ClassLoad) -> bool:
        """Whether a class offers less than its share of a pool that has not enough for all."""
        return self.is_contended and load.allotted < load.entitled

    @property
    def has_several(self) -> bool:
        """Whether several classes have used the pool; one that is only declared has not."""
        return len(self._classes) > 1

    def reserved_ns(self, load: ClassLoad, window_ns: float) -> float:
        """Lane time that other classes with shorter objectives will need within a window."""
        if not self._sums:
            self._sum_up()
        index = bisect_left(self._objectives_ns, window_ns)
        lanes, moment = self._sums[index]
        reserved_ns = lanes * window_ns - moment
        if load.objective_ns < window_ns:
            reserved_ns -= load.allotted * (window_ns - load.objective_ns)
        if self.is_contended:
            reserved_ns -= (load.entitled - load.allotted) * window_ns
        return reserved_ns if reserved_ns > 0.0 else 0.0

    def blocked(self, now_ns: int, lanes: float, busy_ns: float) -> tuple[float, float]:
        """Of the active classes that cannot wait so long: their lanes, and the shortest window."""
        if now_ns > self._stale_ns:  # nothing may have arrived since they were active
            self._divide(now_ns, lanes)
        index = bisect_left(self._windows_ns, busy_ns)
        return self._window_lanes[index], self._windows_ns[0] if index else busy_ns

    def _divide(self, now_ns: int, lanes: float) -> None:
        """Divide the lanes among the clients, and each one's among its pipelines. O(n log n)."""
        offered = {key: load.offered(now_ns) for key, load in self._classes.items()}
        offered_lanes = sum(offered.values())
        self.offered_lanes = offered_lanes
        self.is_contended = offered_lanes > lanes
        if not self.is_contended:
            self._calm += 1
            step = max(USUAL_STEP, 1.0 / self._calm)
            self.usual_lanes += step * (offered_lanes - self.usual_lanes)
        of_client: dict[int, list[tuple[int, int]]] = {}
        for key in self._classes:
            of_client.setdefault(key[0], []).append(key)
        of_rank: dict[int, list[list[tuple[int, int]]]] = {}
        for keys in of_client.values():
            of_rank.setdefault(self._classes[keys[0]].rank, []).append(keys)
        left = lanes
        for rank in sorted(of_rank):
            clients = of_rank[rank]
            needs = [sum([offered[key] for key in keys]) for keys in clients]
            weights = [self._classes[keys[0]].weight for keys in clients]
            for keys, entitled in zip(clients, _entitled(left, needs, weights), strict=True):
                own_needs = [offered[key] for key in keys]
                own = _entitled(entitled, own_needs, [1.0] * len(keys))
                for key, own_entitled in zip(keys, own, strict=True):
                    self._classes[key].allot(own_entitled, offered[key])
            left = max(0.0, left - sum(needs))
        self._by_objective.sort(key=_objective_ns)
        self._by_window.sort(key=_window_ns)
        self._sums = []
        self._sum_up_active(now_ns)

    def _sum_up(self) -> None:
        """Sum what is allotted, by objective."""
        self._objectives_ns = [load.objective_ns for load in self._by_objective]
        lanes = moment = 0.0
        self._sums.append((lanes, moment))
        for load in self._by_objective:
            lanes += load.allotted
            moment += load.allotted * load.objective_ns
            self._sums.append((lanes, moment))

    def _sum_up_active(self, now_ns: int) -> None:
        """Sum what is allotted to the classes that are active now, by window."""
        stale_ns, lanes = NEVER_NS, 0.0
        self.starved_window_ns = inf
        windows_ns: list[float] = []
        window_lanes = [lanes]
        for load in self._by_window:
            until_ns = load.active_until_ns()
            if until_ns > now_ns:
                stale_ns = until_ns if until_ns < stale_ns else stale_ns
                windows_ns.append(load.window_ns)
                if load.is_starved and load.window_ns < self.starved_window_ns:
                    self.starved_window_ns = load.window_ns
                lanes += load.allotted
                window_lanes.append(lanes)
        self._stale_ns = stale_ns
        self._windows_ns, self._window_lanes = windows_ns, window_lanes


def _entitled(lanes: float, needs: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The lanes that each may use: max-min fair by weight (progressive filling).

    Who needs least relative to its weight comes first, and what it leaves is for the others.

    >>> _entitled(10.0, [2.0, 9.0, 9.0], [1.0, 1.0, 1.0])
    [3.3333333333333335, 4.0, 4.0]
    """
    entitled = [0.0] * len(needs)
    left, weight_sum = lanes, sum(weights)
    relative = [need / weight for need, weight in zip(needs, weights, strict=True)]
    for index in sorted(range(len(needs)), key=relative.__getitem__):
        entitled[index] = left * weights[index] / max(1e-9, weight_sum)
        left -= min(needs[index], entitled[index])
        weight_sum -= weights[index]
    return entitled
