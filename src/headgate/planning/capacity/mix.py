"""A load, and the cheapest mix for it: instances of one type, and FaaS for the overflow.

A load is a distribution over levels: shares of time at an arrival rate or a client count.

A mix is evaluated by formulas, not by simulation, so that many can be tried quickly:

- Instances take requests up to their concurrency threshold; the next request goes to FaaS. At an
  open-loop level (Poisson arrivals) this is a loss system with processor sharing, whose state
  distribution depends on the service times through their means only (Erlang's formula with a
  state-dependent service rate). At a closed-loop level the number of requests is constant.
- A request is assumed to be served at the concurrency it found on arrival. Without FaaS, a request
  that finds all instances full counts as missed, although it might just be in time.
- FaaS instances are assumed to be used in order: the j-th is called when j - 1 are busy. A call is
  cold if it is the first, if the previous one was longer ago than the platform's keep-alive (calls
  to one instance are assumed to be Poisson, levels to alternate faster than the keep-alive), or if
  the instance has reached its maximum age. No instance is warm at the beginning; and when the load
  rises above what the existing instances can take, every call starts another instance until the
  first of them is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS
from headgate.core.model import FaasPlatform
from headgate.planning.capacity.sizing import InstanceCapacity, SizeRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS_MAX: Final = 32
_WINDOW_NS_MIN: Final = 1_000_000_000
_TRIED_MAX: Final = 64  # instance counts in the first, coarse search


@dataclass(frozen=True, slots=True)
class RateLevel:
    """A level of the load for a share of the time: open (a rate) or closed (a client count)."""

    share: float
    rate_per_s: float = 0.0  # open loop: arrival rate
    clients: float = 0.0  # closed loop: clients that send the next request after each response


@dataclass(frozen=True, slots=True)
class Rise:
    """A moment at which the load rose above its previous maximum."""

    at_s: float
    level: int  # index of the level that it rose to


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """The levels of a load, its duration, and the moments of a new maximum.

    All levels are open loop, or all are closed loop.
    """

    levels: tuple[RateLevel, ...]
    duration_s: float
    rises: tuple[Rise, ...]  # in order of time

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate of an open load."""
        return sum(level.share * level.rate_per_s for level in self.levels)

    @property
    def peak_per_s(self) -> float:
        """Arrival rate at the highest level of an open load."""
        return max(level.rate_per_s for level in self.levels)

    @property
    def peak_clients(self) -> float:
        """Clients at the highest level of a closed load."""
        return max(level.clients for level in self.levels)


def open_load(times_ns: Ints, duration_ns: int, slo_ms: float) -> LoadProfile:
    """Return the load profile of open-loop arrivals.

    Arrivals are counted in windows, each many service times long. Counts vary even if the rate does
    not, and a model that takes each level for a Poisson stream adds that variation a second time.
    So the Poisson part is removed first: deviations from the mean are shrunk until the variance of
    the rates is the variance of the counts less their mean, which is the variance of a Poisson
    stream.

    >>> steady = open_load(np.arange(0, 10_000_000_000, 20_000_000), 10_000_000_000, slo_ms=100)
    >>> [(round(level.share, 3), level.rate_per_s) for level in steady.levels]
    [(1.0, 50.0)]
    """
    assert duration_ns > 0, duration_ns
    window_ns = min(duration_ns, max(_WINDOW_NS_MIN, round(10 * slo_ms * 1e6)))
    windows = duration_ns // window_ns  # the incomplete last window is dropped
    counts = np.bincount(times_ns // window_ns, minlength=windows)[:windows].astype(np.float64)
    mean, variance = counts.mean(), counts.var()
    kept = np.sqrt(max(0.0, 1.0 - mean / variance)) if variance > 0.0 else 0.0
    rates = (mean + kept * (counts - mean)) / window_ns * 1e9
    levels, places = _merge_rates(rates)
    highest, firsts = np.unique(np.maximum.accumulate(places), return_index=True)
    starts_s = firsts * (window_ns / 1e9)
    rises = map(Rise, starts_s.tolist(), highest.tolist())
    return LoadProfile(levels, duration_ns / 1e9, tuple(rises))


def closed_load(steps: Iterable[tuple[int, int]], duration_ns: int) -> LoadProfile:
    """Return the load profile of closed-loop clients, from (start time, client count) steps.

    >>> [(level.share, level.clients) for level in closed_load([(0, 5), (10, 20)], 40).levels]
    [(0.25, 5), (0.75, 20)]
    """
    known = sorted(steps)
    ends_ns = [start_ns for start_ns, _ in known[1:]] + [duration_ns]
    shares: dict[int, float] = {}
    rises: list[Rise] = []
    highest = -1
    for (start_ns, clients), end_ns in zip(known, ends_ns, strict=True):
        length_ns = max(0, min(end_ns, duration_ns) - start_ns)
        shares[clients] = shares.get(clients, 0.0) + length_ns / duration_ns
        if clients > highest:
            highest = clients
            rises.append(Rise(start_ns / 1e9, len(shares) - 1))
    levels = tuple(RateLevel(share, clients=clients) for clients, share in shares.items())
    return LoadProfile(levels, duration_ns / 1e9, tuple(rises))


def _merge_rates(rates: Floats) -> tuple[tuple[RateLevel, ...], Ints]:
    """Merge similar rates into levels at their mean; also return the level index of each rate.

    Levels are ascending, and the mean over all levels is unchanged.
    """
    lowest, highest = float(rates.min()), float(rates.max())
    if highest - lowest <= 1e-9 * highest:
        return (RateLevel(1.0, rate_per_s=float(rates.mean())),), np.zeros(
            len(rates), dtype=np.int64
        )
    edges = np.linspace(lowest, highest, LEVELS_MAX + 1)[1:-1]
    places = np.unique(np.digitize(rates, edges), return_inverse=True)[1]
    shares = np.bincount(places) / len(rates)
    means = np.bincount(places, weights=rates) / np.bincount(places)
    levels = tuple(
        RateLevel(share, rate_per_s=mean)
        for share, mean in zip(shares.tolist(), means.tolist(), strict=True)
    )
    return levels, places


@dataclass(frozen=True, slots=True)
class FaasChoice:
    """The FaaS platform at the chosen memory size."""

    terms: FaasPlatform
    row: SizeRow
    start_ms: float  # duration of a cold start
    is_cold_within: bool  # a cold call meets the objective


@dataclass(frozen=True, slots=True)
class Mix:
    """A number of instances and FaaS for the overflow, with its predicted cost and attainment."""

    capacity: InstanceCapacity | None  # None: functions alone
    instances: int
    faas: FaasChoice | None
    rate_per_s: float  # requests answered
    spilled: float  # share of requests that go to FaaS, or that no capacity takes
    cold: float  # share of requests with a cold start
    attainment: float  # share of requests within the objective
    functions_peak: int  # concurrent FaaS calls at the highest level
    instances_usd_per_hour: float
    functions_usd_per_hour: float

    @property
    def usd_per_hour(self) -> float:
        """Cost of instances and FaaS together."""
        return self.instances_usd_per_hour + self.functions_usd_per_hour

    @property
    def usd_per_1k(self) -> float:
        """Cost of a thousand requests."""
        return self.usd_per_hour / self.rate_per_s / 3.6 if self.rate_per_s else inf


def break_even_rate(usd_per_hour: float, usd_per_call: float) -> float:
    """Return the rate per second above which an instance is cheaper than calls.

    >>> round(break_even_rate(0.41, 1.43e-5), 1)
    8.0
    """
    return usd_per_hour / 3600.0 / usd_per_call if usd_per_call else inf


def cheapest_mix(
    load: LoadProfile,
    capacities: Sequence[InstanceCapacity],
    functions: FaasChoice | None,
    quantile: float,
    instances_max: int,
) -> Mix:
    """Return the cheapest mix that reaches the quantile; if none does, the one that comes closest.

    At least one instance type must have a threshold above 0, or FaaS must be given.
    """
    usable = [capacity for capacity in capacities if capacity.threshold]
    if not usable:
        assert functions is not None
        return evaluate(load, None, 0, functions)
    mixes = [
        best_of_type(load, capacity, functions, quantile, instances_max) for capacity in usable
    ]
    return min(mixes, key=lambda mix: _rank(mix, quantile))


def best_of_type(
    load: LoadProfile,
    capacity: InstanceCapacity,
    functions: FaasChoice | None,
    quantile: float,
    instances_max: int,
) -> Mix:
    """Return the best mix with instances of one type, from 0 to `instances_max` of them."""
    least = 0 if functions is not None else 1
    most = max(least, min(instances_max, _instances_enough(load, capacity)))
    spread = np.geomspace(1, most, _TRIED_MAX) if most > _TRIED_MAX else np.arange(1, most + 1)
    tried = sorted({least, *(round(count) for count in spread.tolist())})
    mixes = {count: evaluate(load, capacity, count, functions) for count in tried}

    def rank(count: int) -> tuple[float, float]:
        return _rank(mixes[count], quantile)

    place = tried.index(min(tried, key=rank))
    # If not all counts were tried, the best is between the neighbours of the best so far.
    for count in range(tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)] + 1):
        if count not in mixes:
            mixes[count] = evaluate(load, capacity, count, functions)
    return mixes[min(mixes, key=rank)]


def evaluate(
    load: LoadProfile,
    capacity: InstanceCapacity | None,
    instances: int,
    functions: FaasChoice | None,
) -> Mix:
    """Return the predicted cost and attainment of a number of instances, with or without FaaS."""
    if load.peak_clients:
        flows = _closed_flows(load, capacity, instances, functions)
    else:
        flows = _open_flows(load, capacity, instances)
    taken = sum(flow.share * flow.taken_per_s for flow in flows)
    spilled = sum(flow.share * flow.spilled_per_s for flow in flows)
    met = sum(flow.share * flow.taken_per_s * flow.within for flow in flows)
    cold = usd_per_s = 0.0
    peak = 0
    if functions is not None:
        run_s = functions.row.run_ms / 1e3
        most = functions.terms.concurrency_max
        served = sum(f.share * min(f.spilled_per_s, most / run_s) for f in flows)
        cold = min(served, _cold_per_s(flows, functions, load))
        met += functions.row.within * (served - (0.0 if functions.is_cold_within else cold))
        usd_per_s = served * functions.row.usd_per_call + cold * _start_usd(functions)
        peak = max(min(most, _concurrent_calls(flow, run_s)) for flow in flows)
    total = taken + spilled
    return Mix(
        capacity=capacity if instances else None,
        instances=instances,
        faas=functions,
        rate_per_s=total,
        spilled=spilled / total if total else 0.0,
        cold=cold / total if total else 0.0,
        attainment=met / total if total else 1.0,
        functions_peak=peak,
        instances_usd_per_hour=instances * capacity.instance_type.usd_per_hour if capacity else 0.0,
        functions_usd_per_hour=3600.0 * usd_per_s,
    )


@dataclass(frozen=True, slots=True)
class _LevelFlow:
    """The flow of requests at one level of the load."""

    share: float  # of the time
    taken_per_s: float  # by instances
    within: float  # share of those that meet the objective
    spilled_per_s: float
    waiting: int | None  # closed loop: clients whose requests are spilled; None: open loop


def _open_flows(
    load: LoadProfile, capacity: InstanceCapacity | None, instances: int
) -> list[_LevelFlow]:
    levels = load.levels
    if capacity is None or not instances:
        return [_LevelFlow(level.share, 0.0, 0.0, level.rate_per_s, None) for level in levels]
    rates = np.array([max(level.rate_per_s, 1e-12) for level in levels])
    paces, within = _states(capacity, instances)
    steps = np.log(rates)[:, None] - np.log(paces)[None, :]
    logs = np.concatenate([np.zeros((len(levels), 1)), np.cumsum(steps, axis=1)], axis=1)
    odds = np.exp(logs - logs.max(axis=1, keepdims=True))
    # Probability of each number of requests in the system, which an arrival sees as well (PASTA).
    probabilities = odds / odds.sum(axis=1, keepdims=True)
    blocked = probabilities[:, -1]
    met = probabilities[:, :-1] @ within
    return [
        _LevelFlow(level.share, rate * (1.0 - b), m / max(1.0 - b, 1e-12), rate * b, None)
        for level, rate, b, m in zip(
            levels, rates.tolist(), blocked.tolist(), met.tolist(), strict=True
        )
    ]


def _closed_flows(
    load: LoadProfile,
    capacity: InstanceCapacity | None,
    instances: int,
    functions: FaasChoice | None,
) -> list[_LevelFlow]:
    paces, shares = np.zeros(0), np.zeros(0)
    if capacity is not None and instances:
        paces, shares = _states(capacity, instances)
    flows = []
    for level in load.levels:
        held = min(int(level.clients), len(paces))
        rest = int(level.clients) - held
        pace, within = (float(paces[held - 1]), float(shares[held - 1])) if held else (0.0, 0.0)
        if rest and functions is None:  # clients queue for the instances, and all are late
            flows.append(_LevelFlow(level.share, 0.0, 0.0, pace, rest))
        else:
            per_s = rest / functions.row.round_trip_ms * 1e3 if functions is not None else 0.0
            flows.append(_LevelFlow(level.share, pace, within, per_s, rest))
    return flows


def _states(capacity: InstanceCapacity, instances: int) -> tuple[Floats, Floats]:
    """For 1, 2, ... requests, spread evenly: throughput, and the share of the last in time."""
    counts = np.arange(1, instances * capacity.threshold + 1)
    fewer, more = counts // instances, counts % instances  # `more` instances have one more
    paces = np.array([0.0, *(c / ms * 1e3 for c, ms in enumerate(capacity.times_ms, 1)), 0.0])
    total = (instances - more) * paces[fewer] + more * paces[fewer + 1]
    return total, np.array(capacity.within)[(counts - 1) // instances]


def _cold_per_s(flows: Sequence[_LevelFlow], functions: FaasChoice, load: LoadProfile) -> float:
    """Rate of cold starts, averaged over the load."""
    terms, run_s = functions.terms, functions.row.run_ms / 1e3
    start_s, duration_s = functions.start_ms / 1e3, load.duration_s
    if start_s == 0.0:
        return 0.0
    rates = _rates_by_instance(flows, run_s, terms.concurrency_max)
    calls = rates * duration_s
    again = np.exp(-rates * terms.keep_alive_ns / 1e9)
    first = float((1.0 - np.exp(-calls)).sum())
    old = 0.0
    if terms.age_max_ns != NEVER_NS:
        age_s = terms.age_max_ns / 1e9
        old = float((rates * age_s > 1.0).sum()) * duration_s / age_s
    starts = (
        max(first, min(_ramp_up_starts(flows, load, run_s, start_s), terms.concurrency_max))
        + float((calls * again).sum())
        + old
    )
    return starts / duration_s


def _rates_by_instance(flows: Sequence[_LevelFlow], run_s: float, most: int) -> Floats:
    """Call rate of the first, the second, ... FaaS instance, averaged over the load."""
    waiting = [flow for flow in flows if flow.waiting is not None]
    coming = [flow for flow in flows if flow.waiting is None]
    loads = np.array([flow.spilled_per_s * run_s for flow in coming])
    shares = np.array([flow.share for flow in coming])
    highest = float(loads.max()) if len(loads) else 0.0
    count = min(most, ceil(highest + 6.0 * sqrt(highest)) + 4)
    count = max([count, *(min(most, flow.waiting or 0) for flow in waiting)])
    rates = np.zeros(count)
    passed = np.ones_like(loads)  # Erlang's recursion: the share that finds all before it busy
    for index in range(count):
        blocked = loads * passed / (index + 1 + loads * passed)
        rates[index] = float((shares * loads * (passed - blocked)).sum()) / run_s
        passed = blocked
    for flow in waiting:
        rates[: flow.waiting] += flow.share / run_s
    return rates


def _ramp_up_starts(
    flows: Sequence[_LevelFlow], load: LoadProfile, run_s: float, start_s: float
) -> float:
    """FaaS instances that are started while the load rises to its maximum."""
    instances, ready_s = 0.0, 0.0
    for rise in load.rises:
        flow = flows[rise.level]
        if flow.waiting is not None:
            instances = max(instances, float(flow.waiting))
        elif rise.at_s < ready_s or instances < _concurrency_bound(flow.spilled_per_s * run_s):
            instances = max(instances, flow.spilled_per_s * (run_s + start_s))
            ready_s = rise.at_s + start_s
    return instances


def _concurrent_calls(flow: _LevelFlow, run_s: float) -> int:
    """Concurrent FaaS calls at a level: an upper bound that is rarely exceeded."""
    if flow.waiting is not None:
        return flow.waiting
    mean = flow.spilled_per_s * run_s
    return ceil(_concurrency_bound(mean)) if mean > 0.01 else 0


def _concurrency_bound(mean: float) -> float:
    """Mean plus three standard deviations of a Poisson number of concurrent calls."""
    return mean + 3.0 * sqrt(mean)


def _start_usd(functions: FaasChoice) -> float:
    if not functions.terms.bills_cold_start:
        return 0.0
    return functions.start_ms / 1e3 * functions.row.usd_per_s


def _instances_enough(load: LoadProfile, capacity: InstanceCapacity) -> int:
    """Number of instances beyond which more would hardly ever be used."""
    busy = load.peak_per_s / capacity.rate_per_s
    return ceil(busy + 4.0 * sqrt(busy) + load.peak_clients / capacity.threshold) + 2


def _rank(mix: Mix, quantile: float) -> tuple[float, float]:
    """Sort key: mixes that reach the quantile by price, then the others by attainment."""
    return (0.0, mix.usd_per_1k) if mix.attainment >= quantile else (1.0, -mix.attainment)
