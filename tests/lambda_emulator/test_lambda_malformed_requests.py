"""Malformed and hostile requests: each gets a response, and other clients are still served."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from platform_rig import Caller, platform_in, sent, signed

from headgate.lambda_emulator import EmbeddedPlatform

FUNCTIONS = b"/2015-03-31/functions"
INVOKE = FUNCTIONS + b"/f/invocations"


@pytest.fixture(autouse=True)
def _still_serves(platform: EmbeddedPlatform, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """After each test: the next client is served, and no exception was logged."""
    yield
    response = sent(platform, signed(platform, b"GET", FUNCTIONS))
    assert response.startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in capfd.readouterr().err


def request(method: bytes, path: bytes, body: bytes = b"", head: bytes = b"") -> bytes:
    """Return the bytes of an unsigned request."""
    length = str(len(body)).encode()
    first = method + b" " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return first + head + b"Content-Length: " + length + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (bytes(range(256)) * 8, 400),
        (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + b"x" * 200, 400),  # as TLS begins
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (request(b"GET", b"http://["), 400),
        (request(b"GET", FUNCTIONS + b"/\xff"), 400),
        (request(b"GET", b"/" + b"a" * 100_000), 414),
        (request(b"GET", FUNCTIONS, head=b"Content-Length: -5\r\n"), 400),
        (request(b"POST", FUNCTIONS, b"zzz\r\n", b"Transfer-Encoding: chunked\r\n"), 400),
    ],
    ids=range(8),
)
def test_malformed_http(platform: EmbeddedPlatform, data: bytes, status: int) -> None:
    """The error has the shape of AWS."""
    response = sent(platform, data)
    assert response.startswith(b"HTTP/1.1 %d " % status)
    body = json.loads(response.partition(b"\r\n\r\n")[2])
    assert body["Type"] == "User" and body["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        (b"POST", FUNCTIONS, b'{"a":' * 100_000, 400),
        (b"POST", FUNCTIONS, b'{"Code":' * 100_000, 400),
        (b"POST", FUNCTIONS, b"\xff", 400),
        (b"POST", INVOKE, b"[" * 100_000, 400),
        (b"GET", FUNCTIONS + b"?MaxItems=" + b"9" * 5_000, b"", 200),
        (b"GET", FUNCTIONS + b"?MaxItems=%C2%B2&Marker=%FF", b"", 200),
        (b"GET", FUNCTIONS + b"?Mark=1", b"", 400),
        (b"GET", FUNCTIONS + b"/%00", b"", 400),
        (b"PUT", FUNCTIONS + b"/f/configuration", b'{"Handler":""}', 400),
        (b"POST", b"/2017-10-31/functions/f/concurrency", b"", 404),
        (b"PUT", b"/2017-03-31/tags/f", b"{}", 404),
    ],
    ids=range(11),
)
def test_malformed_api_requests(
    platform: EmbeddedPlatform, method: bytes, path: bytes, body: bytes, status: int
) -> None:
    response = sent(platform, signed(platform, method, path, body))
    assert response.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("context", [b"[" * 2_600, b"[" * 990 + b"]" * 990, b"[1]", b"\xff"])
def test_invalid_client_context(platform: EmbeddedPlatform, context: bytes) -> None:
    headers = {"X-Amz-Client-Context": base64.b64encode(context).decode()}
    response = sent(platform, signed(platform, b"POST", INVOKE, b"{}", headers))
    assert response.startswith(b"HTTP/1.1 400 ")


def test_partial_requests_get_no_response(platform: EmbeddedPlatform) -> None:
    assert sent(platform, b"GET / HT", ends=True) == b""
    assert sent(platform, signed(platform, b"POST", INVOKE, b"x" * 100)[:-50], ends=True) == b""


def test_request_head_too_large(platform: EmbeddedPlatform) -> None:
    """Too many bytes of headers, and too many headers."""
    for lines in (
        b"".join(b"X%d: %s\r\n" % (number, b"a" * 1_500) for number in range(64)),
        b"".join(b"X%d: a\r\n" % number for number in range(300)),
    ):
        assert b"HTTP/1.1 431 " in sent(platform, request(b"GET", FUNCTIONS, head=lines))


def test_deleted_code_directory(tmp_path: Path) -> None:
    """A failed start is reported as such, and leaks no file descriptors."""
    with platform_in(tmp_path) as (platform, caller):
        source = tmp_path / "gone"
        source.mkdir()
        (source / "module.py").write_text("", encoding="utf-8")
        platform.register("gone", source, "module.handle")
        shutil.rmtree(source)
        rejected = _rejected_invokes(caller, 3)
        before = _open_files()
        rejected += _rejected_invokes(caller, 20)
        assert all(
            status == 500 and "no instance can" in message for status, _, message in rejected
        )
        assert not any(str(tmp_path) in message for _, _, message in rejected), (
            "paths must not leak"
        )
        assert _open_files() <= before + 2
        assert platform.instances() == []


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _rejected_invokes(caller: Caller, count: int) -> list[tuple[int, str, str]]:
    return [caller.rejected("invoke", FunctionName="gone") for _ in range(count)]
