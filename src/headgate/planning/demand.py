"""How much work is being asked for, in Erlangs: the number of places it would keep busy."""

from __future__ import annotations

from math import exp
from typing import final


@final
class OfferedLoad:
    """Work per time of what was offered lately; the past fades with time constant `memory_ns`.

    It counts what arrives, not what is finished: under overload, completions tell of capacity and
    nothing of demand. `prior_ns` of quiet time is taken for granted at the beginning, so that the
    first few arrivals are not read as a flood.

    >>> load = OfferedLoad(memory_ns=1_000_000, prior_ns=0)
    >>> for at_ns in range(0, 1_000_000, 100):
    ...     load.offer(at_ns, work_ns=160)
    >>> round(load.erlangs(1_000_000), 1)
    1.6
    """

    def __init__(self, memory_ns: int, prior_ns: int) -> None:
        self._memory_ns = memory_ns
        self._prior_ns = prior_ns
        self._work_ns = 0.0
        self._since_ns: int | None = None
        self._updated_ns = 0

    def offer(self, now_ns: int, work_ns: float) -> None:
        """Something has arrived that takes so long. O(1)."""
        if self._since_ns is None:
            self._since_ns = now_ns
        else:
            self._work_ns *= exp((self._updated_ns - now_ns) / self._memory_ns)
        self._updated_ns = now_ns
        self._work_ns += work_ns

    def erlangs(self, now_ns: int) -> float:
        """The load as of now. O(1)."""
        if self._since_ns is None:
            return 0.0
        faded = self._work_ns * exp((self._updated_ns - now_ns) / self._memory_ns)
        seen_ns = self._memory_ns * (1.0 - exp((self._since_ns - now_ns) / self._memory_ns))
        return faded / (seen_ns + self._prior_ns) if seen_ns + self._prior_ns > 0 else 0.0
