"""Child processes: start, signals, memory, and what ends them if the supervisor dies.

When the supervisor dies, its children must exit too. The kernel kills a worker, which may be in any
state and would not be restarted. The gateway has clients to answer, so it gets a signal and exits
by itself; if it does not, a thread kills it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import IO, Final, NoReturn, final

from headgate.system.process import private_bytes

OUTPUT_BYTES_MAX: Final = 1 << 20  # of output that is kept: one line


class ProcessTree:
    """A process in a session of its own, which is killed with its child processes.

    In a session of its own, because Ctrl-C is for the parent, which signals its children.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        inherited_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. `environment` is in addition to our own. Raises `OSError`."""
        self.started_s = monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=inherited_fds,
            env=None if environment is None else {**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def exit_status(self) -> int | None:
        """Return the exit status; None while the process runs, negative if a signal killed it."""
        return self.process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is running."""
        self.process.send_signal(number)

    def wait(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for the exit; return whether the process has exited."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and its child processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and its child processes, and wait for it."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # unsent input
                    pipe.close()

    def private_bytes(self) -> int:
        """Return the resident memory without shared memory; 0 if the process has exited."""
        return private_bytes(self.pid)


@final
class ChildProcess(ProcessTree):
    """A Python module as a process, and a pipe from it for heartbeats and output.

    The pipe also ties the child to this process: a child exits when its pipe has no reader.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], *, inherited_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.last_output_s: float | None = None  # when it last wrote to the pipe
        self.output = b""
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        command = [sys.executable, "-m", module, *arguments, "--heartbeat-fd", str(write_fd)]
        try:
            super().__init__(command, inherited_fds=[write_fd, *inherited_fds])
        except BaseException:
            os.close(self._read_fd)
            raise
        finally:
            os.close(write_fd)

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

    def close(self) -> None:
        """Kill the process, wait for it, and close the pipe."""
        super().close()
        os.close(self._read_fd)


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
