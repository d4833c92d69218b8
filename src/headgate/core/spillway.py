"""The spillway: the way out to a pool that is paid by the call, and what closes it.

One per serverless pool, behind every policy: a breaker that leaves a failing platform alone, a ramp
by which it is trusted again, and budgets that money cannot run past. Pure, like all of the core:
time is an argument, so what it did in a live incident can be replayed.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import MINUTE_NS
from headgate.core.lifecycle import BatchState
from headgate.core.model import Pool, Serverless

DAY_NS: Final = 24 * 60 * MINUTE_NS
_UNBOUNDED: Final = 1 << 62


class Breaker:
    """Whether a platform is trusted."""

    CLOSED: Final = 0  # the circuit: calls flow
    OPEN: Final = 1  # too many failed in a row: left alone
    TRYING: Final = 2  # a few at a time, twice as many with each that succeeds


BREAKER_NAMES: Final = ("closed", "open", "trying")


@final
class Spillway:
    """Counts what is out, what failed and what was spent."""

    def __init__(self, pool: Pool, platform: Serverless) -> None:
        self.pool = pool
        self.platform = platform
        self.breaker = Breaker.CLOSED
        self.in_flight = 0
        self.spent_usd = 0.0  # ever, as far as we can see it
        self._guard = pool.guard
        self._in_flight_max = _UNBOUNDED
        self._failures = 0  # in a row
        self._refusals = 0  # likewise, at different times
        self._rest_ns = pool.guard.rest_ns
        self._blocked_until_ns = 0
        self._minute = self._day = 0
        self._minute_usd = self._day_usd = 0.0

    def is_open(self, now_ns: int) -> bool:
        """Whether one more call may go out."""
        return now_ns >= self._blocked_until_ns and self.in_flight < self._in_flight_max

    @property
    def blocked_until_ns(self) -> int:
        """No call goes out before then; those that wait are told when the time has come."""
        return self._blocked_until_ns

    def block(self, until_ns: int) -> None:
        """Leave the platform alone until then."""
        self._blocked_until_ns = max(self._blocked_until_ns, until_ns)

    def sent(self, now_ns: int, expected_ns: int) -> None:
        """A call goes out; what it will probably cost counts as spent."""
        self.in_flight += 1
        self._spend(now_ns, self.platform.usd(expected_ns))

    def ended(self, now_ns: int, state: int, expected_ns: int, took_ns: int) -> None:
        """A call has come back, this way or that."""
        self.in_flight -= 1
        usd = 0.0 if state == BatchState.REFUSED else self.platform.usd(took_ns)
        self._spend(now_ns, usd - self.platform.usd(expected_ns))
        if state == BatchState.FINISHED:
            self._succeeded()
        elif state != BatchState.REFUSED:
            self._failed(now_ns)

    def refused(self, now_ns: int, backoff_ns: int, *, is_gone: bool) -> None:
        """A call never ran: leave the platform alone, twice as long each time in a row.

        One that is not even there has failed.
        """
        if is_gone:
            self._failed(now_ns)
        if now_ns < self._blocked_until_ns:
            return  # it was out already when another one was refused
        longest_ns = max(backoff_ns, self._guard.rest_ns)
        self.block(now_ns + min(backoff_ns << min(self._refusals, 30), longest_ns))
        self._refusals += 1

    def _succeeded(self) -> None:
        self._failures = 0
        self._refusals = 0
        if self.breaker == Breaker.CLOSED:
            return
        self._in_flight_max *= 2
        if self._in_flight_max >= self.platform.concurrency_max:
            self.breaker = Breaker.CLOSED
            self._in_flight_max = _UNBOUNDED
            self._rest_ns = self._guard.rest_ns

    def _failed(self, now_ns: int) -> None:
        self._failures += 1
        is_trusted = self.breaker == Breaker.CLOSED
        if is_trusted and self._failures < self._guard.failures_max:
            return
        if not is_trusted and now_ns < self._blocked_until_ns:
            return  # it was out already when the breaker opened
        self.breaker = Breaker.OPEN
        self._in_flight_max = 1
        self.block(now_ns + self._rest_ns)
        self._rest_ns = min(2 * self._rest_ns, self._guard.rest_max_ns)

    def rested(self, now_ns: int) -> None:
        """The time has come to try again, if it was the breaker that we waited for."""
        if self.breaker == Breaker.OPEN and now_ns >= self._blocked_until_ns:
            self.breaker = Breaker.TRYING

    def _spend(self, now_ns: int, usd: float) -> None:
        self.spent_usd += usd
        minute, day = now_ns // MINUTE_NS, now_ns // DAY_NS
        if minute != self._minute:
            self._minute, self._minute_usd = minute, 0.0
        if day != self._day:
            self._day, self._day_usd = day, 0.0
        self._minute_usd += usd
        self._day_usd += usd
        if self._day_usd >= self._guard.usd_per_day:
            self.block((day + 1) * DAY_NS)
        elif self._minute_usd >= self._guard.usd_per_minute:
            self.block((minute + 1) * MINUTE_NS)
