"""Compute: the books of Scheduler and Backend agree, and no node is oversubscribed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.actions import Dispatch
from headgate.core.events import BatchRefused, Refusal
from headgate.core.model import (
    COMPUTE_NAMES,
    UNLIMITED,
    App,
    Compute,
    Pool,
    Shape,
    ShapeTimes,
    Stage,
)
from headgate.core.policy import Capabilities, Policy, PolicyKind
from headgate.core.records import Batch, Node, Task
from headgate.core.states import BatchState, InstanceState, TaskState
from headgate.sim.faults import Fault
from headgate.sim.fuzz import random_case
from headgate.sim.run import Setup, simulate

from .apps import MS, RecordingObserver, at_ms, make_app, run


class Prewarm(Policy):
    """Starts every variant that has room on a node as it joins, and sends what the view allows.

    Now and then it calls off a start.
    """

    def on_node_joined(self, node: Node) -> None:
        for variant in node.variants:
            is_free = node.id in self.view.free_nodes
            if variant is not None and is_free and self.view.can_make_room(node, variant):
                self.orders.start(variant, node)

    def on_task_ready(self, task: Task) -> None:
        starting = [i for i in self.view.instances.values() if i.state == InstanceState.STARTING]
        if starting and self.rng.random() < 0.3:
            self.orders.stop(self.rng.choice(starting))
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


COMPUTE_CASES = compute_cases(40)


# In the last three, a start is called off while the node is full.
@pytest.mark.parametrize("seed", [*COMPUTE_CASES, 27, 416, 555])
def test_what_the_view_says_fits_is_never_refused(seed: int) -> None:
    """Also while an instance starts: a start takes a slot in both books, and compute in neither.

    A start that nobody wants any more holds its slot until it has ended.
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
@pytest.mark.parametrize("seed", COMPUTE_CASES[:15])
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


MILLI_USD_PER_MS = 3_600.0  # dollars per hour


def priced(compute: int) -> App:
    """One function in shapes of 2/7 and 5/7 (10 and 6 ms), which takes 4 ms to start; two nodes.

    A GPU costs seven thousandths of a dollar per millisecond, so 1/7 costs one.
    """
    app = make_app(exec_ms=(10,), start_ms=4)
    variant = replace(
        app.functions[0].variants[0],
        shape=Shape(1_000, 2),
        more_shapes=(ShapeTimes(Shape(1_000, 5), (6 * MS,)),),
    )
    function = replace(app.functions[0], variants=(variant,))
    pool = Pool(
        0, "gpu", nodes=2, slots=4, cpu_milli=8_000, gpu_sevenths=7, compute=compute,
        gpu_usd_per_hour=7 * MILLI_USD_PER_MS,
    )  # fmt: skip
    pipeline = replace(app.pipelines[0], stages=(Stage(function),))
    return replace(app, functions=(function,), pipelines=(pipeline,), pools=(pool,))


class TwoContainers(Policy):
    """Starts one instance of each shape on the first node, and sends one task to each.

    The instance whose batch ends first is stopped then; the other one lives to the end of the run.
    """

    def on_node_joined(self, node: Node) -> None:
        if node.id == 0:
            variant = self.view.app.variants[0]
            is_bound = node.pool.compute != Compute.PER_BATCH
            for shape_id in range(2):
                self.orders.start(variant, node, shape_id if is_bound else 0)

    def on_capacity(self, node: Node) -> None:
        pass

    def on_task_ready(self, task: Task) -> None:
        if task.attempts_made:
            self.orders.expire(task.request, "its node has died")
            return
        node = self.view.nodes[0]
        shape_id = task.request.id
        instance = node.by_variant[0][shape_id]
        self.orders.dispatch([task], node, None, instance, shape_id)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        is_finished = batch.state == BatchState.FINISHED
        if batch.instance is not None and is_finished and self.view.requests:
            self.orders.stop(batch.instance)


@pytest.mark.parametrize(
    ("compute", "bills"),
    [
        # 10 ms of 2/7, and 6 ms of 5/7: only what batches hold is paid for.
        (Compute.PER_BATCH, [(0, 20, 20), (0, 30, 30)]),
        (Compute.PER_INSTANCE, [(0, 20, 20), (1, 30, 30)]),
        # From the start at 0: until the batch from 100 to 110, or to 106, has ended.
        (Compute.RESIDENT, [(0, 20, 2 * 110), (1, 30, 5 * 106)]),
    ],
    ids=COMPUTE_NAMES,
)
def test_two_instances_of_a_variant_on_a_node_are_billed_apart(
    compute: int, bills: list[tuple[int, float, float]]
) -> None:
    columns, _ = run(priced(compute), at_ms(100, 100), policy=PolicyKind(TwoContainers))
    found = [
        (use.shape, round(use.usage_usd * 1e3, 6), round(use.allocation_usd * 1e3, 6))
        for use in columns.instances
    ]
    assert found == bills
    assert [(use.node, use.batches, use.start_ns) for use in columns.instances] == [(0, 1, 0)] * 2
    assert sum(each.usage_usd for each in columns.resources) == pytest.approx(0.05)
    total_usd = sum(bill for _, _, bill in bills) / 1e3
    assert columns.resources[0].allocation_usd == pytest.approx(total_usd)


def test_a_crash_ends_the_bill() -> None:
    """The node dies at 103: 3 ms of each batch are paid, and 103 ms of each slice."""
    crash = Fault("crash", 103 * MS, until_ns=200 * MS, node=0)
    columns, _ = run(
        priced(Compute.RESIDENT), at_ms(100, 100), crash, policy=PolicyKind(TwoContainers)
    )
    paid = [(use.usage_usd * 1e3, use.allocation_usd * 1e3) for use in columns.instances]
    assert paid == [pytest.approx(bill) for bill in ((6, 206), (15, 515))]
