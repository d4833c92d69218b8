"""DAG admission: promises, joins, choices, rejections, and what a lost node leaves behind."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.events import BatchFinished, InstanceStarted, NodeJoined, RequestArrived
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Tier, Variant
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome, Rejection
from headgate.policies import find_policy
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals

MS = 1_000_000
CPU = Pool(0, "cpu", Tier.DEDICATED, usd_per_hour=3.6)  # one unit of 1e-6 USD per millisecond
GPU = Pool(1, "gpu", Tier.GPU, usd_per_hour=18.0)


def app_of(
    slo: Slo, *, batch_max: int = 1, load_ms: int = 0, cpu: Pool = CPU, gpu: Pool = GPU
) -> App:
    """A function of 10 ms and 10 units on the CPU, 4 ms and 20 units on the GPU."""
    variants = tuple(
        Variant(
            pool,
            f"f/{pool}",
            0,
            (pool,),
            Profile(
                tuple((ms + extra) * MS for extra in range(batch_max)), cold_start_ns=load_ms * MS
            ),
        )
        for pool, ms in enumerate((10, 4))
    )
    function = Function(0, "f", variants)
    return App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (cpu, gpu))


def start(app: App, **settings: object) -> Scheduler:
    kind = find_policy("dag_admission")
    scheduler = Scheduler(app, kind, kind.config(**settings), validate=True)
    for node, pool in enumerate(app.pools):
        scheduler.handle(0, NodeJoined(node, pool.id, pool.name))
    return scheduler


def warm(scheduler: Scheduler, actions: list[Action], at_ns: int = 0) -> list[Action]:
    """Have every start that was ordered end at once, and return what follows."""
    after: list[Action] = []
    for action in actions:
        if isinstance(action, StartInstance):
            assert action.node_id is not None
            event = InstanceStarted(action.instance_id, action.node_id)
            after += scheduler.handle(at_ns, event)
    return after


def arrive(scheduler: Scheduler, at_ms: int, request_id: int) -> list[Action]:
    actions = scheduler.handle(at_ms * MS, RequestArrived(request_id, 0))
    return actions + warm(scheduler, actions, at_ms * MS)


def pools_of(actions: list[Action]) -> list[int]:
    return [action.pool_id for action in actions if isinstance(action, Dispatch)]


def settled(actions: list[Action]) -> list[Settle]:
    return [action for action in actions if isinstance(action, Settle)]


def test_a_request_that_nothing_can_do_in_time_is_rejected_with_its_latency() -> None:
    """Deadline 12 ms: two nodes take one each, the GPU two more behind its own, and no more."""
    scheduler = start(app_of(Slo(12 * MS)), choose="fastest")
    found = [arrive(scheduler, 0, request) for request in range(5)]
    assert pools_of([each for actions in found for each in actions]) == [1, 0]
    rejected = [settle for actions in found for settle in settled(actions)]
    assert [settle.request_id for settle in rejected] == [4]
    (settle,) = rejected
    assert settle.settlement.outcome == Outcome.REJECTED
    assert settle.settlement.reason == Rejection.OVERLOADED
    assert settle.settlement.predicted_ns == 16 * MS


@pytest.mark.parametrize(
    ("slo", "reason"),
    [(Slo(3 * MS), Rejection.INFEASIBLE), (Slo(9 * MS, cost_usd=15e-6), Rejection.INFEASIBLE)],
)
def test_an_objective_that_no_placement_meets_is_infeasible(slo: Slo, reason: str) -> None:
    """The second needs the GPU to be in time, which costs 20 units, and may cost 15."""
    (settle,) = settled(arrive(start(app_of(slo)), 0, 0))
    assert settle.settlement.reason == reason
    assert settle.settlement.predicted_ns == 4 * MS  # of the fastest placement


@pytest.mark.parametrize(("choose", "pool"), [("cheapest", 0), ("fastest", 1), ("least_loaded", 1)])
def test_the_user_chooses_among_valid_placements(choose: str, pool: int) -> None:
    assert pools_of(arrive(start(app_of(Slo(50 * MS)), choose=choose), 0, 0)) == [pool]


def test_a_cost_objective_excludes_the_dear_placement() -> None:
    scheduler = start(app_of(Slo(25 * MS, cost_usd=15e-6)), choose="fastest")
    found = [arrive(scheduler, 0, request) for request in range(3)]
    assert pools_of([each for actions in found for each in actions]) == [0]  # the second waits
    assert [len(settled(actions)) for actions in found] == [0, 0, 1]


def test_what_waits_is_joined_as_long_as_nobody_is_late() -> None:
    """One node, 10 ms and 1 ms per further item: behind the first, four share a batch."""
    app = app_of(Slo(23 * MS, cost_usd=15e-6), batch_max=8)
    scheduler = start(app)
    for request in range(6):
        actions = arrive(scheduler, 0, request)
        assert len(settled(actions)) == (request == 5)  # 10 + 13 ms would do, 10 + 14 would not
    done = scheduler.handle(10 * MS, BatchFinished(0))
    (dispatch,) = [action for action in done if isinstance(action, Dispatch)]
    assert dispatch.items == 4


def test_a_load_that_takes_too_long_is_begun_for_those_that_follow() -> None:
    scheduler = start(app_of(Slo(15 * MS), load_ms=20))
    actions = scheduler.handle(0, RequestArrived(0, 0))
    (settle,) = settled(actions)
    assert settle.settlement.reason == Rejection.OVERLOADED
    assert settle.settlement.predicted_ns > 20 * MS
    assert any(isinstance(action, StartInstance) for action in actions)
    warm(scheduler, actions, 20 * MS)
    assert not settled(arrive(scheduler, 21, 1))


@pytest.mark.parametrize("latency_ms", [1_000, 60])
def test_what_was_promised_on_a_node_that_dies_is_promised_anew(latency_ms: int) -> None:
    """Six requests on two nodes, one of which dies: each is answered, in time or late."""
    gpu = Pool(1, "gpu", Tier.GPU, nodes=2, usd_per_hour=18.0)
    slo = Slo(latency_ms * MS, cost_usd=inf)
    app = app_of(slo, cpu=Pool(0, "cpu", Tier.DEDICATED, nodes=0), gpu=gpu)
    count = 12
    zeros = np.zeros(count, dtype=np.int32)
    times_ns = np.full(count, MS, dtype=np.int64)
    arrivals = Arrivals(times_ns, 2 * MS, zeros, zeros, ("p",), ("client",))
    plan = FaultPlan((Fault("crash", 6 * MS, until_ns=500 * MS, node=0),))
    kind = find_policy("dag_admission")
    setup = Setup(app, kind, validate=True, faults=plan.actions())
    outcomes = simulate(setup, arrivals).requests.outcome
    # The one that was running alone on the node may have killed it, and is not tried again.
    lost = int((outcomes == Outcome.FAILED).sum())
    assert lost <= 1
    assert int((outcomes <= Outcome.LATE).sum()) + lost == count
