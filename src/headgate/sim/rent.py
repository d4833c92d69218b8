"""The rent of a node that is ours only while it holds something."""

from __future__ import annotations

from typing import final

from headgate.core.model import Pool


@final
class Rent:
    """When the node was taken, whether it has booted, and how long it was paid for."""

    def __init__(self, pool: Pool) -> None:
        self._boot_ns = pool.boot_ns
        self._first_ns = pool.network_ns  # when what was ordered at once gets here
        self._since_ns: int | None = None
        self._booted_ns = 0
        self._paid_ns = 0

    def begin(self, now_ns: int) -> None:
        """Take the node, unless it is taken.

        What is ordered in the very first moment is there already: a run begins in the middle of
        things.
        """
        if self._since_ns is None:
            self._since_ns = now_ns
            self._booted_ns = now_ns + (0 if self._is_beginning(now_ns) else self._boot_ns)

    def ready_after_ns(self, now_ns: int, start_ns: int) -> int:
        """How long a start takes that is begun now."""
        if self._is_beginning(now_ns):
            return 0
        return max(0, self._booted_ns - now_ns) + start_ns

    def _is_beginning(self, now_ns: int) -> bool:
        return now_ns <= self._first_ns

    def end(self, now_ns: int) -> None:
        """Give the node back."""
        if self._since_ns is not None:
            self._paid_ns += now_ns - self._since_ns
            self._since_ns = None

    def paid_ns(self, end_ns: int) -> int:
        """How long it was paid for, up to the end of the run."""
        return self._paid_ns + (0 if self._since_ns is None else end_ns - self._since_ns)
