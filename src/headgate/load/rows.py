"""What happens to every request while it happens: one row each, filled in as it goes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.outcome import OUTCOME_NAMES

UNSAID: Final = -1
_OUTCOMES: Final[Mapping[bytes, int]] = MappingProxyType(
    {name.encode(): outcome for outcome, name in enumerate(OUTCOME_NAMES)}
)


class Trouble:
    """Why a request has no answer. Its status is 0 then."""

    NONE: Final = 0
    REFUSED: Final = 1  # no connection could be opened
    LOST: Final = 2  # the connection ended, or spoke no HTTP, before the answer was complete
    TIMED_OUT: Final = 3  # the client would wait no longer


TROUBLE_NAMES: Final = ("", "no connection", "connection lost", "timed out")


@final
class Rows:
    """Columns that grow. Times are nanoseconds since the start; NEVER_NS: it did not happen."""

    __slots__ = (
        "ended",
        "ended_ns",
        "intended_ns",
        "reached_ns",
        "said",
        "sent_ns",
        "status",
        "timing",
        "trouble",
    )

    def __init__(self) -> None:
        self.intended_ns = array("q")  # when it should be sent
        self.reached_ns = array("q")  # when the sender got to it
        self.sent_ns = array("q")  # when a connection took it
        self.ended_ns = array("q")  # when its answer was complete, or it was given up
        self.status = array("h")
        self.trouble = array("b")
        self.said = array("b")  # the outcome in the server's own words, or UNSAID
        self.timing: list[bytes] = []  # Server-Timing, as it came
        self.ended: list[int] = []  # rows in the order in which they ended

    def __len__(self) -> int:
        return len(self.intended_ns)

    def add(self, intended_ns: int, reached_ns: int) -> int:
        """Begin a row and return its number."""
        row = len(self.intended_ns)
        self.intended_ns.append(intended_ns)
        self.reached_ns.append(reached_ns)
        self.sent_ns.append(NEVER_NS)
        self.ended_ns.append(NEVER_NS)
        self.status.append(0)
        self.trouble.append(Trouble.NONE)
        self.said.append(UNSAID)
        self.timing.append(b"")
        return row

    def answer(self, row: int, now_ns: int, status: int, outcome: bytes, timing: bytes) -> None:
        """The answer is complete."""
        self.ended_ns[row] = now_ns
        self.status[row] = status
        if outcome:
            self.said[row] = _OUTCOMES.get(outcome, UNSAID)
        if timing:
            self.timing[row] = timing
        self.ended.append(row)

    def give_up(self, row: int, now_ns: int, trouble: int) -> None:
        """There will be no answer."""
        self.ended_ns[row] = now_ns
        self.trouble[row] = trouble
        self.ended.append(row)
