"""Two fairness warnings of the thesis: an unfair bucket, and a client that games the queue.

*Alone in a bucket.* Eight clients send requests for one model and one client for the other, each
the same amount of work. MLFQ draws the two buckets equally often, so the single client gets as much
service as the eight clients together.

*Copies.* One of five equal clients sends every request several times (hedging) and cancels the
other copies after the first response. The thesis warns that a single queue can be gamed in this
way. In a FIFO queue no copy can start before the original, so copies can only pay if execution
times vary and the quickest copy wins; both cases are run. A separate run measures the share of a
client that keeps more requests outstanding.
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
TITLE = "A client with an MLFQ bucket of its own, and a client that sends copies"

_GPUS: Final = 4
_CROWD_CLIENTS: Final = 8
_OTHER_CLIENTS: Final = 4
_COPIES: Final = (1, 2, 4, 8)
_SHARE_TIMES: Final = (1, 2, 8)
_BUCKET_POLICIES: Final = (BALANCE, SRTF, MLFQ, AFFINITY)
_COPY_POLICIES: Final = (ROUND_ROBIN, BALANCE, AFFINITY)
_TIMES: Final = ("exact", "exponential")


@dataclass(frozen=True, slots=True)
class BucketCase:
    """Eight clients of one model, one of the other; every client brings the same work."""

    policy: KaasPolicyCase
    single: int  # the model with a single client: 0 is ResNet, 1 BERT
    load: float


@dataclass(frozen=True, slots=True)
class BucketResult:
    """Mean waits in timesteps, and Jain's index over clients' throughput and over their waits."""

    single: float
    single_requests: int
    others: float
    others_requests: int
    pace_index: float
    wait_index: float


@dataclass(frozen=True, slots=True)
class CopyCase:
    """Five clients with equal demand; the last one sends copies."""

    policy: KaasPolicyCase
    copies: int
    times: str  # distribution of execution times around the profile
    load: float = 0.5  # without copies


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Means in timesteps: wait until the first copy starts, response until the first completes."""

    wait: float
    response: float
    others_wait: float
    others_response: float


BucketRuns = dict[BucketCase, list[BucketResult]]
CopyRuns = dict[CopyCase, list[CopyResult]]


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run both, and the service shares of closed-loop clients."""
    seeds = 10 if quick else 100
    loads = (0.95,) if quick else (0.8, 0.95, 1.1)
    progress(f"One client with a bucket of its own: {seeds} seeds")
    bucket_cases = [
        BucketCase(policy, single, load)
        for single in (0, 1)
        for load in loads
        for policy in _BUCKET_POLICIES
    ]
    bucket_runs = over_seeds(run_bucket, bucket_cases, seeds, quick=quick)
    progress(f"Copies: {seeds} seeds")
    copy_cases = [
        CopyCase(policy, copies, times)
        for times in _TIMES
        for policy in _COPY_POLICIES
        for copies in _COPIES
    ]
    copy_runs = over_seeds(run_copies, copy_cases, seeds, quick=quick)
    shares = {
        (policy, keep): [share_of(policy, times, keep) for times in _SHARE_TIMES]
        for keep in (1, 2)
        for policy in _COPY_POLICIES
    }
    return Result(
        NAME,
        [
            *(_bucket_row(case, runs) for case, runs in bucket_runs.items()),
            *(_copy_row(case, runs) for case, runs in copy_runs.items()),
            *(_share_row(policy, keep, values) for (policy, keep), values in shares.items()),
        ],
        [*_bucket_checks(bucket_runs), *_copy_checks(copy_runs), *_share_checks(shares)],
        () if out is None else _figures(out, loads, bucket_runs, copy_runs),
    )


def run_bucket(case: BucketCase, seed: int) -> BucketResult:
    """Run one case. Top-level function with picklable arguments, for worker processes."""
    crowd_model, single_model = (STATED[1 - case.single], STATED[case.single])
    names = client_names(crowd_model, _CROWD_CLIENTS)
    duration_ns = 2_000 * MILLISECOND_NS
    gpus_busy = case.load * _GPUS / (_CROWD_CLIENTS + 1)  # per client
    many = poisson(
        1000 * _CROWD_CLIENTS * gpus_busy / crowd_model.exec_ms, duration_ns, seed=2 * seed
    )
    one = poisson(1000 * gpus_busy / single_model.exec_ms, duration_ns, seed=2 * seed + 1)
    arrivals = mix(
        [
            assign(many, {crowd_model.name: 1.0}, dict.fromkeys(names, 1.0), seed=seed),
            named(one, single_model.name, "single"),
        ]
    )
    kind, config = case.policy.build()
    app = build_app(STATED, _GPUS, [*names, "single"])
    setup = Setup(app, kind, config, seed=seed)
    summary = summarise(simulate(setup, on_timesteps(arrivals)))
    clients, pipelines = summary.clients, summary.pipelines
    return BucketResult(
        single=pipelines[case.single].mean_wait_ms,
        single_requests=pipelines[case.single].requests,
        others=pipelines[1 - case.single].mean_wait_ms,
        others_requests=pipelines[1 - case.single].requests,
        pace_index=summary.fairness,
        wait_index=jain([client.mean_wait_ms for client in clients]),
    )


def run_copies(case: CopyCase, seed: int) -> CopyResult:
    """Run one case. Top-level function with picklable arguments, for worker processes."""
    model = STATED[0]
    names = [*client_names(model, _OTHER_CLIENTS), "copier"]
    rate_per_s = 1000 * case.load * _GPUS / len(names) / model.exec_ms
    duration_ns = 1_000 * MILLISECOND_NS
    arrivals = assign(
        poisson(rate_per_s * _OTHER_CLIENTS, duration_ns, seed=2 * seed),
        {model.name: 1.0},
        dict.fromkeys(names[:-1], 1.0),
        seed=seed,
    )
    own = poisson(rate_per_s, duration_ns, seed=2 * seed + 1)
    kind, config = case.policy.build()
    app = build_app((model,), _GPUS, names)
    setup = Setup(app, kind, config, seed=seed, truth=GroundTruthConfig(case.times))
    copier = HedgingClient(own.times_ns.tolist(), case.copies, client=_OTHER_CLIENTS)
    requests = simulate(setup, arrivals, clients=[copier]).requests
    others = requests.client != _OTHER_CLIENTS
    arrival_ns = requests.arrival_ns[others]
    return CopyResult(
        wait=_first_copy_wait(requests),
        response=fmean(one.wait_ns for one in copier.ended) / MILLISECOND_NS,
        others_wait=float((requests.started_ns[others] - arrival_ns).mean()) / MILLISECOND_NS,
        others_response=float((requests.finished_ns[others] - arrival_ns).mean()) / MILLISECOND_NS,
    )


def _first_copy_wait(requests: RequestColumns) -> float:
    """Return the mean time until the first copy of a request started."""
    own = requests.client == _OTHER_CLIENTS
    sent_ns, group = np.unique(requests.arrival_ns[own], return_inverse=True)
    first_ns = np.full(len(sent_ns), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, group, requests.started_ns[own])  # NEVER_NS if it never started
    return float((first_ns - sent_ns).mean()) / MILLISECOND_NS


def share_of(policy: KaasPolicyCase, times: int, others_keep: int) -> float:
    """Return the service share of a client with `times` as many outstanding requests as others.

    Each of the four other clients always has `others_keep` requests outstanding. Nothing is random.
    """
    model = STATED[0]
    names = [*client_names(model, _OTHER_CLIENTS), "copier"]
    app = build_app((model,), _GPUS, names)
    kind, config = policy.build()
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


def _bucket_row(case: BucketCase, runs: Sequence[BucketResult]) -> Row:
    return {
        "single": STATED[case.single].name,
        "load": case.load,
        "policy": case.policy.label,
        **wait_columns("its wait", [run.single for run in runs]),
        **wait_columns("the others'", [run.others for run in runs]),
        "Jain (pace)": fmean(run.pace_index for run in runs),
        "Jain (waits)": fmean(run.wait_index for run in runs),
    }


def _copy_row(case: CopyCase, runs: Sequence[CopyResult]) -> Row:
    return {
        "times": case.times,
        "policy": case.policy.label,
        "copies": case.copies,
        **wait_columns("its wait", [run.wait for run in runs]),
        **wait_columns("its response", [run.response for run in runs]),
        "others' wait": fmean(run.others_wait for run in runs),
        "others' response": fmean(run.others_response for run in runs),
    }


def _share_row(policy: KaasPolicyCase, others_keep: int, shares: Sequence[float]) -> Row:
    row: Row = {
        "others keep": others_keep,
        "policy; share of one that keeps ... times as many": policy.label,
    }
    return row | {str(times): share for times, share in zip(_SHARE_TIMES, shares, strict=True)}


def _figures(
    out: Path, loads: Sequence[float], bucket_runs: BucketRuns, copy_runs: CopyRuns
) -> tuple[Path, ...]:
    single = {}
    for policy in (BALANCE, MLFQ, AFFINITY):
        runs = [bucket_runs[BucketCase(policy, 1, load)] for load in loads]
        single[f"{policy.label}: single"] = [mean_interval([r.single for r in rs]) for rs in runs]
        single[f"{policy.label}: others"] = [mean_interval([r.others for r in rs]) for rs in runs]
    copies = {}
    for policy in (BALANCE, AFFINITY):
        both = [copy_runs[CopyCase(policy, count, "exact")] for count in _COPIES]
        copies[f"{policy.label}: copier"] = [mean_interval([r.wait for r in rs]) for rs in both]
        copies[f"{policy.label}: others"] = [
            mean_interval([r.others_wait for r in rs]) for rs in both
        ]
    bucket = log_sweep_figure(
        loads, single, title="One BERT client and eight ResNet clients", x_label="load"
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


def _bucket_checks(runs: BucketRuns) -> list[Check]:
    """Check at load 0.95, where queues are long but stable."""
    checks = []
    for index, model in enumerate(STATED):
        claim = f"single {model.name} client under mlfq: wait relative to the others"
        ratio, gap = _pooled(runs[BucketCase(MLFQ, index, 0.95)])
        checks.append(Check(claim, "thesis 6.1", "below 1", ratio, gap.high < 0))
        claim = f"single {model.name} client under balance: wait relative to the others"
        ratio, gap = _pooled(runs[BucketCase(BALANCE, index, 0.95)])
        checks.append(Check(claim, "thesis 6.1", 1, ratio, gap.low <= 0 <= gap.high))
    srtf, mlfq = ([r.single for r in runs[BucketCase(policy, 1, 0.95)]] for policy in (SRTF, MLFQ))
    claim = "mlfq does not starve BERT: wait relative to that under srtf"
    ratio = fmean(mlfq) / fmean(srtf)
    return [*checks, Check(claim, "thesis 6.1", "below 1", ratio, is_above(srtf, mlfq))]


def _pooled(runs: Sequence[BucketResult]) -> tuple[float, Interval]:
    """Return ratio and difference of the mean waits, single client over others, of all requests.

    The mean of per-run means would be biased by some per cent: a busy run has more requests of the
    eight clients and longer waits, so equal weights of runs separate two equal waits.
    """
    single = fmean(r.single * r.single_requests for r in runs)
    others = fmean(r.others * r.others_requests for r in runs)
    single_requests = fmean(r.single_requests for r in runs)
    others_requests = fmean(r.others_requests for r in runs)
    wait, others_wait = single / single_requests, others / others_requests
    # Contribution of each run to the difference of the two quotients, to first order.
    parts = [
        wait
        - others_wait
        + (r.single - wait) * r.single_requests / single_requests
        - (r.others - others_wait) * r.others_requests / others_requests
        for r in runs
    ]
    return wait / others_wait, mean_interval(parts)


def _copy_checks(runs: CopyRuns) -> list[Check]:
    checks = []
    for times in _TIMES:
        for policy in (ROUND_ROBIN, BALANCE):
            responses = [[r.response for r in runs[CopyCase(policy, c, times)]] for c in _COPIES]
            best = min(responses[1:], key=fmean)
            claim = f"{policy.label}, {times} times: response with copies over that without"
            ratio = fmean(best) / fmean(responses[0])
            pays = is_above(responses[0], best)
            checks.append(Check(claim, "thesis 6.1", "below 1", ratio, pays))
    balance, affinity = (
        [r.others_wait for r in runs[CopyCase(policy, 8, "exact")]]
        for policy in (BALANCE, AFFINITY)
    )
    claim = "wait of the others with 8 copies, affinity relative to balance"
    ratio = fmean(affinity) / fmean(balance)
    shielded = is_above(balance, affinity)
    return [*checks, Check(claim, "KaaS pool's rule", "below 1", ratio, shielded)]


def _share_checks(shares: dict[tuple[KaasPolicyCase, int], list[float]]) -> list[Check]:
    in_order, even = 8 / (8 + _OTHER_CLIENTS), 1 / (1 + _OTHER_CLIENTS)
    return [
        Check(
            f"{policy.label}: share of a client with 8 times the requests of each of four others, "
            f"who keep {keep}",
            "KaaS pool's rule" if policy == AFFINITY else "thesis 6.1",
            even if policy == AFFINITY else in_order,
            values[-1],
            abs(values[-1] - (even if policy == AFFINITY else in_order)) < 0.01,
        )
        for (policy, keep), values in shares.items()
    ]
