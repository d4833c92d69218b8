"""The tools of the hostile tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from harness import (
    Bystander,
    BystanderResults,
    PeakMemory,
    Row,
    descendants,
    is_running,
    kill_all,
    marked_processes,
    rss_bytes,
    run_directories,
    write_app,
)
from served import Served, until

APP = 'functions: {plain: {code: "misdeeds:Numbers", batch_max: 4}}\nserve: {lame_duck: 0s}\n'


def test_a_bystander_records_what_its_server_does(tmp_path: Path) -> None:
    """Responses while the server runs; connections refused or cut when it does not."""
    with Served(write_app(tmp_path, APP)) as served:
        generous_ms = 30_000.0
        with Bystander(served.url, "plain", deadline_ms=generous_ms, timeout_s=60) as bystander:
            assert until(lambda: "plain" in served.get("/metrics")[1])
            results = bystander.stop()
        assert results.rows
        assert results.share_in_time == results.share_ok == 1.0, str(results)
        assert not results.resets
        with Bystander(served.url, "nobody") as bystander:
            assert set(bystander.stop().statuses) == {404}
        url = served.url
    with Bystander(url, "plain") as bystander:
        assert set(bystander.stop().errors) == {"refused"}


def test_summary_of_records() -> None:
    rows = [Row(float(i), 200, float(i), "") for i in range(1, 101)]
    rows += [Row(101.0, 0, 5.0, "reset"), Row(102.0, 503, 5.0, ""), Row(103.0, 0, 5.0, "timeout")]
    results = BystanderResults(tuple(rows), deadline_ms=50.0)
    assert results.share_ok == 100 / 103
    assert results.share_in_time == 50 / 103
    assert results.resets == 1
    assert results.between(1.0, 101.0).percentile_ms(99) == 99.0
    assert results.between(1.0, 101.0).percentile_ms(100) == 100.0


def test_processes_of_a_server_are_found(tmp_path: Path) -> None:
    """Also those whose parent has ended."""
    with Served(write_app(tmp_path, APP)) as served:
        family = descendants(served.process.pid)
        assert {*served.workers(), *served.gateways(), served.process.pid} == set(family)
        assert set(marked_processes(served.mark)) == set(family)
        (directory,) = run_directories(family)
        assert directory.is_dir()
    assert not directory.exists()
    assert until(lambda: not marked_processes(served.mark))
    assert not any(map(is_running, family))


def test_memory_is_sampled_while_it_is_held() -> None:
    code = "import sys; held = b'x' * (200 << 20); print(1, flush=True); sys.stdin.read()"
    with _child(code) as process:
        with PeakMemory(lambda: [process.pid]) as peak:
            assert until(lambda: peak.bytes_max > 200 << 20)
        kill_all([process.pid])
        process.wait()
        assert rss_bytes(process.pid) == 0
    assert process.returncode == -signal.SIGKILL
    assert rss_bytes(os.getpid()) > 0


def _child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
