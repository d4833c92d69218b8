"""Admission by promise: a request is admitted if every stage fits the calendar of a pool in time.

For each stage, in topological order, a build is chosen whose calendar still balances with the stage
in it; if there is none for a stage, the request is rejected. A pipeline's time is given to its
stages in proportion to their service times and the waits found in the calendars (end-to-end
deadline assignment: Chetto 1990; Kao and Garcia-Molina 1993).

The promise is made with a margin: of every stage `z` standard deviations of its service time, and
of the whole `z` per cent of the allowed time. `z` is controlled per pipeline by what became of its
promises, so that fewer requests miss their deadline than the objective allows. One wrong profile
taxes no other pipeline.

The constants were chosen on the worlds with seeds 1 to 148 and 2000 to 2059 of `headgate fuzz
--regret`, and on those of `tests/simulation/worlds.py` with seed 1; so were those of the other
components.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App
from headgate.core.records import STAGES_MAX, Request, Task
from headgate.core.states import Outcome
from headgate.core.view import View
from headgate.planning.build import Build
from headgate.planning.builds import Builds
from headgate.planning.frontier.candidates import has_choice
from headgate.planning.shares import ClassLoad, PoolShares
from headgate.planning.spillover import Spillover

_Z_START: Final = 3.0
_Z_MAX: Final = 8.0
_Z_STEP: Final = 0.25  # of z per miss
_MISS_TARGET: Final = 0.3  # misses to aim at, relative to what the objective allows
_MARGIN_MAX: Final = 0.5  # of the slack
_SENT_MARGIN: Final = 0.33
_UNIT: Final = 0.01  # share of the allowed time that is kept per unit of z
_EQUAL_SHARE: Final = 0.25  # of a pipeline's time that is divided equally
_LEFT_TO_OTHERS: Final = 0.25  # of the calendar, by a class that has used its share
# By one that has not, but wants more: it would fill the calendar, and a class with few requests
# would find it full.
_LEFT_BY_LARGE: Final = 0.125
_PROBE_EVERY: Final = 2  # objectives between two probes of a pipeline
_PRICE_MIN: Final = 0.1  # of the time of a pool without a backlog
_DEFAULT_OBJECTIVE_NS: Final = 1e9  # where no pipeline has one, and clients claim deadlines
_TRIES: Final = 2  # divisions of a pipeline's time that are tried


@final
class Promise:
    """What is booked for one task: on which build, until when, and how much work."""

    __slots__ = (
        "base_ns",
        "batches",
        "bucket",
        "build",
        "due_ns",
        "items",
        "order_ns",
        "own_bucket",
        "size",
        "start_ns",
        "work_ns",
    )

    def __init__(
        self,
        build: Build,
        due_ns: int,
        start_ns: int,
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
        self.order_ns = start_ns  # by which tasks queue
        self.bucket = bucket
        self.own_bucket = 0  # in the build's own calendar, if it has one
        self.work_ns = work_ns
        self.batches = batches
        self.items = items
        self.size = size  # of the batches that the promise reckons with


@final
class Margins:
    """The margin of each pipeline, controlled by what became of its promises."""

    def __init__(self, view: View) -> None:
        self._allowed = [
            _MISS_TARGET * (1.0 - pipeline.slo.quantile) for pipeline in view.app.pipelines
        ]
        self.z = [_Z_START for _ in view.app.pipelines]

    def observe(self, pipeline_id: int, *, was_kept: bool) -> None:
        """Move `z` so that misses are as frequent as the objective allows."""
        missed = 0.0 if was_kept else 1.0
        z = self.z[pipeline_id] + _Z_STEP * (missed - self._allowed[pipeline_id])
        self.z[pipeline_id] = min(_Z_MAX, max(0.0, z))


@final
class AdmissionControl:
    """Makes promises, and takes them back."""

    def __init__(self, view: View, builds: Builds, spillover: Spillover) -> None:
        self._view = view
        self._builds = builds
        self.margins = Margins(view)
        self._promises: dict[int, list[Promise | None]] = {}  # by request id, by stage
        self._booked: dict[int, Promise] = {}  # by task id: what is not sent yet
        self._spillover = spillover
        # Deviations of stages add as variances, so each keeps less where there are several.
        self._depth_roots = [
            sqrt(max(p.longest_to([1.0] * len(p.stages)))) for p in view.app.pipelines
        ]
        self._has_choice = has_choice(view.app)
        self._probe_ns = [0 for _ in view.app.pipelines]
        self._shares = [PoolShares() for _ in view.app.pools]
        self._declared_ns = _declared_ns(view.app)  # by pipeline id
        self._loads: dict[int, ClassLoad] = {}  # of the request at hand, by pool
        self._isolated_ns = 0.0  # of the request at hand
        self._priority = 0  # likewise
        self.was_share_used = False  # the last request was refused to leave others their shares

    def _observe(self, request: Request) -> None:
        """Record what the request offers to each pool that it prefers."""
        view, items = self._view, request.items
        works: dict[int, float] = {}
        window_ns = float(request.deadline_ns - view.now_ns)
        for task in request.tasks:
            builds = self._builds.of_function[task.function.id]
            if builds:
                build = builds[0]
                size = max(1, build.items_within(window_ns / len(request.tasks), 0.0))
                work_ns = build.lane_ns(size) / size * items * build.weight
                self._builds.observe_load(build, work_ns)
                works[build.pool.id] = works.get(build.pool.id, 0.0) + work_ns
        self._loads.clear()
        isolated_ns = self._isolated_ns
        client = view.app.clients[request.client]
        for pool_id, work_ns in works.items():
            self._loads[pool_id] = self._shares[pool_id].observe(
                view.now_ns,
                (request.client, request.pipeline.id),
                window_ns,
                max(0.0, window_ns - isolated_ns),
                client.weight,
                work_ns,
                self._builds.calendars[pool_id].lanes,
                self._declared_ns[request.pipeline.id],
                request.priority,
            )

    def admit(self, request: Request) -> bool:
        """Promise every stage of a request, or none; whether it was promised."""
        if request.deadline_ns <= self._view.now_ns:  # nothing could serve it: it is no load
            return False
        promises = self._promise(request)
        if promises is None:
            return False
        for task, promise in zip(request.tasks, promises, strict=True):
            self._booked[task.id] = promise
        self._promises[request.id] = list(promises)
        return True

    def booked(self, task: Task) -> Promise | None:
        """The promise of a task that is not sent yet; None for best effort."""
        return self._booked.get(task.id)

    def release_task(self, task: Task) -> int:
        """A task is sent: take its booking back, and return the work that was booked."""
        promise = self._booked.pop(task.id, None)
        if promise is None:
            return 0
        self._release(promise)
        return promise.base_ns

    def give_up(self, task: Task) -> None:
        """A task cannot be in time any more: it is best effort from now on."""
        self.release_task(task)
        self._promises[task.request.id][task.id % STAGES_MAX] = None

    def confirm(self, task: Task) -> Promise | None:
        """The promise of a task that is ready now; a new one, or None, if its build cannot run it.

        Its payload is known only now, and the pool may have lost its nodes.
        """
        promise = self._booked.get(task.id)
        if promise is None or self._can_run(promise.build, task):
            return promise
        self.give_up(task)
        self._loads.clear()  # it was admitted: its class owes nothing more
        stage = task.id % STAGES_MAX
        anew = self._fit(task.request, stage, self._view.now_ns, promise.due_ns, 0.0)
        if anew is not None:
            self._add(anew)
            self._booked[task.id] = self._promises[task.request.id][stage] = anew
        return anew

    def _can_run(self, build: Build, task: Task) -> bool:
        if build.warm_pool is not None:
            return self._view.fits_call(task, build.pool, build.variant)
        return self._builds.is_usable(build)

    def promise_again(self, task: Task) -> None:
        """Book a task again that came back from an attempt without a result."""
        promises = self._promises.get(task.request.id)
        promise = None if promises is None else promises[task.id % STAGES_MAX]
        if promise is not None and task.id not in self._booked:
            self._booked[task.id] = promise
            self._add(promise)

    def on_settled(self, request: Request, outcome: int) -> None:
        """A request is settled: release what is left of it, and learn whether it was kept."""
        promises = self._promises.pop(request.id, None)
        if promises is None:
            return
        for stage in range(len(promises)):
            promise = self._booked.pop(request.id * STAGES_MAX + stage, None)
            if promise is not None:
                self._release(promise)
        if outcome in (Outcome.MET, Outcome.LATE, Outcome.EXPIRED):
            self.margins.observe(request.pipeline.id, was_kept=outcome == Outcome.MET)

    def _promise(self, request: Request) -> list[Promise] | None:
        """Book every stage of a request; None, and nothing is booked, if one cannot be in time."""
        self._isolated_ns = self.isolated_ns(request)
        self._priority = request.priority
        self.was_share_used = False
        self._observe(request)
        waits_ns = [0.0]
        if len(request.tasks) > 1:
            waits_ns = [self._wait_ns(request, index) for index in range(len(request.tasks))]
        promises: list[Promise] = []
        for _ in range(_TRIES if len(waits_ns) > 1 else 1):
            late = self._book(request, waits_ns, promises)
            if late is None:
                for promise in promises:
                    load = self._loads.get(promise.build.pool.id)
                    if load is not None:
                        load.tokens_ns -= promise.work_ns
                return promises
            for promise in promises:
                self._release(promise)
            promises.clear()
            waits_ns[late] = 2.0 * waits_ns[late] + self.fastest_ns(
                request.tasks[late].function.id, request.items
            )
        return self._probe(request)

    def _probe(self, request: Request) -> list[Promise] | None:
        """Admit a request that only what was learnt forbids, now and then, to learn it again."""
        now_ns, pipeline = self._view.now_ns, request.pipeline
        if now_ns < self._probe_ns[pipeline.id] or not self._is_idle(request):
            return None
        promises: list[Promise] = []
        for task in request.tasks:
            builds = [b for b in self._builds.of_function[task.function.id] if b.warm_pool is None]
            builds = [
                b for b in builds if self._builds.is_usable(b) and self._builds.has_instance(b)
            ]
            if not builds or request.items > builds[0].items_max:
                return None
            work_ns = int(builds[0].profiled_ns(request.items))
            bucket = builds[0].calendar.bucket(now_ns, request.deadline_ns)
            promises.append(
                Promise(
                    builds[0], request.deadline_ns, now_ns, bucket, work_ns, 1.0, request.items,
                    request.items, work_ns,
                )
            )  # fmt: skip
        times_ns = [float(promise.work_ns) for promise in promises]
        if now_ns + max(pipeline.longest_to(times_ns)) > request.deadline_ns:
            return None
        self._probe_ns[pipeline.id] = now_ns + _PROBE_EVERY * (request.deadline_ns - now_ns)
        for promise in promises:
            self._add(promise)
        return promises

    def _release(self, promise: Promise) -> None:
        """Take a booking back: its task is sent, or its request is settled."""
        build = promise.build
        build.pending_items -= promise.items
        build.pending_ns -= promise.work_ns
        build.pending_batches -= promise.batches
        build.calendar.add(promise.bucket, -promise.work_ns, -promise.batches)
        if build.own is not None:
            weight = build.weight
            work_ns, batches = int(promise.work_ns / weight), promise.batches / weight
            build.own.add(promise.own_bucket, -work_ns, -batches)

    def _add(self, promise: Promise) -> None:
        build = promise.build
        build.pending_items += promise.items
        build.pending_ns += promise.work_ns
        build.pending_batches += promise.batches
        build.calendar.add(promise.bucket, promise.work_ns, promise.batches)
        if build.own is not None:
            weight = build.weight
            work_ns, batches = int(promise.work_ns / weight), promise.batches / weight
            promise.own_bucket = build.own.bucket(self._view.now_ns, promise.start_ns)
            build.own.add(promise.own_bucket, work_ns, batches)

    def isolated_ns(self, request: Request, *, as_observed: bool = False) -> float:
        """Latency of a request on an idle system."""
        tasks, items = request.tasks, request.items
        if len(tasks) == 1:
            return self.fastest_ns(tasks[0].function.id, items, as_observed=as_observed)
        times_ns = [
            self.fastest_ns(task.function.id, items, as_observed=as_observed) for task in tasks
        ]
        return max(request.pipeline.longest_to(times_ns))

    def fastest_ns(self, function_id: int, items: int, *, as_observed: bool = False) -> float:
        """Least time of a task on any build, by the profile or as observed if that is less.

        With `as_observed`, as observed even if that is more.
        """
        best_ns = inf
        for build in self._builds.of_function[function_id]:
            time_ns = build.fastest_ns(min(items, build.items_max), as_observed=as_observed)
            best_ns = min(best_ns, time_ns)
        return 0.0 if best_ns == inf else best_ns

    def _wait_ns(self, request: Request, stage: int) -> float:
        """Estimate of the wait and service of a stage, on the build where it would end first."""
        now_ns = self._view.now_ns
        best_ns: float | None = None
        for build in self._builds.of_function[request.tasks[stage].function.id]:
            calendar = build.narrowest()
            if build.warm_pool is not None and best_ns is not None:
                continue
            if calendar.lanes == 0 or request.items > build.items_max:
                continue
            wait_ns = max(
                calendar.free_in_ns(now_ns),
                (calendar.work_ns + calendar.busy_ns(now_ns)) / calendar.lanes,
            )
            total_ns = wait_ns + build.lane_ns(request.items)
            if best_ns is None or total_ns < best_ns:
                best_ns = total_ns
        return best_ns or 0.0

    def _divide(
        self, request: Request, wanted_ns: list[float], allowed_ns: float, z: float
    ) -> list[float]:
        """Lengths of the stages, in proportion to which a pipeline's time is given to them.

        Where shapes are chosen, what a stage wants is more than it needs: first the least that each
        needs, then of what it wants as much as fits.
        """
        floor_ns = _EQUAL_SHARE * allowed_ns / len(wanted_ns)
        if not self._has_choice:
            return [wanted + floor_ns for wanted in wanted_ns]
        least_ns = [self._least_ns(task, z) for task in request.tasks]
        full_ns = [
            max(least, wanted + floor_ns) for least, wanted in zip(least_ns, wanted_ns, strict=True)
        ]
        pipeline = request.pipeline
        path_ns = max(pipeline.longest_to(full_ns))
        if path_ns <= allowed_ns:
            return full_ns
        least_path_ns = max(pipeline.longest_to(least_ns))
        part = max(0.0, allowed_ns - least_path_ns) / max(1.0, path_ns - least_path_ns)
        return [
            least + part * (full - least) for least, full in zip(least_ns, full_ns, strict=True)
        ]

    def _least_ns(self, task: Task, z: float) -> float:
        """The least time that a task needs, with its margin."""
        items = task.request.items
        builds = self._builds.of_function[task.function.id]
        return min(
            (
                build.fastest_ns(items, as_observed=True) * (1.0 + z * build.deviation)
                for build in builds
                if items <= build.items_max
            ),
            default=0.0,
        )

    def _book(
        self, request: Request, wanted_ns: list[float], promises: list[Promise]
    ) -> int | None:
        """Book the stages in turn; return the first that does not fit, or None."""
        now_ns = self._view.now_ns
        pipeline = request.pipeline
        allowed_ns = float(request.deadline_ns - now_ns)
        z = self.stage_z(request.tasks[0])
        if self._is_idle(request):
            z = 0.0
        else:
            # An idle system always tries, or a margin that is too large would never shrink.
            allowed_ns -= self._margin_ns(request, allowed_ns)
            z = min(z, self._z_max(request, allowed_ns))
        ends = [1.0]
        if len(wanted_ns) > 1:
            lengths_ns = self._divide(request, wanted_ns, allowed_ns, z)
            to_ns, from_ns = pipeline.longest_to(lengths_ns), pipeline.longest_from(lengths_ns)
            ends = [
                to / max(1.0, to + after - own)
                for to, after, own in zip(to_ns, from_ns, lengths_ns, strict=True)
            ]
        for index, end in enumerate(ends):
            after = pipeline.stages[index].after
            ready_ns = max((promises[i].due_ns for i in after), default=now_ns)
            due_ns = now_ns + int(allowed_ns * end)
            promise = self._fit(request, index, ready_ns, due_ns, z)
            if promise is None:
                return index
            self._add(promise)
            promises.append(promise)
        return None

    def _margin_ns(self, request: Request, allowed_ns: float) -> float:
        """The time to keep between the promise and the deadline, beside that of the stages."""
        most_ns = _MARGIN_MAX * (allowed_ns - self._isolated_ns)
        return max(0.0, min(most_ns, self.margins.z[request.pipeline.id] * _UNIT * allowed_ns))

    def _z_max(self, request: Request, allowed_ns: float) -> float:
        """The largest margin of stages for which a request may be refused: a part of its slack.

        Where nothing is admitted, nothing is learnt, and a margin that is too large stays.
        """
        builds = [build for t in request.tasks for build in self._builds.of_function[t.function.id]]
        deviation = max((build.deviation for build in builds), default=0.0)
        least_ns = self.isolated_ns(request, as_observed=True)
        slack_ns = max(0.0, allowed_ns - least_ns)
        return _MARGIN_MAX * slack_ns / max(1.0, least_ns * deviation)

    def _is_idle(self, request: Request) -> bool:
        """Whether nothing runs or waits where the request could run."""
        for task in request.tasks:
            for build in self._builds.of_function[task.function.id]:
                if build.calendar.work_ns > 0 or build.calendar.last_end_ns() > 0:
                    return False
        return True

    def observe_best_effort(self, request: Request) -> None:
        """Record the load of a request without an objective."""
        for task in request.tasks:
            builds = self._builds.of_function[task.function.id]
            if builds:
                build, size = builds[0], builds[0].items_best
                work_ns = build.lane_ns(size) / size * request.items * build.weight
                self._builds.observe_load(build, work_ns)

    def is_in_time(self, task: Task, build: Build) -> bool:
        """Whether a task would keep its promise on another build that began with it now."""
        promise, items = self._booked.get(task.id), task.request.items
        if promise is None or items > build.items_max:
            return False
        z = self.margins.z[task.request.pipeline.id]
        return self._view.now_ns + build.cautious_ns(items, z) <= promise.due_ns

    def left_ns(self, task: Task) -> float:
        """The time that is left to a request, less its margin."""
        request = task.request
        left_ns = float(request.deadline_ns - self._view.now_ns)
        allowed_ns = request.deadline_ns - request.arrival_ns
        return left_ns - _SENT_MARGIN * self.margins.z[request.pipeline.id] * _UNIT * allowed_ns

    def stage_z(self, task: Task) -> float:
        """Standard deviations of its time that a stage keeps as a margin."""
        pipeline_id = task.request.pipeline.id
        return self.margins.z[pipeline_id] / self._depth_roots[pipeline_id]

    def sent_z(self, task: Task) -> float:
        return _SENT_MARGIN * self.stage_z(task)

    def wait_ns(self, request: Request) -> int:
        """How long the work ahead of a request keeps the pools busy that it needs."""
        now_ns, longest_ns = self._view.now_ns, 0.0
        for task in request.tasks:
            waits_ns = [
                (calendar.work_ns + calendar.busy_ns(now_ns)) / calendar.lanes
                for calendar in map(Build.narrowest, self._builds.of_function[task.function.id])
                if calendar.lanes > 0
            ]
            longest_ns = max(longest_ns, min(waits_ns, default=0.0))
        return int(longest_ns)

    def can_run(self, request: Request) -> bool:
        """Whether there is a build that can run, for each stage."""
        return all(
            any(self._builds.is_usable(b) for b in self._builds.of_function[task.function.id])
            for task in request.tasks
        )

    def unblocking_items(self, build: Build, items: int) -> int:
        """The largest batch, up to `items`, that leaves lanes to those who cannot wait so long.

        Work cannot be preempted: while a long batch runs, its lane is lost to requests with short
        windows. So enough lanes for their load must be within reach of the shortest window.
        """
        busy_ns = build.lane_ns(items)
        needed, window_ns = self._shares[build.pool.id].blocked(busy_ns)
        if window_ns >= busy_ns:
            return items
        reach_ns = self._view.now_ns + int(window_ns)
        if build.calendar.lanes_free_by(reach_ns) - build.weight >= needed:
            return items
        return min(items, build.items_within(window_ns, 0.0))

    def latest_ns(self, request: Request, stage: int) -> float:
        """When a stage must be done for the request to be in time, with nothing to spare."""
        after = request.pipeline.successors[stage]
        if not after:
            return request.deadline_ns
        items = request.items
        times_ns = [self.fastest_ns(t.function.id, items) for t in request.tasks]
        from_ns = request.pipeline.longest_from(times_ns)
        return request.deadline_ns - max(from_ns[index] for index in after)

    def _latest_start_ns(self, request: Request, stage: int) -> int:
        """When a stage must start at its fastest for the request to be in time."""
        time_ns = self.fastest_ns(request.tasks[stage].function.id, request.items)
        return int(self.latest_ns(request, stage) - time_ns)

    def _fit(
        self, request: Request, stage: int, ready_ns: int, due_ns: int, z: float
    ) -> Promise | None:
        for build in self._ranked(request.tasks[stage], due_ns - ready_ns):
            if request.items <= build.items_max and self._builds.is_usable(build):
                if build.warm_pool is not None:
                    promise = self._fit_call(build, request.tasks[stage], ready_ns, due_ns, z)
                    if promise is not None:
                        return promise
                    continue
                if len(build.shape_ids) > 1:
                    promise = self._fit_shape(build, request.items, ready_ns, due_ns, z)
                    if promise is not None:
                        # The shape sets the latest start, and is not chosen yet.
                        promise.order_ns = self._latest_start_ns(request, stage)
                else:
                    promise = self._fit_build(build, request.items, ready_ns, due_ns, z)
                if promise is not None:
                    return promise
        return None

    def _must_yield(self, pool_id: int, load: ClassLoad, work_ns: float) -> bool:
        """Whether the request at hand must leave room: to other classes, or to more urgent ones."""
        has_used = self._shares[pool_id].has_used_its_share(load, work_ns)
        return has_used or load.has_more_urgent(self._priority)

    def _ranked(self, task: Task, window_ns: int) -> list[Build]:
        """The builds of a task, the one that costs others least first, and calls last.

        The price of a pool's time is its backlog within the task's window: a task leaves a pool
        that is in demand to those that can run nowhere else.
        """
        builds = self._builds.of_function[task.function.id]
        if len(builds) == 1:
            return builds
        return sorted(builds, key=lambda build: self._cost(build, task.request.items, window_ns))

    def _cost(self, build: Build, items: int, window_ns: int) -> float:
        calendar = build.narrowest()
        if build.warm_pool is not None or calendar.lanes == 0 or items > build.items_max:
            return inf
        backlog_ns = calendar.work_ns + calendar.busy_ns(self._view.now_ns)
        price = _PRICE_MIN + backlog_ns / (calendar.lanes * max(1, window_ns))
        return build.lane_ns(items) * build.weight / calendar.lanes * price

    def _start_ns(self, build: Build, latest_ns: int, alone_ns: float) -> int | None:
        """Time that a batch which begins by `latest_ns` must wait for a node to hold the build.

        None if the nodes that hold it are full until then, and no other should.
        """
        if build.cold_start_ns == 0:
            return 0
        lanes = self._builds.lanes_of(build)
        left_ns = latest_ns - self._view.now_ns
        load = self._loads.get(build.pool.id)
        if load is not None and self._must_yield(build.pool.id, load, alone_ns):
            left_ns = int((1.0 - _LEFT_TO_OTHERS) * left_ns)
        if 0 < lanes < build.calendar.lanes and build.pending_ns > lanes * left_ns:
            return build.cold_start_ns if self._builds.may_start_now(build) else None
        return self._builds.ready_in_ns(build)

    def _fit_call(
        self, build: Build, task: Task, ready_ns: int, due_ns: int, z: float
    ) -> Promise | None:
        """The promise of a FaaS call; None if it would be late."""
        items = task.request.items
        if not self._view.fits_call(task, build.pool, build.variant):
            return None
        latest_ns = due_ns - int(build.cautious_ns(items, z))
        if latest_ns < ready_ns:
            return None
        size, base_ns, batches = self._marginal(build, items, due_ns - ready_ns, z)
        work_ns = int(base_ns * build.overrun)
        if not self._spillover.can_start_by(build, task, batches, latest_ns):
            return None
        bucket = build.calendar.bucket(self._view.now_ns, latest_ns)
        if not self._balances(build, latest_ns, bucket, work_ns, batches, build.weight):
            return None
        return Promise(
            build, due_ns, latest_ns, bucket, work_ns, batches, items, size, int(base_ns)
        )

    def _marginal(
        self, build: Build, items: int, window_ns: float, z: float
    ) -> tuple[int, float, float]:
        """The largest batch for a window, and the work and the part of a batch that a task adds."""
        largest = max(items, build.items_within(window_ns, z))
        size = max(items, min(largest, build.likely_items(window_ns, z)))
        filled = build.pending_items % size
        if filled == 0 or filled + items > size:
            return largest, build.lane_ns(items) * build.weight, build.weight * items / size
        added_ns = build.lane_ns(filled + items) - build.lane_ns(filled)
        return largest, added_ns * build.weight, build.weight * items / size

    def _fit_build(
        self, build: Build, items: int, ready_ns: int, due_ns: int, z: float
    ) -> Promise | None:
        """The promise of a build to run a stage between two times; None if it cannot."""
        now_ns, calendar = self._view.now_ns, build.calendar
        own_lanes = build.narrowest().lanes
        alone_ns = build.cautious_ns(items, z)
        start_ns = self._start_ns(build, due_ns - int(alone_ns), alone_ns)
        if start_ns is None:
            return None
        alone_ns += start_ns
        if ready_ns + alone_ns > due_ns:
            return None
        window_ns = (due_ns - ready_ns) * own_lanes / (own_lanes + 1.0)
        size, base_ns, batches = self._marginal(build, items, window_ns, z)
        work_ns = base_ns * build.overrun
        # It will run with what waits already; with more, the batch starts sooner or is smaller.
        together = min(size, build.pending_items + items)
        latest_ns = due_ns - int(max(alone_ns, build.cautious_ns(together, z)))
        if latest_ns < ready_ns:
            latest_ns = due_ns - int(alone_ns)
        bucket = calendar.bucket(now_ns, latest_ns)
        is_idle = calendar.work_ns == 0 and build.narrowest().free_in_ns(now_ns) == 0
        if not is_idle and not self._balances(
            build, latest_ns, bucket, work_ns, batches, build.weight
        ):
            return None
        return Promise(
            build, due_ns, latest_ns, bucket, int(work_ns), batches, items, size, int(base_ns)
        )

    def _fit_shape(
        self, build: Build, items: int, ready_ns: int, due_ns: int, z: float
    ) -> Promise | None:
        """The same for a build whose batches have a choice of shapes."""
        now_ns, calendar = self._view.now_ns, build.calendar
        window_ns = due_ns - ready_ns
        found = build.plan_within(items, window_ns, z)
        if found is None:
            return None
        size, shape_id = found
        time_ns = build.lane_ns_in(size, shape_id, z)
        start_ns = self._start_ns(build, due_ns - int(time_ns), time_ns)
        if start_ns is None or start_ns + time_ns > window_ns:
            return None
        weight = build.weight_of(shape_id)
        base_ns = build.lane_ns_in(size, shape_id) * weight * items / size
        work_ns, batches = base_ns * build.overrun, weight * items / size
        latest_ns = due_ns - int(time_ns + start_ns)
        bucket = calendar.bucket(now_ns, latest_ns)
        is_idle = calendar.work_ns == 0 and build.narrowest().free_in_ns(now_ns) == 0
        if not is_idle and not self._balances(build, latest_ns, bucket, work_ns, batches, weight):
            return None
        return Promise(
            build, due_ns, latest_ns, bucket, int(work_ns), batches, items, size, int(base_ns)
        )

    def _balances(
        self,
        build: Build,
        latest_ns: int,
        bucket: int,
        work_ns: float,
        batches: float,
        weight: float,
    ) -> bool:
        """Whether a batch can start by `latest_ns`, and everything promised for later still can."""
        now_ns, calendar = self._view.now_ns, build.calendar
        default_ns = build.lane_ns(1)
        if build.own is not None:
            own_bucket = build.own.bucket(now_ns, latest_ns)
            own_work_ns, own_batches = work_ns / weight, batches / weight
            if not build.own.fit(
                now_ns, latest_ns, own_bucket, own_work_ns, own_batches, 1.0, default_ns
            ):
                return False
        fit = calendar.fit(now_ns, latest_ns, bucket, work_ns, batches, weight, default_ns)
        if fit is None:
            return False
        ahead_ns, slack_ns = fit
        load, shares = self._loads.get(build.pool.id), self._shares[build.pool.id]
        if load is None:
            return True
        left_ns = min(latest_ns, calendar.covered_ns(bucket)) - now_ns
        reserved_ns = shares.reserved_ns(load, left_ns)
        if self._must_yield(build.pool.id, load, work_ns):
            reserved_ns += _LEFT_TO_OTHERS * max(0, slack_ns + ahead_ns)
        elif shares.wants_more(load):
            reserved_ns += _LEFT_BY_LARGE * max(0, slack_ns + ahead_ns)
        if reserved_ns <= 0.0 or slack_ns >= work_ns + reserved_ns:
            return True
        self.was_share_used = slack_ns >= work_ns  # it would have fitted
        return False


def _declared_ns(app: App) -> list[float]:
    """The objective of each pipeline; of one without, the longest of the others, or a default."""
    latencies_ns = [float(pipeline.slo.latency_ns) for pipeline in app.pipelines]
    longest_ns = max((ns for ns in latencies_ns if ns < NEVER_NS), default=_DEFAULT_OBJECTIVE_NS)
    return [min(ns, longest_ns) for ns in latencies_ns]
