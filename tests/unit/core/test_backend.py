"""The Backend: what it begins, holds and refuses, and when an instance stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.actions import (
    Action,
    CancelBatch,
    Dispatch,
    EvictWeights,
    KeepWarm,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.backend import (
    INSTANCES_MAX,
    Backend,
    Drain,
    Effect,
    Ended,
    IdleTimer,
    Message,
    SchedulerLeft,
)
from headgate.core.clock import NEVER_NS
from headgate.core.errors import DriverError
from headgate.core.events import (
    REFUSAL_NAMES,
    BatchRefused,
    InstanceStopped,
    InstanceUseChanged,
    WeightsEvicted,
)
from headgate.core.model import Compute, Pool, Shape, ShapeTimes, Variant

from .sample_apps import make_function


def variants(*, concurrency: int = 1, shape: Shape = Shape()) -> tuple[Variant, ...]:  # noqa: B008
    functions = (make_function(i, concurrency=concurrency, shape=shape) for i in range(3))
    return tuple(function.variants[0] for function in functions)


def make_backend(pool: Pool | None = None, *, concurrency: int = 1) -> Backend:
    return Backend(Pool(0, "gpu") if pool is None else pool, variants(concurrency=concurrency))


def start(instance_id: int) -> StartInstance:
    """Instance i is of variant i, or 0 beyond."""
    return StartInstance(instance_id, instance_id if instance_id < 3 else 0, 0, 0)


def batch(batch_id: int, instance_id: int = 0) -> Dispatch:
    return Dispatch(batch_id, instance_id, [batch_id], 1, 0, 0, instance_id)


def load(instance_id: int = 0) -> LoadWeights:
    return LoadWeights(instance_id, 0)


def evict(instance_id: int = 0) -> EvictWeights:
    return EvictWeights(instance_id, 0)


def stop(instance_id: int = 0) -> StopInstance:
    return StopInstance(instance_id, 0)


def cancel(batch_id: int) -> CancelBatch:
    return CancelBatch(batch_id, 0, 0)


def ready(backend: Backend, *instance_ids: int) -> None:
    """Start these, one after the other."""
    for instance_id in instance_ids:
        assert told(backend, start(instance_id)) == [f"begin start {instance_id}"]
        backend.handle(0, Ended(start(instance_id)))


def told(backend: Backend, *messages: Message, now_ns: int = 0) -> list[str]:
    """The effects of these messages, in words."""
    return [words(e) for message in messages for e in backend.handle(now_ns, message)]


def words(effect: Effect) -> str:
    if isinstance(effect, Dispatch):
        return f"begin batch {effect.batch_id}"
    if isinstance(effect, StartInstance | LoadWeights):
        kind = "start" if isinstance(effect, StartInstance) else "load"
        return f"begin {kind} {effect.instance_id}"
    if isinstance(effect, BatchRefused):
        return f"batch {effect.batch_id} {REFUSAL_NAMES[effect.reason]}"
    if isinstance(effect, WeightsEvicted):
        return f"{effect.instance_id} evicted"
    if isinstance(effect, InstanceStopped):
        return f"{effect.instance_id} {effect.reason}"
    if isinstance(effect, InstanceUseChanged):
        return f"{effect.instance_id} {'in use' if effect.is_in_use else 'not in use'}"
    assert isinstance(effect, IdleTimer)
    return f"timer {effect.instance_id} at {effect.at_ns}"


def test_one_thing_at_a_time_and_nobody_waits() -> None:
    """1. A batch begins. 2. The next is refused. 3. When the first has ended, one begins again."""
    backend = make_backend()
    ready(backend, 0)
    assert told(backend, batch(0), batch(1)) == ["begin batch 0", "batch 1 busy"]
    assert told(backend, Ended(batch(0))) == []
    assert told(backend, batch(2)) == ["begin batch 2"]


def test_a_queue_is_as_long_as_declared_and_served_in_order() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=2))
    ready(backend, 0)
    orders = [batch(i) for i in range(4)]
    assert told(backend, *orders) == ["begin batch 0", "batch 3 busy"]
    assert backend.held_batches() == orders[1:3]
    assert told(backend, Ended(batch(0))) == ["begin batch 1"]
    assert told(backend, Ended(batch(1))) == ["begin batch 2"]


def test_slots_are_the_nodes_and_concurrency_the_instances() -> None:
    backend = make_backend(Pool(0, "gpu", slots=3), concurrency=2)
    ready(backend, 0, 1)
    full_instance = [batch(i) for i in range(3)]
    assert told(backend, *full_instance) == ["begin batch 0", "begin batch 1", "batch 2 busy"]
    assert told(backend, batch(3, 1), batch(4, 1)) == ["begin batch 3", "batch 4 busy"]


def test_compute_is_held_while_a_batch_runs() -> None:
    pool = Pool(0, "gpu", slots=3, gpu_sevenths=7)
    backend = Backend(pool, variants(shape=Shape(gpu_sevenths=4)))
    ready(backend, 0, 1)
    assert told(backend, batch(0, 0), batch(1, 1)) == ["begin batch 0", "batch 1 busy"]
    assert told(backend, Ended(batch(0, 0)), batch(2, 1)) == ["begin batch 2"]


SHAPES = (Shape(1_000, 2), Shape(2_000, 5), Shape(4_000, 7))


def shaped(
    compute: int,
    *,
    slots: int = 4,
    concurrency: int = 1,
    queue_max: int = 0,
    idle_timeout_ns: int = NEVER_NS,
) -> Backend:
    """A backend of 4 CPUs and a GPU, whose variants run in three shapes."""
    pool = Pool(
        0, "gpu", slots=slots, queue_max=queue_max, cpu_milli=4_000, gpu_sevenths=7,
        compute=compute, idle_timeout_ns=idle_timeout_ns,
    )  # fmt: skip
    further = tuple(ShapeTimes(shape, (5,)) for shape in SHAPES[1:])
    own = variants(concurrency=concurrency, shape=SHAPES[0])
    return Backend(pool, tuple(replace(variant, more_shapes=further) for variant in own))


def in_shape(order: StartInstance | Dispatch, shape_id: int) -> StartInstance | Dispatch:
    order.shape_id = shape_id
    return order


def test_each_batch_holds_the_shape_it_was_dispatched_in() -> None:
    """2/7 and 5/7 fit together; of 5/7 and 5/7 the second must wait, whatever the instance had."""
    backend = shaped(Compute.PER_BATCH)
    ready(backend, 0, 1)
    small, large = in_shape(batch(0), 0), in_shape(batch(1, 1), 1)
    assert told(backend, small, large) == ["begin batch 0", "begin batch 1"]
    assert told(backend, Ended(small), in_shape(batch(2), 1)) == ["batch 2 busy"]
    assert told(backend, Ended(large), in_shape(batch(3), 1)) == ["begin batch 3"]


def test_resident_compute_is_held_until_the_instance_is_gone() -> None:
    """1. A start takes it, and keeps it while idle. 2. The next start waits until it is stopped."""
    backend = shaped(Compute.RESIDENT, concurrency=2)
    first, second = in_shape(start(0), 1), in_shape(start(1), 1)
    assert told(backend, first, second) == ["begin start 0"]
    assert told(backend, Ended(first)) == []
    assert told(backend, stop(0)) == ["0 stopped", "begin start 1"]
    assert told(backend, Ended(second)) == []
    batches = [in_shape(batch(number, 1), 1) for number in range(2)]
    assert told(backend, *batches) == ["begin batch 0", "begin batch 1"]  # in one slice


def test_resident_compute_is_held_while_the_last_batch_of_a_drained_instance_runs() -> None:
    backend = shaped(Compute.RESIDENT)
    ready(backend, 0)
    assert told(backend, batch(0), stop(0), in_shape(start(1), 2)) == ["begin batch 0"]
    assert told(backend, Ended(batch(0))) == ["0 stopped", "begin start 1"]


def test_evicted_weights_leave_their_compute_to_others() -> None:
    """1. Evicted, and another starts. 2. The load waits for it to go. 3. A failed start goes."""
    backend = shaped(Compute.RESIDENT)
    ready(backend, 0)
    other = in_shape(start(1), 2)
    assert told(backend, evict(), other, load()) == ["0 evicted", "begin start 1"]
    assert told(backend, Ended(other, has_failed=True)) == ["begin load 0"]


def test_an_idle_timeout_frees_resident_compute() -> None:
    backend = shaped(Compute.RESIDENT, idle_timeout_ns=10)
    assert told(backend, in_shape(start(0), 1), in_shape(start(1), 1)) == ["begin start 0"]
    assert told(backend, Ended(start(0))) == ["timer 0 at 10"]
    due = IdleTimer(0, 10)
    assert told(backend, due, now_ns=10) == ["0 idle for too long", "begin start 1"]


def test_a_batch_waits_for_its_own_instance_even_where_there_is_no_queue() -> None:
    backend = make_backend()
    assert told(backend, start(0), batch(0), batch(1)) == ["begin start 0", "batch 1 busy"]
    assert told(backend, Ended(start(0))) == ["begin batch 0"]


def test_a_start_waits_for_a_slot() -> None:
    backend = make_backend()
    assert told(backend, start(0), start(1)) == ["begin start 0"]
    assert told(backend, Ended(start(0))) == ["begin start 1"]


def test_two_cold_starts_go_on_side_by_side_where_there_are_slots() -> None:
    """The batch that waits for the first start needs no slot yet, so it blocks nothing."""
    backend = make_backend(Pool(0, "gpu", slots=2))
    orders = [start(0), batch(0, 0), start(1), batch(1, 1)]
    assert told(backend, *orders) == ["begin start 0", "begin start 1"]


def test_a_start_does_not_overtake_a_batch_that_wants_the_slot() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=1))
    ready(backend, 0)
    assert told(backend, batch(0), batch(1), start(1)) == ["begin batch 0"]
    assert told(backend, Ended(batch(0))) == ["begin batch 1"]
    assert told(backend, Ended(batch(1))) == ["begin start 1"]


def test_a_batch_does_not_overtake_what_waits_for_compute() -> None:
    """A slot is free, but a batch that came before needs more compute than is free."""
    pool = Pool(0, "gpu", slots=3, gpu_sevenths=7, queue_max=1)
    small = make_function(0, concurrency=2, shape=Shape(gpu_sevenths=2)).variants[0]
    large = make_function(1, shape=Shape(gpu_sevenths=6)).variants[0]
    backend = Backend(pool, (small, large))
    ready(backend, 0, 1)
    assert told(backend, batch(0), batch(1, 1), batch(2)) == ["begin batch 0", "batch 2 busy"]
    assert told(backend, Ended(batch(0))) == ["begin batch 1"]


def test_a_start_takes_a_slot_and_no_compute() -> None:
    """The books of the Scheduler say the same: it sends a batch beside a start."""
    pool = Pool(0, "gpu", slots=2, gpu_sevenths=7)
    backend = Backend(pool, variants(shape=Shape(gpu_sevenths=4)))
    ready(backend, 0)
    assert told(backend, start(1), batch(0)) == ["begin start 1", "begin batch 0"]
    assert told(backend, Ended(start(1)), batch(1, 1)) == ["batch 1 busy"]


def test_a_start_that_fails_takes_the_batches_with_it_that_waited_for_it() -> None:
    backend = make_backend()
    assert told(backend, start(0), batch(0), start(1)) == ["begin start 0"]
    assert told(backend, Ended(start(0), has_failed=True)) == ["batch 0 gone", "begin start 1"]
    assert backend.held_batches() == []
    assert told(backend, batch(1)) == ["batch 1 gone"]


def test_weights_are_evicted_and_loaded_again() -> None:
    backend = make_backend()
    ready(backend, 0)
    assert told(backend, evict(), load(), batch(0)) == ["0 evicted", "begin load 0"]
    assert told(backend, Ended(load())) == ["begin batch 0"]
    assert told(backend, load(7)) == []  # its Scheduler knows that it has stopped


def test_weights_that_are_in_use_leave_when_the_work_has_ended() -> None:
    """A Scheduler may have given the batch up for lost, and take the instance to be idle."""
    backend = make_backend()
    ready(backend, 0)
    assert told(backend, batch(0), evict()) == ["begin batch 0"]
    assert told(backend, Ended(batch(0))) == ["0 evicted"]
    assert not backend.instances[0].is_ready


def test_weights_that_are_wanted_again_do_not_leave() -> None:
    backend = make_backend(Pool(0, "gpu", slots=2))
    ready(backend, 0)
    assert told(backend, batch(0), evict(), load()) == ["begin batch 0", "begin load 0"]
    assert told(backend, Ended(batch(0)), Ended(load())) == []
    assert told(backend, batch(1)) == ["begin batch 1"]


def test_what_is_gone_is_off_the_device_and_stopped() -> None:
    assert told(make_backend(), evict(), stop()) == ["0 evicted", "0 stopped"]


def test_an_idle_instance_stops_at_once() -> None:
    backend = make_backend()
    ready(backend, 0)
    assert told(backend, stop(), batch(0)) == ["0 stopped", "batch 0 gone"]


def test_a_busy_instance_finishes_what_it_has_and_takes_no_more() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=1))
    ready(backend, 0)
    orders = [batch(0), batch(1), stop(), batch(2), load()]
    assert told(backend, *orders) == ["begin batch 0", "batch 2 gone"]
    assert told(backend, Ended(batch(0))) == ["begin batch 1"]
    assert told(backend, Ended(batch(1))) == ["0 stopped"]


def test_an_instance_goes_when_the_last_batch_that_waited_for_it_is_taken_back() -> None:
    """It had not even begun to start: that start is dropped as well."""
    backend = make_backend()
    assert told(backend, start(0), start(1), batch(0, 1), stop(1)) == ["begin start 0"]
    assert told(backend, cancel(0)) == ["batch 0 cancelled", "1 stopped"]
    assert told(backend, Ended(start(0))) == []


def test_a_start_that_is_called_off_is_not_begun() -> None:
    backend = make_backend()
    assert told(backend, start(0), start(1), stop(1)) == ["begin start 0", "1 stopped"]
    assert told(backend, Ended(start(0))) == []


def test_a_batch_that_has_begun_cannot_be_taken_back() -> None:
    backend = make_backend()
    ready(backend, 0)
    assert told(backend, batch(0), cancel(0), cancel(99)) == ["begin batch 0"]


def test_an_instance_that_was_idle_for_long_stops() -> None:
    backend = make_backend(Pool(0, "gpu", idle_timeout_ns=10))
    assert told(backend, start(0)) == ["begin start 0"]
    assert told(backend, Ended(start(0)), now_ns=5) == ["timer 0 at 15"]
    assert told(backend, batch(0), IdleTimer(0, 15), now_ns=15) == ["begin batch 0"]
    assert told(backend, Ended(batch(0)), now_ns=50) == ["timer 0 at 60"]
    assert told(backend, IdleTimer(0, 60), now_ns=60) == ["0 idle for too long"]
    assert told(backend, IdleTimer(0, 61), now_ns=61) == []


def test_no_timer_is_set_for_an_instance_that_is_not_idle() -> None:
    backend = make_backend(Pool(0, "gpu", idle_timeout_ns=10, queue_max=1))
    ready(backend, 0)
    assert told(backend, batch(0), batch(1), Ended(batch(0))) == ["begin batch 0", "begin batch 1"]
    assert told(backend, stop(), Ended(batch(1))) == ["0 stopped"]


def test_who_has_left_is_given_nothing_and_the_others_go_on() -> None:
    """Ids below 100 belong to one Scheduler, those from 100 on to another."""
    backend = make_backend(Pool(0, "gpu", slots=2, queue_max=2), concurrency=2)
    ready(backend, 0, 100)
    orders = [batch(0), batch(100, 100), batch(1), batch(101, 100)]
    assert told(backend, *orders) == ["begin batch 0", "begin batch 100"]
    assert told(backend, SchedulerLeft(range(100))) == ["batch 1 gone"]
    assert told(backend, Ended(batch(0))) == ["begin batch 101"]
    assert told(backend, batch(102, 100)) == []
    assert told(backend, Ended(batch(100, 100)), batch(103)) == ["begin batch 102"]
    assert list(backend.instances) == [0, 100]  # whoever is left uses what the other has started


def test_instances_of_who_has_left_serve_the_others() -> None:
    """1. The Scheduler of ids below 100 starts an instance, whose start is under way, and leaves.
    2. The start goes on, and another Scheduler uses the instance.
    """
    backend = make_backend(Pool(0, "gpu"))
    assert told(backend, start(0), SchedulerLeft(range(100))) == ["begin start 0"]
    assert told(backend, batch(100, 0)) == []
    assert told(backend, Ended(start(0))) == ["begin batch 100"]
    assert list(backend.instances) == [0]


def test_a_batch_that_crosses_an_eviction_by_another_scheduler_is_refused() -> None:
    """It would wait for a load of weights that nobody has ordered."""
    backend = make_backend(Pool(0, "gpu"))
    ready(backend, 0)
    assert told(backend, evict(0), batch(100, 0)) == ["0 evicted", "batch 100 busy"]
    assert told(backend, load(0), batch(101, 0)) == ["begin load 0"]
    assert told(backend, Ended(load(0))) == ["begin batch 101"]


def test_a_draining_node_finishes_what_runs_and_accepts_nothing() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=1))
    ready(backend, 0, 1)
    assert told(backend, batch(0), batch(1)) == ["begin batch 0"]
    assert told(backend, Drain()) == ["batch 1 gone", "1 the node is draining"]
    assert told(backend, start(2), batch(2)) == ["2 the node is draining", "batch 2 gone"]
    assert told(backend, Ended(batch(0))) == ["0 the node is draining"]
    assert backend.is_draining
    assert not backend.instances


def test_the_number_of_instances_is_limited() -> None:
    backend = make_backend()
    for instance_id in range(INSTANCES_MAX):
        backend.handle(0, start(instance_id))
    assert told(backend, start(INSTANCES_MAX)) == [f"{INSTANCES_MAX} too many instances"]


def test_what_is_not_for_a_node_is_an_error() -> None:
    with pytest.raises(DriverError, match="KeepWarm is not for a node"):
        make_backend().handle(0, KeepWarm(0, 0, 1, False))


class Driver:
    """Does what a Backend says, and checks that nothing is lost, doubled or over a limit."""

    def __init__(
        self, concurrency: int, compute: int, *, slots: int, queue_max: int, idle_timeout_ns: int
    ) -> None:
        self.concurrency = concurrency
        self.compute = compute
        self.slots, self.idle_timeout_ns = slots, idle_timeout_ns
        self.backend = shaped(
            compute,
            slots=slots,
            concurrency=concurrency,
            queue_max=queue_max,
            idle_timeout_ns=idle_timeout_ns,
        )
        self.loaded: dict[int, Shape] = {}  # by instance id, where compute is resident
        self.now_ns = 0
        self.running: list[Action] = []
        self.timers: list[IdleTimer] = []
        self.open_batches: set[int] = set()  # sent, and neither refused nor ended
        self.open_instances: set[int] = set()
        self.started: set[int] = set()  # instance ids
        self.evicted: set[int] = set()  # instance ids: ordered to leave the device, not to return
        self.shape_ids: dict[int, int] = {}  # by instance id

    def tell(self, message: Message) -> None:
        if isinstance(message, Dispatch):
            self.open_batches.add(message.batch_id)
        elif isinstance(message, StartInstance):
            self.open_instances.add(message.instance_id)
        for effect in self.backend.handle(self.now_ns, message):
            self.apply(effect)
        self.check()

    def apply(self, effect: Effect) -> None:
        if isinstance(effect, StartInstance):
            self.loaded[effect.instance_id] = SHAPES[effect.shape_id]
            self.shape_ids[effect.instance_id] = effect.shape_id
        elif isinstance(effect, LoadWeights):
            self.loaded[effect.instance_id] = SHAPES[self.shape_ids[effect.instance_id]]
        elif isinstance(effect, WeightsEvicted | InstanceStopped):
            self.loaded.pop(effect.instance_id, None)
        if isinstance(effect, IdleTimer):
            assert effect.at_ns <= self.now_ns + self.idle_timeout_ns
            assert all(timer.instance_id != effect.instance_id for timer in self.timers)
            self.timers.append(effect)
            self.timers.sort(key=lambda timer: timer.at_ns)
        elif isinstance(effect, BatchRefused):
            self.open_batches.remove(effect.batch_id)
            assert all(e.batch_id != effect.batch_id for e in self.batches())
        elif isinstance(effect, InstanceStopped):
            self.open_instances.discard(effect.instance_id)
            assert effect.instance_id not in self.backend.instances
        elif not isinstance(effect, WeightsEvicted):
            assert isinstance(effect, Dispatch | StartInstance | LoadWeights)
            assert effect not in self.running
            self.running.append(effect)

    def batches(self) -> list[Dispatch]:
        return [order for order in self.running if isinstance(order, Dispatch)]

    def shape_of(self, number: int, instance_id: int) -> int:
        """The shape of a batch: any, or that of its instance where it has one."""
        if self.compute == Compute.PER_BATCH:
            return number % 3
        return self.shape_ids.get(instance_id, 0)

    def is_possible(self, step: str, instance_id: int) -> bool:
        """Whether a Scheduler can give this order: what is evicted is loaded before it is used."""
        if step == "evict":
            is_possible = instance_id in self.started and instance_id not in self.evicted
            if is_possible:
                self.evicted.add(instance_id)
            return is_possible
        if step == "load":
            is_possible = instance_id in self.evicted
            self.evicted.discard(instance_id)
            return is_possible
        return step != "batch" or instance_id not in self.evicted

    def end(self, index: int, *, has_failed: bool) -> None:
        if self.running:
            order = self.running.pop(index % len(self.running))
            if isinstance(order, Dispatch):
                self.open_batches.remove(order.batch_id)
            fails = has_failed and isinstance(order, StartInstance)
            if fails:
                assert isinstance(order, StartInstance)
                self.open_instances.remove(order.instance_id)
                self.loaded.pop(order.instance_id, None)
            elif isinstance(order, StartInstance):
                self.started.add(order.instance_id)
            self.tell(Ended(order, fails))

    def check(self) -> None:
        """Limits are kept, and every batch runs, is held or has been refused."""
        assert len(self.running) <= self.slots
        shapes = [SHAPES[order.shape_id] for order in self.batches()]
        if self.compute == Compute.RESIDENT:
            shapes = list(self.loaded.values())
        assert sum(shape.cpu_milli for shape in shapes) <= 4_000
        assert sum(shape.gpu_sevenths for shape in shapes) <= 7
        held = {order.batch_id for order in self.backend.held_batches()}
        running = {order.batch_id for order in self.batches()}
        assert not held & running
        assert held | running == self.open_batches
        assert set(self.backend.instances) == self.open_instances
        for id, instance in self.backend.instances.items():
            assert instance.running == sum(_instance_id(order) == id for order in self.running)
            assert sum(b.instance_id == id for b in self.batches()) <= self.concurrency


def _instance_id(order: Action) -> int | None:
    assert isinstance(order, Dispatch | StartInstance | LoadWeights)
    return order.instance_id


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "batch", "batch", "batch", "end", "end", "end", "load", "evict"])
        | st.sampled_from(["stop", "cancel", "time", "fail", "leave"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(
    steps=STEPS,
    slots=st.integers(1, 3),
    queue_max=st.integers(0, 2),
    concurrency=st.integers(1, 2),
    compute=st.integers(0, 2),
    drains=st.booleans(),
)
def test_every_order_ends_once_within_the_limits(
    *,
    steps: list[tuple[str, int]],
    slots: int,
    queue_max: int,
    concurrency: int,
    compute: int,
    drains: bool,
) -> None:
    """Random orders; then everything that runs ends, and nothing is left over.

    Where compute is resident, everything is stopped too: what is loaded would keep the rest out.
    """
    driver = Driver(concurrency, compute, slots=slots, queue_max=queue_max, idle_timeout_ns=3)
    instances = 0
    for number, (step, choice) in enumerate(steps):
        instance_id = choice % instances if instances else 0
        if step == "start":
            shape_id = 0 if compute == Compute.PER_BATCH else number % 3
            driver.shape_ids[instances] = shape_id
            driver.tell(StartInstance(instances, choice % 3, 0, 0, shape_id))
            instances += 1
        elif step in ("end", "fail"):
            driver.end(choice, has_failed=step == "fail")
        elif step == "time":
            driver.now_ns += choice
            while driver.timers and driver.timers[0].at_ns <= driver.now_ns:
                driver.tell(driver.timers.pop(0))
        elif step == "leave":
            driver.tell(SchedulerLeft(range(choice)))
        elif driver.is_possible(step, instance_id):
            messages: dict[str, Message] = {
                "batch": in_shape(batch(number, instance_id), driver.shape_of(number, instance_id)),
                "load": load(instance_id),
                "evict": evict(instance_id),
                "stop": stop(instance_id),
                "cancel": cancel(number - choice),
            }
            driver.tell(messages[step])
    if drains:
        driver.tell(Drain())
    for instance_id in range(instances if compute == Compute.RESIDENT else 0):
        driver.tell(stop(instance_id))
    while driver.running:
        driver.end(0, has_failed=False)
    assert not driver.open_batches
    assert not driver.backend.held_batches()
    assert not (drains and driver.open_instances)
