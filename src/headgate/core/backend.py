"""The Backend: the half of every decision that is made where the work is done.

One per node, in the simulator and in every live worker. It may serve several Schedulers, so only
it knows whether there is a slot: it begins an order, holds it back, or refuses it. Orders are
carried out in the order they were given as far as slots, compute and residency allow: a dispatch
that follows the start of its own instance simply waits for it.

Like the Scheduler it is pure: time is an argument, and what it returns is for its driver to do.
The driver calls `start`, `load`, `offer`, `evict`, `stop` and `cancel` for orders and `ended` when
something it began has ended; everything it is told to begin, it begins at once.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.actions import Action, Dispatch, LoadWeights, StartInstance
from headgate.core.clock import NEVER_NS
from headgate.core.model import Pool, Variant


class Verdict:
    """What a Backend says to an order."""

    BEGIN: Final = 0
    HOLD: Final = 1  # accepted, to begin later
    BUSY: Final = 2
    GONE: Final = 3


_BEGIN: Final = Verdict.BEGIN  # interpreted, a name of the module is read much faster


@final
class ResidentInstance:
    """An instance as its own node knows it."""

    __slots__ = (
        "held",
        "id",
        "idle_since_ns",
        "is_draining",
        "is_leaving",
        "is_ready",
        "running",
        "variant",
    )

    def __init__(self, id: int, variant: Variant) -> None:
        self.id = id
        self.variant = variant
        self.is_ready = False  # weights on the device: started, and not being loaded
        self.is_draining = False
        self.is_leaving = False  # its weights are to leave the device when its work has ended
        self.running = 0
        self.held = 0  # dispatches accepted and not begun
        self.idle_since_ns = 0  # when it last ended something; meaningful while nothing runs


@final
class Backend:
    """Accepts, holds or refuses; knows what is resident and what is running."""

    def __init__(self, pool: Pool, variants: tuple[Variant, ...]) -> None:
        self._pool = pool
        self._variants = variants
        self._slots = pool.slots
        self._limits_compute = pool.cpu_milli < NEVER_NS or pool.gpu_sevenths < NEVER_NS
        self.running = 0
        self._cpu_milli = 0
        self._gpu_sevenths = 0
        self.residents: dict[int, ResidentInstance] = {}
        self._held: list[Action] = []

    # --- orders --------------------------------------------------------------------------------

    def offer(self, order: Dispatch) -> int:
        """Whether a batch begins now, is held, or is refused."""
        instance_id = order.instance_id
        resident = None if instance_id is None else self.residents.get(instance_id)
        if resident is None or resident.is_draining:
            return Verdict.GONE
        is_next = not self._held or not self._somebody_waits()
        if is_next and self._begins(resident):
            return _BEGIN
        # It may wait for its own instance, as far as that has slots.
        is_welcome = not resident.is_ready and resident.held < resident.variant.concurrency
        if not is_welcome and self._queue_length() >= self._pool.queue_max:
            return Verdict.BUSY
        resident.held += 1
        self._held.append(order)
        return Verdict.HOLD

    def start(self, order: StartInstance) -> int:
        """Begin to start an instance, or hold that until a slot is free."""
        resident = ResidentInstance(order.instance_id, self._variants[order.variant_id])
        self.residents[order.instance_id] = resident
        return self._prepare(order, resident)

    def load(self, order: LoadWeights) -> int:
        """Begin to load an instance's weights, or hold that until a slot is free."""
        resident = self.residents.get(order.instance_id)
        if resident is None or resident.is_draining:
            return Verdict.GONE
        resident.is_ready = False
        resident.is_leaving = False
        return self._prepare(order, resident)

    def evict(self, instance_id: int) -> bool:
        """Whether the weights are off the device at once; else they leave when its work has ended.

        A Scheduler orders this of what it takes to be idle; it may have given a batch up for lost
        that still runs, or know nothing of a peer's.
        """
        resident = self.residents.get(instance_id)
        if resident is None:
            return True
        if resident.running or resident.held:
            resident.is_leaving = True
            return False
        resident.is_ready = False
        return True

    def stop(self, instance_id: int) -> bool:
        """Whether the instance is gone at once; else it goes when its work has ended."""
        resident = self.residents.get(instance_id)
        if resident is None:
            return True
        resident.is_draining = True
        if resident.running or resident.held:
            return False
        self._drop(instance_id)
        return True

    def cancel(self, batch_id: int) -> Dispatch | None:
        """Take back a batch that is still held; None if it has begun or is not here."""
        for order in self._held:
            if isinstance(order, Dispatch) and order.batch_id == batch_id:
                self._held.remove(order)
                assert order.instance_id is not None
                self.residents[order.instance_id].held -= 1
                return order
        return None

    # --- what happens on the node --------------------------------------------------------------

    def ended(self, now_ns: int, order: Action) -> bool:
        """A start, a load or a batch that had begun has ended.

        True if that leaves anything for `begin_held`, `drained_instance` or `evicted_instance` to
        do.
        """
        resident = self.residents[_instance_of(order)]
        if not isinstance(order, Dispatch):
            resident.is_ready = True
        resident.idle_since_ns = now_ns
        resident.running -= 1
        self.running -= 1
        if self._limits_compute:
            shape = resident.variant.shape
            self._cpu_milli -= shape.cpu_milli
            self._gpu_sevenths -= shape.gpu_sevenths
        return resident.is_draining or resident.is_leaving or len(self._held) > 0

    def begin_held(self) -> list[Action]:
        """Begin what has been held and can begin now; returns those orders."""
        if not self._held:
            return []
        begun: list[Action] = []
        still_held: list[Action] = []
        for order in self._held:
            resident = self.residents[_instance_of(order)]
            if isinstance(order, Dispatch):
                has_begun = self._begins(resident)
                if has_begun:
                    resident.held -= 1
            else:
                has_begun = self._takes_slot(resident)
            if has_begun:
                begun.append(order)
            else:
                still_held.append(order)
        self._held = still_held
        return begun

    def drained_instance(self, order: Action) -> int | None:
        """The instance that was to stop and has, now that this order has ended.

        Ask this, and `evicted_instance`, whenever an order is over: it has ended, or was taken
        back by `cancel`.
        """
        instance_id = _instance_of(order)
        resident = self.residents.get(instance_id)
        if resident is None or not resident.is_draining or resident.running or resident.held:
            return None
        self._drop(instance_id)
        return instance_id

    def evicted_instance(self, order: Action) -> int | None:
        """The instance whose weights were to leave the device and have, now that this has ended."""
        resident = self.residents.get(_instance_of(order))
        if resident is None or not resident.is_leaving or resident.running or resident.held:
            return None
        resident.is_leaving = False
        resident.is_ready = False
        return resident.id

    def start_failed(self, instance_id: int) -> list[Dispatch]:
        """An instance could not be started: the batches that waited for it never ran."""
        del self.residents[instance_id]
        return self._drop_held(instance_id)

    def retire_idle(self, now_ns: int, instance_id: int) -> bool:
        """Whether an instance has been idle for its pool's timeout and so is gone now."""
        resident = self.residents.get(instance_id)
        if resident is None or resident.running or resident.held or not resident.is_ready:
            return False
        if now_ns - resident.idle_since_ns < self._pool.idle_timeout_ns:
            return False
        del self.residents[instance_id]
        return True

    def held_batches(self) -> list[Dispatch]:
        """Batches accepted and not begun."""
        return [order for order in self._held if isinstance(order, Dispatch)]

    # --- rules ---------------------------------------------------------------------------------

    def _begins(self, resident: ResidentInstance) -> bool:
        """Begin a batch if its instance is ready and there is a slot."""
        return (
            resident.is_ready
            and resident.running < resident.variant.concurrency
            and self._takes_slot(resident)
        )

    def _takes_slot(self, resident: ResidentInstance) -> bool:
        """Take a slot, and the compute that goes with it, if they are free."""
        if self.running >= self._slots:
            return False
        if self._limits_compute:
            shape = resident.variant.shape
            cpu_milli = self._cpu_milli + shape.cpu_milli
            gpu_sevenths = self._gpu_sevenths + shape.gpu_sevenths
            if cpu_milli > self._pool.cpu_milli or gpu_sevenths > self._pool.gpu_sevenths:
                return False
            self._cpu_milli = cpu_milli
            self._gpu_sevenths = gpu_sevenths
        self.running += 1
        resident.running += 1
        return True

    def _somebody_waits(self) -> bool:
        """Whether a held order wants a slot. One that waits for its own instance does not."""
        for order in self._held:
            if not isinstance(order, Dispatch):
                return True
            if self.residents[_instance_of(order)].is_ready:
                return True
        return False

    def _prepare(self, order: Action, resident: ResidentInstance) -> int:
        if not self._somebody_waits() and self._takes_slot(resident):
            return Verdict.BEGIN
        self._held.append(order)
        return Verdict.HOLD

    def _queue_length(self) -> int:
        """Held batches whose instance is ready: those that wait for somebody else's work."""
        return sum(
            1
            for order in self._held
            if isinstance(order, Dispatch) and self.residents[_instance_of(order)].is_ready
        )

    def _drop(self, instance_id: int) -> None:
        """Forget an instance, and its start if that was still held."""
        del self.residents[instance_id]
        if self._held:
            self._held = [o for o in self._held if _instance_of(o) != instance_id]

    def _drop_held(self, instance_id: int) -> list[Dispatch]:
        dropped = [o for o in self.held_batches() if o.instance_id == instance_id]
        self._held = [o for o in self._held if _instance_of(o) != instance_id]
        return dropped


def _instance_of(order: Action) -> int:
    if isinstance(order, Dispatch):
        assert order.instance_id is not None, "a pool that picks its own has no Backend"
        return order.instance_id
    assert isinstance(order, StartInstance | LoadWeights)
    return order.instance_id
