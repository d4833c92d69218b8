"""Calls in bursts while instances are killed at random: nothing lost, all billed."""

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

from headgate.lambda_emulator import EmbeddedPlatform, read_bill

BURST = 8  # at once


@pytest.mark.parametrize("count", [200, pytest.param(1_000, marks=pytest.mark.slow)])
def test_many_calls_and_a_killer(tmp_path: Path, count: int) -> None:
    """Every call is answered once, with its own answer; what ran is on the bill, once."""
    mark = tmp_path / "ran"
    mark.touch()
    kills: list[int] = []
    with platform_in(tmp_path) as (platform, caller):
        end = threading.Event()
        killer = threading.Thread(target=_kill, args=(platform, end, kills))
        killer.start()
        try:
            answers = _call_in_bursts(caller, mark, count)
        finally:
            end.set()
            killer.join()
        records = platform.bill.records()
    assert kills and sum(bool(answer.error) for answer in answers) <= len(kills)
    for number, answer in enumerate(answers):
        if answer.error:
            assert answer.body["errorType"] == "Runtime.ExitError"
            assert "signal: killed" in answer.body["errorMessage"]
        else:
            assert answer.body["note"] == number, "somebody else's answer"

    ids = [answer.response["ResponseMetadata"]["RequestId"] for answer in answers]
    assert len(set(ids)) == count
    ran = Counter(mark.read_text().split())
    assert set(ran.values()) == {1}, "something ran twice"
    by_id = {record.request_id: record for record in records}
    assert len(by_id) == len(records) == count and set(by_id) == set(ids)
    for id, answer in zip(ids, answers, strict=True):
        record = by_id[id]
        assert bool(record.error) == bool(answer.error)
        # One that was killed between getting the call and running the handler is billed, too.
        assert id in ran or record.error
        assert record.billed_ms - 1 < record.init_ms + record.duration_ms <= record.billed_ms
    cold = [record for record in records if record.is_cold]
    assert len(cold) == len({record.instance for record in records}), "one start, one cold call"
    assert read_bill(platform.bill.path) == records


def _call_in_bursts(caller: Caller, mark: Path, count: int) -> list[Called]:
    """Up to `BURST` calls at once, then a moment of peace."""
    chance = random.Random(5)

    def call(number: int) -> Called:
        sleep_s = 0.002 * (number % 5)
        return caller.invoke("f", {"note": number, "mark": str(mark), "sleep": sleep_s})

    answers: list[Called] = []
    with ThreadPoolExecutor(BURST) as threads:
        while len(answers) < count:
            size = min(chance.randint(1, BURST), count - len(answers))
            answers += threads.map(call, range(len(answers), len(answers) + size))
            time.sleep(chance.uniform(0, 0.01))
    return answers


def _kill(platform: EmbeddedPlatform, end: threading.Event, kills: list[int]) -> None:
    """Kill some instance now and then: idle, starting or busy."""
    chance = random.Random(7)
    while not end.wait(chance.uniform(0.1, 0.3)):
        instances = [each for each in platform.instances() if each.pid]
        if instances:
            kills.append(chance.choice(instances).pid)
            with suppress(ProcessLookupError):
                os.kill(kills[-1], signal.SIGKILL)
