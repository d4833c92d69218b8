"""What Schedulers share: the Backend of one node, and the Broker of a pool whose nodes it grants.

The Backend has the rules of one node, the same in the simulator and in every live worker.

A node may serve several Schedulers, so only its Backend knows whether a slot is free: it begins an
order, holds it, or refuses it. Orders are carried out in the order they were given as far as slots,
compute and residency allow: a dispatch that follows the start of its own instance waits for that
start. A running batch holds the compute of its shape; where compute is resident (`Pool.compute`),
an instance holds it from the begin of its start until it stops or its weights are evicted.

Like the Scheduler, the Backend is pure and has one entry: `handle(now_ns, message) -> effects`.

A message is an order (an action of a Scheduler for this node), or tells what has happened:
`Ended` (an order that had begun is over), `IdleTimer` (it is due), `SchedulerLeft` or `Drain`.

Instances belong to the node, not to the Scheduler that started them: they stay when it leaves, and
any Scheduler may use or stop them. Each stops by itself when nobody has used it for long. Where
`Variant.unused_after_ns` is set this takes two steps: an instance is first no longer *in use*,
which every Scheduler may see, and after `Variant.retire_after_ns` more it stops. A batch that
begins meanwhile makes it in use again, at no cost.

The driver applies the effects in their order. An effect is one of
- an order (`Dispatch`, `StartInstance` or `LoadWeights`): begin it now, and hand in `Ended` for it
  exactly once. The driver reports the event of its end, because only the driver knows the result;
- an event: report it to the Scheduler whose order it ends;
- an `IdleTimer`: hand it in again at its `at_ns`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final, TypeAlias, final

from headgate.core.actions import (
    Action,
    CancelBatch,
    Dispatch,
    EvictWeights,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.clock import NEVER_NS
from headgate.core.errors import DriverError
from headgate.core.events import (
    BatchRefused,
    Event,
    InstanceStopped,
    InstanceUseChanged,
    Refusal,
    WeightsEvicted,
)
from headgate.core.model import UNLIMITED, Compute, Pool, Variant

INSTANCES_MAX: Final = 4096  # per node: a Scheduler cannot fill the memory of a worker

# Why an instance has stopped, in the words of logs.
STOPPED: Final = "stopped"
IDLE: Final = "idle for too long"
RETIRED: Final = "not in use for too long"
DRAINING: Final = "the node is draining"
NO_ROOM: Final = "another gateway has taken the room"  # before it began to start
# Why a Broker denies a node, in the same words.
EXHAUSTED: Final = "the pool is exhausted"
STARTED_ALREADY: Final = "another gateway has ordered it"
NODE_LOST: Final = "the node was lost"  # that was granted
# These say nothing about whether a variant can be loaded: none of them has tried to.
NEVER_TRIED: Final = frozenset((DRAINING, EXHAUSTED, NODE_LOST, NO_ROOM, STARTED_ALREADY))


@final
class Ended:
    """An order that had begun is over: a batch, a load or a start, which may have failed.

    The Backend keeps no reference to it, so a driver may use one object again and again.
    """

    __slots__ = ("has_failed", "order")

    def __init__(self, order: Action, has_failed: bool = False) -> None:
        self.order = order
        self.has_failed = has_failed  # of a start only: there is no instance


@final
class IdleTimer:
    """At `at_ns` this instance may have reached an idle timeout, of its pool or its variant."""

    __slots__ = ("at_ns", "instance_id")

    def __init__(self, instance_id: int, at_ns: int) -> None:
        self.instance_id = instance_id
        self.at_ns = at_ns


@final
class SchedulerLeft:
    """Nobody waits any more for the batches with these ids. Instances stay."""

    __slots__ = ("ids",)

    def __init__(self, ids: Container[int]) -> None:
        self.ids = ids


@final
class Drain:
    """Accept and begin nothing from now on. What runs may finish."""

    __slots__ = ()


Message: TypeAlias = Action | Ended | IdleTimer | SchedulerLeft | Drain
Effect: TypeAlias = Action | Event | IdleTimer

# Returned where nothing follows, as after most batches. Drivers only read effects.
_NOTHING: Final[list[Effect]] = []


@final
class ResidentInstance:
    """The state of an instance on its own node."""

    __slots__ = (
        "has_timer",
        "held",
        "holds_compute",
        "id",
        "idle_since_ns",
        "is_evicting",
        "is_in_use",
        "is_ready",
        "running",
        "shape_id",
        "stop_reason",
        "variant",
    )

    def __init__(self, id: int, variant: Variant, shape_id: int = 0) -> None:
        self.id = id
        self.variant = variant
        self.shape_id = shape_id  # what it was started with, where an instance has a shape
        self.holds_compute = False  # it holds its shape, because compute is resident on this node
        self.is_ready = False  # weights on the device: started, and not being loaded
        self.stop_reason = ""  # why it stops as soon as its work has ended; "": it does not
        self.is_evicting = False  # its weights leave the device as soon as its work has ended
        self.running = 0
        self.held = 0  # dispatches accepted and not begun
        self.idle_since_ns = 0  # when its last work ended; meaningful only while nothing runs
        self.is_in_use = True  # False from `Variant.unused_after_ns` after its last work
        self.has_timer = False  # one of its timeouts is being waited for


@final
class Backend:
    """The instances of one node, its running work, and the orders that it holds back."""

    def __init__(self, pool: Pool, variants: tuple[Variant, ...]) -> None:
        self._pool = pool
        self._variants = variants
        self._slots = pool.slots
        self._cpu_milli_max = pool.cpu_milli
        self._gpu_sevenths_max = pool.gpu_sevenths
        limits_compute = pool.cpu_milli < UNLIMITED or pool.gpu_sevenths < UNLIMITED
        is_resident = pool.compute == Compute.RESIDENT
        self._is_resident = limits_compute and is_resident  # instances hold compute
        self._counts_batches = limits_compute and not is_resident  # running batches do
        self._has_idle_timeout = pool.idle_timeout_ns < NEVER_NS or any(
            variant.unused_after_ns < NEVER_NS for variant in variants
        )
        self._running = 0
        self._cpu_milli = 0
        self._gpu_sevenths = 0
        self._held: list[Action] = []
        self.instances: dict[int, ResidentInstance] = {}
        self.is_draining = False

    def handle(self, now_ns: int, message: Message) -> list[Effect]:
        """Take an order or learn what has happened; return what the driver must do now.

        A dispatch, a start or a load without effect is held. O(held orders), else O(1).
        """
        # What every batch passes through is inline, because calls are what costs interpreted code.
        if isinstance(message, Dispatch):
            instance_id = message.instance_id
            instance = None if instance_id is None else self.instances.get(instance_id)
            if instance is None or instance.stop_reason:
                return [BatchRefused(message.batch_id, Refusal.GONE)]
            is_next = not self._held or not self._has_waiting_order()
            if is_next and self._try_begin_batch(instance, message.shape_id):
                if instance.is_in_use:
                    return [message]
                return [message, _used_again(instance)]
            return self._hold(message, instance)
        if not isinstance(message, Ended):
            return self._handle_rare(now_ns, message)
        order = message.order
        if isinstance(order, Dispatch) and order.instance_id is not None:
            instance = self.instances[order.instance_id]
            if self._counts_batches:
                shape = instance.variant.shapes[order.shape_id].shape
                self._cpu_milli -= shape.cpu_milli
                self._gpu_sevenths -= shape.gpu_sevenths
        else:
            instance = self.instances[instance_of(order)]
            instance.is_ready = True
        instance.idle_since_ns = now_ns
        instance.running -= 1
        self._running -= 1
        if (
            self._has_idle_timeout
            or self._held
            or instance.stop_reason
            or instance.is_evicting
            or message.has_failed
        ):
            return self._after_end(now_ns, instance, message.has_failed)
        return _NOTHING

    def _handle_rare(self, now_ns: int, message: Message) -> list[Effect]:
        if isinstance(message, StartInstance):
            return self._start(message)
        if isinstance(message, LoadWeights):
            return self._load(message)
        effects: list[Effect] = []
        if isinstance(message, EvictWeights):
            self._evict(message.instance_id, effects)
        elif isinstance(message, StopInstance):
            self._stop(message.instance_id, STOPPED, effects)
        elif isinstance(message, CancelBatch):
            for batch in self.held_batches():
                if batch.batch_id == message.batch_id:
                    self._refuse_held(batch, Refusal.CANCELLED, effects)
        elif isinstance(message, IdleTimer):
            self._stop_if_idle(now_ns, message.instance_id, effects)
        elif isinstance(message, SchedulerLeft):
            self._refuse_all(message.ids, effects)
            self._begin_held(effects)
        elif isinstance(message, Drain):
            self.is_draining = True
            self._refuse_all(range(NEVER_NS), effects)
            for instance_id in list(self.instances):
                self._stop(instance_id, DRAINING, effects)
            self._begin_held(effects)
        else:
            raise DriverError(f"{type(message).__name__} is not for a node")
        if self._is_resident:
            self._begin_held(effects)  # what left the device has made room
        return effects

    def held_batches(self) -> list[Dispatch]:
        """Batches accepted and not begun."""
        return [order for order in self._held if isinstance(order, Dispatch)]

    def _hold(self, order: Dispatch, instance: ResidentInstance) -> list[Effect]:
        """Hold a batch that cannot begin now, or refuse it."""
        if not instance.is_ready and not self._is_preparing(instance):
            # Another Scheduler has evicted its weights, and the news and this order have crossed.
            return [BatchRefused(order.batch_id, Refusal.BUSY)]
        # A batch may wait for its own instance to become ready, up to the instance's concurrency.
        may_wait = not instance.is_ready and instance.held < instance.variant.concurrency
        if not may_wait and self._queue_length() >= self._pool.queue_max:
            return [BatchRefused(order.batch_id, Refusal.BUSY)]
        instance.held += 1
        self._held.append(order)
        return _NOTHING

    def _start(self, order: StartInstance) -> list[Effect]:
        if self.is_draining:
            return [InstanceStopped(order.instance_id, DRAINING)]
        if len(self.instances) >= INSTANCES_MAX:
            return [InstanceStopped(order.instance_id, "too many instances")]
        variant = self._variants[order.variant_id]
        instance = ResidentInstance(order.instance_id, variant, order.shape_id)
        self.instances[order.instance_id] = instance
        return self._prepare(order, instance)

    def _load(self, order: LoadWeights) -> list[Effect]:
        instance = self.instances.get(order.instance_id)
        if instance is None or instance.stop_reason:
            return _NOTHING  # the Scheduler learns, or has learnt, that the instance has stopped
        instance.is_ready = False
        instance.is_evicting = False
        return self._prepare(order, instance)

    def _prepare(self, order: Action, instance: ResidentInstance) -> list[Effect]:
        if denied := self._denial(order):
            del self.instances[instance.id]
            return [InstanceStopped(instance.id, denied)]
        if (
            not self._has_waiting_order()
            and not self._others_of(order)
            and self._try_prepare(instance)
        ):
            return [order]
        self._held.append(order)
        return _NOTHING

    def _denial(self, order: Action) -> str:
        """Why a start that other gateways may have forestalled will never begin; empty: it may."""
        if not isinstance(order, StartInstance) or not order.nth:
            return ""
        if self._others_of(order, ready=True):
            return STARTED_ALREADY
        return NO_ROOM if self._is_resident and not self._has_compute_for(order) else ""

    def _has_compute_for(self, order: StartInstance) -> bool:
        """Whether an instance fits beside those that hold compute and are here to stay."""
        shape = self._variants[order.variant_id].shapes[order.shape_id].shape
        cpu_milli, gpu_sevenths = shape.cpu_milli, shape.gpu_sevenths
        for other in self.instances.values():
            if other.holds_compute and not other.stop_reason and not other.is_evicting:
                shape = other.variant.shapes[other.shape_id].shape
                cpu_milli += shape.cpu_milli
                gpu_sevenths += shape.gpu_sevenths
        return cpu_milli <= self._cpu_milli_max and gpu_sevenths <= self._gpu_sevenths_max

    def _others_of(self, order: Action, *, ready: bool = False) -> bool:
        """Whether the node has what a start is for: as many others are ready, or being started.

        Several gateways may find that a node lacks a variant. One start is begun; the others wait
        for its end, and begin only if it fails.
        """
        if not isinstance(order, StartInstance) or not order.nth:
            return False
        count = 0
        for other in self.instances.values():
            is_here = other.is_ready if ready else other.is_ready or other.running > 0
            if other.variant.id == order.variant_id and is_here and not other.stop_reason:
                count += 1
        return count >= order.nth

    def _evict(self, instance_id: int, effects: list[Effect]) -> None:
        """Take weights off the device, now or when the instance's work has ended.

        A Scheduler evicts only instances that it believes to be idle. It can be wrong: a batch that
        it gave up as lost may still run, and it does not know the batches of other Schedulers.
        """
        instance = self.instances.get(instance_id)
        if instance is None:
            effects.append(WeightsEvicted(instance_id))
        else:
            instance.is_evicting = True
            self._finish_if_idle(instance, effects)

    def _stop(self, instance_id: int, reason: str, effects: list[Effect]) -> None:
        """Stop an instance, now or when its work has ended."""
        instance = self.instances.get(instance_id)
        if instance is None:
            effects.append(InstanceStopped(instance_id, reason))
        else:
            instance.stop_reason = reason
            self._finish_if_idle(instance, effects)

    def _stop_if_idle(self, now_ns: int, instance_id: int, effects: list[Effect]) -> None:
        """Stop an instance that nobody has used for long; one that has been used waits on."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return
        instance.has_timer = False
        if instance.running or not instance.is_ready or instance.stop_reason:
            return  # when its work has ended it gets another timer
        if instance.variant.unused_after_ns < NEVER_NS:
            if not instance.held:
                self._retire_by_steps(now_ns, instance, effects)
            return
        due_ns = instance.idle_since_ns + self._pool.idle_timeout_ns
        if now_ns < due_ns:
            self._set_timer(instance, due_ns, effects)
        elif not instance.held:
            self._stop(instance_id, IDLE, effects)

    def _retire_by_steps(
        self, now_ns: int, instance: ResidentInstance, effects: list[Effect]
    ) -> None:
        """Take an idle instance out of use, or stop one that is not in use, when that is due."""
        variant = instance.variant
        due_ns = instance.idle_since_ns + variant.unused_after_ns
        if instance.is_in_use and now_ns >= due_ns:
            instance.is_in_use = False
            effects.append(InstanceUseChanged(instance.id, False))
        if not instance.is_in_use:
            if variant.retire_after_ns == NEVER_NS:
                return
            due_ns += variant.retire_after_ns
            if now_ns >= due_ns:
                self._stop(instance.id, RETIRED, effects)
                return
        self._set_timer(instance, due_ns, effects)

    def _set_timer(self, instance: ResidentInstance, at_ns: int, effects: list[Effect]) -> None:
        """Wait for a timeout of this instance. One timer is enough, however often it is used."""
        if not instance.has_timer:
            instance.has_timer = True
            effects.append(IdleTimer(instance.id, at_ns))

    def _refuse_all(self, ids: Container[int], effects: list[Effect]) -> None:
        """Refuse the held batches with these ids."""
        for batch in self.held_batches():
            if batch.batch_id in ids:
                self._refuse_held(batch, Refusal.GONE, effects)

    def _refuse_held(self, batch: Dispatch, refusal: int, effects: list[Effect]) -> None:
        self._held.remove(batch)
        effects.append(BatchRefused(batch.batch_id, refusal))
        instance = self.instances[instance_of(batch)]
        instance.held -= 1
        self._finish_if_idle(instance, effects)

    def _after_end(self, now_ns: int, instance: ResidentInstance, has_failed: bool) -> list[Effect]:
        """What follows from the end of an order of this instance."""
        effects: list[Effect] = []
        if has_failed:
            self._remove(instance, effects)
        self._begin_held(effects)
        if has_failed:
            return effects
        self._finish_if_idle(instance, effects)
        if self._is_resident:
            self._begin_held(effects)  # what left the device has made room
        is_idle = instance.is_ready and not (instance.running or instance.held)
        if self._has_idle_timeout and is_idle and not instance.stop_reason:
            if instance.variant.unused_after_ns < NEVER_NS:
                self._set_timer(instance, now_ns + instance.variant.unused_after_ns, effects)
            elif self._pool.idle_timeout_ns < NEVER_NS:
                self._set_timer(instance, now_ns + self._pool.idle_timeout_ns, effects)
        return effects

    def _begin_held(self, effects: list[Effect]) -> None:
        """Begin the held orders that can begin now."""
        if not self._held:
            return
        still_held: list[Action] = []
        denied: list[tuple[ResidentInstance, str]] = []
        for order in self._held:
            instance = self.instances[instance_of(order)]
            if isinstance(order, Dispatch):
                begins = self._try_begin_batch(instance, order.shape_id)
                instance.held -= begins
            elif reason := self._denial(order):
                begins = False
                denied.append((instance, reason))
            elif self._others_of(order):
                begins = False
            else:
                begins = self._try_prepare(instance)
            if begins:
                effects.append(order)
                if not instance.is_in_use:
                    effects.append(_used_again(instance))
            else:
                still_held.append(order)
        self._held = still_held
        for instance, reason in denied:
            self._remove(instance, effects)
            effects.append(InstanceStopped(instance.id, reason))

    def _finish_if_idle(self, instance: ResidentInstance, effects: list[Effect]) -> None:
        """Carry out the eviction and the stop that waited for the end of an instance's work."""
        if instance.running or instance.held:
            return
        if instance.is_evicting:
            instance.is_evicting = False
            instance.is_ready = False
            self._release_compute(instance)
            effects.append(WeightsEvicted(instance.id))
        if instance.stop_reason:
            self._remove(instance, effects)
            effects.append(InstanceStopped(instance.id, instance.stop_reason))

    def _remove(self, instance: ResidentInstance, effects: list[Effect]) -> None:
        """Remove an instance with everything that is held for it."""
        del self.instances[instance.id]
        self._release_compute(instance)
        still_held: list[Action] = []
        for order in self._held:
            if instance_of(order) != instance.id:
                still_held.append(order)
            elif isinstance(order, Dispatch):
                effects.append(BatchRefused(order.batch_id, Refusal.GONE))
        self._held = still_held

    def _try_begin_batch(self, instance: ResidentInstance, shape_id: int) -> bool:
        """Take a slot and the compute of a shape if they are free and the instance is ready."""
        if not instance.is_ready or instance.running >= instance.variant.concurrency:
            return False
        if self._running >= self._slots:
            return False
        if self._counts_batches:
            shape = instance.variant.shapes[shape_id].shape
            cpu_milli = self._cpu_milli + shape.cpu_milli
            gpu_sevenths = self._gpu_sevenths + shape.gpu_sevenths
            if cpu_milli > self._cpu_milli_max or gpu_sevenths > self._gpu_sevenths_max:
                return False
            self._cpu_milli = cpu_milli
            self._gpu_sevenths = gpu_sevenths
        self._running += 1
        instance.running += 1
        return True

    def _try_prepare(self, instance: ResidentInstance) -> bool:
        """Take a slot for a start or a load and, where it is resident, the instance's compute.

        Elsewhere it takes no compute, here and in the books of the Scheduler: it runs no batch, and
        which shape its batches will have may not be known yet.
        """
        if self._running >= self._slots:
            return False
        if self._is_resident and not instance.holds_compute and not self._take_compute(instance):
            return False
        self._running += 1
        instance.running += 1
        return True

    def _take_compute(self, instance: ResidentInstance) -> bool:
        """Take the compute that an instance holds while it is loaded, if that is free."""
        shape = instance.variant.shapes[instance.shape_id].shape
        cpu_milli = self._cpu_milli + shape.cpu_milli
        gpu_sevenths = self._gpu_sevenths + shape.gpu_sevenths
        if cpu_milli > self._cpu_milli_max or gpu_sevenths > self._gpu_sevenths_max:
            return False
        self._cpu_milli = cpu_milli
        self._gpu_sevenths = gpu_sevenths
        instance.holds_compute = True
        return True

    def _release_compute(self, instance: ResidentInstance) -> None:
        """Release the compute of an instance that leaves the device."""
        if instance.holds_compute:
            shape = instance.variant.shapes[instance.shape_id].shape
            self._cpu_milli -= shape.cpu_milli
            self._gpu_sevenths -= shape.gpu_sevenths
            instance.holds_compute = False

    def _has_waiting_order(self) -> bool:
        """Whether a held order waits for a slot, and not only for its own instance."""
        for order in self._held:
            if not isinstance(order, Dispatch):
                if not self._others_of(order):
                    return True
            elif self.instances[instance_of(order)].is_ready:
                return True
        return False

    def _is_preparing(self, instance: ResidentInstance) -> bool:
        """Whether an instance that is not ready is being started or loaded, or will be."""
        if instance.running:
            return True
        orders = (order for order in self._held if not isinstance(order, Dispatch))
        return any(instance_of(order) == instance.id for order in orders)

    def _queue_length(self) -> int:
        """Number of held batches whose instance is ready: those that wait for a slot."""
        return sum(
            1 for batch in self.held_batches() if self.instances[instance_of(batch)].is_ready
        )


def _used_again(instance: ResidentInstance) -> InstanceUseChanged:
    instance.is_in_use = True
    return InstanceUseChanged(instance.id, True)


def instance_of(order: Action) -> int:
    """The instance that a batch, a start or a load is for."""
    if isinstance(order, Dispatch):
        assert order.instance_id is not None, "a FaaS pool has no Backend"
        return order.instance_id
    assert isinstance(order, StartInstance | LoadWeights)
    return order.instance_id


@final
class Grant:
    """Permission to start an instance on a node."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class Broker:
    """The free nodes of a pool that several Schedulers share, and the requests that wait for one.

    A node of such a pool holds one instance at a time. Requests for a node are granted in order of
    arrival, but a function that holds fewer nodes goes before one that holds more, so no function
    can starve the others. When no node is free, requests wait in a queue of bounded length; beyond
    the bound they are denied, and the Scheduler sees an instance that could not be started.

    A request may say that it is for the `nth` instance of its function. It is denied if the
    function holds as many nodes already, or will when its requests are granted. So Schedulers that
    want the same instance need not agree on who starts it.
    """

    def __init__(self, waiting_max: int = 1_000) -> None:
        self._waiting_max = waiting_max
        self._free: dict[int, None] = {}  # node ids, longest free first
        self._waiting: dict[int, int] = {}  # instance id -> function id, in order of request
        self._held: dict[int, tuple[int, int]] = {}  # node id -> (instance id, function id)
        self._nodes_of: dict[int, int] = {}  # function id -> nodes it holds

    def request(self, instance_id: int, function_id: int, nth: int = 0) -> str:
        """Request a node. Returns why the request is denied; empty if it is granted or waits."""
        if nth:
            waiting = sum(1 for other in self._waiting.values() if other == function_id)
            if self._nodes_of.get(function_id, 0) + waiting >= nth:
                return STARTED_ALREADY
        if not self._free and len(self._waiting) >= self._waiting_max:
            return EXHAUSTED
        self._waiting[instance_id] = function_id
        return ""

    def withdraw(self, instance_id: int) -> None:
        """Drop the request of an instance that has not been granted a node."""
        self._waiting.pop(instance_id, None)

    def withdraw_all(self, ids: range) -> list[int]:
        """Drop the requests with these ids, whose Scheduler has left; return the ids dropped."""
        dropped = [instance_id for instance_id in self._waiting if instance_id in ids]
        for instance_id in dropped:
            del self._waiting[instance_id]
        return dropped

    def node_joined(self, node_id: int) -> None:
        """Add a node that may be granted. Idempotent, also while the node is granted."""
        if node_id not in self._held:
            self._free[node_id] = None

    def node_freed(self, node_id: int) -> None:
        """Release a node whose instance is gone, so that it may be granted again."""
        if self._release(node_id):
            self._free[node_id] = None

    def node_lost(self, node_id: int) -> None:
        """Remove a node from the pool."""
        self._release(node_id)
        self._free.pop(node_id, None)

    def grants(self) -> list[Grant]:
        """Grant free nodes to waiting requests: the function with fewest nodes first, then FIFO."""
        granted: list[Grant] = []
        while self._free and self._waiting:
            instance_id = min(  # dicts keep their order, so ties go to the oldest request
                self._waiting, key=lambda i: self._nodes_of.get(self._waiting[i], 0)
            )
            function_id = self._waiting.pop(instance_id)
            node_id = next(iter(self._free))
            del self._free[node_id]
            self._held[node_id] = (instance_id, function_id)
            self._nodes_of[function_id] = self._nodes_of.get(function_id, 0) + 1
            granted.append(Grant(instance_id, node_id))
        return granted

    def _release(self, node_id: int) -> bool:
        held = self._held.pop(node_id, None)
        if held is None:
            return False
        self._nodes_of[held[1]] -= 1
        return True
