"""Actions: orders to the world, in the imperative.

Every action with an effect ends in exactly one later event that names it; the driver owes that.
`Settle`, `ReportFault` and the timers end nothing: they answer a client, tell people or mind the
clock.
"""

from __future__ import annotations

from typing import TypeAlias, final

from headgate.core.events import TimerKey


class Action:
    """Something to do. The subclasses below are the whole vocabulary."""

    __slots__ = ()


@final
class Dispatch(Action):
    """Run these tasks together: on an instance, or anywhere in a pool that picks its own.

    Ends in `BatchFinished`, `BatchFailed`, `BatchRefused` or `BatchLost`. `moved_bytes` must first
    come from other nodes.
    """

    __slots__ = (
        "batch_id",
        "instance_id",
        "items",
        "moved_bytes",
        "node_id",
        "pool_id",
        "task_ids",
        "variant_id",
    )

    def __init__(
        self,
        batch_id: int,
        variant_id: int,
        task_ids: list[int],
        items: int,
        pool_id: int,
        node_id: int | None,
        instance_id: int | None,
        moved_bytes: int = 0,
    ) -> None:
        self.batch_id = batch_id
        self.variant_id = variant_id
        self.task_ids = task_ids
        self.items = items
        self.pool_id = pool_id
        self.node_id = node_id
        self.instance_id = instance_id
        self.moved_bytes = moved_bytes


@final
class CancelBatch(Action):
    """Nobody waits for this batch any more: do not begin it, stop it if that is possible.

    The batch still ends in its one event.
    """

    __slots__ = ("batch_id", "node_id", "pool_id")

    def __init__(self, batch_id: int, pool_id: int, node_id: int | None) -> None:
        self.batch_id = batch_id
        self.pool_id = pool_id
        self.node_id = node_id


@final
class StartInstance(Action):
    """Start a variant on a node, or on whichever node the pool grants when `node_id` is None.

    Ends in `InstanceStarted`, or in `InstanceStopped` if it cannot be started.
    """

    __slots__ = ("instance_id", "node_id", "pool_id", "variant_id")

    def __init__(
        self, instance_id: int, variant_id: int, pool_id: int, node_id: int | None
    ) -> None:
        self.instance_id = instance_id
        self.variant_id = variant_id
        self.pool_id = pool_id
        self.node_id = node_id


@final
class StopInstance(Action):
    """Finish what it has begun, then be gone. Ends in `InstanceStopped`."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int | None) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class LoadWeights(Action):
    """Bring the weights from host memory to the device. Ends in `WeightsLoaded`."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class EvictWeights(Action):
    """Move the weights from the device to host memory. Ends in `WeightsEvicted`."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class KeepWarm(Action):
    """Have a platform keep so many instances of a variant ready, from now on, by this means.

    A standing wish, which ends nothing: the newest for a variant in a pool replaces the one before.
    What became of it shows in how long calls take and in what is paid.
    """

    __slots__ = ("count", "is_provisioned", "pool_id", "variant_id")

    def __init__(self, pool_id: int, variant_id: int, count: int, is_provisioned: bool) -> None:
        self.pool_id = pool_id
        self.variant_id = variant_id
        self.count = count
        self.is_provisioned = is_provisioned  # paid for by the second; else they are called


@final
class SetTimer(Action):
    """Deliver `TimerFired(key)` at `at_ns`; replaces a timer of the same key."""

    __slots__ = ("at_ns", "key")

    def __init__(self, key: TimerKey, at_ns: int) -> None:
        self.key = key
        self.at_ns = at_ns


@final
class CancelTimer(Action):
    """Forget the timer of this key."""

    __slots__ = ("key",)

    def __init__(self, key: TimerKey) -> None:
        self.key = key


@final
class Settle(Action):
    """Answer the client: this is how its request ended. Exactly one per request.

    One that is turned away is told the latency it would have seen and when to come back, where the
    policy knows.
    """

    __slots__ = ("outcome", "predicted_ns", "reason", "request_id", "retry_ns")

    def __init__(
        self,
        request_id: int,
        outcome: int,
        reason: str = "",
        predicted_ns: int = 0,
        retry_ns: int = 0,
    ) -> None:
        self.request_id = request_id
        self.outcome = outcome
        self.reason = reason
        self.predicted_ns = predicted_ns  # 0: nobody knows
        self.retry_ns = retry_ns  # after so long; 0: nobody knows, or never


@final
class ReportFault(Action):
    """Tell people that a hook of the policy raised this error. It ends nothing.

    It is an action so that a log holds it and a replay compares it.
    """

    __slots__ = ("error", "hook")

    def __init__(self, hook: str, error: str) -> None:
        self.hook = hook
        self.error = error


# Actions that are carried out on a node, or by a pool when `node_id` is None.
PlacedAction: TypeAlias = (
    Dispatch | CancelBatch | StartInstance | StopInstance | LoadWeights | EvictWeights
)
