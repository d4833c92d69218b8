"""The envelope: how work goes to a function of somebody else's platform, and its results come back.

Such platforms take JSON and let no header through, so everything travels in the body: the tensors
(their elements in base64), the deadline, and the trace. A ping is an envelope, too: it only keeps
an instance awake.
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
HEAD_BYTES: Final = 1_024  # of a body, beside its requests or results
TOO_LARGE: Final = 413  # the status of a result that an answer could not carry
HOLD_MS: Final = 20.0  # a ping stays so long, or another one might land on the same instance


@final
class TensorJson(Struct, gc=False):
    """A tensor, its elements as base64."""

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
    """What a function is asked. Without `requests` it is a ping."""

    headgate: int
    function: str = ""
    requests: list[RequestJson] = []
    deadline_ms: float | None = None  # from when it was sent
    is_hard: bool = field(default=True, name="gives_up")  # the key in the JSON is older
    traceparent: str | None = None
    tenant: str | None = None
    ping: bool = False
    hold_ms: float = HOLD_MS


@final
class ResultJson(Struct, gc=False):
    """What became of one request: outputs, or an error and whose it is."""

    id: int
    outputs: list[TensorJson]
    unsure: bool = False
    error: str = ""
    status: int = 200


@final
class ResponseJson(Struct, kw_only=True):
    """What a function answers."""

    headgate: int
    cold: bool  # it was the first call of its instance
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
    """Return the body that asks a function to do some work."""
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
    """Return the body that only wakes an instance.

    >>> encode_ping(30)
    b'{"headgate":1,"ping":true,"hold_ms":30}'
    """
    return _ENCODER.encode(CallJson(headgate=VERSION, ping=True, hold_ms=hold_ms))


def body_bytes(parts: Sequence[Sequence[Tensor]]) -> int:
    """Return how long a body is, at most, that carries the tensors of so many requests.

    Elements grow by a third in base64, to a multiple of four. A character of a name may take twelve
    bytes: platforms write what is not ASCII as two escapes of six.
    """
    return HEAD_BYTES + sum(map(_part_bytes, parts))


def _part_bytes(tensors: Sequence[Tensor]) -> int:
    size = 128
    for tensor in tensors:
        elements = -(-_nbytes(tensor) // 3) * 4
        size += 256 + 12 * len(tensor.name) + 24 * len(tensor.shape) + elements
    return size


def parse_call(event: object) -> CallJson:
    """Return what a function was asked, from a body that is decoded. Raises `ValueError`."""
    call = convert(event, CallJson)
    if call.headgate != VERSION:
        raise ValueError(f"version {call.headgate} of the envelope is not known here")
    return call


def unbatched_calls(call: CallJson) -> list[UnbatchedCall]:
    """Return the work that an envelope asks for."""
    return [
        UnbatchedCall(request.id, request.items, [_from_json(tensor) for tensor in request.inputs])
        for request in call.requests
    ]


def encode_response(
    results: Sequence[UnbatchedResult], *, is_cold: bool, took_ms: float
) -> dict[str, object]:
    """Return an answer as plain data, for the platform to encode.

    A result that it has no room for is told as such: whoever asked can have it done elsewhere.
    """
    result_json: list[ResultJson] = []
    left = LAMBDA_PAYLOAD_BYTES_MAX - HEAD_BYTES
    for result in results:
        size = _part_bytes(result.outputs) + 12 * len(result.error)
        if size > left:
            problem = f"its answer takes {size} bytes, more than a call can carry"
            result_json.append(ResultJson(result.task_id, [], error=problem, status=TOO_LARGE))
            continue
        left -= size
        outputs = [_to_json(tensor) for tensor in result.outputs]
        error, status = result.error, result.status
        result_json.append(ResultJson(result.task_id, outputs, result.is_unsure, error, status))
    response = ResponseJson(headgate=VERSION, cold=is_cold, took_ms=took_ms, results=result_json)
    builtins: dict[str, object] = to_builtins(response)
    return builtins


def decode_response(body: bytes) -> tuple[ResponseJson, list[UnbatchedResult]]:
    """Return an answer and what became of each request. Raises `ValueError` if it is none."""
    response = _DECODER.decode(body)
    if response.headgate != VERSION:
        raise ValueError(f"version {response.headgate} of the envelope is not known here")
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
