"""The Runtime API of an instance serves processes of that instance only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from platform_rig import Caller, eventually, platform_in

from headgate.http.interface import HttpLimits
from headgate.lambda_emulator import EmbeddedPlatform
from headgate.lambda_emulator.instance import is_from_session

NEXT = "GET /2018-06-01/runtime/invocation/next"
# Returns the address of its Runtime API, or calls one: another's, or its own from a child process.
CURIOUS = """
import http.client, os, subprocess, sys

TALK = '''
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
connection.request("POST", "/2018-06-01/runtime/invocation/nobody/response", b"{}")
print(connection.getresponse().status)
'''

def handle(event, context):
    own = os.environ["AWS_LAMBDA_RUNTIME_API"]
    if "child" in event:
        command = (sys.executable, "-c", TALK, own)
        return subprocess.check_output(command, text=True).strip()
    if "other" not in event:
        return own
    connection = http.client.HTTPConnection(event["other"], timeout=60)
    connection.request("POST", "/2018-06-01/runtime/init/error", b'{"errorType":"Forged"}')
    return connection.getresponse().status
"""


def ask(api: str, line: str, *headers: str, body: str = "") -> str:
    """Return the response to a foreign process: the process of the tests."""
    host, _, port = api.partition(":")
    lines = [f"{line} HTTP/1.1", *headers, f"Content-Length: {len(body)}", "", body]
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall("\r\n".join(lines).encode())
        return client.makefile("rb").read().decode()


@pytest.fixture(scope="module")
def api(served: tuple[EmbeddedPlatform, Caller]) -> str:
    """The address of the Runtime API of an idle instance."""
    caller = served[1]
    caller.create("curious", CURIOUS)
    result = caller.invoke("curious", {}).body
    assert isinstance(result, str)
    return result


def test_foreign_process_is_rejected(platform: EmbeddedPlatform, caller: Caller, api: str) -> None:
    """A foreign process cannot poll, respond for the instance, or report a failed start."""
    (before,) = [each for each in platform.instances() if each.function == "curious"]
    host = f"Host: {api}"
    for line, body in (
        (NEXT, ""),
        ("POST /2018-06-01/runtime/init/error", '{"errorType":"Forged"}'),
        ("POST /2018-06-01/runtime/invocation/x/response", '"forged"'),
        ("POST /2018-06-01/runtime/invocation/x/error", '{"errorType":"Forged"}'),
        ("GET /", ""),
    ):
        response = ask(api, line, host, body=body)
        assert response.startswith("HTTP/1.1 403 Forbidden"), line
        assert "Connection: close" in response
    assert caller.invoke("curious", {}).body == api, "another instance, or a forged response"
    assert before in platform.instances()


def test_foreign_process_cannot_answer_an_invocation(tmp_path: Path) -> None:
    """A response sent by a foreign process to a running invocation is ignored."""
    with platform_in(tmp_path) as (_, caller):
        caller.create("curious", CURIOUS)
        api = caller.invoke("curious", {}).body
        code = (
            "import os, time\n"
            "def handle(event, context):\n"
            "    open(event['began'], 'w').write(context.aws_request_id)\n"
            "    while not os.path.exists(event['end']): time.sleep(0.01)\n"
            "    return os.environ['AWS_LAMBDA_RUNTIME_API']\n"
        )
        caller.create("slow", code, Timeout=60)
        began, end = tmp_path / "began", tmp_path / "end"
        responses: list[object] = []
        event = {"began": str(began), "end": str(end)}
        call = threading.Thread(target=lambda: responses.append(caller.invoke("slow", event).body))
        call.start()
        assert eventually(lambda: began.exists() and bool(began.read_text()))
        path = f"/2018-06-01/runtime/invocation/{began.read_text()}/response"
        for port in _listening(api):
            ask(f"127.0.0.1:{port}", f"POST {path}", f"Host: 127.0.0.1:{port}", body='"forged"')
        end.touch()
        call.join()
        assert isinstance(responses[0], str) and responses[0].startswith("127.0.0.1:")


def test_instances_cannot_use_each_others_runtime_api(caller: Caller, api: str) -> None:
    caller.create("neighbour", CURIOUS)
    assert caller.invoke("neighbour", {"other": api}).body == 403
    assert caller.invoke("curious", {}).body == api


def test_child_process_of_an_instance_is_accepted(caller: Caller, api: str) -> None:
    """A child process gets a regular error: the invocation does not exist."""
    assert caller.invoke("curious", {"child": True}).body == "400"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Host: evil.example"], 403),
        (["Host: 127.0.0.1"], 403),
        ([], 400),
        (["Host: {api}", "Origin: null"], 403),
    ],
)
def test_web_pages_are_rejected_at_the_runtime_api(
    api: str, headers: list[str], status: int
) -> None:
    response = ask(api, NEXT, *(header.format(api=api) for header in headers))
    assert response.startswith(f"HTTP/1.1 {status} ")


def test_second_request_after_rejection_is_ignored(
    platform: EmbeddedPlatform, caller: Caller, api: str
) -> None:
    """Only the first request of a connection is authenticated, so a rejection must close it."""
    one = f"{NEXT} HTTP/1.1\r\nHost: {api}\r\n\r\n"
    host, _, port = api.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall((one + one).encode())
        response = client.makefile("rb").read()
    assert response.count(b"HTTP/1.1 ") == 1 and response.startswith(b"HTTP/1.1 403 ")
    assert caller.invoke("curious", {}).body == api


def test_is_from_session() -> None:
    """A child in a session of its own owns its connections, and not those of this process.

    The session of this process is not tested: its leader may be outside of the container, and the
    kernel then reports session 0.
    """
    program = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
        "print(); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with (
            subprocess.Popen(
                (sys.executable, "-c", program, str(address[1])),
                stdin=subprocess.PIPE,
                start_new_session=True,
            ) as child,
            server.accept()[0] as theirs,
            socket.create_connection(address),
            server.accept()[0] as ours,
        ):
            peer = theirs.getpeername()
            assert is_from_session(peer, address, child.pid)
            assert not is_from_session(peer, address, child.pid + 1)
            assert not is_from_session(peer, address, 0)
            assert not is_from_session((peer[0], peer[1] ^ 1), address, child.pid)
            assert not is_from_session(ours.getpeername(), address, child.pid)
            child.communicate()
            assert not is_from_session(peer, address, child.pid), "the connection is closed"


def _listening(api: str) -> list[int]:
    """Return the ports of all Runtime APIs of this process: they are random."""
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        if fields[3] == "0A" and host == "0100007F" and _is_runtime_api(int(port, 16)):
            ports.append(int(port, 16))
    assert int(api.partition(":")[2]) in ports
    return ports


def _is_runtime_api(port: int) -> bool:
    """Whether a port is a Runtime API of this process, which must be the instance's parent."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            parent = Path(path.parent, "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"AWS_LAMBDA_RUNTIME_API=127.0.0.1:%d" % port in variables:
            return int(parent) == os.getpid()
    return False


def test_runtime_reconnects_after_an_idle_timeout(tmp_path: Path) -> None:
    """While a function runs, the runtime's connection is idle; the runtime opens another one."""
    limits = HttpLimits(idle_timeout_s=0.1, sweep_s=0.005)
    with platform_in(tmp_path, http=limits) as (_, caller):
        first, second = (caller.invoke("f", {"sleep": 1.0}).body for _ in range(2))
        assert (second["pid"], second["calls"]) == (first["pid"], 2)
