"""Distributed autoscaling: frontends that each see a slice of the load agree on how many backends.

Swayam (Middleware 2017). All frontends (gateways) share a pool of backends, each of which serves
one model at a time, one request at a time. A frontend counts its own arrivals, extrapolates their
rate by one set-up time (linear regression), and multiplies it by the number of frontends: these
receive equal slices. It then computes the least n with P(response <= RT_max) >= SL_min at U times
that rate, and sends each request to one of the first n backends of the model, at random. A busy
backend refuses, and the frontend asks another one after the probe delay. The order of backends is
that of their nodes, the same for everybody, so frontends agree without a message.

Where n exceeds the backends that are warm, the frontend orders the next ones, each by its number.
All frontends do; the Broker starts each backend once. Nobody stops a backend: one that is beyond
everybody's n receives nothing, leaves service (`Variant.unused_after_ns`), and retires
(`Variant.retire_after_ns`). The number of frontends may be wrong for a while after a crash: then n
is too high or too low in proportion, which U is there to absorb.

A request that can no longer meet its deadline is pruned (it expires). When the pool is exhausted,
orders wait at the Broker, those of the model with the fewest backends first, until a backend of
another model retires; requests meanwhile share the backends that there are, or are pruned. An order
that is still waiting when it is no longer wanted is withdrawn. Only for a model that has no backend
at all, an idle one that another model does not need is stopped at once.

RT_max, SL_min and U are the objective of the model's pipeline (`Slo`), the strictest one if it is
in several; without one, the settings. Cost per decision: O(backends of the model).

>>> from headgate.policies import find_policy
>>> find_policy("swayam").config().rate_tolerance
2.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log, sqrt
from typing import Final, final

from headgate.core.clock import MILLISECOND_NS, MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.model import App, Function, Slo
from headgate.core.policy import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Capabilities,
    Context,
    Plan,
    PolicyConfig,
    PolicyKind,
    bounded,
)
from headgate.core.records import Instance, Request
from headgate.planning.autoscaling.execution_times import (
    ExecutionTimes,
    LogNormalTimes,
    fit_execution_times,
)
from headgate.planning.autoscaling.response_time import check_slo, least_backends
from headgate.planning.autoscaling.waiting_time import RandomRetry
from headgate.planning.forecast import ArrivalForecaster, trend
from headgate.policies._frontend import Fleet, Frontend, place

_TREND_MIN: Final = 10  # buckets: the slope of fewer is noise, so their mean is used
_SAMPLES: Final = 256  # execution times that a distribution is fitted to
_SAMPLES_MIN: Final = 32  # of the first fit
_RATE_STEP: Final = log(1.01)  # rates differ by 1 % or count as one: estimates are kept by steps


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `swayam`."""

    plan_every_ns: int = field(default=SECOND_NS, metadata=POSITIVE)  # between two forecasts
    window_ns: int = field(default=MINUTE_NS, metadata=POSITIVE)  # of the regression
    bucket_ns: int = field(default=SECOND_NS, metadata=POSITIVE)  # arrivals are counted per bucket
    # From a probe of a busy backend to the next one, the way there and back included.
    probe_delay_ns: int = field(default=MILLISECOND_NS, metadata=NOT_NEGATIVE)
    execution_cv: float = field(default=0.25, metadata=NOT_NEGATIVE)  # until it has been observed
    # Of models without an objective: RT_max in multiples of the mean execution time, SL_min and U.
    rt_max_factor: float = field(default=5.0, metadata=bounded(ge=1))
    sl_min: float = field(default=0.99, metadata=SHARE)
    rate_tolerance: float = field(default=2.0, metadata=bounded(ge=1))


@final
class Swayam(Frontend):
    """One frontend. `needs` has n of each model."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, config.probe_delay_ns)
        self.plan_every_ns = config.plan_every_ns
        app = self.view.app
        self._estimators = [
            BackendEstimator(fleet, _strictest(app, function, config, fleet.exec_ns), config)
            for fleet, function in zip(self.fleets, app.functions, strict=True)
        ]
        self.needs = [min(f.prewarm_nodes, self.fleets[f.id].home.nodes) for f in app.functions]
        self.order_first(self.needs)

    def used(self, function_id: int) -> int:
        return max(1, self.needs[function_id])

    def on_arrival(self, request: Request) -> None:
        for stage in request.pipeline.stages:
            self._estimators[stage.function.id].on_arrival(self.view.now_ns)

    def on_executed(self, function_id: int, took_ns: int) -> None:
        self._estimators[function_id].observe(took_ns)

    def plan(self) -> Plan:
        """Forecast, and order what is missing of each model; backends retire by themselves."""
        for fleet, estimator in zip(self.fleets, self._estimators, strict=True):
            self.prune_waiting(fleet)
            needed = estimator.backends(self.view.now_ns, self.view.gateways)
            if needed is not None:
                if fleet.waiting or fleet.probing:
                    needed = max(1, needed)
                self.needs[fleet.build.function_id] = min(needed, fleet.home.nodes)
                self.serve(fleet)
        for fleet in self.fleets:
            if fleet.waiting and not fleet.backends and self.overdue(fleet):
                self._free_node(fleet.home.id)
        return self.plan_for(self.needs)

    def _free_node(self, pool_id: int) -> None:
        """Stop an idle backend of a pool that its model does not need: the last, for everybody."""
        spare: list[Instance] = []
        for fleet, needed in zip(self.fleets, self.needs, strict=True):
            if fleet.home.id == pool_id:
                spare += [backend for backend in fleet.backends[needed:] if backend.running == 0]
        if spare:
            self.retire(max(spare, key=place))


@final
class BackendEstimator:
    """How many backends a model needs, from what one frontend sees of it."""

    def __init__(self, fleet: Fleet, objective: Slo, config: Config) -> None:
        self._forecaster = ArrivalForecaster(_settled_trend, config.bucket_ns, config.window_ns)
        self._bucket_ns = config.bucket_ns
        self._since_ns: int | None = None  # the first arrival
        self._setup_ns = fleet.setup_ns
        self._objective = objective
        self._balancer = RandomRetry(fleet.probe_s)
        self._times: ExecutionTimes = LogNormalTimes(fleet.exec_ns / SECOND_NS, config.execution_cv)
        if fleet.exec_ns <= objective.latency_ns:  # else every request is pruned
            check_slo(self._times, objective)
        self._samples_s: deque[float] = deque(maxlen=_SAMPLES)
        self._unfitted = 0  # samples since the last fit
        self._known: dict[int, int] = {}  # estimates by step of the rate

    def on_arrival(self, now_ns: int) -> None:
        """Count an arrival."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._forecaster.observe(now_ns)

    def observe(self, took_ns: int) -> None:
        """Add an execution time; from time to time the distribution is fitted anew."""
        self._samples_s.append(max(1, took_ns) / SECOND_NS)
        self._unfitted += 1
        is_first = self._unfitted == len(self._samples_s) == _SAMPLES_MIN
        if is_first or self._unfitted == _SAMPLES:
            self._unfitted = 0
            self._times = fit_execution_times(self._samples_s).times
            self._known.clear()

    def backends(self, now_ns: int, gateways: int) -> int | None:
        """Return n for the rate of all gateways together, one set-up time from now.

        None before arrivals have been counted for a while.
        """
        if self._since_ns is None or now_ns < self._since_ns + self._bucket_ns:
            return None
        rate_per_s = gateways * self._forecaster.ahead(now_ns, self._setup_ns)
        if rate_per_s <= 0.0:
            return 0
        step = ceil(log(rate_per_s) / _RATE_STEP)
        if step not in self._known:
            self._known[step] = self._backends_for(rate_per_s)
        return self._known[step]

    def _backends_for(self, rate_per_s: float) -> int:
        """Backends that meet the objective; if no number does, so many that few requests wait."""
        times, objective = self._times, self._objective
        if times.mean_s * SECOND_NS <= objective.latency_ns:
            found = least_backends(times, rate_per_s, objective, self._balancer).backends
            if found is not None:
                return found
        erlangs = rate_per_s * objective.rate_tolerance * times.mean_s
        return ceil(erlangs + sqrt(erlangs))


def _settled_trend(values: Sequence[float], ahead: float) -> float:
    return trend(values, ahead) if len(values) >= _TREND_MIN else sum(values) / len(values)


def _strictest(app: App, function: Function, config: Config, exec_ns: int) -> Slo:
    """The objective of the pipelines that a function is in, or one by the settings."""
    slos = [p.slo for p in app.pipelines if any(s.function.id == function.id for s in p.stages)]
    known = [slo for slo in slos if slo.latency_ns < NEVER_NS]
    if known:
        return min(known, key=lambda slo: slo.latency_ns)
    return Slo(int(config.rt_max_factor * exec_ns), config.sl_min, config.rate_tolerance)


POLICY = PolicyKind(Swayam, Config, Capabilities(pipelines=False, multi_gateway=True))
