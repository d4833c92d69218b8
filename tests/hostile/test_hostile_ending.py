"""Told to end under load: every request has its one answer, and no connection is reset."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness import Bystander, is_running, marked_processes, run_directories, write_app
from served import Served, until

APP = """
functions: {plain: {code: "misdeeds:Numbers", batch_max: 4}}
pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}
serve: {lame_duck: 3s, drain: 20s}
"""


@pytest.mark.parametrize("whom", ["the supervisor", "all processes"])
def test_sigterm_under_load(tmp_path: Path, whom: str) -> None:
    """Also as systemd sends it. Within the lame-duck time everything is served as before."""
    with (
        Served(write_app(tmp_path, APP)) as served,
        Bystander(
            served.url, "plain", rate_per_s=100, sends_deadline=False, timeout_s=60
        ) as bystander,
    ):
        time.sleep(0.5)
        everybody = marked_processes(served.mark)
        assert len(everybody) >= 3
        for pid in [served.process.pid] if whom == "the supervisor" else everybody:
            os.kill(pid, signal.SIGTERM)
        told_s = time.monotonic()
        assert until(lambda: served.process.poll() is not None, 60)
        seen = bystander.stop()
    assert served.process.returncode == 0
    assert not seen.resets, str(seen)
    assert set(seen.errors) <= {"refused"}, str(seen)
    assert set(seen.statuses) <= {0, 200, 503}, str(seen)
    lame_duck = seen.between(0.0, told_s + 0.5)
    assert lame_duck.share_ok == 1.0, str(lame_duck)
    assert not [pid for pid in everybody if is_running(pid)]


def test_a_killed_supervisor_leaves_nothing_behind_under_load(tmp_path: Path) -> None:
    """Requests that are open are answered or see the end; no process and no file is left."""
    with (
        Served(write_app(tmp_path, APP)) as served,
        Bystander(
            served.url, "plain", rate_per_s=100, sends_deadline=False, timeout_s=60
        ) as bystander,
    ):
        everybody = marked_processes(served.mark)
        directories = run_directories(everybody)
        assert len(everybody) >= 3 and directories
        served.process.kill()
        assert until(lambda: not marked_processes(served.mark))
        assert until(lambda: not any(path.exists() for path in directories))
        seen = bystander.stop()
    assert not seen.errors["timeout"], str(seen)
