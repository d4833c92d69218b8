"""Checkers of batches: each order has one end, keeps within limits and runs as it was sent."""

from __future__ import annotations

from collections import Counter
from typing import final

from headgate.core.actions import (
    Action,
    CancelTimer,
    Dispatch,
    EvictWeights,
    LoadWeights,
    SetTimer,
    StartInstance,
    StopInstance,
)
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    NodeLost,
    RequestArrived,
    TimerFired,
    TimerKey,
    WeightsEvicted,
    WeightsLoaded,
)
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.metrics.columns import RunColumns, SpanKind
from headgate.sim.checkers.checker import Checker


@final
class Causes(Checker):
    """Every event that ends an order names one that was given; every order ends exactly once.

    A batch that its Scheduler has given up may still end, once. What a node held ends with it.
    """

    def __init__(
        self,
        *,
        duplicates: bool = False,
        losses: bool = False,
        thinks: bool = False,
        drained: bool = False,
    ) -> None:
        super().__init__()
        self._duplicates = duplicates
        self._losses = losses
        self._thinks = thinks
        self._drained = drained
        self._senders: dict[int, int] = {}  # batch id -> Scheduler
        self._out: dict[int, None] = {}  # batches that have not ended
        self._given_up: dict[int, None] = {}
        self._started: dict[int, int] = {}  # instance id -> Scheduler
        self._appeared: set[tuple[int, int]] = set()  # (Scheduler, instance id)
        # Orders about instances that have not ended: (kind, instance id) -> node id.
        self._pending: dict[tuple[type[Action], int], int | None] = {}
        self._timers: dict[tuple[int, TimerKey], int] = {}

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Take note of what must end."""
        if isinstance(action, Dispatch):
            if action.batch_id in self._senders:
                self.blame(now_ns, f"batch {action.batch_id} is sent twice")
            self._senders[action.batch_id] = scheduler
            self._out[action.batch_id] = None
        elif isinstance(action, StartInstance | StopInstance | LoadWeights | EvictWeights):
            if isinstance(action, StartInstance):
                if action.instance_id in self._started:
                    self.blame(now_ns, f"instance {action.instance_id} is started twice")
                self._started[action.instance_id] = scheduler
            self._pending[type(action), action.instance_id] = action.node_id
        elif isinstance(action, SetTimer):
            self._timers[scheduler, action.key] = action.at_ns
        elif isinstance(action, CancelTimer):
            self._timers.pop((scheduler, action.key), None)

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Find what this ends."""
        if isinstance(event, BatchFinished | BatchFailed | BatchRefused | BatchLost):
            self._end_batch(now_ns, scheduler, event.batch_id, isinstance(event, BatchFinished))
        elif isinstance(event, TimerFired):
            self._fire(now_ns, scheduler, event.key)
        elif isinstance(event, NodeLost):
            self._pending = {k: n for k, n in self._pending.items() if n != event.node_id}
        elif isinstance(
            event,
            InstanceStarted | InstanceAppeared | InstanceStopped | WeightsLoaded | WeightsEvicted,
        ):
            if event.instance_id not in self._started:
                self.blame(now_ns, f"instance {event.instance_id} was never started")
            self._end_order(now_ns, scheduler, event.instance_id, event)

    def finish(self, run: RunColumns) -> None:
        """Nothing is in flight any more, if the run went on for long enough."""
        if not self._drained:
            return
        for batch_id in () if self._losses else (*self._out, *self._given_up):
            self.blame(run.end_ns, f"batch {batch_id} has not ended")
        for kind, instance_id in self._pending:
            self.blame(run.end_ns, f"{kind.__name__} of instance {instance_id} has not ended")

    def _end_batch(self, now_ns: int, scheduler: int, batch_id: int, is_finished: bool) -> None:
        if self._senders.get(batch_id) != scheduler:
            self.blame(now_ns, f"batch {batch_id} was never sent by Scheduler {scheduler}")
        elif batch_id in self._out:
            del self._out[batch_id]
        elif batch_id in self._given_up:
            del self._given_up[batch_id]
        elif not (is_finished and self._duplicates):
            self.blame(now_ns, f"batch {batch_id} has ended twice")

    def _fire(self, now_ns: int, scheduler: int, key: TimerKey) -> None:
        at_ns = self._timers.pop((scheduler, key), None)
        if (at_ns is None or at_ns > now_ns) and not self._thinks:
            self.blame(now_ns, f"timer {key} has fired that was not set, or too early")
        if key[0] == "lost" and key[1] in self._out:
            del self._out[key[1]]
            self._given_up[key[1]] = None

    def _end_order(self, now_ns: int, scheduler: int, instance_id: int, event: Event) -> None:
        pending = self._pending
        if isinstance(event, InstanceStarted):
            # Of a node that is lost no more is heard; but what was on its way arrives.
            if self._started.get(instance_id) != scheduler:
                self.blame(now_ns, f"instance {instance_id} is not Scheduler {scheduler}'s")
            pending.pop((StartInstance, instance_id), None)
        elif isinstance(event, InstanceAppeared):
            if self._started.get(instance_id) == scheduler:
                self.blame(now_ns, f"instance {instance_id} appeared where it was ordered")
            if (scheduler, instance_id) in self._appeared:
                self.blame(now_ns, f"instance {instance_id} appeared twice")
            self._appeared.add((scheduler, instance_id))
        elif isinstance(event, InstanceStopped):
            for kind in (StartInstance, StopInstance, LoadWeights, EvictWeights):
                pending.pop((kind, instance_id), None)
        elif isinstance(event, WeightsLoaded):  # a load is done, or an eviction was declined
            pending.pop((LoadWeights, instance_id), None)
            pending.pop((EvictWeights, instance_id), None)
        else:
            pending.pop((EvictWeights, instance_id), None)


@final
class AttemptLimits(Checker):
    """A task runs no more often than allowed, and once at most if it may not be repeated.

    What was refused did not run. Of what was given up for lost nobody knows, so it counts.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._runs: Counter[int] = Counter()  # by task id
        self._out: dict[int, list[int]] = {}  # batch id -> task ids

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """A refusal takes its attempts back."""
        if isinstance(event, BatchFinished | BatchFailed | BatchLost):
            self._out.pop(event.batch_id, None)
        elif isinstance(event, BatchRefused):
            self._runs.subtract(self._out.pop(event.batch_id, ()))
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._out.pop(event.key[1], None)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Every task that goes out is an attempt."""
        if not isinstance(action, Dispatch):
            return
        self._out[action.batch_id] = action.task_ids
        function = self._app.functions[self._app.variants[action.variant_id].function_id]
        runs_max = self._app.limits.attempts_max if function.is_idempotent else 1
        for task_id in action.task_ids:
            self._runs[task_id] += 1
            if self._runs[task_id] > runs_max:
                self.blame(now_ns, f"task {task_id} is sent out again, beyond {runs_max} runs")


@final
class BatchLimits(Checker):
    """A batch is of one function, fits its variant and its pool, and has no task twice."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._requests: dict[int, RequestArrived] = {}

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Remember what was asked for."""
        if isinstance(event, RequestArrived):
            self._requests[event.request_id] = event

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Compare what goes out with what was declared."""
        if not isinstance(action, Dispatch):
            return
        variant = self._app.variants[action.variant_id]
        items = 0
        for task_id in action.task_ids:
            request_id, index = divmod(task_id, STAGES_MAX)
            request = self._requests.get(request_id)
            if request is None:
                continue  # `Stages` has something to say about that
            items += request.items
            function = self._app.pipelines[request.pipeline].stages[index].function
            if function.id != variant.function_id:
                self.blame(now_ns, f"batch {action.batch_id} runs {function.name} by mistake")
        if items != action.items or not 1 <= items <= variant.profile.items_max:
            self.blame(
                now_ns, f"batch {action.batch_id} has {action.items} items, in truth {items}"
            )
        if len(set(action.task_ids)) != len(action.task_ids):
            self.blame(now_ns, f"batch {action.batch_id} has a task twice")
        if action.pool_id not in variant.pool_ids:
            self.blame(now_ns, f"{variant.name} does not run on pool {action.pool_id}")


@final
class Executions(Checker):
    """A batch runs once, where it was sent and as it was sent.

    Looks at the spans of the run, so it checks only runs that record them.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._nodes = sum(pool.nodes for pool in app.pools if pool.faas is None)
        self._sent: dict[int, Dispatch] = {}

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Remember what was sent."""
        if isinstance(action, Dispatch):
            self._sent[action.batch_id] = action

    def finish(self, run: RunColumns) -> None:
        """Compare what ran with what was sent."""
        spans = run.spans
        seen: set[int] = set()
        for row in (spans.kind == SpanKind.RUN).nonzero()[0].tolist():
            batch_id, begin_ns = int(spans.batch[row]), int(spans.start_ns[row])
            node = int(spans.node[row])
            order = self._sent.get(batch_id)
            if order is None or batch_id in seen:
                self.blame(begin_ns, f"batch {batch_id} ran twice, or was never sent")
                continue
            seen.add(batch_id)
            if spans.items[row] != order.items or order.node_id != (
                node if node < self._nodes else None
            ):
                self.blame(begin_ns, f"batch {batch_id} ran otherwise than it was sent")
