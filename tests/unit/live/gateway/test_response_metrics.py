"""Every response is counted, errors included; and what clients learn about failures."""

from __future__ import annotations

import asyncio
import json
import logging
from hashlib import sha256
from pathlib import Path

import pytest
from gateway_rig import QUICK, Rig, body, infer, request, run, tensor, with_limits
from msgspec.structs import replace

import headgate
from headgate.live.call import GatewayPhase
from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit

Row = tuple[str, str]
LIMITED = with_limits(
    QUICK,
    body_bytes_max=2000,
    header_timeout_s=0.5,
    keys=(ApiKey(sha256(b"a").hexdigest(), 0), ApiKey(sha256(b"b").hexdigest(), 1)),
    tenants=(TenantLimit(1, rate_per_s=0.001),),
)
KEY = "X-API-Key: a"


def counted(rig: Rig) -> dict[Row, int]:
    """The counts, without those of success."""
    return {
        (code, reason): count
        for (protocol, code, reason), count in rig.server.context.responses.counted()
        if protocol == "http" and code != "200"
    }


@pytest.mark.parametrize(
    ("request_bytes", "row"),
    [
        (b"nonsense\r\n\r\n", ("400", "malformed")),
        (request("GET", "/livez").replace(b"Host: test\r\n", b""), ("400", "invalid")),
        (infer(b"{", KEY), ("400", "invalid")),
        (infer(body()), ("401", "unauthenticated")),
        (request("GET", "/nothing"), ("404", "unknown_path")),
        (infer(body(), KEY, model="nobody"), ("404", "unknown_model")),
        (request("DELETE", "/livez"), ("405", "method_not_allowed")),
        (b"GET /livez HTTP/1.1\r\nHo", ("408", "slow")),
        (infer(bytes(3000), KEY), ("413", "too_large")),
        (b"GET /" + b"x" * 20_000, ("414", "too_large")),
        (infer(body(), KEY, "Content-Encoding: gzip"), ("415", "unsupported")),
        (request("POST", "/invocations", b"x", KEY, "Expect: much"), ("417", "unsupported")),
        (
            b"GET /livez HTTP/1.1\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(200)),
            ("431", "too_large"),
        ),
    ],
    ids=lambda value: value[0] + value[1] if isinstance(value, tuple) else "",
)
def test_early_errors_are_counted_under_the_reason_that_clients_see(
    request_bytes: bytes, row: Row
) -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.ask(request_bytes)
        assert (str(reply.status), counted(rig)) == (row[0], {row: 1})
        assert reply.json["reason"] == reply.headers["x-headgate-reason"] == row[1]

    run(scenario, LIMITED)


def test_limits_of_a_tenant_are_counted() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.infer(body(), "X-API-Key: b")
        assert (await rig.infer(body(), "X-API-Key: b")).status == 429
        assert counted(rig) == {("429", "rate_limited"): 1}

    run(scenario, LIMITED)


@pytest.mark.parametrize(
    ("mode", "row"),
    [
        ("overloaded", ("429", "overloaded")),
        ("infeasible", ("422", "infeasible")),
        ("refuse", ("400", "function_refused")),
        ("fail", ("500", "function_failed")),
        ("raise", ("500", "internal")),
        ("lost", ("503", "worker_lost")),
        ("expire", ("504", "deadline_exceeded")),
    ],
)
def test_outcomes_of_calls_are_counted(mode: str, row: Row) -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = mode
        await rig.infer(body())
        assert counted(rig) == {row: 1}

    run(scenario)


def test_excess_connections_and_vanished_clients_are_counted() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        client.send(infer(body()))
        await rig.until(lambda: bool(rig.runtime.calls))
        assert (await (await rig.connect()).reply()).status == 503
        assert counted(rig) == {("503", "connections"): 1}
        client.reset()
        await rig.until(lambda: counted(rig).get(("499", "client_gone")) == 1)

    run(scenario, replace(QUICK, connections_max=1))


def test_probes_are_counted_during_shutdown() -> None:
    async def scenario(rig: Rig) -> None:
        rig.runtime.phase = GatewayPhase.DRAINING
        await rig.ask(request("GET", "/readyz"))
        await rig.infer(body())
        assert counted(rig) == {("503", "not_ready"): 1, ("503", "draining"): 1}

    run(scenario)


@pytest.mark.parametrize("exposes", [False, True])
def test_the_text_of_a_functions_exception_is_only_logged(
    exposes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected_text = "division by zero" if exposes else "the function failed"

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "fail"
        reply = await rig.infer(body(), "X-Request-Id: mine")
        assert (reply.status, reply.json["error"], reply.json["reason"]) == (
            500,
            expected_text,
            "function_failed",
        )
        assert reply.json["request_id"] == "mine"
        given = json.dumps({"inputs": [tensor()]}).encode()
        for path in ("/invocations", "/endpoints/echo/invocations"):
            target = "X-Amzn-SageMaker-Target-Model: echo"
            reply = await rig.ask(
                request("POST", path, given, "Content-Type: application/json", target)
            )
            shown = reply.json.get("OriginalMessage", reply.body.decode())
            assert expected_text in shown and exposes == ("division by zero" in reply.body.decode())
        rig.runtime.mode = "refuse"
        assert (await rig.infer(body())).json["error"] == "x must be positive"

    with caplog.at_level(logging.WARNING):
        run(scenario, replace(QUICK, expose_errors=exposes))
    texts = [r.getMessage() for r in caplog.records if getattr(r, "request_id", "") == "mine"]
    assert texts == ["the function failed: division by zero"]


@pytest.mark.parametrize(
    "mode", ["overloaded", "infeasible", "refuse", "fail", "raise", "lost", "expire", "echo"]
)
def test_no_error_carries_a_traceback_or_a_path(mode: str) -> None:
    """Whatever the cause, a defect of the gateway included."""
    rows, target = json.dumps(body()).encode(), "X-Amzn-SageMaker-Target-Model: echo"
    request_bytes = [infer(body()), infer(b"{"), infer(body(), model="nobody"), b"nonsense\r\n\r\n"]
    request_bytes.append(
        request("POST", "/invocations", rows, "Content-Type: application/json", target)
    )
    private = ("Traceback", 'File "', ".py", str(Path(headgate.__file__).parent), str(Path.cwd()))

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = mode
        for each in request_bytes:
            reply = await rig.ask(each)
            assert reply.status >= 400 or mode == "echo"
            shown = reply.body.decode() + str(reply.headers)
            assert not [word for word in private if word in shown]

    run(scenario)


def test_metrics_have_the_format_that_the_scraper_accepts() -> None:
    async def scenario(rig: Rig) -> None:
        seen: list[str] = []

        def render(accept: str) -> tuple[bytes, str]:
            seen.append(accept)
            return b"# EOF\n", "application/openmetrics-text; version=1.0.0; charset=utf-8"

        rig.server.context.render_metrics = render
        reply = await rig.ask(request("GET", "/metrics", b"", "Accept: some/thing"))
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        assert seen == ["some/thing"]
        await asyncio.sleep(0)

    run(scenario, GatewayConfig())
