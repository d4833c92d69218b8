"""Shapes: chosen at dispatch, at the start of an instance, or held while an instance is loaded."""

from __future__ import annotations

import pytest

from headgate.core.actions import Dispatch, EvictWeights, StartInstance, StopInstance
from headgate.core.errors import InvariantError
from headgate.core.event_log import from_wire, to_wire
from headgate.core.events import (
    BatchFinished,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeLost,
    RequestArrived,
)
from headgate.core.ids import first_id
from headgate.core.model import App, Compute, Function, Pool, Profile, Shape, ShapeTimes, Variant
from headgate.core.policy import Plan, Target
from headgate.core.scheduler.scheduler import reconcile
from headgate.core.scheduler.validate import Validator

from .rig import Rig, wires
from .sample_apps import Scripted, make_app

SMALL, LARGE, HUGE = Shape(1_000, 2), Shape(2_000, 5), Shape(9_000, 5)


def make(
    compute: int,
    *,
    host_memory_bytes: int = 0,
    concurrency: int = 1,
) -> App:
    """Two functions in shapes 0 (small), 1 (large, batches of one) and 2 (more than a node)."""
    more = (ShapeTimes(LARGE, (6,)), ShapeTimes(HUGE, (1,)))
    profile = Profile((10, 18), memory_bytes=10)
    functions = []
    for id in range(2):
        variant = Variant(id, f"v{id}", id, (0,), profile, SMALL, concurrency, more)
        functions.append(Function(id, f"f{id}", (variant,)))
    pool = Pool(
        0, "gpu", slots=8, cpu_milli=4_000, gpu_sevenths=7, compute=compute, memory_bytes=100,
        host_memory_bytes=host_memory_bytes,
    )  # fmt: skip
    return make_app(*functions, pools=[pool])


def make_rig_of(make_rig: type[Rig], app: App, *, requests: int = 4) -> Rig:
    """One node; requests 0, 1, 2, ... are of functions 0, 1, 0, ..."""
    rig = make_rig(app, Scripted, nodes=1)
    for id in range(requests):
        rig.at(0, RequestArrived(id, id % 2))
    return rig


def send(rig: Rig, task_id: int, shape_id: int | None = None) -> list[list[object]]:
    now_ns, node = rig.view.now_ns, rig.view.nodes[0]
    return rig.order(
        now_ns, lambda p: p.orders.dispatch([p.task(task_id)], node, shape_id=shape_id)
    )


def start(rig: Rig, variant_id: int = 0, shape_id: int = 0) -> list[list[object]]:
    now_ns, node = rig.view.now_ns, rig.view.nodes[0]
    variant = rig.view.app.variants[variant_id]
    return rig.order(now_ns, lambda p: p.orders.start(variant, node, shape_id))


def used(rig: Rig) -> tuple[int, int]:
    node = rig.view.nodes[0]
    return node.cpu_milli_used, node.gpu_sevenths_used


def test_a_dispatch_chooses_the_shape_of_a_warm_instance(make_rig: type[Rig]) -> None:
    """1. The same instance runs in one shape, then in another. 2. A batch holds its own shape."""
    rig = make_rig_of(make_rig, make(Compute.PER_BATCH))
    assert send(rig, 0, 1) == wires(
        StartInstance(0, 0, 0, 0), Dispatch(0, 0, [0], 1, 0, 0, 0, shape_id=1)
    )
    assert used(rig) == (2_000, 5)
    rig.at(1, InstanceStarted(0, 0))
    rig.at(2, BatchFinished(0))
    assert used(rig) == (0, 0)
    assert send(rig, 512) == wires(Dispatch(1, 0, [512], 1, 0, 0, 0))
    assert used(rig) == (1_000, 2)


def test_whether_a_batch_fits_depends_on_its_shape(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.PER_BATCH))
    view, node = rig.view, rig.view.nodes[0]
    first, second = view.app.variants
    send(rig, 0, 1)
    assert view.fits(node, second)
    assert view.fits(node, second, 0)
    assert not view.fits(node, second, 1)  # 10/7
    assert not view.fits(node, first, 0)  # its one instance is full
    send(rig, 256, 0)
    assert (used(rig), view.has_compute(node, first)) == ((3_000, 7), False)


def test_batches_are_as_large_as_their_shape_allows(make_rig: type[Rig]) -> None:
    rig = make_rig(make(Compute.PER_BATCH), Scripted, nodes=1)
    rig.at(0, RequestArrived(0, 0, items=2))
    rig.forbids(
        lambda p: p.orders.dispatch([p.task(0)], p.view.nodes[0], shape_id=1),
        "2 items exceed the largest batch of v0",
    )
    assert send(rig, 0, 0)[-1] == wires(Dispatch(0, 0, [0], 2, 0, 0, 0))[0]


@pytest.mark.parametrize(
    ("compute", "shape_id", "match"),
    [
        (Compute.PER_BATCH, 3, "v0 has no shape 3"),
        (Compute.PER_BATCH, -1, "v0 has no shape -1"),
        (Compute.PER_BATCH, 2, "takes 9 CPUs and 5/7 of a GPU: more than a node of pool gpu has"),
        (Compute.RESIDENT, 2, "more than a node of pool gpu has"),
        (Compute.PER_INSTANCE, 7, "v0 has no shape 7"),
    ],
)
def test_what_a_variant_or_a_node_lacks_is_illegal(
    make_rig: type[Rig], compute: int, shape_id: int, match: str
) -> None:
    rig = make_rig_of(make_rig, make(compute))
    variant, node = rig.view.app.variants[0], rig.view.nodes[0]
    rig.forbids(lambda p: p.orders.dispatch([p.task(0)], node, shape_id=shape_id), match)
    if compute != Compute.PER_BATCH:
        rig.forbids(lambda p: p.orders.start(variant, node, shape_id), match)


def test_a_start_has_no_shape_where_a_dispatch_chooses_it(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.PER_BATCH))
    variant, node = rig.view.app.variants[0], rig.view.nodes[0]
    match = "pool gpu chooses shapes at dispatch"
    rig.forbids(lambda p: p.orders.start(variant, node, 1), match)
    rig.forbids(lambda p: p.orders.start_anywhere(variant, node.pool, 1), match)


def test_an_instance_keeps_the_shape_that_it_was_started_with(make_rig: type[Rig]) -> None:
    """1. Its batches run in it. 2. Another shape is another instance. 3. Neither holds compute."""
    rig = make_rig_of(make_rig, make(Compute.PER_INSTANCE))
    assert start(rig, 0, 1) == wires(StartInstance(0, 0, 0, 0, 1))
    rig.at(1, InstanceStarted(0, 0))
    assert used(rig) == (0, 0)
    assert send(rig, 0) == wires(Dispatch(0, 0, [0], 1, 0, 0, 0, shape_id=1))
    assert used(rig) == (2_000, 5)
    instance, node = rig.view.instances[0], rig.view.nodes[0]
    rig.forbids(
        lambda p: p.orders.dispatch([p.task(512)], node, None, instance, 0), "another shape"
    )
    assert send(rig, 512, 0) == wires(StartInstance(1, 0, 0, 0), Dispatch(1, 0, [512], 1, 0, 0, 1))
    assert used(rig) == (3_000, 7)


def test_a_batch_of_no_shape_goes_to_the_instance_that_can_begin_it(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.PER_INSTANCE))
    start(rig, 0, 0)
    start(rig, 0, 1)
    for id in range(2):
        rig.at(1, InstanceStarted(id, 0))
    view, node, variant = rig.view, rig.view.nodes[0], rig.view.app.variants[0]
    assert view.instance_for(node, variant, 1) is view.instances[1]
    assert send(rig, 0, 0)[0] == wires(Dispatch(0, 0, [0], 1, 0, 0, 0))[0]
    assert send(rig, 512)[0] == wires(Dispatch(1, 0, [512], 1, 0, 0, 1, shape_id=1))[0]
    assert not view.fits(node, variant)
    assert not view.fits(node, variant, 1)


def test_whether_a_function_fits_depends_on_the_shape_of_its_instance(make_rig: type[Rig]) -> None:
    """f0 has one instance, of 5/7: beside 2/7 its batch fits, beside 2/7 and 2/7 it does not."""
    rig = make_rig_of(make_rig, make(Compute.PER_INSTANCE, concurrency=2))
    node = rig.view.nodes[0]
    start(rig, 0, 1)
    start(rig, 1, 0)
    send(rig, 256)
    assert rig.view.can_take(node, 0)
    send(rig, 768)
    assert (used(rig), rig.view.can_take(node, 0)) == ((2_000, 4), False)
    assert not rig.view.fits(node, rig.view.app.variants[0])
    assert rig.view.fits(node, rig.view.app.variants[0], 0)  # as one more instance


def test_resident_compute_is_held_from_start_to_stop(make_rig: type[Rig]) -> None:
    """1. From the order to start, whether a batch runs or not, and once for several batches.

    2. What is drained while it runs holds its compute until it is gone.
    """
    rig = make_rig_of(make_rig, make(Compute.RESIDENT, concurrency=2))
    start(rig, 0, 1)
    assert used(rig) == (2_000, 5)
    rig.at(1, InstanceStarted(0, 0))
    send(rig, 0)
    send(rig, 512)
    assert used(rig) == (2_000, 5)
    rig.at(2, BatchFinished(0))
    rig.order(3, lambda p: p.orders.stop(p.view.instances[0]))
    assert used(rig) == (2_000, 5)
    rig.at(4, BatchFinished(1))
    rig.at(5, InstanceStopped(0, "stopped"))
    assert used(rig) == (0, 0)


def test_an_idle_instance_makes_room_for_resident_compute(make_rig: type[Rig]) -> None:
    """Memory is plenty, but 5/7 and 5/7 are too much: the idle one is stopped, or evicted."""
    for host_bytes, order in ((0, StopInstance(0, 0)), (50, EvictWeights(0, 0))):
        rig = make_rig_of(make_rig, make(Compute.RESIDENT, host_memory_bytes=host_bytes))
        start(rig, 0, 1)
        view, node, second = rig.view, rig.view.nodes[0], rig.view.app.variants[1]
        assert not view.fits(node, second, 1)  # the first one is starting
        rig.forbids(lambda p: p.orders.start(p.view.app.variants[1], p.view.nodes[0], 1), "compute")
        rig.at(1, InstanceStarted(0, 0))
        assert view.fits(node, second, 1)
        assert start(rig, 1, 1) == wires(order, StartInstance(1, 1, 0, 0, 1))
        assert used(rig) == (2_000, 5)


def test_weights_that_return_to_the_device_take_their_compute_again(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.RESIDENT, host_memory_bytes=50))
    start(rig, 0, 1)
    rig.at(1, InstanceStarted(0, 0))
    rig.order(2, lambda p: p.orders.evict(p.view.instances[0]))
    assert used(rig) == (0, 0)
    assert rig.view.fits(rig.view.nodes[0], rig.view.app.variants[0])
    sent = send(rig, 0)
    assert [action[0] for action in sent] == ["LoadWeights", "Dispatch"]
    assert (sent[1], used(rig)) == (
        wires(Dispatch(0, 0, [0], 1, 0, 0, 0, shape_id=1))[0],
        (2_000, 5),
    )


def test_a_loaded_instance_has_its_compute(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.RESIDENT))
    view, node = rig.view, rig.view.nodes[0]
    first, second = view.app.variants
    start(rig, 0, 1)
    start(rig, 1, 0)
    assert used(rig) == (3_000, 7)
    assert view.has_compute(node, first) and view.has_compute(node, second)
    rig.at(1, NodeLost(0))
    assert used(rig) == (0, 0)


@pytest.mark.parametrize("compute", [Compute.PER_BATCH, Compute.RESIDENT])
def test_what_a_gone_instance_held_is_free(make_rig: type[Rig], compute: int) -> None:
    """It crashes while it runs two batches of different shapes, where that is possible."""
    rig = make_rig_of(make_rig, make(compute, concurrency=2))
    send(rig, 0, 0)
    rig.at(1, InstanceStarted(0, 0))
    send(rig, 512, 0)
    send(rig, 256, 0)
    rig.at(2, InstanceStopped(0, "crashed"))
    assert used(rig) == (1_000, 2)


def test_a_plan_starts_shapes_apart(make_rig: type[Rig]) -> None:
    """1. Two small ones and a large one are wanted. 2. The small ones are not wanted any more."""
    rig = make_rig_of(make_rig, make(Compute.PER_INSTANCE), requests=0)
    targets = (Target(0, 0, 2, 2, shape_id=0), Target(0, 0, 1, 2, shape_id=1))
    made = rig.order(1, lambda p: reconcile(p.view, p.orders, Plan(targets)))
    assert made == wires(
        StartInstance(0, 0, 0, 0), StartInstance(1, 0, 0, 0), StartInstance(2, 0, 0, 0, 1)
    )
    fewer = Plan((Target(0, 0, 0, shape_id=0), Target(0, 0, 1, shape_id=1)))
    assert rig.order(2, lambda p: reconcile(p.view, p.orders, fewer)) == wires(
        StopInstance(0, 0), StopInstance(1, 0)
    )


def test_a_plan_starts_no_more_than_resident_compute_allows(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.RESIDENT), requests=0)
    plan = Plan((Target(0, 0, 9, per_node_max=9),))
    made = rig.order(1, lambda p: reconcile(p.view, p.orders, plan))
    assert len(made) == 3  # 6/7
    assert used(rig) == (3_000, 6)


def test_an_instance_for_which_there_is_no_compute_is_not_there_yet(make_rig: type[Rig]) -> None:
    rig = make_rig(make(Compute.RESIDENT), Scripted, nodes=1, index=0, peers=2)
    start(rig, 0, 1)
    theirs = first_id(1)
    rig.at(1, InstanceAppeared(theirs, 1, 0))
    assert used(rig) == (3_000, 7)
    rig.at(2, InstanceAppeared(theirs + 1, 1, 0))
    assert list(rig.view.instances) == [0, theirs]
    rig.at(3, InstanceStopped(theirs, "retired"))
    assert list(rig.view.instances) == [0, theirs + 1]


def test_an_instance_of_another_scheduler_has_the_shape_that_it_was_started_with(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(make(Compute.RESIDENT), Scripted, nodes=1, index=0, peers=2)
    rig.rejects(1, InstanceAppeared(first_id(1), 0, 0, 9), "unknown shape 9")
    rig.at(1, InstanceAppeared(first_id(1), 0, 0, 1))
    assert rig.view.instances[first_id(1)].shape_id == 1


def test_a_log_may_be_older_than_shapes() -> None:
    for action in (Dispatch(1, 2, [3], 1, 4, 5, 6, 7, 8), StartInstance(1, 2, 3, 4, 5)):
        wire = to_wire(action)
        assert to_wire(from_wire(wire)) == wire
        assert to_wire(from_wire(wire[:-1])) == [*wire[:-1], 0]


def test_validate_finds_compute_that_is_miscounted(make_rig: type[Rig]) -> None:
    rig = make_rig_of(make_rig, make(Compute.RESIDENT))
    start(rig, 0, 1)
    node, instance = rig.view.nodes[0], rig.view.instances[0]
    node.cpu_milli_used += 1
    with pytest.raises(InvariantError, match="miscounts its CPUs"):
        Validator(rig.view).check()
    node.cpu_milli_used -= 1
    instance.holds_compute = False
    with pytest.raises(InvariantError, match="instance 0 holds no compute"):
        Validator(rig.view).check()
    instance.holds_compute = True
