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
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import MILLISECOND_NS
from headgate.lab.experiments import Check, Known, Progress, Result, Row
from headgate.lab.experiments._kaas import (
    AFFINITY,
    BALANCE,
    MLFQ,
    ROUND_ROBIN,
    SRTF,
    STATED,
    PoissonStream,
    build_app,
    client_names,
    draw_arrivals,
    log_sweep_figure,
    stream_seed,
    waits,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import (
    Case,
    Environment,
    PolicyCase,
    RunResult,
    is_above,
    mean_columns,
    over_seeds,
    run_case,
)
from headgate.metrics.columns import RequestColumns
from headgate.metrics.confidence import Interval, mean_interval
from headgate.metrics.summary import jain
from headgate.sim.clients import HedgingClient, LoopClients
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.workload import ClosedLoop, ConcurrencyStep, assign, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "kaas-fairness"
TITLE = "A client with an MLFQ bucket of its own, and a client that sends copies"
_PAGE: Final = "docs/papers/kaas.md"
KNOWN: Final = (
    Known("round_robin, exact times: response with copies over that without", _PAGE),
    Known("balance, exact times: response with copies over that without", _PAGE),
    Known("round_robin, exponential times: response with copies over that without", _PAGE),
    Known(
        "affinity: share of a client with 8 times the requests of each of four others, who keep 1",
        _PAGE,
    ),
)

_GPUS: Final = 4
_CROWD_CLIENTS: Final = 8
_OTHER_CLIENTS: Final = 4
_COPIES: Final = (1, 2, 4, 8)
_SHARE_TIMES: Final = (1, 2, 8)
_BUCKET_POLICIES: Final = (BALANCE, SRTF, MLFQ, AFFINITY)
_COPY_POLICIES: Final = (ROUND_ROBIN, BALANCE, AFFINITY)
_TIMES: Final = ("exact", "exponential")


@dataclass(frozen=True, slots=True)
class BucketScenario:
    """Eight clients of one model, one of the other; every client brings the same work."""

    single: int  # the model with a single client: 0 is ResNet, 1 BERT
    load: float

    def environment(self, seed: int) -> Environment:
        crowd, single = STATED[1 - self.single], STATED[self.single]
        names = client_names(crowd, _CROWD_CLIENTS)
        gpus_busy = self.load * _GPUS / (_CROWD_CLIENTS + 1)  # per client
        streams = [
            PoissonStream(crowd.name, 1000 * _CROWD_CLIENTS * gpus_busy / crowd.exec_ms, names),
            PoissonStream(single.name, 1000 * gpus_busy / single.exec_ms, ["single"]),
        ]
        app = build_app(STATED, _GPUS, [*names, "single"])
        return Environment(app, draw_arrivals(streams, 2_000, seed))


@dataclass(frozen=True, slots=True)
class CopyScenario:
    """Five clients with equal demand; the last one sends copies."""

    copies: int
    times: str  # distribution of execution times around the profile
    load: float = 0.5  # without copies

    def environment(self, seed: int) -> Environment:
        """Return application, arrivals of the others, and the client that sends copies."""
        model = STATED[0]
        names = [*client_names(model, _OTHER_CLIENTS), "copier"]
        rate_per_s = 1000 * self.load * _GPUS / len(names) / model.exec_ms
        duration_ns = 1_000 * MILLISECOND_NS
        others, own = (
            poisson(rate_per_s * clients, duration_ns, seed=stream_seed(seed, index, 2))
            for index, clients in enumerate((_OTHER_CLIENTS, 1))
        )
        return Environment(
            build_app((model,), _GPUS, names),
            assign(others, {model.name: 1.0}, dict.fromkeys(names[:-1], 1.0), seed=seed),
            GroundTruthConfig(self.times),
            (HedgingClient(own.times_ns.tolist(), self.copies, client=_OTHER_CLIENTS),),
        )


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Means in timesteps: wait until the first copy starts, response until the first completes."""

    wait: float
    response: float
    others_wait: float
    others_response: float


BucketCase = Case[BucketScenario]
BucketRuns = dict[BucketCase, list[RunResult]]
CopyCase = Case[CopyScenario]
CopyRuns = dict[CopyCase, list[CopyResult]]


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run both, and the service shares of closed-loop clients."""
    seeds = 10 if quick else 100
    loads = (0.95,) if quick else (0.8, 0.95, 1.1)
    progress(f"One client with a bucket of its own: {seeds} seeds")
    bucket_cases = [
        BucketCase(policy, BucketScenario(single, load))
        for single in (0, 1)
        for load in loads
        for policy in _BUCKET_POLICIES
    ]
    bucket_runs = over_seeds(run_case, bucket_cases, seeds, is_parallel=not quick)
    progress(f"Copies: {seeds} seeds")
    copy_cases = [
        CopyCase(policy, CopyScenario(copies, times))
        for times in _TIMES
        for policy in _COPY_POLICIES
        for copies in _COPIES
    ]
    copy_runs = over_seeds(run_copies, copy_cases, seeds, is_parallel=not quick)
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
        write_figures(out, NAME, lambda: _figures(loads, bucket_runs, copy_runs)),
    )


def run_copies(case: CopyCase, seed: int) -> CopyResult:
    """Run one case. At the top level of a module, for worker processes."""
    environment = case.scenario.environment(seed)
    (copier,) = environment.clients
    assert isinstance(copier, HedgingClient)
    requests = environment.simulate(case.policy, seed).requests
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


def share_of(policy: PolicyCase, times: int, others_keep: int) -> float:
    """Return the service share of a client with `times` as many outstanding requests as others.

    Each of the four other clients always has `others_keep` requests outstanding. Nothing is random.
    """
    model = STATED[0]
    names = [*client_names(model, _OTHER_CLIENTS), "copier"]
    app = build_app((model,), _GPUS, names)
    steps = [(ConcurrencyStep(0, others_keep * n),) for n in (*[1] * _OTHER_CLIENTS, times)]
    clients = tuple(
        LoopClients(ClosedLoop(step, 4_000 * MILLISECOND_NS, client=name), app)
        for name, step in zip(names, steps, strict=True)
    )
    return Environment(app, clients=clients).run(policy, 0).clients[-1].service_share


def _bucket_row(case: BucketCase, runs: Sequence[RunResult]) -> Row:
    scenario = case.scenario
    return {
        "single": STATED[scenario.single].name,
        "load": scenario.load,
        "policy": case.policy.label,
        **mean_columns("its wait", waits(runs, scenario.single)),
        **mean_columns("the others'", waits(runs, 1 - scenario.single)),
        "Jain (pace)": fmean(run.fairness for run in runs),
        "Jain (waits)": fmean(jain([client.mean_wait_ms for client in r.clients]) for r in runs),
    }


def _copy_row(case: CopyCase, runs: Sequence[CopyResult]) -> Row:
    return {
        "times": case.scenario.times,
        "policy": case.policy.label,
        "copies": case.scenario.copies,
        **mean_columns("its wait", [run.wait for run in runs]),
        **mean_columns("its response", [run.response for run in runs]),
        "others' wait": fmean(run.others_wait for run in runs),
        "others' response": fmean(run.others_response for run in runs),
    }


def _share_row(policy: PolicyCase, others_keep: int, shares: Sequence[float]) -> Row:
    row: Row = {
        "others keep": others_keep,
        "policy; share of one that keeps ... times as many": policy.label,
    }
    return row | {str(times): share for times, share in zip(_SHARE_TIMES, shares, strict=True)}


def _figures(
    loads: Sequence[float], bucket_runs: BucketRuns, copy_runs: CopyRuns
) -> dict[str, Figure]:
    single, copies = {}, {}
    for policy in (BALANCE, MLFQ, AFFINITY):
        runs = [bucket_runs[BucketCase(policy, BucketScenario(1, load))] for load in loads]
        for who, model in (("single", 1), ("others", 0)):
            single[f"{policy.label}: {who}"] = [mean_interval(waits(rs, model)) for rs in runs]
    for policy in (BALANCE, AFFINITY):
        both = [copy_runs[CopyCase(policy, CopyScenario(count, "exact"))] for count in _COPIES]
        copies[f"{policy.label}: copier"] = [mean_interval([r.wait for r in rs]) for rs in both]
        copies[f"{policy.label}: others"] = [
            mean_interval([r.others_wait for r in rs]) for rs in both
        ]
    return {
        "bucket": log_sweep_figure(
            loads, single, title="One BERT client and eight ResNet clients", x_label="load"
        ),
        "copies": log_sweep_figure(
            _COPIES,
            copies,
            title="One client of five sends copies, load 0.5",
            x_label="copies of each of its requests",
        ),
    }


def _bucket_checks(runs: BucketRuns) -> list[Check]:
    """Check at load 0.95, where queues are long but stable."""
    checks = []
    for index, model in enumerate(STATED):
        claim = f"single {model.name} client under mlfq: wait relative to the others"
        ratio, gap = _pooled(runs, MLFQ, index)
        checks.append(Check(claim, "thesis 6.1", "below 1", ratio, gap.high < 0))
        claim = f"single {model.name} client under balance: wait relative to the others"
        ratio, gap = _pooled(runs, BALANCE, index)
        checks.append(Check(claim, "thesis 6.1", 1, ratio, gap.low <= 0 <= gap.high))
    srtf, mlfq = (
        waits(runs[BucketCase(policy, BucketScenario(1, 0.95))], 1) for policy in (SRTF, MLFQ)
    )
    claim = "mlfq does not starve BERT: wait relative to that under srtf"
    ratio = fmean(mlfq) / fmean(srtf)
    return [*checks, Check(claim, "thesis 6.1", "below 1", ratio, is_above(srtf, mlfq))]


def _pooled(runs: BucketRuns, policy: PolicyCase, model: int) -> tuple[float, Interval]:
    """Return ratio and difference of the mean waits, single client over others, of all requests.

    The mean of per-run means would be biased by some per cent: a busy run has more requests of the
    eight clients and longer waits, so equal weights of runs separate two equal waits.
    """
    pairs = [
        (result.pipelines[model], result.pipelines[1 - model])
        for result in runs[BucketCase(policy, BucketScenario(model, 0.95))]
    ]
    single_requests = fmean(single.requests for single, _ in pairs)
    others_requests = fmean(others.requests for _, others in pairs)
    single_sum = fmean(single.mean_wait_ms * single.requests for single, _ in pairs)
    others_sum = fmean(others.mean_wait_ms * others.requests for _, others in pairs)
    wait, others_wait = single_sum / single_requests, others_sum / others_requests
    # Contribution of each run to the difference of the two quotients, to first order.
    parts = [
        wait
        - others_wait
        + (single.mean_wait_ms - wait) * single.requests / single_requests
        - (others.mean_wait_ms - others_wait) * others.requests / others_requests
        for single, others in pairs
    ]
    return wait / others_wait, mean_interval(parts)


def _copy_checks(runs: CopyRuns) -> list[Check]:
    checks = []
    for times in _TIMES:
        for policy in (ROUND_ROBIN, BALANCE):
            responses = [
                [r.response for r in runs[CopyCase(policy, CopyScenario(c, times))]]
                for c in _COPIES
            ]
            best = min(responses[1:], key=fmean)
            claim = f"{policy.label}, {times} times: response with copies over that without"
            ratio = fmean(best) / fmean(responses[0])
            pays = is_above(responses[0], best)
            checks.append(Check(claim, "thesis 6.1", "below 1", ratio, pays))
    balance, affinity = (
        [r.others_wait for r in runs[CopyCase(policy, CopyScenario(8, "exact"))]]
        for policy in (BALANCE, AFFINITY)
    )
    claim = "wait of the others with 8 copies, affinity relative to balance"
    ratio = fmean(affinity) / fmean(balance)
    shielded = is_above(balance, affinity)
    return [*checks, Check(claim, "KaaS pool's rule", "below 1", ratio, shielded)]


def _share_checks(shares: dict[tuple[PolicyCase, int], list[float]]) -> list[Check]:
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
