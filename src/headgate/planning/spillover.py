"""When to send elsewhere what the nodes cannot do in time, and what to keep ready there."""

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

# Starts that what waits may take, all together, before more is turned away.
_STARTS_MAX: Final = 4
# How many fewer instances must be needed before any are let go.
_SLACK: Final = 0.7
_MOMENTS: Final = 50  # in a start

TEND = "tend"  # the timer by which instances that are kept ready are looked after


@final
class Spillover:
    """The outlets of all functions. `reserve` is the part of the time left for surprises."""

    def __init__(
        self,
        view: View,
        orders: Orders,
        predictor: LatencyPredictor,
        reserve: float,
        memory_ns: int,
    ) -> None:
        self._view = view
        self._orders = orders
        self._predictor = predictor
        self._reserve = reserve
        self.outlets = [choose_faas_target(view.app, f, memory_ns) for f in view.app.functions]
        self.is_possible = any(self.outlets)
        self._soon_ns = [0 for _ in view.app.functions]
        self._latest_ns = [0 for _ in view.app.functions]  # by function: the last that is due

    # --- what it is told -----------------------------------------------------------------------

    def waits(self, task: Task) -> None:
        """A task has come to wait; the predictor hears of it next."""
        deadline_ns, function_id = task.request.deadline_ns, task.function.id
        if self._predictor.waiting(function_id) == 0:  # a distant one of before is of no account
            self._latest_ns[function_id] = 0
        if deadline_ns < NEVER_NS:
            self._latest_ns[function_id] = max(self._latest_ns[function_id], deadline_ns)

    def came_back(self, batch: Batch) -> None:
        """A call has ended. Where it ran there is an instance now."""
        outlet = self.outlets[batch.variant.function_id]
        assert outlet is not None
        has_run = batch.state in (BatchState.FINISHED, BatchState.FAILED)
        outlet.warmth.returned(self._view.now_ns, ran=has_run)

    # --- what it is asked ----------------------------------------------------------------------

    def can_take(self, request: Request) -> bool:
        """Whether what the nodes cannot take is taken elsewhere, if need be after a cold start."""
        view = self._view
        for task in request.tasks:
            outlet = self.outlets[task.function.id]
            if outlet is None or not view.is_pool_available(outlet.pool.id):
                return False
            if not view.fits_call(task, outlet.pool, outlet.variant):
                return False
            waiting_ns = self._predictor.waiting(task.function.id) * outlet.call_ns
            instances = max(1, outlet.warmth.there(view.now_ns))
            start_ns = outlet.variant.profile.cold_start_ns
            if waiting_ns > _STARTS_MAX * instances * (start_ns + outlet.call_ns):
                return False
        return True

    def is_too_large(self, task: Task) -> bool:
        """Whether a task has a platform of which no call can carry it: its items, or inputs."""
        outlet = self.outlets[task.function.id]
        return outlet is not None and not self._view.fits_call(task, outlet.pool, outlet.variant)

    def is_open(self, function_id: int) -> bool:
        """Whether a function may be called elsewhere just now."""
        outlet = self.outlets[function_id]
        return outlet is not None and self._view.is_pool_available(outlet.pool.id)

    def closed_pools(self) -> list[int]:
        """Platforms that take no calls just now."""
        pools = {outlet.pool.id for outlet in self.outlets if outlet is not None}
        return [pool_id for pool_id in sorted(pools) if not self._view.is_pool_available(pool_id)]

    def next_outlet(self, task: Task) -> FaasTarget | None:
        """Where the most urgent task is to go, if what waits cannot all be done here in time.

        A call that would start an instance is late however soon it goes out: more are made ready,
        and the task stays where it is. Only where there is nothing at all it goes first.
        """
        outlet, now_ns = self.outlets[task.function.id], self._view.now_ns
        if outlet is None or not self._view.is_pool_available(outlet.pool.id):
            return None
        needed = self._calls_needed(task, outlet)
        if needed <= 0.0 or not self._view.fits_call(task, outlet.pool, outlet.variant):
            return None
        warmth = outlet.warmth
        outlet.needs(now_ns, warmth.busy + needed)
        is_lonely = warmth.there(now_ns) == 0 and not warmth.is_waking(now_ns)
        if warmth.idle(now_ns) > 0 or is_lonely:
            outlet.called(now_ns)
            return outlet
        if outlet.wish(now_ns) > outlet.wished:
            self._tend_soon(task.function.id, outlet)
        return None

    def _calls_needed(self, task: Task, outlet: FaasTarget) -> float:
        """How many calls at once it would take to have everything that waits done in time."""
        predictor, function_id = self._predictor, task.function.id
        left_ns = self._latest_ns[function_id] - self._view.now_ns
        backlog_ns = predictor.backlog_ns(function_id)
        if backlog_ns == inf:
            return predictor.waiting(function_id) * outlet.call_ns / max(outlet.call_ns, left_ns)
        if left_ns <= 0:
            return 0.0
        own_ns = predictor.expected_ns(predictor.reference(function_id), 1)
        allowed_ns = own_ns + (1.0 - self._reserve) * (left_ns - own_ns)
        if backlog_ns <= allowed_ns:
            return self._calls_for_one(task, outlet, own_ns)
        excess = (backlog_ns - allowed_ns) / own_ns * predictor.lanes(function_id)
        return excess * outlet.call_ns / max(allowed_ns, outlet.call_ns)

    def _calls_for_one(self, task: Task, outlet: FaasTarget, own_ns: float) -> float:
        """The same for one that is due before what waits behind it, and would be late here."""
        left_ns = task.request.deadline_ns - self._view.now_ns
        allowed_ns = own_ns + (1.0 - self._reserve) * (left_ns - own_ns)
        if self._predictor.soonest_for_ns(task.function.id) + own_ns <= allowed_ns:
            return 0.0
        return min(1.0, outlet.call_ns / left_ns) if left_ns > 0 else 0.0

    # --- keeping instances ready ---------------------------------------------------------------

    def _tend_soon(self, function_id: int, outlet: FaasTarget) -> None:
        """More are needed; wait a moment for others that need some too, and order them together."""
        now_ns = self._view.now_ns
        if now_ns >= self._soon_ns[function_id]:
            self._soon_ns[function_id] = now_ns + outlet.variant.profile.cold_start_ns // _MOMENTS
            self._orders.set_timer(TEND, self._soon_ns[function_id], function_id)

    def tend(self, function_id: int) -> None:
        """Have as many ready as were needed of late; look again when they are, and now and then."""
        outlet, now_ns = self.outlets[function_id], self._view.now_ns
        assert outlet is not None
        count = outlet.wish(now_ns)
        if count > outlet.wished or count < _SLACK * outlet.wished:
            outlet.wished = count
            self._orders.keep_warm(
                outlet.variant,
                outlet.pool,
                count,
                is_provisioned=outlet.is_provision_cheaper(count),
            )
        # The breaker and the budgets may have it that there are fewer.
        key = (outlet.pool.id, outlet.variant.id)
        kept, is_provisioned = self._view.kept_warm.get(key, (0, False))
        if kept != outlet.warmth.kept:
            outlet.warmth.keep(now_ns, kept, is_provisioned=is_provisioned)
        if count:
            wakes_ns = outlet.warmth.wakes_ns(now_ns)
            at_ns = now_ns + SECOND_NS if wakes_ns is None else wakes_ns
            self._orders.set_timer(TEND, at_ns, function_id)
