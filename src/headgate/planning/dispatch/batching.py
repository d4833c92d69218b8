"""Batching: which waiting tasks go together, and which can no longer be in time.

A batch is as large as the promises of its members allow. A task that cannot be in time on any build
is given up, or one late task would make the next one late (the domino effect of EDF). Best-effort
batches leave lanes to the requests that could not wait for them to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import ceil, inf, sqrt
from typing import final

from headgate.core.model import UNLIMITED
from headgate.core.records import STAGES_MAX, Batch, Node, Task
from headgate.core.states import TASK_READY, BatchState
from headgate.core.view import View
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.constants import ENOUGH_EFFICIENCY, FULL_BATCH_MIN, LANES_WITHIN, WAIT_MAX
from headgate.planning.dispatch.shapes import Choice, ShapeChooser
from headgate.planning.dispatch.task_queues import EdfQueue, TaskQueues
from headgate.planning.pools.build import Build, Promise
from headgate.planning.pools.builds import Builds


@final
class Send:
    """A decision: a batch from the head of a queue goes to a node, or to a FaaS pool.

    Or, with `is_start`, the node starts the build, and the batch waits for a node that holds it.
    """

    __slots__ = ("build", "choice", "is_start", "node", "queue", "shape_id", "start_ns")

    def __init__(
        self,
        queue: EdfQueue,
        build: Build,
        node: Node | None,
        start_ns: int = 0,
        shape_id: int = 0,
        choice: Choice | None = None,
        *,
        is_start: bool = False,
    ) -> None:
        self.queue = queue
        self.build = build
        self.is_start = is_start
        self.node = node  # None: the batch is a call of the build's FaaS pool
        self.start_ns = start_ns  # that it takes first, to hold the build and its input
        self.shape_id = shape_id
        self.choice = choice  # where the size of the batch was chosen with its shape


@final
class Batching:
    """Forms batches from the heads of queues."""

    def __init__(
        self,
        view: View,
        builds: Builds,
        admission: AdmissionControl,
        queues: TaskQueues,
        shapes: ShapeChooser,
    ) -> None:
        self._view = view
        self._builds = builds
        self._admission = admission
        self._queues = queues
        self._shapes = shapes
        self._shares = admission.feasibility.shares
        # What is learnt from a batch that a node may refuse, if the node takes it: of the batch
        # that was formed last, and by batch id.
        self._lesson: Callable[[], None] | None = None
        self._lessons: dict[int, Callable[[], None]] = {}

    def take(self, send: Send) -> tuple[list[Task], int]:
        """Dequeue the most urgent task and those that run with it; their bookings are released.

        Return them and the shape of the batch. With a `choice`, those join for whom it is best too;
        if they are fewer, the shape is chosen again.
        """
        queue, build, node, choice = send.queue, send.build, send.node, send.choice
        start_ns, shape_id = send.start_ns, send.shape_id
        admission, head = self._admission, queue.head()
        assert head is not None
        promise = admission.booked(head)
        items_max = build.items_max if choice is None else choice.items
        if promise is None and choice is None:
            # What blocks others anyway takes all that waits: one more item costs them little.
            items_max = self.unblocking_items(build, build.items_best, node) or build.items_best
        elif node is not None and queue.node_id is not None and queue.node_id != node.id:
            items_max = 1  # every further input would have to be moved first, too
        bytes_max = UNLIMITED if build.pool.faas is None else build.pool.faas.payload_bytes_max
        batch: list[Task] = []
        items = booked_ns = 0
        task: Task | None = head
        while task is not None:
            own_items = task.request.items
            booked = admission.booked(task) if batch else promise
            if booked is not None:
                if batch and booked.build is not build and not self._pays(task, build):
                    break
                if choice is None:
                    if batch or own_items < min(items_max, queue.items):  # else none can join it
                        items_max = min(items_max, self._limit(build, task, booked, start_ns))
                elif batch and not self._gains(build, task, start_ns, choice):
                    break
            bytes_max -= task.payload_bytes
            if batch and (items + own_items > items_max or bytes_max < 0 or task.must_run_alone):
                break
            items += own_items
            batch.append(queue.pop())
            if booked is not None:
                booked.release()
                booked_ns += booked.base_ns
            if task.must_run_alone or queue.items == 0 or items >= items_max:
                break
            task = queue.head()
        admission.on_sent(batch)
        if choice is not None and items < choice.items and promise is not None:
            left_ns, z = admission.left_ns(head) - start_ns, admission.sent_z(head)
            shape_id = self._shapes.refine(build, head, items, left_ns, z, node, choice)
        lane_ns = build.lane_ns_in(items, shape_id)
        slip_ns = self._slip_ns(head, promise, build, lane_ns, choice)
        lane_ns *= build.weight_of(shape_id)
        booked_ns = 0 if slip_ns is None else booked_ns
        is_contended, is_promised = queue.items > 0, promise is not None
        self._queues.forget(batch)
        admission.budgets.on_sent(batch, build, items, shape_id)
        if self._view.gateways == 1 or node is None:
            self._learn(
                build, items, shape_id, lane_ns, is_promised, booked_ns, is_contended, slip_ns
            )
        else:
            self._lesson = partial(
                self._learn,
                build, items, shape_id, lane_ns, is_promised, booked_ns, is_contended, slip_ns,
            )  # fmt: skip
        self._queues.update_heads(queue, build.function_id, promise)
        return batch, shape_id

    def waits_until_ns(self, task: Task, promise: Promise, items: int, node: Node) -> int:
        """Until when a promised task leaves a node to others; `items` wait with it for now.

        Half of the time that it can wait is enough: what else is promised may delay it. Nodes that
        all gateways leave to others, it leaves for most of its time.
        """
        build, request = promise.build, task.request
        shares, now_ns = self._shares[build.pool.id], self._view.now_ns
        can_wait_ns = promise.start_ns - request.arrival_ns
        until_ns = request.arrival_ns + can_wait_ns // 2
        last_ns = until_ns
        if self._view.gateways > 1:
            last_ns = request.arrival_ns + int(WAIT_MAX * can_wait_ns)
        load = shares.of_class((request.client, request.pipeline.id))
        if last_ns <= now_ns or load is None:
            return 0
        batch_items = min(items, build.items_best)
        if not shares.is_contended:
            lanes, within_ns = self._lanes_to_leave(build, batch_items, load.window_ns)
            if lanes > 0 and last_ns > until_ns:
                nodes = ceil(lanes / max(1, build.lanes))
                if self._builds.nodes.is_among_last(node, nodes):
                    return last_ns
            if lanes > 0 and self._lanes_left(build, now_ns + within_ns) < lanes:
                return until_ns
        if until_ns <= now_ns or load.is_starved or load.window_ns <= shares.starved_window_ns:
            return 0
        # A class that can wait less is starved. Where this one is not, a batch that takes far more
        # time per item than a full one waits for others to join it.
        return 0 if build.efficiency(batch_items) >= ENOUGH_EFFICIENCY else until_ns

    def _lanes_to_leave(self, build: Build, items: int, own_window_ns: float) -> tuple[int, int]:
        """How many lanes a batch has to leave to those who can wait less, and not until it ends.

        And within which time they are to be free. Where there is enough for all, patient requests
        must not take every node at once only because all of them are free. No more are left than
        will not be missed. Of several gateways, each is taken to be asked for as much.
        """
        calendar, shares = build.calendar, self._shares[build.pool.id]
        gateways, lanes = self._view.gateways, calendar.lanes
        busy_ns = min(build.lane_ns(items), own_window_ns)
        own, window_ns = shares.blocked(self._view.now_ns, lanes / gateways, busy_ns)
        needed = gateways * own
        if window_ns >= busy_ns:
            return 0, 0
        spare = lanes - gateways * shares.offered_lanes + needed
        return min(ceil(needed + sqrt(needed)), int(spare)), int(LANES_WITHIN * window_ns)

    def _lanes_left(self, build: Build, at_ns: int) -> float:
        """Lanes that a batch would leave by then, if each gateway runs as much as this one."""
        lanes = build.calendar.lanes
        busy = lanes - build.calendar.lanes_free_by(self._view.now_ns, at_ns)
        return lanes - self._view.gateways * busy - build.weight

    def unblocking_items(self, build: Build, items: int, node: Node | None = None) -> int:
        """The largest batch, up to `items`, that leaves lanes to those who cannot wait so long.

        Work cannot be preempted: while a long batch runs, its lane is lost to requests with short
        windows. So enough lanes for their load must be within reach of the shortest window, and for
        each function one of the nodes that hold it. Where a class is starved, they are not enough:
        its stages have a part of its window each, and its requests may come in bursts. Then no lane
        is taken for longer than it can wait. 0: not even one item is done within it.
        """
        now_ns, calendar, shares = self._view.now_ns, build.calendar, self._shares[build.pool.id]
        busy_ns = build.lane_ns(items)
        needed, window_ns = shares.blocked(now_ns, calendar.lanes / self._view.gateways, busy_ns)
        free_by_ns = now_ns + int(LANES_WITHIN * window_ns)
        left = calendar.lanes_free_by(now_ns, free_by_ns) - build.weight
        if left >= needed + sqrt(needed):
            window_ns = shares.starved_window_ns
        if node is not None:
            window_ns = min(window_ns, self._builds.holders_wait_ns(node, build))
        if window_ns >= busy_ns:
            return items
        if build.lane_ns(1) > window_ns:
            return 0
        return min(items, build.items_within(window_ns, 0.0))

    def on_sent(self, batch: Batch) -> None:
        """The batch that was formed last is sent: where a node may refuse it, learn later."""
        if self._lesson is not None:
            self._lessons[batch.id] = self._lesson
            self._lesson = None

    def on_ended(self, batch: Batch) -> None:
        """A batch has ended: learn from it, unless it was refused."""
        if self._lessons:
            learn = self._lessons.pop(batch.id, None)
            if learn is not None and batch.state != BatchState.REFUSED:
                learn()

    def _learn(
        self,
        build: Build,
        items: int,
        shape_id: int,
        lane_ns: float,
        was_promised: bool,
        booked_ns: int,
        is_contended: bool,
        slip_ns: int | None,
    ) -> None:
        """Learn from a batch.

        `booked_ns` is 0 unless it was booked on this build, `is_contended` says that others waited
        to join it, and `slip_ns` is by how much it is sent after its latest start; None if it was
        promised to another build.
        """
        if not was_promised:
            lane_ns *= max(FULL_BATCH_MIN, build.efficiency(items))
        self._queues.on_sent(build, lane_ns, was_promised=was_promised)
        if was_promised:
            build.on_formed(items, booked_ns, shape_id, is_contended=is_contended)
        if slip_ns is not None:
            build.narrowest.on_sent(slip_ns)

    def _pays(self, task: Task, build: Build) -> bool:
        return self._admission.budgets.allows(task, build)

    def _slip_ns(
        self,
        head: Task,
        promise: Promise | None,
        build: Build,
        lane_ns: float,
        choice: Choice | None,
    ) -> int | None:
        """How long after the latest start of its head a batch is sent; None: on another build."""
        if promise is None or build is not promise.build:
            return None
        if choice is None:
            return self._view.now_ns - promise.start_ns
        # The latest start depends on the shape.
        latest_ns = int(self._builds.latest_ns(head.request, head.id % STAGES_MAX))
        return self._view.now_ns + int(lane_ns) - latest_ns

    def _gains(self, build: Build, task: Task, start_ns: int, choice: Choice) -> bool:
        """Whether a task should join a batch rather than be the head of another one."""
        left_ns = self._admission.left_ns(task) - start_ns
        return self._shapes.gains(build, task, left_ns, self._admission.sent_z(task), choice)

    def _limit(self, build: Build, task: Task, promise: Promise, start_ns: int) -> int:
        """The largest batch with which a task is done when it is due, or else at least in time."""
        ready_ns = self._view.now_ns + start_ns
        z = self._admission.margins.z[task.request.pipeline.id]
        items_max = build.items_within(promise.due_ns - ready_ns, z)
        if build is promise.build and items_max < promise.size:  # behind its schedule
            latest_ns = self._builds.latest_ns(task.request, task.id % STAGES_MAX)
            # Without a margin, half of the batches would end too late.
            by_latest = build.items_within(latest_ns - ready_ns, self._admission.sent_z(task))
            items_max = max(items_max, min(by_latest, promise.size))
        return items_max

    def prune(self, queue: EdfQueue) -> Task | None:
        """Give up the heads that are lost to best effort; the first task that is not, or None.

        Together they are as one batch that starts too late. To learn only from those that start
        would be to learn least from the worst.
        """
        late: Promise | None = None
        while (task := queue.head()) is not None:
            promise = self._admission.booked(task)
            if promise is None or not self._is_lost(task, promise):
                break
            late = late or promise
            queue.pop()
            self._admission.give_up(task)
            self._queues.give_up(task)
        if late is not None:
            late.build.narrowest.on_sent(self._view.now_ns - late.start_ns)
        return task

    def _is_lost(self, task: Task, promise: Promise) -> bool:
        """Whether a task cannot be in time."""
        now_ns, items, build = self._view.now_ns, task.request.items, promise.build
        if build.has_choice:
            return now_ns > promise.order_ns  # too late for its fastest shape
        left_ns = self._builds.latest_ns(task.request, task.id % STAGES_MAX) - now_ns
        # No build is faster than the fastest: where its own is in time, none need be compared.
        time_ns = build.lane_ns(items)
        if not self._builds.may_start_now(build):  # its start would take a place from others
            time_ns += self._builds.ready_in_ns(build, may_swap_in=True)
        return time_ns > left_ns and self._soonest_ns(task.function.id, items) > left_ns

    def _soonest_ns(self, function_id: int, items: int) -> float:
        """Least time of a task that begins now, with a start that takes a place from others."""
        best_ns, builds = inf, self._builds
        for build in builds.of_function[function_id]:
            time_ns = build.fastest_ns(min(items, build.items_max))
            if time_ns < best_ns and not builds.may_start_now(build):
                time_ns += builds.ready_in_ns(build, may_swap_in=True)
            best_ns = min(best_ns, time_ns)
        return 0.0 if best_ns == inf else best_ns


def take_batch(queue: deque[Task], node: Node, items_max: int) -> list[Task]:
    """Dequeue tasks of one function from the head of the queue: one, or as many as fit a batch.

    Items are counted, not requests. The head must be READY and runnable on the node; tasks behind
    it that are no longer READY are discarded on the way. A quarantined task goes alone.
    """
    first = queue.popleft()
    batch = [first]
    if items_max == 1 or not queue or first.must_run_alone:
        return batch
    variant = node.variants[first.function.id]
    if variant is not None:
        items_max = min(items_max, len(variant.profile.exec_ns))
    items = first.request.items
    while queue:
        following = queue[0]
        if following.state == TASK_READY:
            items += following.request.items
            if (
                following.function is not first.function
                or items > items_max
                or following.must_run_alone
            ):
                break
            batch.append(following)
        queue.popleft()
    return batch
