"""Makes the Scheduler of an application, and the recording of what it decides."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final, final

from headgate.app import LoadedApp, ServeChoice, make_config, without_keys
from headgate.core.errors import ConfigError
from headgate.core.log import LogHeader
from headgate.core.rng import stream
from headgate.core.scheduler import Scheduler
from headgate.live.driver import Record
from headgate.live.event_log import EventLog, Rotation
from headgate.policies import find_policy

SEED: Final = 0
FLUSH_EVERY_S: Final = 0.25

_LOG: Final = logging.getLogger(__name__)


def make_scheduler(loaded: LoadedApp) -> tuple[Scheduler, LogHeader]:
    """Return a Scheduler under the policy that the application names, and the header of its log."""
    choice = loaded.policy
    kind = find_policy(choice.name)
    config = make_config(kind.config, choice.settings, "policy")
    scheduler = Scheduler(loaded.app, kind, config, rng=stream(SEED, "policy/0"))
    return scheduler, LogHeader(without_keys(loaded.spec), choice.name, choice.settings, SEED)


@final
class Recording:
    """The event log of a gateway, if it is to have one, written now and then."""

    def __init__(self, path: Path | None, serve: ServeChoice, *, is_required: bool) -> None:
        """`is_required`: it cannot be served without the log, as at the first start of a server."""
        self._path = path
        self._rotation = Rotation(serve.log_size_bytes, serve.log_age_ns, serve.log_keep)
        self._is_required = is_required
        self._log: EventLog | None = None
        self._flusher: asyncio.Task[None] | None = None

    def begin(self, header: LogHeader) -> Record | None:
        """Open the log; return who writes down what is decided.

        Raises `ConfigError` if it cannot be opened and is required. A gateway that is started again
        had better serve without its log than not at all.
        """
        if self._path is None:
            return None
        try:
            log = self._log = EventLog(self._path, header, self._rotation)
        except ConfigError as error:
            if self._is_required:
                raise
            _LOG.error("there is no event log from here on: %s; serving goes on", error)
            return None
        self._flusher = asyncio.create_task(_flush(log))
        return log.record

    def close(self) -> None:
        """Say that nothing is missing."""
        if self._flusher is not None:
            self._flusher.cancel()
        if self._log is not None:
            self._log.close()


async def _flush(log: EventLog) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        log.flush()
