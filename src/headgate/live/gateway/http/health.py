"""The routes of health, metadata and metrics."""

from __future__ import annotations

from typing import Final, final

from msgspec import Struct
from msgspec.json import Encoder

from headgate import __version__
from headgate.functions.tensor import TensorSpec
from headgate.live.call import ServedModel, model_problem, problems, server_problem
from headgate.live.gateway.http.request import HttpRequest, Rule
from headgate.live.gateway.http.responses import JSON_HEADER
from headgate.live.gateway.inference import find_model
from headgate.live.gateway.oip import json as oip

EXTENSIONS: Final = ("binary_tensor_data", "schedule_policy", "parameters")
_ENCODER: Final = Encoder()


def health_rules() -> dict[str, Rule]:
    """The rules by path."""
    rules = {
        path: Rule(b"GET", live, is_public=True)
        for path in ("/v2/health/live", "/livez", "/healthz")
    }
    rules |= {path: Rule(b"GET", ready, is_public=True) for path in ("/v2/health/ready", "/readyz")}
    rules |= {path: Rule(b"GET", server_metadata, is_public=True) for path in ("/v2", "/v2/")}
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        rules[path] = Rule(b"GET", model_metadata)
        rules[f"{path}/ready"] = Rule(b"GET", model_ready)
    rules["/metrics"] = Rule(b"GET", metrics, is_public=True)
    return rules


@final
class TensorMetadata(Struct, gc=False):
    """One input or output of a model."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@final
class ModelJson(Struct, gc=False):
    """The metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


def live(request: HttpRequest) -> None:
    """The process responds, so it is alive."""
    request.respond(200, JSON_HEADER, b'{"live":true}')


def ready(request: HttpRequest) -> None:
    """Whether the server is ready, and if not, why.

    The protocol's specification says `live` where it means `ready`, so both fields are sent.
    """
    api = request.context.api
    problem, broken = server_problem(api), problems(api)
    content: dict[str, object] = {"ready": not problem, "live": True}
    if problem:
        content["reason"] = problem
    if broken:
        content["models"] = broken
    if breakers := api.breakers():
        content["breakers"] = breakers
    request.respond(503 if problem else 200, JSON_HEADER, _ENCODER.encode(content))


def server_metadata(request: HttpRequest) -> None:
    """The server's name, version and extensions."""
    content = {
        "name": request.context.config.server_name,
        "version": __version__,
        "extensions": EXTENSIONS,
    }
    request.respond(200, JSON_HEADER, _ENCODER.encode(content))


def model_metadata(request: HttpRequest) -> None:
    """The inputs and outputs of a model. Raises `RequestError`."""
    model = _model(request)
    content = ModelJson(
        model.name,
        [oip.VERSION],
        model.platform,
        [_tensor_metadata(spec) for spec in model.inputs],
        [_tensor_metadata(spec) for spec in model.outputs],
    )
    request.respond(200, JSON_HEADER, _ENCODER.encode(content))


def model_ready(request: HttpRequest) -> None:
    """Whether a model is ready, and if not, why. Raises `RequestError`."""
    model = _model(request)
    context = request.context
    problem = model_problem(context.api, model, in_full=context.config.expose_errors)
    content: dict[str, object] = {"name": model.name, "ready": not problem}
    if problem:
        content["reason"] = problem
    request.respond(503 if problem else 200, JSON_HEADER, _ENCODER.encode(content))


def metrics(request: HttpRequest) -> None:
    """The metrics, in the format that the scraper accepts."""
    accept = request.headers.get(b"accept", b"").decode("latin-1")
    text, media_type = request.context.render_metrics(accept)
    request.respond(200, b"Content-Type: %b\r\n" % media_type.encode(), text)


def _model(request: HttpRequest) -> ServedModel:
    assert request.route is not None
    return find_model(request.context.api, request.route.name, request.route.version)


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype, spec.shape)
