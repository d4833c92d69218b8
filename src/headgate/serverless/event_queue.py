"""Calls that nobody waits for: queued, tried again after an error, and dropped in the end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import final

from headgate.serverless.errors import ServiceError, Throttled
from headgate.serverless.function import Function
from headgate.serverless.invocation import Invocation
from headgate.serverless.invoker import Invoker
from headgate.serverless.settings import Settings


@final
class EventQueue:
    """Events on their way. `dropped` counts those that were given up."""

    def __init__(self, settings: Settings, invoker: Invoker) -> None:
        self.dropped = 0
        self._settings = settings
        self._invoker = invoker
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, function: Function, call: Invocation) -> None:
        """Take a call to be run at some time. Raises `Throttled` if too many wait already."""
        if len(self._tasks) >= self._settings.events_max:
            raise Throttled("CallerRateLimitExceeded")
        task = asyncio.create_task(self._see_through(function, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop what still waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _see_through(self, function: Function, call: Invocation) -> None:
        """Run it until it succeeds, has failed too often, or is too old."""
        settings, errors = self._settings, 0
        oldest_s = time.monotonic() + settings.event_age_max_s
        throttled_s, longest_s = settings.event_throttled_s
        while time.monotonic() < oldest_s:
            # What it is now counts, and not what it was when the event came.
            current = self._invoker.current(function, call.function.version)
            if current is None:
                break
            try:
                ended, _ = await self._invoker.run(function, replace(call, function=current))
            except ServiceError:  # it has not run: that does not count as a try
                await asyncio.sleep(throttled_s)
                throttled_s = min(2 * throttled_s, longest_s)
                continue
            if not ended.error_type:
                return
            if errors == len(settings.event_retry_s):
                break
            await asyncio.sleep(settings.event_retry_s[errors])
            errors += 1
        self.dropped += 1
