"""The HTTP server: listening sockets, routes, and the sweep that enforces timeouts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, final

from headgate.live.call import FrontEndApi
from headgate.live.gateway.config import BACKLOG, GatewayConfig
from headgate.live.gateway.context import GatewayContext
from headgate.live.gateway.errors import SHUTDOWN_MESSAGE, RequestError
from headgate.live.gateway.http.connection import HttpConnection, OpenConnections
from headgate.live.gateway.http.health import health_rules
from headgate.live.gateway.http.openapi import openapi_rules
from headgate.live.gateway.http.router import Router
from headgate.live.gateway.oip.http import infer_rules
from headgate.live.gateway.sagemaker import sagemaker_rules
from headgate.live.telemetry.metrics import Responses

_LOG: Final = logging.getLogger(__name__)
_ACCEPTED_AT_ONCE: Final = 64
_ACCEPT_RETRY_S: Final = 0.5  # after the process has run out of file descriptors


@final
class HttpServer:
    """Accepts connections and sweeps over them.

    `await server.listen(...)` serves. To shut down, `stop_accepting`, `abort_all`, and wait for
    `connections` to be empty.
    """

    def __init__(
        self,
        api: FrontEndApi,
        config: GatewayConfig,
        render_metrics: Callable[[str], tuple[bytes, str]],
        responses: Responses | None = None,
    ) -> None:
        """`render_metrics` maps a scraper's `Accept` header to a page and its media type."""
        self.context = GatewayContext(api, config, render_metrics, responses)
        self.router = Router(
            infer_rules() | health_rules() | sagemaker_rules() | openapi_rules(),
            lambda name: name in api.models,
        )
        self.open = OpenConnections(config.connections_max)
        self.connections = self.open.connections
        self._timer: asyncio.TimerHandle | None = None
        self._listeners: list[asyncio.Server | TlsListener] = []
        self._ssl: ssl.SSLContext | None = None

    def start(self) -> None:
        """Start the sweep on the running loop."""
        self.context.loop = asyncio.get_running_loop()
        self._sweep()

    async def listen(
        self,
        *,
        sock: socket.socket | None = None,
        ssl: ssl.SSLContext | None = None,
        **where: object,
    ) -> asyncio.Server | None:
        """Accept connections: on `sock=`, or on `host=` and `port=`. Starts the server.

        With `ssl` a socket is required, and there is no `asyncio.Server` to return.
        """
        if self._timer is None:
            self.start()
        self._ssl = ssl
        if ssl is not None:
            assert sock is not None
            self._listeners.append(TlsListener(self, sock))
            return None
        loop = self.context.loop
        listener = await loop.create_server(self.protocol, sock=sock, backlog=BACKLOG, **where)  # type: ignore[call-overload]
        self._listeners.append(listener)
        return listener  # type: ignore[no-any-return]

    async def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted; over TLS if the server uses TLS."""
        loop = self.context.loop
        if self._ssl is None:
            await loop.connect_accepted_socket(self.protocol, sock)
            return
        limits = self.context.config
        try:
            await loop.connect_accepted_socket(
                lambda: HttpConnection(self.context, self.router, self.open, is_encrypted=True),
                sock,
                ssl=self._ssl,
                ssl_handshake_timeout=limits.header_timeout_s,
                ssl_shutdown_timeout=limits.linger_s,
            )
        except OSError as error:  # includes SSLError and TimeoutError
            _LOG.debug("a TLS handshake failed: %s", error)

    def protocol(self) -> HttpConnection:
        """The protocol of a connection without TLS: the factory that asyncio calls."""
        return HttpConnection(self.context, self.router, self.open)

    def stop_accepting(self) -> None:
        """Accept no more connections; open ones stay."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    @property
    def is_responding(self) -> bool:
        """Whether any response is due, or was written and has not left the process yet."""
        return any(connection.is_responding for connection in self.connections)

    def abort_all(self, message: str = SHUTDOWN_MESSAGE) -> None:
        """Respond to every open request with 503 (`draining`), and close all connections."""
        for connection in list(self.connections):
            connection.abort(RequestError(503, message, reason="draining", closes=True))

    def close(self) -> None:
        """Close everything at once."""
        self.stop_accepting()
        for handshake in list(self.open.handshakes):
            handshake.cancel()
        self.context.close()
        for connection in list(self.connections):
            connection.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        context = self.context
        context.refresh()
        for connection in list(self.connections):
            connection.sweep(context.clock_s)
        self._timer = context.loop.call_later(context.config.sweep_s, self._sweep)


@final
class TlsListener:
    """Accepts TLS connections, and counts them before their handshake.

    `create_server(ssl=)` would report a connection only after its handshake, so silent clients
    would be neither counted nor timed.
    """

    def __init__(self, server: HttpServer, sock: socket.socket) -> None:
        self._server = server
        self._loop = server.context.loop
        self._socket = sock
        self._timer: asyncio.TimerHandle | None = None
        sock.listen(BACKLOG)
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more connections."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        connections = self._server.open
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _LOG.warning("connections cannot be accepted for now: %s", error)
                self._loop.remove_reader(self._socket)
                self._timer = self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
                return
            if connections.excess() >= 0:
                sock.close()
                continue
            sock.setblocking(False)
            handshake = self._loop.create_task(self._server.adopt(sock))
            connections.handshakes.add(handshake)
            handshake.add_done_callback(connections.handshakes.discard)
