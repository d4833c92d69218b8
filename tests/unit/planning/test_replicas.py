"""Books of replicas: what is reserved, where there is room, which instances are spare."""

from __future__ import annotations

import pytest

from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import UNLIMITED, App, Compute, Function, Pool, Profile, Shape, Variant
from headgate.core.records import Instance, Node
from headgate.core.states import InstanceState, NodeState, Residency
from headgate.core.view import View
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.rivals.replicas import Replica, Reservations, rated

MS = MILLISECOND_NS


class Books:
    """Reservations on one node, with replicas of a variant of 2 CPUs, 2/7 of a GPU, 10 bytes."""

    def __init__(
        self,
        *,
        slots: int = 8,
        cpu_milli: int = 16_000,
        gpu_sevenths: int = 7,
        memory_bytes: int = 100,
        compute: int = Compute.PER_BATCH,
        concurrency: int = 1,
        cpu_usd: float = 0.0,
        gpu_usd: float = 0.0,
    ) -> None:
        self.variant = Variant(
            0, "v", 0, (0,), Profile((20 * MS,), memory_bytes=10), Shape(2_000, 2), concurrency
        )
        pool = Pool(
            0, "gpu", slots=slots, cpu_milli=cpu_milli, gpu_sevenths=gpu_sevenths, compute=compute,
            memory_bytes=memory_bytes, cpu_usd_per_hour=cpu_usd, gpu_usd_per_hour=gpu_usd,
        )  # fmt: skip
        view = View(App((Function(0, "f", (self.variant,)),), (), (pool,)))
        self.node = Node(0, "n", pool, (self.variant,))
        self.node.state = NodeState.UP
        view.nodes[0] = view.free_nodes[0] = view.free_by_pool[0][0] = self.node
        self.view = view
        self.books = Reservations(view)
        self.rating = rated(StageConfig(20 * MS, 1, 1, 2_000, 2))

    def add(self) -> Replica:
        replica = Replica(self.rating, self.variant, self.node)
        self.books.reserve(replica)
        return replica

    def start(self, *, state: int = InstanceState.IDLE, last_used_ns: int = 0) -> Instance:
        id = sum(len(group) for group in self.node.by_variant.values())
        instance = Instance(id, self.variant, self.node.pool, self.node, last_used_ns)
        instance.state, instance.residency = state, Residency.DEVICE
        self.node.by_variant.setdefault(0, []).append(instance)
        self.node.instances.setdefault(0, instance)
        return instance

    @property
    def room(self) -> int:
        """How many replicas there is room for."""
        added = []
        while list(self.books.rooms([self.rating])):
            added.append(self.add())
        for replica in added:
            self.books.release(replica)
        return len(added)


@pytest.mark.parametrize(
    ("books", "room"),
    [
        (Books(), 3),  # of 7 sevenths
        (Books(cpu_milli=4_000), 2),
        (Books(slots=1), 1),
        (Books(memory_bytes=25), 2),
        (Books(cpu_milli=UNLIMITED, gpu_sevenths=UNLIMITED), 8),
        # One instance runs two batches, so two replicas share its memory.
        (Books(memory_bytes=10, concurrency=2), 2),
        # Where compute is resident they share its compute as well, else each has its own.
        (Books(concurrency=2, compute=Compute.RESIDENT), 6),
        (Books(concurrency=2, compute=Compute.PER_INSTANCE), 3),
    ],
)
def test_room_is_what_no_replica_has_reserved(books: Books, room: int) -> None:
    assert books.room == room
    first = books.add()
    assert books.room == room - 1
    books.books.release(first)
    assert books.room == room


def test_rooms_are_on_free_nodes_only() -> None:
    books = Books()
    del books.view.free_by_pool[0][0]
    assert books.room == 0


def test_a_room_is_warm_if_an_instance_is_to_spare() -> None:
    """1. No instance. 2. One that starts. 3. One that has started. 4. A replica needs it."""
    books = Books()
    seen = [[warm for _, _, warm in books.books.rooms([books.rating])]]
    instance = books.start(state=InstanceState.STARTING)
    seen.append([warm for _, _, warm in books.books.rooms([books.rating])])
    instance.state = InstanceState.IDLE
    seen.append([warm for _, _, warm in books.books.rooms([books.rating])])
    books.add()
    seen.append([warm for _, _, warm in books.books.rooms([books.rating])])
    assert seen == [[False], [False], [True], [False]]


@pytest.mark.parametrize(
    ("books", "left"),
    [
        (Books(gpu_usd=7.0), 5 / 7),
        (Books(cpu_usd=1.0), 7 / 8),
        (Books(cpu_usd=7.0, gpu_usd=16.0), 1 - (14 + 16 * 2 / 7) / (7 * 16 + 16)),
        (Books(), 1 - (1 / 8 + 2 / 7) / 2),  # without prices both count alike
        (Books(cpu_milli=UNLIMITED, gpu_sevenths=UNLIMITED, slots=4), 3 / 4),
    ],
)
def test_the_part_of_a_node_that_is_left_over(books: Books, left: float) -> None:
    assert books.books.left_over(books.node, books.rating.config) == pytest.approx(left)


def test_what_is_left_over_is_a_part_of_what_was_left_before() -> None:
    books = Books(gpu_usd=7.0)
    books.add()
    assert books.books.left_over(books.node, books.rating.config) == pytest.approx(3 / 5)


@pytest.mark.parametrize(("concurrency", "lacks"), [(1, [True, True]), (2, [False, True])])
def test_replicas_lack_instances_by_their_number(concurrency: int, lacks: list[bool]) -> None:
    """With one instance, two and three replicas."""
    books = Books(concurrency=concurrency)
    books.start()
    assert not books.books.lacks_instance(books.add())
    assert [books.books.lacks_instance(books.add()) for _ in range(2)] == lacks


def test_spares_are_idle_instances_that_no_replica_needs() -> None:
    """Three instances and one replica: the busy one stays, of the others the longest unused go."""
    books = Books()
    busy = books.start(state=InstanceState.BUSY)
    new, old = books.start(last_used_ns=2), books.start(last_used_ns=1)
    books.add()
    assert books.books.spares(books.node) == [old, new]
    books.add()
    assert books.books.spares(books.node) == [old]
    busy.state = InstanceState.IDLE
    assert books.books.spares(books.node) == [busy]
