"""Dispatch: which batch goes to a free node next. What is called for instead, `calls` says.

A promise binds: a task goes to the build that its promise names. Another pool takes it only if it
is in time there and nothing that was promised there waits. Best effort gets its small share of a
pool first, and whatever promised tasks leave.

Each decision is a `Send`, a value: to order its batch, which `take` forms, is the caller's part.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Final, final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.records import STAGES_MAX, Batch, Node, Task
from headgate.core.states import ON_HOST, TASK_READY
from headgate.core.view import View, has_free_compute
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.spillover import Spillover
from headgate.planning.constants import BEST_EFFORT_RETRY_NS, HEADS_EXAMINED, LATE_WAIT
from headgate.planning.dispatch.batching import Batching, Send
from headgate.planning.dispatch.busy_nodes import TRY_AGAIN
from headgate.planning.dispatch.calls import Calls
from headgate.planning.dispatch.placement import Placement
from headgate.planning.dispatch.shapes import ShapeChooser
from headgate.planning.dispatch.task_queues import (
    EdfQueue,
    Heads,
    TaskQueues,
    urgency,
)
from headgate.planning.pools.build import Build, Promise
from headgate.planning.pools.builds import Builds

MORE: Final = "more"  # a timer with a build id: what waits for more tasks is offered a node again
_NO_LIMIT_NS: Final = float(1 << 60)


@final
class Dispatcher:
    """Queues what is ready, and chooses from the queues what runs next."""

    def __init__(
        self,
        view: View,
        builds: Builds,
        admission: AdmissionControl,
        queues: TaskQueues,
        placement: Placement,
        spillover: Spillover,
    ) -> None:
        self._view = view
        self._builds = builds
        self._admission = admission
        self._queues = queues
        self._placement = placement
        self._spillover = spillover
        self._shapes = ShapeChooser(view, builds, admission.budgets)
        self._batching = Batching(view, builds, admission, queues, self._shapes)
        self.calls = Calls(view, builds, admission, queues, spillover, self._batching)
        self.ready: list[Task] = []  # queued with others, and not taken by `take_ready` yet
        # A promised task waits for more compute of the node at hand than is free. Best effort in
        # smaller shapes would take it piece by piece, as it becomes free.
        self._lacks_compute = False
        self.has_timers = False  # there is something for `take_timers`
        self._has_left = False  # a slot was left to other gateways, and best effort may wait for it
        self._held: dict[int, int] = {}  # by build id: when to look again at what waits for more
        # By build id: when its batch was found to wait, with which head and how many items.
        self._waits: dict[int, tuple[int, int, int]] = {}
        # By node id: the build that a node is emptied for, which finds room nowhere else.
        self._emptied_for: dict[int, Build] = {}

    def enqueue(self, task: Task, promise: Promise | None, *, was_refused: bool = False) -> None:
        """Queue a task that is ready; one that a busy node refused has been counted before."""
        self._queues.push(task, promise)
        if promise is not None and promise.build.has_choice and not was_refused:
            self._shapes.observe(promise.build, task.request.items)

    def enqueue_with_others(self, task: Task, *, was_refused: bool = False) -> None:
        """Queue one of several tasks, for `take_ready`; what it was promised may be lost by now."""
        self.enqueue(task, self._admission.confirm(task), was_refused=was_refused)
        self.ready.append(task)

    def take_ready(self) -> Task | None:
        """The next task that was queued, and for which nodes and calls were not looked for yet."""
        while self.ready:
            task = self.ready.pop(0)  # of a few
            if task.state == TASK_READY:
                return task
        return None

    def take(self, send: Send) -> tuple[list[Task], int]:
        """Dequeue the tasks of a batch that is to be sent; return them and the batch's shape."""
        return self._batching.take(send)

    def on_sent(self, send: Send, batch: Batch) -> None:
        """A batch was sent."""
        if send.node is None:
            self._spillover.on_call(send.build)
        else:
            self._batching.on_sent(batch)
        self._builds.on_sent(send.build, batch, send.start_ns)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """A batch has ended: its lane is free, and its time teaches."""
        build = self._builds.on_batch_ended(batch, took_ns)
        self._shapes.on_observed(build)
        self._batching.on_ended(batch)
        if batch.node is None:
            self._spillover.on_call_ended(build, batch)

    def forget(self, node: Node) -> None:
        """A node is gone."""
        self._emptied_for.pop(node.id, None)

    def take_timers(self, node: Node) -> list[tuple[str, int, int]]:
        """When to look again at what a node was not given: timers, with their time and number.

        That is what waits for more tasks to fill a batch, best effort that others could not wait
        for, and best effort where the slots of the node were left to other gateways.
        """
        self.has_timers = False
        timers = [(MORE, at_ns, build_id) for build_id, at_ns in self._held.items()]
        self._held.clear()
        if self._has_left and (TRY_AGAIN, node.id) not in self._view.timers:
            timers.append((TRY_AGAIN, self._view.now_ns + BEST_EFFORT_RETRY_NS, node.id))
        self._has_left = False
        return timers

    def to_node(self, node: Node) -> Send | None:
        """The next batch for a node; None if it has no free slot, or should run nothing now.

        A call can be the answer, too: of a task that waits for this node and would be late.
        """
        busy = self._placement.busy
        if node.id not in self._view.free_nodes or (busy.allowed and busy.is_held_back(node)):
            return None
        if self._emptied_for and (kept_for := self._emptied_for.get(node.id)) is not None:
            waits = any(q.items > 0 for q in self._queues.promised_on(kept_for, node.id))
            if waits and self._placement.is_crowded_out(node, kept_for):
                return None
            del self._emptied_for[node.id]
            if (first := self._of_build(node, kept_for)) is not None:
                return first
        queues, pool_id = self._queues, node.pool.id
        if (missing := self._placement.take_missing(node)) is not None:
            return Send(queues.promised[missing.id], missing, node, is_start=True)
        promised, best_effort = queues.promised_heads[pool_id], queues.best_effort_heads[pool_id]
        send: Send | None = None
        if queues.is_best_effort_due(self._view.now_ns, pool_id):
            send = self._first(node, best_effort, is_best_effort=True, goes_first=True)
        self._lacks_compute = False
        if send is None and promised.entries:
            send = self._first(node, promised)
            if send is None and (self._lacks_compute or node.id in self._emptied_for):
                return None
        if send is None and len(queues.promised_heads) > 1:
            send = self._from_other_pool(node)
        if send is not None:
            return send
        if self._builds.is_left_to_others(pool_id):
            self.has_timers = self._has_left = True
            return None
        if best_effort.entries:
            send = self._first(node, best_effort, is_best_effort=True)
        return send

    def _first(
        self, node: Node, heads: Heads, *, is_best_effort: bool = False, goes_first: bool = False
    ) -> Send | None:
        """The most urgent queue of which the node should run a batch now."""
        passed_over: list[EdfQueue] = []
        send: Send | None = None
        while send is None and (queue := heads.first()) is not None:
            items = queue.items
            task = self._batching.prune(queue)
            if task is None or queue.items < items:
                continue  # its head was given up: another queue may be more urgent now
            build = self._builds.on_pool[node.pool.id][task.function.id]
            assert build is not None
            if self._builds.faas[task.function.id] is not None:
                send = self.calls.instead(queue, task)
                if send is not None:
                    break
            if not self._has_lane(node, build):
                break  # kept for a build that needs more of it, which would starve otherwise
            if not goes_first or self._may_go_first(node, queue, task, build):
                send = self._of_queue(node, queue, task, build, is_best_effort=is_best_effort)
            if send is None and not is_best_effort and self._empties(node, build, task):
                break
            if send is None:
                heads.remove(queue)
                passed_over.append(queue)
                if len(passed_over) == HEADS_EXAMINED:
                    break
        if passed_over:
            for queue in passed_over:
                heads.put(queue, queue.head_key())
            if send is None and len(passed_over) == HEADS_EXAMINED:
                return self._of_what_it_holds(node, is_best_effort=is_best_effort)
        return send

    def _may_go_first(self, node: Node, waiting: EdfQueue, task: Task, build: Build) -> bool:
        """Whether a task of best effort may go before promised tasks, where best effort is due.

        What is late makes no other request late, or the next one would be late for that; unless it
        has waited for long.
        """
        if not self._queues.may_go_first(build):
            return False
        request, now_ns = task.request, self._view.now_ns
        allowed_ns = request.deadline_ns - request.arrival_ns
        if request.deadline_ns == NEVER_NS or now_ns - request.arrival_ns > LATE_WAIT * allowed_ns:
            return True
        queue = self._queues.promised_heads[node.pool.id].first()
        head = None if queue is None else queue.head()
        promise = None if head is None else self._admission.booked(head)
        if promise is None:
            return True
        items = min(max(request.items, waiting.items), build.items_best)
        end_ns, lanes_free_by = now_ns + int(build.lane_ns(items)), build.calendar.lanes_free_by
        return end_ns <= promise.start_ns or lanes_free_by(now_ns, promise.start_ns) > build.weight

    def _of_build(self, node: Node, build: Build) -> Send | None:
        """A batch of what was promised to a build, if the node should run it now."""
        for queue in self._queues.promised_on(build, node.id):
            task = self._batching.prune(queue) if queue.items > 0 else None
            if task is not None:
                return self._of_queue(node, queue, task, build, is_best_effort=False)
        return None

    def _empties(self, node: Node, build: Build, task: Task) -> bool:
        """Begin to empty a node for a build that no node holds, if its task can wait no longer.

        Memory is free only when all that uses it is idle at once. Where others take turns on the
        slots of all nodes, that may never be so.
        """
        if node.running == 0:
            return False
        promise, placement = self._admission.booked(task), self._placement
        if promise is None or build in self._emptied_for.values():
            return False
        batch_ns = build.calendar.mean_batch_ns(build.lane_ns(1))
        ready_ns = self._view.now_ns + 2 * batch_ns + self._builds.start_ns(build, node)
        if ready_ns < promise.start_ns or not placement.is_crowded_out(node, build):
            return False
        self._emptied_for[node.id] = build
        return True

    def _of_what_it_holds(self, node: Node, *, is_best_effort: bool) -> Send | None:
        """The most urgent queue of a build that the node holds, however many are more urgent.

        The most urgent ones of all may wait for other nodes: this one would stand idle beside work
        that it could do, and if all did, for ever.
        """
        queues, builds = self._queues, self._builds.on_pool[node.pool.id]
        waiting: list[tuple[tuple[int, ...], EdfQueue, Build]] = []
        for instance in node.instances.values():
            build = builds[instance.variant.function_id]
            if build is not None and instance.residency != ON_HOST:
                own = (
                    queues.best_effort_of(build)
                    if is_best_effort
                    else queues.promised_on(build, node.id)
                )
                for queue in own:
                    if queue.items > 0 and queue.head() is not None:
                        waiting.append((urgency(queue.head_key()), queue, build))
        waiting.sort(key=itemgetter(0))
        for _, queue, build in waiting[:HEADS_EXAMINED]:
            task = self._batching.prune(queue) if self._has_lane(node, build) else None
            if task is not None:
                send = self._of_queue(node, queue, task, build, is_best_effort=is_best_effort)
                if send is not None:
                    return send
        return None

    def _has_lane(self, node: Node, build: Build) -> bool:
        """Whether the node has a lane for the build; of several shapes, one is chosen later."""
        return build.has_choice or (
            node.running < self._builds.lanes_on(node, build)
            and (
                not node.limits_compute
                or self._view.has_compute(node, build.variant, build.shape_id)
            )
        )

    def _of_queue(
        self, node: Node, queue: EdfQueue, task: Task, build: Build, *, is_best_effort: bool
    ) -> Send | None:
        """A batch from the head of a queue; None if the node should not run it now."""
        if task.request.items > build.items_max:
            return self.calls.of_function(task.function.id)  # perhaps no node can take it
        if not self._placement.suits(node, build):
            # Of one shape alone, `_has_lane` keeps the room.
            if build.has_choice and not is_best_effort and build.variant.id in node.instances:
                smallest = build.shape_ids[0]
                self._lacks_compute |= not has_free_compute(node, build.variant, smallest)
            return None
        if is_best_effort and not self._leaves_lanes(node, queue, task, build):
            return None
        if build.has_choice:
            return self._in_shape(queue, task, build, node)
        if queue.node_id is not None and queue.node_id != node.id:
            return self._moved(queue, task, build, node)
        if not is_best_effort and self._should_wait(node, queue, task, build):
            return None
        send = self._send_to(node, queue, build)
        if send.start_ns == 0 or is_best_effort:
            return send
        if self._can_wait_to_evict(task, send):
            return None
        if self._should_wait_elsewhere(task, send):
            is_held = build.variant.id in node.instances
            if is_held or not self._placement.pays(node, build):
                return None
            return Send(queue, build, node, is_start=True)
        return send

    def _moved(self, queue: EdfQueue, task: Task, build: Build, node: Node) -> Send | None:
        """A task whose input is moved to this node; None if the node that has it is free sooner."""
        moved_bytes = self._view.moved_bytes(task, node.pool.id, node.id)
        moving_ns = int(moved_bytes / node.pool.bytes_per_s * SECOND_NS)
        source = None if queue.node_id is None else self._view.nodes.get(queue.node_id)
        if (
            source is not None
            and self._builds.nodes.end_ns(source) <= self._view.now_ns + moving_ns
            and build.variant.id in source.instances
            and not self._view.is_barred(source, build.variant)
        ):
            return None
        start_ns = self._builds.start_ns(build, node) + moving_ns
        return Send(queue, build, node, start_ns, build.shape_id)

    def _can_wait_to_evict(self, task: Task, send: Send) -> bool:
        """Whether a task can wait until something ends that is better evicted for its build."""
        promise, node = self._admission.booked(task), send.node
        if promise is None or node is None:
            return False
        waiting_ns = self._placement.waiting_ns(node, send.build)
        if self._view.now_ns + waiting_ns < promise.start_ns and self._has_work(node):
            return True
        ready_ns = self._builds.nodes.end_ns(node) + send.start_ns
        return ready_ns <= promise.start_ns and self._placement.spares_by_waiting(node, send.build)

    def _has_work(self, node: Node) -> bool:
        """Whether something that is promised and ready waits for what a node holds.

        What is promised may also wait for an earlier stage, and that one for this node.
        """
        builds = self._builds.on_pool[node.pool.id]
        held = [i for i in node.instances.values() if i.residency != ON_HOST]
        return any(
            queue.items > 0
            for build in (builds[instance.variant.function_id] for instance in held)
            if build is not None
            for queue in self._queues.promised_on(build, node.id)
        )

    def _should_wait_elsewhere(self, task: Task, send: Send) -> bool:
        """Whether the start of a build would make a task late, and another node is ready sooner."""
        time_ns = send.start_ns + send.build.lane_ns(task.request.items)
        latest_ns = self._builds.latest_ns(task.request, task.id % STAGES_MAX)
        is_late = self._view.now_ns + time_ns > latest_ns
        return is_late and self._builds.ready_in_ns(send.build) < send.start_ns

    def _should_wait(self, node: Node, queue: EdfQueue, task: Task, build: Build) -> bool:
        """Whether a promised batch waits, so that others who can wait less find a free node."""
        promise = self._admission.booked(task)
        if promise is None:
            return False
        at_ns = self._batching.waits_until_ns(task, promise, queue.items, node)
        if at_ns <= self._view.now_ns:
            return False
        self._hold(build, at_ns)
        return True

    def _hold(self, build: Build, until_ns: int) -> None:
        """What waits for a build is offered a node again then."""
        self._held[build.id] = until_ns
        self.has_timers = True

    def _leaves_lanes(self, node: Node, queue: EdfQueue, task: Task, build: Build) -> bool:
        """Whether a task of best effort leaves lanes to those who cannot wait for it, or need not.

        A start that evicts what others ask for keeps the lane from them until that is loaded again.
        Otherwise it is offered a node again when it need not.
        """
        items, now_ns = task.request.items, self._view.now_ns
        reload_ns = self._placement.reload_ns(node, build)
        if reload_ns == 0 and self._batching.unblocking_items(build, items, node) > 0:
            return True
        lane_ns = build.lane_ns(max(items, min(queue.items, build.items_best)))
        if reload_ns > 0:
            lane_ns += reload_ns + self._builds.start_ns(build, node)
        may_block_ns = self._queues.may_block_from_ns(now_ns, build, lane_ns)
        if now_ns < may_block_ns:
            self._hold(build, may_block_ns)
            return False
        self._queues.on_blocking(build.pool.id)
        return True

    def _from_other_pool(self, node: Node) -> Send | None:
        """The most urgent task of another pool that is in time on this node."""
        if node.pool.id in self._builds.unwanted_pools:
            return None
        for pool_id, heads in enumerate(self._queues.promised_heads):
            queue = None if pool_id == node.pool.id else heads.first()
            # A task that is lost must not keep those behind it: its own pool may never run it.
            task = None if queue is None else self._batching.prune(queue)
            if queue is None or task is None:
                continue
            build = self._builds.on_pool[node.pool.id][task.function.id]
            if (
                build is not None
                and node.running < self._builds.lanes_on(node, build)
                and self._admission.is_in_time(task, build)
                and self._placement.suits(node, build)
            ):
                return self._send_to(node, queue, build)
        return None

    def _send_to(self, node: Node, queue: EdfQueue, build: Build) -> Send:
        """A batch in the shape that is planned for its build."""
        start_ns = self._builds.start_ns(build, node)
        return Send(queue, build, node, start_ns, build.shape_id)

    def _in_shape(self, queue: EdfQueue, task: Task, build: Build, node: Node) -> Send | None:
        """A batch in the cheapest shape that is in time; None while it waits for more, or room.

        It goes to this node if the node has room for the shape, or else to another one.
        """
        if task.must_run_alone:
            return self._alone(queue, task, build, node)
        shapes, promise, waiting = self._shapes, self._admission.booked(task), queue.items
        if self._waits.get(build.id) == (self._view.now_ns, task.id, waiting):
            return None  # nothing has changed
        left_ns, z = _NO_LIMIT_NS, 0.0
        if promise is not None:
            left_ns, z = self._admission.left_ns(task), self._admission.sent_z(task)
        best = shapes.choose(build, task, waiting, left_ns, z)
        if best is not None:
            if promise is not None:
                at_ns = shapes.hold_until_ns(build, task, waiting, left_ns, z, best.cost)
                if at_ns > self._view.now_ns:
                    self._hold(build, at_ns)
                    self._waits[build.id] = (self._view.now_ns, task.id, waiting)
                    return None
            roomy = self._placement.node_with_room(build, task, best.shape_id, node)
            if roomy is not None:
                return Send(queue, build, roomy, 0, best.shape_id, best)
        start_ns = self._builds.start_ns(build, node)
        choice = shapes.choose(build, task, waiting, left_ns - start_ns, z, node)
        if choice is not None:
            return Send(queue, build, node, start_ns, choice.shape_id, choice)
        if best is not None or start_ns > 0:
            if promise is not None and start_ns == 0:
                self._lacks_compute = True
            return None  # what holds the build will have room for it
        shape_id = shapes.fastest(build, task, node)  # too late for any margin
        return None if shape_id is None else Send(queue, build, node, start_ns, shape_id)

    def _alone(self, queue: EdfQueue, task: Task, build: Build, node: Node) -> Send | None:
        """A task in quarantine, in the fastest shape for which a node has room.

        The others that may have killed the same worker are held until it ends, so the time of its
        batch is time that all of them lose.
        """
        for shape_id in self._shapes.by_time(build, task):
            roomy = self._placement.node_with_room(build, task, shape_id, node)
            if roomy is not None:
                return Send(queue, build, roomy, 0, shape_id)
        fastest = self._shapes.fastest(build, task, node)  # of a node that does not hold the build
        start_ns = self._builds.start_ns(build, node)
        return None if fastest is None else Send(queue, build, node, start_ns, fastest)

    def to_other_pool(self, promised: Build) -> Send | None:
        """Send what waits for a build to another pool where it is in time and nothing waits."""
        builds = self._builds.of_function[promised.function_id]
        if len(builds) == 1:
            return None
        queue = self._queues.promised[promised.id]
        task = queue.head()
        own = None if task is None else self._admission.booked(task)
        if task is None or own is None:
            return None
        for build in builds:
            if build is own.build or build.warm_pool is not None:
                continue
            if build.pool.id in self._builds.unwanted_pools:
                continue
            if build.calendar.work_ns == 0 and self._admission.is_in_time(task, build):
                node = self._placement.warm_node(build)
                if node is not None:
                    return self._send_to(node, queue, build)
        return None
