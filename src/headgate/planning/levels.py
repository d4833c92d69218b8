"""How many nodes to rent, beside a platform that takes what they cannot, at a price per call.

Demand is cut into levels: the first node would take as much as one node can, the second what is
above that, and so on. For each level there are two ways to serve it, renting a node or paying by
the call, and it costs a boot to go from the second to the first. When to change over is an old
question with an old answer: when what the other way would have saved since it last looked bad
exceeds a certain part of what changing costs. To take a node, that part is small where arrivals are
steady, because then a rise is news; where they come in bursts, it grows with how bursty they are.
To give a node back it is small, too, unless it was missed soon after the last time.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.planning.dispersion import Dispersion

_OFF: Final = 0
_BOOTING: Final = 1
_ON: Final = 2

# Regret, in boots, before a node is taken where arrivals are steady, and before it is given back.
_START: Final = 0.15
_STOP: Final = 0.25
_STOP_MAX: Final = 4.0
_LEARNT: Final = 4.0  # by so much more, if it was missed
_MISSED_NS: Final = 15 * MINUTE_NS  # within so long
_WINDOW_NS: Final = 5 * SECOND_NS


@final
class Level:
    """What one more node would be used for, and whether it is worth having."""

    __slots__ = (
        "_boots_until_ns",
        "_given_back_ns",
        "_regret_usd",
        "_state",
        "_stop",
        "calls",
        "free_ns",
    )

    def __init__(self, *, is_on: bool) -> None:
        self.calls = 0  # of late: what the node would have taken
        self.free_ns = 0.0  # when the node would be free
        self._state = _ON if is_on else _OFF
        self._regret_usd = 0.0  # since the other way last looked bad
        self._boots_until_ns = 0
        self._given_back_ns = -_MISSED_NS
        self._stop = _STOP

    @property
    def is_wanted(self) -> bool:
        """Whether to have the node."""
        return self._state != _OFF

    def weigh(self, saved_usd: float, rent_usd: float, boot_usd: float, burstiness: float) -> bool:
        """A while has passed in which the node would have saved so much: whether to change over."""
        if self._state == _BOOTING:
            return False
        gained_usd = rent_usd - saved_usd if self._state == _ON else saved_usd - rent_usd
        self._regret_usd = max(0.0, self._regret_usd + gained_usd)
        part = self._stop if self._state == _ON else _START * burstiness
        return self._regret_usd > part * boot_usd

    def change(self, now_ns: int, boot_ns: int) -> None:
        """Go the other way; a node that is taken is there after its boot."""
        self._regret_usd = 0.0
        if self._state == _ON:
            self._state = _OFF
            self._given_back_ns = now_ns
            return
        self._state = _BOOTING
        self._boots_until_ns = now_ns + boot_ns
        if now_ns - self._given_back_ns < _MISSED_NS:
            self._stop = min(_LEARNT * self._stop, _STOP_MAX)
        else:
            self._stop = max(self._stop / _LEARNT, _STOP)

    def wait(self, now_ns: int) -> None:
        """Time passes."""
        if self._state == _BOOTING and now_ns >= self._boots_until_ns:
            self._state = _ON


@final
class Levels:
    """Says how many nodes are worth their rent. O(levels) per arrival, and per `wanted`.

    A node takes what it can have done within `allowed_ns`, at `pace_ns` per request; what it cannot
    is for the next level. The first `own` levels are those of nodes that are ours anyway, which are
    never weighed or counted. `call_usd` is what a call costs elsewhere.
    """

    def __init__(
        self,
        count: int,
        *,
        standing: int,
        own: int = 0,
        allowed_ns: int,
        pace_ns: float,
        call_usd: float,
        rent_usd_per_s: float,
        boot_ns: int,
        memory_ns: int,
    ) -> None:
        self._levels = [Level(is_on=number < standing) for number in range(count)]
        self._fills = [*(Level(is_on=True) for _ in range(own)), *self._levels]
        self._allowed_ns = allowed_ns
        self._pace_ns = pace_ns
        self._call_usd = call_usd
        self._rent_usd_per_s = rent_usd_per_s
        self._boot_ns = boot_ns
        self._dispersion = Dispersion(_WINDOW_NS, memory_ns)
        self._seen_ns: int | None = None

    def arrived(self, now_ns: int, items: int) -> None:
        """Something is asked for, whether or not it is let in."""
        if self._seen_ns is None:
            self._seen_ns = now_ns
        self._dispersion.arrived(now_ns, items)
        work_ns = self._pace_ns * items
        for level in self._fills:
            done_ns = max(now_ns, level.free_ns) + work_ns
            if done_ns <= now_ns + self._allowed_ns:
                level.free_ns = done_ns
                level.calls += 1
                return

    def wanted(self, now_ns: int) -> int:
        """How many nodes to have, as of now."""
        if self._seen_ns is not None and now_ns > self._seen_ns:
            self._weigh(now_ns, now_ns - self._seen_ns)
        self._seen_ns = now_ns
        return sum(1 for level in self._levels if level.is_wanted)

    def _weigh(self, now_ns: int, elapsed_ns: int) -> None:
        rent_usd = self._rent_usd_per_s * elapsed_ns / SECOND_NS
        boot_usd = self._rent_usd_per_s * self._boot_ns / SECOND_NS
        burstiness = max(1.0, self._dispersion.value)
        for level in self._levels:
            saved_usd = level.calls * self._call_usd
            level.calls = 0
            level.wait(now_ns)
            if level.weigh(saved_usd, rent_usd, boot_usd, burstiness):
                level.change(now_ns, self._boot_ns)
