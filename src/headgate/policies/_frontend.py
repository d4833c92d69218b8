"""The base of policies whose gateways share backends: random dispatch, and retries of the refused.

Each gateway knows its own batches only. It sends a request to one of the backends of its function,
at random among those that it does not know to be busy. A backend that is busy with the request of
another gateway refuses, and the gateway asks another one after the probe delay. A request that can
no longer meet its deadline is pruned: it expires.

How many backends of a function are used, and how many there are, is for the policy: `used` and
`Policy.plan`. The order of backends is that of their nodes, the same for every gateway.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.events import Refusal
from headgate.core.model import App, Function, Pool, Variant
from headgate.core.policy import Context, LazyDeletions, Plan, Policy, PolicyConfig, Target
from headgate.core.records import STAGES_MAX, Batch, Instance, Node, Task
from headgate.core.states import TASK_READY, TASK_RUNNING, BatchState

_PROBE: Final = "probe_again"  # the timer, by task id
_SMOOTHING: Final = 1 / 64  # weight of one execution in their mean


@final
class Fleet:
    """The backends of one function as a gateway knows them, and the tasks that wait for one."""

    def __init__(self, app: App, function: Function, probe_delay_ns: int) -> None:
        self.build, self.home = _dedicated(app, function)
        self.setup_ns = self.build.profile.cold_start_ns + self.home.boot_ns
        self.exec_ns = max(1, self.build.profile.exec_ns[0])  # mean, as far as known
        round_trip_ns = 2 * self.home.network_ns
        self.retry_after_ns = max(0, probe_delay_ns - round_trip_ns)
        self.probe_s = max(1, probe_delay_ns, round_trip_ns) / SECOND_NS  # from probe to probe
        self.backends: list[Instance] = []  # that have started, in the common order
        self.waiting: deque[Task] = deque()
        self.withdrawals = LazyDeletions()
        self.next_order_ns = 0  # until then no backend is ordered outside a plan
        # By task id: tasks that wait for the probe delay, with the backend that refused them last.
        self.probing: dict[int, tuple[Task, Instance | None]] = {}


class Frontend(Policy):
    """Sends requests to backends that all gateways share."""

    def __init__(self, context: Context, config: PolicyConfig, probe_delay_ns: int) -> None:
        super().__init__(context, config)
        app = self.view.app
        self.fleets = [Fleet(app, function, probe_delay_ns) for function in app.functions]
        self._refused_by: Instance | None = None

    def used(self, function_id: int) -> int:
        """How many backends requests are sent to, the first ones in the common order; 1 or more."""
        raise NotImplementedError

    def on_executed(self, function_id: int, took_ns: int) -> None:
        """A request was executed, in this time."""

    def order_first(self, counts: list[int]) -> None:
        """Order so many backends of each function, before the first event."""
        for nth in range(1, max(counts, default=0) + 1):
            for fleet, count in zip(self.fleets, counts, strict=True):
                if nth <= count:
                    self.orders.start_anywhere(fleet.build, fleet.home, nth=nth)

    def plan_for(self, counts: list[int]) -> Plan:
        """Return a plan that lacks nothing of these counts, by function id.

        The second backend of every function is ordered before the third of any: if there are not
        enough nodes, all have about as many. Orders that wait at the Broker and are no longer
        wanted are withdrawn; backends that have started, or are starting, are left alone.
        """
        steps: list[tuple[int, int]] = []  # count, function id
        for function_id, count in enumerate(counts):
            fleet = self.fleets[function_id]
            present = len(self.view.instances_of[fleet.build.id])
            steps.append((max(min(count, present), present - self.overdue(fleet)), function_id))
            steps += [(nth, function_id) for nth in range(present + 1, count + 1)]
        targets: list[Target] = []
        for count, function_id in sorted(steps):
            fleet = self.fleets[function_id]
            targets.append(Target(fleet.build.id, fleet.home.id, count, is_shared=True))
        return Plan(tuple(targets))

    def overdue(self, fleet: Fleet) -> int:
        """Number of our orders that wait for a node at the Broker: longer than a start takes."""
        before_ns = self.view.now_ns - fleet.setup_ns
        ordered = self.view.instances_of[fleet.build.id].values()
        return sum(1 for i in ordered if i.node is None and i.last_used_ns < before_ns)

    def retire(self, backend: Instance) -> None:
        """Stop a backend, and send nothing more to it."""
        self.fleets[backend.variant.function_id].backends.remove(backend)
        self.orders.stop(backend)

    def on_task_ready(self, task: Task) -> None:
        fleet = self.fleets[task.function.id]
        fleet.waiting.append(task)
        self.serve(fleet)

    def backs_off(self, batch: Batch) -> bool:
        self._refused_by = batch.instance
        return False

    def on_task_returned(self, task: Task, reason: int | None) -> None:
        if reason != Refusal.BUSY:
            self.on_task_ready(task)
        elif not self._prune(task):
            fleet = self.fleets[task.function.id]
            fleet.probing[task.id] = (task, self._refused_by)
            self.orders.set_timer(_PROBE, self.view.now_ns + fleet.retry_after_ns, task.id)

    def on_timer(self, name: str, number: int) -> None:
        task = self.view.requests[number // STAGES_MAX].tasks[number % STAGES_MAX]
        fleet = self.fleets[task.function.id]
        self._probe_again(fleet, *fleet.probing.pop(number))

    def on_task_withdrawn(self, task: Task) -> None:
        fleet = self.fleets[task.function.id]
        if fleet.probing.pop(task.id, None) is not None:
            self.orders.cancel_timer(_PROBE, task.id)
        else:
            fleet.withdrawals.withdraw_from(fleet.waiting)

    def on_capacity(self, node: Node) -> None:
        for variant_id in list(node.instances):
            fleet = self.fleets[self.view.app.variants[variant_id].function_id]
            if fleet.waiting:
                self.serve(fleet)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.state == BatchState.FINISHED:
            fleet = self.fleets[batch.variant.function_id]
            fleet.exec_ns += int((took_ns - fleet.exec_ns) * _SMOOTHING)
            self.on_executed(batch.variant.function_id, took_ns)

    def on_instance_started(self, instance: Instance) -> None:
        fleet = self.fleets[instance.variant.function_id]
        insort(fleet.backends, instance, key=place)
        self.serve(fleet)

    def on_instance_gone(self, instance: Instance) -> None:
        backends = self.fleets[instance.variant.function_id].backends
        if instance in backends:
            backends.remove(instance)

    def serve(self, fleet: Fleet) -> None:
        """Send tasks that wait to backends that may be idle, for as long as there are any.

        All gateways together probe for about as many tasks at a time as there are backends: for
        more they would find nothing sooner.
        """
        waiting = fleet.waiting
        probed = min(self.used(fleet.build.function_id), len(fleet.backends))
        probes_max = 1 + probed // self.view.gateways
        while waiting and len(fleet.probing) < probes_max:
            if waiting[0].state != TASK_READY or self._prune(waiting[0]):
                waiting.popleft()
                continue
            backend = self._pick(fleet, None)
            if backend is None:
                break
            self._send(waiting.popleft(), backend)
        if waiting and not self.view.instances_of[fleet.build.id]:
            self._order_one(fleet)

    def _order_one(self, fleet: Fleet) -> None:
        """Order the first backend of a function, without waiting for the next plan.

        Once per plan at most: while the one that another gateway has ordered starts, all orders of
        ours are denied.
        """
        now_ns = self.view.now_ns
        if now_ns >= fleet.next_order_ns and fleet.build.id not in self.view.load_failures:
            fleet.next_order_ns = now_ns + self.plan_every_ns
            self.orders.start_anywhere(fleet.build, fleet.home, nth=1)

    def prune_waiting(self, fleet: Fleet) -> None:
        """Prune from the head of the queue: of tasks with one objective, it is the most urgent."""
        waiting = fleet.waiting
        while waiting and (waiting[0].state != TASK_READY or self._prune(waiting[0])):
            waiting.popleft()

    def _probe_again(self, fleet: Fleet, task: Task, refused_by: Instance | None) -> None:
        if not self._prune(task):
            backend = self._pick(fleet, refused_by)
            if backend is None:
                fleet.waiting.appendleft(task)
            else:
                self._send(task, backend)
        self.serve(fleet)

    def _pick(self, fleet: Fleet, refused_by: Instance | None) -> Instance | None:
        """A backend at random: none that we know to be busy, nor the one that has just refused.

        If there is no other, that one is asked again.
        """
        concurrency = fleet.build.concurrency
        used = self.used(fleet.build.function_id)
        first = fleet.backends[:used]
        idle = [i for i in first if i.running < concurrency]
        if len(idle) > 1 and refused_by is not None:
            idle = [i for i in idle if i is not refused_by]
        return idle[self.rng.randrange(len(idle))] if idle else None

    def _send(self, task: Task, backend: Instance) -> None:
        assert backend.node is not None, "it has started"
        self.orders.dispatch([task], backend.node, instance=backend)

    def _prune(self, task: Task) -> bool:
        """Expire a request that can no longer meet its deadline; whether it has been."""
        exec_ns = self.fleets[task.function.id].exec_ns
        if self.view.now_ns + exec_ns <= task.request.deadline_ns:
            return False
        if any(each.state == TASK_RUNNING for each in task.request.tasks):
            return False  # a stage beside it runs: the request ends late
        self.orders.expire(task.request, "it can no longer meet its deadline")
        return True


def place(instance: Instance) -> int:
    """The place of a backend in the common order."""
    assert instance.node is not None, "it has started"
    return instance.node.id


def _dedicated(app: App, function: Function) -> tuple[Variant, Pool]:
    """The first build of a function that runs on nodes, and the first pool of such nodes."""
    for variant in function.variants:
        for pool_id in variant.pool_ids:
            if app.pools[pool_id].faas is None:
                return variant, app.pools[pool_id]
    raise ConfigError("runs on no nodes", key=function.name)
