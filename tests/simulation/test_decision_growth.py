"""A decision examines few candidates, however large the fleet is.

Calls of Python functions per `Scheduler.handle` are counted, not time: a loop over all nodes or all
functions makes at least one call, or one step of a generator, for each of them. The time is in
`headgate bench decisions`.
"""

from __future__ import annotations

import sys
from statistics import median
from types import FrameType

import pytest

from headgate.core import build_kind
from headgate.core.scheduler.scheduler import Scheduler
from headgate.lab.bench._decision_driver import DecisionCase, TimedDriver
from headgate.policies import find_policy

pytestmark = pytest.mark.skipif(
    build_kind() != "interpreted", reason="calls of compiled functions cannot be counted"
)


def calls_per_decision(nodes: int, functions: int, waiting: int, events: int = 200) -> list[int]:
    """How many functions each of the next events calls, with so many requests waiting."""
    driver = TimedDriver(DecisionCase(nodes, functions, waiting), find_policy("headgate"), None)
    driver.join_nodes()
    driver.load_weights()
    driver.send_requests()
    while not driver.is_steady:
        driver.run(100)
    counts: list[int] = []
    code = Scheduler.handle.__code__
    depth = calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, calls
        if event == "call":
            if frame.f_code is code:
                depth, calls = 1, 0
            calls += 1
        elif event == "return" and frame.f_code is code and depth:
            counts.append(calls)
            depth = 0

    sys.setprofile(count)
    try:
        driver.run(events)
    finally:
        sys.setprofile(None)
    return counts


@pytest.mark.parametrize("size", [300, pytest.param(1_000, marks=pytest.mark.slow)])
def test_calls_per_decision_do_not_grow_with_the_fleet(size: int) -> None:
    small = calls_per_decision(nodes=30, functions=30, waiting=300)
    large = calls_per_decision(nodes=size, functions=size, waiting=10 * size)
    assert len(small) >= 200
    assert len(large) >= 200
    assert median(large) <= 2 * median(small)
    # Now and then a pool is divided among its classes, which looks at all of them; or a node looks
    # at all functions that it holds, here up to 100.
    assert sorted(large)[int(0.99 * len(large))] < 800
