"""Nodes that other gateways keep busy: held back, asked again by urgency, left to others."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from planning_rig import MS, PlanningRig, make_app

from headgate.core.model import Pool, Profile
from headgate.planning.pools.peer_gateways import RETRY_MIN_NS, BusyNodes

BATCH_NS = 64.0 * MS


@pytest.fixture
def rig() -> PlanningRig:
    return PlanningRig(make_app([Profile((10 * MS,))], Pool(0, "gpu", slots=3)))


@pytest.fixture
def busy(rig: PlanningRig) -> BusyNodes:
    return BusyNodes(rig.view, Random(1))


def test_a_node_that_refused_gets_one_more_at_a_time(rig: PlanningRig, busy: BusyNodes) -> None:
    node = rig.view.nodes[0]
    assert not busy.is_held_back(node)
    busy.hold_back(node)
    assert busy.is_held_back(node)
    assert busy.allow_one_more(node)
    assert not busy.is_held_back(node)  # it runs nothing of ours, and may run one batch
    assert busy.allow_one_more(node)
    assert not busy.allow_one_more(node)  # all of its slots are allowed again
    busy.hold_back(node)
    busy.forget(node)
    assert not busy.is_held_back(node)


def test_the_more_urgent_asks_sooner(busy: BusyNodes) -> None:
    """Between a sixteenth and half the time of a batch, with chance of a quarter either way."""
    waits = [
        [busy.retry_at_ns(slack_ns, BATCH_NS) for _ in range(50)]
        for slack_ns in (0.0, 128.0 * MS, inf)
    ]
    assert max(waits[0]) <= 1.25 * BATCH_NS / 16 < 0.75 * 16 * MS <= min(waits[1])
    assert max(waits[1]) <= 20 * MS < 0.75 * BATCH_NS / 2 <= min(waits[2])
    assert max(waits[2]) <= 1.25 * BATCH_NS / 2


def test_best_effort_that_is_refused_often_asks_less_often(busy: BusyNodes) -> None:
    assert busy.retry_at_ns(inf, BATCH_NS, refusals=160) > 3 * busy.retry_at_ns(inf, BATCH_NS)
    assert busy.retry_at_ns(0.0, BATCH_NS, refusals=160) < BATCH_NS / 8


def test_no_node_is_asked_all_the_time(busy: BusyNodes) -> None:
    assert busy.retry_at_ns(0.0, 1.0) == RETRY_MIN_NS


def test_a_free_slot_is_left_to_more_urgent_tasks(rig: PlanningRig, busy: BusyNodes) -> None:
    node = rig.view.nodes[0]
    assert busy.yield_until_ns(node, 0.0, BATCH_NS) is None
    assert busy.yield_until_ns(node, 32.0 * MS, BATCH_NS) == MS
    assert busy.yield_until_ns(node, inf, BATCH_NS) == 8 * MS  # of four batches
    busy.hold_back(node)
    assert busy.yield_until_ns(node, inf, BATCH_NS) is None
