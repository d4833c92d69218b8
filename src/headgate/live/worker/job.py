"""Jobs, and the threads that do them.

The thread that listens to gateways leaves jobs to others, of which there are as many as jobs ever
ran at once; the Backend's slots limit that. One that has finished goes on by itself: waiting for
the listening thread would cost two switches between threads per batch. A job that is shorter than
such a switch the listening thread does itself, before it listens again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, get_ident
from time import monotonic_ns
from typing import Final, final

from headgate.live.worker.ending import BROKEN_EXIT, end

_LOG: Final = logging.getLogger(__name__)


class Job:
    """Something to do in a thread of its own."""

    what = "something"  # for people, who see it when it takes too long
    is_awaited = True  # a worker that leaves finishes it first
    began_ns = 0  # 0: not yet
    limit_ns = 0  # how long it may take

    def run(self) -> None:
        """Do it. Raises nothing."""
        raise NotImplementedError

    def over(self) -> None:
        """Act on it being done."""


@final
class Executor:
    """Runs jobs in threads, which call `on_done` when they have done one.

    Nothing here is locked: `submit` and `finish` must not overlap.
    """

    def __init__(self, on_done: Callable[[Job], None]) -> None:
        self.running: set[Job] = set()
        self.short: Job | None = None  # for the thread that made this, to `do`
        self._home = get_ident()
        self._on_done = on_done
        self._todo: SimpleQueue[Job] = SimpleQueue()
        self._threads = 0

    def submit(self, job: Job, *, is_short: bool = False) -> None:
        """Have it begun at once."""
        self.running.add(job)
        if is_short and self.short is None and get_ident() == self._home:
            self.short = job
            return
        if len(self.running) > self._threads:
            self._threads += 1
            # A daemon: a job that hangs must not keep the process from ending.
            Thread(target=self._work, name=f"executor-{self._threads}", daemon=True).start()
        self._todo.put(job)

    def do(self, job: Job) -> None:
        """Do it right here."""
        job.began_ns = monotonic_ns()
        job.run()
        self._on_done(job)

    def finish(self, job: Job) -> None:
        """Act on a job being done."""
        self.running.discard(job)
        job.over()

    def is_busy(self) -> bool:
        """Whether there is a job that must be finished before the process may end."""
        return any(job.is_awaited for job in list(self.running))

    def hanging(self, now_ns: int) -> Job | None:
        """Return a job that takes longer than it may."""
        for job in list(self.running):
            if job.began_ns and now_ns - job.began_ns > job.limit_ns:
                return job
        return None

    def _work(self) -> None:
        while True:
            try:
                self.do(self._todo.get())
            except BaseException:  # ours, not the function's: nothing can be relied on any more
                _LOG.critical("the worker is broken, and ends itself", exc_info=True)
                end(BROKEN_EXIT)
