"""A scriptable function, and boto3 clients without retries."""

from __future__ import annotations

import io
import json
import socket
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from headgate.lambda_emulator import EmbeddedPlatform
from headgate.lambda_emulator.functions import RUNTIME

ROLE = "arn:aws:iam::000000000000:role/any"
HANDLER = '''
import os
import time
from pathlib import Path

print("module imported")
calls = 0


def handle(event, context):
    """Perform the steps that the event names, in this order; return details of the instance."""
    global calls
    calls += 1
    print("note", event.get("note"))
    if "mark" in event:  # proof of the run, which outlives this process
        with open(event["mark"], "a") as file:
            file.write(context.aws_request_id + "\\n")
    time.sleep(event.get("sleep", 0))
    if "spin" in event:
        end, began = time.monotonic() + event["spin"], time.process_time()
        while time.monotonic() < end:
            pass
        return {"cpu_s": time.process_time() - began}
    if "exit" in event:
        os._exit(event["exit"])
    if "until" in event and not os.path.exists(event["until"]):
        raise FileNotFoundError(event["until"])
    if "fail" in event:
        raise ValueError(event["fail"])
    if "bytes" in event:
        return "x" * (event["bytes"] - 2)
    return {
        "note": event.get("note"),
        "pid": os.getpid(),
        "calls": calls,
        "id": context.aws_request_id,
        "arn": context.invoked_function_arn,
        "left_ms": context.get_remaining_time_in_millis(),
        "client": getattr(context.client_context, "custom", None),
        "env": {name: os.environ.get(name) for name in event.get("env", ())},
        "cpus": sorted(os.sched_getaffinity(0)),
    }
'''


@dataclass(frozen=True)
class Called:
    """The response to an invocation."""

    status: int
    error: str | None  # FunctionError
    body: Any
    response: dict[str, Any]


class Caller:
    """A boto3 client of one platform."""

    def __init__(self, options: Mapping[str, str], **config: Any) -> None:
        settings = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64, **config}
        self.boto = boto3.client("lambda", **options, config=Config(**settings))

    def invoke(self, function: str, event: object = None, **options: Any) -> Called:
        """Invoke a function and wait for its response."""
        if event is not None:
            options["Payload"] = json.dumps(event).encode()
        response = self.boto.invoke(FunctionName=function, **options)
        body = response["Payload"].read()
        return Called(
            response["StatusCode"],
            response.get("FunctionError"),
            json.loads(body) if body else None,
            response,
        )

    def create(self, name: str, code: str = HANDLER, **options: Any) -> dict[str, Any]:
        """Create a function from the source of its only module."""
        request: dict[str, Any] = {"Runtime": RUNTIME, "Role": ROLE, "Handler": "module.handle"}
        request |= {"MemorySize": 1_769, "Timeout": 60, **options}  # less memory may be too slow
        created: dict[str, Any] = self.boto.create_function(
            FunctionName=name, Code={"ZipFile": zipped({"module.py": code})}, **request
        )
        return created

    def rejected(self, operation: str, **options: Any) -> tuple[int, str, str]:
        """Return status, code and message of a call that must be rejected."""
        with pytest.raises(ClientError) as caught:
            getattr(self.boto, operation)(**options)
        response = caught.value.response
        status = response["ResponseMetadata"]["HTTPStatusCode"]
        return status, response["Error"]["Code"], response["Error"]["Message"]


@contextmanager
def platform_in(directory: Path, **settings: Any) -> Iterator[tuple[EmbeddedPlatform, Caller]]:
    """Run a platform with a function `f`; yields it with a client."""
    code = directory / "source"
    code.mkdir()
    (code / "module.py").write_text(HANDLER, encoding="utf-8")
    with EmbeddedPlatform(directory / "data", **settings) as platform:
        platform.register("f", code, "module.handle")
        caller = Caller(platform.client_options)
        try:
            yield platform, caller
        finally:
            caller.boto.close()


def signed(
    platform: EmbeddedPlatform,
    method: bytes,
    path: bytes,
    body: bytes = b"",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return the bytes of a signed request; path and headers are sent verbatim."""
    named = {"Host": urlsplit(platform.url).netloc, "Content-Type": "application/json", **headers}
    url = f"{platform.url}{path.decode('latin-1')}"
    request = AWSRequest(method.decode(), url, headers=named, data=body)
    options = platform.client_options
    keys = Credentials(options["aws_access_key_id"], options["aws_secret_access_key"])
    SigV4Auth(keys, "lambda", "eu-central-1").add_auth(request)
    request.headers["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return method + b" " + path + b" HTTP/1.1\r\n" + head.encode("latin-1") + b"\r\n" + body


def sent(platform: EmbeddedPlatform, data: bytes, *, ends: bool = False) -> bytes:
    """Send bytes on a new connection and return the first bytes received."""
    with socket.create_connection(("127.0.0.1", platform.port), timeout=60) as client:
        client.sendall(data)
        if ends:
            client.shutdown(socket.SHUT_WR)
        return client.recv(65_536)


def zipped(files: dict[str, str]) -> bytes:
    """Return a zip file with these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty for a zombie
    except OSError:
        return False


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether a condition becomes true within a minute."""
    end_s = time.monotonic() + 60.0
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True
