"""Components of the platform: HTTP server, packages, billing log, events."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from platform_rig import Caller, eventually, platform_in, signed, zipped

from headgate.lambda_emulator import EmbeddedPlatform, PlatformSettings
from headgate.lambda_emulator.functions import unpack
from headgate.lambda_emulator.http import ServiceError
from headgate.lambda_emulator.invoker import BillingLog, BillingRecord, gb_s, read_billing_log


def test_pipelined_and_chunked_requests(platform: EmbeddedPlatform) -> None:
    """Pipelined requests are answered in order; a chunked body in small packets is joined."""
    get = signed(platform, b"GET", b"/2015-03-31/functions/f")
    nowhere = signed(platform, b"GET", b"/nowhere")
    with socket.create_connection(("127.0.0.1", platform.port)) as client:
        client.settimeout(60)
        client.sendall(get + nowhere)
        message = b""
        while message.count(b"HTTP/1.1 ") < 2 or b"no such operation" not in message:
            message += client.recv(65_536)
        assert message.index(b"HTTP/1.1 200 OK") < message.index(b"HTTP/1.1 404 Not Found")

        whole = signed(platform, b"POST", b"/2015-03-31/functions/f/invocations", b'{"note":1}')
        how = b"Transfer-Encoding: chunked\r\nConnection: close"
        chunked = whole.replace(b"Content-Length: 10", how).removesuffix(b'{"note":1}')
        crumbs = (chunked[:30], chunked[30:], b'6\r\n{"note\r\n', b'4\r\n":1}\r\n', b"0\r\n\r\n")
        for crumb in crumbs:
            client.sendall(crumb)
        message = b""
        while more := client.recv(65_536):
            message += more
        assert message.startswith(b"HTTP/1.1 200 OK") and b'"note": 1' in message


@pytest.mark.parametrize("nonsense", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 99])
def test_non_http_input(platform: EmbeddedPlatform, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", platform.port)) as client:
        client.settimeout(60)
        client.sendall(nonsense)
        assert client.recv(65_536).startswith(b"HTTP/1.1 400 Bad Request")
        assert client.recv(65_536) == b""


def test_request_body_too_large(tmp_path: Path) -> None:
    """The body is read to its end and discarded, and the request is rejected."""
    with platform_in(tmp_path, zip_bytes=1_000, sync_payload_bytes=1_000) as (_, caller):
        rejected = caller.rejected("invoke", FunctionName="f", Payload=b" " * 3_000_000)
        assert rejected[:2] == (413, "RequestEntityTooLargeException")
        assert caller.invoke("f", {"note": 1}).body["note"] == 1


def test_package_size_limits(tmp_path: Path) -> None:
    """Limits of the zipped and of the unpacked size."""
    package = zipped({"module.py": "x" * 1_000})
    with pytest.raises(ServiceError, match="Zipped size must be smaller than 10 bytes"):
        unpack(package, tmp_path, PlatformSettings(zip_bytes=10))
    with pytest.raises(ServiceError, match="Unzipped size must be smaller than 10 bytes"):
        unpack(package, tmp_path, PlatformSettings(unzipped_bytes=10))
    assert list(tmp_path.iterdir()) == [], "files were left behind"


def test_billing_log_keeps_latest_records_in_memory(tmp_path: Path) -> None:
    billing_log = BillingLog(tmp_path / "billing.jsonl", records_max=2)
    for number in range(3):
        billing_log.add(
            BillingRecord(
                request_id=str(number),
                function="f",
                version="$LATEST",
                memory_mb=512,
                started_s=0.0,
                init_ms=0.0,
                duration_ms=999.5,
                billed_ms=1_000,
                is_cold=False,
                is_provisioned=False,
            )
        )
    billing_log.close()
    assert [record.request_id for record in billing_log.records("f")] == ["1", "2"]
    assert len(read_billing_log(billing_log.path)) == 3
    assert gb_s(billing_log.records()) == 1.0 and not billing_log.records("g")


def test_events_of_a_deleted_function_are_dropped(tmp_path: Path) -> None:
    with platform_in(tmp_path, event_retry_s=(0.3,)) as (platform, caller):
        _fail_once(platform, caller)
        caller.boto.delete_function(FunctionName="f")
        assert eventually(lambda: platform.events_waiting == 0)
        assert len(platform.billing_log.records()) == 1
        assert eventually(lambda: not platform.instances())


def _fail_once(platform: EmbeddedPlatform, caller: Caller) -> None:
    caller.invoke("f", {"fail": "always"}, InvocationType="Event")
    assert eventually(lambda: len(platform.billing_log.records()) == 1)
