"""Threads for calls that block. They come as they are needed, up to a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, final

Result = TypeVar("Outcome")
Task = Callable[[], Callable[[], None]]


@final
class DaemonThreads:
    """Does things elsewhere and tells of them on the event loop.

    Daemons, other than those of an executor: a call that hangs must not keep a gateway from ending.
    """

    def __init__(self, count_max: int, loop: asyncio.AbstractEventLoop) -> None:
        self.count_max = count_max
        self.busy = 0
        self._loop = loop
        self._todo: SimpleQueue[Task | None] = SimpleQueue()
        self._count = 0

    @property
    def free(self) -> int:
        """How many more things can be begun at once."""
        return self.count_max - self.busy

    def do(self, what: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Begin something that raises nothing; the loop then calls `done` with what it returned.

        Only while there are any `free`: nothing waits here.
        """
        assert self.busy < self.count_max

        def task() -> Callable[[], None]:
            outcome = what()
            return lambda: done(outcome)

        self.busy += 1
        if self.busy > self._count:
            self._count += 1
            Thread(target=self._work, name=f"remote-{self._count}", daemon=True).start()
        self._todo.put(task)

    def stop(self) -> None:
        """Have all end that do nothing, and the others when they are done."""
        for _ in range(self._count):
            self._todo.put(None)

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            then = task()
            with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                self._loop.call_soon_threadsafe(self._over, then)

    def _over(self, then: Callable[[], None]) -> None:
        self.busy -= 1
        then()
