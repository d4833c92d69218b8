"""The gateway process: a runtime behind its front ends, from first socket to last answer."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from asyncio import FIRST_COMPLETED
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

from headgate.core.errors import ConfigError
from headgate.live import deployment as assignments
from headgate.live.call import Call, GatewayPhase, problems
from headgate.live.gateway.access_log import AccessLog
from headgate.live.gateway.http.server import HttpServer
from headgate.live.model_registry import LoadsNeeded
from headgate.live.runtime import Runtime
from headgate.live.telemetry import Exposition, GaugeSnapshot, Metrics
from headgate.live.telemetry.tracing import make_tracer
from headgate.system.child_process import end_without_trace, signal_on_orphaned, watch_supervisor

if TYPE_CHECKING:
    from headgate.live.gateway.grpc.server import GrpcServer


import ssl
from collections.abc import Mapping

import msgspec

from headgate.config import AppConfig, ServeOptions
from headgate.functions.tensor import write_spec
from headgate.live.call import ServedModel
from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit

# What a gateway says when it is ready: what is served, and how to ask for it.


_EXAMPLES: Final[dict[str, object]] = {"BYTES": "text", "BOOL": True, "FP32": 1.0, "FP64": 1.0}
_ELEMENTS_MAX: Final = 64  # of an example that people can read


def greeting(
    url: str, grpc: str, policy: str, models: list[ServedModel], problems: Mapping[str, str]
) -> bytes:
    """One line of JSON, for the supervisor. `problems` are of models that are not ready."""
    asked = next((model for model in models if model.name not in problems), models[0])
    content = {
        "url": url,
        "grpc": grpc,
        "policy": policy,
        "models": [
            {"name": model.name, "signature": problems.get(model.name) or _signature(model)}
            for model in models
        ],
        "curl": _curl(url, asked),
    }
    return msgspec.json.encode(content) + b"\n"


def _signature(model: ServedModel) -> str:
    """What goes in and what comes out, in one line."""
    inputs = ", ".join(f"{spec.name} {write_spec(spec)}" for spec in model.inputs)
    outputs = ", ".join(f"{spec.name} {write_spec(spec)}" for spec in model.outputs)
    return f"{inputs or 'any inputs'} -> {outputs or 'any outputs'}"


def _curl(url: str, model: ServedModel) -> str:
    """A command that gets an answer of this model."""
    path = f"{url}/v2/models/{model.name}"
    small = all(_elements(spec.shape) <= _ELEMENTS_MAX for spec in model.inputs)
    if not model.inputs or not small:
        return f"curl {path}"
    inputs = [
        {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": [max(1, size) for size in spec.shape],
            "data": [_EXAMPLES.get(spec.datatype, 1)] * _elements(spec.shape),
        }
        for spec in model.inputs
    ]
    body = msgspec.json.encode({"inputs": inputs}).decode()
    return f"curl {path}/infer -d '{body}'"


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= max(1, size)
    return count


# What an application file declares about its gateway.


def gateway_config(loaded: AppConfig) -> GatewayConfig:
    """What the application file says of the front ends."""
    serve = loaded.serve
    return GatewayConfig(
        body_bytes_max=serve.body_bytes_max,
        answer_bytes_max=serve.response_bytes_max,
        bodies_bytes_max=serve.memory_bytes_max,
        connections_max=serve.connections_max,
        timeout_max_s=serve.deadline_max_ns / 1e9,
        overload_status=serve.overload_status,
        expose_errors=serve.expose_errors,
        keys=tuple(
            ApiKey(tenant.key_sha256, tenant.client_id)
            for tenant in loaded.tenants
            if tenant.key_sha256 is not None
        ),
        tenants=tuple(
            TenantLimit(
                tenant.client_id,
                rate_per_s=tenant.rate_per_s or 0.0,
                burst=tenant.burst,
                concurrency_max=tenant.concurrency or 0,
            )
            for tenant in loaded.tenants
        ),
    )


def tls_context(serve: ServeOptions, base: Path) -> ssl.SSLContext | None:
    """How connections are encrypted, if they are."""
    if serve.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key = None if serve.tls_key is None else base / serve.tls_key
    try:
        context.load_cert_chain(base / serve.tls_certificate, key)
    except (OSError, ssl.SSLError) as error:
        problem = f"is no certificate with its key: {error}"
        raise ConfigError(
            problem, key="serve.tls_certificate", value=serve.tls_certificate
        ) from None
    return context


POLL_S: Final = 0.005  # while it is starting, or about to end
BEAT_S: Final = 0.5
SETTLE_S: Final = 0.2  # for those who have just connected to ask, and be told that it is too late
LINGER_S: Final = 0.5  # for what crosses our last word on a connection
ORPHANED_S: Final = 3.0  # in which it can answer what is open

_LOG: Final = logging.getLogger(__name__)


@final
class GatewayProcess:
    """Serves until it is told to end, and then finishes what it has."""

    def __init__(
        self,
        run_dir: Path,
        http_fd: int,
        pipe_fd: int,
        log_path: Path | None,
        *,
        listens_when_ready: bool,
        loads_needed: LoadsNeeded,
    ) -> None:
        assignment = assignments.read(run_dir)
        loaded = assignment.load()
        self._loaded = loaded
        self._run_dir = run_dir
        self._base = Path(assignment.base)
        self._http_fd = http_fd
        self._listens_when_ready = listens_when_ready
        self._pipe_fd = pipe_fd
        self._metrics = Metrics(loaded.app, self._readings)
        self._exposition = Exposition(self._metrics)
        self._tracer = make_tracer()
        self._runtime = Runtime(
            run_dir,
            assignment,
            arena_bytes=loaded.serve.shared_memory_bytes,
            log_path=log_path,
            is_log_required=not listens_when_ready,
            loads_needed=loads_needed,
            submitted=self._tracer.begin if self._tracer.is_on else None,
            settled=self._settled,
            started=self._metrics.cold_started,
            fault=self._metrics.fault,
        )
        self._models = [pipeline.name for pipeline in loaded.app.pipelines]
        self._tenants = [client.name for client in loaded.app.clients]
        self._url = ""
        self._grpc_address = ""
        self._grpc: GrpcServer | None = None
        self._listener: socket.socket | None = None
        self._orphaned = asyncio.Event()
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        """Serve; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        signal_on_orphaned(signal.SIGCONT)  # one that is stopped is to go on, and end
        watch_supervisor(
            self._pipe_fd,
            lambda: _tell(loop, self._orphaned),
            self._end_orphaned,
            ORPHANED_S,
        )
        config = gateway_config(self._loaded)
        server = HttpServer(self._runtime, config, self._exposition.text, self._metrics.responses)
        if self._loaded.serve.access_log:
            server.access = AccessLog(self._models, self._tenants)
        self._runtime.start()
        life = asyncio.create_task(self._live(server))
        told = asyncio.create_task(self._signals.get())
        orphaned = asyncio.create_task(self._orphaned.wait())
        leaves: asyncio.Task[None] | None = None
        try:
            ends: set[asyncio.Future[Any]] = {life, told, orphaned, self._runtime.failure}
            await asyncio.wait(ends, return_when=FIRST_COMPLETED)
            for broken in (life, self._runtime.failure):
                if broken.done():
                    await self._finish(server, monotonic())
                    broken.result()  # raises: neither ends in any other way
            if told.done():
                leaves = asyncio.create_task(self._leave(server, told.result()))
                await asyncio.wait({leaves, orphaned}, return_when=FIRST_COMPLETED)
            if self._orphaned.is_set():
                _LOG.error("the supervisor is gone: what is open is refused, and the gateway ends")
                self._runtime.phase = GatewayPhase.DRAINING
                await self._finish(server, monotonic())
            elif leaves is not None:
                leaves.result()
        finally:
            for task in (life, told, orphaned):
                task.cancel()
            server.close()
            await self._runtime.stop()
            self._tracer.close()
        if self._orphaned.is_set():
            self._end_orphaned()
        return 0

    # --- life ----------------------------------------------------------------------------------

    async def _live(self, server: HttpServer) -> None:
        """Listen, say when everything is ready, and from then on that we are alive."""
        if not self._listens_when_ready:
            await self._listen(server)
        while self._runtime.phase is GatewayPhase.STARTING:
            await asyncio.sleep(POLL_S)
        if self._listens_when_ready:
            await self._listen(server)
        models = list(self._runtime.models.values())
        said = greeting(
            self._url,
            self._grpc_address,
            self._loaded.policy.name,
            models,
            problems(self._runtime),
        )
        os.write(self._pipe_fd, said)
        while True:
            await asyncio.sleep(BEAT_S)
            # Nobody may have read for a long time, or there is nobody: that is noticed elsewhere.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._pipe_fd, b".")

    async def _listen(self, server: HttpServer) -> None:
        serve = self._loaded.serve
        listener = socket.socket(fileno=self._http_fd)
        self._listener = listener.dup()  # for whoever is in line when we stop to listen
        scheme = "https" if serve.tls_certificate else "http"
        self._url = f"{scheme}://{_shown(serve.host)}:{listener.getsockname()[1]}"
        await server.listen(sock=listener, ssl=tls_context(serve, self._base))
        self._grpc = await self._listen_grpc(server)

    async def _listen_grpc(self, http: HttpServer) -> GrpcServer | None:
        serve = self._loaded.serve
        if serve.grpc_port is None:
            return None
        try:
            from headgate.live.gateway.grpc.server import GrpcServer  # noqa: PLC0415  an extra
        except ImportError as error:
            problem = f"needs the extra `grpc`: pip install 'headgate[grpc]' ({error})"
            raise ConfigError(problem, key="serve.grpc_port") from None
        server = GrpcServer(http)
        certificate, key = (
            None if name is None else self._base / name
            for name in (serve.tls_certificate, serve.tls_key)
        )
        port = await server.start(serve.host, serve.grpc_port, certificate, key)
        self._grpc_address = f"{_shown(serve.host)}:{port}"
        return server

    def _settled(self, call: Call) -> None:
        model = self._models[call.pipeline_id]
        self._metrics.settled(call, model, self._tenants[call.client_id])
        if self._tracer.is_on:
            self._tracer.end(call, model)

    def _readings(self) -> GaugeSnapshot:
        return self._runtime.readings()

    async def _leave(self, server: HttpServer, number: signal.Signals) -> None:
        """Say that it is not ready, go on for a while, refuse what is new, finish what is open.

        SIGINT leaves out the going on. SIGUSR1 means that a successor is there for whoever connects
        from now on: connections that there are end with their next answer. Else connections are
        accepted until nothing is open any more: whoever asks is told that it is leaving.
        """
        serve = self._loaded.serve
        drain_s = serve.drain_ns / 1e9
        replaced: asyncio.Task[None] | None = None
        if number is signal.SIGUSR1:
            server.stop_accepting()
            self._close_listener()
            if self._grpc is not None:
                grace_s = serve.lame_duck_ns / 1e9 + drain_s
                replaced = asyncio.create_task(self._grpc.stop(grace_s))
        if number is not signal.SIGINT and self._runtime.phase is GatewayPhase.READY:
            self._runtime.phase = GatewayPhase.LEAVING
            await self._hurried(serve.lame_duck_ns / 1e9)
        end_s = monotonic() + drain_s
        left = await self._runtime.drain(drain_s)
        if left:
            _LOG.warning("%d requests were not finished in time", left)
        await self._stop_listening(server)
        await self._finish(server, end_s)
        if replaced is not None:
            await replaced

    async def _hurried(self, limit_s: float) -> None:
        """Wait for so long, or until SIGINT says not to.

        SIGTERM is no news: it comes from the supervisor and from whoever has sent it to all
        processes of the service.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while await self._signals.get() is not signal.SIGINT:
                    pass

    async def _stop_listening(self, server: HttpServer) -> None:
        """Accept whoever has connected by now, then nobody. Their requests are refused."""
        server.stop_accepting()
        accepted = []
        if self._listener is not None:
            with suppress(OSError):
                while True:
                    accepted.append(self._listener.accept()[0])
        self._close_listener()
        await asyncio.gather(*(server.adopt(sock) for sock in accepted), return_exceptions=True)
        if server.connections:
            await asyncio.sleep(SETTLE_S)

    async def _finish(self, server: HttpServer, end_s: float) -> None:
        """Answer what is still open, and let go of all connections, of both protocols at once."""
        stops: asyncio.Task[None] | None = None
        if self._grpc is not None:
            self._grpc.abandon_all()
            stops = asyncio.create_task(self._grpc.stop(max(SETTLE_S, end_s - monotonic())))
        server.abandon_all()
        linger_s = monotonic() + LINGER_S
        while server.connections and monotonic() < max(end_s, linger_s):
            if monotonic() > linger_s and not server.is_answering:
                break
            await asyncio.sleep(POLL_S)
        if stops is not None:
            await stops

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- without a supervisor ------------------------------------------------------------------

    def _end_orphaned(self) -> NoReturn:
        """Nobody will start a worker again, nor clean up after us."""
        end_without_trace(self._run_dir, self._runtime.worker_ids())


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop from another thread."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(event.set)


def _shown(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host
