"""Who may use a platform: keys and their file, hosts, origins, types of content."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
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
from headgate.lambda_emulator.http import EmulatorRequest

FUNCTIONS = b"/2015-03-31/functions"
INVOKE = FUNCTIONS + b"/f/invocations"


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_keys_are_in_a_file_for_our_user_alone(tmp_path: Path) -> None:
    """They are random, found by the port, and gone with the platform."""
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


def test_a_file_that_others_can_read_is_not_read(tmp_path: Path) -> None:
    with platform_in(tmp_path) as (platform, _):
        assert platform.keys_file is not None
        platform.keys_file.chmod(0o640)
        assert read_keys(platform.keys_file) is None
        assert keys_for(platform.url, {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}) == NO_KEYS
        refused = Caller({**platform.client_options, **_options(NO_KEYS)})
        code, said = refused.refused("list_functions")[1:]
        assert code == "UnrecognizedClientException" and platform.keys_file.name in said
        refused.boto.close()


def test_keys_that_are_fixed_and_files_that_are_chosen(
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
def test_keys_that_cannot_be_fixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, id: str, secret: str
) -> None:
    """Least of all with a key of AWS, which does not belong here."""
    monkeypatch.setenv(ID_VARIABLE, id)
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(ConfigError) as caught:
        EmbeddedPlatform(tmp_path)
    assert secret not in str(caught.value)


def test_keys_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="the keys cannot be written"),
        EmbeddedPlatform(tmp_path / "data", keys_file=tmp_path / "file" / "keys.json"),
    ):
        pass


def test_the_file_of_the_next_platform_is_not_removed(tmp_path: Path) -> None:
    """One that ends late leaves the file of the one that has taken its place."""
    path = tmp_path / "keys.json"
    with ExitStack() as late:
        with ExitStack() as early:
            early.enter_context(EmbeddedPlatform(tmp_path / "one", keys_file=path))
            two = late.enter_context(EmbeddedPlatform(tmp_path / "two", keys_file=path))
        found = read_keys(path)
        assert found is not None and two.keys is not None
        assert found.access_key_id == two.keys.access_key_id
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
def test_web_pages_and_other_hosts_are_refused(
    platform: EmbeddedPlatform, headers: dict[str, str]
) -> None:
    """Although they are signed: nobody knows how a page has come to that."""
    answer = sent(platform, signed(platform, b"GET", FUNCTIONS, headers=headers))
    assert status(answer) == 403 and b"AccessDeniedException" in answer
    assert b"Access-Control" not in answer


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "[::1]:9001"])
def test_names_of_this_machine(platform: EmbeddedPlatform, host: str) -> None:
    answer = sent(platform, signed(platform, b"GET", FUNCTIONS, headers={"Host": host}))
    assert status(answer) == 200


def test_two_hosts_are_none(platform: EmbeddedPlatform) -> None:
    data = signed(platform, b"GET", FUNCTIONS)
    assert status(sent(platform, data.replace(b"\r\n", b"\r\nHost: 127.0.0.1\r\n", 1))) == 403


def test_preflights_are_refused(platform: EmbeddedPlatform) -> None:
    head = b"OPTIONS %s HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://a\r\n" % INVOKE
    asked = b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Private-Network: true"
    answer = sent(platform, head + asked + b"\r\n\r\n")
    assert status(answer) == 403 and b"Access-Control" not in answer


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b", ""]
)
def test_forms_and_texts_are_no_requests_to_manage(platform: EmbeddedPlatform, kind: str) -> None:
    headers = {"Content-Type": kind}
    reserve = b"/2017-10-31/functions/f/concurrency"
    body = b'{"ReservedConcurrentExecutions":1}'
    assert status(sent(platform, signed(platform, b"PUT", reserve, body, headers))) == 415
    # An invocation takes any bytes, as it does on AWS.
    assert status(sent(platform, signed(platform, b"POST", INVOKE, b"{}", headers))) == 200


def test_without_keys_pages_and_hosts_are_still_looked_at(tmp_path: Path) -> None:
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
def test_without_keys_only_on_loopback_addresses(tmp_path: Path, host: str) -> None:
    with (
        pytest.raises(ConfigError, match="--no-auth would let everybody") as caught,
        EmbeddedPlatform(tmp_path, host=host, has_auth=False),
    ):
        pass
    assert str(caught.value).startswith(f"--host {host}: ")


def test_hosts_that_are_allowed(tmp_path: Path) -> None:
    """By name, and by any address that a connection can come in on."""
    with platform_in(tmp_path, host="0.0.0.0", allow_hosts=["Box.example"]) as (platform, _):
        for host, expected in (
            ("box.example:9001", 200),
            ("other.example", 403),
            ("127.0.0.1", 200),
            ("0.0.0.0", 200),
            ("1.2.3.4", 403),
        ):
            answer = sent(platform, signed(platform, b"GET", FUNCTIONS, headers={"Host": host}))
            assert status(answer) == expected, host
        page = {"Origin": "http://box.example"}
        assert status(sent(platform, signed(platform, b"GET", FUNCTIONS, headers=page))) == 200


def test_an_address_that_a_connection_came_in_on() -> None:
    """Of a platform on all of them: an address cannot be made to lead elsewhere, unlike a name."""
    access = RequestAuth(None, "0.0.0.0")
    for local, host, is_let_in in (
        ("192.168.1.5", "192.168.1.5:9001", True),
        ("192.168.1.5", "192.168.1.6:9001", False),
        ("fe80::1", "[fe80:0::1]", True),
        ("192.168.1.5", "box", False),
    ):
        request = EmulatorRequest("GET", "/", "", {"host": host}, local=(local, 9001))
        assert (access.screen(request) is None) == is_let_in, host


def test_a_body_without_keys_is_not_kept(platform: EmbeddedPlatform) -> None:
    """However large it says it is: the refusal needs nothing of it."""
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % FUNCTIONS
    request = b"%sContent-Length: 200000\r\n\r\n%s" % (head, b"x" * 200_000)
    answer = sent(platform, request)
    assert status(answer) == 403 and b"MissingAuthenticationToken" in answer
    assert b"Connection: close" in answer


def test_what_follows_a_refusal_on_its_connection_is_not_looked_at(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with platform_in(tmp_path) as (platform, _):
        body = json.dumps({"mark": str(mark)}).encode()
        refused = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        answer = sent(platform, refused + signed(platform, b"POST", INVOKE, body))
        assert answer.count(b"HTTP/1.1 ") == 1 and status(answer) == 403
        assert platform.instances() == [] and not mark.exists()


def test_only_so_many_connections(tmp_path: Path) -> None:
    """Beyond as many as may run at once and some hundred that are idle, none is served."""
    with platform_in(tmp_path, concurrency=1) as (platform, caller):
        address = ("127.0.0.1", platform.port)
        idle = [socket.create_connection(address) for _ in range(300)]
        with pytest.raises(ConnectionError), socket.create_connection(address, timeout=60) as last:
            last.sendall(signed(platform, b"GET", FUNCTIONS))
            if not last.recv(1):
                raise ConnectionError
        for each in idle:
            each.close()
        served = eventually(lambda: _is_served(caller))
        assert served


def _is_served(caller: Caller) -> bool:
    try:
        return bool(caller.boto.list_functions()["Functions"])
    except BotoCoreError:
        return False


def test_the_lines_that_a_shell_can_use(tmp_path: Path) -> None:
    """What the command prints makes boto3 work, and nothing of it lies around afterwards."""
    command = (sys.executable, "-m", "headgate", "lambda-local", "--port", "0", "--directory")
    server = subprocess.Popen((*command, tmp_path / "data"), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server, server.stdout:
        lines = [server.stdout.readline() for _ in range(7)]
        found = dict(re.findall(r"^export (\w+)=(\S+)$", "".join(lines), re.MULTILINE))
        program = "import boto3; print(boto3.client('lambda').list_functions()['Functions'])"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        ran = subprocess.run(
            (sys.executable, "-c", program),
            env={**environment, **found},
            capture_output=True,
            text=True,
            check=False,
        )
        (keys,) = (Path(line.split()[1]) for line in lines if line.startswith("  keys: "))
        assert keys.is_file()
        server.terminate()
        assert server.wait(60) == 0
    assert (ran.stdout, ran.returncode) == ("[]\n", 0), ran.stderr
    assert set(found) == {
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


def test_a_wrong_secret(platform: EmbeddedPlatform) -> None:
    caller = Caller({**platform.client_options, "aws_secret_access_key": "guessed"})
    with pytest.raises(ClientError, match="InvalidSignatureException"):
        caller.boto.list_functions()
    caller.boto.close()
