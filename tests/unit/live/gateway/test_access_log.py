"""The access log: one line per response, whatever the outcome, and no secrets."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import grpc_rig
import pytest
from gateway_rig import QUICK, Rig, body, infer, request, rig, run_on_loop
from msgspec.structs import replace

from headgate.live.gateway.config import ApiKey, GatewayConfig
from headgate.live.gateway.context import AccessLog

MODELS = ["echo", "bytes", "free", "whole", "two"]
KEY = "open sesame"
KEYED = replace(QUICK, keys=(ApiKey(sha256(KEY.encode()).hexdigest(), 1),))


def lines(
    caplog: pytest.LogCaptureFixture,
    scenario: Callable[[Rig], Awaitable[None]],
    config: GatewayConfig = QUICK,
) -> list[dict[str, Any]]:
    """Run a scenario against a server with an access log, and return its lines."""
    caplog.set_level(logging.INFO, "headgate.access")

    async def main() -> None:
        async with rig(config) as made:
            made.server.context.access_log = AccessLog(MODELS, ["web", "batch"])
            await scenario(made)

    run_on_loop(main())
    found = [record for record in caplog.records if record.name == "headgate.access"]
    return [{**r.__dict__["fields"], "request_id": r.__dict__["request_id"]} for r in found]


def test_a_successful_request_is_logged_with_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(made: Rig) -> None:
        await made.infer(body(), "X-Request-Id: abc")

    (line,) = lines(caplog, scenario)
    assert line["total_ms"] > 0
    assert line["in_bytes"] > 50 and line["out_bytes"] > 50
    assert {k: line[k] for k in line if not k.endswith(("bytes", "total_ms"))} == {
        "method": "POST",
        "target": "/v2/models/echo/infer",
        "status": 200,
        "reason": None,
        "tenant": "web",
        "model": "echo",
        "number": -1,
        "queue_ms": 0.001,
        "exec_ms": 0.002,
        "request_id": "abc",
    }
    assert caplog.messages[-1].startswith(
        "POST /v2/models/echo/infer 200 - tenant=web model=echo number=-1 in_bytes="
    )


def test_every_response_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(made: Rig) -> None:
        await made.ask(request("GET", "/livez"))
        await made.ask(request("HEAD", "/nowhere?token=secret"))
        await made.infer(b"{")
        await made.infer(body(), model="nobody")
        made.runtime.mode = "overloaded"
        await made.infer(body())
        made.runtime.mode = "raise"
        await made.infer(body())
        await made.ask(b"no HTTP at all\r\n\r\n")

    found = lines(caplog, scenario)
    assert [(line["target"], line["status"]) for line in found] == [
        ("/livez", 200),
        ("/nowhere", 404),
        ("/v2/models/echo/infer", 400),
        ("/v2/models/nobody/infer", 404),
        ("/v2/models/echo/infer", 429),
        ("/v2/models/echo/infer", 500),
        ("-", 400),
    ]
    assert [line["reason"] for line in found[4:]] == ["overloaded", "internal", "malformed"]
    assert "secret" not in caplog.text
    assert found[0]["tenant"] is None  # the path is public


def test_a_client_that_disconnects_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """As in the metrics, and as over gRPC; its event log has the request by this id."""

    async def scenario(made: Rig) -> None:
        made.runtime.mode = "never"
        client = await made.connect()
        client.send(infer(body(), "X-Request-Id: abc"))
        await made.until(lambda: bool(made.runtime.calls))
        client.reset()
        await made.until(lambda: made.responses("499", "client_gone") == 1)

    (line,) = lines(caplog, scenario)
    assert (line["status"], line["reason"], line["request_id"]) == (499, "client_gone", "abc")
    assert (line["model"], line["out_bytes"]) == ("echo", 0)


def test_tenants_are_named_and_keys_are_not(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(made: Rig) -> None:
        await made.infer(body(), f"X-API-Key: {KEY}")
        await made.infer(body(), "X-API-Key: wrong wheat")
        await made.ask(request("GET", "/readyz", b"", f"Authorization: Bearer {KEY}"))

    found = lines(caplog, scenario, KEYED)
    assert [(line["status"], line["tenant"]) for line in found] == [
        (200, "batch"),
        (401, None),
        (200, None),
    ]
    text = caplog.text + str(found)
    assert KEY not in text and "wheat" not in text and KEYED.keys[0].sha256 not in text


def test_a_target_with_control_characters_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(made: Rig) -> None:
        await made.ask(infer(body(), model="%0a" + "\xff" * 3_000))

    (line,) = lines(caplog, scenario)
    assert len(line["target"]) <= 1_000


def test_nothing_is_logged_without_an_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        async with rig() as made:
            await made.infer(body())

    run_on_loop(scenario())
    assert caplog.messages == []


def test_rpcs_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headgate.access")
    access = AccessLog(MODELS, ["web"])

    async def scenario(made: grpc_rig.Rig) -> None:
        await made.ask("ServerLive", made.messages["ServerLiveRequest"]())
        await made.infer(metadata=(("x-request-id", "abc"),))
        nobody = made.row()
        nobody.model_name = "nobody"
        await made.refused(nobody)

    grpc_rig.run(scenario, access_log=access)
    found = [record.__dict__ for record in caplog.records if record.name == "headgate.access"]
    assert [(r["fields"]["target"].rsplit("/")[-1], r["fields"]["status"]) for r in found] == [
        ("ServerLive", "OK"),
        ("ModelInfer", "OK"),
        ("ModelInfer", "NOT_FOUND"),
    ]
    assert (found[1]["request_id"], found[1]["fields"]["model"]) == ("abc", "echo")
    assert found[1]["fields"]["tenant"] == "web"
