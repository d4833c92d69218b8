"""The demonstration: sizing, plan, application, checks, and a short end-to-end run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headgate.config import from_spec
from headgate.core.errors import ConfigError
from headgate.core.model import Profile
from headgate.lab.demo import setup as scaling
from headgate.lab.demo.hybrid import (
    DemoResult,
    DemoRun,
    Planned,
    best_threshold,
    plan_for,
    prepare,
    run_demo,
    run_rows,
    run_simulated,
    write_demo_page,
)
from headgate.lab.demo.setup import (
    FEW,
    FUNCTION,
    FUNCTIONS,
    MACHINE,
    MANY,
    DemoSchedule,
    Scale,
    SessionModel,
    Times,
    application,
    fit_to_machine,
    single_request_ns,
)
from headgate.lab.harness import PolicyCase, RunResult
from headgate.planning.capacity.latency_model import Characterisation

MODEL = Path(__file__).parents[2] / "examples" / "recommender" / "recommender.onnx"
TIMES = Times(20.0, 25.0)
REQUEST_NS = 1_000_000


@pytest.fixture(scope="module")
def planned() -> Planned:
    """A machine with perfect processor sharing: n concurrent requests take n times 20 ms."""
    measured = Characterisation.surrogate(s_ms=20, p_ms=0, cores=(1, 2), concurrency=range(1, 21))
    return plan_for(Scale(MODEL, 8, measured, slo_ms=108, schedule=DemoSchedule()))


def simulated(planned: Planned, policy: PolicyCase) -> RunResult:
    return run_simulated(planned.simulation(TIMES, REQUEST_NS), policy)


WITHOUT = PolicyCase("dedicated_only")
SPILL = PolicyCase.of("threshold", threshold=FEW)


def test_quiet_load_is_below_capacity_and_bursts_above(planned: Planned) -> None:
    quiet, burst = planned.scale.rates_per_s
    assert quiet < planned.scale.capacity_per_s < burst
    assert burst / quiet == pytest.approx(MANY / FEW)
    arrivals = planned.arrivals
    assert arrivals.mean_rate_per_s == pytest.approx((3 * quiet + 4 * burst) / 7, rel=0.15)


def test_planned_threshold_is_the_largest_concurrency_within_the_slo(planned: Planned) -> None:
    assert planned.threshold == FEW


def test_application_spec_is_valid(planned: Planned) -> None:
    url = "http://127.0.0.1:9"
    spec = application(planned.scale, planned.machine, planned.platform, TIMES, endpoint_url=url)
    config = from_spec(spec, "demo")
    machine, functions = config.app.functions[0].variants
    assert config.app.functions[0].name == FUNCTION
    assert [pool.name for pool in config.app.pools] == [MACHINE, FUNCTIONS]
    assert machine.profile.time_ns(1, FEW) == FEW * 20_000_000
    assert functions.profile.exec_ns[0] == TIMES.call_ms * 1_000_000
    assert all(source is not None for source in config.sources)


def test_functions_raise_attainment_in_bursts(planned: Planned) -> None:
    without = simulated(planned, WITHOUT)
    spill = simulated(planned, SPILL)
    assert without.on_functions == 0 and without.functions.usd == 0
    assert 0 < spill.on_functions < 0.5 and spill.functions.usd > 0
    assert spill.attainment > 0.95 > without.attainment + 0.2


def test_planned_threshold_is_near_the_best(planned: Planned) -> None:
    best = best_threshold(planned.simulation(TIMES, REQUEST_NS))
    assert abs(best - planned.threshold) <= 1


def test_checks_fail_on_disagreement(planned: Planned) -> None:
    without = simulated(planned, WITHOUT)
    spill = simulated(planned, SPILL)
    runs = (
        DemoRun(PolicyCase("alike"), spill, spill, spill),
        DemoRun(PolicyCase("not"), spill, without, spill),
    )
    checks = DemoResult(planned, runs, best_threshold=FEW + 2).checks
    assert [check.holds for check in checks] == [True, True, False, False, False]


def test_report_marks_policies_without_a_live_run(planned: Planned, tmp_path: Path) -> None:
    result = simulated(planned, PolicyCase("threshold"))
    runs = (
        DemoRun(PolicyCase("here"), result, live=result, simulated=result),
        DemoRun(PolicyCase("elsewhere"), result),
    )
    demo = DemoResult(planned, runs, best_threshold=FEW)
    sources = [(row[""], row["source"]) for row in run_rows(demo)]
    here = [("here", "predicted"), ("here", "live"), ("here", "simulated")]
    assert sources == [*here, ("elsewhere", "predicted")]
    text = write_demo_page(demo, ["Rent it."], tmp_path).read_text(encoding="utf-8")
    assert "Rent it." in text and "elsewhere" in text


def test_session_model_has_a_fixed_number_of_sessions() -> None:
    pytest.importorskip("onnxruntime")
    model = SessionModel(str(MODEL), 3)
    model.load()
    example = model.example()
    assert example is not None and example["clicks"].shape == (3, 20)
    assert not model.batches
    assert model.predict(example)["items"].shape == (3, 20)


def test_single_request_time_from_concurrent_requests() -> None:
    """Two concurrent requests for 20, then one for 10: 30 of work for three requests."""
    profile = Profile((10,), slowdown=(1.0, 2.0))
    began, ended = np.array([0, 0, 30]), np.array([20, 20, 40])
    assert single_request_ns(profile, began, ended) == pytest.approx(30 / 3)
    uneven = single_request_ns(
        Profile((10,), slowdown=(1.0, 1.0)), np.array([0, 10]), np.array([20, 30])
    )
    assert uneven == pytest.approx((10 + 2 * 10 + 10) / 2)


def test_one_core_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "usable_cores", lambda: [0])
    with pytest.raises(ConfigError, match="needs two cores"):
        fit_to_machine(MODEL, DemoSchedule(), 1.0, print)


@pytest.mark.slow
def test_demo_end_to_end() -> None:
    """Profile, plan, serve and simulate; on a busy machine requests may be late, but not lost."""
    for needed in ("onnxruntime", "boto3", "awslambdaric"):
        pytest.importorskip(needed)
    planned = prepare(MODEL, DemoSchedule(step_s=0.5, steps=5), 4.0, print)
    result = run_demo(planned, print)
    warm_ns = planned.scale.schedule.warm_up_ns
    sent = int((planned.arrivals.times_ns >= warm_ns).sum())
    live_runs = [run.live for run in result.runs if run.live is not None]
    assert [live.requests for live in live_runs] == [sent] * 3
    without, threshold, _ = live_runs
    assert without.unserved == threshold.unserved == 0
    assert without.on_functions == 0
    assert 0 < threshold.on_functions <= 1
