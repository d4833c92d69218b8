"""Busy polling: spin the event loop instead of blocking while a single request is in flight.

A thread wake-up costs more than the rest of the path of a lone request, so the loop spins for up to
`SPIN_NS`. With several requests in flight the loop has work to do anyway, and it does not spin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Final, final

SPIN_NS: Final = 1_000_000  # beyond this wait, the cost of a wake-up is negligible


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
