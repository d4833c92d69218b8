"""The benchmark `pipeline`: the ways that it compares, its models, and its checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headgate.config import from_spec
from headgate.lab.bench import pipeline
from headgate.lab.bench.pipeline import (
    FIXED,
    FRONTIER,
    OWN,
    STAGES,
    Profiles,
    StageSettings,
    choose_ways,
    core_ns,
    fastest_ns,
    measure_profiles,
    served_app,
    write_models,
)

MS = 1_000_000
BATCHES = 16


def profiles() -> Profiles:
    """Batches pay in `classify` alone; two cores make `features` faster, at a price."""
    return {
        "resize": {1: linear(0, 1), 2: linear(0, 1)},
        "features": {1: linear(0, 10), 2: linear(0, 6)},
        "classify": {1: linear(8, 1), 2: linear(8, 1)},
    }


def linear(base_ms: float, item_ms: float) -> tuple[int, ...]:
    return tuple(round((base_ms + item_ms * items) * MS) for items in range(1, BATCHES + 1))


def test_the_fastest_path_counts_single_items() -> None:
    assert fastest_ns(profiles()) == (1 + 6 + 9) * MS


def test_the_frontier_plans_within_its_time_and_a_stage_by_itself_does_not() -> None:
    """In 30 ms, a batch of `classify` has as long as the other two leave on one core each."""
    ways = choose_ways(profiles(), 2, slo_ns=60 * MS, plan_ns=30 * MS)
    one = StageSettings(1, 1)
    assert ways[FRONTIER] == {"resize": one, "features": one, "classify": StageSettings(11, 1)}
    assert ways[OWN] == {"resize": one, "features": one, "classify": StageSettings(16, 1)}
    assert ways[FIXED] == dict.fromkeys(STAGES, StageSettings(1, 2))
    times_ms = [core_ns(profiles(), ways[name]) / MS for name in (OWN, FRONTIER, FIXED)]
    assert times_ms == sorted(times_ms)


def test_a_stage_gets_more_cores_where_it_would_be_late_with_one() -> None:
    ways = choose_ways(profiles(), 2, slo_ns=34 * MS, plan_ns=17 * MS)
    assert ways[FRONTIER]["features"] == StageSettings(1, 2)
    assert ways[FRONTIER]["classify"] == StageSettings(2, 1)


def test_the_application_has_what_was_chosen() -> None:
    way = choose_ways(profiles(), 2, slo_ns=60 * MS, plan_ns=30 * MS)[FRONTIER]
    app = from_spec(served_app(profiles(), way, 2, 60 * MS), "here").app
    assert [stage.name for stage in app.pipelines[0].stages] == list(STAGES)
    for function in app.functions:
        choice = way[function.name]
        assert function.variants[0].profile.items_max == choice.batch
        assert function.variants[0].shape.cpu_milli == 1000 * choice.cores


def test_models_fit_together_and_can_be_measured(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    write_models(tmp_path)
    measured = measure_profiles(tmp_path, [1], 0.0)
    for stage in STAGES:
        times_ns = measured[stage][1]
        assert list(times_ns) == sorted(times_ns)
        assert times_ns[0] > 0


def test_core_time_is_by_request() -> None:
    before, after = pipeline.CoreSeconds(1.0, 2.0, 3.0), pipeline.CoreSeconds(2.0, 2.5, 3.1)
    used = after.since(before, 10)
    assert [used.workers, used.gateway, used.sender] == pytest.approx([0.1, 0.05, 0.01])
    assert after.since(before, 0).workers == 1.0


def way_run(way: str, hit: float = 0.99, core_ms: float = 10.0) -> pipeline.WayRun:
    figures = {"requests": 100.0, "p50_ms": 20.0, "p99_ms": 40.0, "slo_attainment": hit}
    choices = dict.fromkeys(STAGES, StageSettings(1, 1))
    return pipeline.WayRun(
        way, "poisson", 1, choices, 50.0, 60.0, figures, dict(figures), core_ms_of(core_ms)
    )


def core_ms_of(workers_ms: float) -> pipeline.CoreSeconds:
    return pipeline.CoreSeconds(workers_ms / 1e3, 0.001, 0.001)


def failing(*runs: pipeline.WayRun) -> list[str]:
    return [check.claim for check in pipeline.report(list(runs)).checks if not check.holds]


def test_checks_fail_where_they_should() -> None:
    runs = [way_run(FRONTIER, core_ms=8.0), way_run(FIXED), way_run(OWN)]
    assert failing(*runs) == []
    worse = replace(runs[0], live={**runs[0].live, "slo_attainment": 0.96}, core_s=core_ms_of(11.0))
    claims = failing(worse, *runs[1:])
    assert len(claims) == 4  # beside both others, its core time, and its simulated hit rate
    far = replace(runs[2], simulated={**runs[2].simulated, "p50_ms": 23.0})
    assert failing(*runs[:2], far) == [f"{OWN}, poisson: error of the simulated p50"]
    second = [replace(run, round=2) for run in runs]  # the mean of both rounds is near enough
    assert failing(*runs[:2], far, *second) == []
