"""The machine on which a profile is measured: its description, and the usable cores."""

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
    """Description of a machine, stored in profiles."""

    cpu: str
    cores: int  # usable by this process
    memory_bytes: int
    system: str
    python: str
    headgate: str


def this_machine() -> Machine:
    """Return the description of this machine."""
    return Machine(
        cpu=_cpu(),
        cores=len(usable_cores()),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        headgate=__version__,
    )


def usable_cores(quota_path: Path = _QUOTA) -> list[int]:
    """Return the cores that processes may be pinned to, the best first.

    These are the cores of this process, limited to the CPU quota of its container: more would be
    throttled. The highest core numbers come first, because other programs tend to run on the
    lowest.
    """
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    quota = _quota(quota_path)
    return cores if quota is None else cores[: max(1, int(quota))]


def _quota(path: Path) -> float | None:
    """Return the CPU quota of the control group in cores; None if there is none."""
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
