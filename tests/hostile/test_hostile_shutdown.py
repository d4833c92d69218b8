"""Shutdown under load: every request gets one response, and no connection is reset."""

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
        signalled_s = time.monotonic()
        assert until(lambda: served.process.poll() is not None, 60)
        results = bystander.stop()
    assert served.process.returncode == 0
    assert not results.resets, str(results)
    assert set(results.errors) <= {"refused"}, str(results)
    assert set(results.statuses) <= {0, 200, 503}, str(results)
    lame_duck = results.between(0.0, signalled_s + 0.5)
    assert lame_duck.share_ok == 1.0, str(lame_duck)
    assert not [pid for pid in everybody if is_running(pid)]


def test_a_killed_supervisor_leaves_nothing_behind_under_load(tmp_path: Path) -> None:
    """Open requests get a response or a closed connection; no process and no file is left."""
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
        results = bystander.stop()
    assert not results.errors["timeout"], str(results)
