"""Checkers of limits: spending on FaaS calls, back-off after failed starts, and suspect tasks."""

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
from headgate.core.backend import NO_ROOM, STARTED_ALREADY
from headgate.core.circuit_breaker import DAY_NS
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.events import (
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
from headgate.core.ids import owner
from headgate.core.model import App, FaasPlatform, Pool
from headgate.sim.checkers.checker import Checker, ended_batch

_ROUNDING: Final = 1e-9


# Another Scheduler was faster: the start was never tried.
_FORESTALLED: Final = (NO_ROOM, STARTED_ALREADY)


@final
class Budgets(Checker):
    """A call is sent only while money spent plus the expected cost of calls in flight < budget.

    So a minute, or a day, costs no more than its budget, plus one call, plus the time by which
    calls exceeded their expected time.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._budgets: dict[tuple[int, int], list[_Budget]] = {}  # by Scheduler and pool id
        # By batch id: its Scheduler, its pool, when it was sent and its expected cost.
        self._in_flight: dict[int, tuple[int, Pool, int, float]] = {}

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Pay for calls that have ended; a refused call is free."""
        batch_id = ended_batch(event)
        call = None if batch_id is None else self._in_flight.pop(batch_id, None)
        if call is not None and not isinstance(event, BatchRefused):
            sender, pool, sent_ns, _ = call
            assert pool.faas is not None
            for budget in self._budgets_of(sender, pool):
                budget.spend(now_ns, pool.faas.usd(now_ns - sent_ns))

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, KeepWarm):
            for budget in self._budgets_of(scheduler, self._app.pools[action.pool_id]):
                budget.keep_warm(now_ns, action)
        elif isinstance(action, Dispatch) and action.node_id is None:
            pool = self._app.pools[action.pool_id]
            committed_usd = sum(
                usd
                for sender, target, _, usd in self._in_flight.values()
                if sender == scheduler and target is pool
            )
            for budget in self._budgets_of(scheduler, pool):
                spent_usd = budget.spent_usd(now_ns) + committed_usd
                if spent_usd >= budget.usd * (1 + _ROUNDING):
                    problem = f"${spent_usd} of ${budget.usd} are spent"
                    self.report(now_ns, f"batch {action.batch_id} is sent, and {problem}")
            usd = self._expected_usd(action, pool)
            self._in_flight[action.batch_id] = (scheduler, pool, now_ns, usd)

    def _expected_usd(self, dispatch: Dispatch, pool: Pool) -> float:
        platform, profile = pool.faas, self._app.variants[dispatch.variant_id].profile
        assert platform is not None
        exec_ns = profile.exec_ns[dispatch.items - 1]
        return platform.usd(profile.cold_start_ns + exec_ns + 2 * pool.network_ns)

    def _budgets_of(self, scheduler: int, pool: Pool) -> list[_Budget]:
        budgets = self._budgets.get((scheduler, pool.id))
        if budgets is None:
            assert pool.faas is not None
            budgets = self._budgets[scheduler, pool.id] = [
                _Budget(pool.faas, pool.breaker.usd_per_minute, MINUTE_NS),
                _Budget(pool.faas, pool.breaker.usd_per_day, DAY_NS),
            ]
        return budgets


@final
class StartBackoff(Checker):
    """A variant that failed to start is not started during the back-off, then once, as a probe.

    Each Scheduler knows of its own starts, and of instances of others that appear. Starts for which
    the pool picks the node are not checked: the pool may have had no free node.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._backoff_ns = app.limits.start_backoff_ns
        self._up: set[int] = set()  # node ids
        self._starting: dict[int, StartInstance] = {}  # by instance id
        self._ready: dict[int, tuple[int, int]] = {}  # by instance id: node and variant
        # By Scheduler and variant id: when its back-off ends, and the instance id of the probe, if
        # there is one.
        self._barred: dict[tuple[int, int], tuple[int, int | None]] = {}

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        """Lift a back-off whose timer starts nothing: the variant runs wherever it can."""
        if isinstance(event, TimerFired) and event.key[0] == "probe" and not actions:
            self._barred.pop((scheduler, event.key[1]), None)
        super().on_event(now_ns, scheduler, event, actions)

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """Bar a variant whose start has failed; lift the bar where one has succeeded."""
        if isinstance(event, NodeJoined):
            self._up.add(event.node_id)
        elif isinstance(event, NodeLost):
            self._lose(now_ns, event.node_id)
        elif isinstance(event, InstanceStarted):
            start = self._starting.pop(event.instance_id, None)
            if start is not None:
                self._ready[event.instance_id] = (event.node_id, start.variant_id)
                self._barred.pop((scheduler, start.variant_id), None)
        elif isinstance(event, InstanceAppeared):
            self._barred.pop((scheduler, event.variant_id), None)
        elif isinstance(event, InstanceStopped):
            self._ready.pop(event.instance_id, None)
            start = self._starting.pop(event.instance_id, None)
            is_own = scheduler == owner(event.instance_id)  # else it had started
            if start is not None and is_own and event.reason not in _FORESTALLED:
                self._failed(now_ns, scheduler, start.variant_id, event.instance_id)
        elif isinstance(event, LoadFailed):
            is_running = (event.node_id, event.variant_id) in self._ready.values()
            if not is_running and event.node_id in self._up:
                self._failed(now_ns, scheduler, event.variant_id, None)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """Report a start within the back-off; a start after it is the probe."""
        if isinstance(action, StopInstance):
            self._ready.pop(action.instance_id, None)
            self._starting.pop(action.instance_id, None)
        elif isinstance(action, StartInstance) and action.node_id is not None:
            self._starting[action.instance_id] = action
            key = (scheduler, action.variant_id)
            until_ns, probe = self._barred.get(key, (now_ns, None))
            if now_ns < until_ns or probe in self._starting:
                self.report(now_ns, f"variant {action.variant_id} is started while it is barred")
            if key in self._barred:
                self._barred[key] = (until_ns, action.instance_id)

    def _failed(
        self, now_ns: int, scheduler: int, variant_id: int, instance_id: int | None
    ) -> None:
        barred = self._barred.get((scheduler, variant_id))
        if barred is None or (instance_id is not None and barred[1] == instance_id):
            self._barred[scheduler, variant_id] = (now_ns + self._backoff_ns, None)

    def _lose(self, now_ns: int, node_id: int) -> None:
        self._up.discard(node_id)
        for instance_id, start in list(self._starting.items()):
            if start.node_id == node_id:
                del self._starting[instance_id]
                scheduler = owner(instance_id)
                if self._barred.get((scheduler, start.variant_id), (0, None))[1] == instance_id:
                    self._failed(now_ns, scheduler, start.variant_id, instance_id)
        self._ready = {i: place for i, place in self._ready.items() if place[0] != node_id}


@final
class SuspectTasks(Checker):
    """A task that ran alone on a node that died never runs again.

    Tasks that ran together when a node died are suspects: each runs again in a batch of its own,
    and of one function only one suspect runs at a time. So is a task that ran alone on a node that
    may hold batches of several gateways, because its gateway cannot know.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._schedulers: set[int] = set()  # that have had an event
        self._ready: set[tuple[int, int]] = set()  # (Scheduler, instance id)
        self._in_flight: dict[int, tuple[int, Dispatch]] = {}  # by batch id: Scheduler, action
        self._not_alone: set[int] = set()  # ids of batches that another ran beside at a crash
        self._guilty: set[int] = set()  # task ids
        self._suspects: set[int] = set()  # task ids
        # By Scheduler and function id: Schedulers do not know each other's suspects.
        self._suspects_running: Counter[tuple[int, int]] = Counter()

    def check_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        self._schedulers.add(scheduler)
        if isinstance(event, InstanceStarted | InstanceAppeared | WeightsLoaded):
            self._ready.add((scheduler, event.instance_id))
        elif isinstance(event, BatchLost):
            self._lost(event)
        elif (batch_id := ended_batch(event)) is not None:
            self._end(batch_id)

    def on_gateway_crashed(self, now_ns: int, scheduler: int) -> None:
        """Nobody hears how its batches end, and no task of them runs again."""
        for batch_id, (sender, _) in list(self._in_flight.items()):
            if sender == scheduler:
                self._end(batch_id)

    def check_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        if isinstance(action, LoadWeights):
            self._ready.discard((scheduler, action.instance_id))
        if not isinstance(action, Dispatch):
            return
        self._in_flight[action.batch_id] = (scheduler, action)
        for task_id in action.task_ids:
            if task_id in self._guilty:
                self.report(now_ns, f"task {task_id} was alone when a node died, and runs again")
            if task_id in self._suspects:
                key = (scheduler, self._app.variants[action.variant_id].function_id)
                self._suspects_running[key] += 1
                if len(action.task_ids) > 1 or self._suspects_running[key] > 1:
                    self.report(now_ns, f"task {task_id} is a suspect, and not alone")

    def _end(self, batch_id: int) -> None:
        scheduler, dispatch = self._in_flight.pop(batch_id, (0, None))
        if dispatch is not None:
            key = (scheduler, self._app.variants[dispatch.variant_id].function_id)
            suspects = self._suspects.intersection(dispatch.task_ids)
            self._suspects_running[key] -= len(suspects)

    def _lost(self, event: BatchLost) -> None:
        scheduler, dispatch = self._in_flight.get(event.batch_id, (0, None))
        self._end(event.batch_id)
        if dispatch is None or not event.node_died or not self._had_begun(scheduler, dispatch):
            return
        others = [
            batch_id
            for batch_id, (sender, other) in self._in_flight.items()
            if other.node_id == dispatch.node_id and self._had_begun(sender, other)
        ]
        pool = self._app.pools[dispatch.pool_id]
        may_be_shared = len(self._schedulers) > 1 and (pool.slots > 1 or pool.queue_max > 0)
        was_alone = not (others or may_be_shared or event.batch_id in self._not_alone)
        self._not_alone.update(others)
        if len(dispatch.task_ids) == 1 and (was_alone or dispatch.task_ids[0] in self._suspects):
            self._guilty.update(dispatch.task_ids)
        else:
            self._suspects.update(dispatch.task_ids)

    def _had_begun(self, scheduler: int, dispatch: Dispatch) -> bool:
        return dispatch.instance_id is not None and (scheduler, dispatch.instance_id) in self._ready


@final
class _Budget:
    """What one Scheduler has spent on one pool in the present minute, or the present day."""

    def __init__(self, platform: FaasPlatform, usd: float, length_ns: int) -> None:
        self.usd = usd
        self.length_ns = length_ns
        self._platform = platform
        self._began_ns = 0
        self._spent_usd = 0.0
        self._warm: dict[int, tuple[int, bool]] = {}  # by variant id
        self._paid_until_ns = 0

    def spend(self, now_ns: int, usd: float) -> None:
        """Pay `usd`, and for the instances that were kept warm until now."""
        began_ns = now_ns // self.length_ns * self.length_ns
        if began_ns != self._began_ns:
            self._began_ns, self._spent_usd = began_ns, 0.0
        unpaid_ns = now_ns - max(began_ns, self._paid_until_ns)
        self._spent_usd += usd + self._warm_usd_per_s() * unpaid_ns / SECOND_NS
        self._paid_until_ns = now_ns

    def keep_warm(self, now_ns: int, action: KeepWarm) -> None:
        """Pay for what `action` keeps warm from now on; instances kept by pings are pinged now."""
        has_pings = not action.is_provisioned and self._platform.ping_every_ns > 0
        pings = action.count if has_pings else 0
        self.spend(now_ns, pings * self._platform.usd(self._platform.ping_ns))
        self._warm[action.variant_id] = (action.count, action.is_provisioned)

    def spent_usd(self, now_ns: int) -> float:
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
