"""The regret search: ratios and losses, recorded scores, and shrinking of a lost world."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from math import isnan, nan
from typing import Any

import pytest

from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.lab.regret.references import REFERENCES
from headgate.lab.regret.scores import Judge, Kept, Score
from headgate.lab.regret.search import (
    RegretReport,
    Rival,
    WorldResult,
    judge_seed,
    judge_world,
    recorded_rivals,
    rival_kinds,
    run_rivals,
    search,
)
from headgate.lab.regret.shrink import is_valid, loss_of, shrink, simplifications
from headgate.lab.regret.worlds import Spec, World, draw_world
from headgate.metrics.format import json_value
from headgate.policies import find_policy

OWN = Score(
    goodput=80.0,
    share=0.8,
    share_in_time=0.85,
    counts=True,
    starved=(),
    kept=(Kept("p", 0.99, 1_000, 1_000),),
    admitted=1_000,
    cost_usd=3.0,
    best_effort=nan,
)
FAIR = Rival(100.0, counts=True, cost_usd=2.0)
UNFAIR = Rival(200.0, counts=False, cost_usd=1.0)


def result(own: Score = OWN, requests: int = 2_000, seed: int = 0, **rivals: Rival) -> WorldResult:
    return WorldResult(seed, "d", 1.0, requests, (), own, rivals)


def test_the_ratio_is_to_the_best_rival_that_counts() -> None:
    both = result(fair=FAIR, unfair=UNFAIR)
    assert both.best_rival == "fair"
    assert both.ratio == pytest.approx(0.8)
    assert result(other=Rival(40.0, counts=True, cost_usd=1.0)).ratio == 1.0
    assert result(unfair=UNFAIR).ratio == 1.0


def test_a_policy_that_does_not_count_has_the_ratio_0() -> None:
    own = replace(OWN, counts=False)
    assert result(own, fair=FAIR).ratio == 0.0
    assert isnan(result(own, unfair=UNFAIR).ratio)  # nobody counts


def test_cost_compares_with_rivals_of_the_same_goodput() -> None:
    cheap_and_bad = Rival(70.0, counts=True, cost_usd=0.5)
    assert result(fair=FAIR, other=cheap_and_bad).cost_ratio == pytest.approx(1.5)
    assert isnan(result(other=cheap_and_bad).cost_ratio)


def test_losses() -> None:
    assert result(fair=FAIR).losses == ("ratio",)
    assert result().losses == ()
    assert result(replace(OWN, share=0.4)).losses == ("share",)
    assert result(replace(OWN, kept=(Kept("p", 0.99, 1_000, 900),))).losses == ("kept",)
    assert result(replace(OWN, best_effort=0.01)).losses == ("best effort",)
    assert result(replace(OWN, share=0.4), requests=999).losses == ()


def test_the_report() -> None:
    results = (
        result(fair=FAIR, seed=3),
        result(replace(OWN, share=0.4, kept=(Kept("p", 0.99, 1_000, 900),)), seed=4),
        result(replace(OWN, share=0.1), requests=10, seed=5),
    )
    report = RegretReport("headgate", "scattered", results)
    assert [each.seed for each in report.judged] == [3, 4]
    assert report.share.mean == pytest.approx(0.6)
    assert (report.share.worst, report.share.seed) == (0.4, 4)
    assert report.ratio.mean == pytest.approx(0.9)
    assert (report.ratio.worst, report.ratio.seed) == (0.8, 3)
    assert report.quantile_kept == 0.5
    assert (report.cost.worst, report.cost.worlds) == (1.5, 1)
    assert report.best_effort.worlds == 0
    assert [each.seed for each in report.lost] == [4, 3]
    content = json.loads(json.dumps(json_value(report.to_json()), allow_nan=False))
    assert (content["left_out"], content["lost"]) == (1, 2)
    assert recorded_rivals(content)[3] == ("d", {"fair": FAIR})


SMALL: Spec = {
    "functions": {
        "f0": {
            "variants": {"pool0": {"pools": ["pool0"], "exec_time": {"1": "10ms", "4": "20ms"}}}
        },
        "f1": {"variants": {"pool0": {"pools": ["pool0"], "exec_time": {"1": "1ms", "8": "4ms"}}}},
    },
    "pools": {"pool0": {"nodes": 2, "price": "$1/h", "network_delay": "1ms"}},
    "pipelines": {
        "p0": {
            "stages": {"s0": {"function": "f0"}, "s1": {"function": "f1", "after": ["s0"]}},
            "slo": {"latency": "100ms", "quantile": "95%"},
        },
        "p1": {"stages": {"s0": {"function": "f1"}}, "slo": {"latency": "100ms"}},
    },
    "clients": {"c0": {"weight": 2}, "c1": {}},
    "workload": {
        "duration": "10s",
        "arrivals": [
            {"pipeline": "p0", "client": "c0", "process": "gamma:rate=700/s,cv=2"},
            {"pipeline": "p1", "client": "c1", "process": "poisson:rate=100/s,items=1"},
        ],
    },
    "simulation": {"service_times": {"distribution": "lognormal", "cv": 0.1}},
}


@pytest.fixture(scope="module")
def found() -> WorldResult:
    """`balance` and all its rivals in the small world: three seconds, and more with each policy."""
    return judge_world(World(SMALL, 1), "balance")


def test_a_policy_and_its_rivals_in_a_world(found: WorldResult) -> None:
    """An overloaded node: the bounded queues serve; all that admits everything collapses."""
    world = World(SMALL, 1)
    kinds = rival_kinds(world.load().app, "balance")
    assert set(found.rivals) == set(kinds)
    assert {"headgate", "affinity", *REFERENCES} <= set(kinds)
    assert "balance" not in kinds
    assert found.own.share < 0.1
    best = found.best_rival
    assert best is not None
    assert found.rivals[best].goodput > found.own.goodput
    assert found.losses[0] == "ratio"
    assert judge_world(world, "balance", found.rivals) == found


def test_recorded_scores_must_be_of_the_same_world() -> None:
    found = judge_seed(21, policy="balance", truth="exact")
    recorded = {21: (found.digest, found.rivals)}
    assert judge_seed(21, policy="balance", truth="exact", recorded=recorded) == found
    with pytest.raises(ValueError, match="another world"):
        judge_seed(21, policy="balance", truth="scattered", recorded=recorded)


def test_processes_give_the_same_results() -> None:
    recorded = {seed: ("", {"fair": FAIR}) for seed in (21, 22)}
    for seed in recorded:
        recorded[seed] = (judge_world(draw_world(seed), "balance", {}).digest, {"fair": FAIR})
    alone = list(search("balance", [21, 22], recorded=recorded))
    assert [each.seed for each in alone] == [21, 22]
    both = list(search("balance", [21, 22], recorded=recorded, jobs=2))
    # As JSON, because a NaN that was pickled no longer equals itself.
    assert [json_value(r.to_json()) for r in both] == [json_value(r.to_json()) for r in alone]


def test_simplifications_load_and_leave_the_world_alone() -> None:
    """Every one is another world, and most can be loaded; the world itself does not change."""
    for seed in range(12):
        spec = draw_world(seed, "wrong", "shapes" if seed % 3 == 2 else "plain").spec
        before = deepcopy(spec)
        simpler = list(simplifications(spec))
        assert spec == before
        assert all(each != spec for each in simpler)
        assert len(simpler) >= 5
        assert sum(is_valid(World(each, seed)) for each in simpler) >= len(simpler) // 3


def test_shapes_are_simplified_away() -> None:
    """The test asks for resident compute: one shape is left, and no price."""
    world = draw_world(26, kind="shapes")

    def is_resident(world: World) -> bool:
        return any(pool.get("compute") == "resident" for pool in world.spec["pools"].values())

    (pool,) = (small := shrink(world, is_resident, tries_max=120)).spec["pools"].values()
    assert pool["compute"] == "resident"
    assert not pool.keys() & {"cpu_price", "gpu_price"}
    builds = [b for f in small.spec["functions"].values() for b in f["variants"].values()]
    assert not any("shapes" in build for build in builds)


def test_validity() -> None:
    assert is_valid(World(SMALL, 1))
    few, tight, broken = deepcopy(SMALL), deepcopy(SMALL), deepcopy(SMALL)
    few["workload"]["duration"] = "1s"
    tight["pipelines"]["p0"]["slo"]["latency"] = "20ms"
    broken["functions"].pop("f1")
    assert not any(is_valid(World(spec, 1)) for spec in (few, tight, broken))


def test_shrinking_keeps_only_what_matters() -> None:
    """The test asks for a pool with a network delay: everything else goes."""

    def has_network(world: World) -> bool:
        return any("network_delay" in pool for pool in world.spec["pools"].values())

    tries: list[int] = []
    small = shrink(World(SMALL, 1), has_network, on_try=tries.append)
    assert is_valid(small)
    assert len(small.spec["functions"]) == len(small.spec["pipelines"]) == 1
    assert len(small.spec["clients"]) == len(small.spec["workload"]["arrivals"]) == 1
    assert small.spec["pools"]["pool0"] == {"nodes": 1, "price": "$1/h", "network_delay": "1ms"}
    assert "simulation" not in small.spec
    assert tries == list(range(1, len(tries) + 1))
    assert shrink(World(SMALL, 1), has_network, tries_max=0).spec == SMALL


def test_what_cannot_be_shrunk_stays() -> None:
    assert shrink(World(SMALL, 1), lambda world: False).spec == SMALL


@pytest.mark.slow
def test_a_lost_world_is_lost_when_shrunk(found: WorldResult) -> None:
    """In the shrunk world the policy still has less than 0.9 of the same rival's goodput."""
    world = World(SMALL, 1)
    reason, loses = loss_of(found, "balance")
    assert reason == "ratio"
    assert loses(world)
    small = shrink(world, loses, tries_max=20)
    again = judge_world(small, "balance")
    assert "ratio" in again.losses
    assert len(str(small.spec)) < len(str(world.spec))


@pytest.mark.parametrize(
    ("reason", "change"),
    [("share", {}), ("kept", {}), ("best effort", {"best_effort": 0.0})],
)
def test_the_loss_that_is_looked_for(reason: str, change: dict[str, Any]) -> None:
    """The reason of the whole world is tested in the smaller one, by a run of the policy."""
    own = replace(Judge(World(SMALL, 1).load()).run(find_policy("balance")), **change)
    found = result(own)
    losses = [each for each in found.losses if each == reason]
    assert losses == [reason]
    only = replace(found, own=_only(own, reason))
    name, loses = loss_of(only, "balance")
    assert name == reason
    # `SMALL` has no requests without an objective, so only the first two are lost there.
    assert loses(World(SMALL, 1)) == (reason != "best effort")


def _only(own: Score, reason: str) -> Score:
    """A score that is lost for one reason alone."""
    fine = replace(own, share=0.9, kept=(), best_effort=nan)
    return {
        "share": replace(fine, share=own.share),
        "kept": replace(fine, kept=own.kept),
        "best effort": replace(fine, best_effort=own.best_effort),
    }[reason]


class Broken(Policy):
    """Raises whenever a task is ready."""

    def on_task_ready(self, task: Task) -> None:
        raise IndexError("pop from empty list")

    def on_capacity(self, node: Node) -> None:
        """Nothing is ever queued."""


def test_a_rival_that_raises_is_logged_and_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = {"broken": (PolicyKind(Broken), None)}
    assert run_rivals(Judge(World(SMALL, 7).load()), kinds) == {
        "broken": Rival(0.0, counts=False, cost_usd=0.0)
    }
    assert "world 7: broken: on_task_ready raised IndexError" in caplog.text
