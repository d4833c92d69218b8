"""SageMaker: what its containers must offer, and what its clients call.

A container is asked `GET /ping` and `POST /invocations`. Clients (boto3) call
`POST /endpoints/{name}/invocations` and expect that interface's errors. SageMaker strips headers
it does not know, so deadline, priority and trace travel in its custom attributes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, final

from msgspec import Struct
from msgspec.json import encode

from headgate.functions.tensor import TensorSpec
from headgate.live.call import Call, GatewayPhase, ServedModel, problems
from headgate.live.gateway.codec.text import OutputText, ParsedRequest, ReadText, WriteText
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.headers import traceparent
from headgate.live.gateway.http.request import HttpRequest
from headgate.live.gateway.http.responses import JSON, ResponseBody, error_json, json_lines
from headgate.live.gateway.http.router import Rule
from headgate.live.gateway.inference import check_open, find_model
from headgate.live.gateway.oip import binary
from headgate.live.gateway.oip.http import OipFormat, check_coding, read_then, submit
from headgate.live.gateway.oip.json import (
    InferRequest,
    InputJson,
    Parameters,
    memoryview_of,
    pack_strings,
)

# Bodies that SageMaker's clients send, and the answers each kind of them expects.
#
# Beside the Open Inference Protocol (JSON, or Triton's binary form under its own media type)
# there are rows for a model of one input: `{"instances": [...]}`, a bare JSON array, or CSV.
# Anything else is one opaque string of bytes.


TRITON: Final = "application/vnd.sagemaker-triton.binary+json"
_TRITON_SIZE: Final = re.compile(rb";\s*json-header-size=(\d+)\s*$")
_TEXTS: Final = {"application/json": "json", "text/csv": "csv"}


@final
class Parts(Struct, gc=False):
    """A body in parts: the text that is to be read, and what follows it."""

    text: memoryview
    rest: memoryview
    message: ReadText


def is_text(headers: Mapping[bytes, bytes]) -> bool:
    """Whether all of a body is text, going by its media type."""
    return _kind(headers.get(b"content-type", b"")) in _TEXTS


def parts_of(media_type: bytes, body: memoryview, model: ServedModel) -> Parts | None:
    """What is text in a body; None: it is one opaque string of bytes. Raises `RequestError`."""
    kind = _kind(media_type)
    if kind == TRITON:
        size = _TRITON_SIZE.search(media_type)
        if size is None:
            raise RequestError(400, f"{TRITON} needs json-header-size=N")
        at = binary.json_bytes(size[1], len(body))
        return Parts(body[:at], body[at:], ReadText("oip", model.name))
    if kind not in _TEXTS:
        return None
    spec = model.inputs[0] if len(model.inputs) == 1 else None
    return Parts(body, body[:0], ReadText(_TEXTS[kind], model.name, spec))


def opaque(body: memoryview, model: ServedModel) -> ParsedRequest:
    """A body of which nothing is understood, as one string for the model."""
    spec = model.inputs[0] if len(model.inputs) == 1 else TensorSpec("body", "BYTES", (1,))
    described = InputJson(spec.name, (1,) * len(spec.shape), "BYTES")
    return ParsedRequest("opaque", InferRequest([described]), [memoryview(pack_strings([body]))])


@final
class BodyFormat:
    """How a body of one kind is answered."""

    def __init__(self, model: ServedModel, read: ParsedRequest, media_type: bytes) -> None:
        self._model = model
        self._form = read.form
        self._is_triton = _kind(media_type) == TRITON
        self._oip = OipFormat(model.name, read.request)
        self.names = self._oip.names

    def answer(self, call: Call) -> ResponseBody:
        """In the form in which was asked."""
        if self._form == "opaque":
            string = _only_string(call)
            if string is not None:
                return ResponseBody(b"", (), [string], _opaque_lines)
        elif self._form != "oip":
            outputs = [OutputText(t.name, t.datatype, t.shape) for t in call.outputs]
            text = WriteText(self._form, self._model.name, "", outputs)
            data = [memoryview_of(tensor) for tensor in call.outputs]
            return ResponseBody(text, data, (), _csv_lines if self._form == "csv" else json_lines)
        answer = self._oip.answer(call)
        if self._is_triton:
            answer.lines = _triton_lines
        return answer


def _kind(media_type: bytes) -> str:
    return media_type.partition(b";")[0].strip().lower().decode("latin-1")


def _only_string(call: Call) -> memoryview | None:
    """The string that is all of an answer, if it is one."""
    if len(call.outputs) != 1 or call.outputs[0].datatype != "BYTES":
        return None
    data = memoryview_of(call.outputs[0])
    size = int.from_bytes(data[:4], "little")
    return data[4:] if len(data) >= 4 and len(data) == 4 + size else None


def _csv_lines(text_bytes: int) -> bytes:
    return b"Content-Type: text/csv; charset=utf-8\r\n"


def _opaque_lines(text_bytes: int) -> bytes:
    return b"Content-Type: application/octet-stream\r\n"


def _triton_lines(text_bytes: int) -> bytes:
    return f"Content-Type: {TRITON};json-header-size={text_bytes}\r\n".encode()


ATTRIBUTES: Final = b"x-amzn-sagemaker-custom-attributes"
TARGET: Final = b"x-amzn-sagemaker-target-model"
VARIANT: Final = b"x-Amzn-Invoked-Production-Variant: AllTraffic\r\n"


def sagemaker_rules() -> dict[str, Rule]:
    """The paths of SageMaker."""
    return {
        "/ping": Rule(b"GET", ping, is_open=True),
        "/invocations": Rule(b"POST", invocations, is_text=is_text),
        "/endpoints/{name}/invocations": Rule(
            b"POST", endpoint_invocations, is_text=is_text, form=SageMakerFormat(is_endpoint=True)
        ),
    }


@final
class SageMakerFormat:
    """Answers in the form the body came in; errors as the client's interface has them."""

    __slots__ = ("_is_endpoint", "body_form")

    def __init__(self, *, is_endpoint: bool) -> None:
        self._is_endpoint = is_endpoint
        self.body_form: BodyFormat | None = None  # once the body is understood

    def answer(self, call: Call) -> ResponseBody:
        """Whatever the kind of body is answered with."""
        assert self.body_form is not None
        answer = self.body_form.answer(call)
        lines = answer.lines
        answer.lines = lambda text_bytes: lines(text_bytes) + VARIANT
        return answer

    def refusal(self, refused: RequestError, request_id: bytes) -> tuple[int, bytes, bytes]:
        """A container's error, or the service's."""
        if not self._is_endpoint:
            return refused.status, JSON, error_json(refused, request_id)
        status, kind = _service_error(refused)
        body: dict[str, object] = {"Message": refused.message}
        if kind == "ModelError":
            body["OriginalStatusCode"] = refused.status
            body["OriginalMessage"] = error_json(refused, request_id).decode()
            body["LogStreamArn"] = ""
        return status, JSON + b"x-amzn-ErrorType: %b\r\n" % kind.encode(), encode(body)


def ping(exchange: HttpRequest) -> None:
    """Whether the container is healthy.

    SageMaker replaces one that is not, so it is as long as any of its models can be asked.
    """
    serving = exchange.server.serving
    is_healthy = serving.phase is GatewayPhase.READY and len(problems(serving)) < len(
        serving.models
    )
    exchange.respond(200 if is_healthy else 503, b"", b"")


def invocations(exchange: HttpRequest) -> None:
    """Ask the model that is named in a header, or the only one. Raises `RequestError`."""
    exchange.form = SageMakerFormat(is_endpoint=False)
    models = exchange.server.serving.models
    target = exchange.headers.get(TARGET, b"").decode("latin-1")
    if not target and len(models) == 1:
        target = next(iter(models))
    elif not target:
        check_open(exchange.server.serving)
        raise RequestError(400, "name a model in X-Amzn-SageMaker-Target-Model: there are several")
    _invoke(exchange, target)


def endpoint_invocations(exchange: HttpRequest) -> None:
    """Ask the model that is called like the endpoint. Raises `RequestError`."""
    assert exchange.route is not None
    exchange.form = SageMakerFormat(is_endpoint=True)
    _invoke(exchange, exchange.route.name)


def _invoke(exchange: HttpRequest, name: str) -> None:
    serving, form = exchange.server.serving, exchange.form
    assert isinstance(form, SageMakerFormat)
    arrived_ns = serving.now_ns()
    check_open(serving)
    model = find_model(serving, name)
    check_coding(exchange.headers)
    attributes = _heed_attributes(exchange) if ATTRIBUTES in exchange.headers else {}
    media_type = exchange.headers.get(b"content-type", b"")
    body = memoryview(exchange.body)
    parts = parts_of(media_type, body, model)

    def go_on(read: ParsedRequest) -> None:
        form.body_form = BodyFormat(model, read, media_type)
        if attributes:
            read.request.parameters = attributes | (read.request.parameters or {})
        rest = body[:0] if parts is None else parts.rest
        submit(exchange, model, arrived_ns, read, rest, form.body_form.names)

    if parts is None:
        go_on(opaque(body, model))
    else:
        read_then(exchange, parts.message, parts.text, arrived_ns, go_on)


def _heed_attributes(exchange: HttpRequest) -> Parameters:
    """Put what custom attributes say where it is looked for; what is said there already stays."""
    headers = dict(exchange.headers)
    parameters: Parameters = {}
    for attribute in headers[ATTRIBUTES].replace(b",", b";").split(b";"):
        key, _, value = attribute.strip().partition(b"=")
        if key == b"timeout_ms":
            headers.setdefault(b"x-request-timeout-ms", value)
        elif key == b"priority":
            if not value.isdigit() or len(value) > 10:
                raise RequestError(400, "the custom attribute priority must be a whole number")
            parameters.setdefault("priority", int(value))
        elif key == b"traceparent":
            exchange.trace = exchange.trace or traceparent(value)
    exchange.headers = headers
    return parameters


def _service_error(refused: RequestError) -> tuple[int, str]:
    """How the service would report it."""
    if refused.reason.startswith("function_") or refused.status in (422, 504):
        return 424, "ModelError"
    if refused.status == 429 or refused.reason == "starting":
        return 429, "ModelNotReadyException"
    if refused.status == 503:
        return 503, "ServiceUnavailable"
    return (500, "InternalFailure") if refused.status == 500 else (400, "ValidationError")
