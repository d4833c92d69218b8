"""The driver: owns the Scheduler, and is the only one to speak to it.

A driver of the seam like the simulator's engine, and as small: no decision is made here. Everybody
else posts events to its inbox; once per turn of the event loop it hands them over, what ends work
before what brings work, and carries out what the Scheduler says. The clock is read once per event.

An exception that nobody expected costs what it was about and nothing else. Every action is carried
out by itself: a batch that cannot be sent comes back as refused, an answer that cannot be given is
given as 500. If the Scheduler itself breaks, its state is unknown from then on: the requests that
the event was about are answered with 500, whatever was open then and is open long after as well;
and if it breaks at one kind of event again and again, everything open is answered with 503 and the
gateway ends, to be started again. All of that is logged and counted (`count_fault`).

Everything runs on one event loop, so there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from operator import attrgetter
from pathlib import Path
from time import monotonic_ns
from typing import Final, Protocol, final

from headgate.config import AppConfig, ServeOptions, make_config, without_keys
from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportFault,
    SetTimer,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.errors import ConfigError, DriverError, PolicyError
from headgate.core.event_log import LogHeader
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStopped,
    Refusal,
    RequestArrived,
    RequestCancelled,
    TimerFired,
    TimerKey,
)
from headgate.core.records import STAGES_MAX
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.live.event_log import EventLog, Rotation
from headgate.policies import find_policy

FAULTS_MAX: Final = 10  # of the Scheduler, at one kind of event in a row
_INTERNAL: Final = "an error of the gateway"

_LOG: Final = logging.getLogger(__name__)


class ActionExecutor(Protocol):
    """Who carries out what the Scheduler says."""

    def settle(self, now_ns: int, action: Settle) -> None:
        """Answer a client."""

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        """Send a batch to its worker. Raises only if nothing of it has been sent."""

    def execute(self, action: PlacedAction) -> None:
        """Send a worker any other order."""

    def keep_warm(self, action: KeepWarm) -> None:
        """Have a platform keep instances ready from now on."""

    def open_requests(self) -> Collection[int]:
        """The requests that have no answer yet."""

    def fail(self, request_ids: Collection[int]) -> None:
        """Answer those of them that have no answer yet: 500, a mistake of ours."""

    def abort(self, error: BaseException) -> None:
        """It cannot go on: answer whatever is open with 503, and end."""


Record = Callable[[int, Event, list[Action]], None]
CountFault = Callable[[str], None]


def ignore_fault(kind: str) -> None:
    """Count nothing."""


@final
class Driver:
    """Feeds one Scheduler on one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ActionExecutor,
        loop: asyncio.AbstractEventLoop,
        *,
        record: Record | None = None,
        count_fault: CountFault = ignore_fault,
        recheck_s: float = 120.0,
    ) -> None:
        """`recheck_s`: what was open when the Scheduler broke has so long to be answered."""
        self.scheduler = scheduler
        self._executor = executor
        self._loop = loop
        self._record = record
        self._count_fault = count_fault
        self._recheck_s = recheck_s
        self._inbox: list[Event] = []
        self._is_drain_scheduled = False
        self._timers: dict[TimerKey, tuple[int, asyncio.TimerHandle]] = {}
        self._tasks_in_flight: dict[int, list[int]] = {}  # by batch that is out: its tasks
        self._faults: dict[type[Event], int] = {}  # of the Scheduler, in a row
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._needs_recheck = False  # it has broken again since
        self._is_stopped = False

    def post(self, event: Event) -> None:
        """Have the Scheduler told, before the loop waits again."""
        self._inbox.append(event)
        if not self._is_drain_scheduled:
            self._is_drain_scheduled = True
            self._loop.call_soon(self._drain)

    def stop(self) -> None:
        """Forget all timers and take no more events."""
        self._is_stopped = True
        for _, handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
        if self._recheck_timer is not None:
            self._recheck_timer.cancel()

    def _drain(self) -> None:
        self._is_drain_scheduled = False
        inbox, self._inbox = self._inbox, []
        if len(inbox) > 1:
            inbox.sort(key=_RANK)  # stable: among equals, in the order they came about
        for event in inbox:
            if self._is_stopped:
                return
            self._handle(event)

    def _handle(self, event: Event) -> None:
        """Hand one event over, and carry out what follows from it. Never raises."""
        now_ns = monotonic_ns()
        try:
            actions = self.scheduler.handle(now_ns, event)
        except DriverError as error:
            self._event_rejected(event, error)
            return
        except PolicyError as error:
            # A defect of the policy. What was ordered stands, so the world must hear of it.
            _LOG.error("the policy made a mistake: %s", error, exc_info=error)
            self._count_fault("policy")
            actions = [action for action in error.actions if isinstance(action, Action)]
        except Exception as error:
            self._execute(now_ns, event, self.scheduler.actions_so_far)
            self._scheduler_failed(event, error)
            return
        if self._faults:
            self._faults.pop(type(event), None)
        self._execute(now_ns, event, actions)
        if isinstance(event, BatchFinished):
            self._tasks_in_flight.pop(event.batch_id, None)
        elif not isinstance(event, RequestArrived):
            self._forget_batch(event)

    def _execute(self, now_ns: int, event: Event, actions: list[Action]) -> None:
        if self._record is not None:
            try:
                self._record(now_ns, event, actions)
            except Exception:
                _LOG.exception("the event log ends here; serving goes on")
                self._count_fault("event_log")
                self._record = None
        # Workers first: answering takes a while, and they had better work meanwhile.
        executor = self._executor
        settled: list[Settle] = []
        for action in actions:
            try:
                if isinstance(action, Settle):
                    settled.append(action)
                elif isinstance(action, Dispatch):
                    self._tasks_in_flight[action.batch_id] = action.task_ids
                    executor.dispatch(now_ns, action)
                elif isinstance(action, SetTimer):
                    self._set_timer(now_ns, action.key, action.at_ns)
                elif isinstance(action, CancelTimer):
                    self._cancel_timer(action.key)
                elif isinstance(action, KeepWarm):
                    executor.keep_warm(action)
                elif isinstance(action, PlacedAction):
                    executor.execute(action)
                else:
                    assert isinstance(action, ReportFault)  # for the log; the error has been told
            except Exception:
                self._action_failed(action)
        for settle in settled:
            try:
                executor.settle(now_ns, settle)
            except Exception:
                self._action_failed(settle)

    def _forget_batch(self, event: Event) -> None:
        """A batch is not out any more."""
        if isinstance(event, BatchFailed | BatchLost | BatchRefused):
            self._tasks_in_flight.pop(event.batch_id, None)
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._tasks_in_flight.pop(event.key[1], None)

    # --- what should never happen --------------------------------------------------------------

    def _action_failed(self, action: Action) -> None:
        """Have what could not be carried out end, so that nothing waits for it."""
        kind = type(action).__name__
        _LOG.exception("%s could not be carried out", kind)
        self._count_fault(_FAULT_KINDS.get(kind, "order"))
        if isinstance(action, Settle):
            self._fail([action.request_id])
        elif isinstance(action, Dispatch):
            self.post(BatchRefused(action.batch_id, Refusal.BUSY))
        elif isinstance(action, StartInstance | StopInstance):
            self.post(InstanceStopped(action.instance_id, _INTERNAL))

    def _event_rejected(self, event: Event, error: DriverError) -> None:
        """An event that cannot have happened: a defect of ours, or a worker that tells stories.

        It has changed nothing. But a request that the Scheduler does not take is never settled.
        """
        _LOG.error("an event that cannot have happened: %s", error)
        self._count_fault("event")
        if isinstance(event, RequestArrived):
            self._fail([event.request_id])

    def _scheduler_failed(self, event: Event, error: Exception) -> None:
        kind = type(event)
        _LOG.error("the Scheduler broke at %s", kind.__name__, exc_info=error)
        self._count_fault("scheduler")
        faults = self._faults[kind] = self._faults.get(kind, 0) + 1
        if faults >= FAULTS_MAX:
            _LOG.critical(
                "the Scheduler broke %d times in a row at %s: the gateway ends, to begin anew",
                faults,
                kind.__name__,
            )
            self.stop()
            self._executor.abort(error)
            return
        request_ids = self._requests_of(event)
        self._forget_batch(event)
        # Cancelling it is what broke: once more would break once more.
        self._fail(request_ids, cancels=not isinstance(event, RequestCancelled))
        if self._recheck_timer is None:
            self._schedule_recheck()
        else:
            self._needs_recheck = True

    def _requests_of(self, event: Event) -> list[int]:
        """The requests that an event is about."""
        if isinstance(event, RequestArrived | RequestCancelled):
            return [event.request_id]
        batch_id = None
        if isinstance(event, TimerFired):
            name, number = event.key
            if name == "deadline":
                return [number]
            batch_id = number if name == "lost" else None
        elif isinstance(event, BatchFinished | BatchFailed | BatchLost | BatchRefused):
            batch_id = event.batch_id
        tasks = () if batch_id is None else self._tasks_in_flight.get(batch_id, ())
        return [task_id // STAGES_MAX for task_id in tasks]

    def _schedule_recheck(self) -> None:
        """Look again later at what is open now: the Scheduler may have forgotten some of it."""
        self._needs_recheck = False
        request_ids = list(self._executor.open_requests())
        self._recheck_timer = self._loop.call_later(
            self._recheck_s, self._fail_forgotten, request_ids
        )

    def _fail_forgotten(self, request_ids: list[int]) -> None:
        self._recheck_timer = None
        left = set(self._executor.open_requests()).intersection(request_ids)
        if left:
            _LOG.error("%d requests were forgotten when the Scheduler broke", len(left))
            self._fail(sorted(left))
        if self._needs_recheck:
            self._schedule_recheck()

    def _fail(self, request_ids: list[int], *, cancels: bool = True) -> None:
        """Answer requests, and have the Scheduler let go of those that it knows."""
        try:
            self._executor.fail(request_ids)
        except Exception:
            _LOG.exception("requests could not be answered")
            self._count_fault("answer")
        for request_id in request_ids:
            if cancels and request_id in self.scheduler.view.requests:
                self.post(RequestCancelled(request_id))

    # --- timers --------------------------------------------------------------------------------

    def _set_timer(self, now_ns: int, key: TimerKey, at_ns: int) -> None:
        self._cancel_timer(key)
        delay_s = max(0, at_ns - now_ns) / 1e9
        self._timers[key] = (at_ns, self._loop.call_later(delay_s, self._fire, key))

    def _cancel_timer(self, key: TimerKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer[1].cancel()

    def _fire(self, key: TimerKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is None:
            return
        now_ns = monotonic_ns()
        if now_ns < timer[0]:  # the loop counts in milliseconds and may round down
            self._set_timer(now_ns, key, timer[0])
        else:
            self.post(TimerFired(key))


_RANK: Final = attrgetter("rank")
# By action, where it is not just any order.
_FAULT_KINDS: Final = {
    "Settle": "settle",
    "Dispatch": "dispatch",
    "KeepWarm": "keep_warm",
    "SetTimer": "timer",
    "CancelTimer": "timer",
}


# Makes the Scheduler of an application, and the recording of what it decides.


SEED: Final = 0
FLUSH_EVERY_S: Final = 0.25


def make_scheduler(app_config: AppConfig) -> tuple[Scheduler, LogHeader]:
    """Return a Scheduler under the policy that the application names, and the header of its log."""
    policy = app_config.policy
    kind = find_policy(policy.name)
    config = make_config(kind.config, policy.settings, "policy")
    scheduler = Scheduler(app_config.app, kind, config, rng=stream(SEED, "policy/0"))
    return scheduler, LogHeader(without_keys(app_config.spec), policy.name, policy.settings, SEED)


@final
class EventLogTask:
    """The event log of a gateway, if it is to have one, written now and then."""

    def __init__(self, path: Path | None, serve: ServeOptions, *, is_required: bool) -> None:
        """`is_required`: it cannot be served without the log, as at the first start of a server."""
        self._path = path
        self._rotation = Rotation(serve.log_size_bytes, serve.log_age_ns, serve.log_keep)
        self._is_required = is_required
        self._log: EventLog | None = None
        self._flusher: asyncio.Task[None] | None = None

    def begin(self, header: LogHeader) -> Record | None:
        """Open the log; return who writes down what is decided.

        Raises `ConfigError` if it cannot be opened and is required. A gateway that is started again
        had better serve without its log than not at all.
        """
        if self._path is None:
            return None
        try:
            log = self._log = EventLog(self._path, header, self._rotation)
        except ConfigError as error:
            if self._is_required:
                raise
            _LOG.error("there is no event log from here on: %s; serving goes on", error)
            return None
        self._flusher = asyncio.create_task(_flush(log))
        return log.record

    def close(self) -> None:
        """Say that nothing is missing."""
        if self._flusher is not None:
            self._flusher.cancel()
        if self._log is not None:
            self._log.close()


async def _flush(log: EventLog) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        log.flush()
