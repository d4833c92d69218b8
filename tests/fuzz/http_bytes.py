"""Fuzz target: an HTTP connection. Each request gets one response, and none has status 500.

The input is a script: each line begins with the kind of step (see `STEPS`), then the bytes sent, in
which `~` stands for the end of a line of HTTP. Time advances only by steps of the script.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from fuzzing import fuzz

sys.path.append(str(Path(__file__).parents[1] / "unit" / "live" / "gateway"))

from fake_runtime import FakeRuntime

from headgate.http.interface import HttpLimits
from headgate.live.call import Call
from headgate.live.gateway.config import GatewayConfig, TenantLimit
from headgate.live.gateway.http.server import GatewayServer

LIMITS = GatewayConfig(
    body_bytes_max=2048, memory_bytes_max=4096, elements_max=1 << 12,
    http=HttpLimits(
        header_bytes_max=1024, headers_max=20, pipelined_max=4, write_high_water=2048
    ),
    tenants=(TenantLimit(0, concurrency_max=8),),
)  # fmt: skip
FOREVER_S = 1e6
RESPONSE = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(?:[^\r\n]+\r\n)*\r\n")
LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n")


class Handle:
    """A timer."""

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s = at_s
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        self.act = None


class Loop:
    """The part of an event loop that a server needs, with a simulated clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[Handle] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, act: Callable[[], None]) -> Handle:
        handle = Handle(self.now_s + delay_s, act)
        self.timers.append(handle)
        return handle

    def call_soon(self, act: Callable[[], None]) -> Handle:
        return self.call_later(0.0, act)

    def pass_time(self, by_s: float) -> None:
        self.now_s += by_s
        while due := [handle for handle in self.timers if handle.at_s <= self.now_s]:
            self.timers = [handle for handle in self.timers if handle not in due and handle.act]
            for handle in due:
                if handle.act is not None:
                    handle.act()


class Runtime(FakeRuntime):
    """Answers when the script says so."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Call] = []

    def submit(self, call: Call) -> None:
        self.waiting.append(call)

    def answer_next(self) -> None:
        if self.waiting:
            self.complete(self.waiting.pop(0))


class Transport:
    """Keeps the bytes written; `connection_lost` follows a close later, as in a real one."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.has_ended = False
        self.is_gone = False

    def write(self, data: bytes) -> None:
        assert not self.has_ended, "written after the end"
        if not self.is_gone:
            self.written += data

    def write_eof(self) -> None:
        self.has_ended = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_gone

    def close(self) -> None:
        self.is_gone = True

    abort = close

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, _: str) -> Transport:
        return self

    def getsockopt(self, *_: int) -> bytes:
        return bytes((1 if not self.is_gone else 7,))


class Session:
    """One connection, and the steps that a script applies to it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.runtime = Runtime()
        self.server = GatewayServer(self.runtime, LIMITS, lambda accept: (b"up 1\n", "text/plain"))
        self.server.loop = self.server.context.loop = cast(asyncio.AbstractEventLoop, self.loop)
        self.server._sweep()
        self.transport = Transport()
        self.connection = self.server.protocol()
        self.connection.connection_made(cast(asyncio.Transport, self.transport))
        self.is_lost = False
        self.is_slow = False
        self.has_closed = False

    def send(self, data: bytes) -> None:
        if data and not self.has_closed and not self.transport.is_gone:
            self.connection.data_received(data)

    def answer(self, _: bytes) -> None:
        self.runtime.answer_next()

    def wait(self, data: bytes) -> None:
        self.loop.pass_time(0.3 + 20 * len(data))

    def stall(self, _: bytes) -> None:
        self.is_slow = not self.is_slow
        self.connection.pause_writing() if self.is_slow else self.connection.resume_writing()

    def lose(self, _: bytes = b"") -> None:
        if not self.is_lost:
            self.is_lost = self.transport.is_gone = True
            self.connection.connection_lost(None)

    def half_close(self, _: bytes) -> None:
        if not self.is_lost and not self.transport.is_gone and not self.has_closed:
            self.has_closed = True
            if not self.connection.eof_received():
                self.transport.close()

    def end(self) -> None:
        """Answer all open requests and let the timeouts pass."""
        if self.is_slow:
            self.stall(b"")
        while self.runtime.waiting:
            self.runtime.answer_next()
        for _ in range(4):
            self.loop.pass_time(100)
        assert self.transport.is_gone, "the connection never closes"
        self.lose()


STEPS: Mapping[bytes, Callable[[Session, bytes], None]] = {
    b">": Session.send,
    b"!": Session.answer,
    b"@": Session.wait,
    b"%": Session.stall,
    b"#": Session.lose,
    b"$": Session.half_close,
}


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    """Return a line of a script: one request."""
    head = (b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *lines)
    return b">%b~~%b\n" % (b"~".join(head), body)


ROW = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
TEXT = (
    b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":5}}],'
    b'"parameters":{"binary_data_output":true}}'
)
SEEDS = [
    b">GET /livez HTTP/1.1~Host: x~~GET /v2/models/two HTTP/1.1~Host: x~~\n",
    post(b"/v2/models/echo/infer", ROW) + b"!\n@\n",
    post(b"/v2/models/echo/infer", ROW) * 2 + b"$\n@\n!\n!\n",
    post(b"/v2/models/echo/infer", ROW, b"X-Request-Timeout-Ms: 10") * 3 + b"!\n@xxx\n!\n#\n",
    post(b"/invocations", b"1,2", b"Content-Type: text/csv", b"X-Amzn-SageMaker-Target-Model: echo")
    + b"!\n",
    post(
        b"/endpoints/echo/invocations",
        b'{"instances": [[1, 2]]}',
        b"Content-Type: application/json",
    )
    + b"@\n!\n",
    post(
        b"/v2/models/bytes/infer",
        TEXT + b"\x01\0\0\0a",
        b"Inference-Header-Content-Length: %d" % len(TEXT),
    )
    + b"!\n",
    b">POST /v2/models/free/infer HTTP/1.1~Host: x~Transfer-Encoding: chunked~~5~hello~\n>0~~\n!\n",
    b">POST /v2/models/echo/infer HTTP/1.1~Host: x~Expect: 100-continue~Content-Length: 5~~\n>1234",
    b">GET / HTTP/1.1~Host: x~Upgrade: h2c~Connection: upgrade~Content-Length: 4~~ab\n>cd\n@x\n",
    b">GET /metrics HTTP/1.0~Connection: keep-alive~~\n%\n>HEAD /livez HTTP/1.1~Host: x~~\n%\n",
]


def check_written(written: bytes) -> None:
    """Assert that the bytes are a sequence of responses, none of them with status 500."""
    at = 0
    while at < len(written):
        match = RESPONSE.match(written, at)
        assert match is not None, written[at : at + 80]
        status = int(match[1])
        assert status != 500, written[at : at + 400]
        at = match.end()
        length = LENGTH.search(match[0])
        is_head = at == len(written) or written.startswith(b"HTTP/1.1 ", at)
        if length is not None and not is_head:
            at += int(length[1])
    assert at == len(written), "a response is truncated"


def target(data: bytes) -> None:
    """Run a script."""
    session = Session()
    for line in data.split(b"\n"):
        step = STEPS.get(line[:1])
        if step is not None and not session.is_lost:
            step(session, line[1:].replace(b"~", b"\r\n"))
            if session.transport.is_gone:
                session.lose()
    session.end()
    server, context = session.server, session.server.context
    assert not server.connections and not context.budget.used
    assert not context.keys.anonymous.in_flight
    check_written(bytes(session.transport.written))


if __name__ == "__main__":
    fuzz(target, SEEDS)
