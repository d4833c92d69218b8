"""The errors of calls that ended without a result."""

from __future__ import annotations

import pytest

from headgate.core.states import Failure, Outcome, Rejection, Settlement
from headgate.live.call import Call
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.http.responses import error_of


def settled(outcome: int, reason: str, retry_ns: int = 0) -> Call:
    call = Call(0, [], 1, print)
    call.settlement = Settlement(outcome, reason, retry_ns=retry_ns)
    return call


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.FAILED])
def test_a_function_that_cannot_be_loaded_is_503_before_and_after_admission(outcome: int) -> None:
    error = error_of(settled(outcome, Rejection.LOAD_FAILED, 1_500_000_000), GatewayConfig(), b"")
    assert error is not None
    assert (error.status, error.reason) == (503, "load_failed")
    assert error.retry_ns == 1_500_000_000
    assert "cannot be loaded" in error.message


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (f"f: {Failure.LOST}", "worker_lost"),
        (f"f: {Failure.KILLED_WORKER}", "worker_lost"),
        (Failure.POLICY_FAULT, "policy_fault"),
    ],
)
def test_failures_have_a_reason_code_of_the_error(failure: str, reason: str) -> None:
    error = error_of(settled(Outcome.FAILED, failure), GatewayConfig(), b"")
    assert error is not None
    assert (error.status, error.reason) == (503, reason)
