"""`headgate` with several gateways that share a pool and talk to nobody.

Every run is under all checkers, so each request has exactly one outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.events import InstanceStarted
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import Outcome
from headgate.metrics.columns import RunColumns
from headgate.policies import find_policy
from headgate.sim.checkers import all_checkers
from headgate.sim.clients import DrainWatcher
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import counts_of_means, expand_counts, mix, named, poisson

from .apps import MS, CheckedObserver

EXEC_MS = 40
POOL = Pool(0, "gpu", nodes=4, slots=2)
CAPACITY_PER_S = 8 * 1000 / EXEC_MS


def make_app(
    pool: Pool = POOL, *, latency_ms: float | None = 300, cold_start_ms: int = 0, warm: int = 0
) -> App:
    """Requests of 40 ms."""
    profile = Profile((EXEC_MS * MS,), cold_start_ns=cold_start_ms * MS)
    variant = Variant(0, "f", 0, (0,), profile, concurrency=pool.slots)
    function = Function(0, "f", (variant,), prewarm_nodes=warm)
    slo = Slo(NEVER_NS if latency_ms is None else int(latency_ms * MS), 0.99, rate_tolerance=1.5)
    return App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (pool,))


@dataclass(frozen=True)
class Run:
    columns: RunColumns
    observer: CheckedObserver

    def outcomes(self, from_ms: int = 0, until_ms: int = 1_000_000) -> list[int]:
        rows = self.columns.requests
        is_within = (rows.arrival_ns >= from_ms * MS) & (rows.arrival_ns < until_ms * MS)
        return [int(outcome) for outcome in rows.outcome[is_within]]

    def met(self, from_ms: int = 0) -> int:
        return self.outcomes(from_ms).count(Outcome.MET)

    def kept(self, from_ms: int = 0) -> float:
        """In time, of those that were admitted."""
        outcomes = self.outcomes(from_ms)
        return self.met(from_ms) / (len(outcomes) - outcomes.count(Outcome.REJECTED))

    def starts(self) -> int:
        """Instances that were started, as told to whoever ordered them."""
        return self.observer.count(InstanceStarted)


def run(app: App, per_s: float, gateways: int, *faults: Fault, seconds: float = 3.0) -> Run:
    plan = FaultPlan(faults).check(app, gateways)
    setup = Setup(
        app,
        find_policy("headgate"),
        schedulers=gateways,
        truth=GroundTruthConfig("lognormal", cv=0.1),
        faults=plan.actions(),
        records_spans=True,
        limit_ns=1_000 * SECOND_NS,
    )
    arrivals = named(poisson(per_s, int(seconds * SECOND_NS), seed=1), "p")
    observer = CheckedObserver(all_checkers(app, is_drained=True))
    until_ns = max(plan.end_ns, int(arrivals.times_ns[-1]) + 1)
    columns = simulate(setup, arrivals, clients=[DrainWatcher(until_ns)], observer=observer)
    observer.finish(columns)
    return Run(columns, observer)


@pytest.mark.parametrize("gateways", [2, 8])
def test_at_half_the_capacity_everything_is_in_time(gateways: int) -> None:
    found = run(make_app(), 0.5 * CAPACITY_PER_S, gateways)
    assert found.met() == len(found.outcomes())


@pytest.mark.parametrize("gateways", [2, 8])
def test_at_twice_the_capacity_promises_are_kept_and_the_pool_is_used(gateways: int) -> None:
    """Each of them promised the whole pool before: 8 gateways kept less than half."""
    alone = run(make_app(), 2 * CAPACITY_PER_S, 1, seconds=2.0)
    found = run(make_app(), 2 * CAPACITY_PER_S, gateways, seconds=2.0)
    assert found.kept() >= 0.97
    assert found.met() >= 0.9 * alone.met()


def test_a_pool_of_fewer_slots_than_gateways_is_used_by_all() -> None:
    app = make_app(Pool(0, "gpu", nodes=2))
    alone = run(app, 100.0, 1)
    found = run(app, 100.0, 8)
    assert found.kept(from_ms=1000) >= 0.9
    assert found.met() >= 0.8 * alone.met()


def test_the_most_urgent_task_of_all_gateways_is_likely_to_get_the_only_node() -> None:
    """Requests of 40 ms keep one node busy for 48 % of the time, and may take 200 ms.

    With eight gateways, nearly every request is alone at its own. The node has to be asked the
    sooner, the longer a request has waited, also if nothing waits beside the one that was refused.
    """
    app = make_app(Pool(0, "gpu", nodes=1), latency_ms=200)
    outcomes = run(app, 12.0, 8, seconds=240.0).outcomes(from_ms=40_000)
    missed = len(outcomes) - outcomes.count(Outcome.MET)
    assert missed <= 0.005 * len(outcomes)


def test_a_gateway_that_dies_leaves_its_part_to_the_others() -> None:
    """Three of four die after a second: the last one has the whole pool, and all of the load."""
    crashes = [Fault("crash_gateway", 1000 * MS, until_ns=NEVER_NS, gateway=i) for i in range(3)]
    found = run(make_app(), 2 * CAPACITY_PER_S, 4, *crashes)
    alone = run(make_app(), 2 * CAPACITY_PER_S, 1)
    assert found.met(from_ms=1500) >= 0.9 * alone.met(from_ms=1500)
    assert found.kept(from_ms=1500) >= 0.97


def test_what_has_no_objective_is_refused_by_busy_nodes_and_never_fails() -> None:
    """Twice the capacity: it waits until the load is over, however often it is refused."""
    found = run(make_app(latency_ms=None), 2 * CAPACITY_PER_S, 4, seconds=1.0)
    assert found.outcomes().count(Outcome.MET) == len(found.outcomes())


def run_with_best_effort(promised: float, best_effort: float, gateways: int) -> RunColumns:
    """Eight seconds of requests with an objective and without, as parts of the capacity."""
    profile = Profile((EXEC_MS * MS,))
    function = Function(0, "f", (Variant(0, "f", 0, (0,), profile, concurrency=POOL.slots),))
    slos = {"p": Slo(300 * MS, 0.99), "batch": Slo(NEVER_NS, 0.99)}
    pipelines = tuple(
        Pipeline(id, name, (Stage(function),), slo) for id, (name, slo) in enumerate(slos.items())
    )
    setup = Setup(
        App((function,), pipelines, (POOL,)),
        find_policy("headgate"),
        schedulers=gateways,
        truth=GroundTruthConfig("lognormal", cv=0.1),
        limit_ns=1_000 * SECOND_NS,
    )
    loads = {"p": promised, "batch": best_effort}
    arrivals = [
        named(poisson(load * CAPACITY_PER_S, 8 * SECOND_NS, seed=seed), name)
        for seed, (name, load) in enumerate(loads.items())
        if load > 0
    ]
    return simulate(setup, mix(arrivals))


def in_time(columns: RunColumns) -> float:
    """Of the requests with an objective, after the first second."""
    rows = columns.requests
    is_promised = (rows.pipeline == 0) & (rows.arrival_ns > SECOND_NS)
    return float((rows.outcome[is_promised] == Outcome.MET).mean())


def best_effort_throughput(columns: RunColumns) -> float:
    """What ends of it while requests arrive, as a part of the capacity."""
    rows, (from_ns, until_ns) = columns.requests, (SECOND_NS, 8 * SECOND_NS)
    ends = (rows.pipeline == 1) & (rows.finished_ns > from_ns) & (rows.finished_ns <= until_ns)
    return float(ends.sum()) / (CAPACITY_PER_S * (until_ns - from_ns) / SECOND_NS)


@pytest.mark.parametrize("gateways", [2, 8])
def test_best_effort_alone_has_the_whole_pool(gateways: int) -> None:
    """Each gateway left all slots to promises of the others, which there were none of."""
    found = run_with_best_effort(0.0, 1.5, gateways)
    assert best_effort_throughput(found) >= 0.95


@pytest.mark.parametrize("gateways", [2, 8])
@pytest.mark.parametrize(("promised", "left"), [(0.1, 0.75), (0.8, 0.12)])
def test_best_effort_gets_what_promises_leave(gateways: int, promised: float, left: float) -> None:
    """A flood of best effort at all gateways makes no promise late, and no slot stays idle."""
    found = run_with_best_effort(promised, 1.5, gateways)
    assert in_time(found) >= 0.98
    assert best_effort_throughput(found) >= left


def test_gateways_start_what_a_node_lacks_once() -> None:
    """All find four empty nodes at the same moment."""
    found = run(make_app(cold_start_ms=200, warm=4), 0.5 * CAPACITY_PER_S, 4)
    assert found.starts() == 4
    assert found.kept(from_ms=500) == 1.0


def test_gateways_rent_what_all_of_them_need_together() -> None:
    """80 requests/s are 3.2 Erlangs, of which each gateway sees a quarter."""
    pool = Pool(0, "gpu", nodes=24, is_elastic=True)
    app = make_app(pool, cold_start_ms=200, warm=4)
    alone = run(app, 80.0, 1, seconds=6.0)
    found = run(app, 80.0, 4, seconds=6.0)
    assert found.met(from_ms=3000) == len(found.outcomes(from_ms=3000))
    assert found.starts() <= 1.5 * alone.starts()


def test_what_gateways_rented_for_a_burst_is_released_after_it() -> None:
    """A second with 240 requests more, then a minute with 5 per second: one node is enough."""
    pool = Pool(0, "gpu", nodes=24, is_elastic=True, cpu_usd_per_hour=1.0)
    app = make_app(pool, cold_start_ms=200)
    burst = named(poisson(240.0, SECOND_NS, seed=3), "p")
    arrivals = mix([burst, named(poisson(5.0, 60 * SECOND_NS, seed=4), "p")])
    rented_ns = {}
    for gateways in (1, 4):
        setup = Setup(app, find_policy("headgate"), schedulers=gateways)
        uses = simulate(setup, arrivals).instances
        rented_ns[gateways] = sum(use.end_ns - use.start_ns for use in uses)
    assert rented_ns[4] <= 1.25 * rented_ns[1]


@pytest.mark.parametrize("gateways", [1, 4])
def test_nodes_are_rented_before_a_step_that_recurs(gateways: int) -> None:
    """20 s of every minute have eight times the load, which needs five nodes more at least, and
    a start takes 5 s. The first two steps are a surprise; the others lose nothing.
    """
    pool = Pool(0, "gpu", nodes=24, is_elastic=True, cpu_usd_per_hour=1.0)
    app = make_app(pool, cold_start_ms=5000, warm=1)
    rates = [120.0 if second % 60 >= 40 else 15.0 for second in range(240)]
    arrivals = named(expand_counts(counts_of_means(np.array(rates), draw="poisson")), "p")
    columns = simulate(Setup(app, find_policy("headgate"), schedulers=gateways), arrivals)
    found = Run(columns, CheckedObserver(all_checkers(app)))
    for step_s, is_known in ((40, False), (100, False), (160, True), (220, True)):
        starts_s = [use.start_ns / SECOND_NS - step_s for use in columns.instances]
        assert any(-10 <= start_s < -1 for start_s in starts_s) is is_known
        outcomes = found.outcomes(step_s * 1000, (step_s + 10) * 1000)
        assert (outcomes.count(Outcome.MET) >= 0.99 * len(outcomes)) is is_known
