"""Attacks by functions: loads and requests that end their worker, beside other clients."""

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
    """Sends a failing request again and again until `stop`."""

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
        """Stop. Returns the statuses of all responses."""
        self._is_over.set()
        self._thread.join()
        return self.statuses


@pytest.mark.parametrize("name", list(KINDS))
def test_requests_for_a_broken_function_do_not_slow_others(tmp_path: Path, name: str) -> None:
    """Without deadlines, every request of a healthy function gets a response."""
    with Served(write_app(tmp_path, name, "Healthy")) as served:
        workers, began_s = served.workers(), time.monotonic()
        attacker = Attacker(served, name.lower(), 1.0, 0.02)
        with Bystander(served.url, "healthy", sends_deadline=False, timeout_s=60) as bystander:
            time.sleep(3)
            results = bystander.stop()
        assert set(attacker.stop()) == {503}
        assert results.share_ok == 1, results
        assert len(results.rows) > 20
        assert served.workers() == workers
        assert len(loads(tmp_path, name)) <= 3 + time.monotonic() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
def test_other_functions_meet_deadlines_beside_a_broken_one(tmp_path: Path, name: str) -> None:
    with Served(write_app(tmp_path, name, "Healthy")) as served:
        attacker = Attacker(served, name.lower(), 1.0, 0.02)
        with Bystander(served.url, "healthy") as bystander:
            time.sleep(30)
            results = bystander.stop()
        attacker.stop()
        assert results.share_in_time >= 0.99, results


SEGFAULTS = """
functions:
  plain: {code: "misdeeds:Numbers", exec_time: 1ms, idempotent: true}
  segfaults: {code: "misdeeds:Segfaults", exec_time: 1ms, idempotent: true}
pools: {cpu: {tier: dedicated, nodes: 2, cpus: 1}}
serve: {lame_duck: 0s, drain: 5s, execution_timeout: 2s}
"""


def others_beside_segfaults(
    directory: Path, for_s: float, every_s: float
) -> tuple[float, int, int]:
    """The share of other requests with status 200, the number of attacks, and of deaths."""
    with Served(write_misdeeds(directory, SEGFAULTS)) as served:
        attacker = Attacker(served, "segfaults", 666.0, every_s)
        with Bystander(
            served.url, "plain", rate_per_s=60, sends_deadline=False, timeout_s=30
        ) as bystander:
            time.sleep(for_s)
            results = bystander.stop()
        statuses = attacker.stop()
        assert set(statuses) <= {500, 503}
        deaths = served.errors().count("died (signal 11")
    return results.share_ok, len(statuses), deaths


def test_other_requests_beside_segfaulting_ones(tmp_path: Path) -> None:
    """A request kills one worker and no other; the worker is back before the next attack."""
    share, attacks, deaths = others_beside_segfaults(tmp_path, 6, 2.0)
    assert attacks >= 1
    assert deaths <= attacks
    assert share >= 0.95


@pytest.mark.slow
def test_other_requests_beside_segfaulting_ones_for_long(tmp_path: Path) -> None:
    share, attacks, deaths = others_beside_segfaults(tmp_path, 60, 4.0)
    assert attacks >= 8
    assert deaths <= attacks
    assert share >= 0.95
