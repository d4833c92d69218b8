"""When a batch is given up: long after such batches were answered lately, or should have been.

A profile can be far too short: a function of microseconds takes less time than the way to its
worker and back, and one that was measured on an idle machine is slow on a busy one. So what was
really observed counts as well, including batches that came back after they had been given up: else
all of a function would be given up for ever. And no batch is given up within a floor.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.lifecycle import BatchState
from headgate.core.model import App
from headgate.core.records import Batch

_FADING: Final = 0.99  # of the slowest batch, with each that follows
_GIVEN_UP_MAX: Final = 256  # batches that may yet come back, the latest of them


@final
class Watchdog:
    """Knows, by variant, how much longer than its profile says a batch takes of late."""

    def __init__(self, app: App) -> None:
        limits = app.limits
        self.is_needed = limits.lost_after > 0
        self._factor = limits.lost_after
        self._floor_ns = limits.lost_floor_ns
        self._ratios = [1.0 for _ in app.variants]  # of the slowest lately; it fades
        self._given_up: dict[int, Batch] = {}  # by batch id

    def limit_ns(self, batch: Batch) -> int:
        """How long to wait for this batch at most, from when it may begin."""
        expected_ns = _expected_ns(batch) * self._ratios[batch.variant.id]
        return max(self._floor_ns, int(expected_ns * self._factor))

    def ended(self, batch: Batch, now_ns: int) -> None:
        """A batch has ended, or is given up."""
        if batch.state == BatchState.FINISHED:
            self._see(batch, now_ns)

    def gave_up(self, batch: Batch) -> None:
        """No answer came in time; if it comes after all, that is worth knowing."""
        self._given_up[batch.id] = batch
        if len(self._given_up) > _GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]

    def finished_late(self, batch_id: int, now_ns: int) -> None:
        """A batch has finished that had been given up, or had ended before."""
        batch = self._given_up.pop(batch_id, None)
        if batch is not None:
            self._see(batch, now_ns)

    def _see(self, batch: Batch, now_ns: int) -> None:
        ratio = (now_ns - batch.sent_ns) / max(1, _expected_ns(batch))
        id = batch.variant.id
        self._ratios[id] = max(1.0, ratio, _FADING * self._ratios[id])


def _expected_ns(batch: Batch) -> int:
    """As the profile has it, on a node whose slots are all taken, after a start."""
    profile = batch.variant.profile
    exec_ns = profile.time_ns(batch.items, batch.pool.slots)
    return profile.start_ns + profile.load_ns + exec_ns
