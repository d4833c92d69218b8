"""The HTTP server: listening sockets, TLS, and the sweep that enforces timeouts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Final, cast, final

from headgate.http.connection import BeginRequest, HttpConnection, ServerState
from headgate.http.interface import BACKLOG, SHUTDOWN_MESSAGE, HttpError, HttpLimits

_LOG: Final = logging.getLogger(__name__)
_ACCEPTED_AT_ONCE: Final = 64
_ACCEPT_RETRY_S: Final = 0.5  # after the process has run out of file descriptors


class HttpServer:
    """Accepts connections and sweeps over them.

    `await server.listen(...)` serves. To shut down, `stop_accepting`, `abort_all`, and wait for
    `connections` to be empty.
    """

    def __init__(self, limits: HttpLimits, begin: BeginRequest) -> None:
        """`begin` makes the requests, each when its head has arrived."""
        self.state = ServerState(limits, begin)
        self.connections = self.state.connections
        self.loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._listeners: list[asyncio.Server | TlsListener] = []
        self._ssl: ssl.SSLContext | None = None

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
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
        listener = await self.loop.create_server(self.protocol, sock=sock, backlog=BACKLOG, **where)  # type: ignore[call-overload]
        self._listeners.append(listener)
        return listener  # type: ignore[no-any-return]

    async def adopt(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted; over TLS if the server uses TLS."""
        if self._ssl is None:
            await self.loop.connect_accepted_socket(self.protocol, sock)
            return
        limits = self.state.limits
        try:
            await self.loop.connect_accepted_socket(
                lambda: self.protocol(is_encrypted=True),
                sock,
                ssl=self._ssl,
                ssl_handshake_timeout=limits.header_timeout_s,
                ssl_shutdown_timeout=limits.write_timeout_s,
            )
        except OSError as error:  # includes SSLError and TimeoutError
            _LOG.debug("a TLS handshake failed: %s", error)

    def protocol(self, *, is_encrypted: bool = False) -> asyncio.Protocol:
        """The protocol of a connection: the factory that asyncio calls.

        It has the methods of `asyncio.Protocol`, which a compiled class cannot extend.
        """
        return cast("asyncio.Protocol", HttpConnection(self.state, is_encrypted))

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
            connection.abort(HttpError(503, message, reason="draining", closes=True))

    def close(self) -> None:
        self.stop_accepting()
        for handshake in list(self.state.handshakes):
            handshake.cancel()
        for connection in list(self.connections):
            connection.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refresh(self) -> None:
        """Called before every sweep: servers update here what only changes now and then."""

    def _sweep(self) -> None:
        now_s = self.state.clock_s = self.loop.time()
        self.refresh()
        for connection in list(self.connections):
            connection.sweep(now_s)
        self._timer = self.loop.call_later(self.state.limits.sweep_s, self._sweep)


@final
class TlsListener:
    """Accepts TLS connections, and counts them before their handshake.

    `create_server(ssl=)` would report a connection only after its handshake, so silent clients
    would be neither counted nor timed.
    """

    def __init__(self, server: HttpServer, sock: socket.socket) -> None:
        self._server = server
        self._loop = server.loop
        self._socket = sock
        self._timer: asyncio.TimerHandle | None = None
        sock.listen(BACKLOG)
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        state = self._server.state
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
            if state.excess() >= 0:
                sock.close()
                continue
            sock.setblocking(False)
            handshake = self._loop.create_task(self._server.adopt(sock))
            state.handshakes.add(handshake)
            handshake.add_done_callback(state.handshakes.discard)
