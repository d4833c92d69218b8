"""Busy polling: the event loop spins for a bounded time, and only while it should."""

from __future__ import annotations

import asyncio
from time import monotonic_ns

from headgate.live import busy_poll
from headgate.live.busy_poll import BusyPoll


async def _spins(should_spin: list[bool], *, extensions: int = 1) -> int:
    """Return how often the loop asks whether to spin, with these answers in turn."""
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return asked <= len(should_spin) and should_spin[asked - 1]

    poll = BusyPoll(asyncio.get_running_loop(), ask)
    for _ in range(extensions):
        poll.extend(monotonic_ns() + 10**12)  # far away: the answers alone end it
    for _ in range(len(should_spin) + 5):
        await asyncio.sleep(0)
    return asked


def test_it_spins_while_it_should() -> None:
    assert asyncio.run(_spins([True, True, True, False])) == 4


def test_it_does_not_spin_if_it_should_not() -> None:
    assert asyncio.run(_spins([False])) == 1


def test_extending_it_does_not_spin_twice() -> None:
    assert asyncio.run(_spins([True, True, False], extensions=3)) == 3


def test_it_ends_by_itself() -> None:
    """It has been extended so long ago that its time is over."""

    async def scenario() -> int:
        asked = 0

        def ask() -> bool:
            nonlocal asked
            asked += 1
            return True

        BusyPoll(asyncio.get_running_loop(), ask).extend(monotonic_ns() - 2 * busy_poll.SPIN_NS)
        for _ in range(5):
            await asyncio.sleep(0)
        return asked

    assert asyncio.run(scenario()) == 1
