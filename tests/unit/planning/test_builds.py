"""Builds: what is learnt from the time of batches, and which lanes there are."""

from __future__ import annotations

from random import Random

import pytest
from planning_rig import CLOUD, MS, NODES, PlanningRig, make_app

from headgate.core.events import BatchFinished, InstanceStarted, InstanceStopped
from headgate.core.model import Pool, Profile, Shape, ShapeTimes
from headgate.core.policy import Target
from headgate.planning.pools.build import Build

BATCHES = Profile((10 * MS, 12 * MS, 14 * MS, 16 * MS))


def make_build(profile: Profile = BATCHES, *, pool: Pool = NODES) -> Build:
    rig = PlanningRig(make_app([profile], pool), joins=False)
    return rig.build()


def test_the_profile_is_believed_until_something_else_is_seen() -> None:
    build = make_build()
    assert [build.lane_ns(items) / MS for items in (1, 2, 3, 4)] == [10, 12, 14, 16]
    assert build.cautious_ns(1, 0.0) == build.lane_ns(1)
    assert build.cautious_ns(1, 2.0) == pytest.approx(12 * MS)


def test_the_ratio_follows_what_is_observed_and_the_spread_with_it() -> None:
    build, rng = make_build(), Random(1)
    for _ in range(200):
        build.observe(2, int(15 * MS * rng.gauss(1.0, 0.05)))
    assert build.ratio == pytest.approx(1.25, rel=0.05)
    assert build.deviation == pytest.approx(0.05, abs=0.03)
    assert build.lane_ns(1) == pytest.approx(12.5 * MS, rel=0.05)
    assert build.fastest_ns(1) == 10 * MS  # the profile may be right after all


def test_one_surprise_is_an_outlier_and_several_are_news() -> None:
    build = make_build()
    for _ in range(50):
        build.observe(1, 10 * MS)
    build.observe(1, 100 * MS)
    assert build.ratio < 1.3
    for _ in range(30):
        build.observe(1, 100 * MS)
    assert build.ratio == pytest.approx(10.0, rel=0.1)
    for _ in range(30):
        build.observe(1, 10 * MS)
    assert build.ratio == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("spread", [0.1, 0.3, 0.7])
def test_a_function_that_was_slow_for_a_while_is_soon_known_to_be_fast(spread: float) -> None:
    """Also if its times varied much meanwhile, as they do where something else takes the CPU."""
    build, rng = make_build(), Random(1)
    for _ in range(100):
        build.observe(1, int(1_000 * MS * rng.lognormvariate(0.0, spread)))
    assert 50 < build.ratio < 250
    for _ in range(20):
        build.observe(1, 10 * MS)
    assert build.ratio < 2.0


def test_no_observation_makes_a_time_vanish() -> None:
    build = make_build()
    for _ in range(1_000):
        build.observe(1, 0)
    assert build.lane_ns(1) > 0


def test_network_time_holds_the_lane_and_is_not_learnt_from() -> None:
    build = make_build(pool=Pool(0, "far", network_ns=40 * MS))
    assert build.lane_ns(1) == 90 * MS
    for _ in range(100):
        build.observe(1, 90 * MS)
    assert build.ratio == pytest.approx(1.0)
    for _ in range(100):
        build.observe(1, 100 * MS)
    assert build.lane_ns(1) == pytest.approx(100 * MS, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_batch_within_a_window_fits_and_a_larger_one_does_not(seed: int) -> None:
    rng = Random(seed)
    times_ns = sorted(rng.randint(1, 50) * MS for _ in range(rng.randint(1, 12)))
    build = make_build(Profile(tuple(times_ns)))
    build.observe(1, int(times_ns[0] * rng.uniform(0.5, 2.0)))
    for _ in range(20):
        window_ns, z = rng.uniform(0, 120) * MS, rng.choice((0.0, 1.0, 3.0))
        items = build.items_within(window_ns, z)
        assert 1 <= items <= build.items_best <= build.items_max
        if items > 1:
            assert build.cautious_ns(items, z) <= window_ns * (1 + 1e-9)
        if items < build.items_best:
            assert build.cautious_ns(items + 1, z) > window_ns * (1 - 1e-9)


def test_a_batch_is_no_larger_than_pays() -> None:
    assert make_build(Profile((10 * MS, 20 * MS, 30 * MS))).items_best == 1
    assert make_build(BATCHES).items_best == 4


def test_batches_are_planned_a_little_larger_than_those_that_were_formed() -> None:
    build = make_build(Profile(tuple((10 + items) * MS for items in range(32))))
    assert build.likely_items() == 2
    for _ in range(100):
        build.on_formed(8, 0, is_contended=True)
    assert build.likely_items() == pytest.approx(12, abs=1)
    for _ in range(100):
        build.on_formed(1, 0, is_contended=False)
    assert build.likely_items() == pytest.approx(12, abs=1)


def test_work_that_was_booked_too_low_is_booked_higher() -> None:
    build = make_build()
    for _ in range(100):
        build.on_formed(1, 5 * MS, is_contended=True)
    assert build.overrun == pytest.approx(2.0, rel=0.01)
    for _ in range(100):
        build.on_formed(1, 1, is_contended=True)
    assert build.overrun <= 3.0
    for _ in range(100):
        build.on_formed(1, 1, is_contended=False)  # few were there: it says nothing about a backlog
    assert build.overrun == pytest.approx(1.0, rel=0.01)


def test_a_build_that_needs_more_of_a_node_takes_more_lanes_of_the_pool() -> None:
    """Four CPUs: a batch of the first function takes one, of the second three."""
    pool = Pool(0, "node", slots=4, cpu_milli=4_000)
    app = make_app([Profile((10 * MS,), slowdown=(1.0,) * 4)] * 2, pool)
    for function, milli in zip(app.functions, (1_000, 3_000), strict=True):
        (variant,) = function.variants
        object.__setattr__(
            variant, "shapes", (ShapeTimes(Shape(milli, 0), variant.profile.exec_ns),)
        )
        object.__setattr__(variant, "shape", Shape(milli, 0))
        object.__setattr__(variant, "concurrency", 4)
    rig = PlanningRig(app)
    small, large = rig.build(0), rig.build(1)
    assert rig.builds.calendars[0].lanes == small.lanes * 1
    assert large.weight == pytest.approx(3.0 * small.weight)
    taken = [large.take_lanes(0) for _ in range(100)]
    assert sum(taken) == pytest.approx(100 * large.weight, abs=1)
    assert set(taken) <= {int(large.weight), int(large.weight) + 1}


def test_lanes_come_and_go_with_their_nodes() -> None:
    rig = PlanningRig(make_app([BATCHES], NODES))
    calendar = rig.builds.calendars[0]
    assert (calendar.lanes, rig.builds.nodes.node_count(0)) == (2, 2)
    node = rig.view.nodes[0]
    rig.builds.nodes.on_node_lost(node)
    rig.builds.nodes.on_node_lost(node)
    assert calendar.lanes == 1
    rig.builds.nodes.on_node_joined(node)
    rig.builds.nodes.on_node_joined(node)
    assert calendar.lanes == 2


def test_a_rented_node_counts_while_it_has_an_instance() -> None:
    pool = Pool(0, "rented", nodes=1, is_elastic=True)
    rig = PlanningRig(make_app([BATCHES], pool))
    calendar, build = rig.builds.calendars[0], rig.build()
    assert calendar.lanes == 0
    assert not rig.builds.is_usable(build)
    instance = rig.start(0, rig.view.nodes[0])
    assert calendar.lanes == 1
    assert rig.builds.is_usable(build)
    assert rig.builds.has_nodes(rig.builds.of_function[0], 4)
    assert not rig.builds.has_nodes(rig.builds.of_function[0], 5)
    rig.tell(InstanceStopped(instance.id, "idle"))
    rig.builds.nodes.on_instance_gone(instance)
    assert calendar.lanes == 0


def test_a_batch_holds_its_lanes_until_it_ends_and_teaches_its_build() -> None:
    rig = PlanningRig(make_app([BATCHES], NODES))
    node, build = rig.view.nodes[0], rig.build()
    rig.start(0, node)
    request = rig.ask()
    batch = rig.orders.dispatch(list(request.tasks), node, build.variant)
    rig.builds.on_sent(build, batch, 0)
    assert rig.builds.calendars[0].lanes_free_by(rig.now_ns, rig.now_ns) == 1
    rig.tell(BatchFinished(batch.id), at_ms=20)
    rig.builds.on_batch_ended(batch, 20 * MS)
    assert rig.builds.calendars[0].lanes_free_by(rig.now_ns, rig.now_ns) == 2
    assert build.ratio > 1.1
    learnt = build.ratio
    rig.builds.on_batch_ended(batch, 20 * MS)  # told twice
    assert build.ratio == learnt


def test_where_a_task_fits() -> None:
    rig = PlanningRig(make_app([BATCHES], NODES, CLOUD))
    assert rig.builds.fits_node(0, 4)
    assert not rig.builds.fits_node(0, 5)
    (task,) = rig.ask().tasks
    assert rig.builds.fits_call(task)
    task.payload_bytes = 1 << 40
    assert not rig.builds.fits_call(task)


def test_a_start_takes_a_lane_until_it_is_over() -> None:
    profile = Profile((10 * MS,), cold_start_ns=50 * MS)
    rig = PlanningRig(make_app([profile], NODES))
    calendar, build = rig.builds.calendars[0], rig.build()
    assert rig.builds.ready_in_ns(build) == 50 * MS
    instance = rig.start(0, rig.view.nodes[0], is_ready=False)
    assert (calendar.lanes_free_by(0, 0), calendar.lanes_free_by(0, 50 * MS)) == (1, 2)
    rig.builds.nodes.on_instance_gone(instance)
    assert calendar.lanes_free_by(0, 0) == 2


RENTED = Pool(0, "rented", nodes=2, slots=2, is_elastic=True, boot_ns=200 * MS)
SLOW_START = Profile((10 * MS,), cold_start_ns=50 * MS)


def test_a_rented_node_counts_from_its_order_on_and_is_busy_until_it_is_up() -> None:
    rig = PlanningRig(make_app([SLOW_START, SLOW_START], RENTED, latency_ms=1000))
    calendar, build = rig.builds.calendars[0], rig.build()
    first = rig.start(0, rig.view.nodes[0], is_ready=False)
    assert rig.builds.is_usable(build)
    assert calendar.lanes == 2
    assert [calendar.lanes_free_by(0, ms * MS) for ms in (0, 249, 250)] == [0, 0, 2]
    assert rig.builds.nodes.start_end_ns(first) == 250 * MS
    rig.start(1, rig.view.nodes[0], is_ready=False)  # while the same node boots
    assert [calendar.lanes_free_by(0, ms * MS) for ms in (0, 249, 250)] == [0, 0, 2]
    rig.tell(InstanceStarted(first.id, 0), 240)
    rig.builds.nodes.on_instance_started(first)
    assert (calendar.lanes, calendar.lanes_free_by(240 * MS, 240 * MS)) == (2, 2)


def test_a_rented_node_that_does_not_come_up_counts_no_more() -> None:
    rig = PlanningRig(make_app([SLOW_START], RENTED, latency_ms=1000))
    instance = rig.start(0, rig.view.nodes[0], is_ready=False)
    rig.tell(InstanceStopped(instance.id, "failed"))
    rig.builds.nodes.on_instance_gone(instance)
    calendar = rig.builds.calendars[0]
    assert (calendar.lanes, calendar.last_end_ns()) == (0, 0)


def test_a_boot_that_takes_longer_than_every_objective_is_not_waited_for() -> None:
    rig = PlanningRig(make_app([SLOW_START], RENTED, latency_ms=249))
    instance = rig.start(0, rig.view.nodes[0], is_ready=False)
    assert rig.builds.calendars[0].lanes == 0
    rig.tell(InstanceStarted(instance.id, 0), 250)
    rig.builds.nodes.on_instance_started(instance)
    assert rig.builds.calendars[0].lanes == 1


def test_what_to_wake_is_what_nothing_runs() -> None:
    rig = PlanningRig(make_app([SLOW_START], RENTED, latency_ms=1000))
    assert rig.builds.without_place() == [0]
    assert rig.builds.to_wake(0) is rig.build()
    rig.start(0, rig.view.nodes[0], is_ready=False)
    assert rig.builds.to_wake(0) is None
    with_calls = PlanningRig(make_app([SLOW_START], RENTED, CLOUD, latency_ms=1000))
    assert with_calls.builds.without_place() == []
    assert with_calls.builds.to_wake(0) is None


def test_a_plan_keeps_an_instance_for_what_is_promised() -> None:
    rig = PlanningRig(make_app([SLOW_START], RENTED, latency_ms=1000))
    rig.start(0, rig.view.nodes[0])
    none = Target(variant_id=0, pool_id=0, count=0)
    assert rig.builds.as_promised(none) == none
    assert rig.admission.admit(rig.ask(due_ms=1000))
    assert rig.builds.as_promised(none).count == 1


def test_weights_on_hosts_do_not_hide_the_node_that_is_free() -> None:
    """Seed 200097. More nodes than are asked have them on the host; a later one can run them."""
    memory = Profile((10 * MS,), memory_bytes=2)
    pool = Pool(0, "gpu", nodes=20, memory_bytes=3, host_memory_bytes=4)
    rig = PlanningRig(make_app([memory, memory], pool))
    instances = [rig.start(0, node) for node in rig.view.nodes.values()]
    for instance in instances[:18]:
        rig.orders.evict(instance)
    assert rig.builds.free_in_ns(rig.build()) == 0


def test_a_node_that_starts_another_function_is_not_free_until_then() -> None:
    """It holds the build, and was idle before: what is admitted now waits for the start."""
    profile = Profile((10 * MS,), cold_start_ns=40 * MS)
    rig = PlanningRig(make_app([profile] * 2, Pool(0, "node", nodes=2), latency_ms=30))
    node = rig.view.nodes[0]
    rig.start(0, node)
    rig.start(1, node, is_ready=False)
    assert rig.builds.ready_in_ns(rig.build()) == 40 * MS
    assert not rig.admission.admit(rig.ask(due_ms=30))


def test_an_instance_that_starts_is_no_lane_until_then() -> None:
    profile = Profile((10 * MS,), cold_start_ns=40 * MS)
    rig = PlanningRig(make_app([profile], Pool(0, "node", nodes=3)))
    build = rig.build()
    first, second, _ = rig.view.nodes.values()
    rig.start(0, first)
    starting = rig.start(0, second, is_ready=False)
    assert rig.builds.lanes_of(build) == 2
    assert [rig.builds.lanes_by(build, at_ms * MS) for at_ms in (0, 39, 40)] == [1, 1, 2]
    rig.tell(InstanceStarted(starting.id, second.id), 20)
    rig.builds.nodes.on_instance_started(starting)
    assert rig.builds.lanes_by(build, 20 * MS) == 2
