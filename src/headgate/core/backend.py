"""The Backend: admission of orders on one node, in the simulator and in every live worker.

A node may serve several Schedulers, so only its Backend knows whether a slot is free: it begins an
order, holds it back, or refuses it. Orders are carried out in the order they were given as far as
slots, compute and residency allow: a dispatch that follows the start of its own instance waits for
that start.

Like the Scheduler, the Backend is pure: time is an argument, and its driver does what it returns.
The driver calls `start`, `load`, `offer`, `evict`, `stop` and `cancel` for orders, and `on_ended`
when something that it began has ended. Whatever the Backend begins, the driver must begin at once.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.actions import Action, Dispatch, LoadWeights, StartInstance
from headgate.core.clock import NEVER_NS
from headgate.core.model import Pool, Variant


class Verdict:
    """A Backend's answer to an order."""

    BEGIN: Final = 0
    HOLD: Final = 1  # accepted, begins later
    BUSY: Final = 2  # refused: no slot, and the queue is full
    GONE: Final = 3  # refused: the instance is not there, or it is draining


_BEGIN: Final = Verdict.BEGIN  # CPython reads a module global much faster than a class attribute


@final
class ResidentInstance:
    """The state of an instance on its own node."""

    __slots__ = (
        "held",
        "id",
        "idle_since_ns",
        "is_draining",
        "is_evicting",
        "is_ready",
        "running",
        "variant",
    )

    def __init__(self, id: int, variant: Variant) -> None:
        self.id = id
        self.variant = variant
        self.is_ready = False  # weights on the device: started, and not being loaded
        self.is_draining = False
        self.is_evicting = False  # its weights leave the device as soon as its work has ended
        self.running = 0
        self.held = 0  # dispatches accepted and not begun
        self.idle_since_ns = 0  # when its last work ended; meaningful only while nothing runs


@final
class Backend:
    """The instances of one node, its running work, and the orders that it holds back."""

    def __init__(self, pool: Pool, variants: tuple[Variant, ...]) -> None:
        self._pool = pool
        self._variants = variants
        self._slots = pool.slots
        self._limits_compute = pool.cpu_milli < NEVER_NS or pool.gpu_sevenths < NEVER_NS
        self.running = 0
        self._cpu_milli = 0
        self._gpu_sevenths = 0
        self.instances: dict[int, ResidentInstance] = {}
        self._held: list[Action] = []

    def offer(self, order: Dispatch) -> int:
        """Whether a batch begins now, is held, or is refused."""
        instance_id = order.instance_id
        instance = None if instance_id is None else self.instances.get(instance_id)
        if instance is None or instance.is_draining:
            return Verdict.GONE
        is_next = not self._held or not self._has_waiting_order()
        if is_next and self._try_begin(instance):
            return _BEGIN
        # A batch may wait for its own instance to become ready, up to the instance's concurrency.
        may_wait = not instance.is_ready and instance.held < instance.variant.concurrency
        if not may_wait and self._queue_length() >= self._pool.queue_max:
            return Verdict.BUSY
        instance.held += 1
        self._held.append(order)
        return Verdict.HOLD

    def start(self, order: StartInstance) -> int:
        """Start an instance, or hold the start until a slot is free."""
        instance = ResidentInstance(order.instance_id, self._variants[order.variant_id])
        self.instances[order.instance_id] = instance
        return self._prepare(order, instance)

    def load(self, order: LoadWeights) -> int:
        """Load an instance's weights, or hold the load until a slot is free."""
        instance = self.instances.get(order.instance_id)
        if instance is None or instance.is_draining:
            return Verdict.GONE
        instance.is_ready = False
        instance.is_evicting = False
        return self._prepare(order, instance)

    def evict(self, instance_id: int) -> bool:
        """Whether the weights are off the device now; else they leave when its work has ended.

        A Scheduler evicts only instances that it believes to be idle. It can be wrong: a batch that
        it gave up as lost may still run, and it does not know the batches of other Schedulers.
        """
        instance = self.instances.get(instance_id)
        if instance is None:
            return True
        if instance.running or instance.held:
            instance.is_evicting = True
            return False
        instance.is_ready = False
        return True

    def stop(self, instance_id: int) -> bool:
        """Whether the instance has stopped now; else it stops when its work has ended."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return True
        instance.is_draining = True
        if instance.running or instance.held:
            return False
        self._drop(instance_id)
        return True

    def cancel(self, batch_id: int) -> Dispatch | None:
        """Remove and return a held batch; None if it has begun or is unknown."""
        for order in self._held:
            if isinstance(order, Dispatch) and order.batch_id == batch_id:
                self._held.remove(order)
                assert order.instance_id is not None
                self.instances[order.instance_id].held -= 1
                return order
        return None

    def on_ended(self, now_ns: int, order: Action) -> bool:
        """Record the end of a start, a load or a batch that had begun.

        Returns whether `begin_held`, `drained_instance` or `evicted_instance` now has work to do.
        """
        instance = self.instances[_instance_of(order)]
        if not isinstance(order, Dispatch):
            instance.is_ready = True
        instance.idle_since_ns = now_ns
        instance.running -= 1
        self.running -= 1
        if self._limits_compute:
            shape = instance.variant.shape
            self._cpu_milli -= shape.cpu_milli
            self._gpu_sevenths -= shape.gpu_sevenths
        return instance.is_draining or instance.is_evicting or len(self._held) > 0

    def begin_held(self) -> list[Action]:
        """Begin the held orders that can begin now, and return them."""
        if not self._held:
            return []
        begun: list[Action] = []
        still_held: list[Action] = []
        for order in self._held:
            instance = self.instances[_instance_of(order)]
            if isinstance(order, Dispatch):
                has_begun = self._try_begin(instance)
                if has_begun:
                    instance.held -= 1
            else:
                has_begun = self._try_take_slot(instance)
            if has_begun:
                begun.append(order)
            else:
                still_held.append(order)
        self._held = still_held
        return begun

    def drained_instance(self, order: Action) -> int | None:
        """The draining instance that has stopped because this order was its last; None if none.

        Call this and `evicted_instance` whenever an order is over: after `on_ended`, and after
        `cancel` has removed it.
        """
        instance_id = _instance_of(order)
        instance = self.instances.get(instance_id)
        if instance is None or not instance.is_draining or instance.running or instance.held:
            return None
        self._drop(instance_id)
        return instance_id

    def evicted_instance(self, order: Action) -> int | None:
        """The instance whose pending eviction happened because this order was its last; or None."""
        instance = self.instances.get(_instance_of(order))
        if instance is None or not instance.is_evicting or instance.running or instance.held:
            return None
        instance.is_evicting = False
        instance.is_ready = False
        return instance.id

    def on_start_failed(self, instance_id: int) -> list[Dispatch]:
        """Drop an instance that could not be started; return the batches held for it."""
        del self.instances[instance_id]
        return self._drop_held(instance_id)

    def retire_idle(self, now_ns: int, instance_id: int) -> bool:
        """Drop an instance that has been idle for the pool's `idle_timeout_ns`; whether it was."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.running or instance.held or not instance.is_ready:
            return False
        if now_ns - instance.idle_since_ns < self._pool.idle_timeout_ns:
            return False
        del self.instances[instance_id]
        return True

    def held_batches(self) -> list[Dispatch]:
        """Batches accepted and not begun."""
        return [order for order in self._held if isinstance(order, Dispatch)]

    def _try_begin(self, instance: ResidentInstance) -> bool:
        """Take a slot for a batch if its instance is ready and a slot is free."""
        return (
            instance.is_ready
            and instance.running < instance.variant.concurrency
            and self._try_take_slot(instance)
        )

    def _try_take_slot(self, instance: ResidentInstance) -> bool:
        """Take a slot and the variant's compute if both are free."""
        if self.running >= self._slots:
            return False
        if self._limits_compute:
            shape = instance.variant.shape
            cpu_milli = self._cpu_milli + shape.cpu_milli
            gpu_sevenths = self._gpu_sevenths + shape.gpu_sevenths
            if cpu_milli > self._pool.cpu_milli or gpu_sevenths > self._pool.gpu_sevenths:
                return False
            self._cpu_milli = cpu_milli
            self._gpu_sevenths = gpu_sevenths
        self.running += 1
        instance.running += 1
        return True

    def _has_waiting_order(self) -> bool:
        """Whether a held order waits for a slot, and not only for its own instance."""
        for order in self._held:
            if not isinstance(order, Dispatch):
                return True
            if self.instances[_instance_of(order)].is_ready:
                return True
        return False

    def _prepare(self, order: Action, instance: ResidentInstance) -> int:
        if not self._has_waiting_order() and self._try_take_slot(instance):
            return Verdict.BEGIN
        self._held.append(order)
        return Verdict.HOLD

    def _queue_length(self) -> int:
        """Number of held batches whose instance is ready: those that wait for a slot."""
        return sum(
            1
            for order in self._held
            if isinstance(order, Dispatch) and self.instances[_instance_of(order)].is_ready
        )

    def _drop(self, instance_id: int) -> None:
        """Drop an instance, and its start if that is still held."""
        del self.instances[instance_id]
        if self._held:
            self._held = [o for o in self._held if _instance_of(o) != instance_id]

    def _drop_held(self, instance_id: int) -> list[Dispatch]:
        dropped = [o for o in self.held_batches() if o.instance_id == instance_id]
        self._held = [o for o in self._held if _instance_of(o) != instance_id]
        return dropped


def _instance_of(order: Action) -> int:
    if isinstance(order, Dispatch):
        assert order.instance_id is not None, "a FaaS pool has no Backend"
        return order.instance_id
    assert isinstance(order, StartInstance | LoadWeights)
    return order.instance_id
