"""A live node: the `Backend` of the core decides, threads do the work.

It is the counterpart of the simulator's node, action by action. Instances and batches belong to the
gateway that requested them. When a gateway disconnects, its held batches are dropped and its
instances stop once they are idle, but their models stay in the cache for the next gateway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
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
from headgate.core.backend import Backend, Verdict
from headgate.core.clock import NEVER_NS
from headgate.core.events import (
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    Refusal,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, Pool, Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.tensor import TaskInputs
from headgate.live.ipc.messages import FunctionLoaded, MeasuredFunction, RunBatch, frame
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.executor import BatchJob, Executor, PrepareJob, TrialJob, UnloadJob
from headgate.live.worker.loading import LOAD_TIMEOUT_FACTOR, Loader
from headgate.live.worker.model_cache import ModelCache

_LOG: Final = logging.getLogger(__name__)

INSTANCES_MAX: Final = 4096  # per worker


@final
class WorkerNode:
    """Executes the actions of all gateways. Calls must be serialised."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        app: App,
        run_dir: Path,
        model_cache: ModelCache,
        loader: Loader,
        measured: dict[int, MeasuredFunction],
        executor: Executor,
        hang_ns: int,
    ) -> None:
        self.backend = Backend(pool, app.variants)
        self.is_draining = False
        self._id = id
        self._pool = pool
        self._app = app
        self._run_dir = run_dir
        self._model_cache = model_cache
        self._loader = loader
        self._measured = measured  # by variant id; updated here
        self._executor = executor
        self._hang_ns = hang_ns
        self._connections: dict[int, GatewayConnection] = {}  # by `first_id`
        self._runners: dict[int, tuple[Variant, BatchRunner]] = {}  # by instance
        self._held_tasks: dict[int, list[TaskInputs]] = {}  # inputs by batch that has not begun
        self._idle_timers: list[tuple[int, int]] = []  # (when, instance to stop if idle)

    def add_gateway(self, connection: GatewayConnection) -> None:
        """Accept actions of a gateway."""
        self._connections[connection.first_id] = connection

    def remove_gateway(self, connection: GatewayConnection) -> None:
        """Drop the batches and instances of a gateway that has disconnected."""
        del self._connections[connection.first_id]
        self._release(lambda id: id - id % GatewayConnection.IDS == connection.first_id)

    def drain(self) -> None:
        """Accept no more actions and begin nothing; running batches finish."""
        self.is_draining = True
        self._release(lambda _: True)

    def _release(self, is_selected: Callable[[int], bool]) -> None:
        for action in self.backend.held_batches():
            if is_selected(action.batch_id):
                self.backend.cancel(action.batch_id)
                self._refuse(action, Refusal.GONE)
        for instance_id in [id for id in self.backend.instances if is_selected(id)]:
            if self.backend.stop(instance_id):
                self._stopped(instance_id, "the worker is draining", keep=True)
        self._begin_held()

    def dispatch(self, connection: GatewayConnection, run: RunBatch) -> None:
        """Begin, hold or refuse a batch. Raises `ValueError` if the message is invalid."""
        batch_id = connection.local_id(run.batch_id)
        connection.resolve_blocks(run)
        action = Dispatch(
            batch_id,
            run.variant_id,
            [],
            run.items,
            self._pool.id,
            self._id,
            connection.local_id(run.instance_id),
        )
        if batch_id in self._held_tasks:
            raise ValueError(f"batch {run.batch_id} exists already")
        self._held_tasks[batch_id] = run.tasks
        verdict = Verdict.GONE if self.is_draining else self.backend.offer(action)
        self._apply_verdict(action, verdict)

    def execute(self, connection: GatewayConnection, action: Action) -> None:
        """Execute any other action. Raises `ValueError` if it is invalid."""
        if isinstance(action, StartInstance):
            self._start_instance(connection, action)
        elif isinstance(action, LoadWeights):
            local = LoadWeights(connection.local_id(action.instance_id), self._id)
            resident = self.backend.instances.get(local.instance_id)
            if resident is not None and local.instance_id not in self._runners:
                raise ValueError(f"instance {action.instance_id} has not been started yet")
            self._apply_verdict(local, self.backend.load(local))
        elif isinstance(action, EvictWeights):
            instance_id = connection.local_id(action.instance_id)
            if self.backend.evict(instance_id):
                self._report(instance_id, WeightsEvicted)
        elif isinstance(action, StopInstance):
            instance_id = connection.local_id(action.instance_id)
            if self.backend.stop(instance_id):
                self._stopped(instance_id, "stopped", keep=False)
        elif isinstance(action, CancelBatch):
            held = self.backend.cancel(connection.local_id(action.batch_id))
            if held is not None:
                self._refuse(held, Refusal.CANCELLED)
                self._retire(held)
        else:
            raise ValueError(f"{type(action).__name__} is not for a worker")

    def _start_instance(self, connection: GatewayConnection, action: StartInstance) -> None:
        instance_id = connection.local_id(action.instance_id)
        if instance_id in self.backend.instances:
            raise ValueError(f"instance {action.instance_id} exists already")
        variants = self._app.variants
        is_known = 0 <= action.variant_id < len(variants)
        if not is_known or self._pool.id not in variants[action.variant_id].pool_ids:
            raise ValueError(f"variant {action.variant_id} does not run on this node")
        if self.is_draining or len(self.backend.instances) >= INSTANCES_MAX:
            reason = "the worker is draining" if self.is_draining else "too many instances"
            connection.report(InstanceStopped(action.instance_id, reason))
            return
        blocked = self._load_block_reason(variants[action.variant_id])
        if blocked:
            connection.report(InstanceStopped(action.instance_id, blocked))
            return
        local = StartInstance(instance_id, action.variant_id, self._pool.id, self._id)
        self._apply_verdict(local, self.backend.start(local))

    def _load_block_reason(self, variant: Variant) -> str:
        """Return why a function must not be loaded now; may start a trial of it, which uses no
        slot.
        """
        reason = "" if self._model_cache.has(variant) else self._loader.block_reason(variant)
        if reason and self._loader.try_begin_trial(variant):
            limit_ns, memory_bytes = LOAD_TIMEOUT_FACTOR * self._hang_ns, self._pool.memory_bytes
            self._executor.submit(
                TrialJob(variant, self._loader, self._run_dir, limit_ns, memory_bytes)
            )
        return reason

    def _apply_verdict(self, action: Action, verdict: int) -> None:
        if verdict == Verdict.BEGIN:
            self._begin(action)
        elif isinstance(action, Dispatch) and verdict != Verdict.HOLD:
            self._refuse(action, _REFUSALS[verdict])

    def _refuse(self, action: Dispatch, reason: int) -> None:
        del self._held_tasks[action.batch_id]
        self._report(action.batch_id, lambda id: BatchRefused(id, reason))

    def _begin(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            assert action.instance_id is not None
            _, runner = self._runners[action.instance_id]
            connection = self._connections[
                action.batch_id - action.batch_id % GatewayConnection.IDS
            ]
            tasks = self._held_tasks.pop(action.batch_id)
            job = BatchJob(action, tasks, runner, connection, self._on_batch_done, self._hang_ns)
            # Inline only with a single slot: with more, batches in other slots would wait for the
            # reading thread.
            runs_inline = self._pool.slots == 1 and runner.mean_exec_ns < SHORT_NS
            self._executor.submit(job, runs_inline=runs_inline)
            return
        assert isinstance(action, StartInstance | LoadWeights)
        variant = self.backend.instances[action.instance_id].variant
        model_cache = self._model_cache if isinstance(action, StartInstance) else None
        limit_ns = LOAD_TIMEOUT_FACTOR * self._hang_ns
        self._executor.submit(PrepareJob(action, variant, model_cache, self._on_prepared, limit_ns))

    def _on_batch_done(self, job: BatchJob) -> None:
        now_ns = monotonic_ns()
        action = job.action
        has_more_to_do = self.backend.on_ended(now_ns, action)
        connection = self._connections.get(
            action.batch_id - action.batch_id % GatewayConnection.IDS
        )
        if connection is not None:
            connection.send(job.reply)
        self._finish_action(now_ns, action, has_more_to_do)

    def _on_prepared(self, job: PrepareJob) -> None:
        now_ns = monotonic_ns()
        action = job.action
        instance_id = action.instance_id
        has_more_to_do = self.backend.on_ended(now_ns, action)
        if job.runner is not None:
            self._runners[instance_id] = (job.variant, job.runner)
        if isinstance(action, LoadWeights):
            self._report(instance_id, WeightsLoaded)
        elif job.runner is not None:
            self._report(instance_id, lambda id: InstanceStarted(id, self._id))
            self._report_recovered(job.variant, job.runner)
        else:
            if job.variant.id in self._measured:
                self._measured[job.variant.id].problem = job.error
            for batch in self.backend.on_start_failed(instance_id):
                self._refuse(batch, Refusal.GONE)
            self._report(instance_id, lambda id: InstanceStopped(id, job.error))
        self._finish_action(now_ns, action, has_more_to_do)

    def _report_recovered(self, variant: Variant, runner: BatchRunner) -> None:
        """If a function had failed to load before, send its signature to every gateway."""
        measured = self._measured.get(variant.id)
        if measured is not None and measured.problem:
            measured.problem = ""
            measured.signature = runner.signature
            _LOG.info("%s: loaded after earlier failures", variant.name)
            for connection in self._connections.values():
                connection.send(frame(FunctionLoaded(measured)))

    def _finish_action(self, now_ns: int, action: Action, has_more_to_do: bool) -> None:
        """Begin held work; stop an instance that was draining; arm its idle timer."""
        if has_more_to_do:
            self._begin_held()
            self._retire(action)
        if self._pool.idle_timeout_ns < NEVER_NS:
            assert isinstance(action, Dispatch | StartInstance | LoadWeights)
            assert action.instance_id is not None
            heappush(self._idle_timers, (now_ns + self._pool.idle_timeout_ns, action.instance_id))

    def _begin_held(self) -> None:
        for held in self.backend.begin_held():
            self._begin(held)

    def _retire(self, action: Action) -> None:
        evicted = self.backend.evicted_instance(action)
        if evicted is not None:
            self._report(evicted, WeightsEvicted)
        drained = self.backend.drained_instance(action)
        if drained is not None:
            # A gateway that is still connected has stopped the instance and wants the memory back.
            is_stop_requested = drained - drained % GatewayConnection.IDS in self._connections
            self._stopped(drained, "stopped", keep=not is_stop_requested)

    def next_timer_ns(self) -> int:
        """Return when `retire_idle` is next due."""
        return self._idle_timers[0][0] if self._idle_timers else NEVER_NS

    def retire_idle(self, now_ns: int) -> None:
        """Stop instances that have reached the idle timeout."""
        while self._idle_timers and self._idle_timers[0][0] <= now_ns:
            _, instance_id = heappop(self._idle_timers)
            if self.backend.retire_idle(now_ns, instance_id):
                self._stopped(instance_id, "idle for too long", keep=False)

    def _stopped(self, instance_id: int, reason: str, *, keep: bool) -> None:
        variant, runner = self._runners.pop(instance_id, (None, None))
        if variant is not None and runner is not None:
            if keep:
                self._model_cache.release(variant, runner, keep=True)
            else:
                limit_ns = LOAD_TIMEOUT_FACTOR * self._hang_ns
                self._executor.submit(UnloadJob(variant, runner, self._model_cache, limit_ns))
        self._report(instance_id, lambda id: InstanceStopped(id, reason))

    def _report(self, local_id: int, event: Callable[[int], Event]) -> None:
        id = local_id % GatewayConnection.IDS
        connection = self._connections.get(local_id - id)
        if connection is not None:
            connection.report(event(id))


SHORT_NS: Final = 5_000_000  # with one slot, nothing waits for the reading thread meanwhile
_REFUSALS: Final[Mapping[int, int]] = {
    Verdict.BUSY: Refusal.BUSY,
    Verdict.GONE: Refusal.GONE,
}
