"""Events: what has happened, named in the past tense.

An event that ends an action names it (`batch_id`, `instance_id`), and nothing else ties the two
together, so a log of events and actions can be followed from cause to effect. At one instant,
events are handled in order of `rank`, then in the order they occurred: completions before arrivals,
and timers last.
"""

from __future__ import annotations

from typing import ClassVar, Final, final

# A timer is identified by a name and a number.
TimerKey = tuple[str, int]


class Rank:
    """The order of events at one instant."""

    COMPLETION: Final = 0  # batches end; instances and nodes come and go
    ARRIVAL: Final = 1  # requests arrive, are announced or are cancelled
    TIMER: Final = 2


class Refusal:
    """Why a batch never ran."""

    BUSY: Final = 0  # no free slot, and the node's queue is full
    GONE: Final = 2  # the instance or node no longer exists
    THROTTLED: Final = 3  # the platform is at its concurrency or rate limit
    CANCELLED: Final = 4  # cancelled before it began
    TOO_LARGE: Final = 5  # its inputs exceed the platform's payload limit


# By number. Logs hold the numbers, so a reason that is removed leaves a gap.
REFUSAL_NAMES: Final = {
    Refusal.BUSY: "busy",
    Refusal.GONE: "gone",
    Refusal.THROTTLED: "throttled",
    Refusal.CANCELLED: "cancelled",
    Refusal.TOO_LARGE: "too_large",
}


class Event:
    """Base class of all events. The subclasses in this module are the whole vocabulary."""

    __slots__ = ()
    rank: ClassVar[int] = Rank.COMPLETION


@final
class RequestArrived(Event):
    """A client requested a pipeline. The request ids of one Scheduler only increase.

    `client_request_id` is the id that the client finds in its answer. It stands in the log, so that
    the request can be found there, and nothing decides by it: no record of the state has it.
    """

    __slots__ = (
        "client",
        "client_request_id",
        "cost_usd",
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
        cost_usd: float = 0.0,
        client_request_id: str = "",
    ) -> None:
        self.request_id = request_id
        self.pipeline = pipeline
        self.client = client
        self.items = items
        self.priority = priority
        self.deadline_ns = deadline_ns  # 0: the pipeline's SLO sets the deadline
        self.is_hard = is_hard  # a response after the deadline is useless
        # Upper bound on the payload of a FaaS call that carries the inputs; 0: unknown.
        self.payload_bytes = payload_bytes
        self.cost_usd = cost_usd  # the most that it may cost; 0: the pipeline's SLO says
        self.client_request_id = client_request_id  # bounded by the gateway; empty: simulated


@final
class RequestAnnounced(Event):
    """A request will arrive at `arrival_ns`. Only clairvoyant policies get this event."""

    __slots__ = ("arrival_ns", "client", "pipeline", "request_id")
    rank: ClassVar[int] = Rank.ARRIVAL

    def __init__(self, request_id: int, pipeline: int, client: int, arrival_ns: int) -> None:
        self.request_id = request_id
        self.pipeline = pipeline
        self.client = client
        self.arrival_ns = arrival_ns


@final
class RequestCancelled(Event):
    """The client cancelled its request, or disconnected."""

    __slots__ = ("request_id",)
    rank: ClassVar[int] = Rank.ARRIVAL

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


@final
class BatchFinished(Event):
    """A batch ran to its end.

    `unsure` are the tasks whose result a cascade should improve. `failed_tasks` are those for which
    the function itself raised an error: they would fail again, so they are not retried.
    `too_large` are those whose result exceeds the platform's payload limit: they are retried on
    another pool.
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
    """A batch ran and failed."""

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
    """It is unknown whether a batch ran.

    `node_died` is false if only the response is missing: then no task is suspected of having killed
    the node.
    """

    __slots__ = ("batch_id", "node_died")

    def __init__(self, batch_id: int, node_died: bool = True) -> None:
        self.batch_id = batch_id
        self.node_died = node_died


@final
class InstanceStarted(Event):
    """An instance is ready to run batches. `node_id` is news if the pool picked the node."""

    __slots__ = ("instance_id", "node_id")

    def __init__(self, instance_id: int, node_id: int) -> None:
        self.instance_id = instance_id
        self.node_id = node_id


@final
class InstanceAppeared(Event):
    """Another Scheduler of the same pool has started this instance, perhaps one that has left."""

    __slots__ = ("instance_id", "node_id", "shape_id", "variant_id")

    def __init__(self, instance_id: int, variant_id: int, node_id: int, shape_id: int = 0) -> None:
        self.instance_id = instance_id
        self.variant_id = variant_id
        self.node_id = node_id
        self.shape_id = shape_id  # what it was started with


@final
class InstanceUseChanged(Event):
    """An instance has been idle for `Variant.unused_after_ns`, or is in use again."""

    __slots__ = ("instance_id", "is_in_use")

    def __init__(self, instance_id: int, is_in_use: bool) -> None:
        self.instance_id = instance_id
        self.is_in_use = is_in_use


@final
class InstanceStopped(Event):
    """An instance is gone: stopped as ordered, failed to start, idle for too long, or lost."""

    __slots__ = ("instance_id", "reason")

    def __init__(self, instance_id: int, reason: str) -> None:
        self.instance_id = instance_id
        self.reason = reason


@final
class LoadFailed(Event):
    """A node reports that a variant cannot be loaded, although no start is under way."""

    __slots__ = ("node_id", "reason", "variant_id")

    def __init__(self, variant_id: int, node_id: int, reason: str) -> None:
        self.variant_id = variant_id
        self.node_id = node_id
        self.reason = reason


@final
class WeightsLoaded(Event):
    """The weights of an instance are on the device."""

    __slots__ = ("instance_id",)

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id


@final
class WeightsEvicted(Event):
    """The weights of an instance are in host memory."""

    __slots__ = ("instance_id",)

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id


@final
class NodeJoined(Event):
    """A node joined, or came back.

    `instances` are those that it holds and that can be used, whoever has started them: the id of
    each, that of its variant and that of its shape, one after the other. They come with the node,
    because a policy may start instances as soon as it has a node.
    """

    __slots__ = ("instances", "name", "node_id", "pool_id")

    def __init__(
        self, node_id: int, pool_id: int, name: str, instances: tuple[int, ...] = ()
    ) -> None:
        self.node_id = node_id
        self.pool_id = pool_id
        self.name = name
        self.instances = instances


@final
class NodeLost(Event):
    """A node and every instance on it are gone. Its batches end in events of their own."""

    __slots__ = ("node_id",)

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


@final
class GatewaysChanged(Event):
    """The number of gateways that share the load is now known to be this one.

    Whoever counts them needs a while to notice that one has crashed, so the number may be wrong.
    """

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


@final
class TimerFired(Event):
    """A timer fired."""

    __slots__ = ("key",)
    rank: ClassVar[int] = Rank.TIMER

    def __init__(self, key: TimerKey) -> None:
        self.key = key
