"""Supervised child processes: start, signals, memory, and what ends them if the supervisor dies.

When the supervisor dies, its children must exit too. The kernel kills a worker, which may be in any
state and would not be restarted. The gateway has clients to answer, so it gets a signal and exits
by itself; if it does not, a thread kills it.
"""

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

OUTPUT_BYTES_MAX: Final = 1 << 20  # of output that is kept: one line
_PR_SET_PDEATHSIG: Final = 1
_KINDS: Final = ("RssAnon:", "RssFile:")


@final
class ChildProcess:
    """A child process, and a pipe from it for heartbeats and output.

    The pipe also ties the child to this process: a child exits when its pipe has no reader.
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
        self.last_output_s: float | None = None  # when it last wrote to the pipe
        self.output = b""
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [sys.executable, "-m", module, *arguments, "--heartbeat-fd", str(write_fd)]
        try:
            # In a session of its own: Ctrl-C is for the supervisor, which signals its children.
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
        """The process id."""
        return self._process.pid

    def poll_output(self) -> None:
        """Read from the pipe without blocking."""
        try:
            data = os.read(self._read_fd, 65_536)
        except BlockingIOError:
            return
        if data:
            self.last_output_s = monotonic()
            if b"\n" not in self.output and len(self.output) < OUTPUT_BYTES_MAX:
                self.output += data

    def exit_status(self) -> int | None:
        """Return the exit status; None while the process runs, negative if a signal killed it."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is running."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for the exit; return whether the process has exited."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and its child processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, wait for it, and close the pipe."""
        self.kill()
        self._process.wait()
        os.close(self._read_fd)

    def private_bytes(self) -> int:
        """Return the resident memory without shared memory; 0 if the process has exited."""
        return private_bytes(self.pid)


def describe_exit(status: int) -> str:
    """Return how a process exited, from its status in the convention of `subprocess`.

    >>> describe_exit(-11), describe_exit(3)
    ('signal 11, SIGSEGV', 'exit status 3')
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status}, {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def private_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process without shared memory; 0 if it has exited.

    Anonymous and file-backed pages count. Shared-memory pages do not: they contain the tensors of
    requests, which the gateway limits, and a worker must not be killed for what it was sent. `pid`
    defaults to the calling process.
    """
    status = Path("/proc", "self" if pid is None else str(pid), "status")
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(_KINDS)) * 1024


def set_parent_death_signal(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def watch_supervisor(
    pipe_fd: int, on_gone: Callable[[], None], on_late: Callable[[], None], limit_s: float
) -> None:
    """Call `on_gone` when the pipe has no reader any more, and `on_late` after another `limit_s`.

    Runs in a thread of its own, because the rest of the process may be stuck.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe_fd, 0)  # POLLERR, the closed other end, is always reported
        poll.poll()
        on_gone()
        time.sleep(limit_s)
        on_late()

    Thread(target=watch, name="supervisor-watch", daemon=True).start()


def kill_groups_and_exit(run_dir: Path, group_ids: Iterable[int]) -> NoReturn:
    """Kill these process groups and our own, and remove their run directory."""
    shutil.rmtree(run_dir, ignore_errors=True)
    for group_id in group_ids:
        with suppress(OSError):
            os.killpg(group_id, signal.SIGKILL)
    if os.getpgrp() == os.getpid():  # otherwise the group belongs to the parent
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
