"""Under every policy: functions that cannot be loaded, and requests that crash their nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.clock import SECOND_NS
from headgate.core.events import BatchLost, Event, InstanceStarted, NodeLost
from headgate.core.model import App, Limits, Pool, Profile
from headgate.core.policy import PolicyConfig
from headgate.core.records import STAGES_MAX
from headgate.core.states import Failure, Outcome, Rejection
from headgate.policies import find_policy, policy_names
from headgate.sim.engine import Engine
from headgate.sim.faults import Fault
from headgate.sim.interfaces import SimClient, Simulation
from headgate.workload import Arrivals

from .apps import CLOUD, MS, make_app, run

TWO = (Pool(0, "gpu", nodes=2),)
every_policy = pytest.mark.parametrize("policy", policy_names())


def arrivals(rows: Sequence[tuple[int, int]], app: App) -> Arrivals:
    """Requests of one client: (time in ms, pipeline)."""
    times_ms, pipelines = zip(*sorted(rows), strict=True)
    return Arrivals(
        np.array(times_ms, dtype=np.int64) * MS,
        60 * SECOND_NS,
        np.array(pipelines, dtype=np.int32),
        np.zeros(len(rows), dtype=np.int32),
        tuple(pipeline.name for pipeline in app.pipelines),
        ("c0",),
    )


def starts_of(actions: Sequence[Action], variant_id: int) -> int:
    return sum(isinstance(a, StartInstance) and a.variant_id == variant_id for a in actions)


@every_policy
def test_an_unloadable_function_costs_one_start_per_back_off(policy: str) -> None:
    """30 seconds, 10 requests a second for it and 40 for another function on the same two nodes.

    Starts are tried after 0, 1, 3, 7, 15 and 31 seconds; the first perhaps on both nodes.
    """
    app = make_app(exec_ms=(5, 5), start_ms=5, pools=TWO, latency_ms=200)
    rows = [(ms, 0) for ms in range(0, 30_000, 100)] + [(ms, 1) for ms in range(0, 30_000, 25)]
    columns, observer = run(
        app,
        arrivals(rows, app),
        Fault("cannot_load", 0, until_ns=40 * SECOND_NS, function=0),
        policy=find_policy(policy),
    )
    assert 5 <= starts_of(observer.actions, 0) <= 5 + 2
    outcomes = columns.requests.outcome
    healthy = outcomes[columns.requests.pipeline == 1]
    assert (healthy == Outcome.MET).mean() >= 0.99
    broken = Counter(outcomes[columns.requests.pipeline == 0].tolist())
    assert set(broken) <= {Outcome.REJECTED, Outcome.FAILED}
    assert broken[Outcome.FAILED] <= 3  # requests that arrived before the first failure
    reasons = Counter(
        a.settlement.reason
        for a in observer.actions
        if isinstance(a, Settle) and a.settlement.reason
    )
    assert set(reasons) <= {Rejection.LOAD_FAILED, "refused too often, last reason: gone"}


@every_policy
def test_a_function_that_loads_again_recovers_without_traffic(policy: str) -> None:
    """Unloadable until 2 s, probed at 1 and 3 s: a request at 4 s finds the function loaded."""
    app = make_app(start_ms=5, pools=TWO, latency_ms=200)
    columns, observer = run(
        app,
        arrivals([(0, 0), (4_000, 0)], app),
        Fault("cannot_load", 0, until_ns=2 * SECOND_NS, function=0),
        policy=find_policy(policy),
    )
    assert columns.requests.outcome.tolist() == [Outcome.FAILED, Outcome.MET]
    assert any(isinstance(e, InstanceStarted) and ns < 4 * SECOND_NS for ns, e in observer.events)


# A node that a Broker grants holds one instance at a time: with one node there is one function.
CHOOSING = [name for name in policy_names() if not find_policy(name).capabilities.multi_gateway]


@pytest.mark.parametrize("policy", CHOOSING)
def test_nodes_that_hold_a_function_keep_serving_it(policy: str) -> None:
    """One node cannot start anything. The other serves both functions."""
    app = make_app(exec_ms=(5, 5), start_ms=5, pools=TWO)
    rows = [(ms, ms // 20 % 2) for ms in range(0, 4_000, 20)]
    columns, observer = run(
        app,
        arrivals(rows, app),
        Fault("break_starts", 0, until_ns=10 * SECOND_NS, node=1),
        policy=find_policy(policy),
    )
    outcomes = Counter(columns.requests.outcome[60:].tolist())  # after the first probe
    assert outcomes == {Outcome.MET: 140}
    sent_to = {a.node_id for a in observer.actions if isinstance(a, Dispatch)}
    assert 0 in sent_to
    assert starts_of(observer.actions, 0) + starts_of(observer.actions, 1) <= 12


SPILLING = [name for name in policy_names() if find_policy(name).capabilities.serverless]


@pytest.mark.parametrize("policy", SPILLING)
def test_the_faas_platform_takes_over_an_unloadable_function(policy: str) -> None:
    """Unloadable on the node, loadable on the platform: requests are answered, or rejected."""
    app = make_app(exec_ms=(5,), start_ms=5, pools=(Pool(0, "gpu"), CLOUD), latency_ms=200)
    columns, observer = run(
        app,
        arrivals([(ms, 0) for ms in range(0, 3_000, 100)], app),
        Fault("cannot_load", 0, until_ns=10 * SECOND_NS, function=0),
        policy=find_policy(policy),
    )
    outcomes = Counter(columns.requests.outcome.tolist())
    if policy in (
        "autoscale",
        "autoscale_concurrency",
        "dedicated_only",
    ):  # for them it is for functions without nodes
        assert outcomes[Outcome.MET] == 0
        assert outcomes[Outcome.REJECTED] + outcomes[Outcome.FAILED] == 30
    else:
        assert outcomes[Outcome.MET] >= 29
    assert starts_of(observer.actions, 0) <= 4


class Poisoning(SimClient):
    """Declares requests that crash every node that runs them, before the first event."""

    def __init__(self, *request_ids: int) -> None:
        self._request_ids = request_ids

    def on_start(self, simulation: Simulation) -> None:
        assert isinstance(simulation, Engine)
        simulation.poisonous_requests.update(self._request_ids)


def batching(policy: str) -> PolicyConfig:
    """Settings under which the policy makes batches, if it can."""
    kind = find_policy(policy).config
    if "batch_max" in {field.name for field in fields(kind)}:
        return kind(batch_max=8)  # type: ignore[call-arg]
    return kind()


def with_batches(app: App) -> App:
    """Return the same application with batches of up to eight."""
    (function,) = app.functions
    (variant,) = function.variants
    profile = Profile(tuple((10 + i) * MS for i in range(8)))
    functions = (replace(function, variants=(replace(variant, profile=profile),)),)
    (pipeline,) = app.pipelines
    stages = tuple(replace(stage, function=functions[0]) for stage in pipeline.stages)
    return App(functions, (replace(pipeline, stages=stages),), app.pools, limits=app.limits)


@every_policy
def test_poisonous_requests_crash_two_nodes_each_at_most(policy: str) -> None:
    """Each crashes two nodes at most: once in a batch, once alone. All others are answered."""
    poisonous = (10, 17, 30, 31, 52)
    app = with_batches(make_app(pools=TWO, limits=Limits(attempts_max=8)))
    columns, observer = run(
        app,
        arrivals([(2 * ms, 0) for ms in range(80)], app),
        policy=find_policy(policy),
        config=batching(policy),
        clients=[Poisoning(*poisonous)],
    )
    assert observer.count(NodeLost) <= 2 * len(poisonous)
    outcomes = columns.requests.outcome.tolist()
    assert [id for id, outcome in enumerate(outcomes) if outcome != Outcome.MET] == list(poisonous)
    reasons = {
        a.request_id: a.settlement.reason
        for a in observer.actions
        if isinstance(a, Settle) and a.settlement.reason
    }
    assert reasons == dict.fromkeys(poisonous, f"f0: {Failure.KILLED_WORKER}")
    assert crashes_per_request(observer.events, observer.actions, poisonous) <= 2


def crashes_per_request(
    events: list[tuple[int, Event]], actions: list[Action], poisonous: tuple[int, ...]
) -> int:
    """Return the largest number of nodes that crashed under one poisonous request."""
    sent = {a.batch_id: a.task_ids for a in actions if isinstance(a, Dispatch)}
    lost = [sent[e.batch_id] for _, e in events if isinstance(e, BatchLost)]
    deaths = Counter(id // STAGES_MAX for task_ids in lost for id in task_ids)
    return max(deaths[request_id] for request_id in poisonous)
