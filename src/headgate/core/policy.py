"""The interface of a policy: hooks that the Scheduler calls, and a statement of capabilities.

A policy is one file in `headgate.policies`: a docstring with the idea, the paper and an example, a
frozen `Config`, a subclass of `Policy`, and `POLICY = PolicyKind(...)`. The policy has the name of
the file.

A policy reads `self.view`, changes nothing but its own attributes, and acts through `self.orders`.
It reads no clock (`self.view.now_ns` is the time), draws random numbers from `self.rng` only, and
breaks no tie by the number of a client. CONTRIBUTING.md has the rules in full, with the tests that
enforce them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from random import Random
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.core.model import UNLIMITED
from headgate.core.orders import Orders
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import TASK_READY, Settlement
from headgate.core.view import View


@final
class Context:
    """What a policy is constructed with: the view, the orders, and its own random stream."""

    def __init__(self, view: View, orders: Orders, rng: Random) -> None:
        self.view = view
        self.orders = orders
        self.rng = rng


@dataclass(frozen=True)
class Bounds:
    """The values that a setting may have. `str` says which."""

    ge: float | None = None
    gt: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()

    def allows(self, value: object) -> bool:
        """Whether a setting may have this value."""
        if not isinstance(value, int | float):
            return value in self.choices
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        texts = [f"{self.ge:g} or more"] if self.ge is not None else []
        texts += [f"above {self.gt:g}"] if self.gt is not None else []
        texts += [f"below {self.lt:g}"] if self.lt is not None else []
        return " and ".join(texts) or ", ".join(self.choices)


def bounded(
    *,
    ge: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] = (),
) -> dict[str, Bounds]:
    """Return the metadata of a field of a `PolicyConfig` that has bounds."""
    return {"bounds": Bounds(ge, gt, lt, choices)}


POSITIVE: Final = bounded(gt=0)
NOT_NEGATIVE: Final = bounded(ge=0)
SHARE: Final = bounded(gt=0, lt=1)


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of a policy. Subclasses add fields, each with a default, some with bounds.

    >>> from dataclasses import field
    >>> @dataclass(frozen=True)
    ... class Config(PolicyConfig):
    ...     batch_max: int = field(default=8, metadata=bounded(ge=1))
    >>> Config(batch_max=0)
    Traceback (most recent call last):
        ...
    headgate.core.errors.ConfigError: batch_max: 0: is out of range (allowed: 1 or more)
    """

    def __post_init__(self) -> None:
        for setting in fields(self):
            bounds = setting.metadata.get("bounds")
            value = getattr(self, setting.name)
            if bounds is not None and not bounds.allows(value):
                raise ConfigError(
                    "is out of range", key=setting.name, value=value, allowed=str(bounds)
                )


@dataclass(frozen=True)
class Capabilities:
    """What a policy supports. The shared test suites and `headgate compare` rely on this."""

    pipelines: bool = True  # stages that depend on other stages
    batches: bool = False  # more than one item per dispatch
    mixed_pools: bool = False  # several pools, functions that not every node can run
    serverless: bool = False  # FaaS pools
    needs_serverless: bool = False  # it is about nothing else: without them it has no meaning
    multi_gateway: bool = False  # several Schedulers that share pools
    # Several gateways may each run it over the same nodes, where those queue what is too much: it
    # picks nodes by itself, and stops nothing that another gateway uses.
    shares_nodes: bool = False
    # With several gateways, nodes that are busy refuse its batches instead of queueing them: it
    # asks another node, and that one later.
    retries_busy: bool = False
    clairvoyance: bool = False  # requests are announced before they arrive


@dataclass(frozen=True)
class Target:
    """How many instances of a variant, in a shape, a plan wants in a pool."""

    variant_id: int
    pool_id: int
    count: int
    per_node_max: int = 1  # instances that one node may hold, of this variant and shape
    shape_id: int = 0  # other than 0 only where a shape is chosen at the start of an instance
    # The Broker of the pool picks the nodes, and the instances of all Schedulers count: those that
    # plan the same number start it once.
    is_shared: bool = False
    # No node of an elastic pool is rented for it while so many are: it waits for one of those.
    rented_max: int = UNLIMITED
    # Instances beyond the count end what they run and stop; else only idle ones stop. Where the
    # work is spread over all of them, none is ever idle.
    drains: bool = False


@dataclass(frozen=True)
class Plan:
    """The desired instances, from the slow time scale of a policy.

    The Scheduler reconciles a plan into starts and stops.
    """

    targets: tuple[Target, ...] = ()


class Policy:
    """The hooks. All are optional except `on_task_ready` and `on_capacity`.

    Fast hooks are called per event and act through `self.orders`; the slow `plan` is called every
    `plan_every_ns` and only returns the desired instances. A queued task that was cancelled or
    expired is no longer READY: check the state when dequeuing, or drop the task in
    `on_task_withdrawn` (see `LazyDeletions`). A task that `must_run_alone` is never put into
    a batch with others.

    A hook that raises is a fault of the policy: the task or request that the hook was about fails,
    and everything else continues.
    """

    plan_every_ns: int = 0  # 0: `plan` is never called

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        self.view = context.view
        self.orders = context.orders
        self.rng = context.rng
        # By pipeline id: the safety margin that this policy's admission test keeps at present, in
        # the policy's own unit; empty if it keeps none. Drivers publish the margins.
        self.admission_margins: list[float] = []

    def on_arrival(self, request: Request) -> None:
        """A request arrived: `reject` it now, or its first tasks become ready.

        They become ready as well if `reject` returns False: admission is only observed.
        """

    def uses_faas(self, function_id: int) -> bool:
        """Whether this policy dispatches the function to FaaS pools, if it runs on any."""
        return True

    def on_announced(self, request_id: int, pipeline_id: int, arrival_ns: int) -> None:
        """A request will arrive at `arrival_ns` (only for policies with `clairvoyance`)."""

    def on_rejected_early(self, request_id: int, pipeline_id: int) -> None:
        """The Scheduler rejected a request itself, before `on_arrival`.

        A policy to which the request was announced must stop waiting for it.
        """

    def on_task_ready(self, task: Task) -> None:
        """A task may be dispatched: dispatch it now, or queue it."""
        raise NotImplementedError

    def backs_off(self, batch: Batch) -> bool:
        """Whether to send nothing to a node for `Limits.backoff_ns`, because it was busy.

        Such a refusal counts towards `Limits.refusals_max`. A policy that returns False retries in
        its own way: the node stays free for everything else, the refusal does not count, and the
        policy must bound its retries itself.
        """
        return True

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        """A task is ready again: its attempt was refused, or failed and may be repeated.

        `reason` is the `Refusal`; None if the attempt may have run.
        """
        self.on_task_ready(task)

    def on_task_withdrawn(self, task: Task) -> None:
        """A ready task was cancelled or expired. Queues must not keep such tasks for ever."""

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        """An admitted request has its outcome; its `tasks` are cleared. Rejections do not count."""

    def on_capacity(self, node: Node) -> None:
        """A node may have capacity for another batch."""
        raise NotImplementedError

    def on_pool_available(self, pool_id: int) -> None:
        """A FaaS pool can take a call: its breaker allows calls again, or a call has ended."""

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """A batch has ended (its state says how), for policies that learn from the time it took."""

    def on_planned_start(self, instance: Instance) -> None:
        """An instance that the plan lacked is being started."""

    def on_instance_started(self, instance: Instance) -> None:
        """An instance is ready to run batches."""

    def on_instance_gone(self, instance: Instance) -> None:
        """An instance no longer exists."""

    def on_node_joined(self, node: Node) -> None:
        """A node joined; `on_capacity` follows."""

    def on_node_lost(self, node: Node) -> None:
        """A node is gone."""

    def on_gateways_changed(self) -> None:
        """`View.gateways` has another value."""

    def on_timer(self, name: str, number: int) -> None:
        """A timer set by this policy has fired."""

    def plan(self) -> Plan:
        """Return the desired instances. Called on the slow time scale."""
        return Plan()


def overrides(policy: Policy, hook: str) -> bool:
    """Whether a policy overrides a hook; a hook that does nothing need not be called."""
    return getattr(type(policy), hook) is not getattr(Policy, hook)


@dataclass(frozen=True)
class PolicyKind:
    """How to build a policy: its class, its configuration class and its capabilities."""

    make: type[Policy]
    config: type[PolicyConfig] = PolicyConfig
    capabilities: Capabilities = Capabilities()


@final
class LazyDeletions:
    """Counts the withdrawn tasks of one queue since the queue was last swept.

    A task that is cancelled or expires while it is queued stays in its policy's queue until it
    reaches the head, because removing it at once would cost every cancellation a search. If the
    head does not move, such a queue would grow without bound. So the queue is swept when withdrawn
    tasks may be half of it: O(1) amortised per withdrawal, and a queue is never longer than twice
    the number of tasks that really wait.

    >>> withdrawals = LazyDeletions()
    >>> [withdrawals.add(length) for length in (4, 4, 4, 1)]
    [False, False, True, True]
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def add(self, length: int) -> bool:
        """Count one more withdrawn task of a queue of this length; whether to sweep it now."""
        self._count += 1
        if 2 * self._count <= length:
            return False
        self._count = 0
        return True

    def withdraw_from(self, queue: deque[Task]) -> None:
        """Count one more withdrawn task of a queue, and sweep the queue if that is due."""
        if self.add(len(queue)):
            waiting = [task for task in queue if task.state == TASK_READY]
            queue.clear()
            queue.extend(waiting)
