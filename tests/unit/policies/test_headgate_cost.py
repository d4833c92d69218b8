"""The default policy under cost objectives: no batch costs its requests more than they may cost."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import final

import numpy as np
import pytest

from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.clock import NEVER_NS
from headgate.core.events import (
    BatchFinished,
    Event,
    InstanceStarted,
    NodeJoined,
    RequestArrived,
    RequestCancelled,
)
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Tier, Variant
from headgate.core.records import STAGES_MAX
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome, Rejection
from headgate.lab.experiments.dag_cluster.environment import UNIT_USD, CostObserver
from headgate.lab.experiments.dag_cluster.optimum import optimum, served_by, small_case
from headgate.lab.harness import Environment, PolicyCase
from headgate.policies import find_policy
from headgate.workload import assign
from headgate.workload.arrivals import arrivals_at

MS = 1_000_000
UNIT = 1e-6
CPU = Pool(0, "cpu", nodes=2, usd_per_hour=UNIT * 3_600_000)
GPU = Pool(1, "gpu", Tier.GPU, nodes=1, usd_per_hour=5 * UNIT * 3_600_000)
ON_CPU = Profile((20 * MS, 39 * MS, 58 * MS, 76 * MS))
ON_GPU = Profile((8 * MS, 9 * MS, 10 * MS, 11 * MS))


def make_app(*costs: float, latency_ms: float = 120, stages: int = 1) -> App:
    """Pipelines of the same functions with different cost objectives, in units."""
    functions = tuple(
        Function(
            id,
            f"f{id}",
            tuple(
                Variant(2 * id + pool, f"f{id}/{pool}", id, (pool,), profile)
                for pool, profile in enumerate((ON_CPU, ON_GPU))
            ),
        )
        for id in range(stages)
    )
    chain = tuple(Stage(f, (f.id - 1,) if f.id else ()) for f in functions)
    latency_ns = NEVER_NS if latency_ms == inf else int(latency_ms * MS)
    return App(
        functions,
        tuple(
            Pipeline(i, f"p{i}", chain, Slo(latency_ns, cost_usd=cost * UNIT))
            for i, cost in enumerate(costs)
        ),
        (CPU, GPU),
    )


@final
class CostRig:
    """A Scheduler with two CPU nodes and a GPU node, on which starts take no time."""

    def __init__(self, app: App) -> None:
        self.scheduler = Scheduler(app, find_policy("headgate"), validate=True)
        for node_id, pool_id in enumerate((0, 0, 1)):
            self.handle(0, NodeJoined(node_id, pool_id, f"n{node_id}"))

    def handle(self, now_ns: int, event: Event) -> list[Action]:
        actions = self.scheduler.handle(now_ns, event)
        for action in list(actions):
            if isinstance(action, StartInstance) and action.node_id is not None:
                started = InstanceStarted(action.instance_id, action.node_id)
                actions = actions + self.scheduler.handle(now_ns, started)
        return actions


def pools(actions: list[Action]) -> list[int]:
    return [action.pool_id for action in actions if isinstance(action, Dispatch)]


def settled(actions: list[Action]) -> list[tuple[int, str]]:
    settles = [action for action in actions if isinstance(action, Settle)]
    return [(each.settlement.outcome, each.settlement.reason) for each in settles]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("latency_ms", [60, 120, inf])
def test_nobody_pays_more_than_they_may(stages: int, latency_ms: float) -> None:
    """Three classes at twice the capacity: any cost, what a GPU alone costs, CPUs only."""
    costs = (1e6, 41.0 * stages, 21.0 * stages)
    app = make_app(*costs, latency_ms=latency_ms, stages=stages)
    times_ns = np.arange(400, dtype=np.int64) * (4 * MS)
    arrivals = arrivals_at(times_ns, 1_600 * MS)
    weights = {"p0": 1.0, "p1": 1.0, "p2": 1.0}
    environment = Environment(app, assign(arrivals, weights, {app.clients[0].name: 1.0}, seed=3))
    observer = CostObserver(app, ())
    run = environment.simulate(PolicyCase("headgate"), 0, observer=observer)
    answered = [0, 0, 0]
    for id, outcome in enumerate(run.requests.outcome.tolist()):
        pipeline = int(run.requests.pipeline[id])
        assert observer.usd.get(id, 0.0) <= costs[pipeline] * UNIT * (1 + 1e-5)
        answered[pipeline] += outcome in (Outcome.MET, Outcome.LATE)
    assert min(answered) > 0


def test_a_task_moves_to_no_pool_that_it_cannot_pay_for() -> None:
    """Both CPUs are busy and the GPU is free: who can pay it goes there, who cannot waits."""
    rig = CostRig(make_app(1e6, 25.0, latency_ms=200))
    for request_id in range(2):
        assert pools(rig.handle(0, RequestArrived(request_id, 1))) == [0]
    assert pools(rig.handle(1, RequestArrived(2, 1))) == []
    assert pools(rig.handle(1, RequestArrived(3, 0))) == [1]
    assert pools(rig.handle(8 * MS + 1, BatchFinished(2))) == []  # the GPU is free again
    assert pools(rig.handle(20 * MS, BatchFinished(0))) == [0]


def test_best_effort_waits_for_what_it_can_pay_for_and_delays_nobody() -> None:
    rig = CostRig(make_app(25.0, inf, latency_ms=inf))
    for request_id in range(2):
        rig.handle(0, RequestArrived(request_id, 0))
    assert pools(rig.handle(1, RequestArrived(2, 0))) == []
    assert pools(rig.handle(2, RequestArrived(3, 1))) == [1]
    assert pools(rig.handle(20 * MS, BatchFinished(0))) == [0]


def test_best_effort_that_can_pay_for_nothing_is_refused() -> None:
    rig = CostRig(make_app(19.0, latency_ms=inf))
    actions = rig.handle(0, RequestArrived(0, 0))
    assert settled(actions) == [(Outcome.REJECTED, Rejection.OVER_COST)]


def test_a_cancelled_task_leaves_its_queue() -> None:
    """Of two that wait for a CPU the first is cancelled: the second goes when one is free."""
    rig = CostRig(make_app(25.0, latency_ms=inf))
    for request_id in range(4):
        rig.handle(request_id, RequestArrived(request_id, 0))
    rig.handle(10, RequestCancelled(2))
    actions = rig.handle(20 * MS, BatchFinished(0))
    assert [a.task_ids for a in actions if isinstance(a, Dispatch)] == [[3 * STAGES_MAX]]
    assert pools(rig.handle(21 * MS, BatchFinished(1))) == []


def test_a_request_may_have_an_objective_of_its_own() -> None:
    """It replaces that of the pipeline, whether it is more or less."""
    rig = CostRig(make_app(25.0, latency_ms=15))
    assert settled(rig.handle(0, RequestArrived(0, 0))) == [(Outcome.REJECTED, Rejection.OVER_COST)]
    assert pools(rig.handle(0, RequestArrived(1, 0, cost_usd=41 * UNIT))) == [1]
    refused = rig.handle(0, RequestArrived(2, 0, cost_usd=1 * UNIT))
    assert settled(refused) == [(Outcome.REJECTED, Rejection.OVER_COST)]


def test_a_cost_objective_that_forbids_nothing_changes_no_decision() -> None:
    """The same actions with a very large objective as with none."""
    logs = []
    for cost in (inf, 1e9):
        app = make_app(cost, latency_ms=80, stages=2)
        arrivals = arrivals_at(np.arange(150, dtype=np.int64) * (5 * MS), 800 * MS)
        workload = assign(arrivals, {"p0": 1.0}, {app.clients[0].name: 1.0}, seed=0)
        run = Environment(app, workload).simulate(PolicyCase("headgate"), 0)
        logs.append((run.requests.outcome.tolist(), run.requests.finished_ns.tolist()))
    assert logs[0] == logs[1]


def test_small_cases_are_within_both_objectives_and_nearer_to_the_optimum() -> None:
    """Nothing that is answered in time costs too much; without the objective, some of it does."""
    served = unlimited = best = 0
    for seed in range(12):
        case = small_case(seed)
        environment = case.environment()
        observer = CostObserver(environment.app, ())
        run = environment.simulate(PolicyCase("headgate"), 0, observer=observer)
        met = sum(outcome == Outcome.MET for outcome in run.requests.outcome.tolist())
        within = served_by(PolicyCase("headgate"), case)
        assert within == met
        served += within
        best += optimum(case)
        app = environment.app
        free = replace(app, pipelines=(replace(app.pipelines[0], slo=Slo(case.latency_ms * MS)),))
        observer = CostObserver(app, ())
        run = replace(environment, app=free).simulate(PolicyCase("headgate"), 0, observer=observer)
        limit_usd = case.cost_units * UNIT_USD * (1 + 1e-9)
        unlimited += sum(
            outcome == Outcome.MET and observer.usd[id] <= limit_usd
            for id, outcome in enumerate(run.requests.outcome.tolist())
        )
    assert unlimited < served <= best
