"""How many nodes an objective needs: at the forecast rate, and at U times it until more are there.

Nodes are rented ahead of demand, because they take seconds to minutes to be ready. An objective
says by how much the rate may exceed the forecast without harm (`Slo.rate_tolerance`, Swayam's U).
The least number of nodes n is the larger of two:

- *For good, at the forecast rate*: P(response <= RT_max) >= SL_min (`response_time`, one queue).
  Misses come in clusters, so only half of those that SL_min allows are planned for, and fewer
  where several gateways ask for the nodes: they have no queue in common, so some that came later
  go first, and more of them wait too long.
- *For a while, at U times that rate*: if the rate rises now, more nodes are ready after a time T,
  the set-up and the time to notice. This is the capacity calendar at U times the forecast: of what
  arrives within t, for every t up to T, the n nodes finish in time what they can do until
  t + RT_max - C, with C the mean execution time. The rest is not admitted; it may be 1 - SL_min of
  the work (Poisson arrivals). Swayam asks for nodes that could serve U times the rate for good.

The forecast is the rate of now, or that which seasons before had at this time (`Recurrence`).
A number that falls is followed after a hold, the time in which a node costs as much as its set-up.

Of several gateways each counts its own arrivals and takes the others to receive as many. From 1/F
of the arrivals the rate is known as well after F times as long: its longest window is that long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log, sqrt
from statistics import NormalDist
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.model import Slo
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.response_time import least_backends
from headgate.planning.autoscaling.waiting_time import GlobalQueue
from headgate.planning.constants import (
    DISPUTE_DEVIATIONS,
    EXECUTION_CV,
    HOLD_MIN_NS,
    PLANNED_MISSES,
    PLANNED_MISSES_SHARED,
    REACTION_NS,
    RISE_DEVIATIONS,
    SETTLED_AFTER_NS,
    SURPLUS,
    SURPLUS_SETUPS,
    WINDOWS_FOR_MEAN,
)
from headgate.planning.forecast import ArrivalCounts, Recurrence

_BUCKET_NS: Final = SECOND_NS  # so that counts are rates per second
_WINDOW: Final = 64  # the longest, of a single gateway, in buckets
_WINDOW_MAX: Final = 16 * _WINDOW  # of any number of gateways
_NORMAL: Final = NormalDist()
_STEPS_PER_E: Final = 100.0  # rates are rounded to 1 %: fewer estimates


def consistent_mean(
    values: Sequence[float], longest: int = _WINDOW, shortest: int = 2
) -> tuple[float, int]:
    """The mean of the longest recent window that no shorter one contradicts, and its length.

    Of Poisson arrivals at one rate the longest window says most. After a change of the rate the
    short windows differ from the long ones by more than chance, and the rate is that of the short
    ones: a change is followed within seconds, and noise is not. Windows have `shortest` values,
    twice as many, and so on, up to `longest`.

    >>> consistent_mean([10.0] * 60 + [11.0, 9.0, 12.0, 8.0])
    (10.0, 64)
    >>> consistent_mean([10.0] * 60 + [20.0] * 4)
    (20.0, 4)
    """
    sums: list[tuple[int, float]] = []  # by window, the shortest first
    window = shortest
    used = min(window, len(values))
    mean = sum(values[-used:]) / used
    while window <= min(longest, len(values)):
        total = sum(values[-window:])
        expected = total / window
        if all(_is_consistent(part, length, expected, window) for length, part in sums):
            mean, used = expected, window
        sums.append((window, total))
        window *= 2
    return mean, used


def _is_consistent(total: float, length: int, expected: float, window: int) -> bool:
    """Whether the end of a window has as much as its mean lets one expect.

    Given the count of a window, that of a part of it is binomial.
    """
    deviation = sqrt(max(expected * length, 1.0) * (1.0 - length / window))
    return abs(total - expected * length) <= RISE_DEVIATIONS * deviation + 0.5


def _expected_excess(work_s: float, capacity_s: float, mean_s: float) -> float:
    """Return the work above a capacity that is expected of Poisson arrivals; normal approximation.

    >>> round(_expected_excess(80.0, 80.0, 0.5), 2), round(_expected_excess(80.0, 95.0, 0.5), 2)
    (2.63, 0.03)
    """
    deviation_s = sqrt(work_s * mean_s * (1.0 + EXECUTION_CV * EXECUTION_CV))
    margin = (capacity_s - work_s) / deviation_s
    return deviation_s * (_NORMAL.pdf(margin) - margin * _NORMAL.cdf(-margin))


@final
class FleetSize:
    """The number of nodes for one function on one pool. O(1) per arrival, O(window) per query.

    A node runs `concurrency` requests at once, in `exec_ns` each. `slo.latency_ns` is for the
    response of the node. `own_per_s` is the rate that nodes which are not rented take. Until the
    first arrival `standing` nodes are wanted, then those of them that the rate may need.
    """

    def __init__(
        self,
        nodes_max: int,
        *,
        standing: int,
        slo: Slo,
        exec_ns: int,
        concurrency: int,
        ready_after_ns: int,
        own_per_s: float = 0.0,
    ) -> None:
        self._nodes_max = nodes_max
        self._standing = standing
        self._times = LogNormalTimes(exec_ns / SECOND_NS, EXECUTION_CV)
        # An objective that a single request misses counts as if it were just met.
        self._slo = replace(slo, latency_ns=max(slo.latency_ns, 2 * exec_ns))
        self._concurrency = concurrency
        self._ready_after_ns = ready_after_ns
        self._own_per_s = own_per_s
        # Of all gateways: each arrival counts for as many as there were when it came.
        self._counts = ArrivalCounts(_BUCKET_NS, _WINDOW_MAX * _BUCKET_NS)
        self._recurrence = Recurrence(ready_after_ns + REACTION_NS)
        self._has_arrivals = False
        # In less time than a request may wait, so many come by chance and are no rate: the nodes
        # have all that time for them.
        slack_ns = self._slo.latency_ns - exec_ns
        self._shortest = min(max(2, slack_ns // _BUCKET_NS), _WINDOW)
        self._forecast_per_s = 0.0  # of now
        self._settled_ns = 0  # from when on the forecast is trusted to release nodes
        self._planned_misses = PLANNED_MISSES
        self._servers: dict[int, int] = {}  # estimates by rounded rate
        self._guess: int | None = None  # the last of them
        # What another gateway may want, and what the last few seconds alone would need, as of the
        # last query.
        self.most_nodes = self.recent_nodes = 0
        self._held: deque[tuple[int, int]] = deque()  # (until, nodes), fewer nodes last

    def on_arrival(self, now_ns: int, items: float, gateways: int = 1) -> None:
        """Record an arrival, admitted or not: one of those that all gateways receive."""
        if not self._has_arrivals:
            self._has_arrivals = True
            self._settled_ns = now_ns + SETTLED_AFTER_NS
        self._counts.observe(now_ns, items * gateways)

    def desired_nodes(self, now_ns: int, gateways: int = 1) -> int:
        """How many nodes to rent now, if so many gateways receive as much as this one."""
        self._set_planned_misses(gateways)
        self._estimate(now_ns, gateways)
        forecast_per_s = self._forecast_per_s
        if self._has_arrivals:
            self._recurrence.observe(now_ns, forecast_per_s)
            forecast_per_s = max(forecast_per_s, self._recurrence.highest_ahead())
        nodes = self._hold(now_ns, self._nodes_for(forecast_per_s))
        if not self._has_arrivals:
            nodes = max(nodes, self._standing)
        elif now_ns < self._settled_ns and gateways == 1:
            nodes = max(nodes, min(self._standing, self._nodes_at_most(now_ns)))
        elif now_ns < self._settled_ns:  # for other gateways it may be settled already
            self.most_nodes = max(self.most_nodes, self._standing)
        return min(nodes, self._nodes_max)

    def _set_planned_misses(self, gateways: int) -> None:
        planned = PLANNED_MISSES if gateways == 1 else PLANNED_MISSES_SHARED
        if planned != self._planned_misses:
            self._planned_misses = planned
            self._servers.clear()

    def _estimate(self, now_ns: int, gateways: int) -> None:
        """The rate of all gateways, and the deviation that counting a part of it adds.

        It is that of the window from which the rate is, or of a minute at most: after a change of
        the rate the tolerance of the objective is for what is not known yet.
        """
        values = self._counts.buckets(now_ns)
        if not values:
            return
        longest = min(gateways * max(_WINDOW, WINDOWS_FOR_MEAN * self._shortest), _WINDOW_MAX)
        own = values[-longest:]
        if gateways > 1:
            own = [value / gateways for value in own]
        own_per_s, window = consistent_mean(own, longest, self._shortest)
        per_s = gateways * own_per_s
        self._forecast_per_s = per_s + sqrt((gateways - 1) * per_s / max(window, _WINDOW))
        if gateways == 1:
            return
        dispute_per_s = DISPUTE_DEVIATIONS * sqrt(gateways * per_s / window)
        self.most_nodes = self._nodes_for(self._forecast_per_s + dispute_per_s)
        recent = values[-(REACTION_NS // _BUCKET_NS) :]
        self.recent_nodes = self._nodes_for(sum(recent) / len(recent))

    def _nodes_at_most(self, now_ns: int) -> int:
        """What the highest rate needs with which so few may have come since the first arrival."""
        values = self._counts.buckets(now_ns)
        if not values:
            return self._nodes_max
        count, z = sum(values), RISE_DEVIATIONS
        return self._nodes_for((count + z * z / 2 + z * sqrt(count + z * z / 4)) / len(values))

    def _nodes_for(self, per_s: float) -> int:
        return ceil(self._servers_for(per_s - self._own_per_s) / self._concurrency)

    def _servers_for(self, rate_per_s: float) -> int:
        if rate_per_s <= 0.0:
            return 0
        step = round(_STEPS_PER_E * log(rate_per_s))
        found = self._servers.get(step)
        if found is None:
            quantile = 1.0 - (1.0 - self._slo.quantile) * self._planned_misses
            for_good = replace(self._slo, rate_tolerance=1.0, quantile=quantile)
            found = self._least(rate_per_s, for_good)
            if self._slo.rate_tolerance > 1.0:
                most = self._least(rate_per_s, self._slo)  # enough at U times the rate for good
                found = self._for_a_while(rate_per_s, found, max(found, most))
            self._servers[step] = self._guess = found
        return found

    def _least(self, rate_per_s: float, slo: Slo) -> int:
        queue, guess = GlobalQueue(), self._guess
        found = least_backends(self._times, rate_per_s, slo, queue, guess=guess).backends
        return self._nodes_max * self._concurrency if found is None else found

    def _for_a_while(self, rate_per_s: float, least: int, most: int) -> int:
        """The servers that keep up with U times the rate until more nodes are ready.

        Of what arrives within t, all times down to where only a few requests do are looked at.
        """
        slo, mean_s = self._slo, self._times.mean_s
        erlangs = slo.rate_tolerance * rate_per_s * mean_s
        slack_s = slo.latency_ns / SECOND_NS - mean_s
        times_s = [(self._ready_after_ns + REACTION_NS) / SECOND_NS]
        while times_s[-1] > slack_s:
            times_s.append(times_s[-1] / 2)
        for servers in range(least, most):
            if all(
                _expected_excess(erlangs * t, servers * (t + slack_s), mean_s)
                <= (1.0 - slo.quantile) * erlangs * t
                for t in times_s
            ):
                return servers
        return most

    def _hold(self, now_ns: int, nodes: int) -> int:
        """The largest number of the last while."""
        held = self._held
        while held and held[-1][1] <= nodes:
            held.pop()
        held.append((now_ns + max(self._ready_after_ns, HOLD_MIN_NS), nodes))
        while held[0][0] <= now_ns:
            held.popleft()
        return held[0][1]


@final
class FleetSizes:
    """The number of nodes for a function whose requests differ in the time that they have.

    The urgent ones go first, so those that have a time t wait only for those that have no more, and
    the nodes must be enough for these within t, for each t. `fleets` are by that time. Requests
    that have more than any of them, as those without an objective, count for the last one.
    """

    def __init__(self, fleets: Mapping[int, FleetSize]) -> None:
        self._fleets = dict(sorted(fleets.items()))

    def on_arrival(self, now_ns: int, allowed_ns: int, items: float, gateways: int = 1) -> None:
        """Record an arrival, admitted or not, that has a time to be answered in."""
        last = next(reversed(self._fleets.values()))
        for time_ns, fleet in self._fleets.items():
            if allowed_ns <= time_ns or fleet is last:
                fleet.on_arrival(now_ns, items, gateways)

    def desired_nodes(self, now_ns: int, gateways: int = 1) -> int:
        """How many nodes to rent now, if so many gateways receive as much as this one."""
        return max(fleet.desired_nodes(now_ns, gateways) for fleet in self._fleets.values())

    @property
    def most_nodes(self) -> int:
        """What another gateway may want, as of the last query."""
        return max(fleet.most_nodes for fleet in self._fleets.values())

    @property
    def recent_nodes(self) -> int:
        """What the last few seconds alone would need, as of the last query."""
        return max(fleet.recent_nodes for fleet in self._fleets.values())


@final
class SurplusInstances:
    """The surplus instances of one variant in one pool, where gateways plan for the same pool.

    Each gateway forecasts the whole load from its own part of it, so by chance one wants more than
    another. To stop what another one wants costs a set-up. So a few surplus instances stay until
    they were not wanted for several times that long, and then go one after the other. None goes
    while the last few seconds alone would need it: others may have noticed a rise already. Those
    that stand from the start were wanted by no forecast: what no gateway can want by chance goes at
    once.
    """

    def __init__(self, setup_ns: int) -> None:
        self._setup_ns = setup_ns
        self._present: int | None = None
        self._since_ns = 0  # from when on there are so many, and too many
        self._has_gone = False  # one of those that stood from the start
        self._were_started = False  # some since then

    def to_keep(self, now_ns: int, wanted: int, present: int, most: int, recent: int) -> int:
        """How many instances to have now: those wanted, and the surplus that stays.

        `most` is what another gateway may want, `recent` what the last seconds alone would need.
        """
        before = present if self._present is None else self._present
        self._has_gone = self._has_gone or present < before
        self._were_started = self._were_started or (self._has_gone and present > before)
        if present <= wanted or present != self._present:
            self._since_ns = now_ns  # another gateway may have stopped or started one just now
        self._present = present
        if present <= max(wanted, recent):
            return max(wanted, present)
        few = ceil(SURPLUS * wanted) + 1 if self._were_started else max(wanted, most)
        is_old = now_ns - self._since_ns >= SURPLUS_SETUPS * self._setup_ns
        return min(present - 1 if is_old else present, max(few, recent))
