"""Classification of AWS errors: above all, whether the call may have run."""

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
def test_denied_call_has_not_run(error: Exception) -> None:
    call_result = classify_error(error, throttles=(429,))
    assert isinstance(call_result, Refused)
    assert call_result.reason == Refusal.GONE


def test_only_throttling_statuses_are_throttled() -> None:
    call_result = classify_error(answered(429, "TooManyRequestsException"), throttles=(429,))
    assert isinstance(call_result, Refused)
    assert call_result.reason == Refusal.THROTTLED
    assert isinstance(classify_error(answered(503), throttles=(429,)), Failed)
    assert isinstance(classify_error(answered(503), throttles=(429, 503)), Refused)


def test_too_large_call_has_not_run() -> None:
    """Only if the status says so: the container of an endpoint may mean something else by it."""
    error = answered(413, "RequestTooLargeException")
    call_result = classify_error(error, throttles=(429,), too_large=(413,))
    assert isinstance(call_result, Refused)
    assert call_result.reason == Refusal.TOO_LARGE
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
def test_unanswered_call_is_lost(error: Exception) -> None:
    assert isinstance(classify_error(error, throttles=(429,)), Lost)


@pytest.mark.parametrize("status", [400, 500, 502, 504])
def test_other_errors_are_failures(status: int) -> None:
    assert isinstance(classify_error(answered(status), throttles=(429,)), Failed)
