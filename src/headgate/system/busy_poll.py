"""Busy polling: spinning instead of blocking while a single request is in flight.

A thread wake-up costs more than the rest of the path of a lone request. With several requests in
flight there is other work for the CPU and less to gain, so nothing spins. A gateway spins while it
waits for a worker, a worker while it waits for the next request.

Nothing spins unless every worker and every gateway has cores of its own. On the core of the process
that it waits for, a spinning process would delay that one for as long as it spins: with two workers
on two cores, that made an ensemble of three models take twice as long.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from time import monotonic_ns
from typing import Final, final

SPIN_NS: Final = 1_000_000  # beyond this wait, the cost of a wake-up is negligible
GAP_NS: Final = 500_000  # between lone requests, up to which it is worth to spin for the next


@final
class BusyPoll:
    """Keeps an event loop spinning for up to `SPIN_NS`, as long as `should_spin` returns true."""

    def __init__(self, loop: asyncio.AbstractEventLoop, should_spin: Callable[[], bool]) -> None:
        self._loop = loop
        self._should_spin = should_spin
        self._until_ns = 0
        self._is_spinning = False

    def extend(self, now_ns: int) -> None:
        """Spin until `SPIN_NS` after `now_ns`."""
        self._until_ns = now_ns + SPIN_NS
        if not self._is_spinning:
            self._is_spinning = True
            self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        if self._should_spin() and monotonic_ns() < self._until_ns:
            self._loop.call_soon(self._spin)
        else:
            self._is_spinning = False


@final
class BusyEpoll:
    """Waits on an `epoll`; spins first if the last wait was short."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._was_short = False

    def wait(self, until_ns: int | None, *, may_spin: bool) -> list[tuple[int, int]]:
        """Return what is ready; empty at `until_ns`. With `may_spin` a single request came last."""
        began_ns = monotonic_ns()
        if may_spin and self._was_short:
            end_ns = began_ns + GAP_NS if until_ns is None else min(began_ns + GAP_NS, until_ns)
            ready = self._epoll.poll(0)
            while not ready and monotonic_ns() < end_ns:
                ready = self._epoll.poll(0)
            if ready:
                return ready
        ready = self._block(until_ns)
        self._was_short = monotonic_ns() - began_ns < GAP_NS
        return ready

    def _block(self, until_ns: int | None) -> list[tuple[int, int]]:
        if until_ns is None:
            return self._epoll.poll()
        # `epoll` takes no timeout beyond 24 days, which an idle timeout may exceed; `select` does.
        select.select((self._epoll,), (), (), max(0, until_ns - monotonic_ns()) / 1e9)
        return self._epoll.poll(0)
