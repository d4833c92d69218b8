"""Which machine an endpoint is on, and which keys are sent to it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from headgate.config.providers import (
    ID_VARIABLE,
    NO_KEYS,
    SECRET_VARIABLE,
    PlatformKeys,
    is_aws_url,
    is_local_url,
    is_valid_url,
    keys_for,
)
from headgate.core.errors import ConfigError

WRITTEN = {
    "platform": "1",
    "endpoint_url": "http://127.0.0.1:9001",
    "region": "us-east-1",
    "access_key_id": "HEADGATEWRITTEN",
    "secret_access_key": "written",
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by host name; any other name does not resolve."""
    known: dict[str, list[str]] = {}

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def here(url: str) -> bool:
    return is_local_url(url, where="app.yaml", key="pools.cloud.endpoint_url")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9001",
        "https://127.0.0.1",
        "http://127.1.2.3:9001",
        "http://[::1]:9001",
        "http://[::ffff:127.0.0.1]:9001",
        "http://0.0.0.0:9001",
        "http://[::]:9001",
        "http://localhost",
        "http://LOCALHOST",
        "http://functions.localhost",
    ],
)
def test_urls_of_this_machine(names: dict[str, list[str]], url: str) -> None:
    assert is_valid_url(url) and here(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1.evil.example",
        "http://localhost.evil.example",
        "http://192.168.1.5:9001",
        "http://evil.example:9001",
        "https://lambda.eu-central-1.amazonaws.com",
        "http://evil.example/127.0.0.1",
        "http://evil.example?@127.0.0.1",
        "http://[2001:db8::1]:9001",
    ],
)
def test_urls_of_other_machines(names: dict[str, list[str]], url: str) -> None:
    names["evil.example"] = names["127.0.0.1.evil.example"] = ["203.0.113.5"]
    assert is_valid_url(url) and not here(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9001@evil.example",
        "http://user:word@127.0.0.1:9001",
        "http://evil.example\\@127.0.0.1",
        "http://127.0.0.1\\.evil.example",
        "http://127\u30020\u30020\u30021:9001",
        "http://evil.example\n",
        "http://127.0.0.1 .evil.example",
        "http://127.0.0.1:port",
        "ftp://127.0.0.1",
        "127.0.0.1:9001",
        "http://",
        "",
    ],
)
def test_an_ambiguous_url_is_not_valid(url: str) -> None:
    assert not is_valid_url(url)


def test_host_names_count_by_their_addresses(names: dict[str, list[str]]) -> None:
    """A name that resolves to this machine is local, even one that looks like AWS's own."""
    names["box"] = ["127.0.1.1"]
    names["lambda.us-east-1.amazonaws.com"] = ["127.0.0.1", "::1"]
    assert here("http://box:9001")
    assert here("http://lambda.us-east-1.amazonaws.com")


@pytest.mark.parametrize(
    ("name", "addresses", "message"),
    [
        ("localhost", ["203.0.113.5"], "is named localhost but resolves to another machine"),
        ("a.localhost", ["203.0.113.5"], "is named localhost but resolves to another machine"),
        ("box", ["127.0.0.1", "203.0.113.5"], "resolves to this machine and to others"),
        ("localhost", ["::1", "203.0.113.5"], "resolves to this machine and to others"),
    ],
)
def test_a_host_that_resolves_ambiguously_is_refused(
    names: dict[str, list[str]], name: str, addresses: list[str], message: str
) -> None:
    names[name] = addresses
    with pytest.raises(ConfigError) as caught:
        here(f"http://{name}:9001")
    assert message in str(caught.value)
    assert str(caught.value).startswith("app.yaml: pools.cloud.endpoint_url: ")


def test_urls_of_aws() -> None:
    assert is_aws_url("https://vpce-1.lambda.us-east-1.vpce.amazonaws.com")
    assert is_aws_url("https://lambda.cn-north-1.amazonaws.com.cn")
    assert not is_aws_url("http://lambda.us-east-1.amazonaws.com"), "anybody may answer there"
    assert not is_aws_url("https://evilamazonaws.com")


def test_keys_by_port_and_by_variables(tmp_path: Path) -> None:
    path = tmp_path / "headgate" / "platform-9001.json"
    path.parent.mkdir()
    path.touch(0o600)
    path.write_text(json.dumps(WRITTEN))
    home = {"XDG_STATE_HOME": str(tmp_path)}
    written = PlatformKeys("HEADGATEWRITTEN", "written")
    aws = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "real"}
    assert keys_for("http://127.0.0.1:9001", home | aws) == written
    assert keys_for("http://127.0.0.1:9002", home | aws) == NO_KEYS, "never those of AWS"
    assert keys_for("https://127.0.0.1", home | aws) == NO_KEYS
    fixed = {ID_VARIABLE: "FIXEDKEY", SECRET_VARIABLE: "long-enough-to-be-one"}
    expected = PlatformKeys("FIXEDKEY", "long-enough-to-be-one")
    assert keys_for("http://127.0.0.1:9001", home | aws | fixed) == expected
    exported = {"AWS_ACCESS_KEY_ID": "HEADGATEX", "AWS_SECRET_ACCESS_KEY": "x"}
    assert keys_for("http://127.0.0.1:9002", home | exported) == PlatformKeys("HEADGATEX", "x")


@pytest.mark.parametrize("text", ["", "{}", "[]", "\0", '{"access_key_id": 1}'])
def test_invalid_key_files_are_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "headgate" / "platform-9001.json"
    path.parent.mkdir()
    path.touch(0o600)
    path.write_text(text)
    assert keys_for("http://127.0.0.1:9001", {"XDG_STATE_HOME": str(tmp_path)}) == NO_KEYS
