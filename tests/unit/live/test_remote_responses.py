"""Invalid responses of platforms: the call has failed, and nothing else happens."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from remote_rig import remote_call

pytest.importorskip("botocore")

from botocore.exceptions import ClientError

from headgate.config.providers import Provider
from headgate.functions.tensor import Tensor
from headgate.http.interface import STATUS_LINES
from headgate.live.pools.lambda_pool import LambdaFunctions
from headgate.live.pools.remote_pool import CallResult, Done, Failed, check_outputs
from headgate.live.pools.sagemaker_pool import SageMakerEndpoints

DEEP = b"[" * 1_000_000  # deeper than a parser may recurse
RIGHT: dict[str, object] = {"name": "y", "datatype": "FP32", "shape": [2], "data": "AAAAAAAAAAA="}
WRONG: dict[str, dict[str, object]] = {
    "too few bytes": {"shape": [3]},
    "too many bytes": {"shape": [1]},
    "part of an element": {"data": "AAAAAAAAAA=="},
    "a negative dimension": {"shape": [-1, -2]},
    "many dimensions": {"shape": [1] * 40 + [2]},
    "very many elements": {"shape": [1 << 40, 0]},
    "an unknown datatype": {"datatype": "FP1"},
    "a length that lies": {"datatype": "BYTES", "shape": [1], "data": "/wAAAGFhYWE="},
    "no base64": {"data": "???"},
}
# Elements of an endpoint are in JSON.
WRONG_IN_JSON = WRONG.keys() - {"part of an element", "a length that lies", "no base64"}


class Client:
    """Responds to every call with the same bytes, or with an error."""

    def __init__(
        self, body: bytes = b"", error: Exception | None = None, function_error: str = ""
    ) -> None:
        self._body = body
        self._error = error
        self._function_error = function_error

    def invoke(self, **asked: Any) -> dict[str, object]:
        return {"Payload": io.BytesIO(self._body), "FunctionError": self._function_error}

    def invoke_endpoint(self, **asked: Any) -> dict[str, object]:
        if self._error is not None:
            raise self._error
        return {"Body": io.BytesIO(self._body)}


def of_lambda(body: bytes, function_error: str = "") -> CallResult:
    client = Client(body, function_error=function_error)
    return LambdaFunctions(client, Provider("lambda", "f"), 6_000_000).call(remote_call())


def of_sagemaker(body: bytes = b"", error: Exception | None = None) -> CallResult:
    endpoints = SageMakerEndpoints(Client(body, error), Provider("sagemaker", "f"), 0)
    return endpoints.call(remote_call())


def response_body(output: dict[str, object], **more: object) -> bytes:
    """Return the response of a function to the only task of a call."""
    result = [0, [list(output.values())], *more.values()]
    return json.dumps({"headgate": 2, "cold": False, "took_ms": 1.0, "results": [result]}).encode()


def test_valid_response() -> None:
    call_result = of_lambda(response_body(RIGHT))
    assert isinstance(call_result, Done)
    ((result,), (output,)) = call_result.results, call_result.results[0].outputs
    assert (result.error, output.shape, bytes(output.data)) == ("", (2,), bytes(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRONG)
def test_lambda_tensor_must_match_its_bytes(name: str) -> None:
    call_result = of_lambda(response_body({**RIGHT, **WRONG[name]}))
    assert isinstance(call_result, Failed)
    assert call_result.reason.startswith("invalid response: ")


@pytest.mark.parametrize("name", sorted(WRONG_IN_JSON))
def test_endpoint_tensor_must_match_its_elements(name: str) -> None:
    output = {**RIGHT, "data": [0.0, 0.0], **WRONG[name]}
    call_result = of_sagemaker(json.dumps({"outputs": [output]}).encode())
    assert isinstance(call_result, Failed)
    assert call_result.reason.startswith("invalid response: ")


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b'"', b"{}", b"[]", b'{"headgate":1}', b"\xff", b'{"x":' + DEEP, DEEP],
    ids=lambda body: repr(body[:12]),
)
def test_invalid_response_is_a_failure(body: bytes) -> None:
    """Including one that is nested too deeply to be parsed: the calling thread survives."""
    assert isinstance(of_lambda(body), Failed)
    assert isinstance(of_sagemaker(body), Failed)
    assert of_lambda(body, "Unhandled") == Failed("the function failed")


@pytest.mark.parametrize(("took_ms", "longest_ns"), [(-1.0, 0), (1e305, 10**15)])
def test_reported_durations_are_bounded(took_ms: float, longest_ns: int) -> None:
    body = {"headgate": 2, "cold": False, "took_ms": took_ms, "results": []}
    call_result = of_lambda(json.dumps(body).encode())
    assert isinstance(call_result, Done)
    assert 0 <= call_result.took_ns <= longest_ns


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, 400), (413, 413), (504, 504), (0, 500), (-1, 500), (200, 500), (450, 500), (777, 500)],
)
def test_invalid_status_becomes_500(status: int, expected: int) -> None:
    """The gateway has no status line for it, and the client would get no response at all."""
    call_result = of_lambda(response_body(RIGHT, error="no", status=status))
    assert isinstance(call_result, Done)
    assert call_result.results[0].status == expected
    assert expected in STATUS_LINES


@pytest.mark.parametrize("status", [450, 777, "many", None, [400]])
def test_invalid_container_status_becomes_500(status: object) -> None:
    reported = {
        "Error": {"Code": "ModelError", "Message": "it failed"},
        "ResponseMetadata": {"HTTPStatusCode": 424},
        "OriginalStatusCode": status,
        "OriginalMessage": 7,
    }
    assert of_sagemaker(error=ClientError(reported, "InvokeEndpoint")) == Failed("7")


def test_string_elements_are_counted() -> None:
    two = base64.b64decode("AQAAAGEAAAAA")  # "a", and an empty string
    check_outputs([Tensor("y", "BYTES", (2,), memoryview(two))])
    for count in (1, 3, 1 << 25):
        with pytest.raises(ValueError, match=f"are not {count} BYTES"):
            check_outputs([Tensor("y", "BYTES", (count,), memoryview(two))])
