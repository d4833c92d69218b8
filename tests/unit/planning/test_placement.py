"""On which node a batch runs, and when a build is started on one more."""

from __future__ import annotations

from dataclasses import replace

from planning_rig import MS, PlanningRig, make_app

from headgate.core.model import Compute, Pool, Profile
from headgate.planning.dispatch.placement import has_room

GB = 1 << 30
COLD = Profile((10 * MS,), cold_start_ns=50 * MS, memory_bytes=GB)


def make_rig(count: int = 1, *, nodes: int = 3, memory_gb: int = 64) -> PlanningRig:
    pool = Pool(0, "node", nodes=nodes, memory_bytes=memory_gb * GB)
    return PlanningRig(make_app([COLD] * count, pool))


def test_a_node_that_holds_the_weights_comes_first() -> None:
    rig = make_rig()
    held = rig.view.nodes[1]
    rig.start(0, held)
    assert rig.placement.warm_node(rig.build()) is held
    assert rig.placement.node_for(rig.build()) is held
    assert rig.placement.suits(held, rig.build())


def test_a_node_without_the_weights_does_not_suit_while_one_with_them_is_free() -> None:
    rig = make_rig()
    rig.start(0, rig.view.nodes[1])
    assert not rig.placement.suits(rig.view.nodes[0], rig.build())


def test_what_no_node_holds_is_started_where_there_is_room() -> None:
    rig = make_rig()
    assert rig.placement.warm_node(rig.build()) is None
    node = rig.placement.missing_node(rig.build())
    assert node is not None
    assert rig.placement.suits(node, rig.build())
    rig.start(0, node)
    assert rig.placement.missing_node(rig.build()) is None


def test_an_empty_rented_node_is_left_to_the_plan() -> None:
    rig = PlanningRig(make_app([COLD], Pool(0, "rented", nodes=2, is_elastic=True)))
    assert rig.placement.node_for(rig.build()) is None
    assert not rig.placement.suits(rig.view.nodes[0], rig.build())


def test_a_rented_node_that_boots_is_not_waited_for() -> None:
    """It has two slots, one of which the start does not take."""
    pool = Pool(0, "rented", nodes=1, slots=2, is_elastic=True)
    rig = PlanningRig(make_app([COLD], pool))
    node = rig.view.nodes[0]
    rig.start(0, node, is_ready=False)
    assert rig.placement.warm_node(rig.build()) is None
    assert not rig.placement.suits(node, rig.build())


def test_room_is_memory_that_nothing_holds() -> None:
    rig = make_rig(2, nodes=1, memory_gb=1)
    node = rig.view.nodes[0]
    first, second = rig.build(0).variant, rig.build(1).variant
    assert has_room(rig.view, node, first)
    rig.start(0, node)
    assert not has_room(rig.view, node, first)  # it is there
    assert not has_room(rig.view, node, second)


def test_where_memory_is_scarce_a_build_that_needs_its_node_keeps_it() -> None:
    """Each node holds one of two functions. The first has the load, the second has none."""
    rig = make_rig(2, nodes=2, memory_gb=1)
    busy, idle = rig.build(0), rig.build(1)
    for node in rig.view.nodes.values():
        rig.start(0, node)
    for _ in range(200):
        rig.now_ns += 5 * MS
        rig.ask(0)
        rig.builds.observe_load(busy, 10.0 * MS)
    assert busy.share > 1.5
    assert not rig.builds.can_spare(busy, idle)
    assert not rig.builds.wants_instance(idle)
    # A function that no node holds is started all the same when a task asks for it.
    assert rig.placement.node_for(idle) is not None


def test_only_what_has_nodes_to_spare_is_evicted() -> None:
    """Nodes hold two of three functions. The one without load goes, though it was used last."""
    rig = make_rig(3, nodes=2, memory_gb=2)
    first, wanted = rig.build(0), rig.build(2)
    node, other = rig.view.nodes.values()
    for each in (0, 1):
        rig.start(each, node)
    for each in (0, 2):
        rig.start(each, other)
    for _ in range(200):
        rig.now_ns += 10 * MS
        rig.ask(0)
        rig.builds.observe_load(first, 8.0 * MS)
        rig.builds.observe_load(wanted, 8.0 * MS)
    assert not rig.builds.can_spare(first, wanted)
    assert [i.variant.function_id for i in rig.placement.to_evict(node, wanted)] == [1]
    assert rig.placement.to_evict(other, wanted) == []  # it is there


def test_a_function_gives_up_a_node_to_one_with_more_load_per_node() -> None:
    """By load alone both could be everywhere, but a node holds only one of them."""
    rig = make_rig(2, nodes=3, memory_gb=1)
    light, heavy = rig.build(0), rig.build(1)
    nodes = list(rig.view.nodes.values())
    for node, function_id in zip(nodes, (0, 0, 1), strict=True):
        rig.start(function_id, node)
    for _ in range(200):
        rig.now_ns += 10 * MS
        rig.ask(0)
        rig.builds.observe_load(light, 4.0 * MS)
        rig.builds.observe_load(heavy, 9.0 * MS)
    assert rig.builds.can_spare(light, heavy)
    assert not rig.builds.can_spare(heavy, light)
    assert [i.variant.function_id for i in rig.placement.to_evict(nodes[0], heavy)] == [0]


def test_a_function_that_another_pool_holds_evicts_nothing_for_its_first_node() -> None:
    """It is not without a node: what it would evict may run nowhere else."""
    small = Pool(0, "small", nodes=1, memory_bytes=GB)
    large = Pool(1, "large", nodes=1, memory_bytes=2 * GB)
    rig = PlanningRig(make_app([COLD] * 2, small, large))
    on_small, on_large = rig.view.nodes.values()
    rig.start(0, on_small)
    second = rig.builds.on_pool[0][1]
    assert second is not None
    assert rig.placement.suits(on_small, second)
    rig.start(1, on_large)
    assert not rig.placement.suits(on_small, second)


def test_a_start_in_advance_leaves_a_node_free_and_needs_a_load() -> None:
    rig = make_rig(nodes=2)
    rig.start(0, rig.view.nodes[0])
    build = rig.build()
    assert rig.placement.prestart_node(build, is_awaited=False) is None
    for _ in range(1_000):
        rig.now_ns += 10 * MS
        rig.view.now_ns = rig.now_ns
        rig.builds.observe_load(build, 10.0 * MS)
    assert rig.placement.prestart_node(build, is_awaited=False) is rig.view.nodes[1]
    rig.start(0, rig.view.nodes[1])
    assert rig.placement.prestart_node(build, is_awaited=False) is None


def test_what_is_refused_is_started_on_as_many_nodes_as_its_load_wants() -> None:
    """Nodes are starting it: nothing can be admitted, so no task waits for a second or a third."""
    rig = make_rig()
    build = rig.build()
    for _ in range(1_000):
        rig.now_ns += 10 * MS
        rig.view.now_ns = rig.now_ns
        rig.builds.observe_load(build, 10.0 * MS)
    rig.start(0, rig.view.nodes[0], is_ready=False)
    node = rig.placement.missing_node(build)
    assert node is rig.view.nodes[1]
    rig.start(0, node, is_ready=False)
    assert rig.placement.missing_node(build) is None  # one stays free


def test_one_more_start_is_paid_for_with_what_was_refused() -> None:
    """A start takes 50 ms of a node that runs something else for half of its time.

    It is worth it once 25 ms of work were refused, and not because a task has to wait.
    """
    rig = make_rig(2, nodes=2)
    held, wanted = rig.view.nodes.values()
    build = rig.build(0)
    rig.start(0, held)
    rig.start(1, wanted)
    for _ in range(1_000):
        rig.builds.nodes.on_sent(wanted, rig.now_ns + 5 * MS)
        rig.now_ns += 10 * MS
        rig.view.now_ns = rig.now_ns
        rig.builds.observe_load(build, 5.0 * MS)
    assert rig.placement.prestart_node(build, is_awaited=True) is None
    refused = [rig.placement.missing_node(build) for _ in range(3)]
    assert refused == [None, None, wanted]
    assert rig.placement.missing_node(build) is None  # what was refused before is used up


def test_a_node_that_has_just_loaded_a_function_is_wanted_for_it() -> None:
    """Nothing ran there yet, but there is a load."""
    rig = make_rig(2, nodes=2)
    held, fresh = rig.view.nodes.values()
    rig.start(0, held)
    rig.start(1, fresh)
    for _ in range(100):
        rig.now_ns += 10 * MS
        rig.view.now_ns = rig.now_ns
        rig.builds.observe_load(rig.build(1), 5.0 * MS)
    assert rig.placement.prestart_node(rig.build(0), is_awaited=True) is None


def test_the_first_node_of_a_function_is_the_one_that_is_wanted_least() -> None:
    rig = make_rig(2, nodes=3)
    first, second, _ = rig.view.nodes.values()
    rig.builds.nodes.on_sent(first, 4 * MS)
    rig.builds.nodes.on_sent(second, 2 * MS)
    rig.start(0, rig.view.nodes[2], is_ready=False)
    rig.now_ns = rig.view.now_ns = 20 * MS
    assert rig.placement.missing_node(rig.build(1)) is second


def test_a_node_that_joins_starts_each_function_once_then_more_of_it() -> None:
    """Of two of three functions, one node is to be warm. Each start takes one of its six slots."""
    pool = Pool(0, "node", nodes=2, slots=6, cpu_milli=6000, compute=Compute.PER_INSTANCE)
    app = make_app([COLD] * 3, pool)
    functions = tuple(replace(f, prewarm_nodes=int(f.id < 2)) for f in app.functions)
    rig = PlanningRig(replace(app, functions=functions), joins=False)
    node, started = rig.join(), []
    while (build := rig.placement.to_prewarm(node)) is not None:
        started.append(build.function_id)
        rig.start(build.function_id, node, is_ready=False)
    assert started == [0, 1, 0, 0, 0, 0]
    assert rig.placement.to_prewarm(rig.join()) is None  # enough nodes have them
