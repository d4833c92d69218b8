"""Where a function can run and at what price: nodes by the hour, or platforms by the call.

A *lot* is a kind of node that a function can be rented on: a variant in a dedicated pool. An
*outlet* is a way to a platform: a variant in a serverless pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, inf
from typing import Final, final

from headgate.core.model import App, FaasPlatform, Function, Pool, Variant
from headgate.core.records import Task
from headgate.core.view import View
from headgate.planning.concurrency import Thresholds, rate_per_s
from headgate.planning.warm_pool import WarmPoolEstimate


@dataclass(frozen=True)
class NodeOption:
    """A function on nodes of one dedicated pool."""

    variant: Variant
    pool: Pool
    threshold: int  # requests at once that are in time; at least 1 if there is no other place
    rate_per_s: float  # what one node answers at that
    usd_per_s: float  # of one node

    @property
    def usd_per_request(self) -> float:
        """On a node that is always full."""
        return self.usd_per_s / self.rate_per_s if self.rate_per_s else inf


@dataclass(frozen=True)
class FaasOption:
    """A function on a platform that is paid by the call."""

    variant: Variant
    pool: Pool
    usd_per_request: float  # of one item, when it need not be started


@final
class Targets:
    """By function: its lots, those to be rented first, and its outlets, both cheapest first."""

    def __init__(self, app: App, thresholds: Thresholds) -> None:
        self.outlets = [tuple(_outlets(app, function)) for function in app.functions]
        self.lots = [
            tuple(_lots(app, function, thresholds, bool(self.outlets[function.id])))
            for function in app.functions
        ]

    def can_spill(self, view: View, task: Task) -> bool:
        """Whether a call of any platform can carry a task. O(outlets)."""
        for outlet in self.outlets[task.function.id]:
            if view.fits_call(task, outlet.pool, outlet.variant):
                return True
        return False

    def open_outlet(self, view: View, task: Task) -> FaasOption | None:
        """The cheapest platform that takes a task just now. O(outlets)."""
        for outlet in self.outlets[task.function.id]:
            if (
                view.is_pool_available(outlet.pool.id)
                and _has_place(view, outlet.pool)
                and view.fits_call(task, outlet.pool, outlet.variant)
            ):
                return outlet
        return None

    def elastic_lot(self, function_id: int) -> NodeOption | None:
        """The kind of node to rent for a function: the cheapest per request of those in time."""
        return next((lot for lot in self.lots[function_id] if lot.pool.is_elastic), None)

    def spill_usd(self, function_id: int) -> float:
        """What a call costs on the cheapest platform; infinite where there is none."""
        return min((outlet.usd_per_request for outlet in self.outlets[function_id]), default=inf)


def _has_place(view: View, pool: Pool) -> bool:
    """Whether the platform would not throttle us for what we have out ourselves."""
    spillway, platform = view.breakers[pool.id], pool.faas
    assert spillway is not None
    assert platform is not None
    return spillway.in_flight < platform.concurrency_max


def _outlets(app: App, function: Function) -> list[FaasOption]:
    found: list[FaasOption] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.faas is not None and variant is not None:
            usd = pool.faas.usd(variant.profile.time_ns(1))
            found.append(FaasOption(variant, pool, usd))
    return sorted(found, key=lambda outlet: (outlet.usd_per_request, outlet.pool.id))


def _lots(
    app: App, function: Function, thresholds: Thresholds, has_outlet: bool
) -> list[NodeOption]:
    found: list[NodeOption] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.faas is None and variant is not None:
            threshold = max(thresholds.of(variant, pool), 0 if has_outlet else 1)
            rate = rate_per_s(variant.profile, threshold)
            found.append(NodeOption(variant, pool, threshold, rate, pool.usd_per_hour / 3_600))
    # What is late even alone comes last, however cheap.
    return sorted(found, key=lambda lot: (not lot.rate_per_s, lot.usd_per_request, lot.pool.id))


# Where a function goes when the nodes cannot take it in time: to a platform, by the call.


_HEADROOM: Final = 1.25  # more than was ever needed of late


@final
class FaasTarget:
    """One function on one platform: what a call takes and costs, and how many to keep ready."""

    def __init__(
        self, pool: Pool, platform: FaasPlatform, variant: Variant, burst: float, memory_ns: int
    ) -> None:
        self.pool = pool
        self.variant = variant
        self.call_ns = variant.profile.exec_ns[0] + 2 * pool.network_ns
        self.call_usd = platform.usd(variant.profile.exec_ns[0])
        self.warmth = WarmPoolEstimate(
            platform, variant.profile.cold_start_ns + 2 * pool.network_ns
        )
        self.wished = 0  # how many were last asked to be kept ready
        self._platform = platform
        self._headroom = max(burst, _HEADROOM)
        self._memory_ns = memory_ns
        self._peak = 0.0  # of calls at once that would have been needed; it fades
        self._peak_ns = 0
        self._busy_ns = 0.0  # work of late, which fades likewise

    def needs(self, now_ns: int, calls: float) -> None:
        """So many calls at once are needed now."""
        self._fade(now_ns)
        self._peak = max(self._peak, calls)

    def called(self, now_ns: int) -> None:
        """A call goes out."""
        self._fade(now_ns)
        self._busy_ns += self.call_ns
        self.warmth.called(now_ns)

    def wish(self, now_ns: int) -> int:
        """How many instances to keep ready, as of now."""
        self._fade(now_ns)
        count = ceil(self._headroom * self._peak) if self._peak > 0.05 else 0
        return min(count, self._platform.concurrency_max)

    def is_provision_cheaper(self, count: int) -> bool:
        """Whether instances that are busy as often as of late had better be provisioned."""
        platform = self._platform
        if platform.provisioned_usd_per_gb_s <= 0.0 or count == 0:
            return False
        if platform.ping_every_ns == 0:  # where none stays, calling keeps none
            return True
        busy = min(1.0, self._busy_ns / self._memory_ns / count)
        gigabytes = platform.gigabytes
        saved = busy * gigabytes * (platform.usd_per_gb_s - platform.provisioned_run_usd_per_gb_s)
        pings = platform.usd(platform.ping_ns) / (platform.ping_every_ns / 1e9)
        return platform.provisioned_usd_per_gb_s * gigabytes < saved + pings

    def _fade(self, now_ns: int) -> None:
        factor = exp((self._peak_ns - now_ns) / self._memory_ns)
        self._peak *= factor
        self._busy_ns *= factor
        self._peak_ns = now_ns


def choose_faas_target(app: App, function: Function, memory_ns: int) -> FaasTarget | None:
    """The cheapest platform for a function that is in time for its objectives.

    One that is never in time is of use only where there is nothing else.
    """
    slos = [p.slo for p in app.pipelines if any(s.function is function for s in p.stages)]
    allowed_ns = min((slo.latency_ns for slo in slos), default=0)
    burst = max((slo.rate_tolerance for slo in slos), default=1.0)
    outlets = [
        FaasTarget(pool, pool.faas, variant, burst, memory_ns)
        for pool in app.pools
        for variant in function.variants
        if pool.faas is not None and pool.id in variant.pool_ids
    ]
    in_time = [outlet for outlet in outlets if outlet.call_ns <= allowed_ns]
    if in_time:
        return min(in_time, key=lambda outlet: outlet.call_usd)
    if any(app.pools[id].faas is None for v in function.variants for id in v.pool_ids):
        return None
    return min(outlets, key=lambda outlet: outlet.call_ns, default=None)
