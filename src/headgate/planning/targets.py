"""Where a function can run and at what price: nodes by the hour, or FaaS platforms by the call.

A `NodeOption` is a variant in a dedicated pool, a `FaasOption` a variant in a serverless pool.
`Targets` lists both for every function. A `FaasTarget` is the FaaS option that the `headgate`
policy uses for a function, with its estimate of warm instances and of the demand for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, inf
from typing import Final, final

from headgate.core.model import App, FaasPlatform, Function, Pool, Variant
from headgate.core.records import Task
from headgate.core.view import View
from headgate.planning.concurrency import Thresholds, rate_per_s


@final
class WarmPoolEstimate:
    """Estimate of the warm instances that a FaaS platform has of one function.

    Platforms do not report this. But a platform reuses the most recently used instance, removes an
    instance that has been idle for its keep-alive, and keeps warm what it was ordered to keep warm.
    So a client that sends all the calls can compute the number. Methods are O(1) amortised.
    """

    def __init__(self, platform: FaasPlatform, start_ns: int) -> None:
        self._keep_alive_ns = platform.keep_alive_ns
        self._start_ns = start_ns
        self._provisioning_ns = platform.provisioning_ns
        self._idle_since_ns: list[int] = []  # a stack: the most recently used instance is last
        self.busy = 0  # calls in flight
        self.desired = 0  # warm instances requested
        self._ready = 0  # of those, started
        # (ready at, ready count from then on), earliest first.
        self._starting: list[tuple[int, int]] = []

    def set_desired(self, now_ns: int, count: int, *, is_provisioned: bool = False) -> None:
        """Set how many instances the platform keeps warm from now on; new ones take time."""
        ready_in_ns = self._provisioning_ns if is_provisioned else self._start_ns
        size = self.size(now_ns)
        self.desired = count
        if count <= size:
            self._ready, self._starting = count, []
            return
        self._starting = [(at_ns, min(ready, count)) for at_ns, ready in self._starting]
        if not self._starting or self._starting[-1][1] < count:
            self._starting.append((now_ns + ready_in_ns, count))

    def is_starting(self, now_ns: int) -> bool:
        """Whether requested instances are still starting."""
        return self.next_ready_ns(now_ns) is not None

    def next_ready_ns(self, now_ns: int) -> int | None:
        """When the next requested instance is ready; None if none is starting."""
        self._mark_started(now_ns)
        return self._starting[0][0] if self._starting else None

    def size(self, now_ns: int) -> int:
        """Number of instances, busy or idle."""
        self._expire_idle(now_ns)
        self._mark_started(now_ns)
        return max(self.busy + len(self._idle_since_ns), self._ready)

    def idle(self, now_ns: int) -> int:
        """Number of idle warm instances."""
        return self.size(now_ns) - self.busy

    def on_call(self, now_ns: int) -> None:
        """Record a call that is sent."""
        self._expire_idle(now_ns)
        if self._idle_since_ns:
            self._idle_since_ns.pop()
        self.busy += 1

    def on_return(self, now_ns: int, *, ran: bool) -> None:
        """Record the end of a call; if it ran, its instance is warm now."""
        self.busy -= 1
        if ran:
            self._idle_since_ns.append(now_ns)

    def _mark_started(self, now_ns: int) -> None:
        while self._starting and self._starting[0][0] <= now_ns:
            self._ready = self._starting.pop(0)[1]

    def _expire_idle(self, now_ns: int) -> None:
        idle = self._idle_since_ns
        expired = 0
        while expired < len(idle) and now_ns - idle[expired] >= self._keep_alive_ns:
            expired += 1
        if expired:
            del idle[:expired]


_HEADROOM: Final = 1.25  # warm instances relative to the largest recent demand


@dataclass(frozen=True)
class NodeOption:
    """A function on nodes of one dedicated pool."""

    variant: Variant
    pool: Pool
    threshold: int  # largest concurrency within the objective; at least 1 without a FaaS option
    rate_per_s: float  # throughput of one node at that concurrency
    usd_per_s: float  # rent of one node

    @property
    def usd_per_request(self) -> float:
        """Cost of a request on a node that is always at its threshold."""
        return self.usd_per_s / self.rate_per_s if self.rate_per_s else inf


@dataclass(frozen=True)
class FaasOption:
    """A function on a FaaS platform."""

    variant: Variant
    pool: Pool
    usd_per_request: float  # of one item, on a warm instance


@final
class Targets:
    """The node options and the FaaS options of each function, both cheapest first."""

    def __init__(self, app: App, thresholds: Thresholds) -> None:
        self.faas_options = [tuple(_faas_options(app, function)) for function in app.functions]
        self.node_options = [
            tuple(_node_options(app, function, thresholds, bool(self.faas_options[function.id])))
            for function in app.functions
        ]

    def can_spill(self, view: View, task: Task) -> bool:
        """Whether a task fits a call of any of its platforms. O(FaaS options)."""
        for option in self.faas_options[task.function.id]:
            if view.fits_call(task, option.pool, option.variant):
                return True
        return False

    def available_faas_option(self, view: View, task: Task) -> FaasOption | None:
        """The cheapest platform that can take a task now. O(FaaS options)."""
        for option in self.faas_options[task.function.id]:
            if (
                view.is_pool_available(option.pool.id)
                and _is_below_concurrency_max(view, option.pool)
                and view.fits_call(task, option.pool, option.variant)
            ):
                return option
        return None

    def elastic_node_option(self, function_id: int) -> NodeOption | None:
        """The node type to rent for a function: the cheapest per request within the objective."""
        return next(
            (option for option in self.node_options[function_id] if option.pool.is_elastic), None
        )

    def spill_usd(self, function_id: int) -> float:
        """Cost of a call on the cheapest platform; infinite if there is none."""
        return min(
            (option.usd_per_request for option in self.faas_options[function_id]), default=inf
        )


def _is_below_concurrency_max(view: View, pool: Pool) -> bool:
    """Whether our own calls in flight are below the platform's concurrency limit."""
    breaker, platform = view.breakers[pool.id], pool.faas
    assert breaker is not None
    assert platform is not None
    return breaker.in_flight < platform.concurrency_max


def _faas_options(app: App, function: Function) -> list[FaasOption]:
    options: list[FaasOption] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.faas is not None and variant is not None:
            usd = pool.faas.usd(variant.profile.time_ns(1))
            options.append(FaasOption(variant, pool, usd))
    return sorted(options, key=lambda option: (option.usd_per_request, option.pool.id))


def _node_options(
    app: App, function: Function, thresholds: Thresholds, has_faas: bool
) -> list[NodeOption]:
    options: list[NodeOption] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.faas is None and variant is not None:
            threshold = max(thresholds.of(variant, pool), 0 if has_faas else 1)
            rate = rate_per_s(variant.profile, threshold)
            options.append(NodeOption(variant, pool, threshold, rate, pool.usd_per_hour / 3_600))
    # Options that miss the objective even at concurrency 1 come last, however cheap.
    return sorted(
        options, key=lambda option: (not option.rate_per_s, option.usd_per_request, option.pool.id)
    )


@final
class FaasTarget:
    """One function on one platform: time and cost of a call, and the warm instances to keep."""

    def __init__(
        self, pool: Pool, platform: FaasPlatform, variant: Variant, burst: float, memory_ns: int
    ) -> None:
        self.pool = pool
        self.variant = variant
        self.call_ns = variant.profile.exec_ns[0] + 2 * pool.network_ns
        self.call_usd = platform.usd(variant.profile.exec_ns[0])
        self.warm_pool = WarmPoolEstimate(
            platform, variant.profile.cold_start_ns + 2 * pool.network_ns
        )
        self.warm_requested = 0  # warm instances last requested
        self._platform = platform
        self._headroom = max(burst, _HEADROOM)
        self._memory_ns = memory_ns
        self._peak = 0.0  # largest recent demand in concurrent calls, which decays
        self._peak_ns = 0
        self._busy_ns = 0.0  # recent execution time of calls, which decays likewise

    def observe_demand(self, now_ns: int, calls: float) -> None:
        """Observe that this many concurrent calls are needed now."""
        self._decay(now_ns)
        self._peak = max(self._peak, calls)

    def on_call(self, now_ns: int) -> None:
        """Record a call that is sent."""
        self._decay(now_ns)
        self._busy_ns += self.call_ns
        self.warm_pool.on_call(now_ns)

    def desired_warm(self, now_ns: int) -> int:
        """How many instances to keep warm now."""
        self._decay(now_ns)
        count = ceil(self._headroom * self._peak) if self._peak > 0.05 else 0
        return min(count, self._platform.concurrency_max)

    def is_provisioned_cheaper(self, count: int) -> bool:
        """Whether provisioned instances are cheaper than pinged ones at the recent utilisation."""
        platform = self._platform
        if platform.provisioned_usd_per_gb_s <= 0.0 or count == 0:
            return False
        if platform.ping_every_ns == 0:  # no keep-alive: pings keep nothing warm
            return True
        busy = min(1.0, self._busy_ns / self._memory_ns / count)
        gigabytes = platform.gigabytes
        saved = busy * gigabytes * (platform.usd_per_gb_s - platform.provisioned_run_usd_per_gb_s)
        pings = platform.usd(platform.ping_ns) / (platform.ping_every_ns / 1e9)
        return platform.provisioned_usd_per_gb_s * gigabytes < saved + pings

    def _decay(self, now_ns: int) -> None:
        factor = exp((self._peak_ns - now_ns) / self._memory_ns)
        self._peak *= factor
        self._busy_ns *= factor
        self._peak_ns = now_ns


def choose_faas_target(app: App, function: Function, memory_ns: int) -> FaasTarget | None:
    """The cheapest platform for a function within its objectives.

    If no platform is within them, the fastest one is used, but only for a function that runs on no
    node.
    """
    slos = [p.slo for p in app.pipelines if any(s.function is function for s in p.stages)]
    allowed_ns = min((slo.latency_ns for slo in slos), default=0)
    burst = max((slo.rate_tolerance for slo in slos), default=1.0)
    targets = [
        FaasTarget(pool, pool.faas, variant, burst, memory_ns)
        for pool in app.pools
        for variant in function.variants
        if pool.faas is not None and pool.id in variant.pool_ids
    ]
    in_time = [target for target in targets if target.call_ns <= allowed_ns]
    if in_time:
        return min(in_time, key=lambda target: target.call_usd)
    if any(app.pools[id].faas is None for v in function.variants for id in v.pool_ids):
        return None
    return min(targets, key=lambda target: target.call_ns, default=None)
