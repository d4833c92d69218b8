"""A live node: the `Backend` of the core decides, threads do the work.

It is the counterpart of the simulator's node, action by action. Instances and batches belong to the
gateway that requested them. When a gateway disconnects, its held batches are dropped and its
instances stop once they are idle, but their models stay in the cache for the next gateway.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
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
from headgate.core.backend import Backend, Drain, Effect, Ended, IdleTimer, Message, SchedulerLeft
from headgate.core.clock import NEVER_NS
from headgate.core.events import (
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, Pool, Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.tensor import TaskInputs
from headgate.live.ipc.messages import FunctionLoaded, MeasuredFunction, RunBatch, frame
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.executor import BatchJob, Executor, PrepareJob, TrialJob, UnloadJob
from headgate.live.worker.model_cache import LOAD_TIMEOUT_FACTOR, Loader, ModelCache

_LOG: Final = logging.getLogger(__name__)

SHORT_NS: Final = 5_000_000  # with one slot, nothing waits for the reading thread meanwhile


@final
@dataclass(eq=False)
class WorkerNode:
    """Executes the actions of all gateways. Calls must be serialised."""

    id: int
    pool: Pool
    app: App
    run_dir: Path
    model_cache: ModelCache
    loader: Loader
    measured: dict[int, MeasuredFunction]  # by variant id; updated here
    executor: Executor
    hang_ns: int

    def __post_init__(self) -> None:
        self.backend = Backend(self.pool, self.app.variants)
        self._connections: dict[int, GatewayConnection] = {}  # by `first_id`
        self._runners: dict[int, tuple[Variant, BatchRunner]] = {}  # by instance
        self._held_tasks: dict[int, list[TaskInputs]] = {}  # inputs by batch that has not begun
        self._idle_timers: deque[IdleTimer] = deque()  # the next one first

    def add_gateway(self, connection: GatewayConnection) -> None:
        """Accept actions of a gateway."""
        self._connections[connection.first_id] = connection

    def remove_gateway(self, connection: GatewayConnection) -> None:
        """Drop the batches and instances of a gateway that has disconnected."""
        del self._connections[connection.first_id]
        first_id = connection.first_id
        self._handle(SchedulerLeft(range(first_id, first_id + GatewayConnection.IDS)))

    @property
    def is_draining(self) -> bool:
        return self.backend.is_draining

    def drain(self) -> None:
        """Accept no more actions and begin nothing; running batches finish."""
        self._handle(Drain())

    def dispatch(self, connection: GatewayConnection, run: RunBatch) -> None:
        """Begin, hold or refuse a batch. Raises `ValueError` if the message is invalid."""
        batch_id = connection.local_id(run.batch_id)
        instance_id = connection.local_id(run.instance_id)
        resident = self.backend.instances.get(instance_id)
        if resident is not None and not 0 <= run.shape_id < len(resident.variant.shapes):
            raise ValueError(f"variant {resident.variant.id} has no shape {run.shape_id}")
        connection.resolve_blocks(run)
        action = Dispatch(
            batch_id,
            run.variant_id,
            [],
            run.items,
            self.pool.id,
            self.id,
            instance_id,
            shape_id=run.shape_id,
        )
        if batch_id in self._held_tasks:
            raise ValueError(f"batch {run.batch_id} exists already")
        self._held_tasks[batch_id] = run.tasks
        self._handle(action)

    def execute(self, connection: GatewayConnection, action: Action) -> None:
        """Execute any other action. Raises `ValueError` if it is invalid."""
        if isinstance(action, CancelBatch):
            batch_id = connection.local_id(action.batch_id)
            self._handle(CancelBatch(batch_id, self.pool.id, self.id))
            return
        if not isinstance(action, StartInstance | LoadWeights | EvictWeights | StopInstance):
            raise ValueError(f"{type(action).__name__} is not for a worker")
        instance_id = connection.local_id(action.instance_id)
        if isinstance(action, StartInstance):
            self._start_instance(connection, action)
        elif isinstance(action, EvictWeights):
            self._handle(EvictWeights(instance_id, self.id))
        elif isinstance(action, StopInstance):
            self._handle(StopInstance(instance_id, self.id))
        elif instance_id in self.backend.instances and instance_id not in self._runners:
            raise ValueError(f"instance {action.instance_id} has not been started yet")
        else:
            self._handle(LoadWeights(instance_id, self.id))

    def _start_instance(self, connection: GatewayConnection, action: StartInstance) -> None:
        instance_id = connection.local_id(action.instance_id)
        if instance_id in self.backend.instances:
            raise ValueError(f"instance {action.instance_id} exists already")
        variants = self.app.variants
        is_known = 0 <= action.variant_id < len(variants)
        if not is_known or self.pool.id not in variants[action.variant_id].pool_ids:
            raise ValueError(f"variant {action.variant_id} does not run on this node")
        if not 0 <= action.shape_id < len(variants[action.variant_id].shapes):
            raise ValueError(f"variant {action.variant_id} has no shape {action.shape_id}")
        blocked = "" if self.is_draining else self._load_block_reason(variants[action.variant_id])
        if blocked:
            connection.report(InstanceStopped(action.instance_id, blocked))
        else:
            variant_id, shape_id = action.variant_id, action.shape_id
            self._handle(StartInstance(instance_id, variant_id, self.pool.id, self.id, shape_id))

    def _load_block_reason(self, variant: Variant) -> str:
        """Return why a function must not be loaded now; may begin a trial, which uses no slot."""
        reason = "" if self.model_cache.has(variant) else self.loader.block_reason(variant)
        if reason and self.loader.try_begin_trial(variant):
            limit_ns, memory_bytes = LOAD_TIMEOUT_FACTOR * self.hang_ns, self.pool.memory_bytes
            self.executor.submit(
                TrialJob(variant, self.loader, self.run_dir, limit_ns, memory_bytes)
            )
        return reason

    def _handle(self, message: Message) -> None:
        self._apply(self.backend.handle(monotonic_ns(), message))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, IdleTimer):
                self._idle_timers.append(effect)  # every timer runs equally long
            elif isinstance(effect, Event):
                self._clean_up(effect)
                self._report(effect)
            else:
                self._begin(effect)

    def _begin(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            assert action.instance_id is not None
            _, runner = self._runners[action.instance_id]
            connection = self._connections[
                action.batch_id - action.batch_id % GatewayConnection.IDS
            ]
            tasks = self._held_tasks.pop(action.batch_id)
            job = BatchJob(action, tasks, runner, connection, self._on_batch_done, self.hang_ns)
            # Inline only with a single slot: with more, batches in other slots would wait for the
            # reading thread.
            runs_inline = self.pool.slots == 1 and runner.mean_exec_ns < SHORT_NS
            self.executor.submit(job, runs_inline=runs_inline)
            return
        assert isinstance(action, StartInstance | LoadWeights)
        variant = self.backend.instances[action.instance_id].variant
        model_cache = self.model_cache if isinstance(action, StartInstance) else None
        limit_ns = LOAD_TIMEOUT_FACTOR * self.hang_ns
        self.executor.submit(PrepareJob(action, variant, model_cache, self._on_prepared, limit_ns))

    def _on_batch_done(self, job: BatchJob) -> None:
        action = job.action
        effects = self.backend.handle(monotonic_ns(), Ended(action))
        connection = self._connections.get(
            action.batch_id - action.batch_id % GatewayConnection.IDS
        )
        if connection is not None:
            connection.send(job.reply)
        self._apply(effects)

    def _on_prepared(self, job: PrepareJob) -> None:
        action = job.action
        instance_id = action.instance_id
        has_failed = isinstance(action, StartInstance) and job.runner is None
        effects = self.backend.handle(monotonic_ns(), Ended(action, has_failed))
        if has_failed:
            if job.variant.id in self.measured:
                self.measured[job.variant.id].problem = job.error
            self._report(InstanceStopped(instance_id, job.error))
        elif job.runner is not None:
            self._runners[instance_id] = (job.variant, job.runner)
            self._report(InstanceStarted(instance_id, self.id))
            self._report_recovered(job.variant, job.runner)
        else:
            self._report(WeightsLoaded(instance_id))
        self._apply(effects)

    def _report_recovered(self, variant: Variant, runner: BatchRunner) -> None:
        """If a function had failed to load before, send its signature to every gateway."""
        measured = self.measured.get(variant.id)
        if measured is not None and measured.problem:
            measured.problem = ""
            measured.signature = runner.signature
            _LOG.info("%s: loaded after earlier failures", variant.name)
            for connection in self._connections.values():
                connection.send(frame(FunctionLoaded(measured)))

    def next_timer_ns(self) -> int:
        return self._idle_timers[0].at_ns if self._idle_timers else NEVER_NS

    def retire_idle(self, now_ns: int) -> None:
        """Hand the idle timers that are due to the Backend."""
        while self._idle_timers and self._idle_timers[0].at_ns <= now_ns:
            self._apply(self.backend.handle(now_ns, self._idle_timers.popleft()))

    def _clean_up(self, event: Event) -> None:
        """Free what the worker kept for a batch or an instance that is over."""
        if isinstance(event, BatchRefused):
            del self._held_tasks[event.batch_id]
        elif isinstance(event, InstanceStopped) and event.instance_id in self._runners:
            variant, runner = self._runners.pop(event.instance_id)
            # A gateway that is connected wants the memory back; the next one may want the model.
            owner_id = event.instance_id - event.instance_id % GatewayConnection.IDS
            if self.is_draining or owner_id not in self._connections:
                self.model_cache.release(variant, runner, keep=True)
            else:
                limit_ns = LOAD_TIMEOUT_FACTOR * self.hang_ns
                self.executor.submit(UnloadJob(variant, runner, self.model_cache, limit_ns))

    def _report(self, event: Event) -> None:
        """Send an event to the gateway that it concerns, with the gateway's own id."""
        if isinstance(event, BatchRefused):
            local_id = event.batch_id
            event.batch_id = id = local_id % GatewayConnection.IDS
        else:
            assert isinstance(
                event, InstanceStarted | InstanceStopped | WeightsEvicted | WeightsLoaded
            )
            local_id = event.instance_id
            event.instance_id = id = local_id % GatewayConnection.IDS
        connection = self._connections.get(local_id - id)
        if connection is not None:
            connection.report(event)
