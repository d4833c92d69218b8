"""What a policy is: hooks that the Scheduler calls, and a statement of what it can take.

A policy is one file in `headgate.policies`: a docstring with the idea, the paper and an example, a
frozen `Config`, a subclass of `Policy`, and `POLICY = PolicyKind(...)`. Its name is the file's.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import final

from headgate.core.orders import Orders
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.view import View


@final
class Context:
    """What a policy is given: the view, the orders, and a random stream of its own."""

    def __init__(self, view: View, orders: Orders, rng: Random) -> None:
        self.view = view
        self.orders = orders
        self.rng = rng


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of a policy. Subclasses add fields, each with a default."""


@dataclass(frozen=True)
class Capabilities:
    """What a policy can cope with; the shared test suites and `compare` go by this."""

    pipelines: bool = True  # stages that wait for others
    batches: bool = False  # more than one item to a dispatch
    mixed_pools: bool = False  # pools that differ, functions that not every node can run
    serverless: bool = False
    multi_gateway: bool = False
    clairvoyance: bool = False  # wants to be told of requests before they arrive


@dataclass(frozen=True)
class Target:
    """How many instances of a variant a plan wants in a pool."""

    variant_id: int
    pool_id: int
    count: int


@dataclass(frozen=True)
class Plan:
    """What the slow half of a policy wants; the Scheduler reconciles it into starts and stops."""

    targets: tuple[Target, ...] = ()


class Policy:
    """The hooks. All are optional but `on_task_ready` and `on_capacity`.

    Fast hooks are called per event and act through `self.orders`; the slow `plan` is called every
    `plan_every_ns` and only says what it wants. A task that left a policy's queue without being
    dispatched (cancelled, expired) is no longer READY: check that when taking it out, or drop it
    in `on_task_withdrawn`; see `core.lazy_deletion`. One that `must_run_alone` is never put
    into a batch with others.

    A hook that raises is a fault: what it was about fails, and everything else goes on.
    """

    plan_every_ns: int = 0  # 0: `plan` is never called

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        self.view = context.view
        self.orders = context.orders
        self.rng = context.rng

    def on_arrival(self, request: Request) -> None:
        """A request is at the door: `reject` it now, or its tasks will become ready."""

    def spills(self, function_id: int) -> bool:
        """Whether this policy also sends a function to platforms, where it runs on any."""
        return True

    def on_announced(self, request_id: int, pipeline_id: int, arrival_ns: int) -> None:
        """A request will arrive then (only for policies that take clairvoyance)."""

    def on_turned_away(self, request_id: int, pipeline_id: int) -> None:
        """A request was turned away before it came to the policy (which may have expected it)."""

    def on_task_ready(self, task: Task) -> None:
        """A task may be dispatched: do so, or keep it."""
        raise NotImplementedError

    def on_task_returned(self, task: Task) -> None:
        """A task is ready again: its attempt was refused, or failed and may be repeated."""
        self.on_task_ready(task)

    def on_task_withdrawn(self, task: Task) -> None:
        """A ready task is wanted no longer. Queues must not keep such tasks for ever."""

    def on_capacity(self, node: Node) -> None:
        """A node may have become able to take more."""
        raise NotImplementedError

    def on_pool_available(self, pool_id: int) -> None:
        """A pool that picks its own instances can take a call: again, or one more."""

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """A batch has ended (its state says how); for policies that learn."""

    def on_instance_started(self, instance: Instance) -> None:
        """An instance is ready to run."""

    def on_instance_gone(self, instance: Instance) -> None:
        """An instance is not there any more."""

    def on_node_joined(self, node: Node) -> None:
        """A node is there; `on_capacity` follows."""

    def on_node_lost(self, node: Node) -> None:
        """A node is gone."""

    def on_timer(self, name: str, number: int) -> None:
        """A timer set by this policy has fired."""

    def plan(self) -> Plan:
        """Say how many instances of what should be there. Pure; called on the slow time scale."""
        return Plan()


def overrides(policy: Policy, hook: str) -> bool:
    """Whether a policy has a hook of its own; one that does nothing need not be called."""
    return getattr(type(policy), hook) is not getattr(Policy, hook)


@dataclass(frozen=True)
class PolicyKind:
    """How to make a policy: the class, its configuration, and what it takes."""

    make: type[Policy]
    config: type[PolicyConfig] = PolicyConfig
    capabilities: Capabilities = Capabilities()

    def build(self, context: Context, config: PolicyConfig) -> Policy:
        """Make the policy."""
        return self.make(context, config)
