"""A FaaS platform for tests: the Invoke API of Lambda, the real handler, and failures on demand."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from headgate.functions.lambda_handler import Handler

INVOKE = "/2015-03-31/functions/"
PROVISION = "/2019-09-30/functions/"


class FakeLambda:
    """Modes: well, throttle, fail (500), broken (function error), slow, hang, reset, senseless."""

    def __init__(self, directory: Path) -> None:
        self.mode = "well"
        self.slow_s = 0.3
        self.start_s = 0.0
        self.events: list[dict[str, object]] = []  # payloads of calls, pings included
        self.calls: Counter[str] = Counter()  # by mode
        self.running_max = 0
        self.targets: set[str] = set()
        self.rename: dict[str, str] = {}  # functions that have another name here
        self.provisioned: list[tuple[str, str, int]] = []
        self._running = 0
        self._environment = {"LAMBDA_TASK_ROOT": str(directory), "HEADGATE_APP": "app.yaml"}
        self._idle: list[Handler] = []
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._is_over = threading.Event()
        self._server: Server | None = None
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.close()

    def open(self) -> None:
        """Listen, on the same port as before."""
        server = self._server = Server(("127.0.0.1", self.port), Answerer)
        server.platform = self
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.hang_up()
            self._server = None

    def run(self, event: dict[str, object]) -> dict[str, object]:
        with self._lock:
            self.events.append(event)
            self._running += 1
            self.running_max = max(self.running_max, self._running)
            instance = self._idle.pop() if self._idle else None
        instance = instance or self._start()
        try:
            return instance.handle(event, None)
        finally:
            with self._lock:
                self._running -= 1
                self._idle.append(instance)

    def _start(self) -> Handler:
        """Start one instance at a time: real ones are processes, and loading is not thread-safe."""
        time.sleep(self.start_s)
        with self._starting:
            handler = Handler(self._environment)
            handler.warm_up()
        return handler

    def wait(self, limit_s: float) -> None:
        self._is_over.wait(limit_s)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a burst of new connections must not overflow the backlog
    platform: FakeLambda

    def __init__(self, address: tuple[str, int], answerer: type[Answerer]) -> None:
        self.sockets: set[socket.socket] = set()
        super().__init__(address, answerer)

    def get_request(self) -> tuple[socket.socket, object]:
        sock, address = super().get_request()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.add(sock)
        return sock, address

    def hang_up(self) -> None:
        for sock in list(self.sockets):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        self.sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, address: object) -> None:
        """Ignore clients that disconnect."""


class Answerer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    wbufsize = -1  # one packet per response

    def do_POST(self) -> None:
        platform = self.server.platform
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert self.path.startswith(INVOKE)
        platform.calls[platform.mode] += 1
        if platform.mode == "throttle":
            self.answer(
                429,
                {"Reason": "ConcurrentInvocationLimitExceeded", "message": "Rate Exceeded."},
                {"x-amzn-ErrorType": "TooManyRequestsException", "Retry-After": "1"},
            )
        elif platform.mode == "fail":
            self.answer(500, {"message": "oh"}, {"x-amzn-ErrorType": "ServiceException"})
        elif platform.mode == "broken":
            error = {"errorMessage": "no such luck", "errorType": "RuntimeError"}
            self.answer(200, error, {"X-Amz-Function-Error": "Unhandled"})
        elif platform.mode == "senseless":
            self.answer(200, {"hello": "world"})
        elif platform.mode == "reset":
            # SO_LINGER of zero: the connection is reset instead of closed.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
        elif platform.mode == "hang":
            platform.wait(30)
            self.close_connection = True
        else:
            if platform.mode == "slow":
                time.sleep(platform.slow_s)
            platform.targets.add(self.path.removeprefix(INVOKE).partition("/")[0])
            event = json.loads(body)
            if event.get("function") in platform.rename:
                event["function"] = platform.rename[event["function"]]
            self.answer(200, platform.run(event))

    def do_PUT(self) -> None:
        platform = self.server.platform
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        platform.provisioned.append((*self._named(), body["ProvisionedConcurrentExecutions"]))
        self.answer(202, {"Status": "IN_PROGRESS"})

    def do_DELETE(self) -> None:
        self.server.platform.provisioned.append((*self._named(), 0))
        self.answer(204, None)

    def _named(self) -> tuple[str, str]:
        path, _, query = self.path.removeprefix(PROVISION).partition("?")
        return path.partition("/")[0], query.removeprefix("Qualifier=")

    def answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None: ...
