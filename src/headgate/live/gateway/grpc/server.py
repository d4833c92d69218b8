"""The gRPC front end: the Open Inference Protocol, `grpc.health.v1`, and server reflection.

The protocol's messages come from a compiled descriptor set: `open_inference.proto` is the source,
and `tools/grpc_messages.py` compiles it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast, final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import ssl_server_credentials
from grpc.aio import server
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from headgate import __version__
from headgate.core.errors import ConfigError
from headgate.core.states import Outcome
from headgate.functions.tensor import TensorSpec
from headgate.http.interface import SHUTDOWN_MESSAGE
from headgate.live.call import Call, FrontEndApi, model_problem, server_problem
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.context import GatewayContext, is_request_id, with_body_id
from headgate.live.gateway.errors import RequestError, memory_exhausted
from headgate.live.gateway.grpc.admission import (
    LOOKAHEAD_BYTES,
    Rpc,
    RpcAdmission,
    message_bytes_max,
)
from headgate.live.gateway.grpc.rpc import PendingCall, printable
from headgate.live.gateway.grpc.tensors import (
    encode_response,
    output_names,
    split_message,
    tensors,
)
from headgate.live.gateway.http.responses import error_of
from headgate.live.gateway.inference import (
    check_open,
    check_outputs,
    cost_objective_usd,
    find_model,
    make_call,
    priority_of,
    requested_outputs,
    timeout_ns,
    traceparent,
)
from headgate.live.gateway.oip.json import check_response_size, memoryview_of
from headgate.live.gateway.oip.messages import VERSION

STREAMS_MAX: Final = 256  # concurrent RPCs of one connection; clients queue more
_PING_MS_MIN: Final = 5_000  # clients that ping more often are disconnected
_KEEPALIVE_MS: Final = 20_000  # a silent connection is pinged after this time
# Maximum age of a connection. A client that does not read its response holds part of its tenant's
# memory budget, and can only be cut off by ending its connection. Clients reconnect by themselves.
_AGE_MS: Final = 300_000
_PENDING_MAX: Final = 256  # RPCs that have arrived and are not handled yet
HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_S: Final = 0.2  # how often `Watch` checks for a change
EXTENSIONS: Final = ("parameters", "schedule_policy")
COMPILED: Final = "open_inference.binpb"
SERVICE: Final = "inference.GRPCInferenceService"


@final
class Messages:
    """The message classes by name, and the pool with their descriptors and the service's.

    The pool is not the default one: a client library in the same process has messages of the same
    names, and one pool cannot hold both.
    """

    def __init__(self) -> None:
        self.pool = DescriptorPool()
        compiled = files(__package__).joinpath(COMPILED).read_bytes()
        for file in FileDescriptorSet.FromString(compiled).file:
            self.pool.Add(file)
        service = self.pool.FindServiceByName(SERVICE)
        messages = [
            m for method in service.methods for m in (method.input_type, method.output_type)
        ]
        self._classes = {message.name: GetMessageClass(message) for message in messages}

    # `Any`: the classes are made at run time, so a type checker cannot know their fields.
    def __getitem__(self, name: str) -> Any:
        return self._classes[name]


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
        trailers = [("x-request-id", rpc.request_id.decode("latin-1"))]
        if call.settlement is not None and call.settlement.outcome == Outcome.LATE:
            trailers.append(("headgate-outcome", "late"))
        rpc.context.set_trailing_metadata(trailers)
        return response

    def _call(self, rpc: Rpc, message: bytes) -> tuple[Call, PendingCall]:
        """The call that a message asks for, with its inputs held. Raises `RequestError`."""
        api, headers = self._api, rpc.headers
        check_open(api)  # the server may have begun to drain while the message arrived
        rest, raw = split_message(message, self._config)
        request = self._parsed("ModelInferRequest", rest)
        rpc.request_id = with_body_id(rpc.request_id, headers, request.id)
        model = find_model(api, request.model_name, request.model_version)
        names = output_names(request)
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
            outputs = requested_outputs(call.outputs, names)
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
            cost_usd=cost_objective_usd(headers, parameters.get("cost_usd")),
        )
        call.trace = traceparent(headers.get(b"traceparent", b"")) or None
        call.client_request_id = rpc.request_id
        call.is_id_given = is_request_id(headers.get(b"x-request-id"))
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


def _spec(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


@final
class GrpcServer:
    """Listens on the running event loop, next to the HTTP server and for the same runtime.

    gRPC opens its own socket. To reserve or choose the port beforehand, bind a socket with
    `SO_REUSEPORT` and do not listen on it.
    """

    def __init__(self, context: GatewayContext) -> None:
        """`context` is the HTTP server's: tenants have one budget whichever protocol they use."""
        messages = Messages()
        self._admission = RpcAdmission(context)
        self._server = server(options=_options(context.config, message_bytes_max(context)))
        InferenceService(context, self._admission, messages)
        self._health = Health(context.api, self._admission)
        _Reflection(self._admission, messages)
        self._server.add_generic_rpc_handlers((self._admission,))

    async def start(
        self, host: str, port: int, certificate: Path | None = None, key: Path | None = None
    ) -> int:
        """Listen. Returns the port, which gRPC chooses for 0. Raises `ConfigError` if it is taken.

        With a certificate (PEM; its key in the same file unless given), TLS is required.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = self._server.add_insecure_port(address)
            else:
                pair = ((key or certificate).read_bytes(), certificate.read_bytes())
                bound = self._server.add_secure_port(address, ssl_server_credentials([pair]))
        except (OSError, RuntimeError) as error:
            problem = f"gRPC cannot listen on this address: {error}"
            raise ConfigError(problem, key="serve.grpc_port", value=address) from None
        await self._server.start()
        return bound

    def abort_all(self, message: str = SHUTDOWN_MESSAGE) -> None:
        self._admission.abort_all(message)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more RPCs; those in progress are cancelled after `grace_s`."""
        self._health.is_closed = True
        await self._server.stop(grace_s)


def _options(config: GatewayConfig, message_bytes: int) -> list[tuple[str, int]]:
    return [
        # Messages. The first limit is checked when a message begins, not when it has arrived.
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", config.response_bytes_max),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # no compression, as over HTTP
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),  # it would raise the lookahead to what the network carries
        ("grpc.max_metadata_size", config.http.header_bytes_max),
        ("grpc.absolute_max_metadata_size", config.http.header_bytes_max),
        # Connections.
        ("grpc.so_reuseport", 1),
        ("grpc.max_allowed_incoming_connections", config.connections_max),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server.max_pending_requests", _PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _PENDING_MAX),
        ("grpc.server_handshake_timeout_ms", int(config.http.header_timeout_s * 1000)),
        ("grpc.http2.settings_timeout", int(config.http.header_timeout_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS_MIN),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", int(config.http.header_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", int(config.http.idle_timeout_s * 1000)),
        ("grpc.max_connection_age_ms", _AGE_MS),
        (
            "grpc.max_connection_age_grace_ms",
            int(1000 * (config.deadline_max_ns / 1e9 + config.http.write_timeout_s)),
        ),
    ]


@final
class _Reflection:
    """Server reflection: tools list the services and their messages."""

    def __init__(self, admission: RpcAdmission, messages: Messages) -> None:
        for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            messages.pool.AddSerializedFile(file.serialized_pb)
        self._admission = admission
        self._servicer = ReflectionServicer((SERVICE, HEALTH, REFLECTION), messages.pool)
        admission.add_stream(f"/{REFLECTION}/ServerReflectionInfo", self._reflect)

    async def _reflect(self, rpc: Rpc) -> AsyncIterator[bytes]:
        while (message := await self._admission.read_public(rpc)) is not None:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(message)
            except DecodeError:
                raise RequestError(400, "the message is not a ServerReflectionRequest") from None
            for response in self._servicer.ServerReflectionInfo(iter((request,)), rpc.context):
                yield response.SerializeToString()
