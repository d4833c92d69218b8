"""Busy polling: the event loop spins for a bounded time, and only while it should."""

from __future__ import annotations

import asyncio
import os
import select
from time import monotonic_ns

import pytest

from headgate.system import busy_poll
from headgate.system.busy_poll import BusyEpoll, BusyPoll

NOW_NS = 10**15


async def _spins(
    should_spin: list[bool], *, gap_ns: int = 0, took_ns: int = 0, batches: int = 1
) -> int:
    """Return how often the loop asks whether to spin, with these answers in turn.

    The last batch took so long and was answered so long ago. The clock of the test is ahead of the
    real one, so that the answers alone end it.
    """
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return asked <= len(should_spin) and should_spin[asked - 1]

    poll = BusyPoll(asyncio.get_running_loop(), ask)
    now_ns = monotonic_ns() + NOW_NS
    poll.sent(now_ns)
    poll.answered(now_ns + took_ns)
    for _ in range(batches):
        poll.sent(now_ns + took_ns + gap_ns)
    for _ in range(len(should_spin) + 5):
        await asyncio.sleep(0)
    return asked


def test_it_spins_while_it_should() -> None:
    assert asyncio.run(_spins([True, True, True, False])) == 4


def test_it_does_not_spin_if_it_should_not() -> None:
    assert asyncio.run(_spins([False])) == 1


def test_a_second_batch_does_not_make_it_spin_twice() -> None:
    assert asyncio.run(_spins([True, True, False], batches=3)) == 3


def test_it_spins_for_a_request_right_after_the_last_one() -> None:
    assert asyncio.run(_spins([True, False], gap_ns=busy_poll.GAP_NS)) == 2
    assert asyncio.run(_spins([True, False], gap_ns=busy_poll.GAP_NS + 1)) == 0


def test_it_spins_for_answers_that_come_soon() -> None:
    assert asyncio.run(_spins([True, False], took_ns=busy_poll.SPIN_NS)) == 2
    assert asyncio.run(_spins([True, False], took_ns=busy_poll.SPIN_NS + 1)) == 0


def test_it_does_not_spin_for_the_first_request() -> None:
    async def scenario() -> None:
        poll = BusyPoll(asyncio.get_running_loop(), lambda: pytest.fail("it spins"))
        poll.sent(monotonic_ns())
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_it_ends_by_itself() -> None:
    """The batch was sent so long ago that its time is over."""

    async def scenario() -> int:
        asked = 0

        def ask() -> bool:
            nonlocal asked
            asked += 1
            return True

        poll = BusyPoll(asyncio.get_running_loop(), ask)
        sent_ns = monotonic_ns() - 2 * busy_poll.SPIN_NS
        poll.sent(sent_ns)
        poll.answered(sent_ns)
        poll.sent(sent_ns)
        for _ in range(5):
            await asyncio.sleep(0)
        return asked

    assert asyncio.run(scenario()) == 1


class CountingEpoll:
    """An `epoll` of one pipe that counts polls and becomes readable at one of them."""

    def __init__(self, readable_at: int) -> None:
        self.polls = self.blocked = 0
        self._readable_at = readable_at

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self.polls += 1
        self.blocked += timeout is None
        return [(7, 1)] if timeout is None or self.polls == self._readable_at else []


def test_epoll_spins_only_for_lone_requests_in_quick_succession() -> None:
    epoll = CountingEpoll(readable_at=5)
    busy = BusyEpoll(epoll)  # type: ignore[arg-type]
    assert busy.wait(None, may_spin=True) == [(7, 1)]
    assert (epoll.polls, epoll.blocked) == (1, 1)  # the first wait blocks
    busy._was_short = True  # however busy this machine is
    assert busy.wait(None, may_spin=True) == [(7, 1)]
    assert (epoll.polls, epoll.blocked) == (5, 1)  # it spun
    busy._was_short = True
    assert busy.wait(None, may_spin=False) == [(7, 1)]
    assert epoll.blocked == 2


def test_epoll_wakes_at_its_time() -> None:
    reader, writer = os.pipe()
    with select.epoll() as epoll:
        epoll.register(reader, select.EPOLLIN)
        busy = BusyEpoll(epoll)
        assert busy.wait(monotonic_ns() - 1, may_spin=True) == []
        os.write(writer, b".")
        assert busy.wait(monotonic_ns() + 10**17, may_spin=True) == [(reader, select.EPOLLIN)]
    os.close(reader)
    os.close(writer)
