"""Compute: the books of Scheduler and Backend agree, and no node is oversubscribed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import Dispatch
from headgate.core.events import BatchRefused, Refusal
from headgate.core.model import COMPUTE_NAMES, UNLIMITED
from headgate.core.policy import Capabilities, Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.core.states import TaskState
from headgate.sim.fuzz import random_case
from headgate.sim.run import Setup, simulate

from .apps import RecordingObserver, run


class Prewarm(Policy):
    """Starts every variant that has room on a node as it joins, and sends what the view allows."""

    def on_node_joined(self, node: Node) -> None:
        for variant in node.variants:
            is_free = node.id in self.view.free_nodes
            if variant is not None and is_free and self.view.can_make_room(node, variant):
                self.orders.start(variant, node)

    def on_task_ready(self, task: Task) -> None:
        self.on_capacity(next(iter(self.view.nodes.values())))

    def on_capacity(self, node: Node) -> None:
        for request in list(self.view.requests.values()):
            for task in list(request.tasks):
                free = self.view.first_free(task.function.id)
                if task.state == TaskState.READY and free is not None:
                    self.orders.dispatch([task], free)


PREWARM = PolicyKind(Prewarm, capabilities=Capabilities(mixed_pools=True))


class Shaper(Policy):
    """Sends every task in a random shape that the view says fits, to a random node."""

    def on_task_ready(self, task: Task) -> None:
        self._serve()

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def _serve(self) -> None:
        for request in list(self.view.requests.values()):
            for task in list(request.tasks):
                if task.state == TaskState.READY:
                    self._send(task)

    def _send(self, task: Task) -> None:
        places = [
            (node, variant, shape_id)
            for node in self.view.free_nodes.values()
            for variant in self.view.all_variants_by_pool[node.pool.id][task.function.id]
            for shape_id in (None, *range(len(variant.shapes)))
            if task.request.items <= variant.items_max(shape_id or 0)
            and self.view.fits(node, variant, shape_id)
        ]
        if places:
            node, variant, shape_id = self.rng.choice(places)
            instance = self.view.instance_for(node, variant, shape_id)
            if instance is None or task.request.items <= variant.items_max(instance.shape_id):
                self.orders.dispatch([task], node, variant, None, shape_id)


SHAPER = PolicyKind(Shaper, capabilities=Capabilities(mixed_pools=True))


def compute_cases(count: int) -> list[int]:
    """Return the seeds of the first random cases in which nodes have little compute."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        pools = random_case(PREWARM.capabilities, seed).app.pools
        if any(pool.cpu_milli < UNLIMITED and pool.slots > 1 for pool in pools):
            found.append(seed)
        seed += 1
    return found


@pytest.mark.parametrize("seed", compute_cases(40))
def test_what_the_view_says_fits_is_never_refused(seed: int) -> None:
    """Also while an instance starts: a start takes a slot in both books, and compute in neither.

    Without faults and timeouts: a batch that was given up as lost still holds what it holds.
    """
    case = random_case(PREWARM.capabilities, seed)
    app = replace(case.app, limits=replace(case.app.limits, timeout_factor=0.0))
    observer = RecordingObserver()
    setup = Setup(app, PREWARM, seed=seed, truth=case.truth, validate=True)
    simulate(setup, case.arrivals, observer=observer)
    refused = [event for _, event in observer.events if isinstance(event, BatchRefused)]
    assert [event.batch_id for event in refused if event.reason == Refusal.BUSY] == []


@pytest.mark.parametrize("compute", range(3), ids=COMPUTE_NAMES)
@pytest.mark.parametrize("seed", compute_cases(15))
def test_shapes_chosen_at_random_stay_within_the_compute_of_a_node(seed: int, compute: int) -> None:
    """Under all checkers; and again, nothing that the view allows is refused."""
    case = random_case(SHAPER.capabilities, seed)
    pools = tuple(replace(pool, compute=compute) for pool in case.app.pools)
    limits = replace(case.app.limits, timeout_factor=0.0)
    app = replace(case.app, pools=pools, limits=limits)
    columns, observer = run(app, case.arrivals, policy=SHAPER)
    refused = [event for _, event in observer.events if isinstance(event, BatchRefused)]
    assert [event.batch_id for event in refused if event.reason == Refusal.BUSY] == []
    assert len(columns.spans) > 0


def test_random_shapes_of_all_kinds_were_chosen() -> None:
    """The test above would be empty if no batch ran in another shape than its variant's own."""
    chosen: set[int] = set()
    for seed in compute_cases(15):
        case = random_case(SHAPER.capabilities, seed)
        _, observer = run(case.app, case.arrivals, policy=SHAPER)
        chosen |= {a.shape_id for a in observer.actions if isinstance(a, Dispatch)}
    assert chosen == {0, 1, 2}
