"""What is promised to requests of DAGs: where their stages run, from when, and what is loaded.

The book of admission control for DAGs (Berkeley thesis EECS-2022-88, chapter 4). A `DagPromise` is
the batch per stage in which some requests of a pipeline go through it together. `PromiseBook` finds
the nodes for a placement, books the time of every stage and of the loads before it, and says what
is due on a node. It orders nothing: it returns what a policy then orders, and is told what happens.

A promise is *booked* when time is reserved for it, and *kept* when the policy has decided for it:
only then are its functions pinned in memory, and its nodes known as an instance of the DAG.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import Variant
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import NODE_UP, ON_HOST, TASK_BLOCKED, TASK_READY
from headgate.core.view import View, is_evictable
from headgate.planning.rivals.dag_placements import (
    DagPlacements,
    NodeReservations,
    RecentRatios,
    Reservation,
    duration_ns,
)

_JOINED_MAX: Final = 4  # promised batches of a pipeline that a newcomer tries to join

Nodes = tuple[tuple[Node, Variant], ...]  # by stage: where it runs


@final
class DagPromise:
    """Requests that go through their pipeline together, in a batch per stage."""

    __slots__ = ("bookings", "due_ns", "members", "placement", "places")

    def __init__(self, placement: int, places: Nodes, members: list[Request]) -> None:
        self.placement = placement  # its number among those of the pipeline
        self.places = places
        self.members = members
        self.due_ns = min(request.deadline_ns for request in members)
        self.bookings: list[Reservation] = []  # with those of loads

    @property
    def end_ns(self) -> int:
        return max(each.end_ns for each in self.bookings)

    @property
    def items_max(self) -> int:
        """Items of the largest batch that every stage can run."""
        return min(variant.items_max() for _, variant in self.places)

    def has_begun(self) -> bool:
        """Whether a stage runs, or has run, so that nobody can join any more."""
        return any(each.is_running and each.tasks for each in self.bookings) or any(
            task.state not in (TASK_BLOCKED, TASK_READY)
            for request in self.members
            for task in request.tasks
        )


@final
class PromiseBook:
    """All promises of an application, and the time and memory that they take on nodes."""

    def __init__(self, view: View, window: int) -> None:
        app = view.app
        self._view = view
        self.placements = [DagPlacements(app, pipeline) for pipeline in app.pipelines]
        self.reservations = NodeReservations()
        self._ratios = RecentRatios(app, window)
        self._waiting: list[list[DagPromise]] = [[] for _ in app.pipelines]  # none of it has begun
        self._placed: list[dict[Nodes, int]] = [{} for _ in app.pipelines]  # with the placement
        self._by_task: dict[int, Reservation] = {}  # of tasks that do not run yet
        self._by_request: dict[int, list[Reservation]] = {}
        self._by_batch: dict[int, Reservation] = {}
        self._loads: dict[tuple[int, int], Reservation] = {}  # by node and variant id
        self._pins: dict[tuple[int, int], int] = {}  # by the same: batches promised

    # Where a request could run

    def satisfying(self, request: Request) -> range:
        """The placements of its pipeline that meet both objectives on an idle system."""
        left_ns = request.deadline_ns
        if left_ns != NEVER_NS:
            left_ns -= self._view.now_ns
        pipeline = request.pipeline
        return self.placements[pipeline.id].satisfying(left_ns, request.cost_usd, request.items)

    def placed(self, request: Request, valid: range) -> list[tuple[Nodes, int]]:
        """The instances of the DAG that are placed already, of these placements."""
        placed = self._placed[request.pipeline.id].items()
        return [(places, number) for places, number in placed if number in valid and _held(places)]

    def fit(self, request: Request, placement: int) -> Nodes | None:
        """Nodes for a placement: functions by ascending memory, nodes of their pool by free memory.

        None if some function fits nowhere. O(stages x (nodes + what is promised on a node)).
        """
        configs = self.placements[request.pipeline.id].placements[placement]
        variants = [self._view.app.variants[config.build] for config in configs]
        free: dict[int, int] = {}
        places: dict[int, Node] = {}
        order = sorted(range(len(variants)), key=lambda i: variants[i].profile.memory_bytes)
        now_ns = self._view.now_ns
        for index in order:
            variant, pool_id = variants[index], configs[index].place
            nodes = [n for n in self._view.nodes.values() if self._is_usable(n, pool_id, variant)]
            for node in nodes:
                if node.id not in free:
                    free[node.id] = self._free_bytes(node)
            nodes.sort(key=lambda n: (-free[n.id], self.reservations.promised_ns(n, now_ns)))
            for node in nodes:
                is_pinned = self._pins.get((node.id, variant.id), 0) > 0
                need = 0 if is_pinned else variant.profile.memory_bytes
                if need <= free[node.id]:
                    free[node.id] -= need
                    places[index] = node
                    break
            else:
                return None
        return tuple((places[index], variant) for index, variant in enumerate(variants))

    def _is_usable(self, node: Node, pool_id: int, variant: Variant) -> bool:
        is_up = node.state == NODE_UP and node.id in self.reservations.lanes
        return is_up and node.pool.id == pool_id and not self._view.is_barred(node, variant)

    def _free_bytes(self, node: Node) -> int:
        """Memory of a node that nothing promised needs."""
        pinned = sum(
            self._view.app.variants[variant_id].profile.memory_bytes
            for (node_id, variant_id), count in self._pins.items()
            if node_id == node.id and count
        )
        return node.pool.memory_bytes - pinned

    # Promises, booked

    def join(self, request: Request, valid: range) -> DagPromise | None:
        """A promised batch that has not begun with the request in it, booked, if nobody is late.

        It replaces the one without the request, which is waited for no more.
        """
        waiting = self._waiting[request.pipeline.id]
        waiting[:] = [each for each in waiting if each.members and not each.has_begun()]
        for promise in waiting[: -_JOINED_MAX - 1 : -1]:  # least is promised behind the last ones
            items = request.items + sum(each.items for each in promise.members)
            if promise.placement not in valid or items > promise.items_max:
                continue
            old = promise.bookings
            for each in old:
                self.reservations.remove(each)
            joined = DagPromise(promise.placement, promise.places, [*promise.members, request])
            self.book(joined)
            if joined.end_ns <= joined.due_ns:
                for each in old:
                    self._unpin(each)
                waiting.remove(promise)
                return joined
            self._cancel(joined)
            for each in old:
                self.reservations.restore(each)
        return None

    def preview(self, promise: DagPromise) -> tuple[int, bool]:
        """When a promise would end if it were booked now, and whether something of it waits."""
        self.book(promise)
        end_ns = promise.end_ns
        waits = any(each.start_ns > self._view.now_ns for each in promise.bookings)
        self._cancel(promise)
        promise.bookings = []
        return end_ns, waits

    def book(self, promise: DagPromise) -> None:
        """Reserve every stage of a promise, and what must be loaded for it."""
        now_ns = self._view.now_ns
        pipeline = promise.members[0].pipeline
        items = sum(request.items for request in promise.members)
        ends_ns: list[int] = []
        for index, (node, variant) in enumerate(promise.places):
            after = pipeline.stages[index].after
            ready_ns = max([now_ns, *(ends_ns[before] for before in after)])
            load = self._loads.get((node.id, variant.id))
            if load is None and not _is_resident(node, variant):
                load = self._load(node, variant)
                promise.bookings.append(load)
            if load is not None:
                ready_ns = max(ready_ns, load.end_ns)
            tasks = [request.tasks[index] for request in promise.members]
            took_ns = self._duration_ns(node, variant, items)
            times = (ready_ns, took_ns)
            booking = self.reservations.reserve(now_ns, node, variant, tasks, times)
            promise.bookings.append(booking)
            ends_ns.append(booking.end_ns)

    def _cancel(self, promise: DagPromise) -> None:
        """Undo what `book` reserved and nobody has kept."""
        for each in promise.bookings:
            self.reservations.remove(each)
            if not each.tasks:
                self._loads.pop((each.node.id, each.variant.id), None)

    def room_ns(self, promise: DagPromise, batch_room: int) -> int:
        """How much longer a promise of one request takes if others join it.

        Up to a batch of `batch_room`, or of the half of it, or of a quarter, with which the
        placement would on an idle system take no more than half of the time that is left.
        """
        (request,) = promise.members
        if batch_room <= request.items:
            return 0
        places, pipeline = promise.places, request.pipeline
        single = [float(self._duration_ns(n, v, request.items)) for n, v in places]
        left_ns = request.deadline_ns - self._view.now_ns
        items = batch_room
        while items > request.items:
            sizes = [min(v.items_max(), items) for _, v in places]
            grown = [
                float(self._duration_ns(n, v, size))
                for (n, v), size in zip(places, sizes, strict=True)
            ]
            grown_ns = max(pipeline.longest_to(grown))
            if 2 * grown_ns <= left_ns:
                return int(grown_ns - max(pipeline.longest_to(single)))
            items //= 2
        return 0

    def promised_ns(self, places: Nodes) -> int:
        """Time that is promised on the busiest of these nodes."""
        now_ns = self._view.now_ns
        return max(self.reservations.promised_ns(node, now_ns) for node, _ in places)

    def _duration_ns(self, node: Node, variant: Variant, items: int) -> int:
        took_ns = duration_ns(variant, items, node.slots, node.pool.network_ns)
        return int(took_ns * self._ratios.factor(self._view.now_ns, variant))

    # Promises, kept

    def keep(self, promise: DagPromise) -> list[Reservation]:
        """Confirm a promise that is booked: its memory is pinned. Return the loads to begin."""
        pipeline = promise.members[0].pipeline
        self._placed[pipeline.id][promise.places] = promise.placement
        self._waiting[pipeline.id].append(promise)
        loads = [each for each in promise.bookings if not each.tasks]
        promise.bookings = [each for each in promise.bookings if each.tasks]
        for each in promise.bookings:
            self._pin(each)
        for request in promise.members:
            self._by_request[request.id] = list(promise.bookings)
        return loads

    def promise_again(self, tasks: Sequence[Task], ready_ns: int) -> Reservation | None:
        """Promise tasks of one stage that have no promise, on the node that is done first.

        None if no node can take them. O(variants x nodes x what is promised on a node).
        """
        items = sum(task.request.items for task in tasks)
        best: Reservation | None = None
        now_ns = self._view.now_ns
        for variant in tasks[0].function.variants:
            for node in self._view.nodes.values():
                is_usable = self._is_usable(node, node.pool.id, variant)
                if not is_usable or node.pool.id not in variant.pool_ids:
                    continue
                could_hold = variant.profile.memory_bytes <= node.pool.memory_bytes
                if items > variant.items_max() or not could_hold:
                    continue
                start_ns = 0 if _is_resident(node, variant) else variant.profile.cold_start_ns
                times = (ready_ns, start_ns + self._duration_ns(node, variant, items))
                booking = self.reservations.reserve(now_ns, node, variant, list(tasks), times)
                if best is None or booking.end_ns < best.end_ns:
                    if best is not None:
                        self.reservations.remove(best)
                    best = booking
                else:
                    self.reservations.remove(booking)
        if best is not None:
            self._pin(best)
            for task in tasks:
                self._by_request.setdefault(task.request.id, []).append(best)
        return best

    def booking_of(self, task: Task) -> Reservation | None:
        """The reservation in which a task is to run, if it has one."""
        return self._by_task.get(task.id)

    def withdraw(self, task: Task) -> None:
        """A task is not needed any more."""
        booking = self._by_task.pop(task.id, None)
        if booking is not None:
            self._leave(booking, task.request)

    def settle(self, request: Request) -> None:
        """Nothing of a request is needed any more."""
        for booking in self._by_request.pop(request.id, []):
            self._leave(booking, request)
        for each in self._waiting[request.pipeline.id]:
            if request in each.members:
                each.members.remove(request)

    def release(self, bookings: Sequence[Reservation]) -> list[tuple[list[Task], int]]:
        """Take back what nodes cannot keep; return the tasks of each, and when it was to begin."""
        released: list[tuple[list[Task], int]] = []
        for booking in bookings:
            self.reservations.remove(booking)
            self._unpin(booking)
            for task in booking.tasks:
                self._by_task.pop(task.id, None)
            released.append((booking.tasks, booking.start_ns))
            booking.narrow([])
        return released

    def lose_node(self, node: Node) -> list[Reservation]:
        """Forget a node that is lost; return what was promised there and does not run."""
        for placed in self._placed:
            for places in [each for each in placed if any(n is node for n, _ in each)]:
                del placed[places]
        for waiting in self._waiting:
            waiting[:] = [each for each in waiting if all(n is not node for n, _ in each.places)]
        for key in [key for key in self._loads if key[0] == node.id]:
            del self._loads[key]
        return self.reservations.drop_node(node)

    def stuck(self, node_id: int, variant: Variant) -> list[Reservation]:
        """What is promised on a node on which its function does not start."""
        return [
            booking
            for lane in self.reservations.lanes.get(node_id, [])
            for booking in lane
            if booking.variant is variant
            and not booking.is_running
            and self._view.is_barred(booking.node, variant)
        ]

    def _leave(self, booking: Reservation, request: Request) -> None:
        """A request does not need its part of a reservation any more."""
        if booking.is_running:
            return
        for task in [task for task in booking.tasks if task.request is request]:
            self._by_task.pop(task.id, None)
            if len(booking.tasks) == 1:
                self._unpin(booking)
                self.reservations.remove(booking)
            booking.narrow([each for each in booking.tasks if each is not task])

    def _pin(self, booking: Reservation) -> None:
        key = (booking.node.id, booking.variant.id)
        self._pins[key] = self._pins.get(key, 0) + 1
        for task in booking.tasks:
            self._by_task[task.id] = booking

    def _unpin(self, booking: Reservation) -> None:
        key = (booking.node.id, booking.variant.id)
        if booking.tasks and key in self._pins:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    # What is due, and what runs

    def due(self, node: Node) -> tuple[Reservation | None, list[int]]:
        """The first reservation of a lane that can begin without delaying one that cannot yet.

        Also the times at which something may be due that is not due now, as they were found.
        """
        now_ns = self._view.now_ns
        lanes = self.reservations.lanes[node.id]
        wakes_ns: list[int] = []
        for lane in lanes:
            limit_ns = NEVER_NS  # when the first that cannot begin yet is promised to
            for booking in lane:
                if booking.is_running:
                    break
                if self._can_begin(booking, wakes_ns):
                    if now_ns + booking.duration_ns <= limit_ns:
                        return booking, wakes_ns
                    wakes_ns.append(limit_ns)
                elif limit_ns == NEVER_NS and booking.start_ns > now_ns:
                    limit_ns = booking.start_ns
        if all(lanes):
            return None, wakes_ns
        for lane in lanes:  # a lane has nothing to do: it takes what is behind something else
            for booking in lane[1:]:
                if lane[0].is_running and self._can_begin(booking, wakes_ns):
                    self.reservations.change_lane(booking)
                    return booking, wakes_ns
        return None, wakes_ns

    def _can_begin(self, booking: Reservation, wakes_ns: list[int]) -> bool:
        node, variant = booking.node, booking.variant
        if not booking.tasks:
            return True
        blocked = [task for task in booking.tasks if task.state == TASK_BLOCKED]
        ready = [task for task in booking.tasks if task.state == TASK_READY]
        if not ready or (blocked and booking.start_ns > self._view.now_ns):
            if blocked and ready:
                wakes_ns.append(booking.start_ns)
            return False
        instance = node.instances.get(variant.id)
        if instance is not None and instance.is_preparing:
            return False
        return self._view.fits(node, variant)

    def begin(self, booking: Reservation) -> tuple[list[Task], list[Task]]:
        """A batch begins: return the tasks that go, and those that cannot go with them."""
        tasks = [task for task in booking.tasks if task.state == TASK_READY]
        alone = next((task for task in tasks if task.must_run_alone), None)
        if alone is not None:
            tasks = [alone]
        others = [task for task in booking.tasks if task not in tasks]
        self._unpin(booking)
        for task in booking.tasks:
            self._by_task.pop(task.id, None)
        booking.narrow(list(tasks))
        self.reservations.begin(booking, self._view.now_ns)
        return tasks, others

    def dispatched(self, batch: Batch, booking: Reservation) -> None:
        """The batch of a reservation runs."""
        self._by_batch[batch.id] = booking

    def ended(self, batch: Batch, took_ns: int) -> None:
        """A batch has ended; its time is learnt from, unless it includes a load."""
        booking = self._by_batch.pop(batch.id, None)
        if booking is not None:
            self.reservations.remove(booking)
            node = booking.node
            if booking.duration_ns <= self._duration_ns(node, batch.variant, batch.items):
                self._ratios.observe(self._view.now_ns, batch, took_ns, slots=node.slots)

    def evicted(self, node: Node, variant: Variant) -> list[Instance]:
        """The idle instances to stop, of functions for which nothing is promised, to run one."""
        held = node.instances.get(variant.id)
        if held is not None and held.residency != ON_HOST:
            return []
        missing = node.memory_used_bytes + variant.profile.memory_bytes - node.pool.memory_bytes
        idle = [i for group in node.by_variant.values() for i in group if is_evictable(i)]
        evicted: list[Instance] = []
        for instance in sorted(idle, key=lambda i: (i.last_used_ns, i.id)):
            if missing <= 0:
                break
            is_free = (node.id, instance.variant.id) not in self._pins
            if is_free and instance.residency != ON_HOST and instance.variant is not variant:
                missing -= instance.variant.profile.memory_bytes
                evicted.append(instance)
        return evicted

    # Loads

    def _load(self, node: Node, variant: Variant) -> Reservation:
        profile = variant.profile
        held = node.instances.get(variant.id)
        is_on_host = held is not None and held.residency == ON_HOST
        took_ns = profile.swap_in_ns if is_on_host else profile.cold_start_ns
        now_ns = self._view.now_ns
        load = self.reservations.reserve(now_ns, node, variant, [], (now_ns, took_ns))
        self._loads[node.id, variant.id] = load
        return load

    def loads_ahead(self, promise: DagPromise) -> Iterator[Reservation]:
        """Yield the loads that alone make a promise late, and can begin now.

        They are for the requests that follow. What is promised on a node goes first.
        """
        (request,) = promise.members
        idle_ns = self.placements[request.pipeline.id].times_ns[promise.placement]
        missing = [place for place in promise.places if not _is_resident(*place)]
        if not missing or idle_ns > request.deadline_ns - self._view.now_ns:
            return
        for node, variant in missing:
            if (node.id, variant.id) in self._loads or node.id not in self._view.free_nodes:
                continue
            load = self._load(node, variant)
            if load.start_ns == self._view.now_ns:
                yield load
            else:
                self.end_load(node, variant)

    def end_load(self, node: Node, variant: Variant) -> None:
        """A load has ended, or is given up."""
        load = self._loads.pop((node.id, variant.id), None)
        if load is not None:
            self.reservations.remove(load)

    def end_loads_from_host(self, node: Node) -> None:
        """End the loads of a node whose weights have arrived."""
        for key in [key for key in self._loads if key[0] == node.id]:
            variant = self._view.app.variants[key[1]]
            if _is_resident(node, variant):
                self.end_load(node, variant)


def _is_resident(node: Node, variant: Variant) -> bool:
    instance = node.instances.get(variant.id)
    return instance is not None and instance.residency != ON_HOST and not instance.is_preparing


def _held(places: Nodes) -> bool:
    """Whether an instance of a DAG is still placed: every node is up and holds its function."""
    return all(node.state == NODE_UP and variant.id in node.instances for node, variant in places)
