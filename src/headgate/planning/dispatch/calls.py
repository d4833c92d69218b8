"""Calls: what goes to a FaaS pool next.

What was promised a call is called for, and what runs nowhere else. What may be late on the next
free node is called for instead, if a call is in time. Best effort has its share of the platform.
"""

from __future__ import annotations

from typing import final

from headgate.core.records import STAGES_MAX, Task
from headgate.core.view import View
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.spillover import Spillover
from headgate.planning.constants import HEADS_EXAMINED, LATE_Z
from headgate.planning.dispatch.batching import Batching, Send
from headgate.planning.dispatch.task_queues import (
    ANYWHERE,
    CALLS_ONLY,
    EdfQueue,
    Heads,
    TaskQueues,
)
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds


@final
class Calls:
    """Chooses the next call from the queues."""

    def __init__(
        self,
        view: View,
        builds: Builds,
        admission: AdmissionControl,
        queues: TaskQueues,
        spillover: Spillover,
        batching: Batching,
    ) -> None:
        self._view = view
        self._builds = builds
        self._admission = admission
        self._queues = queues
        self._spillover = spillover
        self._batching = batching

    def to_pool(self, pool_id: int) -> Send | None:
        """The next call of a FaaS pool, whose concurrency all its functions share."""
        queues = self._queues
        promised, best_effort = queues.promised_heads[pool_id], queues.best_effort_heads[pool_id]
        send: Send | None = None
        if queues.is_best_effort_due(self._view.now_ns, pool_id):
            send = self._first_call(best_effort, is_best_effort_due=True)
        return send or self._first_call(promised) or self._first_call(best_effort)

    def of_function(self, function_id: int) -> Send | None:
        """The next call for a function: of what was promised one, or runs nowhere else."""
        build = self._builds.faas[function_id]
        if build is None:
            return None
        for queue in self._called_queues(build):
            task = self._batching.prune(queue)
            if task is not None:
                may_start = self._admission.budgets.allows_cold(task, build)
                if self._spillover.may_call(build, task, may_start=may_start):
                    return Send(queue, build, None, self._spillover.start_ns(build))
        return None

    def instead(self, queue: EdfQueue, task: Task) -> Send | None:
        """Call for a task that may be late on the next free node, if a call is in time."""
        faas = self._builds.faas[task.function.id]
        promise = None if faas is None else self._admission.booked(task)
        if faas is None or promise is None or promise.build is faas:
            return None
        items, now_ns = task.request.items, self._view.now_ns
        left_ns = self._builds.latest_ns(task.request, task.id % STAGES_MAX) - now_ns
        wait_ns = promise.build.narrowest.free_in_ns(now_ns)
        if wait_ns + promise.build.cautious_ns(items, LATE_Z) <= left_ns:
            return None
        if items > faas.items_max or faas.cautious_ns(items, LATE_Z) > left_ns:
            return None
        if not self._admission.budgets.allows(task, faas):
            return None
        return Send(queue, faas, None) if self._spillover.has_warm(faas, task) else None

    def retry_at_ns(self, function_id: int) -> int | None:
        """When a call that waits for an instance can be sent; None if none waits."""
        build = self._builds.faas[function_id]
        if build is None or all(q.head() is None for q in self._called_queues(build)):
            return None
        return self._spillover.retry_at_ns(build)

    def _first_call(self, heads: Heads, *, is_best_effort_due: bool = False) -> Send | None:
        """The call of the most urgent queue of which one can be sent."""
        passed_over: list[EdfQueue] = []
        send: Send | None = None
        while send is None and len(passed_over) < HEADS_EXAMINED:
            queue = heads.first()
            if queue is None:
                break
            task = self._batching.prune(queue)
            if task is None:
                continue
            if is_best_effort_due:
                send = self._due_call(queue, task)
            else:
                send = self.of_function(task.function.id)
            if send is None:
                heads.remove(queue)
                passed_over.append(queue)
        for queue in passed_over:
            heads.put(queue, queue.head_key())
        return send

    def _due_call(self, queue: EdfQueue, task: Task) -> Send | None:
        """A call of best effort, which may run on nodes too but has its share of the platform."""
        build = self._builds.faas[task.function.id]
        if build is None or not self._builds.fits_call(task):
            return None
        if not self._queues.may_go_first(build):
            return None
        # A start would hold concurrency for many times as long as the call that is due.
        if not self._spillover.has_warm(build, task):
            return None
        return Send(queue, build, None)

    def _called_queues(self, build: Build) -> list[EdfQueue]:
        """The queues whose tasks a call should carry, promised ones first."""
        best_effort = self._queues.best_effort[build.function_id]
        queues = [self._queues.promised[build.id], best_effort[CALLS_ONLY]]
        queues += self._queues.limited(build.function_id, CALLS_ONLY)
        for queue in (
            best_effort[ANYWHERE],
            *self._queues.limited(build.function_id, ANYWHERE),
        ):
            waiting = queue.head()
            if waiting is not None:
                items = waiting.request.items
                builds = self._queues.builds_of(queue, build.function_id)
                if not self._builds.has_nodes(builds, items):
                    queues.append(queue)
        return queues
