"""Inference over HTTP: `POST /v2/models/{name}/infer`, in JSON or with binary tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from headgate.functions.tensor import Tensor
from headgate.live.call import Call
from headgate.live.gateway import binary, oip
from headgate.live.gateway.answers import JSON, error_json
from headgate.live.gateway.deadline import timeout_ns
from headgate.live.gateway.exchange import Exchange
from headgate.live.gateway.intake import check_open, check_outputs, find_model, make_call
from headgate.live.gateway.oip import InferRequest, InferResponse
from headgate.live.gateway.priority import priority_of
from headgate.live.gateway.refusal import Refused
from headgate.live.gateway.routes import Rule
from headgate.live.serving import Model

BINARY_LINES: Final = (
    b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
)


def infer_rules() -> dict[str, Rule]:
    """The paths of inference."""
    rule = Rule(b"POST", infer)
    return {
        "/v2/models/{name}/infer": rule,
        "/v2/models/{name}/versions/{version}/infer": rule,
    }


@final
class OipForm:
    """How the Open Inference Protocol answers: which outputs, and which of them as raw bytes."""

    __slots__ = ("_id", "_is_binary", "_model_name", "_wanted", "names")

    def __init__(self, model_name: str, request: InferRequest) -> None:
        self._model_name = model_name
        self._id = request.id
        self._is_binary = False
        self._wanted: dict[str, bool] = {}
        self.names: list[str] = []  # that are asked for; none: all
        if request.parameters:
            self._is_binary = binary.truth(request.parameters, "binary_data_output", False)
        if request.outputs:
            self.names = [output.name for output in request.outputs]
            self._wanted = {
                output.name: binary.is_wanted(output, self._is_binary) for output in request.outputs
            }

    def answer(self, call: Call) -> tuple[bytes, bytes]:
        """The outputs, in the order in which they were asked for."""
        if not self._wanted and not self._is_binary:
            outputs = [oip.output(tensor) for tensor in call.outputs]
            response = InferResponse(self._model_name, outputs, oip.VERSION, self._id)
            return JSON, oip.encode(response)
        text, raw = self.parts(call)
        if not raw:
            return JSON, text
        return BINARY_LINES % len(text), b"".join((text, *raw))

    def parts(self, call: Call) -> tuple[bytes, list[memoryview]]:
        """The JSON, and the raw bytes that are to follow it."""
        raw: list[memoryview] = []
        outputs = []
        by_name = {tensor.name: tensor for tensor in call.outputs}
        wanted = self._wanted or dict.fromkeys(by_name, self._is_binary)
        for name, is_binary in wanted.items():
            if name not in by_name:
                raise Refused(400, f"there is no output {name[:80]!r}")
            if is_binary:
                described, data = binary.output(by_name[name])
                raw.append(data)
                outputs.append(described)
            else:
                outputs.append(oip.output(by_name[name]))
        response = InferResponse(self._model_name, outputs, oip.VERSION, self._id)
        return oip.encode(response), raw

    def refusal(self, refused: Refused, request_id: bytes) -> tuple[int, bytes, bytes]:
        """The protocol's error."""
        return refused.status, JSON, error_json(refused, request_id)


def infer(exchange: Exchange) -> None:
    """Have a model answer a request. Raises `Refused`."""
    server, route, headers = exchange.server, exchange.route, exchange.headers
    assert route is not None
    check_open(server.serving)
    model = find_model(server.serving, route.name, route.version)
    check_coding(headers)
    length = headers.get(binary.LENGTH_HEADER)
    if length is None:
        request = oip.decode(exchange.body, server.config)
        inputs = oip.tensors(request, server.config)
    else:
        body = memoryview(exchange.body)
        at = binary.json_bytes(length, len(body))
        request = oip.decode(body[:at], server.config)
        inputs = binary.tensors(request, body[at:], server.config)
    form = OipForm(model.name, request)
    exchange.form = form
    submit(exchange, model, request, inputs, form.names)


def check_coding(headers: Mapping[bytes, bytes]) -> None:
    """See that the body is as it is. Raises `Refused` (415)."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refused(415, "bodies cannot be compressed")


def submit(
    exchange: Exchange,
    model: Model,
    request: InferRequest,
    inputs: list[Tensor],
    outputs: list[str],
) -> None:
    """Make a call of a request and hand it over. Raises `Refused`."""
    server, headers = exchange.server, exchange.headers
    assert exchange.tenant is not None
    if outputs:
        check_outputs(model, outputs)
    parameters = request.parameters or {}
    exchange.submit(
        make_call(
            model,
            inputs,
            exchange.answered,
            now_ns=server.serving.now_ns(),
            timeout_ns=timeout_ns(headers, parameters.get("timeout"), server.timeout_max_ns),
            client_id=exchange.tenant.client_id,
            priority=priority_of(headers, parameters.get("priority")),
        )
    )
