"""Nodes that other gateways keep busy: held back, asked again by urgency, left to others."""

from __future__ import annotations

from math import inf

import pytest
from planning_rig import MS, PlanningRig, make_app

from headgate.core.events import GatewaysChanged
from headgate.core.model import Pool, Profile
from headgate.core.records import Batch
from headgate.planning.constants import RETRY_MIN_NS
from headgate.planning.dispatch.busy_nodes import BusyNodes

BATCH_NS = 64.0 * MS


@pytest.fixture
def rig() -> PlanningRig:
    return PlanningRig(make_app([Profile((10 * MS,))], Pool(0, "gpu", slots=3)))


@pytest.fixture
def busy(rig: PlanningRig) -> BusyNodes:
    return rig.busy


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
    """Between 1/64 and half the time of a batch, with chance of a quarter either way.

    In between by the square of the time that is left: for two batches 1/8, for three 9/32.
    """
    waits = [
        [busy.retry_at_ns(batches * BATCH_NS, BATCH_NS) for _ in range(50)]
        for batches in (0, 2, 3, 5, inf)
    ]
    for found, part in zip(waits, (1 / 64, 1 / 8, 9 / 32, 1 / 2, 1 / 2), strict=True):
        assert 0.75 * part * BATCH_NS <= min(found) < part * BATCH_NS < max(found)
        assert max(found) <= 1.25 * part * BATCH_NS


def test_best_effort_that_is_refused_often_asks_less_often(busy: BusyNodes) -> None:
    assert busy.retry_at_ns(inf, BATCH_NS, refusals=160) > 3 * busy.retry_at_ns(inf, BATCH_NS)
    assert busy.retry_at_ns(0.0, BATCH_NS, refusals=160) < BATCH_NS / 4  # urgent ones, far sooner


def test_no_node_is_asked_all_the_time(busy: BusyNodes) -> None:
    assert busy.retry_at_ns(0.0, 1.0) == RETRY_MIN_NS


def test_a_free_slot_is_left_to_more_urgent_tasks(rig: PlanningRig, busy: BusyNodes) -> None:
    node = rig.view.nodes[0]
    assert busy.yield_until_ns(node, 0.0, BATCH_NS) is None
    assert busy.yield_until_ns(node, 32.0 * MS, BATCH_NS) == MS
    assert busy.yield_until_ns(node, inf, BATCH_NS) == 8 * MS  # of four batches
    busy.hold_back(node)
    assert busy.yield_until_ns(node, inf, BATCH_NS) is None


def send_one(rig: PlanningRig, *, refusals: int = 0) -> Batch:
    """A batch of one task on the node, which was refused so often before."""
    task = rig.ask(due_ms=1000).tasks[0]
    task.busy_refusals = refusals
    return rig.orders.dispatch([task], rig.view.nodes[0])


def test_a_single_gateway_backs_off(rig: PlanningRig, busy: BusyNodes) -> None:
    batch = send_one(rig)
    assert not busy.on_refused(batch)
    assert busy.on_ended(batch) is None
    assert busy.on_freed(rig.view.nodes[0]) is None
    assert not busy.is_held_back(rig.view.nodes[0])


def test_a_node_that_refused_is_held_back_and_asked_again(
    rig: PlanningRig, busy: BusyNodes
) -> None:
    """The batches of a gateway that has left may still run."""
    node = rig.view.nodes[0]
    rig.start(0, node)
    for count in (2, 1):
        rig.tell(GatewaysChanged(count))
        busy.on_gateways_changed()
    batch = send_one(rig)
    assert busy.on_refused(batch)
    at_ns = busy.on_ended(batch)
    assert at_ns is not None
    assert busy.on_ended(batch) is None
    assert 0 < at_ns <= 1.25 * 10 * MS / 2  # nothing waits: half of a batch, about
    assert busy.is_held_back(node)
    assert busy.on_asked_again(node) is not None  # one of three slots is still withheld
    assert not busy.is_held_back(node)
    assert busy.on_asked_again(node) is None


def test_a_task_that_is_always_refused_fails_in_the_end(rig: PlanningRig, busy: BusyNodes) -> None:
    rig.tell(GatewaysChanged(2))
    busy.on_gateways_changed()
    assert not busy.on_refused(send_one(rig, refusals=1000))


def test_a_free_slot_is_left_to_others_only_where_all_have_too_much(
    rig: PlanningRig, busy: BusyNodes
) -> None:
    node = rig.view.nodes[0]
    rig.tell(GatewaysChanged(4))
    assert busy.on_freed(node) is None
    rig.offer_too_much()
    task = rig.ask(due_ms=1100).tasks[0]
    assert rig.admission.admit(task.request)
    rig.queues.push(task, rig.admission.booked(task))
    at_ns = busy.on_freed(node)
    assert at_ns is not None
    assert at_ns > rig.now_ns
    assert busy.is_held_back(node)
