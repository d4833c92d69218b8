"""A hand-written HTTP/2 client that can do what no library would do.

It opens streams, announces messages of any size, and sends any part of them within the windows that
the server grants. Headers are not compressed, and responses are kept as frames.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from typing import Self

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384


class Http2Client:
    """One connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.frames: list[tuple[int, int, bytes]] = []  # kind, stream, payload
        self.has_settings = False
        self._unread = b""
        self._window = self._stream_window = 65_535
        self._windows: dict[int, int] = {}
        self._next_id = 1
        self.socket.sendall(PREFACE + _frame(SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def open_stream(self, path: str, headers: dict[str, str] | None = None) -> int:
        """Begin a request. Returns the id of its stream."""
        stream_id = self._next_id
        self._next_id += 2
        self._windows[stream_id] = self._stream_window
        lines = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "test",
            "te": "trailers",
            "content-type": "application/grpc",
            **(headers or {}),
        }
        block = b"".join(
            b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in lines.items()
        )
        self.socket.sendall(_frame(HEADERS, END_HEADERS, stream_id, block))
        return stream_id

    def announce(self, stream_id: int, message_bytes: int, *, is_compressed: bool = False) -> None:
        """Send the length prefix of a message."""
        prefix = bytes((is_compressed,)) + struct.pack("!I", message_bytes)
        self.send(stream_id, prefix, limit_s=60)

    def send(self, stream_id: int, data: bytes, *, limit_s: float) -> int:
        """Send what the server accepts within `limit_s`, or until it responds. Returns the size."""
        sent = 0
        end_s = time.monotonic() + limit_s
        while sent < len(data) and time.monotonic() < end_s and not self.response(stream_id):
            size = min(len(data) - sent, FRAME_BYTES_MAX, self._window, self._windows[stream_id])
            if size <= 0:
                self.receive(0.1)
                continue
            self.socket.sendall(_frame(DATA, 0, stream_id, data[sent : sent + size]))
            sent += size
            self._window -= size
            self._windows[stream_id] -= size
            self.receive(0.0)
        return sent

    def response(self, stream_id: int) -> bytes:
        """What the server has sent on a stream, headers and trailers included."""
        return b"".join(
            payload for kind, at, payload in self.frames if at == stream_id and kind != RESET
        )

    def wait_for_response(self, stream_id: int) -> bytes:
        """The response, once there is one."""
        end_s = time.monotonic() + 60.0
        while not self.response(stream_id) and time.monotonic() < end_s:
            self.receive(0.1)
        return self.response(stream_id)

    def receive(self, wait_s: float) -> None:
        """Read and handle frames. Raises `ConnectionError` when the server has closed."""
        while select.select([self.socket], [], [], wait_s)[0]:
            data = self.socket.recv(65_536)
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._unread += data
            wait_s = 0.0
        while len(self._unread) >= 9:
            size = int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < 9 + size:
                return
            kind, flags = self._unread[3], self._unread[4]
            stream_id = int.from_bytes(self._unread[5:9], "big") & 0x7FFF_FFFF
            payload = self._unread[9 : 9 + size]
            self._unread = self._unread[9 + size :]
            self._handle_frame(kind, flags, stream_id, payload)

    def _handle_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.has_settings = True
            for name, value in struct.iter_unpack("!HI", payload):
                if name == 4:  # the window of a stream
                    for id in self._windows:
                        self._windows[id] += value - self._stream_window
                    self._stream_window = value
            self.socket.sendall(_frame(SETTINGS, ACK, 0))
        elif kind == WINDOW and stream_id:
            self._windows[stream_id] += int.from_bytes(payload, "big")
        elif kind == WINDOW:
            self._window += int.from_bytes(payload, "big")
        elif kind == PING and not flags & ACK:
            with suppress(OSError):
                self.socket.sendall(_frame(PING, ACK, 0, payload))
        elif kind in (HEADERS, DATA, RESET, GOAWAY):
            self.frames.append((kind, stream_id, payload))


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big")
        + bytes((kind, flags))
        + struct.pack("!I", stream_id)
        + payload
    )
