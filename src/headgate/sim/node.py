"""A simulated node: the `Backend` of the core decides, the ground truth says how long work takes.

Work on a node runs exclusively (one slot), in independent slots, or, where concurrent batches slow
each other down, by processor sharing: the progress of every job then depends on the number of jobs
(`Profile.slowdown`) and on what they are (`Variant.interference`), and the next completion is
computed anew whenever a job begins or ends. A node of an elastic pool is paid for only while it is
rented (`NodeRental`).
"""

from __future__ import annotations

from functools import partial
from typing import Final, final

from headgate.core.actions import Action, Dispatch, StartInstance, StopInstance
from headgate.core.backend import Backend, Effect, Ended, IdleTimer, SchedulerLeft, instance_of
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
from headgate.core.model import App, Compute, Pool, Variant
from headgate.metrics.columns import InstanceUse, SpanKind
from headgate.sim.event_queue import Callback, EventQueue, QueueItem
from headgate.sim.ground_truth import GroundTruth, has_cascades, unsure_tasks
from headgate.sim.host import SimHost
from headgate.sim.recorder import Recorder

RESTART_NS: Final = 20 * MILLISECOND_NS  # until a node that was killed joins again
_DOWN: Final = "the node is down"

# Interpreted code reads a global of the module many times faster than an attribute of a class.
_COMPLETION: Final = Rank.COMPLETION


@final
class NodeRental:
    """The rental of an elastic node: from its first instance to its last."""

    def __init__(self, pool: Pool) -> None:
        self._boot_ns = pool.boot_ns
        self._first_ns = pool.network_ns  # when actions that were sent at time 0 arrive
        self._since_ns: int | None = None  # None while the node is not rented
        self._booted_ns = 0
        self._ended_ns = -1
        self._paid_ns = 0
        self.is_from_start = False  # rented at time 0

    def begin(self, now_ns: int) -> None:
        """Rent the node, unless it is rented already.

        Instances that are started at time 0 skip the boot: a run begins with a warm fleet. Where an
        instance takes the place of the last one at the same instant, the node is not given back.
        """
        if self._since_ns is None:
            self._since_ns = now_ns
            self.is_from_start |= self._is_beginning(now_ns)
            if now_ns != self._ended_ns:
                self._booted_ns = now_ns + (0 if self._is_beginning(now_ns) else self._boot_ns)

    def ready_after_ns(self, now_ns: int, start_ns: int) -> int:
        """Return how long a start that is begun now takes, the rest of the boot included."""
        if self._is_beginning(now_ns):
            return 0
        return max(0, self._booted_ns - now_ns) + start_ns

    def _is_beginning(self, now_ns: int) -> bool:
        return now_ns <= self._first_ns

    def end(self, now_ns: int) -> None:
        """Return the node; it is paid for until now."""
        if self._since_ns is not None:
            self._paid_ns += now_ns - self._since_ns
            self._since_ns, self._ended_ns = None, now_ns

    def paid_ns(self, end_ns: int) -> int:
        """Return how long the node was paid for, up to the end of the run."""
        return self._paid_ns + (0 if self._since_ns is None else end_ns - self._since_ns)


@final
class MeteredInstance:
    """What one instance has cost so far."""

    __slots__ = ("allocation_usd", "batches", "loaded_ns", "shape_id", "usage_usd", "variant")

    def __init__(self, variant: Variant, shape_id: int, loaded_ns: int) -> None:
        self.variant = variant
        self.shape_id = shape_id
        self.loaded_ns = loaded_ns  # since when it is loaded; NEVER_NS: it is not
        self.batches = 0
        self.usage_usd = 0.0
        self.allocation_usd = 0.0


@final
class ComputeMeter:
    """Bills the compute of one node, instance by instance.

    A batch pays for its shape while it runs. Where compute is resident, an instance pays for its
    shape while it is loaded, and its batches use their part of that: one slice serves
    `Variant.concurrency` of them.
    """

    def __init__(self, node_id: int, pool: Pool) -> None:
        self._node_id = node_id
        self._pool = pool
        self._is_resident = pool.compute == Compute.RESIDENT
        self._live: dict[int, MeteredInstance] = {}  # by instance id
        self._starts_ns: dict[int, int] = {}  # by instance id
        self._ended: list[InstanceUse] = []

    def on_loading(self, now_ns: int, instance_id: int, variant: Variant, shape_id: int) -> None:
        """A start or a load of weights begins."""
        metered = self._live.get(instance_id)
        if metered is None:
            self._live[instance_id] = MeteredInstance(variant, shape_id, now_ns)
            self._starts_ns[instance_id] = now_ns
        elif metered.loaded_ns == NEVER_NS:
            metered.loaded_ns = now_ns

    def on_ran(self, action: Dispatch, length_ns: int) -> None:
        """A batch has ended, or its node has crashed."""
        metered = self._live[instance_of(action)]
        shape = metered.variant.shapes[action.shape_id].shape
        usd = self._pool.compute_usd(shape, length_ns)
        metered.batches += 1
        if self._is_resident:
            metered.usage_usd += usd / metered.variant.concurrency
        else:
            metered.usage_usd += usd
            metered.allocation_usd += usd

    def on_evicted(self, now_ns: int, instance_id: int) -> None:
        """The weights of an instance are in host memory."""
        metered = self._live.get(instance_id)
        if metered is not None:
            self._pay(now_ns, metered)
            metered.loaded_ns = NEVER_NS

    def on_gone(self, now_ns: int, instance_id: int) -> None:
        """An instance has stopped, or failed to start."""
        if instance_id in self._live:
            self._ended.append(self._use(now_ns, instance_id))
            del self._live[instance_id]

    def on_crash(self, now_ns: int) -> None:
        """All instances are gone."""
        for instance_id in list(self._live):
            self.on_gone(now_ns, instance_id)

    def uses(self, end_ns: int) -> list[InstanceUse]:
        """Return the cost of every instance. To be called once, at the end of a run."""
        self.on_crash(end_ns)
        return self._ended

    def _pay(self, now_ns: int, metered: MeteredInstance) -> None:
        if self._is_resident and metered.loaded_ns != NEVER_NS:
            shape = metered.variant.shapes[metered.shape_id].shape
            held_ns = now_ns - metered.loaded_ns
            metered.allocation_usd += self._pool.compute_usd(shape, held_ns)

    def _use(self, now_ns: int, instance_id: int) -> InstanceUse:
        metered = self._live[instance_id]
        self._pay(now_ns, metered)
        return InstanceUse(
            instance_id,
            self._node_id,
            metered.variant.id,
            metered.shape_id,
            self._starts_ns.pop(instance_id),
            now_ns,
            metered.batches,
            metered.usage_usd,
            metered.allocation_usd,
        )


@final
class NodeJob(QueueItem):
    """A start, a load or a batch in progress; on the event queue it stands for its completion."""

    __slots__ = ("action", "began_ns", "ends_ns", "left_ns", "node", "slowdown", "variant")

    def __init__(self, node: SimNode, action: Action, variant: Variant, began_ns: int) -> None:
        self.node = node
        self.action = action
        self.variant = variant
        self.began_ns = began_ns
        self.ends_ns = NEVER_NS  # while the end is not known, or once the node has crashed
        self.left_ns = 0.0  # remaining work, under processor sharing
        self.slowdown = 1.0  # beside the jobs that run at present


@final
class EventInTransit(QueueItem):
    """An event on the network, on its way to the Schedulers."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event = event


@final
class SimNode:
    """One node: its Backend, the jobs in progress and the faults in force."""

    def __init__(
        self,
        id: int,
        name: str,
        pool: Pool,
        app: App,
        queue: EventQueue,
        truth: GroundTruth,
        recorder: Recorder,
        host: SimHost | None = None,
    ) -> None:
        self.id = id
        self.name = name
        self.pool = pool
        self._app = app
        self._variants = app.variants
        self._queue = queue
        self._truth = truth
        self._recorder = recorder
        self.backend = Backend(pool, app.variants)
        self._ended = Ended(Action())  # used again for every job: no allocation per batch
        self.jobs: list[NodeJob] = []
        self._records_spans = recorder.records_spans
        self._has_cascades = has_cascades(app)
        variants = [variant for variant in app.variants if pool.id in variant.pool_ids]
        self._has_interference = any(variant.interference for variant in variants)
        self._has_processor_sharing = host is not None or (
            pool.slots > 1
            and (self._has_interference or any(len(v.profile.slowdown) > 1 for v in variants))
        )
        self._host = host
        self._host_number = 0 if host is None else host.join(self)
        self._changed_ns = 0  # when the set of jobs last changed, under processor sharing
        self.is_up = False
        self.life = 0  # how often it has crashed
        self.up_since_ns = 0
        self.rental = NodeRental(pool) if pool.is_elastic else None
        has_price = pool.cpu_usd_per_hour > 0 or pool.gpu_usd_per_hour > 0
        self.meter = ComputeMeter(id, pool) if has_price else None
        # Faults in force: counts, because the windows of faults may overlap.
        self.slow_factor = 1.0
        self.refuse_faults = 0
        self.break_faults = 0
        self.break_start_faults = 0
        self.lose_faults = 0
        self.duplicate_faults = 0
        self.up_ns = 0
        self.busy_ns = 0
        self.cold_starts = 0
        self.loads = 0

    def start(self, now_ns: int, action: StartInstance, life: int) -> None:
        """Start an instance, unless the node has crashed since the life that the order is for.

        An order is for a process, which takes what was sent to it along. A later process on the
        node that carried it out would hold an instance that no Scheduler knows, and for ever.
        """
        if life == self.life:
            self.execute(now_ns, action)
        else:
            self.report(now_ns, InstanceStopped(action.instance_id, _DOWN))

    def execute(self, now_ns: int, action: Action) -> None:
        """Give an action to the Backend, if the node is up."""
        if isinstance(action, Dispatch):
            self.execute_batch(now_ns, action)
        elif self.is_up:
            if self.rental is not None and isinstance(action, StartInstance):
                self.rental.begin(now_ns)
            self._apply(now_ns, self.backend.handle(now_ns, action))
        elif isinstance(action, StartInstance | StopInstance):
            self.report(now_ns, InstanceStopped(action.instance_id, _DOWN))

    def execute_batch(self, now_ns: int, action: Dispatch) -> None:
        """Give a batch to the Backend, unless the node is down or a fault makes it refuse."""
        if self.refuse_faults or not self.is_up:
            reason = Refusal.BUSY if self.is_up else Refusal.GONE
            self.report(now_ns, BatchRefused(action.batch_id, reason))
            return
        effects = self.backend.handle(now_ns, action)
        if not effects:
            self._record_hold(now_ns, action)
        elif len(effects) == 1 and effects[0] is action:  # the usual case: it begins
            self._begin_batch(now_ns, action)
        else:
            self._apply(now_ns, effects)

    def _apply(self, now_ns: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                self._begin_batch(now_ns, effect)
            elif isinstance(effect, IdleTimer):
                due = Callback(partial(self._on_idle_timer, effect))
                self._queue.push(effect.at_ns, _COMPLETION, due)
            elif isinstance(effect, Event):
                self.report(now_ns, effect)
            else:
                self._begin_start_or_load(now_ns, effect)

    def _record_hold(self, now_ns: int, action: Dispatch) -> None:
        resident = self.backend.instances[instance_of(action)]
        if resident.running and not resident.is_ready:
            self._recorder.waiting_for_start(now_ns, action.task_ids)

    def _begin_batch(self, now_ns: int, action: Dispatch) -> None:
        variant = self._variants[action.variant_id]
        length_ns = self._truth.exec_ns(variant, action.items, action.shape_id)
        if action.moved_bytes and self.pool.bytes_per_s > 0:
            length_ns += int(action.moved_bytes / self.pool.bytes_per_s * 1e9)
        self._recorder.began(now_ns, self.id, action.task_ids)
        self._begin(NodeJob(self, action, variant, now_ns), length_ns)

    def _begin_start_or_load(self, now_ns: int, action: Action) -> None:
        """Begin a start or a load. For the tasks that wait for it, it counts as a cold start."""
        instance_id = instance_of(action)
        resident = self.backend.instances[instance_id]
        variant = resident.variant
        if self.meter is not None:
            self.meter.on_loading(now_ns, instance_id, variant, resident.shape_id)
        if isinstance(action, StartInstance):
            self.cold_starts += 1
            length_ns = variant.profile.cold_start_ns
            if self.rental is not None:
                length_ns = self.rental.ready_after_ns(now_ns, length_ns)
        else:
            self.loads += 1
            length_ns = variant.profile.swap_in_ns
        for waiting in self.backend.held_batches():
            if waiting.instance_id == instance_id:
                self._recorder.waiting_for_start(now_ns, waiting.task_ids)
        self._begin(NodeJob(self, action, variant, now_ns), length_ns)

    def _begin(self, job: NodeJob, length_ns: int) -> None:
        if self.slow_factor != 1.0:
            length_ns = int(length_ns * self.slow_factor)
        if self._has_processor_sharing:
            self._progress(job.began_ns)
            job.left_ns = float(length_ns)
            self.jobs.append(job)
            self._reschedule(job.began_ns)
        else:
            self.jobs.append(job)
            job.ends_ns = job.began_ns + length_ns
            self._queue.push(job.ends_ns, _COMPLETION, job)

    def delay_batches(self, now_ns: int, delay_ns: int) -> None:
        """Lengthen the batches in progress: something else takes so much time from each."""
        if self._has_processor_sharing:
            self._progress(now_ns)
        for job in self.jobs:
            if isinstance(job.action, Dispatch):
                if self._has_processor_sharing:
                    job.left_ns += delay_ns / job.slowdown
                else:
                    job.ends_ns += delay_ns  # which voids the item that is on the queue
                    self._queue.push(job.ends_ns, _COMPLETION, job)
        if self._has_processor_sharing:
            self._reschedule(now_ns)

    def end_job(self, now_ns: int, job: NodeJob) -> Event | None:
        """End a job that is due; return the event for the Schedulers, if there is one."""
        if job.ends_ns != now_ns:
            return None  # the node has crashed, or the end of the job has been rescheduled
        if self._has_processor_sharing:
            self._progress(now_ns)
            job.ends_ns = NEVER_NS  # a rescheduled job may be on the queue twice
        self.jobs.remove(job)
        action = job.action
        self.busy_ns += now_ns - job.began_ns
        ended = self._ended
        ended.order = action
        event: Event | None
        if isinstance(action, Dispatch):
            ended.has_failed = False
            effects = self.backend.handle(now_ns, ended)
            if self.meter is not None:
                self.meter.on_ran(action, now_ns - job.began_ns)
            if self.lose_faults or self.break_faults or self.duplicate_faults:
                event = self._faulty_completion(now_ns, action)
            elif self._has_cascades:
                event = self._finished_event(action)
            else:
                event = BatchFinished(action.batch_id)
        else:
            ended.has_failed = self._fails_to_start(action, job.variant)
            effects = self.backend.handle(now_ns, ended)
            event = self._prepared_event(now_ns, action, ended.has_failed)
        if self._records_spans:
            self._record(now_ns, job)
        if effects:
            self._apply(now_ns, effects)
        if self._has_processor_sharing:
            self._reschedule(now_ns)
        return event

    def _fails_to_start(self, action: Action, variant: Variant) -> bool:
        cannot_load = variant.function_id in self._truth.unloadable
        return isinstance(action, StartInstance) and (self.break_start_faults > 0 or cannot_load)

    def _record(self, now_ns: int, job: NodeJob) -> None:
        action, function_id, began_ns = job.action, job.variant.function_id, job.began_ns
        if isinstance(action, Dispatch):
            kind, id, items = SpanKind.RUN, action.batch_id, action.items
        else:
            kind = SpanKind.START if isinstance(action, StartInstance) else SpanKind.LOAD
            id, items = instance_of(action), 0
        self._recorder.span(self.id, function_id, kind, began_ns, now_ns, id, items)

    def _faulty_completion(self, now_ns: int, action: Dispatch) -> Event | None:
        if self.lose_faults:
            return None
        if self.break_faults:
            return BatchFailed(action.batch_id, "broken by a fault")
        self.report(now_ns, self._finished_event(action))
        return self._finished_event(action)

    def _finished_event(self, action: Dispatch) -> BatchFinished:
        unsure: tuple[int, ...] = ()
        if self._has_cascades:
            unsure = unsure_tasks(self._app, self._recorder, action.task_ids)
        return BatchFinished(action.batch_id, unsure)

    def _prepared_event(self, now_ns: int, action: Action, has_failed: bool) -> Event:
        instance_id = instance_of(action)
        if not isinstance(action, StartInstance):
            return WeightsLoaded(instance_id)
        if not has_failed:
            return InstanceStarted(instance_id, self.id)
        if self.meter is not None:
            self.meter.on_gone(now_ns, instance_id)
        self._release_node(now_ns)
        return InstanceStopped(instance_id, "failed to start")

    def _on_idle_timer(self, timer: IdleTimer, now_ns: int) -> None:
        """Hand in an idle timer that is due; to the Backend after a crash it means nothing."""
        self._apply(now_ns, self.backend.handle(now_ns, timer))

    def _release_node(self, now_ns: int) -> None:
        """End the rental of a node that holds no instance."""
        if self.rental is not None and not self.backend.instances:
            self.rental.end(now_ns)

    def _progress(self, now_ns: int) -> None:
        """Credit every job with its progress since the set of jobs last changed."""
        elapsed_ns = now_ns - self._changed_ns
        self._changed_ns = now_ns
        if elapsed_ns:
            for job in self.jobs:
                job.left_ns -= elapsed_ns / job.slowdown

    def _reschedule(self, now_ns: int) -> None:
        """Compute which job ends next beside the present jobs, and schedule its end."""
        best: NodeJob | None = None
        best_ns = 0.0
        count = len(self.jobs)
        has_interference = self._has_interference
        of_host = 1.0
        if self._host is not None:
            self._host.want(now_ns, self._host_number, self._wanted_cpu_milli())
            of_host = self._host.slowdown
        for job in self.jobs:
            slowdown = job.variant.profile.slowdown_at(count) * of_host
            if has_interference:
                slowdown *= self._interference(job)
            job.slowdown = slowdown
            remaining_ns = job.left_ns * slowdown
            job.ends_ns = NEVER_NS  # voids the item that an earlier computation has queued
            if best is None or remaining_ns < best_ns:
                best, best_ns = job, remaining_ns
        if best is not None:
            ends_ns = now_ns + max(0, int(best_ns + 0.5))
            best.ends_ns = ends_ns
            self._queue.push(ends_ns, Rank.COMPLETION, best)

    def on_host_changed(self, now_ns: int) -> None:
        """The slowdown of the host has changed: until now it was another."""
        self._progress(now_ns)
        self._reschedule(now_ns)

    def _wanted_cpu_milli(self) -> int:
        return sum(
            job.variant.wanted_cpu_milli(
                job.action.shape_id if isinstance(job.action, Dispatch) else 0
            )
            for job in self.jobs
        )

    def _interference(self, job: NodeJob) -> float:
        """The factor of the batches that run beside a batch; starts and loads run no kernels."""
        factors = job.variant.interference
        if not factors or not isinstance(job.action, Dispatch):
            return 1.0
        product = 1.0
        for other in self.jobs:
            if other is not job and isinstance(other.action, Dispatch):
                product *= factors[other.variant.function_id]
        return product

    def scheduler_left(self, now_ns: int, ids: range) -> None:
        """Drop the batches with these ids that have not begun: their gateway has crashed."""
        self._apply(now_ns, self.backend.handle(now_ns, SchedulerLeft(ids)))

    def crash(self, now_ns: int) -> list[Event]:
        """Take the node down, with everything on it; return the events of its batches."""
        events: list[Event] = []
        for job in self.jobs:
            job.ends_ns = NEVER_NS
            self.busy_ns += now_ns - job.began_ns
            if isinstance(job.action, Dispatch):
                events.append(BatchLost(job.action.batch_id))
                if self.meter is not None:
                    self.meter.on_ran(job.action, now_ns - job.began_ns)
        if self.meter is not None:
            self.meter.on_crash(now_ns)
        events.extend(BatchLost(action.batch_id) for action in self.backend.held_batches())
        self.jobs = []
        if self._host is not None:
            self._host.want(now_ns, self._host_number, 0)
        self.backend = Backend(self.pool, self._app.variants)
        self.is_up = False
        self.life += 1
        self.up_ns += now_ns - self.up_since_ns
        self._release_node(now_ns)
        return events

    def join(self, now_ns: int) -> None:
        """Bring the node up, empty."""
        self.is_up = True
        self.up_since_ns = now_ns

    def report(self, now_ns: int, event: Event) -> None:
        """Send an event to the Schedulers; it arrives after the network delay of the pool."""
        if self.rental is not None and isinstance(event, InstanceStopped):
            self._release_node(now_ns)
        if self.meter is not None:
            if isinstance(event, InstanceStopped):
                self.meter.on_gone(now_ns, event.instance_id)
            elif isinstance(event, WeightsEvicted):
                self.meter.on_evicted(now_ns, event.instance_id)
        self._queue.push(now_ns + self.pool.network_ns, Rank.COMPLETION, EventInTransit(event))
