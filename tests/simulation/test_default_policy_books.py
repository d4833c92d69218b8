"""What the default policy has booked is released again, whatever becomes of the requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.clock import NEVER_NS
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.core.states import NODE_UP
from headgate.policies import find_policy
from headgate.policies.headgate import Headgate
from headgate.sim import fuzz
from headgate.sim.fuzz import RandomCase, fuzz_kind, random_case

HEADGATE = find_policy("headgate")


def run(seed: int) -> tuple[fuzz.FuzzReport, Headgate]:
    """Run the random case of a seed under all checkers; the policy of its first run."""
    made: list[Headgate] = []

    def __init__(self: Headgate, context: Context, config: PolicyConfig) -> None:
        HEADGATE.make.__init__(self, context, config)
        made.append(self)

    recorded = type("Recorded", (HEADGATE.make,), {"__init__": __init__})
    kind = PolicyKind(recorded, HEADGATE.config, HEADGATE.capabilities)
    return fuzz_kind("headgate", kind, seed), made[0]


def check_books(policy: Headgate) -> None:
    """All requests have ended: nothing waits, and nothing is promised."""
    queues, builds, view = policy._queues, policy._builds, policy.view
    for queue in (*queues.promised, *(queue for own in queues.best_effort for queue in own)):
        assert (queue.items, queue.head()) == (0, None)
    for build in builds.all:
        assert (build.pending_items, build.pending_ns, build.calendar.work_ns) == (0, 0, 0)
        assert build.calendar.batches == pytest.approx(0.0, abs=1e-6)
        if build.warm_pool is not None and not view.batches:
            assert build.warm_pool.instances.busy == 0
            assert build.calendar.busy_ns(view.now_ns) == 0
    assert not policy._admission._promises
    for pool in view.app.pools:
        if pool.faas is None and not pool.is_elastic:
            up = sum(1 for n in view.nodes.values() if n.pool is pool and n.state == NODE_UP)
            assert builds.nodes.node_count(pool.id) in (0, up)  # 0: no function runs there


@pytest.mark.parametrize("seed", range(40))
def test_nothing_stays_booked(seed: int) -> None:
    """Cancelled, expired, failed, returned and skipped: in random cases with random faults."""
    report, policy = run(seed)
    assert report.is_ok, str(report)
    check_books(policy)


@pytest.mark.parametrize("seed", range(100, 120))
def test_nothing_stays_booked_where_admission_is_only_observed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objectives that are too tight: most of what goes on is best effort."""

    def tightened(capabilities: Capabilities, seed: int) -> RandomCase:
        case = random_case(capabilities, seed)
        limits = replace(case.app.limits, admission="observe")
        pipelines = tuple(
            pipeline
            if pipeline.slo.latency_ns == NEVER_NS
            else replace(
                pipeline, slo=replace(pipeline.slo, latency_ns=pipeline.slo.latency_ns // 5)
            )
            for pipeline in case.app.pipelines
        )
        return replace(case, app=replace(case.app, limits=limits, pipelines=pipelines))

    monkeypatch.setattr(fuzz, "random_case", tightened)
    report, policy = run(seed)
    assert report.is_ok, str(report)
    check_books(policy)
