"""Attacks by functions: loads and requests that end their worker, beside innocent clients."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from harness import Bystander
from harness import write_app as write_misdeeds
from load_failures_app import KINDS, loads, write_app
from served import Served


class Attacker:
    """Asks for something that cannot go well, again and again, until it is told to stop."""

    def __init__(self, served: Served, model: str, value: float, every_s: float) -> None:
        self.statuses: list[int] = []
        self._served = served
        self._asked = (model, [value])
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.statuses.append(self._served.ask(*self._asked)[0])

    def stop(self) -> list[int]:
        """The statuses of all its answers."""
        self._is_over.set()
        self._thread.join()
        return self.statuses


@pytest.mark.parametrize("name", list(KINDS))
def test_requests_for_what_cannot_be_loaded_cost_innocents_nothing(
    tmp_path: Path, name: str
) -> None:
    """Innocents wait for their answers: none may be missing, whatever the machine is busy with."""
    with Served(write_app(tmp_path, name, "Healthy")) as served:
        workers, began_s = served.workers(), time.monotonic()
        attacker = Attacker(served, name.lower(), 1.0, 0.02)
        with Bystander(served.url, "healthy", sends_deadline=False, timeout_s=60) as bystander:
            time.sleep(3)
            seen = bystander.stop()
        assert set(attacker.stop()) == {503}
        assert seen.share_ok == 1, seen
        assert len(seen.rows) > 20
        assert served.workers() == workers
        assert len(loads(tmp_path, name)) <= 3 + time.monotonic() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
def test_innocents_beside_what_cannot_be_loaded_are_in_time(tmp_path: Path, name: str) -> None:
    with Served(write_app(tmp_path, name, "Healthy")) as served:
        attacker = Attacker(served, name.lower(), 1.0, 0.02)
        with Bystander(served.url, "healthy") as bystander:
            time.sleep(30)
            seen = bystander.stop()
        attacker.stop()
        assert seen.share_in_time >= 0.99, seen


SEGFAULTS = """
functions:
  plain: {code: "misdeeds:Numbers", exec_time: 1ms, idempotent: true}
  segfaults: {code: "misdeeds:Segfaults", exec_time: 1ms, idempotent: true}
pools: {cpu: {tier: dedicated, nodes: 2, cpus: 1}}
serve: {lame_duck: 0s, drain: 5s, execution_timeout: 2s}
"""


def innocents_beside_segfaults(
    directory: Path, for_s: float, every_s: float
) -> tuple[float, int, int]:
    """The share of innocents that were answered, how many attacks there were, and deaths."""
    with Served(write_misdeeds(directory, SEGFAULTS)) as served:
        attacker = Attacker(served, "segfaults", 666.0, every_s)
        with Bystander(
            served.url, "plain", rate_per_s=60, sends_deadline=False, timeout_s=30
        ) as bystander:
            time.sleep(for_s)
            seen = bystander.stop()
        statuses = attacker.stop()
        assert set(statuses) <= {500, 503}
        deaths = served.errors().count("died (signal 11")
    return seen.share_ok, len(statuses), deaths


def test_innocents_beside_segfaulting_requests(tmp_path: Path) -> None:
    """A request kills one worker, alone, and no other; the worker is back before the next one."""
    share, attacks, deaths = innocents_beside_segfaults(tmp_path, 6, 2.0)
    assert attacks >= 1
    assert deaths <= attacks
    assert share >= 0.95


@pytest.mark.slow
def test_innocents_beside_segfaulting_requests_for_long(tmp_path: Path) -> None:
    share, attacks, deaths = innocents_beside_segfaults(tmp_path, 60, 4.0)
    assert attacks >= 8
    assert deaths <= attacks
    assert share >= 0.95
