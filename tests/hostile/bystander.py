"""A well-behaved client in a process of its own: small requests at a fixed rate.

The rate does not depend on the responses (open loop), and latency counts from the time at which a
request was due. `python bystander.py SETTINGS` sends until its standard input is closed, and then
prints one JSON list per request: when it was due (the monotonic clock, which all processes of a
machine share), its status (0: none), its latency in milliseconds, and an error.

This file needs nothing but the standard library: an attack that keeps the test's process busy
does not slow it, and it measures every version of the server in the same way.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"


class Sender:
    """Keep-alive connections to one server, and the result of each request."""

    def __init__(self, settings: dict[str, object]) -> None:
        address = urlsplit(str(settings["url"]))
        self._host, self._port = address.hostname or "", address.port
        self._tls = _unverified() if address.scheme == "https" else None
        self._request = _request_bytes(address.netloc, settings)
        self._gap_s = 1 / float(str(settings["rate_per_s"]))
        self._timeout_s = float(str(settings["timeout_s"]))
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._rows: list[tuple[float, int, float, str]] = []

    async def run(self) -> None:
        """Send until the standard input ends; then wait, and print the results."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, stop.set)
        tasks = set()
        due_s = time.monotonic()
        print("sending", flush=True)
        while not stop.is_set():
            task = asyncio.create_task(self._record(due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due_s += self._gap_s
            try:
                await asyncio.wait_for(stop.wait(), max(0.0, due_s - time.monotonic()))
            except TimeoutError:
                continue
        loop.remove_reader(sys.stdin)
        await asyncio.gather(*tasks)
        for _, writer in self._idle:
            writer.close()
        for row in self._rows:
            print(json.dumps(row))

    async def _record(self, due_s: float) -> None:
        status, error = 0, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._send()
        except TimeoutError:
            error = "timeout"
        except ConnectionRefusedError:
            error = "refused"
        except asyncio.IncompleteReadError as cut:
            error = "cut" if cut.partial else "closed"
        except OSError:
            error = "reset"
        self._rows.append((due_s, status, (time.monotonic() - due_s) * 1000, error))

    async def _send(self) -> int:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                break
            writer.close()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            writer.write(self._request)
            head = await reader.readuntil(HEAD_END)
            status, length, is_last = _read_head(head)
            await reader.readexactly(length)
        except BaseException:
            writer.transport.abort()
            raise
        if is_last:
            writer.close()
        else:
            self._idle.append((reader, writer))
        return status


def _request_bytes(host: str, settings: dict[str, object]) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
    body = json.dumps({"inputs": [tensor]})
    headers = settings["headers"]
    assert isinstance(headers, dict)
    lines = [
        f"POST /v2/models/{settings['model']}/infer HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", body]).encode()


def _read_head(head: bytes) -> tuple[int, int, bool]:
    """Status, length of the body, and whether the connection ends with it."""
    first, *lines = head.decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    length = int(headers.get("content-length", "0"))
    return int(first.split()[1]), length, headers.get("connection") == "close"


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False  # certificates of tests are self-signed
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    asyncio.run(Sender(json.loads(sys.argv[1])).run())
