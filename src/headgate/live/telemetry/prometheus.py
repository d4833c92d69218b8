"""Prometheus exposition. Values are in base units, and the number of label values is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from platform import python_version
from typing import Final, TypeAlias, final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from headgate import __version__
from headgate.core.circuit_breaker import CALL_BLOCKS
from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.live.call import FUNCTION_REFUSED
from headgate.live.telemetry.metrics import (
    CLASS_NAMES,
    REJECTIONS,
    FaasPoolGauges,
    GaugeSnapshot,
    Histogram,
    Metrics,
    ModelMetrics,
)

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# By name: help text, unit, and the attribute of `ModelMetrics`.
_HISTOGRAMS: Final[Mapping[str, tuple[str, int, str]]] = {
    "request_duration_seconds": (
        "Time from arrival to response of requests that were answered, in time or late.",
        SECOND_NS,
        "request",
    ),
    "queue_duration_seconds": (
        "Time from arrival to the start of execution of requests that were run.",
        SECOND_NS,
        "queue",
    ),
    "execute_duration_seconds": (
        "Execution time of the batch that a request was in.",
        SECOND_NS,
        "execute",
    ),
    "deadline_slack_seconds": (
        "Time left until the deadline when a request was answered; negative if it was late.",
        SECOND_NS,
        "slack",
    ),
    "batch_size": (
        "Items in the batch that a request was in, counted once per request.",
        1,
        "batch",
    ),
}
_Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]  # by label values


@final
class Exposition:
    """Writes the metrics in a Prometheus format."""

    def __init__(
        self, metrics: Metrics, read_gauges: Callable[[], GaugeSnapshot] = GaugeSnapshot
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(metrics, read_gauges))
        ProcessCollector(registry=self._registry)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its media type: OpenMetrics if the scraper accepts it."""
        if wants_open_metrics(accept):
            text: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return text, OPEN_METRICS
        return generate_latest(self._registry), TEXT


def wants_open_metrics(accept: str) -> bool:
    """Whether an `Accept` header prefers OpenMetrics over plain text.

    >>> wants_open_metrics("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3")
    True
    >>> wants_open_metrics("text/plain, application/openmetrics-text;q=0.1")
    False
    >>> wants_open_metrics("*/*")
    False
    """
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        media_type, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if media_type in weights:
            weights[media_type] = max(weights[media_type], _weight(parameters))
    return weights["application/openmetrics-text"] > 0 and (
        weights["application/openmetrics-text"] >= weights["text/plain"]
    )


def _weight(parameters: list[str]) -> float:
    """Return the `q` of a media type; 0 if the client sent an invalid one."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


@final
class _Families(Collector):
    def __init__(self, metrics: Metrics, read_gauges: Callable[[], GaugeSnapshot]) -> None:
        self._metrics = metrics
        self._read_gauges = read_gauges

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise the registry would collect once to learn the names

    def collect(self) -> Iterator[Metric]:
        self._metrics.fold()
        versions = {"version": __version__, "python": python_version()}
        yield InfoMetricFamily("headgate_build", "Versions of Headgate and Python.", versions)
        yield from self._counters()
        yield from self._objectives()
        for name, (help_text, unit, attribute) in _HISTOGRAMS.items():
            histograms = {model.name: getattr(model, attribute) for model in self._metrics.models}
            yield _histogram(name, help_text, "model", histograms, unit)
        starts = self._metrics.starts
        counts = {function: float(each.counts.sum()) for function, each in starts.items()}
        yield _counter("cold_starts", "Cold starts of instances.", "function", _labelled(counts))
        help_text = "Duration of cold starts."
        yield _histogram("cold_start_duration_seconds", help_text, "function", starts, SECOND_NS)
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        # Including counters that are still zero, because a rate needs an initial value.
        models = self._metrics.models
        requests = Counter[tuple[str, ...]](
            {(m.name, m.tier, CLASS_NAMES[1], name): 0 for m in models for name in OUTCOME_NAMES}
        )
        rejections = Counter[tuple[str, ...]](dict.fromkeys(_rejection_labels(models), 0))
        for count, model, _, reason, priority_class, outcome in self._metrics.counted():
            requests[model.name, model.tier, priority_class, OUTCOME_NAMES[outcome]] += count
            if outcome == Outcome.REJECTED:
                rejections[model.name, reason] += count
        yield _counter(
            "requests",
            "Requests that have ended, by outcome.",
            "model tier class outcome",
            requests.items(),
        )
        yield _counter(
            "responses",
            "Responses of the front ends, by protocol, status and reason; 499: client gone.",
            "protocol code reason",
            self._metrics.responses.counted(),
        )
        yield _counter(
            "admission_rejections",
            "Requests rejected at admission, by reason.",
            "model reason",
            rejections.items(),
        )
        would_reject = Counter[tuple[str, ...]](dict.fromkeys(_rejection_labels(models), 0))
        would_reject.update(dict(self._metrics.would_reject_counted()))
        yield _counter(
            "admission_would_reject",
            "Requests that would be rejected at admission if it were enforced, by reason.",
            "model reason",
            would_reject.items(),
        )
        yield _counter(
            "internal_errors",
            "Defects of the server or of a policy that serving has survived, by kind.",
            "kind",
            _labelled(self._metrics.faults),
        )

    def _objectives(self) -> Iterator[Metric]:
        attained = Counter[tuple[str, ...]]()
        missed = Counter[tuple[str, ...]]()
        admitted = Counter[tuple[str, ...]]()
        for count, model, tenant, reason, _, outcome in self._metrics.counted():
            if outcome != Outcome.CANCELLED:
                # Both counters exist from the first request, because a ratio needs both.
                attained[model.name, tenant] += count if outcome == Outcome.MET else 0
                missed[model.name, tenant] += count if outcome != Outcome.MET else 0
                # What `decode` refuses is the client's error, and breaks no promise.
                has_promise = outcome != Outcome.REJECTED and reason != FUNCTION_REFUSED
                admitted[model.name, tenant] += count if has_promise else 0
        labels = "model tenant"
        help_text = "Requests answered by their deadline."
        yield _counter("slo_attained", help_text, labels, attained.items())
        help_text = "Requests that were late, rejected, expired or failed; not cancelled ones."
        yield _counter("slo_missed", help_text, labels, missed.items())
        help_text = "Requests that were admitted and have ended; not cancelled or invalid ones."
        yield _counter("admitted", help_text, labels, admitted.items())
        help_text = "Requests that were admitted and answered by their deadline."
        yield _counter("admitted_kept", help_text, labels, attained.items())
        slos_ns = {model.name: model.slo_ns for model in self._metrics.models}
        known = {name: slo_ns / SECOND_NS for name, slo_ns in slos_ns.items() if slo_ns != NEVER_NS}
        yield _gauge("slo_seconds", "Latency SLO.", "model", _labelled(known))

    def _gauges(self) -> Iterator[Metric]:
        now_ns = self._metrics.now_ns()
        gauges = self._read_gauges()
        arrival_rps = {model.name: model.arrival_rps(now_ns) for model in self._metrics.models}
        margin = "Safety margin of the admission test, in the policy's own unit."
        for name, help_text, label, values in (
            ("queue_depth", "Requests waiting in queues.", "model", gauges.queue_depth),
            ("inflight", "Requests accepted and not yet settled.", "model", gauges.inflight),
            ("arrival_rps", "Arrivals per second, mean of the last 10 s.", "model", arrival_rps),
            ("admission_margin", margin, "model", gauges.admission_margin),
        ):
            yield _gauge(name, help_text, label, _labelled(values))
        help_text = "Recent mean of execution time minus predicted time of batches."
        errors = gauges.prediction_error_s.items()
        yield _gauge("prediction_error_seconds", help_text, "function variant", errors)
        help_text = "Outputs of stages that stay in the memory of workers for the next stage."
        yield _gauge("stage_output_bytes", help_text, "", [((), gauges.stage_output_bytes)])
        help_text = "Events without effect: they crossed others or came twice."
        yield _counter("events_ignored", help_text, "", [((), gauges.events_ignored)])
        labels = "function state"
        yield _gauge("replicas", "Instances, by state.", labels, gauges.replicas.items())
        yield _counter(
            "cost_usd",
            "Cost, by basis: usage, idle time of nodes, or instances kept warm.",
            "model tenant tier basis",
            gauges.cost_usd.items(),
        )
        if gauges.faas_pools:
            yield from _faas_pool_families(gauges.faas_pools)


def _faas_pool_families(pools: Mapping[str, FaasPoolGauges]) -> Iterator[Metric]:
    yield _gauge(
        "faas_breaker_state",
        "State of the circuit breaker of a pay-per-call pool: 0 closed, 1 open, 2 half-open.",
        "pool",
        (((name,), pool.breaker) for name, pool in pools.items()),
    )
    yield _gauge(
        "faas_calls_allowed",
        "Whether the pool can take a call now: breaker, back-off and budgets allow it.",
        "pool",
        (((name,), not pool.blocked_by) for name, pool in pools.items()),
    )
    yield _gauge(
        "faas_inflight",
        "Calls in flight to the pool.",
        "pool",
        (((name,), pool.in_flight) for name, pool in pools.items()),
    )
    yield _gauge(
        "faas_calls_blocked",
        "Whether this reason blocks calls to the pool now.",
        "pool reason",
        (
            ((name, reason), pool.blocked_by == reason)
            for name, pool in pools.items()
            for reason in CALL_BLOCKS
        ),
    )
    yield _counter(
        "faas_spent_usd",
        "Spending that counts against the budgets: calls, and instances kept warm.",
        "pool",
        (((name,), pool.spent_usd) for name, pool in pools.items()),
    )
    yield _counter(
        "faas_calls",
        "Calls to the pool that have ended, by outcome.",
        "pool outcome",
        (
            ((name, *call), count)
            for name, pool in pools.items()
            for call, count in _labelled(pool.calls)
        ),
    )
    yield _counter(
        "faas_pings",
        "Calls to the pool that only kept an instance warm.",
        "pool",
        (((name,), pool.pings) for name, pool in pools.items()),
    )


def _rejection_labels(models: Iterable[ModelMetrics]) -> list[tuple[str, ...]]:
    return [(model.name, reason) for model in models for reason in REJECTIONS]


def _labelled(values: Mapping[str, float]) -> _Values:
    return (((label,), value) for label, value in values.items())


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    labels: str,  # separated by spaces
    values: _Values,
) -> Metric:
    family = kind(f"headgate_{name}", help_text, labels=labels.split())
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


_counter: Final = partial(_family, CounterMetricFamily)
_gauge: Final = partial(_family, GaugeMetricFamily)


def _histogram(
    name: str, help_text: str, label: str, histograms: Mapping[str, Histogram], unit: int
) -> Metric:
    family = HistogramMetricFamily(f"headgate_{name}", help_text, labels=(label,))
    for value, histogram in histograms.items():
        buckets = [
            ("+Inf" if bound == inf else repr(bound), float(count))
            for bound, count in histogram.cumulative(unit=unit)
        ]
        family.add_metric((value,), buckets, histogram.total / unit)
    return family
