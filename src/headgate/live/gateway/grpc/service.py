"""The services over gRPC: the Open Inference Protocol's, and the standard `grpc.health.v1`."""

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
from headgate.live.gateway.context import GatewayContext
from headgate.live.gateway.errors import RequestError, memory_exhausted
from headgate.live.gateway.grpc.admission import LOOKAHEAD_BYTES, Rpc, RpcAdmission
from headgate.live.gateway.grpc.messages import SERVICE, Messages
from headgate.live.gateway.grpc.rpc import PendingCall, printable
from headgate.live.gateway.grpc.tensors import encode_response, split_message, tensors
from headgate.live.gateway.http.headers import priority_of, timeout_ns, traceparent
from headgate.live.gateway.http.responses import error_of
from headgate.live.gateway.inference import check_open, check_outputs, find_model, make_call
from headgate.live.gateway.oip.json import VERSION, check_response_size, memoryview_of

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_S: Final = 0.2  # how often `Watch` checks for a change
EXTENSIONS: Final = ("parameters", "schedule_policy")


@final
class Health:
    """The health service, for load balancers and probes: SERVING while the gateway is ready."""

    def __init__(self, api: FrontEndApi, admission: RpcAdmission) -> None:
        self.is_closed = False  # ends every `Watch`
        self._api = api
        self._admission = admission
        admission.add_method(f"/{HEALTH}/Check", self._check, is_public=True)
        admission.add_stream(f"/{HEALTH}/Watch", self._watch)

    async def _check(self, rpc: Rpc) -> bytes:
        status = self._status(await self._service(rpc))
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise RequestError(404, "the service does not exist", reason="unknown_path")
        set_reason(rpc, server_problem(self._api))
        return HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, rpc: Rpc) -> AsyncIterator[bytes]:
        """The status, now and whenever it changes."""
        service = await self._service(rpc)
        sent: int | None = None
        while not self.is_closed:
            status = self._status(service)
            if status != sent:
                sent = status
                yield HealthCheckResponse(status=status).SerializeToString()
            await asyncio.sleep(WATCH_S)

    async def _service(self, rpc: Rpc) -> str:
        try:
            message = await self._admission.read_public(rpc) or b""
            return HealthCheckRequest.FromString(message).service
        except DecodeError:
            raise RequestError(400, "the message is not a HealthCheckRequest") from None

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE):
            return HealthCheckResponse.SERVICE_UNKNOWN
        if server_problem(self._api):
            return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVING


def set_reason(rpc: Rpc, problem: str) -> None:
    """Send why something is not ready as trailing metadata: the messages have no field for it."""
    if problem:
        rpc.context.set_trailing_metadata((("headgate-reason", printable(problem)),))


@final
class InferenceService:
    """The six methods. Messages are parsed here, so that a malformed one is the client's error."""

    def __init__(
        self, context: GatewayContext, admission: RpcAdmission, messages: Messages
    ) -> None:
        self._api = context.api
        self._config = context.config
        self._admission = admission
        self._messages = messages
        admission.add_method(f"/{SERVICE}/ServerLive", self._server_live, is_public=True)
        admission.add_method(f"/{SERVICE}/ServerReady", self._server_ready, is_public=True)
        admission.add_method(f"/{SERVICE}/ServerMetadata", self._server_metadata, is_public=True)
        admission.add_method(f"/{SERVICE}/ModelReady", self._model_ready)
        admission.add_method(f"/{SERVICE}/ModelMetadata", self._model_metadata)
        admission.add_method(f"/{SERVICE}/ModelInfer", self._model_infer)

    # The messages of the first three are empty, and are not read.

    async def _server_live(self, rpc: Rpc) -> bytes:
        return self._encoded("ServerLiveResponse", live=True)

    async def _server_ready(self, rpc: Rpc) -> bytes:
        problem = server_problem(self._api)
        set_reason(rpc, problem)
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
        model = find_model(self._api, request.name, request.version)
        in_full = self._config.expose_errors
        problem = model_problem(self._api, model, in_full=in_full)
        set_reason(rpc, problem)
        return self._encoded("ModelReadyResponse", ready=not problem)

    async def _model_metadata(self, rpc: Rpc) -> bytes:
        request = self._parsed("ModelMetadataRequest", await self._read_small(rpc))
        model = find_model(self._api, request.name, request.version)
        return self._encoded(
            "ModelMetadataResponse",
            name=model.name,
            versions=[VERSION],
            platform=model.platform,
            inputs=[_spec(each) for each in model.inputs],
            outputs=[_spec(each) for each in model.outputs],
        )

    async def _model_infer(self, rpc: Rpc) -> bytes:
        api, tenant = self._api, rpc.tenant
        check_open(api)
        tenant.admit(api.now_ns())
        try:
            call, pending = self._call(rpc, await self._admission.read(rpc))
            rpc.pending = pending
            api.submit(call)
            response = await pending.wait(api, call)
        except RequestError:
            if rpc.pending is not None and rpc.pending.is_expired and rpc.hold is not None:
                rpc.pending.keep_hold(rpc.hold)  # the runtime still uses the inputs
                rpc.hold = None
            raise
        finally:
            rpc.pending = None
            tenant.finish()
        if call.settlement is not None and call.settlement.outcome == Outcome.LATE:
            rpc.context.set_trailing_metadata((("headgate-outcome", "late"),))
        return response

    def _call(self, rpc: Rpc, message: bytes) -> tuple[Call, PendingCall]:
        """The call that a message asks for, with its inputs held. Raises `RequestError`."""
        api, headers = self._api, rpc.headers
        check_open(api)  # the server may have begun to drain while the message arrived
        rest, raw = split_message(message, self._config)
        request = self._parsed("ModelInferRequest", rest)
        model = find_model(api, request.model_name, request.model_version)
        names = [output.name for output in request.outputs]
        check_outputs(model, names)
        parameters = _parameters(request.parameters)
        response = self._messages["ModelInferResponse"](
            model_name=request.model_name, model_version=VERSION, id=request.id
        )
        request_id, is_raw = rpc.request_id, bool(raw)

        # This closure must not refer to the RPC or its message: the RPC refers to the call, and the
        # call to the closure.
        def respond(call: Call) -> bytes:
            error = error_of(call, self._config, request_id)
            if error is not None:
                raise error
            outputs = _requested(call.outputs, names)
            size = sum(memoryview_of(output).nbytes for output in outputs)
            check_response_size(size, self._config.response_bytes_max, is_text=False)
            return encode_response(response, outputs, self._config, is_raw=is_raw)

        pending = PendingCall(respond)
        inputs = tensors(request, raw, self._config)
        assert rpc.hold is not None
        held = len(message) if raw else sum(memoryview_of(tensor).nbytes for tensor in inputs)
        if not rpc.hold.resize(LOOKAHEAD_BYTES + held):
            raise memory_exhausted()
        call = make_call(
            model,
            inputs,
            pending.on_result,
            now_ns=api.now_ns(),
            timeout_ns=self._timeout_ns(rpc, parameters.get("timeout")),
            client_id=rpc.tenant.client_id,
            priority=priority_of(headers, parameters.get("priority")),
        )
        call.trace = traceparent(headers.get(b"traceparent", b"")) or None
        call.client_request_id = rpc.request_id
        rpc.call = call
        return call, pending

    def _timeout_ns(self, rpc: Rpc, parameter: object) -> int:
        """The client's timeout; the RPC's deadline takes precedence over headers and parameters."""
        max_ns = self._config.deadline_max_ns
        left_s = cast("float | None", rpc.context.time_remaining())
        if left_s is None:
            return timeout_ns(rpc.headers, parameter, max_ns)
        return min(max(1, int(left_s * 1e9)), max_ns)

    async def _read_small(self, rpc: Rpc) -> bytes:
        message = await self._admission.read(rpc)
        if len(message) > self._config.http.header_bytes_max:
            problem = f"the message is larger than {self._config.http.header_bytes_max} bytes"
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


def _requested(outputs: list[Tensor], names: list[str]) -> list[Tensor]:
    """The requested outputs in the order of `names`; all of them if there are no names."""
    if not names:
        return outputs
    by_name = {tensor.name: tensor for tensor in outputs}
    for name in names:
        if name not in by_name:
            raise RequestError(400, f"the model returned no output {name[:80]!r}")
    return [by_name[name] for name in names]


def _spec(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
