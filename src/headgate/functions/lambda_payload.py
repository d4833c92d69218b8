"""JSON payload of FaaS calls: tasks for a function on a FaaS platform, and their results.

Such platforms take JSON and pass no headers on, so everything is in the body: the tasks as a worker
gets them (elements in base64), the deadline, and the trace. A ping is a call without tasks, which
only keeps an instance warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from msgspec import Struct, convert, field, to_builtins
from msgspec.json import Decoder, Encoder

from headgate.core.model import LAMBDA_PAYLOAD_BYTES_MAX
from headgate.functions.tensor import Block, TaskInputs, TaskResult, Tensor

VERSION: Final = 2
HEAD_BYTES: Final = 1_024  # upper bound for a body without its tasks or results
TOO_LARGE: Final = 413  # status of a result that the response has no room for
# How long a ping occupies its instance, so that concurrent pings reach different ones.
HOLD_MS: Final = 20.0


@final
class CallJson(Struct, kw_only=True, omit_defaults=True):
    """The payload of a call. Without `tasks` it is a ping."""

    headgate: int
    function: str = ""
    tasks: list[TaskInputs] = []
    deadline_ms: float | None = None  # from the time of sending
    # The results are worthless after the deadline.
    is_hard: bool = field(default=True, name="gives_up")
    traceparent: str | None = None
    tenant: str | None = None
    ping: bool = False
    hold_ms: float = HOLD_MS


@final
class ResponseJson(Struct, kw_only=True):
    """The payload of a response."""

    headgate: int
    cold: bool  # the first call of its instance
    took_ms: float  # within the handler
    results: list[TaskResult]


def encode_request(
    function: str,
    tasks: Sequence[TaskInputs],
    *,
    deadline_ms: float | None = None,
    is_hard: bool = True,
    traceparent: str | None = None,
    tenant: str | None = None,
) -> bytes:
    """Return the payload that runs tasks on a function."""
    return _ENCODER.encode(
        CallJson(
            headgate=VERSION,
            function=function,
            tasks=list(tasks),
            deadline_ms=deadline_ms,
            is_hard=is_hard,
            traceparent=traceparent,
            tenant=tenant,
        )
    )


def encode_ping(hold_ms: float = HOLD_MS) -> bytes:
    """Return the payload that only keeps an instance warm.

    >>> encode_ping(30)
    b'{"headgate":2,"ping":true,"hold_ms":30}'
    """
    return _ENCODER.encode(CallJson(headgate=VERSION, ping=True, hold_ms=hold_ms))


def body_bytes(parts: Sequence[Sequence[Tensor]]) -> int:
    """Return an upper bound for the payload that carries the tensors of these tasks.

    Base64 grows elements by a third, to a multiple of four. A character of a name may take twelve
    bytes: platforms write non-ASCII characters as two escapes of six.
    """
    return HEAD_BYTES + sum(map(_part_bytes, parts))


def parse_call(event: object) -> CallJson:
    """Return the call in a decoded payload. Raises `ValueError` if it is invalid."""
    call = convert(event, CallJson)
    if call.headgate != VERSION:
        raise ValueError(f"unsupported payload version {call.headgate}")
    return call


def encode_response(
    results: Sequence[TaskResult], *, is_cold: bool, took_ms: float
) -> dict[str, object]:
    """Return a response as plain data, for the platform to encode.

    A result that does not fit gets the status `TOO_LARGE`, so that the gateway can run it
    elsewhere.
    """
    fitting: list[TaskResult] = []
    bytes_left = LAMBDA_PAYLOAD_BYTES_MAX - HEAD_BYTES
    for result in results:
        size = _part_bytes(result.outputs) + 12 * len(result.error)
        if size > bytes_left:
            problem = f"its response takes {size} bytes, more than the payload limit of a call"
            result = TaskResult(result.task_id, [], problem, TOO_LARGE)
        else:
            bytes_left -= size
        fitting.append(result)
    response = ResponseJson(headgate=VERSION, cold=is_cold, took_ms=took_ms, results=fitting)
    builtins: dict[str, object] = to_builtins(response)
    return builtins


def decode_response(body: bytes) -> ResponseJson:
    """Return a response. Raises `ValueError` if it is invalid."""
    response = _DECODER.decode(body)
    if response.headgate != VERSION:
        raise ValueError(f"unsupported payload version {response.headgate}")
    for result in response.results:
        for tensor in result.outputs:
            if isinstance(tensor.data, Block):
                raise ValueError(f"output {tensor.name[:80]!r} has no elements")
    return response


def _part_bytes(tensors: Sequence[Tensor]) -> int:
    size = 128
    for tensor in tensors:
        data = tensor.data
        elements = -(-(data.size if isinstance(data, Block) else data.nbytes) // 3) * 4
        size += 256 + 12 * len(tensor.name) + 24 * len(tensor.shape) + elements
    return size


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(ResponseJson)
