"""A child process of the supervisor: a worker or a gateway."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Final, NoReturn, final

# How much memory a process holds for itself.


def private_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process without shared memory; 0 if the process is gone.

    Anonymous and file-backed pages count. Pages of shared memory do not: they hold the tensors of
    requests, which the gateway bounds, and a worker must not be ended for what it was sent.
    Without `pid` the calling process is meant.
    """
    status = Path("/proc", "self" if pid is None else str(pid), "status")
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(_KINDS)) * 1024


_KINDS: Final = ("RssAnon:", "RssFile:")


OUTPUT_BYTES_MAX: Final = 1 << 20  # bytes that are kept of it: one line


def describe_exit(status: int) -> str:
    """Return how a process ended, by its status as `subprocess` has it.

    >>> describe_exit(-11), describe_exit(3)
    ('signal 11, SIGSEGV', 'exit status 3')
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


@final
class ChildProcess:
    """One process, and a pipe from it: its heartbeat, or what it has to say.

    The pipe also binds it to us: a child whose pipe has nobody at the other end goes by itself.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        inherited_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.started_s = monotonic()
        self.last_output_s: float | None = None  # when it last said something
        self.output = b""
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [sys.executable, "-m", module, *arguments, "--heartbeat-fd", str(write_fd)]
        try:
            # In a session of its own: Ctrl-C is for the supervisor, which tells its children.
            self._process = subprocess.Popen(
                command,
                pass_fds=[write_fd, *inherited_fds],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(write_fd)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll_output(self) -> None:
        """Read what it has said since."""
        try:
            data = os.read(self._read_fd, 65_536)
        except BlockingIOError:
            return
        if data:
            self.last_output_s = monotonic()
            if b"\n" not in self.output and len(self.output) < OUTPUT_BYTES_MAX:
                self.output += data

    def exit_status(self) -> int | None:
        """Its exit status once it is gone: negative if a signal ended it."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
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


# What becomes of a process whose supervisor is gone, killed by whatever: it ends too.
#
# The kernel ends a worker: it may be in the middle of anything, and nobody would start it again.
# The gateway has clients to answer, so it is told, and ends itself; if it cannot, a thread does.


_PR_SET_PDEATHSIG: Final = 1


def set_parent_death_signal(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. Only Linux does."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def watch_supervisor(
    pipe_fd: int, on_gone: Callable[[], None], on_late: Callable[[], None], limit_s: float
) -> None:
    """Call `on_gone` when nobody reads from a pipe any more, and `on_late` so long after that.

    From a thread of its own: the rest of the process may be stuck.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe_fd, 0)  # that the other end is closed is told always
        poll.poll()
        on_gone()
        time.sleep(limit_s)
        on_late()

    Thread(target=watch, name="supervisor-watch", daemon=True).start()


def kill_groups_and_exit(run_dir: Path, group_ids: Iterable[int]) -> NoReturn:
    """End these process groups and our own, and remove the directory they have shared."""
    shutil.rmtree(run_dir, ignore_errors=True)
    for group_id in group_ids:
        with suppress(OSError):
            os.killpg(group_id, signal.SIGKILL)
    if os.getpgrp() == os.getpid():  # else the group is that of whoever started us
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
