"""What became of an errand, in the words of the core: it ran, it broke, it never ran, who knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

from headgate.live.messages import Result


@final
@dataclass(frozen=True, slots=True)
class Done:
    """It ran, and each of its requests has a result."""

    results: list[Result]
    took_ns: int  # as the far end has it
    is_cold: bool = False


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """It ran, or may have, and the far end said that it broke."""

    reason: str


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """It never ran: `reason` is a `Refusal`."""

    reason: int
    words: str


@final
@dataclass(frozen=True, slots=True)
class Lost:
    """Nobody knows whether it ran."""

    words: str


Fate: TypeAlias = Done | Failed | Refused | Lost
