"""Calls SageMaker endpoints, and those of compatible servers: Open Inference Protocol in JSON.

SageMaker passes no custom headers on, so deadline and trace are sent as custom attributes. Each
endpoint is a node: it is up when it responds, and nothing has to be loaded onto it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from time import monotonic_ns
from typing import Any, Final, final

from botocore.exceptions import ClientError
from msgspec import Struct
from msgspec.json import Decoder, Encoder

from headgate.config.providers import Provider
from headgate.core.errors import error_text, sendable
from headgate.functions.tensor import (
    ITEM_BYTES,
    UNSURE,
    Signature,
    TaskInputs,
    TaskResult,
    Tensor,
    TensorSpec,
)
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError as NotSendable
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.json import memoryview_of, pack_strings, split_strings
from headgate.live.gateway.oip.messages import InputJson
from headgate.live.pools.aws_client import classify_error, first_line, status_of
from headgate.live.pools.remote_pool import (
    CallResult,
    Done,
    Failed,
    Refused,
    RemoteCall,
    error_status,
)

THROTTLES: Final = (429, 503)
MODEL_ERROR: Final = 424
_JSON: Final = "application/json"
_LIMITS: Final = GatewayConfig()


@final
@dataclass(eq=False)
class SageMakerEndpoints:
    """Calls the endpoints of the nodes of one pool. All methods block, and none raises."""

    client: Any  # boto3 has no types
    provider: Provider
    first_node_id: int

    def call(self, call: RemoteCall) -> CallResult:
        """Run a batch as one request, or task by task if that is impossible or fails."""
        began_ns = monotonic_ns()
        tasks = call.tasks
        inputs = concatenate(tasks)
        outcome: CallResult | list[TaskResult] = Failed("")
        if inputs is not None:
            outcome = self._invoke(call, tasks, inputs)
        has_failed = isinstance(outcome, Failed)  # also if it cannot be one request
        if isinstance(outcome, list):
            has_failed = any(result.error for result in outcome)
        if len(tasks) > 1 and has_failed:
            outcome = self._invoke_each(call)
        if isinstance(outcome, list):
            return Done(outcome, monotonic_ns() - began_ns)
        return outcome

    def ping(self, function: str, node_id: int, signature: Signature) -> str:
        """Send a minimal request; return why the endpoint seems to be down, empty if it is up."""
        example = [_example(spec) for spec in signature.inputs]
        target = self._target(function, node_id)
        try:
            body = _encode_inputs(example)
            self.client.invoke_endpoint(EndpointName=target, ContentType=_JSON, Body=body)
        except ClientError as error:
            status = status_of(error)
            message = str(error)
            is_missing = status == 400 and ("not found" in message or "no model" in message)
            is_there = status == MODEL_ERROR or (status == 400 and not is_missing)
            return "" if is_there else f"{target}: {first_line(error)}"
        except Exception as error:  # boto3 may raise anything
            return f"{target}: {first_line(error)}"
        return ""

    def _target(self, function: str, node_id: int | None) -> str:
        number = 1 + (node_id or 0) - self.first_node_id
        return self.provider.target_of(function, number)

    def _invoke_each(self, call: RemoteCall) -> CallResult | list[TaskResult]:
        results: list[TaskResult] = []
        for task in call.tasks:
            outcome = self._invoke(call, [task], task.inputs)
            if not isinstance(outcome, list):
                return outcome
            results += outcome
        return results

    def _invoke(
        self, call: RemoteCall, tasks: list[TaskInputs], inputs: list[Tensor]
    ) -> CallResult | list[TaskResult]:
        try:
            response = self.client.invoke_endpoint(
                EndpointName=self._target(call.function, call.node_id),
                ContentType=_JSON,
                Accept=_JSON,
                Body=_encode_inputs(inputs),
                **_attributes(call),
            )
            body: bytes = response["Body"].read()
        except NotSendable as problem:
            return [TaskResult(task.task_id, [], problem.message, 400) for task in tasks]
        except ClientError as error:
            return _error_results(error, tasks)
        except Exception as error:  # boto3 may raise anything
            return classify_error(error, throttles=THROTTLES)
        try:
            outputs = [oip.tensor(output, _LIMITS) for output in _DECODER.decode(body).outputs]
            parts = split_by_items(outputs, [task.items for task in tasks])
        except (ValueError, RecursionError, NotSendable) as error:
            return Failed(f"invalid response: {error_text(error)}")
        return [
            TaskResult(task.task_id, outputs, is_unsure=any(map(_is_unsure, outputs)))
            for task, outputs in zip(tasks, parts, strict=True)
        ]


def concatenate(tasks: Sequence[TaskInputs]) -> list[Tensor] | None:
    """Return the inputs of all tasks as those of one request; None if that is impossible."""
    if len(tasks) == 1:
        return tasks[0].inputs
    keys = {
        tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in task.inputs)
        for task in tasks
    }
    counts = all(tensor.shape[:1] == (task.items,) for task in tasks for tensor in task.inputs)
    if len(keys) > 1 or not counts:
        return None
    items = sum(task.items for task in tasks)
    return [
        Tensor(
            tensor.name,
            tensor.datatype,
            (items, *tensor.shape[1:]),
            memoryview(b"".join(memoryview_of(task.inputs[node]) for task in tasks)),
        )
        for node, tensor in enumerate(tasks[0].inputs)
    ]


def split_by_items(outputs: Sequence[Tensor], items: Sequence[int]) -> list[list[Tensor]]:
    """Split the outputs of one request by items per task. Raises `ValueError`.

    >>> tensor = Tensor("y", "UINT8", (3,), memoryview(b"abc"))
    >>> [bytes(part[0].data) for part in split_by_items([tensor], [1, 2])]
    [b'a', b'bc']
    """
    if len(items) == 1:
        return [list(outputs)]
    parts: list[list[Tensor]] = [[] for _ in items]
    for tensor in outputs:
        if tensor.shape[:1] != (sum(items),):
            raise ValueError(
                f"output {tensor.name!r} is {list(tensor.shape)} for {sum(items)} items"
            )
        at = 0
        for part, count in zip(parts, items, strict=True):
            shape = (count, *tensor.shape[1:])
            part.append(Tensor(tensor.name, tensor.datatype, shape, _rows(tensor, at, count)))
            at += count
    return parts


def _rows(tensor: Tensor, at: int, count: int) -> memoryview:
    data = memoryview_of(tensor)
    if tensor.datatype == "BYTES":
        width = prod(tensor.shape[1:])
        return memoryview(pack_strings(split_strings(data)[at * width : (at + count) * width]))
    width = len(data) // tensor.shape[0]
    return data[at * width : (at + count) * width]


@final
class _Response(Struct, gc=False):
    outputs: list[InputJson]


def _attributes(call: RemoteCall) -> dict[str, str]:
    """Return the custom attributes. Server and client may drop the request at `timeout_ms`."""
    attributes = []
    time_left_ms = call.time_left_ms(monotonic_ns())
    if time_left_ms is not None:
        name = "timeout_ms" if call.is_hard else "deadline_ms"
        attributes.append(f"{name}={max(1.0, time_left_ms):.3f}")
    if call.traceparent is not None:
        attributes.append(f"traceparent={call.traceparent}")
    if call.tenant is not None:
        attributes.append(f"tenant={call.tenant}")
    return {"CustomAttributes": ";".join(attributes)} if attributes else {}


def _error_results(error: ClientError, tasks: list[TaskInputs]) -> CallResult | list[TaskResult]:
    """Return the results for an error. A client error is a result: a retry would fail as well."""
    status = status_of(error)
    message = error.response.get("Error", {}).get("Message") or error_text(error)
    if status == MODEL_ERROR:
        status = error_status(error.response.get("OriginalStatusCode", 500))
        message = error.response.get("OriginalMessage") or message
    outcome = classify_error(error, throttles=THROTTLES)
    if isinstance(outcome, Refused) or not 400 <= status < 500:
        return Failed(sendable(str(message))) if isinstance(outcome, Failed) else outcome
    return [TaskResult(task.task_id, [], sendable(str(message)), status) for task in tasks]


def _is_unsure(tensor: Tensor) -> bool:
    is_boolean = tensor.name == UNSURE and tensor.datatype == "BOOL"
    return is_boolean and any(memoryview_of(tensor))


def _example(spec: TensorSpec) -> Tensor:
    """Return a tensor of zeros; dimensions of any size are 1."""
    shape = tuple(1 if size < 0 else size for size in spec.shape)
    # An empty string has a length prefix of four bytes.
    data = bytes(prod(shape) * (ITEM_BYTES[spec.datatype] or 4))
    return Tensor(spec.name, spec.datatype, shape, memoryview(data))


def _encode_inputs(inputs: list[Tensor]) -> bytes:
    return _ENCODER.encode({"inputs": [oip.output(tensor) for tensor in inputs]})


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(_Response)
