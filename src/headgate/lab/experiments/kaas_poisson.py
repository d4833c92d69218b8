"""Cold starts and waits under Poisson arrivals: section 6.2 of the thesis, over many seeds.

Four GPUs, two models, 1,000 timesteps, "a queue occupancy of roughly 80 %". What that means is not
said. Here it is utilisation: arrivals ask for 0.8 of the GPUs' time in evaluation, cold starts not
counted. Nor is the mix said: equal work per model suits the thesis's two GPUs for each, equal
rates ask BERT's two GPUs for 1.28 times what they have. Both are run, and both again at the load
at which BERT waits as long under SRTF as the thesis says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Final

from headgate.lab.experiments._kaas import (
    ALL_FORMS,
    BALANCE,
    EXCLUSIVE_FIXED,
    FITTED,
    HEADGATE,
    MIXES,
    ROUND_ROBIN,
    SRTF,
    SRTF_PRINTED,
    STATED,
    THESIS_FORMS,
    KaasCase,
    KaasPolicyCase,
    KaasResult,
    Mix,
    beats,
    differences,
    is_above,
    load_figure,
    measure,
    wait_columns,
    waits,
    waits_figure,
    write_figure,
)
from headgate.lab.experiments.experiment import Check, Progress, Result, Row, over_seeds
from headgate.metrics.confidence import mean_interval
from headgate.policies.headgate import Config

NAME = "kaas-poisson"
TITLE = "Cold starts and waits of the thesis's policies under Poisson arrivals"

BERT_WAIT: Final = 80.65  # thesis, figure 6.5: SRTF
_RESNET, _BERT = 0, 1
_BERT_LOAD: Final = 1.05  # about where SRTF's BERT does wait that long
_LOADS: Final = (0.8, 0.9, 1.0, 1.05, 1.1, 1.15)
_TIMES: Final = {"stated": STATED, "fitted": FITTED}

Runs = dict[KaasCase, list[KaasResult]]


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run every policy under both mixes, then SRTF under rising load."""
    seeds = 20 if quick else 200
    times = ["stated"] if quick else list(_TIMES)
    progress(f"{seeds} seeds, 0.8 of the GPUs' time in evaluation")
    cases = [
        KaasCase(form, models=_TIMES[name], mix=mix)
        for name in times
        for mix in MIXES
        for form in (*ALL_FORMS, HEADGATE, SRTF_PRINTED)
    ]
    forms = (*ALL_FORMS, HEADGATE)
    cases += [KaasCase(form, mix=mix, load=_BERT_LOAD) for mix in MIXES for form in forms]
    runs = over_seeds(measure, cases, seeds, quick=quick)
    rows = [_row(case, runs[case]) for case in cases]
    progress("SRTF under rising load")
    curves = {(name, mix): _curve(name, mix) for name in times for mix in MIXES}
    runs |= over_seeds(measure, [c for curve in curves.values() for c in curve], seeds, quick=quick)
    rows += [_load_row(case, runs[case]) for curve in curves.values() for case in curve]
    rows += [_reached_row(*key, curve, runs) for key, curve in curves.items()]
    checks = [check for mix in MIXES for check in _checks(mix, runs)]
    for load in (KaasCase(HEADGATE).load, _BERT_LOAD):
        checks += [check for mix in MIXES for check in _headgate_checks(mix, load, runs)]
    figures: tuple[Path, ...] = ()
    if out is not None:
        progress("figures")
        figures = _figures(out, runs, curves)
    return Result(NAME, rows, checks, figures)


def _curve(times: str, mix: Mix) -> list[KaasCase]:
    return [KaasCase(SRTF, models=_TIMES[times], mix=mix, load=load) for load in _LOADS]


def _row(case: KaasCase, measured: Sequence[KaasResult]) -> Row:
    cold = [one.cold_starts for one in measured]
    return {
        **_setting(case),
        "policy": case.form.label,
        "cold starts": median(cold),
        "least": min(cold),
        "most": max(cold),
        **wait_columns("ResNet", waits(measured, _RESNET)),
        **wait_columns("BERT", waits(measured, _BERT)),
    }


def _load_row(case: KaasCase, measured: Sequence[KaasResult]) -> Row:
    values = waits(measured, _BERT)
    return {
        **_setting(case),
        **wait_columns("BERT under srtf", values),
        "runs at 80.65 or more": sum(value >= BERT_WAIT for value in values) / len(values),
    }


def _setting(case: KaasCase) -> Row:
    times = next(name for name, models in _TIMES.items() if models == case.models)
    return {"times": times, "mix": case.mix, "load": case.load}


def _reached_row(times: str, mix: Mix, curve: Sequence[KaasCase], runs: Runs) -> Row:
    points = [(case.load, mean_interval(waits(runs[case], _BERT)).mean) for case in curve]
    return {
        "times": times,
        "mix": mix,
        "load at which BERT waits 80.65 under srtf": _load_at(points),
    }


def _load_at(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the load at which the wait is the thesis's, on the line between two points."""
    for (load, wait), (next_load, next_wait) in pairwise(points):
        if wait <= BERT_WAIT < next_wait:
            return load + (next_load - load) * (BERT_WAIT - wait) / (next_wait - wait)
    return None


def _checks(mix: Mix, runs: Runs) -> list[Check]:
    """Set the claims of section 6.2 beside what the stated times give."""
    by_form = {form: runs[KaasCase(form, mix=mix)] for form in THESIS_FORMS}
    checks = []
    for form, measured in by_form.items():
        expected = 4 if form == EXCLUSIVE_FIXED else 8
        cold = median(one.cold_starts for one in measured)
        claim = f"{mix}: cold starts of {form.label} (median run)"
        checks.append(Check(claim, "thesis, fig. 6.4", expected, cold, cold == expected))
    loaded = {
        form: waits(runs[KaasCase(form, mix=mix, load=_BERT_LOAD)], _BERT)
        for form in THESIS_FORMS
        if form != ROUND_ROBIN
    }
    claim = f"{mix}: longest wait of BERT, round robin aside, at load {_BERT_LOAD}"
    return [*checks, *_wait_checks(mix, by_form), _longest_check(claim, SRTF, loaded)]


def _wait_checks(mix: Mix, by_form: dict[KaasPolicyCase, list[KaasResult]]) -> list[Check]:
    resnet = {form: waits(measured, _RESNET) for form, measured in by_form.items()}
    bert = {form: waits(measured, _BERT) for form, measured in by_form.items()}
    srtf = mean_interval(bert[SRTF])
    return [
        _longest_check(f"{mix}: longest wait of ResNet", ROUND_ROBIN, resnet),
        _longest_check(
            f"{mix}: longest wait of BERT, SRTF aside",
            ROUND_ROBIN,
            {form: values for form, values in bert.items() if form != SRTF},
        ),
        _longest_check(
            f"{mix}: longest wait of BERT, round robin aside",
            SRTF,
            {form: values for form, values in bert.items() if form != ROUND_ROBIN},
        ),
        Check(
            f"{mix}: SRTF makes BERT wait longer than balance does, by (timesteps)",
            "thesis 6.2",
            "above 0",
            mean_interval(differences(bert[SRTF], bert[BALANCE])).mean,
            is_above(bert[SRTF], bert[BALANCE]),
        ),
        Check(
            f"{mix}: BERT's wait under SRTF",
            "thesis, fig. 6.5",
            BERT_WAIT,
            srtf.mean,
            srtf.low <= BERT_WAIT <= srtf.high,
        ),
    ]


def _headgate_checks(mix: Mix, load: float, runs: Runs) -> list[Check]:
    """The default policy lies on the frontier of the others, and starves nobody."""
    rivals = {form.label: runs[KaasCase(form, mix=mix, load=load)] for form in ALL_FORMS}
    ours = runs[KaasCase(HEADGATE, mix=mix, load=load)]
    better = [label for label, theirs in rivals.items() if beats(theirs, ours)]
    extra = fmean(waits(ours, _BERT)) - fmean(waits(ours, _RESNET))
    # Without objectives headgate orders by arrival plus so many lengths: no more can BERT lose.
    bound = Config().default_deadline_factor * (STATED[_BERT].exec_ms - STATED[_RESNET].exec_ms)
    return [
        Check(
            f"{mix}, load {load}: who has no more cold starts than headgate and shorter waits",
            "a goal of this project",
            "nobody",
            ", ".join(better) or "nobody",
            not better,
        ),
        Check(
            f"{mix}, load {load}: BERT is not starved by headgate: its wait beyond ResNet's",
            "a goal of this project",
            f"at most {bound:g}",
            round(extra, 2),
            extra <= bound,
        ),
    ]


def _longest_check(
    claim: str, expected: KaasPolicyCase, values: dict[KaasPolicyCase, list[float]]
) -> Check:
    """Check who waits longest; it must be above each other one beyond what chance explains."""
    longest = max(values, key=lambda form: sum(values[form]))
    is_clear = all(
        is_above(values[expected], rival) for form, rival in values.items() if form != expected
    )
    return Check(claim, "thesis 6.2", expected.label, longest.label, is_clear)


def _figures(
    out: Path, runs: Runs, curves: dict[tuple[str, Mix], list[KaasCase]]
) -> tuple[Path, ...]:
    figures = []
    for mix in MIXES:
        series = {
            model.name: {
                form.label: mean_interval(waits(runs[KaasCase(form, mix=mix)], place))
                for form in (*ALL_FORMS, HEADGATE)
            }
            for place, model in enumerate(STATED)
        }
        figure = waits_figure(series, title=f"Waits at 0.8 load, {mix}")
        figures.append(write_figure(figure, out, f"{NAME}-{mix.replace(' ', '-')}"))
    lines = {
        f"{times} times, {mix}": [mean_interval(waits(runs[case], _BERT)) for case in curve]
        for (times, mix), curve in curves.items()
    }
    figure = load_figure(_LOADS, lines, BERT_WAIT)
    return (*figures, write_figure(figure, out, f"{NAME}-srtf-load"))
