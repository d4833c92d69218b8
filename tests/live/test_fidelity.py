"""The benchmarks `fidelity`, `overload`, `pipeline` and `whatif` on a small scale.

Results depend on other load of the machine, so these tests only check that the benchmarks measure;
`headgate bench` checks the results.
"""

from __future__ import annotations

import pytest

from headgate.lab.bench import fidelity, overload, pipeline, whatif
from headgate.lab.bench.pipeline import FIXED, FRONTIER, OWN


@pytest.mark.slow
def test_fidelity_benchmark() -> None:
    plan = fidelity.FidelityPlan(levels=(("some", 0.5),), rounds=1, seconds=2.0, peak_seconds=0.5)
    (level,) = fidelity.measure(plan, lambda _: None)
    assert level.replay["is_identical"] is True
    assert level.replay["complete"] is True
    assert level.client_overhead_ms > 0
    assert level.simulated["requests"] == level.live["requests"] > 0
    result = fidelity.report([level])
    assert len(result.checks) == 4
    assert [row["source"] for row in result.rows] == ["live", "simulated"]


@pytest.mark.slow
def test_overload_benchmark() -> None:
    plan = overload.OverloadPlan(curve=(), seconds=3.0, peak_seconds=0.5)
    result = overload.measure(plan, lambda _: None)
    step = result.overload
    assert step.has_one_response_each
    assert result.settled == step.summary.run.requests > 0
    assert step.summary.run.rejected > 0
    assert step.summary.run.goodput_rps > 0 < result.peak_rps
    assert step.memory_mib[1] - step.memory_mib[0] < 32
    assert len(overload.report(result).checks) == 5


@pytest.mark.slow
def test_pipeline_benchmark() -> None:
    pytest.importorskip("onnx")
    plan = pipeline.ImagePipelinePlan(
        poisson_load=0.1, bursty_load=0.1, rounds=1, seconds=2.0, profile_seconds=0.05
    )
    runs = pipeline.measure(plan, lambda _: None)
    assert [run.way for run in runs] == 2 * [FRONTIER, FIXED, OWN]
    for run in runs:
        assert run.live["requests"] == run.simulated["requests"] > 0
        assert run.core_s.workers > 0 < run.core_s.sender
    assert len(pipeline.report(runs).checks) == 2 * 3 + 2 * len(runs)


@pytest.mark.slow
def test_whatif_benchmark() -> None:
    plan = whatif.WhatIfPlan(models=("sleeper",), logged_seconds=4.0, seconds=2.0, runs=1)
    measured = whatif.measure(plan, lambda _: None)
    assert [each.change for each in measured] == [each.name for each in whatif.CHANGES]
    for each in measured:
        assert each.live["p50_ms"] > 0 < each.predicted["p50_ms"]["value"]
    assert len(whatif.report(measured).checks) == 2 * len(measured)
