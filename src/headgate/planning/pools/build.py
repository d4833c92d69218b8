"""A build: a variant on the nodes of a pool, how long its batches take there, and what is promised.

The time of a batch is the profile's, at the node's concurrency limit, times the mean of recently
observed over expected times, plus the network both ways: for all of that time a batch holds a lane.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf, sqrt
from typing import Final, final

from headgate.core.model import Compute, Pool, Shape, Variant
from headgate.planning.constants import (
    BATCH_GROWTH,
    BATCH_STEP,
    BATCH_TOLERANCE,
    LOAD_RUNS,
    LOAD_STARTS,
    MIX_GAIN,
    MIX_STEP,
    OBSERVATION_CLIP,
    OBSERVATIONS_KEPT,
    OVERRUN_MAX,
    PROBE_EVERY_MAX_NS,
    PROBE_GAIN,
    PROFILE_WEIGHT,
    SURPRISE,
    TIME_DEVIATION,
)
from headgate.planning.forecast import OfferedLoad
from headgate.planning.pools.calendar import Calendar
from headgate.planning.pools.node_room import compute_part, cpu_part, gpu_part
from headgate.planning.pools.warm_pool import WarmPool

_MIX_LEVELS: Final = 8


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
        self._cpu_ns += MIX_STEP * (cpu_ns - self._cpu_ns)
        self._gpu_ns += MIX_STEP * (gpu_ns - self._gpu_ns)
        excess = (self._cpu_ns - self._gpu_ns) / max(1.0, self._cpu_ns + self._gpu_ns)
        part = min(1.0, max(0.0, 0.5 + MIX_GAIN * excess))
        self.cpu_part = round(_MIX_LEVELS * part) / _MIX_LEVELS


@final
class Build:
    """One variant on one pool of nodes, with the work that is promised to it."""

    __slots__ = (
        "_cpu_lanes",
        "_dearest",
        "_fastest_ns",
        "_gpu_lanes",
        "_lanes_due",
        "_least_work",
        "_mix",
        "_seen",
        "_shape_times_ns",
        "_slowest_ns",
        "_surprises",
        "_times_ns",
        "_variance",
        "_weights",
        "batch_mean",
        "booked",
        "calendar",
        "cold_start_ns",
        "deviation",
        "function_id",
        "has_choice",
        "id",
        "items_best",
        "items_max",
        "lanes",
        "load",
        "narrowest",
        "network_ns",
        "observations",
        "open_batch",
        "overrun",
        "own",
        "pending_batches",
        "pending_items",
        "pending_ns",
        "per_node",
        "pool",
        "ratio",
        "replicas",
        "shape_id",
        "shape_ids",
        "share",
        "start_shape_id",
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
        replicas: int = 1,
    ) -> None:
        profile = variant.profile
        slowdown = profile.slowdown_at(lanes)
        self.id = id
        self.variant = variant
        self.function_id = variant.function_id
        self.pool = pool
        self.lanes = lanes  # batches that a node should run at once: the concurrency limit
        self.calendar = calendar
        self.replicas = replicas  # instances that a node should hold, if it holds any
        self.per_node = min(lanes, replicas * variant.concurrency)  # of its own batches on a node
        self.own = own  # what is promised to it alone, where its concurrency is below the limit
        self.narrowest = calendar if own is None else own  # that with the fewest lanes for it
        self.cold_start_ns = profile.cold_start_ns
        self.network_ns = 2.0 * pool.network_ns  # a float, as all that it is added to
        self.items_max = variant.items_max(shape_id)
        self._shape_times_ns = [
            [time_ns * slowdown for time_ns in times.exec_ns] for times in variant.shapes
        ]
        self._weights = [_weight(lanes, pool, times.shape) for times in variant.shapes]
        self._mix = mix or ComputeMix()  # of the pool
        self._cpu_lanes = [lanes * cpu_part(pool, times.shape) for times in variant.shapes]
        self._gpu_lanes = [lanes * gpu_part(pool, times.shape) for times in variant.shapes]
        # The shape that plans reckon with. Where a dispatch chooses the shape, `shape_ids` are
        # those that it chooses among, the smallest first; otherwise it is the only one.
        self.shape_id = shape_id
        self.shape_ids = [shape_id]
        self.start_shape_id = 0 if pool.compute == Compute.PER_BATCH else shape_id
        if pool.compute == Compute.PER_BATCH and pool.faas is None:
            ids = [id for id, times in enumerate(variant.shapes) if pool.has_room_for(times.shape)]
            self.shape_ids = sorted(ids, key=self._weights.__getitem__) or [shape_id]
        self.has_choice = len(self.shape_ids) > 1
        self._times_ns = self._shape_times_ns[shape_id]
        self._slowest_ns = max(self._times_ns)
        self._fastest_ns = self._fastest_times_ns()
        self.items_best = _knee([time_ns + self.network_ns for time_ns in self._times_ns])
        self.overrun = 1.0  # mean of the lane time of recent batches over what was booked for them
        self.batch_mean = 1.0  # items of recent batches that were formed while others waited
        self.ratio = 1.0  # mean of observed over profiled time
        self._variance = TIME_DEVIATION**2  # of that ratio, relative to the mean
        self.deviation = TIME_DEVIATION  # its root
        self._seen = PROFILE_WEIGHT
        self._surprises = self.observations = 0  # of all batches that were learnt from
        self.warm_pool = warm_pool  # of a FaaS pool: its instances are the lanes; None for nodes
        memory_ns = max(LOAD_STARTS * profile.cold_start_ns, LOAD_RUNS * profile.exec_ns[0])
        self.load = OfferedLoad(memory_ns, 10 * profile.exec_ns[0])
        self.window_ns = 0.0  # the shortest objective of a pipeline that uses it
        self.share = 0.0  # nodes that should hold it, by its load
        # Lanes of a batch: above 1 where it takes more of a node than its part of the slots.
        self.weight = self._weights[shape_id]
        self._lanes_due = 0.0
        # By items and what limits the nodes.
        self._least_work: dict[tuple[int, float], tuple[list[float], list[int]]] = {}
        self._dearest: dict[int, int] = {}  # by items: the batch in which they cost most
        self.pending_ns = self.pending_items = 0  # promised to this build and not sent
        self.pending_batches = 0.0
        self.booked: dict[Promise, None] = {}  # of the tasks that are pending
        self.open_batch: Promise | None = None  # of the first task of the batch that others join

    def _fastest_times_ns(self) -> list[float]:
        """By number of items, the time in the fastest of the shapes that a dispatch can choose."""
        tables = [self._shape_times_ns[id] for id in self.shape_ids]
        return [
            min([time_ns, *(table[index] for table in tables if index < len(table))])
            for index, time_ns in enumerate(self._times_ns)
        ]

    def profiled_ns(self, items: int) -> float:
        """Time of a batch by the profile alone."""
        return self._times_ns[items - 1] + self.network_ns

    def lane_ns(self, items: int) -> float:
        """Expected time for which a batch holds its lane."""
        return self._times_ns[items - 1] * self.ratio + self.network_ns

    def efficiency(self, items: int) -> float:
        """Time per item of a full batch, relative to that of a batch of so many items."""
        full_ns = self.lane_ns(self.items_best) * items / self.items_best
        return min(1.0, full_ns / max(1.0, self.lane_ns(items)))

    def lane_ns_in(self, items: int, shape_id: int, z: float = 0.0) -> float:
        """The same in a shape, and `z` standard deviations more."""
        factor = self.ratio * (1.0 + z * self.deviation)
        return self._shape_times_ns[shape_id][items - 1] * factor + self.network_ns

    def lane_and_spread_ns(self, items: int, shape_id: int) -> tuple[float, int]:
        """The expected time of a batch in a shape, and its standard deviation."""
        time_ns, ratio, network_ns = (
            self._shape_times_ns[shape_id][items - 1],
            self.ratio,
            self.network_ns,
        )
        expected_ns = time_ns * ratio + network_ns
        cautious_ns = time_ns * (ratio * (1.0 + self.deviation)) + network_ns
        return expected_ns, int(cautious_ns - expected_ns)

    def profiled_exec_ns(self, items: int, shape_id: int) -> float:
        """Time of a batch in a shape by the profile alone, without the network."""
        return self._shape_times_ns[shape_id][items - 1]

    def factor(self, z: float) -> float:
        """Expected over profiled execution times, and `z` standard deviations more."""
        return self.ratio * (1.0 + z * self.deviation)

    def items_in(self, shape_id: int) -> int:
        """The largest batch in a shape."""
        return len(self._shape_times_ns[shape_id])

    def weight_of(self, shape_id: int) -> float:
        """Lanes that a batch in a shape holds."""
        if not self.has_choice:
            return self._weights[shape_id]
        part = self._mix.cpu_part
        return max(1.0, part * self._cpu_lanes[shape_id] + (1.0 - part) * self._gpu_lanes[shape_id])

    def learn_mix(self, items: int, shape_id: int) -> None:
        """A batch was sent in one of several shapes: learn which compute is scarce."""
        time_ns = self.lane_ns_in(items, shape_id)
        self._mix.observe(self._cpu_lanes[shape_id] * time_ns, self._gpu_lanes[shape_id] * time_ns)

    def usd(self, items: int, *, is_cold: bool = False) -> float:
        """What a task costs at most in any of the batches that it may be in, as observed.

        In the cheapest of the shapes that a dispatch can choose. A call that is not cold finds a
        warm instance.
        """
        if self.has_choice:
            return min(
                self.usd_in(items, items, shape_id)
                for shape_id in self.shape_ids
                if items <= self.items_in(shape_id)
            )
        batch = self._dearest.get(items)
        if batch is None:
            sizes = range(items, max(items, self.items_best) + 1)
            batch = max(sizes, key=lambda size: self.usd_in(items, size, self.shape_id))
            self._dearest[items] = batch
        return self.usd_in(items, batch, self.shape_id, is_cold=is_cold)

    def usd_in(self, items: int, batch: int, shape_id: int, *, is_cold: bool = False) -> float:
        """What a task costs as a part of a batch of so many items in a shape, as observed."""
        run_ns = int(self._shape_times_ns[shape_id][batch - 1] * self.ratio)
        start_ns = self.cold_start_ns if is_cold else 0
        shape = self.variant.shapes[shape_id].shape
        return self.pool.batch_usd(shape, run_ns, start_ns) * items / batch

    def plan_within(
        self, items: int, window_ns: float, z: float, most_usd: float = inf
    ) -> tuple[int, int] | None:
        """Size and shape of a batch that fits a window, at the least work per item; None: none.

        It has as many items as recent batches, or a little more, or less. With `most_usd`, the
        task costs no more than that in it.
        """
        exec_ns = (window_ns - self.network_ns) / (self.ratio * (1.0 + z * self.deviation))
        best: tuple[int, int] | None = None
        least_ns = inf
        size = max(items, min(self.items_max, self.likely_items()))
        while True:
            key = (size, self._mix.cpu_part)
            known = self._least_work.get(key)
            if most_usd < inf:
                known = self._by_work(size, items, most_usd)
            elif known is None:
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

    def _by_work(
        self, items: int, own_items: int = 1, most_usd: float = inf
    ) -> tuple[list[float], list[int]]:
        """Times of a batch, ascending, and the shapes that take less work than all faster ones.

        With `most_usd`, only those in which a task of `own_items` costs no more than that.
        """
        times_ns: list[float] = []
        shape_ids: list[int] = []
        least_ns = inf
        for time_ns, shape_id in sorted(
            (self._shape_times_ns[id][items - 1], id)
            for id in self.shape_ids
            if items <= len(self._shape_times_ns[id])
            and (most_usd == inf or self.usd_in(own_items, items, id) <= most_usd)
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
        if self.items_best == 1:
            return 1
        exec_ns = (window_ns - self.network_ns) / (self.ratio * (1.0 + z * self.deviation))
        most = self.items_best
        if exec_ns >= self._slowest_ns:  # where time is plenty
            return most
        fitting = bisect_right(self._times_ns, exec_ns)
        return most if fitting > most else fitting or 1

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

    def joined_ns(self, items: int, size: int, ready_ns: int, latest_ns: int) -> int:
        """When a task must start that is promised now, with those that it will run with.

        Those that wait fill batches of `size`. It joins the last one, unless its first task must
        start before this one is ready, or would be late in so large a batch.
        """
        first, filled = self.open_batch, self.pending_items % size
        if first is None or filled == 0 or filled + items > size or filled + items > first.size:
            return latest_ns
        return first.start_ns if ready_ns <= first.start_ns < latest_ns else latest_ns

    def likely_items(self) -> int:
        """The largest batch size to plan with: not far above recent batches."""
        return int(BATCH_GROWTH * self.batch_mean) + 1

    def on_formed(
        self, items: int, booked_ns: int, shape_id: int = 0, *, is_contended: bool
    ) -> None:
        """A batch was formed for which this much work was booked, before correction.

        A batch that nobody was left to join is small because few were admitted: more would have
        cost little. To learn from it would keep batches small for ever.
        """
        if is_contended or items > self.batch_mean:
            self.batch_mean += BATCH_STEP * (items - self.batch_mean)
        ratio = 1.0
        if is_contended and booked_ns > 0:
            work_ns = self.lane_ns_in(items, shape_id) * self.weight_of(shape_id)
            ratio = min(OVERRUN_MAX, work_ns / booked_ns)
        self.overrun += BATCH_STEP * (ratio - self.overrun)

    def fastest_ns(self, items: int, *, as_observed: bool = False) -> float:
        """Time of a batch by the profile, or as observed if that is less, or if that is asked."""
        ratio = self.ratio
        if ratio > 1.0 and not as_observed:
            ratio = 1.0
        return self._fastest_ns[items - 1] * ratio + self.network_ns

    def observe(self, items: int, took_ns: int, shape_id: int = 0) -> None:
        """Learn from the time of a batch; two surprises in a row make it forget what was before."""
        self.observations += 1
        profiled_ns, expected = self._shape_times_ns[shape_id][items - 1], self.ratio
        ratio = (took_ns - self.network_ns) / (profiled_ns if profiled_ns > 1.0 else 1.0)
        lowest, highest = expected / OBSERVATION_CLIP, expected * OBSERVATION_CLIP
        error = (lowest if ratio < lowest else highest if ratio > highest else ratio) - expected
        deviation = self.deviation if self.deviation > TIME_DEVIATION else TIME_DEVIATION
        # By a factor: no time is shorter than expected by more than all of it, however odd it is.
        wide = 1.0 + SURPRISE * deviation
        is_surprise = ratio > expected * wide or ratio * wide < expected
        self._surprises = self._surprises + 1 if is_surprise else 0
        if self._surprises >= 2:
            self._seen = PROFILE_WEIGHT
        if self._seen < OBSERVATIONS_KEPT:
            self._seen += 1
        step = 1.0 / self._seen
        ratio = expected + step * error
        self.ratio = ratio = ratio if ratio > 0.01 else 0.01
        if not is_surprise:
            variance = self._variance
            self._variance = variance = variance + step * ((error / ratio) ** 2 - variance)
            self.deviation = sqrt(variance)


@final
class Promise:
    """What is booked for one task: on which build, until when, and how much work."""

    __slots__ = (
        "base_ns",
        "batches",
        "begin_ns",
        "bucket",
        "build",
        "due_ns",
        "input_node_id",
        "is_booked",
        "is_given_up",
        "items",
        "joined",
        "needed_start_ns",
        "order_ns",
        "own_bucket",
        "probability",
        "size",
        "start_ns",
        "usd",
        "work_ns",
    )

    def __init__(
        self,
        build: Build,
        due_ns: int,
        start_ns: int,
        begin_ns: int,
        bucket: int,
        work_ns: int,
        batches: float,
        items: int,
        size: int,
        base_ns: int,
    ) -> None:
        self.base_ns = base_ns
        self.build = build
        self.due_ns = due_ns  # the stage's deadline, less the margin
        self.start_ns = start_ns  # the latest start with which it is done by then
        # By which the tasks of a build queue: the latest start of a batch of its own. How many
        # waited when it was promised must not matter, or those that came later would go first.
        self.order_ns = start_ns
        # When its work is due: with those that it joins, who may have to start sooner.
        self.begin_ns = begin_ns
        self.bucket = bucket  # of that
        self.joined: list[Promise] | None = None  # of tasks that are due then to run with its own
        self.own_bucket = 0  # in the build's own calendar, if it has one
        self.work_ns = work_ns
        self.batches = batches
        self.items = items
        self.size = size  # of the batches that the promise reckons with
        self.needed_start_ns = 0  # of a start of its build that nobody needed before
        self.probability = 1.0  # that the task runs, as long as that is not known
        # Where the task waits because its input is there; None: nothing would have to be moved.
        self.input_node_id: int | None = None
        self.usd = 0.0  # what the task costs at most, if its request has a cost objective
        self.is_booked = False  # it is in the calendars: its task is not sent yet
        self.is_given_up = False  # its task is best effort now

    def expect(self, probability: float) -> None:
        """Its task is a stage of a cascade: until it is known to run, so much of it is booked."""
        self.work_ns = int(probability * self.work_ns)
        self.batches *= probability
        self.probability = probability

    def confirm(self, now_ns: int) -> None:
        """Its task runs: book all of it."""
        self.release()
        self.work_ns = int(self.work_ns / self.probability)
        self.batches /= self.probability
        self.probability = 1.0
        self.book(now_ns)

    def book(self, now_ns: int) -> None:
        """Enter it into the calendars of its build."""
        self.is_booked = True
        build, work_ns, batches = self.build, self.work_ns, self.batches
        build.booked[self] = None
        build.pending_items += self.items
        build.pending_ns += work_ns
        build.pending_batches += batches
        build.calendar.add(self.bucket, work_ns, batches)
        own = build.own
        if own is not None:
            self.own_bucket = own.bucket(now_ns, self.begin_ns)
            own.add(self.own_bucket, int(work_ns / build.weight), batches / build.weight)

    def release(self) -> None:
        """Take it out of them: its task is sent, or its request is settled."""
        self.is_booked = False
        build, work_ns, batches = self.build, self.work_ns, self.batches
        if build.open_batch is self:
            build.open_batch = None
        build.booked.pop(self, None)
        build.pending_items -= self.items
        build.pending_ns -= work_ns
        build.pending_batches -= batches
        build.calendar.add(self.bucket, -work_ns, -batches)
        own = build.own
        if own is not None:
            own.add(self.own_bucket, -int(work_ns / build.weight), -batches / build.weight)

    def join(self, other: Promise) -> None:
        """Another task will run with its own, and is due when that must start."""
        if self.joined is None:
            self.joined = []
        self.joined.append(other)

    def rebook_joined(self, now_ns: int) -> None:
        """Its batch is gone: what was to join it and did not is due at its own latest start."""
        if self.joined is None:
            return
        joined, self.joined = self.joined, None
        for other in joined:
            if other.is_booked:
                other.release()
                other.begin_ns = other.start_ns
                other.bucket = other.build.calendar.bucket(now_ns, other.start_ns)
                other.book(now_ns)


@final
class EstimateProbes:
    """When requests of a pipeline are tried that estimated times rule out.

    The time between two probes doubles, unless the last one showed that the estimate is wrong.
    """

    def __init__(self) -> None:
        self._next_ns = self._wait_ns = 0
        self._ratio = 0.0  # observed over estimated time, summed over the stages, at the last probe
        self._batches = 0  # observed until then

    def is_due(self, now_ns: int, least_ns: int, builds: Sequence[Build]) -> bool:
        """Whether to try a request now, and not again for `least_ns` at least.

        Batches that others have run in the meantime tell as much as a probe does.
        """
        if now_ns < self._next_ns:
            return False
        ratio = sum(build.ratio for build in builds)
        batches = sum(build.observations for build in builds)
        is_faster = ratio < (1.0 - PROBE_GAIN) * self._ratio
        is_due = is_faster or batches <= self._batches + len(builds)
        longer_ns = min(2 * self._wait_ns, PROBE_EVERY_MAX_NS)
        self._wait_ns = least_ns if is_faster else max(least_ns, longer_ns)
        self._next_ns = now_ns + self._wait_ns
        self._ratio, self._batches = ratio, batches
        return is_due


def _weight(lanes: int, pool: Pool, shape: Shape) -> float:
    """The lanes that one batch takes of a node: of its concurrency limit, its CPUs or its GPU.

    Where compute is resident, it is the instance that takes it, and not each of its batches.
    """
    if pool.compute == Compute.RESIDENT:
        return 1.0
    return max(1.0, lanes * compute_part(pool, shape))


def _knee(times_ns: list[float]) -> int:
    """The smallest batch whose time per item is within a few per cent of the best."""
    per_item_ns = [time_ns / (index + 1) for index, time_ns in enumerate(times_ns)]
    enough_ns = BATCH_TOLERANCE * min(per_item_ns)
    return next(index + 1 for index, item_ns in enumerate(per_item_ns) if item_ns <= enough_ns)
