"""Dispatch: which batch goes to a free node next, and which to a FaaS pool.

A promise binds: a task goes to the build that its promise names. Another pool takes it only if it
is in time there and nothing that was promised there waits. What may be late on the next free node
is called for instead, if a call is in time. Best effort gets its small share of a pool first, and
whatever promised tasks leave.

Each decision is a `Send`, a value: to form the batch and to order it is the caller's part.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from headgate.core.records import STAGES_MAX, Node, Task
from headgate.core.view import View
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.spillover import Spillover
from headgate.planning.dispatch.batching import Batching
from headgate.planning.dispatch.placement import Placement
from headgate.planning.dispatch.shapes import Choice, ShapeChooser
from headgate.planning.dispatch.task_queues import ANYWHERE, CALLS_ONLY, EdfQueue, Heads, TaskQueues
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds

_HEADS_EXAMINED: Final = 8  # queues that are tried for a free node
_NO_LIMIT_NS: Final = float(1 << 60)
_LATE_Z: Final = 2.0  # a task is called for if with so many standard deviations a node is too late


@final
class Send:
    """A decision: a batch from the head of a queue goes to a node, or to a FaaS pool."""

    __slots__ = ("build", "choice", "node", "queue", "shape_id")

    def __init__(
        self,
        queue: EdfQueue,
        build: Build,
        node: Node | None,
        shape_id: int = 0,
        choice: Choice | None = None,
    ) -> None:
        self.queue = queue
        self.build = build
        self.node = node  # None: the batch is a call of the build's FaaS pool
        self.shape_id = shape_id
        self.choice = choice  # where the size of the batch was chosen with its shape


@final
class Dispatcher:
    """Chooses from the queues what runs next."""

    def __init__(
        self,
        view: View,
        builds: Builds,
        admission: AdmissionControl,
        queues: TaskQueues,
        batching: Batching,
        placement: Placement,
        spillover: Spillover,
        shapes: ShapeChooser,
    ) -> None:
        self._view = view
        self._builds = builds
        self._admission = admission
        self._queues = queues
        self._batching = batching
        self._placement = placement
        self._spillover = spillover
        self._shapes = shapes
        self._has_left = False  # a slot was left to other gateways, and best effort may wait for it
        self._held: dict[int, int] = {}  # by build id: when to look again at what waits for more
        # By build id: when its batch was found to wait, with which head and how many items.
        self._waits: dict[int, tuple[int, int, int]] = {}

    def take_held(self) -> list[tuple[int, int]]:
        """The builds whose tasks wait for more to fill a batch, and when to offer them a node."""
        if not self._held:
            return []
        held = list(self._held.items())
        self._held.clear()
        return held

    def take_left(self) -> bool:
        """Whether slots were left to other gateways for which best effort of ours may wait."""
        has_left, self._has_left = self._has_left, False
        return has_left

    def slack_ns(self, pool_id: int) -> float:
        """Time until the most urgent promised task of a pool must start; endless if none waits."""
        queue = self._queues.promised_heads[pool_id].first()
        if queue is None:
            return inf
        entry = queue.head()
        assert entry is not None
        return max(0.0, float(entry[0][1] - self._view.now_ns))

    def to_node(self, node: Node) -> Send | None:
        """The next batch for a node; None if it has no free slot, or should run nothing now.

        A call can be the answer, too: of a task that waits for this node and would be late.
        """
        if node.id not in self._view.free_nodes or self._placement.is_held_back(node):
            return None
        queues, pool_id = self._queues, node.pool.id
        promised, best_effort = queues.promised_heads[pool_id], queues.best_effort_heads[pool_id]
        send: Send | None = None
        if queues.is_best_effort_due(pool_id):
            send = self._first(node, best_effort, is_best_effort=True)
        send = send or self._first(node, promised) or self._from_other_pool(node)
        if send is None and self._builds.is_left_to_others(pool_id):
            self._has_left = True
            return None
        return send or self._first(node, best_effort, is_best_effort=True)

    def _first(self, node: Node, heads: Heads, *, is_best_effort: bool = False) -> Send | None:
        """The most urgent queue of which the node should run a batch now."""
        passed_over: list[EdfQueue] = []
        send: Send | None = None
        while send is None and len(passed_over) < _HEADS_EXAMINED:
            queue = heads.first()
            if queue is None:
                break
            task = self._batching.prune(queue)
            if task is None:
                continue
            build = self._builds.on_pool[node.pool.id][task.function.id]
            assert build is not None
            send = self._call_instead(queue, task)
            if send is not None:
                break
            has_choice = len(build.shape_ids) > 1
            if not has_choice and (
                node.running >= self._builds.lanes_on(node, build)
                or not self._view.has_compute(node, build.variant, build.shape_id)
            ):
                break  # kept for a build that needs more of it, which would starve otherwise
            if task.request.items > build.items_max:
                send = self.to_faas(task.function.id)  # perhaps no node can take it
            elif self._placement.suits(node, build) and (
                not is_best_effort or self._leaves_lanes(task, build)
            ):
                if has_choice:
                    send = self._in_shape(queue, task, build, node)
                else:
                    send = Send(queue, build, node, build.shape_id)
            if send is None:
                heads.remove(queue)
                passed_over.append(queue)
        for queue in passed_over:
            heads.push(queue)
        return send

    def _leaves_lanes(self, task: Task, build: Build) -> bool:
        """Whether a task of best effort leaves lanes to those who cannot wait for it, or need not.

        Otherwise it is offered a node again when it need not.
        """
        items, now_ns = task.request.items, self._view.now_ns
        if self._admission.feasibility.unblocking_items(build, items) > 0:
            return True
        may_block_ns = self._queues.may_block_from_ns(now_ns, build, build.lane_ns(items))
        if now_ns < may_block_ns:
            self._held[build.id] = may_block_ns
            return False
        self._queues.on_blocking(build.pool.id)
        return True

    def _from_other_pool(self, node: Node) -> Send | None:
        """The most urgent task of another pool that is in time on this node."""
        for pool_id, heads in enumerate(self._queues.promised_heads):
            queue = None if pool_id == node.pool.id else heads.first()
            if queue is None:
                continue
            entry = queue.head()
            assert entry is not None
            build = self._builds.on_pool[node.pool.id][entry[1].function.id]
            if (
                build is not None
                and node.running < self._builds.lanes_on(node, build)
                and self._admission.is_in_time(entry[1], build)
                and self._placement.suits(node, build)
            ):
                return Send(queue, build, node, build.shape_id)
        return None

    def _in_shape(self, queue: EdfQueue, task: Task, build: Build, node: Node) -> Send | None:
        """A batch in the cheapest shape that is in time; None while it waits for more, or room.

        It goes to this node if the node has room for the shape, or else to another one.
        """
        shapes, promise = self._shapes, self._admission.booked(task)
        waiting = task.request.items if task.must_run_alone else queue.items
        if self._waits.get(build.id) == (self._view.now_ns, task.id, waiting):
            return None  # nothing has changed
        left_ns, z = _NO_LIMIT_NS, 0.0
        if promise is not None:
            left_ns, z = self._admission.left_ns(task), self._admission.sent_z(task)
        best = shapes.choose(build, task, waiting, left_ns, z)
        if best is not None:
            if promise is not None and not task.must_run_alone:
                at_ns = shapes.hold_until_ns(build, task, waiting, left_ns, z, best.cost)
                if at_ns > self._view.now_ns:
                    self._held[build.id] = at_ns
                    self._waits[build.id] = (self._view.now_ns, task.id, waiting)
                    return None
            roomy = self._placement.node_with_room(build, task, best.shape_id, node)
            if roomy is not None:
                return Send(queue, build, roomy, best.shape_id, best)
        start_ns = self._builds.start_ns(build, node)
        choice = shapes.choose(build, task, waiting, left_ns - start_ns, z, node)
        if choice is not None:
            return Send(queue, build, node, choice.shape_id, choice)
        if best is not None or start_ns > 0:
            return None  # what holds the build will have room for it
        shape_id = shapes.fastest(build, task, node)  # too late for any margin
        return None if shape_id is None else Send(queue, build, node, shape_id)

    def to_other_pool(self, queue: EdfQueue) -> Send | None:
        """Send the head of a queue to another pool where it is in time and nothing waits."""
        entry = queue.head()
        own = None if entry is None else self._admission.booked(entry[1])
        if entry is None or own is None:
            return None
        task = entry[1]
        for build in self._builds.of_function[task.function.id]:
            if build is own.build or build.warm_pool is not None:
                continue
            if build.calendar.work_ns == 0 and self._admission.is_in_time(task, build):
                node = self._placement.warm_node(build)
                if node is not None:
                    return Send(queue, build, node, build.shape_id)
        return None

    def to_faas(self, function_id: int) -> Send | None:
        """The next call for a function: of what was promised one, or runs nowhere else."""
        build = self._builds.faas[function_id]
        if build is None:
            return None
        for queue in self._called_queues(build):
            task = self._batching.prune(queue)
            if task is not None:
                may_start = self._admission.budgets.allows_cold(task, build)
                if self._spillover.may_call(build, task, may_start=may_start):
                    return Send(queue, build, None)
        return None

    def retry_call_at_ns(self, function_id: int) -> int | None:
        """When a call that waits for an instance can be sent; None if none waits."""
        build = self._builds.faas[function_id]
        if build is None or all(q.head() is None for q in self._called_queues(build)):
            return None
        return self._spillover.retry_at_ns(build)

    def to_platform_of(self, function_id: int) -> Send | None:
        """The next call of the FaaS pool that a function uses; None if it uses none.

        Other functions may have more urgent calls that wait for the same concurrency.
        """
        build = self._builds.faas[function_id]
        return None if build is None else self.to_pool(build.pool.id)

    def to_pool(self, pool_id: int) -> Send | None:
        """The next call of a FaaS pool, whose concurrency all its functions share."""
        for heads in (
            self._queues.promised_heads[pool_id],
            self._queues.best_effort_heads[pool_id],
        ):
            passed_over: list[EdfQueue] = []
            send: Send | None = None
            while send is None and len(passed_over) < _HEADS_EXAMINED:
                queue = heads.first()
                if queue is None:
                    break
                task = self._batching.prune(queue)
                if task is None:
                    continue
                send = self.to_faas(task.function.id)
                if send is None:
                    heads.remove(queue)
                    passed_over.append(queue)
            for queue in passed_over:
                heads.push(queue)
            if send is not None:
                return send
        return None

    def _called_queues(self, build: Build) -> list[EdfQueue]:
        best_effort = self._queues.best_effort[build.function_id]
        queues = [self._queues.promised[build.id], best_effort[CALLS_ONLY]]
        queues += self._queues.limited(build.function_id, CALLS_ONLY)
        for queue in (
            best_effort[ANYWHERE],
            *self._queues.limited(build.function_id, ANYWHERE),
        ):
            waiting = queue.head()
            if waiting is not None:
                items = waiting[1].request.items
                builds = self._queues.builds_of(queue, build.function_id)
                if not self._builds.has_nodes(builds, items):
                    queues.append(queue)
        return queues

    def _call_instead(self, queue: EdfQueue, task: Task) -> Send | None:
        """Call for a task that may be late on the next free node, if a call is in time."""
        faas = self._builds.faas[task.function.id]
        promise = None if faas is None else self._admission.booked(task)
        if faas is None or promise is None or promise.build is faas:
            return None
        items, now_ns = task.request.items, self._view.now_ns
        left_ns = self._builds.latest_ns(task.request, task.id % STAGES_MAX) - now_ns
        wait_ns = promise.build.narrowest().free_in_ns(now_ns)
        if wait_ns + promise.build.cautious_ns(items, _LATE_Z) <= left_ns:
            return None
        if items > faas.items_max or faas.cautious_ns(items, _LATE_Z) > left_ns:
            return None
        if not self._admission.budgets.allows(task, faas):
            return None
        return Send(queue, faas, None) if self._spillover.has_warm(faas, task) else None
