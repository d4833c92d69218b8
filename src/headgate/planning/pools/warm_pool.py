"""Warm instances on a FaaS platform: how many there are, and how many to keep.

`WarmPool` is what changes about a `FaasTarget`: the estimate of its warm instances, the recent
demand for them, and how many were requested. `ReadyCount` is how instances that were requested
become ready; the simulator's platform provisions by the same rule.
"""

from __future__ import annotations

from math import ceil, exp
from typing import final

from headgate.core.model import App, FaasPlatform, Function
from headgate.planning.constants import WARM_DEMAND_MIN, WARM_HEADROOM
from headgate.planning.pools.calendar import Lanes
from headgate.planning.pools.targets import FaasTarget


@final
class ReadyCount:
    """A number of instances that grows after a delay and shrinks at once. O(1) amortised.

    To ask for more does not delay those that are starting already.
    """

    def __init__(self) -> None:
        self._ready = 0
        # (ready at, ready count from then on), earliest first.
        self._starting: list[tuple[int, int]] = []

    def at(self, now_ns: int) -> int:
        """How many are ready now."""
        while self._starting and self._starting[0][0] <= now_ns:
            self._ready = self._starting.pop(0)[1]
        return self._ready

    def next_ns(self, now_ns: int) -> int | None:
        """When the next ones are ready; None if none are starting."""
        self.at(now_ns)
        return self._starting[0][0] if self._starting else None

    def starting(self, now_ns: int) -> list[tuple[int, int]]:
        """When more will be ready, and how many in all from then on; earliest first."""
        self.at(now_ns)
        return self._starting

    def resize(self, now_ns: int, count: int, ready_in_ns: int) -> None:
        """Ask for `count` in all: what is missing is ready after `ready_in_ns`."""
        if count <= self.at(now_ns):
            self.set(count)
            return
        self._starting = [(at_ns, min(ready, count)) for at_ns, ready in self._starting]
        if not self._starting or self._starting[-1][1] < count:
            self._starting.append((now_ns + ready_in_ns, count))

    def set(self, count: int) -> None:
        """There are this many, and none is starting."""
        self._ready = count
        self._starting = []


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
        # The estimates of its platform with instances that are starting, or were: all share it.
        self.starting_there: dict[WarmPoolEstimate, None] = {}
        self._kept = ReadyCount()  # of those, started
        self._is_provisioned = False

    def set_desired(self, now_ns: int, count: int, *, is_provisioned: bool = False) -> None:
        """Set how many instances the platform keeps warm from now on; new ones take time."""
        self.desired = count
        self._is_provisioned = is_provisioned
        if count <= self.size(now_ns):
            self._kept.set(count)
        else:
            ready_in_ns = self._provisioning_ns if is_provisioned else self._start_ns
            self._kept.resize(now_ns, count, ready_in_ns)
            self.starting_there[self] = None

    def is_starting(self, now_ns: int) -> bool:
        """Whether requested instances are still starting."""
        return self.next_ready_ns(now_ns) is not None

    def next_ready_ns(self, now_ns: int) -> int | None:
        """When the next requested instance is ready; None if none is starting."""
        return self._kept.next_ns(now_ns)

    def starting(self, now_ns: int) -> list[tuple[int, int]]:
        """When requested instances will be ready, and the size from then on; earliest first."""
        size = self.size(now_ns)
        return [(at_ns, count) for at_ns, count in self._kept.starting(now_ns) if count > size]

    def pings_starting(self, now_ns: int) -> int:
        """Number of instances that pings are starting: each is a call of the platform."""
        starting = None if self._is_provisioned else self._kept.starting(now_ns)
        return max(0, starting[-1][1] - self.size(now_ns)) if starting else 0

    def size(self, now_ns: int) -> int:
        """Number of instances, busy or idle."""
        self._expire_idle(now_ns)
        return max(self.busy + len(self._idle_since_ns), self._kept.at(now_ns))

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

    def _expire_idle(self, now_ns: int) -> None:
        idle = self._idle_since_ns
        expired = 0
        while expired < len(idle) and now_ns - idle[expired] >= self._keep_alive_ns:
            expired += 1
        if expired:
            del idle[:expired]


@final
class WarmPool:
    """The warm instances of one `FaasTarget`, and the demand that says how many to keep.

    `burst` is how far demand may exceed what was seen; demand is forgotten over `memory_ns`.
    """

    def __init__(self, target: FaasTarget, burst: float, memory_ns: int) -> None:
        self.target = target
        start_ns = target.variant.profile.cold_start_ns + 2 * target.pool.network_ns
        self.instances = WarmPoolEstimate(target.platform, start_ns)
        self.lanes = Lanes()  # those instances, and when the busy ones will be free
        self.requested = 0  # warm instances last requested
        self._platform = target.platform
        self._headroom = max(burst, WARM_HEADROOM)
        self._memory_ns = memory_ns
        self._peak = 0.0  # largest recent demand in concurrent calls, which decays
        self._peak_ns = 0
        self._busy_ns = 0.0  # recent execution time of calls, which decays likewise

    def observe_demand(self, now_ns: int, calls: float) -> None:
        """Observe that this many concurrent calls are needed now."""
        self._decay(now_ns)
        self._peak = max(self._peak, calls)

    def recent_demand(self, now_ns: int) -> float:
        """The largest recent demand in concurrent calls."""
        self._decay(now_ns)
        return self._peak

    def on_call(self, now_ns: int) -> None:
        """Record a call that is sent."""
        self._decay(now_ns)
        self._busy_ns += self.target.call_ns
        self.instances.on_call(now_ns)

    def desired(self, now_ns: int) -> int:
        """How many instances to keep warm now."""
        self._decay(now_ns)
        count = ceil(self._headroom * self._peak) if self._peak > WARM_DEMAND_MIN else 0
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


def burst_of(app: App, function: Function) -> float:
    """How far demand for a function may exceed what was seen, by the objectives; 1 without any."""
    slos = [p.slo for p in app.pipelines if any(s.function is function for s in p.stages)]
    return max((slo.rate_tolerance for slo in slos), default=1.0)
