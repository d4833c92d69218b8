"""Deadline headers, API keys, tenant limits, health and metadata."""

from __future__ import annotations

import hmac
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest

import pytest
from gateway_rig import QUICK, Rig, body, request, run
from msgspec.structs import replace

from headgate.live.gateway.config import ApiKey, GatewayConfig, TenantLimit
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.http.openapi import document
from headgate.live.gateway.inference import timeout_ns
from headgate.live.gateway.tenants import ApiKeys, Tenant

MS = 1_000_000
HOUR_NS = 3_600_000 * MS
KEYS = (
    ApiKey(sha256(b"first").hexdigest(), 1),
    ApiKey(sha256(b"second").hexdigest().upper(), 2),
)


@pytest.mark.parametrize(
    ("headers", "parameter", "expected_ns"),
    [
        ({}, None, 0),
        ({}, 0, 0),
        ({}, 2500, 2_500_000),
        ({b"grpc-timeout": b"5S"}, 1, 5000 * MS),
        ({b"grpc-timeout": b"00000100u", b"x-request-timeout-ms": b"7"}, None, 100_000),
        ({b"x-request-timeout-ms": b"7", b"x-envoy-expected-rq-timeout-ms": b"8"}, 1, 7 * MS),
        ({b"x-request-timeout-ms": b"0.5"}, None, MS // 2),
        ({b"x-envoy-expected-rq-timeout-ms": b"8"}, 1, 8 * MS),
        ({b"grpc-timeout": b"99999999H"}, None, HOUR_NS),
        ({}, 2**200, HOUR_NS),
    ],
)
def test_precedence_of_deadline_headers(
    headers: dict[bytes, bytes], parameter: object, expected_ns: int
) -> None:
    assert timeout_ns(headers, parameter, HOUR_NS) == expected_ns


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("grpc-timeout", text) for text in ("", "5", "5s", "S", "-5S", "123456789S", "5 S")),
        *(("x-request-timeout-ms", text) for text in ("", "0", "-1", "nan", "inf", "1e9", "1_0")),
        ("x-envoy-expected-rq-timeout-ms", "soon"),
    ],
)
def test_malformed_deadlines_are_refused(name: str, text: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        timeout_ns({name.encode(): text.encode()}, None, HOUR_NS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("headers", "client_id"),
    [
        ({b"authorization": b"Bearer first"}, 1),
        ({b"authorization": b"bearer  second "}, 2),
        ({b"x-api-key": b"second"}, 2),
        ({b"authorization": b"Basic first"}, None),
        ({b"authorization": b"Bearer wrong"}, None),
        ({b"authorization": b"Bearer wrong", b"x-api-key": b"first"}, None),
        ({b"x-api-key": KEYS[0].sha256.encode()}, None),
        ({b"x-api-key": b""}, None),
        ({}, None),
    ],
)
def test_keys_identify_tenants(headers: dict[bytes, bytes], client_id: int | None) -> None:
    keys = ApiKeys(GatewayConfig(keys=KEYS))
    if client_id is not None:
        assert keys.tenant(headers).client_id == client_id
        return
    with pytest.raises(RequestError) as caught:
        keys.tenant(headers)
    assert caught.value.status == 401


@pytest.mark.parametrize("given", [b"first", b"wrong"])
def test_hashes_of_keys_are_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, given: bytes
) -> None:
    """Hashes and not keys are compared, by `hmac.compare_digest`, for known and unknown keys."""
    compared: list[tuple[str, str]] = []

    def compare(known: str, digest: str) -> bool:
        compared.append((known, digest))
        return compare_digest(known, digest)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with suppress(RequestError):
        ApiKeys(GatewayConfig(keys=KEYS)).tenant({b"x-api-key": given})
    ((known, digest),) = compared
    assert digest == sha256(given).hexdigest()
    assert known == (KEYS[0].sha256 if given == b"first" else "")


def test_the_rate_limit_is_a_token_bucket() -> None:
    """With a burst of two and ten per second, a third request may follow after 100 ms."""
    tenant = Tenant(TenantLimit(1, rate_per_s=10.0, burst=2))
    tenant.admit(10 * MS)
    tenant.admit(10 * MS)
    with pytest.raises(RequestError) as caught:
        tenant.admit(30 * MS)
    assert caught.value.reason == "rate_limited"
    assert caught.value.retry_ns == pytest.approx(80 * MS)
    tenant.admit(30 * MS + caught.value.retry_ns)
    with pytest.raises(RequestError):
        tenant.admit(30 * MS + caught.value.retry_ns)
    assert tenant.in_flight == 3
    tenant.admit(HOUR_NS)  # a long pause earns no more than the burst
    tenant.admit(HOUR_NS)
    with pytest.raises(RequestError):
        tenant.admit(HOUR_NS)


def test_keys_over_http() -> None:
    async def scenario(rig: Rig) -> None:
        reply = await rig.infer(body())
        assert (reply.status, reply.json["reason"]) == (401, "unauthenticated")
        assert "Bearer" in reply.headers["www-authenticate"]
        for path in ("/v2", "/livez", "/metrics", "/openapi.json", "/ping"):
            assert (await rig.ask(request("GET", path))).status == 200
        assert (await rig.ask(request("GET", "/v2/models/echo"))).status == 401
        assert (await rig.infer(body(), "X-API-Key: second")).status == 200
        assert rig.runtime.calls[0].client_id == 2

    run(scenario, replace(QUICK, keys=KEYS))


def test_every_path_needs_a_key_except_public_ones() -> None:
    """A path that runs a model, or describes one, is not public."""
    public = {
        *("/livez", "/readyz", "/healthz", "/v2/health/live", "/v2/health/ready", "/ping"),
        *("/v2", "/v2/", "/metrics", "/openapi.json"),
    }

    async def scenario(rig: Rig) -> None:
        found = set()
        for parts, rule in rig.server.router._patterns:
            path = b"/".join(parts).decode()
            target = path.replace("{name}", "echo").replace("{version}", "1")
            has_body = rule.method == b"POST"
            reply = await rig.ask(request(rule.method.decode(), target, ECHO * has_body))
            if reply.status != 401:
                found.add(path)
        assert found == public
        assert rig.runtime.calls == []

    run(scenario, replace(QUICK, keys=KEYS))


def test_the_concurrency_limit_of_a_tenant() -> None:
    """With a limit of one, the next request is admitted however the previous one ended."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.mode = "never"
        client = await rig.connect()
        request_bytes = "X-Request-Timeout-Ms: 1000"
        client.send(request("POST", "/v2/models/echo/infer", ECHO, request_bytes))
        await rig.until(lambda: bool(rig.runtime.calls))
        reply = await rig.infer(body())
        assert (reply.status, reply.json["reason"]) == (429, "concurrency_limited")
        assert "retry-after" in reply.headers
        assert (await client.reply()).status == 504
        rig.runtime.mode = "raise"
        assert (await rig.infer(body())).status == 500
        rig.runtime.mode = "never"
        client.send(request("POST", "/v2/models/echo/infer", ECHO))
        await rig.until(lambda: len(rig.runtime.calls) == 2)
        client.reset()
        await rig.until(lambda: bool(rig.runtime.cancelled))
        rig.runtime.mode = "overloaded"
        assert (await rig.infer(body())).json["reason"] == "overloaded"
        rig.runtime.mode = "echo"
        assert (await rig.infer(body())).status == 200

    run(scenario, replace(QUICK, tenants=(TenantLimit(0, concurrency_max=1),)))


ECHO = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'


def test_metadata() -> None:
    async def scenario(rig: Rig) -> None:
        for path in ("/v2", "/v2/"):
            about = (await rig.ask(request("GET", path))).json
            assert about["name"] == "headgate"
            assert "binary_tensor_data" in about["extensions"]
        about = (await rig.ask(request("GET", "/v2/models/two"))).json
        assert about["inputs"][1] == {"name": "b", "datatype": "FP32", "shape": [-1, 3]}
        reply = await rig.ask(request("GET", "/v2/models/two/ready"))
        assert (reply.status, reply.json) == (200, {"name": "two", "ready": True})
        rig.runtime.problems["two"] = "cannot be loaded: OSError: no secret/weights"
        reply = await rig.ask(request("GET", "/v2/models/two/versions/1/ready"))
        expected = {"name": "two", "ready": False, "reason": "cannot be loaded: OSError"}
        assert (reply.status, reply.json) == (503, expected)
        assert (await rig.ask(request("GET", "/v2/models/nobody/ready"))).status == 404
        reply = await rig.ask(request("GET", "/metrics"))
        assert (reply.body, reply.headers["content-type"][:10]) == (b"up 1\n", "text/plain")

    run(scenario)


def test_readiness_names_models_without_details() -> None:
    """These paths are public: the text of an exception is only logged."""

    async def scenario(rig: Rig) -> None:
        rig.runtime.problems["two"] = "cannot be loaded: OSError: no secret/weights"
        for path in ("/readyz", "/v2/health/ready"):
            reply = await rig.ask(request("GET", path))
            assert reply.status == 503
            assert reply.json == {
                "ready": False,
                "live": True,
                "reason": "not ready: two",
                "models": {"two": "cannot be loaded: OSError"},
            }
        assert (await rig.ask(request("GET", "/ping"))).status == 200
        for name in rig.runtime.models:
            rig.runtime.problems[name] = "has no worker to run on"
        assert (await rig.ask(request("GET", "/ping"))).status == 503
        rig.runtime.problems.clear()
        reply = await rig.ask(request("GET", "/readyz"))
        assert (reply.status, reply.json) == (200, {"ready": True, "live": True})

    run(scenario)


def test_model_readiness_has_details_with_expose_errors() -> None:
    """The model's own path needs a key where keys are configured; `/readyz` is public."""

    async def scenario(rig: Rig) -> None:
        problem = "cannot be loaded: OSError: no secret/weights"
        rig.runtime.problems["two"] = problem
        assert (await rig.ask(request("GET", "/v2/models/two/ready"))).json["reason"] == problem
        models = (await rig.ask(request("GET", "/readyz"))).json["models"]
        assert models == {"two": "cannot be loaded: OSError"}

    run(scenario, replace(QUICK, expose_errors=True))


def test_the_openapi_document_has_every_path() -> None:
    async def scenario(rig: Rig) -> None:
        paths = (await rig.ask(request("GET", "/openapi.json"))).json["paths"]
        for path, item in paths.items():
            for method in {"get", "post"} & set(item):
                target = path.replace("{model}", "echo").replace("{version}", "1")
                reply = await rig.ask(request(method.upper(), target, b"{}" * (method == "post")))
                assert str(reply.status) in item[method]["responses"], path
                assert reply.status not in (404, 405)

    run(scenario)
    assert document([], has_keys=True)["security"]
