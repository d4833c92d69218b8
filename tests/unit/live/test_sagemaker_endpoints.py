"""Batches to endpoints: one request if possible, split correctly."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from time import monotonic_ns
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_rig import remote_call, task

pytest.importorskip("botocore")

from botocore.exceptions import ClientError, EndpointConnectionError

from headgate.config.providers import Provider
from headgate.core.events import Refusal
from headgate.functions.tensor import Signature, TaskInputs, Tensor, TensorSpec
from headgate.live.gateway.oip.json import memoryview_of, pack_strings
from headgate.live.pools.remote_pool import Done, Failed, Refused
from headgate.live.pools.sagemaker_pool import SageMakerEndpoints, concatenate, split_by_items


def model_error(status: int, text: str) -> ClientError:
    body = {
        "Error": {"Code": "ModelError", "Message": "it failed"},
        "ResponseMetadata": {"HTTPStatusCode": 424},
        "OriginalStatusCode": status,
        "OriginalMessage": text,
    }
    return ClientError(body, "InvokeEndpoint")


class Client:
    """Adds one to every number; 13 is rejected, 14 fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.error = error

    def invoke_endpoint(self, **request: Any) -> dict[str, object]:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        (given,) = json.loads(request["Body"])["inputs"]
        if 13 in given["data"]:
            raise model_error(400, "bad luck")
        if 14 in given["data"]:
            raise model_error(500, "worse")
        given["data"] = [number + 1 for number in given["data"]]
        return {"Body": io.BytesIO(json.dumps({"outputs": [given]}).encode())}


def endpoints(client: Client) -> SageMakerEndpoints:
    return SageMakerEndpoints(client, Provider("sagemaker", "e-{function}-{node}"), 5)


def numbers(tensor: Tensor) -> list[int]:
    return list(memoryview_of(tensor))


def test_batch_is_one_request() -> None:
    client = Client()
    call_result = endpoints(client).call(
        remote_call(tasks=[task(1, b"\x01\x02"), task(2, b"\x07")])
    )
    assert isinstance(call_result, Done)
    assert [(r.task_id, numbers(r.outputs[0])) for r in call_result.results] == [
        (1, [2, 3]),
        (2, [8]),
    ]
    assert len(client.asked) == 1


def test_request_carries_no_other_data() -> None:
    """Tensors, deadline, trace and the name of the client."""
    client = Client()
    asked = remote_call(deadline_ns=monotonic_ns() + 10**12, is_hard=True)
    endpoints(client).call(replace(asked, node_id=5, traceparent="00-a-b-01", tenant="ali"))
    (sent,) = client.asked
    timeout, *others = sent.pop("CustomAttributes").split(";")
    assert (timeout.partition("=")[0], others) == (
        "timeout_ms",
        ["traceparent=00-a-b-01", "tenant=ali"],
    )
    assert json.loads(sent.pop("Body")) == {
        "inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [1]}]
    }
    assert sent == {
        "EndpointName": "e-f-1",
        "ContentType": "application/json",
        "Accept": "application/json",
    }


def test_rejected_task_fails_by_itself() -> None:
    client = Client()
    call_result = endpoints(client).call(remote_call(tasks=[task(1, b"\x0d"), task(2, b"\x07")]))
    assert isinstance(call_result, Done)
    assert [(r.status, r.error) for r in call_result.results] == [(400, "bad luck"), (200, "")]
    assert len(client.asked) == 3  # together, and then each by itself


def test_failing_endpoint_is_a_failure() -> None:
    assert endpoints(Client()).call(remote_call(tasks=[task(1, b"\x0e")])) == Failed("worse")


@pytest.mark.parametrize(("status", "reason"), [(429, Refusal.THROTTLED), (503, Refusal.THROTTLED)])
def test_throttled_endpoint_has_run_nothing(status: int, reason: int) -> None:
    error = {"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    call_result = endpoints(Client(ClientError(error, "InvokeEndpoint"))).call(remote_call())
    assert isinstance(call_result, Refused)
    assert call_result.reason == reason


def test_target_is_named_after_function_and_node() -> None:
    client = Client()
    signature = Signature((TensorSpec("x", "UINT8", (-1, 3)),), ())
    assert endpoints(client).ping("f", 6, signature) == ""
    assert client.asked[0]["EndpointName"] == "e-f-2"
    assert json.loads(client.asked[0]["Body"])["inputs"][0]["shape"] == [1, 3]


@pytest.mark.parametrize(
    ("status", "text", "is_there"),
    [
        (400, "input 'x' is missing", True),
        (400, "Endpoint e of account 1 not found.", False),
        (400, "there is no model 'e'", False),
        (424, "", True),
        (429, "", False),
        (503, "", False),
    ],
)
def test_endpoint_that_rejects_the_ping_is_up(status: int, text: str, is_there: bool) -> None:
    error = {
        "Error": {"Code": "X", "Message": text},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    client = Client(ClientError(error, "InvokeEndpoint"))
    assert (endpoints(client).ping("f", 5, Signature()) == "") is is_there
    nobody = endpoints(Client(EndpointConnectionError(endpoint_url="http://x")))
    assert "Could not connect" in nobody.ping("f", 5, Signature())


@given(st.lists(st.lists(st.binary(max_size=5), min_size=1, max_size=4), min_size=1, max_size=5))
def test_concatenate_and_split_round_trip(requests: list[list[bytes]]) -> None:
    """Of text, whose elements differ in length, and of numbers."""
    tasks = [
        TaskInputs(
            id,
            len(texts),
            [
                Tensor("t", "BYTES", (len(texts), 1), memoryview(pack_strings(texts))),
                Tensor("n", "INT16", (len(texts), 2), memoryview(bytes([id] * 4 * len(texts)))),
            ],
        )
        for id, texts in enumerate(requests)
    ]
    together = concatenate(tasks)
    assert together is not None
    assert split_by_items(together, [task.items for task in tasks]) == [
        task.inputs for task in tasks
    ]


def test_different_requests_are_not_concatenated() -> None:
    narrow = TaskInputs(0, 1, [Tensor("x", "UINT8", (1, 2), memoryview(b"ab"))])
    wide = TaskInputs(1, 1, [Tensor("x", "UINT8", (1, 3), memoryview(b"abc"))])
    assert concatenate([narrow, wide]) is None
    with pytest.raises(ValueError, match="for 2"):
        split_by_items([Tensor("y", "UINT8", (1,), memoryview(b"a"))], [1, 1])
