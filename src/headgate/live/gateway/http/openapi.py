"""The OpenAPI document of what is served, at `/openapi.json`: made anew for each reader, because
the names of the models are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.json import encode

from headgate import __version__
from headgate.live.gateway.http.request import HttpRequest
from headgate.live.gateway.http.responses import JSON
from headgate.live.gateway.http.router import Rule

Document = dict[str, object]

_DATATYPES: Final = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
)
_ERRORS: Final[Mapping[int, str]] = {
    400: "It was not understood, or does not fit the model.",
    401: "An API key is needed.",
    404: "There is no such model.",
    406: "The outputs cannot be sent in the form asked for.",
    408: "It took too long to come.",
    413: "It is too large.",
    414: "The target is too long.",
    415: "Bodies cannot be compressed.",
    422: "The deadline cannot be met at any scale.",
    424: "The model failed.",
    429: "Too much is asked for now. `Retry-After` says when to try again.",
    431: "There are too many headers.",
    500: "The model or the gateway made a mistake.",
    503: "It is not ready, or leaving. `Retry-After` says when to try again.",
    504: "The deadline passed.",
}
# What may go wrong with any request at all, before anybody knows what it is.
_ALWAYS: Final = (400, 408, 414, 431, 503)
_INFER: Final = (401, 404, 406, 413, 415, 422, 429, 500, 504)
_TIMEOUT: Final[Document] = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "description": "How long the client will wait; the answer is 504 after that.",
    "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"},
}


def openapi_rules() -> dict[str, Rule]:
    """The path of the document."""
    return {"/openapi.json": Rule(b"GET", openapi, is_open=True)}


def openapi(exchange: HttpRequest) -> None:
    """The document."""
    names = sorted(exchange.server.serving.models)
    exchange.respond(200, JSON, encode(document(names, has_keys=bool(exchange.server.config.keys))))


def document(model_names: list[str], *, has_keys: bool = False) -> Document:
    """The document for these models."""
    made: Document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headgate",
            "version": __version__,
            "description": "Inference under objectives, by the Open Inference Protocol.",
        },
        "paths": _server_paths() | _model_paths(model_names) | _sagemaker_paths(model_names),
        "components": {"schemas": _schemas()},
    }
    if has_keys:
        made["components"] = {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        made["security"] = [{"key": []}]
    return made


def _server_paths() -> Document:
    live = _get("Whether it lives", _answer("Live"))
    ready = _get("Whether it is ready", _answer("Ready"), _answer("Ready", "It is not."))
    about = _get("What it is", _answer("Server"))
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        **dict.fromkeys(("/v2/health/live", "/livez", "/healthz"), live),
        **dict.fromkeys(("/v2/health/ready", "/readyz"), ready),
        **dict.fromkeys(("/v2", "/v2/"), about),
        "/metrics": _get("Metrics", {"description": "As Prometheus has it.", "content": text}),
        "/openapi.json": _get("This document", _answer("Document")),
        "/ping": _get(
            "Whether the container is healthy",
            {"description": "It is."},
            {"description": "It is not ready, or leaving."},
        ),
    }


def _model_paths(names: list[str]) -> Document:
    paths: Document = {}
    raw: Document = {"application/octet-stream": {"schema": {}}}  # JSON, then raw tensors
    answer: Document = {
        "description": "The outputs.",
        "content": _json(_ref("InferResponse")) | raw,
    }
    for version in (False, True):
        path = "/v2/models/{model}" + ("/versions/{version}" if version else "")
        parameters = [_parameter("model", names)]
        if version:
            parameters.append(_parameter("version", ["1"]))
        about = _get("What a model takes and gives", _answer("Model"), more=(401, 404))
        not_ready: Document = {
            "description": "It is not.",
            "content": _json({"anyOf": [_ref("ModelReady"), _ref("Error")]}),
        }
        ready = _get("Whether it can run", _answer("ModelReady"), not_ready, more=(401, 404))
        paths[path] = about | {"parameters": parameters}
        paths[f"{path}/ready"] = ready | {"parameters": parameters}
        infer = {
            "summary": "Ask a model",
            "parameters": [_TIMEOUT],
            "requestBody": {"required": True, "content": _json(_ref("InferRequest"))},
            "responses": {"200": answer} | _errors(_INFER),
        }
        paths[f"{path}/infer"] = {"post": infer, "parameters": parameters}
    return paths


def _sagemaker_paths(names: list[str]) -> Document:
    kinds = ("application/json", "text/csv", "application/octet-stream")
    anything: Document = {kind: {"schema": {}} for kind in kinds}
    post: Document = {
        "summary": "Ask a model as SageMaker's clients do",
        "requestBody": {"content": {"application/json": {"schema": {}}}},
    }
    ok = {"description": "The answer, in the form of the question.", "content": anything}
    target = {
        "name": "X-Amzn-SageMaker-Target-Model",
        "in": "header",
        "schema": {"type": "string", "enum": names} if names else {"type": "string"},
    }
    service = {
        str(status): {"description": _ERRORS[status], "content": _json(_ref("ServiceError"))}
        for status in (424, 429, 500)
    }
    early = {  # by the service's form, or by the protocol's before the path is known
        str(status): {
            "description": _ERRORS[status],
            "content": _json({"anyOf": [_ref("ServiceError"), _ref("Error")]}),
        }
        for status in (400, 413, 503)
    }
    return {
        "/invocations": {
            "post": post | {"parameters": [target], "responses": {"200": ok} | _errors(_INFER)},
        },
        "/endpoints/{model}/invocations": {
            "post": post | {"responses": {"200": ok} | _errors((401,)) | service | early},
            "parameters": [_parameter("model", names)],
        },
    }


def _get(
    summary: str, answer: Document, not_ready: Document | None = None, more: tuple[int, ...] = ()
) -> Document:
    responses = {"200": answer} | _errors(more)
    if not_ready is not None:
        responses["503"] = not_ready
    return {"get": {"summary": summary, "responses": responses}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Document]:
    return {
        str(status): _answer("Error", _ERRORS[status]) for status in sorted({*_ALWAYS, *statuses})
    }


def _answer(schema: str, description: str = "It is as follows.") -> Document:
    return {"description": description, "content": _json(_ref(schema))}


def _json(schema: Document) -> Document:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, allowed: list[str]) -> Document:
    schema: Document = {"type": "string", "minLength": 1}
    if allowed:
        schema["enum"] = allowed
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _object(required: Document, optional: Document | None = None) -> Document:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
    }


def _schemas() -> Document:
    text, truth, number, whole = ({"type": t} for t in ("string", "boolean", "number", "integer"))
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 8}
    spec_shape = {"type": "array", "items": {"type": "integer", "minimum": -1}}
    datatype = {"type": "string", "enum": list(_DATATYPES)}
    data = {"type": "array", "items": {}}
    parameters = {"type": "object", "additionalProperties": {}}
    by_name = {"type": "object", "additionalProperties": text}
    given = {"name": text, "datatype": datatype, "shape": shape}
    specs = _list(_object({"name": text, "datatype": datatype, "shape": spec_shape}))
    return {
        "Live": _object({"live": truth}),
        "Ready": _object(
            {"ready": truth, "live": truth},
            {"reason": text, "models": by_name, "breakers": by_name},
        ),
        "Server": _object({"name": text, "version": text, "extensions": _list(text)}),
        "ModelReady": _object({"name": text, "ready": truth}, {"reason": text}),
        "Model": _object(
            {
                "name": text,
                "versions": _list(text),
                "platform": text,
                "inputs": specs,
                "outputs": specs,
            }
        ),
        "InferRequest": _object(
            {
                "inputs": _list(_object(given | {"data": data}, {"parameters": parameters}))
                | {"minItems": 1}
            },
            {
                "id": text,
                "parameters": parameters,
                "outputs": _list(_object({"name": text}, {"parameters": parameters})),
            },
        ),
        "InferResponse": _object(
            {"model_name": text, "outputs": _list(_object(given, {"data": data}))},
            {"model_version": text, "id": text},
        ),
        "Error": _object(
            {"error": text, "code": whole, "request_id": text},
            {
                "reason": text,
                "predicted_ms": number,
                "deadline_ms": number,
                "retry_after_ms": whole,
            },
        ),
        "ServiceError": _object(
            {"Message": text},
            {"OriginalStatusCode": whole, "OriginalMessage": text, "LogStreamArn": text},
        ),
        "Document": {"type": "object"},
    }


def _list(items: Mapping[str, object]) -> Document:
    return {"type": "array", "items": items}
