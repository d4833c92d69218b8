"""The hammering part of `bench overload`: costs by difference, and what its checks say."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.lab.bench._server_under_test import OPTIONS, SLO_MS, Sleeping
from headgate.lab.bench.overload import (
    HammeringPlan,
    HammeringStep,
    costs_us,
    report_hammering,
    step_of,
)
from headgate.loadgen.results import FailureReason, Rows, make_result
from headgate.workload import arrivals_at


def step(clients: int, admitted: int, rejected: int, core_s: float, good: int) -> HammeringStep:
    """Ten seconds."""
    return HammeringStep(clients, 10.0, admitted, rejected, 0, good, admitted, 50.0, core_s)


def test_each_request_counts_once_and_goodput_is_what_clients_see() -> None:
    rows = Rows()
    for number, (status, took_ms, outcome) in enumerate(
        [
            (200, SLO_MS - 1, b""),
            (200, SLO_MS + 1, b""),  # it waited where the gateway does not see it
            (200, SLO_MS + 9, b"late"),
            (429, 1, b"rejected"),
            (0, 1, b""),
        ]
    ):
        row = rows.add(number, number)
        if status:
            rows.complete(row, number + took_ms * MILLISECOND_NS, status, outcome, b"")
        else:
            rows.fail(row, number + 1, FailureReason.LOST)
    arrivals = arrivals_at(np.array(rows.intended_ns), SECOND_NS)
    found = step_of(5, 1.0, make_result(rows, arrivals, OPTIONS, 5, is_closed_loop=True), 0.5)
    assert (found.admitted, found.rejected, found.unanswered) == (3, 1, 1)
    assert (found.good, found.in_time) == (1, 2)
    assert found.p50_ms == pytest.approx(SLO_MS + 1)


def test_a_refusal_costs_what_is_left_beside_the_admissions() -> None:
    steps = [step(16, 3_000, 0, 0.6, 3_000), step(128, 3_000, 20_000, 2.6, 1_500)]
    assert costs_us(steps) == pytest.approx((200.0, 100.0))
    result = report_hammering(steps)
    assert [check.holds for check in result.checks] == [True, True, True]
    assert [row["share_of_peak"] for row in result.rows[:2]] == [1.0, 0.5]


def test_collapse_and_dear_refusals_are_named() -> None:
    steps = [step(16, 3_000, 0, 0.6, 3_000), step(128, 300, 10_000, 4.0, 10)]
    assert [check.holds for check in report_hammering(steps).checks] == [False, False, True]


def test_the_load_is_a_multiple_of_what_keeps_the_worker_busy() -> None:
    assert HammeringPlan().multiples == (1, 2, 8)
    model = Sleeping()
    model.load()
    x = np.ones((3, 1), np.float32)
    assert model.predict({"x": x})["y"].tolist() == [1.0, 1.0, 1.0]
