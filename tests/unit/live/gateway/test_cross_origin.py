"""Web pages of other origins: a browser lets none read a response or send a key."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from gateway_rig import QUICK, Rig, body, infer, request, run
from msgspec.structs import replace

from headgate.live.gateway.config import ApiKey

PAGE = ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors")
FORM = "Content-Type: text/plain"  # what a page may send without a preflight request
KEYED = replace(QUICK, keys=(ApiKey(sha256(b"key").hexdigest(), 1),))


def test_no_response_allows_cross_origin_reads() -> None:
    """No response has a header that would allow it."""

    async def scenario(rig: Rig) -> None:
        for request_bytes in (
            infer(body(), *PAGE, FORM),
            infer(b"{", *PAGE, FORM),
            request("GET", "/v2/models/echo", b"", *PAGE),
            request("GET", "/metrics", b"", *PAGE),
            request("GET", "/nowhere", b"", *PAGE),
            request("POST", "/invocations", json.dumps(body()).encode(), *PAGE, FORM),
        ):
            reply = await rig.ask(request_bytes)
            assert not [name for name in reply.headers if name.startswith("access-control-")]

    run(scenario)


@pytest.mark.parametrize(
    "path", ["/v2/models/echo/infer", "/invocations", "/endpoints/echo/invocations", "/metrics"]
)
def test_preflight_requests_are_refused(path: str) -> None:
    """A header such as `Authorization` needs a preflight request, which is refused."""

    async def scenario(rig: Rig) -> None:
        requested = (
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: x-api-key",
        )
        reply = await rig.ask(request("OPTIONS", path, b"", *PAGE, *requested))
        assert reply.status == 405
        assert not [name for name in reply.headers if name.startswith("access-control-")]

    run(scenario, KEYED)


def test_simple_cross_origin_requests_run_nothing_without_a_key() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(infer(body(), *PAGE, FORM))).status == 401
        assert (await rig.ask(request("POST", "/invocations", b"1", *PAGE, FORM))).status == 401
        assert rig.runtime.calls == []

    run(scenario, KEYED)
