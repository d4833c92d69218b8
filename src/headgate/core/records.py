"""The mutable state of a Scheduler: requests, tasks, batches, instances, nodes.

Plain slotted classes, because some are made for every request and a compiled build turns them into
C structs. The Scheduler (through its `StateWriter`) writes them; policies only read them.

An *attempt* is a task's membership in a batch; it has no record of its own. A task counts its
attempts; retries and competing copies (hedging) are both just more attempts. A RUNNING task has one
attempt in flight, plus `copies_in_flight` competing copies.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.model import UNLIMITED, Compute, Function, Pipeline, Pool, Stage, Variant
from headgate.core.states import (
    BATCH_IN_FLIGHT,
    REQUEST_OPEN,
    TASK_BLOCKED,
    InstanceState,
    NodeState,
    Residency,
)

# Task ids are request id * STAGES_MAX + stage, so that a log needs no table to read them.
STAGES_MAX: Final = 256


@final
class Request:
    """One invocation of a pipeline, with its tasks. The deadline is computed once, at arrival."""

    __slots__ = (
        "arrival_ns",
        "client",
        "cost_usd",
        "deadline_ns",
        "id",
        "is_hard",
        "items",
        "payload_bytes",
        "pipeline",
        "priority",
        "state",
        "tasks",
        "tasks_left",
        "would_be_rejected",
    )

    def __init__(
        self,
        id: int,
        pipeline: Pipeline,
        client: int,
        items: int,
        priority: int,
        arrival_ns: int,
        deadline_ns: int,
        payload_bytes: int = 0,
        cost_usd: float = 0.0,
    ) -> None:
        self.id = id
        self.pipeline = pipeline
        self.client = client
        self.items = items
        # Smaller is more urgent. The client chooses it, so it orders this client's requests alone.
        self.priority = priority
        self.arrival_ns = arrival_ns
        self.deadline_ns = deadline_ns
        self.payload_bytes = payload_bytes  # of a FaaS call that carries its inputs; 0: unknown
        self.cost_usd = cost_usd or pipeline.slo.cost_usd  # the cost objective; inf: none
        self.is_hard = False  # it expires if it still waits at its deadline
        self.would_be_rejected = False  # the policy rejected it, and admission is only observed
        self.state: int = REQUEST_OPEN
        tasks: list[Task] = []
        for stage in pipeline.stages:
            tasks.append(Task(id * STAGES_MAX + len(tasks), self, stage))
        self.tasks = tasks
        self.tasks_left = len(tasks)


@final
class Task:
    """One stage of one request; it becomes ready when its predecessors are done."""

    __slots__ = (
        "attempts_made",
        "busy_refusals",
        "copies_in_flight",
        "function",
        "id",
        "must_run_alone",
        "node_id",
        "payload_bytes",
        "pool_id",
        "refusals",
        "request",
        "stage",
        "state",
        "waits_for",
    )

    def __init__(self, id: int, request: Request, stage: Stage) -> None:
        self.id = id
        self.request = request
        self.stage = stage
        self.function: Function = stage.function
        self.state: int = TASK_BLOCKED
        self.waits_for = len(stage.after)
        self.copies_in_flight = 0  # attempts in flight beside the first, while it is RUNNING
        self.attempts_made = 0
        self.refusals = 0
        self.busy_refusals = 0  # those that the policy deals with: `Policy.backs_off`
        self.must_run_alone = False  # quarantined: it may have killed a worker, so it runs alone
        # Payload of a FaaS call that carries its inputs, as far as known; raised to above the
        # platform's limit once a call was too large.
        self.payload_bytes = 0 if stage.after else request.payload_bytes
        # Where the result is once the task is done: its successors read it there. A FaaS pool
        # names no node.
        self.pool_id: int | None = None
        self.node_id: int | None = None


@final
class Datum:
    """The size and location of an intermediate result that successor tasks read."""

    __slots__ = ("node_id", "pool_id", "size_bytes", "task_id")

    def __init__(
        self, task_id: int, pool_id: int | None, node_id: int | None, size_bytes: int
    ) -> None:
        self.task_id = task_id
        self.pool_id = pool_id
        self.node_id = node_id
        self.size_bytes = size_bytes


@final
class Instance:
    """A variant of a function on a node. A node may hold several instances of a variant."""

    __slots__ = (
        "holds_compute",
        "id",
        "is_in_use",
        "is_preparing",
        "last_used_ns",
        "node",
        "pool",
        "residency",
        "running",
        "shape_id",
        "state",
        "variant",
    )

    def __init__(
        self,
        id: int,
        variant: Variant,
        pool: Pool,
        node: Node | None,
        now_ns: int,
        shape_id: int = 0,
    ) -> None:
        self.id = id
        self.variant = variant
        self.pool = pool
        self.node = node  # None until a pool that picks the node has reported it
        self.state: int = InstanceState.STARTING
        self.residency: int = Residency.NOWHERE
        self.is_preparing = False  # starting or loading weights: it holds a slot of its node
        # What it was started with; of no meaning where a dispatch chooses the shape.
        self.shape_id = shape_id
        self.holds_compute = False  # it holds its shape, because compute is resident on its node
        self.running = 0  # batches of this Scheduler in flight on it
        # False once nobody, whichever Scheduler, has used it for `Variant.unused_after_ns`.
        self.is_in_use = True
        self.last_used_ns = now_ns


@final
class Node:
    """A machine or an accelerator, as this Scheduler believes it to be.

    Other Schedulers may use the node too, so `running` counts only this Scheduler's batches;
    whether the node can take one more is decided by its Backend.
    """

    __slots__ = (
        "binds_at_start",
        "blocked_until_ns",
        "by_variant",
        "counts_batches",
        "cpu_milli_used",
        "gpu_sevenths_used",
        "has_resident_compute",
        "host_bytes_used",
        "id",
        "instances",
        "limits_compute",
        "memory_used_bytes",
        "name",
        "pool",
        "replicas",
        "running",
        "slots",
        "state",
        "variants",
    )

    def __init__(
        self, id: int, name: str, pool: Pool, variants: tuple[Variant | None, ...]
    ) -> None:
        self.id = id
        self.name = name
        self.pool = pool
        # By function id: the variant that is fastest here, or None. It is the one that a
        # policy gets that does not choose; `App.variants_in` has all of them.
        self.variants = variants
        self.slots = pool.slots
        self.limits_compute = pool.cpu_milli < UNLIMITED or pool.gpu_sevenths < UNLIMITED
        is_resident = pool.compute == Compute.RESIDENT
        self.has_resident_compute = self.limits_compute and is_resident  # instances hold compute
        self.counts_batches = self.limits_compute and not is_resident  # running batches do
        self.binds_at_start = pool.compute != Compute.PER_BATCH  # instances have a shape
        self.state: int = NodeState.DOWN
        self.running = 0
        self.blocked_until_ns = 0
        self.cpu_milli_used = 0
        self.gpu_sevenths_used = 0
        self.memory_used_bytes = 0
        self.host_bytes_used = 0
        # By variant id: its oldest instance here. That is the only one unless a policy has started
        # more, so a policy that keeps one per node needs no other query.
        self.instances: dict[int, Instance] = {}
        self.by_variant: dict[int, list[Instance]] = {}  # all instances, oldest first
        self.replicas = 0  # instances beside the oldest of their variant


@final
class Batch:
    """Tasks of one function dispatched together to an instance, or to a FaaS pool."""

    __slots__ = (
        "id",
        "instance",
        "items",
        "node",
        "pool",
        "sent_ns",
        "shape_id",
        "state",
        "tasks",
        "variant",
    )

    def __init__(
        self,
        id: int,
        variant: Variant,
        tasks: list[Task],
        items: int,
        instance: Instance | None,
        node: Node | None,
        pool: Pool,
        sent_ns: int,
        shape_id: int = 0,
    ) -> None:
        self.id = id
        self.variant = variant
        self.tasks = tasks
        self.items = items
        self.instance = instance  # None if a FaaS pool picks the instance
        self.node = node
        self.pool = pool
        self.sent_ns = sent_ns
        self.shape_id = shape_id
        self.state: int = BATCH_IN_FLIGHT


@final
class LoadFailure:
    """A variant that could not be started on a node, and when the start is retried."""

    __slots__ = ("failures", "node_id", "probe_id", "reason", "retry_at_ns")

    def __init__(self, reason: str, node_id: int | None) -> None:
        self.reason = reason
        self.node_id = node_id  # the node of the last attempt; None: a Broker picked it
        self.failures = 0  # consecutive
        self.retry_at_ns = 0  # when a probe starts, or when the running probe should be done
        self.probe_id: int | None = None  # the instance that is being started as a probe
