"""Inference over HTTP: `POST /v2/models/{name}/infer`, in JSON or with binary tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.headers import priority_of, timeout_ns
from headgate.live.gateway.http.request import HttpRequest
from headgate.live.gateway.http.responses import JSON, ResponseBody, error_json, json_lines
from headgate.live.gateway.http.router import Rule
from headgate.live.gateway.inference import check_open, check_outputs, find_model, make_call
from headgate.live.gateway.oip import binary
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.json import (
    InferRequest,
    InferResponse,
    OutputJson,
    memoryview_of,
    to_json,
)

NOTHING: Final = memoryview(b"")
_SHORT_BYTES: Final = 1 << 14  # of an answer that is written at once, whatever it consists of
_OIP: Final = ReadText("oip", "")


def infer_rules() -> dict[str, Rule]:
    """The paths of inference."""
    rule = Rule(b"POST", infer, is_text=lambda headers: binary.LENGTH_HEADER not in headers)
    return {
        "/v2/models/{name}/infer": rule,
        "/v2/models/{name}/versions/{version}/infer": rule,
    }


@final
class OipFormat:
    """How the Open Inference Protocol answers: which outputs, and which of them as raw bytes."""

    __slots__ = ("_id", "_is_binary", "_model_name", "_wanted", "names")

    def __init__(self, model_name: str, request: InferRequest) -> None:
        self._model_name = model_name
        self._id = request.id
        self._is_binary = False
        self._wanted: dict[str, bool] = {}
        self.names: list[str] = []  # that are asked for; none: all
        if request.parameters:
            self._is_binary = binary.bool_parameter(request.parameters, "binary_data_output", False)
        if request.outputs:
            self.names = [output.name for output in request.outputs]
            self._wanted = {
                output.name: binary.is_wanted(output, self._is_binary) for output in request.outputs
            }

    def answer(self, call: Call) -> ResponseBody:
        """The outputs, in the order in which they were asked for."""
        if not self._wanted and not self._is_binary and is_short(call.outputs):
            outputs = [
                OutputJson(tensor.name, tensor.datatype, tensor.shape, data=to_json(tensor))
                for tensor in call.outputs
            ]
            response = InferResponse(self._model_name, outputs, oip.VERSION, self._id)
            return ResponseBody(oip.encode(response))
        return self._long_answer(call)

    def _long_answer(self, call: Call) -> ResponseBody:
        data: list[memoryview] = []
        raw: list[memoryview] = []
        outputs: list[OutputText] = []
        for tensor, is_binary in self._chosen(call):
            elements = memoryview_of(tensor)
            size = len(elements) if is_binary else -1
            outputs.append(OutputText(tensor.name, tensor.datatype, tensor.shape, size))
            (raw if is_binary else data).append(elements)
        text = WriteText("oip", self._model_name, self._id, outputs)
        return ResponseBody(text, data, raw, _binary_lines if raw else json_lines)

    def refusal(self, refused: RequestError, request_id: bytes) -> tuple[int, bytes, bytes]:
        """The protocol's error."""
        return refused.status, JSON, error_json(refused, request_id)

    def _chosen(self, call: Call) -> list[tuple[Tensor, bool]]:
        if not self._wanted:
            return [(tensor, self._is_binary) for tensor in call.outputs]
        by_name = {tensor.name: tensor for tensor in call.outputs}
        for name in self._wanted:
            if name not in by_name:
                raise RequestError(400, f"there is no output {name[:80]!r}")
        return [(by_name[name], is_binary) for name, is_binary in self._wanted.items()]


def infer(exchange: HttpRequest) -> None:
    """Have a model answer a request. Raises `RequestError`."""
    serving, route, headers = exchange.server.serving, exchange.route, exchange.headers
    assert route is not None
    arrived_ns = serving.now_ns()
    check_open(serving)
    model = find_model(serving, route.name, route.version)
    check_coding(headers)
    text: Part = exchange.body
    rest = NOTHING
    length = headers.get(binary.LENGTH_HEADER)
    if length is not None:
        body = memoryview(text)
        at = binary.json_bytes(length, len(body))
        text, rest = body[:at], body[at:]

    def go_on(read: ParsedRequest) -> None:
        form = OipFormat(model.name, read.request)
        exchange.form = form
        submit(exchange, model, arrived_ns, read, rest, form.names)

    read_then(exchange, _OIP, text, arrived_ns, go_on)


def check_coding(headers: Mapping[bytes, bytes]) -> None:
    """See that the body is as it is. Raises `RequestError` (415)."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError(415, "bodies cannot be compressed")


def read_then(
    exchange: HttpRequest,
    message: ReadText,
    text: Part,
    arrived_ns: int,
    go_on: Callable[[ParsedRequest], None],
) -> None:
    """Read text and go on with what it says: at once, or, where it is long, later.

    Raises `RequestError`; so may `go_on`.
    """
    server = exchange.server
    if len(text) <= server.config.inline_bytes_max:
        go_on(read_text(message, text, server.config))
        return
    if len(text) > server.config.json_bytes_max:
        raise oip.too_much_text(server.config)

    def read(understood: ParsedRequest) -> None:
        check_open(server.serving)  # meanwhile it may have been told to end
        go_on(understood)

    wait_ns = timeout_ns(exchange.headers, None, server.timeout_max_ns)
    exchange.read_elsewhere(message, text, arrived_ns + wait_ns if wait_ns else 0, read)


def submit(
    exchange: HttpRequest,
    model: ServedModel,
    arrived_ns: int,
    read: ParsedRequest,
    rest: memoryview,
    outputs: list[str],
) -> None:
    """Make a call of a request and hand it over; `rest` follows its text. Raises `RequestError`."""
    server, headers = exchange.server, exchange.headers
    assert exchange.tenant is not None
    if outputs:
        check_outputs(model, outputs)
    inputs = binary.tensors(read, server.config, rest)
    # Tensors that are views of the body keep all of it.
    held_bytes = len(exchange.body) if len(rest) else 0
    for data in read.data:
        if data is not None:
            held_bytes += len(data)
    parameters = read.request.parameters or {}
    exchange.submit(
        make_call(
            model,
            inputs,
            exchange.answered,
            now_ns=arrived_ns,
            timeout_ns=timeout_ns(headers, parameters.get("timeout"), server.timeout_max_ns),
            client_id=exchange.tenant.client_id,
            priority=priority_of(headers, parameters.get("priority")),
        ),
        held_bytes,
    )


def is_short(outputs: list[Tensor]) -> bool:
    """Whether the text of an answer takes no time worth mentioning."""
    size = 0
    for tensor in outputs:
        size += len(memoryview_of(tensor))
    return size <= _SHORT_BYTES


def _binary_lines(text_bytes: int) -> bytes:
    return (
        b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
        % text_bytes
    )
