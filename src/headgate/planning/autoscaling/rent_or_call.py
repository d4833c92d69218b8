"""How many nodes to rent beside a FaaS platform: ski rental, rate-based and newsvendor sizing.

Rent-or-call is ski rental. Demand is divided into levels: the first node takes as much as one node
can, the second what exceeds that, and so on. Each level can be served by a rented node or by calls,
and switching to the node costs a boot. For each level (marginal node) we accumulate regret: the
cost that the other option would have saved since the regret was last zero. We switch when regret
exceeds a fraction of the cost of one boot. The fraction to start grows with the index of dispersion
of arrivals: with steady arrivals a rise of demand is a signal, with bursty ones it may be noise.
The fraction to stop grows if the node was needed again within 15 minutes of its last release.

`RentalLadder` applies the rule to one function on one pool. Where a function has an objective, a
pool of its own, one shape and no platform to call, nothing is there to compare with: the nodes are
those that the objective needs (`fleet_size`). Functions that share a pool would each ask for all of
it. `NodeAutoscaler` has one or the other for every function and elastic pool. The functions below
size a fleet for a rate (`nodes_for`) or by cost (`newsvendor_nodes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final, final

from headgate.core.clock import HOUR_NS, MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Slo, Variant
from headgate.core.policy import Target
from headgate.planning.autoscaling.fleet_size import FleetSize
from headgate.planning.forecast import Dispersion
from headgate.planning.pools.concurrency import (
    ConcurrencyLimits,
    KneeLimits,
    budgets_ns,
    tightest_objectives_ns,
)
from headgate.planning.pools.targets import FaasTarget
from headgate.planning.pools.warm_pool import burst_of

_OFF: Final = 0
_BOOTING: Final = 1
_ON: Final = 2

# Regret, in costs of a boot, that starts a node (for Poisson arrivals) and that stops it.
_START_REGRET: Final = 0.15
_STOP_REGRET: Final = 0.25
_STOP_REGRET_MAX: Final = 4.0
_STOP_REGRET_STEP: Final = 4.0  # factor if the node was needed again soon after a stop
_NEEDED_AGAIN_NS: Final = 15 * MINUTE_NS  # "soon"
_WINDOW_NS: Final = 5 * SECOND_NS  # of the index of dispersion
# Time that a request may take if it has no objective.
ALLOWED_NS: Final = SECOND_NS
# Cost of a missed request where no FaaS target exists, in rent per request.
_DISPERSION_MEMORY_NS: Final = 30 * MINUTE_NS  # time constant of the index of dispersion
_MISS_COST: Final = 20.0


@final
class RentalLevel:
    """One marginal node: the demand it would serve, and whether to rent it."""

    __slots__ = (
        "_boots_until_ns",
        "_regret_usd",
        "_released_ns",
        "_state",
        "_stop_regret",
        "calls",
        "free_ns",
    )

    def __init__(self, *, is_on: bool) -> None:
        self.calls = 0  # requests since the last update that the node would have served
        self.free_ns = 0.0  # when the (virtual) node is free
        self._state = _ON if is_on else _OFF
        self._regret_usd = 0.0  # what the other option would have saved since it was last 0
        self._boots_until_ns = 0
        self._released_ns = -_NEEDED_AGAIN_NS
        self._stop_regret = _STOP_REGRET

    @property
    def is_wanted(self) -> bool:
        """Whether to rent the node."""
        return self._state != _OFF

    @property
    def is_idle(self) -> bool:
        """Whether the node is not rented, nothing called for it, and no regret is left to decay.

        An interval leaves such a level as it is: no rent is smaller than nothing saved.
        """
        return not self.calls and self._state == _OFF and not self._regret_usd

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
        threshold = self._stop_regret if self._state == _ON else _START_REGRET * burstiness
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
        if now_ns - self._released_ns < _NEEDED_AGAIN_NS:
            self._stop_regret = min(_STOP_REGRET_STEP * self._stop_regret, _STOP_REGRET_MAX)
        else:
            self._stop_regret = max(self._stop_regret / _STOP_REGRET_STEP, _STOP_REGRET)


@final
class RentalLadder:
    """The number of nodes worth their rent. O(levels) per arrival and per `desired_nodes`.

    A node takes the requests that it can finish within `allowed_ns`, at `service_interval_ns` per
    request; the others go to the next level. The first `own_levels` levels are nodes that are not
    rented: they take demand, but are never evaluated or counted. `call_usd` is the cost of a call.
    """

    def __init__(
        self,
        count: int,
        *,
        standing: int,
        own_levels: int = 0,
        allowed_ns: int,
        service_interval_ns: float,
        call_usd: float,
        rent_usd_per_s: float,
        boot_ns: int,
        memory_ns: int,
    ) -> None:
        self._levels = [RentalLevel(is_on=number < standing) for number in range(count)]
        self._fill_order = [*(RentalLevel(is_on=True) for _ in range(own_levels)), *self._levels]
        self._allowed_ns = allowed_ns
        self._service_interval_ns = service_interval_ns
        self._call_usd = call_usd
        self._rent_usd_per_s = rent_usd_per_s
        self._boot_ns = boot_ns
        self._dispersion = Dispersion(_WINDOW_NS, memory_ns)
        self._updated_ns: int | None = None
        self._wanted = min(standing, count)

    def on_arrival(self, now_ns: int, items: int, gateways: int = 1) -> None:
        """Record an arrival, admitted or not; the other gateways are taken to receive one each."""
        if self._updated_ns is None:
            self._updated_ns = now_ns
        self._dispersion.observe(now_ns, items)
        for _ in range(gateways):
            self._fill(now_ns, items)

    def _fill(self, now_ns: int, items: int) -> None:
        """Give a request to the first level that is done with it in time."""
        work_ns = self._service_interval_ns * items
        for level in self._fill_order:
            done_ns = max(now_ns, level.free_ns) + work_ns
            if done_ns <= now_ns + self._allowed_ns:
                level.free_ns = done_ns
                level.calls += items
                return

    def desired_nodes(self, now_ns: int, gateways: int = 1) -> int:
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
            saved_usd = level.calls * self._call_usd
            level.calls = 0
            if level.should_switch(now_ns, saved_usd, rent_usd, boot_usd, burstiness):
                level.switch(now_ns, self._boot_ns)
                self._wanted += 1 if level.is_wanted else -1


@final
class NodeAutoscaler:
    """The nodes to rent in elastic pools, per function: by its objective, or by a `RentalLadder`.

    A node is worth what it serves at its concurrency limit. `faas_targets` are by function id.
    """

    def __init__(self, app: App, faas_targets: Sequence[FaasTarget | None]) -> None:
        limits, memory_ns = KneeLimits(app, default_ns=ALLOWED_NS), _DISPERSION_MEMORY_NS
        self._faas_targets = faas_targets
        self._ladders: list[list[tuple[Variant, Pool, RentalLadder | FleetSize]]] = [
            [
                (variant, pool, self._sizing(app, function, variant, pool, limits, memory_ns))
                for pool in app.pools
                for variant in function.variants
                if pool.is_elastic and pool.id in variant.pool_ids
            ]
            for function in app.functions
        ]

    def _sizing(
        self,
        app: App,
        function: Function,
        variant: Variant,
        pool: Pool,
        limits: ConcurrencyLimits,
        memory_ns: int,
    ) -> RentalLadder | FleetSize:
        latency_ns = budgets_ns(app)[function.id]
        users = [f for f in app.functions if any(pool.id in v.pool_ids for v in f.variants)]
        has_choice = len(users) > 1 or len(variant.shapes) > 1
        has_choice = has_choice or self._faas_targets[function.id] is not None
        if has_choice or latency_ns == NEVER_NS:
            return self._ladder(app, function, variant, pool, limits, memory_ns)
        concurrency = min(limits.limit(pool, variant), pool.count_of(variant.shape))
        slos = [p.slo for p in app.pipelines if any(s.function is function for s in p.stages)]
        return FleetSize(
            pool.nodes,
            standing=min(function.prewarm_nodes, pool.nodes),
            slo=Slo(
                latency_ns - 2 * pool.network_ns,
                max(slo.quantile for slo in slos),
                rate_tolerance=burst_of(app, function),
            ),
            exec_ns=variant.profile.time_ns(1, concurrency),
            concurrency=concurrency,
            ready_after_ns=pool.boot_ns + variant.profile.cold_start_ns,
            own_per_s=_static_rate_per_ns(app, function, limits) * SECOND_NS,
        )

    def _ladder(
        self,
        app: App,
        function: Function,
        variant: Variant,
        pool: Pool,
        limits: ConcurrencyLimits,
        memory_ns: int,
    ) -> RentalLadder:
        allowed_ns = tightest_objectives_ns(app)[function.id]
        service_interval_ns = _service_interval_ns(pool, variant, limits)
        target = self._faas_targets[function.id]
        # Without a FaaS price to compare with, any rent above 0 gives the same decisions.
        usd_per_hour = 1.0 if target is None else pool.usd_per_hour
        rent_usd_per_s = usd_per_hour / (HOUR_NS / SECOND_NS)
        miss_usd = _MISS_COST * rent_usd_per_s * service_interval_ns / SECOND_NS
        return RentalLadder(
            pool.nodes,
            standing=min(function.prewarm_nodes, pool.nodes),
            own_levels=int(_static_rate_per_ns(app, function, limits) * service_interval_ns),
            allowed_ns=ALLOWED_NS if allowed_ns == NEVER_NS else allowed_ns,
            service_interval_ns=service_interval_ns,
            call_usd=miss_usd if target is None else target.call_usd,
            rent_usd_per_s=rent_usd_per_s,
            boot_ns=pool.boot_ns + variant.profile.cold_start_ns,
            memory_ns=memory_ns,
        )

    @property
    def is_needed(self) -> bool:
        """Whether a function runs on an elastic pool."""
        return any(self._ladders)

    def on_arrival(self, now_ns: int, pipeline: Pipeline, items: int, gateways: int = 1) -> None:
        """Record an arrival, admitted or not: one of those that all gateways receive."""
        for stage in pipeline.stages:
            for _, _, ladder in self._ladders[stage.function.id]:
                ladder.on_arrival(now_ns, items, gateways)

    def targets(
        self,
        now_ns: int,
        unavailable_pools: Sequence[int],
        functions_needed: Sequence[int] = (),
        gateways: int = 1,
    ) -> tuple[Target, ...]:
        """The desired instances now, for what all gateways receive together.

        At least one for a function without an available FaaS target, or that needs a node.
        """
        targets: list[Target] = []
        for function_id, ladders in enumerate(self._ladders):
            target = self._faas_targets[function_id]
            can_call = target is not None and target.pool.id not in unavailable_pools
            least = 0 if can_call and function_id not in functions_needed else 1
            for variant, pool, ladder in ladders:
                count = max(least, ladder.desired_nodes(now_ns, gateways))
                targets.append(Target(variant.id, pool.id, count, is_shared=gateways > 1))
        return tuple(targets)


def _service_interval_ns(pool: Pool, variant: Variant, limits: ConcurrencyLimits) -> float:
    """Time per request on a node that runs at its concurrency limit."""
    concurrency = limits.limit(pool, variant)
    return variant.profile.time_ns(1, concurrency) / concurrency


def _static_rate_per_ns(app: App, function: Function, limits: ConcurrencyLimits) -> float:
    """Throughput of a function on nodes that are not rented; functions share a pool evenly."""
    per_ns = 0.0
    for pool in app.pools:
        variants = app.variants_on(pool.id)
        variant = variants[function.id]
        if variant is not None and pool.faas is None and not pool.is_elastic:
            sharers = sum(1 for other in variants if other is not None)
            per_ns += pool.nodes / sharers / _service_interval_ns(pool, variant, limits)
    return per_ns


def nodes_for(rate_per_s: float, node_rate_per_s: float) -> int:
    """Number of nodes that serve a rate; 0 if a node serves nothing.

    >>> nodes_for(21.0, 10.0), nodes_for(0.0, 10.0), nodes_for(5.0, 0.0)
    (3, 0, 0)
    """
    if node_rate_per_s <= 0:
        return 0
    return ceil(rate_per_s / node_rate_per_s - 1e-9)


def newsvendor_nodes(
    buckets: Sequence[float], node_takes: float, node_usd: float, spill_usd: float, most: int
) -> int:
    """Number of nodes that cost less than the calls they save: the newsvendor rule.

    `buckets` are amounts of demand in intervals of equal length. In each, a node takes `node_takes`
    and costs `node_usd`; the rest is spilled at `spill_usd` each. A node is added while the demand
    that it alone takes would cost more as calls. Steady demand keeps a node busy, so nodes pay off
    up to the mean; volatile demand leaves a node mostly idle, so fewer pay off.

    >>> newsvendor_nodes([10.0] * 4, node_takes=4.0, node_usd=1.0, spill_usd=0.4, most=9)
    2
    >>> newsvendor_nodes([0.0, 0.0, 0.0, 40.0], 4.0, 1.0, 0.4, most=9)
    0
    """
    if node_takes <= 0 or not buckets:
        return 0
    nodes = 0
    while nodes < most:
        below = nodes * node_takes
        saved = sum(min(max(amount - below, 0.0), node_takes) for amount in buckets) / len(buckets)
        # A node that saves nothing is not added, even if calls have an infinite price.
        if saved <= 0.0 or node_usd >= saved * spill_usd:
            break
        nodes += 1
    return nodes
