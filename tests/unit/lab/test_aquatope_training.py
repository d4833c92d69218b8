"""Training of `aquatope`: the cheapest configurations that keep the objective, by trials."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import (
    App,
    Function,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Variant,
)
from headgate.lab.aquatope import Trained, train
from headgate.lab.harness import Environment, PolicyCase
from headgate.workload import assign, poisson

MS = MILLISECOND_NS
SLOW_MS, FAST_MS = 100, 35


@dataclass(frozen=True)
class TwoPipelines:
    """The pipeline of `TwoStages` twice, with objectives of their own."""

    def environment(self, seed: int) -> Environment:
        one = TwoStages(SLOW_MS).environment(seed)
        slow = one.app.pipelines[0]
        fast = replace(slow, id=1, name="q", slo=Slo(FAST_MS * MS, quantile=0.9))
        arrivals = assign(
            poisson(20.0, 2 * SECOND_NS, seed=seed), {"p": 1.0, "q": 1.0}, {"client": 1.0}, seed=0
        )
        return Environment(replace(one.app, pipelines=(slow, fast)), arrivals)


@dataclass(frozen=True)
class TwoStages:
    """Two stages with shapes of 20 ms in 1/7 of a GPU, 10 ms in 3/7 and 6 ms in 7/7."""

    slo_ms: int

    def environment(self, seed: int) -> Environment:
        functions = []
        for id in range(2):
            more = (
                ShapeTimes(Shape(1_000, 3), (10 * MS,)),
                ShapeTimes(Shape(1_000, 7), (6 * MS,)),
            )
            profile = Profile((20 * MS, 30 * MS))
            variant = Variant(id, f"v{id}", id, (0,), profile, Shape(1_000, 1), 8, more)
            functions.append(Function(id, f"f{id}", (variant,)))
        pool = Pool(
            0, "gpu", nodes=4, slots=8, cpu_milli=16_000, gpu_sevenths=7, gpu_usd_per_hour=1.0
        )
        stages = (Stage(functions[0]), Stage(functions[1], (0,)))
        pipeline = Pipeline(0, "p", stages, Slo(self.slo_ms * MS, quantile=0.9))
        app = App(tuple(functions), (pipeline,), (pool,))
        return Environment(app, poisson(20.0, 2 * SECOND_NS, seed=seed))


def trained(slo_ms: int, seed: int = 0) -> Trained:
    pytest.importorskip("optuna")
    return train(TwoStages(slo_ms), seeds=(5, 6), trials=40, seed=seed)


def shapes(found: Trained) -> list[str]:
    return [config.split(", ")[1] for config in found.configs]


def test_the_cheapest_configurations_in_time_are_found() -> None:
    """With 100 ms both are small; with 35 ms one of them is larger, no matter which."""
    assert shapes(trained(100)) == ["shape 0", "shape 0"]
    found = trained(35)
    assert sorted(shapes(found)) == ["shape 0", "shape 1"]
    assert not any(found.violations)
    assert found.runs <= 4 * 4  # what was run once is not run again


def test_every_pipeline_has_a_study_of_its_own() -> None:
    """Both are as cheap as their objectives allow, after as many trials for each as for one."""
    pytest.importorskip("optuna")
    found = train(TwoPipelines(), seeds=(5,), trials=40)
    assert [config.split()[0] for config in found.configs] == ["p", "p", "q", "q"]
    assert shapes(found)[:2] == ["shape 0", "shape 0"]
    assert sorted(shapes(found)[2:]) == ["shape 0", "shape 1"]
    assert found.violations == (0.0, 0.0)


def test_the_plans_by_the_profiles_are_tried_first() -> None:
    """Two trials are enough where a plan by the profiles is the best: none of them is random."""
    pytest.importorskip("optuna")
    assert shapes(train(TwoStages(100), trials=2)) == ["shape 0", "shape 0"]
    found = train(TwoStages(35), trials=2)
    assert sorted(shapes(found)) == ["shape 0", "shape 1"]
    assert found.runs <= 2


def test_where_no_trial_is_in_time_the_least_violation_is_taken() -> None:
    found = trained(5)
    assert found.violations == pytest.approx((0.9,))


def test_the_result_is_what_the_policy_reaches() -> None:
    """The setting is accepted as it is, and costs what training says it costs."""
    found = trained(35)
    runs = [
        TwoStages(35)
        .environment(seed)
        .simulate(PolicyCase.of("aquatope", configs=found.configs), seed)
        for seed in (5, 6)
    ]
    costs = [sum(use.usage_usd for use in run.resources) / len(run.requests) for run in runs]
    assert found.usd_per_request == pytest.approx(sum(costs) / 2)


def test_equal_seeds_give_equal_results() -> None:
    assert trained(35, seed=3) == trained(35, seed=3)


def test_without_the_extra_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError) as raised:
        train(TwoStages(35))
    assert str(raised.value) == (
        "aquatope: training needs optuna: pip install 'headgate[aquatope]'"
    )
