"""The components of the default policy on a Scheduler whose policy decides nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import final

from headgate.core.clock import NEVER_NS
from headgate.core.events import Event, InstanceStarted, NodeJoined, RequestArrived
from headgate.core.model import (
    App,
    FaasPlatform,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Instance, Node, Request, Task
from headgate.core.scheduler.scheduler import Scheduler
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.refusals import Refusals
from headgate.planning.admission.spillover import Spillover
from headgate.planning.dispatch.busy_nodes import BusyNodes
from headgate.planning.dispatch.placement import Placement
from headgate.planning.dispatch.task_queues import TaskQueues
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds

MS = 1_000_000
NODES = Pool(0, "node", nodes=2)
PLATFORM = FaasPlatform(1 << 30, concurrency_max=5, keep_alive_ns=600_000 * MS)
CLOUD = Pool(1, "cloud", Tier.SERVERLESS, nodes=0, faas=PLATFORM)


def cpu_and_gpu_functions(times_ms: Sequence[tuple[int, int]]) -> tuple[Function, ...]:
    """Functions with a build on pool 0 and another on pool 1, and the times of both."""
    return tuple(
        Function(
            id,
            f"f{id}",
            tuple(
                Variant(2 * id + pool, f"f{id}/{pool}", id, (pool,), Profile((ms * MS,)))
                for pool, ms in enumerate(times)
            ),
        )
        for id, times in enumerate(times_ms)
    )


@final
class Silent(Policy):
    """Gives no orders."""

    def on_task_ready(self, task: Task) -> None:
        pass

    def on_capacity(self, node: Node) -> None:
        pass


def make_app(
    profiles: list[Profile],
    *pools: Pool,
    latency_ms: float | None = 100.0,
    pipelines: list[list[tuple[int, tuple[int, ...]]]] | None = None,
) -> App:
    """An application whose functions run on every pool; pipelines are (function, after) pairs."""
    pool_ids = tuple(pool.id for pool in pools)
    functions = tuple(
        Function(i, f"f{i}", (Variant(i, f"f{i}", i, pool_ids, profile),))
        for i, profile in enumerate(profiles)
    )
    slo = Slo(NEVER_NS if latency_ms is None else int(latency_ms * MS))
    shapes = pipelines or [[(function.id, ())] for function in functions]
    return App(
        functions,
        tuple(
            Pipeline(i, f"p{i}", tuple(Stage(functions[f], after) for f, after in shape), slo)
            for i, shape in enumerate(shapes)
        ),
        pools,
    )


@final
class PlanningRig:
    """An application at work, as far as its components are told."""

    def __init__(self, app: App, *, joins: bool = True) -> None:
        self.scheduler = Scheduler(app, PolicyKind(Silent), validate=True)
        self.view = self.scheduler.view
        self.orders = self.scheduler.policy.orders
        self.builds = Builds(self.view)
        self.spillover = Spillover(self.view, self.builds)
        self.admission = AdmissionControl(self.view, self.builds, self.spillover)
        self.refusals = Refusals(self.view, self.builds, self.admission)
        self.queues = TaskQueues(self.view, self.builds, self.admission.budgets, 30.0)
        self.busy = BusyNodes(self.view, self.builds, self.queues, Random(1))
        self.placement = Placement(self.view, self.builds, self.busy, Random(0))
        self.now_ns = 0
        self.requests = 0
        if joins:
            for pool in app.pools:
                for _ in range(pool.nodes if pool.faas is None else 0):
                    self.join(pool.id)

    def tell(self, event: Event, at_ms: float | None = None) -> None:
        if at_ms is not None:
            self.now_ns = int(at_ms * MS)
        self.scheduler.handle(self.now_ns, event)

    def join(self, pool_id: int = 0) -> Node:
        node_id = len(self.view.nodes)
        self.tell(NodeJoined(node_id, pool_id, f"n{node_id}"))
        node = self.view.nodes[node_id]
        self.builds.nodes.on_node_joined(node)
        return node

    def start(self, function_id: int, node: Node, *, is_ready: bool = True) -> Instance:
        """Start the variant of a function on a node."""
        variant = node.variants[function_id]
        assert variant is not None
        instance = self.orders.start(variant, node)
        self.builds.nodes.on_start(instance)
        if is_ready:
            self.tell(InstanceStarted(instance.id, node.id))
            self.builds.nodes.on_instance_started(instance)
        return instance

    def ask(self, pipeline: int = 0, *, items: int = 1, due_ms: float = 0) -> Request:
        """A request arrives, which the Scheduler's own policy leaves alone."""
        number = self.requests
        self.requests += 1
        arrived = RequestArrived(number, pipeline, 0, items, deadline_ns=int(due_ms * MS))
        self.tell(arrived)
        return self.view.requests[number]

    def offer_too_much(self, function_id: int = 0, pool_id: int = 0) -> None:
        """A second of more work than a pool can do, for what gateways think of its load."""
        build = self.build(function_id, pool_id)
        for _ in range(100):
            self.now_ns += 10 * MS
            self.view.now_ns = self.now_ns
            self.builds.observe_load(build, 100.0 * MS)

    def build(self, function_id: int = 0, pool_id: int = 0) -> Build:
        build = self.builds.on_pool[pool_id][function_id]
        assert build is not None
        return build

    def faas(self, function_id: int = 0) -> Build:
        build = self.builds.faas[function_id]
        assert build is not None
        return build
