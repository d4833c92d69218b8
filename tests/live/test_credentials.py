"""AWS credentials are used and never logged, not even at debug level."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served import Served, until

pytest.importorskip("boto3")

ID = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN"
# An unreachable address: requests to it go through a proxy, which is the test.
APP = """
functions:
  free: {exec_time: 5ms}
pools:
  cloud: {tier: serverless, memory: 1GB, provider: lambda, target: f, region: eu-central-1,
          endpoint_url: "http://192.0.2.1"}
policy: serverless_only
limits: {backoff: 20ms}
serve: {lame_duck: 0s}
"""


class Refuses(BaseHTTPRequestHandler):
    """Rejects every signature and quotes the string that should have been signed, as AWS does."""

    server: Server

    def do_POST(self) -> None:
        headers = dict(self.headers.items())
        self.rfile.read(int(headers.get("Content-Length", 0)))
        self.server.received.append(headers)
        text = (
            "The request signature we calculated does not match the signature you provided.\n\n"
            "The Canonical String for this request should have been\n'POST\n"
            f"x-amz-security-token:{headers['X-Amz-Security-Token']}\n{headers['Authorization']}'"
        )
        body = json.dumps({"message": text}).encode()
        self.send_response(403)
        self.send_header("x-amzn-ErrorType", "InvalidSignatureException")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.received: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Refuses)


@pytest.fixture
def proxy() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_aws_credentials_are_never_logged(tmp_path: Path, proxy: Server, log_format: str) -> None:
    (tmp_path / "app.yaml").write_text(APP)
    environment = {
        "AWS_ACCESS_KEY_ID": ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "http_proxy": f"http://127.0.0.1:{proxy.server_port}",
        "HTTP_PROXY": f"http://127.0.0.1:{proxy.server_port}",
        "no_proxy": "",
        "NO_PROXY": "",
    }
    options = ("--log-level", "debug", "--log-format", log_format, "--access-log", "--log", "a.log")
    with Served(tmp_path, *options, environment=environment) as served:
        assert served.ask("free", [1.0], {"X-Request-Timeout-Ms": "500"})[0] in (503, 504)
        assert until(lambda: "request signature we calculated" in served.errors())
        displayed = "".join(
            served.get(path)[1] for path in ("/metrics", "/readyz", "/v2/models/free")
        )
    assert ID in proxy.received[0]["Authorization"]
    assert proxy.received[0]["X-Amz-Security-Token"] == TOKEN
    written = served.banner + served.errors() + (tmp_path / "a.log").read_text() + displayed
    for credential in (ID, SECRET, TOKEN):
        assert credential not in written
