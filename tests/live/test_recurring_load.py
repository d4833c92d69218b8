"""A step of the load that recurs: two real gateways start instances before it.

The machine may be busy, so nothing here depends on how long anything takes: the order in which the
event log of a gateway has requests, stops and starts says what was known in advance.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from served import Served

from headgate.core.actions import StartInstance, StopInstance
from headgate.core.event_log import read_log
from headgate.core.events import RequestArrived

FUNCTIONS = '''
import time

from headgate.functions import Model


class Numbers(Model):
    """One number in, one out, in a tenth of a second; to load it takes a second."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def load(self):
        time.sleep(1.0)

    def predict(self, batch):
        time.sleep(0.1)
        return {"y": batch["x"] * 2}
'''
APP = """
functions:
  numbers: {code: "numbers_app:Numbers", batch_max: 1, exec_time: 100ms, cold_start: 1s}
slo: {latency: 3s}
pools:
  local: {tier: dedicated, nodes: 6, cpus: 1, elastic: true}
policy: {name: headgate}
serve: {lame_duck: 200ms, drain: 20s, gateways: 2}
"""
LOW, HIGH = "low", "high"
# Of a season: its part, for how long, and requests per second, for which one instance is enough,
# and four at least are needed.
PARTS = ((LOW, 20, 4), (HIGH, 7, 35))
SEASONS = 5


def send_seasons(served: Served) -> list[int]:
    """Send requests at fixed times, each on a connection of its own; return their statuses."""
    statuses: list[int] = []
    askers: list[threading.Thread] = []

    def ask(request_id: str) -> None:
        statuses.append(served.ask("numbers", [1.0], {"X-Request-Id": request_id})[0])

    at_s = time.monotonic()
    for season in range(SEASONS):
        for part, seconds, per_s in PARTS:
            for number in range(seconds * per_s):
                at_s += 1 / per_s
                time.sleep(max(0.0, at_s - time.monotonic()))
                request_id = f"{part}-{season}-{number}"
                askers.append(threading.Thread(target=ask, args=(request_id,)))
                askers[-1].start()
    for asker in askers:
        asker.join()
    assert len(statuses) == len(askers)
    return statuses


def seasons_foreseen(log: Path) -> set[str]:
    """The seasons in whose low part instances were stopped, and later at least four ordered."""
    part = season = ""
    has_stopped = False
    foreseen: set[str] = set()
    for entry in read_log(log)[1]:
        if isinstance(entry.event, RequestArrived):
            before = (part, season)
            part, season, _ = entry.event.client_request_id.split("-")
            has_stopped = has_stopped and (part, season) == before
        for action in entry.actions:
            if isinstance(action, StopInstance):
                has_stopped = part == LOW
            elif isinstance(action, StartInstance) and action.nth >= 4 and has_stopped:
                foreseen.add(season)
    return foreseen


@pytest.mark.slow
def test_instances_start_before_a_step_that_recurs(tmp_path: Path) -> None:
    """1. Nothing announces the first two steps. 2. Before a later one a gateway orders what it has
    stopped after the last one. 3. Every request has one answer.
    """
    (tmp_path / "numbers_app.py").write_text(FUNCTIONS)
    (tmp_path / "app.yaml").write_text(APP)
    with Served(tmp_path, "--log", "run.log") as served:
        statuses = send_seasons(served)
        assert "ERROR" not in served.errors()
    assert set(statuses) <= {200, 429}  # what no instance could answer in time is refused
    found = [seasons_foreseen(tmp_path / f"run-{index}.log") for index in (0, 1)]
    assert not found[0] & {"0", "1"}
    assert not found[1] & {"0", "1"}
    assert found[0] | found[1]
