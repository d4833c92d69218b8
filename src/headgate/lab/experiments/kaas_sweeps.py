"""The parameter sweeps of section 6.3 of the thesis, over many seeds.

Swept are the arrival rate on three GPUs; then, at a constant load of 0.8, the number of GPUs, the
cold-start time, the execution time and the number of clients. Times are the stated ones, both
models bring equal work, a run has 1,000 timesteps. For the exclusive policy of the thesis the
adaptive variant is used; the fixed split is reported as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

from headgate.lab.experiments import Check, Known, Progress, Result, Row, none_check
from headgate.lab.experiments._kaas import (
    ALL_POLICIES,
    BALANCE,
    EXCLUSIVE,
    EXCLUSIVE_FIXED,
    HEADGATE,
    MLFQ,
    ROUND_ROBIN,
    SRTF,
    STATED,
    GpuCase,
    GpuScenario,
    Models,
    Runs,
    beats,
    log_sweep_figure,
    waits,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import (
    PolicyCase,
    differences,
    is_above,
    margin,
    mean_columns,
    over_seeds,
    run_case,
)
from headgate.metrics.confidence import mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "kaas-sweeps"
TITLE = "Waits against arrival rate, GPUs, cold starts, execution time and clients"
_PAGE: Final = "docs/papers/kaas.md"
KNOWN: Final = (
    Known("round robin waits longest at every rate, a fixed split of the GPUs included", _PAGE),
    Known("waits fall with the number of GPUs", _PAGE),
    Known("cold starts have no discernible effect on the wait", _PAGE),
    Known("cold starts add less than half as much to the wait in 8000 timesteps", _PAGE),
    Known("execution time has no effect on the wait", _PAGE),
    Known("the number of clients has no effect on the wait, affinity included", _PAGE),
)

_SOURCE: Final = "thesis 6.3"
_ADAPTIVE: Final = (ROUND_ROBIN, BALANCE, SRTF, MLFQ, EXCLUSIVE)
_WITH_FIXED: Final = (*_ADAPTIVE, EXCLUSIVE_FIXED)
_ALL_BUT_ROUND_ROBIN: Final = tuple(policy for policy in ALL_POLICIES if policy != ROUND_ROBIN)
_WITH_OURS: Final = (*ALL_POLICIES, HEADGATE)
_LONG_MS: Final = 8_000


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep of one parameter: its values, and the scenario at each value."""

    name: str
    title: str
    x_label: str
    points: tuple[float, ...]
    scenario_at: Callable[[float], GpuScenario]

    def case_at(self, policy: PolicyCase, point: float) -> GpuCase:
        return GpuCase(policy, self.scenario_at(point))

    def cases(self, policy: PolicyCase) -> list[GpuCase]:
        """Return the cases of one policy, in order of the parameter."""
        return [self.case_at(policy, point) for point in self.points]


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run the five sweeps and check the claims of the thesis about each."""
    seeds = 10 if quick else 100
    sweeps = _sweeps(quick)
    runs: Runs = {}
    for sweep in sweeps:
        progress(f"{sweep.title}: {len(sweep.points)} points, {seeds} seeds")
        cases = [case for policy in _WITH_OURS for case in sweep.cases(policy)]
        missing = [case for case in cases if case not in runs]
        runs |= over_seeds(run_case, missing, seeds, is_parallel=not quick)
    progress(f"Cold starts in long runs: {_LONG_MS} timesteps")
    long_cases = [case for policy in ALL_POLICIES for case in _cold_pair(policy, _LONG_MS)]
    runs |= over_seeds(run_case, long_cases, 3 if quick else 30, is_parallel=not quick)
    rate, gpus, _, execution, clients = sweeps
    return Result(
        NAME,
        [
            *(_row(sweep, policy, runs, fmean) for sweep in sweeps for policy in _WITH_OURS),
            *(_long_row(policy, runs) for policy in ALL_POLICIES),
            *(_row(sweep, policy, runs, margin, "± ") for sweep in sweeps for policy in _WITH_OURS),
        ],
        [
            *_rate_checks(rate, runs),
            *_gpu_checks(gpus, runs),
            *_cold_checks(runs),
            *_execution_checks(execution, runs),
            *_client_checks(clients, runs),
            *(_frontier_check(sweep, runs) for sweep in sweeps),
        ],
        write_figures(out, NAME, lambda: {_slug(sweep): _figure(sweep, runs) for sweep in sweeps}),
    )


def _sweeps(quick: bool) -> tuple[Sweep, Sweep, Sweep, Sweep, Sweep]:
    """Return the sweeps. The quick form omits the lightest load: ten seeds are too few for it."""
    return (
        Sweep(
            "rate",
            "Arrival rate, 3 GPUs",
            "load (evaluation time offered per GPU time)",
            (0.4, 0.8, 1.2) if quick else (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4),
            lambda load: GpuScenario(gpus=3, load=load),
        ),
        Sweep(
            "GPUs",
            "Number of GPUs, load 0.8",
            "GPUs",
            (2, 4, 8) if quick else (2, 3, 4, 6, 8, 12),
            lambda gpus: GpuScenario(gpus=int(gpus)),
        ),
        Sweep(
            "cold-start time",
            "Cold-start time, 4 GPUs, load 0.8",
            "cold-start time (times the stated one)",
            (0, 1, 2) if quick else (0, 0.5, 1, 2, 4),
            lambda factor: GpuScenario(models=_scaled(1, factor)),
        ),
        Sweep(
            "execution time",
            "Execution time, 4 GPUs, load 0.8",
            "execution time (times the stated one)",
            (0.5, 1, 4) if quick else (0.5, 1, 2, 4),
            lambda factor: GpuScenario(models=_scaled(factor, 1)),
        ),
        Sweep(
            "clients",
            "Number of clients, 4 GPUs, load 0.8",
            "clients, half of them for each model",
            (2, 16) if quick else (2, 4, 8, 16),
            lambda clients: GpuScenario(clients_per_model=int(clients) // 2),
        ),
    )


def _scaled(exec_factor: float, cold_factor: float) -> Models:
    return tuple(
        replace(model, exec_ms=model.exec_ms * exec_factor, cold_ms=model.cold_ms * cold_factor)
        for model in STATED
    )


def _cold_pair(policy: PolicyCase, duration_ms: int) -> tuple[GpuCase, GpuCase]:
    """Return the cases without cold starts and with twice the stated cold-start times."""
    free, twice = (GpuScenario(_scaled(1, factor), duration_ms=duration_ms) for factor in (0, 2))
    return GpuCase(policy, free), GpuCase(policy, twice)


def _row(
    sweep: Sweep,
    policy: PolicyCase,
    runs: Runs,
    number: Callable[[list[float]], float],
    prefix: str = "",
) -> Row:
    row: Row = {f"{prefix}{sweep.name}": policy.label}
    for point, case in zip(sweep.points, sweep.cases(policy), strict=True):
        row[f"{point:g}"] = number(waits(runs[case]))
    return row


def _long_row(policy: PolicyCase, runs: Runs) -> Row:
    row: Row = {"wait added by twice the stated cold starts": policy.label}
    for duration_ms in (1_000, _LONG_MS):
        added = _added(*_cold_pair(policy, duration_ms), runs)
        row |= mean_columns(f"{duration_ms} timesteps", added)
    return row


def _added(before: GpuCase, after: GpuCase, runs: Runs) -> list[float]:
    return differences(waits(runs[after]), waits(runs[before]))


def _slug(sweep: Sweep) -> str:
    return sweep.name.lower().replace(" ", "-")


def _figure(sweep: Sweep, runs: Runs) -> Figure:
    lines = {
        policy.label: [mean_interval(waits(runs[case])) for case in sweep.cases(policy)]
        for policy in _WITH_OURS
    }
    return log_sweep_figure(sweep.points, lines, title=sweep.title, x_label=sweep.x_label)


def _rate_checks(sweep: Sweep, runs: Runs) -> list[Check]:
    growing = [
        policy
        for policy in ALL_POLICIES
        if all(
            fmean(waits(runs[lower])) < fmean(waits(runs[higher]))
            for lower, higher in pairwise(sweep.cases(policy))
        )
    ]
    claim = "round robin waits longest at every rate"
    return [
        _worst_check(claim, sweep, _ADAPTIVE, runs),
        _worst_check(f"{claim}, a fixed split of the GPUs included", sweep, _WITH_FIXED, runs),
        _all_check("waits grow with the arrival rate", ALL_POLICIES, growing),
    ]


def _gpu_checks(sweep: Sweep, runs: Runs) -> list[Check]:
    falling = []
    for policy in ALL_POLICIES:
        fewest, *_, most = (mean_interval(waits(runs[case])) for case in sweep.cases(policy))
        if most.high < fewest.low:  # not paired by seed: the arrivals differ
            falling.append(policy)
    claim = "waits fall with the number of GPUs"
    worst = "round robin waits longest at every number of GPUs"
    return [
        _all_check(claim, ALL_POLICIES, falling),
        _all_check(f"{claim}, round robin aside", _ALL_BUT_ROUND_ROBIN, falling),
        _worst_check(worst, sweep, _ADAPTIVE, runs),
    ]


def _cold_checks(runs: Runs) -> list[Check]:
    unmoved, hidden, fading = [], [], []
    for policy in ALL_POLICIES:
        free, stated = (
            waits(runs[GpuCase(policy, scenario)])
            for scenario in (GpuScenario(_scaled(1, 0)), GpuScenario())
        )
        if not is_above(stated, free):
            unmoved.append(policy)
        if fmean(stated) - fmean(free) < stdev(stated):
            hidden.append(policy)
        short, long = (fmean(_added(*_cold_pair(policy, ms), runs)) for ms in (1_000, _LONG_MS))
        if long < short / 2:
            fading.append(policy)
    fades = f"cold starts add less than half as much to the wait in {_LONG_MS} timesteps"
    return [
        _all_check("cold starts have no discernible effect on the wait", ALL_POLICIES, unmoved),
        _all_check(
            "their effect is below one standard deviation between runs: one run hides it",
            ALL_POLICIES,
            hidden,
        ),
        _all_check(fades, ALL_POLICIES, fading),
        _all_check(f"{fades}, round robin aside", _ALL_BUT_ROUND_ROBIN, fading),
    ]


def _execution_checks(sweep: Sweep, runs: Runs) -> list[Check]:
    unmoved = []
    for policy in ALL_POLICIES:
        shortest, *_, longest = (mean_interval(waits(runs[case])) for case in sweep.cases(policy))
        if longest.low <= shortest.high:  # not paired by seed: the arrivals differ
            unmoved.append(policy)
    return [_all_check("execution time has no effect on the wait", ALL_POLICIES, unmoved)]


def _client_checks(sweep: Sweep, runs: Runs) -> list[Check]:
    unmoved = []
    for policy in ALL_POLICIES:
        fewest, *_, most = sweep.cases(policy)
        change = mean_interval(_added(fewest, most, runs))
        if change.low <= 0 <= change.high:
            unmoved.append(policy)
    claim = "the number of clients has no effect on the wait"
    return [
        _all_check(claim, _WITH_FIXED, unmoved),
        _all_check(f"{claim}, affinity included", ALL_POLICIES, unmoved),
    ]


def _frontier_check(sweep: Sweep, runs: Runs) -> Check:
    """Check that no policy has both no more cold starts and shorter waits than the default."""
    better = [
        f"{policy.label} at {point:g}"
        for point in sweep.points
        for policy in ALL_POLICIES
        if beats(runs[sweep.case_at(policy, point)], runs[sweep.case_at(HEADGATE, point)])
    ]
    claim = f"{sweep.title}: policies with no more cold starts, shorter waits than headgate"
    return none_check(claim, "a goal of this project", better)


def _worst_check(claim: str, sweep: Sweep, policies: Sequence[PolicyCase], runs: Runs) -> Check:
    """Check that round robin waits significantly longest at every point."""
    points = [
        f"{point:g}"
        for point in sweep.points
        if all(
            is_above(
                waits(runs[sweep.case_at(ROUND_ROBIN, point)]),
                waits(runs[sweep.case_at(policy, point)]),
            )
            for policy in policies
            if policy != ROUND_ROBIN
        )
    ]
    expected = ", ".join(f"{point:g}" for point in sweep.points)
    return Check(claim, _SOURCE, expected, ", ".join(points), len(points) == len(sweep.points))


def _all_check(claim: str, policies: Sequence[PolicyCase], holding: Sequence[PolicyCase]) -> Check:
    """Check that a claim holds for all these policies, and name the exceptions."""
    exceptions = [policy.label for policy in policies if policy not in holding]
    measured = f"not {'; '.join(exceptions)}" if exceptions else "all policies"
    return Check(claim, _SOURCE, "all policies", measured, not exceptions)
