"""Processes: child processes, memory, threads of libraries, and what ends a child.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import IO, Final, NoReturn, final

OUTPUT_BYTES_MAX: Final = 1 << 20  # of a child's output that is kept: one line
# Options of `mallopt`, and the largest values that the GNU library itself adapts them to.
_TRIM_THRESHOLD: Final = (-1, 64 << 20)
_MMAP_THRESHOLD: Final = (-3, 32 << 20)


def set_parent_death_signal(number: signal.Signals, parent_pid: int | None = None) -> None:
    """Have the kernel send this process a signal when its parent dies. Linux only.

    Exits at once if the parent is not `parent_pid` any more: it has died before this call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(number), 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def thread_variables(count: int) -> dict[str, str]:
    """Return environment variables with the number of threads of the libraries behind NumPy.

    The libraries read the variables when they are imported.

    >>> thread_variables(2)["OMP_NUM_THREADS"]
    '2'
    """
    libraries = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")
    return {f"{library}_NUM_THREADS": str(count) for library in libraries}


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for what is allocated next. GNU only.

    Tensors come and go with every request. Memory that goes back to the system in between costs a
    page fault for every 4 kB when it is used again, which takes longer than to fill it.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            library.mallopt(option, value)


def memory_bytes(pid: int | None, *kinds: str) -> int:
    """Return the sum of these kinds of memory of a process; 0 if it has exited.

    Kinds are lines of /proc/PID/status, such as `VmHWM`, the peak of the resident memory. `None` is
    the calling process. `getrusage` would count the memory of the parent at the time of the fork.
    """
    try:
        status = Path("/proc", str(pid or "self"), "status").read_text("ascii", "replace")
    except OSError:
        return 0
    lines = (line.partition(":") for line in status.splitlines())
    return sum(int(value.split()[0]) for kind, _, value in lines if kind in kinds) * 1024


def private_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process without shared memory; 0 if it has exited.

    Anonymous and file-backed pages count. Shared-memory pages do not: they contain the tensors of
    requests, which the gateway limits, and a worker must not be killed for what it was sent.
    """
    return memory_bytes(pid, "RssAnon", "RssFile")


@final
class OtherProcesses:
    """Measures how many of the CPUs that this process may use are used by others. Linux only.

    What this process and its children use does not count, as soon as the children have ended.
    """

    def __init__(self) -> None:
        self._began_s = monotonic()
        self._taken_s = _taken_s() - _own_s()

    def cpus(self) -> float:
        """Return the mean since the beginning; 0 if the system does not tell."""
        taken_s = _taken_s() - _own_s() - self._taken_s
        return max(0.0, taken_s / (monotonic() - self._began_s))


def _taken_s() -> float:
    """Return the time for which our CPUs were busy, or taken by another virtual machine."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = Path("/proc/stat").read_text("ascii").splitlines()
    except OSError:
        return 0.0
    ticks = 0
    for name, *times in map(str.split, lines):
        if name in ours:
            user, nice, system, _, _, irq, softirq, steal = map(int, times[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessTree:
    """A process that is killed with its child processes.

    It has a session of its own, because Ctrl-C is for the parent, which signals its children.
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


def restore_signal_handler(number: signal.Signals) -> None:
    """Make Python handle a signal again whose handler a C library has replaced.

    Only the main thread may call it.
    """
    handler = signal.getsignal(number)
    if handler is not None:  # None: a handler that Python does not know
        signal.signal(number, handler)
        signal.siginterrupt(number, False)


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
