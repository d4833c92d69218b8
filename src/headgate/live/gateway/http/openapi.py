"""The OpenAPI document at `/openapi.json`.

It is made for every request, because it contains the names of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.json import encode, schema_components

from headgate import __version__
from headgate.live.gateway.http.health import (
    LiveJson,
    ModelJson,
    ModelReadyJson,
    ReadyJson,
    ServerJson,
)
from headgate.live.gateway.http.request import HttpRequest, Rule
from headgate.live.gateway.http.responses import JSON_HEADER, ErrorJson
from headgate.live.gateway.oip.messages import InferRequest, InferResponse
from headgate.live.gateway.sagemaker import ServiceErrorJson

Document = dict[str, object]

_MESSAGES: Final[tuple[type, ...]] = (
    *(LiveJson, ReadyJson, ServerJson, ModelReadyJson, ModelJson),
    *(InferRequest, InferResponse, ErrorJson, ServiceErrorJson),
)
# The schemas of the messages are made from their types, so that the document cannot drift.
_SCHEMAS: Final = schema_components(_MESSAGES, ref_template="#/components/schemas/{name}")[1]
_ERRORS: Final[Mapping[int, str]] = {
    400: "The request is malformed, or does not fit the model.",
    401: "An API key is required.",
    404: "The model does not exist.",
    406: "The outputs cannot be sent in the requested form.",
    408: "The request took too long to arrive.",
    413: "The request is too large.",
    414: "The request target is too long.",
    415: "Compressed bodies are not supported.",
    422: "Not even an idle server could meet the deadline within the cost objective.",
    424: "The model failed.",
    429: "The server is overloaded, or the client over a limit. `Retry-After` says when to retry.",
    431: "The headers are too many or too large.",
    500: "The model failed, or an internal error of the gateway.",
    503: "The server is not ready, or shutting down. `Retry-After` says when to retry.",
    504: "The deadline has passed.",
}
# Errors of any request, before its route is known.
_ALWAYS: Final = (400, 408, 414, 431, 503)
_INFER: Final = (401, 404, 406, 413, 415, 422, 429, 500, 504)
_TIMEOUT: Final[Document] = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "description": "The client's timeout in milliseconds; the response is 504 after that.",
    "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"},
}
_COST: Final[Document] = {
    "name": "X-Request-Cost-Usd",
    "in": "header",
    "description": "The most that the request may cost, in dollars; 422 if that is too little.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,12}(\\.[0-9]{1,24})?([eE][+-]?[0-9]{1,2})?$"},
}


def openapi_rules() -> dict[str, Rule]:
    return {"/openapi.json": Rule(b"GET", openapi, is_public=True)}


def openapi(request: HttpRequest) -> None:
    context = request.context
    content = document(sorted(context.api.models), has_keys=bool(context.config.keys))
    request.respond(200, JSON_HEADER, encode(content))


def document(model_names: list[str], *, has_keys: bool = False) -> Document:
    components: Document = {"schemas": _SCHEMAS}
    content: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headgate",
            "version": __version__,
            "description": "Inference with latency objectives, by the Open Inference Protocol.",
        },
        "paths": _server_paths() | _model_paths(model_names) | _sagemaker_paths(model_names),
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        content["security"] = [{"key": []}]
    return content


def _server_paths() -> Document:
    live = _get("Whether the server is alive", _response(LiveJson))
    ready = _get(
        "Whether the server is ready", _response(ReadyJson), _response(ReadyJson, "Not ready.")
    )
    metadata = _get("Metadata of the server", _response(ServerJson))
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        **dict.fromkeys(("/v2/health/live", "/livez", "/healthz"), live),
        **dict.fromkeys(("/v2/health/ready", "/readyz"), ready),
        **dict.fromkeys(("/v2", "/v2/"), metadata),
        "/metrics": _get("Metrics", {"description": "In a format of Prometheus.", "content": text}),
        "/openapi.json": _get(
            "This document", {"description": "OpenAPI.", "content": _json({"type": "object"})}
        ),
        "/ping": _get(
            "Whether the container is healthy",
            {"description": "Healthy."},
            {"description": "The server is not ready, or shutting down."},
        ),
    }


def _model_paths(names: list[str]) -> Document:
    paths: Document = {}
    raw: Document = {"application/octet-stream": {"schema": {}}}  # JSON, then raw tensors
    outputs: Document = {"description": "The outputs.", "content": _json(_ref(InferResponse)) | raw}
    for version in (False, True):
        path = "/v2/models/{model}" + ("/versions/{version}" if version else "")
        parameters = [_parameter("model", names)]
        if version:
            parameters.append(_parameter("version", ["1"]))
        metadata = _get("Metadata of a model", _response(ModelJson), more=(401, 404))
        not_ready: Document = {
            "description": "The model is not ready.",
            "content": _json({"anyOf": [_ref(ModelReadyJson), _ref(ErrorJson)]}),
        }
        ready = _get(
            "Whether a model is ready", _response(ModelReadyJson), not_ready, more=(401, 404)
        )
        paths[path] = metadata | {"parameters": parameters}
        paths[f"{path}/ready"] = ready | {"parameters": parameters}
        infer = {
            "summary": "Run a model",
            "parameters": [_TIMEOUT, _COST],
            "requestBody": {"required": True, "content": _json(_ref(InferRequest))},
            "responses": {"200": outputs} | _errors(_INFER),
        }
        paths[f"{path}/infer"] = {"post": infer, "parameters": parameters}
    return paths


def _sagemaker_paths(names: list[str]) -> Document:
    kinds = ("application/json", "text/csv", "application/octet-stream")
    anything: Document = {kind: {"schema": {}} for kind in kinds}
    post: Document = {
        "summary": "Run a model as SageMaker's clients do",
        "requestBody": {"content": {"application/json": {"schema": {}}}},
    }
    ok = {"description": "The outputs, in the format of the request.", "content": anything}
    target = {
        "name": "X-Amzn-SageMaker-Target-Model",
        "in": "header",
        "schema": {"type": "string", "enum": names} if names else {"type": "string"},
    }
    service = {
        str(status): {"description": _ERRORS[status], "content": _json(_ref(ServiceErrorJson))}
        for status in (424, 429, 500)
    }
    early = {  # in the service's form; before the path is known, in the protocol's
        str(status): {
            "description": _ERRORS[status],
            "content": _json({"anyOf": [_ref(ServiceErrorJson), _ref(ErrorJson)]}),
        }
        for status in (400, 413, 503)
    }
    return {
        "/invocations": {
            "post": post | {"parameters": [target], "responses": {"200": ok} | _errors(_INFER)}
        },
        "/endpoints/{model}/invocations": {
            "post": post | {"responses": {"200": ok} | _errors((401,)) | service | early},
            "parameters": [_parameter("model", names)],
        },
    }


def _get(
    summary: str, success: Document, not_ready: Document | None = None, more: tuple[int, ...] = ()
) -> Document:
    responses = {"200": success} | _errors(more)
    if not_ready is not None:
        responses["503"] = not_ready
    return {"get": {"summary": summary, "responses": responses}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Document]:
    return {
        str(status): _response(ErrorJson, _ERRORS[status])
        for status in sorted({*_ALWAYS, *statuses})
    }


def _response(message: type, description: str = "Success.") -> Document:
    return {"description": description, "content": _json(_ref(message))}


def _json(schema: Document) -> Document:
    return {"application/json": {"schema": schema}}


def _ref(message: type) -> Document:
    return {"$ref": f"#/components/schemas/{message.__name__}"}


def _parameter(name: str, allowed: list[str]) -> Document:
    schema: Document = {"type": "string", "minLength": 1}
    if allowed:
        schema["enum"] = allowed
    return {"name": name, "in": "path", "required": True, "schema": schema}
