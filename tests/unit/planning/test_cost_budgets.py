"""Cost objectives: what a stage may cost, which builds are left, what an idle system could do."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from planning_rig import MS, PlanningRig, cpu_and_gpu_functions

from headgate.core.model import (
    App,
    Compute,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.records import Request
from headgate.core.states import Outcome, Rejection

HOUR_MS = 3_600_000
UNIT = 1e-6  # a CPU node costs one unit per millisecond, a GPU node five
CPU = Pool(0, "cpu", usd_per_hour=UNIT * HOUR_MS)
GPU = Pool(1, "gpu", Tier.GPU, usd_per_hour=5 * UNIT * HOUR_MS)


def app_of(
    *times_ms: tuple[int, int], latency_ms: int = 100, cost: float = inf, is_chain: bool = True
) -> App:
    """Functions with a CPU and a GPU build, one after the other or side by side."""
    functions = cpu_and_gpu_functions(times_ms)
    stages = tuple(Stage(f, (f.id - 1,) if is_chain and f.id else ()) for f in functions)
    slo = Slo(latency_ms * MS, cost_usd=cost * UNIT)
    return App(functions, (Pipeline(0, "dag", stages, slo),), (CPU, GPU))


def pools_of(rig: PlanningRig, request: Request) -> list[int]:
    """Where the stages of a request are promised."""
    promises = [rig.admission.booked(task) for task in request.tasks]
    return [promise.build.pool.id for promise in promises if promise is not None]


def refusal(rig: PlanningRig, request: Request) -> tuple[str, float, float]:
    """The reason, and predicted latency and cost in milliseconds and units."""
    settlement = rig.refusals.explain(request)
    assert settlement.outcome == Outcome.REJECTED
    return (
        settlement.reason,
        settlement.predicted_ns / MS,
        round(settlement.predicted_usd / UNIT, 6),
    )


@pytest.mark.parametrize(("cost", "pools"), [(inf, [1]), (50, [1]), (49, [0]), (20, [0])])
def test_only_builds_within_the_objective_are_considered(cost: float, pools: list[int]) -> None:
    """20 ms on a CPU cost 20, 10 ms on a GPU 50: the GPU is left out for whoever cannot pay it."""
    rig = PlanningRig(app_of((20, 10), cost=cost))
    request = rig.ask(due_ms=25)
    assert rig.admission.admit(request)
    if cost < inf:
        assert pools_of(rig, request) == pools
    rig.admission.on_settled(request, Outcome.MET)
    tight = rig.ask(due_ms=15)
    assert rig.admission.admit(tight) is (cost >= 50)


def test_a_request_that_can_pay_for_no_placement_is_refused_with_a_reason_of_its_own() -> None:
    rig = PlanningRig(app_of((20, 10), cost=19))
    request = rig.ask(due_ms=25)
    assert not rig.admission.admit(request)
    assert refusal(rig, request) == (Rejection.OVER_COST, 20.0, 20.0)


def test_the_cheapest_placement_that_is_in_time_is_what_a_refusal_names() -> None:
    rig = PlanningRig(app_of((20, 10), cost=30))
    request = rig.ask(due_ms=15)
    assert not rig.admission.admit(request)
    assert refusal(rig, request) == (Rejection.OVER_COST, 10.0, 50.0)
    late = rig.ask(due_ms=9)
    assert refusal(rig, late)[0] == Rejection.INFEASIBLE


def test_what_a_refusal_names_would_have_been_accepted() -> None:
    """More money for the same deadline, or more time for the same money."""
    rig = PlanningRig(app_of((20, 10), (20, 10), cost=50))
    request = rig.ask(due_ms=25)
    assert not rig.admission.admit(request)
    settlement = rig.refusals.explain(request)
    assert settlement.reason == Rejection.OVER_COST
    assert (settlement.objective_ns, settlement.objective_usd) == (25 * MS, 50 * UNIT)
    assert settlement.accepted_usd == pytest.approx(100 * UNIT)
    assert rig.admission.try_out(request, 25 * MS, settlement.accepted_usd) is not None
    assert rig.admission.try_out(request, 25 * MS, 0.99 * settlement.accepted_usd) is None
    assert 40 * MS <= settlement.accepted_ns <= 60 * MS
    assert rig.admission.try_out(request, settlement.accepted_ns, 50 * UNIT) is not None


def test_what_is_only_full_now_is_overloaded_and_not_too_dear() -> None:
    rig = PlanningRig(app_of((20, 10), cost=30))
    while rig.admission.admit(rig.ask(due_ms=45)):
        pass
    request = rig.ask(due_ms=45)
    assert not rig.admission.admit(request)
    assert refusal(rig, request)[0] == Rejection.OVERLOADED


def test_the_budget_of_a_pipeline_is_spent_over_its_stages() -> None:
    """Each stage costs 20 or 50. With 70 one of them may use the GPU, with 69 none, with 100 both.

    In 31 ms at least one must, in 21 ms both.
    """
    for cost, due_ms, gpus in ((70, 31, 1), (69, 31, None), (100, 21, 2), (99, 21, None)):
        rig = PlanningRig(app_of((20, 10), (20, 10), cost=cost))
        request = rig.ask(due_ms=due_ms)
        assert rig.admission.admit(request) is (gpus is not None)
        if gpus is not None:
            assert sum(pools_of(rig, request)) == gpus
        else:
            assert refusal(rig, request)[0] == Rejection.OVER_COST


def test_the_stage_that_gains_most_gets_the_dear_build() -> None:
    """Greedy from the front, the first stage would take the GPU, and the second be late."""
    rig = PlanningRig(app_of((12, 10), (60, 10), cost=65))
    request = rig.ask(due_ms=30)
    assert rig.admission.admit(request)
    assert pools_of(rig, request) == [0, 1]


def test_stages_side_by_side_pay_together() -> None:
    rig = PlanningRig(app_of((20, 10), (20, 10), cost=69, is_chain=False))
    assert rig.admission.admit(rig.ask(due_ms=90))
    assert not rig.admission.admit(rig.ask(due_ms=15))


@pytest.mark.parametrize("due_ms", [90, None])
def test_what_was_observed_counts_and_is_observed_again_now_and_then(due_ms: int | None) -> None:
    """Batches take half as long again: 30 units. A probe is admitted: by the profile it costs 20.

    For 19 there is no probe: the profile is not all that forbids it.
    """
    for cost, is_probed in ((29, True), (19, False)):
        app = app_of((20, 90), cost=cost)
        if due_ms is None:
            slo = Slo(cost_usd=cost * UNIT)
            app = replace(app, pipelines=(replace(app.pipelines[0], slo=slo),))
        rig = PlanningRig(app)
        for node in rig.view.nodes.values():
            rig.start(0, node)
        build = rig.build(0, 0)
        assert build.usd(1) == pytest.approx(20 * UNIT)
        for _ in range(200):
            build.observe(1, 30 * MS)
        assert build.usd(1) == pytest.approx(30 * UNIT, rel=0.001)
        admitted = [rig.admission.admit(rig.ask(due_ms=due_ms or 0)) for _ in range(3)]
        assert admitted == [is_probed, False, False]


def test_a_task_pays_for_the_dearest_batch_that_it_may_be_in() -> None:
    times = Profile((10 * MS, 30 * MS, 33 * MS))  # two together cost more each than one alone
    function = Function(0, "f", (Variant(0, "f", 0, (0,), times),))
    app = App((function,), (Pipeline(0, "p", (Stage(function),), Slo(100 * MS)),), (CPU,))
    rig = PlanningRig(app)
    assert rig.build().items_best == 1
    assert rig.build().usd(1) == pytest.approx(10 * UNIT)
    assert rig.build().usd_in(1, 2, 0) == pytest.approx(15 * UNIT)
    assert rig.build().usd(3) == pytest.approx(33 * UNIT)


def test_set_aside_follows_what_is_sent_and_is_forgotten() -> None:
    rig = PlanningRig(app_of((20, 10), (20, 10), cost=100))
    request = rig.ask(due_ms=90)
    budgets = rig.admission.budgets
    assert rig.admission.admit(request)
    first, second = request.tasks
    budgets.on_sent([first], rig.build(0, 1), 1, 0)
    assert budgets.left_usd(second) == pytest.approx(50 * UNIT, rel=1e-5)
    assert budgets.allows(second, rig.build(1, 1))
    budgets.on_sent([first], rig.build(0, 0), 1, 0)
    assert budgets.left_usd(second) == pytest.approx(80 * UNIT, rel=1e-5)
    rig.admission.on_settled(request, Outcome.MET)
    other = rig.ask(due_ms=90)
    assert budgets.left_usd(other.tasks[0]) == pytest.approx(80 * UNIT, rel=1e-5)


def test_without_an_objective_nothing_is_limited() -> None:
    rig = PlanningRig(app_of((20, 10)))
    request = rig.ask(due_ms=90)
    budgets, task = rig.admission.budgets, request.tasks[0]
    assert budgets.left_usd(task) == inf
    assert budgets.affordable(task) is rig.builds.of_function[0]
    assert not budgets.is_below_least(request)
    plan = budgets.fastest_plan(request)
    assert plan is not None and plan.latency_ns == 10 * MS


def test_a_call_with_a_cold_start_that_is_too_dear_is_promised_a_warm_instance() -> None:
    """A warm call of 10 ms at 1 GiB costs 0.367 units, and 1 s more of cold start is billed."""
    platform = FaasPlatform(
        1 << 30,
        concurrency_max=5,
        keep_alive_ns=600_000 * MS,
        usd_per_gb_s=16.7e-6,
        usd_per_request=2e-7,
    )
    cloud = Pool(0, "cloud", Tier.SERVERLESS, nodes=0, faas=platform)
    profile = Profile((10 * MS,), cold_start_ns=1_000 * MS)
    function = Function(0, "f", (Variant(0, "f", 0, (0,), profile),))
    for cost, is_admitted in ((inf, True), (50.0, True), (1.0, False), (0.3, False)):
        slo = Slo(5_000 * MS, cost_usd=cost * UNIT)
        rig = PlanningRig(App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (cloud,)))
        request = rig.ask(due_ms=5_000)
        assert rig.admission.admit(request) is is_admitted
        task, faas = request.tasks[0], rig.faas()
        assert rig.admission.budgets.allows(task, faas) is (cost >= 1.0)
        assert rig.admission.budgets.allows_cold(task, faas) is (cost >= 50.0)
        if cost == 1.0:
            assert faas.warm_pool is not None
            faas.warm_pool.instances.set_desired(rig.now_ns, 1, is_provisioned=False)
            rig.view.now_ns = rig.now_ns = 2_000 * MS
            assert rig.admission.admit(rig.ask(due_ms=5_000))


def test_shapes_that_a_request_cannot_pay_for_are_left_out() -> None:
    """Three sevenths of a GPU for 20 ms cost 42.9 units, a whole one for 12 ms 60."""
    half, whole = Shape(gpu_sevenths=3), Shape(gpu_sevenths=7)
    pool = replace(GPU, id=0, slots=7, gpu_sevenths=7, compute=Compute.PER_BATCH)
    variant = Variant(
        0, "f", 0, (0,), Profile((20 * MS,)), half, more_shapes=(ShapeTimes(whole, (12 * MS,)),)
    )
    function = Function(0, "f", (variant,))
    for cost, is_admitted in ((60.0, True), (59.0, False)):
        slo = Slo(100 * MS, cost_usd=cost * UNIT)
        rig = PlanningRig(App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (pool,)))
        assert rig.admission.admit(rig.ask(due_ms=15)) is is_admitted
        assert rig.admission.admit(rig.ask(due_ms=90))
