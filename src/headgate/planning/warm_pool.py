"""How many instances of a function a platform has ready, as far as its client can tell.

Platforms do not say. But they use the instance that was used last, let one go that nobody has
called for a while, and keep what we asked them to keep; so whoever sends all the calls can follow.
"""

from __future__ import annotations

from typing import final

from headgate.core.model import FaasPlatform


@final
class WarmPoolEstimate:
    """Follows the instances of one function on one platform. All of it O(1), amortised."""

    def __init__(self, platform: FaasPlatform, start_ns: int) -> None:
        self._keep_alive_ns = platform.keep_alive_ns
        self._start_ns = start_ns
        self._provision_ns = platform.provisioning_ns
        self._idle_since_ns: list[int] = []  # a stack: the last is used first
        self._busy = 0
        self.kept = 0  # as many as were asked for
        self._up = 0  # so many of those are there,
        self._waking: list[tuple[int, int]] = []  # and from when on how many, the soonest first

    @property
    def busy(self) -> int:
        """Calls that are out."""
        return self._busy

    def keep(self, now_ns: int, count: int, *, is_provisioned: bool = False) -> None:
        """So many are to be kept ready from now on; those that are not there yet take a while."""
        ready_ns = self._provision_ns if is_provisioned else self._start_ns
        there = self.there(now_ns)
        self.kept = count
        if count <= there:
            self._up, self._waking = count, []
            return
        self._waking = [(at_ns, min(up, count)) for at_ns, up in self._waking]
        if not self._waking or self._waking[-1][1] < count:
            self._waking.append((now_ns + ready_ns, count))

    def is_waking(self, now_ns: int) -> bool:
        """Whether more are on their way because we asked."""
        return self.wakes_ns(now_ns) is not None

    def wakes_ns(self, now_ns: int) -> int | None:
        """When the next of those will be there."""
        self._wake(now_ns)
        return self._waking[0][0] if self._waking else None

    def there(self, now_ns: int) -> int:
        """How many instances there are, busy or not."""
        self._forget(now_ns)
        self._wake(now_ns)
        return max(self._busy + len(self._idle_since_ns), self._up)

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

    def _wake(self, now_ns: int) -> None:
        while self._waking and self._waking[0][0] <= now_ns:
            self._up = self._waking.pop(0)[1]

    def _forget(self, now_ns: int) -> None:
        idle = self._idle_since_ns
        gone = 0
        while gone < len(idle) and now_ns - idle[gone] >= self._keep_alive_ns:
            gone += 1
        if gone:
            del idle[:gone]
