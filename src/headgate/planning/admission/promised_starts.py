"""Starts that promises need, on pools whose nodes cannot hold all functions at once.

A request for a function that no node holds is promised with the time of a start. That start takes a
lane for as long, and the place of a function that is loaded now. Both concern everybody else: the
lane's time is booked in the calendar as long as the start has not begun, and who would lose its
place to it is promised to be done before it begins, or with a start of its own.
"""

from __future__ import annotations

from typing import final

from headgate.core.clock import NEVER_NS
from headgate.core.records import Instance
from headgate.core.states import ON_HOST
from headgate.core.view import View
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.node_room import time_to_reload_ns


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
    """Books the starts that promises need, until they begin or nobody waits for them."""

    def __init__(self, view: View, builds: Builds) -> None:
        self._view = view
        self._builds = builds
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
        node, nodes, now_ns = holder.node, self._builds.nodes, self._view.now_ns
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
        """What is booked on a pool, without what has begun and what nobody waits for."""
        booked = self._booked[pool_id]
        if booked:
            for id, start in list(booked.items()):
                if self._is_over(start):
                    del booked[id]
                    start.build.calendar.add(start.bucket, -start.time_ns, 0.0)
        return booked

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
