"""How many nodes to rent in elastic pools: ski rental beside a FaaS platform, or for an objective.

Rent-or-call is ski rental. Demand is divided into levels: the first node takes as much as one node
can, the second what exceeds that, and so on. Each level can be served by a rented node or by calls,
and switching to the node costs a boot. For each level (marginal node) we accumulate regret: the
cost that the other option would have saved since the regret was last zero. We switch when regret
exceeds a fraction of the cost of one boot. The fraction to start grows with the index of dispersion
of arrivals: with steady arrivals a rise of demand is a signal, with bursty ones it may be noise.
The fraction to stop grows if the node was needed again within 15 minutes of its last release.

A request asks the pools that can run its function in turn: nodes that are always there first, then
rented ones, the cheapest first. What finds none in time is left to calls. The functions of a pool
share its nodes, so there is one `RentalLadder` for all of them, and each is started on as many
nodes as are rented; where a node cannot hold them all, on as many as its part of the work needs.
Where a Broker grants nodes, each instance has a node of its own, and each function a ladder.

Where a function has an objective, a pool of its own, one shape and no platform to call, there is
nothing to compare rent with: the nodes are those that the objective needs (`fleet_size`).

Where nothing else runs a function, at least one node is rented for it. If its objectives leave time
for a boot, only while requests arrive: an idle instance stops after the pool's `idle_timeout`, and
to start it again at once would be of no use to anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp
from typing import Final, final

from headgate.core.clock import HOUR_NS, NEVER_NS, SECOND_NS
from headgate.core.model import UNLIMITED, App, Function, Pipeline, Pool, Slo, Variant
from headgate.core.policy import Target
from headgate.planning.autoscaling.fleet_size import FleetSize, FleetSizes, SurplusInstances
from headgate.planning.constants import (
    ALLOWED_NS,
    ALLOWED_TIMES,
    BATCH_SHARE,
    BEST_EFFORT_DUE,
    DISPERSION_MEMORY_NS,
    DISPERSION_WINDOW_NS,
    IN_USE_NS,
    MISS_COST,
    NEEDED_AGAIN_NS,
    START_REGRET,
    START_SLACK,
    STOP_REGRET,
    STOP_REGRET_MAX,
    STOP_REGRET_STEP,
    SURPLUS,
    WORK_MEMORY_NS,
)
from headgate.planning.forecast import Dispersion
from headgate.planning.frontier.candidates import visits
from headgate.planning.pools.concurrency import (
    KneeLimits,
    allowed_ns_of,
    budgets_ns,
    has_replicas,
    longest_path_ns,
)
from headgate.planning.pools.node_room import is_scarce, replicas_of, room_of
from headgate.planning.pools.targets import FaasTarget
from headgate.planning.pools.warm_pool import burst_of

_OFF: Final = 0
_BOOTING: Final = 1
_ON: Final = 2


@final
class RentalLevel:
    """One marginal node: the demand it would serve, and whether to rent it."""

    __slots__ = (
        "_boots_until_ns",
        "_regret_usd",
        "_released_ns",
        "_state",
        "_stop_regret",
        "free_ns",
        "saved_usd",
    )

    def __init__(self, *, is_on: bool) -> None:
        self.saved_usd = 0.0  # by what it would have served since the last update
        self.free_ns = 0.0  # when the (virtual) node is free
        self._state = _ON if is_on else _OFF
        self._regret_usd = 0.0  # what the other option would have saved since it was last 0
        self._boots_until_ns = 0
        self._released_ns = -NEEDED_AGAIN_NS
        self._stop_regret = STOP_REGRET

    @property
    def is_wanted(self) -> bool:
        """Whether to rent the node."""
        return self._state != _OFF

    @property
    def is_idle(self) -> bool:
        """Whether the node is not rented, nothing called for it, and no regret is left to decay.

        An interval leaves such a level as it is: no rent is smaller than nothing saved.
        """
        return not self.saved_usd and self._state == _OFF and not self._regret_usd

    def should_switch(
        self, now_ns: int, saved_usd: float, rent_usd: float, boot_usd: float, burstiness: float
    ) -> bool:
        """Accumulate the regret of an interval that ends now, and return whether to switch.

        `saved_usd` is the cost of the calls that the node would have saved, `rent_usd` its rent.
        """
        if self._state == _BOOTING:
            if now_ns < self._boots_until_ns:
                return False
            self._state = _ON
        gained_usd = rent_usd - saved_usd if self._state == _ON else saved_usd - rent_usd
        self._regret_usd = max(0.0, self._regret_usd + gained_usd)
        threshold = self._stop_regret if self._state == _ON else START_REGRET * burstiness
        return self._regret_usd > threshold * boot_usd

    def switch(self, now_ns: int, boot_ns: int) -> None:
        """Switch between renting and calling; a rented node is usable after its boot."""
        self._regret_usd = 0.0
        if self._state == _ON:
            self._state = _OFF
            self._released_ns = now_ns
            return
        self._state = _BOOTING
        self._boots_until_ns = now_ns + boot_ns
        if now_ns - self._released_ns < NEEDED_AGAIN_NS:
            self._stop_regret = min(STOP_REGRET_STEP * self._stop_regret, STOP_REGRET_MAX)
        else:
            self._stop_regret = max(self._stop_regret / STOP_REGRET_STEP, STOP_REGRET)


@final
@dataclass(frozen=True, slots=True)
class NodeDemand:
    """What a request of one item of a stage asks of a node of a pool."""

    pool: Pool
    function_id: int
    interval_ns: float  # of the node's time
    allowed_ns: int  # for waiting and service
    tail_ns: float  # service time that the interval does not have: its batch is done later
    saved_usd: float  # if a rented node serves it


@final
class OwnNodes:
    """The nodes of a pool that are not rented, as one queue that all functions share."""

    def __init__(self) -> None:
        self._free_ns = 0.0

    def on_arrival(self, now_ns: int, demand: NodeDemand, items: float) -> bool:
        """Record an arrival; whether the nodes could serve it in time."""
        done_ns = max(now_ns, self._free_ns) + demand.interval_ns * items
        if done_ns > now_ns + demand.allowed_ns - demand.tail_ns:
            return False
        self._free_ns = done_ns
        return True


@final
class RentalLadder:
    """The number of nodes worth their rent. O(levels) per arrival and per `desired_nodes`.

    A node takes the requests that it can finish within the time that they have, one after the
    other; the others go to the next level.
    """

    def __init__(
        self, count: int, *, standing: int, rent_usd_per_s: float, boot_ns: int, memory_ns: int
    ) -> None:
        self._levels = [RentalLevel(is_on=number < standing) for number in range(count)]
        self._rent_usd_per_s = rent_usd_per_s
        self._boot_ns = boot_ns
        self._dispersion = Dispersion(DISPERSION_WINDOW_NS, memory_ns)
        self._updated_ns: int | None = None
        self._wanted = min(standing, count)

    def on_arrival(self, now_ns: int, demand: NodeDemand, items: float, gateways: int = 1) -> bool:
        """Record an arrival, admitted or not; whether a node could serve it in time.

        The other gateways are taken to receive one each.
        """
        if self._updated_ns is None:
            self._updated_ns = now_ns
        self._dispersion.observe(now_ns, items)
        is_taken = [self._fill(now_ns, demand, items) for _ in range(gateways)]
        return is_taken[-1]

    def _fill(self, now_ns: int, demand: NodeDemand, items: float) -> bool:
        work_ns = demand.interval_ns * items
        latest_ns = now_ns + demand.allowed_ns - demand.tail_ns
        for level in self._levels:
            done_ns = max(now_ns, level.free_ns) + work_ns
            if done_ns <= latest_ns:
                level.free_ns = done_ns
                level.saved_usd += items * demand.saved_usd
                return True
        return False

    def desired_nodes(self, now_ns: int) -> int:
        """How many nodes to rent now; arrivals were counted for all gateways."""
        if self._updated_ns is not None and now_ns > self._updated_ns:
            self._update(now_ns, now_ns - self._updated_ns)
        self._updated_ns = now_ns
        return self._wanted

    def _update(self, now_ns: int, elapsed_ns: int) -> None:
        rent_usd = self._rent_usd_per_s * elapsed_ns / SECOND_NS
        boot_usd = self._rent_usd_per_s * self._boot_ns / SECOND_NS
        burstiness = max(1.0, self._dispersion.value)
        for level in self._levels:
            if level.is_idle:  # most levels, most of the time
                continue
            saved_usd, level.saved_usd = level.saved_usd, 0.0
            if level.should_switch(now_ns, saved_usd, rent_usd, boot_usd, burstiness):
                level.switch(now_ns, self._boot_ns)
                self._wanted += 1 if level.is_wanted else -1


@final
class NodeAutoscaler:
    """The nodes to rent in elastic pools. `faas_targets` are by function id.

    A node is worth what it serves at its concurrency limit, in batches that are done in time.
    """

    def __init__(
        self, app: App, faas_targets: Sequence[FaasTarget | None], *, shares_nodes: bool = True
    ) -> None:
        self._app = app
        self._faas_targets = faas_targets
        self._limits = KneeLimits(app, default_ns=ALLOWED_NS)
        self._shares_nodes = shares_nodes
        self._budgets_ns = budgets_ns(app)
        self._users = [
            [variant.function_id for variant in app.variants_on(pool.id) if variant is not None]
            for pool in app.pools
        ]  # by pool id: the functions that run there
        self._own = {
            pool.id: OwnNodes()
            for pool in app.pools
            if pool.faas is None and not pool.is_elastic and pool.nodes > 0
        }
        # By pool and function id; functions that share nodes share a ladder.
        self._ladders: dict[tuple[int, int], RentalLadder] = {}
        self._visits = [visits(pipeline) for pipeline in app.pipelines]
        # By pipeline and stage: the time it has on nodes of `_fleets`.
        self._times_ns = [[NEVER_NS for _ in p.stages] for p in app.pipelines]
        self._fleets: dict[int, FleetSizes] = {}  # by function id
        self._rented: list[tuple[Variant, Pool]] = []
        self._surplus: dict[tuple[int, int], SurplusInstances] = {}  # by variant and pool id
        for function in app.functions:
            elastic = [
                (variant, pool)
                for pool in app.pools
                for variant in function.variants
                if pool.is_elastic and pool.id in variant.pool_ids
            ]
            self._rented.extend(elastic)
            for variant, pool in elastic:
                setup_ns = pool.boot_ns + variant.profile.cold_start_ns
                self._surplus[variant.id, pool.id] = SurplusInstances(setup_ns)
            self._add_sizing(function, elastic)
        self._is_scarce = {
            pool.id: is_scarce(pool, [(v, 0) for v in app.variants_on(pool.id) if v is not None])
            for pool in app.pools
            if pool.is_elastic
        }
        self._node_items: dict[tuple[int, int], int] = {}  # at once, by pool and function id
        # By pipeline and stage: the pools that a request asks in turn.
        self._demands = [
            [self._stage_demands(pipeline, index) for index in range(len(pipeline.stages))]
            for pipeline in (app.pipelines if self._rented else ())
        ]
        self._asked_ns = [0 for _ in app.functions]  # when a request last needed it
        self._work: dict[tuple[int, int], float] = {}  # recent, by pool and function id
        self._planned_ns = 0
        self._can_wait = [self._can_wait_for_boot(function) for function in app.functions]

    @property
    def is_needed(self) -> bool:
        """Whether a function runs on an elastic pool."""
        return bool(self._rented)

    def can_wait(self, function_id: int) -> bool:
        """Whether requests for a function can wait until a node for it is up."""
        return self._can_wait[function_id]

    def on_arrival(
        self,
        now_ns: int,
        pipeline: Pipeline,
        items: int,
        gateways: int = 1,
        stages: Collection[int] | None = None,
    ) -> None:
        """Record an arrival: one of those that all gateways receive.

        `stages` are those that count, all by default. Where a request is refused, that is the one
        that could not be in time: nodes for the others would be of no use.
        """
        for index in range(len(pipeline.stages)) if stages is None else stages:
            demands = self._demands[pipeline.id][index]
            function_id = pipeline.stages[index].function.id
            self._asked_ns[function_id] = now_ns
            expected = items * self._visits[pipeline.id][index]
            fleet = self._fleets.get(function_id)
            if fleet is not None:
                fleet.on_arrival(now_ns, self._times_ns[pipeline.id][index], expected, gateways)
                continue
            for demand in demands:
                own = self._own.get(demand.pool.id)
                if own is not None:
                    if own.on_arrival(now_ns, demand, expected * gateways):
                        break
                    continue
                key = (demand.pool.id, function_id)
                self._work[key] = self._work.get(key, 0.0) + demand.interval_ns * expected
                if self._ladders[key].on_arrival(now_ns, demand, expected, gateways):
                    break

    def targets(
        self,
        now_ns: int,
        without_place: Collection[int],
        waiting: Collection[int] = (),
        gateways: int = 1,
    ) -> tuple[Target, ...]:
        """The desired instances now, for what all gateways receive together.

        `without_place` are the functions that nothing but rented nodes can run now, `waiting` those
        of which a task waits for a node.
        """
        memory = exp((self._planned_ns - now_ns) / WORK_MEMORY_NS)
        self._planned_ns = now_ns
        for key in self._work:
            self._work[key] *= memory
        wanted = {
            ladder: ladder.desired_nodes(now_ns) for ladder in dict.fromkeys(self._ladders.values())
        }
        work: dict[int, float] = {}  # by pool id
        for (pool_id, _), work_ns in self._work.items():
            work[pool_id] = work.get(pool_id, 0.0) + work_ns
        targets: list[Target] = []
        for variant, pool in self._rented:
            function_id, rented_max = variant.function_id, UNLIMITED
            fleet = self._fleets.get(function_id)
            if fleet is not None:
                count = fleet.desired_nodes(now_ns, gateways)
            else:
                nodes = wanted[self._ladders[pool.id, function_id]]
                count = nodes
                if self._shares_nodes and len(self._users[pool.id]) > 1:
                    part = self._work.get((pool.id, function_id), 0.0) / max(
                        1.0, work.get(pool.id, 0.0)
                    )
                    count = self._part_of(now_ns, nodes, pool, function_id, part)
                    rented_max = UNLIMITED if self._is_scarce[pool.id] else max(1, nodes)
            if function_id in waiting:
                count = max(1, count)
            elif function_id in without_place:
                count = self._standing(now_ns, count, pool, function_id, gateways)
            targets.append(
                Target(
                    variant.id,
                    pool.id,
                    count,
                    is_shared=gateways > 1,
                    rented_max=rented_max,
                )
            )
        return tuple(targets)

    def is_scarce(self, pool_id: int) -> bool:
        """Whether a node of an elastic pool cannot hold all functions of the pool at once."""
        return self._is_scarce.get(pool_id, False)

    def recent_work_ns(self, pool_id: int, function_id: int) -> float:
        """The time of nodes of a pool that a function was asked to take lately."""
        return self._work.get((pool_id, function_id), 0.0)

    def nodes_filled(self, pool_id: int, function_id: int, items: int) -> float:
        """The nodes that so many items of a function fill, in the batches that are counted with."""
        return items / self._node_items.get((pool_id, function_id), 1)

    def with_surplus(self, now_ns: int, target: Target, present: int) -> Target:
        """The target with those of the instances present that stay for other gateways."""
        fleet = self._fleets.get(self._app.variants[target.variant_id].function_id)
        most, recent = ceil(SURPLUS * target.count) + 1, 0
        if fleet is not None:
            most, recent = fleet.most_nodes, fleet.recent_nodes
        surplus = self._surplus[target.variant_id, target.pool_id]
        return replace(target, count=surplus.to_keep(now_ns, target.count, present, most, recent))

    def _part_of(self, now_ns: int, nodes: int, pool: Pool, function_id: int, part: float) -> int:
        """On how many of the rented nodes of a pool a function should be, with its part of work."""
        in_use_ns = min(IN_USE_NS, pool.idle_timeout_ns)
        has_asked = (pool.id, function_id) in self._work
        if now_ns - self._asked_ns[function_id] > in_use_ns:
            return 0
        if not has_asked and now_ns > in_use_ns:
            return 0
        return ceil(nodes * part) if has_asked and self._is_scarce[pool.id] else nodes

    def _standing(
        self, now_ns: int, count: int, pool: Pool, function_id: int, gateways: int
    ) -> int:
        """The nodes of a function that runs nowhere else."""
        if gateways == 1 and self._can_wait[function_id]:
            is_idle = now_ns - self._asked_ns[function_id] > pool.idle_timeout_ns
            return 0 if is_idle else max(1, count)
        return max(1, count)

    def _add_sizing(self, function: Function, elastic: Sequence[tuple[Variant, Pool]]) -> None:
        if len(elastic) == 1 and self._faas_targets[function.id] is None:
            variant, pool = elastic[0]
            is_alone = len(self._users[pool.id]) == 1 and len(variant.shapes) == 1
            times_ns = self._set_times(function, variant, pool) if is_alone else ()
            if times_ns:
                fleets = {t: self._fleet(function, variant, pool, t) for t in times_ns}
                self._fleets[function.id] = FleetSizes(fleets)
                return
        for _, pool in elastic:
            self._ladders[pool.id, function.id] = self._ladder(function, pool)

    def _set_times(self, function: Function, variant: Variant, pool: Pool) -> set[int]:
        """Set the time that stages of a function have on its rented nodes; those of objectives."""
        alone_ns = _busy_ns(pool, variant, 1, self._together(pool, variant))
        found: set[int] = set()
        for pipeline in self._app.pipelines:
            for index, stage in enumerate(pipeline.stages):
                if stage.function is function:
                    time_ns = allowed_ns_of(pipeline, index, alone_ns) or alone_ns
                    self._times_ns[pipeline.id][index] = time_ns
                    if time_ns < NEVER_NS:
                        found.add(time_ns)
        return found

    def _fleet(
        self, function: Function, variant: Variant, pool: Pool, latency_ns: int
    ) -> FleetSize:
        concurrency = min(self._together(pool, variant), pool.count_of(variant.shape))
        alone_ns = _busy_ns(pool, variant, 1, concurrency)
        interval_ns, batch_ns, _ = self._in_batches(pool, variant, latency_ns)
        own_per_s = self._own_rate_per_ns(function, latency_ns) * SECOND_NS
        # Nodes on which the tightest requests are late are no help, unless there are no others.
        is_late = alone_ns > self._budgets_ns[function.id]
        pipelines = self._app.pipelines
        slos = [p.slo for p in pipelines if any(s.function is function for s in p.stages)]
        return FleetSize(
            0 if is_late and own_per_s > 0.0 else pool.nodes,
            standing=min(function.prewarm_nodes, pool.nodes),
            slo=Slo(
                latency_ns - (batch_ns - alone_ns),
                max(slo.quantile for slo in slos),
                rate_tolerance=burst_of(self._app, function),
            ),
            exec_ns=round(interval_ns * self._together(pool, variant)),
            concurrency=concurrency,
            ready_after_ns=pool.boot_ns + variant.profile.cold_start_ns,
            own_per_s=own_per_s,
        )

    def _ladder(self, function: Function, pool: Pool) -> RentalLadder:
        if self._shares_nodes:
            for (pool_id, _), ladder in self._ladders.items():
                if pool_id == pool.id:
                    return ladder
        variants = [v for v in self._app.variants_on(pool.id) if v is not None]
        if not self._shares_nodes:
            variants = [v for v in variants if v.function_id == function.id]
        functions = [self._app.functions[variant.function_id] for variant in variants]
        cold_start_ns = max(variant.profile.cold_start_ns for variant in variants)
        return RentalLadder(
            pool.nodes,
            standing=min(max(f.prewarm_nodes for f in functions), pool.nodes),
            rent_usd_per_s=self._rent_usd_per_s(pool, [f.id for f in functions]),
            boot_ns=pool.boot_ns + cold_start_ns,
            memory_ns=DISPERSION_MEMORY_NS,
        )

    def _rent_usd_per_s(self, pool: Pool, function_ids: Sequence[int]) -> float:
        """Without a FaaS price to compare with, any rent above 0 gives the same decisions."""
        has_price = any(self._faas_targets[id] is not None for id in function_ids)
        return (pool.usd_per_hour if has_price else 1.0) / (HOUR_NS / SECOND_NS)

    def _stage_demands(self, pipeline: Pipeline, index: int) -> list[NodeDemand]:
        """What a stage asks of the pools in which it can be in time."""
        function = pipeline.stages[index].function
        own: list[NodeDemand] = []
        rented: list[NodeDemand] = []
        for pool in self._app.pools:
            variant = self._app.variants_on(pool.id)[function.id]
            if variant is None or not (pool.id in self._own or pool.is_elastic):
                continue
            demand = self._demand(pipeline, index, variant, pool)
            if demand is not None:
                (rented if pool.is_elastic else own).append(demand)
        own.sort(key=lambda demand: demand.interval_ns)
        rented.sort(key=lambda demand: demand.interval_ns * demand.pool.usd_per_hour)
        return own + rented

    def _demand(
        self, pipeline: Pipeline, index: int, variant: Variant, pool: Pool
    ) -> NodeDemand | None:
        """What a stage asks of a pool; None if it cannot be in time there."""
        alone_ns = _busy_ns(pool, variant, 1, self._together(pool, variant))
        allowed_ns = allowed_ns_of(pipeline, index, alone_ns)
        if allowed_ns is None:
            return None
        function_id, miss_cost = variant.function_id, MISS_COST
        target = self._faas_targets[function_id]
        if allowed_ns == NEVER_NS:
            times: float = ALLOWED_TIMES
            if target is None and not self._is_scarce.get(pool.id, False):
                # It can wait, and takes no memory from what cannot: a node is worth its rent if
                # such requests keep it busy.
                times, miss_cost = BEST_EFFORT_DUE, 1.0
            allowed_ns = max(ALLOWED_NS, int(times * alone_ns))
        interval_ns, batch_ns, items = self._in_batches(pool, variant, allowed_ns)
        key, node_items = (pool.id, function_id), items * self._together(pool, variant)
        self._node_items[key] = min(node_items, self._node_items.get(key, node_items))
        tail_ns = float(batch_ns - alone_ns)
        if not pool.is_elastic:
            interval_ns /= pool.nodes
            tail_ns = batch_ns - interval_ns
        payers = self._users[pool.id] if self._shares_nodes else [function_id]
        miss_usd = miss_cost * self._rent_usd_per_s(pool, payers) * interval_ns / SECOND_NS
        saved_usd = miss_usd if target is None else target.call_usd
        return NodeDemand(pool, function_id, interval_ns, allowed_ns, tail_ns, saved_usd)

    def _in_batches(self, pool: Pool, variant: Variant, allowed_ns: int) -> tuple[float, int, int]:
        """Time per item on a node in batches that leave time to wait; that of a batch; its size."""
        concurrency = self._together(pool, variant)
        batch_ns, size = _busy_ns(pool, variant, 1, concurrency), 1
        interval_ns = batch_ns / concurrency
        for items in range(2, len(variant.profile.exec_ns) + 1):
            time_ns = _busy_ns(pool, variant, items, concurrency)
            if time_ns > BATCH_SHARE * allowed_ns:
                break
            if time_ns / (items * concurrency) < interval_ns:
                interval_ns, batch_ns, size = time_ns / (items * concurrency), time_ns, items
        return interval_ns, batch_ns, size

    def _together(self, pool: Pool, variant: Variant) -> int:
        """Batches of a variant that a node of a pool runs at once, in one instance or in several.

        As many of several as have the compute of the first shape.
        """
        lanes = pool.count_of(variant.shape)
        is_shared = pool.is_elastic and not self._shares_nodes
        if variant.concurrency >= lanes or is_shared or not has_replicas(pool):
            return self._limits.limit(pool, variant)
        variants = [v for v in self._app.variants_on(pool.id) if v is not None]
        rooms = {v.id: room_of(pool, v, 0) for v in variants}
        room_left = 1.0 - sum(rooms.values())
        replicas = replicas_of(pool, variant, lanes, rooms[variant.id], room_left)
        return max(1, min(lanes, replicas * variant.concurrency))

    def _own_rate_per_ns(self, function: Function, allowed_ns: int) -> float:
        """Throughput of a function on nodes that are not rented; functions share a pool evenly."""
        per_ns = 0.0
        for pool in self._app.pools:
            variant = self._app.variants_on(pool.id)[function.id]
            if variant is not None and pool.id in self._own:
                interval_ns, _, _ = self._in_batches(pool, variant, allowed_ns)
                per_ns += pool.nodes / len(self._users[pool.id]) / interval_ns
        return per_ns

    def _can_wait_for_boot(self, function: Function) -> bool:
        starts_ns = [
            pool.boot_ns + variant.profile.cold_start_ns
            for variant, pool in self._rented
            if variant.function_id == function.id
        ]
        pipelines = [
            p for p in self._app.pipelines if any(s.function is function for s in p.stages)
        ]
        return bool(starts_ns) and all(
            START_SLACK * (min(starts_ns) + longest_path_ns(pipeline, 0)[1])
            <= pipeline.slo.latency_ns
            for pipeline in pipelines
        )


def _busy_ns(pool: Pool, variant: Variant, items: int, concurrency: int) -> int:
    """Time for which a batch takes a slot of a node: it is on the network in that time, too."""
    return variant.profile.time_ns(items, concurrency) + 2 * pool.network_ns
