"""Spillover to FaaS: whether a call would be in time, and how many instances to keep warm.

The warm instances of a function are the lanes of its calls: a task is promised a call if a warm
instance is free in time, or if there is time for a cold start. The concurrency that the waiting
calls need to be in time, whether they were admitted or not, sets the size of the warm pool.

All functions share the concurrency of a platform, and an instance that is started to be kept warm
takes part of it until it has started, as a call does. So no more are started at once than the other
functions leave, above all those that run nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.model import FaasPlatform
from headgate.core.records import Batch, Task
from headgate.core.states import BATCH_FINISHED, BatchState
from headgate.core.view import View
from headgate.planning.constants import RESIZES_PER_START, SCALE_IN_BELOW
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.warm_pool import WarmPool, WarmPoolEstimate

_WITHIN_WINDOW: Final = exp(-1.0)  # what is left of recent work after the length of the window


@dataclass(frozen=True)
class Resize:
    """A decision: how many instances a platform should keep warm, and how."""

    count: int
    is_provisioned: bool


@final
class _Window:
    """The work of calls about within a time, which decays."""

    __slots__ = ("_at_ns", "_work_ns", "length_ns")

    def __init__(self, now_ns: int, length_ns: float) -> None:
        self.length_ns = length_ns
        self._work_ns = 0.0
        self._at_ns = now_ns

    def work_ns(self, now_ns: int, length_ns: float) -> float:
        return self._work_ns * exp((self._at_ns - now_ns) / length_ns)

    def add(self, added_ns: float, now_ns: int) -> None:
        self._work_ns = self.work_ns(now_ns, self.length_ns) + added_ns
        self._at_ns = now_ns


@final
class _RecentWork:
    """The work of recent calls, within windows of every order of magnitude that is asked for.

    A function may be called for objectives of seconds and of milliseconds: what is long ago for
    these is recent for those.
    """

    __slots__ = ("_task_id", "_windows")

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}  # by the number of bits of their length
        self._task_id = -1  # of the last one: several divisions of a pipeline's time may be tried

    def work_ns(self, now_ns: int, window_ns: float) -> float:
        """The work that was added about within the window."""
        window = self._windows.get(int(window_ns).bit_length())
        return 0.0 if window is None else window.work_ns(now_ns, window_ns)

    def add(self, task_id: int, added_ns: float, now_ns: int, window_ns: float) -> float:
        """Count a task once, and return the work about within the window, the task's included."""
        bits = int(window_ns).bit_length()
        own = self._windows.get(bits)
        if own is None:
            own = self._windows[bits] = _Window(now_ns, window_ns)
            if task_id == self._task_id:
                own.add(added_ns, now_ns)
        own.length_ns = window_ns
        if task_id != self._task_id:
            self._task_id = task_id
            for window in self._windows.values():
                window.add(added_ns, now_ns)
        return own.work_ns(now_ns, window_ns)


@final
class Spillover:
    """The calls of each function that has a FaaS target."""

    def __init__(self, view: View, builds: Builds) -> None:
        self._view = view
        self._on_pool: list[list[Build]] = [[] for _ in view.app.pools]
        # By pool: with instances that are starting. Of many functions, few are at a time.
        self._starting: list[dict[WarmPoolEstimate, None]] = [{} for _ in view.app.pools]
        for build in builds.faas:
            if build is not None:
                self._on_pool[build.pool.id].append(build)
                _faas(build)[0].instances.starting_there = self._starting[build.pool.id]
        self._has_nodes = [any(b.warm_pool is None for b in row) for row in builds.of_function]
        self._next_resize_ns = [0 for _ in view.app.functions]
        # By function: of all calls, and of those that could not have been in time.
        self._wanted = [_RecentWork() for _ in view.app.functions]
        self._missed = [_RecentWork() for _ in view.app.functions]

    def can_start_by(
        self,
        build: Build,
        task: Task,
        batches: float,
        latest_ns: int,
        ahead_ns: float,
        *,
        may_start: bool = True,
        is_trial: bool = False,
    ) -> bool:
        """Whether so many more calls can begin in time, behind the work that is due before.

        `ahead_ns` is that work, of all functions on the platform: what is due later waits.

        They begin on instances that are warm or being started, or after a cold start if they may
        start an instance themselves. A trial is no demand.
        """
        warm_pool, platform = _faas(build)
        now_ns, lanes = self._view.now_ns, warm_pool.lanes
        batch_ns = build.mean_pending_ns()
        ahead_ns = min(ahead_ns, float(build.pending_ns))
        if not is_trial:
            self._observe_demand(build, task, batches * batch_ns, latest_ns, ahead_ns, batch_ns)
        needed_in_all = min(build.pending_batches, ahead_ns / batch_ns) + batches
        needed = needed_in_all
        lanes.resize(min(platform.concurrency_max, warm_pool.instances.size(now_ns)))
        # Instances that are being started add starts of their own.
        size = lanes.lanes
        for ready_ns, count in warm_pool.instances.starting(now_ns):
            if ready_ns > latest_ns:
                break
            ready = min(platform.concurrency_max, count)
            needed -= (ready - size) * (1 + int((latest_ns - ready_ns) / batch_ns))
            size = ready
        if lanes.can_start(now_ns, latest_ns, batch_ns, needed):
            return True
        cold_latest_ns = latest_ns - build.cold_start_ns
        if may_start and lanes.can_start(
            now_ns, cold_latest_ns, batch_ns, needed_in_all, platform.concurrency_max
        ):
            return True
        if not is_trial:
            items, window_ns = min(task.request.items, build.items_max), latest_ns - now_ns
            missed = self._missed[build.function_id]
            missed.add(task.id, build.lane_ns(items), now_ns, max(0.0, window_ns) + batch_ns)
        return False

    def _observe_demand(
        self,
        build: Build,
        task: Task,
        work_ns: float,
        latest_ns: int,
        ahead_ns: float,
        batch_ns: float,
    ) -> None:
        """Observe the concurrency with which the recent calls, and this one, would be in time.

        Where an instance can start several calls in time, one after the other, what counts is the
        work of a window of so many calls: requests that come together need no instance each.

        Else, and where calls were missed within the window, instances that are busy count whole:
        while calls arrive as before, each is followed by the next, and what waits needs others.
        More would be ordered only when the waiting calls fill the window, which is a cold start too
        late. Calls that were refused within the window would be waiting too.
        """
        now_ns, function_id, warm_pool = self._view.now_ns, build.function_id, _faas(build)[0]
        slack_ns = max(0.0, float(latest_ns - now_ns))
        calls_in_turn = 1 + int(slack_ns / batch_ns)
        window_ns = calls_in_turn * batch_ns
        wanted_ns = self._wanted[function_id].add(task.id, work_ns, now_ns, window_ns)
        missed_ns = self._missed[function_id].work_ns(now_ns, slack_ns + batch_ns)
        one_ns = build.lane_ns(1)
        if calls_in_turn > 1 and missed_ns < one_ns * _WITHIN_WINDOW:
            warm_pool.observe_demand(now_ns, wanted_ns / window_ns)
            return
        waiting = (ahead_ns + missed_ns + one_ns) / (slack_ns + batch_ns)
        warm_pool.observe_demand(now_ns, warm_pool.instances.busy + waiting)

    def resize_at_ns(self, build: Build) -> int | None:
        """When to resize the warm pool, if its size should grow: after a moment, once for all."""
        warm_pool, _ = _faas(build)
        now_ns, function_id = self._view.now_ns, build.function_id
        if (
            now_ns < self._next_resize_ns[function_id]
            or warm_pool.desired(now_ns) <= warm_pool.requested
        ):
            return None
        at_ns = now_ns + build.cold_start_ns // RESIZES_PER_START
        self._next_resize_ns[function_id] = at_ns
        return at_ns

    def resize(self, build: Build) -> Resize | None:
        """The new size of the warm pool; None to leave it as it is."""
        warm_pool, _ = _faas(build)
        now_ns, requested = self._view.now_ns, warm_pool.requested
        count = warm_pool.desired(now_ns)
        is_provisioned = warm_pool.is_provisioned_cheaper(count)
        if not is_provisioned and count > requested:
            startable = warm_pool.instances.size(now_ns) + self._starts_max(build)
            count = min(count, max(requested, startable))
        if SCALE_IN_BELOW * requested <= count <= requested:
            return None
        warm_pool.requested = count
        return Resize(count, is_provisioned)

    def _starts_max(self, build: Build) -> int:
        """How many instances to start at once: what other functions need of the platform is left.

        A function that runs on nodes, too, leaves what those need that do not; beyond that, one
        start is always possible, or functions of equal rank would wait for each other.
        """
        warm_pool, platform = _faas(build)
        has_nodes = self._has_nodes[build.function_id]
        spare = float(platform.concurrency_max - warm_pool.instances.busy)
        equal = 0.0
        for other in self._on_pool[build.pool.id]:
            if other is not build:
                needed = _faas(other)[0].recent_demand(self._view.now_ns)
                if has_nodes == self._has_nodes[other.function_id]:
                    equal += needed
                elif has_nodes:
                    spare -= needed
        return max(0, int(min(spare, max(1.0, spare - equal))))

    def review_at_ns(self, build: Build) -> int | None:
        """Take note of what is kept warm; when to look again, if anything is."""
        warm_pool, _ = _faas(build)
        now_ns = self._view.now_ns
        # The circuit breaker and the budgets may grant fewer than requested.
        key = (build.pool.id, build.variant.id)
        kept, is_provisioned = self._view.kept_warm.get(key, (0, False))
        if kept != warm_pool.instances.desired:
            warm_pool.instances.set_desired(now_ns, kept, is_provisioned=is_provisioned)
        if not warm_pool.desired(now_ns):
            return None
        next_ready_ns = warm_pool.instances.next_ready_ns(now_ns)
        return now_ns + SECOND_NS if next_ready_ns is None else next_ready_ns

    def may_call(self, build: Build, task: Task, *, may_start: bool = True) -> bool:
        """Whether to call now: on a warm instance, or with a cold start that is in time.

        A call that a cold start would make late, or too dear (`may_start`), waits for an instance
        that is being started; where there is none, the call itself starts one.
        """
        now_ns, instances = self._view.now_ns, _faas(build)[0].instances
        if not self._has_concurrency(build):
            return False
        if instances.idle(now_ns) > 0:
            return True
        cold_ns = build.cold_start_ns + build.lane_ns(min(task.request.items, build.items_max))
        if may_start and now_ns + cold_ns <= task.request.deadline_ns:
            return True
        return instances.size(now_ns) == 0 and not instances.is_starting(now_ns)

    def start_ns(self, build: Build) -> int:
        """The cold start with which a call that is sent now begins; 0 on a warm instance."""
        is_warm = _faas(build)[0].instances.idle(self._view.now_ns) > 0
        return 0 if is_warm else build.cold_start_ns

    def has_warm(self, build: Build, task: Task) -> bool:
        """Whether a call for a task that was promised elsewhere would find a warm instance."""
        view, instances = self._view, _faas(build)[0].instances
        return (
            self._has_concurrency(build)
            and view.fits_call(task, build.pool, build.variant)
            and instances.idle(view.now_ns) > 0
        )

    def _has_concurrency(self, build: Build) -> bool:
        """Whether the platform takes one more call: its functions share its concurrency."""
        breaker, (_, platform) = self._view.breakers[build.pool.id], _faas(build)
        assert breaker is not None
        now_ns, on_pool = self._view.now_ns, self._starting_with(build)
        starting = sum([each.pings_starting(now_ns) for each in on_pool]) if on_pool else 0
        return (
            breaker.in_flight + starting < platform.concurrency_max
            and self._view.is_pool_available(build.pool.id)
        )

    def retry_at_ns(self, build: Build) -> int | None:
        """When an instance that is starting on the platform will be warm; None if none is."""
        now_ns, on_pool = self._view.now_ns, self._starting_with(build)
        ready_ns = [each.next_ready_ns(now_ns) for each in on_pool]
        return min((at_ns for at_ns in ready_ns if at_ns is not None), default=None)

    def _starting_with(self, build: Build) -> dict[WarmPoolEstimate, None]:
        """The functions on the platform of a build of which instances are starting."""
        starting, now_ns = self._starting[build.pool.id], self._view.now_ns
        for each in [each for each in starting if not each.is_starting(now_ns)]:
            del starting[each]
        return starting

    def on_call(self, build: Build) -> None:
        """Record a call that is sent."""
        _faas(build)[0].on_call(self._view.now_ns)

    def on_call_ended(self, build: Build, batch: Batch) -> None:
        """Record the end of a call; if it ran, its instance is warm now."""
        has_run = batch.state in (BATCH_FINISHED, BatchState.FAILED)
        _faas(build)[0].instances.on_return(self._view.now_ns, ran=has_run)


def _faas(build: Build) -> tuple[WarmPool, FaasPlatform]:
    assert build.warm_pool is not None
    return build.warm_pool, build.warm_pool.target.platform
