"""Clients that mean no good, or that do not know better: each gets an answer, and others too."""

from __future__ import annotations

import base64
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from platform_rig import Caller, platform_in, zipped

from headgate.serverless import EmbeddedPlatform, http

FUNCTIONS = b"/2015-03-31/functions"
INVOKE = FUNCTIONS + b"/f/invocations"


@pytest.fixture(autouse=True)
def _still_serves(platform: EmbeddedPlatform, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Whatever a test does, the next client is served, and nothing was a defect of ours."""
    yield
    assert sent(platform, request(b"GET", FUNCTIONS)).startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in capfd.readouterr().err


def request(method: bytes, path: bytes, body: bytes = b"", head: bytes = b"") -> bytes:
    """The bytes of a request."""
    length = str(len(body)).encode()
    first = method + b" " + path + b" HTTP/1.1\r\nHost: x\r\nAuthorization: any\r\n"
    return first + head + b"Content-Length: " + length + b"\r\n\r\n" + body


def sent(platform: EmbeddedPlatform, data: bytes, *, ends: bool = False) -> bytes:
    """What comes back on a connection of its own."""
    with socket.create_connection(("127.0.0.1", platform.port), timeout=20) as client:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        return client.recv(65_536)


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(256)) * 8,
        b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + b"x" * 200,  # as TLS begins
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        request(b"GET", b"http://["),
        request(b"GET", FUNCTIONS + b"/\xff"),
        request(b"GET", b"/" + b"a" * 100_000),
        request(b"GET", FUNCTIONS, head=b"Content-Length: -5\r\n"),
        request(b"POST", FUNCTIONS, b"zzz\r\n", b"Transfer-Encoding: chunked\r\n"),
    ],
    ids=range(8),
)
def test_what_is_no_http(platform: EmbeddedPlatform, data: bytes) -> None:
    answer = sent(platform, data)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b'can be read."}')


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(b"POST", FUNCTIONS, b'{"a":' * 100_000), 400),
        (request(b"POST", FUNCTIONS, b"\xff"), 400),
        (request(b"POST", INVOKE, b"[" * 100_000), 400),
        (request(b"GET", FUNCTIONS + b"?MaxItems=" + b"9" * 5_000), 200),
        (request(b"GET", FUNCTIONS + b"?MaxItems=%C2%B2&Marker=%ff"), 200),
        (request(b"GET", FUNCTIONS + b"/%00"), 400),
        (request(b"PUT", FUNCTIONS + b"/f/configuration", b'{"Handler":""}'), 400),
        (request(b"POST", b"/2017-10-31/functions/f/concurrency"), 404),
        (request(b"POST", INVOKE, b"{}", b"X-Amz-Client-Context: \xe9\r\n"), 400),
    ],
    ids=range(9),
)
def test_what_makes_no_sense(platform: EmbeddedPlatform, data: bytes, status: int) -> None:
    assert sent(platform, data).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("context", [b"[" * 2_600, b"[" * 990 + b"]" * 990, b"[1]", b"\xff"])
def test_contexts_that_are_no_objects(platform: EmbeddedPlatform, context: bytes) -> None:
    head = b"X-Amz-Client-Context: " + base64.b64encode(context) + b"\r\n"
    assert sent(platform, request(b"POST", INVOKE, b"{}", head)).startswith(b"HTTP/1.1 400 ")


def test_requests_that_never_end(
    platform: EmbeddedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one is nobody's answer; who is silent for too long is hung up on."""
    assert sent(platform, b"GET / HT", ends=True) == b""
    assert sent(platform, request(b"POST", INVOKE, b"x" * 100)[:-50], ends=True) == b""
    monkeypatch.setattr(http, "_REQUEST_S_MAX", 0.2)
    began_s = time.monotonic()
    for begun in (b"", b"GET /", request(b"POST", INVOKE, b"xx")[:-1]):
        assert sent(platform, begun) == b""
    assert time.monotonic() - began_s < 10


def test_a_head_without_end(platform: EmbeddedPlatform) -> None:
    lines = b"".join(b"X%d: %s\r\n" % (number, b"a" * 60_000) for number in range(64))
    assert b"HTTP/1.1 400 " in sent(platform, request(b"GET", FUNCTIONS, head=lines)[:3_000_000])


def test_code_that_goes_away(tmp_path: Path) -> None:
    """An instance that cannot start is the reason that is given, and leaves nothing open."""
    with platform_in(tmp_path) as (platform, caller):
        source = tmp_path / "gone"
        source.mkdir()
        (source / "module.py").write_text("", encoding="utf-8")
        platform.register("gone", source, "module.handle")
        shutil.rmtree(source)
        refused = _refusals(caller, 3)
        before = _open_files()
        refused += _refusals(caller, 20)
        assert all(status == 500 and "no instance: " in said for status, _, said in refused)
        assert _open_files() <= before + 2
        assert platform.instances() == []


def test_names_that_lead_out_of_the_package(platform: EmbeddedPlatform, caller: Caller) -> None:
    files = {"../../evil.py": "", "/evil.py": "", "module.py": ""}
    code = {"ZipFile": zipped(files)}
    asked = {"Role": "arn:aws:iam::000000000000:role/any", "Runtime": "python3.12"}
    caller.boto.create_function(FunctionName="out", Handler="module.handle", Code=code, **asked)
    found = [path.relative_to(platform.directory) for path in platform.directory.rglob("evil.py")]
    assert found and all(path.parts[0] == "code" and len(path.parts) == 3 for path in found)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _refusals(caller: Caller, count: int) -> list[tuple[int, str, str]]:
    return [caller.refused("invoke", FunctionName="gone") for _ in range(count)]
