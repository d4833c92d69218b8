"""Admits a DAG if a placement of its functions meets its latency and its cost; reserves it.

"Making the Most of Serverless Accelerators" (Berkeley thesis EECS-2022-88, chapter 4). Rules marked
[own] are ours, where the thesis leaves one open.

*Before the first request* every pipeline gets its placements of functions on pools, as far as no
other is both faster and cheaper (`planning.rivals.dag_placements`). *At every request*:

- It joins a promised batch that has not begun, if no objective of its members breaks. Under
  overload everything is promised until just before its deadline, and nothing can be joined:
  `batch_room` makes promises early enough for others to join them [own].
- Else it runs on an instance of the DAG that is placed already (a node for every function), behind
  what is promised there, if that is in time.
- Else a sample of the placements that meet both objectives is fitted to the nodes: the functions
  of each pool by ascending memory, the nodes by free memory, the one with most first; among equal
  nodes the one with the least promised [own]. Memory of functions for which nothing is promised is
  free ("post"); a function that the node holds needs none [own]. Loading ("pre") and running
  ("exec") are reserved on the nodes, and of the fits that are in time one is taken: at random as
  in the thesis, or the cheapest, the fastest, or the one with the least promised on its nodes.
- Else it is rejected, with the reason and the latency that it would have had. If loading alone
  makes it late, the functions are loaded for those that follow [own: nobody would ever pay for it].
  Without a deadline it is promised stage by stage instead, as far as its cost allows [own].

What is promised runs in the order of its promised starts. Something later may go first if it ends
before the promised start of what is not ready yet [own]. If a node is lost, what was promised there
is promised anew, on whichever node is done first, in time or late [own]. The thesis takes profiles
to be right; here times are multiplied by the largest recent ratio of measured to profiled time
[own]; `window: 0` trusts profiles. A cost objective counts what functions hold while they run.
Cost per decision: O(samples x stages x (nodes + what is promised on a node)).

>>> from headgate.policies import find_policy
>>> find_policy("dag_admission").config(choose="cheapest").samples
8
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.policy import (
    NOT_NEGATIVE,
    Capabilities,
    Context,
    Policy,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import ON_HOST, TASK_BLOCKED, TASK_READY, Outcome, Rejection, Settlement
from headgate.planning.rivals.dag_placements import Reservation
from headgate.planning.rivals.dag_promises import DagPromise, Nodes, PromiseBook

_RANDOM: Final = "random"
_CHEAPEST: Final = "cheapest"
_FASTEST: Final = "fastest"
_LEAST_LOADED: Final = "least_loaded"
_SERVE: Final = "serve"  # the timer: what could not go before something else may go now


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `dag_admission`."""

    # Which of the placements that are in time is taken.
    choose: str = field(
        default=_RANDOM, metadata=bounded(choices=(_RANDOM, _CHEAPEST, _FASTEST, _LEAST_LOADED))
    )
    # Placements that are fitted to the nodes: s of the thesis.
    samples: int = field(default=8, metadata=bounded(ge=1))
    # A promise that has to wait is made only if it would be in time in a batch of so many items, so
    # that others can join it; 1: as in the thesis.
    batch_room: int = field(default=1, metadata=bounded(ge=1))
    # Batches of a variant of which the largest ratio of measured to profiled time counts; 0: none.
    window: int = field(default=10, metadata=NOT_NEGATIVE)


@final
class DagAdmission(Policy):
    """Chooses among promises, keeps one, and dispatches what is due."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._choose = config.choose
        self._samples = config.samples
        self._batch_room = config.batch_room
        self._promises = PromiseBook(self.view, config.window)
        self._unplaced: dict[int, Task] = {}  # by id: ready, and no node that could take them is up
        self._touched: list[Node] = []  # to be looked at when the event of a batch is handled

    # Admission

    def on_arrival(self, request: Request) -> None:
        valid = self._promises.satisfying(request)
        if not valid:
            fastest_ns = self._promises.placements[request.pipeline.id].times_ns[0]
            self._reject(request, Rejection.INFEASIBLE, fastest_ns)
            return
        joined = self._promises.join(request, valid)
        if joined is not None:
            self._keep(joined)
            return
        placed = self._promises.placed(request, valid)
        placed = self.rng.sample(placed, min(self._samples, len(placed)))
        best_ns = NEVER_NS
        for candidates in (placed, self._fits(request, valid)):
            promise, end_ns = self._best(request, candidates)
            if promise is not None:
                self._promises.book(promise)
                self._keep(promise)
                return
            best_ns = min(best_ns, end_ns)
        if request.deadline_ns == NEVER_NS:
            return  # it is promised stage by stage, as its tasks become ready
        if best_ns == NEVER_NS:
            self._reject(request, Rejection.UNAVAILABLE, 0)
        else:
            self._reject(request, Rejection.OVERLOADED, best_ns - self.view.now_ns)

    def _reject(self, request: Request, reason: str, predicted_ns: int) -> None:
        settlement = Settlement(Outcome.REJECTED, reason, predicted_ns=predicted_ns)
        self.orders.reject(request, settlement)

    def _fits(self, request: Request, valid: range) -> Iterator[tuple[Nodes, int]]:
        """Fit a sample of the valid placements to the nodes, by memory."""
        for placement in self.rng.sample(valid, min(self._samples, len(valid))):
            places = self._promises.fit(request, placement)
            if places is not None:
                yield places, placement

    def _best(
        self, request: Request, candidates: Iterable[tuple[Nodes, int]]
    ) -> tuple[DagPromise | None, int]:
        """The chosen one of the candidates that are in time; else the earliest end."""
        best: tuple[tuple[float, int], DagPromise] | None = None
        soonest_ns = NEVER_NS
        for places, placement in candidates:
            promise = DagPromise(placement, places, [request])
            if request.items > promise.items_max:
                continue
            end_ns, waits = self._promises.preview(promise)
            room_ns = self._promises.room_ns(promise, self._batch_room) if waits else 0
            if end_ns + room_ns <= request.deadline_ns:
                rank = (self._rank(promise), end_ns)
                if best is None or rank < best[0]:
                    best = rank, promise
                if self._choose == _RANDOM:  # candidates come in random order
                    break
            elif end_ns < soonest_ns:
                soonest_ns = end_ns
                for load in self._promises.loads_ahead(promise):
                    self._serve(load.node)
        return (None if best is None else best[1]), soonest_ns

    def _rank(self, promise: DagPromise) -> float:
        """What the chosen placement has least of; ties go to the one that ends first."""
        if self._choose == _CHEAPEST:
            return -promise.placement  # they are in order of time, and so of falling cost
        if self._choose == _LEAST_LOADED:
            return self._promises.promised_ns(promise.places)
        return 0.0

    def _keep(self, promise: DagPromise) -> None:
        for load in self._promises.keep(promise):
            self._serve(load.node)  # loads begin before the request's own tasks are ready

    # Dispatch

    def on_task_ready(self, task: Task) -> None:
        booking = self._promises.booking_of(task)
        if booking is None:
            booking = self._promises.promise_again([task], self.view.now_ns)
        if booking is None:
            self._unplaced[task.id] = task
        elif task.stage.after:
            self._touched.append(booking.node)  # others of its batch become ready with it
        else:
            self._serve(booking.node)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self.on_task_ready(task)
        self._serve_touched()

    def on_task_withdrawn(self, task: Task) -> None:
        self._unplaced.pop(task.id, None)
        self._promises.withdraw(task)

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        self._promises.settle(request)

    def on_capacity(self, node: Node) -> None:
        self._promises.end_loads_from_host(node)
        self._serve(node)

    def on_timer(self, name: str, number: int) -> None:
        for node in list(self.view.free_nodes.values()):
            self._serve(node)

    def _serve_touched(self) -> None:
        touched, self._touched = self._touched, []
        for node in dict.fromkeys(touched):
            self._serve(node)

    def _serve(self, node: Node) -> None:
        """Begin what is due on a node while it has a free slot."""
        while node.id in self.view.free_nodes and node.id in self._promises.reservations.lanes:
            booking, wakes_ns = self._promises.due(node)
            for at_ns in wakes_ns:
                self._wake(at_ns)
            if booking is None:
                return
            self._begin(booking)

    def _wake(self, at_ns: int) -> None:
        set_ns = self.view.timers.get((_SERVE, 0), NEVER_NS)
        if at_ns < set_ns or set_ns <= self.view.now_ns:
            self.orders.set_timer(_SERVE, at_ns)

    def _begin(self, booking: Reservation) -> None:
        if not booking.tasks:
            self._begin_load(booking)
            return
        node, variant = booking.node, booking.variant
        tasks, others = self._promises.begin(booking)
        for instance in self._promises.evicted(node, variant):
            self.orders.stop(instance)
        self._promises.dispatched(self.orders.dispatch(tasks, node, variant), booking)
        for task in others:  # they could not go with it, and each is promised for itself
            if task.state == TASK_READY:
                self.on_task_ready(task)

    def _begin_load(self, load: Reservation) -> None:
        node, variant = load.node, load.variant
        held = node.instances.get(variant.id)
        is_held = held is not None and held.residency != ON_HOST
        is_barred = self.view.is_barred(node, variant)
        if is_held or is_barred or not self.view.can_make_room(node, variant):
            self._promises.end_load(node, variant)
            return
        self._promises.reservations.begin(load, self.view.now_ns)
        for instance in self._promises.evicted(node, variant):
            self.orders.stop(instance)
        if held is not None:
            self.orders.load(held)
        else:
            self.orders.start(variant, node)

    # What happens to batches, instances and nodes

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._promises.ended(batch, took_ns)
        self._serve_touched()

    def on_instance_started(self, instance: Instance) -> None:
        if instance.node is not None:
            self._promises.end_load(instance.node, instance.variant)
        self._retry()

    def on_instance_gone(self, instance: Instance) -> None:
        node, variant = instance.node, instance.variant
        if node is None:
            return
        self._promises.end_load(node, variant)
        if variant.id in self.view.load_failures:
            for node_id in list(self._promises.reservations.lanes):
                self._move(self._promises.stuck(node_id, variant))

    def on_node_joined(self, node: Node) -> None:
        self._promises.reservations.add_node(node)
        self._retry()

    def on_node_lost(self, node: Node) -> None:
        self._move(self._promises.lose_node(node))

    def _retry(self) -> None:
        """Promise what no node could take before, and look at all nodes again."""
        unplaced, self._unplaced = self._unplaced, {}
        for task in unplaced.values():
            if task.state == TASK_READY:
                self.on_task_ready(task)
        self._touched += self.view.free_nodes.values()
        self._serve_touched()

    def _move(self, bookings: list[Reservation]) -> None:
        """Promise anew what was promised on nodes that cannot keep it."""
        for tasks, start_ns in self._promises.release(bookings):
            still_open = [task for task in tasks if task.state in (TASK_BLOCKED, TASK_READY)]
            if not still_open:
                continue
            booking = self._promises.promise_again(still_open, start_ns)
            if booking is not None:
                self._serve(booking.node)
            else:
                self._unplaced |= {task.id: task for task in still_open if task.state == TASK_READY}


POLICY = PolicyKind(DagAdmission, Config, Capabilities(batches=True, mixed_pools=True))
