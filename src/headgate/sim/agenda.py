"""What is due to happen, in order: time, then rank, then the order it was put down.

Open-loop arrivals are not in here (they are sorted columns); the agenda holds only work in flight,
timers and messages, so it stays as small as what is going on.
"""

from __future__ import annotations

from heapq import heappush
from typing import final


class Happening:
    """Something that will happen. The engine knows what to do about each kind."""

    __slots__ = ()


Entry = tuple[int, int, int, Happening]  # (at_ns, rank, sequence, what)


@final
class Agenda:
    """A heap with a documented order of ties."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self._sequence = 0

    def push(self, at_ns: int, rank: int, happening: Happening) -> None:
        """Put something down."""
        self._sequence += 1
        heappush(self.heap, (at_ns, rank, self._sequence, happening))
