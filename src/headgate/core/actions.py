"""Actions: what a Scheduler orders its driver to do, named in the imperative.

Every action with an effect ends in exactly one later event that names it; the driver guarantees
that. `KeepWarm`, `Settle`, `ReportFault`, `ReportWouldReject` and the timer actions have no such
event.
"""

from __future__ import annotations

from typing import TypeAlias, final

from headgate.core.events import TimerKey
from headgate.core.states import Settlement


class Action:
    """Base class of all actions. The subclasses in this module are the whole vocabulary."""

    __slots__ = ()


@final
class Dispatch(Action):
    """Run these tasks as one batch: on an instance, or in a FaaS pool that picks the instance.

    Ends in `BatchFinished`, `BatchFailed`, `BatchRefused` or `BatchLost`. `moved_bytes` of input
    must first be transferred from other nodes.
    """

    __slots__ = (
        "batch_id",
        "instance_id",
        "items",
        "moved_bytes",
        "node_id",
        "pool_id",
        "shape_id",
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
        shape_id: int = 0,
    ) -> None:
        self.batch_id = batch_id
        self.variant_id = variant_id
        self.task_ids = task_ids
        self.items = items
        self.pool_id = pool_id
        self.node_id = node_id
        self.instance_id = instance_id
        self.moved_bytes = moved_bytes
        self.shape_id = shape_id  # of the variant: what the batch runs in


@final
class CancelBatch(Action):
    """Cancel a batch whose result nobody needs: do not begin it, or stop it if possible.

    The batch still ends in exactly one event.
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

    __slots__ = ("instance_id", "node_id", "nth", "pool_id", "shape_id", "variant_id")

    def __init__(
        self,
        instance_id: int,
        variant_id: int,
        pool_id: int,
        node_id: int | None,
        shape_id: int = 0,
        nth: int = 0,
    ) -> None:
        self.instance_id = instance_id
        self.variant_id = variant_id
        self.pool_id = pool_id
        self.node_id = node_id
        self.shape_id = shape_id  # of the variant; 0 in a pool where a dispatch chooses it
        # For several Schedulers that may order the same: the start is carried out only if the node
        # has fewer than `nth` of the variant or, where a Broker grants the node, the pool has fewer
        # of the function. 0: one more in any case.
        self.nth = nth


@final
class StopInstance(Action):
    """Drain an instance: finish the batches it has begun, then stop. Ends in `InstanceStopped`."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int | None) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class LoadWeights(Action):
    """Copy an instance's weights from host memory to the device. Ends in `WeightsLoaded`."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class EvictWeights(Action):
    """Move an instance's weights from the device to host memory. Ends in `WeightsEvicted`."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class KeepWarm(Action):
    """Have a FaaS platform keep `count` instances of a variant warm from now on.

    The order stands until the next one for the same variant and pool replaces it. No event ends it:
    its effect shows in the latency of calls and in the bill.
    """

    __slots__ = ("count", "is_provisioned", "pool_id", "variant_id")

    def __init__(self, pool_id: int, variant_id: int, count: int, is_provisioned: bool) -> None:
        self.pool_id = pool_id
        self.variant_id = variant_id
        self.count = count
        # Provisioned instances are paid by the second; the others are kept warm by ping calls.
        self.is_provisioned = is_provisioned


@final
class SetTimer(Action):
    """Deliver `TimerFired(key)` at `at_ns`; replaces a timer of the same key."""

    __slots__ = ("at_ns", "key")

    def __init__(self, key: TimerKey, at_ns: int) -> None:
        self.key = key
        self.at_ns = at_ns


@final
class CancelTimer(Action):
    """Cancel the timer of this key."""

    __slots__ = ("key",)

    def __init__(self, key: TimerKey) -> None:
        self.key = key


@final
class Settle(Action):
    """Answer the client with the outcome of its request. Exactly one per request."""

    __slots__ = ("request_id", "settlement")

    def __init__(self, request_id: int, settlement: Settlement) -> None:
        self.request_id = request_id
        self.settlement = settlement


@final
class ReportFault(Action):
    """Report to operators that a hook of the policy raised an error. No event follows.

    The report is an action so that the event log holds it and a replay compares it.
    """

    __slots__ = ("error", "hook")

    def __init__(self, hook: str, error: str) -> None:
        self.hook = hook
        self.error = error


@final
class ReportWouldReject(Action):
    """Report to operators that the policy rejected a request while admission is only observed.

    The request goes on as if it had been admitted. At most one per request; no event follows.
    """

    __slots__ = ("reason", "request_id")

    def __init__(self, request_id: int, reason: str) -> None:
        self.request_id = request_id
        self.reason = reason


# Actions that are carried out on a node, or by a pool when `node_id` is None.
PlacedAction: TypeAlias = (
    Dispatch | CancelBatch | StartInstance | StopInstance | LoadWeights | EvictWeights
)
