"""A token bucket: the rate limit of tenants, of cold starts, and of the Lambda emulator."""

from __future__ import annotations

from typing import final

from headgate.core.clock import SECOND_NS


@final
class TokenBucket:
    """Holds at most `size` tokens, is refilled at `per_s` tokens per second, and begins full.

    >>> bucket = TokenBucket(2.0, 10.0)
    >>> [bucket.take(0) for _ in range(3)]
    [0, 0, 100000001]
    >>> bucket.take(100_000_000)
    0
    """

    def __init__(self, size: float, per_s: float) -> None:
        self._size = size
        self._per_s = per_s
        self._tokens = size
        self._refilled_ns = 0

    def resize(self, now_ns: int, size: float, per_s: float) -> None:
        """Change size and rate from now on; the bucket stays as full as it is.

        >>> bucket = TokenBucket(4.0, 1.0)
        >>> [bucket.take(0) for _ in range(3)]
        [0, 0, 0]
        >>> bucket.resize(0, 8.0, 2.0)
        >>> [bucket.take(0) for _ in range(3)]
        [0, 0, 500000001]
        """
        self.refill(now_ns)
        self._tokens *= size / self._size
        self._size = size
        self._per_s = per_s

    def refill(self, now_ns: int) -> bool:
        """Add the tokens since the last call. Returns whether there is one to take."""
        elapsed_s = (now_ns - self._refilled_ns) / 1e9
        self._tokens = min(self._size, self._tokens + elapsed_s * self._per_s)
        self._refilled_ns = now_ns
        return self._tokens >= 1.0

    def take(self, now_ns: int) -> int:
        """Take a token and return 0, or return the time until there is one."""
        if self.refill(now_ns):
            self._tokens -= 1.0
            return 0
        # One nanosecond more than needed: rounding must not leave a client short of its token.
        return int((1.0 - self._tokens) / self._per_s * SECOND_NS) + 1

    def take_refilled(self) -> None:
        """Take a token that `refill` has found."""
        self._tokens -= 1.0

    def give_back(self) -> None:
        """Put a token back that was taken and not used."""
        self._tokens = min(self._size, self._tokens + 1.0)
