"""`swayam` and `static_partition` in the simulator, with one frontend and with many.

Every run is under all checkers, so each request has exactly one outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest

from headgate.config import declare
from headgate.core.actions import Action, Dispatch
from headgate.core.clock import SECOND_NS
from headgate.core.events import (
    Event,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    NodeJoined,
    TimerFired,
)
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.policy import Context, Policy, PolicyKind
from headgate.core.states import Outcome
from headgate.metrics.columns import RunColumns
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.response_time import least_backends
from headgate.planning.autoscaling.waiting_time import RandomRetry
from headgate.policies import find_policy
from headgate.policies.swayam import Config, Swayam
from headgate.sim.checkers import all_checkers
from headgate.sim.clients import DrainWatcher
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals, mix, named, poisson, stepped

from .apps import MS, CheckedObserver
from .worlds import Stream, run_world

EXEC_MS = 20
SETUP_MS = 400
CONFIG = Config(plan_every_ns=250 * MS, window_ns=5 * SECOND_NS, bucket_ns=250 * MS)


def make_app(*, models: int = 1, nodes: int = 24, warm: int = 4, latency_ms: int = 100) -> App:
    """Models of 20 ms, to be answered within five times that, also at twice the rate."""
    functions = []
    for id in range(models):
        profile = Profile((EXEC_MS * MS,), cold_start_ns=SETUP_MS * MS)
        variant = Variant(
            id, f"v{id}", id, (0,), profile, unused_after_ns=SECOND_NS, retire_after_ns=SECOND_NS
        )
        functions.append(Function(id, f"f{id}", (variant,), prewarm_nodes=warm))
    slo = Slo(latency_ms * MS, 0.99, rate_tolerance=2.0)
    pipelines = tuple(Pipeline(f.id, f"p{f.id}", (Stage(f),), slo) for f in functions)
    return App(tuple(functions), pipelines, (Pool(0, "gpu", nodes=nodes),))


class NeedsRecorder(CheckedObserver):
    """Records n of every frontend, for all models, whenever it plans."""

    policies: list[Swayam]

    def attach(self, policies: list[Swayam]) -> None:
        self.policies = policies
        self.needs: list[tuple[int, int, tuple[int, ...]]] = []  # time, Scheduler, n by model

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        super().on_event(now_ns, scheduler, event, actions)
        if isinstance(event, TimerFired) and event.key == ("plan", 0):
            policy = self.policies[scheduler]
            if isinstance(policy, Swayam):
                self.needs.append((now_ns, scheduler, tuple(policy.needs)))


@dataclass(frozen=True)
class Run:
    columns: RunColumns
    observer: NeedsRecorder

    def share_met(self, from_ms: int = 0) -> float:
        rows = self.columns.requests
        recent = rows.outcome[rows.arrival_ns >= from_ms * MS]
        return float((recent == Outcome.MET).mean())

    def needs(self, from_ms: int, until_ms: int, model: int = 0) -> list[int]:
        """What all frontends took for n of a model within this time."""
        window = range(from_ms * MS, until_ms * MS)
        return [each[model] for at_ns, _, each in self.observer.needs if at_ns in window]

    def peak(self) -> int:
        """The largest number of backends that there were at a time."""
        alive: set[int] = set()
        peak = 0
        for _, event in self.observer.events:
            if isinstance(event, InstanceStarted):
                alive.add(event.instance_id)
                peak = max(peak, len(alive))
            elif isinstance(event, InstanceStopped):
                alive.discard(event.instance_id)
        return peak

    def instances_at_start(self, scheduler: int) -> int:
        """Return how many instances a Scheduler was told of with the nodes."""
        handled = [event for _, handler, event in self.observer.handled if handler == scheduler]
        return sum(len(each.instances) // 3 for each in handled if isinstance(each, NodeJoined))

    def times_ms(self, kind: type[Event], scheduler: int = 0) -> list[float]:
        return [
            now_ns / MS
            for now_ns, handler, event in self.observer.handled
            if handler == scheduler and isinstance(event, kind)
        ]


def run(
    app: App,
    arrivals: Arrivals,
    *faults: Fault,
    policy: str = "swayam",
    schedulers: int = 1,
    membership_delay_ms: int = 0,
    drain_ms: int = 0,
) -> Run:
    kind = find_policy(policy)
    made: list[Policy] = []

    def make(context: Context, config: Config) -> Policy:
        made.append(kind.make(context, config))
        return made[-1]

    plan = FaultPlan(faults).check(app, schedulers)
    setup = Setup(
        app,
        PolicyKind(cast(type[Policy], make), kind.config, kind.capabilities),
        CONFIG if policy == "swayam" else None,
        truth=GroundTruthConfig("lognormal", cv=0.2),
        schedulers=schedulers,
        membership_delay_ns=membership_delay_ms * MS,
        faults=plan.actions(),
        records_spans=True,
        limit_ns=1_000 * SECOND_NS,
    )
    observer = NeedsRecorder(all_checkers(app, is_drained=True))
    observer.attach(cast(list[Swayam], made))
    until_ns = max(plan.end_ns, int(arrivals.times_ns[-1]) + 1, drain_ms * MS)
    columns = simulate(setup, arrivals, clients=[DrainWatcher(until_ns)], observer=observer)
    observer.finish(columns)
    return Run(columns, observer)


def load(per_s: float, seconds: float, *, model: int = 0, seed: int = 1) -> Arrivals:
    return named(poisson(per_s, int(seconds * SECOND_NS), seed=seed), f"p{model}")


def wanted(per_s: float) -> int:
    """The n of somebody who sees everything and knows the rate."""
    times = LogNormalTimes(EXEC_MS / 1e3, 0.2)
    slo = Slo(100 * MS, 0.99, rate_tolerance=2.0)
    found = least_backends(times, per_s, slo, RandomRetry(0.001)).backends
    assert found is not None
    return found


@pytest.mark.parametrize("frontends", [1, 2, 8])
def test_any_number_of_frontends_meets_the_objective_and_starts_what_one_would(
    frontends: int,
) -> None:
    """150 requests/s are 3 Erlangs, 6 at twice the rate.

    Each sees a slice only, and none talks to another. Backends are started by numbers, so their
    number is the largest n of anybody, and not the sum.
    """
    found = run(make_app(), load(150, 12), schedulers=frontends)
    assert found.share_met(from_ms=3_000) >= 0.99
    settled = found.needs(5_000, 12_000)
    assert abs(sum(settled) / len(settled) - wanted(150)) <= 1.5
    assert found.peak() <= max(found.needs(0, 12_000))


def test_frontends_share_the_load_evenly_over_the_backends_in_use() -> None:
    found = run(make_app(), load(150, 8), schedulers=2)
    nodes = [
        action.node_id
        for now_ns, _, actions in found.observer.entries
        if now_ns > 4_000 * MS
        for action in actions
        if isinstance(action, Dispatch)
    ]
    counts = sorted(nodes.count(node_id) for node_id in set(nodes))
    assert counts[-1] < 3 * counts[len(counts) // 2]


def test_backends_are_started_before_a_rising_load_needs_them() -> None:
    """The load rises steadily from 50 to 250/s: by the trend, n is ahead of the present rate."""
    rates = [50.0 + 20 * second for second in range(10)]
    rising = named(stepped(rates, SECOND_NS, 10 * SECOND_NS, seed=1), "p0")
    found = run(make_app(), rising, schedulers=2)
    assert found.share_met(from_ms=3_000) >= 0.99
    at_the_end = found.needs(9_500, 10_000)
    assert min(at_the_end) >= wanted(200)


def test_a_backend_that_nobody_uses_leaves_service_and_then_retires() -> None:
    """The load ends at 4 s: all are out of use a second after their last request, then gone."""
    app = make_app(warm=2)
    found = run(app, load(50, 4), schedulers=2, drain_ms=20_000)
    stops = [e for _, _, e in found.observer.handled if isinstance(e, InstanceStopped)]
    retired = {e.instance_id for e in stops if e.reason == "not in use for too long"}
    changes = [
        (now_ns, event)
        for now_ns, scheduler, event in found.observer.handled
        if scheduler == 0 and isinstance(event, InstanceUseChanged | InstanceStopped)
    ]
    assert retired
    for instance_id in retired:
        own = [(now_ns, event) for now_ns, event in changes if event.instance_id == instance_id]
        (left_ns, left), (gone_ns, gone) = own[-2:]
        assert isinstance(left, InstanceUseChanged)
        assert not left.is_in_use
        assert isinstance(gone, InstanceStopped)
        assert gone_ns - left_ns == SECOND_NS
    events = [event for _, _, event in found.observer.handled]
    started = {event.instance_id for event in events if isinstance(event, InstanceStarted)}
    assert retired == started  # in the end, all of them


def test_a_frontend_crashes_and_the_others_have_the_wrong_number_for_a_while() -> None:
    """Of two, one dies at 6 s, and the other one hears of it at 9 s.

    It receives the whole load and takes it for half: n is that of twice the load. Then it is told.
    """
    found = run(
        make_app(nodes=40),
        load(150, 16),
        Fault("crash_gateway", 6 * SECOND_NS, until_ns=40 * SECOND_NS, gateway=1),
        schedulers=2,
        membership_delay_ms=3_000,
    )
    rows = found.columns.requests
    failed = rows.outcome == Outcome.FAILED
    assert set((rows.finished_ns[failed] / MS).tolist()) <= {6_000.0}
    assert failed.sum() <= 20
    assert found.share_met(from_ms=6_100) >= 0.99
    windows_ms = ((5_000, 6_000), (8_000, 9_000), (14_500, 16_000))
    before, wrong, after = (found.needs(*window) for window in windows_ms)
    assert max(before) <= 1.5 * wanted(150)
    assert min(wrong) >= 1.5 * wanted(150)
    assert max(after) <= 1.5 * wanted(150)


def test_a_frontend_that_is_replaced_finds_the_backends_that_there_are() -> None:
    """Those that its predecessor has started are among them: it needs hardly any of its own."""
    found = run(
        make_app(),
        load(150, 12),
        Fault("crash_gateway", 4 * SECOND_NS, until_ns=5 * SECOND_NS, gateway=0),
        schedulers=2,
        membership_delay_ms=500,
    )
    assert found.share_met(from_ms=5_000) >= 0.99
    assert found.instances_at_start(scheduler=2) >= 4
    assert len(found.times_ms(InstanceStarted, scheduler=2)) <= 2


def test_backends_that_are_killed_are_skipped_and_replaced() -> None:
    """Half of those in use die at 5 s, for good."""
    faults = [
        Fault("crash", 5 * SECOND_NS, until_ns=60 * SECOND_NS, node=node) for node in range(4)
    ]
    found = run(make_app(), load(150, 14), *faults, schedulers=4)
    assert found.share_met(from_ms=7_500) >= 0.99
    used = [
        action.node_id
        for now_ns, _, actions in found.observer.entries
        if now_ns > 5_000 * MS
        for action in actions
        if isinstance(action, Dispatch)
    ]
    assert min(node_id for node_id in used if node_id is not None) >= 4


def test_when_the_pool_is_exhausted_requests_share_what_there_is_or_are_pruned() -> None:
    """4 Erlangs on 3 nodes: what cannot be answered in time is pruned, and the rest is in time."""
    found = run(make_app(nodes=3), load(200, 8), schedulers=2)
    outcomes = found.columns.requests.outcome.tolist()
    assert outcomes.count(Outcome.EXPIRED) > 0.15 * len(outcomes)
    assert found.share_met(from_ms=2_000) > 0.5
    assert outcomes.count(Outcome.LATE) < 0.06 * len(outcomes)


def test_an_exhausted_pool_is_shared_by_models_and_what_one_leaves_goes_to_the_other() -> None:
    """Two models that need five nodes each, of six. The first one stops at 6 s."""
    app = make_app(models=2, nodes=6, warm=1)
    arrivals = mix([load(120, 6), load(120, 16, model=1, seed=2)])
    found = run(app, arrivals, schedulers=2)
    rows = found.columns.requests
    second = rows.pipeline == 1
    early = second & (rows.arrival_ns > 2 * SECOND_NS) & (rows.arrival_ns < 6 * SECOND_NS)
    late = second & (rows.arrival_ns > 10 * SECOND_NS)
    share = [float((rows.outcome[each] == Outcome.MET).mean()) for each in (early, late)]
    assert share[0] > 0.6  # three nodes each
    assert share[1] >= 0.99


def test_a_model_that_has_no_backend_gets_one_that_is_not_needed() -> None:
    """All nodes are held by a model whose load has ended, and retire only much later."""
    app = make_app(models=2, nodes=4, warm=0)
    first, second = app.functions
    variant = first.variants[0]
    slow = Variant(0, "v0", 0, (0,), variant.profile)  # it never retires
    functions = (Function(0, "f0", (slow,)), second)
    pipelines = tuple(
        Pipeline(p.id, p.name, (Stage(f),), p.slo)
        for p, f in zip(app.pipelines, functions, strict=True)
    )
    app = App(functions, pipelines, app.pools)
    arrivals = mix([load(150, 4), _later(load(20, 6, model=1, seed=3), 10)])
    found = run(app, arrivals, schedulers=2)
    rows = found.columns.requests
    late = (rows.pipeline == 1) & (rows.arrival_ns > 13 * SECOND_NS)
    assert float((rows.outcome[late] == Outcome.MET).mean()) >= 0.99


def _later(arrivals: Arrivals, seconds: int) -> Arrivals:
    by_ns = seconds * SECOND_NS
    return replace(
        arrivals, times_ns=arrivals.times_ns + by_ns, duration_ns=arrivals.duration_ns + by_ns
    )


@pytest.mark.parametrize("frontends", [1, 2, 8])
def test_a_partition_is_static_whoever_needs_more(frontends: int) -> None:
    """The first model has too few of six nodes, and those of the second are idle."""
    app = make_app(models=2, nodes=6)
    found = run(app, load(220, 4), policy="static_partition", schedulers=frontends)
    assert [node.cold_starts for node in found.columns.resources] == [1] * 6
    used = {action.node_id for action in found.observer.actions if isinstance(action, Dispatch)}
    assert len(used) == 3
    outcomes = found.columns.requests.outcome.tolist()
    assert outcomes.count(Outcome.EXPIRED) > 0.2 * len(outcomes)


def test_a_partition_that_is_large_enough_meets_the_objective() -> None:
    app = make_app(models=2, nodes=12)
    arrivals = mix([load(100, 6), load(100, 6, model=1, seed=2)])
    found = run(app, arrivals, policy="static_partition", schedulers=4)
    assert found.share_met(from_ms=1_000) >= 0.99


def test_equal_runs_are_equal() -> None:
    first, second = (run(make_app(), load(150, 3), schedulers=3) for _ in range(2))
    finished = [found.columns.requests.finished_ns.tolist() for found in (first, second)]
    assert finished[0] == finished[1]


@pytest.mark.parametrize("policy", ["swayam", "static_partition"])
def test_a_stage_beside_one_that_runs_is_not_pruned(policy: str) -> None:
    """Two stages in parallel, overloaded: when one of them is hopeless, the other may be running.

    A request that has a running task cannot expire, so such a request ends late.
    """
    config = declare(
        functions={
            "long": {"exec_time": "40ms", "cold_start": "1s"},
            "short": {"exec_time": "20ms", "cold_start": "1s"},
        },
        pipelines={
            "both": {
                "stages": {"a": {"function": "long"}, "b": {"function": "short"}},
                "slo": {"latency": "200ms"},
            }
        },
        pools={"nodes": {"nodes": 3}},
    )
    score = run_world(config, (Stream("poisson:rate=60/s", "both"),), 20.0, policy=policy, seed=1)
    assert score.goodput_per_s() > 30.0  # of the 50/s that three nodes could serve
