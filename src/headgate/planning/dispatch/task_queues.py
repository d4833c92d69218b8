"""Queues of waiting tasks: by latest start for what is promised, by age for best effort.

A queue belongs to one build (promised tasks) or to one function (best effort). Queues go in the
order of the latest start of their heads, deadline less service time, and not of their deadline:
where work cannot be preempted, a short task that is due a little earlier would take the last lane
on which a long one could still have been in time. Where moving inputs between nodes takes time, the
promised tasks with inputs on one node have a queue of their own, so that they run there, and
together.

The most urgent queue of a pool is found through a heap of heads that is corrected lazily:
O(log queues) per change.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import Pipeline
from headgate.core.policy import LazyDeletions
from headgate.core.records import Datum, Task
from headgate.core.states import TASK_READY
from headgate.core.view import View
from headgate.planning.admission.cost_budgets import CostBudgets
from headgate.planning.constants import BEST_EFFORT_SHARE
from headgate.planning.pools.build import Build, Promise
from headgate.planning.pools.builds import Builds

# Compiled code reads a Final directly, and what is imported from a dictionary.
_heappush: Final = heappush
_heappop: Final = heappop
_heapreplace: Final = heapreplace
_OBSOLETE_MAX: Final = 64  # out-of-date entries of `Heads` beyond the number of queues
# Where a task of best effort may run.
ANYWHERE: Final = 0
NODES_ONLY: Final = 1
CALLS_ONLY: Final = 2

# Of a task in its queue, the smallest first: the declared priority of its client if it is best
# effort (a promise binds, whoever comes later), a time, its id, and its latest start. A compiled
# build would copy a `tuple[int, int, int, int]` at every use.
Key = tuple[int, ...]


def urgency(key: Key) -> tuple[int, ...]:
    """The order of queues whose heads have these keys: by declared priority, then latest start."""
    return key[0], key[3], key[2]


@final
class EdfQueue:
    """Tasks of one function, the most urgent first.

    With `uses_priorities`, a client that gives its requests priorities orders its own requests with
    them, and nobody else's: each of its tasks brings a place in the queue, and the client's places
    are taken by its tasks in the order of their priorities.
    """

    __slots__ = (
        "_by_priority",
        "_deletions",
        "_heap",
        "_uses_priorities",
        "id",
        "items",
        "node_id",
    )

    def __init__(
        self, id: int, *, uses_priorities: bool = True, node_id: int | None = None
    ) -> None:
        self.id = id
        self.node_id = node_id  # that has the input of its tasks; None: they have none to move
        self._uses_priorities = uses_priorities
        self.items = 0  # of tasks that wait
        # A place without a task is taken by the first of its client's tasks by priority.
        self._heap: list[tuple[Key, Task | None, int]] = []  # key, task, client id
        self._by_priority: dict[int, list[tuple[int, Key, Task]]] = {}  # by client id
        self._deletions = LazyDeletions()

    def push(self, key: Key, task: Task) -> bool:
        """Queue a task; whether its place is the first one now."""
        request, heap = task.request, self._heap
        self.items += request.items
        if not self._uses_priorities or (
            request.priority == 0 and request.client not in self._by_priority
        ):
            if not heap:  # it is sent at once, most often: a heap of one needs no comparisons
                heap.append((key, task, request.client))
                return True
            _heappush(heap, (key, task, request.client))
            return heap[0][0] is key
        own = self._by_priority.get(request.client)
        if own is None:
            own = self._by_priority[request.client] = self._take_tasks(request.client)
        _heappush(own, (request.priority, key, task))
        _heappush(heap, (key, None, request.client))
        return heap[0][0] is key

    def _take_tasks(self, client: int) -> list[tuple[int, Key, Task]]:
        """Separate the tasks of a client from their places. O(n), once until the queue is empty."""
        taken: list[tuple[int, Key, Task]] = []
        for index, (key, task, owner) in enumerate(self._heap):
            if owner == client and task is not None:
                self._heap[index] = (key, None, client)
                taken.append((0, key, task))
        heapify(taken)
        return taken

    def head(self) -> Task | None:
        """The most urgent task; None if the queue is empty."""
        heap = self._heap
        while heap:
            _, task, client = heap[0]
            if task is None:
                own = self._by_priority[client]
                while own and own[0][2].state != TASK_READY:
                    _heappop(own)
                task = own[0][2] if own else None
            if task is not None and task.state == TASK_READY:
                return task
            _heappop(heap)
        if self._by_priority:
            self._by_priority.clear()
        return None

    def head_key(self) -> Key:
        """The key of the task that `head` has just returned."""
        return self._heap[0][0]

    def pop(self) -> Task:
        """Dequeue the most urgent task, which `head` has just returned."""
        heap = self._heap
        _, task, client = heap.pop() if len(heap) == 1 else _heappop(heap)
        if task is None:
            task = _heappop(self._by_priority[client])[2]
        self.items -= task.request.items
        return task

    def withdraw(self, task: Task) -> None:
        """Forget a task that is no longer READY; its entry is removed later."""
        self.items -= task.request.items
        if self._deletions.add(len(self._heap)):
            heap = [e for e in self._heap if e[1] is not None and e[1].state == TASK_READY]
            for client, own in self._by_priority.items():
                left = [e for e in own if e[2].state == TASK_READY]
                heapify(left)
                self._by_priority[client] = left
                heap += [(key, None, client) for _, key, _ in left]  # withdrawn ones leave theirs
            heapify(heap)
            self._heap = heap


@final
class Heads:
    """The queues of a pool, by the urgency of their heads; each queue once.

    An entry may be out of date if its queue is less urgent by now: `first` corrects those that it
    meets.
    """

    def __init__(self) -> None:
        # A heap, not empty while anything waits: urgency, id and queue, and the key of its head.
        self.entries: list[tuple[tuple[int, ...], int, EdfQueue, Key]] = []
        self._keys: dict[int, Key] = {}  # by queue id: its entry; others in the heap are obsolete

    def push(self, queue: EdfQueue) -> None:
        """Note that the head of a queue may have changed."""
        if queue.head() is not None:
            self.put(queue, queue.head_key())

    def put(self, queue: EdfQueue, key: Key) -> None:
        """Note the key of the head of a queue."""
        id, keys = queue.id, self._keys
        if keys.get(id) is not key:
            keys[id] = key
            entries = self.entries
            if entries and entries[0][1] == id:  # its last entry, most often: obsolete from now on
                _heapreplace(entries, (urgency(key), id, queue, key))
                return
            _heappush(entries, (urgency(key), id, queue, key))
            if len(entries) > 2 * len(keys) + _OBSOLETE_MAX:
                entries[:] = [entry for entry in entries if keys.get(entry[1]) is entry[3]]
                heapify(entries)

    def first(self) -> EdfQueue | None:
        """The most urgent queue, which stays here; None if nothing waits."""
        entries, keys = self.entries, self._keys
        while entries:
            _, id, queue, key = entries[0]
            if keys.get(id) is not key:
                _heappop(entries)
            elif queue.head() is None:
                del keys[id]
                _heappop(entries)
            elif queue.head_key() is key:
                return queue
            else:
                self.push(queue)  # its head was withdrawn or dequeued
        return None

    def remove(self, queue: EdfQueue) -> None:
        """Take out a queue; the caller pushes it back while tasks wait in it."""
        self._keys.pop(queue.id, None)


@final
class TaskQueues:
    """The queues of all builds and functions, and the share of best effort on each pool."""

    def __init__(
        self, view: View, builds: Builds, budgets: CostBudgets, default_deadline_factor: float
    ) -> None:
        """Best effort goes by arrival plus so many execution times: short requests go first."""
        app = self._app = view.app
        self._view = view
        self._budgets = budgets
        self._ranks = [client.priority for client in app.clients]  # by client id
        # By pipeline id: the time after its arrival by which a request of best effort is ordered.
        # All its stages have the same: a request that is begun is not left for others to begin.
        self._due_in_ns = [
            int(default_deadline_factor * max(p.longest_to(_reference_ns(p))))
            for p in app.pipelines
        ]
        self._builds = builds
        # By build id. A promise binds: a client's later requests do not push out its earlier ones,
        # however urgent, but are admitted before its others (`AdmissionControl`).
        self.promised = [EdfQueue(build.id, uses_priorities=False) for build in builds.all]
        # By build id and the node that has their input: made when first needed.
        self._with_input: dict[tuple[int, int], EdfQueue] = {}
        first = len(builds.all)
        # By function id, then by where the tasks may run: one that cannot run in a place must not
        # keep those behind it from running there.
        self.best_effort = [
            [EdfQueue(first + 3 * f.id + place) for place in (ANYWHERE, NODES_ONLY, CALLS_ONLY)]
            for f in app.functions
        ]
        # Of tasks that cannot pay for every build: by place and the ids of the builds that they can
        # pay for. Made when first needed.
        self._limited: dict[tuple[int, tuple[int, ...]], EdfQueue] = {}
        self._builds_of: dict[int, list[Build]] = {}  # by queue id: those of a limited queue
        self._limited_tasks: dict[int, EdfQueue] = {}  # by task id
        self.promised_heads = [Heads() for _ in app.pools]
        self.best_effort_heads = [Heads() for _ in app.pools]
        # Functions with best effort that was not offered to the nodes of all its pools yet, by id.
        self.given_up: list[int] = []
        # By pool id: the lane time that best effort has earned and not used, and up to when it has
        # earned. On nodes it earns by time; calls cost money, so there by what promised ones take.
        self._credit_ns = [0.0 for _ in app.pools]
        self._earned_ns = [0 for _ in app.pools]
        self._credit_max_ns = [0.0 for _ in app.pools]  # what the last promised batch took
        self._earned_sum_ns = [0.0 for _ in app.pools]  # in all
        # By build id: the sum at which all is earned that the build has got.
        self._paid_off_ns = [0.0 for _ in builds.all]
        # By pool id: since when best effort waits to send a batch for which others cannot wait.
        self._blocked_ns: list[int | None] = [None for _ in app.pools]

    def push(self, task: Task, promise: Promise | None) -> EdfQueue:
        """Queue a ready task for the build that its promise names, or for best effort."""
        if promise is not None:
            if promise.build.pool.bytes_per_s > 0.0:
                promise.input_node_id = self._input_node_id(task, promise.build)
            queue = self._promised_queue(promise)
            # The latest start depends on the shape, where that is not chosen yet.
            latest_ns = promise.order_ns if promise.build.has_choice else promise.start_ns
            key: Key = (0, promise.order_ns, task.id, latest_ns)
            if queue.push(key, task):  # else the head is the same as before
                self.promised_heads[promise.build.pool.id].put(queue, key)
            return queue
        request = task.request
        due_ns = request.arrival_ns + self._due_in_ns[request.pipeline.id]
        if request.deadline_ns < NEVER_NS:  # it was not promised, or can no longer be in time
            due_ns = max(due_ns, request.deadline_ns)
        key = (self._ranks[request.client], due_ns, task.id, due_ns)
        queue = self._best_effort_queue(task)
        if self._limited_tasks:
            self.forget([task])
        if queue.id in self._builds_of:
            self._limited_tasks[task.id] = queue
        if queue.push(key, task):
            for build in self.builds_of(queue, task.function.id):
                self.best_effort_heads[build.pool.id].put(queue, key)
        return queue

    def withdraw(self, task: Task, promise: Promise | None) -> None:
        """Forget a task that was cancelled or has expired."""
        if promise is not None:
            queue = self._promised_queue(promise)
            queue.withdraw(task)
            self.promised_heads[promise.build.pool.id].push(queue)  # the next may be more urgent
        else:
            # What it can pay for may have changed since, and its request is settled.
            limited = self._limited_tasks.pop(task.id, None)
            (limited or self.best_effort[task.function.id][self._place(task)]).withdraw(task)

    def _input_node_id(self, task: Task, build: Build) -> int | None:
        """The node of a build's pool that has most of a task's input."""
        if build.has_choice:  # its shape is chosen together with its node
            return None
        most: Datum | None = None
        for datum in self._view.inputs_of(task):
            if datum.pool_id == build.pool.id and datum.size_bytes > 0:
                most = datum if most is None or datum.size_bytes > most.size_bytes else most
        return None if most is None else most.node_id

    def _promised_queue(self, promise: Promise) -> EdfQueue:
        build_id, node_id = promise.build.id, promise.input_node_id
        if node_id is None:
            return self.promised[build_id]
        queue = self._with_input.get((build_id, node_id))
        if queue is None:
            id = -1 - len(self._with_input)
            queue = EdfQueue(id, uses_priorities=False, node_id=node_id)
            self._with_input[build_id, node_id] = queue
        return queue

    def promised_on(self, build: Build, node_id: int) -> list[EdfQueue]:
        """The queues of what was promised a build, but for those with inputs on other nodes."""
        own = self._with_input.get((build.id, node_id)) if self._with_input else None
        return [self.promised[build.id]] if own is None else [own, self.promised[build.id]]

    def forget(self, tasks: list[Task]) -> None:
        """Tasks of best effort were sent."""
        if self._limited_tasks:
            for task in tasks:
                self._limited_tasks.pop(task.id, None)

    def builds_of(self, queue: EdfQueue, function_id: int) -> list[Build]:
        """The builds that the tasks of a queue of best effort can pay for."""
        return self._builds_of.get(queue.id, self._builds.of_function[function_id])

    def _best_effort_queue(self, task: Task) -> EdfQueue:
        function_id, place = task.function.id, self._place(task)
        if task.request.cost_usd < inf:
            builds = self._budgets.affordable(task)
            if len(builds) < len(self._builds.of_function[function_id]):
                return self._limited_queue(place, builds)
        return self.best_effort[function_id][place]

    def _place(self, task: Task) -> int:
        """Where a task of best effort may run, whatever it can pay for."""
        builds, function_id = self._builds, task.function.id
        if builds.faas[function_id] is not None and not builds.fits_call(task):
            return NODES_ONLY
        return ANYWHERE if builds.fits_node(function_id, task.request.items) else CALLS_ONLY

    def _limited_queue(self, place: int, builds: list[Build]) -> EdfQueue:
        """The queue of tasks that can pay for these builds only."""
        has_calls = any(build.warm_pool is not None for build in builds)
        if place == ANYWHERE and not has_calls:
            place = NODES_ONLY
        elif place == ANYWHERE and len(builds) == 1:
            place = CALLS_ONLY
        key = (place, tuple(build.id for build in builds))
        queue = self._limited.get(key)
        if queue is None:
            first = len(self.promised) + 3 * len(self.best_effort)
            queue = self._limited[key] = EdfQueue(first + len(self._limited))
            self._builds_of[queue.id] = builds
        return queue

    def limited(self, function_id: int, place: int) -> list[EdfQueue]:
        """The queues of a function's tasks that cannot pay for every build."""
        if not self._limited:
            return []
        return [
            queue
            for (where, ids), queue in self._limited.items()
            if where == place and self._builds.all[ids[0]].function_id == function_id
        ]

    def has_limited(self, function_id: int) -> bool:
        """Whether a task of a function waits that cannot pay for every build."""
        return bool(self._limited) and any(
            queue.items > 0
            for place in (ANYWHERE, NODES_ONLY, CALLS_ONLY)
            for queue in self.limited(function_id, place)
        )

    def best_effort_of(self, build: Build) -> list[EdfQueue]:
        """The queues of best effort whose tasks a build on nodes may run."""
        function_id = build.function_id
        queues = [self.best_effort[function_id][place] for place in (ANYWHERE, NODES_ONLY)]
        for place in (ANYWHERE, NODES_ONLY):
            for queue in self.limited(function_id, place):
                if build in self._builds_of[queue.id]:
                    queues.append(queue)
        return queues

    def drain(self, build: Build) -> list[Task]:
        """Dequeue everything that was promised a build."""
        queues = [queue for (id, _), queue in self._with_input.items() if id == build.id]
        tasks: list[Task] = []
        for queue in (self.promised[build.id], *queues):
            while queue.head() is not None:
                tasks.append(queue.pop())
        return tasks

    def give_up(self, task: Task) -> None:
        """Queue a task for best effort whose promise cannot be kept."""
        self.push(task, None)
        self.given_up.append(task.function.id)

    def take_given_up(self) -> int:
        """One of `given_up`."""
        return self.given_up.pop()

    def has_best_effort(self, function_id: int) -> bool:
        """Whether a task of best effort of a function waits."""
        queues = self.best_effort[function_id]
        return any(queue.items > 0 for queue in queues) or self.has_limited(function_id)

    def needing_nodes(self) -> list[int]:
        """The functions with a task that waits and that no call can carry."""
        return [id for id, queues in enumerate(self.best_effort) if self._needs_nodes(id, queues)]

    def _needs_nodes(self, function_id: int, queues: list[EdfQueue]) -> bool:
        places = (NODES_ONLY,) if self._builds.faas[function_id] else (NODES_ONLY, ANYWHERE)
        return any(
            queue.items > 0
            for place in places
            for queue in (queues[place], *self.limited(function_id, place))
        )

    def update_heads(self, queue: EdfQueue, function_id: int, promise: Promise | None) -> None:
        """Note that a queue has a new head."""
        if promise is not None:
            if queue.items > 0:
                self.promised_heads[promise.build.pool.id].push(queue)
            return
        for build in self.builds_of(queue, function_id):
            self.best_effort_heads[build.pool.id].push(queue)

    def is_best_effort_due(self, now_ns: int, pool_id: int) -> bool:
        """Whether best effort waits, and has had less than its share of a pool.

        What it gets must be a share of the capacity, not of what promised tasks use of that: they
        leave some idle where nothing else can be in time.
        """
        elapsed_ns = now_ns - self._earned_ns[pool_id]
        self._earned_ns[pool_id] = now_ns
        waiting = self.best_effort_heads[pool_id]
        if not waiting.entries or waiting.first() is None:
            self._blocked_ns[pool_id] = None  # what comes next has not waited
            return False
        calendar = self._builds.calendars[pool_id]
        if elapsed_ns > 0 and self._app.pools[pool_id].faas is None:
            self._earn(pool_id, elapsed_ns * min(calendar.supply, self._builds.own_lanes(pool_id)))
        return self._credit_ns[pool_id] > 0.0

    def _earn(self, pool_id: int, lane_ns: float) -> None:
        """Credit best effort with its share of a lane time."""
        earned_ns = BEST_EFFORT_SHARE * lane_ns
        self._earned_sum_ns[pool_id] += earned_ns
        credit_ns = self._credit_ns[pool_id] + earned_ns
        self._credit_ns[pool_id] = min(credit_ns, self._credit_max_ns[pool_id])

    def may_go_first(self, build: Build) -> bool:
        """Whether best effort of a build may go before promised tasks, where best effort is due.

        Not if what was left over gave it as much; that is no reason to keep other builds waiting.
        """
        return self._paid_off_ns[build.id] <= self._earned_sum_ns[build.pool.id]

    def may_block_from_ns(self, now_ns: int, build: Build, lane_ns: float) -> int:
        """From when on best effort may send a batch for which others would have to wait too long.

        While those others are active, such batches get the share of best effort and no more: what
        a batch takes is earned while it waits.
        """
        since_ns = self._blocked_ns[build.pool.id]
        if since_ns is None:
            since_ns = self._blocked_ns[build.pool.id] = now_ns
        part = build.weight / max(1.0, build.calendar.supply)
        return since_ns + int(lane_ns * part / BEST_EFFORT_SHARE)

    def on_blocking(self, pool_id: int) -> None:
        """Best effort sends a batch that takes lanes for longer than others can wait."""
        self._blocked_ns[pool_id] = None

    def on_sent(self, build: Build, lane_ns: float, *, was_promised: bool) -> None:
        """Account for a batch that was sent: of best effort, what it would take in full batches."""
        pool_id = build.pool.id
        if was_promised:
            self._credit_max_ns[pool_id] = lane_ns
            if build.warm_pool is not None:
                self._earn(pool_id, lane_ns)
        else:
            self._builds.on_best_effort_sent(pool_id, lane_ns)
            self._credit_ns[pool_id] = max(-lane_ns, self._credit_ns[pool_id] - lane_ns)
            # What it got is remembered up to a batch on every lane, and what it earned and did not
            # get up to one batch.
            earned_ns = self._earned_sum_ns[pool_id]
            most_ns = earned_ns + lane_ns * max(1.0, build.calendar.supply)
            paid_off_ns = max(earned_ns, self._paid_off_ns[build.id] + lane_ns)
            self._paid_off_ns[build.id] = min(most_ns, paid_off_ns)


def _reference_ns(pipeline: Pipeline) -> list[float]:
    return [float(stage.function.reference_exec_ns) for stage in pipeline.stages]
