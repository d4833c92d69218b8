"""Observed admission and the metrics of promises live, and the benchmark `promises` in short.

Functions sleep, so capacities do not depend on the machine. The shares wanted here are below those
of the benchmark, because other load of the machine delays some requests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, run_json

from headgate.lab.bench import promises
from headgate.lab.bench._paced_server import CODE

APP = f"""
functions: {{paced: {{code: "{CODE}", options: {{item_ms: 50}}, batch_max: 1}}}}
slo: {{latency: 120ms}}
"""
TOGETHER = 20  # a second of work, of which the objective allows a tenth


@pytest.mark.parametrize("admission", ["enforce", "observe"])
def test_admission_is_enforced_or_observed(tmp_path: Path, admission: str) -> None:
    """What is rejected where admission is enforced runs, and is counted, where it is observed."""
    (tmp_path / "app.yaml").write_text(APP)
    with Served(tmp_path, "--admission", admission, "--log", "run.log") as served:
        statuses = [status for status, _ in served.ask_together("paced", TOGETHER)]
        counts = counters(served)
    is_observed = admission == "observe"
    assert set(statuses) == ({200} if is_observed else {200, 429})
    assert (counts["headgate_admission_would_reject_total"] > 0) == is_observed
    assert (counts["headgate_admission_rejections_total"] > 0) == (not is_observed)
    assert counts["headgate_admitted_total"] == statuses.count(200)
    assert counts["headgate_admitted_kept_total"] < statuses.count(200) or not is_observed
    assert run_json(tmp_path, "replay", "run.log")["is_identical"]
    assert ('["ReportWouldReject"' in (tmp_path / "run.log").read_text()) == is_observed


def counters(served: Served) -> dict[str, float]:
    """Return every counter of the server, summed over its labels."""
    status, text = served.get("/metrics")
    assert status == 200
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_quiet_tenant_beside_a_flood(protocol: str) -> None:
    plan = promises.PromisesPlan(protocols=(protocol,), quiet_seconds=6.0)
    (result,) = promises.measure_tenants(plan, lambda _: None)
    if result.flood_rps < 300 or result.requests < 30:  # not what this test is about
        raise RuntimeError(f"no flood, or nobody beside it: {result}")
    assert result.met >= 0.95 * result.requests


@pytest.mark.slow
def test_function_that_was_slow_recovers() -> None:
    plan = promises.PromisesPlan(
        factors=(5.0,), before_seconds=2.0, slow_seconds=4.0, after_seconds=6.0
    )
    (result,) = promises.measure_slow(plan, lambda _: None)
    assert 0 < result.met <= result.offered
    assert result.after_met >= 0.9 * result.after > 0


@pytest.mark.slow
def test_pipeline_at_three_times_its_capacity() -> None:
    plan = promises.PromisesPlan(pipeline_loads=(0.5, 3.0), pipeline_seconds=5.0)
    half, three = promises.measure_pipeline(plan, lambda _: None)
    if not half.live_rps or not half.simulated_rps:  # not what this test is about
        raise RuntimeError(f"the pipeline does not run: {half}")
    assert three.live_rps >= 0.7 * half.live_rps
    assert three.live_kept >= 0.9 and three.simulated_kept >= 0.9
