"""Cost of counting a settled request, compared with the counters of prometheus_client.

Both record the same requests: their outcome by model, tenant and class, the objectives that were
attained or missed, and five histograms by model. The peer is tuned as well as our recorder: no
label is looked up per request, because the children of its metrics are kept by pipeline id, client
id and outcome. Rounds alternate, and only ratios within a round count, because machines are noisy.
Our recorder sums its rows within the measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from random import Random
from statistics import median
from time import perf_counter_ns

from prometheus_client import CollectorRegistry, Counter, Histogram

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.model import App, Client, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import OUTCOME_NAMES, Outcome, Rejection, Settlement
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.live.call import Call
from headgate.live.telemetry.metrics import (
    BATCH_BOUNDS,
    CLASS_NAMES,
    Metrics,
    latency_bounds_ns,
    slack_bounds_ns,
)

NAME = "metrics"
TITLE = "counting a settled request, compared with prometheus_client"

ROUNDS = 7
REQUESTS = 20_000
RATIO_MIN = 3.0  # the recorder is worth its code if the peer takes this many times as long
SLO_NS = 100 * MILLISECOND_NS
MODELS, TENANTS = 4, 8
_OUTCOMES = (Outcome.MET,) * 16 + (Outcome.LATE, Outcome.REJECTED, Outcome.REJECTED, Outcome.FAILED)


def run(*, progress: Progress) -> Result:
    """Alternate rounds of both recorders over the same requests."""
    app, calls = make_app(), make_calls(REQUESTS)
    ours_us: list[float] = []
    peer_us: list[float] = []
    counts: list[int] = []
    for number in range(ROUNDS):
        progress(f"round {number + 1} of {ROUNDS}")
        metrics, peer = Metrics(app), PrometheusRecorder(app)
        ours_us.append(_us_per_call(metrics.settled, calls, metrics.fold))
        peer_us.append(_us_per_call(peer.settled, calls))
        counts = [sum(row[0] for row in metrics.counted()), peer.count()]
    ratio = round(median(p / o for o, p in zip(ours_us, peer_us, strict=True)), 2)
    rows: list[Row] = [
        {"recorder": "headgate", "us_per_request": round(median(ours_us), 3)},
        {"recorder": "prometheus_client", "us_per_request": round(median(peer_us), 3)},
    ]
    is_worth_it = f"prometheus_client takes at least {RATIO_MIN:g} times as long"
    checks = [
        Check("both count every request", NAME, f"{REQUESTS:,}", f"{counts}", len({*counts}) == 1),
        Check(is_worth_it, NAME, f">= {RATIO_MIN:g}x", f"{ratio}x", ratio >= RATIO_MIN),
    ]
    return Result(NAME, rows, checks)


class PrometheusRecorder:
    """What `Metrics.settled` counts, in metrics of prometheus_client."""

    def __init__(self, app: App) -> None:
        registry = CollectorRegistry()
        requests = Counter("requests", "-", ("model", "class", "outcome"), registry=registry)
        rejections = Counter("rejections", "-", ("model", "reason"), registry=registry)
        attained = Counter("attained", "-", ("model", "tenant"), registry=registry)
        missed = Counter("missed", "-", ("model", "tenant"), registry=registry)
        models = [pipeline.name for pipeline in app.pipelines]
        self._requests = {
            (pipeline_id, class_id, outcome): requests.labels(model, class_name, outcome_name)
            for pipeline_id, model in enumerate(models)
            for class_id, class_name in enumerate(CLASS_NAMES)
            for outcome, outcome_name in enumerate(OUTCOME_NAMES)
        }
        self._rejections = {
            (pipeline_id, Rejection.OVERLOADED): rejections.labels(model, Rejection.OVERLOADED)
            for pipeline_id, model in enumerate(models)
        }
        self._attained, self._missed = (
            {
                (pipeline_id, client.id): counter.labels(model, client.name)
                for (pipeline_id, model), client in product(enumerate(models), app.clients)
            }
            for counter in (attained, missed)
        )

        def histograms(name: str, bounds: Iterable[float]) -> list[Histogram]:
            family = Histogram(name, "-", ("model",), registry=registry, buckets=list(bounds))
            return [family.labels(model) for model in models]

        latencies_s = [bound / SECOND_NS for bound in latency_bounds_ns(SLO_NS)]
        self._latency = histograms("latency", latencies_s)
        self._queue = histograms("queue", latencies_s)
        self._execute = histograms("execute", latencies_s)
        self._slack = histograms("slack", (bound / SECOND_NS for bound in slack_bounds_ns(SLO_NS)))
        self._batch = histograms("batch", BATCH_BOUNDS)

    def settled(self, call: Call) -> None:
        """Count a settled request."""
        settlement = call.settlement
        assert settlement is not None
        now_ns = perf_counter_ns()
        model, outcome, priority = call.pipeline_id, settlement.outcome, call.priority
        priority_class = 1 if priority == 0 else 0 if priority < 0 else 2
        self._requests[model, priority_class, outcome].inc()
        objective = self._attained if outcome == Outcome.MET else self._missed
        objective[model, call.client_id].inc()
        if outcome == Outcome.REJECTED:
            self._rejections[model, settlement.reason].inc()
        if outcome <= Outcome.LATE:
            self._latency[model].observe((now_ns - call.arrived_ns) / SECOND_NS)
            self._slack[model].observe((call.arrived_ns + SLO_NS - now_ns) / SECOND_NS)
        if call.began_ns:
            self._queue[model].observe((call.began_ns - call.arrived_ns) / SECOND_NS)
            self._execute[model].observe((call.ended_ns - call.began_ns) / SECOND_NS)
            self._batch[model].observe(call.batch_items)

    def count(self) -> int:
        """Return the requests counted so far."""
        return sum(
            int(sample.value)
            for child in self._requests.values()
            for metric in child.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )


def make_app() -> App:
    """Return an application with `MODELS` pipelines of one stage, and `TENANTS` clients."""
    functions = tuple(
        Function(i, f"model{i}", (Variant(i, f"model{i}", i, (0,), Profile((MILLISECOND_NS,))),))
        for i in range(MODELS)
    )
    pipelines = tuple(Pipeline(f.id, f.name, (Stage(f),), Slo(SLO_NS)) for f in functions)
    clients = tuple(Client(i, f"tenant{i}") for i in range(TENANTS))
    return App(functions, pipelines, (Pool(0, "cpu"),), clients)


def make_calls(count: int) -> list[Call]:
    """Return settled requests, most of which met their objective."""
    rng = Random(0)
    calls: list[Call] = []
    for _ in range(count):
        outcome = rng.choice(_OUTCOMES)
        priority = rng.choice((0, 0, 0, 1, -1))
        call = Call(
            rng.randrange(MODELS),
            [],
            1,
            lambda call: None,
            client_id=rng.randrange(TENANTS),
            priority=priority,
        )
        call.arrived_ns = perf_counter_ns() - rng.randrange(2 * SLO_NS)
        reason = Rejection.OVERLOADED if outcome == Outcome.REJECTED else ""
        call.settlement = Settlement(outcome, reason)
        if outcome != Outcome.REJECTED:
            call.began_ns = call.arrived_ns + rng.randrange(SLO_NS)
            call.ended_ns = call.began_ns + rng.randrange(SLO_NS)
            call.batch_items = rng.randint(1, 32)
        calls.append(call)
    return calls


def _us_per_call(
    settled: Callable[[Call], None],
    calls: Sequence[Call],
    finish: Callable[[], None] = lambda: None,
) -> float:
    began_ns = perf_counter_ns()
    for call in calls:
        settled(call)
    finish()
    return (perf_counter_ns() - began_ns) / 1_000 / len(calls)
