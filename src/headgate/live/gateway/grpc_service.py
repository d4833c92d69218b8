"""The inference service over gRPC: messages in, calls to the runtime, messages out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from time import monotonic_ns
from typing import Any, Final, NoReturn, cast, final

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext

from headgate import __version__
from headgate.core.outcome import Outcome
from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call
from headgate.live.gateway.access import AccessLog, Asked
from headgate.live.gateway.answers import verdict
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.deadline import timeout_ns
from headgate.live.gateway.grpc_health import tell_reason
from headgate.live.gateway.grpc_messages import SERVICE, Messages
from headgate.live.gateway.grpc_pending import Pending
from headgate.live.gateway.grpc_status import detail_of, status_of, trailers_of
from headgate.live.gateway.grpc_tensors import check_size, fill, tensors
from headgate.live.gateway.intake import check_open, check_outputs, find_model, make_call
from headgate.live.gateway.keys import KeyRing
from headgate.live.gateway.oip import VERSION
from headgate.live.gateway.priority import priority_of
from headgate.live.gateway.readiness import model_problem, server_problem
from headgate.live.gateway.refusal import Refused
from headgate.live.gateway.traceparent import traceparent
from headgate.live.serving import Serving

Context = ServicerContext[bytes, bytes]
Handler = Callable[[bytes, Context], Awaitable[bytes]]

EXTENSIONS: Final = ("parameters", "schedule_policy")

# The call that the RPC of this task has led to, for the access log.
_CALL: Final[ContextVar[Call | None]] = ContextVar("call", default=None)

_LOG: Final = logging.getLogger(__name__)


@final
class InferenceService:
    """The six methods. Messages are parsed here, so that a broken one is the client's mistake."""

    def __init__(
        self,
        serving: Serving,
        config: GatewayConfig,
        keys: KeyRing,
        retry_ns: Callable[[int], int],
        messages: Messages,
        access: AccessLog | None = None,
    ) -> None:
        self._serving = serving
        self._config = config
        self._keys = keys
        self._retry_ns = retry_ns
        self._messages = messages
        self._access = access

    def handlers(self) -> grpc.GenericRpcHandler:
        """For a server to be given."""
        methods: dict[str, Handler] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(self._guarded(name, method))
                for name, method in methods.items()
            },
        )

    async def _server_live(self, message: bytes, context: Context) -> bytes:
        self._parsed("ServerLiveRequest", message)
        return self._encoded("ServerLiveResponse", live=True)

    async def _server_ready(self, message: bytes, context: Context) -> bytes:
        self._parsed("ServerReadyRequest", message)
        problem = server_problem(self._serving)
        tell_reason(context, problem)
        return self._encoded("ServerReadyResponse", ready=not problem)

    async def _model_ready(self, message: bytes, context: Context) -> bytes:
        self._keys.tenant(_headers(context))
        request = self._parsed("ModelReadyRequest", message)
        serving = self._serving
        model = find_model(serving, request.name, request.version)
        problem = model_problem(serving, model)
        tell_reason(context, problem)
        return self._encoded("ModelReadyResponse", ready=not problem)

    async def _server_metadata(self, message: bytes, context: Context) -> bytes:
        self._parsed("ServerMetadataRequest", message)
        return self._encoded(
            "ServerMetadataResponse",
            name=self._config.server_name,
            version=__version__,
            extensions=EXTENSIONS,
        )

    async def _model_metadata(self, message: bytes, context: Context) -> bytes:
        self._keys.tenant(_headers(context))
        request = self._parsed("ModelMetadataRequest", message)
        model = find_model(self._serving, request.name, request.version)
        return self._encoded(
            "ModelMetadataResponse",
            name=model.name,
            versions=[VERSION],
            platform=model.platform,
            inputs=[_spec(each) for each in model.inputs],
            outputs=[_spec(each) for each in model.outputs],
        )

    async def _model_infer(self, message: bytes, context: Context) -> bytes:
        headers = _headers(context)
        tenant = self._keys.tenant(headers)
        serving = self._serving
        check_open(serving)
        check_size(message, self._config)
        request = self._parsed("ModelInferRequest", message)
        model = find_model(serving, request.model_name, request.model_version)
        check_outputs(model, [wanted.name for wanted in request.outputs])
        parameters = _parameters(request.parameters)
        pending = Pending(lambda call: self._response(request, call))
        call = make_call(
            model,
            tensors(request, self._config),
            pending.answered,
            now_ns=serving.now_ns(),
            timeout_ns=self._timeout_ns(context, headers, parameters.get("timeout")),
            client_id=tenant.client_id,
            priority=priority_of(headers, parameters.get("priority")),
        )
        call.trace = traceparent(headers.get(b"traceparent", b"")) or None
        call.client_request_id = headers.get(b"x-request-id", b"")
        if self._access is not None:
            _CALL.set(call)
        tenant.enter(call.arrived_ns)
        try:
            serving.submit(call)
            response = await pending.wait(serving, call)
        finally:
            tenant.leave()
        if call.outcome == Outcome.LATE:
            context.set_trailing_metadata((("headgate-outcome", "late"),))
        return response

    def _timeout_ns(
        self, context: Context, headers: Mapping[bytes, bytes], parameter: object
    ) -> int:
        """The deadline of the RPC goes before whatever else the client says."""
        max_ns = int(self._config.timeout_max_s * 1e9)
        left_s = cast("float | None", context.time_remaining())
        if left_s is None:
            return timeout_ns(headers, parameter, max_ns)
        return min(max(1, int(left_s * 1e9)), max_ns)

    def _response(self, request: Any, call: Call) -> bytes:
        """What the client gets: typed if it asked in types, else raw."""
        refused = verdict(call, self._config.overload_status)
        if refused is not None:
            raise refused
        response = self._messages["ModelInferResponse"](
            model_name=request.model_name, model_version=VERSION, id=request.id
        )
        outputs = _chosen(call.outputs, [wanted.name for wanted in request.outputs])
        fill(response, outputs, is_raw=bool(request.raw_input_contents))
        encoded: bytes = response.SerializeToString()
        return encoded

    def _parsed(self, name: str, message: bytes) -> Any:
        try:
            return self._messages[name].FromString(message)
        except DecodeError:
            raise Refused(400, f"the message is not a {name}") from None

    def _encoded(self, message: str, /, **fields: object) -> bytes:
        encoded: bytes = self._messages[message](**fields).SerializeToString()
        return encoded

    def _guarded(self, name: str, method: Handler) -> Handler:
        async def handle(message: bytes, context: Context) -> bytes:
            began_ns = monotonic_ns()
            refused = None
            try:
                answer = await method(message, context)
            except Refused as error:
                refused = error
            except Exception:
                _LOG.exception("a request broke the gateway", extra=_about(context))
                refused = Refused(500, "the gateway made a mistake", reason="internal")
            if self._access is not None:
                asked = Asked("gRPC", f"/{SERVICE}/{name}", began_ns)
                self._answered(asked, context, refused, len(message), 0 if refused else len(answer))
            if refused is not None:
                await self._refuse(context, refused)
            return answer

        return handle

    def _answered(
        self, asked: Asked, context: Context, refused: Refused | None, in_bytes: int, out_bytes: int
    ) -> None:
        """Tell the access log."""
        assert self._access is not None
        call = _CALL.get()
        self._access.answered(
            asked,
            "OK" if refused is None else status_of(refused).name,
            "" if refused is None else refused.reason,
            request_id=_about(context)["request_id"],
            client_id=None if call is None else call.client_id,
            call=call,
            in_bytes=in_bytes,
            out_bytes=out_bytes,
        )

    async def _refuse(self, context: Context, refused: Refused) -> NoReturn:
        if refused.retry_ns or refused.status == 503:
            refused.retry_ns = self._retry_ns(refused.retry_ns)
        await context.abort(status_of(refused), detail_of(refused), trailers_of(refused))


def _headers(context: Context) -> dict[bytes, bytes]:
    """The metadata as the HTTP front end has its headers."""
    metadata = context.invocation_metadata() or ()
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in metadata
    }


def _about(context: Context) -> dict[str, str]:
    """What a message about an RPC says beside itself."""
    shown = _headers(context).get(b"x-request-id", b"-")[:128]
    return {"request_id": shown.decode("latin-1")}


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
            raise Refused(400, f"there was no output {name[:80]!r}")
    return [by_name[name] for name in names]


def _spec(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
