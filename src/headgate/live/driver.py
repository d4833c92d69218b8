"""The driver: owns the Scheduler and is the only caller of it.

Like the engine of the simulator it is a small driver of the seam and decides nothing. Everyone else
posts events to its inbox. Once per iteration of the event loop it passes the events to the
Scheduler, those that end work before those that bring work, and of the latter a few at a time, and
executes the returned actions. The clock is read once per event.

Unexpected exceptions are contained. Each action is executed by itself: a batch that cannot be sent
is reported as refused, and a response that cannot be delivered becomes a 500. If the Scheduler
itself raises, its state is unknown from then on. The requests that the event concerned are answered
with 500; requests that were open at that moment and are still open after `recheck_s` are answered
with 500 as well. If the Scheduler raises `FAULTS_MAX` times in a row at one kind of event, all open
requests are answered with 503 and the gateway exits, to be restarted. All of this is logged and
counted (`count_fault`).

Everything runs on one event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from pathlib import Path
from time import monotonic_ns
from typing import Final, Protocol, final

from headgate.config import AppConfig, ServeSpec, make_config, without_keys
from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportFault,
    ReportWouldReject,
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

ARRIVALS_PER_TURN: Final = 4  # new requests that are decided about before workers are heard again
FAULTS_MAX: Final = 10  # consecutive exceptions of the Scheduler at one kind of event
SEED: Final = 0
FLUSH_EVERY_S: Final = 0.25
_INTERNAL: Final = "internal error of the gateway"
_LOG: Final = logging.getLogger(__name__)
Record = Callable[[int, Event, list[Action]], None]
CountFault = Callable[[str], None]


def ignore_fault(kind: str) -> None:
    """Do not count faults."""


class ActionExecutor(Protocol):
    """Executes the actions of the Scheduler."""

    def settle(self, now_ns: int, action: Settle) -> None:
        """Send the response of a request."""

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        """Send a batch to its worker. Raises only if nothing of the batch has been sent."""

    def execute(self, action: PlacedAction) -> None:
        """Send any other action to its worker."""

    def count_would_reject(self, action: ReportWouldReject) -> None:
        """Count a request that would have been rejected if admission were enforced."""

    def keep_warm(self, action: KeepWarm) -> None:
        """Keep this many instances of a FaaS pool warm from now on."""

    def open_requests(self) -> Collection[int]:
        """Return the requests without a response."""

    def fail(self, request_ids: Collection[int]) -> None:
        """Answer requests that are still open with 500, after a defect of the gateway."""

    def abort(self, error: BaseException) -> None:
        """Answer all open requests with 503 and shut down."""


@final
@dataclass(eq=False)
class Driver:
    """Drives one Scheduler on one event loop."""

    scheduler: Scheduler
    executor: ActionExecutor
    loop: asyncio.AbstractEventLoop
    _: KW_ONLY
    record: Record | None = None
    count_fault: CountFault = ignore_fault
    recheck_s: float = 120.0  # requests open when the Scheduler raised may stay open this long

    def __post_init__(self) -> None:
        self._inbox: list[Event] = []  # without new requests, of which there may be many
        self._arrivals: list[RequestArrived] = []  # those, by number
        self._is_drain_scheduled = False
        self._timers: dict[TimerKey, tuple[int, asyncio.TimerHandle]] = {}
        self._tasks_in_flight: dict[int, list[int]] = {}  # by batch in flight: its tasks
        self._faults: dict[type[Event], int] = {}  # consecutive exceptions of the Scheduler
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._needs_recheck = False  # the Scheduler raised again after the recheck was scheduled
        self.is_stopped = False

    def post(self, event: Event) -> None:
        """Queue an event for the Scheduler, to be handled before the loop blocks again."""
        if isinstance(event, RequestArrived):
            self._arrivals.append(event)
        else:
            self._inbox.append(event)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._is_drain_scheduled:
            self._is_drain_scheduled = True
            self.loop.call_soon(self._drain)

    def stop(self) -> None:
        """Cancel all timers and drop all further events."""
        self.is_stopped = True
        for _, handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
        if self._recheck_timer is not None:
            self._recheck_timer.cancel()

    def _drain(self) -> None:
        """Handle the events that have been posted, and of many new requests the first ones.

        The others wait for the next turn of the loop, which reads first what workers have to say.
        Where clients send more than the gateway can decide about, what is admitted would otherwise
        wait at every stage for all that is refused, be late, and leave nothing to admit.
        """
        self._is_drain_scheduled = False
        turn: list[Event] = [*self._arrivals[:ARRIVALS_PER_TURN], *self._inbox]
        del self._arrivals[:ARRIVALS_PER_TURN]
        self._inbox = []
        if len(turn) > 1:
            turn.sort(key=_RANK)  # a stable sort: requests arrive before they are cancelled
        for event in turn:
            if self.is_stopped:
                return
            if isinstance(event, RequestCancelled) and self._is_waiting(event.request_id):
                self._inbox.append(event)
            else:
                self._handle(event)
        if self._arrivals:
            self._schedule_drain()

    def _is_waiting(self, request_id: int) -> bool:
        """Whether the Scheduler has not been told of a request yet."""
        return bool(self._arrivals) and request_id >= self._arrivals[0].request_id

    def _handle(self, event: Event) -> None:
        """Pass one event to the Scheduler and execute the resulting actions. Never raises."""
        now_ns = monotonic_ns()
        try:
            actions = self.scheduler.handle(now_ns, event)
        except DriverError as error:
            self._event_rejected(event, error)
            return
        except PolicyError as error:
            # A defect of the policy. The actions issued before the error stand and must be
            # executed, or workers and Scheduler would disagree.
            _LOG.error("the policy raised an error: %s", error, exc_info=error)
            self.count_fault("policy")
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
        if self.record is not None:
            try:
                self.record(now_ns, event, actions)
            except Exception:
                _LOG.exception("the event log failed and ends here; serving continues")
                self.count_fault("event_log")
                self.record = None
        # Dispatches first and responses last: workers run while responses are written.
        executor = self.executor
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
                elif isinstance(action, ReportWouldReject):
                    executor.count_would_reject(action)
                else:
                    # Recorded in the event log; the error was logged above.
                    assert isinstance(action, ReportFault)
            except Exception:
                self._action_failed(action)
        for settle in settled:
            try:
                executor.settle(now_ns, settle)
            except Exception:
                self._action_failed(settle)

    def _forget_batch(self, event: Event) -> None:
        """Forget the tasks of a batch that is no longer in flight."""
        batch_id = _batch_of(event)
        if batch_id is not None:
            self._tasks_in_flight.pop(batch_id, None)

    def _action_failed(self, action: Action) -> None:
        """Report the failed action as ended, so that nothing waits for it."""
        kind = type(action).__name__
        _LOG.exception("the action %s failed", kind)
        self.count_fault(_FAULT_KINDS.get(kind, "order"))
        if isinstance(action, Settle):
            self._fail([action.request_id])
        elif isinstance(action, Dispatch):
            self.post(BatchRefused(action.batch_id, Refusal.BUSY))
        elif isinstance(action, StartInstance | StopInstance):
            self.post(InstanceStopped(action.instance_id, _INTERNAL))

    def _event_rejected(self, event: Event, error: DriverError) -> None:
        """Handle an event that the Scheduler rejects: a defect of the driver or of a worker.

        The event has changed no state. A request that the Scheduler rejects would never be settled,
        so it is answered here.
        """
        _LOG.error("the Scheduler rejected an event: %s", error)
        self.count_fault("event")
        if isinstance(event, RequestArrived):
            self._fail([event.request_id])

    def _scheduler_failed(self, event: Event, error: Exception) -> None:
        kind = type(event)
        _LOG.error("the Scheduler failed at %s", kind.__name__, exc_info=error)
        self.count_fault("scheduler")
        faults = self._faults[kind] = self._faults.get(kind, 0) + 1
        if faults >= FAULTS_MAX:
            _LOG.critical(
                "the Scheduler failed %d times in a row at %s: the gateway exits and is restarted",
                faults,
                kind.__name__,
            )
            self.stop()
            self.executor.abort(error)
            return
        request_ids = self._requests_of(event)
        self._forget_batch(event)
        # If the cancellation itself raised, cancelling again would raise again.
        self._fail(request_ids, cancels=not isinstance(event, RequestCancelled))
        if self._recheck_timer is None:
            self._schedule_recheck()
        else:
            self._needs_recheck = True

    def _requests_of(self, event: Event) -> list[int]:
        if isinstance(event, RequestArrived | RequestCancelled):
            return [event.request_id]
        if isinstance(event, TimerFired) and event.key[0] == "deadline":
            return [event.key[1]]
        batch_id = _batch_of(event)
        tasks = () if batch_id is None else self._tasks_in_flight.get(batch_id, ())
        return [task_id // STAGES_MAX for task_id in tasks]

    def _schedule_recheck(self) -> None:
        """Check the requests that are open now again later: the Scheduler may have lost some."""
        self._needs_recheck = False
        request_ids = list(self.executor.open_requests())
        self._recheck_timer = self.loop.call_later(
            self.recheck_s, self._fail_forgotten, request_ids
        )

    def _fail_forgotten(self, request_ids: list[int]) -> None:
        self._recheck_timer = None
        lost = set(self.executor.open_requests()).intersection(request_ids)
        if lost:
            _LOG.error("%d requests were lost when the Scheduler failed", len(lost))
            self._fail(sorted(lost))
        if self._needs_recheck:
            self._schedule_recheck()

    def _fail(self, request_ids: list[int], *, cancels: bool = True) -> None:
        """Answer requests with 500 and cancel those that the Scheduler knows."""
        try:
            self.executor.fail(request_ids)
        except Exception:
            _LOG.exception("requests could not be answered")
            self.count_fault("answer")
        for request_id in request_ids:
            if cancels and request_id in self.scheduler.view.requests:
                self.post(RequestCancelled(request_id))

    def _set_timer(self, now_ns: int, key: TimerKey, at_ns: int) -> None:
        self._cancel_timer(key)
        delay_s = max(0, at_ns - now_ns) / 1e9
        self._timers[key] = (at_ns, self.loop.call_later(delay_s, self._fire, key))

    def _cancel_timer(self, key: TimerKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer[1].cancel()

    def _fire(self, key: TimerKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is None:
            return
        now_ns = monotonic_ns()
        if now_ns < timer[0]:  # the event loop counts milliseconds and may round down
            self._set_timer(now_ns, key, timer[0])
        else:
            self.post(TimerFired(key))


def _batch_of(event: Event) -> int | None:
    """Return the batch that an event ends; None if it ends none."""
    if isinstance(event, BatchFinished | BatchFailed | BatchLost | BatchRefused):
        return event.batch_id
    return event.key[1] if isinstance(event, TimerFired) and event.key[0] == "lost" else None


@dataclass(frozen=True, slots=True)
class Membership:
    """Which of the gateways this one is.

    `slot` is its place among those that run now: its name. `index` is never given to another one:
    its ids follow from it. `count` is the number that serve when it begins to, itself included.
    """

    slot: int = 0
    index: int = 0
    count: int = 1


def make_scheduler(app_config: AppConfig, index: int) -> tuple[Scheduler, LogHeader]:
    """Return a Scheduler with the policy of the application, and the header of its event log.

    It takes all gateways of the application to be there.
    """
    policy = app_config.policy
    kind = find_policy(policy.name)
    config = make_config(kind.config, policy.settings, "policy")
    peers = app_config.serve.gateways
    rng = stream(SEED, f"policy/{index}")
    scheduler = Scheduler(app_config.app, kind, config, rng=rng, index=index, peers=peers)
    spec = without_keys(app_config.spec)
    return scheduler, LogHeader(spec, policy.name, policy.settings, SEED, index, peers)


@final
class EventLogTask:
    """The optional event log of a gateway, flushed periodically."""

    def __init__(self, path: Path | None, serve: ServeSpec, *, is_required: bool) -> None:
        """`is_required`: a log that cannot be opened is an error, as at a server's first start."""
        self._path = path
        self._rotation = Rotation(serve.log_size_bytes, serve.log_age_ns, serve.log_keep)
        self._is_required = is_required
        self._log: EventLog | None = None
        self._flusher: asyncio.Task[None] | None = None

    def begin(self, header: LogHeader) -> Record | None:
        """Open the log and return the function that records events.

        Raises `ConfigError` if the log cannot be opened and is required. A restarted gateway serves
        without its log rather than not at all.
        """
        if self._path is None:
            return None
        try:
            log = self._log = EventLog(self._path, header, self._rotation)
        except ConfigError as error:
            if self._is_required:
                raise
            _LOG.error("the event log cannot be opened: %s; serving continues without it", error)
            return None
        self._flusher = asyncio.create_task(_flush(log))
        return log.record

    def close(self) -> None:
        """Write the end mark and close the log."""
        if self._flusher is not None:
            self._flusher.cancel()
        if self._log is not None:
            self._log.close()


async def _flush(log: EventLog) -> None:
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        log.flush()


_RANK: Final = attrgetter("rank")
# Kind of fault by type of action; all other actions are `order`.
_FAULT_KINDS: Final = {
    "Settle": "settle",
    "Dispatch": "dispatch",
    "KeepWarm": "keep_warm",
    "SetTimer": "timer",
    "CancelTimer": "timer",
}
