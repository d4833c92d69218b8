"""The routes of health, metadata and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, cast, final

from msgspec import Meta, Struct
from msgspec.json import Encoder

from headgate import __version__
from headgate.functions.tensor import TensorSpec
from headgate.live.call import ServedModel, model_problem, problems, server_problem
from headgate.live.gateway.http.request import HttpRequest, Rule
from headgate.live.gateway.http.responses import JSON_HEADER
from headgate.live.gateway.inference import find_model
from headgate.live.gateway.oip.messages import VERSION, Datatype

EXTENSIONS: Final = ("binary_tensor_data", "schedule_policy", "parameters")
_ENCODER: Final = Encoder()


def health_rules() -> dict[str, Rule]:
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
class LiveJson(Struct, gc=False):
    """The process responds, so it is alive."""

    live: bool = True


@final
class ReadyJson(Struct, gc=False, omit_defaults=True):
    """Whether the server is ready.

    The protocol's specification says `live` where it means `ready`, so both fields are sent.
    """

    ready: bool
    live: bool
    reason: str = ""
    models: dict[str, str] = {}  # models that are not ready: why
    breakers: Mapping[str, str] = {}  # by pool: the state of its circuit breaker


@final
class ServerJson(Struct, gc=False):
    """The metadata of the server."""

    name: str
    version: str
    extensions: tuple[str, ...]


@final
class ModelReadyJson(Struct, gc=False, omit_defaults=True):
    """Whether a model is ready."""

    name: str
    ready: bool
    reason: str = ""


@final
class TensorMetadata(Struct, gc=False):
    """One input or output of a model."""

    name: str
    datatype: Datatype
    shape: tuple[Annotated[int, Meta(ge=-1)], ...]


@final
class ModelJson(Struct, gc=False):
    """The metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


def live(request: HttpRequest) -> None:
    _respond(request, 200, LiveJson())


def ready(request: HttpRequest) -> None:
    """Whether the server is ready, and if not, why."""
    api = request.context.api
    problem = server_problem(api)
    content = ReadyJson(not problem, True, problem, problems(api), api.breakers())
    _respond(request, 503 if problem else 200, content)


def server_metadata(request: HttpRequest) -> None:
    _respond(request, 200, ServerJson(request.context.config.server_name, __version__, EXTENSIONS))


def model_metadata(request: HttpRequest) -> None:
    """The inputs and outputs of a model. Raises `RequestError`."""
    model = _model(request)
    content = ModelJson(
        model.name,
        [VERSION],
        model.platform,
        [_tensor_metadata(spec) for spec in model.inputs],
        [_tensor_metadata(spec) for spec in model.outputs],
    )
    _respond(request, 200, content)


def model_ready(request: HttpRequest) -> None:
    """Whether a model is ready, and if not, why. Raises `RequestError`."""
    model = _model(request)
    context = request.context
    problem = model_problem(context.api, model, in_full=context.config.expose_errors)
    _respond(request, 503 if problem else 200, ModelReadyJson(model.name, not problem, problem))


def metrics(request: HttpRequest) -> None:
    """The metrics, in the format that the scraper accepts."""
    accept = request.headers.get(b"accept", b"").decode("latin-1")

    def respond(page: tuple[bytes, str]) -> None:
        request.respond(200, b"Content-Type: %b\r\n" % page[1].encode(), page[0])

    collect = request.context.collect_metrics
    if collect is None:
        respond(request.context.render_metrics(accept))
    else:
        request.respond_after(collect(accept), respond)


def _model(request: HttpRequest) -> ServedModel:
    assert request.route is not None
    return find_model(request.context.api, request.route.name, request.route.version)


def _respond(request: HttpRequest, status: int, content: Struct) -> None:
    reason = "" if status == 200 else "not_ready"
    request.respond(status, JSON_HEADER, _ENCODER.encode(content), reason)


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, cast("Datatype", spec.datatype), spec.shape)
