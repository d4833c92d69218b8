"""`Invoke`: responses of successful and failed invocations, and their billing records."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from platform_rig import Caller, eventually

from headgate.lambda_emulator import EmbeddedPlatform, read_billing_log


def test_successful_invocation(platform: EmbeddedPlatform, caller: Caller) -> None:
    """First cold, then warm; client context and log are passed on; both runs are billed."""
    caller.create("well")
    context = base64.b64encode(json.dumps({"custom": {"who": "mé 😀"}}).encode()).decode()
    first = caller.invoke("well", {"note": 1}, ClientContext=context, LogType="Tail")
    second = caller.invoke("well", {"note": 2}, LogType="Tail")
    assert (first.status, first.error, second.error) == (200, None, None)
    assert first.response["ExecutedVersion"] == "$LATEST"
    assert first.body["client"] == {"who": "mé 😀"}
    assert first.body["id"] == first.response["ResponseMetadata"]["RequestId"]
    assert first.body["arn"].endswith(":function:well")
    assert (second.body["pid"], second.body["calls"]) == (first.body["pid"], 2)
    log = base64.b64decode(first.response["LogResult"]).decode()
    assert "module imported\nnote 1\n" in log and "Init Duration: " in log
    log = base64.b64decode(second.response["LogResult"]).decode()
    assert log.startswith(f"START RequestId: {second.body['id']} Version: $LATEST\nnote 2\n")
    assert "module imported" not in log and "Init Duration: " not in log

    records = platform.billing_log.records("well")
    assert [(each.request_id, each.is_cold) for each in records] == [
        (first.body["id"], True),
        (second.body["id"], False),
    ]
    assert records[0].init_ms > 0 and records[1].init_ms == 0
    for each in records:
        assert each.billed_ms - 1 < each.init_ms + each.duration_ms <= each.billed_ms
    assert [
        each for each in read_billing_log(platform.billing_log.path) if each.function == "well"
    ] == records


def test_dry_run(platform: EmbeddedPlatform, caller: Caller) -> None:
    before = len(platform.billing_log.records())
    assert caller.invoke("f", {}, InvocationType="DryRun").status == 204
    assert len(platform.billing_log.records()) == before


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ({"fail": "no!"}, "ValueError", "no!"),
        ({"exit": 0}, "Runtime.ExitError", "Runtime exited without providing a reason"),
        ({"exit": 7}, "Runtime.ExitError", "Runtime exited with error: exit status 7"),
        ({"bytes": 6_400_000}, "Function.ResponseSizeTooLarge", "6291556 bytes"),
    ],
)
def test_function_errors(
    platform: EmbeddedPlatform, caller: Caller, event: dict[str, object], kind: str, message: str
) -> None:
    """The status is 200 nevertheless; the next invocation succeeds, and the error is billed."""
    called = caller.invoke("f", event)
    assert (called.status, called.error) == (200, "Unhandled")
    assert called.body["errorType"] == kind and message in called.body["errorMessage"]
    assert caller.invoke("f", {"note": 1}).error is None
    failed, well = platform.billing_log.records("f")[-2:]
    assert (failed.error, well.error) == (kind, "") and failed.billed_ms >= 1


@pytest.mark.parametrize(
    ("code", "handler", "kind"),
    [
        ("import nothing_of_this_name\n", "module.handle", "Runtime.ImportModuleError"),
        ("def handle(:\n", "module.handle", "Runtime.UserCodeSyntaxError"),
        ("pass\n", "module.handle", "Runtime.HandlerNotFound"),
        ("pass\n", "nonsense", "Runtime.MalformedHandlerName"),
        ("1 / 0\n", "module.handle", "ZeroDivisionError"),
        ("import os\nos._exit(3)\n", "module.handle", "Runtime.ExitError"),
    ],
)
def test_init_errors(
    platform: EmbeddedPlatform, caller: Caller, code: str, handler: str, kind: str
) -> None:
    name = f"no-start-{kind.replace('.', '-')}"
    caller.create(name, code, Handler=handler)
    called = caller.invoke(name, {})
    assert (called.status, called.error, called.body["errorType"]) == (200, "Unhandled", kind)
    (record,) = platform.billing_log.records(name)
    assert (record.error, record.is_cold, record.duration_ms) == (kind, True, 0.0)
    assert record.billed_ms >= record.init_ms > 0


def test_timeout(platform: EmbeddedPlatform, caller: Caller) -> None:
    """The invocation is aborted, its instance is killed, and the time is billed."""
    caller.create("slow", Timeout=1)
    pid = caller.invoke("slow", {}).body["pid"]
    began_s = time.monotonic()
    called = caller.invoke("slow", {"sleep": 1_000})
    assert time.monotonic() - began_s > 0.9
    assert (called.status, called.error) == (200, "Unhandled")
    assert called.body["errorMessage"].endswith("Task timed out after 1.00 seconds")
    assert eventually(lambda: not _is_alive(pid))
    assert caller.invoke("slow", {}).body["pid"] != pid
    assert platform.billing_log.records("slow")[1].billed_ms >= 1_000


def test_instance_killed_during_invocation(
    platform: EmbeddedPlatform, caller: Caller, tmp_path: Path
) -> None:
    caller.create("victim")
    pid = caller.invoke("victim", {}).body["pid"]
    mark = tmp_path / "ran"

    def kill() -> None:
        if eventually(mark.exists):
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    called = caller.invoke("victim", {"mark": str(mark), "sleep": 50})
    assert (called.error, called.body["errorType"]) == ("Unhandled", "Runtime.ExitError")
    assert called.body["errorMessage"].endswith("Runtime exited with error: signal: killed")
    assert caller.invoke("victim", {}).body["pid"] != pid
    assert [each.error for each in platform.billing_log.records("victim")] == [
        "",
        "Runtime.ExitError",
        "",
    ]


def test_idle_instance_killed(platform: EmbeddedPlatform, caller: Caller) -> None:
    """Once the platform has noticed, the next invocation gets another instance."""
    pid = caller.invoke("f", {}).body["pid"]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: pid not in [instance.pid for instance in platform.instances()])
    called = caller.invoke("f", {})
    assert called.error is None and called.body["pid"] != pid


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"FunctionName": "nobody"}, 404, "ResourceNotFoundException"),
        ({"Qualifier": "9"}, 404, "ResourceNotFoundException"),
        ({"Payload": b"{no json"}, 400, "InvalidRequestContentException"),
        ({"Payload": b'"\xff"'}, 400, "InvalidRequestContentException"),
        ({"ClientContext": "&"}, 400, "InvalidRequestContentException"),
        ({"InvocationType": "Later"}, 400, "InvalidParameterValueException"),
        ({"Payload": b" " * 6_291_457}, 413, "RequestTooLargeException"),
        (
            {"Payload": b" " * 1_048_577, "InvocationType": "Event"},
            413,
            "RequestTooLargeException",
        ),
    ],
)
def test_rejected_invocations(
    platform: EmbeddedPlatform, caller: Caller, options: dict[str, Any], status: int, code: str
) -> None:
    """The function does not run and nothing is billed."""
    before = len(platform.billing_log.records())
    rejected = caller.rejected("invoke", **{"FunctionName": "f", **options})
    assert rejected[:2] == (status, code)
    assert len(platform.billing_log.records()) == before


def test_largest_payloads(caller: Caller) -> None:
    frame = json.dumps({"note": ""})
    note = "x" * (6_291_456 - len(frame))
    called = caller.invoke("f", {"note": note[:-200]})  # the response is longer than the request
    assert called.body["note"] == note[:-200]
    assert caller.invoke("f", {"note": note}, InvocationType="DryRun").status == 204
    assert len(caller.invoke("f", {"bytes": 6_291_456}).body) == 6_291_454


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
