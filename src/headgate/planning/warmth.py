"""How many instances of a function a platform has ready, as far as its client can tell.

Platforms do not say. But they use the instance that was used last, let one go that nobody has
called for a while, and keep what we asked them to keep; so whoever sends all the calls can follow.
"""

from __future__ import annotations

from typing import final

from headgate.core.model import Serverless


@final
class Warmth:
    """Follows the instances of one function on one platform. All of it O(1), amortised."""

    def __init__(self, platform: Serverless, start_ns: int) -> None:
        self._keep_alive_ns = platform.keep_alive_ns
        self._start_ns = start_ns
        self._idle_since_ns: list[int] = []  # a stack: the last is used first
        self._busy = 0
        self.kept = 0  # as many as were asked for,
        self._kept_from_ns = 0  # and when the last of those will be there

    @property
    def busy(self) -> int:
        """Calls that are out."""
        return self._busy

    def keep(self, now_ns: int, count: int) -> None:
        """So many are to be kept ready from now on."""
        if count > self.there(now_ns):
            self._kept_from_ns = now_ns + self._start_ns
        self.kept = count

    def is_waking(self, now_ns: int) -> bool:
        """Whether more are on their way because we asked."""
        return now_ns < self._kept_from_ns

    def there(self, now_ns: int) -> int:
        """How many instances there are, busy or not."""
        self._forget(now_ns)
        known = self._busy + len(self._idle_since_ns)
        return known if self.is_waking(now_ns) else max(known, self.kept)

    def idle(self, now_ns: int) -> int:
        """How many wait for a call."""
        return self.there(now_ns) - self._busy

    def called(self, now_ns: int) -> None:
        """A call goes out."""
        self._forget(now_ns)
        if self._idle_since_ns:
            self._idle_since_ns.pop()
        self._busy += 1

    def returned(self, now_ns: int, *, ran: bool) -> None:
        """A call has ended; where it ran, there is an instance now."""
        self._busy -= 1
        if ran:
            self._idle_since_ns.append(now_ns)

    def _forget(self, now_ns: int) -> None:
        idle = self._idle_since_ns
        gone = 0
        while gone < len(idle) and now_ns - idle[gone] >= self._keep_alive_ns:
            gone += 1
        if gone:
            del idle[:gone]
