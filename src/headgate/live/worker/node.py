"""A live node: the core's Backend decides, threads do the work.

This is the counterpart of the simulator's node, order by order. Instances and batches belong to the
gateway that asked for them. When it goes, what it had held back is dropped and its instances leave
as soon as they have finished, but their models stay in stock for the next gateway.
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
from headgate.live.ipc.messages import FunctionLoaded, MeasuredFunction, RunBatch, TaskInputs, frame
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.executor import BatchJob, Executor, PrepareJob, TrialJob, UnloadJob
from headgate.live.worker.loading import LOAD_TIMEOUT_FACTOR, Loader
from headgate.live.worker.model_cache import ModelCache
from headgate.live.worker.runner import BatchRunner

_LOG: Final = logging.getLogger(__name__)

INSTANCES_MAX: Final = 4096  # of one gateway


@final
class WorkerNode:
    """Carries out the orders of all gateways. All of it runs in one thread."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        app: App,
        run_dir: Path,
        stock: ModelCache,
        loader: Loader,
        facts: dict[int, MeasuredFunction],
        executor: Executor,
        hang_ns: int,
    ) -> None:
        self.backend = Backend(pool, app.variants)
        self.is_leaving = False
        self._id = id
        self._pool = pool
        self._app = app
        self._run_dir = run_dir
        self._stock = stock
        self._loader = loader
        self._facts = facts  # by variant id; kept up to date here
        self._executor = executor
        self._hang_ns = hang_ns
        self._connections: dict[int, GatewayConnection] = {}  # by its first id
        self._runners: dict[int, tuple[Variant, BatchRunner]] = {}  # by instance
        self._works: dict[int, list[TaskInputs]] = {}  # by batch that has not begun
        self._wakes: list[tuple[int, int]] = []  # (when, instance to retire if idle)

    # --- gateways ------------------------------------------------------------------------------

    def join(self, connection: GatewayConnection) -> None:
        """A gateway may give orders."""
        self._connections[connection.first_id] = connection

    def leave(self, connection: GatewayConnection) -> None:
        """A gateway has gone: what it asked for is no longer wanted."""
        del self._connections[connection.first_id]
        self._abandon(lambda id: id - id % GatewayConnection.IDS == connection.first_id)

    def leave_all(self) -> None:
        """Take no more orders, and begin nothing more; what runs is finished."""
        self.is_leaving = True
        self._abandon(lambda _: True)

    def _abandon(self, is_meant: Callable[[int], bool]) -> None:
        for order in self.backend.held_batches():
            if is_meant(order.batch_id):
                self.backend.cancel(order.batch_id)
                self._refuse(order, Refusal.GONE)
        for instance_id in [id for id in self.backend.residents if is_meant(id)]:
            if self.backend.stop(instance_id):
                self._stopped(instance_id, "the worker is leaving", keep=True)
        self._pump()

    # --- orders --------------------------------------------------------------------------------

    def take_run(self, connection: GatewayConnection, run: RunBatch) -> None:
        """Begin a batch, hold it or refuse it. Raises `ValueError` if it makes no sense."""
        batch_id = connection.local_id(run.batch_id)
        connection.find(run)
        order = Dispatch(
            batch_id,
            run.variant_id,
            [],
            run.items,
            self._pool.id,
            self._id,
            connection.local_id(run.instance_id),
        )
        if batch_id in self._works:
            raise ValueError(f"batch {run.batch_id} is here already")
        self._works[batch_id] = run.works
        verdict = Verdict.GONE if self.is_leaving else self.backend.offer(order)
        self._settle(order, verdict)

    def take(self, connection: GatewayConnection, order: Action) -> None:
        """Carry any other order out. Raises `ValueError` if it makes no sense."""
        if isinstance(order, StartInstance):
            self._take_start(connection, order)
        elif isinstance(order, LoadWeights):
            local = LoadWeights(connection.local_id(order.instance_id), self._id)
            resident = self.backend.residents.get(local.instance_id)
            if resident is not None and local.instance_id not in self._runners:
                raise ValueError(f"instance {order.instance_id} has not been started yet")
            self._settle(local, self.backend.load(local))
        elif isinstance(order, EvictWeights):
            instance_id = connection.local_id(order.instance_id)
            if self.backend.evict(instance_id):
                self._report(instance_id, WeightsEvicted)
        elif isinstance(order, StopInstance):
            instance_id = connection.local_id(order.instance_id)
            if self.backend.stop(instance_id):
                self._stopped(instance_id, "stopped", keep=False)
        elif isinstance(order, CancelBatch):
            held = self.backend.cancel(connection.local_id(order.batch_id))
            if held is not None:
                self._refuse(held, Refusal.CANCELLED)
                self._let_go(held)
        else:
            raise ValueError(f"{type(order).__name__} is not for a worker")

    def _take_start(self, connection: GatewayConnection, order: StartInstance) -> None:
        instance_id = connection.local_id(order.instance_id)
        if instance_id in self.backend.residents:
            raise ValueError(f"instance {order.instance_id} is here already")
        variants = self._app.variants
        is_known = 0 <= order.variant_id < len(variants)
        if not is_known or self._pool.id not in variants[order.variant_id].pool_ids:
            raise ValueError(f"variant {order.variant_id} does not run here")
        if self.is_leaving or len(self.backend.residents) >= INSTANCES_MAX:
            reason = "the worker is leaving" if self.is_leaving else "too many instances"
            connection.report(InstanceStopped(order.instance_id, reason))
            return
        held_back = self._held_back(variants[order.variant_id])
        if held_back:
            connection.report(InstanceStopped(order.instance_id, held_back))
            return
        local = StartInstance(instance_id, order.variant_id, self._pool.id, self._id)
        self._settle(local, self.backend.start(local))

    def _held_back(self, variant: Variant) -> str:
        """Return why a function is not to be loaded now; a trial of it may begin, off any slot."""
        reason = "" if self._stock.has(variant) else self._loader.held_back(variant)
        if reason and self._loader.begins_trial(variant):
            limit_ns, memory_bytes = LOAD_TIMEOUT_FACTOR * self._hang_ns, self._pool.memory_bytes
            self._executor.submit(
                TrialJob(variant, self._loader, self._run_dir, limit_ns, memory_bytes)
            )
        return reason

    def _settle(self, order: Action, verdict: int) -> None:
        if verdict == Verdict.BEGIN:
            self._begin(order)
        elif isinstance(order, Dispatch) and verdict != Verdict.HOLD:
            self._refuse(order, _REFUSALS[verdict])

    def _refuse(self, order: Dispatch, reason: int) -> None:
        del self._works[order.batch_id]
        self._report(order.batch_id, lambda id: BatchRefused(id, reason))

    # --- work ----------------------------------------------------------------------------------

    def _begin(self, order: Action) -> None:
        if isinstance(order, Dispatch):
            assert order.instance_id is not None
            _, runner = self._runners[order.instance_id]
            connection = self._connections[order.batch_id - order.batch_id % GatewayConnection.IDS]
            works = self._works.pop(order.batch_id)
            job = BatchJob(order, works, runner, connection, self._batch_over, self._hang_ns)
            # With more slots the others would have to wait for whoever listens to them.
            is_short = self._pool.slots == 1 and runner.usual_ns < SHORT_NS
            self._executor.submit(job, is_short=is_short)
            return
        assert isinstance(order, StartInstance | LoadWeights)
        variant = self.backend.residents[order.instance_id].variant
        stock = self._stock if isinstance(order, StartInstance) else None
        limit_ns = LOAD_TIMEOUT_FACTOR * self._hang_ns
        self._executor.submit(PrepareJob(order, variant, stock, self._prepared, limit_ns))

    def _batch_over(self, job: BatchJob) -> None:
        now_ns = monotonic_ns()
        order = job.order
        has_more_to_do = self.backend.ended(now_ns, order)
        connection = self._connections.get(order.batch_id - order.batch_id % GatewayConnection.IDS)
        if connection is not None:
            connection.send(job.answer)
        self._after(now_ns, order, has_more_to_do)

    def _prepared(self, job: PrepareJob) -> None:
        now_ns = monotonic_ns()
        order = job.order
        instance_id = order.instance_id
        has_more_to_do = self.backend.ended(now_ns, order)
        if job.runner is not None:
            self._runners[instance_id] = (job.variant, job.runner)
        if isinstance(order, LoadWeights):
            self._report(instance_id, WeightsLoaded)
        elif job.runner is not None:
            self._report(instance_id, lambda id: InstanceStarted(id, self._id))
            self._loads(job.variant, job.runner)
        else:
            if job.variant.id in self._facts:
                self._facts[job.variant.id].problem = job.error
            for batch in self.backend.start_failed(instance_id):
                self._refuse(batch, Refusal.GONE)
            self._report(instance_id, lambda id: InstanceStopped(id, job.error))
        self._after(now_ns, order, has_more_to_do)

    def _loads(self, variant: Variant, runner: BatchRunner) -> None:
        """A function can be loaded, and if it could not be, every gateway hears how it looks."""
        facts = self._facts.get(variant.id)
        if facts is not None and facts.problem:
            facts.problem = ""
            facts.signature = runner.signature
            _LOG.info("%s: is loaded again", variant.name)
            for connection in self._connections.values():
                connection.send(frame(FunctionLoaded(facts)))

    def _after(self, now_ns: int, order: Action, has_more_to_do: bool) -> None:
        """Begin what was held back; let an instance go that was only to finish this."""
        if has_more_to_do:
            self._pump()
            self._let_go(order)
        if self._pool.idle_timeout_ns < NEVER_NS:
            assert isinstance(order, Dispatch | StartInstance | LoadWeights)
            assert order.instance_id is not None
            heappush(self._wakes, (now_ns + self._pool.idle_timeout_ns, order.instance_id))

    def _pump(self) -> None:
        for held in self.backend.begin_held():
            self._begin(held)

    def _let_go(self, order: Action) -> None:
        left = self.backend.evicted_instance(order)
        if left is not None:
            self._report(left, WeightsEvicted)
        gone = self.backend.drained_instance(order)
        if gone is not None:
            # Who still listens has ordered it to stop, and wants the memory.
            is_ordered = gone - gone % GatewayConnection.IDS in self._connections
            self._stopped(gone, "stopped", keep=not is_ordered)

    # --- time ----------------------------------------------------------------------------------

    def next_wake_ns(self) -> int:
        """Return when `wake` is next due."""
        return self._wakes[0][0] if self._wakes else NEVER_NS

    def wake(self, now_ns: int) -> None:
        """Retire instances that have long been idle."""
        while self._wakes and self._wakes[0][0] <= now_ns:
            _, instance_id = heappop(self._wakes)
            if self.backend.retire_idle(now_ns, instance_id):
                self._stopped(instance_id, "idle for too long", keep=False)

    # --- reports -------------------------------------------------------------------------------

    def _stopped(self, instance_id: int, reason: str, *, keep: bool) -> None:
        variant, runner = self._runners.pop(instance_id, (None, None))
        if variant is not None and runner is not None:
            if keep:
                self._stock.give(variant, runner, keep=True)
            else:
                limit_ns = LOAD_TIMEOUT_FACTOR * self._hang_ns
                self._executor.submit(UnloadJob(variant, runner, self._stock, limit_ns))
        self._report(instance_id, lambda id: InstanceStopped(id, reason))

    def _report(self, local_id: int, event: Callable[[int], Event]) -> None:
        id = local_id % GatewayConnection.IDS
        connection = self._connections.get(local_id - id)
        if connection is not None:
            connection.report(event(id))


SHORT_NS: Final = 5_000_000  # with one slot, nobody waits for the listening thread meanwhile
_REFUSALS: Final[Mapping[int, int]] = {
    Verdict.BUSY: Refusal.BUSY,
    Verdict.GONE: Refusal.GONE,
}
