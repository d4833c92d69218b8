"""Bursts of invocations while instances are killed at random: none is lost, all are billed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from platform_rig import Called, Caller, platform_in

from headgate.lambda_emulator import EmbeddedPlatform, read_billing_log

BURST = 8  # at once


@pytest.mark.parametrize("count", [200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_bursts_while_instances_are_killed(tmp_path: Path, count: int) -> None:
    """Every invocation gets its own response once, and every run one billing record."""
    mark = tmp_path / "ran"
    mark.touch()
    kills: list[int] = []
    with platform_in(tmp_path) as (platform, caller):
        end = threading.Event()
        killer = threading.Thread(target=_kill, args=(platform, end, kills))
        killer.start()
        try:
            responses = _call_in_bursts(caller, mark, count)
        finally:
            end.set()
            killer.join()
        records = platform.billing_log.records()
    assert kills and sum(bool(response.error) for response in responses) <= len(kills)
    for number, response in enumerate(responses):
        if response.error:
            assert response.body["errorType"] == "Runtime.ExitError"
            assert "signal: killed" in response.body["errorMessage"]
        else:
            assert response.body["note"] == number, "response of another invocation"

    ids = [response.response["ResponseMetadata"]["RequestId"] for response in responses]
    assert len(set(ids)) == count
    ran = Counter(mark.read_text().split())
    assert set(ran.values()) == {1}, "something ran twice"
    by_id = {record.request_id: record for record in records}
    assert len(by_id) == len(records) == count and set(by_id) == set(ids)
    for id, response in zip(ids, responses, strict=True):
        record = by_id[id]
        assert bool(record.error) == bool(response.error)
        # An instance killed between delivery and the handler has not run it, but is billed.
        assert id in ran or record.error
        assert record.billed_ms - 1 < record.init_ms + record.duration_ms <= record.billed_ms
    cold = [record for record in records if record.is_cold]
    assert len(cold) == len({record.instance for record in records}), "one start, one cold call"
    assert read_billing_log(platform.billing_log.path) == records


def _call_in_bursts(caller: Caller, mark: Path, count: int) -> list[Called]:
    """Send bursts of up to `BURST` invocations, with short pauses."""
    chance = random.Random(5)

    def call(number: int) -> Called:
        sleep_s = 0.002 * (number % 5)
        return caller.invoke("f", {"note": number, "mark": str(mark), "sleep": sleep_s})

    responses: list[Called] = []
    with ThreadPoolExecutor(BURST) as threads:
        while len(responses) < count:
            size = min(chance.randint(1, BURST), count - len(responses))
            responses += threads.map(call, range(len(responses), len(responses) + size))
            time.sleep(chance.uniform(0, 0.01))
    return responses


def _kill(platform: EmbeddedPlatform, end: threading.Event, kills: list[int]) -> None:
    """Kill a random instance at random times, whether idle, starting or busy."""
    chance = random.Random(7)
    while not end.wait(chance.uniform(0.1, 0.3)):
        instances = [each for each in platform.instances() if each.pid]
        if instances:
            kills.append(chance.choice(instances).pid)
            with suppress(ProcessLookupError):
                os.kill(kills[-1], signal.SIGKILL)
