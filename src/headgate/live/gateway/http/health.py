"""Health and metadata: whether it lives, whether it is ready, what it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, final, runtime_checkable

from msgspec import Struct
from msgspec.json import Encoder

from headgate import __version__
from headgate.functions.tensor import TensorSpec
from headgate.live.call import ServedModel, model_problem, problems, server_problem
from headgate.live.gateway.http.request import HttpRequest
from headgate.live.gateway.http.responses import JSON
from headgate.live.gateway.http.router import Rule
from headgate.live.gateway.inference import find_model
from headgate.live.gateway.oip import json as oip

EXTENSIONS: Final = ("binary_tensor_data", "schedule_policy", "parameters")
_ENCODER: Final = Encoder()


def health_rules() -> dict[str, Rule]:
    """The paths of health, metadata and metrics."""
    rules = {
        path: Rule(b"GET", live, is_open=True) for path in ("/v2/health/live", "/livez", "/healthz")
    }
    rules |= {path: Rule(b"GET", ready, is_open=True) for path in ("/v2/health/ready", "/readyz")}
    rules |= {path: Rule(b"GET", about_server, is_open=True) for path in ("/v2", "/v2/")}
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        rules[path] = Rule(b"GET", about_model)
        rules[f"{path}/ready"] = Rule(b"GET", model_ready)
    rules["/metrics"] = Rule(b"GET", metrics, is_open=True)
    return rules


@runtime_checkable
class HasBreakers(Protocol):
    """A runtime that spends money by the call, and what keeps it from doing so."""

    def breakers(self) -> Mapping[str, str]:
        """Whether the breaker of each such pool is closed, open or half-open, and what else is."""


@final
class TensorMetadata(Struct, gc=False):
    """What a model takes or gives."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@final
class ModelJson(Struct, gc=False):
    """What is known about a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


def live(exchange: HttpRequest) -> None:
    """It answers, so it lives."""
    exchange.respond(200, JSON, b'{"live":true}')


def ready(exchange: HttpRequest) -> None:
    """Whether it is ready, and if not, why.

    The protocol's text has `live` where it means `ready`: both are sent.
    """
    serving = exchange.server.serving
    problem, broken = server_problem(serving), problems(serving)
    told: dict[str, object] = {"ready": not problem, "live": True}
    if problem:
        told["reason"] = problem
    if broken:
        told["models"] = broken
    if isinstance(serving, HasBreakers) and serving.breakers():
        told["breakers"] = serving.breakers()
    exchange.respond(503 if problem else 200, JSON, _ENCODER.encode(told))


def about_server(exchange: HttpRequest) -> None:
    """Name, version and extensions."""
    about = {
        "name": exchange.server.config.server_name,
        "version": __version__,
        "extensions": EXTENSIONS,
    }
    exchange.respond(200, JSON, _ENCODER.encode(about))


def about_model(exchange: HttpRequest) -> None:
    """What a model takes and gives. Raises `Refused`."""
    model = _model(exchange)
    about = ModelJson(
        model.name,
        [oip.VERSION],
        model.platform,
        [_described(spec) for spec in model.inputs],
        [_described(spec) for spec in model.outputs],
    )
    exchange.respond(200, JSON, _ENCODER.encode(about))


def model_ready(exchange: HttpRequest) -> None:
    """Whether a model can be asked, and if not, why. Raises `Refused`."""
    model = _model(exchange)
    server = exchange.server
    problem = model_problem(server.serving, model, in_full=server.config.expose_errors)
    told: dict[str, object] = {"name": model.name, "ready": not problem}
    if problem:
        told["reason"] = problem
    exchange.respond(503 if problem else 200, JSON, _ENCODER.encode(told))


def metrics(exchange: HttpRequest) -> None:
    """For Prometheus, in the format that it asks for."""
    accept = exchange.headers.get(b"accept", b"").decode("latin-1")
    text, media_type = exchange.server.render_metrics(accept)
    exchange.respond(200, b"Content-Type: %b\r\n" % media_type.encode(), text)


def _model(exchange: HttpRequest) -> ServedModel:
    assert exchange.route is not None
    return find_model(exchange.server.serving, exchange.route.name, exchange.route.version)


def _described(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype, spec.shape)
