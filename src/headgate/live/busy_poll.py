"""A vigil: staying awake a moment for an answer that is about to come.

To sleep and be woken costs a lone request more than everything else that is done for it here. Among
many requests there is always something else to do, and then there is no vigil.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Final, final

SPIN_NS: Final = 1_000_000  # longer than that, being woken is little beside the waiting


@final
class BusyPoll:
    """Keeps an event loop turning, while `should_spin` and for a moment only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, should_spin: Callable[[], bool]) -> None:
        self._loop = loop
        self._should_spin = should_spin
        self._until_ns = 0
        self._is_spinning = False

    def extend(self, now_ns: int) -> None:
        """Stay awake from now on."""
        self._until_ns = now_ns + SPIN_NS
        if not self._is_spinning:
            self._is_spinning = True
            self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        if self._should_spin() and monotonic_ns() < self._until_ns:
            self._loop.call_soon(self._spin)
        else:
            self._is_spinning = False
