"""Section 5.2 of the paper: the bursty load on one instance, without and with spillover.

`take_sample` runs two minutes of the load request by request, for figures 3 to 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.lab.experiments.experiment import Check, Progress, Result, Row, over_seeds
from headgate.lab.experiments.hips.environment import (
    FUNCTION_POOL,
    INSTANCE_POOL,
    QUANTILE,
    SOURCES,
    SURROGATE,
    BurstPhase,
    Setting,
    build_scene,
    make_phases,
    setting_of,
    wave_sizes,
    waves,
)
from headgate.lab.experiments.hips.figures import (
    load_figure,
    responses_figure,
    violations_figure,
    write_figure,
)
from headgate.lab.experiments.hips.plan import (
    AUTOSCALE,
    DEDICATED,
    FAST_AUTOSCALE,
    HEADGATE,
    THRESHOLD,
    WARM,
    PaperPlan,
    cases_of,
    plan_of,
)
from headgate.lab.experiments.hips.run import HipsResult, RequestTimes, cold_share, measure, observe

SAMPLE_S: Final = 120
DRAWN_SOURCES: Final = (SURROGATE, "recommender")  # the sources with figures
_CALM_S: Final = 10


@dataclass(frozen=True, slots=True)
class Panel:
    """The content of one figure."""

    title: str
    requests: RequestTimes


@dataclass(frozen=True, slots=True)
class SpillTimeline:
    """The load, and three figures: instance without spillover, instance with it, functions."""

    setting: Setting
    wave_sizes: tuple[int, ...]
    period_s: float
    panels: tuple[Panel, Panel, Panel]


def take_sample(setting: Setting, plan: PaperPlan) -> SpillTimeline:
    """Run a calm phase and bursts, without functions and with them."""
    bursts_ns = (SAMPLE_S - _CALM_S) * SECOND_NS
    phases = (
        BurstPhase(_CALM_S * SECOND_NS, is_bursty=False),
        BurstPhase(bursts_ns, is_bursty=True),
    )
    cases = {case.policy.label: case for case in cases_of(setting, plan, phases)}
    period_ns = cases[DEDICATED].period_ns
    sizes = wave_sizes(phases, period_ns, seed=0)
    observed = {}
    for label in (DEDICATED, THRESHOLD):
        scene = build_scene(setting, cases[label].environment)
        observed[label] = observe(scene, cases[label].policy, waves(sizes, period_ns), seed=0)[1]
    cores = f"{setting.cores} cores"
    panels = (
        Panel(f"{cores}, without functions", observed[DEDICATED]),
        Panel(f"{cores}, with functions", observed[THRESHOLD].on(INSTANCE_POOL)),
        Panel("functions", observed[THRESHOLD].on(FUNCTION_POOL)),
    )
    return SpillTimeline(setting, tuple(sizes), period_ns / SECOND_NS, panels)


def load_row(number: int, sample: SpillTimeline) -> Row:
    """Return statistics of the load."""
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
    """Return statistics of the figures."""
    rows: list[Row] = []
    for number, panel in zip(numbers, sample.panels, strict=True):
        requests = panel.requests
        response_ms = requests.response_ms
        rows.append(
            {
                "figure": number,
                "source": sample.setting.source,
                "what": panel.title,
                "requests": len(response_ms),
                "shortest (ms)": float(response_ms.min()),
                "median": float(np.median(response_ms)),
                "longest": float(response_ms.max()),
                "late": int(np.count_nonzero(~requests.is_met)),
                "late by cold starts": int(np.count_nonzero(~requests.is_met & requests.is_cold)),
            }
        )
    return rows


_FAR_LESS_MAX: Final = 0.1  # a ratio below this counts as far less

Runs = dict[Setting, dict[str, list[HipsResult]]]


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
    cases = {
        (setting, case.policy.label): case
        for setting, plan in plans.items()
        for case in cases_of(setting, plan, phases)
    }
    progress(f"{len(cases)} runs of {sum(p.length_ns for p in phases) // MINUTE_NS} minutes")
    results = over_seeds(measure, list(cases.values()), 1 if quick else 3, quick=quick)
    runs: Runs = {setting: {} for setting in plans}
    for (setting, label), case in cases.items():
        runs[setting][label] = results[case]
    samples = [
        take_sample(setting, plan)
        for setting, plan in plans.items()
        if setting.source in DRAWN_SOURCES
    ]
    rows = [load_row(numbers[0], samples[0])] if len(numbers) > 3 else []
    rows += [row for sample in samples for row in panel_rows(numbers[-3:], sample)]
    rows += [_row(setting, label, runs[setting][label]) for setting, label in cases]
    paper = next(iter(plans))
    checks = _paper_checks(runs[paper])
    for setting, plan in plans.items():
        checks += _checks(setting, plan, runs[setting])
    figures: tuple[Path, ...] = ()
    if out is not None:
        progress("figures")
        figures = _figures(out, name, samples, numbers, runs)
    return Result(name, rows, checks, figures)


def _row(setting: Setting, label: str, runs: Sequence[HipsResult]) -> Row:
    return {
        "source": setting.source,
        "policy": label,
        "requests": round(fmean(run.requests for run in runs)),
        "late": _violations(runs),
        "cold (of late)": cold_share(runs),
        "cold starts": fmean(run.cold_starts for run in runs),
        "on instances": fmean(run.on_instance for run in runs),
        "in time": fmean(run.instance_attainment for run in runs),
        "functions in time": fmean(run.function_attainment for run in runs),
        "p99 (ms)": fmean(run.p99_ms for run in runs),
        "$/h": fmean(run.usd_per_hour for run in runs),
    }


def _violations(runs: Sequence[HipsResult]) -> float:
    return sum(run.violations for run in runs) / sum(run.requests for run in runs)


def _paper_checks(runs: dict[str, list[HipsResult]]) -> list[Check]:
    """Check the claims of section 5.2 and of the conclusion with the surrogate."""
    without = _violations(runs[DEDICATED])
    spilled = runs[THRESHOLD]
    on_instance = fmean(run.instance_attainment for run in spilled)
    on_functions = fmean(run.function_attainment for run in spilled)
    cold = cold_share(spilled)
    return [
        Check(
            "without spill the load violates the SLA: share of the requests that are late",
            "paper 5.2",
            "above 0.1",
            without,
            without > 0.1,
        ),
        Check(
            "with spill the instance answers within the SLA",
            "paper 5.2",
            1.0,
            on_instance,
            on_instance == 1.0,
        ),
        Check(
            "the requests that are sent to functions are answered within the SLA",
            "paper 5.2",
            1.0,
            on_functions,
            on_functions == 1.0,
        ),
        Check(
            "share of the violations with spill that are due to cold starts",
            "paper 6",
            1.0,
            cold,
            cold == 1.0,
        ),
    ]


def _checks(setting: Setting, plan: PaperPlan, runs: dict[str, list[HipsResult]]) -> list[Check]:
    """Check what must hold for every model whose functions can meet the SLA."""
    late = {label: _violations(each) for label, each in runs.items()}
    if plan.selected is None:
        in_time = fmean(run.function_attainment for run in runs[WARM])
        claim = f"{setting.source}: no function meets the SLA by the plan; attainment, kept warm"
        expected = f"below {QUANTILE}"
        return [Check(claim, "the plan", expected, in_time, in_time < QUANTILE)]
    checks = [
        _far_less(f"{setting.source}: violations with spill over those without", late, DEDICATED),
        _far_less(f"{setting.source}: violations over those of an autoscaler", late, AUTOSCALE),
        _far_less(
            f"{setting.source}: violations over those of a fast autoscaler", late, FAST_AUTOSCALE
        ),
    ]
    kept = sum(run.cold_violations for run in runs[WARM])
    claim = f"{setting.source}: violations by cold starts where functions are kept warm"
    checks.append(Check(claim, "a goal of this project", 0, kept, kept == 0))
    claim = f"{setting.source}: share in time under headgate"
    in_time = 1.0 - late[HEADGATE]
    expected = f"at least {QUANTILE}"
    return [*checks, Check(claim, "a goal of this project", expected, in_time, in_time >= QUANTILE)]


def _far_less(claim: str, late: dict[str, float], baseline: str) -> Check:
    ratio = late[THRESHOLD] / late[baseline]
    return Check(claim, "paper 5.2", f"below {_FAR_LESS_MAX}", ratio, ratio < _FAR_LESS_MAX)


def _figures(
    out: Path, name: str, samples: Sequence[SpillTimeline], numbers: Sequence[int], runs: Runs
) -> tuple[Path, ...]:
    """Write figures of two minutes of the load, request by request; then violations by policy."""
    figures = []
    if len(numbers) > 3:
        figure = load_figure(samples[0].wave_sizes, samples[0].period_s)
        figures.append(write_figure(figure, out, f"{name}-figure-{numbers[0]}"))
    for sample in samples:
        suffix = "" if sample.setting.source == SURROGATE else f"-{sample.setting.source}"
        for number, panel in zip(numbers[-3:], sample.panels, strict=True):
            figure = responses_figure(
                panel.requests,
                title=f"Figure {number}: {sample.setting.source}, {panel.title}",
                sla_ms=sample.setting.sla_ms,
                until_s=SAMPLE_S,
            )
            figures.append(write_figure(figure, out, f"{name}-figure-{number}{suffix}"))
    late = {
        setting.source: {
            label: (_violations(each), cold_share(each) * _violations(each))
            for label, each in by_policy.items()
        }
        for setting, by_policy in runs.items()
    }
    return (*figures, write_figure(violations_figure(late), out, f"{name}-violations"))
