"""A simulated FaaS platform: a serverless pool that reuses or starts its own instances.

- Every concurrent call has an instance of its own. The instance used last is reused first; an idle
  instance is dropped after its keep-alive, and one beyond its maximum age is not reused.
- Cold starts take tokens from a bucket: its size is the burst concurrency, and it refills at a set
  rate. A call beyond the concurrency limit, or one that needs a cold start while the bucket is
  empty, is throttled.
- A call whose payload exceeds the platform's limit is refused.
- Instances can be kept warm in two ways. Provisioned concurrency exists for as long as it is paid
  for; other instances are kept by calling (pinging) them periodically.
"""

from __future__ import annotations

from functools import partial
from typing import final

from headgate.core.actions import Dispatch, KeepWarm
from headgate.core.clock import NEVER_NS
from headgate.core.events import BatchFinished, BatchRefused, Rank, Refusal
from headgate.core.model import App, FaasPlatform, Pool
from headgate.core.token_bucket import TokenBucket
from headgate.metrics.columns import SpanKind
from headgate.planning.pools.warm_pool import ReadyCount
from headgate.sim.event_queue import Callback, EventQueue, QueueItem
from headgate.sim.ground_truth import GroundTruth, has_cascades, unsure_tasks
from headgate.sim.host import SimHost
from headgate.sim.node import EventInTransit
from headgate.sim.recorder import Recorder


@final
class ProvisionedConcurrency:
    """The provisioned instances of one variant: how many are ready, in use and paid for."""

    def __init__(self, spec: FaasPlatform) -> None:
        self._spec = spec
        self._count = 0  # instances paid for
        self._ready = ReadyCount()  # of those, ready
        self._running = 0
        self._since_ns = 0
        self._held_ns = 0  # instances x time, up to `_since_ns`

    def resize(self, now_ns: int, count: int) -> None:
        """Provision `count` instances: growing takes the provisioning time, shrinking none."""
        self._accrue(now_ns)
        self._ready.resize(now_ns, count, self._spec.provisioning_ns)
        self._count = count

    def acquire(self, now_ns: int) -> bool:
        """Occupy a ready instance; return False if none is free."""
        if self._running >= self._ready.at(now_ns):
            return False
        self._running += 1
        return True

    def release(self) -> None:
        """Free an instance that `acquire` occupied."""
        self._running -= 1

    def usd(self, end_ns: int) -> float:
        """Return the cost of having the instances until `end_ns`, without that of their calls."""
        self._accrue(end_ns)
        return self._held_ns / 1e9 * self._spec.gigabytes * self._spec.provisioned_usd_per_gb_s

    def _accrue(self, now_ns: int) -> None:
        self._held_ns += self._count * (now_ns - self._since_ns)
        self._since_ns = now_ns


@final
class IdleInstance:
    """An instance that is warm and not in use."""

    __slots__ = ("born_ns", "since_ns")

    def __init__(self, born_ns: int, since_ns: int) -> None:
        self.born_ns = born_ns
        self.since_ns = since_ns


@final
class SimInvocation(QueueItem):
    """A call in progress; on the event queue it stands for the end of the call."""

    __slots__ = (
        "began_ns",
        "born_ns",
        "dispatch",
        "ends_ns",
        "is_provisioned",
        "left_ns",
        "platform",
        "start_ns",
    )

    def __init__(
        self,
        platform: SimFaasPlatform,
        dispatch: Dispatch,
        began_ns: int,
        born_ns: int,
        start_ns: int,
        is_provisioned: bool,
    ) -> None:
        self.platform = platform
        self.dispatch = dispatch
        self.began_ns = began_ns
        self.born_ns = born_ns
        self.start_ns = start_ns
        self.is_provisioned = is_provisioned
        self.ends_ns = NEVER_NS  # while the end is not known
        self.left_ns = 0.0  # remaining work, on a host


@final
class SimFaasPlatform:
    """The platform behind one serverless pool."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        spec: FaasPlatform,
        app: App,
        queue: EventQueue,
        truth: GroundTruth,
        recorder: Recorder,
        host: SimHost | None = None,
    ) -> None:
        self.id = id  # index among the resources of the run
        self.pool = pool
        self._spec = spec
        self._app = app
        self._queue = queue
        self._truth = truth
        self._recorder = recorder
        self._has_cascades = has_cascades(app)
        self._idle: dict[int, list[IdleInstance]] = {}  # by variant id, a stack
        self._running_of: dict[int, int] = {}  # by variant id, instances being started included
        self._running = 0
        self._starts = TokenBucket(float(spec.burst_concurrency), spec.burst_refill_per_s)
        self._ping_counts: dict[int, int] = {}  # by variant id: instances kept warm by pings
        self._ping_cycles: dict[int, int] = {}  # by variant id: `KeepWarm` actions so far
        self._provisioned: dict[int, ProvisionedConcurrency] = {}
        self._host = host
        self._host_number = 0 if host is None else host.join(self)
        self._calls: list[SimInvocation] = []  # in progress, on a host
        self._changed_ns = 0  # when they, or the slowdown of the host, last changed
        self._slowdown = 1.0  # since then
        self.throttles = 0  # faults in force
        self.busy_ns = 0
        self.up_ns = 0
        self.cold_starts = 0
        self._calls_usd = 0.0

    def cost_usd(self, end_ns: int) -> float:
        """Return the cost of all calls and of provisioned concurrency until `end_ns`."""
        return self._calls_usd + sum(p.usd(end_ns) for p in self._provisioned.values())

    def invoke(self, now_ns: int, dispatch: Dispatch) -> None:
        """Run a batch on a warm or a new instance, or refuse it: too large, or throttled."""
        if dispatch.moved_bytes > self._spec.payload_bytes_max:
            self._refuse(now_ns, dispatch, Refusal.TOO_LARGE)
            return
        variant_id = dispatch.variant_id
        provisioned = self._provisioned.get(variant_id)
        is_provisioned = provisioned is not None and provisioned.acquire(now_ns)
        instance = None if is_provisioned else self._pop_idle(now_ns, variant_id)
        is_full = self._running >= self._spec.concurrency_max or self.throttles > 0
        can_begin = is_provisioned or instance is not None or self._starts.refill(now_ns)
        if is_full or not can_begin:
            if instance is not None:
                self._idle[variant_id].append(instance)
            if is_provisioned and provisioned is not None:
                provisioned.release()
            self._refuse(now_ns, dispatch, Refusal.THROTTLED)
            return
        start_ns = 0
        if instance is not None:
            self.up_ns += now_ns - instance.since_ns
        elif not is_provisioned:
            start_ns = self._start(variant_id)
            self.cold_starts += 1
        born_ns = now_ns if instance is None else instance.born_ns
        self._begin(SimInvocation(self, dispatch, now_ns, born_ns, start_ns, is_provisioned))

    def _begin(self, invocation: SimInvocation) -> None:
        dispatch, now_ns, start_ns = invocation.dispatch, invocation.began_ns, invocation.start_ns
        self._running += 1
        self._change_running(dispatch.variant_id, 0 if invocation.is_provisioned else 1)
        self._recorder.began(now_ns, self.id, dispatch.task_ids)
        if start_ns:
            self._recorder.waiting_for_start(now_ns, dispatch.task_ids)
        variant = self._app.variants[dispatch.variant_id]
        length_ns = start_ns + self._truth.exec_ns(variant, dispatch.items)
        if dispatch.moved_bytes and self.pool.bytes_per_s > 0:
            length_ns += int(dispatch.moved_bytes / self.pool.bytes_per_s * 1e9)
        if self._host is None:
            invocation.ends_ns = now_ns + length_ns
            self._queue.push(invocation.ends_ns, Rank.COMPLETION, invocation)
        else:
            self._progress(now_ns)
            invocation.left_ns = float(length_ns)
            self._calls.append(invocation)
            self._reschedule(now_ns)

    def on_host_changed(self, now_ns: int) -> None:
        """The slowdown of the host has changed: until now it was another."""
        self._progress(now_ns)
        self._reschedule(now_ns)

    def _progress(self, now_ns: int) -> None:
        """Credit every call on the host with its progress since the last change."""
        done_ns = (now_ns - self._changed_ns) / self._slowdown
        self._changed_ns = now_ns
        for call in self._calls:
            call.left_ns -= done_ns

    def _reschedule(self, now_ns: int) -> None:
        """Schedule the end of the call that ends next at the host's present slowdown."""
        assert self._host is not None
        variants = self._app.variants
        wanted_milli = sum(variants[c.dispatch.variant_id].wanted_cpu_milli() for c in self._calls)
        self._host.want(now_ns, self._host_number, wanted_milli)
        self._slowdown = self._host.slowdown
        for call in self._calls:
            call.ends_ns = NEVER_NS  # voids the item that an earlier computation has queued
        if self._calls:
            first = min(self._calls, key=lambda call: call.left_ns)
            first.ends_ns = now_ns + max(0, int(first.left_ns * self._slowdown + 0.5))
            self._queue.push(first.ends_ns, Rank.COMPLETION, first)

    def complete(self, now_ns: int, invocation: SimInvocation) -> BatchFinished | None:
        """End a call that is due: bill it and make its instance idle.

        Returns the event for the Scheduler; None if the end of the call has been rescheduled.
        """
        if invocation.ends_ns != now_ns:
            return None
        if self._host is not None:
            self._progress(now_ns)
            invocation.ends_ns = NEVER_NS  # a rescheduled call may be on the queue twice
            self._calls.remove(invocation)
            self._reschedule(now_ns)
        dispatch = invocation.dispatch
        self._running -= 1
        if invocation.is_provisioned:
            self._provisioned[dispatch.variant_id].release()
        else:
            self._change_running(dispatch.variant_id, -1)
            self._put_idle(now_ns, dispatch.variant_id, invocation.born_ns)
        length_ns = now_ns - invocation.began_ns
        self.busy_ns += length_ns
        self.up_ns += length_ns
        billed_ns = length_ns if self._spec.bills_cold_start else length_ns - invocation.start_ns
        self._calls_usd += self._spec.usd(billed_ns, is_provisioned=invocation.is_provisioned)
        self._record(now_ns, invocation)
        if not self._has_cascades:
            return BatchFinished(dispatch.batch_id)
        unsure = unsure_tasks(self._app, self._recorder, dispatch.task_ids)
        return BatchFinished(dispatch.batch_id, unsure)

    def _record(self, now_ns: int, invocation: SimInvocation) -> None:
        dispatch, began_ns = invocation.dispatch, invocation.began_ns
        function_id = self._app.variants[dispatch.variant_id].function_id
        if invocation.start_ns:
            ready_ns = began_ns + invocation.start_ns
            self._recorder.span(
                self.id, function_id, SpanKind.START, began_ns, ready_ns, dispatch.batch_id, 0
            )
            began_ns = ready_ns
        self._recorder.span(
            self.id, function_id, SpanKind.RUN, began_ns, now_ns, dispatch.batch_id, dispatch.items
        )

    def _pop_idle(self, now_ns: int, variant_id: int) -> IdleInstance | None:
        """Take the idle instance that was used last and is not too old, if there is one."""
        idle = self._idle.get(variant_id)
        if not idle:
            return None
        self._forget_expired(now_ns, idle)
        while idle:
            instance = idle.pop()
            if now_ns - instance.born_ns <= self._spec.age_max_ns:
                return instance
        return None

    def _put_idle(self, now_ns: int, variant_id: int, born_ns: int) -> None:
        self._idle.setdefault(variant_id, []).append(IdleInstance(born_ns, now_ns))

    def _forget_expired(self, now_ns: int, idle: list[IdleInstance]) -> None:
        keep_alive_ns = self._spec.keep_alive_ns
        expired = 0
        while expired < len(idle) and now_ns - idle[expired].since_ns > keep_alive_ns:
            self.up_ns += keep_alive_ns
            expired += 1
        del idle[:expired]

    def _change_running(self, variant_id: int, change: int) -> None:
        self._running_of[variant_id] = self._running_of.get(variant_id, 0) + change

    def _start(self, variant_id: int) -> int:
        self._starts.take_refilled()
        return self._app.variants[variant_id].profile.cold_start_ns

    def keep_warm(self, now_ns: int, action: KeepWarm) -> None:
        """Keep `count` instances warm from now on, provisioned or by pings as the action says."""
        variant_id = action.variant_id
        provisioned = self._provisioned.setdefault(variant_id, ProvisionedConcurrency(self._spec))
        provisioned.resize(now_ns, action.count if action.is_provisioned else 0)
        self._ping_counts[variant_id] = 0 if action.is_provisioned else action.count
        cycle = self._ping_cycles[variant_id] = self._ping_cycles.get(variant_id, 0) + 1
        self._ping(variant_id, cycle, now_ns)

    def _ping(self, variant_id: int, cycle: int, now_ns: int) -> None:
        """Ping the instances that are kept warm, start the missing ones, and do so again later."""
        count = self._ping_counts[variant_id]
        is_over = cycle != self._ping_cycles[variant_id] or count == 0
        if is_over or self._spec.ping_every_ns == 0:  # without keep-alive pings keep nothing warm
            return
        idle = self._idle.setdefault(variant_id, [])
        self._forget_expired(now_ns, idle)
        idle[:] = [i for i in idle if now_ns - i.born_ns <= self._spec.age_max_ns]
        for instance in idle[-count:]:
            self.up_ns += now_ns - instance.since_ns
            instance.since_ns = now_ns
            self._calls_usd += self._spec.usd(self._spec.ping_ns)
        for _ in range(count - len(idle) - self._running_of.get(variant_id, 0)):
            self._start_keep_warm(now_ns, variant_id)
        again = Callback(partial(self._ping, variant_id, cycle))
        self._queue.push(now_ns + self._spec.ping_every_ns, Rank.TIMER, again)

    def _start_keep_warm(self, now_ns: int, variant_id: int) -> None:
        is_full = self._running >= self._spec.concurrency_max or self.throttles > 0
        if is_full or not self._starts.refill(now_ns):
            return
        start_ns = self._start(variant_id)
        self._running += 1
        self._change_running(variant_id, 1)
        billed_ns = self._spec.ping_ns + (start_ns if self._spec.bills_cold_start else 0)
        self._calls_usd += self._spec.usd(billed_ns)
        ready = Callback(partial(self._on_kept_warm_ready, variant_id))
        self._queue.push(now_ns + start_ns, Rank.COMPLETION, ready)

    def _on_kept_warm_ready(self, variant_id: int, now_ns: int) -> None:
        self._running -= 1
        self._change_running(variant_id, -1)
        self._put_idle(now_ns, variant_id, now_ns)

    def _refuse(self, now_ns: int, dispatch: Dispatch, refusal: int) -> None:
        report = EventInTransit(BatchRefused(dispatch.batch_id, refusal))
        self._queue.push(now_ns + self.pool.network_ns, Rank.COMPLETION, report)
