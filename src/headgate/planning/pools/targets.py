"""Where a function can run and at what price: nodes by the hour, or FaaS platforms by the call.

A `NodeTarget` is a variant in a dedicated pool, a `FaasTarget` a variant in a serverless pool; both
are records of what is declared and do not change. `Targets` lists both for every function.
`choose_faas_target` picks the one platform that a function uses where it uses only one. `nodes_for`
and `newsvendor_nodes` say how many nodes serve a rate, and how many are worth their price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import final

from headgate.core.model import App, FaasPlatform, Function, Pool, Variant
from headgate.core.records import Task
from headgate.core.view import View
from headgate.planning.pools.concurrency import ConcurrencyLimits, rate_per_s


@dataclass(frozen=True)
class NodeTarget:
    """A function on nodes of one dedicated pool."""

    variant: Variant
    pool: Pool
    limit: int  # concurrency within the objective; at least 1 without a FaaS target
    rate_per_s: float  # throughput of one node at that concurrency
    usd_per_s: float  # rent of one node

    @property
    def usd_per_request(self) -> float:
        """Cost of a request on a node that is always at its limit."""
        return self.usd_per_s / self.rate_per_s if self.rate_per_s else inf


@dataclass(frozen=True)
class FaasTarget:
    """A function on one FaaS platform: time and cost of a call of one item on a warm instance."""

    variant: Variant
    pool: Pool
    platform: FaasPlatform  # of the pool
    call_ns: int  # with the network, there and back
    call_usd: float

    def fits(self, view: View, task: Task) -> bool:
        """Whether a task fits one call: its number of items and its payload."""
        return view.fits_call(task, self.pool, self.variant)

    def is_available(self, view: View) -> bool:
        """Whether the platform can take a call now: its circuit breaker allows one."""
        return view.is_pool_available(self.pool.id)

    def is_below_concurrency_max(self, view: View) -> bool:
        """Whether our own calls in flight are below the platform's concurrency limit."""
        breaker = view.breakers[self.pool.id]
        assert breaker is not None
        return breaker.in_flight < self.platform.concurrency_max


@final
class Targets:
    """The node targets and the FaaS targets of each function, both cheapest first."""

    def __init__(self, app: App, limits: ConcurrencyLimits) -> None:
        self.faas = [tuple(_cheapest_first(app, function)) for function in app.functions]
        self.nodes = [
            tuple(_node_targets(app, function, limits, bool(self.faas[function.id])))
            for function in app.functions
        ]

    def can_spill(self, view: View, task: Task) -> bool:
        """Whether a task fits a call of any of its platforms. O(FaaS targets)."""
        return any(target.fits(view, task) for target in self.faas[task.function.id])

    def available_faas(self, view: View, task: Task) -> FaasTarget | None:
        """The cheapest platform that can take a task now. O(FaaS targets)."""
        for target in self.faas[task.function.id]:
            if (
                target.is_available(view)
                and target.is_below_concurrency_max(view)
                and target.fits(view, task)
            ):
                return target
        return None

    def elastic(self, function_id: int) -> list[NodeTarget]:
        """The node types to rent for a function: the cheapest within the objective first."""
        return [target for target in self.nodes[function_id] if target.pool.is_elastic]

    def cheapest_elastic(self, function_id: int) -> NodeTarget | None:
        """The first node type to rent for a function; None if it runs on no elastic pool."""
        return next(iter(self.elastic(function_id)), None)

    def spill_usd(self, function_id: int) -> float:
        """Cost of a call on the cheapest platform; infinite if there is none."""
        return min((target.call_usd for target in self.faas[function_id]), default=inf)


def faas_targets(app: App, function: Function) -> list[FaasTarget]:
    """Every variant of a function on every FaaS platform that runs it, in the order declared."""
    targets: list[FaasTarget] = []
    for pool in app.pools:
        for variant in function.variants:
            if pool.faas is not None and pool.id in variant.pool_ids:
                exec_ns = variant.profile.exec_ns[0]
                call_ns = exec_ns + 2 * pool.network_ns
                call_usd = pool.faas.usd(exec_ns)
                targets.append(FaasTarget(variant, pool, pool.faas, call_ns, call_usd))
    return targets


def within_host(target: FaasTarget) -> FaasTarget:
    """A target with the concurrency that is of use: more calls than its host has CPUs are not."""
    host, platform = target.pool.host, target.platform
    if host is None:
        return target
    calls = max(1, host.cpu_milli // target.variant.wanted_cpu_milli())
    platform = replace(platform, concurrency_max=min(platform.concurrency_max, calls))
    return replace(target, platform=platform)


def choose_faas_target(app: App, function: Function) -> FaasTarget | None:
    """The cheapest platform for a function within its objectives.

    If no platform is within them, the fastest one is used, but only for a function of which no node
    takes as many items as a platform.
    """
    slos = [p.slo for p in app.pipelines if any(s.function is function for s in p.stages)]
    allowed_ns = min((slo.latency_ns for slo in slos), default=0)
    targets = faas_targets(app, function)
    in_time = [target for target in targets if target.call_ns <= allowed_ns]
    if in_time:
        return min(in_time, key=lambda target: target.call_usd)
    if _items_max(app, function, on_faas=False) >= _items_max(app, function, on_faas=True):
        return None
    return min(targets, key=lambda target: target.call_ns, default=None)


def _items_max(app: App, function: Function, *, on_faas: bool) -> int:
    """The most items that a platform, or else a node, takes at once; 0 where there is none."""
    return max(
        (
            variant.profile.items_max
            for variant in function.variants
            for id in variant.pool_ids
            if (app.pools[id].faas is not None) == on_faas
        ),
        default=0,
    )


def _cheapest_first(app: App, function: Function) -> list[FaasTarget]:
    """The FaaS targets by price: of each pool the variant that nodes of a pool would run too."""
    targets = [
        target
        for target in faas_targets(app, function)
        if app.variants_on(target.pool.id)[function.id] is target.variant
    ]
    return sorted(targets, key=lambda target: (target.call_usd, target.pool.id))


def _node_targets(
    app: App, function: Function, limits: ConcurrencyLimits, has_faas: bool
) -> list[NodeTarget]:
    targets: list[NodeTarget] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.faas is None and variant is not None:
            limit = max(limits.limit(pool, variant), 0 if has_faas else 1)
            rate = rate_per_s(variant.profile, limit)
            targets.append(NodeTarget(variant, pool, limit, rate, pool.usd_per_hour / 3_600))
    # Targets that miss the objective even at concurrency 1 come last, however cheap.
    return sorted(
        targets, key=lambda target: (not target.rate_per_s, target.usd_per_request, target.pool.id)
    )


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
