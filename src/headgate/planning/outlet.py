"""Where a function goes when the nodes cannot take it in time: to a platform, by the call."""

from __future__ import annotations

from math import ceil, exp
from typing import Final, final

from headgate.core.model import App, Function, Pool, Serverless, Variant
from headgate.planning.warmth import Warmth

_HEADROOM: Final = 1.25  # more than was ever needed of late


@final
class Outlet:
    """One function on one platform: what a call takes and costs, and how many to keep ready."""

    def __init__(
        self, pool: Pool, platform: Serverless, variant: Variant, burst: float, memory_ns: int
    ) -> None:
        self.pool = pool
        self.variant = variant
        self.call_ns = variant.profile.exec_ns[0] + 2 * pool.network_ns
        self.call_usd = platform.usd(variant.profile.exec_ns[0])
        self.warmth = Warmth(platform, variant.profile.start_ns + 2 * pool.network_ns)
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


def find_outlet(app: App, function: Function, memory_ns: int) -> Outlet | None:
    """The cheapest platform for a function that is in time for its objectives.

    One that is never in time is of use only where there is nothing else.
    """
    slos = [p.slo for p in app.pipelines if any(s.function is function for s in p.stages)]
    allowed_ns = min((slo.latency_ns for slo in slos), default=0)
    burst = max((slo.burst for slo in slos), default=1.0)
    outlets = [
        Outlet(pool, pool.serverless, variant, burst, memory_ns)
        for pool in app.pools
        for variant in function.variants
        if pool.serverless is not None and pool.id in variant.pool_ids
    ]
    in_time = [outlet for outlet in outlets if outlet.call_ns <= allowed_ns]
    if in_time:
        return min(in_time, key=lambda outlet: outlet.call_usd)
    if any(app.pools[id].serverless is None for v in function.variants for id in v.pool_ids):
        return None
    return min(outlets, key=lambda outlet: outlet.call_ns, default=None)
