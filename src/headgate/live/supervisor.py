"""The supervisor: the process that a user starts, and that ends last.

It serves nothing itself. It binds the sockets, keeps a generation of workers and a gateway alive,
and passes signals on:

- SIGTERM: the gateway says it is not ready, goes on for its lame-duck time, takes no more, finishes
  what it has within its bound, and all end. SIGINT (Ctrl-C) leaves the lame-duck time out.
- A second signal ends everything at once.
- SIGHUP, or a changed file where that is watched: a new generation is started; when it is ready,
  the old one finishes. If the new configuration is wrong, or one of its functions cannot be loaded,
  the old one stays.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.live.assignment import Assignment
from headgate.live.generation import Generation

_LOG: Final = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.1
LOOK_FIRST_S: Final = 0.01  # while it is starting


@final
class Supervisor:
    """Runs until it is told to end."""

    def __init__(
        self,
        prepare: Callable[[], Assignment],
        listener: socket.socket,
        *,
        log_path: Path | None,
        watches: Callable[[], object] | None,
        greet: Callable[[bytes], None],
    ) -> None:
        self._prepare = prepare
        self._listener = listener
        self._log_path = log_path
        self._watches = watches  # what it returns changes when a watched file has
        self._greet = greet
        self._signals: list[int] = []
        self._generations: list[Generation] = []  # oldest first; the last one is wanted
        self._started = 0
        self._is_greeted = False
        self._wants_change = False
        self._is_told_to_end = False

    def run(self) -> int:
        """Serve; return the exit status."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(wake_write)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.signal(number, self._note) for number in handled}
        try:
            self._generations.append(self._new_generation())
            return self._loop(wake_read)
        finally:
            for generation in self._generations:
                generation.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            os.close(wake_read)
            os.close(wake_write)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _new_generation(self) -> Generation:
        number = self._started
        self._started += 1
        return Generation(
            number,
            self._prepare(),
            http_fd=self._listener.fileno(),
            log_path=self._log_path,
        )

    def _loop(self, wake_fd: int) -> int:
        seen = None if self._watches is None else self._watches()
        while True:
            ready, _, _ = select.select(
                [wake_fd], [], [], LOOK_EVERY_S if self._is_greeted else LOOK_FIRST_S
            )
            if ready:
                os.read(wake_fd, 4096)
            while self._signals:
                if self._is_over(signal.Signals(self._signals.pop(0))):
                    return 0
            if self._watches is not None and seen != (seen := self._watches()):
                self._change()
            status = self._look()
            if status is not None:
                return status

    def _is_over(self, number: signal.Signals) -> bool:
        """Act on a signal; whether that was the second to say that it must end."""
        if number is signal.SIGHUP:
            self._change()
            return False
        if self._is_told_to_end:
            for generation in self._generations:
                generation.kill()
            return True
        self._is_told_to_end = True
        # Gateways have the socket too, and close it when they have finished. Whoever connects after
        # that is refused rather than left waiting for somebody to accept.
        self._listener.close()
        for generation in self._generations:
            generation.leave(number)
        return False

    def _change(self) -> None:
        """Start a new generation, unless the new configuration is wrong.

        While one is on its way, it is only noted.
        """
        self._wants_change = len(self._generations) > 1
        if self._wants_change or self._is_told_to_end:
            return
        try:
            self._generations.append(self._new_generation())
        except ConfigError as error:
            _LOG.error("%s; what is served stays as it was", error)

    def _look(self) -> int | None:
        for generation in list(self._generations):
            status = generation.look()
            if status is not None and len(self._generations) == 1:
                for problem in generation.problems:
                    _LOG.error("%s", problem)
                return status
            if status is not None:
                _LOG.error("%s; what is served stays as it was", "; ".join(generation.problems))
            if status is not None or generation.has_left:
                generation.close()
                self._generations.remove(generation)
        if not self._generations:
            return 0
        if self._wants_change and len(self._generations) == 1:
            self._change()
        newest = self._generations[-1]
        if newest.greeting is not None:
            if not self._is_greeted:
                self._is_greeted = True
                self._greet(newest.greeting)
            for older in self._generations[:-1]:
                if not older.is_leaving:
                    _LOG.info("the new configuration is served")
                    older.leave(signal.SIGUSR1)
        return None
