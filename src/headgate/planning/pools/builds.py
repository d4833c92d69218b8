"""All builds, the calendars of their pools, and what nodes, instances and batches do to them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Pipeline, Pool, Variant
from headgate.core.policy import Target
from headgate.core.records import Batch, Instance, Node, Request, Task
from headgate.core.states import BATCH_FINISHED, INSTANCE_STARTING, ON_HOST
from headgate.core.view import View
from headgate.planning.constants import (
    ELSEWHERE_MARGIN,
    END_CAUTION,
    HOLDERS_MAX,
    LOAD_MIN,
    MEMORY_REVIEW,
    SPARE_LOAD,
    SPARE_UNUSED,
    WARM_MEMORY_NS,
)
from headgate.planning.frontier.candidates import planned_shapes
from headgate.planning.pools.build import Build, ComputeMix
from headgate.planning.pools.calendar import Calendar
from headgate.planning.pools.concurrency import KneeLimits, has_replicas, tightest_objectives_ns
from headgate.planning.pools.node_lanes import GatewayShare, NodeLanes
from headgate.planning.pools.node_room import is_scarce, replicas_of, resident_holdings, room_of
from headgate.planning.pools.targets import FaasTarget, choose_faas_target, within_host
from headgate.planning.pools.warm_pool import WarmPool, burst_of

_DEFAULT_WINDOW_NS: Final = 1_000_000_000


@final
class Builds:
    """All builds on nodes, and the calendars of their pools."""

    def __init__(self, view: View) -> None:
        app = view.app
        self._view = view
        shortest_ns, longest_ns = _windows_ns(app)
        self.calendars = [Calendar(shortest_ns, longest_ns) for _ in app.pools]
        self.all: list[Build] = []
        self.of_function: list[list[Build]] = [[] for _ in app.functions]
        self.on_pool: list[list[Build | None]] = []
        limits = KneeLimits(app)
        objectives_ns = tightest_objectives_ns(app)
        shapes = planned_shapes(app)
        per_node: list[int] = []  # lanes, by pool id
        for pool in app.pools:
            lanes = 0
            row: list[Build | None] = [None for _ in app.functions]
            if pool.faas is None:
                variants = [v for v in view.variants_by_pool[pool.id] if v is not None]
                lanes = limits.node_limit(pool, variants, view.gateways)
                self._add_builds(pool, variants, lanes, shapes, row)
            self.on_pool.append(row)
            per_node.append(lanes)
            for each in row:
                if each is not None:
                    each.window_ns = float(objectives_ns[each.function_id])
        self.nodes = NodeLanes(view, self.calendars, per_node, self.on_pool, longest_ns)
        self._is_scarce = [
            is_scarce(pool, [(b.variant, b.shape_id) for b in row if b is not None])
            for pool, row in zip(app.pools, self.on_pool, strict=True)
        ]
        for calendar, is_scarce_here in zip(self.calendars, self._is_scarce, strict=True):
            if is_scarce_here:
                calendar.expect_switches()
        self.unwanted_pools: set[int] = set()  # elastic ones of which the plan wants no node
        self._until_review = [0 for _ in app.pools]
        for builds in self.of_function:
            builds.sort(key=lambda build: (build.pool.is_elastic, build.lane_ns(1)))
        # By function id: the largest batch that a node runs.
        self._on_node_max = [max([b.items_max for b in r], default=0) for r in self.of_function]
        self.faas: list[Build | None] = []  # by function id
        for function in app.functions:
            target = choose_faas_target(app, function)
            if target is None:
                self.faas.append(None)
                continue
            target = within_host(target)
            calendar = self.calendars[target.pool.id]  # all functions share its concurrency
            calendar.resize(target.platform.concurrency_max)
            warm_pool = WarmPool(target, burst_of(app, function), WARM_MEMORY_NS)
            build = Build(len(self.all), target.variant, target.pool, 1, calendar, warm_pool)
            self.all.append(build)
            self.faas.append(build)
            self.of_function[function.id].append(build)
        self._loads = [0.0 for _ in self.all]  # by build id: nodes that its load takes
        # By build id: the instances of its variant where each of them is one node that holds it;
        # and of those the ones that do not, because their weights are in host memory.
        self._holders = [self._countable(build) for build in self.all]
        nowhere: dict[int, Instance] = {}
        self._on_host = [
            view.on_host_of[b.variant.id] if self._is_scarce[b.pool.id] else nowhere
            for b in self.all
        ]
        # Of batches in flight: the build, predicted end and lanes, and whether it awaited a start.
        self._runs: dict[Batch, tuple[Build, int, int, bool]] = {}
        owns = [[b.own for b in row if b is not None and b.own is not None] for row in self.on_pool]
        self._gateway_shares = [
            GatewayShare(calendar, own, shortest_ns)
            for calendar, own in zip(self.calendars, owns, strict=True)
        ]

    def _add_builds(
        self,
        pool: Pool,
        variants: list[Variant],
        lanes: int,
        shapes: dict[tuple[int, int], int],
        row: list[Build | None],
    ) -> None:
        """Make the builds of a pool of nodes, in the planned shapes, by function id."""
        gateways = self._view.gateways
        holdings = resident_holdings(self._view.app, pool, gateways)
        shapes.update(((id, pool.id), each.shape_id) for id, each in holdings.items())
        rooms = {v.id: room_of(pool, v, shapes.get((v.id, pool.id), 0)) for v in variants}
        room_left = 1.0 - sum(rooms.values())
        calendar, mix = self.calendars[pool.id], ComputeMix()
        windows_ns = _windows_ns(self._view.app)
        for variant in variants:
            replicas = 1
            if variant.id in holdings:
                replicas = holdings[variant.id].replicas
            elif has_replicas(pool, gateways):
                replicas = replicas_of(pool, variant, lanes, rooms[variant.id], room_left)
            own = Calendar(*windows_ns) if replicas * variant.concurrency < lanes else None
            shape_id = shapes.get((variant.id, pool.id), 0)
            build = Build(
                len(self.all), variant, pool, lanes, calendar, None, own, shape_id, mix, replicas
            )
            self.all.append(build)
            self.of_function[variant.function_id].append(build)
            row[variant.function_id] = build

    def isolated_ns(self, request: Request, *, as_observed: bool = False) -> float:
        """Latency of a request on an idle system."""
        tasks, items = request.tasks, request.items
        if len(tasks) == 1:
            return self.fastest_ns(tasks[0].function.id, items, as_observed=as_observed)
        times_ns = [
            self.fastest_ns(task.function.id, items, as_observed=as_observed) for task in tasks
        ]
        return max(request.pipeline.longest_to(times_ns))

    def fastest_ns(self, function_id: int, items: int, *, as_observed: bool = False) -> float:
        """Least time of a task on any build, by the profile or as observed if that is less.

        With `as_observed`, as observed even if that is more.
        """
        best_ns = inf
        for build in self.of_function[function_id]:
            most = build.items_max
            time_ns = build.fastest_ns(items if items < most else most, as_observed=as_observed)
            best_ns = time_ns if time_ns < best_ns else best_ns
        return 0.0 if best_ns == inf else best_ns

    def latest_ns(self, request: Request, stage: int) -> float:
        """When a stage must be done for the request to be in time, with nothing to spare."""
        after = request.pipeline.successors[stage]
        if not after:
            return request.deadline_ns
        items = request.items
        times_ns = [self.fastest_ns(t.function.id, items) for t in request.tasks]
        from_ns = request.pipeline.longest_from(times_ns)
        return request.deadline_ns - max(from_ns[index] for index in after)

    def observe_load(self, build: Build, work_ns: float, *, is_best_effort: bool = False) -> None:
        """Record work that was offered to a build, admitted or not."""
        build.load.observe(self._view.now_ns, work_ns)
        pool_id = build.pool.id
        if self._view.gateways > 1 and not is_best_effort:  # which other gateways need not mind
            share = self._gateway_shares[pool_id]
            share.observe(self._view.now_ns, work_ns, self._view.gateways)
        if self._is_scarce[pool_id]:
            self._review(pool_id)

    def observe_elsewhere(self, build: Build, work_ns: float) -> None:
        """Record work that is promised to a build though its function prefers another one.

        Without it memory would be divided by what prefers a pool, and on a pool that nothing
        prefers the functions that were started first would keep it.
        """
        if self._is_scarce[build.pool.id]:
            build.load.observe(self._view.now_ns, work_ns)
            self._review(build.pool.id)

    def _review(self, pool_id: int) -> None:
        self._until_review[pool_id] -= 1
        if self._until_review[pool_id] < 0:
            self._until_review[pool_id] = max(MEMORY_REVIEW, len(self.on_pool[pool_id]))
            self._divide_memory(pool_id)

    def observe_admitted(self, pool_id: int, work_ns: float) -> None:
        """Record that work which was offered to a pool was admitted."""
        if self._view.gateways > 1:
            self._gateway_shares[pool_id].on_admitted(self._view.now_ns, work_ns)

    def on_best_effort_sent(self, pool_id: int, work_ns: float) -> None:
        """Record that work without an objective was sent to a pool."""
        if self._view.gateways > 1:
            self._gateway_shares[pool_id].on_best_effort_sent(self._view.now_ns, work_ns)

    def on_promise_settled(self, pipeline: Pipeline, *, was_kept: bool) -> None:
        """Learn whether a promise was kept, where gateways share the pools of its stages."""
        allowed = 1.0 - pipeline.slo.quantile
        for stage in pipeline.stages:
            builds = self.of_function[stage.function.id]
            if builds:
                self._gateway_shares[builds[0].pool.id].on_settled(allowed, was_kept=was_kept)

    def own_lanes(self, pool_id: int) -> float:
        """The equal part of a pool's lanes that a gateway has while all of them need them."""
        return self.calendars[pool_id].lanes / self._view.gateways

    def is_left_to_others(self, pool_id: int) -> bool:
        """Whether what promises leave of a pool here is for the promises of other gateways."""
        gateways = self._view.gateways
        return gateways > 1 and self._gateway_shares[pool_id].is_contended(
            self._view.now_ns, gateways
        )

    def has_promises(self, pool_id: int) -> bool:
        """Whether gateways promise anything of a pool, as far as this one has seen."""
        return self._gateway_shares[pool_id].has_promises

    def on_gateways_changed(self) -> None:
        """Count on another part of every pool."""
        for share in self._gateway_shares:
            share.divide(self._view.now_ns, self._view.gateways)

    def _divide_memory(self, pool_id: int) -> None:
        """Divide the nodes' memory among the builds of a pool in proportion to their loads."""
        now_ns = self._view.now_ns
        builds = [build for build in self.on_pool[pool_id] if build is not None]
        node_lanes = max(1, self.nodes.per_node[pool_id])
        nodes = self.calendars[pool_id].lanes / node_lanes
        loads = [build.load.erlangs(now_ns) / node_lanes for build in builds]
        pool = builds[0].pool
        used = sum(
            load * room_of(pool, build.variant, build.shape_id)
            for load, build in zip(loads, builds, strict=True)
        )
        scale = nodes / used if used > 0 else 0.0
        for load, build in zip(loads, builds, strict=True):
            self._loads[build.id] = load
            # What a function prefers elsewhere is no reason to keep a node for a little of it.
            least = 1.0 if build is self.of_function[build.function_id][0] else 0.0
            build.share = min(nodes, max(least, load * scale)) if load > LOAD_MIN else 0.0

    def count_instances(self, build: Build) -> int:
        """Number of nodes of the pool that hold a build or are starting it."""
        holders = self._holders[build.id]
        if holders is not None:
            return len(holders) - len(self._on_host[build.id])
        instances, pool = self._view.instances_of[build.variant.id].values(), build.pool
        if build.replicas > 1:
            return len([i for i in instances if i.pool is pool and _is_first(i)])
        return len([i for i in instances if i.residency != ON_HOST and i.pool is pool])

    def _countable(self, build: Build) -> dict[int, Instance] | None:
        """The instances of a build's variant, if each is on a node of the pool of its own."""
        if build.replicas > 1 or len(build.variant.pool_ids) > 1:
            return None
        return self._view.instances_of[build.variant.id]

    def start_ns(self, build: Build, node: Node) -> int:
        """Time until a build can run on a node: a load of weights, a cold start, or nothing."""
        instance = node.instances.get(build.variant.id)
        if instance is None:
            return build.cold_start_ns
        if instance.state == INSTANCE_STARTING:
            end_ns = self.nodes.start_end_ns(instance)
            return build.cold_start_ns if end_ns is None else max(1, end_ns - self._view.now_ns)
        return build.variant.profile.swap_in_ns if instance.residency == ON_HOST else 0

    def wants_instance(self, build: Build) -> bool:
        """Whether a build should be on one more node."""
        if not self._is_scarce[build.pool.id]:
            return True
        return self.count_instances(build) + 0.5 <= build.share

    def must_leave_nodes(self, build: Build) -> bool:
        """Whether a build that no node of its pool holds must take none from the others there.

        Another pool holds its function and is in time as a rule, and no build of this pool has a
        node to spare: it has one at most, or its load would keep the others busy. What nothing was
        sent to for long is spared: where all is refused because the other pool is in time only by
        its profile, this one would stand idle for ever.
        """
        others = [
            b
            for b in self.of_function[build.function_id]
            if b is not build
            and b.warm_pool is None
            and b.cautious_ns(1, ELSEWHERE_MARGIN) <= build.window_ns
        ]
        if not any(self.has_instance(other) for other in others):
            return False
        beside = self.on_pool[build.pool.id]
        unused_ns = self._view.now_ns - SPARE_UNUSED * build.window_ns
        return all(
            b is None or not (self._has_several(b) or self._is_unused(b, unused_ns)) for b in beside
        )

    def _is_unused(self, build: Build, since_ns: float) -> bool:
        """Whether nodes of the pool hold a build, and none has run it since a time."""
        instances = self._view.instances_in(build.variant.id, build.pool.id)
        return bool(instances) and all(i.last_used_ns < since_ns for i in instances)

    def _has_several(self, build: Build) -> bool:
        """Whether a build has more nodes than one, and more than its load needs."""
        left = self.count_instances(build) - 1
        return left > 0 and self._loads[build.id] <= SPARE_LOAD * left

    def may_start_now(self, build: Build) -> bool:
        """Whether a node could start a build without taking it from another build."""
        return not self._is_scarce[build.pool.id]

    def can_spare(self, build: Build, taker: Build) -> bool:
        """Whether a build may lose a node to another one.

        It may if it has more nodes than its share, or if it would have less load per node even
        then than the other has now: shares may add up to more than fits the nodes together.
        """
        count = self.count_instances(build)
        taken = self._loads[taker.id] / max(1, self.count_instances(taker))
        return count - 0.5 >= build.share or (
            count > 1 and self._loads[build.id] / (count - 1) < taken
        )

    def free_in_ns(self, build: Build, enough_ns: int = 0) -> int:
        """Time until a node that holds a build is free, as far as a few of them tell.

        One that is free within `enough_ns` is soon enough: no more are looked at.
        """
        soonest_ns, left = NEVER_NS, HOLDERS_MAX
        enough_ns += self._view.now_ns
        for instance in self._view.instances_of[build.variant.id].values():
            if instance.pool is not build.pool or instance.residency == ON_HOST:
                continue
            if left == 0:
                break
            left -= 1
            node = instance.node
            if node is None:
                continue
            if node.running < build.lanes:
                return 0
            end_ns = self.nodes.end_ns(node)
            soonest_ns = end_ns if end_ns < soonest_ns else soonest_ns
            if end_ns <= enough_ns:
                break
        return max(0, soonest_ns - self._view.now_ns)

    def holders_wait_ns(self, node: Node, build: Build) -> float:
        """How long a batch of a build may hold a node, for the sake of what the node holds as well.

        That is as long as a function can wait that has no other node within reach which holds it.
        Where memory is not scarce all nodes can, and the lanes of the pool tell.
        """
        least_ns, now_ns = inf, self._view.now_ns
        if not self._is_scarce[node.pool.id]:
            return least_ns
        for instance in node.instances.values():
            other = self.on_pool[node.pool.id][instance.variant.function_id]
            if other is None or other is build or self._loads[other.id] <= LOAD_MIN:
                continue
            wait_ns = other.window_ns - other.lane_ns(1)
            if 0.0 < wait_ns < least_ns and not any(
                i.node is not None
                and i.node is not node
                and i.residency != ON_HOST
                and self.nodes.end_ns(i.node) <= now_ns + wait_ns
                for i in self._view.instances_in(other.variant.id, other.pool.id)
            ):
                least_ns = wait_ns
        return least_ns

    def ready_in_ns(self, build: Build, *, may_swap_in: bool = False) -> int:
        """Time until some node can run a build without starting it first; 0 if one can now.

        One whose last lane starts another cannot. With `may_swap_in`, weights on a host may take
        the place of others.
        """
        soonest_ns = build.cold_start_ns
        for instance in self._view.instances_of[build.variant.id].values():
            if instance.pool.id != build.pool.id:
                continue
            if instance.residency == ON_HOST:
                if may_swap_in:
                    soonest_ns = min(soonest_ns, build.variant.profile.swap_in_ns)
            elif instance.state != INSTANCE_STARTING:
                if (wait_ns := self.nodes.lane_in_ns(instance)) == 0:
                    return 0
                soonest_ns = min(soonest_ns, wait_ns)
            else:
                end_ns = self.nodes.start_end_ns(instance)
                if end_ns is not None:
                    soonest_ns = min(soonest_ns, max(0, end_ns - self._view.now_ns))
        return soonest_ns

    def lanes_on(self, node: Node, build: Build) -> int:
        """Batches of this gateway that a node should run at once, when it runs this build.

        A node refuses what its slots cannot take, but does not know of a lower limit. So where
        gateways share it, each keeps to its part of that.
        """
        if self._view.gateways == 1 or build.lanes >= node.slots:
            return build.lanes
        return max(1, ceil(build.lanes * build.calendar.part))

    def lanes_of(self, build: Build) -> int:
        """Lanes on which a build can run without being started first."""
        if build.replicas > 1:
            count = len(self._view.instances_in(build.variant.id, build.pool.id))
            return min(
                count * build.variant.concurrency, self.count_instances(build) * build.per_node
            )
        return self.count_instances(build) * build.per_node

    def lanes_by(self, build: Build, at_ns: int) -> int:
        """Lanes on which a build can run at a time: those of instances that have started by then.

        Where a variant runs in several pools, starts in the others count as well.
        """
        late = self.nodes.late_starts(build.variant.id, at_ns)
        if build.replicas > 1:
            return max(0, self.lanes_of(build) - late * build.variant.concurrency)
        return max(0, (self.count_instances(build) - late) * build.per_node)

    def on_sent(self, build: Build, batch: Batch, start_ns: int) -> None:
        """A batch was sent; `start_ns` is the time that its instance needs first."""
        items, shape_id = batch.items, batch.shape_id
        expected_ns, spread_ns = build.lane_and_spread_ns(items, shape_id)
        end_ns = self._view.now_ns + int(start_ns + expected_ns + END_CAUTION * spread_ns)
        lanes = build.take_lanes(shape_id)
        if build.has_choice:
            build.learn_mix(items, shape_id)
        build.calendar.occupy(end_ns, lanes, spread_ns)
        if build.warm_pool is not None:
            build.warm_pool.lanes.occupy(end_ns, 1, spread_ns)
        if build.own is not None:
            build.own.occupy(end_ns, 1, spread_ns)
        self._runs[batch] = (build, end_ns, lanes, start_ns > 0)
        if batch.node is not None:
            self.nodes.on_sent(batch.node, end_ns)
            if start_ns > 0 and self._is_scarce[build.pool.id]:
                self.nodes.on_started_by(batch.node, build, start_ns)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> Build:
        """A batch of a build has ended: free its lane; learn from it unless it awaited a start."""
        run = self._runs.pop(batch, None)
        if run is None:
            return self.build_of(batch)
        build, end_ns, lanes, was_cold = run
        build.calendar.release(end_ns, lanes)
        if build.warm_pool is not None:
            build.warm_pool.lanes.release(end_ns)
        if build.own is not None:
            build.own.release(end_ns)
        if not was_cold and batch.state == BATCH_FINISHED:  # else its time teaches nothing
            build.observe(batch.items, took_ns, batch.shape_id)
        return build

    def fits_call(self, task: Task) -> bool:
        """Whether a call can carry a task; its function may have no FaaS target."""
        build = self.faas[task.function.id]
        return build is None or self._view.fits_call(task, build.pool, build.variant)

    def fits_node(self, function_id: int, items: int) -> bool:
        """Whether the nodes of some pool can run so many items at once."""
        return items <= self._on_node_max[function_id]

    def has_nodes(self, builds: list[Build], items: int) -> bool:
        """Whether there are nodes now on which one of the builds can run so many items at once.

        Rented ones count if one holds the build: plans start what rented nodes run.
        """
        fitting = [b for b in builds if b.warm_pool is None and items <= b.items_max]
        held = [b for b in fitting if not b.pool.is_elastic or self.has_instance(b)]
        return any(self.is_usable(b) for b in held)

    def build_of(self, batch: Batch) -> Build:
        """The build that a batch ran on."""
        function_id = batch.variant.function_id
        build = self.on_pool[batch.pool.id][function_id] or self.faas[function_id]
        assert build is not None
        return build

    def faas_targets(self) -> list[FaasTarget | None]:
        """The FaaS target of each function, by function id."""
        return [None if b is None or b.warm_pool is None else b.warm_pool.target for b in self.faas]

    def as_promised(self, target: Target) -> Target:
        """A target of a plan with at least one instance for what is promised.

        It has the shape in which the build starts, so that its batches wait for no other. What was
        started beside the first instance of a node stays as long as the node does.
        """
        build = self.on_pool[target.pool_id][self._view.app.variants[target.variant_id].function_id]
        if build is None or build.variant.id != target.variant_id:
            return target
        if build.pending_items > 0 and target.count == 0:
            target = replace(target, count=1)
        if build.replicas > 1:
            target = self._with_replicas(target)
        return replace(target, shape_id=build.start_shape_id) if build.start_shape_id else target

    def _with_replicas(self, target: Target) -> Target:
        """A target of so many nodes, with all instances that they hold, or the first of each.

        Plans stop what is too much node by node, the last one first.
        """
        held: dict[int, int] = {}  # by node id
        for instance in self._view.instances_in(target.variant_id, target.pool_id):
            node_id = NEVER_NS if instance.node is None else instance.node.id
            held[node_id] = held.get(node_id, 0) + 1
        kept = [held[node_id] for node_id in sorted(held)][: target.count]
        return replace(
            target,
            count=sum(kept) + target.count - len(kept),
            rented_max=min(target.rented_max, max(1, target.count)),
        )

    def without_place(self) -> list[int]:
        """The functions that nothing but rented nodes can run in time now."""
        return [
            function_id
            for function_id, builds in enumerate(self.of_function)
            if not any(self._is_place(build) for build in builds)
        ]

    def _is_place(self, build: Build) -> bool:
        is_in_time = build.warm_pool is not None or build.lane_ns(1) <= build.window_ns
        return is_in_time and not build.pool.is_elastic and self.is_usable(build)

    def to_wake(self, function_id: int) -> Build | None:
        """The build to start on a rented node where no node can run a function, nor a call."""
        builds = self.of_function[function_id]
        if any(self.is_usable(build) or self.has_instance(build) for build in builds):
            return None
        failures = self._view.load_failures
        return next((b for b in builds if b.pool.is_elastic and b.variant.id not in failures), None)

    def has_instance(self, build: Build) -> bool:
        """Whether a node of the pool holds the build or is starting it."""
        return self.count_instances(build) > 0

    def is_estimated_and_free(self, request: Request) -> bool:
        """Whether each stage has a build with estimated times, a free lane and nobody waiting.

        A large pool is hardly ever idle: for what never ran there, a free lane has to do.
        """
        now_ns = self._view.now_ns
        return all(
            any(
                build.variant.profile.is_estimate
                and build.calendar.work_ns == 0
                and build.narrowest.has_free_lane(now_ns)
                for build in self.of_function[task.function.id]
            )
            for task in request.tasks
        )

    def may_probe_on(self, build: Build) -> bool:
        """Whether a probe would run at once; or start what nothing but its estimate has kept off.

        It takes no memory from others.
        """
        if self.has_instance(build):
            return self.ready_in_ns(build) == 0
        return build.variant.profile.is_estimate and self.may_start_now(build)

    def is_usable(self, build: Build) -> bool:
        """Whether a build can run at all: there are nodes, and it can be loaded."""
        if build.warm_pool is not None:
            return self._view.is_pool_available(build.pool.id)
        failures = self._view.load_failures
        can_load = not failures or build.variant.id not in failures or self.has_instance(build)
        return build.calendar.lanes > 0 and can_load


def _is_first(instance: Instance) -> bool:
    """Whether an instance stands for its node: it is the oldest one of its variant there."""
    return instance.node is None or instance.node.instances.get(instance.variant.id) is instance


def _windows_ns(app: App) -> tuple[float, float]:
    """The shortest time that a stage can have, and the longest objective."""
    objectives = [p for p in app.pipelines if p.slo.latency_ns < NEVER_NS]
    if not objectives:
        return _DEFAULT_WINDOW_NS, _DEFAULT_WINDOW_NS
    shortest = min(p.slo.latency_ns / len(p.stages) for p in objectives)
    return shortest, max(p.slo.latency_ns for p in objectives)
