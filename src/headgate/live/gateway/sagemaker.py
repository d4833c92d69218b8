"""SageMaker: what its containers must offer, and what its clients call.

A container is asked `GET /ping` and `POST /invocations`. Clients (boto3) call
`POST /endpoints/{name}/invocations` and expect that interface's errors. SageMaker strips headers
it does not know, so deadline, priority and trace travel in its custom attributes.
"""

from __future__ import annotations

from typing import Final, final

from msgspec.json import encode

from headgate.live.call import Call
from headgate.live.gateway.answers import JSON, Answer, error_json
from headgate.live.gateway.exchange import Exchange
from headgate.live.gateway.infer import check_coding, read_then, submit
from headgate.live.gateway.intake import check_open, find_model
from headgate.live.gateway.oip import Parameters
from headgate.live.gateway.readiness import problems
from headgate.live.gateway.refusal import Refused
from headgate.live.gateway.routes import Rule
from headgate.live.gateway.sagemaker_bodies import BodyForm, is_text, opaque, parts_of
from headgate.live.gateway.text import Understood
from headgate.live.gateway.traceparent import traceparent
from headgate.live.serving import Phase

ATTRIBUTES: Final = b"x-amzn-sagemaker-custom-attributes"
TARGET: Final = b"x-amzn-sagemaker-target-model"
VARIANT: Final = b"x-Amzn-Invoked-Production-Variant: AllTraffic\r\n"


def sagemaker_rules() -> dict[str, Rule]:
    """The paths of SageMaker."""
    return {
        "/ping": Rule(b"GET", ping, is_open=True),
        "/invocations": Rule(b"POST", invocations, is_text=is_text),
        "/endpoints/{name}/invocations": Rule(
            b"POST", endpoint_invocations, is_text=is_text, form=SageMakerForm(is_endpoint=True)
        ),
    }


@final
class SageMakerForm:
    """Answers in the form the body came in; errors as the client's interface has them."""

    __slots__ = ("_is_endpoint", "body_form")

    def __init__(self, *, is_endpoint: bool) -> None:
        self._is_endpoint = is_endpoint
        self.body_form: BodyForm | None = None  # once the body is understood

    def answer(self, call: Call) -> Answer:
        """Whatever the kind of body is answered with."""
        assert self.body_form is not None
        answer = self.body_form.answer(call)
        lines = answer.lines
        answer.lines = lambda text_bytes: lines(text_bytes) + VARIANT
        return answer

    def refusal(self, refused: Refused, request_id: bytes) -> tuple[int, bytes, bytes]:
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


def ping(exchange: Exchange) -> None:
    """Whether the container is healthy.

    SageMaker replaces one that is not, so it is as long as any of its models can be asked.
    """
    serving = exchange.server.serving
    is_healthy = serving.phase is Phase.READY and len(problems(serving)) < len(serving.models)
    exchange.respond(200 if is_healthy else 503, b"", b"")


def invocations(exchange: Exchange) -> None:
    """Ask the model that is named in a header, or the only one. Raises `Refused`."""
    exchange.form = SageMakerForm(is_endpoint=False)
    models = exchange.server.serving.models
    target = exchange.headers.get(TARGET, b"").decode("latin-1")
    if not target and len(models) == 1:
        target = next(iter(models))
    elif not target:
        check_open(exchange.server.serving)
        raise Refused(400, "name a model in X-Amzn-SageMaker-Target-Model: there are several")
    _invoke(exchange, target)


def endpoint_invocations(exchange: Exchange) -> None:
    """Ask the model that is called like the endpoint. Raises `Refused`."""
    assert exchange.route is not None
    exchange.form = SageMakerForm(is_endpoint=True)
    _invoke(exchange, exchange.route.name)


def _invoke(exchange: Exchange, name: str) -> None:
    serving, form = exchange.server.serving, exchange.form
    assert isinstance(form, SageMakerForm)
    arrived_ns = serving.now_ns()
    check_open(serving)
    model = find_model(serving, name)
    check_coding(exchange.headers)
    attributes = _heed_attributes(exchange) if ATTRIBUTES in exchange.headers else {}
    media_type = exchange.headers.get(b"content-type", b"")
    body = memoryview(exchange.body)
    parts = parts_of(media_type, body, model)

    def go_on(read: Understood) -> None:
        form.body_form = BodyForm(model, read, media_type)
        if attributes:
            read.request.parameters = attributes | (read.request.parameters or {})
        rest = body[:0] if parts is None else parts.rest
        submit(exchange, model, arrived_ns, read, rest, form.body_form.names)

    if parts is None:
        go_on(opaque(body, model))
    else:
        read_then(exchange, parts.message, parts.text, arrived_ns, go_on)


def _heed_attributes(exchange: Exchange) -> Parameters:
    """Put what custom attributes say where it is looked for; what is said there already stays."""
    headers = dict(exchange.headers)
    parameters: Parameters = {}
    for attribute in headers[ATTRIBUTES].replace(b",", b";").split(b";"):
        key, _, value = attribute.strip().partition(b"=")
        if key == b"timeout_ms":
            headers.setdefault(b"x-request-timeout-ms", value)
        elif key == b"priority":
            if not value.isdigit() or len(value) > 10:
                raise Refused(400, "the custom attribute priority must be a whole number")
            parameters.setdefault("priority", int(value))
        elif key == b"traceparent":
            exchange.trace = exchange.trace or traceparent(value)
    exchange.headers = headers
    return parameters


def _service_error(refused: Refused) -> tuple[int, str]:
    """How the service would report it."""
    if refused.reason.startswith("function_") or refused.status in (422, 504):
        return 424, "ModelError"
    if refused.status == 429 or refused.reason == "starting":
        return 429, "ModelNotReadyException"
    if refused.status == 503:
        return 503, "ServiceUnavailable"
    return (500, "InternalFailure") if refused.status == 500 else (400, "ValidationError")
