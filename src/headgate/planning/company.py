"""How many had better run at once on a node where company slows everybody down."""

from __future__ import annotations

from typing import Final

from headgate.core.model import Profile

_GIVEN: Final = 0.97  # of the best pace, for an earlier answer
_OF_LATENCY: Final = 0.7  # the rest is for waiting, and for those that take longer than others


def best_company(profile: Profile, slots: int, latency_ns: int) -> int:
    """The fewest at once that get about as much done as any number does, each within its time.

    Where two take twice as long as one, they had better take turns: then the first is done early,
    and who comes next can still be decided otherwise.

    >>> best_company(Profile(exec_ns=(10,)), slots=4, latency_ns=100)
    4
    >>> best_company(Profile(exec_ns=(10,), slowdown=(1.0, 2.0, 3.0)), slots=3, latency_ns=100)
    1
    >>> best_company(Profile(exec_ns=(10,), slowdown=(1.0, 1.2, 1.5)), slots=3, latency_ns=100)
    3
    """
    if len(profile.slowdown) == 1:
        return slots
    most_ns = _OF_LATENCY * latency_ns
    allowed = [c for c in range(1, slots + 1) if profile.time_ns(1, c) <= most_ns] or [1]
    paces = {c: c / profile.slowdown_at(c) for c in allowed}
    enough = _GIVEN * max(paces.values())
    return next(c for c in allowed if paces[c] >= enough)
