"""The gateway process: a runtime behind its front ends, from start to shutdown.

The process reports to its supervisor on a pipe: one line of JSON when everything is ready, then a
byte at regular intervals as a heartbeat. On a signal it drains (see `_shut_down`). If the
supervisor dies, nobody would restart workers or clean up: the gateway fails its open requests and
ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
from asyncio import FIRST_COMPLETED
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import msgspec

from headgate.core.actions import Action
from headgate.core.errors import ConfigError
from headgate.core.events import Event, GatewaysChanged
from headgate.functions.tensor import format_spec
from headgate.http.interface import BACKLOG
from headgate.live.call import GatewayPhase, ServedModel, problems
from headgate.live.deployment import read_deployment, tls_context
from headgate.live.driver import Membership
from headgate.live.gateway.config import gateway_config
from headgate.live.gateway.context import AccessLog, GatewayContext
from headgate.live.gateway.http.server import GatewayServer
from headgate.live.ipc.control_channel import ControlLink
from headgate.live.model_registry import LoadsNeeded
from headgate.live.runtime import Runtime
from headgate.live.telemetry.merged_pages import MergedPages
from headgate.live.telemetry.metrics import Metrics
from headgate.live.telemetry.prometheus import Exposition
from headgate.system.process import (
    kill_groups_and_exit,
    set_parent_death_signal,
    watch_supervisor,
)

if TYPE_CHECKING:
    from headgate.live.gateway.grpc.server import GrpcServer
    from headgate.live.telemetry.spans import SpanTracer

POLL_S: Final = 0.005  # while starting, or shutting down
HEARTBEAT_S: Final = 0.5
SETTLE_S: Final = 0.2  # for clients that have just connected to send a request, and get a 503
LINGER_S: Final = 0.5  # for requests that cross the end of their connection
ORPHANED_S: Final = 3.0  # to respond to open requests after the supervisor has died
_EXAMPLE_ELEMENTS: Final[dict[str, object]] = {
    "BYTES": "text",
    "BOOL": True,
    "FP32": 1.0,
    "FP64": 1.0,
}
_EXAMPLE_ELEMENTS_MAX: Final = 64  # of an example that people can read
# Any of these variables enables tracing. The specification would export to this machine by default,
# but a server that logs an error every few seconds because nothing listens there is worse.
_ENABLING_VARIABLES: Final = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)

_LOG: Final = logging.getLogger(__name__)


@final
class GatewayProcess:
    """Serves until a signal or the death of the supervisor, and then shuts down."""

    def __init__(
        self,
        run_dir: Path,
        http_fd: int | None,
        pipe_fd: int,
        log_path: Path | None,
        membership: Membership,
        *,
        control_fd: int,
        listens_when_ready: bool,
        loads_needed: LoadsNeeded,
    ) -> None:
        deployment = read_deployment(run_dir)
        app_config = deployment.load()
        self._app_config = app_config
        self._run_dir = run_dir
        self._base = Path(deployment.base)
        self._http_fd = http_fd  # None: several gateways share the port, each with its own socket
        self._control_fd = control_fd
        self._listens_when_ready = listens_when_ready
        self._pipe_fd = pipe_fd
        self._models = [pipeline.name for pipeline in app_config.app.pipelines]
        self._metrics = Metrics(app_config.app)
        self._tracer = make_tracer(self._models)
        self._runtime = Runtime(
            run_dir,
            deployment,
            arena_bytes=app_config.serve.shared_memory_bytes,
            log_path=log_path,
            is_log_required=not listens_when_ready,
            loads_needed=loads_needed,
            metrics=self._metrics,
            tracer=self._tracer,
            membership=membership,
        )
        self._exposition = Exposition(self._metrics, self._runtime.gauge_snapshot)
        self._pages: MergedPages | None = None
        if app_config.serve.gateways > 1:
            self._pages = MergedPages(
                run_dir, membership.slot, app_config.serve.gateways, self._exposition.text
            )
        self._gateways = membership.count
        self._url = ""
        self._grpc_address = ""
        self._grpc: GrpcServer | None = None
        self._listener: socket.socket | None = None
        self._orphaned = asyncio.Event()
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        """Serve until shutdown. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        set_parent_death_signal(signal.SIGCONT)  # a stopped process must continue in order to end
        watch_supervisor(
            self._pipe_fd,
            lambda: _set_threadsafe(loop, self._orphaned),
            self._end_orphaned,
            ORPHANED_S,
        )
        config = gateway_config(self._app_config)
        server = GatewayServer(
            self._runtime, config, self._exposition.text, self._metrics.responses
        )
        server.context.keys.divide(self._gateways, self._runtime.now_ns())
        self._runtime.control = ControlLink(
            lambda message: self._on_control(server.context, message)
        )
        await self._runtime.control.open(self._control_fd)
        if self._pages is not None:
            await self._pages.start()
            server.context.collect_metrics = self._pages.collect
        if self._app_config.serve.access_log:
            server.context.access_log = AccessLog(self._models, self._metrics.tenants)
        self._runtime.start()
        serve_task = asyncio.create_task(self._serve(server))
        signalled = asyncio.create_task(self._signals.get())
        orphaned = asyncio.create_task(self._orphaned.wait())
        shutdown: asyncio.Task[None] | None = None
        try:
            failure = self._runtime.failure
            ends: set[asyncio.Future[Any]] = {serve_task, signalled, orphaned, failure}
            await asyncio.wait(ends, return_when=FIRST_COMPLETED)
            for failed in (serve_task, failure):
                if failed.done():
                    await self._finish(server, monotonic())
                    failed.result()  # raises: both end only by an exception
            if signalled.done():
                shutdown = asyncio.create_task(self._shut_down(server, signalled.result()))
                await asyncio.wait({shutdown, orphaned}, return_when=FIRST_COMPLETED)
            if self._orphaned.is_set():
                _LOG.error("the supervisor has died: open requests fail, and the gateway ends")
                self._runtime.phase = GatewayPhase.DRAINING
                await self._finish(server, monotonic())
            elif shutdown is not None:
                shutdown.result()
        finally:
            for task in (serve_task, signalled, orphaned):
                task.cancel()
            server.close()
            if self._pages is not None:
                self._pages.close()
            await self._runtime.stop()
            if self._tracer is not None:
                self._tracer.close()
        if self._orphaned.is_set():
            self._end_orphaned()
        return 0

    def _on_control(self, context: GatewayContext, message: Event | Action) -> None:
        """Handle a message of the supervisor."""
        if isinstance(message, GatewaysChanged):
            _LOG.info("%d of %d gateways serve", message.count, self._app_config.serve.gateways)
            context.keys.divide(message.count, self._runtime.now_ns())
        self._runtime.on_control(message)

    async def _serve(self, server: GatewayServer) -> None:
        """Listen, report to the supervisor when everything is ready, then send heartbeats."""
        if not self._listens_when_ready:
            await self._listen(server)
        while self._runtime.phase is GatewayPhase.STARTING:
            await asyncio.sleep(POLL_S)
        if self._listens_when_ready:
            await self._listen(server)
        models = list(self._runtime.models.values())
        message = ready_message(
            self._url,
            self._grpc_address,
            self._app_config.policy.name,
            models,
            problems(self._runtime),
            needs_key=any(tenant.key is not None for tenant in self._app_config.tenants),
        )
        os.write(self._pipe_fd, message)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            # The pipe may be full, or the supervisor dead: `watch_supervisor` notices that.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._pipe_fd, b".")

    async def _listen(self, server: GatewayServer) -> None:
        serve = self._app_config.serve
        if self._http_fd is None:
            listener = _shared_listener(serve.host, serve.port)
        else:
            listener = socket.socket(fileno=self._http_fd)
        self._listener = listener.dup()  # for connections in the backlog when listening stops
        scheme = "https" if serve.tls_certificate else "http"
        self._url = f"{scheme}://{_url_host(serve.host)}:{listener.getsockname()[1]}"
        await server.listen(sock=listener, ssl=tls_context(serve, self._base))
        self._grpc = await self._listen_grpc(server.context)

    async def _listen_grpc(self, context: GatewayContext) -> GrpcServer | None:
        serve = self._app_config.serve
        if serve.grpc_port is None:
            return None
        try:
            from headgate.live.gateway.grpc.server import GrpcServer  # noqa: PLC0415  an extra
        except ImportError as error:
            problem = f"needs the extra `grpc`: pip install 'headgate[grpc]' ({error})"
            raise ConfigError(problem, key="serve.grpc_port") from None
        server = GrpcServer(context)
        certificate, key = (
            None if name is None else self._base / name
            for name in (serve.tls_certificate, serve.tls_key)
        )
        port = await server.start(serve.host, serve.grpc_port, certificate, key)
        self._grpc_address = f"{_url_host(serve.host)}:{port}"
        return server

    async def _shut_down(self, server: GatewayServer, number: signal.Signals) -> None:
        """Report not-ready and keep serving (lame duck), then refuse new requests and drain.

        SIGINT skips the lame-duck time. SIGUSR1 means that a successor accepts new connections:
        existing connections are closed with their next response. Otherwise connections are accepted
        until no request is open, and their requests get a 503.
        """
        serve = self._app_config.serve
        drain_s = serve.drain_ns / 1e9
        grpc_stop: asyncio.Task[None] | None = None
        if number is signal.SIGUSR1:
            if self._http_fd is None:  # nobody else accepts what is in the backlog of this socket
                await self._take_backlog(server)
            else:
                server.stop_accepting()
                self._close_listener()
            if self._grpc is not None:
                grace_s = serve.lame_duck_ns / 1e9 + drain_s
                grpc_stop = asyncio.create_task(self._grpc.stop(grace_s))
        if number is not signal.SIGINT and self._runtime.phase is GatewayPhase.READY:
            self._runtime.phase = GatewayPhase.LAME_DUCK
            await self._wait_unless_interrupted(serve.lame_duck_ns / 1e9)
        end_s = monotonic() + drain_s
        unfinished = await self._runtime.drain(drain_s)
        if unfinished:
            _LOG.warning("%d requests were not finished in time", unfinished)
        await self._stop_listening(server)
        await self._finish(server, end_s)
        if grpc_stop is not None:
            await grpc_stop

    async def _wait_unless_interrupted(self, limit_s: float) -> None:
        """Wait for `limit_s`, or until SIGINT.

        Another SIGTERM is ignored: it comes from the supervisor as well as from whoever has sent it
        to all processes of the service.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while await self._signals.get() is not signal.SIGINT:
                    pass

    async def _stop_listening(self, server: GatewayServer) -> None:
        """Accept the connections of the backlog, whose requests get a 503, and then no more."""
        await self._take_backlog(server)
        if server.connections:
            await asyncio.sleep(SETTLE_S)

    async def _take_backlog(self, server: GatewayServer) -> None:
        """Stop listening, and serve the connections that were made before."""
        server.stop_accepting()
        accepted = []
        if self._listener is not None:
            with suppress(OSError):
                while True:
                    accepted.append(self._listener.accept()[0])
        self._close_listener()
        await asyncio.gather(*(server.adopt(sock) for sock in accepted), return_exceptions=True)

    async def _finish(self, server: GatewayServer, end_s: float) -> None:
        """Fail open requests and close all connections, of both protocols at once."""
        grpc_stop: asyncio.Task[None] | None = None
        if self._grpc is not None:
            self._grpc.abort_all()
            grpc_stop = asyncio.create_task(self._grpc.stop(max(SETTLE_S, end_s - monotonic())))
        server.abort_all()
        linger_s = monotonic() + LINGER_S
        while server.connections and monotonic() < max(end_s, linger_s):
            if monotonic() > linger_s and not server.is_responding:
                break
            await asyncio.sleep(POLL_S)
        if grpc_stop is not None:
            await grpc_stop

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _end_orphaned(self) -> NoReturn:
        """Kill the workers and remove the run directory: no supervisor will."""
        kill_groups_and_exit(self._run_dir, self._runtime.worker_pids())


def _shared_listener(host: str, port: int) -> socket.socket:
    """Return a socket on a port that other gateways listen on too: the kernel divides connections.

    A gateway that dies takes its own socket with it, so new connections go to the others.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it: those that we have closed keep no later server from the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def ready_message(
    url: str,
    grpc: str,
    policy: str,
    models: list[ServedModel],
    problems: Mapping[str, str],
    *,
    needs_key: bool,
) -> bytes:
    """The line of JSON for the supervisor. `problems` are those of models that are not ready."""
    example = next((model for model in models if model.name not in problems), models[0])
    content = {
        "url": url,
        "grpc": grpc,
        "policy": policy,
        "models": [
            {"name": model.name, "signature": problems.get(model.name) or _signature(model)}
            for model in models
        ],
        "curl": _curl(url, example, needs_key=needs_key),
    }
    return msgspec.json.encode(content) + b"\n"


def _signature(model: ServedModel) -> str:
    """Inputs and outputs in one line."""
    inputs = ", ".join(f"{spec.name} {format_spec(spec)}" for spec in model.inputs)
    outputs = ", ".join(f"{spec.name} {format_spec(spec)}" for spec in model.outputs)
    return f"{inputs or 'any inputs'} -> {outputs or 'any outputs'}"


def _curl(url: str, model: ServedModel, *, needs_key: bool) -> str:
    """A command that runs the model, or shows its metadata if its inputs are large."""
    path = f"{url}/v2/models/{model.name}"
    if needs_key:  # which one only the client knows: the server has its hash
        path = f"-H 'X-API-Key: KEY' {path}"
    is_small = all(_elements(spec.shape) <= _EXAMPLE_ELEMENTS_MAX for spec in model.inputs)
    if not model.inputs or not is_small:
        return f"curl {path}"
    inputs = [
        {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": [max(1, size) for size in spec.shape],
            "data": [_EXAMPLE_ELEMENTS.get(spec.datatype, 1)] * _elements(spec.shape),
        }
        for spec in model.inputs
    ]
    body = msgspec.json.encode({"inputs": inputs}).decode()
    return f"curl {path}/infer -d {shlex.quote(body)}"


def _elements(shape: tuple[int, ...]) -> int:
    return prod(max(1, size) for size in shape)


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(event.set)


def _url_host(host: str) -> str:
    """A host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def make_tracer(
    models: Sequence[str], environment: Mapping[str, str] = os.environ
) -> SpanTracer | None:
    """Return the tracer that the `OTEL_*` variables configure; None if they enable none.

    `models` are names by pipeline id. Raises `ConfigError` for an unknown exporter. Whole clusters
    set those variables, so a missing OpenTelemetry package is only a warning.
    """
    wanted = _exporters_wanted(environment)
    if not wanted:
        return None
    try:
        from headgate.live.telemetry.spans import export_spans  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as missing:
        _LOG.warning(
            "OTEL_* variables enable traces, which need headgate[otel]: %s is not installed",
            missing.name,
        )
        return None
    return export_spans(wanted, environment, models)


def _exporters_wanted(environment: Mapping[str, str]) -> list[str]:
    is_off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not any(environment.get(name) for name in _ENABLING_VARIABLES):
        return []
    names = environment.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    return [
        name for name in (part.strip() for part in names.split(",")) if name not in ("", "none")
    ]
