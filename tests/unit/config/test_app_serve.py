"""`serve:` and `clients:` are checked when the application is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headgate.config import AppConfig, ClientSpec, ServeSpec, from_spec, load, without_keys
from headgate.core.errors import ConfigError

SECOND_NS = 10**9
KEY = "sha256:" + 64 * "a"
UNITS = "ns, us, ms, s, min, h, d"
SIZES = "B, kB, KiB, MB, MiB, GB, GiB, TB, TiB"


def app_config(**sections: object) -> AppConfig:
    return from_spec({"functions": {"f": {"exec_time": "5ms"}}, **sections}, "app.yaml")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("drain", "soon", f"'soon': is not a number with a unit (allowed: {UNITS})"),
        ("drain", "never", f"'never': is not a number with a unit (allowed: {UNITS})"),
        ("lame_duck", "soon", f"'soon': is not a number with a unit (allowed: {UNITS})"),
        ("deadline_max", 0, "0: must be more than zero (allowed: 5ms, 1.5s, 10min"),
        ("deadline_max", "never", f"'never': is not a number with a unit (allowed: {UNITS})"),
        ("execution_timeout", 0, "0: is too small (allowed: 100ms or more)"),
        ("execution_timeout", "99ms", "'99ms': is too small (allowed: 100ms or more)"),
        ("body_max", "0B", "'0B': is too small (allowed: 1B to 1GiB)"),
        ("body_max", "2GB", "'2GB': is too large (allowed: 1B to 1GiB)"),
        ("response_max", "2GB", "'2GB': is too large (allowed: 1B to 1GiB)"),
        ("memory_max", "0B", "'0B': is too small (allowed: 1B to 1TiB)"),
        ("shared_memory", "0B", "'0B': is too small (allowed: 64KiB to 64GiB)"),
        ("shared_memory", "65GiB", "'65GiB': is too large (allowed: 64KiB to 64GiB)"),
        ("shared_memory", "9000000000GB", "'9000000000GB': is too large (allowed: up to 1000000TB"),
        ("shared_memory", "lots", f"'lots': is not a number with a unit (allowed: {SIZES})"),
        ("shared_memory", "-1B", f"'-1B': must not be negative (allowed: {SIZES})"),
        (
            "tls_key",
            "key.pem",
            "'key.pem': is given without a certificate (allowed: only with",
        ),
        ("log_size", "1kB", "'1kB': is too small (allowed: 64KiB to 1TiB)"),
        ("log_age", "0s", "'0s': must be more than zero (allowed: 5ms, 1.5s, 10min"),
        ("log_keep", -1, "-1: is not valid (allowed: a whole number from 0"),
        ("log_level", "loud", "'loud': is not valid (allowed: debug, error, info, w"),
        ("log_format", "xml", "'xml': is not valid (allowed: json, text)"),
        ("host", "", "'': is empty"),  # which would be every address of the machine
    ],
)
def test_invalid_serve_settings_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app_config(serve={name: value})
    assert str(caught.value).startswith(f"app.yaml: serve.{name}: {message}")


def test_serve_settings_are_parsed() -> None:
    serve = {
        "lame_duck": 0,
        "drain": "1min",
        "execution_timeout": "1s",
        "body_max": "1kB",
        "tls_certificate": "c",
    }
    assert app_config(serve=serve).serve == ServeSpec(
        host="127.0.0.1",
        port=8080,
        grpc_port=None,
        tls_certificate="c",
        tls_key=None,
        log=None,
        lame_duck_ns=0,
        drain_ns=60 * SECOND_NS,
        deadline_max_ns=60 * SECOND_NS,
        execution_timeout_ns=SECOND_NS,
        body_bytes_max=1_000,
        connections_max=4_096,
        shared_memory_bytes=64 << 20,
        overload_status=429,
        log_size_bytes=256 << 20,
        log_age_ns=24 * 3600 * SECOND_NS,
        log_keep=8,
        log_level="info",
        log_format="text",
        access_log=False,
        expose_errors=False,
        response_bytes_max=64 << 20,
        memory_bytes_max=512 << 20,
    )


@pytest.mark.parametrize(
    ("clients", "line"),
    [
        ({"a": {"rate": "0/s"}}, "a.rate: '0/s': must be more than zero (allowed: 100/s)"),
        ({"a": {"rate": "much"}}, "a.rate: 'much': is not a number with a unit (allowed: /s, "),
        ({"a": {"burst": 5}}, "a.burst: 5: is given without a rate (allowed: only with rate)"),
        ({"a": {"key": KEY}, "b": {"key": KEY}}, f"b.key: '{KEY}': is also the key of a (allowed"),
    ],
)
def test_invalid_clients_are_refused(clients: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app_config(clients=clients)
    assert str(caught.value).startswith(f"app.yaml: clients.{line}")


def test_clients_are_parsed() -> None:
    assert app_config().tenants == ()
    clients = {"a": {}, "b": {"key": KEY, "rate": "30/min", "burst": 2, "concurrency": 3}}
    assert app_config(clients=clients).tenants == (
        ClientSpec(),
        ClientSpec(key=KEY, rate_per_s=0.5, burst=2, concurrency=3),
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no\\nway')", "the module exits: no way"),
        ("raise ImportError('no\\nway')", "no way"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_in_one_line(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load("exits_at_import:app")
    assert str(caught.value) == f"exits_at_import:app: cannot be imported: {message}"
    assert "exits_at_import" not in sys.modules


def test_without_keys_removes_the_keys_only() -> None:
    clients = {"a": {}, "b": {"key": KEY, "rate": "30/min"}}
    app = app_config(clients=clients, serve={"port": 1})
    bare = from_spec(without_keys(app.spec), "a log")
    assert "aaaa" not in str(bare.spec)
    assert KEY in str(app.spec)
    assert bare.app == app.app
    assert bare.serve == app.serve
    assert [tenant.rate_per_s for tenant in bare.tenants] == [None, 0.5]
