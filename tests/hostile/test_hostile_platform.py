"""What a web page, or another process, can do to a platform on the machine of its visitor.

A page sends what a browser lets it send without asking: forms, plain text, images, and names that
it has made to resolve to this machine. Nothing of that may create a function or run one.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("awslambdaric")

from headgate.lambda_emulator import EmbeddedPlatform

RUNTIME = f"python{sys.version_info.major}.{sys.version_info.minor}"
CODE = """
from pathlib import Path
def handle(event, context):
    Path(event["mark"]).touch()
"""
PAGE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
SIGNED = "?X-Amz-Signature=x"
FORGED = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/lambda/aws4_request, " + (
    "SignedHeaders=host;x-amz-date, Signature=" + "0" * 64
)


@pytest.fixture(scope="module", params=[True, False], ids=["keys", "no-auth"])
def platform(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedPlatform]:
    directory = tmp_path_factory.mktemp("platform")
    (directory / "module.py").write_text(CODE, encoding="utf-8")
    keys = directory / "keys.json"
    with EmbeddedPlatform(directory / "data", has_auth=request.param, keys_file=keys) as platform:
        platform.register("f", directory, "module.handle")
        yield platform


def ask(
    platform: EmbeddedPlatform, method: str, path: str, body: bytes, headers: dict[str, str]
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    try:
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        response.read()
        return response
    finally:
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {**PAGE, "Content-Type": "text/plain"},
        {**PAGE, "Content-Type": "application/x-www-form-urlencoded"},
        {**PAGE, "Content-Type": "application/json"},
        {"Origin": "null", "Content-Type": "text/plain"},
        {"Origin": "http://localhost", "Content-Type": "text/plain"},
        {"Host": "evil.example", "Content-Type": "application/json"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {**PAGE, "Content-Type": "text/plain", "Authorization": FORGED},
    ],
)
@pytest.mark.parametrize("query", ["", SIGNED])
def test_a_web_page_can_create_and_run_nothing(
    platform: EmbeddedPlatform, tmp_path: Path, headers: dict[str, str], query: str
) -> None:
    mark = tmp_path / "ran"
    payload = json.dumps({"mark": str(mark)}).encode()
    create = json.dumps(
        {
            "FunctionName": "evil",
            "Role": "arn:aws:iam::000000000000:role/any",
            "Runtime": RUNTIME,
            "Handler": "module.handle",
            "Code": {"ZipFile": _package()},
        }
    ).encode()
    functions = "/2015-03-31/functions"
    for method, path, body in (
        ("OPTIONS", functions, b""),
        ("POST", functions, create),
        ("POST", f"{functions}/f/invocations", payload),
        ("POST", f"{functions}/evil/invocations", payload),
        ("DELETE", f"{functions}/f", b""),
        ("GET", functions, b""),
    ):
        response = ask(platform, method, path + query, body, headers)
        assert response.status == 403, (method, path)
        assert not any(name.startswith("Access-Control") for name in response.headers)
    assert not mark.exists() and platform.instances() == []
    assert list(platform._platform.functions) == ["f"]


def test_an_image_request_of_a_web_page(platform: EmbeddedPlatform) -> None:
    """A browser then sends no `Origin`, but `Sec-Fetch-Site: cross-site`."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    for path in ("/2015-03-31/functions", f"/2015-03-31/functions/f{SIGNED}"):
        assert ask(platform, "GET", path, b"", headers).status == 403


def _package() -> str:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("module.py", CODE)
    return base64.b64encode(buffer.getvalue()).decode()
