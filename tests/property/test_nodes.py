"""A simulated and a live node that are given the same orders report the same events.

The jobs of the live node are not run: each ends when the same job of the simulated node ends.
"""

from __future__ import annotations

from heapq import heappop
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.actions import (
    Action,
    CancelBatch,
    Dispatch,
    EvictWeights,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.event_log import to_wire
from headgate.core.events import BatchFinished, Event, InstanceStarted
from headgate.core.model import (
    App,
    Compute,
    Function,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Stage,
    Variant,
)
from headgate.live.ipc.messages import RunBatch
from headgate.live.worker import node as live_node
from headgate.live.worker.executor import BatchJob, Job, PrepareJob, UnloadJob
from headgate.live.worker.node import WorkerNode
from headgate.sim.event_queue import Callback, EventQueue
from headgate.sim.ground_truth import GroundTruth, GroundTruthConfig
from headgate.sim.node import EventInTransit, NodeJob, SimNode
from headgate.sim.recorder import Recorder

REQUESTS_MAX = 1_000


def make_app(pool: Pool, concurrency: int) -> App:
    functions = []
    for id in range(3):
        profile = Profile((3 + id,), cold_start_ns=4, swap_in_ns=2)
        more = (ShapeTimes(Shape(1_000, 5), (2,)),)
        variant = Variant(id, f"v{id}", id, (0,), profile, Shape(1_000, 2), concurrency, more)
        functions.append(Function(id, f"f{id}", (variant,)))
    pipeline = Pipeline(0, "p", (Stage(functions[0]),))
    return App(tuple(functions), (pipeline,), (pool,))


class Connection(SimpleNamespace):
    """Equal only to itself, as the connection of a gateway is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class LiveSide:
    """A worker's node, with an executor that runs nothing and one gateway that keeps events."""

    def __init__(self, app: App) -> None:
        self.events: list[Event] = []
        self.jobs: list[Job] = []
        self.fails_to_start = False
        self.now_ns = 0
        self.gateway = cast(
            "Any",
            Connection(
                first_id=0,
                local_id=lambda id: id,
                resolve_blocks=lambda run: None,
                report=self.events.append,
                send=lambda reply: None,
            ),
        )
        cache = SimpleNamespace(
            has=lambda variant, shape_id: True,
            cores_of=lambda variant, shape_id: 0,
            release=lambda *_, **__: None,
            size_bytes=lambda variant: 0,
        )
        self.node = WorkerNode(
            0, app.pools[0], app, {}, Path(), cast("Any", cache), cast("Any", None),
            cast("Any", SimpleNamespace(submit=self.submit)), 1, cast("Any", None),
        )  # fmt: skip
        self.node.add_gateway(self.gateway)

    def submit(self, job: Job, *, runs_inline: bool = False) -> None:
        if not isinstance(job, UnloadJob):
            self.jobs.append(job)

    def execute(self, order: Action) -> None:
        if isinstance(order, Dispatch):
            assert order.instance_id is not None
            ids = (order.batch_id, order.variant_id, order.instance_id)
            run = RunBatch(*ids, 1, [], order.shape_id)
            self.node.dispatch(self.gateway, run)
        else:
            self.node.execute(self.gateway, order)

    def end(self, order: Action) -> None:
        """End the job of an order."""
        job = next(job for job in self.jobs if to_wire(_action(job))[:2] == to_wire(order)[:2])
        self.jobs.remove(job)
        if isinstance(job, BatchJob):
            self.events.append(BatchFinished(job.action.batch_id))
        elif isinstance(job, PrepareJob) and isinstance(order, StartInstance):
            if self.fails_to_start:
                job.error = "failed to start"
            else:
                runner = SimpleNamespace(name="f", mean_exec_ns=0, signature=None)
                job.loaded = cast("Any", SimpleNamespace(on=lambda cores: runner, runner=runner))
        job.on_done()


def _action(job: Job) -> Action:
    assert isinstance(job, BatchJob | PrepareJob)
    return job.action


class Pair:
    """Both nodes, at the same simulated time."""

    def __init__(self, pool: Pool, concurrency: int) -> None:
        app = make_app(pool, concurrency)
        self.queue = EventQueue()
        recorder = Recorder(records_arrivals=False, records_spans=False, size=REQUESTS_MAX)
        truth = GroundTruth(GroundTruthConfig(), 0)
        self.sim = SimNode(0, "gpu1", pool, app, self.queue, truth, recorder)
        self.sim.join(0)
        self.live = LiveSide(app)
        self.events: list[Event] = []
        self.started: set[int] = set()

    def execute(self, order: Action) -> None:
        self.sim.execute(self.live.now_ns, order)
        self.live.execute(order)
        self.advance(self.live.now_ns)

    def set_fault(self, *, is_on: bool) -> None:
        self.sim.break_start_faults = int(is_on)
        self.live.fails_to_start = is_on

    def advance(self, until_ns: int) -> None:
        """Let time pass, job by job; both have reported the same at every instant."""
        heap = self.queue.heap
        while heap and heap[0][0] <= until_ns:
            at_ns, _, _, item = heappop(heap)
            if at_ns > self.live.now_ns:
                self.compare()
            self.live.now_ns = at_ns
            if isinstance(item, NodeJob):
                event = self.sim.end_job(at_ns, item)
                assert event is not None
                self.events.append(event)
                self.live.end(item.action)
            elif isinstance(item, Callback):  # an idle timer
                item.call(at_ns)
                self.live.node.retire_idle(at_ns)
            else:
                assert isinstance(item, EventInTransit)
                self.events.append(item.event)
        self.live.now_ns = max(self.live.now_ns, until_ns)
        self.compare()

    def compare(self) -> None:
        started = (e.instance_id for e in self.events if isinstance(e, InstanceStarted))
        self.started.update(started)
        expected, found = (
            sorted(map(to_wire, events), key=repr) for events in (self.events, self.live.events)
        )
        assert found == expected
        self.events.clear()
        self.live.events.clear()


KINDS = ["start", "batch", "batch", "batch", "wait", "wait", "load", "evict", "stop", "cancel"]


@given(
    steps=st.lists(st.tuples(st.sampled_from([*KINDS, "fault"]), st.integers(0, 4)), max_size=50),
    slots=st.integers(1, 3),
    queue_max=st.integers(0, 2),
    concurrency=st.integers(1, 2),
    compute=st.integers(0, 2),
)
def test_both_nodes_report_the_same_events(
    *, steps: list[tuple[str, int]], slots: int, queue_max: int, concurrency: int, compute: int
) -> None:
    pool = Pool(
        0, "gpu", slots=slots, queue_max=queue_max, idle_timeout_ns=6, gpu_sevenths=7,
        compute=compute,
    )  # fmt: skip
    pair = Pair(pool, concurrency)
    instances = 0
    shapes: list[int] = []  # by instance id
    with patch.object(live_node, "monotonic_ns", lambda: pair.live.now_ns):
        for number, (kind, choice) in enumerate(steps):
            id = choice % instances if instances else 0
            if kind == "start":
                shapes.append(0 if compute == Compute.PER_BATCH else choice % 2)
                pair.execute(StartInstance(instances, choice % 3, 0, 0, shapes[instances]))
                instances += 1
            elif kind == "wait":
                pair.advance(pair.live.now_ns + choice)
            elif kind == "fault":
                pair.set_fault(is_on=choice > 2)
            elif kind != "load" or id in pair.started:  # a worker refuses to load what never began
                shape_id = shapes[id] if shapes and compute != Compute.PER_BATCH else choice % 2
                orders: dict[str, Action] = {
                    "batch": Dispatch(number, 0, [], 1, 0, 0, id, shape_id=shape_id),
                    "load": LoadWeights(id, 0),
                    "evict": EvictWeights(id, 0),
                    "stop": StopInstance(id, 0),
                    "cancel": CancelBatch(number - choice - 1, 0, 0),
                }
                if kind != "cancel" or number > choice:
                    pair.execute(orders[kind])
        pair.advance(pair.live.now_ns + 1_000)
    assert not pair.live.jobs
    assert not pair.sim.jobs
