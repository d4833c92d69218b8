"""Events: facts about the world, in the past tense.

An event that ends an action names it (`batch_id`, `instance_id`); nothing else ties the two
together, so a log of events and actions can be followed from cause to effect. At one instant,
events are handled in order of `rank`, then in the order they came about: what ends work comes
before what brings work, and timers come last.
"""

from __future__ import annotations

from typing import ClassVar, Final, final

# A timer is known by its owner's name for it and a number.
TimerKey = tuple[str, int]


class Rank:
    """The order of events at one instant."""

    COMPLETION: Final = 0  # batches, instances and nodes come and go
    ARRIVAL: Final = 1  # requests come, are announced or are withdrawn
    TIMER: Final = 2


class Refusal:
    """Why a batch never ran."""

    BUSY: Final = 0  # no slot and no room to wait
    GONE: Final = 2  # the instance or node is not there any more
    THROTTLED: Final = 3  # the platform takes no more just now
    CANCELLED: Final = 4  # it was called back before it began
    TOO_LARGE: Final = 5  # a call of the platform cannot carry its inputs


# By number. Logs hold the numbers, so a reason that is removed leaves a gap.
REFUSAL_NAMES: Final = {
    Refusal.BUSY: "busy",
    Refusal.GONE: "gone",
    Refusal.THROTTLED: "throttled",
    Refusal.CANCELLED: "cancelled",
    Refusal.TOO_LARGE: "too_large",
}


class Event:
    """Something that happened. The subclasses below are the whole vocabulary."""

    __slots__ = ()
    rank: ClassVar[int] = Rank.COMPLETION


@final
class RequestArrived(Event):
    """A client asked for a pipeline. Request ids of one Scheduler only grow."""

    __slots__ = (
        "client",
        "deadline_ns",
        "is_hard",
        "items",
        "payload_bytes",
        "pipeline",
        "priority",
        "request_id",
    )
    rank: ClassVar[int] = Rank.ARRIVAL

    def __init__(
        self,
        request_id: int,
        pipeline: int,
        client: int = 0,
        items: int = 1,
        priority: int = 0,
        deadline_ns: int = 0,
        is_hard: bool = False,
        payload_bytes: int = 0,
    ) -> None:
        self.request_id = request_id
        self.pipeline = pipeline
        self.client = client
        self.items = items
        self.priority = priority
        self.deadline_ns = deadline_ns  # 0: the pipeline's own objective decides
        self.is_hard = is_hard  # nobody wants the answer after the deadline
        # Of a call of a platform that carries its inputs, at most; 0: nobody knows.
        self.payload_bytes = payload_bytes


@final
class RequestAnnounced(Event):
    """A request will arrive at `arrival_ns`: only clairvoyant policies are told."""

    __slots__ = ("arrival_ns", "client", "pipeline", "request_id")
    rank: ClassVar[int] = Rank.ARRIVAL

    def __init__(self, request_id: int, pipeline: int, client: int, arrival_ns: int) -> None:
        self.request_id = request_id
        self.pipeline = pipeline
        self.client = client
        self.arrival_ns = arrival_ns


@final
class RequestCancelled(Event):
    """The client withdrew its request, or went away."""

    __slots__ = ("request_id",)
    rank: ClassVar[int] = Rank.ARRIVAL

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


@final
class BatchFinished(Event):
    """A batch ran to its end.

    `unsure` names the tasks whose answer a cascade should improve. `failed_tasks` names those that
    the function itself could not do: they would break again, so they are not repeated. `too_large`
    names those whose answer the platform could not carry: they are repeated elsewhere.
    """

    __slots__ = ("batch_id", "failed_tasks", "too_large", "unsure")

    def __init__(
        self,
        batch_id: int,
        unsure: tuple[int, ...] = (),
        failed_tasks: tuple[int, ...] = (),
        too_large: tuple[int, ...] = (),
    ) -> None:
        self.batch_id = batch_id
        self.unsure = unsure
        self.failed_tasks = failed_tasks
        self.too_large = too_large


@final
class BatchFailed(Event):
    """A batch ran and broke."""

    __slots__ = ("batch_id", "reason")

    def __init__(self, batch_id: int, reason: str) -> None:
        self.batch_id = batch_id
        self.reason = reason


@final
class BatchRefused(Event):
    """A batch never ran: `reason` is a `Refusal`."""

    __slots__ = ("batch_id", "reason")

    def __init__(self, batch_id: int, reason: int) -> None:
        self.batch_id = batch_id
        self.reason = reason


@final
class BatchLost(Event):
    """Nobody knows whether a batch ran.

    `node_died` is false where only the answer is missing: then nothing is suspected of having
    killed the node.
    """

    __slots__ = ("batch_id", "node_died")

    def __init__(self, batch_id: int, node_died: bool = True) -> None:
        self.batch_id = batch_id
        self.node_died = node_died


@final
class InstanceStarted(Event):
    """An instance is ready to run. `node_id` matters when its pool picked the node."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class InstanceAppeared(Event):
    """Another Scheduler of the same pool has started this instance."""

    __slots__ = ("instance_id", "node_id", "variant_id")

    def __init__(self, instance_id: int, variant_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.variant_id = variant_id
        self.node_id = node_id


@final
class InstanceStopped(Event):
    """An instance is gone: ordered to stop, failed to start, retired by itself, or vanished."""

    __slots__ = ("instance_id", "reason")

    def __init__(self, instance_id: int, reason: str) -> None:
        self.instance_id = instance_id
        self.reason = reason


@final
class LoadFailed(Event):
    """A node says that a variant cannot be loaded, though nobody ordered a start just now."""

    __slots__ = ("node_id", "reason", "variant_id")

    def __init__(self, variant_id: int, node_id: int, reason: str) -> None:
        self.variant_id = variant_id
        self.node_id = node_id
        self.reason = reason


@final
class WeightsLoaded(Event):
    """The weights of an instance are on the device again."""

    __slots__ = ("instance_id",)

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id


@final
class WeightsEvicted(Event):
    """The weights of an instance are in host memory now."""

    __slots__ = ("instance_id",)

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id


@final
class NodeJoined(Event):
    """A node is there (again), empty."""

    __slots__ = ("name", "node_id", "pool_id")

    def __init__(self, node_id: int, pool_id: int, name: str) -> None:
        self.node_id = node_id
        self.pool_id = pool_id
        self.name = name


@final
class NodeLost(Event):
    """A node is gone, and every instance on it. Its batches end in events of their own."""

    __slots__ = ("node_id",)

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


@final
class TimerFired(Event):
    """The time that a timer was set for has come."""

    __slots__ = ("key",)
    rank: ClassVar[int] = Rank.TIMER

    def __init__(self, key: TimerKey) -> None:
        self.key = key
