"""Figure 2 of the HiPS'21 paper, and its decisions: concurrency limit and function size.

Section 5.1 of the paper decides both from response times over cores and concurrency. Here they are
decided from the surrogate and from measured tables, and then compared with an exhaustive search
over thresholds and sizes in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from headgate.core.catalog import MIB
from headgate.lab.experiments.experiment import Check, Progress, Result, Row, over_seeds
from headgate.lab.experiments.hips.environment import (
    MEASURED,
    PAPER_SLA_MS,
    SOURCES,
    SURROGATE,
    Setting,
    characterise,
    setting_of,
)
from headgate.lab.experiments.hips.figures import (
    Trial,
    sizes_figure,
    surface_figure,
    trials_figure,
    write_figure,
)
from headgate.lab.experiments.hips.plan import (
    THRESHOLDS,
    PaperPlan,
    TrialCase,
    best_threshold,
    plan_of,
    run_trial,
)
from headgate.lab.experiments.hips.run import HipsResult
from headgate.planning.capacity.sizing import TOLERANCE, SizeRow
from headgate.planning.latency_model import Characterisation

NAME = "hybrid-characterisation"
TITLE = "Concurrency limit of an instance and size of a function, planned and by exhaustive search"

PAPER_THRESHOLD: Final = 5
PAPER_CORES: Final = 4
PAPER_SAVING: Final = 0.35
_DRAWN: Final = (1, 2, 3, 5, 8, 12, 20)  # concurrencies that were measured

Plans = dict[Setting, PaperPlan]
ByThreshold = dict[int, list[HipsResult]]
BySize = dict[int, list[HipsResult]]


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
    figures: tuple[Path, ...] = ()
    if out is not None:
        progress("figures")
        figures = _figures(out, plans, surfaces, trials)
    return Result(NAME, rows, checks, figures)


def _try_thresholds(plans: Plans, quick: bool) -> dict[Setting, ByThreshold]:
    cases = {
        setting: TrialCase(
            setting, (plan.environment.memory_mb,), tuple(THRESHOLDS), 60 if quick else 200
        )
        for setting, plan in plans.items()
    }
    runs = over_seeds(run_trial, list(cases.values()), 1 if quick else 3, quick=quick)
    return {
        setting: {
            threshold: [
                each[plans[setting].environment.memory_mb, threshold] for each in runs[case]
            ]
            for threshold in THRESHOLDS
        }
        for setting, case in cases.items()
    }


def _try_sizes(plans: Plans, quick: bool) -> dict[Setting, BySize]:
    """Run every function size with the planned threshold, on the smaller instance."""
    cases = {
        setting: TrialCase(
            setting,
            tuple(row.memory_bytes // MIB for row in plan.sizes),
            (plan.threshold,),
            20 if quick else 100,
        )
        for setting, plan in plans.items()
        if setting.cores == min(PAPER_SLA_MS)
    }
    runs = over_seeds(run_trial, list(cases.values()), 1, quick=quick)
    return {
        setting: {
            memory_mb: [each[memory_mb, plans[setting].threshold] for each in runs[case]]
            for memory_mb in case.memory_mb
        }
        for setting, case in cases.items()
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


def _trial_row(setting: Setting, plan: PaperPlan, runs: ByThreshold) -> Row:
    best = best_threshold(runs)
    return {
        **_setting_columns(setting),
        "planned": plan.threshold,
        "best": best,
        "in time as planned": _attainment(runs[plan.threshold]),
        "in time at best": _attainment(runs[best]),
        "$/1000 as planned": fmean(run.usd_per_1000 for run in runs[plan.threshold]),
        "$/1000 at best": fmean(run.usd_per_1000 for run in runs[best]),
    }


def _threshold_rows(trials: Mapping[Setting, ByThreshold]) -> list[Row]:
    return [
        {
            "in time at threshold": threshold,
            **{str(setting): _attainment(runs[threshold]) for setting, runs in trials.items()},
        }
        for threshold in THRESHOLDS
    ]


def _tried_rows(sizes: Mapping[Setting, BySize]) -> list[Row]:
    rows: list[Row] = []
    for memory_mb in next(iter(sizes.values())):
        row: Row = {"function (MB)": memory_mb}
        for setting, runs in sizes.items():
            each = runs[memory_mb]
            row[f"{setting.source} (ms)"] = fmean(run.call_ms for run in each)
            row[f"{setting.source} ($/1000)"] = fmean(run.usd_per_1000 for run in each)
        rows.append(row)
    return rows


def _setting_columns(setting: Setting) -> Row:
    return {"source": setting.source, "cores": setting.cores, "SLA (ms)": setting.sla_ms}


def _attainment(runs: Sequence[HipsResult]) -> float:
    return fmean(run.attainment for run in runs)


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


def _threshold_check(setting: Setting, plan: PaperPlan, runs: ByThreshold) -> Check:
    best = best_threshold(runs)
    return Check(
        f"{setting}: best threshold by exhaustive search",
        "a goal of this project",
        f"{plan.threshold} as planned, plus or minus 1",
        best,
        abs(best - plan.threshold) <= 1,
    )


def _size_check(setting: Setting, plan: PaperPlan, runs: BySize) -> Check:
    """Check the smallest size whose calls are within the tolerance of the fastest."""
    lengths_ms = {size: fmean(run.call_ms for run in each) for size, each in runs.items()}
    enough_ms = (1.0 + TOLERANCE) * min(lengths_ms.values())
    best = next(size for size, length_ms in lengths_ms.items() if length_ms <= enough_ms)
    planned = plan.environment.memory_mb
    sizes = list(lengths_ms)
    return Check(
        f"{setting}: best size of the function by exhaustive search (MB)",
        "a goal of this project",
        f"{planned:,} as planned, or an adjacent size",
        best,
        abs(sizes.index(best) - sizes.index(planned)) <= 1,
    )


def _figures(
    out: Path,
    plans: Plans,
    surfaces: Mapping[str, Characterisation],
    trials: Mapping[Setting, ByThreshold],
) -> tuple[Path, ...]:
    paper = surface_figure({"Figure 2, surrogate": surfaces[SURROGATE]}, [*PAPER_SLA_MS.values()])
    others = surface_figure({source: surfaces[source] for source in MEASURED}, [])
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
            {t: fmean(run.instance_attainment for run in each) for t, each in runs.items()},
            {t: _attainment(each) for t, each in runs.items()},
        )
        for setting, runs in trials.items()
    ]
    return (
        write_figure(paper, out, f"{NAME}-figure-2"),
        write_figure(others, out, f"{NAME}-figure-2-measured"),
        write_figure(sizes_figure(single_ms, knees), out, f"{NAME}-cores"),
        write_figure(trials_figure(tried), out, f"{NAME}-thresholds"),
    )
