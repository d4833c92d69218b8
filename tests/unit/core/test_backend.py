"""The Backend: what it begins, holds and refuses, and when an instance stops."""

from __future__ import annotations

from headgate.core.actions import Action, Dispatch, LoadWeights, StartInstance
from headgate.core.backend import Backend, Verdict
from headgate.core.model import Pool, Shape, Variant

from .sample_apps import make_function

BEGIN, HOLD, BUSY, GONE = Verdict.BEGIN, Verdict.HOLD, Verdict.BUSY, Verdict.GONE


def variants(*, concurrency: int = 1, shape: Shape = Shape()) -> tuple[Variant, ...]:  # noqa: B008
    functions = (make_function(i, concurrency=concurrency, shape=shape) for i in range(3))
    return tuple(function.variants[0] for function in functions)


def make_backend(pool: Pool | None = None, *, concurrency: int = 1) -> Backend:
    return Backend(Pool(0, "gpu") if pool is None else pool, variants(concurrency=concurrency))


def start(instance_id: int) -> StartInstance:
    """Instance i is of variant i."""
    return StartInstance(instance_id, instance_id, 0, 0)


def batch(batch_id: int, instance_id: int = 0) -> Dispatch:
    return Dispatch(batch_id, instance_id, [batch_id], 1, 0, 0, instance_id)


def ready(backend: Backend, *instance_ids: int) -> None:
    """Start these, one after the other."""
    for instance_id in instance_ids:
        order = start(instance_id)
        assert backend.start(order) == BEGIN
        backend.on_ended(0, order)


def pumped(backend: Backend) -> list[tuple[str, int]]:
    """What `pump` begins: the kind of the order and its id."""
    return [(type(order).__name__, _id(order)) for order in backend.begin_held()]


def _id(order: Action) -> int:
    if isinstance(order, Dispatch):
        return order.batch_id
    assert isinstance(order, StartInstance | LoadWeights)
    return order.instance_id


def test_one_thing_at_a_time_and_nobody_waits() -> None:
    """1. A batch begins. 2. The next is refused. 3. When the first has ended, one begins again."""
    backend = make_backend()
    ready(backend, 0)
    first = batch(0)
    assert backend.offer(first) == BEGIN
    assert backend.offer(batch(1)) == BUSY
    assert not backend.on_ended(3, first)
    assert backend.offer(batch(2)) == BEGIN


def test_a_queue_is_as_long_as_declared_and_served_in_order() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=2))
    ready(backend, 0)
    assert [backend.offer(batch(i)) for i in range(4)] == [BEGIN, HOLD, HOLD, BUSY]
    assert backend.on_ended(2, batch(0))
    assert pumped(backend) == [("Dispatch", 1)]
    assert pumped(backend) == []


def test_slots_are_the_nodes_and_concurrency_the_instances() -> None:
    backend = make_backend(Pool(0, "gpu", slots=3), concurrency=2)
    ready(backend, 0, 1)
    verdicts = [backend.offer(batch(i)) for i in range(3)]
    assert verdicts == [BEGIN, BEGIN, BUSY]  # the instance is full
    assert backend.offer(batch(3, 1)) == BEGIN
    assert backend.offer(batch(4, 1)) == BUSY  # the node is full


def test_compute_is_held_while_a_batch_runs() -> None:
    pool = Pool(0, "gpu", slots=3, gpu_sevenths=7)
    backend = Backend(pool, variants(shape=Shape(gpu_sevenths=4)))
    ready(backend, 0, 1)
    assert backend.offer(batch(0, 0)) == BEGIN
    assert backend.offer(batch(1, 1)) == BUSY
    backend.on_ended(2, batch(0, 0))
    assert backend.offer(batch(2, 1)) == BEGIN


def test_who_is_held_goes_before_who_comes() -> None:
    """A slot is free again, but not yet given to the batch that waits for it."""
    backend = make_backend(Pool(0, "gpu", queue_max=1))
    ready(backend, 0)
    backend.offer(batch(0))
    backend.offer(batch(1))
    backend.on_ended(2, batch(0))
    assert backend.offer(batch(2)) == BUSY
    assert pumped(backend) == [("Dispatch", 1)]


def test_a_batch_waits_for_its_own_instance_even_where_there_is_no_queue() -> None:
    backend = make_backend()
    assert backend.start(start(0)) == BEGIN
    assert [backend.offer(batch(i)) for i in range(2)] == [HOLD, BUSY]
    assert backend.on_ended(5, start(0))
    assert pumped(backend) == [("Dispatch", 0)]


def test_a_start_waits_for_a_slot() -> None:
    backend = make_backend()
    assert [backend.start(start(i)) for i in range(2)] == [BEGIN, HOLD]
    backend.on_ended(5, start(0))
    assert pumped(backend) == [("StartInstance", 1)]


def test_two_cold_starts_go_on_side_by_side_where_there_are_slots() -> None:
    """The batch that waits for the first start needs no slot yet, so it blocks nothing."""
    backend = make_backend(Pool(0, "gpu", slots=2))
    assert backend.start(start(0)) == BEGIN
    assert backend.offer(batch(0, 0)) == HOLD
    assert backend.start(start(1)) == BEGIN
    assert backend.offer(batch(1, 1)) == HOLD


def test_a_start_does_not_overtake_a_batch_that_wants_the_slot() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=1))
    ready(backend, 0)
    backend.offer(batch(0))
    backend.offer(batch(1))
    backend.on_ended(2, batch(0))
    assert backend.start(start(1)) == HOLD
    assert pumped(backend) == [("Dispatch", 1)]


def test_a_start_that_fails_takes_the_batches_with_it_that_waited_for_it() -> None:
    backend = make_backend()
    backend.start(start(0))
    waiting = batch(0)
    backend.offer(waiting)
    backend.on_ended(5, start(0))
    assert backend.on_start_failed(0) == [waiting]
    assert backend.held_batches() == []
    assert backend.offer(batch(1)) == GONE


def test_weights_are_evicted_and_loaded_again() -> None:
    backend = make_backend()
    ready(backend, 0)
    assert backend.evict(0)
    load = LoadWeights(0, 0)
    assert backend.load(load) == BEGIN
    assert backend.offer(batch(0)) == HOLD
    backend.on_ended(2, load)
    assert pumped(backend) == [("Dispatch", 0)]
    assert backend.load(LoadWeights(7, 0)) == GONE


def test_weights_that_are_in_use_leave_when_the_work_has_ended() -> None:
    """A Scheduler may have given the batch up for lost, and take the instance to be idle."""
    backend = make_backend()
    ready(backend, 0)
    backend.offer(batch(0))
    assert not backend.evict(0)
    assert backend.on_ended(2, batch(0))
    assert backend.evicted_instance(batch(0)) == 0
    assert backend.evicted_instance(batch(0)) is None
    assert not backend.instances[0].is_ready


def test_weights_that_are_wanted_again_do_not_leave() -> None:
    backend = make_backend(Pool(0, "gpu", slots=2))
    ready(backend, 0)
    backend.offer(batch(0))
    backend.evict(0)
    assert backend.load(LoadWeights(0, 0)) == BEGIN
    backend.on_ended(3, batch(0))
    backend.on_ended(4, LoadWeights(0, 0))
    assert backend.evicted_instance(LoadWeights(0, 0)) is None
    assert backend.offer(batch(1)) == BEGIN


def test_what_is_gone_is_off_the_device() -> None:
    assert make_backend().evict(0)


def test_an_idle_instance_stops_at_once() -> None:
    backend = make_backend()
    ready(backend, 0)
    assert backend.stop(0)
    assert backend.stop(0)  # gone is gone
    assert backend.offer(batch(0)) == GONE


def test_a_busy_instance_finishes_what_it_has_and_takes_no_more() -> None:
    backend = make_backend(Pool(0, "gpu", queue_max=1))
    ready(backend, 0)
    backend.offer(batch(0))
    backend.offer(batch(1))
    assert not backend.stop(0)
    assert backend.offer(batch(2)) == GONE
    assert backend.on_ended(2, batch(0))
    assert pumped(backend) == [("Dispatch", 1)]
    assert backend.drained_instance(batch(0)) is None
    assert backend.on_ended(3, batch(1))
    assert backend.drained_instance(batch(1)) == 0


def test_an_instance_goes_when_the_last_batch_that_waited_for_it_is_taken_back() -> None:
    """It had not even begun to start: that start is dropped as well."""
    backend = make_backend()
    backend.start(start(0))
    backend.start(start(1))
    backend.offer(batch(0, 1))
    assert not backend.stop(1)
    taken = backend.cancel(0)
    assert taken is not None
    assert backend.drained_instance(taken) == 1
    backend.on_ended(6, start(0))
    assert pumped(backend) == []


def test_a_start_that_is_called_off_is_not_begun() -> None:
    backend = make_backend()
    backend.start(start(0))
    backend.start(start(1))
    assert backend.stop(1)
    assert not backend.on_ended(5, start(0))
    assert pumped(backend) == []


def test_a_batch_that_has_begun_cannot_be_taken_back() -> None:
    backend = make_backend()
    ready(backend, 0)
    backend.offer(batch(0))
    assert backend.cancel(0) is None
    assert backend.cancel(99) is None


def test_an_instance_that_was_idle_for_long_retires() -> None:
    backend = make_backend(Pool(0, "gpu", idle_timeout_ns=10))
    ready(backend, 0)
    backend.offer(batch(0))
    assert not backend.retire_idle(50, 0)  # it runs
    backend.on_ended(50, batch(0))
    assert not backend.retire_idle(59, 0)
    assert backend.retire_idle(60, 0)
    assert not backend.retire_idle(61, 0)
