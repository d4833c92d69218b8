"""CPU in proportion to memory: by a cgroup quota where possible, else by affinity."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from platform_rig import eventually, is_running, platform_in

from headgate.core.errors import ConfigError
from headgate.lambda_emulator.cpu_limits import CpuLimiter, make_cpu_limiter


def test_cgroup_quota(tmp_path: Path) -> None:
    """A quarter of the memory of a vCPU comes with a quarter of a CPU."""
    _limiter_or_skip().close()
    with platform_in(tmp_path, cpu="cgroup") as (platform, caller):
        platform.register("quarter", tmp_path / "source", "module.handle", memory_mb=442)
        assert platform.cpu == "quota of a control group"
        caller.invoke("quarter", {})
        used_s = caller.invoke("quarter", {"spin": 1.0}).body["cpu_s"]
        assert 0 < used_s < 0.5, "at most a quarter; less on a busy machine"


def test_affinity(tmp_path: Path) -> None:
    """Without quotas, an instance is pinned to its number of CPUs, rounded up."""
    cpus = sorted(os.sched_getaffinity(0))
    with platform_in(tmp_path, cpu="affinity", cpus=(cpus[-1],)) as (platform, caller):
        assert platform.cpu == "whole CPUs by affinity"
        platform.register("wide", tmp_path / "source", "module.handle", memory_mb=2 * 1_769)
        request = {"env": ["OMP_NUM_THREADS"]}
        one, two = caller.invoke("f", request).body, caller.invoke("wide", request).body
        assert one["cpus"] == two["cpus"] == [cpus[-1]], "runs on another CPU"
        assert (one["env"], two["env"]) == (
            {"OMP_NUM_THREADS": "1"},
            {"OMP_NUM_THREADS": "2"},
        )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU only")
def test_affinity_balances_instances_over_cpus() -> None:
    """The least used CPUs are taken; released CPUs are reused."""
    cpu_limiter = make_cpu_limiter("affinity", None)
    mine = sorted(os.sched_getaffinity(0))
    try:
        cpu_limiter.confine(os.getpid(), 1.0)
        assert os.sched_getaffinity(0) == {mine[0]}
        cpu_limiter.confine(os.getpid(), 1.0)
        assert os.sched_getaffinity(0) == {mine[1]}
        cpu_limiter.release(os.getpid())
        cpu_limiter.confine(os.getpid(), float(len(mine)))
        assert os.sched_getaffinity(0) == set(mine)
    finally:
        os.sched_setaffinity(0, mine)


def test_stale_control_groups_are_removed() -> None:
    """A platform removes groups of killed platforms, and leaves groups in use."""
    kept = _limiter_or_skip()
    group = kept.group
    assert group is not None
    left = group.with_name("headgate-0-0")
    (left / "1").mkdir(parents=True, exist_ok=True)
    _limiter_or_skip().close()
    assert group.exists() and not left.exists()
    kept.close()
    assert not group.exists()


def test_daemons_of_an_instance_are_killed_with_its_control_group(tmp_path: Path) -> None:
    """A process in a session of its own is outside the process group, but in the cgroup."""
    _limiter_or_skip().close()
    code = """
import subprocess
def handle(event, context):
    return subprocess.Popen(("sleep", "600"), start_new_session=True).pid
"""
    with platform_in(tmp_path, cpu="cgroup") as (platform, caller):
        group = platform._platform.cpu_limiter.group
        assert group is not None
        caller.create("daemon", code)
        daemon = caller.invoke("daemon", {}).body
        assert Path(f"/proc/{daemon}/cmdline").read_bytes().startswith(b"sleep")
    assert eventually(lambda: not is_running(daemon))
    assert not group.exists()


def _limiter_or_skip() -> CpuLimiter:
    try:
        return make_cpu_limiter("cgroup", None)
    except ConfigError:
        pytest.skip("no control group can be made here")
