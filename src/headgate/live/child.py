"""A child process of the supervisor: a worker or a gateway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, final

from headgate.live.memory import private_bytes

SAID_MAX: Final = 1 << 20  # bytes that are kept of it: one line


def how_ended(status: int) -> str:
    """Return how a process ended, by its status as `subprocess` has it.

    >>> how_ended(-11), how_ended(3)
    ('signal 11, SIGSEGV', 'exit status 3')
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


@final
class Child:
    """One process, and a pipe from it: its heartbeat, or what it has to say.

    The pipe also binds it to us: a child whose pipe has nobody at the other end goes by itself.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        keeps: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.started_s = monotonic()
        self.heard_s: float | None = None  # when it last said something
        self.said = b""
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [sys.executable, "-m", module, *arguments, "--heartbeat-fd", str(write_fd)]
        try:
            # In a session of its own: Ctrl-C is for the supervisor, which tells its children.
            self._process = subprocess.Popen(
                command,
                pass_fds=[write_fd, *keeps],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(write_fd)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def hear(self) -> None:
        """Read what it has said since."""
        try:
            data = os.read(self._read_fd, 65_536)
        except BlockingIOError:
            return
        if data:
            self.heard_s = monotonic()
            if b"\n" not in self.said and len(self.said) < SAID_MAX:
                self.said += data

    def ended(self) -> int | None:
        """Its exit status once it is gone: negative if a signal ended it."""
        return self._process.poll()

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, limit_s: float) -> bool:
        """Whether it is gone within so long."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and whatever it has started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._process.wait()
        os.close(self._read_fd)

    def private_bytes(self) -> int:
        """Memory it holds for itself now; 0 if it is gone."""
        return private_bytes(self.pid)
