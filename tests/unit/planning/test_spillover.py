"""When a call of a FaaS platform is promised and sent, and how many instances are kept warm.

A call takes 10 ms, and its start 40.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from planning_rig import CLOUD, MS, NODES, PlanningRig, make_app

from headgate.core.events import BatchFinished, BatchLost
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.records import Task
from headgate.planning.pools.warm_pool import WarmPoolEstimate

CLOUD0 = replace(CLOUD, id=0)
PROFILE = Profile((10 * MS, 12 * MS), cold_start_ns=40 * MS)


def make_rig(*pools: Pool, warm: int = 0, latency_ms: float = 100) -> PlanningRig:
    rig = PlanningRig(make_app([PROFILE], *(pools or (NODES, CLOUD)), latency_ms=latency_ms))
    instances = instances_of(rig)
    instances.set_desired(-100 * MS, warm)
    assert instances.size(0) == warm
    return rig


def instances_of(rig: PlanningRig) -> WarmPoolEstimate:
    warm_pool = rig.faas().warm_pool
    assert warm_pool is not None
    return warm_pool.instances


def make_task(rig: PlanningRig, due_ms: float = 0) -> Task:
    return rig.ask(due_ms=due_ms).tasks[0]


def can_start(rig: PlanningRig, latest_ms: float, batches: float = 1.0) -> bool:
    build = rig.faas()
    return rig.spillover.can_start_by(
        build, make_task(rig), batches, int(latest_ms * MS), build.pending_ns
    )


def test_a_call_starts_at_once_on_a_warm_instance_or_after_a_cold_start() -> None:
    assert can_start(make_rig(warm=1), 0)
    assert not can_start(make_rig(warm=0), 39)
    assert can_start(make_rig(warm=0), 40)


def calls_promised(rig: PlanningRig, within_ms: int) -> int:
    """Promise calls until one could not start in time; return how many were promised."""
    build = rig.faas()
    promised = 0
    while promised < 100 and can_start(rig, within_ms):
        build.pending_ns += 10 * MS
        build.pending_batches += 1.0
        promised += 1
    return promised


@pytest.mark.parametrize("warm", [1, 3])
def test_no_more_calls_are_promised_than_the_warm_instances_start_in_time(warm: int) -> None:
    """Each can start one at 0, 10, 20 and 30 ms; a cold start takes longer."""
    rig = make_rig(warm=warm)
    assert calls_promised(rig, 30) == 4 * warm


def test_calls_that_are_due_later_are_not_in_the_way() -> None:
    """An instance is warm, and many wait for it; of those, some must start before the newcomer."""
    rig = make_rig(warm=1)
    build = rig.faas()
    build.pending_ns, build.pending_batches = 100 * 10 * MS, 100.0
    for ahead, is_in_time in ((0, True), (3, True), (4, False), (200, False)):
        assert is_in_time == rig.spillover.can_start_by(
            build, make_task(rig), 1.0, 30 * MS, ahead * 10 * MS
        )


def test_no_more_start_cold_than_the_platform_runs_at_once() -> None:
    rig = make_rig(latency_ms=200)
    assert calls_promised(rig, 45) == 5


def test_calls_that_were_missed_make_the_warm_pool_grow() -> None:
    rig = make_rig()
    build = rig.faas()
    assert build.warm_pool is not None
    assert not can_start(rig, 30)
    at_ns = rig.spillover.resize_at_ns(build)
    assert at_ns is not None
    assert at_ns <= 1 * MS
    assert rig.spillover.resize_at_ns(build) is None  # once for all
    for _ in range(50):
        can_start(rig, 30)
    resize = rig.spillover.resize(build)
    assert resize is not None
    assert 1 < resize.count <= 5
    assert rig.spillover.resize(build) is None


def test_a_small_change_does_not_scale_the_warm_pool_in() -> None:
    rig = make_rig()
    build = rig.faas()
    assert build.warm_pool is not None
    build.warm_pool.observe_demand(0, 3.0)
    resize = rig.spillover.resize(build)
    assert resize is not None
    rig.now_ns = rig.view.now_ns = 600_000 * MS  # a sixth of the memory
    assert rig.spillover.resize(build) is None
    rig.now_ns = rig.view.now_ns = 7_200_000 * MS
    smaller = rig.spillover.resize(build)
    assert smaller is not None
    assert smaller.count < resize.count


def test_a_call_goes_if_an_instance_is_idle_or_a_cold_start_is_in_time() -> None:
    rig = make_rig(warm=1)
    build = rig.faas()
    assert rig.spillover.may_call(build, make_task(rig, due_ms=5))
    rig.spillover.on_call(build)
    assert not rig.spillover.may_call(build, make_task(rig, due_ms=49))
    assert rig.spillover.may_call(build, make_task(rig, due_ms=50))


def test_with_nothing_warm_or_starting_a_late_call_starts_an_instance() -> None:
    rig = make_rig()
    build, late = rig.faas(), make_task(rig, due_ms=5)
    assert rig.spillover.may_call(build, late)
    instances_of(rig).set_desired(0, 2)
    assert not rig.spillover.may_call(build, late)  # one that is starting will be warm
    assert rig.spillover.retry_at_ns(build) == 40 * MS
    rig.view.now_ns = 40 * MS
    assert rig.spillover.may_call(build, late)


def test_no_call_goes_beyond_the_concurrency_of_the_platform() -> None:
    rig = make_rig(warm=6)
    build = rig.faas()
    for _ in range(5):
        task = make_task(rig)
        assert rig.spillover.may_call(build, task)
        rig.spillover.on_call(build)
        rig.orders.dispatch_to_pool([task], build.pool, build.variant)
    assert not rig.spillover.may_call(build, make_task(rig))
    assert not rig.spillover.has_warm(build, make_task(rig))


def test_what_no_call_can_carry_has_no_warm_instance() -> None:
    rig = make_rig(warm=1)
    build, task = rig.faas(), make_task(rig)
    assert rig.spillover.has_warm(build, task)
    task.payload_bytes = 1 << 40
    assert not rig.spillover.has_warm(build, task)


@pytest.mark.parametrize("has_run", [True, False])
def test_where_a_call_ran_an_instance_is_warm(*, has_run: bool) -> None:
    rig = make_rig()
    build, task = rig.faas(), make_task(rig)
    rig.spillover.on_call(build)
    batch = rig.orders.dispatch_to_pool([task], build.pool, build.variant)
    rig.tell(BatchFinished(batch.id) if has_run else BatchLost(batch.id), at_ms=60)
    rig.spillover.on_call_ended(build, batch)
    assert instances_of(rig).busy == 0
    assert instances_of(rig).size(rig.now_ns) == has_run


def test_a_function_with_nodes_leaves_the_platform_to_one_without() -> None:
    """Both want three warm instances of a platform that runs five calls, starts included."""
    both = Variant(0, "both", 0, (0, 1), PROFILE)
    only = Variant(1, "only", 1, (1,), PROFILE)
    functions = Function(0, "both", (both,)), Function(1, "only", (only,))
    pipelines = [Pipeline(f.id, f.name, (Stage(f),), Slo(100 * MS)) for f in functions]
    rig = PlanningRig(App(functions, tuple(pipelines), (NODES, CLOUD)))
    counts: list[int] = []
    for build in (rig.faas(0), rig.faas(1)):
        assert build.warm_pool is not None
        build.warm_pool.observe_demand(0, 2.4)
    for build in (rig.faas(0), rig.faas(1)):
        resize = rig.spillover.resize(build)
        assert resize is not None
        counts.append(resize.count)
    assert counts == [2, 3]


def test_instances_that_are_starting_take_concurrency_of_the_platform() -> None:
    rig = make_rig(warm=1)
    build = rig.faas()
    assert rig.spillover.may_call(build, make_task(rig))
    instances_of(rig).set_desired(0, 6)
    assert not rig.spillover.may_call(build, make_task(rig))
    assert rig.spillover.retry_at_ns(build) == 40 * MS
    rig.now_ns = 40 * MS
    assert rig.spillover.may_call(build, make_task(rig))


def test_a_call_looks_at_the_functions_that_are_starting_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of fifty functions on a platform, three are asked for instances that are starting."""
    rig = PlanningRig(make_app([PROFILE] * 50, CLOUD0))
    for function_id in (7, 11, 13):
        warm_pool = rig.faas(function_id).warm_pool
        assert warm_pool is not None
        warm_pool.instances.set_desired(function_id * MS, 1)
    asked: set[WarmPoolEstimate] = set()
    next_ready_ns = WarmPoolEstimate.next_ready_ns

    def note(self: WarmPoolEstimate, now_ns: int) -> int | None:
        asked.add(self)
        return next_ready_ns(self, now_ns)

    monkeypatch.setattr(WarmPoolEstimate, "next_ready_ns", note)
    build, task = rig.faas(0), make_task(rig, due_ms=100)
    assert rig.spillover.retry_at_ns(build) == 47 * MS
    assert rig.spillover.may_call(build, task)
    assert len(asked) <= 4  # and its own
    for now_ms, ready_ms in ((46, 47), (47, 51), (52, 53), (53, None)):
        rig.view.now_ns = rig.now_ns = now_ms * MS
        assert rig.spillover.retry_at_ns(build) == (ready_ms and ready_ms * MS)
    asked.clear()
    assert rig.spillover.may_call(build, make_task(rig, due_ms=200))
    assert len(asked) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_what_is_starting_on_the_platform_is_that_of_all_its_functions(seed: int) -> None:
    rng, rig = Random(seed), PlanningRig(make_app([PROFILE] * 6, CLOUD0))
    builds = [rig.faas(function_id) for function_id in range(6)]
    pools = [build.warm_pool for build in builds]
    for _ in range(300):
        rig.view.now_ns = rig.now_ns = rig.now_ns + rng.choice((0, MS, 15 * MS))
        warm_pool = rng.choice(pools)
        assert warm_pool is not None
        if rng.random() < 0.5:
            count = rng.choice((0, 0, 1, 2))
            warm_pool.instances.set_desired(rig.now_ns, count, is_provisioned=rng.random() < 0.2)
        elif warm_pool.instances.busy and rng.random() < 0.5:
            warm_pool.instances.on_return(rig.now_ns, ran=rng.random() < 0.7)
        else:
            warm_pool.instances.on_call(rig.now_ns)
        each = [pool.instances for pool in pools if pool is not None]
        starting = sum(instances.pings_starting(rig.now_ns) for instances in each)
        ready_ns = [instances.next_ready_ns(rig.now_ns) for instances in each]
        build = rng.choice(builds)
        assert build.warm_pool is not None
        is_idle = build.warm_pool.instances.idle(rig.now_ns) > 0
        assert rig.spillover.has_warm(build, make_task(rig)) == (starting < 5 and is_idle)
        soonest_ns = min((at_ns for at_ns in ready_ns if at_ns is not None), default=None)
        assert rig.spillover.retry_at_ns(build) == soonest_ns


@pytest.mark.parametrize(("latest_ms", "count"), [(0, 5), (30, 2)])
def test_calls_that_can_follow_each_other_in_time_share_instances(
    latest_ms: float, count: int
) -> None:
    """Five calls at once; by 30 ms an instance starts four: at 0, 10, 20 and 30 ms."""
    rig = make_rig(warm=5)
    build = rig.faas()
    for _ in range(5):
        assert can_start(rig, latest_ms)
        rig.spillover.on_call(build)
    resize = rig.spillover.resize(build)
    assert resize is not None
    assert resize.count == count


def test_short_objectives_do_not_forget_for_long_ones() -> None:
    """A call that can wait a second was missed: 0.4 s later busy instances count whole."""
    rig = make_rig(warm=3)
    build = rig.faas()
    assert build.warm_pool is not None
    build.pending_ns, build.pending_batches = 10_000 * MS, 1_000.0
    assert not can_start(rig, 1_000)
    build.pending_ns, build.pending_batches = 0, 0.0
    for _ in range(3):
        rig.spillover.on_call(build)
    for now_ms, within_ms in ((300, 15), (400, 1_000)):
        rig.view.now_ns = rig.now_ns = now_ms * MS
        assert build.warm_pool.recent_demand(rig.now_ns) < 1.5
        can_start(rig, now_ms + within_ms)
    assert build.warm_pool.recent_demand(rig.now_ns) > 3.0


def test_what_long_objectives_remember_is_no_demand_of_short_ones() -> None:
    """A call each millisecond takes ten instances, however long the calls before could wait."""
    rig = make_rig(warm=3)
    build = rig.faas()
    assert build.warm_pool is not None
    for now_ms in range(100):
        rig.view.now_ns = rig.now_ns = now_ms * MS
        can_start(rig, now_ms + (1_000 if 0 < now_ms < 99 else 15))
    assert 8.0 < build.warm_pool.recent_demand(rig.now_ns) < 12.0


def test_after_a_miss_busy_instances_count_whole() -> None:
    """One instance is busy: by 30 ms, it does three calls more, and the fourth is missed."""
    rig = make_rig(warm=1)
    build = rig.faas()
    rig.spillover.on_call(build)
    build.pending_ns, build.pending_batches = 40 * MS, 4.0
    assert not can_start(rig, 30)
    assert not can_start(rig, 30)
    assert build.warm_pool is not None
    assert build.warm_pool.recent_demand(0) > 2.0
