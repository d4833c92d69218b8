"""Cost per pipeline, tenant and pool, and the prediction error of profiles."""

from __future__ import annotations

from collections import Counter, defaultdict
from time import monotonic_ns
from typing import Final, final

from headgate.core.circuit_breaker import BREAKER_STATE_NAMES, CallBlock
from headgate.core.clock import HOUR_NS
from headgate.core.model import TIER_NAMES, App
from headgate.core.states import InstanceState
from headgate.core.view import View
from headgate.live.call import Call
from headgate.live.pools.registry import RemotePools
from headgate.live.pools.remote_pool import Shares
from headgate.live.telemetry.metrics import FaasPoolGauges, GaugeSnapshot

EWMA_WEIGHT: Final = 0.05  # weight of the latest batch in the exponentially weighted mean
STATE_NAMES: Final = {
    InstanceState.STARTING: "starting",
    InstanceState.IDLE: "idle",
    InstanceState.BUSY: "busy",
    InstanceState.DRAINING: "draining",
}


@final
class CostAccounting:
    """Accumulates per batch and call; computes a `GaugeSnapshot` on demand.

    Several gateways share the nodes, so that each accounts for its part of their time.
    """

    def __init__(self, app: App, gateways: int = 1) -> None:
        self._app = app
        self._gateways = gateways
        # By pipeline, client and pool: slot time used, and idle slot time apportioned to them.
        self._busy_ns: Counter[tuple[int, int, int]] = Counter()
        self._idle_ns: Counter[tuple[int, int, int]] = Counter()
        self._up_ns: Counter[int] = Counter()  # by pool: uptime of nodes that have left
        # By node: its pool, and since when it is up.
        self._up_since_ns: dict[int, tuple[int, int]] = {}
        self._error_s: dict[int, float] = {}  # by variant: mean prediction error
        # Cost of calls by pipeline, client and pool; cost of keep-warm by pipeline and pool, which
        # is not attributed to any client.
        self._called_usd: defaultdict[tuple[int, int, int], float] = defaultdict(float)
        self._warm_usd: defaultdict[tuple[int, int], float] = defaultdict(float)

    def on_node_joined(self, node_id: int, pool_id: int) -> None:
        self._up_since_ns[node_id] = (pool_id, monotonic_ns())

    def on_node_lost(self, node_id: int) -> None:
        up = self._up_since_ns.pop(node_id, None)
        if up is not None:
            self._up_ns[up[0]] += monotonic_ns() - up[1]

    def on_batch_ran(self, variant_id: int, items: int, shape_id: int, took_ns: int) -> None:
        """Update the prediction error of a variant with the duration of a batch."""
        expected_ns = self._app.variants[variant_id].exec_ns(items, shape_id)
        error_s = (took_ns - expected_ns) * 1e-9
        before_s = self._error_s.get(variant_id, error_s)
        self._error_s[variant_id] = before_s + EWMA_WEIGHT * (error_s - before_s)

    def on_call_ran(self, call: Call, pool_id: int) -> None:
        """Attribute to a call its share of the duration of its batch, by items."""
        share_ns = (call.ended_ns - call.began_ns) * call.items // max(1, call.batch_items)
        self._busy_ns[call.pipeline_id, call.client_id, pool_id] += share_ns

    def on_call_billed(self, pool_id: int, shares: Shares, took_ns: int) -> None:
        """Attribute the price of one FaaS call to pipelines and clients, by items."""
        platform = self._app.pools[pool_id].faas
        if platform is None:
            return  # a pool paid by the hour
        usd = platform.usd(took_ns) / max(1, sum(items for _, _, items in shares))
        for pipeline_id, client_id, items in shares:
            self._called_usd[pipeline_id, client_id, pool_id] += usd * items

    def on_keep_warm_billed(self, pool_id: int, function: str, usd: float) -> None:
        """Attribute the cost of keep-warm to the first pipeline that uses the function."""
        for pipeline in self._app.pipelines:
            if any(stage.function.name == function for stage in pipeline.stages):
                self._warm_usd[pipeline.id, pool_id] += usd
                return

    def gauge_snapshot(
        self, view: View | None, calls: list[Call], remote_pools: RemotePools | None = None
    ) -> GaugeSnapshot:
        app = self._app
        names = [pipeline.name for pipeline in app.pipelines]
        queued = Counter(dict.fromkeys(names, 0))
        open_calls = Counter(dict.fromkeys(names, 0))
        for call in calls:
            name = names[call.pipeline_id]
            open_calls[name] += 1
            queued[name] += call.sent_ns == 0
        replicas: Counter[tuple[str, str]] = Counter()
        for instance in () if view is None else view.instances.values():
            function = app.functions[instance.variant.function_id]
            replicas[function.name, STATE_NAMES.get(instance.state, "gone")] += 1
        errors: dict[tuple[str, str], float] = {}
        for id, error_s in self._error_s.items():
            variant = app.variants[id]
            errors[app.functions[variant.function_id].name, variant.name] = error_s
        spills = {} if view is None else _faas_pool_gauges(view, remote_pools)
        return GaugeSnapshot(queued, open_calls, replicas, errors, self._cost_usd(), spills)

    def _cost_usd(self) -> dict[tuple[str, str, str, str], float]:
        """Return the cost by model, tenant, tier and basis."""
        self._apportion_idle_time()
        app = self._app
        costs: defaultdict[tuple[str, str, str, str], float] = defaultdict(float)

        def add(key: tuple[int, int, int], basis: str, usd: float) -> None:
            model, tenant = app.pipelines[key[0]].name, app.clients[key[1]].name
            costs[model, tenant, TIER_NAMES[app.pools[key[2]].tier], basis] += usd

        for basis, spent in (("usage", self._busy_ns), ("idle", self._idle_ns)):
            for key, time_ns in spent.items():
                pool = app.pools[key[2]]
                add(key, basis, time_ns * pool.usd_per_hour / HOUR_NS / pool.slots)
        for key, usd in self._called_usd.items():
            add(key, "usage", usd)
        for (pipeline_id, pool_id), usd in self._warm_usd.items():
            tier = TIER_NAMES[app.pools[pool_id].tier]
            costs[app.pipelines[pipeline_id].name, "", tier, "warm"] = usd
        return costs

    def _apportion_idle_time(self) -> None:
        """Apportion new idle slot time in proportion to the slot time used so far."""
        now_ns = monotonic_ns()
        held_ns = self._up_ns.copy()
        for pool_id, since_ns in self._up_since_ns.values():
            held_ns[pool_id] += now_ns - since_ns
        for pool in self._app.pools:
            mine = {key: time_ns for key, time_ns in self._busy_ns.items() if key[2] == pool.id}
            shared_ns = sum(time_ns for key, time_ns in self._idle_ns.items() if key[2] == pool.id)
            busy_ns = sum(mine.values())
            idle_ns = held_ns[pool.id] * pool.slots // self._gateways - busy_ns - shared_ns
            if idle_ns <= 0:
                continue
            for key, time_ns in mine.items():
                self._idle_ns[key] += idle_ns * time_ns // busy_ns if busy_ns else 0


def breakers(view: View) -> dict[str, str]:
    """Return the state of the circuit breaker of each pay-per-call pool, by pool name.

    If something other than the breaker blocks calls, the reason is appended: `closed, budget`.
    """
    now_ns = monotonic_ns()
    states: dict[str, str] = {}
    for breaker in view.breakers:
        if breaker is not None:
            state, reason = BREAKER_STATE_NAMES[breaker.state], breaker.blocked_by(now_ns)
            is_other = reason not in (CallBlock.NONE, CallBlock.BREAKER)
            states[breaker.pool.name] = f"{state}, {reason}" if is_other else state
    return states


def _faas_pool_gauges(view: View, remote_pools: RemotePools | None) -> dict[str, FaasPoolGauges]:
    now_ns = monotonic_ns()
    spills: dict[str, FaasPoolGauges] = {}
    for pool_id, remote_pool in () if remote_pools is None else remote_pools.by_pool.items():
        breaker = view.breakers[pool_id]
        if breaker is not None and remote_pools is not None:
            spills[breaker.pool.name] = FaasPoolGauges(
                breaker.state,
                breaker.blocked_by(now_ns),
                breaker.in_flight,
                remote_pool.outcomes,
                remote_pools.warm_keepers[pool_id].pings,
                breaker.spent_usd(now_ns),
            )
    return spills
