"""SageMaker: what its containers must offer, and what its clients call.

A container serves `GET /ping` and `POST /invocations`. Clients (boto3) call
`POST /endpoints/{name}/invocations` and expect that service's errors. SageMaker strips headers that
it does not know, so deadline, cost objective, priority and trace context travel in its custom
attributes.

Bodies may be in the Open Inference Protocol (JSON, or Triton's binary form under its own media
type). For models with one input there are rows as well: `{"instances": [...]}`, a bare JSON array,
or CSV. A body of any other media type is one opaque string. A response has the format of its
request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, final

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import encode

from headgate.functions.tensor import TensorSpec
from headgate.live.call import Call, GatewayPhase, ServedModel, problems
from headgate.live.gateway.codec.text import OutputText, ParsedRequest, ReadText, WriteText
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.request import HttpRequest, Rule
from headgate.live.gateway.http.responses import (
    JSON_HEADER,
    ResponseBody,
    ResponseFormat,
    error_json,
)
from headgate.live.gateway.inference import COST_HEADER, check_open, find_model, traceparent
from headgate.live.gateway.oip.http import OipFormat, check_encoding, json_bytes, read_then, submit
from headgate.live.gateway.oip.json import memoryview_of, pack_strings
from headgate.live.gateway.oip.messages import InferRequest, InputJson, Parameters

ATTRIBUTES: Final = b"x-amzn-sagemaker-custom-attributes"
TARGET: Final = b"x-amzn-sagemaker-target-model"
VARIANT: Final = b"x-Amzn-Invoked-Production-Variant: AllTraffic\r\n"
TRITON: Final = "application/vnd.sagemaker-triton.binary+json"
_CSV_HEADER: Final = b"Content-Type: text/csv; charset=utf-8\r\n"
_OPAQUE_HEADER: Final = b"Content-Type: application/octet-stream\r\n"
_TRITON_SIZE: Final = re.compile(rb";\s*json-header-size=(\d+)\s*$")
_TEXT_FORMATS: Final = {"application/json": "json", "text/csv": "csv"}


def sagemaker_rules() -> dict[str, Rule]:
    return {
        "/ping": Rule(b"GET", ping, is_public=True),
        "/invocations": Rule(b"POST", invocations, is_text=is_text),
        "/endpoints/{name}/invocations": Rule(
            b"POST",
            endpoint_invocations,
            is_text=is_text,
            error_format=SageMakerFormat(is_endpoint=True),
        ),
    }


@final
class ServiceErrorJson(Struct, gc=False):
    """The body of an error of the service; all fields for an error of the model."""

    Message: str
    OriginalStatusCode: int | UnsetType = UNSET
    OriginalMessage: str | UnsetType = UNSET
    LogStreamArn: str | UnsetType = UNSET


@final
class SageMakerFormat(ResponseFormat):
    """Responses in the format of the body; errors of a container, or of the service."""

    __slots__ = ("_format", "_is_endpoint", "_is_triton", "_oip")

    def __init__(self, *, is_endpoint: bool) -> None:
        self._is_endpoint = is_endpoint
        self._oip: OipFormat | None = None  # set once the body has been parsed

    def set_body(self, model: ServedModel, parsed: ParsedRequest, media_type: bytes) -> list[str]:
        """Respond in the format of a request's body; return the names of requested outputs."""
        self._format = parsed.format
        self._is_triton = _kind(media_type) == TRITON
        self._oip = OipFormat(model.name, parsed.request)
        return self._oip.names

    def response(self, call: Call) -> ResponseBody:
        response = self._body(call)
        headers = response.headers
        response.headers = lambda text_bytes: headers(text_bytes) + VARIANT
        return response

    def _body(self, call: Call) -> ResponseBody:
        if self._format == "opaque":
            string = _only_string(call)
            if string is not None:
                return ResponseBody(b"", (), [string], lambda text_bytes: _OPAQUE_HEADER)
        elif self._format != "oip":
            outputs = [OutputText(t.name, t.datatype, t.shape) for t in call.outputs]
            text = WriteText(self._format, "", "", outputs)
            data = [memoryview_of(tensor) for tensor in call.outputs]
            if self._format == "csv":
                return ResponseBody(text, data, (), lambda text_bytes: _CSV_HEADER)
            return ResponseBody(text, data)
        assert self._oip is not None
        response = self._oip.response(call)
        if self._is_triton:
            response.headers = _triton_headers
        return response

    def error(self, error: RequestError, request_id: bytes) -> tuple[int, bytes, bytes]:
        """A container's error, or the service's."""
        if not self._is_endpoint:
            return super().error(error, request_id)
        status, kind = _service_error(error)
        body = ServiceErrorJson(error.message)
        if kind == "ModelError":
            body.OriginalStatusCode = error.status
            body.OriginalMessage = error_json(error, request_id).decode()
            body.LogStreamArn = ""
        return status, JSON_HEADER + b"x-amzn-ErrorType: %b\r\n" % kind.encode(), encode(body)


def ping(request: HttpRequest) -> None:
    """Whether the container is healthy.

    SageMaker replaces an unhealthy container, so it is healthy as long as any model is ready.
    """
    api = request.context.api
    is_healthy = api.phase is GatewayPhase.READY and len(problems(api)) < len(api.models)
    request.respond(200 if is_healthy else 503, b"", b"", "" if is_healthy else "not_ready")


def invocations(request: HttpRequest) -> None:
    """Run the model that a header names, or the only model. Raises `RequestError`."""
    request.response_format = SageMakerFormat(is_endpoint=False)
    models = request.context.api.models
    target = request.headers.get(TARGET, b"").decode("latin-1")
    if not target and len(models) == 1:
        target = next(iter(models))
    elif not target:
        check_open(request.context.api)
        message = "name a model in X-Amzn-SageMaker-Target-Model: the server has several"
        raise RequestError(400, message)
    _invoke(request, target)


def endpoint_invocations(request: HttpRequest) -> None:
    """Run the model of the endpoint's name. Raises `RequestError`."""
    assert request.route is not None
    request.response_format = SageMakerFormat(is_endpoint=True)
    _invoke(request, request.route.name)


def _invoke(request: HttpRequest, name: str) -> None:
    api, response_format = request.context.api, request.response_format
    assert isinstance(response_format, SageMakerFormat)
    arrived_ns = api.now_ns()
    check_open(api)
    model = find_model(api, name)
    check_encoding(request.headers)
    attributes = _apply_attributes(request) if ATTRIBUTES in request.headers else {}
    media_type = request.headers.get(b"content-type", b"")
    body = memoryview(request.body)
    parts = split_body(media_type, body, model)

    def on_read(parsed: ParsedRequest) -> None:
        names = response_format.set_body(model, parsed, media_type)
        if attributes:
            parsed.request.parameters = attributes | (parsed.request.parameters or {})
        rest = body[:0] if parts is None else parts.rest
        submit(request, model, arrived_ns, parsed, rest, names)

    if parts is None:
        on_read(opaque(body, model))
    else:
        read_then(request, parts.message, parts.text, arrived_ns, on_read)


def _apply_attributes(request: HttpRequest) -> Parameters:
    """Turn custom attributes into headers, parameters and a trace; explicit ones go first."""
    headers = dict(request.headers)
    parameters: Parameters = {}
    for attribute in headers[ATTRIBUTES].replace(b",", b";").split(b";"):
        key, _, value = attribute.strip().partition(b"=")
        if key == b"timeout_ms":
            headers.setdefault(b"x-request-timeout-ms", value)
        elif key == b"cost_usd":
            headers.setdefault(COST_HEADER, value)
        elif key == b"priority":
            if not value.isdigit() or len(value) > 10:
                raise RequestError(400, "the custom attribute priority must be a whole number")
            parameters.setdefault("priority", int(value))
        elif key == b"traceparent":
            request.trace = request.trace or traceparent(value)
    request.headers = headers
    return parameters


def _service_error(error: RequestError) -> tuple[int, str]:
    """Status and kind of the error that the SageMaker service would report."""
    if error.reason.startswith("function_") or error.status in (422, 504):
        return 424, "ModelError"
    if error.status == 429 or error.reason == "starting":
        return 429, "ModelNotReadyException"
    if error.status == 503:
        return 503, "ServiceUnavailable"
    return (500, "InternalFailure") if error.status == 500 else (400, "ValidationError")


@final
class BodyParts(Struct, gc=False):
    """A body in parts: text to read, how to read it, and the raw bytes after it."""

    text: memoryview
    rest: memoryview
    message: ReadText


def is_text(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the whole body is text, by its media type."""
    return _kind(headers.get(b"content-type", b"")) in _TEXT_FORMATS


def split_body(media_type: bytes, body: memoryview, model: ServedModel) -> BodyParts | None:
    """Split a body into text and raw bytes; None if it is opaque. Raises `RequestError`."""
    kind = _kind(media_type)
    if kind == TRITON:
        size = _TRITON_SIZE.search(media_type)
        if size is None:
            raise RequestError(400, f"the media type {TRITON} requires json-header-size=N")
        at = json_bytes(size[1], len(body))
        return BodyParts(body[:at], body[at:], ReadText("oip", model.name))
    if kind not in _TEXT_FORMATS:
        return None
    spec = model.inputs[0] if len(model.inputs) == 1 else None
    return BodyParts(body, body[:0], ReadText(_TEXT_FORMATS[kind], model.name, spec))


def opaque(body: memoryview, model: ServedModel) -> ParsedRequest:
    """A request with the whole body as one string."""
    spec = model.inputs[0] if len(model.inputs) == 1 else TensorSpec("body", "BYTES", (1,))
    described = InputJson(spec.name, (1,) * len(spec.shape), "BYTES")
    return ParsedRequest("opaque", InferRequest([described]), [memoryview(pack_strings([body]))])


def _kind(media_type: bytes) -> str:
    return media_type.partition(b";")[0].strip().lower().decode("latin-1")


def _only_string(call: Call) -> memoryview | None:
    """The only string of the only output; None if the outputs are anything else."""
    if len(call.outputs) != 1 or call.outputs[0].datatype != "BYTES":
        return None
    data = memoryview_of(call.outputs[0])
    size = int.from_bytes(data[:4], "little")
    return data[4:] if len(data) >= 4 and len(data) == 4 + size else None


def _triton_headers(text_bytes: int) -> bytes:
    return f"Content-Type: {TRITON};json-header-size={text_bytes}\r\n".encode()
