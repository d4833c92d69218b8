"""What a client is told when the Scheduler has settled its call without an answer."""

from __future__ import annotations

import pytest

from headgate.core.states import Failure, Outcome, Rejection
from headgate.live.call import Call
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.http.responses import error_of


def settled(outcome: int, reason: str, retry_ns: int = 0) -> Call:
    call = Call(0, [], 1, print)
    call.outcome, call.reason, call.retry_ns = outcome, reason, retry_ns
    return call


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.FAILED])
def test_a_function_that_cannot_be_loaded_is_503_before_and_after_admission(outcome: int) -> None:
    refused = error_of(settled(outcome, Rejection.LOAD_FAILED, 1_500_000_000), GatewayConfig(), b"")
    assert refused is not None
    assert (refused.status, refused.reason) == (503, "load_failed")
    assert refused.retry_ns == 1_500_000_000
    assert "cannot be loaded" in refused.message


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (f"f: {Failure.LOST}", "worker_lost"),
        (f"f: {Failure.KILLED_WORKER}", "worker_lost"),
        (Failure.POLICY_FAULT, "policy_fault"),
    ],
)
def test_what_failed_has_one_word_for_programs(said: str, word: str) -> None:
    refused = error_of(settled(Outcome.FAILED, said), GatewayConfig(), b"")
    assert refused is not None
    assert (refused.status, refused.reason) == (503, word)
