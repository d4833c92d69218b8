"""The lanes that calendars count on: those of nodes, less what starts take, and the gateway's part.

A node that is always there counts as soon as it has joined. A rented node counts from the moment
that its first instance is ordered, busy until that is ready: a request that can wait for the boot
is admitted. A start that takes longer than every objective is nothing to wait for. Where nodes
cannot hold all functions at once, the starts that promises need are booked (`PromisedStarts`).

Where several gateways share a pool and talk to nobody, each counts on a part of its lanes
(`GatewayShare`). A gateway knows how many they are, F, and what it is offered itself. The others
are taken to be offered as much (Swayam, Middleware 2017: L = F x L') and to admit as large a part
of it. Of the pool's lanes they use that much, and no more than their equal parts: the rest is for
this gateway. So a gateway has nearly the whole of a pool that is idle, and in overload each has 1/F
of it: what all promise together is what the pool can do. The offered load is followed within a few
objectives, or all gateways would promise the whole pool after a step of the load. The part that is
admitted is followed slowly: it matters where 1/F of a pool is so little that nobody could promise
anything, and then what nobody uses is promised again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from math import sqrt
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.records import Instance, Node
from headgate.core.states import INSTANCE_STARTING, ON_HOST
from headgate.core.view import View
from headgate.planning.constants import (
    CAUTION_MAX,
    CAUTION_STEP,
    GATEWAY_DEVIATIONS,
    GATEWAY_MEMORY,
    GATEWAY_MEMORY_SLOW,
    GATEWAY_REVIEW,
    GATEWAY_STEP,
    TURN_STARTS,
)
from headgate.planning.forecast import OfferedLoad
from headgate.planning.pools.build import Build
from headgate.planning.pools.calendar import Calendar
from headgate.planning.pools.node_room import time_to_reload_ns

_STEPS: Final = 64  # parts are multiples of 1/64: a calendar is rebuilt when its part changes


@final
class _Start:
    """An instance that is being started, and what that takes of its pool until it is ready."""

    __slots__ = ("busy_lanes", "end_ns", "missing_lanes", "node_id", "own_lanes")

    def __init__(self, node_id: int, end_ns: int) -> None:
        self.node_id = node_id
        self.end_ns = end_ns  # predicted
        self.busy_lanes = 0  # lanes that are busy until then
        self.own_lanes = False  # and so are those of the builds' own calendars
        self.missing_lanes = 0  # lanes that do not count until then


@final
class NodeLanes:
    """Counts the lanes of the nodes that are up, or will be."""

    def __init__(
        self,
        view: View,
        calendars: Sequence[Calendar],
        per_node: Sequence[int],
        on_pool: Sequence[Sequence[Build | None]],
        longest_ns: float,
    ) -> None:
        self._view = view
        self._calendars = calendars  # by pool id
        self.per_node: Final = per_node  # lanes of a node, by pool id
        self._owned = [[b for b in row if b is not None and b.own is not None] for row in on_pool]
        self._longest_ns = longest_ns
        self._counted: set[int] = set()  # node ids
        self._nodes = [0 for _ in per_node]  # of those, by pool id
        # By pool id: the names of the nodes that count, in the order that all gateways know.
        self._names: list[list[str]] = [[] for _ in per_node]
        self._starts: dict[int, _Start] = {}  # by instance id
        # By node id: the predicted ends of its starts.
        self._node_starts_ns: dict[int, list[int]] = {}
        self._turn_ends_ns: dict[int, int] = {}  # by instance id
        self._ready_ns: dict[int, int] = {}  # by instance id: of those that start for a batch
        self._last_turn_ends_ns: dict[int, int] = {}  # by node id: of what was started there last
        # By node id: the predicted end of what was sent last, and the use of its lanes by all that.
        self._ends_ns: dict[int, int] = {}
        self._uses: dict[int, OfferedLoad] = {}
        memories_ns = [[b.load.memory_ns for b in row if b is not None] for row in on_pool]
        self._memories_ns = [max(row, default=1) for row in memories_ns]  # by pool id
        # By variant id: predicted ends of the starts of its instances, ascending.
        self._start_ends_ns: list[list[int]] = [[] for _ in view.app.variants]

    def node_count(self, pool_id: int) -> int:
        """Number of nodes of a pool that count, those included that start something."""
        return self._nodes[pool_id]

    def is_among_last(self, node: Node, count: int) -> bool:
        """Whether a node is among so many nodes of its pool that come last for every gateway."""
        names = self._names[node.pool.id]
        return bisect_left(names, node.name) >= len(names) - count

    def lane_in_ns(self, instance: Instance) -> int:
        """Time until the node of an instance has a lane that starts nothing; 0 if it has one."""
        node = instance.node
        ends_ns = None if node is None else self._node_starts_ns.get(node.id)
        if not ends_ns or len(ends_ns) < self.per_node[instance.pool.id]:
            return 0
        return max(0, min(ends_ns) - self._view.now_ns)

    def end_ns(self, node: Node) -> int:
        """When what was sent to a node last is predicted to end."""
        return self._ends_ns.get(node.id, 0)

    def on_sent(self, node: Node, end_ns: int) -> None:
        """A batch was sent to a node, with its predicted end."""
        self._ends_ns[node.id] = end_ns
        use = self._uses.get(node.id)
        if use is None:
            memory_ns = self._memories_ns[node.pool.id]
            use = self._uses[node.id] = OfferedLoad(memory_ns, 0)
        use.observe(self._view.now_ns, end_ns - self._view.now_ns)

    def turn_end_ns(self, node: Node) -> int:
        """Until when what was started on a node last should stay to be worth its start."""
        return self._last_turn_ends_ns.get(node.id, 0)

    def eviction_order(self, instance: Instance) -> tuple[int, float]:
        """The key by which instances of a node are evicted, the smallest first.

        First that whose turn is over, or is over first; then what was not used for longest,
        relative to the time that it takes to load each byte of it again. By the time of its last
        use alone, what takes seconds to load would go as soon as what takes milliseconds.
        """
        turn_ns = self._turn_ends_ns.get(instance.id, 0) - self._view.now_ns
        idle_ns = self._view.now_ns - instance.last_used_ns
        size = instance.variant.profile.memory_bytes
        return max(0, turn_ns), -idle_ns * size / max(1, time_to_reload_ns(instance))

    def on_started_by(self, node: Node, build: Build, start_ns: int) -> None:
        """A batch was sent to a node that starts its build first: the lane is busy all the time."""
        instance = node.instances.get(build.variant.id)
        if instance is not None:
            self._ready_ns[instance.id] = self._view.now_ns + start_ns
            self._begin_turn(instance, start_ns)

    def _begin_turn(self, instance: Instance, start_ns: int) -> None:
        turn_end_ns = self._view.now_ns + (1 + TURN_STARTS) * start_ns
        self._turn_ends_ns[instance.id] = turn_end_ns
        if instance.node is not None:
            self._last_turn_ends_ns[instance.node.id] = turn_end_ns

    def use(self, node: Node) -> float:
        """The lanes of a node that were in use lately."""
        use = self._uses.get(node.id)
        return 0.0 if use is None else use.erlangs(self._view.now_ns)

    def start_end_ns(self, instance: Instance) -> int | None:
        """When the start of an instance is predicted to end; None if that is not known."""
        start = self._starts.get(instance.id)
        return self._ready_ns.get(instance.id) if start is None else start.end_ns

    def late_starts(self, variant_id: int, at_ns: int) -> int:
        """Number of instances of a variant whose starts end only after a time."""
        ends_ns = self._start_ends_ns[variant_id]
        if not ends_ns or ends_ns[-1] <= at_ns:
            return 0
        return len(ends_ns) - bisect_right(ends_ns, at_ns)

    def on_node_joined(self, node: Node) -> None:
        """Count a node that is always there."""
        if not node.pool.is_elastic:
            self._count(node)

    def on_start(self, instance: Instance) -> None:
        """An instance is being started, on a node that is up or has to be rented first."""
        node = instance.node
        if node is None:  # which one is not known yet
            return
        pool, calendar = node.pool, self._calendars[node.pool.id]
        start_ns, boots = instance.variant.profile.cold_start_ns, _boots(node)
        if boots:
            start_ns += pool.boot_ns
        start = _Start(node.id, self._view.now_ns + start_ns)
        is_long = start_ns > self._longest_ns
        if boots and is_long:
            return
        if not boots and is_long and calendar.lanes > 0:
            # The time of a lane is counted up to its end, beyond every deadline if that is later.
            # More starts than lanes wait for each other: the pool has no lane less for those.
            start.missing_lanes = 1
            calendar.resize(calendar.lanes - 1)
        elif not boots:
            start.busy_lanes = 1
        elif node.id not in self._counted:
            self._count(node)
            start.busy_lanes, start.own_lanes = self.per_node[pool.id], True
        self._occupy(node.pool.id, start)
        self._starts[instance.id] = start
        self._node_starts_ns.setdefault(node.id, []).append(start.end_ns)
        self._begin_turn(instance, start_ns)
        insort(self._start_ends_ns[instance.variant.id], start.end_ns)

    def on_instance_started(self, instance: Instance) -> None:
        """An instance is ready: so is its node."""
        self._end_start(instance)
        if instance.node is not None and instance.pool.is_elastic:
            self._count(instance.node)

    def on_instance_gone(self, instance: Instance) -> None:
        """Stop counting a rented node without instances."""
        self._end_start(instance)
        self._turn_ends_ns.pop(instance.id, None)
        self._ready_ns.pop(instance.id, None)
        node = instance.node
        if node is not None and node.pool.is_elastic and not node.instances:
            self.on_node_lost(node)

    def on_node_lost(self, node: Node) -> None:
        """Stop counting a node."""
        if node.id in self._counted:
            self._counted.remove(node.id)
            self._names[node.pool.id].remove(node.name)
            self._resize(node.pool.id, -1)

    def _count(self, node: Node) -> None:
        if node.id not in self._counted:
            self._counted.add(node.id)
            insort(self._names[node.pool.id], node.name)
            self._resize(node.pool.id, 1)

    def _resize(self, pool_id: int, nodes: int) -> None:
        """A pool has so many nodes more, or less."""
        self._nodes[pool_id] += nodes
        calendar = self._calendars[pool_id]
        calendar.resize(calendar.lanes + nodes * self.per_node[pool_id])
        for build in self._owned[pool_id]:
            assert build.own is not None
            build.own.resize(build.own.lanes + nodes * build.per_node)

    def _occupy(self, pool_id: int, start: _Start) -> None:
        self._calendars[pool_id].occupy(start.end_ns, start.busy_lanes)
        if start.own_lanes:
            for build in self._owned[pool_id]:
                assert build.own is not None
                build.own.occupy(start.end_ns, build.per_node)

    def _end_start(self, instance: Instance) -> None:
        start = self._starts.pop(instance.id, None)
        if start is None:
            return
        ends_ns = self._start_ends_ns[instance.variant.id]
        del ends_ns[bisect_left(ends_ns, start.end_ns)]
        self._node_starts_ns[start.node_id].remove(start.end_ns)
        calendar = self._calendars[instance.pool.id]
        calendar.resize(calendar.lanes + start.missing_lanes)
        calendar.release(start.end_ns, start.busy_lanes)
        if start.own_lanes:
            for build in self._owned[instance.pool.id]:
                assert build.own is not None
                build.own.release(start.end_ns, build.per_node)


def _boots(node: Node) -> bool:
    """Whether a rented node is not up yet: none of its instances is ready."""
    return node.pool.is_elastic and all(
        instance.state == INSTANCE_STARTING for instance in node.instances.values()
    )


@final
class _PromisedStart:
    """A start of a build that has not begun, as it is booked."""

    __slots__ = ("begin_ns", "bucket", "build", "holder_id", "time_ns")

    def __init__(
        self, build: Build, begin_ns: int, bucket: int, time_ns: int, holder_id: int
    ) -> None:
        self.build = build
        self.begin_ns = begin_ns  # at the latest
        self.bucket = bucket  # of that, in the calendar of its pool
        self.time_ns = time_ns
        self.holder_id = holder_id  # the instance that is to be evicted before; -1: there is none


@final
class PromisedStarts:
    """Books the starts that promises need, until they begin or nobody waits for them.

    Only on pools whose nodes cannot hold all functions at once. A request for a function that no
    node holds is promised with the time of a start. That start takes a lane for as long, and the
    place of a function that is loaded now. So the lane's time is booked in the calendar, and who
    would lose its place is promised to be done before the start begins, or with one of its own.
    """

    def __init__(self, view: View, nodes: NodeLanes) -> None:
        self._view = view
        self._nodes = nodes
        # By pool id, by build id.
        self._booked: list[dict[int, _PromisedStart]] = [{} for _ in view.app.pools]

    def book(self, build: Build, begin_ns: int, time_ns: int) -> None:
        """A promise was made with a start, which must begin by then; one start is for all."""
        known = self._of_pool(build.pool.id).get(build.id)
        bucket = build.calendar.bucket(self._view.now_ns, begin_ns)
        if known is None:
            holder = self._holder(build)
            holder_id = -1 if holder is None else holder.id
            start = _PromisedStart(build, begin_ns, bucket, time_ns, holder_id)
            self._booked[build.pool.id][build.id] = start
            build.calendar.add(bucket, time_ns, 0.0)
        elif begin_ns < known.begin_ns:
            build.calendar.add(known.bucket, -known.time_ns, 0.0)
            build.calendar.add(bucket, known.time_ns, 0.0)
            known.begin_ns, known.bucket = begin_ns, bucket

    def forget_old(self, pool_id: int) -> None:
        """Take out of the calendar what has begun, and what nobody waits for any more."""
        booked = self._booked[pool_id]
        if booked:
            for id, start in list(booked.items()):
                if self._is_over(start):
                    del booked[id]
                    start.build.calendar.add(start.bucket, -start.time_ns, 0.0)

    def ready_by_ns(self, build: Build) -> int | None:
        """When a build for which a start is booked will have started; None if none is."""
        start = self._of_pool(build.pool.id).get(build.id)
        return None if start is None else start.begin_ns + start.time_ns

    def holds_until_ns(self, build: Build) -> int:
        """Until when a node is sure to hold a build that one holds now: then others may start.

        Where several hold it, others are left. And of several nodes, the first that are free start
        what is promised.
        """
        booked = self._of_pool(build.pool.id)
        holder = self._holder(build) if booked else None
        if holder is None or holder.node is None:
            return NEVER_NS
        node, nodes, now_ns = holder.node, self._nodes, self._view.now_ns
        others = sorted((s for s in booked.values() if s.build is not build), key=_begin_ns)
        lanes_sooner = build.calendar.lanes_free_by(now_ns, nodes.end_ns(node) - 1)
        order = nodes.eviction_order(holder)
        room = node.pool.memory_bytes - node.memory_used_bytes
        for instance in node.instances.values():
            if instance.residency != ON_HOST and nodes.eviction_order(instance) < order:
                room += instance.variant.profile.memory_bytes
        for start in others[lanes_sooner // max(1, build.lanes) :]:
            room -= start.build.variant.profile.memory_bytes
            if room < 0:
                return start.begin_ns
        return NEVER_NS

    def reload_ns(self, build: Build) -> int:
        """Time to load a build again after it was evicted from the node that holds it."""
        holder = self._holder(build)
        return build.cold_start_ns if holder is None else time_to_reload_ns(holder)

    def _holder(self, build: Build) -> Instance | None:
        """The only instance that holds a build on its pool, or will; None if there are several."""
        found: Instance | None = None
        for instance in self._view.instances_of[build.variant.id].values():
            if instance.pool is build.pool and instance.residency != ON_HOST:
                if found is not None:
                    return None
                found = instance
        return found

    def _of_pool(self, pool_id: int) -> dict[int, _PromisedStart]:
        self.forget_old(pool_id)
        return self._booked[pool_id]

    def _is_over(self, start: _PromisedStart) -> bool:
        build = start.build
        return build.pending_items == 0 or any(
            instance.id != start.holder_id
            and instance.pool is build.pool
            and instance.residency != ON_HOST
            for instance in self._view.instances_of[build.variant.id].values()
        )


def _begin_ns(start: _PromisedStart) -> int:
    return start.begin_ns


@final
class GatewayShare:
    """Sets the part of the calendars of one pool, by what is offered to the pool here."""

    def __init__(self, calendar: Calendar, own: Sequence[Calendar], objective_ns: float) -> None:
        self._calendar = calendar
        self._own = own  # of builds with fewer lanes than the pool
        self._offered = OfferedLoad(int(GATEWAY_MEMORY * objective_ns), int(objective_ns) // 10)
        slow_ns, prior_ns = (
            int(GATEWAY_MEMORY_SLOW * objective_ns),
            int(GATEWAY_MEMORY * objective_ns),
        )
        self._offered_slow = OfferedLoad(slow_ns, prior_ns)
        self._admitted_slow = OfferedLoad(slow_ns, prior_ns)
        self._best_effort = OfferedLoad(slow_ns, prior_ns)  # what was sent of it
        self._work_ns = 0.0  # mean of what an arrival adds
        self._until_review = self._arrivals = 0
        self._was_contended = False  # when the pool was divided last
        self._caution = 1.0  # divides the part in overload, learnt from promises that were broken

    def observe(self, now_ns: int, work_ns: float, gateways: int) -> None:
        """Record work with an objective that was offered to the pool."""
        self._offered.observe(now_ns, work_ns)
        self._offered_slow.observe(now_ns, work_ns)
        self._work_ns += (work_ns - self._work_ns) * (GATEWAY_STEP if self._arrivals else 1.0)
        self._until_review -= 1
        if self._until_review < 0:
            self._arrivals += 1
            self._until_review = min(GATEWAY_REVIEW, self._arrivals // 8)
            self.divide(now_ns, gateways)

    def on_admitted(self, now_ns: int, work_ns: float) -> None:
        """Record that work with an objective was admitted."""
        self._admitted_slow.observe(now_ns, work_ns)

    def on_best_effort_sent(self, now_ns: int, work_ns: float) -> None:
        """Record that work without an objective was sent: other gateways send as much."""
        self._best_effort.observe(now_ns, work_ns)

    def on_settled(self, allowed: float, *, was_kept: bool) -> None:
        """Learn from what became of a promise: so many may be broken."""
        if not self._was_contended:
            return
        step = -CAUTION_STEP * allowed if was_kept else CAUTION_STEP
        self._caution = min(CAUTION_MAX, max(1.0, self._caution + step))

    def is_contended(self, now_ns: int, gateways: int) -> bool:
        """Whether what all gateways together are asked to promise is more than there is."""
        return self._erlangs(now_ns) * gateways >= self._calendar.lanes

    @property
    def has_promises(self) -> bool:
        """Whether anything was to be promised so far."""
        return self._arrivals > 0

    def _erlangs(self, now_ns: int) -> float:
        """The offered load: the recent one only if it differs from the slow one beyond chance.

        A gateway sees few arrivals. If it took two at once for twice the load, and the others for
        as busy, it would refuse the second.
        """
        recent, slow = self._offered.erlangs(now_ns), self._offered_slow.erlangs(now_ns)
        # Of Poisson arrivals: of the first few, the load is hardly known.
        variance = max(slow, recent) * self._work_ns / max(1.0, self._offered.seen_ns(now_ns))
        return slow if abs(recent - slow) <= GATEWAY_DEVIATIONS * sqrt(variance) else recent

    def divide(self, now_ns: int, gateways: int) -> None:
        """Divide the pool among so many gateways."""
        load = self._erlangs(now_ns) / max(1, self._calendar.lanes)
        self._was_contended = load * gateways >= 1.0
        if self._was_contended:
            offered_slow = max(1e-9, self._offered_slow.erlangs(now_ns))
            load *= min(1.0, self._admitted_slow.erlangs(now_ns) / offered_slow)
            load += self._best_effort.erlangs(now_ns) / max(1, self._calendar.lanes)
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
