"""A simulated function platform: a serverless pool that picks or starts its own instances.

An instance per concurrent request; the one used last is reused first; idle ones vanish after
keep-alive and old ones are not used again; starts draw from a burst that refills at a rate; beyond
the concurrency limit, or with the burst spent, a request is throttled; one that has more to bring
along than a call can carry is refused. Instances can be kept ready:
provisioned ones are there for as long as they are paid for, others are called now and then.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import Dispatch, KeepWarm
from headgate.core.events import BatchFinished, BatchRefused, Rank, Refusal
from headgate.core.model import App, FaasPlatform, Pool
from headgate.metrics.columns import SpanKind
from headgate.sim.event_queue import EventQueue, QueueItem
from headgate.sim.ground_truth import GroundTruth, has_cascades, unsure_tasks
from headgate.sim.node import EventInTransit
from headgate.sim.recorder import Recorder

# Provisioned instances of a function: there for as long as they are paid for.


@final
class ProvisionedConcurrency:
    """How many there are, how many are in use, and what they cost while they wait."""

    def __init__(self, spec: FaasPlatform) -> None:
        self._spec = spec
        self._count = 0  # paid for
        self._there = 0  # of those, so many are ready,
        self._coming: list[tuple[int, int]] = []  # and from when on how many, the soonest first
        self._running = 0
        self._since_ns = 0
        self._held_ns = 0  # instances x time

    def set(self, now_ns: int, count: int) -> None:
        """Have so many from now on; more take a while to come, fewer go at once."""
        self._account(now_ns)
        self._arrive(now_ns)
        self._there = min(self._there, count)
        self._coming = [(at_ns, min(there, count)) for at_ns, there in self._coming]
        if count > (self._coming[-1][1] if self._coming else self._there):
            self._coming.append((now_ns + self._spec.provisioning_ns, count))
        self._count = count

    def take(self, now_ns: int) -> bool:
        """Use one, if one is free."""
        self._arrive(now_ns)
        if self._running >= self._there:
            return False
        self._running += 1
        return True

    def give(self, now_ns: int) -> None:
        """It is free again."""
        self._running -= 1

    def usd(self, end_ns: int) -> float:
        """What they cost besides what their calls cost."""
        self._account(end_ns)
        return self._held_ns / 1e9 * self._spec.gigabytes * self._spec.provisioned_usd_per_gb_s

    def _arrive(self, now_ns: int) -> None:
        while self._coming and self._coming[0][0] <= now_ns:
            self._there = self._coming.pop(0)[1]

    def _account(self, now_ns: int) -> None:
        self._held_ns += self._count * (now_ns - self._since_ns)
        self._since_ns = now_ns


@final
class IdleInstance:
    """An instance that waits for a call."""

    __slots__ = ("born_ns", "since_ns")

    def __init__(self, born_ns: int, since_ns: int) -> None:
        self.born_ns = born_ns
        self.since_ns = since_ns


@final
class SimInvocation(QueueItem):
    """A batch that runs on the platform."""

    __slots__ = ("began_ns", "born_ns", "is_provisioned", "order", "platform", "start_ns")

    def __init__(
        self,
        platform: SimFaasPlatform,
        order: Dispatch,
        began_ns: int,
        born_ns: int,
        start_ns: int,
        is_provisioned: bool,
    ) -> None:
        self.platform = platform
        self.order = order
        self.began_ns = began_ns
        self.born_ns = born_ns
        self.start_ns = start_ns
        self.is_provisioned = is_provisioned


@final
class KeepWarmTick(QueueItem):
    """Instances come up that nobody has called, or it is time to call those that are kept."""

    __slots__ = ("platform", "round", "variant_id")

    def __init__(self, platform: SimFaasPlatform, variant_id: int, round: int | None) -> None:
        self.platform = platform
        self.variant_id = variant_id
        self.round = round  # of calls to keep instances awake; None: one has come up


@final
class SimFaasPlatform:
    """One serverless pool."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        spec: FaasPlatform,
        app: App,
        agenda: EventQueue,
        truth: GroundTruth,
        recorder: Recorder,
    ) -> None:
        self.id = id  # its row among the resources of the run
        self.pool = pool
        self._spec = spec
        self._app = app
        self._agenda = agenda
        self._truth = truth
        self._recorder = recorder
        self._has_cascades = has_cascades(app)
        self._idle: dict[int, list[IdleInstance]] = {}  # by variant id, a stack
        self._running_of: dict[int, int] = {}  # by variant id, those waking up included
        self._running = 0
        self._tokens = float(spec.burst_concurrency)
        self._refilled_ns = 0
        self._kept: dict[int, int] = {}  # by variant id: how many are called now and then
        self._rounds: dict[int, int] = {}
        self._provisions: dict[int, ProvisionedConcurrency] = {}
        self.throttles = 0  # faults in force
        self.busy_ns = 0
        self.up_ns = 0
        self.cold_starts = 0
        self.throttled = 0
        self._calls_usd = 0.0

    def cost_usd(self, end_ns: int) -> float:
        """The bill, up to the end of the run."""
        return self._calls_usd + sum(p.usd(end_ns) for p in self._provisions.values())

    # --- calls ---------------------------------------------------------------------------------

    def take(self, now_ns: int, order: Dispatch) -> None:
        """Run a batch on an idle instance or a new one, or refuse it: too large, or throttled."""
        if order.moved_bytes > self._spec.payload_bytes_max:
            self._report(now_ns, EventInTransit(BatchRefused(order.batch_id, Refusal.TOO_LARGE)))
            return
        variant_id = order.variant_id
        provision = self._provisions.get(variant_id)
        is_provisioned = provision is not None and provision.take(now_ns)
        idler = None if is_provisioned else self._pop_idle(now_ns, variant_id)
        is_full = self._running >= self._spec.concurrency_max or self.throttles > 0
        may_begin = is_provisioned or idler is not None or self._may_start(now_ns)
        if is_full or not may_begin:
            if idler is not None:
                self._idle[variant_id].append(idler)
            if is_provisioned and provision is not None:
                provision.give(now_ns)
            self.throttled += 1
            self._report(now_ns, EventInTransit(BatchRefused(order.batch_id, Refusal.THROTTLED)))
            return
        start_ns = 0
        if idler is not None:
            self.up_ns += now_ns - idler.since_ns
        elif not is_provisioned:
            start_ns = self._start(variant_id)
            self.cold_starts += 1
        born_ns = now_ns if idler is None else idler.born_ns
        self._begin(SimInvocation(self, order, now_ns, born_ns, start_ns, is_provisioned))

    def _begin(self, invocation: SimInvocation) -> None:
        order, now_ns, start_ns = invocation.order, invocation.began_ns, invocation.start_ns
        self._running += 1
        self._count(order.variant_id, 0 if invocation.is_provisioned else 1)
        self._recorder.began(now_ns, order.task_ids)
        if start_ns:
            self._recorder.waits_for_start(now_ns, order.task_ids)
        variant = self._app.variants[order.variant_id]
        length_ns = start_ns + self._truth.exec_ns(variant, order.items)
        if order.moved_bytes and self.pool.bytes_per_s > 0:
            length_ns += int(order.moved_bytes / self.pool.bytes_per_s * 1e9)
        self._agenda.push(now_ns + length_ns, Rank.COMPLETION, invocation)

    def end(self, now_ns: int, invocation: SimInvocation) -> BatchFinished:
        """A batch has run: its instance is idle, and the bill is written."""
        order = invocation.order
        self._running -= 1
        if invocation.is_provisioned:
            self._provisions[order.variant_id].give(now_ns)
        else:
            self._count(order.variant_id, -1)
            self._put_idle(now_ns, order.variant_id, invocation.born_ns)
        length_ns = now_ns - invocation.began_ns
        self.busy_ns += length_ns
        self.up_ns += length_ns
        billed_ns = length_ns if self._spec.bills_cold_start else length_ns - invocation.start_ns
        self._calls_usd += self._spec.usd(billed_ns, is_provisioned=invocation.is_provisioned)
        self._record(now_ns, invocation)
        if not self._has_cascades:
            return BatchFinished(order.batch_id)
        unsure = unsure_tasks(self._app, self._recorder, order.task_ids)
        return BatchFinished(order.batch_id, unsure)

    def _record(self, now_ns: int, invocation: SimInvocation) -> None:
        order, began_ns = invocation.order, invocation.began_ns
        function_id = self._app.variants[order.variant_id].function_id
        if invocation.start_ns:
            ready_ns = began_ns + invocation.start_ns
            self._recorder.span(
                self.id, function_id, SpanKind.START, began_ns, ready_ns, order.batch_id, 0
            )
            began_ns = ready_ns
        self._recorder.span(
            self.id, function_id, SpanKind.RUN, began_ns, now_ns, order.batch_id, order.items
        )

    # --- instances -----------------------------------------------------------------------------

    def _pop_idle(self, now_ns: int, variant_id: int) -> IdleInstance | None:
        """The instance that was used last, if one is there and not too old."""
        idle = self._idle.get(variant_id)
        if not idle:
            return None
        self._forget_expired(now_ns, idle)
        while idle:
            idler = idle.pop()
            if now_ns - idler.born_ns <= self._spec.age_max_ns:
                return idler
        return None

    def _put_idle(self, now_ns: int, variant_id: int, born_ns: int) -> None:
        self._idle.setdefault(variant_id, []).append(IdleInstance(born_ns, now_ns))

    def _forget_expired(self, now_ns: int, idle: list[IdleInstance]) -> None:
        keep_alive_ns = self._spec.keep_alive_ns
        gone = 0
        while gone < len(idle) and now_ns - idle[gone].since_ns > keep_alive_ns:
            self.up_ns += keep_alive_ns
            gone += 1
        del idle[:gone]

    def _count(self, variant_id: int, change: int) -> None:
        self._running_of[variant_id] = self._running_of.get(variant_id, 0) + change

    def _may_start(self, now_ns: int) -> bool:
        spec = self._spec
        elapsed_s = (now_ns - self._refilled_ns) / 1e9
        self._tokens = min(
            float(spec.burst_concurrency), self._tokens + elapsed_s * spec.burst_refill_per_s
        )
        self._refilled_ns = now_ns
        return self._tokens >= 1.0

    def _start(self, variant_id: int) -> int:
        self._tokens -= 1.0
        return self._app.variants[variant_id].profile.cold_start_ns

    # --- keeping them ready --------------------------------------------------------------------

    def keep_warm(self, now_ns: int, order: KeepWarm) -> None:
        """Keep so many instances ready from now on, by the means that the order names."""
        variant_id = order.variant_id
        provision = self._provisions.setdefault(variant_id, ProvisionedConcurrency(self._spec))
        provision.set(now_ns, order.count if order.is_provisioned else 0)
        self._kept[variant_id] = 0 if order.is_provisioned else order.count
        round = self._rounds[variant_id] = self._rounds.get(variant_id, 0) + 1
        self.awaken(now_ns, KeepWarmTick(self, variant_id, round))

    def awaken(self, now_ns: int, what: KeepWarmTick) -> None:
        """One has come up; or call as many as are to be kept, so that they stay, and start more."""
        variant_id = what.variant_id
        if what.round is None:
            self._running -= 1
            self._count(variant_id, -1)
            self._put_idle(now_ns, variant_id, now_ns)
            return
        kept = self._kept[variant_id]
        is_over = what.round != self._rounds[variant_id] or kept == 0
        if is_over or self._spec.ping_every_ns == 0:  # where none stays, calling keeps none
            return
        idle = self._idle.setdefault(variant_id, [])
        self._forget_expired(now_ns, idle)
        idle[:] = [i for i in idle if now_ns - i.born_ns <= self._spec.age_max_ns]
        for idler in idle[-kept:]:
            self.up_ns += now_ns - idler.since_ns
            idler.since_ns = now_ns
            self._calls_usd += self._spec.usd(self._spec.ping_ns)
        for _ in range(kept - len(idle) - self._running_of.get(variant_id, 0)):
            self._start_uncalled(now_ns, variant_id)
        self._agenda.push(now_ns + self._spec.ping_every_ns, Rank.TIMER, what)

    def _start_uncalled(self, now_ns: int, variant_id: int) -> None:
        is_full = self._running >= self._spec.concurrency_max or self.throttles > 0
        if is_full or not self._may_start(now_ns):
            return
        start_ns = self._start(variant_id)
        self._running += 1
        self._count(variant_id, 1)
        billed_ns = self._spec.ping_ns + (start_ns if self._spec.bills_cold_start else 0)
        self._calls_usd += self._spec.usd(billed_ns)
        self._agenda.push(now_ns + start_ns, Rank.COMPLETION, KeepWarmTick(self, variant_id, None))

    def _report(self, now_ns: int, report: EventInTransit) -> None:
        self._agenda.push(now_ns + self.pool.network_ns, Rank.COMPLETION, report)
