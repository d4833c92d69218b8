"""How many items it pays to send out together."""

from __future__ import annotations

from typing import Final

from headgate.core.model import Profile

# What a batch costs beyond its profile, on the way there and back; and how much of the best pace
# is given for an earlier answer.
_BATCH_NS: Final = 1_000_000
_GIVEN: Final = 1.05


def worthwhile_items(profile: Profile) -> int:
    """The smallest batch that is about as good as the best in time per item.

    More would only make the first of them wait for the last, and use up slack that is all there
    is against surprises.

    >>> worthwhile_items(Profile(exec_ns=(20_000_000, 40_000_000, 60_000_000)))
    1
    >>> worthwhile_items(Profile(exec_ns=(20_000_000, 24_000_000, 28_000_000)))
    3
    """
    paces_ns = [(time_ns + _BATCH_NS) / (i + 1) for i, time_ns in enumerate(profile.exec_ns)]
    enough_ns = _GIVEN * min(paces_ns)
    return next(i + 1 for i, pace_ns in enumerate(paces_ns) if pace_ns <= enough_ns)
