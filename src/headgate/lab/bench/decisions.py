"""Time per decision: `Scheduler.handle` over nodes, functions, queue length and stages.

A real Scheduler is driven in memory (`_decision_driver`), and only `handle` is timed: an arrival
includes admission and, if a node is free, placement; a completion includes whatever is dispatched
to the node that is free now. The budget is for the median of both together; starts, loads and
timers are reported apart. The budget is for interpreted code; the build that is installed is
measured, and the checks name it.

    python -m headgate.lab.bench.decisions --nodes 100 --functions 100      one case only
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headgate.core import build_kind
from headgate.lab.bench._decision_driver import (
    FLEETS,
    WEIGHTS,
    DecisionCase,
    Fleet,
    Timings,
    measure,
)
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.lab.figures import draw_lines, write_figures
from headgate.metrics.report.style import INK, MUTED, new_figure, number_log_axis, style_axes
from headgate.policies import find_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "decisions"
TITLE = "time per decision over nodes, functions, queue length and stages"

_SOURCE: Final = "docs/benchmarks.md"
_BASE: Final = DecisionCase(100, 100, 1_000)
_LARGEST: Final = DecisionCase(1_000, 1_000, 10_000)
_SIZES: Final = (1, 10, 100, 1_000)
# What grows: the cases of a sweep, by the label of its axis.
_SWEEPS: Final[Mapping[str, Sequence[DecisionCase]]] = {
    "nodes": [replace(_BASE, nodes=size) for size in _SIZES],
    "functions": [replace(_BASE, functions=size) for size in _SIZES],
    "nodes and functions": [replace(_LARGEST, nodes=size, functions=size) for size in _SIZES],
    "requests waiting": [replace(_BASE, waiting=count) for count in (0, 10, 100, 1_000, 10_000)],
    "stages": [replace(_BASE, stages=count) for count in (1, 2, 4, 8)],
}
_BUDGETS_US: Final = ((_BASE, 20.0), (_LARGEST, 100.0))
_BAR_PER_DECADE: Final = 8  # characters


@dataclass(frozen=True, slots=True)
class Measured:
    """Median and 99th percentile per kind of event, in microseconds."""

    arrival_us: float
    arrival_p99_us: float
    completion_us: float
    completion_p99_us: float
    together_us: float
    together_p99_us: float
    other_us: float
    waiting: int
    instances: int

    @classmethod
    def of(cls, timings: Timings) -> Measured:
        return cls(
            _quantile_us(timings.arrivals, 0.5),
            _quantile_us(timings.arrivals, 0.99),
            _quantile_us(timings.completions, 0.5),
            _quantile_us(timings.completions, 0.99),
            _quantile_us(timings.together, 0.5),
            _quantile_us(timings.together, 0.99),
            _quantile_us(timings.others, 0.5),
            timings.waiting,
            timings.instances,
        )


def _quantile_us(times_ns: Sequence[int], quantile: float) -> float:
    """Return a quantile, that of some event; NaN if there was none."""
    if not times_ns:
        return float("nan")
    return sorted(times_ns)[int(quantile * (len(times_ns) - 1))] / 1_000


def run(*, progress: Progress, policy: str = "headgate", out: Path | None = None) -> Result:
    """Measure all sweeps with one policy. Figures go to `out`."""
    kind = find_policy(policy)
    if out is not None:
        new_figure()  # raises now, and not after minutes, if there is no matplotlib
    results: dict[DecisionCase, Measured] = {}
    cases = all_cases()
    for number, case in enumerate(cases, 1):
        progress(f"case {number} of {len(cases)}: {_label(case)}")
        results[case] = Measured.of(measure(case, kind))
    rows = [_row(name, case, results[case]) for name, case in _swept(results)]
    figures = write_figures(out, NAME, lambda: {policy: _figure(policy, results)})
    return Result(NAME, rows, _checks(policy, results), figures)


def all_cases() -> list[DecisionCase]:
    """Return every case once: the sweeps for every fleet, with resident weights and pressure."""
    cases = {
        _in_state(case, fleet, weights): None
        for fleet, weights in product(FLEETS, WEIGHTS)
        for sweep in _SWEEPS.values()
        for case in sweep
    }
    return [case for case in cases if case.is_possible]


def _in_state(case: DecisionCase, fleet: Fleet, weights: str) -> DecisionCase:
    """Return the case in this state; nothing waits for an idle fleet."""
    known = next(each for each in WEIGHTS if each == weights)
    waiting = 0 if fleet == "idle" else case.waiting
    return replace(case, fleet=fleet, weights=known, waiting=waiting)


def _swept(results: Mapping[DecisionCase, Measured]) -> Iterable[tuple[str, DecisionCase]]:
    """Yield the cases sweep by sweep, without sweeps over what an idle fleet does not have."""
    for (name, sweep), fleet, weights in product(_SWEEPS.items(), FLEETS, WEIGHTS):
        if name != "requests waiting" or fleet != "idle":
            for case in sweep:
                if (each := _in_state(case, fleet, weights)) in results:
                    yield name, each


def _row(sweep: str, case: DecisionCase, measured: Measured) -> Row:
    return {
        "over": sweep,
        "fleet": case.fleet,
        "weights": case.weights,
        "nodes": case.nodes,
        "functions": case.functions,
        "stages": case.stages,
        "waiting": measured.waiting,
        "arrival_us": round(measured.arrival_us, 1),
        "arrival_p99": round(measured.arrival_p99_us, 1),
        "completion_us": round(measured.completion_us, 1),
        "completion_p99": round(measured.completion_p99_us, 1),
        "other_us": round(measured.other_us, 1),
        "median_us": round(measured.together_us, 1),
        "p99_us": round(measured.together_p99_us, 1),
        "growth": _bar(measured.together_us),
    }


def _bar(median_us: float) -> str:
    """Draw a time on a logarithmic scale that begins at 1 us.

    >>> len(_bar(10.0)), len(_bar(100.0))
    (8, 16)
    """
    return "█" * max(1, round(_BAR_PER_DECADE * log10(max(1.0, median_us))))


def _checks(policy: str, results: Mapping[DecisionCase, Measured]) -> list[Check]:
    checks = []
    for (size, budget_us), fleet, weights in product(_BUDGETS_US, FLEETS, WEIGHTS):
        case = _in_state(size, fleet, weights)
        median_us = round(results[case].together_us, 1)
        claim = f"{policy}, {build_kind()}: median at {_label(case)}"
        measured = f"{median_us} us"
        if results[case].waiting < 0.9 * case.waiting:  # too slow to fill the queue in time
            measured += f" with only {results[case].waiting:,} waiting"
        holds = median_us <= budget_us and results[case].waiting >= 0.9 * case.waiting
        checks.append(Check(claim, _SOURCE, f"<= {budget_us:g} us", measured, holds))
    return checks


def _label(case: DecisionCase) -> str:
    stages = "" if case.stages == 1 else f", {case.stages} stages"
    waiting = "" if case.fleet == "idle" else f", {case.waiting:,} waiting"
    size = f"{case.nodes:,} nodes x {case.functions:,} functions"
    return f"{size}{waiting}{stages}, {case.fleet}, weights {case.weights}"


def _figure(policy: str, results: Mapping[DecisionCase, Measured]) -> Figure:
    """Draw the median per event over each dimension, with the budget where one is set."""
    figure = new_figure(6.4)
    states = list(product(FLEETS, WEIGHTS))
    highest_us = max(measured.together_us for measured in results.values())
    handles = []
    for number, (name, sweep) in enumerate(_SWEEPS.items(), 1):
        axes = figure.add_subplot(2, 3, number)
        lines = {}
        for fleet, weights in states:
            cases = [_in_state(case, fleet, weights) for case in sweep]
            if name == "requests waiting" and fleet == "idle":
                cases = []
            points = [(_size(name, case), results[case]) for case in cases if case in results]
            x, y = [size for size, _ in points], [each.together_us for _, each in points]
            lines[f"{fleet}, {weights}"] = (x, y)
        handles = draw_lines(axes, lines)
        axes.set_xscale("symlog" if name == "requests waiting" else "log")
        axes.set_yscale("log")
        axes.set_ylim(1.0, 2.0 * max(highest_us, _BUDGETS_US[-1][1]))
        style_axes(axes, title=name, y_label="median per event (us)" if number in (1, 4) else "")
        _number_axes(axes, name, sweep)
        _mark_budget(axes, name)
    figure.legend(
        handles,
        [f"{fleet}, {weights}" for fleet, weights in states],
        loc="lower right",
        bbox_to_anchor=(0.98, 0.1),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title=f"{policy}, {build_kind()}",
    )
    return figure


def _size(sweep: str, case: DecisionCase) -> int:
    if sweep == "functions":
        return case.functions
    if sweep == "requests waiting":
        return case.waiting
    return case.stages if sweep == "stages" else case.nodes


def _number_axes(axes: Axes, name: str, sweep: Sequence[DecisionCase]) -> None:
    sizes = [_size(name, case) for case in sweep]
    axes.set_xticks(sizes, [f"{size // 1000}k" if size >= 1_000 else f"{size}" for size in sizes])
    axes.set_xlim(-0.4 if sizes[0] == 0 else sizes[0] / 1.5, 1.5 * sizes[-1])
    axes.minorticks_off()
    number_log_axis(axes.yaxis)


def _mark_budget(axes: Axes, sweep: str) -> None:
    """Draw the budget of every size that the sweep passes through, as a short line."""
    cases = _SWEEPS[sweep]
    for case, budget_us in _BUDGETS_US:
        if case in cases or (sweep == "nodes and functions" and case is _BASE):
            size = _size(sweep, case)
            axes.hlines(budget_us, size / 2.5, size * 2.5, colors=MUTED, linestyles="dashed")
            axes.annotate(
                f"{budget_us:g} us",
                (size, budget_us),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=MUTED,
            )


def main() -> None:
    """Measure one case, or all states of a size, and print a line for each."""
    parser = ArgumentParser(description=main.__doc__)
    parser.add_argument("--policy", default="headgate")
    parser.add_argument("--nodes", type=int, default=_BASE.nodes)
    parser.add_argument("--functions", type=int, default=_BASE.functions)
    parser.add_argument("--waiting", type=int, default=_BASE.waiting)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--fleet", choices=FLEETS, action="append")
    parser.add_argument("--weights", choices=WEIGHTS, action="append")
    parser.add_argument("--events", type=int, default=4_000)
    options = parser.parse_args()
    size = DecisionCase(options.nodes, options.functions, options.waiting, options.stages)
    for fleet, weights in product(options.fleet or FLEETS, options.weights or WEIGHTS):
        case = _in_state(size, fleet, weights)
        if case.is_possible:
            kind = find_policy(options.policy)
            done = Measured.of(measure(case, kind, events=options.events))
            print(
                f"{_label(case)}: median {done.together_us:.1f} us, p99 {done.together_p99_us:.1f};"
                f" arrivals {done.arrival_us:.1f}, {done.arrival_p99_us:.1f};"
                f" completions {done.completion_us:.1f}, {done.completion_p99_us:.1f};"
                f" others {done.other_us:.1f};"
                f" {done.waiting:,} waiting, {done.instances:,} instances",
                flush=True,
            )


if __name__ == "__main__":
    main()
