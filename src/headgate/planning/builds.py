"""Builds: a variant on the nodes of a pool, how long its batches take there, and its calendar.

The time of a batch is the profile's, at the node's concurrency limit, times the mean of recently
observed over expected times, plus the network both ways: for all of that time a batch holds a lane.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from math import inf, sqrt
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Compute, Pool, Shape, Variant
from headgate.core.records import Batch, Instance, Node, Task
from headgate.core.states import BATCH_FINISHED, INSTANCE_STARTING, ON_HOST
from headgate.core.view import View
from headgate.planning.calendar import Calendar
from headgate.planning.concurrency import KneeLimits, tightest_objectives_ns
from headgate.planning.forecast import OfferedLoad
from headgate.planning.frontier.candidates import planned_shapes
from headgate.planning.targets import FaasTarget, choose_faas_target
from headgate.planning.warm_pool import WarmPool, burst_of

_DEVIATION: Final = 0.1  # relative standard deviation of a service time before any was observed
_PRIOR: Final = 2  # observations that the profile counts for
_CLIP: Final = 4.0  # one observation counts at most as this much more or less than expected
_SURPRISE: Final = 4.0  # standard deviations
_MEMORY: Final = 20  # observations after which older ones are forgotten
_LOAD_STARTS: Final = 50  # time constant of the load of a build, in cold starts or in runs
_LOAD_RUNS: Final = 200
_LOAD_MIN: Final = 0.02  # nodes
_REVIEW: Final = 64  # arrivals between two divisions of a pool's memory
_WARM_MEMORY_NS: Final = 3_600_000_000_000  # time constant of the demand for warm instances
_SPARE_BACKLOG: Final = (
    0.3  # part of an objective that the backlog may take for a node to be spared
)
_END_CAUTION: Final = 1.0  # standard deviations that a lane is expected to be free later
_HOLDERS_MAX: Final = 16  # nodes that are asked when they will be free
_GROWTH: Final = 1.5  # batches may grow by this factor over recent ones
_BATCH_STEP: Final = 0.1  # weight of one batch in what is learnt about batches
_OVERRUN_MAX: Final = 3.0
_MIX_STEP: Final = 0.01  # weight of one batch in what is learnt about the compute that is taken
_MIX_GAIN: Final = 4.0  # 12 % more of one than of the other: it alone counts
_MIX_LEVELS: Final = 8
_KNEE_TOLERANCE: Final = 1.02
_DEFAULT_WINDOW_NS: Final = 1_000_000_000


@final
class ComputeMix:
    """Which compute limits the nodes of a pool: CPUs (1), GPUs (0), or both.

    Batches take parts of both, and a node is full when one of them is. Work is counted in the one
    of which recent batches took more.
    """

    __slots__ = ("_cpu_ns", "_gpu_ns", "cpu_part")

    def __init__(self) -> None:
        self._cpu_ns = self._gpu_ns = 0.0
        self.cpu_part = 0.5

    def observe(self, cpu_ns: float, gpu_ns: float) -> None:
        """Record what a batch takes of the CPUs and of the GPU of a node, in time of a node."""
        self._cpu_ns += _MIX_STEP * (cpu_ns - self._cpu_ns)
        self._gpu_ns += _MIX_STEP * (gpu_ns - self._gpu_ns)
        excess = (self._cpu_ns - self._gpu_ns) / max(1.0, self._cpu_ns + self._gpu_ns)
        part = min(1.0, max(0.0, 0.5 + _MIX_GAIN * excess))
        self.cpu_part = round(_MIX_LEVELS * part) / _MIX_LEVELS


@final
class Build:
    """One variant on one pool of nodes, with the work that is promised to it."""

    __slots__ = (
        "_fastest_ns",
        "_cpu_lanes",
        "_gpu_lanes",
        "_lanes_due",
        "_least_work",
        "_mix",
        "_seen",
        "_shape_times_ns",
        "_surprises",
        "_times_ns",
        "_variance",
        "_weights",
        "batch_mean",
        "calendar",
        "cold_start_ns",
        "deviation",
        "function_id",
        "id",
        "items_best",
        "items_max",
        "lanes",
        "load",
        "network_ns",
        "overrun",
        "own",
        "pending_batches",
        "pending_items",
        "pending_ns",
        "per_node",
        "pool",
        "ratio",
        "shape_id",
        "shape_ids",
        "share",
        "variant",
        "warm_pool",
        "weight",
        "window_ns",
    )

    def __init__(
        self,
        id: int,
        variant: Variant,
        pool: Pool,
        lanes: int,
        calendar: Calendar,
        warm_pool: WarmPool | None = None,
        own: Calendar | None = None,
        shape_id: int = 0,
        mix: ComputeMix | None = None,
    ) -> None:
        profile = variant.profile
        slowdown = profile.slowdown_at(lanes)
        self.id = id
        self.variant = variant
        self.function_id = variant.function_id
        self.pool = pool
        self.lanes = lanes  # batches that a node should run at once: the concurrency limit
        self.calendar = calendar
        self.per_node = min(lanes, variant.concurrency)  # of its own batches on a node
        # Where its concurrency is below the limit of the node: what is promised to it alone.
        self.own = own
        self.cold_start_ns = profile.cold_start_ns
        self.network_ns = 2 * pool.network_ns
        self.items_max = variant.items_max(shape_id)
        self._shape_times_ns = [
            [time_ns * slowdown for time_ns in times.exec_ns] for times in variant.shapes
        ]
        self._weights = [_weight(lanes, pool, times.shape) for times in variant.shapes]
        self._mix = mix or ComputeMix()  # of the pool
        self._cpu_lanes = [lanes * _cpu_share(pool, times.shape) for times in variant.shapes]
        self._gpu_lanes = [lanes * _gpu_share(pool, times.shape) for times in variant.shapes]
        # The shape that plans reckon with. Where a dispatch chooses the shape, `shape_ids` are
        # those that it chooses among, the smallest first; otherwise it is the only one.
        self.shape_id = shape_id
        self.shape_ids = [shape_id]
        if pool.compute == Compute.PER_BATCH and pool.faas is None:
            ids = [id for id, times in enumerate(variant.shapes) if pool.has_room_for(times.shape)]
            self.shape_ids = sorted(ids, key=self._weights.__getitem__) or [shape_id]
        self._times_ns = self._shape_times_ns[shape_id]
        self._fastest_ns = [
            min(times[index] for times in self._shape_times_ns if index < len(times))
            for index in range(len(self._times_ns))
        ]
        self.items_best = _knee([time_ns + self.network_ns for time_ns in self._times_ns])
        self.overrun = 1.0  # mean of the lane time of recent batches over what was booked for them
        self.batch_mean = 1.0  # items of recent batches that were formed while others waited
        self.ratio = 1.0  # mean of observed over profiled time
        self._variance = _DEVIATION**2  # of that ratio, relative to the mean
        self.deviation = _DEVIATION  # its root
        self._seen = _PRIOR
        self._surprises = 0
        self.warm_pool = warm_pool  # of a FaaS pool: its instances are the lanes; None for nodes
        memory_ns = max(_LOAD_STARTS * profile.cold_start_ns, _LOAD_RUNS * profile.exec_ns[0])
        self.load = OfferedLoad(memory_ns, 10 * profile.exec_ns[0])
        self.window_ns = 0.0  # the shortest objective of a pipeline that uses it
        self.share = 0.0  # nodes that should hold it, by its load
        # Lanes of a batch: above 1 where it takes more of a node than its part of the slots.
        self.weight = self._weights[shape_id]
        self._lanes_due = 0.0
        # By items and what limits the nodes.
        self._least_work: dict[tuple[int, float], tuple[list[float], list[int]]] = {}
        self.pending_ns = 0
        self.pending_items = 0  # promised to this build and not sent
        self.pending_batches = 0.0

    def profiled_ns(self, items: int) -> float:
        """Time of a batch by the profile alone."""
        return self._times_ns[items - 1] + self.network_ns

    def lane_ns(self, items: int) -> float:
        """Expected time for which a batch holds its lane."""
        return self._times_ns[items - 1] * self.ratio + self.network_ns

    def lane_ns_in(self, items: int, shape_id: int, z: float = 0.0) -> float:
        """The same in a shape, and `z` standard deviations more."""
        exec_ns = self._shape_times_ns[shape_id][items - 1] * self.ratio
        return exec_ns * (1.0 + z * self.deviation) + self.network_ns

    def weight_of(self, shape_id: int) -> float:
        """Lanes that a batch in a shape holds."""
        if len(self.shape_ids) == 1:
            return self._weights[shape_id]
        part = self._mix.cpu_part
        return max(1.0, part * self._cpu_lanes[shape_id] + (1.0 - part) * self._gpu_lanes[shape_id])

    def on_sent(self, items: int, shape_id: int) -> None:
        """A batch was sent in a shape: learn which compute is scarce."""
        if len(self.shape_ids) > 1:
            time_ns = self.lane_ns_in(items, shape_id)
            cpu_ns, gpu_ns = (
                self._cpu_lanes[shape_id] * time_ns,
                self._gpu_lanes[shape_id] * time_ns,
            )
            self._mix.observe(cpu_ns, gpu_ns)

    def plan_within(self, items: int, window_ns: float, z: float) -> tuple[int, int] | None:
        """Size and shape of a batch that fits a window, at the least work per item; None: none.

        It has as many items as recent batches, or a little more, or less.
        """
        exec_ns = (window_ns - self.network_ns) / (self.ratio * (1.0 + z * self.deviation))
        best: tuple[int, int] | None = None
        least_ns = inf
        size = max(items, min(self.items_max, int(_GROWTH * self.batch_mean) + 1))
        while True:
            key = (size, self._mix.cpu_part)
            known = self._least_work.get(key)
            if known is None:
                known = self._least_work[key] = self._by_work(size)
            index = bisect_right(known[0], exec_ns) - 1
            if index >= 0:
                shape_id = known[1][index]
                work_ns = known[0][index] * self.weight_of(shape_id) / size
                if work_ns < least_ns:
                    best, least_ns = (size, shape_id), work_ns
            if size == items:
                return best
            size = max(items, size // 2)

    def _by_work(self, items: int) -> tuple[list[float], list[int]]:
        """Times of a batch, ascending, and the shapes that take less work than all faster ones."""
        times_ns: list[float] = []
        shape_ids: list[int] = []
        least_ns = inf
        for time_ns, shape_id in sorted(
            (self._shape_times_ns[id][items - 1], id)
            for id in self.shape_ids
            if items <= len(self._shape_times_ns[id])
        ):
            work_ns = time_ns * self.weight_of(shape_id)
            if work_ns < least_ns:
                least_ns = work_ns
                times_ns.append(time_ns)
                shape_ids.append(shape_id)
        return times_ns, shape_ids

    def cautious_ns(self, items: int, z: float) -> float:
        """The expected time of a batch and `z` standard deviations more."""
        exec_ns = self._times_ns[items - 1] * self.ratio
        return exec_ns * (1.0 + z * self.deviation) + self.network_ns

    def items_within(self, window_ns: float, z: float) -> int:
        """The largest batch worth forming whose cautious time fits a window; at least 1."""
        exec_ns = (window_ns - self.network_ns) / (self.ratio * (1.0 + z * self.deviation))
        return max(1, min(self.items_best, bisect_right(self._times_ns, exec_ns)))

    def narrowest(self) -> Calendar:
        """The calendar with the fewest lanes for this build: its own, or that of the pool."""
        return self.calendar if self.own is None else self.own

    def mean_pending_ns(self) -> float:
        """Mean time of the batches that are promised to this build; of a single item if none is."""
        if self.pending_batches > 0.5:
            return max(1.0, self.pending_ns / self.pending_batches)
        return self.lane_ns(1)

    def take_lanes(self, shape_id: int) -> int:
        """Lanes that the next batch takes: the weight, as whole numbers that average to it."""
        self._lanes_due += self.weight_of(shape_id)
        lanes = int(self._lanes_due)
        self._lanes_due -= lanes
        return lanes

    def likely_items(self, window_ns: float, z: float) -> int:
        """The batch size to plan with: what fits the window, and not far above recent batches."""
        return min(self.items_within(window_ns, z), int(_GROWTH * self.batch_mean) + 1)

    def on_formed(
        self, items: int, booked_ns: int, shape_id: int = 0, *, is_contended: bool
    ) -> None:
        """A batch was formed for which this much work was booked, before correction.

        A batch that nobody was left to join is small because few were admitted: more would have
        cost little. To learn from it would keep batches small for ever.
        """
        if is_contended or items > self.batch_mean:
            self.batch_mean += _BATCH_STEP * (items - self.batch_mean)
        ratio = 1.0
        if is_contended and booked_ns > 0:
            work_ns = self.lane_ns_in(items, shape_id) * self.weight_of(shape_id)
            ratio = min(_OVERRUN_MAX, work_ns / booked_ns)
        self.overrun += _BATCH_STEP * (ratio - self.overrun)

    def fastest_ns(self, items: int, *, as_observed: bool = False) -> float:
        """Time of a batch by the profile, or as observed if that is less, or if that is asked."""
        ratio = self.ratio if as_observed else min(1.0, self.ratio)
        return self._fastest_ns[items - 1] * ratio + self.network_ns

    def observe(self, items: int, took_ns: int, shape_id: int = 0) -> None:
        """Learn from the time of a batch; two surprises in a row make it forget what was before."""
        profiled_ns = self._shape_times_ns[shape_id][items - 1]
        ratio = (took_ns - self.network_ns) / max(1.0, profiled_ns)
        ratio = min(max(ratio, self.ratio / _CLIP), self.ratio * _CLIP)
        error = ratio - self.ratio
        is_surprise = abs(error) > _SURPRISE * self.ratio * max(self.deviation, _DEVIATION)
        self._surprises = self._surprises + 1 if is_surprise else 0
        if self._surprises >= 2:
            self._seen = _PRIOR
        self._seen = min(self._seen + 1, _MEMORY)
        step = 1.0 / self._seen
        self.ratio = max(0.01, self.ratio + step * error)
        if not is_surprise:
            self._variance += step * ((error / self.ratio) ** 2 - self._variance)
            self.deviation = sqrt(self._variance)


@final
class Builds:
    """All builds on nodes, and the calendars of their pools."""

    def __init__(self, view: View) -> None:
        app = view.app
        self._view = view
        shortest_ns, longest_ns = _windows_ns(app)
        self._longest_ns = longest_ns
        self.calendars = [Calendar(shortest_ns, longest_ns) for _ in app.pools]
        self.all: list[Build] = []
        self.of_function: list[list[Build]] = [[] for _ in app.functions]
        self.on_pool: list[list[Build | None]] = []
        limits = KneeLimits(app)
        objectives_ns = tightest_objectives_ns(app)
        shapes = planned_shapes(app)
        self._node_lanes: list[int] = []  # by pool id
        for pool in app.pools:
            row: list[Build | None] = [None for _ in app.functions]
            variants = [v for v in view.variants_by_pool[pool.id] if v is not None]
            lanes = 0 if pool.faas is not None else limits.node_limit(pool, variants)
            mix = ComputeMix()
            for function_id, variant in enumerate(view.variants_by_pool[pool.id]):
                if variant is None or pool.faas is not None:
                    continue
                own = Calendar(shortest_ns, longest_ns) if variant.concurrency < lanes else None
                shape_id = shapes.get((variant.id, pool.id), 0)
                build = Build(
                    len(self.all),
                    variant,
                    pool,
                    lanes,
                    self.calendars[pool.id],
                    None,
                    own,
                    shape_id,
                )
                self.all.append(build)
                self.of_function[function_id].append(build)
                row[function_id] = build
            self.on_pool.append(row)
            self._node_lanes.append(lanes)
            for each in row:
                if each is not None:
                    each.window_ns = float(objectives_ns[each.function_id])
        self._is_scarce = [
            _is_scarce(pool, row) for pool, row in zip(app.pools, self.on_pool, strict=True)
        ]
        self._until_review = [0 for _ in app.pools]
        for builds in self.of_function:
            builds.sort(key=lambda build: (build.pool.is_elastic, build.lane_ns(1)))
        self.faas: list[Build | None] = []  # by function id
        for function in app.functions:
            target = choose_faas_target(app, function)
            if target is None:
                self.faas.append(None)
                continue
            calendar = self.calendars[target.pool.id]  # all functions share its concurrency
            calendar.resize(target.platform.concurrency_max)
            warm_pool = WarmPool(target, burst_of(app, function), _WARM_MEMORY_NS)
            build = Build(len(self.all), target.variant, target.pool, 1, calendar, warm_pool)
            self.all.append(build)
            self.faas.append(build)
            self.of_function[function.id].append(build)
        self._ends: dict[int, tuple[Build, int, int]] = {}  # by batch id
        self._node_ends_ns: dict[int, int] = {}  # by node id: predicted end of what was sent last
        self._cold: set[int] = set()  # batches that waited for a start: their time teaches nothing
        # By instance id: calendar, predicted end, and whether it counts as a lane less.
        self._starts: dict[int, tuple[Calendar, int, bool]] = {}
        self._counted: set[int] = set()  # nodes whose lanes are in their calendar

    def observe_load(self, build: Build, work_ns: float) -> None:
        """Record work that was offered to a build, admitted or not."""
        build.load.observe(self._view.now_ns, work_ns)
        pool_id = build.pool.id
        self._until_review[pool_id] -= 1
        if self._is_scarce[pool_id] and self._until_review[pool_id] < 0:
            self._until_review[pool_id] = max(_REVIEW, len(self.on_pool[pool_id]))
            self._divide_memory(pool_id)

    def _divide_memory(self, pool_id: int) -> None:
        """Divide the nodes' memory among the builds of a pool in proportion to their loads."""
        now_ns = self._view.now_ns
        builds = [build for build in self.on_pool[pool_id] if build is not None]
        node_lanes = max(1, self._node_lanes[pool_id])
        nodes = self.calendars[pool_id].lanes / node_lanes
        loads = [build.load.erlangs(now_ns) / node_lanes for build in builds]
        used = sum(
            load * build.variant.profile.memory_bytes
            for load, build in zip(loads, builds, strict=True)
        )
        scale = nodes * builds[0].pool.memory_bytes / used if used > 0 else 0.0
        for load, build in zip(loads, builds, strict=True):
            build.share = min(nodes, max(1.0, load * scale)) if load > _LOAD_MIN else 0.0

    def count_instances(self, build: Build) -> int:
        """Number of nodes of the pool that hold a build or are starting it."""
        instances = self._view.instances_of[build.variant.id]
        pool_id = build.pool.id
        if len(build.variant.pool_ids) == 1 and not self._is_scarce[pool_id]:
            return len(instances)
        return sum(1 for i in instances.values() if i.pool.id == pool_id and i.residency != ON_HOST)

    def node_count(self, pool_id: int) -> int:
        """Number of nodes of a pool that are up."""
        return self.calendars[pool_id].lanes // max(1, self._node_lanes[pool_id])

    def start_ns(self, build: Build, node: Node) -> int:
        """Time until a build can run on a node: a load of weights, a cold start, or nothing."""
        instance = node.instances.get(build.variant.id)
        if instance is None:
            return build.cold_start_ns
        if instance.state == INSTANCE_STARTING:
            entry = self._starts.get(instance.id)
            return build.cold_start_ns if entry is None else max(1, entry[1] - self._view.now_ns)
        return build.variant.profile.swap_in_ns if instance.residency == ON_HOST else 0

    def wants_instance(self, build: Build) -> bool:
        """Whether a build should be on one more node."""
        if not self._is_scarce[build.pool.id]:
            return True
        return self.count_instances(build) + 0.5 <= build.share

    def may_start_now(self, build: Build) -> bool:
        """Whether a node could start a build without taking it from another build."""
        return not self._is_scarce[build.pool.id]

    def can_spare(self, build: Build) -> bool:
        """Whether a build may lose a node to another build."""
        count = self.count_instances(build)
        left_ns = (count - 1) * self._node_lanes[build.pool.id] * build.window_ns
        return count - 0.5 >= build.share and build.pending_ns <= _SPARE_BACKLOG * left_ns

    def free_in_ns(self, build: Build) -> int:
        """Time until a node that holds a build is free, as far as a few of them tell."""
        soonest_ns = NEVER_NS
        for instance in islice(self._view.instances_of[build.variant.id].values(), _HOLDERS_MAX):
            if instance.node is not None and instance.residency != ON_HOST:
                soonest_ns = min(soonest_ns, self._node_ends_ns.get(instance.node.id, 0))
        return max(0, soonest_ns - self._view.now_ns)

    def ready_in_ns(self, build: Build) -> int:
        """Time until some node can run a build without starting it first; 0 if one can now."""
        soonest_ns = build.cold_start_ns
        for instance in self._view.instances_of[build.variant.id].values():
            if instance.pool.id == build.pool.id and instance.residency != ON_HOST:
                if instance.state != INSTANCE_STARTING:
                    return 0
                entry = self._starts.get(instance.id)
                if entry is not None:
                    soonest_ns = min(soonest_ns, max(0, entry[1] - self._view.now_ns))
        return soonest_ns

    def lanes_of(self, build: Build) -> int:
        """Lanes on which a build can run without being started first."""
        return self.count_instances(build) * build.per_node

    def on_node_joined(self, node: Node) -> None:
        """Count the lanes of a node. A rented node counts once it has an instance."""
        if not node.pool.is_elastic:
            self._count(node)

    def on_start(self, instance: Instance) -> None:
        """An instance is being started: its node has a lane less until then."""
        node = instance.node
        if node is not None and not node.pool.is_elastic:
            calendar = self.calendars[node.pool.id]
            cold_start_ns = instance.variant.profile.cold_start_ns
            end_ns = self._view.now_ns + cold_start_ns
            # The time of a lane is counted up to its end, beyond every deadline if that is later.
            is_long = cold_start_ns > self._longest_ns
            if is_long:
                calendar.resize(calendar.lanes - 1)
            else:
                calendar.occupy(end_ns)
            self._starts[instance.id] = (calendar, end_ns, is_long)

    def _end_start(self, instance: Instance) -> None:
        entry = self._starts.pop(instance.id, None)
        if entry is not None:
            calendar, end_ns, is_long = entry
            if is_long:
                calendar.resize(calendar.lanes + 1)
            else:
                calendar.release(end_ns)

    def on_instance_started(self, instance: Instance) -> None:
        """Count a rented node whose instance is ready."""
        self._end_start(instance)
        if instance.node is not None and instance.pool.is_elastic:
            self._count(instance.node)

    def on_instance_gone(self, instance: Instance) -> None:
        """Stop counting a rented node without instances."""
        self._end_start(instance)
        node = instance.node
        if node is not None and node.pool.is_elastic and not node.instances:
            self.on_node_lost(node)

    def on_node_lost(self, node: Node) -> None:
        """Stop counting a node."""
        if node.id in self._counted:
            self._counted.remove(node.id)
            self._resize(node.pool.id, -1)

    def _count(self, node: Node) -> None:
        if node.id not in self._counted:
            self._counted.add(node.id)
            self._resize(node.pool.id, 1)

    def _resize(self, pool_id: int, nodes: int) -> None:
        """A pool has so many nodes more, or less."""
        calendar = self.calendars[pool_id]
        calendar.resize(calendar.lanes + nodes * self._node_lanes[pool_id])
        for build in self.on_pool[pool_id]:
            if build is not None and build.own is not None:
                build.own.resize(build.own.lanes + nodes * build.per_node)

    def on_sent(self, build: Build, batch: Batch, start_ns: int) -> None:
        """A batch was sent; `start_ns` is the time that its instance needs first."""
        expected_ns = build.lane_ns_in(batch.items, batch.shape_id)
        spread_ns = int(build.lane_ns_in(batch.items, batch.shape_id, 1.0) - expected_ns)
        end_ns = self._view.now_ns + int(start_ns + expected_ns + _END_CAUTION * spread_ns)
        lanes = build.take_lanes(batch.shape_id)
        build.on_sent(batch.items, batch.shape_id)
        build.calendar.occupy(end_ns, lanes, spread_ns)
        if build.warm_pool is not None:
            build.warm_pool.lanes.occupy(end_ns, 1, spread_ns)
        if build.own is not None:
            build.own.occupy(end_ns, 1, spread_ns)
        self._ends[batch.id] = (build, end_ns, lanes)
        if batch.node is not None:
            self._node_ends_ns[batch.node.id] = end_ns
        if start_ns > 0:
            self._cold.add(batch.id)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """A batch has ended: free its lane, and learn from it unless it waited for a start."""
        entry = self._ends.pop(batch.id, None)
        if entry is None:
            return
        build, end_ns, lanes = entry
        build.calendar.release(end_ns, lanes)
        if build.warm_pool is not None:
            build.warm_pool.lanes.release(end_ns)
        if build.own is not None:
            build.own.release(end_ns)
        if batch.state == BATCH_FINISHED and batch.id not in self._cold:
            build.observe(batch.items, took_ns, batch.shape_id)
        self._cold.discard(batch.id)

    def fits_call(self, task: Task) -> bool:
        """Whether a call can carry a task; its function may have no FaaS target."""
        build = self.faas[task.function.id]
        return build is None or self._view.fits_call(task, build.pool, build.variant)

    def fits_node(self, function_id: int, items: int) -> bool:
        """Whether the nodes of some pool can run so many items at once."""
        return any(
            b.warm_pool is None and items <= b.items_max for b in self.of_function[function_id]
        )

    def has_nodes(self, function_id: int, items: int) -> bool:
        """Whether there are nodes now that can run so many items of a function at once."""
        return any(
            b.warm_pool is None and items <= b.items_max and self.is_usable(b)
            for b in self.of_function[function_id]
        )

    def build_of(self, batch: Batch) -> Build:
        """The build that a batch ran on."""
        function_id = batch.variant.function_id
        build = self.on_pool[batch.pool.id][function_id] or self.faas[function_id]
        assert build is not None
        return build

    def faas_targets(self) -> list[FaasTarget | None]:
        """The FaaS target of each function, by function id."""
        return [None if b is None or b.warm_pool is None else b.warm_pool.target for b in self.faas]

    def unavailable_pools(self) -> list[int]:
        """The FaaS pools that take no calls now."""
        pools = {build.pool.id for build in self.faas if build is not None}
        return [pool_id for pool_id in sorted(pools) if not self._view.is_pool_available(pool_id)]

    def has_instance(self, build: Build) -> bool:
        """Whether a node of the pool holds the build or is starting it."""
        return self.count_instances(build) > 0

    def is_usable(self, build: Build) -> bool:
        """Whether a build can run at all: there are nodes, and it can be loaded."""
        if build.warm_pool is not None:
            return self._view.is_pool_available(build.pool.id)
        if build.calendar.lanes == 0:
            return False
        return build.variant.id not in self._view.load_failures or self.has_instance(build)


def _weight(lanes: int, pool: Pool, shape: Shape) -> float:
    """The lanes that one batch takes of a node: of its concurrency limit, its CPUs or its GPU."""
    return max(1.0, lanes * _cpu_share(pool, shape), lanes * _gpu_share(pool, shape))


def _cpu_share(pool: Pool, shape: Shape) -> float:
    return shape.cpu_milli / max(1, pool.cpu_milli)


def _gpu_share(pool: Pool, shape: Shape) -> float:
    return shape.gpu_sevenths / max(1, pool.gpu_sevenths)


def _is_scarce(pool: Pool, builds: list[Build | None]) -> bool:
    """Whether a node of the pool cannot hold all of its builds."""
    need = sum(b.variant.profile.memory_bytes for b in builds if b is not None)
    return need > pool.memory_bytes


def _knee(times_ns: list[float]) -> int:
    """The smallest batch whose time per item is within a few per cent of the best."""
    per_item_ns = [time_ns / (index + 1) for index, time_ns in enumerate(times_ns)]
    enough_ns = _KNEE_TOLERANCE * min(per_item_ns)
    return next(index + 1 for index, item_ns in enumerate(per_item_ns) if item_ns <= enough_ns)


def _windows_ns(app: App) -> tuple[float, float]:
    """The shortest time that a stage can have, and the longest objective."""
    objectives = [p for p in app.pipelines if p.slo.latency_ns < NEVER_NS]
    if not objectives:
        return _DEFAULT_WINDOW_NS, _DEFAULT_WINDOW_NS
    shortest = min(p.slo.latency_ns / len(p.stages) for p in objectives)
    return shortest, max(p.slo.latency_ns for p in objectives)
