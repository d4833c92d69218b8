"""Provisioning: of which builds more instances are needed, and how many nodes are rented for them.

Demand is what arrives, admitted or not. A request that was refused asks for what it lacked, for the
sake of those that follow. A function that nothing runs is woken by a request that can wait for a
node to boot. Everything else about elastic pools is a matter of the forecast (`NodeAutoscaler`):
its targets are ordered by plans, and before the first request where gateways share the pools.

On which node an instance starts, and what makes room for it there, is for `Placement`; how many
instances a FaaS platform keeps warm, for `Spillover`. To start them is the caller's part, one after
the other: a start takes room, so the next one is chosen when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.model import Pool, Variant
from headgate.core.policy import Target
from headgate.core.records import Node, Request
from headgate.core.view import View
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.autoscaling.rent_or_call import NodeAutoscaler
from headgate.planning.constants import LOADED_WORK
from headgate.planning.dispatch.placement import Placement
from headgate.planning.dispatch.task_queues import TaskQueues
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.node_room import room_of, within_room


@final
class Provisioner:
    """Says what arrivals need more of, and how many instances are wanted in elastic pools."""

    def __init__(
        self,
        view: View,
        builds: Builds,
        admission: AdmissionControl,
        queues: TaskQueues,
        placement: Placement,
    ) -> None:
        self._view = view
        self._builds = builds
        self._admission = admission
        self._queues = queues
        self._placement = placement
        self._autoscaler = NodeAutoscaler(
            view.app, builds.faas_targets(), shares_nodes=view.gateways == 1
        )
        self.rents = self._autoscaler.is_needed
        self.plan_every_ns = SECOND_NS if self.rents else 0
        self._has_faas = any(build is not None for build in builds.faas)

    def to_wake(self, request: Request) -> tuple[Build, Node] | None:
        """The build to start next, on a rented node, for a request that can wait for it.

        It is of a function that nothing runs now. Where gateways share pools, only plans rent.
        """
        if self._view.gateways > 1:
            return None
        for task in request.tasks:
            if self._autoscaler.can_wait(task.function.id):
                build = self._builds.to_wake(task.function.id)
                node = None if build is None else self._placement.rentable_node(build)
                if build is not None and node is not None:
                    return build, node
        return None

    def on_arrival(self, request: Request, *, was_admitted: bool) -> list[Build]:
        """Count a request in the forecast; the builds that requests like it need more of.

        Those are the calls that it can pay for, and where it was refused whatever takes time to
        start: of others, tasks that wait start what they need.
        """
        if self.rents:
            self._forecast(request, was_admitted=was_admitted)
        needed: list[Build] = []
        if request.deadline_ns >= NEVER_NS or (was_admitted and not self._has_faas):
            return needed
        for task in request.tasks:
            for build in self._admission.budgets.affordable(task):
                if build.warm_pool is not None or (not was_admitted and build.cold_start_ns > 0):
                    needed.append(build)
        return needed

    def _forecast(self, request: Request, *, was_admitted: bool) -> None:
        late = self._admission.late_stage
        stages = None if was_admitted else () if late is None else (late,)
        now_ns, gateways = self._view.now_ns, self._view.gateways
        self._autoscaler.on_arrival(now_ns, request.pipeline, request.items, gateways, stages)

    def targets(self) -> tuple[Target, ...]:
        """The instances that are wanted in elastic pools now, with what promises need.

        What tasks wait for is started first: the slots of a node may not last for the rest.
        """
        without_place, waiting = self._builds.without_place(), self._queues.needing_nodes()
        now_ns, gateways = self._view.now_ns, self._view.gateways
        targets = self._autoscaler.targets(now_ns, without_place, waiting, gateways)
        filled = self._filled() if gateways == 1 else {}
        if gateways == 1:
            wanted = {target.pool_id for target in targets if target.count > 0}
            self._builds.unwanted_pools = {target.pool_id for target in targets} - wanted
        promised = [self._builds.as_promised(self._to_keep(each, filled)) for each in targets]
        within = self._within_room(promised)
        return tuple(sorted(within, key=self._is_awaited, reverse=True))

    def _within_room(self, targets: list[Target]) -> tuple[Target, ...]:
        """The targets, without starts for which nothing waits and no node has room beside the rest.

        Every plan would start again what the last start has evicted, or had idle for too long. The
        functions with most work come first, and what is loaded gives way only to those that have
        far more.
        """
        app, within = self._view.app, list(targets)
        for pool in app.pools:
            if not (self._autoscaler.is_scarce(pool.id) or self._takes_turns(pool)):
                continue
            own = [index for index, each in enumerate(targets) if each.pool_id == pool.id]
            own.sort(key=lambda index: self._precedence(targets[index]), reverse=True)
            wanted = [
                (self._room_of(pool, app.variants[each.variant_id], each.shape_id), each.count)
                for each in map(targets.__getitem__, own)
            ]
            for index, count in zip(own, within_room(wanted, pool.nodes), strict=True):
                target = targets[index]
                if count < target.count and not self._is_awaited(target):
                    present = len(self._view.instances_in(target.variant_id, target.pool_id))
                    within[index] = replace(target, count=min(target.count, max(count, present)))
        return tuple(within)

    def _takes_turns(self, pool: Pool) -> bool:
        """Whether starts of some function stop the others on a node of an elastic pool."""
        return pool.is_elastic and any(
            build is not None and _stops_others(pool, build.variant)
            for build in self._builds.on_pool[pool.id]
        )

    def _room_of(self, pool: Pool, variant: Variant, shape_id: int) -> float:
        """The part of a node that an instance takes from others: all of it if they would stop."""
        return 1.0 if _stops_others(pool, variant) else room_of(pool, variant, shape_id)

    def _is_awaited(self, target: Target) -> bool:
        """Whether tasks wait for an instance of a target."""
        function_id = self._view.app.variants[target.variant_id].function_id
        build = self._builds.on_pool[target.pool_id][function_id]
        is_promised = build is not None and build.pending_items > 0
        return is_promised or self._queues.has_best_effort(function_id)

    def _precedence(self, target: Target) -> tuple[bool, float]:
        """Whether tasks wait for an instance of a target, and how much work there is for it."""
        function_id = self._view.app.variants[target.variant_id].function_id
        work_ns = self._autoscaler.recent_work_ns(target.pool_id, function_id)
        is_loaded = bool(self._view.instances_in(target.variant_id, target.pool_id))
        return self._is_awaited(target), work_ns * (LOADED_WORK if is_loaded else 1.0)

    def _filled(self) -> dict[int, float]:
        """By elastic pool: the nodes that would be full of what runs and what is promised."""
        filled: dict[int, float] = {}
        nodes_filled = self._autoscaler.nodes_filled
        for batch in self._view.batches.values():
            if batch.node is not None and batch.pool.is_elastic:
                part = nodes_filled(batch.pool.id, batch.variant.function_id, batch.items)
                filled[batch.pool.id] = filled.get(batch.pool.id, 0.0) + part
        for pool in self._view.app.pools:
            for build in self._builds.on_pool[pool.id] if pool.is_elastic else ():
                if build is not None and build.pending_items > 0:
                    part = nodes_filled(pool.id, build.function_id, build.pending_items)
                    filled[pool.id] = filled.get(pool.id, 0.0) + part
        return filled

    def _to_keep(self, target: Target, filled: Mapping[int, float]) -> Target:
        """The target, with those that stay for other gateways; how it is reached if there is none.

        Work is spread over all nodes, so none may ever be idle. They drain if those that stay have
        room for all of it.
        """
        if not target.is_shared:
            return replace(target, drains=filled.get(target.pool_id, 0.0) <= target.count)
        present = len(self._view.instances_in(target.variant_id, target.pool_id))
        return self._autoscaler.with_surplus(self._view.now_ns, target, present)

    def standing_orders(self) -> list[tuple[int, Target]]:
        """What is pre-warmed where gateways share pools: at least so many instances of a target.

        The first instance of every function comes before the second of any.
        """
        if self._view.gateways == 1:
            return []
        targets = self.targets()
        most = max((target.count for target in targets), default=0)
        return [(nth, each) for nth in range(1, 1 + most) for each in targets if nth <= each.count]


def _stops_others(pool: Pool, variant: Variant) -> bool:
    """Whether a start takes the only slot of a node until everything else there has stopped.

    It is idle for too long meanwhile. To start it again stops the other in turn.
    """
    return pool.slots == 1 and variant.profile.cold_start_ns > pool.idle_timeout_ns
