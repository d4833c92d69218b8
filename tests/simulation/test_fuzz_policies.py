"""Every policy in random worlds where things go wrong; and whether that would find anything."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest

from headgate.core import events
from headgate.core.events import Event
from headgate.core.policy import Capabilities, Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.core.states import OUTCOME_NAMES
from headgate.policies import find_policy, policy_names
from headgate.sim.fuzz import fuzz, fuzz_kind, random_case

from .policies import SHARE, SPILL, WILD

POLICIES = policy_names()
SEEDS = 200  # in all, in the default run; of each policy in the slow one
OWN = {"spill": SPILL, "share": SHARE, "wild": WILD}


@pytest.mark.parametrize(
    ("policy", "seed"), [(POLICIES[i % len(POLICIES)], i) for i in range(SEEDS)], ids=str
)
def test_policy(policy: str, seed: int) -> None:
    report = fuzz(policy, seed)
    assert report.is_ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_thoroughly(policy: str) -> None:
    failing = [report for i in range(SEEDS) if not (report := fuzz(policy, 1_000 + i)).is_ok]
    assert not failing, "\n".join(map(str, failing))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", OWN)
def test_what_no_policy_does_yet(name: str, seed: int) -> None:
    """Platforms, shared pools, and orders of every kind at any time, legal or not."""
    report = fuzz_kind(name, OWN[name], seed)
    assert report.is_ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_what_no_policy_does_yet_thoroughly(name: str) -> None:
    reports = [fuzz_kind(name, OWN[name], 1_000 + i) for i in range(SEEDS)]
    assert all(report.is_ok for report in reports), "\n".join(map(str, reports))


def test_the_worlds_are_rich() -> None:
    """Every outcome and every kind of event is met, so what holds there is worth something."""
    seen: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(40):
        for report in (fuzz_kind("share", SHARE, seed), fuzz("srtf", seed)):
            seen.update(report.events)
            outcomes.update(report.outcomes)
    kinds = [cls.__name__ for cls in Event.__subclasses__() if cls.__module__ == events.__name__]
    assert [kind for kind in kinds if not seen[kind]] == []
    assert [name for name in OUTCOME_NAMES if not outcomes[name]] == []


def test_the_same_seed_is_the_same_world() -> None:
    takes = find_policy("balance").capabilities
    first, second = (random_case(takes, 7) for _ in range(2))
    assert (first.app, first.plan, first.loop) == (second.app, second.plan, second.loop)
    assert first.arrivals.times_ns.tolist() == second.arrivals.times_ns.tolist()
    assert random_case(takes, 8).app != first.app


def test_a_policy_is_not_asked_for_more_than_it_takes() -> None:
    modest = Capabilities(pipelines=False)
    for seed in range(50):
        case = random_case(modest, seed)
        assert all(len(pipeline.stages) == 1 for pipeline in case.app.pipelines)
        assert len(case.app.pools) == case.schedulers == 1
        assert case.app.pools[0].faas is None
        assert not case.announces


# --- what it finds -----------------------------------------------------------------------------


class Sloth(Policy):
    """Never does anything."""

    def on_task_ready(self, task: Task) -> None:
        pass

    def on_capacity(self, node: Node) -> None:
        pass


class Hasty(Sloth):
    """Sends everything to the first node, without asking whether it has room."""

    def on_task_ready(self, task: Task) -> None:
        self.orders.dispatch([task], self.view.nodes[0])


class Moody(Sloth):
    """Decides by something that is not its own: two runs differ."""

    shared: ClassVar[list[int]] = []

    def on_task_ready(self, task: Task) -> None:
        self.shared.append(task.id)
        if len(self.shared) % 3 == 0:
            self.orders.set_timer("mood", self.view.now_ns + len(self.shared))

    def on_task_withdrawn(self, task: Task) -> None:
        self.on_task_ready(task)


@pytest.mark.parametrize(
    ("policy", "finding"),
    [
        (Sloth, "was never settled"),
        (Hasty, "PolicyError"),
        (Moody, "determinism: first"),
        (Moody, "replay: event"),
    ],
)
def test_a_bad_policy_is_found_out(policy: type[Policy], finding: str) -> None:
    reports = [fuzz_kind("bad", PolicyKind(policy), seed) for seed in range(20)]
    bad = [report for report in reports if any(finding in found for found in report.failures)]
    assert bad
    assert str(bad[0]).startswith(f"headgate fuzz --policy bad --seed {bad[0].seed}\n")
