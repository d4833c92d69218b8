"""Threads for blocking calls, started on demand up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, final

Result = TypeVar("Result")
Task = Callable[[], Callable[[], None]]


@final
class DaemonThreads:
    """Runs functions in daemon threads and returns the results on the event loop.

    Daemon threads, unlike those of an `Executor` of the standard library: a call that hangs must
    not keep a gateway from exiting.
    """

    def __init__(self, count_max: int, loop: asyncio.AbstractEventLoop) -> None:
        self.count_max = count_max
        self.busy = 0
        self._loop = loop
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._count = 0

    @property
    def free(self) -> int:
        """How many more functions can be started at once."""
        return self.count_max - self.busy

    def submit(self, function: Callable[[], Result], on_done: Callable[[Result], None]) -> None:
        """Run a function, which must not raise; the event loop then calls `on_done` with its
        result.

        Requires a `free` thread: nothing is queued.
        """
        assert self.busy < self.count_max

        def task() -> Callable[[], None]:
            result = function()
            return lambda: on_done(result)

        self.busy += 1
        if self.busy > self._count:
            self._count += 1
            Thread(target=self._run, name=f"remote-{self._count}", daemon=True).start()
        self._queue.put(task)

    def stop(self) -> None:
        """End all idle threads, and busy ones when they are done."""
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            then = task()
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._on_done, then)

    def _on_done(self, then: Callable[[], None]) -> None:
        self.busy -= 1
        then()
