"""Requests and their tasks: from arrival to the one outcome.

A pipeline's tasks become ready as their predecessors finish; a cascade skips what it does not need;
a request whose objective says so gives up when its deadline passes.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.errors import DriverError, PolicyError
from headgate.core.events import RequestAnnounced, RequestArrived, RequestCancelled
from headgate.core.model import App, Pipeline
from headgate.core.policy import Policy, overrides
from headgate.core.records import STAGES_MAX, Batch, Request, Task
from headgate.core.scheduler.state import StateWriter
from headgate.core.states import Failure, Outcome, Rejection, RequestState, TaskState
from headgate.core.view import View

# Interpreted, a name of the module is read many times faster than one of a class.
_BLOCKED: Final = TaskState.BLOCKED
_DONE: Final = TaskState.DONE
_LATE: Final = Outcome.LATE
_MET: Final = Outcome.MET
_OPEN: Final = RequestState.OPEN
_READY: Final = TaskState.READY


@final
class RequestHandlers:
    """Handles what clients do, and moves tasks along."""

    def __init__(self, view: View, ledger: StateWriter, policy: Policy) -> None:
        self._view = view
        self._ledger = ledger
        self._policy = policy
        self._pipelines = view.app.pipelines
        self._clients = len(view.app.clients)
        self._open_max = view.app.limits.open_requests_max
        self._payload_bytes_max = [payload_bytes_max(view.app, p) for p in self._pipelines]
        self._last_id = -1
        self._asks_at_arrival = overrides(policy, "on_arrival")

    # --- what clients do -----------------------------------------------------------------------

    def arrived(self, now_ns: int, event: RequestArrived) -> None:
        """A request is admitted or turned away; its first tasks become ready."""
        request_id = event.request_id
        if request_id <= self._last_id:
            raise DriverError(f"request id {request_id} does not follow {self._last_id}")
        if not 0 <= event.pipeline < len(self._pipelines) or event.items < 1:
            raise DriverError(f"request {request_id}: no pipeline {event.pipeline}, or no items")
        if not 0 <= event.client < self._clients:
            raise DriverError(f"request {request_id}: no client {event.client}")
        self._last_id = request_id
        view = self._view
        view.now_ns = now_ns
        view.arrivals_seen[event.pipeline] += 1
        pipeline = self._pipelines[event.pipeline]
        slo = pipeline.slo
        request = Request(
            request_id,
            pipeline,
            event.client,
            event.items,
            event.priority,
            now_ns,
            event.deadline_ns or slo.deadline_ns(now_ns),
            event.payload_bytes,
        )
        view.requests[request_id] = request
        if len(view.requests) > self._open_max:
            self._turn_away(request, Rejection.FULL, 0)
            return
        if view.unloadable:
            retry_ns = view.load_retry_ns(pipeline)
            if retry_ns:
                self._turn_away(request, Rejection.LOAD_FAILED, retry_ns)
                return
        if event.payload_bytes > self._payload_bytes_max[event.pipeline]:
            self._turn_away(request, Rejection.TOO_LARGE, 0)
            return
        if self._asks_at_arrival:
            try:
                self._policy.on_arrival(request)
            except Exception as error:
                self.fault("on_arrival", error)
                if request.state == _OPEN:
                    self.settle_early(request, Outcome.FAILED, Failure.POLICY_FAULT)
            if request.state != _OPEN:
                return
        if event.is_hard or slo.is_hard:
            request.is_hard = True
            self._ledger.set_timer(("deadline", request_id), request.deadline_ns)
        for task in request.tasks:
            if task.waits_for == 0 and task.state == _BLOCKED:
                task.state = _READY
                try:
                    self._policy.on_task_ready(task)
                except Exception as error:
                    self.fault("on_task_ready", error, task)

    def _turn_away(self, request: Request, reason: str, retry_ns: int) -> None:
        """The policy is not asked, but one that was told of the request waits for it no longer."""
        self._ledger.settle(request, Outcome.REJECTED, reason, retry_ns=retry_ns)
        try:
            self._policy.on_turned_away(request.id, request.pipeline.id)
        except Exception as error:
            self.fault("on_turned_away", error)

    def announced(self, now_ns: int, event: RequestAnnounced) -> None:
        """A clairvoyant policy is told what is to come."""
        if not 0 <= event.pipeline < len(self._pipelines):
            raise DriverError(f"request {event.request_id}: no pipeline {event.pipeline}")
        if event.request_id <= self._last_id or event.arrival_ns < now_ns:
            raise DriverError(f"request {event.request_id} is announced after it has arrived")
        self._view.now_ns = now_ns
        try:
            self._policy.on_announced(event.request_id, event.pipeline, event.arrival_ns)
        except Exception as error:
            self.fault("on_announced", error)

    def cancelled(self, now_ns: int, event: RequestCancelled) -> None:
        """A request is settled at once; what is out of it comes back to nobody."""
        if event.request_id > self._last_id:
            raise DriverError(f"request {event.request_id} is cancelled but never arrived")
        self._view.now_ns = now_ns
        request = self._view.requests.get(event.request_id)
        if request is None:  # the answer and the cancellation crossed
            self._view.events_ignored += 1
            return
        self.settle_early(request, Outcome.CANCELLED, "cancelled by the client")

    # --- how tasks go on -----------------------------------------------------------------------

    def task_done(self, task: Task, batch: Batch, unsure: tuple[int, ...]) -> None:
        """An attempt at a running task has succeeded, the first to do so."""
        task.state = _DONE
        if task.copies_out:  # competing copies lose
            self._ledger.cancel_batches_of(task)
        request = task.request
        request.tasks_left -= 1
        if request.tasks_left == 0:
            is_late = self._view.now_ns > request.deadline_ns
            self._ledger.settle(request, _LATE if is_late else _MET)
            return
        task.pool_id = batch.pool.id
        task.node_id = None if batch.node is None else batch.node.id
        self._wake_successors(task, task.id in unsure)
        if request.state == RequestState.OPEN:
            self.expire_if_overdue(request)

    def _wake_successors(self, task: Task, is_unsure: bool) -> None:
        request = task.request
        is_overdue = self._is_overdue(request)
        for index in request.pipeline.successors[task.id % STAGES_MAX]:
            successor = request.tasks[index]
            if successor.state != TaskState.BLOCKED:
                continue
            successor.waits_for -= 1
            if successor.stage.only_if_unsure and not is_unsure:
                self._skip(successor)
            elif successor.waits_for == 0 and not is_overdue:
                successor.state = TaskState.READY
                try:
                    self._policy.on_task_ready(successor)
                except Exception as error:
                    self.fault("on_task_ready", error, successor)
            if request.state != RequestState.OPEN:
                return

    def _skip(self, task: Task) -> None:
        """A cascade ends before this task: it and all that only it leads to count as done."""
        task.state = TaskState.SKIPPED
        request = task.request
        request.tasks_left -= 1
        if request.tasks_left == 0:
            is_late = self._view.now_ns > request.deadline_ns
            self._ledger.settle(request, _LATE if is_late else _MET)
        else:
            self._wake_successors(task, is_unsure=False)

    def task_broke(self, task: Task) -> None:
        """The function could not do this one. A copy elsewhere may yet; else nothing will."""
        if task.copies_out:
            task.copies_out -= 1
        else:
            self.give_up_failed(task, f"{task.function.name}: it raised an error")

    # --- how requests end before they are done -------------------------------------------------

    def deadline_passed(self, request_id: int) -> None:
        """Give up a request that still waits; one that is running may yet be late."""
        request = self._view.requests.get(request_id)
        if request is not None:
            self.expire_if_overdue(request)

    def expire_if_overdue(self, request: Request) -> None:
        """Expire a request past its deadline once nothing of it is running."""
        if self._is_overdue(request):
            for task in request.tasks:
                if task.state == TaskState.RUNNING:
                    return
            self.settle_early(request, Outcome.EXPIRED, "deadline passed while waiting")

    def give_up_failed(self, task: Task, reason: str) -> None:
        """No attempt at this task has succeeded and none will be made."""
        task.state = TaskState.DROPPED  # it is in no policy's queue: nobody need be told of it
        self.settle_early(task.request, Outcome.FAILED, reason)

    def _is_overdue(self, request: Request) -> bool:
        return request.is_hard and self._view.now_ns >= request.deadline_ns

    def settle_early(self, request: Request, outcome: int, reason: str, retry_ns: int = 0) -> None:
        """Settle a request that still has tasks to go, and tell the policy which it may forget."""
        waiting = [task for task in request.tasks if task.state == TaskState.READY]
        self._ledger.settle(request, outcome, reason, retry_ns=retry_ns)
        for task in waiting:
            try:
                self._policy.on_task_withdrawn(task)
            except Exception as error:
                self.fault("on_task_withdrawn", error)

    # --- what policies do wrong ----------------------------------------------------------------

    def fault(self, hook: str, error: Exception, task: Task | None = None) -> None:
        """A hook has raised an exception. The event goes on; `Scheduler.handle` raises at its end.

        The task that the hook was about, and those of an illegal order, may be in no queue of the
        policy now. Unless they have been sent out all the same, their requests fail.
        """
        self._ledger.note_fault(hook, error)
        if task is not None:
            self.fail_if_ready(task)
        if isinstance(error, PolicyError):
            for other in error.tasks:
                assert isinstance(other, Task)
                self.fail_if_ready(other)

    def fail_if_ready(self, task: Task) -> None:
        """Fail a task that the policy may have lost, unless it is out or wanted no longer."""
        if task.state == _READY:
            self.settle_early(task.request, Outcome.FAILED, Failure.POLICY_FAULT)


def payload_bytes_max(app: App, pipeline: Pipeline) -> int:
    """Return how large inputs may be for a pipeline's first stages to have a place to run.

    Nodes take any size. Where a function runs on platforms only, the one that carries most decides.
    """
    most = NEVER_NS
    for stage in pipeline.stages:
        platforms = [app.pools[id].faas for v in stage.function.variants for id in v.pool_ids]
        if not stage.after:
            largest = 0
            for platform in platforms:
                largest = max(largest, NEVER_NS if platform is None else platform.payload_bytes_max)
            most = min(most, largest)
    return most
