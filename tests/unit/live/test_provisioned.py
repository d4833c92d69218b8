"""Provisioned concurrency is asked for until the platform has confirmed it: it is billed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
from remote_rig import PLATFORM, Rig, remote_call

from headgate.core.model import FaasPlatform
from headgate.functions.tensor import TaskResult
from headgate.live.pools import remote_pool
from headgate.live.pools.remote_pool import CallResult, Done, Failed, RemoteCall, WarmKeeper

MS = 1_000_000
PRICED = replace(PLATFORM, keep_alive_ns=40 * MS, provisioned_usd_per_gb_s=1.0)


class WarmRig:
    """A keeper whose platform notes what it is asked for; its only thread may be kept busy."""

    def __init__(self, threads: int = 1, platform: FaasPlatform = PRICED) -> None:
        self.asked: list[int] = []
        self.problems: list[str] = []  # of the next requests
        self.may_go_on = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.rig = Rig(self._call, threads=threads)
        self.keeper = WarmKeeper(
            self.rig.pool, platform, self._ping, self._provision, self.rig, lambda *_: None
        )

    def _call(self, call: RemoteCall) -> CallResult:
        self.may_go_on.wait(60)
        return Done([TaskResult(0, [])], MS)

    def _ping(self, function: str) -> CallResult:
        return Failed("nobody pings")

    def _provision(self, function: str, count: int) -> str:
        self.asked.append(count)
        self.may_answer.wait(60)
        return self.problems.pop(0) if self.problems else ""

    def set(self, count: int, *, is_provisioned: bool = True) -> None:
        self.keeper.set_target("f", count, is_provisioned=is_provisioned)

    async def hold(self, count: int) -> None:
        """Have this many instances provisioned."""
        self.set(count)
        await self.rig.until(lambda: count in self.asked and not self.rig.pool.threads.busy)

    def occupy(self) -> None:
        self.rig.pool.send(time.monotonic_ns(), remote_call())
        assert not self.rig.pool.threads.free


def run(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario())


@pytest.mark.parametrize("is_provisioned", [True, False])
def test_release_without_a_free_thread_is_repeated(is_provisioned: bool) -> None:
    async def scenario() -> None:
        warm = WarmRig()
        await warm.hold(5)
        warm.occupy()
        warm.set(0, is_provisioned=is_provisioned)
        assert 0 not in warm.asked
        warm.may_go_on.set()
        await warm.rig.until(lambda: warm.asked[-1] == 0)
        await warm.keeper.stop()

    run(scenario)


def test_release_without_a_free_thread_is_repeated_at_the_end() -> None:
    async def scenario() -> None:
        warm = WarmRig(platform=replace(PRICED, keep_alive_ns=10**12))
        await warm.hold(5)
        warm.occupy()
        warm.set(0)
        stopping = asyncio.create_task(warm.keeper.stop())
        await asyncio.sleep(0.02)
        assert warm.asked == [5]
        warm.may_go_on.set()
        await stopping
        assert warm.asked == [5, 0]

    run(scenario)


def test_release_that_fails_is_repeated_and_billed_until_then() -> None:
    async def scenario() -> None:
        warm = WarmRig()
        await warm.hold(5)
        warm.problems = ["busy", "busy"]
        began_ns = time.monotonic_ns()
        warm.set(0)
        warm.rig.warm_usd.clear()
        await warm.rig.until(
            lambda: warm.asked[-3:] == [0, 0, 0] and not warm.rig.pool.threads.busy
        )
        took_s = (time.monotonic_ns() - began_ns) / 1e9
        assert 5 * 0.039 <= sum(warm.rig.warm_usd) <= 5 * took_s
        billed = len(warm.rig.warm_usd)
        await asyncio.sleep(0.1)
        assert (warm.asked.count(0), len(warm.rig.warm_usd)) == (3, billed)

    run(scenario)


def test_failing_release_is_repeated_at_the_end_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_pool, "DEPROVISION_WAIT_S", 1.0)

    async def scenario() -> None:
        warm = WarmRig(platform=replace(PRICED, keep_alive_ns=10**12))
        await warm.hold(5)
        warm.problems = ["busy"] * 100
        await warm.keeper.stop()
        assert 2 <= warm.asked.count(0) <= 7

    caplog.set_level(logging.DEBUG, "headgate")
    run(scenario)
    assert "provisioned instances of f may be billed on" in caplog.text


def test_one_request_at_a_time_and_the_last_one_wins() -> None:
    """Of two at a time, the platform might carry out the earlier one last."""

    async def scenario() -> None:
        warm = WarmRig(threads=4, platform=replace(PRICED, keep_alive_ns=10**12))
        warm.may_answer.clear()
        for count in (2, 5, 0):
            warm.set(count)
        await warm.rig.until(lambda: bool(warm.asked))
        assert warm.rig.pool.threads.busy == 1
        warm.may_answer.set()
        await warm.rig.until(lambda: not warm.rig.pool.threads.busy)
        assert warm.asked == [2, 0]
        await warm.keeper.stop()
        assert warm.asked == [2, 0]

    run(scenario)


def test_where_none_stays_warm_requests_do_not_spin() -> None:
    async def scenario() -> None:
        warm = WarmRig(platform=replace(PRICED, keep_alive_ns=0))
        await warm.hold(5)
        await asyncio.sleep(0.05)
        assert warm.asked == [5]
        await warm.keeper.stop()

    run(scenario)
