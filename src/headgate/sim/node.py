"""A simulated node: the real Backend decides, the truth says how long it takes.

Work on a node runs exclusively (one slot), in slots, or, where the profile says that company slows
it down, by processor sharing: then every job's progress depends on how many there are, and the
next job to end is worked out anew whenever one comes or goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from headgate.core.actions import (
    Action,
    CancelBatch,
    Dispatch,
    EvictWeights,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.backend import Backend, Verdict
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    Rank,
    Refusal,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, Pool, Variant
from headgate.metrics.columns import SpanKind
from headgate.sim.event_queue import EventQueue, QueueItem
from headgate.sim.ground_truth import GroundTruth, has_cascades, unsure_tasks
from headgate.sim.recorder import Recorder

# The rent of a node that is ours only while it holds something.


@final
class NodeRental:
    """When the node was taken, whether it has booted, and how long it was paid for."""

    def __init__(self, pool: Pool) -> None:
        self._boot_ns = pool.boot_ns
        self._first_ns = pool.network_ns  # when what was ordered at once gets here
        self._since_ns: int | None = None
        self._booted_ns = 0
        self._paid_ns = 0

    def begin(self, now_ns: int) -> None:
        """Take the node, unless it is taken.

        What is ordered in the very first moment is there already: a run begins in the middle of
        things.
        """
        if self._since_ns is None:
            self._since_ns = now_ns
            self._booted_ns = now_ns + (0 if self._is_beginning(now_ns) else self._boot_ns)

    def ready_after_ns(self, now_ns: int, start_ns: int) -> int:
        """How long a start takes that is begun now."""
        if self._is_beginning(now_ns):
            return 0
        return max(0, self._booted_ns - now_ns) + start_ns

    def _is_beginning(self, now_ns: int) -> bool:
        return now_ns <= self._first_ns

    def end(self, now_ns: int) -> None:
        """Give the node back."""
        if self._since_ns is not None:
            self._paid_ns += now_ns - self._since_ns
            self._since_ns = None

    def paid_ns(self, end_ns: int) -> int:
        """How long it was paid for, up to the end of the run."""
        return self._paid_ns + (0 if self._since_ns is None else end_ns - self._since_ns)


RESTART_NS: Final = 20 * MILLISECOND_NS  # until a node that was killed is there again

# Interpreted, a name of the module is read many times faster than one of a class.
_BEGIN: Final = Verdict.BEGIN
_COMPLETION: Final = Rank.COMPLETION


@final
class NodeJob(QueueItem):
    """Something a node has begun: a start, a load or a batch."""

    __slots__ = ("began_ns", "ends_ns", "left_ns", "node", "order", "variant")

    def __init__(self, node: SimNode, order: Action, variant: Variant, began_ns: int) -> None:
        self.node = node
        self.order = order
        self.variant = variant
        self.began_ns = began_ns
        self.ends_ns = NEVER_NS  # if that is not worked out yet, or the node has crashed under it
        self.left_ns = 0.0  # work to go, where jobs share the processor


@final
class EventInTransit(QueueItem):
    """An event on its way to the Schedulers."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event = event


@final
class Wake(QueueItem):
    """A node looks at whether an instance has been idle for too long."""

    __slots__ = ("instance_id", "node")

    def __init__(self, node: SimNode, instance_id: int) -> None:
        self.node = node
        self.instance_id = instance_id


@final
class Restart(QueueItem):
    """A node that was killed is there again."""

    __slots__ = ("node",)

    def __init__(self, node: SimNode) -> None:
        self.node = node


@final
class SimNode:
    """One node: a Backend, the work it has begun, and whatever is wrong with it just now."""

    def __init__(
        self,
        id: int,
        name: str,
        pool: Pool,
        app: App,
        agenda: EventQueue,
        truth: GroundTruth,
        recorder: Recorder,
    ) -> None:
        self.id = id
        self.name = name
        self.pool = pool
        self._app = app
        self._variants = app.variants
        self._agenda = agenda
        self._truth = truth
        self._recorder = recorder
        self.backend = Backend(pool, app.variants)
        self.jobs: list[NodeJob] = []
        self._records_spans = recorder.records_spans
        self._has_cascades = has_cascades(app)
        self._shares = pool.slots > 1 and any(
            len(v.profile.slowdown) > 1 for v in app.variants if pool.id in v.pool_ids
        )
        self._retires_idle = pool.idle_timeout_ns < NEVER_NS
        self._changed_ns = 0  # when the set of jobs that share the processor last changed
        self.is_up = False
        self.up_since_ns = 0
        self.rent = NodeRental(pool) if pool.is_elastic else None
        # Faults in force; counted, because their windows may overlap.
        self.slow_factor = 1.0
        self.refuses = 0
        self.breaks = 0
        self.breaks_starts = 0
        self.loses = 0
        self.duplicates = 0
        # What it was used for.
        self.up_ns = 0
        self.busy_ns = 0
        self.cold_starts = 0
        self.loads = 0

    # --- orders --------------------------------------------------------------------------------

    def take(self, now_ns: int, order: Action) -> None:
        """Carry an order out, hold it or refuse it."""
        if isinstance(order, Dispatch):
            self.take_batch(now_ns, order)
        elif not self.is_up:
            self._take_while_down(now_ns, order)
        elif isinstance(order, StartInstance):
            if self.rent is not None:
                self.rent.begin(now_ns)
            self._settle_verdict(now_ns, order, self.backend.start(order))
        elif isinstance(order, LoadWeights):
            self._settle_verdict(now_ns, order, self.backend.load(order))
        elif isinstance(order, EvictWeights):
            if self.backend.evict(order.instance_id):
                self.report(now_ns, WeightsEvicted(order.instance_id))
        elif isinstance(order, StopInstance):
            if self.backend.stop(order.instance_id):
                self.report(now_ns, InstanceStopped(order.instance_id, "stopped"))
        elif isinstance(order, CancelBatch):
            held = self.backend.cancel(order.batch_id)
            if held is not None:
                self.report(now_ns, BatchRefused(held.batch_id, Refusal.CANCELLED))
                self._let_go(now_ns, held)

    def take_batch(self, now_ns: int, order: Dispatch) -> None:
        """Begin a batch, hold it or refuse it."""
        if self.refuses or not self.is_up:
            reason = Refusal.BUSY if self.is_up else Refusal.GONE
            self.report(now_ns, BatchRefused(order.batch_id, reason))
            return
        verdict = self.backend.offer(order)
        if verdict == _BEGIN:
            self._begin_batch(now_ns, order)
        else:
            self._settle_verdict(now_ns, order, verdict)

    def _take_while_down(self, now_ns: int, order: Action) -> None:
        if isinstance(order, StartInstance | StopInstance):
            self.report(now_ns, InstanceStopped(order.instance_id, "the node is down"))

    def _settle_verdict(self, now_ns: int, order: Action, verdict: int) -> None:
        if verdict == Verdict.BEGIN:
            if isinstance(order, Dispatch):
                self._begin_batch(now_ns, order)
            else:
                self._begin_preparing(now_ns, order)
        elif isinstance(order, Dispatch):
            if verdict == Verdict.HOLD:
                self._hold(now_ns, order)
            else:
                self.report(now_ns, BatchRefused(order.batch_id, _REFUSALS[verdict]))

    def _hold(self, now_ns: int, order: Dispatch) -> None:
        resident = self.backend.instances[_instance_id(order)]
        if resident.running and not resident.is_ready:
            self._recorder.waits_for_start(now_ns, order.task_ids)

    # --- work ----------------------------------------------------------------------------------

    def _begin_batch(self, now_ns: int, order: Dispatch) -> None:
        variant = self._variants[order.variant_id]
        length_ns = self._truth.exec_ns(variant, order.items)
        if order.moved_bytes and self.pool.bytes_per_s > 0:
            length_ns += int(order.moved_bytes / self.pool.bytes_per_s * 1e9)
        self._recorder.began(now_ns, order.task_ids)
        self._begin(NodeJob(self, order, variant, now_ns), length_ns)

    def _begin_preparing(self, now_ns: int, order: Action) -> None:
        """Begin a start or a load; that counts as work for those who wait for it."""
        instance_id = _instance_id(order)
        variant = self.backend.instances[instance_id].variant
        if isinstance(order, StartInstance):
            self.cold_starts += 1
            length_ns = variant.profile.cold_start_ns
            if self.rent is not None:
                length_ns = self.rent.ready_after_ns(now_ns, length_ns)
        else:
            self.loads += 1
            length_ns = variant.profile.swap_in_ns
        for waiting in self.backend.held_batches():
            if waiting.instance_id == instance_id:
                self._recorder.waits_for_start(now_ns, waiting.task_ids)
        self._begin(NodeJob(self, order, variant, now_ns), length_ns)

    def _begin(self, job: NodeJob, length_ns: int) -> None:
        if self.slow_factor != 1.0:
            length_ns = int(length_ns * self.slow_factor)
        if self._shares:
            self._progress(job.began_ns)
            job.left_ns = float(length_ns)
            self.jobs.append(job)
            self._reschedule(job.began_ns)
        else:
            self.jobs.append(job)
            job.ends_ns = job.began_ns + length_ns
            self._agenda.push(job.ends_ns, _COMPLETION, job)

    def end_job(self, now_ns: int, job: NodeJob) -> Event | None:
        """A job has come to its end: say what the Schedulers are told, if anything."""
        if job.ends_ns != now_ns:
            return None  # the node crashed under it, or its end was worked out anew
        if self._shares:
            self._progress(now_ns)
            job.ends_ns = NEVER_NS  # it may be on the agenda twice
        self.jobs.remove(job)
        order = job.order
        self.busy_ns += now_ns - job.began_ns
        has_more_to_do = self.backend.on_ended(now_ns, order)
        event: Event | None
        if not isinstance(order, Dispatch):
            event = self._prepared(now_ns, order)
        elif self.loses or self.breaks or self.duplicates:
            event = self._faulty_end(now_ns, order)
        elif self._has_cascades:
            event = self._finished(order)
        else:
            event = BatchFinished(order.batch_id)
        if self._records_spans:
            self._record(now_ns, job)
        if has_more_to_do or self._retires_idle:
            self._after(now_ns, order)
        if self._shares:
            self._reschedule(now_ns)
        return event

    def _record(self, now_ns: int, job: NodeJob) -> None:
        order, function_id, began_ns = job.order, job.variant.function_id, job.began_ns
        if isinstance(order, Dispatch):
            kind, id, items = SpanKind.RUN, order.batch_id, order.items
        else:
            kind = SpanKind.START if isinstance(order, StartInstance) else SpanKind.LOAD
            id, items = _instance_id(order), 0
        self._recorder.span(self.id, function_id, kind, began_ns, now_ns, id, items)

    def _faulty_end(self, now_ns: int, order: Dispatch) -> Event | None:
        if self.loses:
            return None
        if self.breaks:
            return BatchFailed(order.batch_id, "broken by a fault")
        self.report(now_ns, self._finished(order))
        return self._finished(order)

    def _finished(self, order: Dispatch) -> BatchFinished:
        unsure: tuple[int, ...] = ()
        if self._has_cascades:
            unsure = unsure_tasks(self._app, self._recorder, order.task_ids)
        return BatchFinished(order.batch_id, unsure)

    def _prepared(self, now_ns: int, order: Action) -> Event:
        instance_id = _instance_id(order)
        if not isinstance(order, StartInstance):
            return WeightsLoaded(instance_id)
        function_id = self.backend.instances[instance_id].variant.function_id
        if not self.breaks_starts and function_id not in self._truth.unloadable:
            return InstanceStarted(instance_id, self.id)
        for batch in self.backend.on_start_failed(instance_id):
            self.report(now_ns, BatchRefused(batch.batch_id, Refusal.GONE))
        self._let_node_go(now_ns)
        return InstanceStopped(instance_id, "failed to start")

    def _after(self, now_ns: int, order: Action) -> None:
        """Begin what was held back; let an instance go that was only to finish this."""
        self._pump(now_ns)
        if not self._let_go(now_ns, order) and self._retires_idle:
            at_ns = now_ns + self.pool.idle_timeout_ns
            self._agenda.push(at_ns, Rank.COMPLETION, Wake(self, _instance_id(order)))

    def _pump(self, now_ns: int) -> None:
        for held in self.backend.begin_held():
            self._settle_verdict(now_ns, held, _BEGIN)

    def _let_go(self, now_ns: int, order: Action) -> bool:
        """An order is over: whether its instance was to stop after that, and has."""
        left = self.backend.evicted_instance(order)
        if left is not None:
            self.report(now_ns, WeightsEvicted(left))
        gone = self.backend.drained_instance(order)
        if gone is not None:
            self.report(now_ns, InstanceStopped(gone, "stopped"))
        return gone is not None

    def wake(self, now_ns: int, instance_id: int) -> None:
        """Retire an instance that has long been idle."""
        if self.is_up and self.backend.retire_idle(now_ns, instance_id):
            self.report(now_ns, InstanceStopped(instance_id, "idle for too long"))

    def _let_node_go(self, now_ns: int) -> None:
        """Pay no longer for a node that holds nothing."""
        if self.rent is not None and not self.backend.instances:
            self.rent.end(now_ns)

    # --- processor sharing ---------------------------------------------------------------------

    def _progress(self, now_ns: int) -> None:
        """Credit every job with what it has done since the last change."""
        elapsed_ns = now_ns - self._changed_ns
        self._changed_ns = now_ns
        if elapsed_ns:
            count = len(self.jobs)
            for job in self.jobs:
                job.left_ns -= elapsed_ns / job.variant.profile.slowdown_at(count)

    def _reschedule(self, now_ns: int) -> None:
        """Work out which job ends next, at the pace of the present company."""
        best: NodeJob | None = None
        best_ns = 0.0
        count = len(self.jobs)
        for job in self.jobs:
            togo_ns = job.left_ns * job.variant.profile.slowdown_at(count)
            job.ends_ns = NEVER_NS  # the end worked out before does not hold any more
            if best is None or togo_ns < best_ns:
                best, best_ns = job, togo_ns
        if best is not None:
            ends_ns = now_ns + max(0, int(best_ns + 0.5))
            best.ends_ns = ends_ns
            self._agenda.push(ends_ns, Rank.COMPLETION, best)

    # --- faults --------------------------------------------------------------------------------

    def crash(self, now_ns: int) -> list[Event]:
        """Everything on the node is lost; what was asked of it ends in these events."""
        events: list[Event] = []
        for job in self.jobs:
            job.ends_ns = NEVER_NS
            self.busy_ns += now_ns - job.began_ns
            if isinstance(job.order, Dispatch):
                events.append(BatchLost(job.order.batch_id))
        events.extend(BatchLost(order.batch_id) for order in self.backend.held_batches())
        self.jobs = []
        self.backend = Backend(self.pool, self._app.variants)
        self.is_up = False
        self.up_ns += now_ns - self.up_since_ns
        self._let_node_go(now_ns)
        return events

    def join(self, now_ns: int) -> None:
        """The node is there, empty."""
        self.is_up = True
        self.up_since_ns = now_ns

    def report(self, now_ns: int, event: Event) -> None:
        """Tell the Schedulers; it takes the network's time to get there."""
        if self.rent is not None and isinstance(event, InstanceStopped):
            self._let_node_go(now_ns)
        self._agenda.push(now_ns + self.pool.network_ns, Rank.COMPLETION, EventInTransit(event))


_REFUSALS: Final[Mapping[int, int]] = {
    Verdict.BUSY: Refusal.BUSY,
    Verdict.GONE: Refusal.GONE,
}


def _instance_id(order: Action) -> int:
    assert isinstance(order, Dispatch | StartInstance | LoadWeights)
    assert order.instance_id is not None
    return order.instance_id
