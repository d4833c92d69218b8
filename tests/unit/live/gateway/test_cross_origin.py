"""Web pages: a browser lets none of them read an answer, and none of them can send a key."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256

import pytest
from gateway_rig import QUICK, Rig, body, infer, request, run

from headgate.live.gateway.config import ApiKey

PAGE = ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors")
FORM = "Content-Type: text/plain"  # what a page may send without asking first
KEYED = replace(QUICK, keys=(ApiKey(sha256(b"key").hexdigest(), 1),))


def test_no_answer_may_be_read_by_a_page() -> None:
    """Not one header says that a page of another site may."""

    async def scenario(rig: Rig) -> None:
        for asked in (
            infer(body(), *PAGE, FORM),
            infer(b"{", *PAGE, FORM),
            request("GET", "/v2/models/echo", b"", *PAGE),
            request("GET", "/metrics", b"", *PAGE),
            request("GET", "/nowhere", b"", *PAGE),
            request("POST", "/invocations", json.dumps(body()).encode(), *PAGE, FORM),
        ):
            reply = await rig.ask(asked)
            assert not [name for name in reply.headers if name.startswith("access-control-")]

    run(scenario)


@pytest.mark.parametrize(
    "path", ["/v2/models/echo/infer", "/invocations", "/endpoints/echo/invocations", "/metrics"]
)
def test_a_page_that_asks_whether_it_may_send_a_key_may_not(path: str) -> None:
    """A browser asks first for a header such as `Authorization`, and sends nothing unless told."""

    async def scenario(rig: Rig) -> None:
        wanted = (
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: x-api-key",
        )
        reply = await rig.ask(request("OPTIONS", path, b"", *PAGE, *wanted))
        assert reply.status == 405
        assert not [name for name in reply.headers if name.startswith("access-control-")]

    run(scenario, KEYED)


def test_what_a_page_sends_without_asking_runs_nothing_where_keys_are_needed() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(infer(body(), *PAGE, FORM))).status == 401
        assert (await rig.ask(request("POST", "/invocations", b"1", *PAGE, FORM))).status == 401
        assert rig.runtime.calls == []

    run(scenario, KEYED)
