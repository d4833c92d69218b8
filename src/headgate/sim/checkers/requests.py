"""Checkers of requests: each ends once, with a true outcome, stage by stage, in bounded time."""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from headgate.core.actions import Action, Dispatch, ReportWouldReject, Settle
from headgate.core.clock import NEVER_NS
from headgate.core.events import BatchFinished, Event, RequestArrived, RequestCancelled
from headgate.core.model import OBSERVE, App, Pipeline
from headgate.core.records import STAGES_MAX
from headgate.core.states import OUTCOME_NAMES, Outcome, Rejection
from headgate.metrics.columns import RunColumns
from headgate.sim.checkers.checker import Checker, ended_batch

NOBODY: Final = -1  # in place of a Scheduler, for a request that none received


@final
class Conservation(Checker):
    """Every request is settled exactly once, by the Scheduler at which it arrived.

    When a gateway crashes, its open requests fail at that moment. Where decisions take time, one
    that its Scheduler had settled fails all the same if the answer had not left, and a request
    that nobody saw may have waited for its Scheduler.
    """

    def __init__(self, *, has_decision_cost: bool = False) -> None:
        super().__init__()
        self._has_decision_cost = has_decision_cost
        self._has_crashes = False
        self._arrived: dict[int, int] = {}  # request id -> Scheduler
        self._settled: dict[int, tuple[int, int]] = {}  # request id -> (time, outcome)
        self._lost: set[int] = set()  # settled by a Scheduler whose gateway has crashed since

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, RequestArrived):
            if event.request_id in self._arrived:
                self.report(now_ns, f"request {event.request_id} arrived twice")
            self._arrived[event.request_id] = scheduler

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        self._has_crashes = True
        for request_id, receiver in self._arrived.items():
            if receiver == scheduler:
                if request_id not in self._settled:
                    self._settled[request_id] = (now_ns, Outcome.FAILED)
                elif self._has_decision_cost:
                    self._lost.add(request_id)

    def on_turned_away(self, now_ns: int, request_id: int, pipeline: int) -> None:
        self._has_crashes = True
        self._arrived[request_id] = NOBODY
        self._settled[request_id] = (now_ns, Outcome.FAILED)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if not isinstance(action, Settle):
            return
        request_id = action.request_id
        if request_id in self._settled:
            self.report(now_ns, f"request {request_id} is settled twice")
        elif request_id not in self._arrived:
            self.report(now_ns, f"request {request_id} is settled and never arrived")
        elif self._arrived[request_id] != scheduler:
            self.report(now_ns, f"request {request_id} is settled by Scheduler {scheduler}")
        self._settled[request_id] = (now_ns, action.settlement.outcome)

    def finish(self, run: RunColumns) -> None:
        """Report requests that were never settled, or whose rows in the columns differ."""
        rows = run.requests
        waited = self._has_crashes and self._has_decision_cost
        if len(rows) != len(self._arrived) and not (waited and len(rows) > len(self._arrived)):
            self.report(run.end_ns, f"{len(self._arrived)} requests have {len(rows)} rows")
        open_rows = (rows.finished_ns == NEVER_NS).nonzero()[0].tolist()
        for request_id in open_rows:
            self.report(run.end_ns, f"request {request_id} has no outcome in the columns")
        for request_id in self._arrived:
            if request_id not in self._settled:
                self.report(run.end_ns, f"request {request_id} was never settled")
                continue
            settled_ns, outcome = self._settled[request_id]
            if request_id >= len(rows):
                self.report(run.end_ns, f"request {request_id} has no row")
            elif request_id in self._lost and rows.outcome[request_id] == Outcome.FAILED:
                continue
            elif rows.outcome[request_id] != outcome or (
                rows.finished_ns[request_id] != settled_ns and not self._has_decision_cost
            ):
                self.report(settled_ns, f"request {request_id} has another row in the columns")


@final
class Deadlines(Checker):
    """MET is in time, LATE is not, CANCELLED was cancelled, REJECTED was never dispatched."""

    def __init__(self, app: App, *, has_decision_cost: bool = False) -> None:
        super().__init__()
        self._app = app
        self._has_decision_cost = has_decision_cost
        self._deadline_ns: dict[int, int] = {}  # request id -> its deadline
        self._cancelled: set[int] = set()
        self._dispatched: set[int] = set()

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Compute the deadline of a request at its arrival, as the Scheduler must."""
        if isinstance(event, RequestArrived):
            slo = self._app.pipelines[event.pipeline].slo
            self._deadline_ns[event.request_id] = event.deadline_ns or slo.deadline_ns(now_ns)
        elif isinstance(event, RequestCancelled):
            self._cancelled.add(event.request_id)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, Dispatch):
            self._dispatched.update(task_id // STAGES_MAX for task_id in action.task_ids)
        elif isinstance(action, Settle):
            request_id, outcome = action.request_id, action.settlement.outcome
            is_late = now_ns > self._deadline_ns.get(request_id, NEVER_NS)
            if (
                (outcome == Outcome.MET and is_late)
                or (outcome == Outcome.LATE and not is_late)
                or (outcome == Outcome.CANCELLED and request_id not in self._cancelled)
                or (outcome == Outcome.REJECTED and request_id in self._dispatched)
            ):
                name = OUTCOME_NAMES[outcome]
                self.report(now_ns, f"request {request_id} cannot be settled as {name}")

    def finish(self, run: RunColumns) -> None:
        """Compare outcomes and times in the columns.

        Where decisions take time, a response leaves later than it was decided, so a request that
        was settled as MET may have a late row.
        """
        rows = run.requests
        is_late = rows.finished_ns > rows.deadline_ns
        wrong = ((rows.outcome == Outcome.MET) & is_late & (not self._has_decision_cost)) | (
            (rows.outcome == Outcome.LATE) & ~is_late
        )
        for request_id in wrong.nonzero()[0].tolist():
            name = OUTCOME_NAMES[rows.outcome[request_id]]
            self.report(int(rows.finished_ns[request_id]), f"request {request_id} is not {name}")


@final
class ObservedAdmission(Checker):
    """If admission is only observed, no policy rejects; else nothing is reported as observed.

    A request is reported once at most, while it is open, and its row in the columns says so, unless
    its gateway crashed before the report had left. The Scheduler's own limits hold all the same.
    """

    _LIMITS: Final = (Rejection.FULL, Rejection.LOAD_FAILED, Rejection.TOO_LARGE)

    def __init__(self, app: App) -> None:
        super().__init__()
        self._is_observing = app.limits.admission == OBSERVE
        self._open: dict[int, int] = {}  # request id -> Scheduler
        self._reported: set[int] = set()
        self._crashed: set[int] = set()  # requests that were open when their gateway crashed

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._open[event.request_id] = scheduler

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, ReportWouldReject):
            request_id = action.request_id
            if not self._is_observing:
                self.report(now_ns, f"request {request_id} is reported, but not rejected")
            if request_id not in self._open or request_id in self._reported:
                self.report(now_ns, f"request {request_id} is reported again, or is not open")
            self._reported.add(request_id)
        elif isinstance(action, Settle):
            self._open.pop(action.request_id, None)
            settlement = action.settlement
            is_rejected = settlement.outcome == Outcome.REJECTED
            if self._is_observing and is_rejected and settlement.reason not in self._LIMITS:
                self.report(now_ns, f"request {action.request_id} is rejected, not observed")

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        self._crashed.update(id for id, receiver in self._open.items() if receiver == scheduler)

    def finish(self, run: RunColumns) -> None:
        """Compare the rows of the columns with the reports."""
        rows = set(run.requests.would_reject.nonzero()[0].tolist())
        for request_id in sorted((rows ^ self._reported) - self._crashed):
            self.report(run.end_ns, f"request {request_id} has another row than was reported")


@final
class HardDeadlines(Checker):
    """A request with a hard deadline is not dispatched after its deadline.

    Tasks that run at the deadline may end late, and so may other branches of their request; so a
    request with tasks in flight is not checked. Where decisions take time this checker does not
    apply: the Scheduler may handle the deadline late.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._deadline_ns: dict[int, int] = {}  # request id -> hard deadline
        self._in_flight: dict[int, list[int]] = {}  # batch id -> request ids
        self._running: Counter[int] = Counter()  # request id -> tasks in flight

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, RequestArrived):
            slo = self._app.pipelines[event.pipeline].slo
            if slo.is_hard:
                deadline_ns = event.deadline_ns or slo.deadline_ns(now_ns)
                self._deadline_ns[event.request_id] = deadline_ns
        elif (batch_id := ended_batch(event)) is not None:
            self._running.subtract(self._in_flight.pop(batch_id, ()))

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, Dispatch):
            requests = [task_id // STAGES_MAX for task_id in action.task_ids]
            for request_id in requests:
                is_over = now_ns > self._deadline_ns.get(request_id, NEVER_NS)
                if is_over and not self._running[request_id]:
                    self.report(now_ns, f"request {request_id} is dispatched after its deadline")
            self._in_flight[action.batch_id] = requests
            self._running.update(requests)


@final
class Stages(Checker):
    """A task is dispatched once its predecessors are done, and not after it is done or skipped.

    A request is answered (MET or LATE) when every stage is done, or was skipped because an earlier
    stage of its cascade was sure.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._open: dict[int, Pipeline] = {}  # by request id
        self._done: dict[int, bool] = {}  # task id -> whether its result was unsure
        self._in_flight: dict[int, list[int]] = {}  # batch id -> task ids

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Note the tasks of a batch as done, unless the batch was given up as lost before."""
        if isinstance(event, RequestArrived):
            self._open[event.request_id] = self._app.pipelines[event.pipeline]
        elif isinstance(event, BatchFinished):
            for task_id in self._in_flight.pop(event.batch_id, ()):
                if task_id not in event.too_large:
                    self._done.setdefault(task_id, task_id in event.unsure)
        elif (batch_id := ended_batch(event)) is not None:
            self._in_flight.pop(batch_id, None)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, Dispatch):
            for task_id in action.task_ids:
                problem = self._problem(task_id)
                if problem is not None:
                    self.report(now_ns, f"task {task_id} is dispatched {problem}")
            self._in_flight[action.batch_id] = action.task_ids
        elif isinstance(action, Settle):
            pipeline = self._open.pop(action.request_id, None)
            if pipeline is not None and action.settlement.outcome in (Outcome.MET, Outcome.LATE):
                for index in range(len(pipeline.stages)):
                    if self._stage_result(pipeline, action.request_id, index) is None:
                        self.report(now_ns, f"request {action.request_id} lacks stage {index}")

    def _problem(self, task_id: int) -> str | None:
        request_id, index = divmod(task_id, STAGES_MAX)
        pipeline = self._open.get(request_id)
        if pipeline is None:
            return "before its request has arrived, or after it was settled"
        if self._stage_result(pipeline, request_id, index) is not None:
            return "though it is done or was skipped"
        for before in pipeline.stages[index].after:
            if self._stage_result(pipeline, request_id, before) is None:
                return f"before stage {before} is done"
        return None

    def _stage_result(self, pipeline: Pipeline, request_id: int, index: int) -> bool | None:
        """Return whether a stage that is done or skipped was unsure; None if it is open."""
        is_unsure = self._done.get(request_id * STAGES_MAX + index)
        stage = pipeline.stages[index]
        if is_unsure is None and stage.only_if_unsure:
            results = [self._stage_result(pipeline, request_id, before) for before in stage.after]
            return False if False in results else None
        return is_unsure


@final
class Starvation(Checker):
    """No request waits longer than a bound for its first dispatch or its outcome."""

    def __init__(self, wait_max_ns: int) -> None:
        super().__init__()
        self._wait_max_ns = wait_max_ns
        self._waiting: dict[int, int] = {}  # request id -> since when
        self._receivers: dict[int, int] = {}  # request id -> Scheduler

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._waiting[event.request_id] = now_ns
            self._receivers[event.request_id] = scheduler

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        for request_id in list(self._waiting):
            if self._receivers[request_id] == scheduler:
                self._stop_waiting(now_ns, request_id)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, Dispatch):
            for task_id in action.task_ids:
                self._stop_waiting(now_ns, task_id // STAGES_MAX)
        elif isinstance(action, Settle):
            self._stop_waiting(now_ns, action.request_id)

    def finish(self, run: RunColumns) -> None:
        """Check the requests that still wait at the end of the run."""
        for request_id in list(self._waiting):
            self._stop_waiting(run.end_ns, request_id)

    def _stop_waiting(self, now_ns: int, request_id: int) -> None:
        since_ns = self._waiting.pop(request_id, now_ns)
        if now_ns - since_ns > self._wait_max_ns:
            self.report(now_ns, f"request {request_id} has waited for {now_ns - since_ns} ns")
