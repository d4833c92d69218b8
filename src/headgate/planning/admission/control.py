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

from collections.abc import Sequence
from math import inf, sqrt
from typing import Final, final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.model import Pipeline
from headgate.core.records import STAGES_MAX, Request, Task
from headgate.core.states import Outcome
from headgate.core.view import View
from headgate.planning.admission.cost_budgets import CostBudgets
from headgate.planning.admission.feasibility import Feasibility, StageBuilds
from headgate.planning.admission.spillover import Spillover
from headgate.planning.constants import (
    CALL_SLACK,
    EQUAL_SHARE,
    MARGIN_MAX,
    MARGIN_UNIT,
    MISS_TARGET,
    PROBE_BACKOFF,
    PROBE_BACKOFF_MAX_NS,
    PROBE_BACKOFF_UNKEPT,
    PROBE_EVERY,
    SENT_MARGIN,
    TRIES,
    Z_MAX,
    Z_START,
    Z_STEP,
)
from headgate.planning.pools.build import Build, EstimateProbes, Promise
from headgate.planning.pools.builds import Builds

# CPython reads a module global many times faster than a member of an enum.
_MET: Final = int(Outcome.MET)
_JUDGED: Final = (_MET, int(Outcome.LATE), int(Outcome.EXPIRED))  # outcomes of promises
_ROUNDING: Final = 1.001  # of a length, so that it is enough after it was rounded down


@final
class Margins:
    """The margin of each pipeline, controlled by what became of its promises."""

    def __init__(self, view: View) -> None:
        self._allowed = [
            MISS_TARGET * (1.0 - pipeline.slo.quantile) for pipeline in view.app.pipelines
        ]
        self.z = [Z_START for _ in view.app.pipelines]

    def observe(self, pipeline_id: int, *, was_kept: bool) -> None:
        """Move `z` so that misses are as frequent as the objective allows."""
        missed = 0.0 if was_kept else 1.0
        z = self.z[pipeline_id] + Z_STEP * (missed - self._allowed[pipeline_id])
        self.z[pipeline_id] = 0.0 if z <= 0.0 else Z_MAX if z > Z_MAX else z


@final
class AdmissionControl:
    """Makes promises, and takes them back."""

    def __init__(self, view: View, builds: Builds, spillover: Spillover) -> None:
        self._view = view
        self._builds = builds
        self.margins = Margins(view)
        self._promises: dict[Request, list[Promise]] = {}  # of those that are open, by stage
        # Deviations of stages add as variances, so each keeps less where there are several.
        self._depth_roots = [
            sqrt(max(p.longest_to([1.0] * len(p.stages)))) for p in view.app.pipelines
        ]
        self._rests = [_rests(pipeline, builds) for pipeline in view.app.pipelines]
        # By pipeline: the builds that could run a stage of it.
        self._builds_of = [
            list({b: None for stage in p.stages for b in builds.of_function[stage.function.id]})
            for p in view.app.pipelines
        ]
        # By pipeline and stage: the other stages that wait for the same ones.
        self._siblings = [
            [
                [i for i, other in enumerate(p.stages) if i != index and other.after == stage.after]
                for index, stage in enumerate(p.stages)
            ]
            for p in view.app.pipelines
        ]
        self._probe_ns = [0 for _ in view.app.pipelines]
        self._estimate_probes = [EstimateProbes() for _ in view.app.pipelines]
        # By pipeline: when it was first probed since a promise of it was kept, and whether any was.
        self._probed_since_ns: list[int | None] = [None for _ in view.app.pipelines]
        self._was_ever_kept = [False for _ in view.app.pipelines]
        self.late_stage: int | None = None  # of the last request: a stage that did not fit
        self.budgets = CostBudgets(builds)
        self.feasibility = Feasibility(view, builds, spillover, self.budgets)
        self._stage_builds = StageBuilds(builds, self.feasibility)

    def admit(self, request: Request) -> bool:
        """Promise every stage of a request, or none; whether it is admitted.

        A request without a deadline is best effort and needs no promise, but it must be able to pay
        for some placement.
        """
        self.late_stage = None
        if request.deadline_ns <= self._view.now_ns:  # nothing could serve it: it is no load
            return False
        is_too_dear = request.cost_usd < inf and self.budgets.is_below_least(request)
        if request.deadline_ns == NEVER_NS:
            if is_too_dear and not self._probe_best_effort(request):
                return False
            self.budgets.open(request)
            self._observe_best_effort(request)
            return True
        promises = self._probe(request) if is_too_dear else self._promise(request)
        if promises is None:
            self.budgets.close(request.id)
            return False
        self._promises[request] = promises
        return True

    def try_out(self, request: Request, latency_ns: int, cost_usd: float) -> float | None:
        """What a request would cost with these objectives, were it admitted now; None: it is not.

        Nothing is booked, and no demand recorded.
        """
        promises: list[Promise] = []
        was_share_used = self.feasibility.was_share_used
        self.feasibility.is_trial, self.budgets.trial_usd = True, cost_usd
        late = self._book_all(request, self._view.now_ns + latency_ns, promises)
        self.feasibility.is_trial, self.budgets.trial_usd = False, None
        self.feasibility.was_share_used = was_share_used
        for promise in promises:
            promise.release()
        self.budgets.close(request.id)
        return None if late is not None else sum(promise.usd for promise in promises)

    def margin_ns(self, request: Request, latency_ns: int) -> int:
        """The part of a latency objective that would be kept as a margin."""
        allowed_ns, z = self._allowed(request, float(latency_ns))
        least_ns = self._builds.isolated_ns(request, as_observed=True)
        return int(latency_ns - allowed_ns + z * self._deviation(request) * least_ns)

    def booked(self, task: Task) -> Promise | None:
        """The promise of a task that is not sent yet; None for best effort."""
        promises = self._promises.get(task.request)
        if promises is None:
            return None
        promise = promises[task.id % STAGES_MAX]
        return promise if promise.is_booked else None

    def on_sent(self, tasks: Sequence[Task]) -> None:
        """A batch is formed: what was to join it and did not is due at its own time."""
        for task in tasks:
            promises = self._promises.get(task.request)
            if promises is not None:
                promises[task.id % STAGES_MAX].rebook_joined(self._view.now_ns)

    def give_up(self, task: Task) -> None:
        """A task cannot be in time any more: it is best effort from now on."""
        promise = self._promises[task.request][task.id % STAGES_MAX]
        if promise.is_booked:
            promise.release()
            promise.rebook_joined(self._view.now_ns)
        promise.is_given_up = True

    def confirm(self, task: Task) -> Promise | None:
        """The promise of a task that is ready now; a new one, or None, if its build cannot run it.

        Its payload is known only now, and the pool may have lost its nodes.
        """
        promise = self.booked(task)
        if promise is None:
            return None
        build = promise.build
        if build.warm_pool is None:
            can_run = self._builds.is_usable(build)
        else:
            can_run = self._view.fits_call(task, build.pool, build.variant)
        if can_run:
            if promise.probability < 1.0:
                promise.confirm(self._view.now_ns)
            return promise
        self.give_up(task)
        self.feasibility.on_admitted_before()
        stage = task.id % STAGES_MAX
        anew = self.feasibility.fit(task.request, stage, self._view.now_ns, promise.due_ns, 0.0)
        if anew is not None:
            anew.book(self._view.now_ns)
            self.budgets.set_aside(task, anew.usd)
            self._promises[task.request][stage] = anew
        return anew

    def promise_again(self, task: Task) -> None:
        """Book a task again that came back from an attempt without a result."""
        promises = self._promises.get(task.request)
        if promises is not None:
            promise = promises[task.id % STAGES_MAX]
            if not promise.is_booked and not promise.is_given_up:
                promise.book(self._view.now_ns)

    def on_settled(self, request: Request, outcome: int) -> None:
        """A request is settled: release what is left of it, and learn whether it was kept."""
        if request.cost_usd < inf:
            self.budgets.close(request.id)
        promises = self._promises.get(request)
        if promises is None:
            return
        del self._promises[request]
        for promise in promises:
            if promise.is_booked:
                promise.release()
                promise.rebook_joined(self._view.now_ns)
        if outcome not in _JUDGED:
            return
        pipeline_id, was_kept = request.pipeline.id, outcome == _MET
        self.margins.observe(pipeline_id, was_kept=was_kept)
        if was_kept:
            self._was_ever_kept[pipeline_id] = True
            self._probed_since_ns[pipeline_id] = None
            self._probe_ns[pipeline_id] = 0  # what the last probe was to show is known
        if self._view.gateways > 1:
            self._builds.on_promise_settled(request.pipeline, was_kept=was_kept)

    def _promise(self, request: Request) -> list[Promise] | None:
        """Book every stage of a request; None, and nothing is booked, if one cannot be in time."""
        self.feasibility.observe(request)
        promises: list[Promise] = []
        self.late_stage = self._book_all(request, request.deadline_ns, promises)
        if self.late_stage is not None:
            self.feasibility.on_refused()
            return self._probe(request)
        self.feasibility.on_promised(promises)
        return promises

    def _book_all(self, request: Request, deadline_ns: int, promises: list[Promise]) -> int | None:
        """Book every stage in one of several ways; else nothing, and return one that is late."""
        allowed_ns, z = self._allowed(request, float(deadline_ns - self._view.now_ns))
        if len(request.tasks) == 1:  # it has all of the time
            now_ns = self._view.now_ns
            self.budgets.open(request)
            due_ns = now_ns + int(allowed_ns)
            return None if self._book_stage(request, 0, now_ns, due_ns, z, promises) else 0
        waits_ns = [self._wait_ns(request, index) for index in range(len(request.tasks))]
        for index, siblings in enumerate(self._siblings[request.pipeline.id]):
            waits_ns[index] += sum(self._beside_ns(request, index, i) for i in siblings)
        late: int | None = None
        for _ in range(TRIES):
            lengths_ns = self._divide(request, waits_ns, allowed_ns, z)
            late = self._book(request, allowed_ns, z, lengths_ns, promises)
            if late is None:
                return None
            for promise in promises:
                promise.release()
            promises.clear()
            waits_ns[late] = 2.0 * waits_ns[late] + self._builds.fastest_ns(
                request.tasks[late].function.id, request.items
            )
        placed_ns = self._stage_builds.lengths_ns(request, allowed_ns, z)
        if placed_ns is not None:
            if self._book(request, allowed_ns, z, placed_ns, promises) is None:
                return None
            for promise in promises:
                promise.release()
            promises.clear()
        if request.cost_usd < inf and self._book_plan(request, allowed_ns, z, promises):
            return None
        if any(self._can_call_now(task) for task in request.tasks):
            lengths_ns = self._divide_for_calls(request, allowed_ns, z)
            if self._book(request, allowed_ns, z, lengths_ns, promises) is None:
                return None
            for promise in promises:
                promise.release()
            promises.clear()
        return late

    def _allowed(self, request: Request, allowed_ns: float) -> tuple[float, float]:
        """Of a time, what may be promised; and the standard deviations that stages keep of it.

        An idle system always tries, or a margin that is too large would never shrink.
        """
        pipeline_id = request.pipeline.id
        z = self.margins.z[pipeline_id]
        if z == 0.0 or self._is_idle(request):
            return allowed_ns, 0.0
        least_ns = self._builds.isolated_ns(request, as_observed=True)
        margin_ns = z * MARGIN_UNIT * allowed_ns
        if margin_ns > MARGIN_MAX * (allowed_ns - least_ns):
            # By the profile, the latency on an idle system may be less than as observed.
            most_ns = MARGIN_MAX * (allowed_ns - self._builds.isolated_ns(request))
            margin_ns = max(0.0, min(most_ns, margin_ns))
        allowed_ns -= margin_ns
        # Where nothing is admitted, nothing is learnt, and a margin that is too large stays: the
        # stages keep no more than a part of the slack.
        stage_z, slack_ns = z / self._depth_roots[pipeline_id], allowed_ns - least_ns
        if slack_ns <= 0.0:
            return allowed_ns, 0.0
        spread_ns = least_ns * self._deviation(request)
        z_max = MARGIN_MAX * slack_ns / (spread_ns if spread_ns > 1.0 else 1.0)
        return allowed_ns, stage_z if stage_z < z_max else z_max

    def _book_plan(
        self, request: Request, allowed_ns: float, z: float, promises: list[Promise]
    ) -> bool:
        """Book the stages as the fastest plan within the cost objective has them, if that fits."""
        plan = self.budgets.fastest_plan(request)
        if plan is None:
            return False
        late = self._book(request, allowed_ns, z, plan.stages_ns, promises, plan.stages_usd)
        if late is None:
            return True
        for promise in promises:
            promise.release()
        promises.clear()
        return False

    def _probe(self, request: Request) -> list[Promise] | None:
        """Admit a request that only what was learnt forbids, now and then, to learn it again.

        What was learnt are the times of recent batches, and profiles that are estimates.
        """
        now_ns, pipeline = self._view.now_ns, request.pipeline
        if now_ns < self._probe_ns[pipeline.id]:
            return None
        is_idle = self._is_idle(request)
        if not is_idle and not self._builds.is_estimated_and_free(request):
            return None
        promises: list[Promise] = []
        for task in request.tasks:
            usable = [
                b
                for b in self.budgets.cheapest_first(task)
                if b.warm_pool is None
                and self._builds.is_usable(b)
                and self._builds.may_probe_on(b)
            ]
            if not usable or request.items > usable[0].items_max:
                return None
            work_ns = int(usable[0].profiled_ns(request.items))
            due_ns = int(self._builds.latest_ns(request, task.id % STAGES_MAX))
            start_ns = max(now_ns, due_ns - work_ns)
            bucket = usable[0].calendar.bucket(now_ns, start_ns)
            promises.append(
                Promise(
                    usable[0], due_ns, start_ns, start_ns, bucket, work_ns, 1.0,
                    request.items, request.items, work_ns,
                )
            )  # fmt: skip
        builds = [promise.build for promise in promises]
        if not self.budgets.fits_profiles(request, builds):
            return None
        times_ns = [float(promise.work_ns) for promise in promises]
        is_late = now_ns + max(pipeline.longest_to(times_ns)) > request.deadline_ns
        if not (self._may_be_wrong(request, builds, times_ns) if is_late else is_idle):
            return None
        self._probe_ns[pipeline.id] = self._next_probe_ns(request)
        for promise in promises:
            promise.book(self._view.now_ns)
        return promises

    def probe_in_ns(self, request: Request) -> int:
        """When a request that only observed times forbid may be tried again; 0: it may be now."""
        now_ns = self._view.now_ns
        if now_ns + self._builds.isolated_ns(request, as_observed=True) <= request.deadline_ns:
            return 0
        return max(0, self._probe_ns[request.pipeline.id] - now_ns)

    def _may_be_wrong(self, request: Request, builds: list[Build], times_ns: list[float]) -> bool:
        """Whether to try a request that is late by its profiles: estimates alone rule it out."""
        now_ns, pipeline = self._view.now_ns, request.pipeline
        left_ns = request.deadline_ns - now_ns
        declared_ns = [
            0.0 if build.variant.profile.is_estimate else time_ns
            for build, time_ns in zip(builds, times_ns, strict=True)
        ]
        if max(pipeline.longest_to(declared_ns)) > left_ns:
            return False
        return self._estimate_probes[pipeline.id].is_due(now_ns, PROBE_EVERY * left_ns, builds)

    def _next_probe_ns(self, request: Request) -> int:
        """When to probe a pipeline again, if the promise that is made now should be broken.

        The longer none was kept, the less often (exponential back-off): what was slow for a while
        is served again soon, relative to that while. What never was in time may not be able to.
        """
        now_ns, id = self._view.now_ns, request.pipeline.id
        since_ns = self._probed_since_ns[id]
        if since_ns is None:
            since_ns = self._probed_since_ns[id] = now_ns
        part = PROBE_BACKOFF if self._was_ever_kept[id] else PROBE_BACKOFF_UNKEPT
        backoff_ns = min(PROBE_BACKOFF_MAX_NS, int(part * (now_ns - since_ns)))
        return now_ns + max(PROBE_EVERY * (request.deadline_ns - now_ns), backoff_ns)

    def _probe_best_effort(self, request: Request) -> bool:
        """The same for a request without a deadline, which observed times make too dear."""
        now_ns, pipeline = self._view.now_ns, request.pipeline
        if now_ns < self._probe_ns[pipeline.id] or not self._is_idle(request):
            return False
        rows = [self.budgets.cheapest_first(task)[:1] for task in request.tasks]
        builds = [build for row in rows for build in row]
        if len(builds) < len(rows) or not self.budgets.fits_profiles(request, builds):
            return False
        self._probe_ns[pipeline.id] = now_ns + SECOND_NS
        return True

    def _wait_ns(self, request: Request, stage: int) -> float:
        """Estimate of the wait and service of a stage, on the build where it would end first.

        Calls come last: they count where no node is in time.
        """
        now_ns = self._view.now_ns
        best_ns: float | None = None
        for build in self._builds.of_function[request.tasks[stage].function.id]:
            calendar = build.narrowest
            is_call = build.warm_pool is not None
            if is_call and best_ns is not None and now_ns + best_ns <= request.deadline_ns:
                continue
            if calendar.lanes <= 0 or request.items > build.items_max:
                continue
            bucket = calendar.bucket(now_ns, request.deadline_ns)
            ahead_ns = calendar.slack(now_ns, bucket)[0]  # what is due later waits
            wait_ns = max(
                calendar.free_in_ns(now_ns),
                (ahead_ns + calendar.busy_ns(now_ns)) / calendar.supply,
            )
            total_ns = wait_ns + build.lane_ns(request.items)
            if best_ns is None or total_ns < best_ns:
                best_ns = total_ns
        return best_ns or 0.0

    def _beside_ns(self, request: Request, stage: int, sibling: int) -> float:
        """Time by which a stage is later for one that is ready when it is, on the same nodes."""
        builds = self._builds.of_function[request.tasks[stage].function.id]
        others = self._builds.of_function[request.tasks[sibling].function.id]
        if not builds or not others or builds[0].calendar is not others[0].calendar:
            return 0.0
        other, items = others[0], request.items
        lanes = max(1.0, other.narrowest.supply)
        if other is builds[0] and 2 * items <= other.items_best:  # in one batch
            return (other.lane_ns(2 * items) - other.lane_ns(items)) / lanes
        return other.lane_ns(min(items, other.items_max)) / lanes

    def _divide(
        self, request: Request, wanted_ns: list[float], allowed_ns: float, z: float
    ) -> list[float]:
        """Lengths of the stages, in proportion to which a pipeline's time is given to them.

        Where they want more than there is: first the least that each needs, then of what it wants
        as much as fits. A long wait for one must not leave another less than it takes.
        """
        pipeline = request.pipeline
        floor_ns = EQUAL_SHARE * allowed_ns / len(wanted_ns)
        least_ns = [self._least_ns(task, z) for task in request.tasks]
        full_ns = [
            max(least, wanted + floor_ns) for least, wanted in zip(least_ns, wanted_ns, strict=True)
        ]
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

    def _divide_for_calls(self, request: Request, allowed_ns: float, z: float) -> list[float]:
        """Lengths with which as many stages as possible, the first ones first, can be calls.

        While the platform has concurrency to spare, a call waits for nobody: to give it a part of
        the time in proportion to the wait for nodes would give it too little or too much. Most of
        what is left goes to the other stages.
        """
        pipeline, items = request.pipeline, request.items
        lengths_ns = [self._least_ns(task, z) for task in request.tasks]
        waits = [1.0 for _ in lengths_ns]
        for index, task in enumerate(request.tasks):
            build = self._builds.faas[task.function.id]
            if build is None or not self._can_call_now(task):
                continue
            longer_ns = lengths_ns.copy()
            longer_ns[index] = max(longer_ns[index], _ROUNDING * build.cautious_ns(items, z))
            if max(pipeline.longest_to(longer_ns)) <= allowed_ns:
                lengths_ns, waits[index] = longer_ns, CALL_SLACK
        left_ns = allowed_ns - max(pipeline.longest_to(lengths_ns))
        each_ns = max(0.0, left_ns) / max(1.0, *pipeline.longest_to(waits))
        return [own + each_ns * wait for own, wait in zip(lengths_ns, waits, strict=True)]

    def _can_call_now(self, task: Task) -> bool:
        """Whether a platform has concurrency to spare for a task."""
        build = self._builds.faas[task.function.id]
        return (
            build is not None
            and task.request.items <= build.items_max
            and build.calendar.free_in_ns(self._view.now_ns) == 0
        )

    def _book(
        self,
        request: Request,
        allowed_ns: float,
        z: float,
        lengths_ns: Sequence[float],
        promises: list[Promise],
        stages_usd: list[float] | None = None,
    ) -> int | None:
        """Book the stages in turn within a time; return the first that does not fit, or None.

        The time is given to the stages in proportion to their lengths. Of a cost objective, the
        least is set aside for the stages that follow, or `stages_usd`.
        """
        now_ns, pipeline = self._view.now_ns, request.pipeline
        self.budgets.open(request, stages_usd)
        for index, end in enumerate(_ends(pipeline, lengths_ns)):
            after, siblings = pipeline.stages[index].after, self._siblings[pipeline.id][index]
            ready_ns = max([promises[i].due_ns for i in after]) if after else now_ns
            due_ns = now_ns + int(allowed_ns * end)
            beside = [promises[i] for i in siblings if i < index] if siblings else ()
            if not self._book_stage(request, index, ready_ns, due_ns, z, promises, beside):
                return index
        return None

    def _book_stage(
        self,
        request: Request,
        stage: int,
        ready_ns: int,
        due_ns: int,
        z: float,
        promises: list[Promise],
        beside: Sequence[Promise] = (),
    ) -> bool:
        """Book a stage between two times, if it fits; whether it does."""
        promise = self.feasibility.fit(request, stage, ready_ns, due_ns, z, beside)
        if promise is None:
            return False
        self.feasibility.expect(request, stage, promise)
        promise.book(self._view.now_ns)
        self.feasibility.on_booked(promise)
        self.budgets.set_aside(request.tasks[stage], promise.usd)
        promises.append(promise)
        return True

    def _deviation(self, request: Request) -> float:
        """The largest relative deviation of the builds that could run a stage of a request."""
        most = 0.0
        for build in self._builds_of[request.pipeline.id]:
            most = build.deviation if build.deviation > most else most
        return most

    def _is_idle(self, request: Request) -> bool:
        """Whether nothing runs or waits where the request could run."""
        for build in self._builds_of[request.pipeline.id]:
            calendar = build.calendar
            if calendar.work_ns > 0 or calendar.last_end_ns() > 0:
                return False
            if calendar.part < 1.0 and calendar.supply < 1.0:
                return False  # others use it
        return True

    def _observe_best_effort(self, request: Request) -> None:
        """Record the load of a request without a deadline."""
        for task in request.tasks:
            builds = self.budgets.affordable(task)
            if builds:
                build, size = builds[0], builds[0].items_best
                work_ns = build.lane_ns(size) / size * request.items * build.weight
                self._builds.observe_load(build, work_ns, is_best_effort=True)

    def is_in_time(self, task: Task, build: Build) -> bool:
        """Whether a task would keep its promise on another build that began with it now."""
        promise, items = self.booked(task), task.request.items
        if promise is None or items > build.items_max or not self.budgets.allows(task, build):
            return False
        z = self.margins.z[task.request.pipeline.id]
        return self._view.now_ns + build.cautious_ns(items, z) <= promise.due_ns

    def left_ns(self, task: Task) -> float:
        """The time that is left to a request, less its margin: for what has not run yet."""
        request, pipeline_id = task.request, task.request.pipeline.id
        left_ns = float(request.deadline_ns - self._view.now_ns)
        allowed_ns = request.deadline_ns - request.arrival_ns
        rest = self._rests[pipeline_id][task.id % STAGES_MAX]
        return left_ns - SENT_MARGIN * self.margins.z[pipeline_id] * MARGIN_UNIT * rest * allowed_ns

    def stage_z(self, task: Task) -> float:
        """Standard deviations of its time that a stage keeps as a margin."""
        pipeline_id = task.request.pipeline.id
        return self.margins.z[pipeline_id] / self._depth_roots[pipeline_id]

    def sent_z(self, task: Task) -> float:
        return SENT_MARGIN * self.stage_z(task)


def _ends(pipeline: Pipeline, lengths_ns: Sequence[float]) -> list[float]:
    """By stage: the part of a pipeline's time after which it is due."""
    to_ns, from_ns = pipeline.longest_to(lengths_ns), pipeline.longest_from(lengths_ns)
    return [
        to / max(1.0, to + after - own)
        for to, after, own in zip(to_ns, from_ns, lengths_ns, strict=True)
    ]


def _rests(pipeline: Pipeline, builds: Builds) -> list[float]:
    """By stage: the part that it and what follows it have of the longest path through it."""
    lengths_ns = [max(1.0, builds.fastest_ns(s.function.id, 1)) for s in pipeline.stages]
    to_ns, from_ns = pipeline.longest_to(lengths_ns), pipeline.longest_from(lengths_ns)
    return [
        after / (to + after - own)
        for to, after, own in zip(to_ns, from_ns, lengths_ns, strict=True)
    ]
