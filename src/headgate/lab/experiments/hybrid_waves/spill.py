"""Section 5.2 of the paper: the bursty load on one instance, without and with spillover.

`take_sample` runs two minutes of the load request by request, for figures 3 to 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.lab.experiments._hybrid_app import SURROGATE
from headgate.lab.experiments.hybrid_waves.environment import (
    AUTOSCALE,
    DEDICATED,
    FAST_AUTOSCALE,
    HEADGATE,
    QUANTILE,
    SOURCES,
    THRESHOLD,
    WARM,
    BurstPhase,
    PaperPlan,
    Setting,
    cases_of,
    make_phases,
    plan_of,
    setting_of,
)
from headgate.lab.experiments.hybrid_waves.figures import (
    load_figure,
    responses_figure,
    violations_figure,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import RequestTimes, RunResult, over_seeds, request_times, run_case

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUNCTIONS_IN_TIME: Final = "the requests that are sent to functions are answered within the SLA"
SAMPLE_S: Final = 120
DRAWN_SOURCES: Final = (SURROGATE, "recommender")  # the sources with figures
_CALM_S: Final = 10
_FAR_LESS_MAX: Final = 0.1  # a ratio below this counts as far less

Runs = dict[Setting, dict[str, list[RunResult]]]


@dataclass(frozen=True, slots=True)
class SpillTimeline:
    """The load, and the requests of three figures, by title.

    The figures are the instance without spillover, the instance with it, and the functions.
    """

    setting: Setting
    wave_sizes: list[int]
    panels: dict[str, RequestTimes]

    @property
    def period_s(self) -> float:
        """Time between waves."""
        return self.setting.period_ns / SECOND_NS


def take_sample(setting: Setting, plan: PaperPlan) -> SpillTimeline:
    """Run a calm phase and bursts, without functions and with them."""
    bursts_ns = (SAMPLE_S - _CALM_S) * SECOND_NS
    phases = (BurstPhase(_CALM_S * SECOND_NS, False), BurstPhase(bursts_ns, True))
    cases = cases_of(setting, plan, phases)
    scenario = cases[DEDICATED].scenario
    environment = scenario.environment(0)
    without, spilled = (
        request_times(environment.simulate(cases[label].policy, 0))[0]
        for label in (DEDICATED, THRESHOLD)
    )
    cores = f"{setting.cores} cores"
    panels = {
        f"{cores}, without functions": without,
        f"{cores}, with functions": spilled.only(spilled.on_machines),
        "functions": spilled.only(spilled.on_functions),
    }
    return SpillTimeline(setting, scenario.wave_sizes(0), panels)


def load_row(number: int, sample: SpillTimeline) -> Row:
    sizes = sample.wave_sizes
    return {
        "figure": number,
        "waves": len(sizes),
        "every (s)": sample.period_s,
        "fewest at once": min(sizes),
        "mean": fmean(sizes),
        "most": max(sizes),
    }


def panel_rows(numbers: Sequence[int], sample: SpillTimeline) -> list[Row]:
    return [
        {
            "figure": number,
            "source": sample.setting.source,
            "what": title,
            "requests": len(times.response_ms),
            "shortest (ms)": float(times.response_ms.min()),
            "median": float(np.median(times.response_ms)),
            "longest": float(times.response_ms.max()),
            "late": int(np.count_nonzero(~times.is_met)),
            "late by cold starts": int(np.count_nonzero(~times.is_met & times.is_cold)),
        }
        for number, (title, times) in zip(numbers, sample.panels.items(), strict=True)
    ]


def run_on(
    cores: int,
    name: str,
    numbers: Sequence[int],
    *,
    quick: bool,
    out: Path | None,
    progress: Progress,
) -> Result:
    """Run every policy in every setting. The last three `numbers` are figure numbers."""
    plans = {setting: plan_of(setting) for setting in (setting_of(s, cores) for s in SOURCES)}
    phases = make_phases((2 if quick else 5) * MINUTE_NS)
    cases = {setting: cases_of(setting, plan, phases) for setting, plan in plans.items()}
    jobs = [case for by_label in cases.values() for case in by_label.values()]
    progress(f"{len(jobs)} runs of {sum(p.length_ns for p in phases) // MINUTE_NS} minutes")
    results = over_seeds(run_case, jobs, 1 if quick else 3, is_parallel=not quick)
    runs: Runs = {
        setting: {label: results[case] for label, case in by_label.items()}
        for setting, by_label in cases.items()
    }
    samples = [take_sample(s, plan) for s, plan in plans.items() if s.source in DRAWN_SOURCES]
    rows = [load_row(numbers[0], samples[0])] if len(numbers) > 3 else []
    rows += [row for sample in samples for row in panel_rows(numbers[-3:], sample)]
    rows += [
        _row(setting, label, each)
        for setting, by_label in runs.items()
        for label, each in by_label.items()
    ]
    checks = _paper_checks(next(iter(runs.values())))
    for setting, plan in plans.items():
        checks += _checks(setting, plan, runs[setting])
    figures = write_figures(out, name, lambda: _figures(samples, numbers, runs))
    return Result(name, rows, checks, figures)


def _row(setting: Setting, label: str, runs: Sequence[RunResult]) -> Row:
    return {
        "source": setting.source,
        "policy": label,
        "requests": round(fmean(run.requests for run in runs)),
        "late": _violations(runs),
        "cold (of late)": cold_share(runs),
        "cold starts": fmean(run.functions.cold_starts for run in runs),
        "on instances": fmean(run.machines.requests / run.requests for run in runs),
        "in time": fmean(run.machines.attainment for run in runs),
        "functions in time": fmean(run.functions.attainment for run in runs),
        "p99 (ms)": fmean(run.p99_ms for run in runs),
        "$/h": fmean(run.usd_per_hour for run in runs),
    }


def _violations(runs: Sequence[RunResult]) -> float:
    return sum(run.violations for run in runs) / sum(run.requests for run in runs)


def cold_share(runs: Sequence[RunResult]) -> float:
    """Return the share of violations that is due to cold starts; 0 without violations."""
    violations = sum(run.violations for run in runs)
    return sum(run.cold_violations for run in runs) / max(1, violations)


def _paper_checks(runs: Mapping[str, Sequence[RunResult]]) -> list[Check]:
    """Check the claims of section 5.2 and of the conclusion with the surrogate."""
    without = _violations(runs[DEDICATED])
    spilled = runs[THRESHOLD]
    all_of = {
        ("with spill the instance answers within the SLA", "paper 5.2"): fmean(
            run.machines.attainment for run in spilled
        ),
        (FUNCTIONS_IN_TIME, "paper 5.2"): fmean(run.functions.attainment for run in spilled),
        ("share of the violations with spill that are due to cold starts", "paper 6"): cold_share(
            spilled
        ),
    }
    claim = "without spill the load violates the SLA: share of the requests that are late"
    return [
        Check(claim, "paper 5.2", "above 0.1", without, without > 0.1),
        *(Check(*claim, 1.0, measured, measured == 1.0) for claim, measured in all_of.items()),
    ]


def _checks(
    setting: Setting, plan: PaperPlan, runs: Mapping[str, Sequence[RunResult]]
) -> list[Check]:
    """Check what must hold for every model whose functions can meet the SLA."""
    source, goal = setting.source, "a goal of this project"
    if plan.selected is None:
        in_time = fmean(run.functions.attainment for run in runs[WARM])
        claim = f"{source}: no function meets the SLA by the plan; attainment, kept warm"
        return [Check(claim, "the plan", f"below {QUANTILE}", in_time, in_time < QUANTILE)]
    late = {label: _violations(each) for label, each in runs.items()}
    checks = []
    for label, baseline in (
        (DEDICATED, "violations with spill over those without"),
        (AUTOSCALE, "violations over those of an autoscaler"),
        (FAST_AUTOSCALE, "violations over those of a fast autoscaler"),
    ):
        ratio, expected = late[THRESHOLD] / late[label], f"below {_FAR_LESS_MAX}"
        holds = ratio < _FAR_LESS_MAX
        checks.append(Check(f"{source}: {baseline}", "paper 5.2", expected, ratio, holds))
    kept = sum(run.cold_violations for run in runs[WARM])
    claim = f"{source}: violations by cold starts where functions are kept warm"
    checks.append(Check(claim, goal, 0, kept, kept == 0))
    in_time = 1.0 - late[HEADGATE]
    claim = f"{source}: share in time under headgate"
    return [*checks, Check(claim, goal, f"at least {QUANTILE}", in_time, in_time >= QUANTILE)]


def _figures(
    samples: Sequence[SpillTimeline], numbers: Sequence[int], runs: Runs
) -> dict[str, Figure]:
    """Draw two minutes of the load, request by request; then violations by policy."""
    figures = {}
    if len(numbers) > 3:
        figures[f"figure-{numbers[0]}"] = load_figure(samples[0].wave_sizes, samples[0].period_s)
    for sample in samples:
        source = sample.setting.source
        suffix = "" if source == SURROGATE else f"-{source}"
        for number, (title, times) in zip(numbers[-3:], sample.panels.items(), strict=True):
            figures[f"figure-{number}{suffix}"] = responses_figure(
                times,
                title=f"Figure {number}: {source}, {title}",
                sla_ms=sample.setting.sla_ms,
                until_s=SAMPLE_S,
            )
    late = {
        setting.source: {
            label: (_violations(each), cold_share(each) * _violations(each))
            for label, each in by_policy.items()
        }
        for setting, by_policy in runs.items()
    }
    return {**figures, "violations": violations_figure(late)}
