"""Arbitrary bytes on the wire: a response or a close, never a 500, and no memory is kept."""

from __future__ import annotations

import asyncio

from gateway_rig import QUICK, body, infer, request, rig, run_on_loop, send_in_halves, with_limits
from hypothesis import given, settings
from hypothesis import strategies as st

PIECES = [
    infer(body()),
    infer(body())[:-10],
    request("GET", "/livez"),
    request("GET", "/v2/models/echo/ready"),
    b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: text/csv\r\nContent-Length: 9\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"0\r\n\r\n",
    b"GET ",
    b"/v2",
    b" HTTP/1.1\r\n",
    b"Host: x\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 99999999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\nConnection: upgrade\r\n",
    b"Connection: close\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\x00",
]
CONFIG = with_limits(QUICK, header_timeout_s=0.05, body_timeout_s=0.05, idle_timeout_s=0.05)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(PIECES) | st.binary(max_size=12), max_size=8).map(b"".join),
        min_size=8,
        max_size=8,
    )
)
def test_arbitrary_bytes_never_break_the_connection(streams: list[bytes]) -> None:
    """Eight clients at a time send bytes in two halves; each connection ends."""

    async def scenario() -> None:
        async with rig(CONFIG) as made:
            await asyncio.gather(*(send_in_halves(made.port, data) for data in streams))
            await made.until(lambda: not made.server.connections)
            assert made.server.context.budget.used == 0

    run_on_loop(scenario())
