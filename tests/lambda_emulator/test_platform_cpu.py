"""CPU in proportion to memory: by a quota where the machine allows it, else by whole CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from platform_rig import eventually, platform_in

from headgate.core.errors import ConfigError
from headgate.lambda_emulator.cpu_limits import CpuLimiter, make_cpu_limiter


def test_a_quota(tmp_path: Path) -> None:
    """A quarter of the memory of one CPU gets a quarter of a CPU."""
    _shares_or_skip().close()
    with platform_in(tmp_path, cpu="cgroup") as (platform, caller):
        platform.register("quarter", tmp_path / "source", "module.handle", memory_mb=442)
        assert platform.cpu == "quota of a control group"
        caller.invoke("quarter", {})
        used_s = caller.invoke("quarter", {"spin": 1.0}).body["cpu_s"]
        assert 0 < used_s < 0.5, "a quarter at most; less, if others have the CPU"


def test_whole_cpus(tmp_path: Path) -> None:
    """Without quotas, an instance stays on as many CPUs as its memory begins."""
    cpus = sorted(os.sched_getaffinity(0))
    with platform_in(tmp_path, cpu="affinity", cpus=(cpus[-1],)) as (platform, caller):
        assert platform.cpu == "whole CPUs by affinity"
        platform.register("wide", tmp_path / "source", "module.handle", memory_mb=2 * 1_769)
        asked = {"env": ["OMP_NUM_THREADS"]}
        one, two = caller.invoke("f", asked).body, caller.invoke("wide", asked).body
        assert one["cpus"] == two["cpus"] == [cpus[-1]], "where it may not be"
        assert (one["env"], two["env"]) == (
            {"OMP_NUM_THREADS": "1"},
            {"OMP_NUM_THREADS": "2"},
        )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU only")
def test_instances_spread_over_the_cpus() -> None:
    """The least used are taken; what has ended makes room."""
    shares = make_cpu_limiter("affinity", None)
    mine = sorted(os.sched_getaffinity(0))
    try:
        shares.confine(os.getpid(), 1.0)
        assert os.sched_getaffinity(0) == {mine[0]}
        shares.confine(os.getpid(), 1.0)
        assert os.sched_getaffinity(0) == {mine[1]}
        shares.release(os.getpid())
        shares.confine(os.getpid(), float(len(mine)))
        assert os.sched_getaffinity(0) == set(mine)
    finally:
        os.sched_setaffinity(0, mine)


def test_groups_that_were_left_behind_are_removed() -> None:
    """A platform that is killed cannot clean up; the next one does, but leaves those in use."""
    kept = _shares_or_skip()
    group = kept.group
    assert group is not None
    left = group.with_name("headgate-0-0")
    (left / "1").mkdir(parents=True, exist_ok=True)
    _shares_or_skip().close()
    assert group.exists() and not left.exists()
    kept.close()
    assert not group.exists()


def test_whoever_an_instance_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """A process in a session of its own survives its instance, but not its control group."""
    _shares_or_skip().close()
    code = """
import subprocess
def handle(event, context):
    return subprocess.Popen(("sleep", "600"), start_new_session=True).pid
"""
    with platform_in(tmp_path, cpu="cgroup") as (platform, caller):
        group = platform._platform.shares.group
        assert group is not None
        caller.create("daemon", code)
        daemon = caller.invoke("daemon", {}).body
        assert Path(f"/proc/{daemon}/cmdline").read_bytes().startswith(b"sleep")
    assert eventually(lambda: not _runs(daemon))
    assert not group.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # that of a zombie is empty
    except OSError:
        return False


def _shares_or_skip() -> CpuLimiter:
    try:
        return make_cpu_limiter("cgroup", None)
    except ConfigError:
        pytest.skip("no control group can be made here")
