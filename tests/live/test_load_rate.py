"""One load-generator process sends thousands of requests per second and loses none."""

from __future__ import annotations

import subprocess
import sys

from headgate.core.clock import SECOND_NS
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import Body, LoadOptions
from headgate.loadgen.results import summarise_load
from headgate.workload import poisson

SERVER = """
import asyncio, httptools, uvloop

ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}"

class Peer(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)

    def data_received(self, data):
        self.parser.feed_data(data)

    def on_message_complete(self):
        self.transport.write(ANSWER)

async def main():
    server = await asyncio.get_running_loop().create_server(Peer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

uvloop.run(main())
"""


def test_eight_thousand_requests_per_second() -> None:
    """One second of Poisson arrivals, none sent early; how late is for benchmarks to measure."""
    body = Body(b'{"x":[1,2,3,4,5,6,7,8]}', {"Content-Type": "application/json"})
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}/x"
            arrivals = poisson(8_000, SECOND_NS, seed=1)
            result = run_open_loop(url, arrivals, LoadOptions(body=body))
        finally:
            server.kill()
    summary = summarise_load(result)
    assert summary.answers == {"200": len(arrivals)}
    assert (result.sent_ns >= arrivals.times_ns).all()
