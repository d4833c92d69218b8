"""The highest rate that earlier seasons let one expect while a node is set up.

Nothing in the arrivals announces a step, but one that comes every hour was seen before. Levels of
the rate are kept by the second and by the set-up time, and in both a period is looked for
(`find_period`). Two seasons are enough. Levels correlate by chance, too, so a period is tried on
what is kept: what would the season before have been worth as a forecast? The rate rose within
set-up times by so much, for so long. The season before had a part of that; and it was higher at
other times, in vain. A period counts if that part is more than the rest and what was in vain.

Then the forecast is the highest level that the season before had from this phase on until a node
that is started now is ready. It is a maximum because a node that comes too early costs its rent for
a while, and one that comes too late costs promises. It is never above what the last season had.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.planning.forecast import find_period

# Steps that are kept: periods of up to half of that are known, 8 minutes by the second. Longer
# steps than the set-up time would have nodes wait for longer than it takes to set them up.
_KEPT: Final = 1024
_SEARCHES: Final = 16  # while all levels that are kept are replaced
_SEASONS: Final = 2


@final
class Recurrence:
    """What recurs in the level of a rate, looking `ahead_ns` ahead. Amortised O(levels kept)."""

    def __init__(self, ahead_ns: int) -> None:
        self._ahead_ns = ahead_ns
        steps_ns = sorted({SECOND_NS, max(SECOND_NS, ahead_ns)})
        self._scales = [Seasons(step_ns, ahead_ns) for step_ns in steps_ns]
        self._recent: deque[tuple[int, float]] = deque()  # time and level, of the last `ahead_ns`

    def observe(self, now_ns: int, level: float) -> None:
        """Record the present level."""
        recent = self._recent
        recent.append((now_ns, level))
        while len(recent) > 1 and recent[1][0] <= now_ns - self._ahead_ns:
            recent.popleft()
        for scale in self._scales:
            scale.observe(now_ns, level, recent[0][1])

    def highest_ahead(self) -> float:
        """The highest level that is expected until `ahead_ns` from now; 0 if nothing recurs.

        The finest scale that knows a period counts: it knows best when a step comes.
        """
        return next((s.highest_ahead() for s in self._scales if s.has_period), 0.0)


@final
class Seasons:
    """The levels of a rate in steps of time, the highest of each, and their period if any.

    >>> seasons = Seasons(step_ns=1, ahead_ns=2)
    >>> for now_ns in range(26):
    ...     is_high, was_high = now_ns % 10 >= 7, (now_ns - 2) % 10 >= 7
    ...     seasons.observe(now_ns, 9.0 if is_high else 1.0, 9.0 if was_high else 1.0)
    >>> seasons.highest_ahead()  # at 25, of 25 to 27
    9.0
    """

    def __init__(self, step_ns: int, ahead_ns: int) -> None:
        self._step_ns = step_ns
        self._ahead_ns = ahead_ns
        # Of complete steps: the highest level, the mean, and the lowest of `ahead_ns` before.
        self._highest: list[float] = []
        self._means: list[float] = []
        self._lowest: list[float] = []
        self._levels: list[float] = []  # of the present step
        self._before: list[float] = []
        self._ends_ns: int | None = None  # the present step
        self._period: int | None = None  # in steps, if what recurs is worth knowing
        self._until_search = 0  # steps

    @property
    def has_period(self) -> bool:
        """Whether something recurs."""
        return self._period is not None

    def observe(self, now_ns: int, level: float, before: float) -> None:
        """Record the present level, and that of `ahead_ns` before: of all steps since the last."""
        if self._ends_ns is None:
            self._ends_ns = now_ns + self._step_ns
        while now_ns >= self._ends_ns:
            self._ends_ns += self._step_ns
            self._complete_step(level, before)
            self._levels, self._before = [], []
        self._levels.append(level)
        self._before.append(before)

    def _complete_step(self, level: float, before: float) -> None:
        """Keep a step, which had the present level if none was seen in it."""
        levels = self._levels or [level]
        self._highest.append(max(levels))
        self._means.append(sum(levels) / len(levels))
        self._lowest.append(min(self._before, default=before))
        highest = self._highest
        if len(highest) > _KEPT + _KEPT // _SEARCHES:
            for kept in (highest, self._means, self._lowest):
                del kept[:-_KEPT]
        self._until_search -= 1
        if self._until_search < 0:
            self._until_search = len(highest) // _SEARCHES
            period = find_period(highest, seasons=_SEASONS)
            self._period = period if period and self._is_worth_it(period) else None

    def _is_worth_it(self, period: int) -> bool:
        """Whether the season before would have avoided more than it would have held in vain.

        When something recurs is known to a step, so the neighbours of a step count as well.
        """
        levels, short_ns = self._highest, min(self._ahead_ns, self._step_ns)
        risen = avoided = in_vain = 0.0
        for now in range(period + 1, len(levels)):
            near = levels[now - period - 1 : now - period + 2]
            risen += max(0.0, levels[now] - self._lowest[now]) * short_ns
            avoided += max(0.0, min(levels[now], max(near)) - self._lowest[now]) * short_ns
            in_vain += max(0.0, min(near) - self._means[now]) * self._step_ns
        return avoided > in_vain + (risen - avoided)

    def highest_ahead(self) -> float:
        """The highest level of the season before, from this phase on; 0 if nothing recurs."""
        if self._period is None:
            return 0.0
        begin = len(self._highest) - self._period
        ahead = -(-self._ahead_ns // self._step_ns)
        return max(self._highest[begin : begin + ahead + 1])
