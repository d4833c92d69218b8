"""Writes the log of a simulated run, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from headgate.app import LoadedApp, without_keys
from headgate.cli.chosen import Chosen
from headgate.cli.files import writing
from headgate.core.actions import Action
from headgate.core.events import Event
from headgate.core.log import LogHeader, LogWriter, json_lines, open_log
from headgate.sim.hooks import Observer


class LogObserver(Observer):
    """An observer for a run with one Scheduler."""

    def __init__(self, stream: TextIO, header: LogHeader) -> None:
        self.events = 0
        self._writer = LogWriter(json_lines(stream), header)

    def saw(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Write it down."""
        self._writer.write(self.events, now_ns, event, actions)
        self.events += 1

    def close(self) -> None:
        """Write the end mark, once the run has come to its end."""
        self._writer.close()


@contextmanager
def logging_to(
    path: Path | None, loaded: LoadedApp, chosen: Chosen, seed: int
) -> Iterator[LogObserver | None]:
    """Open a log for a run; none without a path. What it needs to be replayed is in its header."""
    if path is None:
        yield None
        return
    header = LogHeader(without_keys(loaded.spec), chosen.name, chosen.settings, seed)
    with writing(path, "--log"), open_log(path) as stream:
        observer = LogObserver(stream, header)
        yield observer
        observer.close()  # not if the run broke: then there is more to it than the log says
