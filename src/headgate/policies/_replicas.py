"""A base of policies that keep replicas of every stage, each in a fixed configuration.

The objective of a pipeline is divided over its stages once, in proportion to their average
normalised lengths, and every stage is scaled for itself: that is how the ESG paper (HPDC 2024)
frames INFless and FaST-GShare. A *replica* runs one batch of a stage at a time, in the
configuration (variant, shape, largest batch) and on the node that it was placed with. It has its
resources reserved while it lives. A policy says in which configurations a stage is in time
(`rate_configs`), which of them comes next (`choose`) and when stages grow and shrink (`scale`).
The rest is here, and all of it is ours: the papers leave it to their platforms.

- A replica is a claim on compute, memory and a slot of its node. Instances are started for
  replicas: one per replica, or fewer where an instance runs several batches at once. An instance
  that no replica needs is a warm spare: it is used again first, and stopped where its room is
  needed. Where an idle instance costs something, because its compute is resident or its node is
  rented for it, it is stopped after `keep_alive_ns`; an idle timeout of the pool is in force
  everywhere. Nodes that join start the functions whose `prewarm_nodes` they are among.
- Requests are counted as they arrive, and every stage of their pipeline is scaled with that rate:
  no cold start waits for the one before it. What waits beyond one batch per replica counts as
  demand as well, so that a backlog is worked off within `drain_ns`.
- After the first arrival evaluations begin at `first_ns`, and their intervals double until they
  have their full length: a start is not a change of load, and need not wait for one.
- A stage is scaled for `utilisation` of what its replicas could do without a pause, and to be done
  `margin` of its time before it is over: arrivals are random, and so are execution times.
- Where there is not room for all, replicas are added one at a time to the stage with the least
  capacity for its demand, and taken from stages that have more to spare.
- Evaluations are not reported as work: in both systems they run beside what dispatches.
- A stage with waiting tasks and no replica gets one at once, without a rate; where nothing is left
  to reserve, it shares a node in its smallest configuration. If no instance can be started there,
  the node is held for it until running batches have ended. So no stage starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.model import Pipeline
from headgate.core.policy import NOT_NEGATIVE, POSITIVE, Context, Policy, PolicyConfig, bounded
from headgate.core.records import STAGES_MAX, Batch, Node, Request, Task
from headgate.core.states import INSTANCE_STARTING, NODE_UP, ON_HOST
from headgate.core.view import has_free_room
from headgate.planning.frontier.candidates import (
    node_candidates,
    pipeline_graph,
    priced,
    visits,
)
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.slo_split import split_slo
from headgate.planning.rivals.replicas import RatedConfig, Replica, Reservations, rated
from headgate.policies._stages import StageQueue, start_prewarmed

_MONITOR: Final = "monitor"  # the timers: of the next evaluation,
_FILL: Final = "fill"  # and, by the number of a stage, of a batch that waits to be filled
_TAKE_OVER_FROM: Final = 1.1  # times its own coverage: from a stage that has so much left
_TAKE_OVERS_MAX: Final = 64  # in one evaluation
_DONORS_MAX: Final = 8  # replicas that are tried
_LEAST_BACKLOG: Final = 1e-3  # per waiting item
_NEARLY_FASTEST: Final = 1.25  # times the shortest time: candidates where nothing is in time


@dataclass(frozen=True)
class ReplicaConfig(PolicyConfig):
    """Settings that these policies share."""

    # Part of a stage's time that is kept free for what is not planned for.
    margin: float = field(default=0.05, metadata=bounded(ge=0, lt=1))
    # Of a replica, up to which load is planned.
    utilisation: float = field(default=0.5, metadata=POSITIVE)
    # Until the first evaluation.
    first_ns: int = field(default=50 * MILLISECOND_NS, metadata=POSITIVE)
    # Within which a backlog is to be worked off.
    drain_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)
    # After which a spare instance stops.
    keep_alive_ns: int = field(default=60 * SECOND_NS, metadata=NOT_NEGATIVE)


@final
class StageReplicas:
    """One stage of a pipeline: its queue, the configurations it may run in, and its replicas."""

    def __init__(
        self, number: int, queue: StageQueue, visits: float, ratings: list[RatedConfig]
    ) -> None:
        self.number = number
        self.queue = queue
        self.visits = visits  # how often the stage runs per request
        self.ratings = ratings
        self.replicas: list[Replica] = []  # the fastest first
        self.items_waiting = 0
        self._ready_ns: dict[int, int] = {}  # by id of a waiting task

    @property
    def rate_max(self) -> float:
        """What its replicas serve at most, in items per second."""
        return sum([replica.rating.rate_max for replica in self.replicas])

    @property
    def rate_min(self) -> float:
        """What its replicas need to fill their batches in time, in items per second."""
        return sum([replica.rating.rate_min for replica in self.replicas])

    def add(self, task: Task, now_ns: int) -> None:
        """Enqueue a task."""
        self.queue.add(task)
        self.items_waiting += task.request.items
        self._ready_ns[task.id] = now_ns

    def take(self, items_max: int) -> list[Task]:
        """Dequeue a batch."""
        batch = self.queue.take(items_max)
        for task in batch:
            self._forget(task)
        return batch

    def withdraw(self, task: Task) -> None:
        """Forget a task that was cancelled or has expired."""
        self.queue.withdraw()
        self._forget(task)

    def waited_ns(self, task: Task, now_ns: int) -> int:
        """How long a task has waited in this stage."""
        return now_ns - self._ready_ns[task.id]

    def backlog(self) -> int:
        """Items that wait beyond one batch for every replica."""
        return max(0, self.items_waiting - sum(r.config.batch for r in self.replicas))

    def _forget(self, task: Task) -> None:
        if self._ready_ns.pop(task.id, None) is not None:
            self.items_waiting -= task.request.items


class ReplicaPolicy(Policy):
    """Places replicas, gives them batches, and counts arrivals.

    `interval_ns` is the time between evaluations; rates are means over `window_ns`. A decision
    costs O(replicas of the stage); an evaluation O(instances), and for each replica that is added
    O(configurations of the stage x free nodes).
    """

    def __init__(
        self,
        context: Context,
        config: ReplicaConfig,
        *,
        interval_ns: int,
        window_ns: int,
    ) -> None:
        super().__init__(context, config)
        self._settings = config
        self._interval_ns = interval_ns
        self._window_ns = window_ns
        app = priced(self.view.app)  # where no pool has a price, all nodes cost the same
        self.stages: list[list[StageReplicas]] = []  # by pipeline id and stage
        self._all: list[StageReplicas] = []
        for pipeline in app.pipelines:
            self._divide(pipeline, node_candidates(app, pipeline))
        self._busy: dict[int, StageReplicas] = {}  # with waiting tasks, the next one to serve first
        self._sent: dict[int, Replica] = {}  # by batch id
        self.books = Reservations(self.view)
        self._claims: dict[int, tuple[StageReplicas, Replica]] = {}  # nodes held, by node id
        # By pipeline id: items that arrived since the last evaluation; and how long the intervals
        # before were, with the items that arrived in them.
        self._arrived = [0 for _ in app.pipelines]
        self._history: deque[tuple[int, list[int]]] = deque()
        self._evaluated_ns = 0
        self._first_ns = 0  # when arrivals began
        # By pool id: the place of each node in the order in which they joined.
        self._places: list[dict[int, int]] = [{} for _ in app.pools]

    def _divide(self, pipeline: Pipeline, candidates: list[list[StageConfig]]) -> None:
        """Divide the objective of a pipeline over its stages, for good."""
        budgets_ns: list[int | None] = [None for _ in candidates]
        if pipeline.slo.latency_ns < NEVER_NS:
            slo_ns = int(pipeline.slo.latency_ns * (1 - self._settings.margin))
            for group in split_slo(pipeline_graph(pipeline), candidates, slo_ns, group_max=1):
                budgets_ns[group.stages[0]] = group.budget_ns
        stages: list[StageReplicas] = []
        for index, (configs, often) in enumerate(zip(candidates, visits(pipeline), strict=True)):
            ratings = list(self.rate_configs(_on_grid(configs), budgets_ns[index]))
            ratings = ratings or [rated(config) for config in _fastest(configs)]
            queue = StageQueue(pipeline, index, configs)
            stages.append(StageReplicas(len(self._all), queue, often, ratings))
            self._all.append(stages[-1])
        self.stages.append(stages)

    def rate_configs(
        self, configs: Sequence[StageConfig], budget_ns: int | None
    ) -> Iterable[RatedConfig]:
        """Return the configurations in which a stage is in time; None: it has any time.

        If there are none, those of one item that are nearly the fastest are used.
        """
        raise NotImplementedError

    def choose(
        self, stage: StageReplicas, missing: float, items: int
    ) -> tuple[RatedConfig, Node] | None:
        """Return the next replica of a stage that lacks so many items per second.

        It must be one of `books.rooms`, and take a request of so many items.
        """
        raise NotImplementedError

    def scale(self, demands: Mapping[StageReplicas, float]) -> None:
        """Add and remove replicas, by the demand of each stage in items per second."""
        raise NotImplementedError

    def share_out(self, stage: StageReplicas, items: int) -> None:
        """Items have come to wait: decide which replicas they are meant for."""

    def on_taken(self, stage: StageReplicas) -> None:
        """Fewer items wait than before: they were sent or withdrawn."""

    def available(self, stage: StageReplicas, replica: Replica) -> int:
        """How many of the items that wait a replica may take before they are overdue."""
        return stage.items_waiting

    def on_arrival(self, request: Request) -> None:
        """Count the request, and start stages of its pipeline that have no replica."""
        pipeline_id = request.pipeline.id
        self._arrived[pipeline_id] += request.items
        if (_MONITOR, 0) not in self.view.timers:
            self._evaluated_ns = self._first_ns = self.view.now_ns
            first_ns = min(self._settings.first_ns, self._interval_ns)
            self.orders.set_timer(_MONITOR, self.view.now_ns + first_ns)
        for stage in self.stages[pipeline_id]:
            if not stage.replicas:
                self.add_replica(stage, 0.0, request.items)

    def on_task_ready(self, task: Task) -> None:
        """Enqueue the task, and serve the stages."""
        stage = self._stage_of(task)
        stage.add(task, self.view.now_ns)
        self.share_out(stage, task.request.items)
        self._busy.setdefault(stage.number, stage)
        self._serve()

    def on_task_withdrawn(self, task: Task) -> None:
        """Forget the task."""
        stage = self._stage_of(task)
        stage.withdraw(task)
        self.on_taken(stage)

    def on_capacity(self, node: Node) -> None:
        """Serve the stages."""
        self._serve()

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        """Free the replica of the batch."""
        replica = self._sent.pop(batch.id, None)
        if replica is not None:
            replica.batch_id = None
        if batch.node is None or batch.node.state != NODE_UP:
            self._serve()  # no `on_capacity` follows

    def on_node_joined(self, node: Node) -> None:
        """Start what is pre-warmed on so many nodes."""
        places = self._places[node.pool.id]
        start_prewarmed(self.view, self.orders, node, places.setdefault(node.id, len(places)))

    def on_node_lost(self, node: Node) -> None:
        """Remove the node's replicas; their stages go on elsewhere."""
        for stage in self._all:
            for replica in [r for r in stage.replicas if r.node is node]:
                self.remove_replica(stage, replica)
        self._claims.pop(node.id, None)
        self._serve()

    def on_timer(self, name: str, number: int) -> None:
        """Evaluate the rates, or serve a stage whose batch has waited long enough."""
        if name == _MONITOR:
            self._evaluate()
        self._serve()

    def _stage_of(self, task: Task) -> StageReplicas:
        return self.stages[task.request.pipeline.id][task.id % STAGES_MAX]

    def _evaluate(self) -> None:
        """Update the rates, scale, and see to instances that are missing or spare."""
        self._observe()
        self.scale({each: self._demand(each) for each in self._all})
        for stage in self._all:
            for replica in stage.replicas:
                if self.books.lacks_instance(replica):
                    self._start(replica, evicts=False)
        has_spares = self._stop_idle_spares()
        if self.view.requests or has_spares or any(each.replicas for each in self._all):
            now_ns = self.view.now_ns
            after_ns = min(self._interval_ns, max(1, now_ns - self._first_ns))
            self.orders.set_timer(_MONITOR, now_ns + after_ns)
        else:
            self._history.clear()

    def _observe(self) -> None:
        """Close an interval, and forget those that are older than the window."""
        now_ns, history = self.view.now_ns, self._history
        history.append((max(1, now_ns - self._evaluated_ns), self._arrived))
        self._arrived = [0 for _ in self._arrived]
        self._evaluated_ns = now_ns
        span_ns = sum(length_ns for length_ns, _ in history)
        while span_ns - history[0][0] >= self._window_ns:
            span_ns -= history.popleft()[0]

    def _demand(self, stage: StageReplicas) -> float:
        """What a stage has to serve, in items per second of replicas that never pause."""
        pipeline_id = stage.queue.pipeline_id
        span_ns = sum(length_ns for length_ns, _ in self._history)
        items = sum(arrived[pipeline_id] for _, arrived in self._history)
        rate = items * stage.visits * SECOND_NS / max(1, span_ns)
        # While anything waits there is some demand, so that the last replica stays.
        backlog = max(stage.backlog(), _LEAST_BACKLOG * stage.items_waiting)
        rate += backlog * SECOND_NS / self._settings.drain_ns
        return rate / self._settings.utilisation

    def scale_out(
        self, lacking: Iterable[StageReplicas], demands: Mapping[StageReplicas, float]
    ) -> None:
        """Add replicas until these stages can serve their demands, or nothing more has room."""
        open_stages = list(lacking)
        take_overs = 0
        while open_stages:
            least = min(open_stages, key=lambda each: _coverage(each.rate_max, demands[each]))
            missing = demands[least] - least.rate_max
            if missing > 0 and self.add_replica(least, missing):
                continue
            if missing > 0 and take_overs < _TAKE_OVERS_MAX:
                take_overs += 1
                if self._take_over(least, missing, demands):
                    continue
            open_stages.remove(least)

    def _take_over(
        self, least: StageReplicas, missing: float, demands: Mapping[StageReplicas, float]
    ) -> bool:
        """Replace a replica of a stage that has more to spare; whether there was one."""
        limit = _TAKE_OVER_FROM * _coverage(least.rate_max, demands[least])
        donors: list[tuple[float, int, Replica]] = []
        for each in self._all:
            for replica in each.replicas if each is not least else ():
                coverage = _coverage(each.rate_max - replica.rating.rate_max, demands[each])
                if coverage > limit:
                    donors.append((-coverage, each.number, replica))
        donors.sort(key=lambda donor: donor[:2])
        for _, number, replica in donors[:_DONORS_MAX]:
            donor = self._all[number]
            self.remove_replica(donor, replica)
            if self.add_replica(least, missing):
                return True
            self.restore_replica(donor, replica)
        return False

    def add_replica(self, stage: StageReplicas, missing: float, items: int = 1) -> bool:
        """Add the replica that `choose` names, and start an instance for it; whether it could."""
        choice = self.choose(stage, missing, items)
        if choice is None:
            return False
        replica = self._place(stage, *choice)
        if self.books.lacks_instance(replica) and not self._start(replica, evicts=False):
            self.remove_replica(stage, replica)
            return False
        return True

    def remove_replica(self, stage: StageReplicas, replica: Replica) -> None:
        """Remove a replica; a batch that it runs goes on, and its instance becomes a spare."""
        self.books.release(replica)
        stage.replicas.remove(replica)

    def _place(self, stage: StageReplicas, rating: RatedConfig, node: Node) -> Replica:
        replica = Replica(rating, self.view.app.variants[rating.config.build], node)
        self.restore_replica(stage, replica)
        return replica

    def restore_replica(self, stage: StageReplicas, replica: Replica) -> None:
        """Add a replica again that was removed just now."""
        self.books.reserve(replica)
        stage.replicas.append(replica)
        stage.replicas.sort(key=lambda each: each.config.time_ns)

    def _start(self, replica: Replica, *, evicts: bool) -> bool:
        """Start an instance for a replica; spares, or with `evicts` idle ones, make room for it."""
        node, variant, shape_id = replica.node, replica.variant, replica.start_shape_id
        if node.id not in self.view.free_nodes or variant.id in self.view.load_failures:
            return False
        for spare in self.books.spares(node):
            if has_free_room(node, variant, shape_id):
                break
            self.orders.stop(spare)
        may_start = has_free_room(node, variant, shape_id) or (
            evicts and self.view.can_make_room(node, variant, shape_id)
        )
        if not may_start:
            return False
        self.orders.start(variant, node, shape_id)
        return True

    def _stop_idle_spares(self) -> bool:
        """Stop spares that cost something and have not been used for long; whether any stay."""
        limit_ns = self.view.now_ns - self._settings.keep_alive_ns
        has_spares = False
        for node in self.view.nodes.values():
            if node.instances and (node.has_resident_compute or node.pool.is_elastic):
                for spare in self.books.spares(node):
                    if spare.last_used_ns <= limit_ns:
                        self.orders.stop(spare)
                    else:
                        has_spares = True
        return has_spares

    def _serve(self) -> None:
        """Send one batch of each stage after the other, until none has one that can begin."""
        pending = deque(self._busy)
        waiting: list[StageReplicas] = []
        while pending:
            number = pending.popleft()
            stage = self._busy.pop(number)
            head = stage.queue.head()
            if head is None:
                continue
            self._busy[number] = stage
            if self._send(stage, head):
                pending.append(number)
            else:
                waiting.append(stage)
        for stage in waiting:
            head = stage.queue.head()
            if head is not None and not self._is_served(stage, head):
                self._revive(stage, head)
                while head is not None and self._send(stage, head):  # a spare may be warm
                    head = stage.queue.head()

    def _send(self, stage: StageReplicas, head: Task) -> bool:
        """Send the next batch of a stage, if a replica can take it now; else set its timer."""
        waited_ns = stage.waited_ns(head, self.view.now_ns)
        longest_ns = max([r.rating.wait_ns for r in stage.replicas], default=0)
        due_ns = NEVER_NS
        for replica in stage.replicas:
            if not self._can_begin(stage, replica, head):
                continue
            items, batch = self.available(stage, replica), replica.config.batch
            wait_ns = replica.rating.wait_ns if items else longest_ns
            if head.must_run_alone or items >= batch or waited_ns >= wait_ns:
                tasks = stage.take(batch)
                replica.take_back(sum(task.request.items for task in tasks))
                sent = self.orders.dispatch(
                    tasks, replica.node, replica.variant, None, replica.config.shape_id
                )
                replica.batch_id = sent.id
                self._sent[sent.id] = replica
                self._release_claims(stage)
                self.on_taken(stage)
                return True
            due_ns = min(due_ns, self.view.now_ns + wait_ns - waited_ns)
        if due_ns < NEVER_NS and self.view.timers.get((_FILL, stage.number)) != due_ns:
            self.orders.set_timer(_FILL, due_ns, stage.number)
        return False

    def _can_begin(self, stage: StageReplicas, replica: Replica, head: Task) -> bool:
        """Whether a replica can begin a batch with this head now."""
        node = replica.node
        return (
            replica.batch_id is None
            and node.id in self.view.free_nodes
            and replica.takes(head)
            and not self._is_held_for_another(node, stage)
            and self.is_ready(replica)
            and self.view.fits(node, replica.variant, replica.config.shape_id)
        )

    def is_ready(self, replica: Replica) -> bool:
        """Whether an instance of a replica has started."""
        node, variant = replica.node, replica.variant
        instance = self.view.instance_for(node, variant, replica.start_shape_id)
        return (
            instance is not None
            and not instance.is_preparing
            and instance.state != INSTANCE_STARTING
        )

    def _is_live(self, replica: Replica) -> bool:
        """Whether a replica runs a batch, or has an instance that runs or starts."""
        if replica.batch_id is not None:
            return True
        node, variant = replica.node, replica.variant
        instance = self.view.instance_for(node, variant, replica.start_shape_id)
        return instance is not None and instance.residency != ON_HOST

    def _is_served(self, stage: StageReplicas, head: Task) -> bool:
        """Whether a live replica can take the head of a stage's queue."""
        return any(self._is_live(each) for each in stage.replicas if each.takes(head))

    def _revive(self, stage: StageReplicas, head: Task) -> None:
        """Have a stage served that has tasks and no live replica for the head of its queue."""
        items = head.request.items
        if items > stage.queue.items_most:  # the Scheduler fails it, and says so
            free = self.view.first_free(head.function.id)
            if free is not None:
                self.orders.dispatch(stage.take(1), free)
            return
        for replica in [each for each in stage.replicas if each.takes(head)]:
            if self.view.is_barred(replica.node, replica.variant):
                self.remove_replica(stage, replica)  # it may run as another variant
        able = [each for each in stage.replicas if each.takes(head)]
        if not able:
            if self.add_replica(stage, 0.0, items):
                return
            able = self._squeeze_in(stage, items)
        for replica in able:
            if self._hold_for(stage, replica):
                if self.books.lacks_instance(replica):
                    self._start(replica, evicts=True)
                return

    def _squeeze_in(self, stage: StageReplicas, items: int) -> list[Replica]:
        """Place the smallest replica that takes so many items, although nothing is left for it."""
        barred = self.view.load_failures
        for config in stage.queue.by_size:
            nodes = [
                node
                for node in self.view.nodes.values()
                if node.state == NODE_UP and node.pool.id == config.place
            ]
            if nodes and config.batch >= items and config.build not in barred:
                node = min(nodes, key=self._crowding)
                return [self._place(stage, rated(config), node)]
        return []

    def _crowding(self, node: Node) -> tuple[bool, int]:
        """How little a node suits one more replica than it has room for."""
        is_held = node.id in self._claims or node.id not in self.view.free_nodes
        return (is_held, self.books.replicas_on(node))

    def _hold_for(self, stage: StageReplicas, replica: Replica) -> bool:
        """Hold a node for a stage until it has sent a batch; False if it is held for another.

        Otherwise the instance that is started for it could be evicted before it is used.
        """
        if self._is_held_for_another(replica.node, stage):
            return False
        self._claims[replica.node.id] = (stage, replica)
        return True

    def _is_held_for_another(self, node: Node, stage: StageReplicas) -> bool:
        claim = self._claims.get(node.id)
        if claim is None or claim[0] is stage:
            return False
        holder, replica = claim
        if holder.queue.head() is None or replica not in holder.replicas:
            del self._claims[node.id]
            return False
        return True

    def _release_claims(self, stage: StageReplicas) -> None:
        for node_id in [id for id, (holder, _) in self._claims.items() if holder is stage]:
            del self._claims[node_id]


def _coverage(rate: float, demand: float) -> float:
    """The part of its demand that a stage can serve."""
    return rate / max(demand, 1e-9)


def _on_grid(configs: Sequence[StageConfig]) -> list[StageConfig]:
    """The configurations whose batch is a power of two, or the largest of its shape."""
    largest: dict[tuple[int, int, int], int] = {}
    for config in configs:
        shape = (config.build, config.place, config.shape_id)
        largest[shape] = max(config.batch, largest.get(shape, 0))
    return [
        config
        for config in configs
        if config.batch & (config.batch - 1) == 0
        or config.batch == largest[config.build, config.place, config.shape_id]
    ]


def _fastest(configs: Sequence[StageConfig]) -> list[StageConfig]:
    """The configurations of one item that are nearly the fastest."""
    single = [config for config in configs if config.batch == 1]
    limit_ns = _NEARLY_FASTEST * min(config.time_ns for config in single)
    return [config for config in single if config.time_ns <= limit_ns]
