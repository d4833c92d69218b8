"""Handlers of requests and their tasks, from arrival to the one outcome.

The tasks of a pipeline become ready as their predecessors finish; a cascade skips the stages that
it does not need; a request with a hard deadline expires if the deadline passes while it waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, final

from headgate.core.errors import DriverError, PolicyError
from headgate.core.events import RequestAnnounced, RequestArrived, RequestCancelled
from headgate.core.model import UNLIMITED, App, Pipeline
from headgate.core.policy import Policy, overrides
from headgate.core.records import STAGES_MAX, Batch, Request, Task
from headgate.core.scheduler.state import StateWriter
from headgate.core.states import (
    DEADLINE_EXCEEDED,
    LATE,
    LATE_IN_VAIN,
    MET,
    REQUEST_OPEN,
    TASK_BLOCKED,
    TASK_DONE,
    TASK_READY,
    Failure,
    Outcome,
    Rejection,
    Settlement,
    TaskState,
)
from headgate.core.view import View

_CANCELLED: Final = Settlement(Outcome.CANCELLED, "cancelled by the client")
_OVERDUE: Final = Settlement(Outcome.EXPIRED, DEADLINE_EXCEEDED)
_POLICY_FAULT: Final = Settlement(Outcome.FAILED, Failure.POLICY_FAULT)


@final
class RequestHandlers:
    """Handles arrivals, announcements and cancellations, and the progress of tasks."""

    def __init__(self, view: View, state: StateWriter, policy: Policy) -> None:
        self._view = view
        self._state = state
        self._policy = policy
        self._pipelines = view.app.pipelines
        self._clients = len(view.app.clients)
        self._open_max = view.app.limits.open_requests_max
        self._payload_bytes_max = [payload_bytes_max(view.app, p) for p in self._pipelines]
        self._last_id = -1
        self._has_arrival_hook = overrides(policy, "on_arrival")
        self._has_settled_hook = overrides(policy, "on_settled")

    def arrived(self, now_ns: int, event: RequestArrived) -> None:
        """Admit or reject a request; the first tasks of an admitted one become ready."""
        request_id, pipeline_id = event.request_id, event.pipeline
        if request_id <= self._last_id:
            raise DriverError(f"request id {request_id} does not follow {self._last_id}")
        if not 0 <= pipeline_id < len(self._pipelines) or event.items < 1:
            problem = f"unknown pipeline {pipeline_id}, or no items"
            raise DriverError(f"request {request_id}: {problem}")
        if not event.cost_usd >= 0.0:
            raise DriverError(f"request {request_id}: its cost objective is {event.cost_usd}")
        if not 0 <= event.client < self._clients:
            raise DriverError(f"request {request_id}: unknown client {event.client}")
        self._last_id = request_id
        view = self._view
        view.now_ns = now_ns
        arrivals = view.arrivals
        arrivals[pipeline_id] = arrivals[pipeline_id] + 1  # compiled, `+=` would be a generic call
        pipeline = self._pipelines[pipeline_id]
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
            event.cost_usd,
        )
        requests = view.requests
        requests[request_id] = request
        if len(requests) > self._open_max:
            self._reject(request, Rejection.FULL)
            return
        if view.unloadable:
            retry_ns = view.load_retry_ns(pipeline)
            if retry_ns:
                self._reject(request, Rejection.LOAD_FAILED, retry_ns)
                return
        if event.payload_bytes > self._payload_bytes_max[pipeline_id]:
            self._reject(request, Rejection.TOO_LARGE)
            return
        if self._has_arrival_hook:
            try:
                self._policy.on_arrival(request)
            except Exception as error:
                self.fault("on_arrival", error)
                if request.state == REQUEST_OPEN:
                    self.settle_early(request, _POLICY_FAULT)
            if request.state != REQUEST_OPEN:
                return
        if event.is_hard or slo.is_hard:
            request.is_hard = True
            self._state.set_timer(("deadline", request_id), request.deadline_ns)
        for task in request.tasks:
            if task.waits_for == 0 and task.state == TASK_BLOCKED:
                task.state = TASK_READY
                try:
                    self._policy.on_task_ready(task)
                except Exception as error:
                    self.fault("on_task_ready", error, task)

    def _reject(self, request: Request, reason: str, retry_ns: int = 0) -> None:
        """Reject a request without `on_arrival`; a clairvoyant policy may be waiting for it."""
        self._state.settle(request, Settlement(Outcome.REJECTED, reason, retry_ns=retry_ns))
        try:
            self._policy.on_rejected_early(request.id, request.pipeline.id)
        except Exception as error:
            self.fault("on_rejected_early", error)

    def announced(self, now_ns: int, event: RequestAnnounced) -> None:
        """Announce a future request to a clairvoyant policy."""
        if not 0 <= event.pipeline < len(self._pipelines):
            raise DriverError(f"request {event.request_id}: unknown pipeline {event.pipeline}")
        if event.request_id <= self._last_id or event.arrival_ns < now_ns:
            raise DriverError(f"request {event.request_id} is announced after it has arrived")
        self._view.now_ns = now_ns
        try:
            self._policy.on_announced(event.request_id, event.pipeline, event.arrival_ns)
        except Exception as error:
            self.fault("on_announced", error)

    def cancelled(self, now_ns: int, event: RequestCancelled) -> None:
        """Settle a request at once; the results of its batches in flight are discarded."""
        if event.request_id > self._last_id:
            raise DriverError(f"request {event.request_id} is cancelled but never arrived")
        self._view.now_ns = now_ns
        request = self._view.requests.get(event.request_id)
        if request is None:  # the response and the cancellation crossed
            self._view.events_ignored += 1
            return
        self.settle_early(request, _CANCELLED)

    def task_done(self, task: Task, batch: Batch, unsure: tuple[int, ...]) -> None:
        """Complete a running task after its first successful attempt."""
        task.state = TASK_DONE
        if task.copies_in_flight:  # competing copies are no longer needed
            self._state.cancel_batches_of(task)
        request = task.request
        request.tasks_left -= 1
        if request.tasks_left == 0:
            self._settle_done(request)
            return
        task.pool_id = batch.pool.id
        task.node_id = None if batch.node is None else batch.node.id
        self._unblock_successors(task, task.id in unsure)
        if request.state == REQUEST_OPEN:
            self.expire_if_overdue(request)

    def _unblock_successors(self, task: Task, is_unsure: bool) -> None:
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
            if request.state != REQUEST_OPEN:
                return

    def _skip(self, task: Task) -> None:
        """Skip a task because its cascade ended, and the tasks that depend on it alone."""
        task.state = TaskState.SKIPPED
        request = task.request
        request.tasks_left -= 1
        if request.tasks_left == 0:
            self._settle_done(request)
        else:
            self._unblock_successors(task, is_unsure=False)

    def _settle_done(self, request: Request) -> None:
        """Settle a request whose last task is done or skipped."""
        settlement = MET
        if self._view.now_ns > request.deadline_ns:
            settlement = LATE_IN_VAIN if request.is_hard else LATE
        self._state.settle(request, settlement)
        if self._has_settled_hook:
            self._notify_settled(request, settlement)

    def _notify_settled(self, request: Request, settlement: Settlement) -> None:
        try:
            self._policy.on_settled(request, settlement)
        except Exception as error:
            self.fault("on_settled", error)

    def task_failed(self, task: Task) -> None:
        """Fail a task for which the function raised, unless a competing copy is in flight."""
        if task.copies_in_flight:
            task.copies_in_flight -= 1
        else:
            self.fail_task(task, f"{task.function.name}: it raised an error")

    def deadline_passed(self, request_id: int) -> None:
        """Expire a request that still waits; one that is running may still finish late."""
        request = self._view.requests.get(request_id)
        if request is not None:
            self.expire_if_overdue(request)

    def expire_if_overdue(self, request: Request) -> None:
        """Expire a request past its hard deadline if none of its tasks is running."""
        if self._is_overdue(request):
            for task in request.tasks:
                if task.state == TaskState.RUNNING:
                    return
            self.settle_early(request, _OVERDUE)

    def fail_task(self, task: Task, reason: str) -> None:
        """Fail the request of a task that has no successful attempt and gets no other."""
        task.state = TaskState.DROPPED  # it is in no queue of the policy: no `on_task_withdrawn`
        self.settle_early(task.request, Settlement(Outcome.FAILED, reason, stage=_stage_name(task)))

    def fail_unloadable(self, request: Request) -> None:
        """Fail a request that needs a function which cannot be loaded."""
        retry_ns = self._view.load_retry_ns(request.pipeline)
        unloadable = self._view.unloadable
        names = [_stage_name(t) for t in request.tasks if t.function.id in unloadable]
        settlement = Settlement(
            Outcome.FAILED,
            Rejection.LOAD_FAILED,
            retry_ns=retry_ns,
            stage=names[0] if names else "",
        )
        self.settle_early(request, settlement)

    def _is_overdue(self, request: Request) -> bool:
        return request.is_hard and self._view.now_ns >= request.deadline_ns

    def settle_early(self, request: Request, settlement: Settlement) -> None:
        """Settle a request with unfinished tasks, and withdraw its ready tasks from the policy."""
        waiting = [task for task in request.tasks if task.state == TaskState.READY]
        self._state.settle(request, settlement)
        for task in waiting:
            try:
                self._policy.on_task_withdrawn(task)
            except Exception as error:
                self.fault("on_task_withdrawn", error)
        if self._has_settled_hook:
            self._notify_settled(request, settlement)

    def fault(self, hook: str, error: Exception, task: Task | None = None) -> None:
        """Record an exception of a hook. `Scheduler.handle` raises it at the end of the event.

        The task that the hook was about, and those of an illegal order, may be in no queue of the
        policy now. Unless they were dispatched all the same, their requests fail.
        """
        self._state.record_fault(hook, error)
        if task is not None:
            self.fail_if_ready(task)
        if isinstance(error, PolicyError):
            for other in error.tasks:
                assert isinstance(other, Task)
                self.fail_if_ready(other)

    def fail_if_ready(self, task: Task) -> None:
        """Fail a task that the policy may have lost, unless it is running or dropped."""
        if task.state == TASK_READY:
            self.settle_early(task.request, replace(_POLICY_FAULT, stage=_stage_name(task)))


def _stage_name(task: Task) -> str:
    """Return the name of the stage of a task; empty in a pipeline of one stage."""
    if len(task.request.tasks) == 1:
        return ""
    return task.stage.name or task.function.name


def payload_bytes_max(app: App, pipeline: Pipeline) -> int:
    """Return the largest payload with which every first stage of a pipeline can run somewhere.

    Nodes take any size. For a function that runs on FaaS pools only, the largest limit counts.
    """
    most = UNLIMITED
    for stage in pipeline.stages:
        platforms = [app.pools[id].faas for v in stage.function.variants for id in v.pool_ids]
        if not stage.after:
            largest = 0
            for platform in platforms:
                largest = max(
                    largest, UNLIMITED if platform is None else platform.payload_bytes_max
                )
            most = min(most, largest)
    return most
