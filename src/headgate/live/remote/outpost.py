"""An outpost: one pool that somebody else runs, as the gateway's event loop sees it.

Errands go out in threads, and each comes back as exactly one event. One that stays away for too
long is given up: nobody knows whether it ran, and what it may bring later is nobody's any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Final, Protocol, final

from headgate.core.events import BatchFailed, BatchLost, BatchRefused, Event, Refusal
from headgate.core.model import Pool
from headgate.live.messages import Ran, Result
from headgate.live.remote.errand import Errand, Shares
from headgate.live.remote.fate import Done, Failed, Fate, Lost, Refused
from headgate.live.remote.threads import Threads

GRACE_NS: Final = 1_000_000_000  # how much later than its deadline an answer may still come
QUIET_S: Final = 5.0  # between two warnings about one pool
OUTCOMES: Final = ("finished", "failed", "refused", "throttled", "lost")

_LOG: Final = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears what became of errands."""

    def ran_at(self, pool_id: int, message: Ran) -> None:
        """A batch has ended. Tensors in it are the listener's own."""

    def reported(self, event: Event) -> None:
        """Something else has happened."""


class Books(Protocol):
    """Who keeps account of money."""

    def called(self, pool_id: int, shares: Shares, took_ns: int) -> None:
        """A call has been paid for that took so long."""

    def kept_warm(self, pool_id: int, function: str, usd: float) -> None:
        """Keeping instances of a function ready has cost so much."""


Started = Callable[[str, int], None]  # an instance of a function had to be, and that took so long


@final
class Outpost:
    """Sends errands to one pool."""

    def __init__(
        self,
        pool: Pool,
        call: Callable[[Errand], Fate],
        listener: Listener,
        books: Books,
        started: Started,
        threads: Threads,
        *,
        hang_ns: int,
    ) -> None:
        self.pool = pool
        self.threads = threads
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))  # by one of `OUTCOMES`
        self.running: Counter[str] = Counter()  # by function: errands that are out
        self.on_gone: Callable[[Errand], None] | None = None  # the far end is not there
        self._call = call
        self._listener = listener
        self._books = books
        self._started = started
        self._hang_ns = hang_ns
        self._loop = asyncio.get_running_loop()
        self._out: dict[int, tuple[Errand, int, asyncio.TimerHandle]] = {}  # by batch
        self._quiet_until_s = 0.0

    @property
    def in_flight(self) -> int:
        """How many errands are out."""
        return len(self._out)

    def send(self, now_ns: int, errand: Errand) -> None:
        """Have a batch run there. Ends in one event, later."""
        if not self.threads.free:
            problem = f"{self.threads.count_max} calls are under way"
            self._end(errand, Refused(Refusal.THROTTLED, problem), 0)
            return
        limit_ns = self._hang_ns
        if errand.gives_up:
            limit_ns = min(limit_ns, max(0, errand.deadline_ns - now_ns) + GRACE_NS)
        timer = self._loop.call_later(limit_ns / 1e9, self._give_up, errand.batch_id)
        self._out[errand.batch_id] = (errand, now_ns, timer)
        self.running[errand.function] += 1
        self.threads.do(partial(self._call, errand), partial(self._came_back, errand.batch_id))

    def warn(self, text: str) -> None:
        """Log a warning about the pool, now and then: what breaks often is not news each time."""
        now_s = self._loop.time()
        is_news = now_s >= self._quiet_until_s
        if is_news:
            self._quiet_until_s = now_s + QUIET_S
        _LOG.log(logging.WARNING if is_news else logging.DEBUG, "pool %s: %s", self.pool.name, text)

    def stop(self) -> None:
        """Forget whatever is out."""
        for _, _, timer in self._out.values():
            timer.cancel()
        self._out.clear()
        self.threads.stop()

    def _give_up(self, batch_id: int) -> None:
        self._came_back(batch_id, Lost("no answer came in time"))

    def _came_back(self, batch_id: int, fate: Fate) -> None:
        found = self._out.pop(batch_id, None)
        if found is None:
            return  # it was given up before
        errand, sent_ns, timer = found
        timer.cancel()
        self.running[errand.function] -= 1
        self._end(errand, fate, monotonic_ns() - sent_ns)

    def _end(self, errand: Errand, fate: Fate, away_ns: int) -> None:
        listener = self._listener
        if isinstance(fate, Done):
            self._done(errand, fate, away_ns)
            return
        if isinstance(fate, Refused):
            is_throttled = fate.reason == Refusal.THROTTLED
            self.ended["throttled" if is_throttled else "refused"] += 1
            listener.reported(BatchRefused(errand.batch_id, fate.reason))
            if fate.reason == Refusal.GONE:
                self.warn(fate.words)
                if self.on_gone is not None:
                    self.on_gone(errand)
            return
        self._books.called(self.pool.id, errand.shares, away_ns)  # for all we know
        if isinstance(fate, Failed):
            self.ended["failed"] += 1
            self.warn(fate.reason)
            listener.reported(BatchFailed(errand.batch_id, fate.reason))
        else:
            self.ended["lost"] += 1
            self.warn(fate.words)
            listener.reported(BatchLost(errand.batch_id, node_died=False))

    def _done(self, errand: Errand, fate: Done, away_ns: int) -> None:
        self.ended["finished"] += 1
        took_ns = min(fate.took_ns, away_ns)
        platform = self.pool.serverless
        is_billed_whole = fate.is_cold and platform is not None and platform.bills_start
        self._books.called(self.pool.id, errand.shares, away_ns if is_billed_whole else took_ns)
        if fate.is_cold:
            self._started(errand.function, away_ns - took_ns)
        by_id = {result.task_id: result for result in fate.results}
        missing = "there was no answer for it among those of its batch"
        results = [
            by_id.get(work.task_id) or Result(work.task_id, [], missing, 500)
            for work in errand.works
        ]
        ended_ns = monotonic_ns()
        ran = Ran(errand.batch_id, ended_ns - took_ns, ended_ns, results)
        self._listener.ran_at(self.pool.id, ran)
