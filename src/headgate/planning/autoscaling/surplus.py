"""Which instances beyond those wanted stay for a while, where gateways plan for the same pool.

Each gateway forecasts the whole load from its own part of it, so by chance one wants more than
another. To stop what another one wants costs a set-up. So a few surplus instances stay until they
were not wanted for several times that long, and then go one after the other. None goes while the
last few seconds alone would need it: others may have noticed a rise already. Those that stand from
the start were wanted by no forecast: what no gateway can want by chance goes at once.
"""

from __future__ import annotations

from math import ceil
from typing import final

from headgate.planning.constants import SURPLUS, SURPLUS_SETUPS


@final
class SurplusInstances:
    """The surplus instances of one variant in one pool."""

    def __init__(self, setup_ns: int) -> None:
        self._setup_ns = setup_ns
        self._present: int | None = None
        self._since_ns = 0  # from when on there are so many, and too many
        self._has_gone = False  # one of those that stood from the start
        self._were_started = False  # some since then

    def to_keep(self, now_ns: int, wanted: int, present: int, most: int, recent: int) -> int:
        """How many instances to have now: those wanted, and the surplus that stays.

        `most` is what another gateway may want, `recent` what the last seconds alone would need.
        """
        before = present if self._present is None else self._present
        self._has_gone = self._has_gone or present < before
        self._were_started = self._were_started or (self._has_gone and present > before)
        if present <= wanted or present != self._present:
            self._since_ns = now_ns  # another gateway may have stopped or started one just now
        self._present = present
        if present <= max(wanted, recent):
            return max(wanted, present)
        few = ceil(SURPLUS * wanted) + 1 if self._were_started else max(wanted, most)
        is_old = now_ns - self._since_ns >= SURPLUS_SETUPS * self._setup_ns
        return min(present - 1 if is_old else present, max(few, recent))
