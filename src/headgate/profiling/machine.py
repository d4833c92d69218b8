"""The machine that is measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headgate import __version__

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a reader of a profile wants to know of it."""

    cpu: str
    cores: int  # that this process may use
    memory_bytes: int
    system: str
    python: str
    headgate: str


def this_machine() -> Machine:
    """Look around."""
    return Machine(
        cpu=_cpu(),
        cores=len(usable_cores()),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        headgate=__version__,
    )


def usable_cores(quota_path: Path = _QUOTA) -> list[int]:
    """Return the cores that may be pinned, the best first.

    Those of this process; fewer where a container's quota would hold all of them back. From the
    last one down, because whatever else runs on a machine tends to run on the first.
    """
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    quota = _quota(quota_path)
    return cores if quota is None else cores[: max(1, int(quota))]


def _quota(path: Path) -> float | None:
    """Return how many cores' worth of time the control group gets; None is all of it."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
