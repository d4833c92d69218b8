"""Figure 2 of the HiPS'21 paper, and its decisions: concurrency limit and function size.

Section 5.1 of the paper decides both from response times over cores and concurrency. Here they are
decided from the surrogate and from measured tables, and then compared with an exhaustive search
over thresholds and sizes in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import MIB
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.lab.experiments._hybrid_app import SURROGATE, characterise
from headgate.lab.experiments.hybrid_waves.environment import (
    MEASURED,
    MOST,
    PAPER_SLA_MS,
    QUANTILE,
    SOURCES,
    BurstPhase,
    BurstScenario,
    PaperPlan,
    Setting,
    plan_of,
    setting_of,
)
from headgate.lab.experiments.hybrid_waves.figures import (
    Trial,
    sizes_figure,
    surface_figure,
    trials_figure,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import Case, PolicyCase, RunResult, best_setting, over_seeds, run_case
from headgate.planning.capacity.latency_model import Characterisation
from headgate.planning.capacity.sizing import TOLERANCE, SizeRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "hybrid-characterisation"
TITLE = "Concurrency limit of an instance and size of a function, planned and by exhaustive search"

PAPER_THRESHOLD: Final = 5
PAPER_CORES: Final = 4
PAPER_SAVING: Final = 0.35
_DRAWN: Final = (1, 2, 3, 5, 8, 12, 20)  # concurrencies that were measured

THRESHOLDS: Final = range(1, MOST + 1)

Plans = dict[Setting, PaperPlan]
Trials = dict[int, list[RunResult]]  # by threshold, or by size of the function


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Plan, then search exhaustively."""
    settings = [setting_of(source, cores) for source in SOURCES for cores in PAPER_SLA_MS]
    plans = {setting: plan_of(setting) for setting in settings}
    surfaces = {source: characterise(source) for source in SOURCES}
    rows = [row for source in SOURCES for row in _surface_rows(source, surfaces[source])]
    rows += [_size_row(setting, plan) for setting, plan in plans.items()]
    progress("every threshold")
    trials = _try_thresholds(plans, quick)
    rows += [_trial_row(setting, plans[setting], runs) for setting, runs in trials.items()]
    rows += _threshold_rows(trials)
    progress("every size")
    sizes = _try_sizes(plans, quick)
    rows += _tried_rows(sizes)
    checks = [*_paper_checks(plans, surfaces[SURROGATE])]
    checks += [_threshold_check(setting, plans[setting], trials[setting]) for setting in settings]
    checks += [_size_check(setting, plans[setting], sizes[setting]) for setting in sizes]
    figures = write_figures(out, NAME, lambda: _figures(plans, surfaces, trials))
    return Result(NAME, rows, checks, figures)


def trial_case(
    setting: Setting, memory_mb: int, threshold: int, wave_count: int
) -> Case[BurstScenario]:
    """Return a case of bursts alone, the same for each size and threshold.

    Cold starts take no time: their number depends mostly on the bursts.
    """
    bursts = (BurstPhase(wave_count * setting.period_ns, is_bursty=True),)
    scenario = BurstScenario(setting, memory_mb, bursts, cold_start_ms=0.0)
    return Case(PolicyCase.of("threshold", threshold=threshold), scenario)


def best_threshold(runs: Trials) -> int:
    """Return the cheapest threshold that reaches the quantile, else that of best attainment."""
    return best_setting(runs, QUANTILE, lambda run: run.usd_per_1000_met)


def _try_thresholds(plans: Plans, quick: bool) -> dict[Setting, Trials]:
    waves = 60 if quick else 200
    cases = {
        setting: {t: trial_case(setting, plan.memory_mb, t, waves) for t in THRESHOLDS}
        for setting, plan in plans.items()
    }
    return _run(cases, 1 if quick else 3, quick)


def _try_sizes(plans: Plans, quick: bool) -> dict[Setting, Trials]:
    """Run every function size with the planned threshold, on the smaller instance."""
    waves = 20 if quick else 100
    cases = {
        setting: {
            memory_mb: trial_case(setting, memory_mb, plan.threshold, waves)
            for memory_mb in (row.memory_bytes // MIB for row in plan.sizes)
        }
        for setting, plan in plans.items()
        if setting.cores == min(PAPER_SLA_MS)
    }
    return _run(cases, 1, quick)


def _run(
    cases: Mapping[Setting, Mapping[int, Case[BurstScenario]]], seeds: int, quick: bool
) -> dict[Setting, Trials]:
    jobs = [case for tried in cases.values() for case in tried.values()]
    results = over_seeds(run_case, jobs, seeds, is_parallel=not quick)
    return {
        setting: {key: results[case] for key, case in tried.items()}
        for setting, tried in cases.items()
    }


def _surface_rows(source: str, surface: Characterisation) -> list[Row]:
    return [
        {
            "response time (ms)": source,
            "cores": cores,
            **{
                f"{concurrency} at once": surface.time_ms(cores, concurrency)
                for concurrency in _DRAWN
            },
        }
        for cores in surface.cores
    ]


def _size_row(setting: Setting, plan: PaperPlan) -> Row:
    largest = plan.sizes[-1]
    selected = plan.selected
    return {
        **_setting_columns(setting),
        "threshold": plan.threshold,
        "knee": plan.knee_cores,
        "size (MB)": None if selected is None else selected.memory_bytes // MIB,
        "call (ms)": None if selected is None else selected.run_ms,
        "saved/s": None if selected is None else _saving(selected, largest),
        "saved/call": None if selected is None else _saving_per_call(selected, largest),
        "cheapest (MB)": None if plan.cheapest is None else plan.cheapest.memory_bytes // MIB,
        "saves/call": None if plan.cheapest is None else _saving_per_call(plan.cheapest, largest),
    }


def _trial_row(setting: Setting, plan: PaperPlan, runs: Trials) -> Row:
    best = best_threshold(runs)
    return {
        **_setting_columns(setting),
        "planned": plan.threshold,
        "best": best,
        "in time as planned": _attainment(runs[plan.threshold]),
        "in time at best": _attainment(runs[best]),
        "$/1000 as planned": fmean(run.usd_per_1000_met for run in runs[plan.threshold]),
        "$/1000 at best": fmean(run.usd_per_1000_met for run in runs[best]),
    }


def _threshold_rows(trials: Mapping[Setting, Trials]) -> list[Row]:
    return [
        {
            "in time at threshold": threshold,
            **{str(setting): _attainment(runs[threshold]) for setting, runs in trials.items()},
        }
        for threshold in THRESHOLDS
    ]


def _tried_rows(sizes: Mapping[Setting, Trials]) -> list[Row]:
    rows: list[Row] = []
    for memory_mb in next(iter(sizes.values())):
        row: Row = {"function (MB)": memory_mb}
        for setting, runs in sizes.items():
            each = runs[memory_mb]
            row[f"{setting.source} (ms)"] = _call_ms(each)
            row[f"{setting.source} ($/1000)"] = fmean(run.usd_per_1000_met for run in each)
        rows.append(row)
    return rows


def _setting_columns(setting: Setting) -> Row:
    return {"source": setting.source, "cores": setting.cores, "SLA (ms)": setting.sla_ms}


def _attainment(runs: Sequence[RunResult]) -> float:
    return fmean(run.attainment for run in runs)


def _call_ms(runs: Sequence[RunResult]) -> float:
    """Return the mean duration of a function call, with cold starts, without network."""
    return fmean(
        run.functions.busy_ns / run.functions.requests / MILLISECOND_NS
        if run.functions.requests
        else nan
        for run in runs
    )


def _saving(size: SizeRow, largest: SizeRow) -> float:
    return 1.0 - size.usd_per_s / largest.usd_per_s


def _saving_per_call(size: SizeRow, largest: SizeRow) -> float:
    return 1.0 - size.usd_per_call / largest.usd_per_call


def _paper_checks(plans: Plans, surface: Characterisation) -> list[Check]:
    """Check section 5.1 with the surrogate, which fits the text except for the function size."""
    checks = []
    for cores, sla_ms in PAPER_SLA_MS.items():
        threshold = plans[Setting(SURROGATE, cores, sla_ms)].threshold
        claim = f"concurrent requests that {cores} cores serve within {sla_ms:g} ms"
        holds = threshold == PAPER_THRESHOLD
        checks.append(Check(claim, "paper 5", PAPER_THRESHOLD, threshold, holds))
    plan = plans[Setting(SURROGATE, 2, PAPER_SLA_MS[2])]
    single_ms = {cores: surface.time_ms(cores, 1) for cores in surface.cores}
    shorter = 1.0 - single_ms[4] / single_ms[2]
    beyond = 1.0 - min(single_ms.values()) / single_ms[4]
    claim = "relative reduction of the time of a single request from 2 to 4 cores"
    checks.append(Check(claim, "paper 5.1", "above 0.1", shorter, shorter > 0.1))
    claim = "relative reduction of the time of a single request on more than 4 cores"
    checks.append(Check(claim, "paper 5.1", 0.0, beyond, beyond == 0.0))
    claim = "cores selected for the function"
    holds = plan.knee_cores == PAPER_CORES
    checks.append(Check(claim, "paper 5.1", PAPER_CORES, plan.knee_cores, holds))
    saving = 0.0 if plan.selected is None else _saving(plan.selected, plan.sizes[-1])
    claim = "price per second of the selected function size, relative saving to the largest"
    holds = abs(saving - PAPER_SAVING) < 0.02
    return [*checks, Check(claim, "paper 5.1", PAPER_SAVING, saving, holds)]


def _threshold_check(setting: Setting, plan: PaperPlan, runs: Trials) -> Check:
    best = best_threshold(runs)
    return Check(
        f"{setting}: best threshold by exhaustive search",
        "a goal of this project",
        f"{plan.threshold} as planned, plus or minus 1",
        best,
        abs(best - plan.threshold) <= 1,
    )


def _size_check(setting: Setting, plan: PaperPlan, runs: Trials) -> Check:
    """Check the smallest size whose calls are within the tolerance of the fastest."""
    lengths_ms = {size: _call_ms(each) for size, each in runs.items()}
    enough_ms = (1.0 + TOLERANCE) * min(lengths_ms.values())
    best = next(size for size, length_ms in lengths_ms.items() if length_ms <= enough_ms)
    planned = plan.memory_mb
    sizes = list(lengths_ms)
    return Check(
        f"{setting}: best size of the function by exhaustive search (MB)",
        "a goal of this project",
        f"{planned:,} as planned, or an adjacent size",
        best,
        abs(sizes.index(best) - sizes.index(planned)) <= 1,
    )


def _figures(
    plans: Plans, surfaces: Mapping[str, Characterisation], trials: Mapping[Setting, Trials]
) -> dict[str, Figure]:
    paper = {"Figure 2, surrogate": surfaces[SURROGATE]}
    single_ms = {
        source: {cores: surface.time_ms(cores, 1) for cores in surface.cores}
        for source, surface in surfaces.items()
    }
    knees = {setting.source: plan.knee_cores for setting, plan in plans.items()}
    tried = [
        Trial(
            f"{setting}, SLA {setting.sla_ms:.3g} ms",
            plans[setting].threshold,
            best_threshold(runs),
            {t: fmean(run.machines.attainment for run in each) for t, each in runs.items()},
            {t: _attainment(each) for t, each in runs.items()},
        )
        for setting, runs in trials.items()
    ]
    return {
        "figure-2": surface_figure(paper, [*PAPER_SLA_MS.values()]),
        "figure-2-measured": surface_figure({source: surfaces[source] for source in MEASURED}, []),
        "cores": sizes_figure(single_ms, knees),
        "thresholds": trials_figure(tried),
    }
