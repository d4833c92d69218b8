"""The cheapest mix: so many instances of one type, and functions for what they cannot hold.

How a mix would do is told by formulas, not by a simulation, so that many can be tried in no time:

- Instances take requests until each has as many as its threshold; the next one goes to a function.
  At a level of the load where requests come by themselves (taken to be Poisson) that is a loss
  system with processor sharing, whose states depend on the service times through their means only
  (Erlang's formula, with a pace that depends on the state). At a level of clients that wait for
  answers, so many requests are there at once, always.
- A request is taken to be served all the time in the company it came into. Without functions, one
  that finds all instances full counts as missed, though it might just make it.
- Function instances are taken to be used in order: the j-th is called when j - 1 are busy. A call
  is cold if it is the first, if the one before was longer ago than the platform's keep-alive (calls
  to one instance taken to be Poisson, levels to alternate faster than that), or if the instance is
  too old. No function is warm at the beginning; and when the load rises to where those that are
  there do not suffice, every call starts another one until the first of them has started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS
from headgate.core.model import FaasPlatform
from headgate.planning.capacity.load import LoadProfile
from headgate.planning.capacity.sizing import InstanceCapacity, SizeRow

Floats = NDArray[np.float64]

_TRIED_MAX: Final = 64  # numbers of instances, at first


@dataclass(frozen=True, slots=True)
class FaasChoice:
    """What takes the rest: a function platform at a size."""

    terms: FaasPlatform
    row: SizeRow
    start_ms: float  # what a cold start adds
    is_cold_within: bool  # whether a cold call meets the objective


@dataclass(frozen=True, slots=True)
class Mix:
    """So many instances and what goes beyond them, and how a load would fare on it."""

    site: InstanceCapacity | None  # None: functions alone
    instances: int
    functions: FaasChoice | None
    rate_per_s: float  # requests answered
    spilled: float  # share of requests that go to functions, or have nowhere to go
    cold: float  # share of requests that meet a cold start
    attainment: float
    functions_peak: int  # functions at once at the highest level
    instances_usd_per_hour: float
    functions_usd_per_hour: float

    @property
    def usd_per_hour(self) -> float:
        """What it costs, whoever takes it."""
        return self.instances_usd_per_hour + self.functions_usd_per_hour

    @property
    def usd_per_1k(self) -> float:
        """Of a thousand requests."""
        return self.usd_per_hour / self.rate_per_s / 3.6 if self.rate_per_s else inf


def break_even_rate(usd_per_hour: float, usd_per_call: float) -> float:
    """Return the rate per second at which calls cost as much as the instance.

    >>> round(break_even_rate(0.41, 1.43e-5), 1)
    8.0
    """
    return usd_per_hour / 3600.0 / usd_per_call if usd_per_call else inf


def cheapest_mix(
    load: LoadProfile,
    sites: Sequence[InstanceCapacity],
    functions: FaasChoice | None,
    quantile: float,
    instances_max: int,
) -> Mix:
    """Return the cheapest mix that reaches the quantile; if none does, the one that comes closest.

    There must be a site that holds at least one request, or functions.
    """
    usable = [site for site in sites if site.threshold]
    if not usable:
        assert functions is not None
        return evaluate(load, None, 0, functions)
    mixes = [best_of_type(load, site, functions, quantile, instances_max) for site in usable]
    return min(mixes, key=lambda mix: _rank(mix, quantile))


def best_of_type(
    load: LoadProfile,
    site: InstanceCapacity,
    functions: FaasChoice | None,
    quantile: float,
    instances_max: int,
) -> Mix:
    """Return the best mix with instances of one type, from none of them to as many as may be."""
    least = 0 if functions is not None else 1
    most = max(least, min(instances_max, _instances_enough(load, site)))
    spread = np.geomspace(1, most, _TRIED_MAX) if most > _TRIED_MAX else np.arange(1, most + 1)
    tried = sorted({least, *(round(count) for count in spread.tolist())})
    mixes = {count: evaluate(load, site, count, functions) for count in tried}

    def rank(count: int) -> tuple[float, float]:
        return _rank(mixes[count], quantile)

    place = tried.index(min(tried, key=rank))
    # Where not all were tried, the best lies between the neighbours of the best so far.
    for count in range(tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)] + 1):
        if count not in mixes:
            mixes[count] = evaluate(load, site, count, functions)
    return mixes[min(mixes, key=rank)]


def evaluate(
    load: LoadProfile, site: InstanceCapacity | None, instances: int, functions: FaasChoice | None
) -> Mix:
    """Return how the load would fare on so many instances, with functions for the rest or none."""
    if load.peak_clients:
        flows = _closed_flows(load, site, instances, functions)
    else:
        flows = _open_flows(load, site, instances)
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
        peak = max(min(most, _at_once(flow, run_s)) for flow in flows)
    total = taken + spilled
    return Mix(
        site=site if instances else None,
        instances=instances,
        functions=functions,
        rate_per_s=total,
        spilled=spilled / total if total else 0.0,
        cold=cold / total if total else 0.0,
        attainment=met / total if total else 1.0,
        functions_peak=peak,
        instances_usd_per_hour=instances * site.offer.usd_per_hour if site else 0.0,
        functions_usd_per_hour=3600.0 * usd_per_s,
    )


@dataclass(frozen=True, slots=True)
class _LevelFlow:
    """Where requests go at one level of the load."""

    share: float  # of the time
    taken_per_s: float  # by instances
    within: float  # share of those that meet the objective
    spilled_per_s: float
    waiting: int | None  # clients that wait for what is spilled; None: it comes by itself


def _open_flows(
    load: LoadProfile, site: InstanceCapacity | None, instances: int
) -> list[_LevelFlow]:
    levels = load.levels
    if site is None or not instances:
        return [_LevelFlow(level.share, 0.0, 0.0, level.rate_per_s, None) for level in levels]
    rates = np.array([max(level.rate_per_s, 1e-12) for level in levels])
    paces, within = _states(site, instances)
    steps = np.log(rates)[:, None] - np.log(paces)[None, :]
    logs = np.concatenate([np.zeros((len(levels), 1)), np.cumsum(steps, axis=1)], axis=1)
    odds = np.exp(logs - logs.max(axis=1, keepdims=True))
    chances = odds / odds.sum(axis=1, keepdims=True)  # that so many are there; who comes sees them
    blocked = chances[:, -1]
    met = chances[:, :-1] @ within
    return [
        _LevelFlow(level.share, rate * (1.0 - b), m / max(1.0 - b, 1e-12), rate * b, None)
        for level, rate, b, m in zip(
            levels, rates.tolist(), blocked.tolist(), met.tolist(), strict=True
        )
    ]


def _closed_flows(
    load: LoadProfile, site: InstanceCapacity | None, instances: int, functions: FaasChoice | None
) -> list[_LevelFlow]:
    paces, shares = np.zeros(0), np.zeros(0)
    if site is not None and instances:
        paces, shares = _states(site, instances)
    flows = []
    for level in load.levels:
        held = min(int(level.clients), len(paces))
        rest = int(level.clients) - held
        pace, within = (float(paces[held - 1]), float(shares[held - 1])) if held else (0.0, 0.0)
        if rest and functions is None:  # they take turns with the others, and all are late
            flows.append(_LevelFlow(level.share, 0.0, 0.0, pace, rest))
        else:
            per_s = rest / functions.row.trip_ms * 1e3 if functions is not None else 0.0
            flows.append(_LevelFlow(level.share, pace, within, per_s, rest))
    return flows


def _states(site: InstanceCapacity, instances: int) -> tuple[Floats, Floats]:
    """With 1, 2, ... requests spread evenly: answers per second, and the last one's chances."""
    counts = np.arange(1, instances * site.threshold + 1)
    fewer, more = counts // instances, counts % instances  # and so many that have one more
    paces = np.array([0.0, *(c / ms * 1e3 for c, ms in enumerate(site.times_ms, 1)), 0.0])
    total = (instances - more) * paces[fewer] + more * paces[fewer + 1]
    return total, np.array(site.within)[(counts - 1) // instances]


def _cold_per_s(flows: Sequence[_LevelFlow], functions: FaasChoice, load: LoadProfile) -> float:
    """How often a call meets an instance that is not there yet, averaged over the load."""
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
        max(first, min(_rush(flows, load, run_s, start_s), terms.concurrency_max))
        + float((calls * again).sum())
        + old
    )
    return starts / duration_s


def _rates_by_instance(flows: Sequence[_LevelFlow], run_s: float, most: int) -> Floats:
    """How often the first, the second, ... function instance is called, averaged over the load."""
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


def _rush(flows: Sequence[_LevelFlow], load: LoadProfile, run_s: float, start_s: float) -> float:
    """Instances that are started while the load rises to its highest."""
    there, ready_s = 0.0, 0.0
    for rise in load.rises:
        flow = flows[rise.place]
        if flow.waiting is not None:
            there = max(there, float(flow.waiting))
        elif rise.at_s < ready_s or there < _needed(flow.spilled_per_s * run_s):
            there = max(there, flow.spilled_per_s * (run_s + start_s))
            ready_s = rise.at_s + start_s
    return there


def _at_once(flow: _LevelFlow, run_s: float) -> int:
    """Functions that run at once at a level, hardly ever more."""
    if flow.waiting is not None:
        return flow.waiting
    mean = flow.spilled_per_s * run_s
    return ceil(_needed(mean)) if mean > 0.01 else 0


def _needed(mean: float) -> float:
    """Hardly ever are there more at once, if there are so many on average."""
    return mean + 3.0 * sqrt(mean)


def _start_usd(functions: FaasChoice) -> float:
    if not functions.terms.bills_cold_start:
        return 0.0
    return functions.start_ms / 1e3 * functions.row.usd_per_s


def _instances_enough(load: LoadProfile, site: InstanceCapacity) -> int:
    """So many that more would hardly ever have anything to do."""
    busy = load.peak_per_s / site.rate_per_s
    return ceil(busy + 4.0 * sqrt(busy) + load.peak_clients / site.threshold) + 2


def _rank(mix: Mix, quantile: float) -> tuple[float, float]:
    """Those that reach the quantile by price; the others after them, by what they reach."""
    return (0.0, mix.usd_per_1k) if mix.attainment >= quantile else (1.0, -mix.attainment)
