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


@pytest.mark.parametrize("failure", [Failure.LOST, Failure.KILLED_WORKER])
def test_a_lost_worker_is_named_and_a_request_that_may_have_run_is_not_to_be_sent_again(
    failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    for is_idempotent in (True, False):
        call = settled(Outcome.FAILED, f"resize: {failure}")
        call.is_idempotent = is_idempotent
        error = error_of(call, GatewayConfig(), b"c0ffee")
        assert error is not None
        assert error.message == "the worker that ran the request died or was cut off (worker_lost)"
        assert error.has_retry_time == is_idempotent
    assert f"a request failed: resize: {failure}" in caplog.text, "the operator sees the function"
