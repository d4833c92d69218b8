"""How much memory a process holds for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final


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
