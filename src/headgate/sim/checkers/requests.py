"""Checkers of requests: each ends once, honestly, in the order of its stages, and in time."""

from __future__ import annotations

from collections import Counter
from typing import final

from headgate.core.actions import Action, Dispatch, Settle
from headgate.core.clock import NEVER_NS
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    RequestArrived,
    RequestCancelled,
    TimerFired,
)
from headgate.core.model import App, Pipeline
from headgate.core.records import STAGES_MAX
from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.metrics.columns import RunColumns
from headgate.sim.checkers.checker import Checker


@final
class Conservation(Checker):
    """Every request that arrives is settled exactly once, by the Scheduler it came to."""

    def __init__(self, *, thinks: bool = False) -> None:
        super().__init__()
        self._thinks = thinks
        self._arrived: dict[int, int] = {}  # request id -> Scheduler
        self._settled: dict[int, tuple[int, int]] = {}  # request id -> (when, how)

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Requests arrive once."""
        if isinstance(event, RequestArrived):
            if event.request_id in self._arrived:
                self.blame(now_ns, f"request {event.request_id} arrived twice")
            self._arrived[event.request_id] = scheduler

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Requests are settled once, and not before they have arrived."""
        if not isinstance(action, Settle):
            return
        request_id = action.request_id
        if request_id in self._settled:
            self.blame(now_ns, f"request {request_id} is settled twice")
        elif request_id not in self._arrived:
            self.blame(now_ns, f"request {request_id} is settled and never arrived")
        elif self._arrived[request_id] != scheduler:
            self.blame(now_ns, f"request {request_id} is settled by Scheduler {scheduler}")
        self._settled[request_id] = (now_ns, action.outcome)

    def finish(self, run: RunColumns) -> None:
        """Nothing is left open, and the columns say the same."""
        rows = run.requests
        if len(rows) != len(self._arrived):
            self.blame(run.end_ns, f"{len(self._arrived)} requests have {len(rows)} rows")
        for request_id in self._arrived:
            if request_id not in self._settled:
                self.blame(run.end_ns, f"request {request_id} was never settled")
                continue
            settled_ns, outcome = self._settled[request_id]
            if request_id >= len(rows):
                self.blame(run.end_ns, f"request {request_id} has no row")
            elif rows.outcome[request_id] != outcome or (
                rows.finished_ns[request_id] != settled_ns and not self._thinks
            ):
                self.blame(settled_ns, f"request {request_id} is written down otherwise")


@final
class Deadlines(Checker):
    """MET is in time and LATE is not; CANCELLED was asked for; REJECTED never went out."""

    def __init__(self, app: App, *, thinks: bool = False) -> None:
        super().__init__()
        self._app = app
        self._thinks = thinks
        self._deadline_ns: dict[int, int] = {}  # request id -> its deadline
        self._withdrawn: set[int] = set()
        self._sent: set[int] = set()

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """A deadline is computed once, at arrival."""
        if isinstance(event, RequestArrived):
            slo = self._app.pipelines[event.pipeline].slo
            self._deadline_ns[event.request_id] = event.deadline_ns or slo.deadline_ns(now_ns)
        elif isinstance(event, RequestCancelled):
            self._withdrawn.add(event.request_id)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Compare the outcome with the clock and with what happened."""
        if isinstance(action, Dispatch):
            self._sent.update(task_id // STAGES_MAX for task_id in action.task_ids)
        elif isinstance(action, Settle):
            request_id, outcome = action.request_id, action.outcome
            is_late = now_ns > self._deadline_ns.get(request_id, NEVER_NS)
            if (
                (outcome == Outcome.MET and is_late)
                or (outcome == Outcome.LATE and not is_late)
                or (outcome == Outcome.CANCELLED and request_id not in self._withdrawn)
                or (outcome == Outcome.REJECTED and request_id in self._sent)
            ):
                name = OUTCOME_NAMES[outcome]
                self.blame(now_ns, f"request {request_id} cannot be called {name}")

    def finish(self, run: RunColumns) -> None:
        """What was written down agrees with itself. Decisions that take time make answers later."""
        rows = run.requests
        is_late = rows.finished_ns > rows.deadline_ns
        wrong = ((rows.outcome == Outcome.MET) & is_late & (not self._thinks)) | (
            (rows.outcome == Outcome.LATE) & ~is_late
        )
        for request_id in wrong.nonzero()[0].tolist():
            name = OUTCOME_NAMES[rows.outcome[request_id]]
            self.blame(int(rows.finished_ns[request_id]), f"request {request_id} is not {name}")


@final
class GivingUp(Checker):
    """A request that gives up at its deadline is not begun after it, nor begun again.

    What runs then may end and be late, and so may its other branches; so nothing is said about a
    request that has anything out. Where decisions take time, the deadline may be heard of late.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._deadline_ns: dict[int, int] = {}  # request id -> when it gives up
        self._out: dict[int, list[int]] = {}  # batch id -> request ids
        self._running: Counter[int] = Counter()  # request id -> tasks that are out

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Requests come; batches end."""
        if isinstance(event, RequestArrived):
            slo = self._app.pipelines[event.pipeline].slo
            if slo.is_hard:
                deadline_ns = event.deadline_ns or slo.deadline_ns(now_ns)
                self._deadline_ns[event.request_id] = deadline_ns
        elif isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            self._end(event.batch_id)
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._end(event.key[1])

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Nothing goes out for a request that should have been given up."""
        if isinstance(action, Dispatch):
            requests = [task_id // STAGES_MAX for task_id in action.task_ids]
            for request_id in requests:
                is_over = now_ns > self._deadline_ns.get(request_id, NEVER_NS)
                if is_over and not self._running[request_id]:
                    self.blame(now_ns, f"request {request_id} should have been given up")
            self._out[action.batch_id] = requests
            self._running.update(requests)

    def _end(self, batch_id: int) -> None:
        self._running.subtract(self._out.pop(batch_id, ()))


@final
class Stages(Checker):
    """A task goes out when all before it are done, not again when it is, and never for nothing.

    A request is answered (MET or LATE) when every stage is done, or was skipped because a stage
    before it was sure.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._open: dict[int, Pipeline] = {}  # request id -> what it asked for
        self._done: dict[int, bool] = {}  # task id -> whether its answer was unsure
        self._out: dict[int, list[int]] = {}  # batch id -> task ids

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Tasks are done when a batch finishes that nobody has given up."""
        if isinstance(event, RequestArrived):
            self._open[event.request_id] = self._app.pipelines[event.pipeline]
        elif isinstance(event, BatchFinished):
            for task_id in self._out.pop(event.batch_id, ()):
                if task_id not in event.too_large:
                    self._done.setdefault(task_id, task_id in event.unsure)
        elif isinstance(event, BatchFailed | BatchRefused | BatchLost):
            self._out.pop(event.batch_id, None)
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._out.pop(event.key[1], None)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Only what is ready goes out, only what is complete is an answer."""
        if isinstance(action, Dispatch):
            for task_id in action.task_ids:
                problem = self._problem(task_id)
                if problem is not None:
                    self.blame(now_ns, f"task {task_id} is dispatched {problem}")
            self._out[action.batch_id] = action.task_ids
        elif isinstance(action, Settle):
            pipeline = self._open.pop(action.request_id, None)
            if pipeline is not None and action.outcome in (Outcome.MET, Outcome.LATE):
                for index in range(len(pipeline.stages)):
                    if self._fate(pipeline, action.request_id, index) is None:
                        self.blame(now_ns, f"request {action.request_id} lacks stage {index}")

    def _problem(self, task_id: int) -> str | None:
        request_id, index = divmod(task_id, STAGES_MAX)
        pipeline = self._open.get(request_id)
        if pipeline is None:
            return "before it has arrived, or after it was settled"
        if self._fate(pipeline, request_id, index) is not None:
            return "though it is done or was skipped"
        for before in pipeline.stages[index].after:
            if self._fate(pipeline, request_id, before) is None:
                return f"before stage {before} is done"
        return None

    def _fate(self, pipeline: Pipeline, request_id: int, index: int) -> bool | None:
        """Whether a stage that is over was unsure; None if it is not over."""
        is_unsure = self._done.get(request_id * STAGES_MAX + index)
        stage = pipeline.stages[index]
        if is_unsure is None and stage.only_if_unsure:
            fates = [self._fate(pipeline, request_id, before) for before in stage.after]
            return False if False in fates else None
        return is_unsure


@final
class Starvation(Checker):
    """No request waits longer than a bound for its first dispatch, or for its end."""

    def __init__(self, wait_max_ns: int) -> None:
        super().__init__()
        self._wait_max_ns = wait_max_ns
        self._waiting: dict[int, int] = {}  # request id -> since when

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """It begins to wait."""
        if isinstance(event, RequestArrived):
            self._waiting[event.request_id] = now_ns

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """It waits no longer."""
        if isinstance(action, Dispatch):
            for task_id in action.task_ids:
                self._stop_waiting(now_ns, task_id // STAGES_MAX)
        elif isinstance(action, Settle):
            self._stop_waiting(now_ns, action.request_id)

    def finish(self, run: RunColumns) -> None:
        """Those who still wait have waited until now."""
        for request_id in list(self._waiting):
            self._stop_waiting(run.end_ns, request_id)

    def _stop_waiting(self, now_ns: int, request_id: int) -> None:
        since_ns = self._waiting.pop(request_id, now_ns)
        if now_ns - since_ns > self._wait_max_ns:
            self.blame(now_ns, f"request {request_id} has waited for {now_ns - since_ns} ns")
