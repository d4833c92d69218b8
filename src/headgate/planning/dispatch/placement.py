"""Placement: on which node a batch runs, and which nodes hold which functions.

A free node that holds the weights comes first. A cold start is worth its time where the function
has fewer nodes than its share of the load, and where it needs no eviction or evicts a function that
has more nodes than its share. A start takes a node from what it holds, for seconds where weights
are large: one more node for a function that has one is paid for with work that was refused for want
of it (`Placement.pays`).

Nodes that other gateways keep busy get no batch: see `busy_nodes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from random import Random
from typing import final

from headgate.core.model import Compute, Variant
from headgate.core.records import Instance, Node, Task
from headgate.core.states import INSTANCE_STARTING, ON_HOST
from headgate.core.view import View, has_free_room, is_evictable
from headgate.planning.constants import CANDIDATES_MAX, PRESTART_LOAD, SPARE_LOAD
from headgate.planning.dispatch.busy_nodes import BusyNodes
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.node_room import time_to_reload_ns


def has_room(view: View, node: Node, variant: Variant, shape_id: int = 0) -> bool:
    """Whether a node could start the first instance of a variant without evicting anything."""
    return (
        variant.id not in node.instances
        and has_free_room(node, variant, shape_id)
        and not view.is_barred(node, variant)
    )


@final
class Placement:
    """Chooses nodes for builds."""

    def __init__(self, view: View, builds: Builds, busy: BusyNodes, rng: Random) -> None:
        self._view = view
        self._builds = builds
        self.busy = busy
        self._rng = rng
        rows = [[build for build in row if build is not None] for row in builds.on_pool]
        # By pool id: the builds of which a node that joins starts the first instance, or more.
        self._prewarmed = [[build for build in row if self._prewarm_nodes(build)] for row in rows]
        self._replicated = [[build for build in row if build.replicas > 1] for row in rows]
        self._missing: dict[int, Build] = {}  # by id: those that wait for a node to start them
        # By build id: work that was refused since it was started last.
        self._missed_ns = [0.0 for _ in builds.all]
        # By function id: the builds that may be started in advance.
        self.prestarted = [
            [build for build in row if _is_prestarted(build)] for row in builds.of_function
        ]

    def _can_take(self, node: Node, build: Build) -> bool:
        """Whether a free node can begin a batch of a build now, in its smallest shape at least."""
        if self.busy.allowed and self.busy.is_held_back(node):
            return False
        if build.replicas > 1 and self._awaits_replica(node, build):
            return False
        if build.shape_ids[0] == 0:
            return self._view.can_take(node, build.function_id)
        return self._view.fits(node, build.variant, build.shape_ids[0])

    def warm_node(self, build: Build) -> Node | None:
        """A free node that holds the weights of a build and can take a batch.

        One of several gateways picks it at random: all would ask the same ones first otherwise.
        """
        if self._view.gateways > 1:
            return self._random_warm_node(build)
        view, free = self._view, self._view.free_by_pool[build.pool.id]
        instances = view.instances_of[build.variant.id]
        if len(instances) < len(free):
            best: Node | None = None
            for instance in instances.values():
                node = instance.node
                if (
                    node is not None
                    and node.id in free
                    and _can_run_soon(instance)
                    and node.running < self._builds.lanes_on(node, build)
                    and self._can_take(node, build)
                    and (best is None or node.running < best.running)
                ):
                    best = node
                    if node.running == 0:
                        break
            return best
        best = None
        for node in free.values():
            if (best is None or node.running < best.running) and self._is_warm(node, build):
                best = node
                if node.running == 0:
                    break
        return best

    def _is_warm(self, node: Node, build: Build) -> bool:
        """Whether a free node holds the weights of a build and can take a batch."""
        held = node.instances.get(build.variant.id)
        return (
            held is not None
            and _can_run_soon(held)
            and node.running < self._builds.lanes_on(node, build)
            and self._can_take(node, build)
        )

    def _random_warm_node(self, build: Build) -> Node | None:
        """Of the free nodes that hold a build, one of those with the fewest batches of ours.

        What takes longer than others can wait goes to the first ones, and leaves the last.
        """
        best: list[Node] = []
        for node in self._view.free_by_pool[build.pool.id].values():
            if (not best or node.running <= best[0].running) and self._is_warm(node, build):
                if best and node.running < best[0].running:
                    best.clear()
                best.append(node)
        if best and self._is_long(build):
            return min(best, key=_name)
        return self._rng.choice(best) if best else None

    def _is_long(self, build: Build) -> bool:
        """Whether a batch of a build takes longer than some objective of its pool."""
        row = self._builds.on_pool[build.pool.id]
        return any(b is not None and b.window_ns < build.lane_ns(1) for b in row)

    def node_with_room(self, build: Build, task: Task, shape_id: int, offered: Node) -> Node | None:
        """A free node that holds a build and has room for a batch in a shape.

        First the one that has the task's input, where moving it takes time; then the one with the
        least compute left, which keeps room together on others.
        """
        for node in self._free_nodes_with_input(build, task):
            if self._has_room_for(node, build, shape_id):
                return node
        free = self._view.free_by_pool[build.pool.id]
        best = offered if self._has_room_for(offered, build, shape_id) else None
        for node in islice(free.values(), CANDIDATES_MAX):
            if (best is None or _compute_used(node) > _compute_used(best)) and self._has_room_for(
                node, build, shape_id
            ):
                best = node
        return best

    def _free_nodes_with_input(self, build: Build, task: Task) -> Iterator[Node]:
        """The free nodes on which stages before a task ran, if moving their outputs takes time."""
        if build.pool.bytes_per_s > 0.0:
            free = self._view.free_by_pool[build.pool.id]
            for index in task.stage.after:
                node_id = task.request.tasks[index].node_id
                if node_id is not None and node_id in free:
                    yield free[node_id]

    def _has_room_for(self, node: Node, build: Build, shape_id: int) -> bool:
        """Whether a free node that holds a build can begin a batch in a shape now."""
        held = node.instances.get(build.variant.id)
        return (
            held is not None
            and not self.busy.is_held_back(node)
            and held.state != INSTANCE_STARTING
            and held.residency != ON_HOST
            and not (build.replicas > 1 and self._awaits_replica(node, build))
            and self._view.fits(node, build.variant, shape_id)
        )

    def _awaits_replica(self, node: Node, build: Build) -> bool:
        """Whether those instances of a build on a node that have started are full.

        A batch should wait for one of them rather than for one that starts.
        """
        ready = [
            i for i in node.by_variant.get(build.variant.id, ()) if i.state != INSTANCE_STARTING
        ]
        return bool(ready) and all(i.running >= build.variant.concurrency for i in ready)

    def wants_replica(self, node: Node, build: Build) -> bool:
        """Whether a node should start one more instance of a build that it holds.

        It should if those that it holds are full, or will be with what waits; and if that takes
        nothing from others. One slot stays free of starts that take time.
        """
        held = node.by_variant.get(build.variant.id, ())
        if not 0 < len(held) < build.replicas or node.id not in self._view.free_nodes:
            return False
        free = sum(build.variant.concurrency - instance.running for instance in held)
        slots = node.slots - (build.cold_start_ns > 0)
        return (
            free < max(1.0, build.pending_batches / build.weight)
            and node.running < slots
            and has_free_room(node, build.variant, build.start_shape_id)
            and not self._view.is_barred(node, build.variant)
        )

    def node_for(self, build: Build, task: Task | None = None) -> Node | None:
        """The free node on which a batch of a build, of a task's if any, should run; None to wait.

        First the one that has the task's input, where moving it takes time.
        """
        if not self._view.free_by_pool[build.pool.id]:
            return None
        if task is not None:
            for near in self._free_nodes_with_input(build, task):
                if self._is_warm(near, build):
                    return near
        node = self.warm_node(build)
        return self._cold_node(build, is_urgent=self._cannot_wait(build)) if node is None else node

    def suits(self, node: Node, build: Build) -> bool:
        """Whether a node should run a build now: it holds it, or a cold start is worth it."""
        if not self._can_take(node, build):
            return False
        instance = node.instances.get(build.variant.id)
        if instance is not None and instance.residency != ON_HOST:
            return _can_run_soon(instance)
        if self.warm_node(build) is not None:
            return False
        return self._may_start(node, build)

    def is_crowded_out(self, node: Node, build: Build) -> bool:
        """Whether what runs on a node keeps a build from its first node of the pool."""
        return (
            node.running > 0
            and not self._view.can_make_room(node, build.variant, build.start_shape_id)
            and self._builds.count_instances(build) == 0
            and not self._builds.must_leave_nodes(build)
        )

    def missing_node(self, build: Build) -> Node | None:
        """The node on which to start a build that was asked for in vain.

        None if enough nodes hold it. What is refused leaves no task that would wait for a node, so
        the load is all that tells how many are missing.
        """
        if self._is_startable(build, 1):
            self._missed_ns[build.id] += build.lane_ns(1)
            node = self._spare_node(build)
            if node is None and self._builds.may_start_now(build):
                self._missing[build.id] = build
            if node is None or self._has_room(node, build):
                return node
            return node if node.running == 0 and self._may_displace(node, build) else None
        if not _is_prestarted(build):
            return None
        if build.load.erlangs(self._view.now_ns) < PRESTART_LOAD:
            return None
        if not self._is_coming(build):
            self._missed_ns[build.id] += build.lane_ns(1)
        return self._paid_node(build)

    def take_missing(self, node: Node) -> Build | None:
        """A build that was asked for in vain, for no node could start it, if this one has room.

        Best effort that keeps all nodes busy would keep it from its first node for ever. Where
        others would have to make room, they take turns with what is promised.
        """
        if not self._missing:
            return None
        for build in list(islice(self._missing.values(), CANDIDATES_MAX)):
            if not self._is_startable(build, 1):
                del self._missing[build.id]
            elif (
                build.pool is node.pool and self._has_room(node, build) and self.suits(node, build)
            ):
                return self._missing.pop(build.id)
        return None

    def prestart_node(self, build: Build, *, is_awaited: bool) -> Node | None:
        """The node on which to start a build of `prestarted`; None if that is not worth it.

        It is if a task waits for a node that holds the build (`is_awaited`), or for the build's
        load; in the latter case one node stays free. What a start takes from others is paid.
        """
        free = self._view.free_by_pool[build.pool.id]
        if not is_awaited:
            load = build.load.erlangs(self._view.now_ns)
            if len(free) <= 1 or load < PRESTART_LOAD:
                return None
        return self._paid_node(build)

    def _paid_node(self, build: Build) -> Node | None:
        """A node on which to start a build once more, if that is paid for."""
        view, builds = self._view, self._builds
        if not view.free_by_pool[build.pool.id] or not builds.wants_instance(build):
            return None
        if not self._is_startable(build, builds.nodes.node_count(build.pool.id)):
            return None
        node = self._spare_node(build)
        return node if node is not None and self.pays(node, build) else None

    def _is_coming(self, build: Build) -> bool:
        """Whether every node that holds a build is still starting it, and they are enough."""
        if self._builds.ready_in_ns(build) == 0:
            return False
        load = build.load.erlangs(self._view.now_ns)
        return load <= SPARE_LOAD * self._builds.lanes_of(build)

    def pays(self, node: Node, build: Build) -> bool:
        """Whether it is worth its time to start a build on one more node; if so, it is paid for.

        A start takes a lane for which what the node holds is wanted. It is worth that once as much
        work of the build was refused for want of it: at most twice as much is lost as by whoever
        knew what comes (ski rental).
        """
        if build.pool.is_elastic:
            return True  # plans rent another node for what lacks one
        if len(self._view.free_by_pool[node.pool.id]) <= 1 and self._is_coming(build):
            return False  # it may be all that is left to a function which no node holds
        displaced_ns = self._displaced(node) * build.cold_start_ns
        if displaced_ns > self._missed_ns[build.id]:
            return False
        self._missed_ns[build.id] = 0.0
        return True

    def _may_displace(self, node: Node, build: Build) -> bool:
        """Whether a build may take the place of others on a node, for what was refused.

        What a node has loaded stays for some times as long as its start took. Functions that
        exclude each other would be loaded in turn otherwise, and none would have time to run.
        """
        return self._view.now_ns >= self._builds.nodes.turn_end_ns(node) and self.pays(node, build)

    def _displaced(self, node: Node) -> float:
        """The part of a lane of a node that a start takes from what is wanted there.

        That is what does not fit the other lanes: of what ran there lately or, if that is more, of
        what is asked of the functions that it holds, for it may hold them only since now.
        """
        asked, now_ns, beside = 0.0, self._view.now_ns, self._builds.on_pool[node.pool.id]
        for instance in islice(node.instances.values(), CANDIDATES_MAX):
            build = beside[instance.variant.function_id]
            if build is not None and instance.residency != ON_HOST:
                asked += build.load.erlangs(now_ns) / max(1, self._builds.count_instances(build))
        lanes = max(asked, self._builds.nodes.use(node))
        return min(1.0, max(0.0, lanes - (self._builds.nodes.per_node[node.pool.id] - 1)))

    def rentable_node(self, build: Build) -> Node | None:
        """A node to rent for a build, one that is rented already if possible; None if none is."""
        nodes = self._view.free_by_pool[build.pool.id].values()
        fitting = [node for node in nodes if self._has_room(node, build)]
        return min(fitting, key=lambda node: not node.instances, default=None)

    def to_prewarm(self, node: Node) -> Build | None:
        """The build that a node which has joined should start next; None if it has enough.

        First one instance of every build of which fewer nodes than declared have one, then as many
        more as the node can use.
        """
        # Elastic pools of several gateways: the plan orders instances, and a Broker gives each one
        # a node of its own.
        if not (node.pool.is_elastic and self._view.gateways > 1):
            for build in self._prewarmed[node.pool.id]:
                is_missing = self._builds.count_instances(build) < self._prewarm_nodes(build)
                if is_missing and self._has_room(node, build):
                    return build
        for build in self._replicated[node.pool.id]:
            held = node.by_variant.get(build.variant.id, ())
            if (
                0 < len(held) < build.replicas
                and node.running < node.slots
                and has_free_room(node, build.variant, build.start_shape_id)
            ):
                return build
        return None

    def _has_room(self, node: Node, build: Build) -> bool:
        return has_room(self._view, node, build.variant, build.start_shape_id)

    def _prewarm_nodes(self, build: Build) -> int:
        return self._view.app.functions[build.function_id].prewarm_nodes

    def _is_startable(self, build: Build, below: int) -> bool:
        """Whether fewer nodes than `below` hold a build, and it can be loaded."""
        is_broken = build.variant.id in self._view.load_failures
        return not is_broken and self._builds.count_instances(build) < below

    def _spare_node(self, build: Build) -> Node | None:
        """A node on which to start a build ahead of need.

        It has a slot more than the start takes, or does nothing: what it holds can go on there.
        """
        return self._cold_node(build, is_urgent=True, is_ahead=True)

    def _cannot_wait(self, build: Build) -> bool:
        """Whether the backlog of a build takes longer than a cold start."""
        lanes = self._builds.lanes_of(build)
        return lanes == 0 or build.pending_ns > lanes * build.cold_start_ns

    def _cold_node(self, build: Build, *, is_urgent: bool, is_ahead: bool = False) -> Node | None:
        """A free node on which to start a build; None if it should wait for one that holds it.

        An urgent task cannot wait: the build is started if that takes nothing from others.
        """
        roomy: Node | None = None
        fallback: Node | None = None
        least = inf  # of what a start displaces on a node with room
        may_take_room: bool | None = None  # asked once: it is the same for all nodes with room
        for node in islice(self._without(build), CANDIDATES_MAX):
            if is_ahead and (
                node.running >= max(1, node.slots - 1)
                or build.variant.id in node.instances
                or self._keeps_others_waiting(node, build)
            ):
                continue
            if _is_left_to_plan(node, build) or not self._can_take(node, build):
                continue
            if not self._has_room(node, build):
                if fallback is None and self._may_evict(node, build):
                    fallback = node
                continue
            if may_take_room is None:
                may_take_room = self._may_take_room(build, is_urgent=is_urgent)
            if may_take_room and (displaced := self._displaced(node)) < least:
                if displaced == 0.0:
                    return node
                roomy, least = node, displaced
        return fallback if roomy is None else roomy

    def _without(self, build: Build) -> Iterator[Node]:
        """The nodes of its pool that do not hold a build and have a lane free for it.

        Where a node has more slots than lanes, it counts as free whatever holds its lanes.
        """
        for node in self._view.free_by_pool[build.pool.id].values():
            holds = build.variant.id in node.instances and not self._is_on_host(node, build)
            if not holds and node.running < self._builds.lanes_on(node, build):
                yield node

    def _keeps_others_waiting(self, node: Node, build: Build) -> bool:
        """Whether one more start of a build takes longer than what a node holds can wait."""
        has_node = self._builds.count_instances(build) > 0
        return has_node and self._builds.holders_wait_ns(node, build) < build.cold_start_ns

    def _may_start(self, node: Node, build: Build) -> bool:
        """Whether a build may be started on a node that could take it."""
        if _is_left_to_plan(node, build):
            return False
        if self._has_room(node, build):
            return self._may_take_room(build, is_urgent=self._cannot_wait(build))
        return self._may_evict(node, build)

    def _may_take_room(self, build: Build, *, is_urgent: bool) -> bool:
        """Whether a build may be started on a node that has room for it."""
        if is_urgent or self._has_no_node(build):
            return True
        return self._builds.wants_instance(build) and not self._is_wait_short(build)

    def _may_evict(self, node: Node, build: Build) -> bool:
        """Whether a build may be started on a node where others have to make room."""
        if self._has_no_node(build):
            return True
        if build.pool.is_elastic:
            return False  # plans divide rented nodes: they would start at once what is evicted here
        is_free = build.cold_start_ns == 0 and build.pool.compute == Compute.RESIDENT
        may_have_more = is_free or self._builds.wants_instance(build)
        return may_have_more and self._has_surplus(node, build)

    def _has_no_node(self, build: Build) -> bool:
        """Whether no node holds a build, and one should."""
        builds = self._builds
        return builds.count_instances(build) == 0 and not builds.must_leave_nodes(build)

    def _is_wait_short(self, build: Build) -> bool:
        """Whether a batch on a node that holds the build would be done before a cold start."""
        return self._builds.free_in_ns(build) + build.lane_ns(1) < build.cold_start_ns

    def _is_on_host(self, node: Node, build: Build) -> bool:
        instance = node.instances.get(build.variant.id)
        return instance is not None and instance.residency == ON_HOST

    def _has_surplus(self, node: Node, build: Build) -> bool:
        """Whether what has nodes to spare makes enough room for a build."""
        spared = self._spared(node, build)
        if node.has_resident_compute:
            return len(spared) == sum(1 for id in node.instances if id != build.variant.id)
        return sum(i.variant.profile.memory_bytes for i in spared) >= _missing_bytes(node, build)

    def to_evict(self, node: Node, build: Build) -> list[Instance]:
        """What to evict before a build is started on a node; empty if there is room.

        First that which has nodes to spare, and then in the order of `NodeLanes.eviction_order`.
        """
        held = node.instances.get(build.variant.id)
        if held is not None and held.residency != ON_HOST:
            return []
        missing = _missing_bytes(node, build)
        if missing <= 0:
            return []
        evicted = self._spared(node, build)
        others = [i for i in self._evictable(node, build) if i not in evicted]
        evicted += sorted(others, key=self._builds.nodes.eviction_order)
        for index, instance in enumerate(evicted):
            missing -= instance.variant.profile.memory_bytes
            if missing <= 0:
                return evicted[: index + 1]
        return []

    def waiting_ns(self, node: Node, build: Build) -> float:
        """Time of a node for what is promised to those that would be evicted for a build.

        `inf` if nothing is: there is nothing to wait for.
        """
        beside, waiting_ns = self._builds.on_pool[node.pool.id], 0.0
        for instance in self.to_evict(node, build):
            other = beside[instance.variant.function_id]
            if other is not None and other.pending_items > 0:
                waiting_ns += other.pending_ns / max(1, self._builds.lanes_of(other))
        return waiting_ns or inf

    def reload_ns(self, node: Node, build: Build) -> int:
        """Time to load again what a start evicts though requests ask for it."""
        evicted = self.to_evict(node, build)
        return sum(time_to_reload_ns(i) for i in evicted if self._is_asked_for(i))

    def _is_asked_for(self, instance: Instance) -> bool:
        build = self._builds.on_pool[instance.pool.id][instance.variant.function_id]
        if build is None:
            return False
        return build.load.erlangs(self._view.now_ns) >= PRESTART_LOAD

    def spares_by_waiting(self, node: Node, build: Build) -> bool:
        """Whether what runs on a node would be loaded again sooner than what is evicted now.

        What nothing is promised to need not be loaded again.
        """
        missing, beside = _missing_bytes(node, build), self._builds.on_pool[node.pool.id]
        reload_ns = 0
        for instance in self.to_evict(node, build):
            other = beside[instance.variant.function_id]
            if other is not None and other.pending_items > 0:
                reload_ns = max(reload_ns, time_to_reload_ns(instance))
        running = [i for i in node.instances.values() if i.running > 0]
        enough = [i for i in running if i.variant.profile.memory_bytes >= missing]
        return any(time_to_reload_ns(instance) < reload_ns for instance in enough)

    def _spared(self, node: Node, build: Build) -> list[Instance]:
        """The idle instances on a node whose builds have nodes to spare."""
        spared: list[Instance] = []
        for instance in self._evictable(node, build):
            other = self._builds.on_pool[node.pool.id][instance.variant.function_id]
            is_resident = instance.pool.compute == Compute.RESIDENT
            if (
                other is None
                or (is_resident and other.cold_start_ns == 0)  # it is back at once
                or self._builds.can_spare(other, build)
            ):
                spared.append(instance)
        return spared

    def _evictable(self, node: Node, build: Build) -> list[Instance]:
        """The idle instances of other builds whose weights are on the device of a node."""
        return [
            instance
            for instance in node.instances.values()
            if instance.variant is not build.variant
            and instance.residency != ON_HOST
            and is_evictable(instance)
        ]


def _is_prestarted(build: Build) -> bool:
    """Whether to start a build before its task has a node can be worth it: a start takes time."""
    return build.cold_start_ns > 0 and build.warm_pool is None and not build.pool.is_elastic


def _name(node: Node) -> str:
    return node.name


def _missing_bytes(node: Node, build: Build) -> int:
    """Memory that a node lacks to hold a build, too."""
    return node.memory_used_bytes + build.variant.profile.memory_bytes - node.pool.memory_bytes


def _is_left_to_plan(node: Node, build: Build) -> bool:
    """Whether a node is not rented yet, or a plan may stop a build there before it is ready."""
    return node.pool.is_elastic and (not node.instances or build.pending_items == 0)


def _compute_used(node: Node) -> tuple[int, int]:
    return node.gpu_sevenths_used, node.cpu_milli_used


def _can_run_soon(instance: Instance) -> bool:
    """Whether a batch may be sent to an instance: it holds its weights, or is being started.

    A rented node that boots is not waited for: that takes far longer than a cold start.
    """
    if instance.pool.is_elastic and instance.state == INSTANCE_STARTING:
        return False
    return instance.residency != ON_HOST
