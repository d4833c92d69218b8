"""Reactive autoscaling of instances on concurrency, with a stable and a panic window; no FaaS.

The rule of Knative's pod autoscaler (KPA), with its documented defaults. The metric is the number
of requests in the system, waiting or running, on average over a window. The desired number of
instances is the metric over a target, a share of the requests that an instance may run at once.

- *Stable mode* follows the average over `window`.
- *Panic mode* begins when the average over the last `panic_share` of the window asks for
  `panic_threshold` times the instances that are ready. The larger of both numbers counts then, and
  nothing is removed until there has been no such reason for a whole window.
- The number falls to no less than 1 / `scale_down_max` of the ready instances at a time.

After a window without requests no instance is left, and the next request starts one. Requests that
the present instances cannot take wait, first come first served, for the least loaded one. A
function that runs on no dedicated pool goes to its FaaS platform. Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("autoscale_concurrency").config().target
0.7
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.policy import (
    POSITIVE,
    Capabilities,
    Context,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import Batch, Task
from headgate.core.states import INSTANCE_STARTING
from headgate.planning.pools.concurrency import FixedLimits
from headgate.planning.pools.targets import NodeTarget
from headgate.policies._hybrid import ThresholdRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `autoscale_concurrency`."""

    # Share of the requests that an instance may run at once.
    target: float = field(default=0.7, metadata=POSITIVE)
    # Over which the metric is averaged.
    window_ns: int = field(default=MINUTE_NS, metadata=POSITIVE)
    # Part of the window that panic mode looks at.
    panic_share: float = field(default=0.1, metadata=bounded(gt=0, lt=1))
    # Desired over ready instances that begins panic mode.
    panic_threshold: float = field(default=2.0, metadata=POSITIVE)
    # Ready instances over the least number that a single evaluation may ask for.
    scale_down_max: float = field(default=2.0, metadata=bounded(ge=1))
    plan_every_ns: int = field(default=2 * SECOND_NS, metadata=POSITIVE)  # interval of evaluations


@final
class AutoscaleConcurrency(ThresholdRouter):
    """A meter of concurrency and a mode per function."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, FixedLimits(0), plan_every_ns=config.plan_every_ns)
        self._scalers = [_Scaler(config) for _ in self.view.app.functions]
        self._counted: set[int] = set()  # ids of the tasks in the system

    def uses_faas(self, function_id: int) -> bool:
        return not self.targets.nodes[function_id]

    def on_task_ready(self, task: Task) -> None:
        """Count the task, then route it."""
        self._enter(task)
        super().on_task_ready(task)

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        """Count the task again, then route it."""
        self._enter(task)
        super().on_task_returned(task, reason)

    def on_task_withdrawn(self, task: Task) -> None:
        """Count the task no more."""
        self._leave(task)
        super().on_task_withdrawn(task)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        for task in batch.tasks:
            self._leave(task)

    def resize(self) -> None:
        """Set the desired number of each function."""
        for function in self.view.app.functions:
            target = self.targets.cheapest_elastic(function.id)
            if target is not None:
                count = self._scalers[function.id].desired(
                    self.view.now_ns, self._ready(target), max(1, target.limit)
                )
                self.desired[target.variant.id, target.pool.id] = min(count, target.pool.nodes)

    def _ready(self, target: NodeTarget) -> int:
        """The instances that are not starting any more."""
        present = self.view.instances_in(target.variant.id, target.pool.id)
        return sum(1 for instance in present if instance.state != INSTANCE_STARTING)

    def _enter(self, task: Task) -> None:
        if task.id not in self._counted:
            self._counted.add(task.id)
            self._scalers[task.function.id].change(self.view.now_ns, 1)

    def _leave(self, task: Task) -> None:
        if task.id in self._counted:
            self._counted.discard(task.id)
            self._scalers[task.function.id].change(self.view.now_ns, -1)


@final
class _Scaler:
    """The concurrency of one function over both windows, and its mode."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._panic_ns = max(1, int(config.window_ns * config.panic_share))
        self._count = 0  # in the system
        self._changed_ns = 0
        self._entered_ns = 0  # when the last request entered
        self._total = 0  # integral of the concurrency so far, in requests x ns
        # Times of evaluations and integrals until then; the first is a window ago, or older.
        self._history: deque[tuple[int, int]] = deque([(0, 0)])
        self._panics_until_ns = 0
        self._panic_count = 0  # the most instances since panic mode began

    def change(self, now_ns: int, by: int) -> None:
        """Add to the number of requests in the system. O(1)."""
        self._total += self._count * (now_ns - self._changed_ns)
        self._changed_ns = now_ns
        self._count += by
        if by > 0:
            self._entered_ns = now_ns

    def desired(self, now_ns: int, ready: int, limit: int) -> int:
        """How many instances that run `limit` requests at once to have now."""
        self.change(now_ns, 0)
        config, ready = self._config, max(1, ready)
        per_instance = config.target * limit
        stable = ceil(self._average(now_ns, config.window_ns) / per_instance - 1e-9)
        panic = ceil(self._average(now_ns, self._panic_ns) / per_instance - 1e-9)
        self._remember(now_ns)
        if panic >= config.panic_threshold * ready:
            self._panics_until_ns = now_ns + config.window_ns
        if now_ns < self._panics_until_ns:
            self._panic_count = max(self._panic_count, stable, panic, ready)
            return self._panic_count
        self._panic_count = 0
        is_used = self._count > 0 or now_ns - self._entered_ns <= config.window_ns
        return max(stable, int(ready / config.scale_down_max), 1 if is_used else 0)

    def _average(self, now_ns: int, window_ns: int) -> float:
        """Mean concurrency since the last evaluation that is at least a window ago."""
        since_ns, before = self._history[0]
        for at_ns, total in self._history:
            if at_ns > now_ns - window_ns:
                break
            since_ns, before = at_ns, total
        return (self._total - before) / (now_ns - since_ns) if now_ns > since_ns else 0.0

    def _remember(self, now_ns: int) -> None:
        self._history.append((now_ns, self._total))
        while len(self._history) > 1 and self._history[1][0] <= now_ns - self._config.window_ns:
            self._history.popleft()


POLICY = PolicyKind(AutoscaleConcurrency, Config, Capabilities(mixed_pools=True, serverless=True))
