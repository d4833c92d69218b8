"""Small runs of the fidelity and overload benchmarks: that they measure, not the results.

The results depend on the load of the machine, so tests do not check them; `headgate bench` does.
"""

from __future__ import annotations

import pytest

from headgate.lab.bench import fidelity, overload


@pytest.mark.slow
def test_live_log_is_replayed_and_simulated() -> None:
    plan = fidelity.FidelityPlan(levels=(("some", 0.5),), rounds=1, seconds=2.0, peak_seconds=0.5)
    (fidelity_run,) = fidelity.measure(plan, lambda _: None)
    assert fidelity_run.replay["is_identical"] is True
    assert fidelity_run.replay["complete"] is True
    assert fidelity_run.outside_ms > 0
    assert fidelity_run.simulated["requests"] == fidelity_run.live["requests"] > 0
    result = fidelity.report([fidelity_run])
    assert len(result.checks) == 4
    assert [row["how"] for row in result.rows] == ["live", "simulated"]


@pytest.mark.slow
def test_overload() -> None:
    plan = overload.OverloadPlan(curve=(), seconds=3.0, peak_seconds=0.5)
    found = overload.measure(plan, lambda _: None)
    step = found.overload
    assert step.has_one_answer_each
    assert found.logged == step.summary.run.requests > 0
    assert step.summary.run.rejected > 0
    assert step.summary.run.goodput_rps > 0 < found.peak_rps
    assert step.memory_mib[1] - step.memory_mib[0] < 32
    assert len(overload.report(found).checks) == 5
