"""Concurrency: instances, limits, throttling, keep-alive and events."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from platform_rig import Called, Caller, eventually, platform_in

from headgate.core.errors import ConfigError
from headgate.lambda_emulator import EmbeddedPlatform, PlatformSettings, instance, invoker
from headgate.lambda_emulator import platform as platforms
from headgate.lambda_emulator.functions import Code, EmulatedFunction, FunctionVersion
from headgate.lambda_emulator.http import Throttled
from headgate.lambda_emulator.invoker import Admission


def at_once(
    caller: Caller, count: int, event: dict[str, object], name: str = "f"
) -> list[Called | dict[str, Any]]:
    """Invoke a function `count` times at once. A rejection is returned as boto3's response."""

    def call(number: int) -> Called | dict[str, Any]:
        try:
            return caller.invoke(name, {"note": number, **event})
        except ClientError as error:
            return dict(error.response)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, range(count)))


def test_one_instance_per_concurrent_call(platform: EmbeddedPlatform, caller: Caller) -> None:
    """Four at once are four cold starts; sequential calls reuse the instance used last."""
    caller.create("four")
    responses = at_once(caller, 4, {"sleep": 1.5}, "four")
    bodies = [response.body for response in responses if isinstance(response, Called)]
    assert len({body["pid"] for body in bodies}) == 4
    assert [body["note"] for body in bodies] == [0, 1, 2, 3]
    assert all(each.is_cold and each.init_ms > 0 for each in platform.billing_log.records("four"))

    one_by_one = [caller.invoke("four", {}).body["pid"] for _ in range(5)]
    assert len(set(one_by_one)) == 1, "not last in, first out"
    assert one_by_one[0] == platform.billing_log.records("four")[3].instance


def test_account_concurrency_limit(tmp_path: Path) -> None:
    """Two run; the others are throttled at once, with a reason and `Retry-After`."""
    with platform_in(tmp_path, concurrency=2) as (platform, caller):
        responses = at_once(caller, 6, {"sleep": 2.0})
        rejected = [response for response in responses if isinstance(response, dict)]
        assert len(rejected) == 4 and len(platform.billing_log.records()) == 2
        for response in rejected:
            assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
            assert response["Error"]["Code"] == "TooManyRequestsException"
            assert response["Reason"] == "ConcurrentInvocationLimitExceeded"
            assert response["Type"] == "User"
            assert response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "1"
        account = caller.boto.get_account_settings()["AccountLimit"]
        assert account["ConcurrentExecutions"] == 2
        assert caller.invoke("f", {}).error is None, "admitted when capacity is free"


def test_reserved_concurrency(caller: Caller) -> None:
    """A reservation is also the function's limit; a reservation of 0 stops it."""
    boto = caller.boto
    of = {"FunctionName": "f"}
    assert boto.put_function_concurrency(ReservedConcurrentExecutions=1, **of)
    assert boto.get_function_concurrency(**of)["ReservedConcurrentExecutions"] == 1
    assert boto.get_function(**of)["Concurrency"] == {"ReservedConcurrentExecutions": 1}
    rejected = [each for each in at_once(caller, 3, {"sleep": 2.0}) if isinstance(each, dict)]
    assert [each["Reason"] for each in rejected] == [
        "ReservedFunctionConcurrentInvocationLimitExceeded"
    ] * 2
    boto.put_function_concurrency(ReservedConcurrentExecutions=0, **of)
    assert caller.rejected("invoke", **of)[:2] == (429, "TooManyRequestsException")
    too_much = caller.rejected("put_function_concurrency", ReservedConcurrentExecutions=901, **of)
    assert too_much[:2] == (400, "InvalidParameterValueException") and "[100]" in too_much[2]
    boto.delete_function_concurrency(**of)
    assert "ReservedConcurrentExecutions" not in boto.get_function_concurrency(**of)
    assert caller.invoke("f", {}).error is None


def test_boto3_retries_throttled_invocation(tmp_path: Path) -> None:
    """With standard retries, a throttled invocation succeeds when capacity is free again."""
    with platform_in(tmp_path, concurrency=1) as (platform, caller):
        patient = Caller(platform.client_options, retries={"max_attempts": 8, "mode": "standard"})
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(caller.invoke, "f", {"sleep": 2.0})
            assert eventually(lambda: len(platform.instances()) == 1)
            second = patient.invoke("f", {"note": "patient"})
            assert first.result().error is None
        patient.boto.close()
        assert second.body["note"] == "patient"
        assert second.response["ResponseMetadata"]["RetryAttempts"] >= 1


def test_scaling_rate(tmp_path: Path) -> None:
    """Two instances at once and one more per minute: the third invocation is throttled."""
    limits = {"scaling_burst": 2, "scaling_per_s": 1 / 60}
    with platform_in(tmp_path, **limits) as (platform, caller):
        responses = at_once(caller, 4, {"sleep": 1.2})
        rejected = [response for response in responses if isinstance(response, dict)]
        assert [each["Reason"] for each in rejected] == ["FunctionInvocationRateLimitExceeded"] * 2
        assert eventually(lambda: caller.invoke("f", {}).error is None)
        assert len(platform.instances()) == 2


def test_request_rate_limit(caller: Caller) -> None:
    """Ten invocations per second for each reserved execution, as on AWS; with a fake clock."""
    now_ns = 0
    function = EmulatedFunction(
        FunctionVersion("g", Code(Path(), "", 0), "module.handle"), reserved=1
    )
    admission = Admission(PlatformSettings(), {"g": function}, lambda: now_ns)
    for _ in range(10):
        admission.acquire(function)
        admission.release("g")
    with pytest.raises(Throttled) as caught:
        admission.acquire(function)
    assert caught.value.reason == "ReservedFunctionInvocationRateLimitExceeded"
    assert caught.value.wait_s == pytest.approx(0.1)
    now_ns = 100_000_001
    admission.acquire(function)


def test_keep_alive_and_maximum_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle instance is killed after the keep-alive time, a busy one at its maximum age.

    With a fake clock: 25 minutes per call, keep-alive of one hour, maximum age of three hours.
    """
    ahead_s = 0.0

    class Clock:
        time = staticmethod(time.time)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + ahead_s

    monkeypatch.setattr(invoker, "time", Clock)
    monkeypatch.setattr(instance, "time", Clock)
    monkeypatch.setattr(platforms, "_SWEEPS", 100_000)
    with platform_in(tmp_path, keep_alive_s=3_600.0, age_max_s=10_800.0) as (platform, caller):
        pid = caller.invoke("f", {}).body["pid"]
        for _ in range(7):
            ahead_s += 1_500.0
            assert caller.invoke("f", {}).body["pid"] == pid, "killed although in use"
        ahead_s += 1_500.0
        assert eventually(lambda: caller.invoke("f", {}).body["pid"] != pid)
        ahead_s += 3_700.0
        assert eventually(lambda: not platform.instances())


def test_instances_end_with_the_platform(tmp_path: Path) -> None:
    with platform_in(tmp_path) as (platform, caller):
        pids = [response.body["pid"] for response in at_once(caller, 2, {"sleep": 0.5})]  # type: ignore[union-attr]
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not platform.billing_log.records()[0].error


def test_events_are_retried(tmp_path: Path) -> None:
    """Accepted at once; attempted three times if they fail, and not again after a success."""
    limits = {"event_retry_s": (0.1, 0.1), "event_throttled_s": (0.05, 0.1)}
    with platform_in(tmp_path, **limits) as (platform, caller):
        mark, flag = tmp_path / "ran", tmp_path / "flag"
        queued = caller.invoke("f", {"mark": str(mark)}, InvocationType="Event")
        assert (queued.status, queued.body) == (202, None)
        assert eventually(mark.exists) and eventually(lambda: platform.events_waiting == 0)
        assert mark.read_text().split() == [queued.response["ResponseMetadata"]["RequestId"]]

        caller.invoke("f", {"fail": "always"}, InvocationType="Event")
        assert eventually(lambda: platform.events_waiting == 0)
        failed = [each for each in platform.billing_log.records() if each.error]
        assert len(failed) == 3 and len({each.request_id for each in failed}) == 1

        caller.invoke("f", {"until": str(flag)}, InvocationType="Event")
        assert eventually(lambda: platform.billing_log.records()[-1].error == "FileNotFoundError")
        flag.touch()
        assert eventually(lambda: platform.events_waiting == 0)
        assert platform.billing_log.records()[-1].error == ""


def test_throttled_events_wait(tmp_path: Path) -> None:
    """Five events at a concurrency of one: all of them run, one after the other."""
    limits = {"concurrency": 1, "event_throttled_s": (0.02, 0.1)}
    with platform_in(tmp_path, **limits) as (platform, caller):
        for _ in range(5):
            caller.invoke("f", {"sleep": 0.05}, InvocationType="Event")
        assert eventually(lambda: platform.events_waiting == 0)
        assert [each.error for each in platform.billing_log.records()] == [""] * 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "platform: concurrency: 0: must be more than zero"),
        ({"cpus": (10_000,)}, "platform: cpus: (10000,): not available to this process"),
    ],
)
def test_invalid_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught, EmbeddedPlatform(tmp_path, **settings):
        pass
    assert str(caught.value).startswith(message)


def test_port_in_use(platform: EmbeddedPlatform, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot listen"),
        EmbeddedPlatform(tmp_path, port=platform.port),
    ):
        pass
