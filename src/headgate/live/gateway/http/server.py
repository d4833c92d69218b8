"""The HTTP server: what its connections share."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from random import Random
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.live.call import FrontEndApi, GatewayPhase
from headgate.live.gateway.access_log import AccessLog
from headgate.live.gateway.auth import ApiKeys
from headgate.live.gateway.codec.client import Codec
from headgate.live.gateway.config import BACKLOG, GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.connection import HttpConnection
from headgate.live.gateway.http.health import health_rules
from headgate.live.gateway.http.openapi import openapi_rules
from headgate.live.gateway.http.router import Router
from headgate.live.gateway.memory_budget import Budget
from headgate.live.gateway.oip.http import infer_rules
from headgate.live.gateway.sagemaker import sagemaker_rules
from headgate.live.telemetry.metrics import Responses

_LOG: Final = logging.getLogger(__name__)
_ACCEPTED_AT_ONCE: Final = 64
_BREATHER_S: Final = 0.5  # when the process can have no more files
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")


@final
class HttpServer:
    """Makes connections for listening sockets, counts them, and watches the clock for them.

    `await loop.create_server(server.protocol, ...)` serves; `start` begins the sweep; to leave,
    stop accepting, `abandon_all`, and wait for `connections` to be empty.
    """

    def __init__(
        self,
        serving: FrontEndApi,
        config: GatewayConfig,
        render_metrics: Callable[[str], tuple[bytes, str]],
        responses: Responses | None = None,
    ) -> None:
        """`render_metrics` is given what a scraper accepts, and returns text and media type."""
        self.serving = serving
        self.config = config
        self.render_metrics = render_metrics
        self.access: AccessLog | None = None
        self.responses = responses or Responses()
        self.timeout_max_ns = int(config.timeout_max_s * SECOND_NS)
        self.keys = ApiKeys(config)
        self.router = Router(
            infer_rules() | health_rules() | sagemaker_rules() | openapi_rules(),
            lambda name: name in serving.models,
        )
        self.connections: set[HttpConnection] = set()
        self.handshakes: set[asyncio.Task[None]] = set()  # of connections to be encrypted
        self.loop: asyncio.AbstractEventLoop
        self.clock_s = 0.0  # the loop's, as of the last sweep
        self.common_lines = b""
        # One request can always be served.
        self._bodies_bytes_max = max(config.bodies_bytes_max, 2 * config.body_bytes_max)
        self.budget = Budget(
            self._bodies_bytes_max,
            self.keys.client_ids,
            largest=config.body_bytes_max,
        )
        self._codec: Codec | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listeners: list[asyncio.Server | TlsListener] = []
        self._ssl: ssl.SSLContext | None = None
        self._rng = Random(secrets.randbits(64))
        self._id_prefix = secrets.token_hex(6).encode()
        self._ids = 0

    @property
    def is_leaving(self) -> bool:
        """Whether connections end with their next answer."""
        phase = self.serving.phase
        return phase is GatewayPhase.LAME_DUCK or phase is GatewayPhase.DRAINING

    @property
    def codec(self) -> Codec:
        """Who reads and writes long texts."""
        if self._codec is None:
            self._codec = Codec(self.loop, self.config)
        return self._codec

    def start(self) -> None:
        """Begin to watch the clock, on the running loop."""
        self.loop = asyncio.get_running_loop()
        self._sweep()

    async def listen(
        self,
        *,
        sock: socket.socket | None = None,
        ssl: ssl.SSLContext | None = None,
        **where: object,
    ) -> asyncio.Server | None:
        """Accept connections: `sock=`, or `host=` and `port=`. Starts the server.

        What is encrypted needs a socket; there is no `asyncio.Server` of it.
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
        """Serve a connection that was accepted, encrypted if all are."""
        if self._ssl is None:
            await self.loop.connect_accepted_socket(self.protocol, sock)
            return
        limits = self.config
        try:
            await self.loop.connect_accepted_socket(
                lambda: HttpConnection(self, is_encrypted=True),
                sock,
                ssl=self._ssl,
                ssl_handshake_timeout=limits.header_timeout_s,
                ssl_shutdown_timeout=limits.linger_s,
            )
        except OSError as error:  # also those of `ssl`, and a time limit
            _LOG.debug("a connection could not be encrypted: %s", error)

    def protocol(self) -> HttpConnection:
        """A connection, for a socket that was accepted."""
        return HttpConnection(self)

    def stop_accepting(self) -> None:
        """Accept no more connections; those that there are stay."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    @property
    def is_answering(self) -> bool:
        """Whether there is an answer that is being written, or that a client has not read yet."""
        return any(connection.is_answering for connection in self.connections)

    def abandon_all(self, message: str = "the server has ended before it was done") -> None:
        """Answer every request that is open with 503 (`draining`), and close all connections."""
        for connection in list(self.connections):
            connection.give_up(RequestError(503, message, reason="draining", closes=True))

    def close(self) -> None:
        """Close everything, now."""
        self.stop_accepting()
        for handshake in list(self.handshakes):
            handshake.cancel()
        if self._codec is not None:
            self._codec.close()
        for connection in list(self.connections):
            connection.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def excess(self) -> int:
        """How many connections there are beyond the limit, or, below zero, how many may come."""
        return len(self.connections) + len(self.handshakes) - self.config.connections_max

    def enter(self, connection: HttpConnection) -> bool:
        """Count a connection. False: it is one too many."""
        is_welcome = self.excess() < 0
        self.connections.add(connection)
        return is_welcome

    def leave(self, connection: HttpConnection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)

    def request_id(self, given: bytes | None) -> bytes:
        """The id of a request: the client's own if it is fit to be repeated, or a new one."""
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given
        self._ids += 1
        return b"%b-%x" % (self._id_prefix, self._ids)

    def retry_ns(self, wait_ns: int) -> int:
        """When a client is to come back: later by up to a quarter, so that not all do at once."""
        wait_ns = wait_ns or int(self.config.retry_after_s * SECOND_NS)
        return int(wait_ns * (1.0 + 0.25 * self._rng.random()))

    def _sweep(self) -> None:
        self.clock_s = self.loop.time()
        self.common_lines = b"Server: %b\r\nDate: %b\r\n" % (
            self.config.server_name.encode(),
            formatdate(usegmt=True).encode(),
        )
        for connection in list(self.connections):
            connection.sweep(self.clock_s)
        if self._codec is not None:
            self._codec.sweep(self.clock_s)
        self._timer = self.loop.call_later(self.config.sweep_s, self._sweep)


@final
class TlsListener:
    """Accepts connections that are to be encrypted, and counts them before they are.

    `create_server(ssl=)` would tell of a connection only when its handshake is over, and clients
    that say nothing would be neither counted nor timed.
    """

    def __init__(self, server: HttpServer, sock: socket.socket) -> None:
        self._server = server
        self._socket = sock
        self._timer: asyncio.TimerHandle | None = None
        sock.listen(BACKLOG)
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._timer = None
        self._server.loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        server = self._server
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _LOG.warning("connections cannot be accepted just now: %s", error)
                server.loop.remove_reader(self._socket)
                self._timer = server.loop.call_later(_BREATHER_S, self._listen)
                return
            if server.excess() >= 0:
                connection.close()
                continue
            connection.setblocking(False)
            handshake = server.loop.create_task(server.adopt(connection))
            server.handshakes.add(handshake)
            handshake.add_done_callback(server.handshakes.discard)
