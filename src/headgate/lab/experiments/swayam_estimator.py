"""Swayam's resource estimation beside simulations: the least number of backends that meets an SLO.

A cell is an offered load, a coefficient of variation of the execution times, a limit RT_max in
multiples of their mean, and a share SL_min; under random dispatch also a probe delay. In each cell
the estimate is compared with the least number of backends that meets the SLO in a simulation, found
by walking up or down from the estimate. Then the three SLAs of Swayam's slides as worked cases, and
their figure: waiting time over the number of backends under each load balancer.

Estimates have no constants that were fitted to simulations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.model import Slo
from headgate.lab.experiments import Check, Progress, Result, Row, none_check
from headgate.lab.experiments._balancer_simulation import (
    Balancer,
    MissEstimate,
    global_queue,
    join_idle_queue,
    partitioned,
    power_of_d,
    random_retry,
    wait_quantile,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import in_processes
from headgate.metrics.report.style import MARKERS, SERIES, add_legend_below, new_figure, style_axes
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.response_time import least_backends
from headgate.planning.autoscaling.waiting_time import (
    GlobalQueue,
    JoinIdleQueue,
    LoadBalancer,
    Partitioned,
    PowerOfD,
    RandomRetry,
    WaitTail,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "swayam-estimator"
TITLE = "Swayam's resource estimation: least backends, estimated and simulated"

_SOURCE: Final = "docs/papers/swayam-estimator.md"
_SEED: Final = 14
_FRONTENDS: Final = 8
_CHOICES: Final = 2
_RANDOM: Final = "random"
_OTHERS: Final = ("global queue", "partitioned", "join-idle-queue", "power of 2")
_LOADS: Final = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0)  # Erlangs
_OTHER_LOADS: Final = (20.0,)  # for the load balancers that Swayam does not use
_CVS: Final = (0.1, 0.25, 0.5, 1.0)
_DELAYS: Final = (0.01, 0.05)  # of the mean execution time
_LIMITS: Final = (2.0, 5.0, 10.0)  # in mean execution times
_SHARES: Final = (0.95, 0.99, 0.999)
_QUICK_LOADS: Final = (2.0, 10.0)
_QUICK_CVS: Final = (0.25,)
_QUICK_LIMITS: Final = (5.0,)
_QUICK_SHARES: Final = (0.95, 0.99)
# How long a simulation may get to be certain, in batches of 5,000 requests.
_BATCHES_MAX: Final = 40
_QUICK_BATCHES_MAX: Final = 20
_WITHIN_MIN: Final = 0.95

# The worked cases: a service of 100 requests per second that execute for 150 ms.
_SERVICE: Final = LogNormalTimes(0.150, 0.5)
_RATE_PER_S: Final = 100.0
_SERVICE_DELAY_S: Final = 0.005
_SLAS: Final = {
    "99 % under 500 ms": Slo(500_000_000, 0.99),
    "99.9 % under 1 s": Slo(SECOND_NS, 0.999),
    "95 % under 850 ms at +25 % load": Slo(850_000_000, 0.95, rate_tolerance=1.25),
}
_FIGURE_BACKENDS: Final = range(16, 33, 2)
_FIGURE_QUANTILE: Final = 0.99


@dataclass(frozen=True, slots=True)
class Condition:
    """What the cells of one group have in common. Times are in mean execution times."""

    balancer: str
    load: float
    cv: float
    delay: float = 0.0

    def estimator(self, mean_s: float = 1.0) -> LoadBalancer:
        """Return the load balancer for the estimate."""
        estimators: dict[str, LoadBalancer] = {
            "global queue": GlobalQueue(),
            "partitioned": Partitioned(_FRONTENDS),
            "join-idle-queue": JoinIdleQueue(),
            "power of 2": PowerOfD(_CHOICES),
        }
        return estimators.get(self.balancer) or RandomRetry(self.delay * mean_s)

    def simulator(self, mean_s: float = 1.0) -> Balancer:
        """Return the load balancer for the simulation."""
        simulators: dict[str, Balancer] = {
            "global queue": global_queue,
            "partitioned": partitioned(_FRONTENDS),
            "join-idle-queue": join_idle_queue,
            "power of 2": power_of_d(_CHOICES),
        }
        return simulators.get(self.balancer) or random_retry(self.delay * mean_s)


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One SLO under one condition: the estimate beside the simulated minimum."""

    limit: float
    share: float
    estimated: int | None
    simulated: int | None  # None: no number of backends is enough
    error: float = 0.0  # standard error of the simulated minimum, in backends

    @property
    def difference(self) -> int:
        """The estimate less the simulated minimum, where there is one."""
        assert self.estimated is not None and self.simulated is not None
        return self.estimated - self.simulated

    @property
    def label(self) -> str:
        """Estimate and simulated minimum; one number where they agree."""
        if self.estimated == self.simulated:
            return "-" if self.simulated is None else str(self.simulated)
        return f"{self.estimated} ({self.simulated})"


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Estimate and simulate every cell, the worked cases and the figure."""
    conditions = list(_conditions(is_quick=quick))
    cells: dict[Condition, list[ComparedCell]] = {}
    simulate = partial(compare, is_quick=quick)
    for condition, found in zip(
        conditions, in_processes(simulate, conditions, 1 if quick else 2), strict=True
    ):
        progress(f"{condition.balancer}, {condition.load:g} Erlangs, cv {condition.cv:g}")
        cells[condition] = found
    progress("worked cases")
    worked = _worked_cases(is_quick=quick)
    rows = [
        *(_row(condition, found) for condition, found in cells.items()),
        *(_summary(name, cells) for name in (_RANDOM, *_OTHERS)),
        *worked,
    ]
    checks = [*_checks(cells), _worked_check(worked)]
    figures = write_figures(out, NAME, lambda: {"waiting": _figure(is_quick=quick)})
    return Result(NAME, rows, checks, figures)


def compare(condition: Condition, *, is_quick: bool) -> list[ComparedCell]:
    """Return the cells of a condition. At the top level of the module, for worker processes."""
    limits, shares = (_QUICK_LIMITS, _QUICK_SHARES) if is_quick else (_LIMITS, _SHARES)
    times = LogNormalTimes(1.0, condition.cv)
    simulated = _SimulatedMinimum(condition, times, limits, is_quick=is_quick)
    cells = []
    for (place, limit), share in product(enumerate(limits), shares):
        slo = Slo(round(limit * SECOND_NS), share)
        estimated = least_backends(times, condition.load, slo, condition.estimator()).backends
        if times.share_within(limit) < share:
            cells.append(ComparedCell(limit, share, estimated, None))
        else:
            cells.append(
                ComparedCell(
                    limit, share, estimated, *simulated.least(place, 1.0 - share, estimated)
                )
            )
    return cells


@final
class _SimulatedMinimum:
    """The least numbers of backends under one condition, from simulations of as few as possible."""

    def __init__(
        self,
        condition: Condition,
        times: LogNormalTimes,
        limits: Sequence[float],
        *,
        is_quick: bool,
    ) -> None:
        self._condition = condition
        self._times = times
        self._limits = limits
        self._batches_max = _QUICK_BATCHES_MAX if is_quick else _BATCHES_MAX
        self._simulations: dict[int, MissEstimate] = {}

    def least(self, limit: int, allowed: float, start: int | None) -> tuple[int, float]:
        """Return the least number, and its standard error, by walking from `start`."""
        backends = start or int(self._condition.load) + 1
        if self._is_met(backends, limit, allowed):
            while self._is_met(backends - 1, limit, allowed):
                backends -= 1
        else:
            backends += 1
            while not self._is_met(backends, limit, allowed):
                backends += 1
        share, error = self._at(backends).misses(limit)
        fewer = (
            1.0 if backends - 1 <= self._condition.load else self._at(backends - 1).misses(limit)[0]
        )
        return backends, error / max(fewer - share, 1e-9)

    def _is_met(self, backends: int, limit: int, allowed: float) -> bool:
        if backends <= self._condition.load:
            return False  # the wait grows without end
        return self._at(backends).is_met(limit, allowed)

    def _at(self, backends: int) -> MissEstimate:
        found = self._simulations.get(backends)
        if found is None:
            condition = self._condition
            seed = (_SEED, round(1000 * condition.load), round(1000 * condition.cv))
            found = self._simulations[backends] = MissEstimate(
                condition.simulator(self._times.mean_s),
                condition.load / self._times.mean_s,
                self._times,
                backends,
                self._limits,
                seed,
                batches_max=self._batches_max,
            )
        return found


def _conditions(*, is_quick: bool) -> Iterator[Condition]:
    loads, cvs = (_QUICK_LOADS, _QUICK_CVS) if is_quick else (_LOADS, _CVS)
    for load, cv in product(loads, cvs):
        for delay in _DELAYS:
            yield Condition(_RANDOM, load, cv, delay)
    for balancer, load, cv in product(_OTHERS, loads if is_quick else _OTHER_LOADS, cvs):
        yield Condition(balancer, load, cv)


def _row(condition: Condition, cells: Sequence[ComparedCell]) -> Row:
    row: Row = {"balancer": condition.balancer, "load": condition.load, "cv": condition.cv}
    if condition.balancer == _RANDOM:
        row["delay"] = condition.delay
    return row | {f"{cell.limit:g}C {100 * cell.share:g} %": cell.label for cell in cells}


def _summary(balancer: str, cells: Mapping[Condition, Sequence[ComparedCell]]) -> Row:
    """Return how far the estimates for a load balancer are from the simulated minima."""
    every = [cell for condition, each in cells.items() for cell in each
             if condition.balancer == balancer]  # fmt: skip
    met = [cell for cell in every if cell.simulated is not None and cell.estimated is not None]
    differences = [cell.difference for cell in met]
    return {
        "balancer": balancer,
        "cells": len(every),
        "infeasible": sum(cell.simulated is None for cell in every),
        "disagree on that": sum(
            (cell.simulated is None) != (cell.estimated is None) for cell in every
        ),
        "exact": sum(each == 0 for each in differences) / len(met),
        "within 1": sum(abs(each) <= 1 for each in differences) / len(met),
        "most below": min(differences),
        "most above": max(differences),
        "error of simulation": max(cell.error for cell in met),
    }


def _checks(cells: Mapping[Condition, Sequence[ComparedCell]]) -> list[Check]:
    summary = _summary(_RANDOM, cells)
    within, below = float(str(summary["within 1"])), int(str(summary["most below"]))
    claim = "random dispatch: the estimate is within 1 of the simulated minimum"
    expected = f"at least {_WITHIN_MIN:.0%} of the cells"
    checks = [Check(claim, _SOURCE, expected, within, within >= _WITHIN_MIN)]
    claim = "random dispatch: no estimate is more than 1 below"
    checks.append(Check(claim, _SOURCE, "-1 or more", below, below >= -1))
    disagreeing = sum(
        int(str(_summary(each, cells)["disagree on that"])) for each in (_RANDOM, *_OTHERS)
    )
    claim = "cells that no number of backends can meet are reported as such"
    checks.append(Check(claim, _SOURCE, "0 exceptions", disagreeing, disagreeing == 0))
    error = max(cell.error for each in cells.values() for cell in each)
    claim = "the standard error of the simulated minimum is below 1 backend"
    checks.append(Check(claim, "batch means", "below 1", error, error < 1.0))
    return checks


def _service_conditions() -> list[Condition]:
    load = _RATE_PER_S * _SERVICE.mean_s
    delay = _SERVICE_DELAY_S / _SERVICE.mean_s
    return [Condition(each, load, _SERVICE.cv, delay) for each in (_RANDOM, *_OTHERS)]


def _worked_cases(*, is_quick: bool) -> list[Row]:
    """Return, by SLA, the estimate and the simulated minimum under each load balancer."""
    rows = []
    for sla, slo in list(_SLAS.items())[: 1 if is_quick else None]:
        row: Row = {"SLA": sla, "load": slo.rate_tolerance * _RATE_PER_S * _SERVICE.mean_s}
        for condition in _service_conditions():
            estimator = condition.estimator(_SERVICE.mean_s)
            estimated = least_backends(_SERVICE, _RATE_PER_S, slo, estimator).backends
            limit_s = slo.latency_ns / SECOND_NS
            raised = replace(condition, load=condition.load * slo.rate_tolerance)
            simulated, _ = _SimulatedMinimum(raised, _SERVICE, [limit_s], is_quick=is_quick).least(
                0, 1.0 - slo.quantile, estimated
            )
            row[condition.balancer] = ComparedCell(
                limit_s, slo.quantile, estimated, simulated
            ).label
        rows.append(row)
    return rows


def _worked_check(rows: Sequence[Row]) -> Check:
    apart = [
        f"{row['SLA']}: {label}"
        for row in rows
        for key, label in row.items()
        if key not in ("SLA", "load") and _apart(str(label)) > 1
    ]
    return none_check("the worked SLAs are estimated within 1 backend", _SOURCE, apart)


def _apart(label: str) -> int:
    """Return the distance of the numbers in the label of a cell."""
    estimated, _, simulated = label.rstrip(")").partition(" (")
    return abs(int(estimated) - int(simulated)) if simulated else 0


def _figure(*, is_quick: bool) -> Figure:
    """Draw the 99th percentile of the wait over the number of backends."""
    figure = new_figure(4.2)
    axes = figure.add_subplot(1, 1, 1)
    sizes = list(_FIGURE_BACKENDS)[:: 3 if is_quick else 1]
    handles = []
    for number, condition in enumerate(_service_conditions()):
        estimator = condition.estimator(_SERVICE.mean_s)
        tails = [estimator.wait(_SERVICE, _RATE_PER_S, n, _SERVICE.mean_s) for n in sizes]
        estimated = [1e3 * _tail_quantile_s(tail, _FIGURE_QUANTILE) for tail in tails]
        simulated = [
            1e3
            * wait_quantile(
                condition.simulator(_SERVICE.mean_s), _RATE_PER_S, _SERVICE, n, _FIGURE_QUANTILE,
                4 if is_quick else 10, (_SEED,),
            )
            for n in sizes
        ]  # fmt: skip
        colour = SERIES[number]
        axes.plot(sizes, estimated, color=colour, linewidth=1.5)
        handles += axes.plot(
            sizes, simulated, color=colour, marker=MARKERS[number], linestyle="none", markersize=5
        )
    axes.set_yscale("symlog", linthresh=10.0)
    axes.set_ylim(bottom=0.0)
    style_axes(
        axes,
        title=f"{_RATE_PER_S * _SERVICE.mean_s:g} Erlangs; lines: estimated, markers: simulated",
        x_label="backends",
        y_label="99th percentile of the wait (ms)",
    )
    add_legend_below(figure, handles, [_RANDOM, *_OTHERS], columns=5)
    return figure


def _tail_quantile_s(tail: WaitTail, quantile: float) -> float:
    """Return the wait that a share of the requests do not exceed, by bisection."""
    allowed = 1.0 - quantile
    if tail.beyond(0.0) <= allowed:
        return 0.0
    high = _SERVICE.mean_s
    while tail.beyond(high) > allowed and high < _WAIT_MAX_S:
        high *= 2.0
    low = 0.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if tail.beyond(middle) > allowed else (low, middle)
    return high


_WAIT_MAX_S: Final = 100.0
