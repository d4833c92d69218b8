"""A remote pool, as the event loop of the gateway sees it, with its keep-warm and its nodes.

Calls run in threads, and each results in exactly one event. A call that exceeds its timeout is
reported lost, because nobody knows whether it has run; a late reply is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from http import HTTPStatus
from time import monotonic_ns
from typing import Final, Protocol, TypeAlias, final

from headgate.core.actions import (
    Dispatch,
    EvictWeights,
    LoadWeights,
    PlacedAction,
    StartInstance,
    StopInstance,
)
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.errors import error_text
from headgate.core.events import (
    BatchFailed,
    BatchLost,
    BatchRefused,
    InstanceStarted,
    InstanceStopped,
    Refusal,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App, FaasPlatform, Function, Pool
from headgate.core.records import STAGES_MAX
from headgate.core.view import View
from headgate.functions.tensor import ITEM_BYTES, Signature, TaskInputs, TaskResult, Tensor
from headgate.live.call import Call
from headgate.live.deployment import NodeSpec
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.json import element_count, holds_strings, memoryview_of
from headgate.live.ipc.messages import BatchListener, BatchRan
from headgate.system.threads import BlockingCalls

Shares: TypeAlias = tuple[tuple[int, int, int], ...]  # (pipeline, client, items) of each request
OnColdStart = Callable[[str, int], None]  # function and duration of a cold start
GRACE_NS: Final = 1_000_000_000  # how long after its deadline a reply is still accepted
RETRY_S: Final = 0.5  # between pings of a node that is down
WARNING_INTERVAL_S: Final = 5.0  # per pool
# How long `stop` waits for the removal of provisioned instances, which would be billed on.
DEPROVISION_WAIT_S: Final = 3.0
UNKEPT_EVERY_S: Final = 60.0  # between requests for provisioned instances where no other stays warm
POLL_S: Final = 0.01
OUTCOMES: Final = ("finished", "failed", "refused", "throttled", "lost")
_LIMITS: Final = GatewayConfig()
_ERROR_STATUSES: Final = frozenset(status.value for status in HTTPStatus if status.value >= 400)
_NAME_MAX: Final = 80  # characters of a name in an error
_LOG: Final = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A batch to run on a remote pool: the tasks, their deadline, and on whose behalf."""

    batch_id: int
    variant_id: int
    function: str
    pool_id: int
    node_id: int | None
    tasks: list[TaskInputs]
    deadline_ns: int  # the latest deadline of its requests
    is_hard: bool  # the results are worthless after the deadline
    traceparent: str | None
    tenant: str | None
    shares: Shares

    def time_left_ms(self, now_ns: int) -> float | None:
        """Return the time until the deadline; None if there is none."""
        if self.deadline_ns >= NEVER_NS:
            return None
        return (self.deadline_ns - now_ns) / MILLISECOND_NS


def make_remote_call(
    view: View, action: Dispatch, tasks: list[TaskInputs], calls: Mapping[int, Call]
) -> RemoteCall:
    """Return a dispatched batch as a remote call. `calls` are the open calls by request id.

    `tasks` are those of its tasks whose calls are open: a call may be answered after a fault.
    """
    app = view.app
    batch_calls = [calls[task.task_id // STAGES_MAX] for task in tasks]
    ids = {call.request_id for call in batch_calls}
    requests = [view.requests[id] for id in ids if id in view.requests]
    tenants = {call.client_id for call in batch_calls}
    return RemoteCall(
        action.batch_id,
        action.variant_id,
        app.functions[app.variants[action.variant_id].function_id].name,
        action.pool_id,
        action.node_id,
        tasks,
        max((request.deadline_ns for request in requests), default=NEVER_NS),
        bool(requests) and all(request.is_hard for request in requests),
        traceparent_of(batch_calls),
        app.clients[tenants.pop()].name if len(tenants) == 1 else None,
        tuple((call.pipeline_id, call.client_id, call.items) for call in batch_calls),
    )


def traceparent_of(calls: Sequence[Call]) -> str | None:
    """Return the `traceparent` of the first traced call, in the format of the W3C header."""
    for call in calls:
        trace = call.trace
        if isinstance(trace, bytes):
            return trace.decode("ascii", "replace")
        context_of = getattr(trace, "get_span_context", None)  # an OpenTelemetry span
        if context_of is not None:
            context = context_of()
            flags = int(context.trace_flags)
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
    return None


@final
@dataclass(frozen=True, slots=True)
class Done:
    """The call ran, and each task has a result."""

    results: list[TaskResult]
    took_ns: int  # as reported by the platform
    is_cold: bool = False


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """The call ran, or may have, and the platform reports a failure."""

    reason: str


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """The call has not run: `reason` is a `Refusal`."""

    reason: int
    message: str


@final
@dataclass(frozen=True, slots=True)
class Lost:
    """It is unknown whether the call ran."""

    message: str
    node_died: bool = False  # the process that ran it died: one of its tasks may be the reason


CallResult: TypeAlias = Done | Failed | Refused | Lost


class CostSink(Protocol):
    """Receives the cost of calls and of keep-warm."""

    def on_call_billed(self, pool_id: int, shares: Shares, took_ns: int) -> None:
        """Bill one call with its duration."""

    def on_keep_warm_billed(self, pool_id: int, function: str, usd: float) -> None:
        """Bill the cost of keeping instances of a function warm."""


def _failed(error: BaseException) -> CallResult:
    """Return the result of a call that raised, which is a defect: whether it ran is unknown."""
    return Failed(error_text(error))


@final
@dataclass(eq=False)
class RemotePool:
    """Sends calls to one pool."""

    pool: Pool
    call: Callable[[RemoteCall], CallResult]
    listener: BatchListener
    costs: CostSink
    on_cold_start: OnColdStart
    threads: BlockingCalls
    _: KW_ONLY
    hang_ns: int

    def __post_init__(self) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))  # by `OUTCOMES`
        self.running: Counter[str] = Counter()  # calls in flight by function
        # The target does not exist or denies access.
        self.on_unreachable: Callable[[RemoteCall], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[int, tuple[RemoteCall, int, asyncio.TimerHandle]] = {}  # by batch
        self._next_warning_s = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def send(self, now_ns: int, call: RemoteCall) -> None:
        """Run a batch. It results in exactly one event, later."""
        if not self.threads.free:
            problem = f"{self.threads.count_max} calls are in flight already"
            self._finish(call, Refused(Refusal.THROTTLED, problem), 0)
            return
        limit_ns = self.hang_ns
        if call.is_hard:
            limit_ns = min(limit_ns, max(0, call.deadline_ns - now_ns) + GRACE_NS)
        timer = self._loop.call_later(limit_ns / 1e9, self._time_out, call.batch_id)
        self._in_flight[call.batch_id] = (call, now_ns, timer)
        self.running[call.function] += 1
        done = partial(self._end, call.batch_id)
        self.threads.submit(partial(self.call, call), done, _failed)

    def warn(self, text: str) -> None:
        """Log a warning about the pool, rate-limited: repetitions are logged at debug level."""
        now_s = self._loop.time()
        is_due = now_s >= self._next_warning_s
        if is_due:
            self._next_warning_s = now_s + WARNING_INTERVAL_S
        _LOG.log(logging.WARNING if is_due else logging.DEBUG, "pool %s: %s", self.pool.name, text)

    def stop(self) -> None:
        """Forget the calls in flight."""
        for _, _, timer in self._in_flight.values():
            timer.cancel()
        self._in_flight.clear()
        self.threads.stop()

    def _time_out(self, batch_id: int) -> None:
        self._end(batch_id, Lost("no response in time"))

    def _end(self, batch_id: int, outcome: CallResult) -> None:
        sent = self._in_flight.pop(batch_id, None)
        if sent is None:
            return  # timed out before
        call, sent_ns, timer = sent
        timer.cancel()
        self.running[call.function] -= 1
        self._finish(call, outcome, monotonic_ns() - sent_ns)

    def _finish(self, call: RemoteCall, outcome: CallResult, round_trip_ns: int) -> None:
        listener = self.listener
        if isinstance(outcome, Done):
            self._finish_done(call, outcome, round_trip_ns)
            return
        if isinstance(outcome, Refused):
            is_throttled = outcome.reason == Refusal.THROTTLED
            self.outcomes["throttled" if is_throttled else "refused"] += 1
            listener.on_event(BatchRefused(call.batch_id, outcome.reason))
            if outcome.reason == Refusal.GONE:
                self.warn(outcome.message)
                if self.on_unreachable is not None:
                    self.on_unreachable(call)
            return
        # An upper bound of what is billed.
        self.costs.on_call_billed(self.pool.id, call.shares, round_trip_ns)
        if isinstance(outcome, Failed):
            self.outcomes["failed"] += 1
            self.warn(outcome.reason)
            listener.on_event(BatchFailed(call.batch_id, outcome.reason))
        else:
            self.outcomes["lost"] += 1
            self.warn(outcome.message)
            listener.on_event(BatchLost(call.batch_id, node_died=outcome.node_died))

    def _finish_done(self, call: RemoteCall, outcome: Done, round_trip_ns: int) -> None:
        self.outcomes["finished"] += 1
        took_ns = min(outcome.took_ns, round_trip_ns)
        platform = self.pool.faas
        is_billed_whole = outcome.is_cold and platform is not None and platform.bills_cold_start
        self.costs.on_call_billed(
            self.pool.id, call.shares, round_trip_ns if is_billed_whole else took_ns
        )
        if outcome.is_cold:
            self.on_cold_start(call.function, round_trip_ns - took_ns)
        by_id = {result.task_id: result for result in outcome.results}
        missing = "the response contains no result for this task"
        results = [
            by_id.get(task.task_id) or TaskResult(task.task_id, [], missing, 500)
            for task in call.tasks
        ]
        ended_ns = monotonic_ns()
        ran = BatchRan(call.batch_id, ended_ns - took_ns, ended_ns, results)
        self.listener.on_batch_ran(self.pool.id, ran)


@final
@dataclass(eq=False, slots=True)
class _Provisioned:
    """The provisioned concurrency of a function: what is wanted, and what the platform may have."""

    wanted: int = 0
    # As confirmed last, or as asked for since, if that is more: a call that failed may have worked.
    held: int = 0
    billed_ns: int = 0  # until when it is billed
    is_in_flight: bool = False  # a call that sets it


@final
@dataclass(eq=False)
class WarmKeeper:
    """Keeps instances of one pool warm, by pings or provisioned concurrency.

    There is one target per function; a new one replaces the last.
    """

    pool: RemotePool
    platform: FaasPlatform
    ping: Callable[[str], CallResult]
    provision: Callable[[str, int], str]
    costs: CostSink
    on_cold_start: OnColdStart

    def __post_init__(self) -> None:
        self.pings = 0
        self._loop = asyncio.get_running_loop()
        self._ping_targets: dict[str, int] = {}  # instances to keep warm by pings
        self._provisioned: dict[str, _Provisioned] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def set_target(self, function: str, count: int, *, is_provisioned: bool) -> None:
        """Keep this many instances warm from now on. Surplus instances expire by themselves."""
        before = self._ping_targets.get(function, 0)
        self._ping_targets[function] = 0 if is_provisioned else count
        self._set_provisioned(function, count if is_provisioned else 0)
        timer = self._timers.get(function)
        if timer is None or count > before or is_provisioned:
            self._refresh(function)

    async def stop(self) -> None:
        """Stop pinging and remove provisioned instances, which would be billed on."""
        for timer in self._timers.values():
            timer.cancel()
        for function in self._provisioned:
            self._set_provisioned(function, 0)
        pause_s = POLL_S
        with suppress(TimeoutError):
            async with asyncio.timeout(DEPROVISION_WAIT_S):
                while any(each.held for each in self._provisioned.values()):
                    await asyncio.sleep(pause_s)
                    pause_s *= 2  # a platform that refuses would refuse more if asked more often
                    for function in self._provisioned:
                        self._request_provisioned(function)
        for function, each in self._provisioned.items():
            if each.held:
                self.pool.warn(f"provisioned instances of {function} may be billed on")

    def _refresh(self, function: str) -> None:
        """Ping the instances to be kept warm, and again before any of them would expire."""
        timer = self._timers.pop(function, None)
        if timer is not None:
            timer.cancel()
        pinged, provisioned = self._ping_targets[function], self._provisioned[function]
        if not pinged and not provisioned.wanted and not provisioned.held:
            return
        # Repeated, because it may have failed, and because somebody else may have changed it.
        self._request_provisioned(function)
        self._bill_provisioned(function)
        # Running instances are warm already.
        wanted = pinged - self.pool.running[function]
        for _ in range(max(0, min(wanted, self.pool.threads.free))):
            self.pings += 1
            done = partial(self._on_ping_done, function, monotonic_ns())
            self.pool.threads.submit(partial(self.ping, function), done, _failed)
        every_s = self.platform.ping_every_ns / 1e9 or UNKEPT_EVERY_S
        self._timers[function] = self._loop.call_later(every_s, self._refresh, function)

    def _on_ping_done(self, function: str, sent_ns: int, outcome: CallResult) -> None:
        if not isinstance(outcome, Done):
            message = outcome.message if isinstance(outcome, Refused | Lost) else outcome.reason
            self.pool.warn(f"cannot keep {function} warm: {message}")
            return
        pool_id, round_trip_ns = self.pool.pool.id, monotonic_ns() - sent_ns
        is_billed_whole = outcome.is_cold and self.platform.bills_cold_start
        usd = self.platform.usd(round_trip_ns if is_billed_whole else outcome.took_ns)
        self.costs.on_keep_warm_billed(pool_id, function, usd)
        if outcome.is_cold:
            self.on_cold_start(function, max(0, round_trip_ns - outcome.took_ns))

    def _set_provisioned(self, function: str, count: int) -> None:
        provisioned = self._provisioned.setdefault(function, _Provisioned())
        provisioned.wanted = count
        if not count:
            self._request_provisioned(function)

    def _request_provisioned(self, function: str) -> None:
        """Ask for what is wanted, if there is anything to ask for and a thread is free.

        One call at a time: of two, the platform might carry out the earlier one last.
        """
        provisioned = self._provisioned[function]
        count = provisioned.wanted
        if not (count or provisioned.held) or provisioned.is_in_flight:
            return
        if not self.pool.threads.free:
            return  # `_refresh` and `stop` repeat it
        self._bill_provisioned(function)
        provisioned.held = max(provisioned.held, count)
        provisioned.is_in_flight = True
        done = partial(self._on_provisioning_done, function, count)
        self.pool.threads.submit(partial(self.provision, function, count), done, error_text)

    def _on_provisioning_done(self, function: str, count: int, problem: str) -> None:
        provisioned = self._provisioned[function]
        provisioned.is_in_flight = False
        if problem:
            self.pool.warn(f"cannot set provisioned concurrency: {problem}")
        else:
            self._bill_provisioned(function)
            provisioned.held = count
        if provisioned.wanted != count:  # it has changed meanwhile
            self._request_provisioned(function)

    def _bill_provisioned(self, function: str) -> None:
        """Bill the provisioned instances up to now."""
        provisioned, now_ns = self._provisioned[function], monotonic_ns()
        length_ns, provisioned.billed_ns = now_ns - provisioned.billed_ns, now_ns
        if provisioned.held:
            rate = self.platform.provisioned_usd_per_gb_s * self.platform.gigabytes
            usd = provisioned.held * rate * length_ns / 1e9
            self.costs.on_keep_warm_billed(self.pool.pool.id, function, usd)


class NodeListener(BatchListener, Protocol):
    """Receives nodes that join and are lost, and the results of calls."""

    def on_node_joined(self, node: NodeSpec) -> None:
        """Handle a node that is up, without instances."""

    def on_node_lost(self, node: NodeSpec) -> None:
        """Handle a node that is down. Its running batches end in events of their own."""


Ping = Callable[[str, int, Signature], str]


@final
@dataclass(eq=False)
class EndpointNode:
    """Executes the actions for one node of a pool."""

    node: NodeSpec
    app: App
    signatures: Sequence[Signature]
    pool: RemotePool
    ping: Ping
    listener: NodeListener

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_up = False
        self._starting: dict[int, Function] = {}  # by instance

    def join(self) -> None:
        """Report the node as up. Whether it responds is found out when an instance is started."""
        self._is_up = True
        self.listener.on_node_joined(self.node)

    def dispatch(self, now_ns: int, call: RemoteCall) -> None:
        """Run a batch: an endpoint has a queue of its own."""
        self.pool.send(now_ns, call)

    def execute(self, action: PlacedAction) -> None:
        listener = self.listener
        if isinstance(action, StartInstance):
            function_id = self.app.variants[action.variant_id].function_id
            self._starting[action.instance_id] = self.app.functions[function_id]
            self._try_start(action.instance_id)
        elif isinstance(action, StopInstance):
            self._starting.pop(action.instance_id, None)
            listener.on_event(InstanceStopped(action.instance_id, "stopped"))
        elif isinstance(action, LoadWeights):
            listener.on_event(WeightsLoaded(action.instance_id))
        elif isinstance(action, EvictWeights):
            listener.on_event(WeightsEvicted(action.instance_id))

    def mark_unreachable(self, call: RemoteCall) -> None:
        """Report the node as lost, and ping it until it responds again."""
        if self._is_up:
            self._is_up = False
            self._starting.clear()
            self.listener.on_node_lost(self.node)
            function_id = self.app.variants[call.variant_id].function_id
            self._recheck(self.app.functions[function_id])

    def _try_start(self, instance_id: int) -> None:
        function = self._starting.get(instance_id)
        if function is not None:
            self._ping_then(function, partial(self._on_start_ping, instance_id))

    def _on_start_ping(self, instance_id: int, problem: str) -> None:
        if instance_id not in self._starting:
            return  # stopped meanwhile
        if problem:
            self.pool.warn(f"{self.node.name} does not respond yet: {problem}")
            self._loop.call_later(RETRY_S, self._try_start, instance_id)
            return
        del self._starting[instance_id]
        self.listener.on_event(InstanceStarted(instance_id, self.node.id))

    def _recheck(self, function: Function) -> None:
        self._ping_then(function, partial(self._on_recheck_ping, function))

    def _on_recheck_ping(self, function: Function, problem: str) -> None:
        if problem:
            self._loop.call_later(RETRY_S, self._recheck, function)
        else:
            self.join()

    def _ping_then(self, function: Function, then: Callable[[str], None]) -> None:
        threads = self.pool.threads
        if not threads.free:
            self._loop.call_later(RETRY_S, self._ping_then, function, then)
            return
        signature = self.signatures[function.id]
        threads.submit(partial(self.ping, function.name, self.node.id, signature), then, error_text)


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """Check that the metadata of tensors agrees with their data. Raises `ValueError`.

    Whatever runs behind a platform may be outdated, broken or hostile.
    """
    for tensor in outputs:
        name, datatype, data = tensor.name[:_NAME_MAX], tensor.datatype, memoryview_of(tensor)
        if datatype not in ITEM_BYTES:
            raise ValueError(f"output {name!r} has an unknown datatype")
        try:
            count = element_count(tensor.shape, name, _LIMITS.dims_max, _LIMITS.elements_max)
        except RequestError as problem:
            raise ValueError(problem.message) from None
        is_right = len(data) == count * ITEM_BYTES[datatype]
        if datatype == "BYTES":
            is_right = holds_strings(data, count)
        if not is_right:
            raise ValueError(f"output {name!r}: {len(data)} bytes are not {count} {datatype}")


def error_status(status: object) -> int:
    """Return an HTTP error status that can be forwarded: 500 for anything that is not one.

    >>> error_status(413), error_status(200), error_status(777), error_status("400")
    (413, 500, 500, 500)
    """
    return status if isinstance(status, int) and status in _ERROR_STATUSES else 500
