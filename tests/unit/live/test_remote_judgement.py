"""What errors of AWS's client mean: above all, whether the work may have run."""

from __future__ import annotations

import pytest

pytest.importorskip("botocore")

from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from headgate.core.events import Refusal
from headgate.live.pools.aws_client import classify_error
from headgate.live.pools.remote_pool import Failed, Lost, Refused

URL = "http://nowhere"


def answered(status: int, code: str = "Some") -> ClientError:
    metadata = {"HTTPStatusCode": status}
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": metadata}, "Invoke")


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError(endpoint_url=URL),
        ConnectTimeoutError(endpoint_url=URL),
        NoCredentialsError(),
        answered(403),
        answered(404, "ResourceNotFoundException"),
        answered(400, "UnrecognizedClientException"),
    ],
)
def test_what_was_never_let_in_never_ran(error: Exception) -> None:
    fate = classify_error(error, throttles=(429,))
    assert isinstance(fate, Refused)
    assert fate.reason == Refusal.GONE


def test_only_a_status_that_says_so_is_a_throttle() -> None:
    fate = classify_error(answered(429, "TooManyRequestsException"), throttles=(429,))
    assert isinstance(fate, Refused)
    assert fate.reason == Refusal.THROTTLED
    assert isinstance(classify_error(answered(503), throttles=(429,)), Failed)
    assert isinstance(classify_error(answered(503), throttles=(429, 503)), Refused)


def test_what_a_platform_finds_too_large_never_ran() -> None:
    """Only where that is what the status says: an endpoint's container may mean something else."""
    error = answered(413, "RequestTooLargeException")
    fate = classify_error(error, throttles=(429,), too_large=(413,))
    assert isinstance(fate, Refused)
    assert fate.reason == Refusal.TOO_LARGE
    assert isinstance(classify_error(error, throttles=(429,)), Failed)


@pytest.mark.parametrize(
    "error",
    [
        ReadTimeoutError(endpoint_url=URL),
        ConnectionClosedError(endpoint_url=URL),
        ResponseStreamingError(error="cut off"),
        OSError("whatever"),
    ],
)
def test_of_what_was_sent_and_not_answered_nobody_knows(error: Exception) -> None:
    assert isinstance(classify_error(error, throttles=(429,)), Lost)


@pytest.mark.parametrize("status", [400, 500, 502, 504])
def test_other_answers_are_failures(status: int) -> None:
    assert isinstance(classify_error(answered(status), throttles=(429,)), Failed)
