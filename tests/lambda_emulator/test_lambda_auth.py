"""Authentication: keys and their file, hosts, origins, content types."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from platform_rig import Caller, eventually, platform_in, sent, signed

from headgate.config.providers import (
    FILE_VARIABLE,
    ID_VARIABLE,
    NO_KEYS,
    SECRET_VARIABLE,
    PlatformKeys,
    keys_for,
    keys_path,
    read_keys,
)
from headgate.core.errors import ConfigError
from headgate.lambda_emulator import EmbeddedPlatform, client_options
from headgate.lambda_emulator.auth import RequestAuth
from headgate.lambda_emulator.http import EmulatorRequest, ServiceError

FUNCTIONS = b"/2015-03-31/functions"
INVOKE = FUNCTIONS + b"/f/invocations"


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def test_keys_file_is_readable_by_its_user_only(tmp_path: Path) -> None:
    """Keys are random, the file is found by the port and is removed with the platform."""
    with platform_in(tmp_path) as (platform, _):
        path = keys_path(platform.port)
        assert platform.keys_file == path and platform.keys is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [each.name for each in path.parent.iterdir() if str(platform.port) in each.name] == [
            path.name
        ]
        assert keys_for(platform.url) == platform.keys
        assert keys_for(f"http://localhost:{platform.port}") == platform.keys
        assert client_options(platform.url) == platform.client_options
        assert platform.keys.secret_access_key not in repr(platform.keys)
        assert len(platform.keys.secret_access_key) >= 40
        caller = Caller(client_options(platform.url))
        assert caller.invoke("f", {"note": 1}).body["note"] == 1
        caller.boto.close()
    assert not path.exists()
    assert EmbeddedPlatform(tmp_path).keys != platform.keys


def test_keys_file_readable_by_others_is_ignored(tmp_path: Path) -> None:
    with platform_in(tmp_path) as (platform, _):
        assert platform.keys_file is not None
        platform.keys_file.chmod(0o640)
        assert read_keys(platform.keys_file) is None
        assert keys_for(platform.url, {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}) == NO_KEYS
        rejected = Caller({**platform.client_options, **_options(NO_KEYS)})
        code, message = rejected.rejected("list_functions")[1:]
        assert code == "UnrecognizedClientException" and platform.keys_file.name in message
        rejected.boto.close()


def test_keys_from_environment_and_custom_keys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = PlatformKeys("FIXEDKEY", "a-secret-that-is-long-enough")
    monkeypatch.setenv(ID_VARIABLE, fixed.access_key_id)
    with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE} is not set"):
        EmbeddedPlatform(tmp_path)
    monkeypatch.setenv(SECRET_VARIABLE, fixed.secret_access_key)
    path = tmp_path / "new" / "keys.json"
    with platform_in(tmp_path, keys_file=path) as (platform, caller):
        assert platform.keys == fixed
        assert json.loads(path.read_text())["access_key_id"] == "FIXEDKEY"
        assert caller.boto.list_functions()["Functions"]
        monkeypatch.delenv(ID_VARIABLE)
        monkeypatch.delenv(SECRET_VARIABLE)
        monkeypatch.setenv(FILE_VARIABLE, str(path))
        assert keys_for(platform.url) == fixed
    assert not path.exists()


@pytest.mark.parametrize(
    ("id", "secret"),
    [("AKIAIOSFODNN7EXAMPLE", "x" * 40), ("short", "x" * 40), ("LONGENOUGH", "short")],
)
def test_invalid_keys_from_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, id: str, secret: str
) -> None:
    """Real AWS keys are rejected above all: they must never be used here."""
    monkeypatch.setenv(ID_VARIABLE, id)
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(ConfigError) as caught:
        EmbeddedPlatform(tmp_path)
    assert secret not in str(caught.value)


def test_keys_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="the keys cannot be written"),
        EmbeddedPlatform(tmp_path / "data", keys_file=tmp_path / "file" / "keys.json"),
    ):
        pass


def test_keys_file_of_another_platform_is_not_removed(tmp_path: Path) -> None:
    """A platform leaves a keys file that another platform has overwritten."""
    path = tmp_path / "keys.json"
    with ExitStack() as late:
        with ExitStack() as early:
            early.enter_context(EmbeddedPlatform(tmp_path / "one", keys_file=path))
            two = late.enter_context(EmbeddedPlatform(tmp_path / "two", keys_file=path))
        result = read_keys(path)
        assert result is not None and two.keys is not None
        assert result.access_key_id == two.keys.access_key_id
    assert not path.exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
        {"Host": "evil.example:9001"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "127.0.0.1@evil.example"},
        {"Host": "127.0.0.1:9001, evil.example"},
        {"Host": "[::1"},
        {"Host": ""},
        {"Host": "127.0.0.2"},
    ],
)
def test_web_pages_and_other_hosts_are_rejected(
    platform: EmbeddedPlatform, headers: dict[str, str]
) -> None:
    """Even if the request is signed."""
    response = sent(platform, signed(platform, b"GET", FUNCTIONS, headers=headers))
    assert status(response) == 403 and b"AccessDeniedException" in response
    assert b"Access-Control" not in response


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "[::1]:9001"])
def test_host_names_of_this_machine(platform: EmbeddedPlatform, host: str) -> None:
    response = sent(platform, signed(platform, b"GET", FUNCTIONS, headers={"Host": host}))
    assert status(response) == 200


def test_repeated_host_header_is_rejected(platform: EmbeddedPlatform) -> None:
    data = signed(platform, b"GET", FUNCTIONS)
    assert status(sent(platform, data.replace(b"\r\n", b"\r\nHost: 127.0.0.1\r\n", 1))) == 400


def test_repeated_headers_are_signed_as_a_list(platform: EmbeddedPlatform) -> None:
    data = signed(platform, b"GET", FUNCTIONS, headers={"X-Note": "a,b"})
    parts = re.sub(rb"(?i)x-note: a,b", b"X-Note: a\r\nX-Note: b", data)
    assert parts != data and status(sent(platform, parts)) == 200


def test_cors_preflights_are_rejected(platform: EmbeddedPlatform) -> None:
    head = b"OPTIONS %s HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://a\r\n" % INVOKE
    request = b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Private-Network: true"
    response = sent(platform, head + request + b"\r\n\r\n")
    assert status(response) == 403 and b"Access-Control" not in response


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b", ""]
)
def test_control_plane_accepts_json_only(platform: EmbeddedPlatform, kind: str) -> None:
    headers = {"Content-Type": kind}
    reserve = b"/2017-10-31/functions/f/concurrency"
    body = b'{"ReservedConcurrentExecutions":1}'
    assert status(sent(platform, signed(platform, b"PUT", reserve, body, headers))) == 415
    # An invocation takes any bytes, as it does on AWS.
    assert status(sent(platform, signed(platform, b"POST", INVOKE, b"{}", headers))) == 200


def test_no_auth_still_checks_origin_and_host(tmp_path: Path) -> None:
    with platform_in(tmp_path, has_auth=False) as (platform, caller):
        assert platform.keys_file is None and not keys_path(platform.port).exists()
        assert keys_for(platform.url) == NO_KEYS
        assert caller.invoke("f", {"note": 1}).body["note"] == 1
        plain = b"GET %s HTTP/1.1\r\nHost: localhost\r\n" % FUNCTIONS
        assert status(sent(platform, plain + b"\r\n")) == 200
        assert status(sent(platform, plain + b"Origin: http://localhost\r\n\r\n")) == 403
        assert status(sent(platform, plain.replace(b"localhost", b"evil") + b"\r\n")) == 403
        assert status(sent(platform, plain.replace(b"GET", b"OPTIONS") + b"\r\n")) == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_no_auth_requires_loopback_address(tmp_path: Path, host: str) -> None:
    with (
        pytest.raises(ConfigError, match="--no-auth would let anyone") as caught,
        EmbeddedPlatform(tmp_path, host=host, has_auth=False),
    ):
        pass
    assert str(caught.value).startswith(f"--host {host}: ")


def test_allowed_hosts(tmp_path: Path) -> None:
    """By name, and by the local address of a connection."""
    with platform_in(tmp_path, host="0.0.0.0", allow_hosts=["Box.example"]) as (platform, _):
        for host, expected in (
            ("box.example:9001", 200),
            ("other.example", 403),
            ("127.0.0.1", 200),
            ("0.0.0.0", 200),
            ("1.2.3.4", 403),
        ):
            response = sent(platform, signed(platform, b"GET", FUNCTIONS, headers={"Host": host}))
            assert status(response) == expected, host
        page = {"Origin": "http://box.example"}
        assert status(sent(platform, signed(platform, b"GET", FUNCTIONS, headers=page))) == 200


def test_local_address_of_connection_is_an_allowed_host() -> None:
    """For a platform on all addresses: unlike a name, an address cannot be rebound."""
    auth = RequestAuth(None, "0.0.0.0")
    for local, host, is_accepted in (
        ("192.168.1.5", "192.168.1.5:9001", True),
        ("192.168.1.5", "192.168.1.6:9001", False),
        ("fe80::1", "[fe80:0::1]", True),
        ("192.168.1.5", "box", False),
    ):
        request = EmulatorRequest("GET", "/", "", {"host": host}, local=(local, 9001))
        with nullcontext() if is_accepted else pytest.raises(ServiceError, match="Host"):
            auth.check_head(request)


def test_body_of_unsigned_request_is_discarded(platform: EmbeddedPlatform) -> None:
    """Whatever its declared length: the rejection does not need the body."""
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % FUNCTIONS
    request = b"%sContent-Length: 200000\r\n\r\n%s" % (head, b"x" * 200_000)
    response = sent(platform, request)
    assert status(response) == 403 and b"MissingAuthenticationToken" in response
    assert b"Connection: close" in response


def test_requests_after_a_rejected_one_are_ignored(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with platform_in(tmp_path) as (platform, _):
        body = json.dumps({"mark": str(mark)}).encode()
        rejected = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        response = sent(platform, rejected + signed(platform, b"POST", INVOKE, body))
        assert response.count(b"HTTP/1.1 ") == 1 and status(response) == 403
        assert platform.instances() == [] and not mark.exists()


def test_connection_limit(tmp_path: Path) -> None:
    """Connections beyond the concurrency plus 256 idle ones are not served."""
    with platform_in(tmp_path, concurrency=1) as (platform, caller):
        address = ("127.0.0.1", platform.port)
        idle = [socket.create_connection(address) for _ in range(300)]
        with socket.create_connection(address, timeout=60) as last:
            response = last.makefile("rb").read()
            assert status(response) == 503 and b"too many connections" in response
        for each in idle:
            each.close()
        served = eventually(lambda: _is_served(caller))
        assert served


def _is_served(caller: Caller) -> bool:
    try:
        return bool(caller.boto.list_functions()["Functions"])
    except BotoCoreError:
        return False


def test_export_lines_work_in_a_shell(tmp_path: Path) -> None:
    """The printed environment configures boto3; the keys file is removed at exit."""
    command = (sys.executable, "-m", "headgate", "lambda-local", "--port", "0", "--directory")
    server = subprocess.Popen((*command, tmp_path / "data"), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server, server.stdout:
        lines = [server.stdout.readline() for _ in range(7)]
        result = dict(re.findall(r"^export (\w+)=(\S+)$", "".join(lines), re.MULTILINE))
        program = "import boto3; print(boto3.client('lambda').list_functions()['Functions'])"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        ran = subprocess.run(
            (sys.executable, "-c", program),
            env={**environment, **result},
            capture_output=True,
            text=True,
            check=False,
        )
        (keys,) = (Path(line.split()[1]) for line in lines if line.startswith("  keys: "))
        assert keys.is_file()
        server.terminate()
        assert server.wait(60) == 0
    assert (ran.stdout, ran.returncode) == ("[]\n", 0), ran.stderr
    assert set(result) == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL_LAMBDA",
        "AWS_DEFAULT_REGION",
    }
    assert not keys.exists()


def _options(keys: PlatformKeys) -> dict[str, str]:
    return {
        "aws_access_key_id": keys.access_key_id,
        "aws_secret_access_key": keys.secret_access_key,
    }


def test_wrong_secret(platform: EmbeddedPlatform) -> None:
    caller = Caller({**platform.client_options, "aws_secret_access_key": "guessed"})
    with pytest.raises(ClientError, match="InvalidSignatureException"):
        caller.boto.list_functions()
    caller.boto.close()
