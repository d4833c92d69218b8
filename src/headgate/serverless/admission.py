"""Who may run now: concurrency of the account and of functions, and how fast both may grow."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import final

from headgate.serverless.bucket import Bucket
from headgate.serverless.errors import Throttled, invalid
from headgate.serverless.function import Function
from headgate.serverless.settings import Settings


@final
class Admission:
    """Counts what runs, and refuses what is too much.

    A function with reserved concurrency has that much to itself and no more; all others share
    what reservations leave. Provisioned instances count whether they run or not.
    """

    def __init__(
        self,
        settings: Settings,
        functions: Mapping[str, Function],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._functions = functions
        self._clock_s = clock_s
        self._running: Counter[str] = Counter()
        self._growth: dict[str, Bucket] = {}
        self._rates: dict[str, tuple[int, Bucket]] = {}

    def running(self, name: str) -> int:
        """How many calls of a function are under way."""
        return self._running[name]

    def enter(self, function: Function) -> None:
        """Let a call in; `leave` must follow. Raises `Throttled`."""
        name, reserved = function.name, function.reserved
        if reserved is not None:
            if self._running[name] >= reserved:
                raise Throttled("ReservedFunctionConcurrentInvocationLimitExceeded")
        elif self._is_account_full(name):
            raise Throttled("ConcurrentInvocationLimitExceeded")
        self._check_rate(name, reserved)
        self._running[name] += 1

    def leave(self, name: str) -> None:
        """A call has ended."""
        self._running[name] -= 1

    def grow(self, function: Function) -> None:
        """Let a function have one more instance. Raises `Throttled`."""
        now_s = self._clock_s()
        bucket = self._growth.get(function.name)
        if bucket is None:
            burst, per_s = self._settings.scaling_burst, self._settings.scaling_per_s
            bucket = self._growth[function.name] = Bucket(burst=burst, per_s=per_s, now_s=now_s)
        self._refuse_for(bucket.take(now_s), is_reserved=function.reserved is not None)

    def check_reservation(self, function: Function, count: int) -> None:
        """Refuse a reservation that leaves too little to all others."""
        others = sum(f.reserved or 0 for f in self._functions.values() if f is not function)
        least = int(self._settings.concurrency * self._settings.unreserved_share_min)
        if others + count > self._settings.concurrency - least:
            raise invalid(
                "Specified ReservedConcurrentExecutions for function decreases account's "
                f"UnreservedConcurrentExecution below its minimum value of [{least}]."
            )

    def unreserved(self) -> int:
        """What reservations leave."""
        reserved = sum(f.reserved or 0 for f in self._functions.values())
        return self._settings.concurrency - reserved

    def forget(self, name: str) -> None:
        """A function is gone; what still runs of it goes on and is counted."""
        self._growth.pop(name, None)
        self._rates.pop(name, None)

    def _is_account_full(self, name: str) -> bool:
        """Whether one more call of an unreserved function is too much."""
        used = 0
        for each, function in self._functions.items():
            if function.reserved is None:
                running = self._running[each] + (each == name)
                used += max(running, sum(function.provisioned.values()))
        return used > self.unreserved()

    def _check_rate(self, name: str, reserved: int | None) -> None:
        per_concurrency = self._settings.requests_per_concurrency
        if not per_concurrency:
            return
        # Those that share their concurrency share its rate as well, under a name nobody can have.
        key = "" if reserved is None else name
        concurrency = self._settings.concurrency if reserved is None else reserved
        now_s = self._clock_s()
        known = self._rates.get(key)
        if known is None or known[0] != concurrency:
            per_s = max(1.0, per_concurrency * concurrency)
            known = (concurrency, Bucket(burst=per_s, per_s=per_s, now_s=now_s))
            self._rates[key] = known
        self._refuse_for(known[1].take(now_s), is_reserved=reserved is not None)

    def _refuse_for(self, wait_s: float, *, is_reserved: bool) -> None:
        if wait_s > 0 and is_reserved:
            raise Throttled("ReservedFunctionInvocationRateLimitExceeded", wait_s=wait_s)
        if wait_s > 0:
            raise Throttled("FunctionInvocationRateLimitExceeded", wait_s=wait_s)
