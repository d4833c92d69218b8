"""JSON payload of FaaS calls: requests to a function on a FaaS platform, and its results.

Such platforms take JSON and pass no headers on, so everything is in the body: the tensors (elements
in base64), the deadline, and the trace. A ping is a call without requests, which only keeps an
instance warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from msgspec import Struct, convert, field, to_builtins
from msgspec.json import Decoder, Encoder

from headgate.core.model import LAMBDA_PAYLOAD_BYTES_MAX
from headgate.functions.tensor import Block, Tensor
from headgate.functions.unbatched import AnyUnbatchedCall, UnbatchedCall, UnbatchedResult

VERSION: Final = 1
HEAD_BYTES: Final = 1_024  # upper bound for a body without its requests or results
TOO_LARGE: Final = 413  # status of a result that the response has no room for
# How long a ping occupies its instance, so that concurrent pings reach different ones.
HOLD_MS: Final = 20.0


@final
class TensorJson(Struct, gc=False):
    """A tensor, with its elements in base64."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


@final
class RequestJson(Struct, gc=False):
    """One request of a batch."""

    id: int
    items: int
    inputs: list[TensorJson]


@final
class CallJson(Struct, kw_only=True, omit_defaults=True):
    """The payload of a call. Without `requests` it is a ping."""

    headgate: int
    function: str = ""
    requests: list[RequestJson] = []
    deadline_ms: float | None = None  # from the time of sending
    # The results are worthless after the deadline.
    is_hard: bool = field(default=True, name="gives_up")
    traceparent: str | None = None
    tenant: str | None = None
    ping: bool = False
    hold_ms: float = HOLD_MS


@final
class ResultJson(Struct, gc=False):
    """The result of one request: outputs, or an error with its HTTP status."""

    id: int
    outputs: list[TensorJson]
    unsure: bool = False
    error: str = ""
    status: int = 200


@final
class ResponseJson(Struct, kw_only=True):
    """The payload of a response."""

    headgate: int
    cold: bool  # the first call of its instance
    took_ms: float  # within the handler
    results: list[ResultJson]


def encode_request(
    function: str,
    calls: Sequence[AnyUnbatchedCall],
    *,
    deadline_ms: float | None = None,
    is_hard: bool = True,
    traceparent: str | None = None,
    tenant: str | None = None,
) -> bytes:
    """Return the payload that runs requests on a function."""
    return _ENCODER.encode(
        CallJson(
            headgate=VERSION,
            function=function,
            requests=[
                RequestJson(request.task_id, request.items, [_to_json(t) for t in request.inputs])
                for request in calls
            ],
            deadline_ms=deadline_ms,
            is_hard=is_hard,
            traceparent=traceparent,
            tenant=tenant,
        )
    )


def encode_ping(hold_ms: float = HOLD_MS) -> bytes:
    """Return the payload that only keeps an instance warm.

    >>> encode_ping(30)
    b'{"headgate":1,"ping":true,"hold_ms":30}'
    """
    return _ENCODER.encode(CallJson(headgate=VERSION, ping=True, hold_ms=hold_ms))


def body_bytes(parts: Sequence[Sequence[Tensor]]) -> int:
    """Return an upper bound for the payload that carries the tensors of these requests.

    Base64 grows elements by a third, to a multiple of four. A character of a name may take twelve
    bytes: platforms write non-ASCII characters as two escapes of six.
    """
    return HEAD_BYTES + sum(map(_part_bytes, parts))


def _part_bytes(tensors: Sequence[Tensor]) -> int:
    size = 128
    for tensor in tensors:
        elements = -(-_nbytes(tensor) // 3) * 4
        size += 256 + 12 * len(tensor.name) + 24 * len(tensor.shape) + elements
    return size


def parse_call(event: object) -> CallJson:
    """Return the call in a decoded payload. Raises `ValueError` if it is invalid."""
    call = convert(event, CallJson)
    if call.headgate != VERSION:
        raise ValueError(f"unsupported payload version {call.headgate}")
    return call


def unbatched_calls(call: CallJson) -> list[UnbatchedCall]:
    """Return the requests of a call with their tensors."""
    return [
        UnbatchedCall(request.id, request.items, [_from_json(tensor) for tensor in request.inputs])
        for request in call.requests
    ]


def encode_response(
    results: Sequence[UnbatchedResult], *, is_cold: bool, took_ms: float
) -> dict[str, object]:
    """Return a response as plain data, for the platform to encode.

    A result that does not fit gets the status `TOO_LARGE`, so that the gateway can run it
    elsewhere.
    """
    result_json: list[ResultJson] = []
    bytes_left = LAMBDA_PAYLOAD_BYTES_MAX - HEAD_BYTES
    for result in results:
        size = _part_bytes(result.outputs) + 12 * len(result.error)
        if size > bytes_left:
            problem = f"its response takes {size} bytes, more than the payload limit of a call"
            result_json.append(ResultJson(result.task_id, [], error=problem, status=TOO_LARGE))
            continue
        bytes_left -= size
        outputs = [_to_json(tensor) for tensor in result.outputs]
        error, status = result.error, result.status
        result_json.append(ResultJson(result.task_id, outputs, result.is_unsure, error, status))
    response = ResponseJson(headgate=VERSION, cold=is_cold, took_ms=took_ms, results=result_json)
    builtins: dict[str, object] = to_builtins(response)
    return builtins


def decode_response(body: bytes) -> tuple[ResponseJson, list[UnbatchedResult]]:
    """Return a response and the results in it. Raises `ValueError` if it is invalid."""
    response = _DECODER.decode(body)
    if response.headgate != VERSION:
        raise ValueError(f"unsupported payload version {response.headgate}")
    results = [
        UnbatchedResult(
            result_json.id,
            [_from_json(tensor) for tensor in result_json.outputs],
            result_json.error,
            result_json.status,
            result_json.unsure,
        )
        for result_json in response.results
    ]
    return response, results


def _to_json(tensor: Tensor) -> TensorJson:
    assert isinstance(tensor.data, memoryview)
    return TensorJson(tensor.name, tensor.datatype, tensor.shape, tensor.data)


def _from_json(tensor: TensorJson) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data)


def _nbytes(tensor: Tensor) -> int:
    return tensor.data.size if isinstance(tensor.data, Block) else tensor.data.nbytes


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(ResponseJson)
