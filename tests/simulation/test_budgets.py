"""Budgets of pay-per-call pools, in random applications over minutes of simulated time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest

from headgate.core.actions import Dispatch, KeepWarm
from headgate.core.circuit_breaker import DAY_NS
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.events import BatchFinished, BatchRefused, Refusal
from headgate.core.model import (
    App,
    BreakerConfig,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.policy import PolicyConfig
from headgate.policies import find_policy
from headgate.sim.checkers import Budgets, all_checkers
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, build_scheduler, simulate
from headgate.workload import Arrivals, constant_column

from .apps import CheckedObserver
from .checker_runs import Entry, does, violations

S = SECOND_NS
POLICIES = ("headgate", "threshold", "spock", "mark", "spandana", "serverless_only")
CLOUD_ROW = 2  # among the resources, behind two nodes


def call_usd(app: App) -> float:
    """Return the cost of a call with a cold start."""
    (cloud,) = [pool for pool in app.pools if pool.faas is not None]
    assert cloud.faas is not None
    profile = app.variants[1].profile
    return cloud.faas.usd(profile.cold_start_ns + profile.exec_ns[0] + 2 * cloud.network_ns)


def random_app(rng: Random) -> App:
    """Return an app with two nodes, perhaps rented, and a platform with budgets for few calls."""
    platform = FaasPlatform(
        1 << 30,
        concurrency_max=rng.choice((2, 20)),
        keep_alive_ns=rng.choice((0, 5, 40, 600)) * S,
        usd_per_gb_s=1e-3,
        usd_per_request=1e-4,
        bills_cold_start=rng.random() < 0.7,
        provisioning_ns=20 * S,
        provisioned_usd_per_gb_s=rng.choice((0.0, 1e-6, 1e-5)),
        provisioned_run_usd_per_gb_s=5e-4,
    )
    exec_ns = rng.randint(200, 2_000) * S // 1_000
    on_node = Profile((exec_ns,), slowdown=(1.0, 1.6, 2.2))
    as_call = Profile((exec_ns,), cold_start_ns=rng.choice((0, 500, 3_000)) * S // 1_000)
    variants = (
        Variant(0, "node", 0, (0,), on_node, concurrency=3),
        Variant(1, "call", 0, (1,), as_call),
    )
    function = Function(0, "f", variants, prewarm_nodes=1)
    nodes = Pool(0, "node", Tier.DEDICATED, nodes=2, slots=3, usd_per_hour=1.0)
    if rng.random() < 0.5:
        nodes = replace(nodes, is_elastic=True, boot_ns=10 * S)
    cloud = Pool(1, "cloud", Tier.SERVERLESS, nodes=0, network_ns=10**7, faas=platform)
    slo = Slo(rng.choice((4, 10, 60)) * S, is_hard=rng.random() < 0.5)
    app = App((function,), (Pipeline(0, "p", (Stage(function),), slo),), (nodes, cloud))
    usd = call_usd(app)
    breaker = BreakerConfig(
        usd_per_minute=rng.choice((inf, 3 * usd, 12 * usd)),
        usd_per_day=rng.choice((inf, 20 * usd, 80 * usd)),
    )
    return replace(app, pools=(nodes, replace(cloud, breaker=breaker)))


def random_arrivals(rng: Random) -> Arrivals:
    """Return bursts over four minutes."""
    times_ns: list[int] = []
    for _ in range(rng.randint(3, 12)):
        at_ns = rng.randrange(4 * MINUTE_NS)
        times_ns += [at_ns + rng.randrange(5 * S) for _ in range(rng.randint(1, 25))]
    zeros = constant_column(len(times_ns))
    times = np.array(sorted(times_ns), dtype=np.int64)
    return Arrivals(times, 10 * MINUTE_NS, zeros, zeros, ("p",), ("client",))


def config_of(policy: str, rng: Random) -> PolicyConfig:
    kind = find_policy(policy)
    warm = {} if policy == "headgate" else {"warm_instances": rng.choice((0, 1, 6))}
    return kind.config(**warm)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", POLICIES)
def test_no_budget_is_exceeded_by_more_than_one_call(policy: str, seed: int) -> None:
    """Calls take their expected time. At least the platform's bill counts against the budgets.

    A replay decides the same.
    """
    rng = Random(f"{policy}/{seed}")
    app, arrivals = random_app(rng), random_arrivals(rng)
    setup = Setup(app, find_policy(policy), config_of(policy, rng), seed=seed, validate=True)
    observer = CheckedObserver(all_checkers(app, is_drained=False))
    columns = simulate(setup, arrivals, observer=observer)
    observer.finish(columns)
    paid, cloud = paid_usd(app, observer), app.pools[1]
    for (kind, _), usd in paid.items():
        budget_usd = cloud.breaker.usd_per_minute if kind == "minute" else cloud.breaker.usd_per_day
        assert usd <= budget_usd + call_usd(app) * (1 + 1e-9)
    scheduler = build_scheduler(setup, 0)
    for now_ns, event in observer.events:
        scheduler.handle(now_ns, event)
    breaker = scheduler.view.breakers[1]
    assert breaker is not None
    bill_usd = columns.resources[CLOUD_ROW].usage_usd
    assert bill_usd <= breaker.spent_usd(columns.end_ns) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("policy", POLICIES)
def test_slow_calls_are_charged_in_full_and_stop_at_the_budget(
    policy: str,
) -> None:
    """The budget may be exceeded by the calls in flight only, which the checkers verify."""
    for seed in range(4):
        rng = Random(f"slow/{policy}/{seed}")
        app, arrivals = random_app(rng), random_arrivals(rng)
        truth = GroundTruthConfig(distribution="lognormal", cv=1.0)
        config = config_of(policy, rng)
        setup = Setup(app, find_policy(policy), config, seed=seed, truth=truth, validate=True)
        observer = CheckedObserver(all_checkers(app, is_drained=False))
        observer.finish(simulate(setup, arrivals, observer=observer))


def test_random_cases_cover_all_kinds() -> None:
    """Budgets are exhausted and renewed, instances are kept warm both ways, calls are made."""
    calls, warm, closed = 0, Counter[bool](), 0
    for seed in range(40):
        rng = Random(f"headgate/{seed}")
        app, arrivals = random_app(rng), random_arrivals(rng)
        observer = CheckedObserver(all_checkers(app, is_drained=False))
        simulate(Setup(app, find_policy("headgate")), arrivals, observer=observer)
        calls += sum(isinstance(a, Dispatch) and a.node_id is None for a in observer.actions)
        warm.update(
            a.is_provisioned for a in observer.actions if isinstance(a, KeepWarm) and a.count
        )
        closed += any(
            getattr(event, "key", None) == ("unblock_pool", 1) for _, event in observer.events
        )
    assert calls > 100
    assert warm[True] > 5
    assert warm[False] > 5
    assert closed > 10


def paid_usd(app: App, observer: CheckedObserver) -> dict[tuple[str, int], float]:
    """Return the cost of calls by the minute and the day in which they ended."""
    platform = app.pools[1].faas
    assert platform is not None
    paid: dict[tuple[str, int], float] = {}
    sent: dict[int, int] = {}
    for now_ns, event, actions in observer.entries:
        if isinstance(event, BatchFinished) and event.batch_id in sent:
            usd = platform.usd(now_ns - sent[event.batch_id])
            for key in (("minute", now_ns // MINUTE_NS), ("day", now_ns // DAY_NS)):
                paid[key] = paid.get(key, 0.0) + usd
        for action in actions:
            if isinstance(action, Dispatch) and action.node_id is None:
                sent[action.batch_id] = now_ns
    return paid


def budget_app(breaker: BreakerConfig) -> App:
    """Return an app in which a call costs $1, and a provisioned instance $1 per second."""
    platform = FaasPlatform(1 << 30, usd_per_request=1.0, provisioned_usd_per_gb_s=1.0)
    variant = Variant(0, "v", 0, (0,), Profile((10,)))
    function = Function(0, "f", (variant,))
    cloud = Pool(0, "cloud", Tier.SERVERLESS, nodes=0, faas=platform, breaker=breaker)
    return App((function,), (Pipeline(0, "p", (Stage(function),)),), (cloud,))


def test_the_checker_reports_a_call_beyond_the_budget() -> None:
    app = budget_app(BreakerConfig(usd_per_minute=1.5))
    calls = [Dispatch(id, 0, [256 * id], 1, 0, None, None) for id in range(3)]
    end: Entry = (5, BatchFinished(0), [])
    refused: Entry = (5, BatchRefused(0, Refusal.THROTTLED), [])
    assert violations(Budgets(app), does(*calls[:2])) == ""
    assert "$2.0 of $1.5 are spent" in violations(Budgets(app), does(*calls))
    assert "are spent" in violations(Budgets(app), does(*calls[:2]), end, does(calls[2], now_ns=6))
    assert violations(Budgets(app), does(*calls[:2]), refused, does(calls[2], now_ns=6)) == ""
    late: Entry = (MINUTE_NS - 1, BatchFinished(0), [])
    other: Entry = (MINUTE_NS - 1, BatchFinished(1), [])
    next_minute = does(calls[2], now_ns=MINUTE_NS)
    assert violations(Budgets(app), does(*calls[:2]), late, other, next_minute) == ""


def test_the_checker_counts_the_cost_of_warm_instances() -> None:
    app = budget_app(BreakerConfig(usd_per_day=9.5))
    call = Dispatch(0, 0, [0], 1, 0, None, None)
    warm = does(KeepWarm(0, 0, 1, True), now_ns=S)
    assert violations(Budgets(app), warm, does(call, now_ns=10 * S)) == ""
    assert "are spent" in violations(Budgets(app), warm, does(call, now_ns=11 * S))
    cold = does(KeepWarm(0, 0, 0, True), now_ns=5 * S)
    assert violations(Budgets(app), warm, cold, does(call, now_ns=11 * S)) == ""
    pinged = does(KeepWarm(0, 0, 10, False), now_ns=S)
    assert "are spent" in violations(Budgets(app), pinged, does(call, now_ns=2 * S))
