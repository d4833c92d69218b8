"""AWS credentials go to AWS only: nothing that listens on this machine gets them."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")

from botocore.exceptions import SSLError

from headgate.config import from_spec
from headgate.config.providers import Provider
from headgate.core.errors import ConfigError
from headgate.deploy import connect
from headgate.live.pools.aws_client import make_client

REAL_ID = "AKIAIOSFODNN7EXAMPLE"
REAL_TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN"
ENDED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


class Listener:
    """Records whatever is sent to a port of this machine."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.received = b""
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                with client, suppress(OSError):
                    client.settimeout(20)
                    while b"\r\n\r\n" not in self.received:
                        self.received += client.recv(65_536)
                    client.sendall(ENDED)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AWS credentials in every place where boto3 looks for them."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", REAL_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", REAL_TOKEN)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id={REAL_ID}\naws_secret_access_key=real\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def of_gateway(url: str | None) -> Any:
    provider = Provider("lambda", "f", url)
    return make_client(
        "lambda", provider, connections=1, hang_s=20.0, where="app.yaml", key="pools.cloud"
    )


def of_sagemaker(url: str | None) -> Any:
    provider = Provider("sagemaker", "f", url)
    return make_client(
        "sagemaker-runtime",
        provider,
        connections=1,
        hang_s=20.0,
        where="app.yaml",
        key="pools.machine",
    )


def call(client: Any) -> None:
    """Send a request, which is answered with an error."""
    with pytest.raises(client.exceptions.ClientError):
        if client.meta.service_model.service_name == "lambda":
            client.invoke(FunctionName="f", Payload=b"{}")
        else:
            client.invoke_endpoint(EndpointName="f", Body=b"{}")


def key_id(listener: Listener) -> str:
    received = listener.received.decode("latin-1")
    assert REAL_ID not in received and REAL_TOKEN not in received
    (found,) = re.findall(r"Credential=(\w+)/", received)
    return str(found)


@pytest.mark.parametrize("make", [of_gateway, of_sagemaker, connect])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_local_endpoint_gets_no_aws_credentials(listener: Listener, make: Any, host: str) -> None:
    call(make(f"http://{host}:{listener.port}"))
    assert key_id(listener) == "headgate"


@pytest.mark.parametrize("make", [of_gateway, connect])
def test_local_endpoint_from_an_aws_variable_gets_no_credentials(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", f"http://127.0.0.1:{listener.port}")
    call(make(None))
    assert key_id(listener) == "headgate"


@pytest.mark.parametrize("make", [of_gateway, connect])
def test_proxy_gets_no_credentials(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    call(make(f"http://127.0.0.1:{listener.port}"))
    assert key_id(listener) == "headgate"


def write_keys(tmp_path: Path, port: int, key_id: str) -> None:
    path = tmp_path / "headgate" / f"platform-{port}.json"
    path.parent.mkdir(exist_ok=True)
    path.touch(0o600)
    written = {"platform": "1", "endpoint_url": "", "region": ""}
    keys = {"access_key_id": key_id, "secret_access_key": "secret"}
    path.write_text(json.dumps({**written, **keys}))


@pytest.mark.parametrize("make", [of_gateway, connect])
def test_local_platform_gets_its_own_keys(listener: Listener, tmp_path: Path, make: Any) -> None:
    write_keys(tmp_path, listener.port, "HEADGATEKEY")
    call(make(f"http://127.0.0.1:{listener.port}"))
    assert key_id(listener) == "HEADGATEKEY"


def test_restarted_platform_gets_its_new_keys(listener: Listener, tmp_path: Path) -> None:
    """The gateway keeps running while its platform restarts."""
    client = of_gateway(f"http://127.0.0.1:{listener.port}")
    for expected in ("HEADGATEONE", "HEADGATETWO"):
        write_keys(tmp_path, listener.port, expected)
        listener.received = b""
        call(client)
        assert key_id(listener) == expected
    client.close()


@pytest.mark.parametrize("make", [of_gateway, connect])
def test_aws_gets_aws_credentials(make: Any) -> None:
    client = make(None)
    assert client.meta.endpoint_url == "https://lambda.eu-central-1.amazonaws.com"
    assert client._request_signer._credentials.access_key == REAL_ID
    client.close()


class Impostor:
    """A proxy that poses as AWS, with a certificate that is not trusted."""

    def __init__(self, directory: Path) -> None:
        subprocess.run(
            "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 "
            "-subj /CN=amazonaws.com -addext subjectAltName=DNS:*.eu-central-1.amazonaws.com",
            shell=True,
            cwd=directory,
            check=True,
            capture_output=True,
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = b""
        self.received = b""
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self.asked.startswith(b"CONNECT"):  # others may try a port that is new to them
            self.asked = b""
            client, _ = self._socket.accept()
            with client, suppress(OSError):  # the client aborts the handshake
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(20)
        while b"\r\n\r\n" not in self.asked:
            data = client.recv(65_536)
            if not data:
                return
            self.asked += data
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with self._context.wrap_socket(client, server_side=True) as secured:
            self.received = secured.recv(65_536)

    def close(self) -> None:
        self._thread.join()
        self._socket.close()


@pytest.mark.parametrize("make", [of_gateway, of_sagemaker, connect])
def test_aws_certificate_is_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any
) -> None:
    impostor = Impostor(tmp_path)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, impostor.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    client = make(None)
    with pytest.raises(SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        if client.meta.service_model.service_name == "lambda":
            client.invoke(FunctionName="f", Payload=b"{}")
        else:
            client.invoke_endpoint(EndpointName="f", Body=b"{}")
    client.close()
    impostor.close()
    assert re.match(rb"CONNECT [a-z.]+\.eu-central-1\.amazonaws\.com:443 ", impostor.asked)
    assert impostor.received == b""


@pytest.mark.parametrize(
    "name",
    ["aws_access_key_id", "aws_secret_access_key", "aws_session_token", "credentials", "profile"],
)
def test_application_file_has_no_field_for_credentials(name: str) -> None:
    cloud = {"tier": "serverless", "memory": "1GB", "provider": "lambda", "target": "f"}
    functions = {"f": {"exec_time": "1ms"}}
    for spec in (
        {"functions": functions, "pools": {"cloud": {**cloud, name: REAL_ID}}},
        {"functions": functions, "pools": {"cloud": cloud}, "serve": {name: REAL_ID}},
        {"functions": functions, "pools": {"cloud": cloud}, name: REAL_ID},
    ):
        with pytest.raises(ConfigError, match=name):
            from_spec(spec, "app.yaml")


def test_ambiguous_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that looks like localhost and is not: neither keys nor credentials are sent."""
    found = [(2, 1, 6, "", ("203.0.113.5", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    for make in (of_gateway, connect):
        with pytest.raises(ConfigError, match="is named localhost but resolves to another machine"):
            make("http://localhost")
