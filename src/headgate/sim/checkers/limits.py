"""The checker of money: nobody spends by the call, or on instances kept warm, beyond a budget."""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from headgate.core.actions import (
    Action,
    Dispatch,
    KeepWarm,
    LoadWeights,
    StartInstance,
    StopInstance,
)
from headgate.core.circuit_breaker import DAY_NS
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    TimerFired,
    WeightsLoaded,
)
from headgate.core.model import App, FaasPlatform, Pool
from headgate.sim.checkers.checker import Checker

_ROUNDING: Final = 1e-9


@final
class _Account:
    """What one Scheduler has spent in one pool in the present minute, or the present day."""

    def __init__(self, platform: FaasPlatform, usd: float, length_ns: int) -> None:
        self.usd = usd
        self.length_ns = length_ns
        self._platform = platform
        self._began_ns = 0
        self._spent_usd = 0.0
        self._warm: dict[int, tuple[int, bool]] = {}  # by variant id
        self._paid_until_ns = 0

    def spend(self, now_ns: int, usd: float) -> None:
        """Pay for what is kept warm until now, and for something else."""
        began_ns = now_ns // self.length_ns * self.length_ns
        if began_ns != self._began_ns:
            self._began_ns, self._spent_usd = began_ns, 0.0
        unpaid_ns = now_ns - max(began_ns, self._paid_until_ns)
        self._spent_usd += usd + self._warm_usd_per_s() * unpaid_ns / SECOND_NS
        self._paid_until_ns = now_ns

    def keep_warm(self, now_ns: int, order: KeepWarm) -> None:
        """Something else is kept warm from now on; what is called is called at once."""
        is_called = not order.is_provisioned and self._platform.ping_every_ns > 0
        pings = order.count if is_called else 0
        self.spend(now_ns, pings * self._platform.usd(self._platform.ping_ns))
        self._warm[order.variant_id] = (order.count, order.is_provisioned)

    def spent_usd(self, now_ns: int) -> float:
        """What was spent until now."""
        self.spend(now_ns, 0.0)
        return self._spent_usd

    def _warm_usd_per_s(self) -> float:
        platform, total_usd = self._platform, 0.0
        for count, is_provisioned in self._warm.values():
            if is_provisioned:
                total_usd += count * platform.provisioned_usd_per_gb_s * platform.gigabytes
            elif platform.ping_every_ns:
                every_s = platform.ping_every_ns / SECOND_NS
                total_usd += count * platform.usd(platform.ping_ns) / every_s
        return total_usd


@final
class Budgets(Checker):
    """A call goes out only while there is money left, less what those that are out may cost.

    So a minute, or a day, costs no more than its budget, one call, and what calls took longer than
    they should have.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._accounts: dict[tuple[int, int], list[_Account]] = {}  # by Scheduler and pool id
        # By batch id: its Scheduler, its pool, when it was sent and what it may cost.
        self._out: dict[int, tuple[int, Pool, int, float]] = {}

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """A call that has ended is paid for; one that was refused is free."""
        if isinstance(event, BatchFinished | BatchFailed | BatchLost | BatchRefused):
            self._end(now_ns, event.batch_id, is_free=isinstance(event, BatchRefused))
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._end(now_ns, event.key[1], is_free=False)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """See that there is money for a call."""
        if isinstance(action, KeepWarm):
            for account in self._accounts_of(scheduler, self._app.pools[action.pool_id]):
                account.keep_warm(now_ns, action)
        elif isinstance(action, Dispatch) and action.node_id is None:
            pool = self._app.pools[action.pool_id]
            mine = [usd for by, at, _, usd in self._out.values() if by == scheduler and at is pool]
            for account in self._accounts_of(scheduler, pool):
                spent_usd = account.spent_usd(now_ns) + sum(mine)
                if spent_usd >= account.usd * (1 + _ROUNDING):
                    said = f"${spent_usd} of ${account.usd} are spent"
                    self.blame(now_ns, f"batch {action.batch_id} is sent, and {said}")
            usd = self._may_cost_usd(action, pool)
            self._out[action.batch_id] = (scheduler, pool, now_ns, usd)

    def _end(self, now_ns: int, batch_id: int, *, is_free: bool) -> None:
        found = self._out.pop(batch_id, None)
        if found is not None and not is_free:
            scheduler, pool, sent_ns, _ = found
            assert pool.faas is not None
            for account in self._accounts_of(scheduler, pool):
                account.spend(now_ns, pool.faas.usd(now_ns - sent_ns))

    def _may_cost_usd(self, order: Dispatch, pool: Pool) -> float:
        platform, profile = pool.faas, self._app.variants[order.variant_id].profile
        assert platform is not None
        exec_ns = profile.exec_ns[order.items - 1]
        return platform.usd(profile.cold_start_ns + exec_ns + 2 * pool.network_ns)

    def _accounts_of(self, scheduler: int, pool: Pool) -> list[_Account]:
        found = self._accounts.get((scheduler, pool.id))
        if found is None:
            assert pool.faas is not None
            found = self._accounts[scheduler, pool.id] = [
                _Account(pool.faas, pool.breaker.usd_per_minute, MINUTE_NS),
                _Account(pool.faas, pool.breaker.usd_per_day, DAY_NS),
            ]
        return found


# Checkers of what is not to be tried again at once: failed starts, and who may kill a node.


@final
class Starts(Checker):
    """A variant that failed to start on a node is left alone for the back-off, then tried once.

    Starts "anywhere" are not looked at: a pool may have had no node for them.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._backoff_ns = app.limits.start_backoff_ns
        self._up: set[int] = set()  # node ids
        self._starting: dict[int, StartInstance] = {}  # by instance id
        self._ready: dict[int, tuple[int, int]] = {}  # by instance id: node and variant
        self._barred: dict[int, tuple[int, int | None]] = {}  # by variant: until when, its probe

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """A back-off that ends in nothing has found the variant wherever it can be."""
        if isinstance(event, TimerFired) and event.key[0] == "probe" and not actions:
            self._barred.pop(event.key[1], None)
        super().on_event(now_ns, scheduler, event, actions)

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Starts end well or not."""
        if isinstance(event, NodeJoined):
            self._up.add(event.node_id)
        elif isinstance(event, NodeLost):
            self._lose(now_ns, event.node_id)
        elif isinstance(event, InstanceStarted):
            order = self._starting.pop(event.instance_id, None)
            if order is not None:
                self._ready[event.instance_id] = (event.node_id, order.variant_id)
                self._barred.pop(order.variant_id, None)
        elif isinstance(event, InstanceStopped):
            self._ready.pop(event.instance_id, None)
            order = self._starting.pop(event.instance_id, None)
            if order is not None:
                self._failed(now_ns, order.variant_id, event.instance_id)
        elif isinstance(event, LoadFailed):
            is_there = (event.node_id, event.variant_id) in self._ready.values()
            if not is_there and event.node_id in self._up:
                self._failed(now_ns, event.variant_id, None)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """A start that is too early is blamed; else it is the probe."""
        if isinstance(action, StopInstance):
            self._ready.pop(action.instance_id, None)
            self._starting.pop(action.instance_id, None)
        elif isinstance(action, StartInstance) and action.node_id is not None:
            self._starting[action.instance_id] = action
            until_ns, probe = self._barred.get(action.variant_id, (now_ns, None))
            if now_ns < until_ns or probe in self._starting:
                self.blame(now_ns, f"variant {action.variant_id} is started while it is barred")
            if action.variant_id in self._barred:
                self._barred[action.variant_id] = (until_ns, action.instance_id)

    def _failed(self, now_ns: int, variant_id: int, instance_id: int | None) -> None:
        barred = self._barred.get(variant_id)
        if barred is None or (instance_id is not None and barred[1] == instance_id):
            self._barred[variant_id] = (now_ns + self._backoff_ns, None)

    def _lose(self, now_ns: int, node_id: int) -> None:
        self._up.discard(node_id)
        for instance_id, order in list(self._starting.items()):
            if order.node_id == node_id:
                del self._starting[instance_id]
                if self._barred.get(order.variant_id, (0, None))[1] == instance_id:
                    self._failed(now_ns, order.variant_id, instance_id)
        self._ready = {i: there for i, there in self._ready.items() if there[0] != node_id}


@final
class Suspects(Checker):
    """Who was alone on a node that died never runs again; its mates run alone, one at a time."""

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._ready: set[tuple[int, int]] = set()  # (Scheduler, instance id)
        self._out: dict[int, tuple[int, Dispatch]] = {}  # by batch id: Scheduler
        self._in_company: set[int] = set()  # batch ids
        self._guilty: set[int] = set()  # task ids
        self._suspects: set[int] = set()  # task ids
        self._suspects_out: Counter[int] = Counter()  # by function id

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Batches end; nodes die under them."""
        if isinstance(event, InstanceStarted | InstanceAppeared | WeightsLoaded):
            self._ready.add((scheduler, event.instance_id))
        elif isinstance(event, BatchLost):
            self._lost(event)
        elif isinstance(event, BatchFinished | BatchFailed | BatchRefused):
            self._end(event.batch_id)
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._end(event.key[1])

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Compare what goes out with what is known about it."""
        if isinstance(action, LoadWeights):
            self._ready.discard((scheduler, action.instance_id))
        if not isinstance(action, Dispatch):
            return
        self._out[action.batch_id] = (scheduler, action)
        for task_id in action.task_ids:
            if task_id in self._guilty:
                self.blame(now_ns, f"task {task_id} was alone when a node died, and runs again")
            if task_id in self._suspects:
                function_id = self._app.variants[action.variant_id].function_id
                self._suspects_out[function_id] += 1
                if len(action.task_ids) > 1 or self._suspects_out[function_id] > 1:
                    self.blame(now_ns, f"task {task_id} is a suspect, and not alone")

    def _end(self, batch_id: int) -> Dispatch | None:
        _, order = self._out.pop(batch_id, (0, None))
        if order is not None:
            function_id = self._app.variants[order.variant_id].function_id
            self._suspects_out[function_id] -= len(self._suspects.intersection(order.task_ids))
        return order

    def _lost(self, event: BatchLost) -> None:
        scheduler, order = self._out.get(event.batch_id, (0, None))
        self._end(event.batch_id)
        if order is None or not event.node_died or not self._had_begun(scheduler, order):
            return
        mates = [
            batch_id
            for batch_id, (sender, other) in self._out.items()
            if other.node_id == order.node_id and self._had_begun(sender, other)
        ]
        was_alone = not mates and event.batch_id not in self._in_company
        self._in_company.update(mates)
        if len(order.task_ids) == 1 and (was_alone or order.task_ids[0] in self._suspects):
            self._guilty.update(order.task_ids)
        else:
            self._suspects.update(order.task_ids)

    def _had_begun(self, scheduler: int, order: Dispatch) -> bool:
        return order.instance_id is not None and (scheduler, order.instance_id) in self._ready
