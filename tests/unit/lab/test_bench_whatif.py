"""The report of the benchmark `whatif`, and its changes as they are served."""

from __future__ import annotations

from headgate.config import from_spec
from headgate.lab.bench.whatif import CHANGES, WhatIfMeasurement, report

APP = {"functions": {"m": {"code": "module:Model", "batch_max": 4}}, "slo": {"latency": "150ms"}}


def measurement(in_time: float, p50_ms: float) -> WhatIfMeasurement:
    """Predicted: 90 % in time and a median of 20 ms."""
    predicted = {
        "in_time": {"value": 0.9, "low": 0.8, "high": 0.95},
        "p50_ms": {"value": 20.0, "low": 18.0, "high": 22.0},
    }
    return WhatIfMeasurement(
        "m", "80 %", 100.0, {"in_time": in_time, "p50_ms": p50_ms}, predicted, ["assumed: this"]
    )


def test_predictions_are_checked_against_the_goal() -> None:
    good = report([measurement(0.925, 18.5)])
    assert [check.holds for check in good.checks] == [True, True]
    assert [check.measured for check in good.checks] == ["2.5 points", "8.1 %"]
    assert good.rows[0]["never_seen"] == 1
    bad = report([measurement(0.94, 18.0)])
    assert [check.holds for check in bad.checks] == [False, False]


def test_each_change_is_served_as_it_is_predicted() -> None:
    served = {each.name: from_spec(each.applied(APP, "m"), "here") for each in CHANGES}
    workers = [config.app.pools[0].nodes for config in served.values()]
    assert workers == [1, 1, 2, 1, 1]
    policies = [config.policy.name for config in served.values()]
    assert policies == ["headgate", "headgate", "headgate", "clipper", "headgate"]
    largest = [config.app.variants[0].profile.items_max for config in served.values()]
    assert largest == [4, 4, 4, 4, 8]
