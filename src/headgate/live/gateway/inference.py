"""From tensors and headers to a call: the checks that every front end makes before it submits one.

Independent of protocols: errors are raised as `RequestError` with an HTTP status, which front ends
of other protocols map.

Deadlines, by precedence: `grpc-timeout`, `X-Request-Timeout-Ms`, Envoy's header, the `timeout`
parameter of the Open Inference Protocol. All are durations: clocks of clients cannot be trusted.

Cost objectives, by precedence: `X-Request-Cost-Usd`, the parameter `cost_usd`; in dollars per
request.

Priorities: RFC 9218 has urgencies from 0 to 7, 3 by default. The protocol's `priority` parameter
has 1 for the highest, and 0 for the default. Calls have one scale for both, on which smaller is
more urgent and 0 is the default, so that parameter 1 and `u=0` mean the same.

Trace contexts are the W3C's `traceparent`, sent back if well formed and ignored if not.
"""

from __future__ import annotations

import re
from asyncio import AbstractEventLoop, Handle
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, final

from headgate.core.clock import MILLISECOND_NS
from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call, FrontEndApi, GatewayPhase, ServedModel
from headgate.live.gateway.errors import RequestError, draining

GRPC_UNITS_NS: Final[Mapping[str, int]] = {
    "H": 3_600_000_000_000,
    "M": 60_000_000_000,
    "S": 1_000_000_000,
    "m": 1_000_000,
    "u": 1_000,
    "n": 1,
}
_GRPC: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_MILLISECONDS: Final = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,6})?")
_DOLLARS: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,2})?")
COST_HEADER: Final = b"x-request-cost-usd"
_MS_HEADERS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
URGENCY_DEFAULT: Final = 3
_NAMED_MAX: Final = 10  # models that an error names
PRIORITY_MAX: Final = (1 << 31) - 1  # logs and traces have columns of 32 bits
_URGENCY: Final = re.compile(rb"(?:^|,)[ \t]*u=([0-7])[ \t]*(?:$|[,;])")
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def find_model(api: FrontEndApi, name: str, version: str = "") -> ServedModel:
    """The model of that name. Raises `RequestError` (404; 503 while the server is starting)."""
    model = api.models.get(name)
    if model is None:
        if api.phase is GatewayPhase.STARTING:
            raise _starting()
        known = [*list(api.models)[:_NAMED_MAX], *(["..."] if len(api.models) > _NAMED_MAX else [])]
        problem = f"does not exist; the models: {', '.join(known)}"
        raise RequestError(404, f"the model {name[:200]!r} {problem}", reason="unknown_model")
    if version and version != "1":
        problem = f"has no version {version[:40]!r}; its version: 1"
        raise RequestError(404, f"the model {name!r} {problem}", reason="unknown_model")
    return model


def check_open(api: FrontEndApi) -> None:
    """Raise `RequestError` (503) unless the server accepts new requests."""
    phase = api.phase
    if phase is GatewayPhase.STARTING:
        raise _starting()
    if phase is GatewayPhase.DRAINING:
        raise draining()


def make_call(
    model: ServedModel,
    inputs: list[Tensor],
    on_answer: Callable[[Call], None],
    *,
    now_ns: int,
    timeout_ns: int = 0,
    client_id: int = 0,
    priority: int = 0,
    cost_usd: float = 0.0,
) -> Call:
    """A call of the model, with inputs that fit it, in the model's order.

    `timeout_ns` and `cost_usd` are the client's; 0 leaves the deadline, and the cost, to the
    model's objective. The bytes of each input must agree with its shape already. Raises
    `RequestError`.
    """
    if model.inputs:
        inputs = _fitted(model.inputs, inputs)
    else:
        _check_names(inputs)
    call = Call(
        model.pipeline.id,
        inputs,
        _items(model, inputs) if model.batches else 1,
        on_answer,
        client_id=client_id,
        priority=priority,
        deadline_ns=now_ns + timeout_ns if timeout_ns else 0,
        is_hard=timeout_ns > 0,
        cost_usd=cost_usd,
        is_idempotent=model.is_idempotent,
    )
    call.arrived_ns = now_ns
    return call


def check_outputs(model: ServedModel, names: Sequence[str]) -> None:
    """Raise `RequestError` (400) unless the model has the requested outputs, each only once."""
    if len(set(names)) != len(names):
        raise RequestError(400, "an output is requested twice")
    if not model.outputs:
        return
    known = [spec.name for spec in model.outputs]
    for name in names:
        if name not in known:
            raise RequestError(
                400, f"{model.name!r} has no output {name[:80]!r}; its outputs: {', '.join(known)}"
            )


def requested_outputs(outputs: list[Tensor], names: list[str]) -> list[Tensor]:
    """Outputs in the order of `names`, or all. Raises `RequestError` (400) if one is missing."""
    if not names:
        return outputs
    by_name = {tensor.name: tensor for tensor in outputs}
    for name in names:
        if name not in by_name:
            raise RequestError(400, f"the model returned no output {name[:80]!r}")
    return [by_name[name] for name in names]


def _starting() -> RequestError:
    return RequestError(503, "the server is starting", reason="starting")


def _fitted(specs: tuple[TensorSpec, ...], inputs: list[Tensor]) -> list[Tensor]:
    if len(specs) != len(inputs):
        inputs = _in_order(specs, inputs)
    for index, spec in enumerate(specs):
        tensor = inputs[index]
        if spec.name != tensor.name:
            return _fitted(specs, _in_order(specs, inputs))
        if spec.datatype != tensor.datatype:
            raise RequestError(
                400, f"input {spec.name!r} is {tensor.datatype}; {spec.datatype} is expected"
            )
        if spec.shape != tensor.shape:
            _check_shape(spec, tensor.shape)
    return inputs


def _in_order(specs: tuple[TensorSpec, ...], inputs: list[Tensor]) -> list[Tensor]:
    _check_names(inputs)
    by_name = {tensor.name: tensor for tensor in inputs}
    for spec in specs:
        if spec.name not in by_name:
            others = ", ".join(repr(name[:80]) for name in list(by_name)[:_NAMED_MAX])
            raise RequestError(400, f"input {spec.name!r} is missing; the request has: {others}")
    if len(inputs) > len(specs):
        known = [spec.name for spec in specs]
        name = next(name for name in by_name if name not in known)
        raise RequestError(
            400, f"the model has no input {name[:80]!r}; its inputs: {', '.join(known)}"
        )
    return [by_name[spec.name] for spec in specs]


def _check_names(inputs: list[Tensor]) -> None:
    if not inputs:
        raise RequestError(400, "the request has no inputs")
    names = [tensor.name for tensor in inputs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(400, f"input {twice[:80]!r} is given twice")


def _check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    fits = len(shape) == len(spec.shape)
    if fits:
        for expected, size in zip(spec.shape, shape, strict=True):
            if expected != size and expected != -1:
                fits = False
    if not fits:
        raise RequestError(
            400,
            f"input {spec.name!r} has the shape {list(shape)}; {list(spec.shape)} is expected "
            "(-1: any)",
        )


def _items(model: ServedModel, inputs: list[Tensor]) -> int:
    items = 0
    for tensor in inputs:
        if not tensor.shape:
            raise RequestError(
                400, f"input {tensor.name!r} needs a first dimension, which counts items"
            )
        if items and tensor.shape[0] != items:
            raise RequestError(400, "the inputs differ in their first dimension (items)")
        items = tensor.shape[0]
        if not items:
            raise RequestError(400, f"input {tensor.name!r} has no items")
    if items > model.items_max:
        raise RequestError(
            413, f"the request has {items} items; {model.name!r} accepts at most {model.items_max}"
        )
    return items


def timeout_ns(headers: Mapping[bytes, bytes], timeout_us: object, max_ns: int) -> int:
    """The client's timeout, at most `max_ns`; 0 where the client gives none.

    Raises `RequestError` where a timeout is malformed.

    >>> timeout_ns({b"grpc-timeout": b"20m", b"x-request-timeout-ms": b"5"}, None, 10**12)
    20000000
    >>> timeout_ns({}, 1500, 10**12)
    1500000
    """
    given_ns = 0
    if b"grpc-timeout" in headers:
        given_ns = _grpc_ns(headers[b"grpc-timeout"])
    elif _MS_HEADERS[0] in headers:
        given_ns = _header_ns(_MS_HEADERS[0], headers)
    elif _MS_HEADERS[1] in headers:
        given_ns = _header_ns(_MS_HEADERS[1], headers)
    elif timeout_us is not None:
        given_ns = _parameter_ns(timeout_us)
    return given_ns if given_ns < max_ns else max_ns


@final
class DeadlineTimer:
    """Calls `expire` once a deadline has passed, unless it is cancelled.

    The runtime may be running the call then: only the front end can answer in time.

    The clock of an event loop counts whole milliseconds and rounds: without two of them more, a
    client would be told that its deadline has passed before it has. And a loop runs its timers
    before the callbacks that are ready, such as the one that has the Scheduler decide about what
    has arrived: `expire` comes after these, because a request that is refused has not expired.
    """

    __slots__ = ("_expire", "_handle", "_loop")

    def __init__(self, loop: AbstractEventLoop, left_ns: int, expire: Callable[[], None]) -> None:
        self._loop = loop
        self._expire = expire
        delay_ms = max(0, left_ns) // MILLISECOND_NS + 2
        self._handle: Handle = loop.call_later(delay_ms * 1e-3, self._fire)

    def _fire(self) -> None:
        self._handle = self._loop.call_soon(self._expire)

    def cancel(self) -> None:
        self._handle.cancel()


def milliseconds_ns(text: bytes, what: str) -> int:
    """Parse a duration in milliseconds. Raises `RequestError` unless it is above zero."""
    if _MILLISECONDS.fullmatch(text):
        duration_ns = int(float(text) * 1e6)
        if duration_ns > 0:
            return duration_ns
    raise RequestError(400, f"{what} must be a number of milliseconds above 0, not {_quoted(text)}")


def cost_objective_usd(headers: Mapping[bytes, bytes], parameter: object) -> float:
    """The most that the client's request may cost, in dollars; 0 where the client does not say.

    Raises `RequestError` unless it is a number above zero.

    >>> cost_objective_usd({b"x-request-cost-usd": b"2.5e-6"}, 0.1), cost_objective_usd({}, 0.1)
    (2.5e-06, 0.1)
    """
    if COST_HEADER in headers:
        return _dollars(headers[COST_HEADER].decode("latin-1"), COST_HEADER.decode())
    if parameter is None:
        return 0.0
    what = "parameters.cost_usd"
    if isinstance(parameter, str):
        return _dollars(parameter, what)
    # `type` and not `isinstance`: a bool is an int to Python, but not to a client.
    if (type(parameter) is int or type(parameter) is float) and 0.0 < parameter < inf:
        return float(parameter)
    raise _not_dollars(what, parameter)


def _dollars(text: str, what: str) -> float:
    usd = float(text) if _DOLLARS.fullmatch(text) else 0.0
    if usd > 0.0:
        return usd
    raise _not_dollars(what, text)


def _not_dollars(what: str, given: object) -> RequestError:
    return RequestError(400, f"{what} must be a number of dollars above 0, not {repr(given)[:40]}")


def priority_of(headers: Mapping[bytes, bytes], parameter: object) -> int:
    """The priority of a call; the parameter takes precedence over the header.

    Raises `RequestError` if the parameter is malformed; a malformed header is ignored, as RFC 9218
    demands.

    >>> priority_of({}, 1), priority_of({b"priority": b"u=0, i"}, None), priority_of({}, 0)
    (-3, -3, 0)
    """
    if parameter is not None:
        if type(parameter) is not int or not 0 <= parameter <= PRIORITY_MAX:
            raise RequestError(
                400, f"parameters.priority must be a whole number from 0 to {PRIORITY_MAX}"
            )
        return parameter - 1 - URGENCY_DEFAULT if parameter else 0
    if b"priority" in headers:
        match = _URGENCY.search(headers[b"priority"])
        if match is not None:
            return int(match[1]) - URGENCY_DEFAULT
    return 0


def traceparent(text: bytes | None) -> bytes:
    """The `traceparent` header if it is well formed, otherwise nothing.

    >>> traceparent(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")[:5]
    b'00-0a'
    >>> traceparent(b"00-00000000000000000000000000000000-b7ad6b7169203331-01")
    b''
    """
    return text if text and _TRACEPARENT.fullmatch(text) else b""


def _header_ns(name: bytes, headers: Mapping[bytes, bytes]) -> int:
    return milliseconds_ns(headers[name], name.decode())


def _grpc_ns(text: bytes) -> int:
    match = _GRPC.fullmatch(text)
    if match is None:
        raise RequestError(
            400, f"grpc-timeout must be 1 to 8 digits and one of HMSmun, not {_quoted(text)}"
        )
    return max(1, int(match[1]) * GRPC_UNITS_NS[match[2].decode()])


def _parameter_ns(timeout_us: object) -> int:
    # `type` and not `isinstance`: a bool is an int to Python, but not to a client.
    if type(timeout_us) is not int or timeout_us < 0:
        raise RequestError(
            400, "parameters.timeout must be a whole number of microseconds, 0 or above"
        )
    return timeout_us * 1000  # 0 means no timeout, as in Triton


def _quoted(text: bytes) -> str:
    return repr(text[:40].decode("latin-1"))
