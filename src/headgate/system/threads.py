"""Daemon threads, started on demand.

Daemon threads, unlike those of an `Executor` of the standard library: a call that hangs must not
keep a process from exiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Final, TypeVar, final

Result = TypeVar("Result")
_LOG: Final = logging.getLogger(__name__)


@final
class DaemonThreads:
    """As many threads as calls ever ran at once. Calls of `run` must be serialised."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run(self, call: Callable[[], None], running: int) -> None:
        """Run a call in a thread, at once. `running` are the calls that run now, with this one."""
        if running > self._count:
            self._count += 1
            Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
        self._queue.put(call)

    def stop(self) -> None:
        """End all idle threads, and busy ones when they are done."""
        for _ in range(self._count):
            self._queue.put(None)

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # a thread that ended would still be counted
                _LOG.exception("a call in a thread failed")
            del call  # with what it holds, such as a model, while this thread waits


async def run_in_daemon_thread(function: Callable[[], Result]) -> Result:
    """Run a blocking function in a thread of its own, and wait for its result.

    If the caller is cancelled meanwhile, the thread goes on, at most until the process ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def finish(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return  # cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where it is a result

    def call() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    Thread(target=call, name="blocking", daemon=True).start()
    return await future


@final
class BlockingCalls:
    """Runs blocking functions in a limited number of threads, and returns to the event loop."""

    def __init__(self, count_max: int, loop: asyncio.AbstractEventLoop) -> None:
        self.count_max = count_max
        self.busy = 0
        self._loop = loop
        self._threads = DaemonThreads("remote")

    @property
    def free(self) -> int:
        """How many more functions can be started at once."""
        return self.count_max - self.busy

    def submit(
        self,
        function: Callable[[], Result],
        on_done: Callable[[Result], None],
        on_error: Callable[[BaseException], Result],
    ) -> None:
        """Run a function; the event loop then calls `on_done` with its result, once.

        The result of a function that raises is `on_error` of the exception. Requires a `free`
        thread: nothing is queued.
        """
        assert self.busy < self.count_max
        self.busy += 1

        def call() -> None:
            try:
                result = function()
            except BaseException as error:
                _LOG.exception("a call in a thread failed")
                result = on_error(error)
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(finish, result)

        def finish(result: Result) -> None:
            self.busy -= 1
            on_done(result)

        self._threads.run(call, self.busy)

    def stop(self) -> None:
        """End all idle threads, and busy ones when they are done."""
        self._threads.stop()
