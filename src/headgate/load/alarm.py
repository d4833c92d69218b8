"""Wakes the event loop at an instant, to some microseconds.

The timers of event loops count whole milliseconds, which is more than many an answer takes. The
kernel's own (timerfd) count nanoseconds and are a descriptor like any other.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from time import CLOCK_MONOTONIC
from typing import Final

from headgate.core.clock import SECOND_NS

_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME


class _Spec(ctypes.Structure):
    """`struct itimerspec`: every how often, and when first."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Alarm:
    """Calls `ring` once for each `set`; a later `set` replaces an earlier one. Linux only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._spec = _Spec()
        self._ring = ring
        self._loop = loop
        self._fd: int = libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._on_readable)

    def set(self, at_ns: int) -> None:
        """Ring at this instant of the monotonic clock; at once if it is past."""
        spec = self._spec
        # Zero would disarm the timer, and so would never ring.
        spec.at_s, spec.at_ns = divmod(max(at_ns, 1), SECOND_NS)
        self._settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_readable(self) -> None:
        with suppress(BlockingIOError):  # set anew between its ringing and now
            os.read(self._fd, 8)
            self._ring()
