"""Earliest deadline first, in batches that the slack allows, admitting only what can be kept.

The policy that is meant for everything, with one configuration. Its parts:

- *Order.* Within a priority, the earliest deadline goes first. A request without an objective is
  given a deadline for ordering's sake, `stretch` times its own length after its arrival: short ones
  go first, and yet nobody starves.
- *Batches.* As large as the slack of the most urgent member allows and no larger than pays: where
  two take twice as long as one, company is all cost. Counted in items. An idle node never waits
  for a batch to fill.
- *Placement.* A free node that holds the weights. Elsewhere a cold start is paid when it takes no
  longer than being served at home and nobody else wants the node, or when waiting would miss a
  deadline or has lasted for many times what the start takes. Nodes with room and nothing to do are
  made ready beforehand for what has been coming.
- *Admission.* A request whose predicted finish is past its deadline is turned away at once, with
  the prediction. Once the queue takes half of what the deadline allows, a client that has more than
  its fair share of it is turned away too, so that others find room.
- *Spilling.* Where what waits cannot all be done in time by the nodes, the most urgent of it goes
  to a platform that is paid by the call, as far as that has instances ready. What a cold start
  would make late anyway waits for a node instead, which costs nothing. As many instances are kept
  ready as were lately needed at once, provisioned or by calling them, whichever is cheaper.
- *Renting.* A node of an elastic pool is taken and given back when the calls that it would have
  saved are worth it (`headgate.planning.rent_or_call`).
- *Correction.* Predictions are the profile's times a quantile of what was lately observed over it.

Cost per decision: O(functions + nodes).

>>> from headgate.policies import find_policy
>>> find_policy("headgate").capabilities.batches
True
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.lazy_deletion import LazyDeletions
from headgate.core.model import Variant
from headgate.core.policy import Capabilities, Context, Plan, Policy, PolicyConfig, PolicyKind
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import InstanceState, Rejection, TaskState
from headgate.planning.batch_size import knee_batch_size, max_batch_within
from headgate.planning.forecast import OfferedLoad
from headgate.planning.latency_predictor import LatencyPredictor
from headgate.planning.placement import has_room, next_prestart
from headgate.planning.rent_or_call import NodeAutoscaler, is_nowhere
from headgate.planning.spillover import TEND, Spillover

Entry = tuple[int, int, int, Task]  # (priority, deadline, task id, task): the smallest goes first


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `headgate`. The defaults are meant to stay."""

    stretch: float = 30.0  # deadline of a request without objective, in its own lengths
    start_patience: float = 5.0  # waiting, in cold starts, after which one is paid all the same
    load_memory_ns: int = 30_000_000_000  # how far back demand is looked at
    correction_quantile: float = 0.9  # of observed over expected time
    probe_every_ns: int = 10_000_000_000  # how often what looks infeasible is tried all the same
    reserve: float = 0.2  # of the time that a request may wait, kept for surprises
    fair_share_from: float = 0.5  # how much of the time allowed the queue may take before it binds
    warm_memory_ns: int = 3_600_000_000_000  # how long a burst is remembered by functions kept warm
    rent_memory_ns: int = 1_800_000_000_000  # how far back ways of renting are compared

    def __post_init__(self) -> None:
        for key in (
            "stretch",
            "start_patience",
            "load_memory_ns",
            "probe_every_ns",
            "warm_memory_ns",
            "rent_memory_ns",
        ):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("correction_quantile", "fair_share_from", "reserve"):
            if not 0 < getattr(self, key) < 1:
                raise ConfigError("must lie between 0 and 1", key=key, value=getattr(self, key))


@final
class Headgate(Policy):
    """A heap of tasks per function, and a prediction of when each node will be free."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        app = self.view.app
        self._config = config
        self._queues: list[list[Entry]] = [[] for _ in app.functions]
        self._withdrawals = [LazyDeletions() for _ in app.functions]
        # Tasks that no call can carry are for nodes only. In a queue of their own, or they would
        # keep those behind them from spilling.
        self._large: list[list[Entry]] = [[] for _ in app.functions]
        self._ready_ns: dict[int, int] = {}  # by task id: since when it waits
        self._probe_ns: dict[int, int] = {}  # by pipeline: when the impossible is tried again
        self._client_items = [0 for _ in app.clients]
        self._weight_sum = sum(client.weight for client in app.clients)
        self._predictor = LatencyPredictor(self.view, config.correction_quantile)
        self._worthwhile = [knee_batch_size(variant.profile) for variant in app.variants]
        self._loads = [
            OfferedLoad(config.load_memory_ns, 10 * f.reference_exec_ns) for f in app.functions
        ]
        self._spilling = Spillover(
            self.view, self.orders, self._predictor, config.reserve, config.warm_memory_ns
        )
        self._renting = NodeAutoscaler(app, self._spilling.outlets, config.rent_memory_ns)
        if self._renting.is_needed:
            self.plan_every_ns = SECOND_NS

    # --- admission -----------------------------------------------------------------------------

    def on_arrival(self, request: Request) -> None:
        self._renting.arrived(self.view.now_ns, request.pipeline, request.items)
        if request.deadline_ns == NEVER_NS:
            return
        predictor, pipeline, items = self._predictor, request.pipeline, request.items
        allowed_ns = request.deadline_ns - self.view.now_ns
        if predictor.alone_ns(pipeline, items) > allowed_ns:
            best_ns = predictor.best_ns(pipeline, items)
            if best_ns > allowed_ns:
                if not self._is_probe(request):
                    self.orders.reject(request, Rejection.INFEASIBLE, best_ns)
                return
        if self._spilling.is_possible and self._spilling.can_take(request):
            return
        if not predictor.can_run(pipeline):
            self.orders.reject(request, Rejection.UNAVAILABLE)
            return
        queue_ns = predictor.queue_ns(pipeline, items)
        wait_ns = queue_ns + predictor.soonest_ns(pipeline)
        own_ns = predictor.own_ns(pipeline, items)
        if wait_ns == 0.0:
            return  # an idle node may as well try, or what is learnt could never be unlearnt
        latency_ns = int(wait_ns + own_ns)
        # Whoever waits shares the fate of all before it: a part of the time is left for surprises.
        waits_too_long_ns = wait_ns - (1.0 - self._config.reserve) * (allowed_ns - own_ns)
        if waits_too_long_ns > 0:  # by then, so much of what waits is done
            self.orders.reject(request, Rejection.OVERLOADED, latency_ns, int(waits_too_long_ns))
        elif queue_ns > self._config.fair_share_from * allowed_ns and self._is_greedy(request):
            self.orders.reject(request, Rejection.UNFAIR, latency_ns, int(queue_ns))

    def _is_probe(self, request: Request) -> bool:
        """Whether to try the impossible, now and then: else a profile that errs stays as it is."""
        pipeline_id, now_ns = request.pipeline.id, self.view.now_ns
        if now_ns < self._probe_ns.get(pipeline_id, now_ns):
            return False
        self._probe_ns[pipeline_id] = now_ns + self._config.probe_every_ns
        return True

    def _is_greedy(self, request: Request) -> bool:
        """Whether a client has more of what waits than its weight entitles it to."""
        share = self.view.app.clients[request.client].weight / self._weight_sum
        waiting = self._client_items[request.client]
        return share < 1 and waiting > share * self._predictor.items_waiting

    def spills(self, function_id: int) -> bool:
        return self._spilling.outlets[function_id] is not None

    # --- the queues ----------------------------------------------------------------------------

    def on_task_ready(self, task: Task) -> None:
        work_ns = task.function.reference_exec_ns * task.request.items
        self._loads[task.function.id].offer(self.view.now_ns, work_ns)
        self.on_task_returned(task)

    def on_task_returned(self, task: Task) -> None:
        request = task.request
        deadline_ns = request.deadline_ns
        if deadline_ns == NEVER_NS:
            deadline_ns = request.arrival_ns + self._stretch_ns(task)
        entry = (request.priority, deadline_ns, task.id, task)
        queues = self._large if self._spilling.is_too_large(task) else self._queues
        heappush(queues[task.function.id], entry)
        self._spilling.waits(task)
        self._ready_ns[task.id] = self.view.now_ns
        self._predictor.waits(task)
        self._client_items[request.client] += request.items
        self._serve()

    def _stretch_ns(self, task: Task) -> int:
        return int(self._config.stretch * task.function.reference_exec_ns)

    def on_task_withdrawn(self, task: Task) -> None:
        function_id = task.function.id
        queues = (self._queues[function_id], self._large[function_id])
        if self._withdrawals[function_id].add(len(queues[0]) + len(queues[1])):
            for queue in queues:
                queue[:] = [entry for entry in queue if entry[3].state == TaskState.READY]
                heapify(queue)
        self._leave(task)

    def _leave(self, task: Task) -> None:
        """A task waits no longer."""
        del self._ready_ns[task.id]
        self._predictor.left(task)
        self._client_items[task.request.client] -= task.request.items

    # --- dispatch ------------------------------------------------------------------------------

    def on_capacity(self, node: Node) -> None:
        self._serve()

    def on_timer(self, name: str, number: int) -> None:
        if name == TEND:
            self._spilling.tend(number)
        self._serve()

    def on_pool_available(self, pool_id: int) -> None:
        self._serve()

    def on_instance_started(self, instance: Instance) -> None:
        self._predictor.started(instance)

    def on_instance_gone(self, instance: Instance) -> None:
        self._predictor.stopped(instance)

    def plan(self) -> Plan:
        return Plan(self._renting.targets(self.view.now_ns, self._spilling.closed_pools()))

    def on_node_joined(self, node: Node) -> None:
        self._predictor.node_joined(node)
        self._warm(node)

    def _warm(self, node: Node) -> None:
        """What is to be warm is started before anybody asks for it, where there is room."""
        for function in self.view.app.functions:
            variant = node.variants[function.id]
            if function.prewarm_nodes == 0 or variant is None:
                continue
            homes = sum(1 for i in self.view.instances.values() if i.variant.id == variant.id)
            if homes < function.prewarm_nodes and has_room(self.view, node, variant):
                self.orders.start(variant, node)

    def on_node_lost(self, node: Node) -> None:
        self._predictor.node_lost(node)

    def _serve(self) -> None:
        """Most urgent first; a function that had better wait for a certain node is passed over."""
        while self.view.free_nodes:
            heads = sorted(queue[0] for queue in self._waiting() if self._clean(queue))
            if not heads:
                self._spread()
            if not any(self._send(entry) for entry in heads):
                break
        if self._spilling.is_possible:
            self._spill()

    def _waiting(self) -> list[list[Entry]]:
        """All queues. Those of what cannot spill are of use only where something can."""
        return self._queues + self._large if self._spilling.is_possible else self._queues

    def _spill(self) -> None:
        """Send the most urgent elsewhere, while what waits cannot all be done in time."""
        for queue in self._queues:
            while self._clean(queue):
                task = queue[0][3]
                outlet = self._spilling.next_outlet(task)
                if outlet is None:
                    break
                heappop(queue)
                self._leave(task)
                self.orders.dispatch_to_pool([task], outlet.pool, outlet.variant)

    def _spread(self) -> None:
        """Nothing waits: make ready for more of what has been coming."""
        found = next_prestart(self.view, self._loads)
        if found is not None:
            self.orders.start(*found)

    def _clean(self, queue: list[Entry]) -> bool:
        """Put in order what is at the head; say whether anything is left.

        What was withdrawn goes. What can no longer be in time stands back behind what can, though
        not for ever: it is given another deadline, as what has no objective is.
        """
        while queue:
            priority, deadline_ns, task_id, task = queue[0]
            if task.state != TaskState.READY:
                heappop(queue)
            elif deadline_ns == task.request.deadline_ns and self._is_hopeless(task):
                heapreplace(queue, (priority, deadline_ns + self._stretch_ns(task), task_id, task))
            else:
                return True
        return False

    def _is_hopeless(self, task: Task) -> bool:
        variant = self._predictor.reference(task.function.id)
        exec_ns = self._predictor.expected_ns(
            variant, min(task.request.items, variant.profile.items_max)
        )
        outlet = self._spilling.outlets[task.function.id]
        if outlet is not None:
            exec_ns = min(exec_ns, self._predictor.expected_ns(outlet.variant, 1))
        return self.view.now_ns + exec_ns > task.request.deadline_ns

    def _send(self, entry: Entry) -> bool:
        _, deadline_ns, _, task = entry
        node = self._place(task, deadline_ns)
        if node is None:
            return False
        variant = node.variants[task.function.id]
        assert variant is not None
        # A deadline that was given for ordering's sake is no reason for small batches.
        until_ns = NEVER_NS if task.request.deadline_ns == NEVER_NS else deadline_ns
        batch = self._take_batch(task.function.id, variant, until_ns)
        items = sum(member.request.items for member in batch)
        start_ns = (
            0 if self.view.is_resident(node, task.function.id) else variant.profile.cold_start_ns
        )
        self._predictor.sent(node, variant, items, start_ns)
        self.orders.dispatch(batch, node)
        return True

    def _take_batch(self, function_id: int, variant: Variant, until_ns: int) -> list[Task]:
        """The most urgent task and whatever fits into a batch within its slack."""
        correction = self._predictor.correction(variant)
        slack_ns = until_ns - self.view.now_ns
        items_max = min(
            max_batch_within(variant.profile, slack_ns, correction), self._worthwhile[variant.id]
        )
        batch: list[Task] = []
        items = 0
        while (queue := self._first_queue(function_id)) is not None:
            task = queue[0][3]
            items += task.request.items
            if batch and (items > items_max or task.must_run_alone):
                break
            heappop(queue)
            self._leave(task)
            batch.append(task)
            if task.must_run_alone:
                break
        return batch

    def _first_queue(self, function_id: int) -> list[Entry] | None:
        """The queue of a function whose head is the most urgent; None if nothing waits."""
        queue, large = self._queues[function_id], self._large[function_id]
        if large and self._clean(large) and (not self._clean(queue) or large[0] < queue[0]):
            return large
        return queue if self._clean(queue) else None

    def _place(self, task: Task, deadline_ns: int) -> Node | None:
        """A free node with the weights; one without them where that is worth a cold start."""
        view, function_id = self.view, task.function.id
        stranger: Node | None = None
        for node in view.free_nodes.values():
            variant = node.variants[function_id]
            if variant is None or not self._predictor.has_lane(node, variant):
                continue
            if node.pool.is_elastic:
                if self._is_worth_renting(task, node, variant) and view.can_take(node, function_id):
                    return node
            elif view.can_take(node, function_id):
                if view.is_resident(node, function_id):
                    return node
                if stranger is None:
                    stranger = node
        if stranger is None or self._is_worth_a_start(task, stranger, deadline_ns):
            return stranger
        variant = stranger.variants[function_id]
        assert variant is not None
        if not self._is_wanted(stranger) and has_room(view, stranger, variant):
            self.orders.start(variant, stranger)  # for those behind it: it is served sooner at home
        return None

    def _is_worth_renting(self, task: Task, node: Node, variant: Variant) -> bool:
        """Whether a rented node is ready; one that boots will do where there is nothing else.

        For a task that no call can carry one is rented, if need be.
        """
        instance, function_id = node.instances.get(variant.id), variant.function_id
        if instance is not None and instance.state != InstanceState.STARTING:
            return True
        if self._predictor.lanes(function_id):
            return False
        is_for_nodes = self._spilling.is_too_large(task)
        if instance is None:
            return is_for_nodes and is_nowhere(self.view, function_id)
        return is_for_nodes or not self._spilling.is_open(function_id)

    def _is_worth_a_start(self, task: Task, node: Node, deadline_ns: int) -> bool:
        view, function_id = self.view, task.function.id
        variant = node.variants[function_id]
        assert variant is not None
        homes = [n for n in view.nodes.values() if view.is_resident(n, function_id)]
        if not homes:
            return True
        free_ns = min(self._predictor.free_at_ns(home) for home in homes)
        home_ns = max(0.0, free_ns - view.now_ns)
        home_ns += self._predictor.expected_ns(variant, task.request.items)
        if task.request.deadline_ns < NEVER_NS and view.now_ns + home_ns > deadline_ns:
            return True
        start_ns = variant.profile.cold_start_ns
        if start_ns <= home_ns and not self._is_wanted(node) and has_room(view, node, variant):
            return True
        until_ns = self._ready_ns[task.id] + int(self._config.start_patience * start_ns)
        if until_ns > view.now_ns:
            self.orders.set_timer("patience", until_ns, function_id)
        return until_ns <= view.now_ns

    def _is_wanted(self, node: Node) -> bool:
        """Whether something waits that the node holds already."""
        view = self.view
        return any(
            view.is_resident(node, function_id) and self._first_queue(function_id) is not None
            for function_id in range(len(self._queues))
        )

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        self._predictor.came_back(batch, took_ns)
        if batch.node is None:
            self._spilling.came_back(batch)


POLICY = PolicyKind(Headgate, Config, Capabilities(batches=True, mixed_pools=True, serverless=True))
