"""Estimate of the warm instances that a FaaS platform has of one function.

Platforms do not report this. But a platform reuses the most recently used instance, removes an
instance that has been idle for its keep-alive, and keeps warm what it was ordered to keep warm. So
a client that sends all the calls can compute the number.
"""

from __future__ import annotations

from typing import final

from headgate.core.model import FaasPlatform


@final
class WarmPoolEstimate:
    """Tracks the instances of one function on one platform. Every method is O(1) amortised."""

    def __init__(self, platform: FaasPlatform, start_ns: int) -> None:
        self._keep_alive_ns = platform.keep_alive_ns
        self._start_ns = start_ns
        self._provisioning_ns = platform.provisioning_ns
        self._idle_since_ns: list[int] = []  # a stack: the most recently used instance is last
        self._busy = 0
        self.desired = 0  # warm instances requested
        self._ready = 0  # of those, started
        # (ready at, ready count from then on), earliest first.
        self._starting: list[tuple[int, int]] = []

    @property
    def busy(self) -> int:
        """Calls in flight."""
        return self._busy

    def set_desired(self, now_ns: int, count: int, *, is_provisioned: bool = False) -> None:
        """Set how many instances the platform keeps warm from now on; new ones take time."""
        ready_in_ns = self._provisioning_ns if is_provisioned else self._start_ns
        size = self.size(now_ns)
        self.desired = count
        if count <= size:
            self._ready, self._starting = count, []
            return
        self._starting = [(at_ns, min(ready, count)) for at_ns, ready in self._starting]
        if not self._starting or self._starting[-1][1] < count:
            self._starting.append((now_ns + ready_in_ns, count))

    def is_starting(self, now_ns: int) -> bool:
        """Whether requested instances are still starting."""
        return self.next_ready_ns(now_ns) is not None

    def next_ready_ns(self, now_ns: int) -> int | None:
        """When the next requested instance is ready; None if none is starting."""
        self._mark_started(now_ns)
        return self._starting[0][0] if self._starting else None

    def size(self, now_ns: int) -> int:
        """Number of instances, busy or idle."""
        self._expire_idle(now_ns)
        self._mark_started(now_ns)
        return max(self._busy + len(self._idle_since_ns), self._ready)

    def idle(self, now_ns: int) -> int:
        """Number of idle warm instances."""
        return self.size(now_ns) - self._busy

    def on_call(self, now_ns: int) -> None:
        """Record a call that is sent."""
        self._expire_idle(now_ns)
        if self._idle_since_ns:
            self._idle_since_ns.pop()
        self._busy += 1

    def on_return(self, now_ns: int, *, ran: bool) -> None:
        """Record the end of a call; if it ran, its instance is warm now."""
        self._busy -= 1
        if ran:
            self._idle_since_ns.append(now_ns)

    def _mark_started(self, now_ns: int) -> None:
        while self._starting and self._starting[0][0] <= now_ns:
            self._ready = self._starting.pop(0)[1]

    def _expire_idle(self, now_ns: int) -> None:
        idle = self._idle_since_ns
        expired = 0
        while expired < len(idle) and now_ns - idle[expired] >= self._keep_alive_ns:
            expired += 1
        if expired:
            del idle[:expired]
