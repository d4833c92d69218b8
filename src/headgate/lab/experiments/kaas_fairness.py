"""Two warnings of the thesis: an unfair bucket, and a client that plays the queue.

*Alone in a bucket.* Eight clients send requests for one model and one client for the other, each
the same amount of work. MLFQ draws the two buckets equally often, so the one is served as if it
were eight.

*Copies.* One of five equal clients sends every request several times and withdraws the rest when
the first is answered. The thesis warns that a single queue can be played like this. In a queue that
is served in order no copy can start before the original, so this can only pay where execution
times scatter and the quickest copy wins; both are run. That a client which keeps more requests
waiting gets more is another matter, and is run too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from headgate.core.clock import MILLISECOND_NS
from headgate.lab.experiments._kaas import (
    AFFINITY,
    BALANCE,
    MLFQ,
    ROUND_ROBIN,
    SRTF,
    STATED,
    KaasPolicyCase,
    build_app,
    client_names,
    is_above,
    log_sweep_figure,
    on_timesteps,
    wait_columns,
    write_figure,
)
from headgate.lab.experiments.experiment import Check, Progress, Result, Row, over_seeds
from headgate.metrics.columns import RequestColumns
from headgate.metrics.confidence import Interval, mean_interval
from headgate.metrics.summary import jain, summarise
from headgate.sim.clients import HedgingClient, LoopClients
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import ClosedLoop, ConcurrencyStep, assign, mix, named, poisson

NAME = "kaas-fairness"
TITLE = "A client alone in its MLFQ bucket, and a client that sends copies"

_GPUS: Final = 4
_CROWD: Final = 8
_NEIGHBOURS: Final = 4
_COPIES: Final = (1, 2, 4, 8)
_SHARE_TIMES: Final = (1, 2, 8)
_ALONE_FORMS: Final = (BALANCE, SRTF, MLFQ, AFFINITY)
_COPY_FORMS: Final = (ROUND_ROBIN, BALANCE, AFFINITY)
_TIMES: Final = ("exact", "exponential")


@dataclass(frozen=True, slots=True)
class OneModelEach:
    """Eight clients for one model, one for the other; everybody brings the same work."""

    form: KaasPolicyCase
    alone: int  # which model has a client to itself: 0 is ResNet, 1 BERT
    load: float


@dataclass(frozen=True, slots=True)
class Crowded:
    """Mean waits in timesteps, and Jain's index over the clients' pace and over their waits."""

    alone: float
    alone_requests: int
    others: float
    others_requests: int
    pace_index: float
    wait_index: float


@dataclass(frozen=True, slots=True)
class Copying:
    """Five clients that want equally much; the last one sends copies."""

    form: KaasPolicyCase
    copies: int
    times: str  # how execution times scatter around the profile
    load: float = 0.5  # were there no copies


@dataclass(frozen=True, slots=True)
class Copied:
    """Means in timesteps. A wait ends when the first copy starts, a response when it answers."""

    wait: float
    response: float
    others_wait: float
    others_response: float


AloneRuns = dict[OneModelEach, list[Crowded]]
CopyRuns = dict[Copying, list[Copied]]


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run both, and the shares of clients that always have something waiting."""
    seeds = 10 if quick else 100
    loads = (0.95,) if quick else (0.8, 0.95, 1.1)
    progress(f"One client alone in its bucket: {seeds} seeds")
    alone_cases = [
        OneModelEach(form, alone, load)
        for alone in (0, 1)
        for load in loads
        for form in _ALONE_FORMS
    ]
    alone_runs = over_seeds(run_alone, alone_cases, seeds, quick=quick)
    progress(f"Copies: {seeds} seeds")
    copy_cases = [
        Copying(form, copies, times)
        for times in _TIMES
        for form in _COPY_FORMS
        for copies in _COPIES
    ]
    copy_runs = over_seeds(run_copying, copy_cases, seeds, quick=quick)
    shares = {
        (form, keep): [share_of(form, times, keep) for times in _SHARE_TIMES]
        for keep in (1, 2)
        for form in _COPY_FORMS
    }
    return Result(
        NAME,
        [
            *(_alone_row(case, runs) for case, runs in alone_runs.items()),
            *(_copy_row(case, runs) for case, runs in copy_runs.items()),
            *(_share_row(form, keep, values) for (form, keep), values in shares.items()),
        ],
        [*_alone_checks(alone_runs), *_copy_checks(copy_runs), *_share_checks(shares)],
        () if out is None else _figures(out, loads, alone_runs, copy_runs),
    )


def run_alone(case: OneModelEach, seed: int) -> Crowded:
    """Run one case. Top-level, for worker processes."""
    crowd, lone = (STATED[1 - case.alone], STATED[case.alone])
    names = client_names(crowd, _CROWD)
    duration_ns = 2_000 * MILLISECOND_NS
    gpus_busy = case.load * _GPUS / (_CROWD + 1)  # by each client
    many = poisson(1000 * _CROWD * gpus_busy / crowd.exec_ms, duration_ns, seed=2 * seed)
    one = poisson(1000 * gpus_busy / lone.exec_ms, duration_ns, seed=2 * seed + 1)
    arrivals = mix(
        [
            assign(many, {crowd.name: 1.0}, dict.fromkeys(names, 1.0), seed=seed),
            named(one, lone.name, "alone"),
        ]
    )
    kind, config = case.form.build()
    app = build_app(STATED, _GPUS, [*names, "alone"])
    setup = Setup(app, kind, config, seed=seed)
    summary = summarise(simulate(setup, on_timesteps(arrivals)))
    clients, pipelines = summary.clients, summary.pipelines
    return Crowded(
        alone=pipelines[case.alone].mean_wait_ms,
        alone_requests=pipelines[case.alone].requests,
        others=pipelines[1 - case.alone].mean_wait_ms,
        others_requests=pipelines[1 - case.alone].requests,
        pace_index=summary.fairness,
        wait_index=jain([client.mean_wait_ms for client in clients]),
    )


def run_copying(case: Copying, seed: int) -> Copied:
    """Run one case. Top-level, for worker processes."""
    model = STATED[0]
    names = [*client_names(model, _NEIGHBOURS), "copier"]
    rate_per_s = 1000 * case.load * _GPUS / len(names) / model.exec_ms
    duration_ns = 1_000 * MILLISECOND_NS
    arrivals = assign(
        poisson(rate_per_s * _NEIGHBOURS, duration_ns, seed=2 * seed),
        {model.name: 1.0},
        dict.fromkeys(names[:-1], 1.0),
        seed=seed,
    )
    own = poisson(rate_per_s, duration_ns, seed=2 * seed + 1)
    kind, config = case.form.build()
    app = build_app((model,), _GPUS, names)
    setup = Setup(app, kind, config, seed=seed, truth=GroundTruthConfig(case.times))
    copier = HedgingClient(own.times_ns.tolist(), case.copies, client=_NEIGHBOURS)
    requests = simulate(setup, arrivals, clients=[copier]).requests
    others = requests.client != _NEIGHBOURS
    arrival_ns = requests.arrival_ns[others]
    return Copied(
        wait=_copier_wait(requests),
        response=fmean(one.wait_ns for one in copier.ended) / MILLISECOND_NS,
        others_wait=float((requests.started_ns[others] - arrival_ns).mean()) / MILLISECOND_NS,
        others_response=float((requests.finished_ns[others] - arrival_ns).mean()) / MILLISECOND_NS,
    )


def _copier_wait(requests: RequestColumns) -> float:
    """Return the mean time until the first of a request's copies started."""
    own = requests.client == _NEIGHBOURS
    sent_ns, group = np.unique(requests.arrival_ns[own], return_inverse=True)
    first_ns = np.full(len(sent_ns), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, group, requests.started_ns[own])  # one that never started is NEVER_NS
    return float((first_ns - sent_ns).mean()) / MILLISECOND_NS


def share_of(form: KaasPolicyCase, times: int, others_keep: int) -> float:
    """Return a client's share of all service when it keeps `times` as many requests as others.

    Each of the four others always has `others_keep` requests out. Nothing is random.
    """
    model = STATED[0]
    names = [*client_names(model, _NEIGHBOURS), "copier"]
    app = build_app((model,), _GPUS, names)
    kind, config = form.build()
    loops = [
        ClosedLoop(
            (ConcurrencyStep(0, others_keep * (times if name == "copier" else 1)),),
            4_000 * MILLISECOND_NS,
            client=name,
        )
        for name in names
    ]
    run = simulate(Setup(app, kind, config), clients=[LoopClients(loop, app) for loop in loops])
    return summarise(run).clients[-1].service_share


# --- what is reported ---------------------------------------------------------------------------


def _alone_row(case: OneModelEach, runs: Sequence[Crowded]) -> Row:
    return {
        "alone": STATED[case.alone].name,
        "load": case.load,
        "policy": case.form.label,
        **wait_columns("its wait", [run.alone for run in runs]),
        **wait_columns("the others'", [run.others for run in runs]),
        "Jain (pace)": fmean(run.pace_index for run in runs),
        "Jain (waits)": fmean(run.wait_index for run in runs),
    }


def _copy_row(case: Copying, runs: Sequence[Copied]) -> Row:
    return {
        "times": case.times,
        "policy": case.form.label,
        "copies": case.copies,
        **wait_columns("its wait", [run.wait for run in runs]),
        **wait_columns("its response", [run.response for run in runs]),
        "others' wait": fmean(run.others_wait for run in runs),
        "others' response": fmean(run.others_response for run in runs),
    }


def _share_row(form: KaasPolicyCase, others_keep: int, shares: Sequence[float]) -> Row:
    row: Row = {
        "others keep": others_keep,
        "policy; share of one that keeps ... times as many": form.label,
    }
    return row | {str(times): share for times, share in zip(_SHARE_TIMES, shares, strict=True)}


def _figures(
    out: Path, loads: Sequence[float], alone_runs: AloneRuns, copy_runs: CopyRuns
) -> tuple[Path, ...]:
    alone = {}
    for form in (BALANCE, MLFQ, AFFINITY):
        runs = [alone_runs[OneModelEach(form, 1, load)] for load in loads]
        alone[f"{form.label}: alone"] = [mean_interval([r.alone for r in rs]) for rs in runs]
        alone[f"{form.label}: others"] = [mean_interval([r.others for r in rs]) for rs in runs]
    copies = {}
    for form in (BALANCE, AFFINITY):
        both = [copy_runs[Copying(form, count, "exact")] for count in _COPIES]
        copies[f"{form.label}: copier"] = [mean_interval([r.wait for r in rs]) for rs in both]
        copies[f"{form.label}: others"] = [
            mean_interval([r.others_wait for r in rs]) for rs in both
        ]
    bucket = log_sweep_figure(
        loads, alone, title="One BERT client beside eight for ResNet", x_label="load"
    )
    copied = log_sweep_figure(
        _COPIES,
        copies,
        title="One client of five sends copies, load 0.5",
        x_label="copies of each of its requests",
    )
    return (
        write_figure(bucket, out, f"{NAME}-bucket"),
        write_figure(copied, out, f"{NAME}-copies"),
    )


# --- what the thesis says -----------------------------------------------------------------------


def _alone_checks(runs: AloneRuns) -> list[Check]:
    """Check at load 0.95, where queues are long but do not grow for ever."""
    checks = []
    for place, model in enumerate(STATED):
        claim = f"{model.name} alone under mlfq: its wait over the others'"
        ratio, gap = _pooled(runs[OneModelEach(MLFQ, place, 0.95)])
        checks.append(Check(claim, "thesis 6.1", "below 1", ratio, gap.high < 0))
        claim = f"{model.name} alone under balance: its wait over the others'"
        ratio, gap = _pooled(runs[OneModelEach(BALANCE, place, 0.95)])
        checks.append(Check(claim, "thesis 6.1", 1, ratio, gap.low <= 0 <= gap.high))
    srtf, mlfq = ([r.alone for r in runs[OneModelEach(form, 1, 0.95)]] for form in (SRTF, MLFQ))
    claim = "mlfq does not starve BERT: its wait over that under srtf"
    ratio = fmean(mlfq) / fmean(srtf)
    return [*checks, Check(claim, "thesis 6.1", "below 1", ratio, is_above(srtf, mlfq))]


def _pooled(runs: Sequence[Crowded]) -> tuple[float, Interval]:
    """Return the waits' ratio, alone over others, and their difference, over all requests.

    The mean of the runs' means would not do to find two waits equal: a busy run has more requests
    of the crowd and longer waits, so weighing runs alike sets the two apart by some per cent.
    """
    alone = fmean(r.alone * r.alone_requests for r in runs)
    others = fmean(r.others * r.others_requests for r in runs)
    alone_requests = fmean(r.alone_requests for r in runs)
    others_requests = fmean(r.others_requests for r in runs)
    wait, others_wait = alone / alone_requests, others / others_requests
    # What each run contributes to the difference of the two quotients, to first order.
    parts = [
        wait
        - others_wait
        + (r.alone - wait) * r.alone_requests / alone_requests
        - (r.others - others_wait) * r.others_requests / others_requests
        for r in runs
    ]
    return wait / others_wait, mean_interval(parts)


def _copy_checks(runs: CopyRuns) -> list[Check]:
    checks = []
    for times in _TIMES:
        for form in (ROUND_ROBIN, BALANCE):
            responses = [[r.response for r in runs[Copying(form, c, times)]] for c in _COPIES]
            best = min(responses[1:], key=fmean)
            claim = f"{form.label}, {times} times: response with copies over that without"
            ratio = fmean(best) / fmean(responses[0])
            pays = is_above(responses[0], best)
            checks.append(Check(claim, "thesis 6.1", "below 1", ratio, pays))
    balance, affinity = (
        [r.others_wait for r in runs[Copying(form, 8, "exact")]] for form in (BALANCE, AFFINITY)
    )
    claim = "the others' wait beside 8 copies, affinity over balance"
    ratio = fmean(affinity) / fmean(balance)
    shielded = is_above(balance, affinity)
    return [*checks, Check(claim, "KaaS pool's rule", "below 1", ratio, shielded)]


def _share_checks(shares: dict[tuple[KaasPolicyCase, int], list[float]]) -> list[Check]:
    in_order, even = 8 / (8 + _NEIGHBOURS), 1 / (1 + _NEIGHBOURS)
    return [
        Check(
            f"{form.label}: share of a client with 8 times the requests of each of four others, "
            f"who keep {keep}",
            "KaaS pool's rule" if form == AFFINITY else "thesis 6.1",
            even if form == AFFINITY else in_order,
            values[-1],
            abs(values[-1] - (even if form == AFFINITY else in_order)) < 0.01,
        )
        for (form, keep), values in shares.items()
    ]
