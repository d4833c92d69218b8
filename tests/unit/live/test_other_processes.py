"""How much other processes use of our CPUs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from headgate.system import process
from headgate.system.process import OtherProcesses

SPIN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_our_own_work_and_that_of_our_children_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 2 s the CPUs were busy for 3.5 s, of which 2.5 s were ours."""
    taken_s, own_s, now_s = [10.0, 13.5], [4.0, 6.5], [100.0, 102.0]
    monkeypatch.setattr(process, "_taken_s", lambda: taken_s.pop(0))
    monkeypatch.setattr(process, "_own_s", lambda: own_s.pop(0))
    monkeypatch.setattr(process, "monotonic", lambda: now_s.pop(0))
    assert OtherProcesses().cpus() == pytest.approx(0.5)


def test_a_process_that_is_not_our_child_counts() -> None:
    others = OtherProcesses()
    subprocess.run(["setsid", "--fork", sys.executable, "-c", SPIN], check=True)
    for _ in range(600):
        time.sleep(0.1)
        if others.cpus() > 0.0:
            return
    raise AssertionError("half a second of CPU time was not seen within a minute")
