"""A bucket of tokens: so many at once, and so many per second after that."""

from __future__ import annotations

from typing import final


@final
class Bucket:
    """Holds at most `burst` tokens and gets `per_s` of them every second.

    >>> bucket = Bucket(burst=2, per_s=10, now_s=0.0)
    >>> [bucket.take(0.0) for _ in range(3)]
    [0.0, 0.0, 0.1]
    >>> bucket.take(0.1)
    0.0
    """

    def __init__(self, *, burst: float, per_s: float, now_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take a token and return 0, or return how long it will be until there is one."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._tokens >= 1 - 1e-9:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s
