"""Every policy in random cases with faults, and tests that fuzzing finds faulty policies."""

from __future__ import annotations

from typing import ClassVar

import pytest

from headgate.core import events
from headgate.core.events import Event
from headgate.core.model import OBSERVE
from headgate.core.policy import Capabilities, Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.core.states import OUTCOME_NAMES
from headgate.policies import find_policy, policy_names
from headgate.sim.fuzz import fuzz, fuzz_kind, random_case, run_case
from headgate.sim.interfaces import Observer

from .policies import RANDOM_ACTIONS, SHARE, SPILL

POLICIES = policy_names()
SEEDS = 200  # over all policies in the default run; per policy in the slow one
OWN = {"spill": SPILL, "share": SHARE, "wild": RANDOM_ACTIONS}


@pytest.mark.parametrize(
    ("policy", "seed"), [(POLICIES[i % len(POLICIES)], i) for i in range(SEEDS)], ids=str
)
def test_policy(policy: str, seed: int) -> None:
    report = fuzz(policy, seed)
    assert report.is_ok, str(report)


@pytest.mark.parametrize(
    "seed",
    [
        5090,  # a node joins that has no compute for the shape of a function it should hold
        7036,  # a task waits for a node that it must leave to others, and is late
    ],
)
def test_cases_in_which_the_default_policy_failed(seed: int) -> None:
    report = fuzz("headgate", seed)
    assert report.is_ok, str(report)


@pytest.mark.slow
def test_a_policy_that_orders_until_the_limit() -> None:
    """Its fixed fleet times out when idle and is started again: the last starts are cut off."""
    report = fuzz("dedicated_only", 104)
    assert report.is_ok, str(report)


@pytest.mark.slow
def test_a_policy_that_asks_again_thousands_of_times_a_second() -> None:
    """Each request that waits probes every 25 us, and a batch takes some 100 ms."""
    report = fuzz("swayam", 40027)
    assert report.is_ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_thoroughly(policy: str) -> None:
    failing = [report for i in range(SEEDS) if not (report := fuzz(policy, 1_000 + i)).is_ok]
    assert not failing, "\n".join(map(str, failing))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", OWN)
def test_code_paths_that_no_policy_uses(name: str, seed: int) -> None:
    """FaaS platforms, shared pools, and actions of every kind at any time, legal or not."""
    report = fuzz_kind(name, OWN[name], seed)
    assert report.is_ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_code_paths_that_no_policy_uses_thoroughly(name: str) -> None:
    reports = [fuzz_kind(name, OWN[name], 1_000 + i) for i in range(SEEDS)]
    assert all(report.is_ok for report in reports), "\n".join(map(str, reports))


def test_random_cases_cover_all_kinds() -> None:
    """Every outcome and every kind of event occurs within 40 seeds; the first that do suffice."""
    kinds = {cls.__name__ for cls in Event.__subclasses__() if cls.__module__ == events.__name__}
    outcomes = set(OUTCOME_NAMES)
    for seed in range(40):
        for report in (fuzz_kind("share", SHARE, seed), fuzz("srtf", seed)):
            kinds -= {kind for kind, count in report.events.items() if count}
            outcomes -= {name for name, count in report.outcomes.items() if count}
        if not kinds and not outcomes:
            return
    raise AssertionError(f"never seen: {sorted(kinds)} {sorted(outcomes)}")


def test_random_cases_reject_where_admission_is_only_observed() -> None:
    """Some cases only observe, and in some of those the default policy would have rejected."""
    kind = find_policy("headgate")
    observed = [i for i in range(40) if _admission(kind, i) == OBSERVE]
    assert 5 <= len(observed) <= 25
    runs = [run_case(kind, seed, Observer()) for seed in observed]
    assert sum(int(run.requests.would_reject.sum()) for run in runs) > 0


def _admission(kind: PolicyKind, seed: int) -> str:
    return random_case(kind.capabilities, seed).app.limits.admission


def test_equal_seeds_give_equal_cases() -> None:
    capabilities = find_policy("balance").capabilities
    first, second = (random_case(capabilities, 7) for _ in range(2))
    assert (first.app, first.plan, first.loop) == (second.app, second.plan, second.loop)
    assert first.arrivals.times_ns.tolist() == second.arrivals.times_ns.tolist()
    assert random_case(capabilities, 8).app != first.app


def test_cases_stay_within_the_capabilities_of_a_policy() -> None:
    modest = Capabilities(pipelines=False)
    for seed in range(50):
        case = random_case(modest, seed)
        assert all(len(pipeline.stages) == 1 for pipeline in case.app.pipelines)
        assert len(case.app.pools) == case.schedulers == 1
        assert case.app.pools[0].faas is None
        assert not case.announces


class NoDispatch(Policy):
    """Never dispatches anything."""

    def on_task_ready(self, task: Task) -> None:
        pass

    def on_capacity(self, node: Node) -> None:
        pass


class OverloadFirstNode(NoDispatch):
    """Dispatches everything to the first node, whether or not it has a free slot."""

    def on_task_ready(self, task: Task) -> None:
        self.orders.dispatch([task], self.view.nodes[0])


class Nondeterministic(NoDispatch):
    """Decides by state that runs share, so that two runs differ."""

    shared: ClassVar[list[int]] = []

    def on_task_ready(self, task: Task) -> None:
        self.shared.append(task.id)
        if len(self.shared) % 3 == 0:
            self.orders.set_timer("mood", self.view.now_ns + len(self.shared))

    def on_task_withdrawn(self, task: Task) -> None:
        self.on_task_ready(task)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (NoDispatch, "was never settled"),
        (OverloadFirstNode, "PolicyError"),
        (Nondeterministic, "determinism: first"),
        (Nondeterministic, "replay: event"),
    ],
)
def test_fuzzing_finds_a_faulty_policy(policy: type[Policy], message: str) -> None:
    """One of twenty cases is enough: the first that shows the fault ends the search."""
    reports = (fuzz_kind("bad", PolicyKind(policy), seed) for seed in range(20))
    bad = next(
        (report for report in reports if any(message in found for found in report.failures)), None
    )
    assert bad is not None
    assert str(bad).startswith(f"headgate fuzz --policy bad --seed {bad.seed}\n")
