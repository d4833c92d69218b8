"""Keeps instances of a platform ready: by calling them now and then, or provisioned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Final, final

from headgate.core.model import Serverless
from headgate.live.remote.fate import Done, Fate, Lost, Refused
from headgate.live.remote.outpost import Books, Outpost, Started

GIVE_BACK_S: Final = 3.0  # how long the end waits for what is to be paid for no longer
LOOK_S: Final = 0.01


@final
class Warmth:
    """The standing wishes for one pool, by function. The newest replaces the one before."""

    def __init__(
        self,
        outpost: Outpost,
        platform: Serverless,
        ping: Callable[[str], Fate],
        provision: Callable[[str, int], str],
        books: Books,
        started: Started,
    ) -> None:
        self.pings = 0
        self._outpost = outpost
        self._platform = platform
        self._ping = ping
        self._provision = provision
        self._books = books
        self._started = started
        self._loop = asyncio.get_running_loop()
        self._pinged: dict[str, int] = {}  # how many are called
        self._provisioned: dict[str, tuple[int, int]] = {}  # how many are paid for, since when
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._puts = 0  # orders to provision that are under way

    def wish(self, function: str, count: int, *, is_provisioned: bool) -> None:
        """Keep so many instances ready from now on, by this means. The others may age and go."""
        before = self._pinged.get(function, 0)
        self._pinged[function] = 0 if is_provisioned else count
        self._set_provisioned(function, count if is_provisioned else 0)
        timer = self._timers.get(function)
        if timer is None or count > before or is_provisioned:
            self._keep(function)

    async def stop(self) -> None:
        """Wish for nothing any more. What is provisioned would go on costing money."""
        for timer in self._timers.values():
            timer.cancel()
        for function, (count, _) in list(self._provisioned.items()):
            if count:
                self._set_provisioned(function, 0)
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                while self._puts:
                    await asyncio.sleep(LOOK_S)

    def _keep(self, function: str) -> None:
        """Call as many as are to be kept, and again before any of them would leave."""
        timer = self._timers.pop(function, None)
        if timer is not None:
            timer.cancel()
        kept, provisioned = self._pinged[function], self._provisioned.get(function, (0, 0))[0]
        if not kept and not provisioned:
            return
        if provisioned:
            self._put(function, provisioned)  # again: somebody else may have changed it
            self._pay(function)
        # Those that run are awake.
        wanted = kept - self._outpost.running[function]
        for _ in range(max(0, min(wanted, self._outpost.threads.free))):
            self.pings += 1
            done = partial(self._pinged_one, function, monotonic_ns())
            self._outpost.threads.do(partial(self._ping, function), done)
        every_s = self._platform.ping_every_ns / 1e9
        self._timers[function] = self._loop.call_later(every_s, self._keep, function)

    def _pinged_one(self, function: str, sent_ns: int, fate: Fate) -> None:
        if not isinstance(fate, Done):
            words = fate.words if isinstance(fate, Refused | Lost) else fate.reason
            self._outpost.warn(f"cannot keep {function} warm: {words}")
            return
        pool_id, away_ns = self._outpost.pool.id, monotonic_ns() - sent_ns
        is_billed_whole = fate.is_cold and self._platform.bills_start
        usd = self._platform.usd(away_ns if is_billed_whole else fate.took_ns)
        self._books.kept_warm(pool_id, function, usd)
        if fate.is_cold:
            self._started(function, max(0, away_ns - fate.took_ns))

    # --- provisioned ---------------------------------------------------------------------------

    def _set_provisioned(self, function: str, count: int) -> None:
        before = self._provisioned.get(function, (0, 0))[0]
        self._pay(function)
        if before != count:
            self._provisioned[function] = (count, monotonic_ns())
            if not count:
                self._put(function, 0)

    def _put(self, function: str, count: int) -> None:
        if self._outpost.threads.free:
            self._puts += 1
            self._outpost.threads.do(partial(self._provision, function, count), self._was_put)

    def _was_put(self, problem: str) -> None:
        self._puts -= 1
        if problem:
            self._outpost.warn(f"nothing is provisioned: {problem}")

    def _pay(self, function: str) -> None:
        """Account for what was provisioned until now."""
        count, since_ns = self._provisioned.get(function, (0, 0))
        if count:
            now_ns = monotonic_ns()
            rate = self._platform.provisioned_usd_per_gb_s * self._platform.gigabytes
            self._books.kept_warm(
                self._outpost.pool.id, function, count * rate * (now_ns - since_ns) / 1e9
            )
            self._provisioned[function] = (count, now_ns)
