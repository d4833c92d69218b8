"""The inference service over gRPC: messages in, calls to the runtime, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast, final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headgate import __version__
from headgate.core.states import Outcome
from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call, FrontEndApi, model_problem, server_problem
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.grpc.admission import LOOKAHEAD_BYTES, Rpc, RpcAdmission
from headgate.live.gateway.grpc.messages import SERVICE, Messages
from headgate.live.gateway.grpc.rpc import Pending, printable
from headgate.live.gateway.grpc.tensors import encoded, take_apart, tensors
from headgate.live.gateway.http.headers import priority_of, timeout_ns, traceparent
from headgate.live.gateway.http.request import no_memory
from headgate.live.gateway.http.responses import error_of
from headgate.live.gateway.http.server import HttpServer
from headgate.live.gateway.inference import check_open, check_outputs, find_model, make_call
from headgate.live.gateway.oip.json import VERSION, check_answer, memoryview_of

# The standard `grpc.health.v1`: what balancers and probes ask.


HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_S: Final = 0.2  # how often a change is looked for


@final
class Health:
    """Serving while the gateway says that it is ready, as a whole and for the one service."""

    def __init__(self, serving: FrontEndApi, guard: RpcAdmission) -> None:
        self.is_over = False  # no more changes will come
        self._serving = serving
        self._guard = guard
        guard.add(f"/{HEALTH}/Check", self._check, is_public=True)
        guard.add_stream(f"/{HEALTH}/Watch", self._watch)

    async def _check(self, rpc: Rpc) -> bytes:
        status = self._status(await self._service(rpc))
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise RequestError(404, "there is no such service", reason="unknown_path")
        tell_reason(rpc, server_problem(self._serving))
        return HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, rpc: Rpc) -> AsyncIterator[bytes]:
        """How it is, now and whenever that changes."""
        service = await self._service(rpc)
        told: int | None = None
        while not self.is_over:
            status = self._status(service)
            if status != told:
                told = status
                yield HealthCheckResponse(status=status).SerializeToString()
            await asyncio.sleep(WATCH_S)

    async def _service(self, rpc: Rpc) -> str:
        try:
            message = await self._guard.read_public(rpc) or b""
            return HealthCheckRequest.FromString(message).service
        except DecodeError:
            raise RequestError(400, "the message is not a HealthCheckRequest") from None

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE):
            return HealthCheckResponse.SERVICE_UNKNOWN
        if server_problem(self._serving):
            return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVING


def tell_reason(rpc: Rpc, problem: str) -> None:
    """Say why something is not ready, in metadata: the messages have no field for it."""
    if problem:
        rpc.context.set_trailing_metadata((("headgate-reason", printable(problem)),))


EXTENSIONS: Final = ("parameters", "schedule_policy")


@final
class InferenceService:
    """The six methods. Messages are parsed here, so that a broken one is the client's mistake."""

    def __init__(self, http: HttpServer, guard: RpcAdmission, messages: Messages) -> None:
        self._serving = http.serving
        self._config = http.config
        self._guard = guard
        self._messages = messages
        guard.add(f"/{SERVICE}/ServerLive", self._server_live, is_public=True)
        guard.add(f"/{SERVICE}/ServerReady", self._server_ready, is_public=True)
        guard.add(f"/{SERVICE}/ServerMetadata", self._server_metadata, is_public=True)
        guard.add(f"/{SERVICE}/ModelReady", self._model_ready)
        guard.add(f"/{SERVICE}/ModelMetadata", self._model_metadata)
        guard.add(f"/{SERVICE}/ModelInfer", self._model_infer)

    # The messages of the first three say nothing, and are not read.

    async def _server_live(self, rpc: Rpc) -> bytes:
        return self._encoded("ServerLiveResponse", live=True)

    async def _server_ready(self, rpc: Rpc) -> bytes:
        problem = server_problem(self._serving)
        tell_reason(rpc, problem)
        return self._encoded("ServerReadyResponse", ready=not problem)

    async def _server_metadata(self, rpc: Rpc) -> bytes:
        return self._encoded(
            "ServerMetadataResponse",
            name=self._config.server_name,
            version=__version__,
            extensions=EXTENSIONS,
        )

    async def _model_ready(self, rpc: Rpc) -> bytes:
        request = self._parsed("ModelReadyRequest", await self._read_small(rpc))
        model = find_model(self._serving, request.name, request.version)
        in_full = self._config.expose_errors
        problem = model_problem(self._serving, model, in_full=in_full)
        tell_reason(rpc, problem)
        return self._encoded("ModelReadyResponse", ready=not problem)

    async def _model_metadata(self, rpc: Rpc) -> bytes:
        request = self._parsed("ModelMetadataRequest", await self._read_small(rpc))
        model = find_model(self._serving, request.name, request.version)
        return self._encoded(
            "ModelMetadataResponse",
            name=model.name,
            versions=[VERSION],
            platform=model.platform,
            inputs=[_spec(each) for each in model.inputs],
            outputs=[_spec(each) for each in model.outputs],
        )

    async def _model_infer(self, rpc: Rpc) -> bytes:
        serving, tenant = self._serving, rpc.tenant
        check_open(serving)
        tenant.enter(serving.now_ns())
        try:
            call, pending = self._call(rpc, await self._guard.read(rpc))
            rpc.pending = pending
            serving.submit(call)
            response = await pending.wait(serving, call)
        except RequestError:
            if rpc.pending is not None and rpc.pending.is_expired and rpc.hold is not None:
                rpc.pending.leave(rpc.hold)  # the runtime has the inputs still
                rpc.hold = None
            raise
        finally:
            rpc.pending = None
            tenant.leave()
        if call.outcome == Outcome.LATE:
            rpc.context.set_trailing_metadata((("headgate-outcome", "late"),))
        return response

    def _call(self, rpc: Rpc, message: bytes) -> tuple[Call, Pending]:
        """What a message asks for. Its inputs are held. Raises `RequestError`."""
        serving, headers = self._serving, rpc.headers
        check_open(serving)  # that may have changed while the message came
        rest, raw = take_apart(message, self._config)
        request = self._parsed("ModelInferRequest", rest)
        model = find_model(serving, request.model_name, request.model_version)
        names = [wanted.name for wanted in request.outputs]
        check_outputs(model, names)
        parameters = _parameters(request.parameters)
        answer = self._messages["ModelInferResponse"](
            model_name=request.model_name, model_version=VERSION, id=request.id
        )
        request_id, is_raw = rpc.request_id, bool(raw)

        # Which keeps neither the RPC nor the message: the RPC knows the call, and the call this.
        def respond(call: Call) -> bytes:
            refused = error_of(call, self._config, request_id)
            if refused is not None:
                raise refused
            chosen = _chosen(call.outputs, names)
            size = sum(memoryview_of(output).nbytes for output in chosen)
            check_answer(size, self._config.answer_bytes_max, is_text=False)
            return encoded(answer, chosen, self._config, is_raw=is_raw)

        pending = Pending(respond)
        inputs = tensors(request, raw, self._config)
        assert rpc.hold is not None
        held = len(message) if raw else sum(memoryview_of(tensor).nbytes for tensor in inputs)
        if not rpc.hold.resize(LOOKAHEAD_BYTES + held):
            raise no_memory()
        call = make_call(
            model,
            inputs,
            pending.answered,
            now_ns=serving.now_ns(),
            timeout_ns=self._timeout_ns(rpc, parameters.get("timeout")),
            client_id=rpc.tenant.client_id,
            priority=priority_of(headers, parameters.get("priority")),
        )
        call.trace = traceparent(headers.get(b"traceparent", b"")) or None
        call.client_request_id = rpc.request_id
        rpc.call = call
        return call, pending

    def _timeout_ns(self, rpc: Rpc, parameter: object) -> int:
        """The deadline of the RPC goes before whatever else the client says."""
        max_ns = int(self._config.timeout_max_s * 1e9)
        left_s = cast("float | None", rpc.context.time_remaining())
        if left_s is None:
            return timeout_ns(rpc.headers, parameter, max_ns)
        return min(max(1, int(left_s * 1e9)), max_ns)

    async def _read_small(self, rpc: Rpc) -> bytes:
        message = await self._guard.read(rpc)
        if len(message) > self._config.header_bytes_max:
            problem = f"the message is larger than {self._config.header_bytes_max} bytes"
            raise RequestError(413, problem, reason="too_large")
        return message

    def _parsed(self, name: str, message: bytes) -> Any:
        try:
            return self._messages[name].FromString(message)
        except DecodeError:
            raise RequestError(400, f"the message is not a {name}") from None

    def _encoded(self, message: str, /, **fields: object) -> bytes:
        encoded: bytes = self._messages[message](**fields).SerializeToString()
        return encoded


def _parameters(given: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: getattr(p, p.WhichOneof("parameter_choice") or "", None) for name, p in given.items()
    }


def _chosen(outputs: list[Tensor], names: list[str]) -> list[Tensor]:
    """Those that were asked for, in that order; all of them if none were."""
    if not names:
        return outputs
    by_name = {tensor.name: tensor for tensor in outputs}
    for name in names:
        if name not in by_name:
            raise RequestError(400, f"there was no output {name[:80]!r}")
    return [by_name[name] for name in names]


def _spec(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
