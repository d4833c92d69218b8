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
from typing import TYPE_CHECKING, Any, Final, final

from headgate.core.errors import ConfigError
from headgate.live import assignment as assignments
from headgate.live.call import Call
from headgate.live.facts import LoadsNeeded
from headgate.live.gateway.access import AccessLog
from headgate.live.gateway.declared import gateway_config, tls_context
from headgate.live.gateway.greeting import greeting
from headgate.live.gateway.readiness import problems
from headgate.live.gateway.server import HttpServer
from headgate.live.metrics import Exposition, Metrics, Readings
from headgate.live.runtime import Runtime
from headgate.live.serving import Phase
from headgate.live.tracing import make_tracer

if TYPE_CHECKING:
    from headgate.live.gateway.grpc_server import GrpcServer

POLL_S: Final = 0.005  # while it is starting
BEAT_S: Final = 0.5

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
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        """Serve; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        server = HttpServer(
            self._runtime, gateway_config(self._loaded), lambda: self._exposition.text()[0]
        )
        if self._loaded.serve.access_log:
            server.access = AccessLog(self._models, self._tenants)
        self._runtime.start()
        life = asyncio.create_task(self._live(server))
        told = asyncio.create_task(self._signals.get())
        try:
            ends: set[asyncio.Future[Any]] = {life, told, self._runtime.failure}
            await asyncio.wait(ends, return_when=FIRST_COMPLETED)
            for broken in (life, self._runtime.failure):
                if broken.done():
                    await _finish_sending(server)
                    broken.result()  # raises: neither ends in any other way
            await self._leave(server, told.result())
        finally:
            life.cancel()
            told.cancel()
            server.close()
            await self._runtime.stop()
            self._tracer.close()
        return 0

    # --- life ----------------------------------------------------------------------------------

    async def _live(self, server: HttpServer) -> None:
        """Listen, say when everything is ready, and from then on that we are alive."""
        if not self._listens_when_ready:
            await self._listen(server)
        while self._runtime.phase is Phase.STARTING:
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
        supervisor = os.getppid()
        while os.getppid() == supervisor:
            await asyncio.sleep(BEAT_S)
            try:
                os.write(self._pipe_fd, b".")
            except BlockingIOError:
                continue  # nobody has read for a long time
            except BrokenPipeError:
                break
        # Without a supervisor nobody restarts workers.
        self._signals.put_nowait(signal.SIGINT)
        await asyncio.Event().wait()

    async def _listen(self, server: HttpServer) -> None:
        serve = self._loaded.serve
        listener = socket.socket(fileno=self._http_fd)
        scheme = "https" if serve.tls_certificate else "http"
        self._url = f"{scheme}://{_shown(serve.host)}:{listener.getsockname()[1]}"
        await server.listen(sock=listener, ssl=tls_context(serve, self._base))
        self._grpc = await self._listen_grpc(server)

    async def _listen_grpc(self, http: HttpServer) -> GrpcServer | None:
        serve = self._loaded.serve
        if serve.grpc_port is None:
            return None
        try:
            from headgate.live.gateway.grpc_server import GrpcServer  # noqa: PLC0415  an extra
        except ImportError as error:
            problem = f"needs the extra `grpc`: pip install 'headgate[grpc]' ({error})"
            raise ConfigError(problem, key="serve.grpc_port") from None
        server = GrpcServer(self._runtime, http.config, http.keys, http.retry_ns, http.access)
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

    def _readings(self) -> Readings:
        return self._runtime.readings()

    async def _leave(self, server: HttpServer, number: signal.Signals) -> None:
        """Say that it is not ready, go on for a while, take no more, finish.

        SIGINT leaves out the going on. SIGUSR1 means that a successor is there for whoever connects
        from now on: connections that there are end with their next answer.
        """
        serve = self._loaded.serve
        lame_duck_s = serve.lame_duck_ns / 1e9
        drain_s = serve.drain_ns / 1e9
        if number is signal.SIGUSR1:
            server.stop_accepting()
            if self._grpc is not None:
                await self._grpc.stop(lame_duck_s)
        if number is not signal.SIGINT and self._runtime.phase is Phase.READY:
            self._runtime.phase = Phase.LEAVING
            with suppress(TimeoutError):  # a second signal means that somebody is in a hurry
                await asyncio.wait_for(self._signals.get(), lame_duck_s)
        server.stop_accepting()
        if self._grpc is not None:
            await self._grpc.stop(drain_s)
        left = await self._runtime.drain(drain_s)
        if left:
            _LOG.warning("%d requests were not finished in time", left)
            server.abandon_all()
        await _finish_sending(server)


async def _finish_sending(server: HttpServer) -> None:
    """Let answers that are still being sent reach whoever waits for them, for a second."""
    server.close_idle()
    for _ in range(100):
        if not server.connections:
            break
        await asyncio.sleep(0.01)


def _shown(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host
