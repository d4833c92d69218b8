"""What processes ask of the kernel and of libraries: death with the parent, memory, threads."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path


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
