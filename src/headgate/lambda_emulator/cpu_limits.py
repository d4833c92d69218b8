"""CPU limits of instances, in proportion to their memory as on AWS.

A cgroup CPU quota limits an instance to any fraction of one CPU or of several. Where no quota can
be set, CPU affinity confines an instance to its number of CPUs, rounded up. Affinity keeps an
instance from using more, but gives a small function more than it would get on AWS. `description`
says which of the two applies.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.lambda_emulator.cleanup_process import kill_control_group, remove_control_group
from headgate.lambda_emulator.settings import CpuMode

# Period of the CPU quota: short, so that a small function runs evenly instead of in bursts.
PERIOD_US: Final = 20_000
QUOTA_US_MIN: Final = 1_000  # the kernel accepts no less
_KILL_TIMEOUT_S: Final = 1.0  # to wait for processes that have been killed


class CpuLimiter:
    """Limits the CPU time of processes. This one limits nothing; the others derive from it."""

    description = "not limited"
    group: Path | None = None  # the control group that holds all processes, if there is one

    def confine(self, pid: int, vcpus: float) -> None:
        """Limit a process that has just been started."""

    def release(self, pid: int) -> None:
        """Release what is held for a process that has exited."""

    def close(self) -> None:
        """Remove everything that was created in the system."""


def threads(vcpus: float) -> int:
    """Return the number of threads that can use a number of CPUs.

    >>> threads(0.07), threads(1.0), threads(1.2)
    (1, 1, 2)
    """
    return max(1, math.ceil(round(vcpus, 3)))


def make_cpu_limiter(mode: CpuMode, cpus: tuple[int, ...] | None) -> CpuLimiter:
    """Return a limiter that works on this machine.

    Raises `ConfigError` if the mode does not work here, or if `cpus` are not available.
    """
    allowed = sorted(os.sched_getaffinity(0))
    selected = list(cpus) if cpus is not None else allowed
    if not selected or not set(selected) <= set(allowed):
        problem, names = "not available to this process", ", ".join(map(str, allowed))
        raise ConfigError(problem, where="platform", key="cpus", value=cpus, allowed=names)
    if mode == "none":
        return CpuLimiter()
    if mode != "affinity":
        group = next(filter(None, map(_make_group, _candidates())), None)
        if group is not None:
            return _CgroupLimiter(*group, None if cpus is None else selected)
    if mode == "cgroup":
        problem, others = "no control group with a CPU quota can be created here", "auto, affinity"
        raise ConfigError(problem, where="platform", key="cpu", value=mode, allowed=others)
    return _AffinityLimiter(selected)


@final
class _CgroupLimiter(CpuLimiter):
    description = "quota of a control group"

    def __init__(self, group: Path, lock: int, cpus: list[int] | None) -> None:
        self.group = self._group = group
        self._lock = lock  # held until `close`, or until this process exits
        self._cpus = cpus

    def confine(self, pid: int, vcpus: float) -> None:
        group = self._group / str(pid)
        group.mkdir(exist_ok=True)  # a group of an earlier process with this ID may be left
        quota_us = max(QUOTA_US_MIN, round(vcpus * PERIOD_US))
        _set_quota(group, quota_us)
        with suppress(ProcessLookupError):  # the process has exited already
            (group / "cgroup.procs").write_text(str(pid))
            if self._cpus is not None:
                os.sched_setaffinity(pid, self._cpus)

    def release(self, pid: int) -> None:
        group = self._group / str(pid)
        kill_control_group(group)  # child processes that the instance has left
        with suppress(OSError):  # some of them are not dead yet: `close` tries again
            group.rmdir()

    def close(self) -> None:
        remove_control_group(self._group)
        end_s = time.monotonic() + _KILL_TIMEOUT_S
        while self._group.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
            kill_control_group(self._group)
            remove_control_group(self._group)
        os.close(self._lock)


@final
class _AffinityLimiter(CpuLimiter):
    description = "whole CPUs by affinity"

    def __init__(self, cpus: list[int]) -> None:
        self._cpus = cpus
        self._used: Counter[int] = Counter()
        self._held: dict[int, list[int]] = {}

    def confine(self, pid: int, vcpus: float) -> None:
        count = min(threads(vcpus), len(self._cpus))
        held = sorted(self._cpus, key=lambda cpu: self._used[cpu])[:count]
        self._used.update(held)
        self._held[pid] = held
        with suppress(ProcessLookupError):
            os.sched_setaffinity(pid, held)

    def release(self, pid: int) -> None:
        self._used.subtract(self._held.pop(pid, ()))


def _candidates() -> list[Path]:
    """Return where a group may be possible: below our own group, and at the root."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []  # this kernel knows no control groups
    own: dict[str, str] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    directories: list[Path] = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        top = Path(before.split(" ")[4])
        if kind == "cgroup2":
            directories += [top / own.get("", "/").lstrip("/"), top]
        elif kind == "cgroup" and "cpu" in options.split(","):
            directories += [top / own.get("cpu", "/").lstrip("/"), top]
    return list(dict.fromkeys(directories))


def _make_group(parent: Path) -> tuple[Path, int] | None:
    """Create a group in which quotas can be set. Returns it with its lock, or None."""
    for old in parent.glob("headgate-*"):
        lock = _lock(old) if re.fullmatch(r"headgate-\d+-\d+", old.name) else None
        if lock is not None:  # unlocked: left by a platform that was killed
            kill_control_group(old)
            remove_control_group(old)
            os.close(lock)
    claimed = _claim_group(parent)
    if claimed is None:
        return None
    group, lock = claimed
    # Quotas are set in subgroups, so try one in a subgroup.
    trial = group / "trial"
    try:
        with suppress(OSError):
            (group / "cgroup.subtree_control").write_text("+cpu")
        trial.mkdir()
        _set_quota(trial, PERIOD_US)
        trial.rmdir()
    except OSError:
        remove_control_group(group)
        os.close(lock)
        return None
    return group, lock


def _claim_group(parent: Path) -> tuple[Path, int] | None:
    """Create an empty group and lock it; None where that is not permitted."""
    for number in itertools.count():
        group = parent / f"headgate-{os.getpid()}-{number}"
        try:
            group.mkdir()
        except FileExistsError:
            continue
        except OSError:
            return None
        lock = _lock(group)
        # A platform that starts at this moment may have removed the group before it was locked.
        if lock is not None and group.exists():
            return group, lock
        if lock is not None:
            os.close(lock)
    return None  # unreachable: `itertools.count` is infinite


def _lock(group: Path) -> int | None:
    """Lock a group as in use. Returns the file descriptor; None if it is locked already."""
    try:
        descriptor = os.open(group, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _set_quota(group: Path, quota_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        # "r+": must not create the file, which is missing in a group without the controller.
        with (group / "cpu.cfs_period_us").open("r+") as file:
            file.write(str(PERIOD_US))
        with (group / "cpu.cfs_quota_us").open("r+") as file:
            file.write(str(quota_us))
