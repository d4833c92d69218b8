"""Inference over HTTP: `POST /v2/models/{name}/infer`, in JSON or with binary tensors.

Binary tensors are Triton's extension: raw elements of inputs follow the JSON, in its order. A
header gives the length of the JSON, and each input the number of its bytes after the JSON. A
request may send some inputs this way and others in the JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Final, final

from headgate.functions.tensor import Tensor
from headgate.live.call import Call, ServedModel
from headgate.live.gateway.codec.client import Part
from headgate.live.gateway.codec.text import (
    OutputText,
    ParsedRequest,
    ReadText,
    WriteText,
    read_text,
)
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.context import with_body_id
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.request import HttpRequest, Rule
from headgate.live.gateway.http.responses import ResponseBody, ResponseFormat, json_headers
from headgate.live.gateway.inference import (
    check_open,
    check_outputs,
    find_model,
    requested_outputs,
    timeout_ns,
)
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.json import (
    check_bytes,
    check_strings,
    element_count,
    memoryview_of,
    to_json,
)
from headgate.live.gateway.oip.messages import (
    UNSUPPORTED_OF_OUTPUTS,
    VERSION,
    InferRequest,
    InferResponse,
    OutputJson,
    RequestedOutput,
)

LENGTH_HEADER: Final = b"inference-header-content-length"
_DIGITS: Final = re.compile(rb"[0-9]{1,12}")
_EMPTY: Final = memoryview(b"")
_SHORT_BYTES: Final = 1 << 14  # outputs that are encoded at once, whatever their datatype
_OIP: Final = ReadText("oip", "")


def infer_rules() -> dict[str, Rule]:
    rule = Rule(b"POST", infer, is_text=lambda headers: LENGTH_HEADER not in headers)
    return {"/v2/models/{name}/infer": rule, "/v2/models/{name}/versions/{version}/infer": rule}


@final
class OipFormat(ResponseFormat):
    """Responses of the Open Inference Protocol: which outputs, and which of them as raw bytes."""

    __slots__ = ("_id", "_is_binary", "_model_name", "_requested", "names")

    def __init__(self, model_name: str, request: InferRequest) -> None:
        self._model_name = model_name
        self._id = request.id
        self._is_binary = False
        self._requested: dict[str, bool] = {}  # requested outputs, and whether as raw bytes
        self.names: list[str] = []  # of requested outputs; empty: all
        if request.parameters:
            self._is_binary = bool_parameter(request.parameters, "binary_data_output", False)
        if request.outputs:
            self.names = [output.name for output in request.outputs]
            self._requested = {
                output.name: is_binary(output, self._is_binary) for output in request.outputs
            }

    def response(self, call: Call) -> ResponseBody:
        """The outputs, in the order in which they were requested."""
        if not self._requested and not self._is_binary and is_short(call.outputs):
            outputs = [
                OutputJson(tensor.name, tensor.datatype, tensor.shape, data=to_json(tensor))
                for tensor in call.outputs
            ]
            response = InferResponse(self._model_name, outputs, VERSION, self._id)
            return ResponseBody(oip.encode(response))
        return self._long_response(call)

    def _long_response(self, call: Call) -> ResponseBody:
        data: list[memoryview] = []
        raw: list[memoryview] = []
        outputs: list[OutputText] = []
        for tensor in requested_outputs(call.outputs, self.names):
            is_binary = self._requested.get(tensor.name, self._is_binary)
            elements = memoryview_of(tensor)
            size = len(elements) if is_binary else -1
            outputs.append(OutputText(tensor.name, tensor.datatype, tensor.shape, size))
            (raw if is_binary else data).append(elements)
        text = WriteText("oip", self._model_name, self._id, outputs)
        return ResponseBody(text, data, raw, _binary_headers if raw else json_headers)


def infer(request: HttpRequest) -> None:
    """Run a model. Raises `RequestError`."""
    api, route, headers = request.context.api, request.route, request.headers
    assert route is not None
    arrived_ns = api.now_ns()
    check_open(api)
    model = find_model(api, route.name, route.version)
    check_encoding(headers)
    text: Part = request.body
    rest = _EMPTY
    length = headers.get(LENGTH_HEADER)
    if length is not None:
        body = memoryview(text)
        at = json_bytes(length, len(body))
        text, rest = body[:at], body[at:]

    def on_read(parsed: ParsedRequest) -> None:
        response_format = OipFormat(model.name, parsed.request)
        request.response_format = response_format
        submit(request, model, arrived_ns, parsed, rest, response_format.names)

    read_then(request, _OIP, text, arrived_ns, on_read)


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raise `RequestError` (415) if the body is compressed."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError(415, "compressed bodies are not supported")


def read_then(
    request: HttpRequest,
    message: ReadText,
    text: Part,
    arrived_ns: int,
    then: Callable[[ParsedRequest], None],
) -> None:
    """Read text, in the codec if long, and pass it to `then`. Both may raise `RequestError`."""
    context = request.context
    if len(text) <= context.config.inline_bytes_max:
        then(read_text(message, text, context.config))
        return
    if len(text) > context.config.json_bytes_max:
        raise oip.text_too_long(context.config)

    def on_read(parsed: ParsedRequest) -> None:
        check_open(context.api)  # the server may have begun to drain meanwhile
        then(parsed)

    wait_ns = timeout_ns(request.headers, None, context.timeout_max_ns)
    request.read_in_codec(message, text, arrived_ns + wait_ns if wait_ns else 0, on_read)


def submit(
    request: HttpRequest,
    model: ServedModel,
    arrived_ns: int,
    parsed: ParsedRequest,
    rest: memoryview,
    outputs: list[str],
) -> None:
    """Submit the call of a request; `rest` follows its text. Raises `RequestError`."""
    request.request_id = with_body_id(request.request_id, request.headers, parsed.request.id)
    if outputs:
        check_outputs(model, outputs)
    inputs = read_tensors(parsed, request.context.config, rest)
    # Tensors that are views of the body keep the whole body in memory.
    held_bytes = len(request.body) if len(rest) else 0
    for data in parsed.data:
        if data is not None:
            held_bytes += len(data)
    request.submit(model, inputs, parsed.request.parameters or {}, arrived_ns, held_bytes)


def is_short(outputs: list[Tensor]) -> bool:
    """Whether the outputs are encoded in a negligible time."""
    size = 0
    for tensor in outputs:
        size += len(memoryview_of(tensor))
    return size <= _SHORT_BYTES


def _binary_headers(text_bytes: int) -> bytes:
    return (
        b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
        % text_bytes
    )


def json_bytes(text: bytes, body_bytes: int) -> int:
    """The length of a body's JSON, from the header's text. Raises `RequestError` (400)."""
    if not _DIGITS.fullmatch(text) or int(text) > body_bytes:
        raise RequestError(
            400,
            f"the length of the JSON cannot be {text[:40].decode('latin-1')!r}: "
            f"the body has {body_bytes} bytes",
        )
    return int(text)


def read_tensors(
    parsed: ParsedRequest, limits: GatewayConfig, rest: memoryview = _EMPTY
) -> list[Tensor]:
    """The inputs of a request; `rest` is what follows its text. Raises `RequestError` (400)."""
    inputs = []
    at = strings = 0
    for given, data in zip(parsed.request.inputs, parsed.data, strict=True):
        size = given.parameters.get("binary_data_size") if given.parameters else None
        if size is None:
            if data is None:
                raise RequestError(400, f"input {given.name!r} has no data")
        elif data is not None:
            raise RequestError(400, f"input {given.name!r} has both data and binary_data_size")
        elif type(size) is not int or not 0 <= size <= len(rest) - at:
            raise RequestError(
                400,
                f"input {given.name!r}: binary_data_size is {str(size)[:40]}; "
                f"{len(rest) - at} bytes are left",
            )
        else:
            data = rest[at : at + size]
            at += size
            count = element_count(given.shape, given.name, limits.dims_max, limits.elements_max)
            check_bytes(data, given.name, given.datatype, count)
        if given.datatype == "BYTES":
            strings += prod(given.shape)
            check_strings(strings)
        inputs.append(Tensor(given.name, given.datatype, given.shape, data))
    if at != len(rest):
        raise RequestError(400, f"{len(rest) - at} bytes after the JSON belong to no input")
    return inputs


def is_binary(output: RequestedOutput, by_default: bool) -> bool:
    """Whether an output is requested as raw bytes. Raises `RequestError` (400)."""
    if not output.parameters:
        return by_default
    for unsupported in UNSUPPORTED_OF_OUTPUTS:
        if unsupported in output.parameters:
            raise RequestError(400, f"output {output.name!r}: {unsupported} is not supported")
    return bool_parameter(output.parameters, "binary_data", by_default)


def bool_parameter(parameters: Mapping[str, object] | None, name: str, by_default: bool) -> bool:
    """The value of a boolean parameter. Raises `RequestError` (400) if it is not one."""
    value = parameters.get(name, by_default) if parameters else by_default
    if not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false")
    return value
