"""Replicas of stages in fixed configurations, and the books of what they reserve of their nodes.

A *replica* runs one batch of a stage at a time, in the configuration and on the node that it was
placed with, and has a slot, compute and memory reserved there while it lives. Instances are started
for replicas: one for each, or one for as many as an instance runs batches at once. Replicas of one
node, variant and, where instances have a shape, one shape share their instances. Where compute is
resident it is reserved once per instance, else once per replica. An instance that no replica needs
is a *spare*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.core.model import UNLIMITED, Variant
from headgate.core.records import Instance, Node, Task
from headgate.core.states import INSTANCE_STARTING
from headgate.core.view import View, is_evictable
from headgate.planning.frontier.configs import StageConfig


@dataclass(frozen=True, slots=True)
class RatedConfig:
    """A configuration with the rates that a replica in it serves, in items per second."""

    config: StageConfig
    rate_max: float
    rate_min: float = 0.0  # below which its batches are not filled in time
    wait_ns: int = 0  # how long the oldest task may wait for its batch to be filled


def rated(config: StageConfig, *, rate_min: float = 0.0, wait_ns: int = 0) -> RatedConfig:
    """Return a configuration with the rate of one that runs batch after batch.

    >>> rated(StageConfig(time_ns=500_000_000, cost=1, batch=4)).rate_max
    8.0
    """
    return RatedConfig(config, config.batch * SECOND_NS / max(1, config.time_ns), rate_min, wait_ns)


@final
class Replica:
    """Runs batches of one stage, one at a time, in one configuration on one node."""

    __slots__ = (
        "batch_id",
        "config",
        "credit",
        "lag",
        "node",
        "rating",
        "share",
        "start_shape_id",
        "variant",
    )

    def __init__(self, rating: RatedConfig, variant: Variant, node: Node) -> None:
        self.rating = rating
        self.config = rating.config
        self.variant = variant
        self.node = node
        # The shape of its instance, where instances have one.
        self.start_shape_id = rating.config.shape_id if node.binds_at_start else 0
        self.batch_id: int | None = None  # in flight
        # Where the load of a stage is divided: its part of it in items per second, the items by
        # which it is behind its part, and the waiting items that are set aside for it.
        self.share = rating.rate_max
        self.lag = 0.0
        self.credit = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """What replicas that share instances have in common."""
        return (self.node.id, self.variant.id, self.start_shape_id)

    def set_share(self, share: float) -> None:
        """Set its part of the load, in items per second."""
        self.share = share

    def fall_behind(self, items: float) -> None:
        """Count items that have come to wait and belong to its part."""
        self.lag += items

    def give(self, items: int) -> None:
        """Set waiting items aside for it."""
        self.lag -= items
        self.credit += items

    def take_back(self, items: int) -> int:
        """Set so many items less aside for it, as far as there are; return how many."""
        taken = min(items, self.credit)
        self.credit -= taken
        return taken

    def takes(self, task: Task) -> bool:
        """Whether a task fits a batch in its shape."""
        return task.request.items <= self.variant.items_max(self.config.shape_id)


@final
class _Reserved:
    """What the replicas on one node have reserved of it."""

    __slots__ = ("cpu_milli", "gpu_sevenths", "memory_bytes", "slots")

    def __init__(self) -> None:
        self.slots = 0
        self.cpu_milli = 0
        self.gpu_sevenths = 0
        self.memory_bytes = 0


@final
class Reservations:
    """What the replicas of all stages have reserved, and which instances they need for it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._nodes: dict[int, _Reserved] = {}  # by node id
        self._counts: dict[tuple[int, int, int], int] = {}  # replicas by their key

    def reserve(self, replica: Replica) -> None:
        """Reserve what a replica needs, although there may be no room for it."""
        self._change(replica, 1)

    def release(self, replica: Replica) -> None:
        """Give back what a replica has reserved."""
        self._change(replica, -1)

    def _change(self, replica: Replica, count: int) -> None:
        node, config = replica.node, replica.config
        reserved = self._nodes.setdefault(node.id, _Reserved())
        held = self._counts.get(replica.key, 0)
        self._counts[replica.key] = held + count
        instances = _instances_for(held + count, replica.variant) - _instances_for(
            held, replica.variant
        )
        shapes = instances if node.has_resident_compute else count
        reserved.slots += count
        reserved.cpu_milli += shapes * config.cpu_milli
        reserved.gpu_sevenths += shapes * config.gpu_sevenths
        reserved.memory_bytes += instances * replica.variant.profile.memory_bytes

    def replicas_on(self, node: Node) -> int:
        """How many replicas a node has."""
        reserved = self._nodes.get(node.id)
        return 0 if reserved is None else reserved.slots

    def rooms(self, ratings: Iterable[RatedConfig]) -> Iterator[tuple[RatedConfig, Node, bool]]:
        """Yield where there is room for a replica, and whether a warm instance is there.

        A node is passed over on which an instance would have to be started that may not be started.
        """
        variants, failures = self._view.app.variants, self._view.load_failures
        for rating in ratings:
            variant = variants[rating.config.build]
            for node in self._view.free_by_pool[rating.config.place].values():
                if self._has_room(node, rating.config, variant):
                    is_warm = self._has_spare(node, rating.config, variant)
                    if is_warm or variant.id not in failures:
                        yield rating, node, is_warm

    def _has_room(self, node: Node, config: StageConfig, variant: Variant) -> bool:
        """Whether a node has a slot, compute and memory that no replica has reserved."""
        reserved = self._nodes.get(node.id)
        if reserved is None:
            return True  # the candidates of a pool fit its nodes
        held = self._held(node, config, variant)
        instances = _instances_for(held + 1, variant) - _instances_for(held, variant)
        shapes = instances if node.has_resident_compute else 1
        pool, memory_bytes = node.pool, instances * variant.profile.memory_bytes
        return (
            reserved.slots < node.slots
            and reserved.cpu_milli + shapes * config.cpu_milli <= pool.cpu_milli
            and reserved.gpu_sevenths + shapes * config.gpu_sevenths <= pool.gpu_sevenths
            and reserved.memory_bytes + memory_bytes <= pool.memory_bytes
        )

    def _has_spare(self, node: Node, config: StageConfig, variant: Variant) -> bool:
        """Whether a node has an instance for one more replica, and it has started."""
        shape_id = config.shape_id if node.binds_at_start else 0
        instances = _instances(node, variant, shape_id)
        ready = sum(1 for instance in instances if instance.state != INSTANCE_STARTING)
        return ready >= _instances_for(self._held(node, config, variant) + 1, variant)

    def _held(self, node: Node, config: StageConfig, variant: Variant) -> int:
        """How many replicas share instances with one in this configuration."""
        shape_id = config.shape_id if node.binds_at_start else 0
        return self._counts.get((node.id, variant.id, shape_id), 0)

    def left_over(self, node: Node, config: StageConfig) -> float:
        """The part of what is left of a node that a replica would leave, weighed by prices.

        Where compute has no price, all CPUs of a node weigh as much as its GPU; where compute has
        no limit, slots are what counts.
        """
        pool, reserved = node.pool, self._nodes.get(node.id) or _Reserved()
        cpu_weight, gpu_weight = pool.cpu_usd_per_hour / 1000, pool.gpu_usd_per_hour / 7
        if not cpu_weight and not gpu_weight:
            cpu_weight, gpu_weight = 1 / max(1, pool.cpu_milli), 1 / max(1, pool.gpu_sevenths)
        free = need = 0.0
        if pool.cpu_milli < UNLIMITED:
            free += cpu_weight * (pool.cpu_milli - reserved.cpu_milli)
            need += cpu_weight * config.cpu_milli
        if pool.gpu_sevenths < UNLIMITED:
            free += gpu_weight * (pool.gpu_sevenths - reserved.gpu_sevenths)
            need += gpu_weight * config.gpu_sevenths
        if not free:
            free, need = float(node.slots - reserved.slots), 1.0
        return 1 - need / free if free > 0 else 0.0

    def lacks_instance(self, replica: Replica) -> bool:
        """Whether there are fewer instances than the replicas that share them need."""
        needed = _instances_for(self._counts.get(replica.key, 0), replica.variant)
        return len(_instances(replica.node, replica.variant, replica.start_shape_id)) < needed

    def spares(self, node: Node) -> list[Instance]:
        """The idle instances on a node that no replica needs, least recently used first."""
        spares: list[Instance] = []
        for group in node.by_variant.values():
            variant = group[0].variant
            for shape_id in sorted({instance.shape_id for instance in group}):
                instances = _instances(node, variant, shape_id)
                held = self._counts.get((node.id, variant.id, shape_id), 0)
                idle = [instance for instance in instances if is_evictable(instance)]
                idle.sort(key=lambda instance: instance.last_used_ns)
                spares += idle[: max(0, len(instances) - _instances_for(held, variant))]
        spares.sort(key=lambda instance: instance.last_used_ns)
        return spares


def _instances_for(replicas: int, variant: Variant) -> int:
    """How many instances so many replicas need."""
    return -(-replicas // variant.concurrency)


def _instances(node: Node, variant: Variant, shape_id: int) -> list[Instance]:
    """The instances on a node that replicas of a shape may use, oldest first."""
    return [i for i in node.by_variant.get(variant.id, ()) if i.shape_id == shape_id]
