"""Requests of hostile clients: bodies that are expensive to read, and silent connections."""

from __future__ import annotations

import http.client
import json
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

MIB = 1 << 20
CHUNK = b"1\r\n1\r\n"


@dataclass(frozen=True)
class Attack:
    """One request to a model, as bytes."""

    model: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, url: str, timeout_s: float = 60.0) -> int:
        """Send the request on a new connection. Returns the status, 0 if the server disconnects."""
        address = urlsplit(url)
        host, port = address.hostname or "", address.port
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        if address.scheme == "https":
            trusting = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=trusting
            )
        try:
            connection.putrequest("POST", f"/v2/models/{self.model}/infer")
            for name, text in self.headers.items():
                connection.putheader(name, text)
            if "Transfer-Encoding" not in self.headers:
                connection.putheader("Content-Length", str(len(self.body)))
            connection.endheaders()
            with suppress(ConnectionError):  # refused before it was read; there may be a response
                connection.send(self.body)
            response = connection.getresponse()
            while response.read(MIB):
                pass
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def long_json(size: int = 16 * MIB - 1024, model: str = "plain") -> Attack:
    """A long list of numbers that does not fit its shape."""
    head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":['
    tail = b"1]}]}"
    return Attack(model, head + b"1," * ((size - len(head) - len(tail)) // 2) + tail)


def raw_halves(size: int = 63 * MIB, model: str = "halves") -> Attack:
    """Half-precision numbers as bytes, with a response in JSON."""
    count = size // 2
    tensor = {
        "name": "x",
        "datatype": "FP16",
        "shape": [1, count],
        "parameters": {"binary_data_size": 2 * count},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Attack(model, head + b"\x55\x35" * count, headers)  # 0.3333...: many digits each


def deep_nesting(depth: int = 7 * MIB, model: str = "plain") -> Attack:
    """Deeply nested lists."""
    head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":'
    return Attack(model, head + b"[" * depth + b"]" * depth + b"}]}")


def tiny_chunks(count: int = 4 * MIB, model: str = "plain") -> Attack:
    """A body in chunks of one byte."""
    return Attack(model, CHUNK * count + b"0\r\n\r\n", {"Transfer-Encoding": "chunked"})


def huge_header(size: int = 16 * MIB, model: str = "plain") -> Attack:
    """A very long header."""
    return Attack(model, b"{}", {"X-Long": "x" * size})


BOMBS: dict[str, Callable[[], Attack]] = {
    "long_json": long_json,
    "raw_halves": raw_halves,
    "deep_nesting": deep_nesting,
    "tiny_chunks": tiny_chunks,
    "huge_header": huge_header,
}


def grpc_message(model: str, size: int) -> bytes:
    """A `ModelInferRequest` of one FP32 tensor as raw bytes, written without a library.

    >>> len(grpc_message("rows", 4096)) - 4096 < 40
    True
    """

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes((*out, value))

    def field_of(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    count = size // 4
    shape = varint(1) + varint(count)
    tensor = field_of(1, b"x") + field_of(2, b"FP32") + field_of(3, shape)
    return field_of(1, model.encode()) + field_of(5, tensor) + field_of(7, bytes(4 * count))


class SilentClients:
    """Connections that are opened and send nothing."""

    def __init__(self, url: str, count: int) -> None:
        _allow_open_files(count + 512)
        address = urlsplit(url)
        self.opened_s = time.monotonic()
        self._sockets: dict[int, socket.socket] = {}  # by file descriptor; still open
        self._poll = select.poll()
        for number in range(count):
            if number % 50 == 0:
                time.sleep(0.01)  # so that the backlog does not fill up
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex((address.hostname or "", address.port or 0))
            self._sockets[client.fileno()] = client
            self._poll.register(client, select.POLLIN | select.POLLHUP | select.POLLERR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._sockets.values():
            client.close()

    def held(self) -> int:
        """How many the server has not closed yet."""
        for number, _ in self._poll.poll(0):
            self._poll.unregister(number)
            self._sockets.pop(number).close()
        return len(self._sockets)


def connect_at_once(url: str, count: int, within_s: float) -> int:
    """Open `count` connections at once. Returns how many were established within the time."""
    _allow_open_files(count + 512)
    address = urlsplit(url)
    clients = {}
    poll = select.poll()
    try:
        for _ in range(count):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex((address.hostname or "", address.port or 0))
            clients[client.fileno()] = client
            poll.register(client, select.POLLOUT)
        end_s = time.monotonic() + within_s
        waiting = set(clients)
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            for number, event in poll.poll(left_s * 1000):
                poll.unregister(number)
                if event == select.POLLOUT:
                    waiting.discard(number)
        return count - len(waiting)
    finally:
        for client in clients.values():
            client.close()


def every(gap_s: float, seconds: float) -> Iterator[int]:
    """Yield 0, 1, 2, ..., one number per `gap_s`, for `seconds`."""
    start_s = time.monotonic()
    number = 0
    while (due_s := number * gap_s) < seconds:
        time.sleep(max(0.0, start_s + due_s - time.monotonic()))
        yield number
        number += 1


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
