"""A node that several gateways share: their actions go to one `Backend`, and its events to them.

Instances belong to the node: every gateway learns of them, whoever started them, and may use and
stop them. So a gateway that disconnects stops nothing. Its held batches are dropped, and the
results of those that run; its instances stay for the other gateways, or for the next one. Ids of
instances and batches are unique across gateways: each has a range of its own.

What carries out the orders is up to the subclass: threads of a worker (`WorkerNode`, here), or
actors of Ray. Both are counterparts of the simulator's node, action by action.
"""

from __future__ import annotations

import logging
from bisect import insort
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
from headgate.core.backend import (
    NO_ROOM,
    STOPPED,
    Backend,
    Drain,
    Effect,
    Ended,
    IdleTimer,
    Message,
    ResidentInstance,
    SchedulerLeft,
)
from headgate.core.clock import NEVER_NS
from headgate.core.event_log import from_wire
from headgate.core.events import (
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, Compute, Pool, Variant
from headgate.functions.loader import LoadedFunction
from headgate.functions.tensor import Signature, TaskInputs
from headgate.live.ipc.messages import (
    ActionMessage,
    AnyMessage,
    ForgetMemory,
    FunctionLoaded,
    InstanceStage,
    MeasuredFunction,
    PresentInstance,
    RunBatch,
    frame,
)
from headgate.live.worker.begun_requests import BegunRequests
from headgate.live.worker.connection import GatewayConnection
from headgate.live.worker.executor import BatchJob, Executor, PrepareJob, TrialJob, UnloadJob
from headgate.live.worker.model_cache import LOAD_TIMEOUT_FACTOR, Loader, ModelCache

_LOG: Final = logging.getLogger(__name__)

SHORT_NS: Final = 5_000_000  # with one slot, nothing waits for the reading thread meanwhile


@dataclass(eq=False)
class SharedNode:
    """Executes the actions of all gateways. Calls must be serialised."""

    id: int
    pool: Pool
    app: App
    measured: dict[int, MeasuredFunction]  # by variant id; updated here

    def __post_init__(self) -> None:
        self.backend = Backend(self.pool, self.app.variants)
        self._connections: dict[GatewayConnection, None] = {}  # a set, in order of arrival
        # By batch that has not begun: its gateway and its inputs.
        self._held: dict[int, tuple[GatewayConnection, list[TaskInputs]]] = {}
        # By instance that has not started: the gateway that ordered it, which may have left.
        self._starters: dict[int, GatewayConnection] = {}

    def _begin(self, action: Action) -> None:
        """Begin a batch, a start or a load; hand its end to the `Backend` later."""
        raise NotImplementedError

    def _add_timer(self, timer: IdleTimer) -> None:
        """Hand the timer to the `Backend` when it is due."""
        raise NotImplementedError

    def _is_loaded(self, instance_id: int) -> bool:
        """Whether an instance has started."""
        raise NotImplementedError

    def _size_bytes(self, variant: Variant) -> int:
        """Return the size of a model, declared or measured; 0 if it is unknown."""
        raise NotImplementedError

    def _load_block_reason(self, start: StartInstance) -> str:
        """Return why a function must not be loaded now."""
        return ""

    def on_message(self, connection: GatewayConnection, message: AnyMessage) -> None:
        """Handle a message of a gateway. Raises `ValueError` or `ConfigError` for invalid ones."""
        if type(message) is RunBatch:
            self.dispatch(connection, message)
        elif isinstance(message, ActionMessage):
            action = from_wire(message.wire)
            if not isinstance(action, Action):
                raise ValueError(f"{type(action).__name__} is not an action")
            self.execute(connection, action)
        elif isinstance(message, ForgetMemory):
            connection.forget_memory(message.memory_id)
        else:
            raise ValueError(f"{type(message).__name__} is not for a worker")

    def add_gateway(self, connection: GatewayConnection) -> None:
        """Accept actions of a gateway, and tell it of every instance from now on."""
        self._connections[connection] = None

    def remove_gateway(self, connection: GatewayConnection) -> None:
        """Drop the batches of a gateway that has disconnected. Its instances stay."""
        del self._connections[connection]
        ids = frozenset(id for id, (owner, _) in self._held.items() if owner is connection)
        self._handle(SchedulerLeft(ids))

    def present_instances(self) -> list[PresentInstance]:
        """Return the instances that exist now, for the `Hello` to a gateway."""
        return [
            PresentInstance(
                each.id, each.variant.id, each.shape_id, self._stage(each), each.is_in_use
            )
            for each in self.backend.instances.values()
        ]

    def _stage(self, instance: ResidentInstance) -> InstanceStage:
        if instance.stop_reason:
            return "stopping"
        if not self._is_loaded(instance.id):
            return "starting"
        return "ready" if instance.is_ready or instance.running else "evicted"

    @property
    def is_draining(self) -> bool:
        return self.backend.is_draining

    def drain(self) -> None:
        """Accept no more actions and begin nothing; running batches finish."""
        self._handle(Drain())

    def dispatch(self, connection: GatewayConnection, run: RunBatch) -> None:
        """Begin, hold or refuse a batch. Raises `ValueError` if the message is invalid."""
        for offset in run.released:
            connection.arena.free(offset)
        batch_id, instance_id = run.batch_id, run.instance_id
        if batch_id < 0:
            raise ValueError(f"{batch_id} is not a valid id")
        resident = self.backend.instances.get(instance_id)
        if resident is not None:
            self._check_shape(resident, run.shape_id)
        if batch_id in self._held:
            raise ValueError(f"batch {batch_id} exists already")
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
        self._held[batch_id] = (connection, run.tasks)
        self._handle(action)

    def _check_shape(self, instance: ResidentInstance, shape_id: int) -> None:
        """Raise `ValueError` if an instance is not loaded for batches in a shape."""
        shapes = instance.variant.shapes
        if not 0 <= shape_id < len(shapes):
            raise ValueError(f"variant {instance.variant.id} has no shape {shape_id}")
        if shape_id == instance.shape_id:
            return
        if self.pool.compute != Compute.PER_BATCH:
            raise ValueError(f"instance {instance.id} has the shape {instance.shape_id}")
        if not self.pool.has_room_for(shapes[shape_id].shape):
            raise ValueError(f"shape {shape_id} does not fit this node")

    def execute(self, connection: GatewayConnection, action: Action) -> None:
        """Execute any other action. Raises `ValueError` if it is invalid."""
        if isinstance(action, CancelBatch):
            held = self._held.get(action.batch_id)
            if held is not None and held[0] is connection:
                self._handle(CancelBatch(action.batch_id, self.pool.id, self.id))
            return
        if not isinstance(action, StartInstance | LoadWeights | EvictWeights | StopInstance):
            raise ValueError(f"{type(action).__name__} is not for a worker")
        instance_id = action.instance_id
        if isinstance(action, StartInstance):
            self._start_instance(connection, action)
        elif isinstance(action, EvictWeights):
            self._handle(EvictWeights(instance_id, self.id))
        elif isinstance(action, StopInstance):
            self._stop_instance(connection, instance_id)
        elif instance_id in self.backend.instances and not self._is_loaded(instance_id):
            raise ValueError(f"instance {instance_id} has not been started yet")
        else:
            self._handle(LoadWeights(instance_id, self.id))

    def _start_instance(self, connection: GatewayConnection, action: StartInstance) -> None:
        instance_id = action.instance_id
        if instance_id < 0:
            raise ValueError(f"{instance_id} is not a valid id")
        if instance_id in self.backend.instances:
            raise ValueError(f"instance {instance_id} exists already")
        variants = self.app.variants
        is_known = 0 <= action.variant_id < len(variants)
        if not is_known or self.pool.id not in variants[action.variant_id].pool_ids:
            raise ValueError(f"variant {action.variant_id} does not run on this node")
        if not 0 <= action.shape_id < len(variants[action.variant_id].shapes):
            raise ValueError(f"variant {action.variant_id} has no shape {action.shape_id}")
        blocked = "" if self.is_draining else self._load_block_reason(action)
        if blocked:
            connection.report(InstanceStopped(action.instance_id, blocked))
        elif not self._has_memory(variants[action.variant_id]):
            connection.report(InstanceStopped(instance_id, NO_ROOM))
        else:
            variant_id, shape_id, nth = action.variant_id, action.shape_id, action.nth
            self._starters[instance_id] = connection
            start = StartInstance(instance_id, variant_id, self.pool.id, self.id, shape_id, nth)
            self._handle(start)

    def _has_memory(self, variant: Variant) -> bool:
        """Whether a model fits beside those that are here to stay.

        A gateway starts only what fits, as far as it knows; another may have been faster.
        """
        staying = [
            each.variant
            for each in self.backend.instances.values()
            if self._stage(each) not in ("stopping", "evicted") and not each.is_evicting
        ]
        size_bytes = self._size_bytes
        return sum(map(size_bytes, staying)) + size_bytes(variant) <= self.pool.memory_bytes

    def _stop_instance(self, connection: GatewayConnection, instance_id: int) -> None:
        """Stop an instance as soon as its work has ended.

        It takes no more batches, so the other gateways are told at once that it is gone. Their
        batches that run on it end as usual.
        """
        self._handle(StopInstance(instance_id, self.id))
        if instance_id in self.backend.instances:
            for other in self._connections:
                if other is not connection:
                    other.report(InstanceStopped(instance_id, STOPPED))

    def _handle(self, message: Message) -> None:
        self._apply(self.backend.handle(monotonic_ns(), message))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, IdleTimer):
                self._add_timer(effect)
            elif isinstance(effect, Event):
                self._report(effect)
            else:
                self._begin(effect)

    def _report(self, event: Event) -> None:
        """Report an event of the Backend."""
        if isinstance(event, BatchRefused):
            connection, _ = self._held.pop(event.batch_id)
            if connection in self._connections:
                connection.report(event)
            return
        assert isinstance(event, InstanceStopped | InstanceUseChanged | WeightsEvicted)
        self._report_instance(event)

    def _end_batch(self, action: Dispatch, connection: GatewayConnection, message: bytes) -> None:
        """Tell a gateway how its batch has ended, unless it has left."""
        effects = self.backend.handle(monotonic_ns(), Ended(action))
        if connection in self._connections:
            connection.send(message)
        self._apply(effects)

    def _end_start(self, action: StartInstance, problem: str, signature: Signature) -> None:
        """Report that an instance has started, or why it could not. `signature` is its own."""
        variant = self.app.variants[action.variant_id]
        measured = self.measured.get(variant.id)
        effects = self.backend.handle(monotonic_ns(), Ended(action, bool(problem)))
        if problem:
            if measured is not None:
                measured.problem = problem
            self._report_instance(InstanceStopped(action.instance_id, problem))
        else:
            self._report_started(variant, action)
            if measured is not None and measured.problem:
                measured.problem, measured.signature = "", signature
                _LOG.info("%s: loaded after earlier failures", variant.name)
                for connection in self._connections:
                    connection.send(frame(FunctionLoaded(measured)))
        self._apply(effects)

    def _end_load(self, action: LoadWeights) -> None:
        effects = self.backend.handle(monotonic_ns(), Ended(action))
        self._report_instance(WeightsLoaded(action.instance_id))
        self._apply(effects)

    def _report_instance(
        self, event: InstanceStopped | InstanceUseChanged | WeightsEvicted | WeightsLoaded
    ) -> None:
        """Tell every gateway what has become of an instance."""
        if isinstance(event, InstanceStopped):
            self._starters.pop(event.instance_id, None)
        for connection in self._connections:
            connection.report(event)

    def _report_started(self, variant: Variant, action: StartInstance) -> None:
        """Tell every gateway of a new instance; the one that ordered it waits for its start."""
        instance_id, shape_id = action.instance_id, action.shape_id
        starter = self._starters.pop(instance_id, None)
        for connection in self._connections:
            if connection is starter:
                connection.report(InstanceStarted(instance_id, self.id))
            else:
                connection.report(InstanceAppeared(instance_id, variant.id, self.id, shape_id))


@final
@dataclass(eq=False)
class WorkerNode(SharedNode):
    """Carries out the orders of a `SharedNode` in threads of this process."""

    run_dir: Path
    model_cache: ModelCache
    loader: Loader
    executor: Executor
    hang_ns: int
    begun: BegunRequests

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loaded: dict[int, tuple[Variant, LoadedFunction]] = {}  # by instance
        self._idle_timers: deque[IdleTimer] = deque()  # the next one first

    def _is_loaded(self, instance_id: int) -> bool:
        return instance_id in self._loaded

    def _size_bytes(self, variant: Variant) -> int:
        return self.model_cache.size_bytes(variant)

    def _add_timer(self, timer: IdleTimer) -> None:
        insort(self._idle_timers, timer, key=lambda timer: timer.at_ns)

    def _load_block_reason(self, start: StartInstance) -> str:
        """Return why a function must not be loaded now; may begin a trial, which uses no slot."""
        variant = self.app.variants[start.variant_id]
        is_cached = self.model_cache.has(variant, start.shape_id)
        reason = "" if is_cached else self.loader.block_reason(variant)
        if reason and self.loader.try_begin_trial(variant):
            limit_ns, memory_bytes = LOAD_TIMEOUT_FACTOR * self.hang_ns, self.pool.memory_bytes
            self.executor.submit(
                TrialJob(variant, self.loader, self.run_dir, limit_ns, memory_bytes)
            )
        return reason

    def _begin(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            assert action.instance_id is not None
            variant, loaded = self._loaded[action.instance_id]
            runner = loaded.on(self.model_cache.cores_of(variant, action.shape_id))
            connection, tasks = self._held.pop(action.batch_id)
            on_done, hang_ns, begun = self._on_batch_done, self.hang_ns, self.begun
            job = BatchJob(action, tasks, runner, connection, on_done, hang_ns, begun)
            # Inline only with a single slot: with more, batches in other slots would wait for the
            # reading thread.
            runs_inline = self.pool.slots == 1 and runner.mean_exec_ns < SHORT_NS
            self.executor.submit(job, runs_inline=runs_inline)
            return
        assert isinstance(action, StartInstance | LoadWeights)
        instance = self.backend.instances[action.instance_id]
        variant, shape_id = instance.variant, instance.shape_id
        model_cache = self.model_cache if isinstance(action, StartInstance) else None
        limit_ns = LOAD_TIMEOUT_FACTOR * self.hang_ns
        self.executor.submit(
            PrepareJob(action, variant, model_cache, self._on_prepared, limit_ns, shape_id)
        )

    def _on_batch_done(self, job: BatchJob) -> None:
        self._end_batch(job.action, job.connection, job.reply)

    def _on_prepared(self, job: PrepareJob) -> None:
        action = job.action
        if isinstance(action, LoadWeights):
            self._end_load(action)
        elif job.loaded is None:
            self._end_start(action, job.error, Signature())
        else:
            self._loaded[action.instance_id] = (job.variant, job.loaded)
            self._end_start(action, "", job.loaded.runner.signature)

    def next_timer_ns(self) -> int:
        return self._idle_timers[0].at_ns if self._idle_timers else NEVER_NS

    def retire_idle(self, now_ns: int) -> None:
        """Hand the idle timers that are due to the Backend."""
        while self._idle_timers and self._idle_timers[0].at_ns <= now_ns:
            self._apply(self.backend.handle(now_ns, self._idle_timers.popleft()))

    def _report(self, event: Event) -> None:
        """Report an event of the Backend, and free what the worker kept for what is over."""
        if isinstance(event, InstanceStopped) and event.instance_id in self._loaded:
            variant, loaded = self._loaded.pop(event.instance_id)
            if self.is_draining:
                self.model_cache.release(variant, loaded, keep=True)
            else:  # whoever stopped it wants the memory back
                limit_ns = LOAD_TIMEOUT_FACTOR * self.hang_ns
                self.executor.submit(UnloadJob(variant, loaded, self.model_cache, limit_ns))
        super()._report(event)
