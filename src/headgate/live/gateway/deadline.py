"""The timer with which a front end answers a call at its deadline.

The runtime may be running the call at that moment, so that nobody else would answer in time.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Handle
from collections.abc import Callable
from typing import final

_MILLISECOND_NS = 1_000_000


@final
class DeadlineTimer:
    """Calls `expire` once a deadline has passed, unless it is cancelled.

    The clock of an event loop counts whole milliseconds and rounds: without two of them more, a
    client would be told that its deadline has passed before it has. And a loop runs its timers
    before the callbacks that are ready, such as the one that has the Scheduler decide about what
    has arrived: `expire` comes after these, because a request that is refused has not expired.
    """

    __slots__ = ("_expire", "_handle", "_loop")

    def __init__(self, loop: AbstractEventLoop, left_ns: int, expire: Callable[[], None]) -> None:
        self._loop = loop
        self._expire = expire
        delay_ms = max(0, left_ns) // _MILLISECOND_NS + 2
        self._handle: Handle = loop.call_later(delay_ms * 1e-3, self._fire)

    def _fire(self) -> None:
        self._handle = self._loop.call_soon(self._expire)

    def cancel(self) -> None:
        self._handle.cancel()
