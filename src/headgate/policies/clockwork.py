"""A central controller runs one inference at a time per node, and drops what cannot be in time.

Gujarati et al., "Serving DNNs like Clockwork: Performance Predictability from the Bottom Up" (OSDI
2020). Two forms; rules marked [own] are ours.

`form: faithful`. Every model has a queue. For every batch size there is a strategy: to run that
many of the most urgent requests, at the latest when the first of them could still be in time. When
a node is free, of the models that it holds the strategy with the earliest latest start is taken,
the largest batch that is still in time; strategies whose latest start has passed are discarded, and
so is a request whose batch of one is. If nothing can run, the node loads the model with the most
unfulfilled demand: its queued work, less what the nodes that hold it can do in proportion to their
load; the least recently used model gives way. A request that no node could finish in time is
rejected at once. Times are predicted by the largest of the last ten measured. Clockwork serves
single models: here a stage is due when the rest of its pipeline must begin [own], a stage that
cannot be in time any more takes its request with it, and one beside it that runs is waited for
[own]. A load is an action on the node, not beside inferences [own]. An action has no window: its
node is free when it is sent, so it begins at once [own].

`form: naive`, as "Making the Most of Serverless Accelerators" (Berkeley thesis EECS-2022-88,
chapter 4) compares with it: the whole DAG of a request goes to one node, a CPU or a GPU, without
batches, and nothing is rejected. The node is the one that is done with it first [own], of those
that meet the objective when idle, if there are such [own]; a node works on as many requests as it
has slots [own]. A DAG that no node runs as a whole is run stage by stage [own].
Cost per decision: O(functions) faithful, O(nodes) naive.

>>> from headgate.policies import find_policy
>>> find_policy("clockwork").config().form
'faithful'
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import Function, Pool, Variant
from headgate.core.policy import (
    Capabilities,
    Context,
    Policy,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import STAGES_MAX, Batch, Instance, Node, Request, Task
from headgate.core.states import (
    NODE_UP,
    ON_HOST,
    REQUEST_OPEN,
    TASK_READY,
    TASK_RUNNING,
    Outcome,
    Rejection,
    Settlement,
)
from headgate.planning.rivals.dag_placements import RecentRatios, duration_ns

_FAITHFUL: Final = "faithful"
_NAIVE: Final = "naive"
_WINDOW: Final = 10  # measured times of which the largest predicts the next
_DUE: Final = "due"  # the timer of a task that becomes infeasible, by function id


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `clockwork`."""

    form: str = field(default=_FAITHFUL, metadata=bounded(choices=(_FAITHFUL, _NAIVE)))


@final
class Clockwork(Policy):
    """The controller; `_Naive` or the queues of models below, depending on the form."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._naive = _Naive(context) if config.form == _NAIVE else None
        self._ratios = RecentRatios(app, _WINDOW)
        # By function id: tasks with the time at which each is due, the most urgent first.
        self._queues: list[list[tuple[int, int, Task]]] = [[] for _ in app.functions]
        self._rests_ns = [
            [longest - time for longest, time in zip(pipeline.longest_from(t), t, strict=True)]
            for pipeline in app.pipelines
            for t in [[float(self._fastest_ns(stage.function)) for stage in pipeline.stages]]
        ]
        self._free_at_ns: dict[int, int] = {}  # by node id: when its action is predicted to end

    def _fastest_ns(self, function: Function) -> int:
        """The shortest time of one item of a function on any node, as far as known."""
        return min(
            self._time_ns(variant, 1, self.view.app.pools[pool_id])
            for variant in function.variants
            for pool_id in variant.pool_ids
        )

    # Admission

    def on_arrival(self, request: Request) -> None:
        if self._naive is not None:
            self._naive.on_arrival(request)
        elif request.deadline_ns != NEVER_NS:
            rests_ns = self._rests_ns[request.pipeline.id]
            end_ns = self.view.now_ns
            for index, task in enumerate(request.tasks):
                if not task.stage.after:
                    end_ns = max(end_ns, self._soonest_ns(task) + int(rests_ns[index]))
            if end_ns >= NEVER_NS:
                self._reject(request, Settlement(Outcome.REJECTED, Rejection.UNAVAILABLE))
            elif end_ns > request.deadline_ns:
                predicted_ns = end_ns - self.view.now_ns
                self._reject(
                    request, Settlement(Outcome.REJECTED, Rejection.OVERLOADED, predicted_ns)
                )

    def _reject(self, request: Request, settlement: Settlement) -> None:
        self._load_for(request)
        self.orders.reject(request, settlement)

    def _soonest_ns(self, task: Task) -> int:
        """When a node could be done with a task if it were the next there; or `NEVER_NS`."""
        soonest_ns = NEVER_NS
        for variant in task.function.variants:
            for instance in self.view.instances_of[variant.id].values():
                node = instance.node
                if node is not None and instance.residency != ON_HOST:
                    free_ns = max(self.view.now_ns, self._free_at_ns.get(node.id, 0))
                    soonest_ns = min(soonest_ns, free_ns + self._time_ns(variant, 1, node.pool))
            if variant.id in self.view.load_failures:
                continue
            for node in self.view.free_nodes.values():
                if node.pool.id in variant.pool_ids and self.view.can_make_room(node, variant):
                    load_ns = self.view.now_ns + variant.profile.cold_start_ns
                    soonest_ns = min(soonest_ns, load_ns + self._time_ns(variant, 1, node.pool))
                    break
        return soonest_ns

    def _load_for(self, request: Request) -> None:
        """Load what a rejected request found nowhere: its demand is not in any queue."""
        for task in request.tasks:
            if not self.view.has_instance(task.function.id):
                node = self.view.first_free(task.function.id)
                variant = None if node is None else node.variants[task.function.id]
                if node is not None and variant is not None and not node.running:
                    self._start(node, variant)

    def _time_ns(self, variant: Variant, items: int, pool: Pool) -> int:
        took_ns = duration_ns(variant, items, 1, pool.network_ns)
        return int(took_ns * self._ratios.factor(self.view.now_ns, variant))

    # Queues of models

    def on_task_ready(self, task: Task) -> None:
        if self._naive is not None:
            self._naive.on_task_ready(task)
            return
        due_ns = task.request.deadline_ns
        if due_ns != NEVER_NS:
            due_ns -= int(self._rests_ns[task.request.pipeline.id][task.id % STAGES_MAX])
        insort(self._queues[task.function.id], (due_ns, task.id, task), key=itemgetter(0))
        if not task.stage.after:  # else `on_batch_ended` follows, and all of them share a batch
            self._serve_all()

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        self.on_task_ready(task)
        self._serve_all()

    def on_task_withdrawn(self, task: Task) -> None:
        if self._naive is not None:
            self._naive.on_task_withdrawn(task)
        else:
            self._sweep(task.function.id)

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        if self._naive is not None:
            self._naive.on_settled(request)

    def on_capacity(self, node: Node) -> None:
        if self._naive is not None:
            self._naive.serve_all()
        else:
            self._serve_all()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        node = batch.node
        if self._naive is not None:
            self._naive.serve_all()
        elif node is not None:
            predicted_ns = self._free_at_ns.pop(node.id, 0) - batch.sent_ns
            if predicted_ns <= self._time_ns(
                batch.variant, batch.items, node.pool
            ):  # without a load
                self._ratios.observe(self.view.now_ns, batch, took_ns, slots=1)
            self._serve_all()

    def on_node_lost(self, node: Node) -> None:
        self._free_at_ns.pop(node.id, None)
        if self._naive is not None:
            self._naive.on_node_lost(node)

    def on_node_joined(self, node: Node) -> None:
        if self._naive is not None:
            self._naive.on_node_joined()

    def on_timer(self, name: str, number: int) -> None:
        self._prune(number)
        self._serve_all()

    def _serve_all(self) -> None:
        if self._naive is not None:
            self._naive.serve_all()
            return
        for function in self.view.app.functions:
            self._prune(function.id)
        for node in list(self.view.free_nodes.values()):
            while node.id in self.view.free_nodes and not node.running and self._infer(node):
                pass

    def _prune(self, function_id: int) -> None:
        """Drop the tasks that no batch of one can finish in time any more."""
        queue = self._queues[function_id]
        if not queue:
            return
        least_ns = self._fastest_ns(self.view.app.functions[function_id])
        now_ns = self.view.now_ns
        while queue and queue[0][0] < now_ns + least_ns:
            task = queue.pop(0)[2]
            if task.state == TASK_READY:
                self._drop(task)
        if queue and queue[0][0] != NEVER_NS:
            self.orders.set_timer(_DUE, max(now_ns, queue[0][0] - least_ns) + 1, function_id)

    def _drop(self, task: Task) -> None:
        request = task.request
        if any(each.state == TASK_RUNNING for each in request.tasks):
            # It cannot expire now: the task goes last, and the request ends late.
            self._queues[task.function.id].append((NEVER_NS, task.id, task))
        elif request.state == REQUEST_OPEN:
            functions = {each.function.id for each in request.tasks if each.state == TASK_READY}
            self.orders.expire(request, "could not start in time")
            for function_id in functions:  # of stages beside it
                self._sweep(function_id)

    def _sweep(self, function_id: int) -> None:
        queue = self._queues[function_id]
        queue[:] = [each for each in queue if each[2].state == TASK_READY]

    def _infer(self, node: Node) -> bool:
        """Run the most urgent strategy of the models that a node holds, or load another model."""
        best: tuple[int, list[Task], Variant] | None = None
        for queue in self._queues:
            if not queue:
                continue
            variant = node.variants[queue[0][2].function.id]
            if variant is None:
                continue
            instance = node.instances.get(variant.id)
            is_held = instance is not None and instance.residency != ON_HOST
            if not is_held or not self.view.fits(node, variant):
                continue
            strategy = self._strategy(queue, variant, node)
            if strategy is not None and (best is None or strategy[0] < best[0]):
                best = (*strategy, variant)
        if best is None:
            return self._load(node)
        _, tasks, variant = best
        items = sum(task.request.items for task in tasks)
        queue = self._queues[variant.function_id]
        queue[:] = [each for each in queue if each[2] not in tasks]
        self._free_at_ns[node.id] = self.view.now_ns + self._time_ns(variant, items, node.pool)
        self.orders.dispatch(tasks, node, variant)
        return True

    def _strategy(
        self, queue: list[tuple[int, int, Task]], variant: Variant, node: Node
    ) -> tuple[int, list[Task]] | None:
        """The largest batch of the most urgent tasks that is in time, and its latest start."""
        now_ns = self.view.now_ns
        tasks: list[Task] = []
        items = 0
        first_due_ns = NEVER_NS
        best: tuple[int, list[Task]] | None = None
        for due_ns, _, task in queue:
            items += task.request.items
            if items > variant.items_max() or (tasks and task.must_run_alone):
                break
            first_due_ns = min(first_due_ns, due_ns)
            time_ns = self._time_ns(variant, items, node.pool)
            if first_due_ns != NEVER_NS and now_ns + time_ns > first_due_ns:
                break
            tasks = [*tasks, task]
            best = (first_due_ns - time_ns, tasks)
            if task.must_run_alone:
                break
        return best

    def _load(self, node: Node) -> bool:
        """Load the model with the most unfulfilled demand, if there is one that the node lacks."""
        best: tuple[float, Variant] | None = None
        for queue in self._queues:
            if not queue:
                continue
            variant = node.variants[queue[0][2].function.id]
            if variant is None or variant.id in self.view.load_failures:
                continue
            instance = node.instances.get(variant.id)
            is_held = instance is not None and instance.residency != ON_HOST
            if is_held or not self.view.can_make_room(node, variant):
                continue
            unfulfilled_ns = self._unfulfilled_ns(queue, variant)
            if unfulfilled_ns > 0 and (best is None or unfulfilled_ns > best[0]):
                best = (unfulfilled_ns, variant)
        if best is None or not self.view.has_compute(node, best[1]):
            return False
        self._start(node, best[1])
        return True

    def _unfulfilled_ns(self, queue: list[tuple[int, int, Task]], variant: Variant) -> float:
        """Queued work of a model beyond what the nodes that hold it can do, by their load."""
        demand_ns = float(sum(task.request.items for _, _, task in queue)) * variant.exec_ns(1)
        now_ns = self.view.now_ns
        window_ns = max([1.0, *(due_ns - now_ns for due_ns, _, _ in queue if due_ns != NEVER_NS)])
        done_ns = 0.0
        for build in self.view.app.functions[variant.function_id].variants:
            for instance in self.view.instances_of[build.id].values():
                node = instance.node
                if node is not None:
                    busy_ns = max(0, self._free_at_ns.get(node.id, 0) - now_ns)
                    rivals = sum(1 for other in node.instances.values() if self._has_work(other))
                    free_ns = max(0.0, window_ns - busy_ns) / max(1, rivals)
                    done_ns += free_ns * variant.exec_ns(1) / build.exec_ns(1)
        return demand_ns - done_ns

    def _has_work(self, instance: Instance) -> bool:
        return bool(self._queues[instance.variant.function_id])

    def _start(self, node: Node, variant: Variant) -> None:
        held = node.instances.get(variant.id)
        if held is None:
            self._free_at_ns[node.id] = self.view.now_ns + variant.profile.cold_start_ns
            self.orders.start(variant, node)
        elif held.residency == ON_HOST:
            self._free_at_ns[node.id] = self.view.now_ns + variant.profile.swap_in_ns
            self.orders.load(held)


@final
class _Naive:
    """Whole DAGs on single nodes: each node has a queue of requests, and works on its heads."""

    def __init__(self, context: Context) -> None:
        self._view = context.view
        self._orders = context.orders
        self._lines: dict[int, dict[int, Request]] = {}  # by node id, in order of arrival
        self._backlog_ns: dict[int, float] = {}  # by node id: the work of its line
        # By request id: the node of its whole DAG, and the work that it was taken for.
        self._line_of: dict[int, tuple[int, float]] = {}
        self._ready: dict[int, list[Task]] = {}  # by request id
        self._stray: deque[Task] = deque()  # of DAGs that no node runs as a whole

    def on_arrival(self, request: Request) -> None:
        best: tuple[bool, float, Node] | None = None
        slo_ns = request.deadline_ns - self._view.now_ns
        for node in self._view.nodes.values():
            idle_ns = self._work_ns(request, node)
            if node.state != NODE_UP or idle_ns is None:
                continue
            ahead_ns = self._backlog_ns.get(node.id, 0.0) / node.slots
            rank = (idle_ns > slo_ns, ahead_ns + idle_ns)
            if best is None or rank < best[:2]:
                best = (*rank, node)
        if best is not None:
            node = best[2]
            work_ns = self._work_ns(request, node) or 0.0
            self._backlog_ns[node.id] = self._backlog_ns.get(node.id, 0.0) + work_ns
            self._lines.setdefault(node.id, {})[request.id] = request
            self._line_of[request.id] = (node.id, work_ns)

    def _work_ns(self, request: Request, node: Node) -> float | None:
        """Time of a whole DAG on a node, loads included; None if the node cannot run it."""
        total_ns = 0.0
        for task in request.tasks:
            variant = node.variants[task.function.id]
            if variant is None or request.items > variant.items_max():
                return None
            if variant.id in self._view.load_failures and variant.id not in node.instances:
                return None
            if variant.id not in node.instances:
                total_ns += variant.profile.cold_start_ns
            total_ns += duration_ns(variant, request.items, 1, node.pool.network_ns)
        return total_ns

    def on_task_ready(self, task: Task) -> None:
        if task.request.id in self._line_of:
            self._ready.setdefault(task.request.id, []).append(task)
        else:
            self._stray.append(task)
        self.serve_all()

    def on_task_withdrawn(self, task: Task) -> None:
        ready = self._ready.get(task.request.id)
        if ready is not None and task in ready:
            ready.remove(task)

    def on_settled(self, request: Request) -> None:
        self._ready.pop(request.id, None)
        node_id, work_ns = self._line_of.pop(request.id, (None, 0.0))
        if node_id is not None:
            self._lines[node_id].pop(request.id, None)
            self._backlog_ns[node_id] -= work_ns

    def on_node_lost(self, node: Node) -> None:
        self._backlog_ns.pop(node.id, None)
        for request in self._lines.pop(node.id, {}).values():
            del self._line_of[request.id]
            self.on_arrival(request)
            if request.id not in self._line_of:
                self._stray.extend(self._ready.pop(request.id, []))

    def on_node_joined(self) -> None:
        self.serve_all()

    def serve_all(self) -> None:
        for node_id, line in list(self._lines.items()):
            node = self._view.nodes[node_id]
            for request in list(islice(line.values(), node.slots)):
                self._serve_request(node, request)
        waiting, self._stray = self._stray, deque()
        for task in waiting:
            if task.state != TASK_READY:
                continue
            free = self._view.first_free(task.function.id)
            if free is None:
                self._stray.append(task)
            else:
                self._orders.dispatch([task], free)

    def _serve_request(self, node: Node, request: Request) -> None:
        for task in list(self._ready.get(request.id, ())):
            if node.id not in self._view.free_nodes:
                return
            variant = node.variants[task.function.id]
            if variant is not None and self._view.is_barred(node, variant):
                self._ready[request.id].remove(task)
                self._stray.append(task)  # it does not load here
            elif self._view.can_take(node, task.function.id):
                self._ready[request.id].remove(task)
                if task.state == TASK_READY:
                    self._orders.dispatch([task], node)


POLICY = PolicyKind(Clockwork, Config, Capabilities(batches=True, mixed_pools=True))
