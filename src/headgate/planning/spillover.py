"""Spillover: which tasks go to a FaaS platform because the nodes would miss their deadlines.

It also sizes the pool of warm instances that the platform keeps for them.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.orders import Orders
from headgate.core.records import Batch, Request, Task
from headgate.core.states import BatchState
from headgate.core.view import View
from headgate.planning.latency_predictor import LatencyPredictor
from headgate.planning.targets import FaasTarget, choose_faas_target
from headgate.planning.warm_pool import WarmPool, burst_of

# Admit to FaaS while its backlog is below this many cold starts.
_BACKLOG_COLD_STARTS_MAX: Final = 4
# Hysteresis: scale the warm pool in only below 70 % of its size.
_SCALE_IN_BELOW: Final = 0.7
_RESIZES_PER_START: Final = 50  # debounce: at most one resize per 1/50 of a cold start

RESIZE_WARM_POOL = "resize_warm_pool"  # name of the timer


@final
class Spillover:
    """The FaaS targets of all functions, and the decision to spill.

    `slack_reserve` is the share of the remaining time that is kept back against variance.
    """

    def __init__(
        self,
        view: View,
        orders: Orders,
        predictor: LatencyPredictor,
        slack_reserve: float,
        memory_ns: int,
    ) -> None:
        self._view = view
        self._orders = orders
        self._predictor = predictor
        self._slack_reserve = slack_reserve
        self.targets = [choose_faas_target(view.app, f) for f in view.app.functions]
        self.warm_pools = [
            None if target is None else WarmPool(target, burst_of(view.app, f), memory_ns)
            for f, target in zip(view.app.functions, self.targets, strict=True)
        ]
        self.is_possible = any(self.targets)
        self._next_resize_ns = [0 for _ in view.app.functions]
        self._last_deadline_ns = [0 for _ in view.app.functions]  # latest deadline in the queue

    def on_queued(self, task: Task) -> None:
        """Record a task that is queued. To be called before `LatencyPredictor.on_queued`."""
        deadline_ns, function_id = task.request.deadline_ns, task.function.id
        if self._predictor.items_queued_of(function_id) == 0:  # the queue was empty: start anew
            self._last_deadline_ns[function_id] = 0
        if deadline_ns < NEVER_NS:
            self._last_deadline_ns[function_id] = max(
                self._last_deadline_ns[function_id], deadline_ns
            )

    def on_call_ended(self, batch: Batch) -> None:
        """Record the end of a call; if it ran, its instance is warm now."""
        has_run = batch.state in (BatchState.FINISHED, BatchState.FAILED)
        warm_pool = self._warm_pool(batch.variant.function_id)
        warm_pool.instances.on_return(self._view.now_ns, ran=has_run)

    def _warm_pool(self, function_id: int) -> WarmPool:
        warm_pool = self.warm_pools[function_id]
        assert warm_pool is not None
        return warm_pool

    def can_take(self, request: Request) -> bool:
        """Whether FaaS can take what the nodes cannot, after a cold start if necessary."""
        view = self._view
        for task in request.tasks:
            target = self.targets[task.function.id]
            if target is None or not view.is_pool_available(target.pool.id):
                return False
            if not view.fits_call(task, target.pool, target.variant):
                return False
            waiting_ns = self._predictor.items_queued_of(task.function.id) * target.call_ns
            warm_pool = self._warm_pool(task.function.id)
            instances = max(1, warm_pool.instances.size(view.now_ns))
            start_ns = target.variant.profile.cold_start_ns
            if waiting_ns > _BACKLOG_COLD_STARTS_MAX * instances * (start_ns + target.call_ns):
                return False
        return True

    def is_too_large(self, task: Task) -> bool:
        """Whether a task has a FaaS target but exceeds its batch size or payload limit."""
        target = self.targets[task.function.id]
        return target is not None and not self._view.fits_call(task, target.pool, target.variant)

    def is_available(self, function_id: int) -> bool:
        """Whether a function has a FaaS target that can take a call now."""
        target = self.targets[function_id]
        return target is not None and self._view.is_pool_available(target.pool.id)

    def unavailable_pools(self) -> list[int]:
        """The FaaS pools that take no calls now."""
        pools = {target.pool.id for target in self.targets if target is not None}
        return [pool_id for pool_id in sorted(pools) if not self._view.is_pool_available(pool_id)]

    def spill_target(self, task: Task) -> FaasTarget | None:
        """The FaaS target for the most urgent task, or None to keep the task queued.

        A task spills only if the nodes cannot finish the whole queue in time. A call that needs a
        cold start misses its deadline anyway, so we grow the warm pool and keep the task queued.
        Exception: with no instance warm or starting, the call itself starts one.
        """
        target, now_ns = self.targets[task.function.id], self._view.now_ns
        if target is None or not self._view.is_pool_available(target.pool.id):
            return None
        calls_needed = self._calls_needed(task, target)
        if calls_needed <= 0.0 or not self._view.fits_call(task, target.pool, target.variant):
            return None
        warm_pool = self._warm_pool(task.function.id)
        instances = warm_pool.instances
        warm_pool.observe_demand(now_ns, instances.busy + calls_needed)
        has_no_instance = instances.size(now_ns) == 0 and not instances.is_starting(now_ns)
        if instances.idle(now_ns) > 0 or has_no_instance:
            warm_pool.on_call(now_ns)
            return target
        if warm_pool.desired(now_ns) > warm_pool.requested:
            self._schedule_resize(task.function.id, target)
        return None

    def _calls_needed(self, task: Task, target: FaasTarget) -> float:
        """Concurrent calls that would be needed to finish the whole queue in time."""
        predictor, function_id = self._predictor, task.function.id
        left_ns = self._last_deadline_ns[function_id] - self._view.now_ns
        backlog_ns = predictor.backlog_ns(function_id)
        if backlog_ns == inf:
            return (
                predictor.items_queued_of(function_id)
                * target.call_ns
                / max(target.call_ns, left_ns)
            )
        if left_ns <= 0:
            return 0.0
        service_ns = predictor.expected_ns(predictor.reference_variant(function_id), 1)
        allowed_ns = service_ns + (1.0 - self._slack_reserve) * (left_ns - service_ns)
        if backlog_ns <= allowed_ns:
            return self._calls_for_one(task, target, service_ns)
        excess = (backlog_ns - allowed_ns) / service_ns * predictor.capacity(function_id)
        return excess * target.call_ns / max(allowed_ns, target.call_ns)

    def _calls_for_one(self, task: Task, target: FaasTarget, service_ns: float) -> float:
        """Calls needed for the most urgent task alone, which is due before the rest of the queue.

        Used when the queue as a whole is in time: this task may still be late on the nodes.
        """
        left_ns = task.request.deadline_ns - self._view.now_ns
        allowed_ns = service_ns + (1.0 - self._slack_reserve) * (left_ns - service_ns)
        if self._predictor.function_free_in_ns(task.function.id) + service_ns <= allowed_ns:
            return 0.0
        return min(1.0, target.call_ns / left_ns) if left_ns > 0 else 0.0

    def _schedule_resize(self, function_id: int, target: FaasTarget) -> None:
        """Schedule a resize after a moment, so that several demands lead to one resize."""
        now_ns = self._view.now_ns
        if now_ns >= self._next_resize_ns[function_id]:
            self._next_resize_ns[function_id] = (
                now_ns + target.variant.profile.cold_start_ns // _RESIZES_PER_START
            )
            self._orders.set_timer(RESIZE_WARM_POOL, self._next_resize_ns[function_id], function_id)

    def resize_warm_pool(self, function_id: int) -> None:
        """Resize the warm pool to recent demand.

        A timer repeats this when the next requested instance is ready, or after a second.
        """
        warm_pool, now_ns = self._warm_pool(function_id), self._view.now_ns
        target, instances = warm_pool.target, warm_pool.instances
        count = warm_pool.desired(now_ns)
        if count > warm_pool.requested or count < _SCALE_IN_BELOW * warm_pool.requested:
            warm_pool.requested = count
            self._orders.keep_warm(
                target.variant,
                target.pool,
                count,
                is_provisioned=warm_pool.is_provisioned_cheaper(count),
            )
        # The circuit breaker and the budgets may grant fewer.
        key = (target.pool.id, target.variant.id)
        kept, is_provisioned = self._view.kept_warm.get(key, (0, False))
        if kept != instances.desired:
            instances.set_desired(now_ns, kept, is_provisioned=is_provisioned)
        if count:
            next_ready_ns = instances.next_ready_ns(now_ns)
            at_ns = now_ns + SECOND_NS if next_ready_ns is None else next_ready_ns
            self._orders.set_timer(RESIZE_WARM_POOL, at_ns, function_id)
