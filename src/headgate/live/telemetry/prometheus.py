"""Prometheus exposition. Values are in base units, and the number of label values is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from platform import python_version
from typing import Final, final

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

_HISTOGRAMS: Final[tuple[tuple[str, str, int, Callable[[ModelMetrics], Histogram]], ...]] = (
    (
        "headgate_request_duration_seconds",
        "Time from arrival to response of requests that were answered, in time or late.",
        SECOND_NS,
        lambda model: model.request,
    ),
    (
        "headgate_queue_duration_seconds",
        "Time from arrival to the start of execution of requests that were run.",
        SECOND_NS,
        lambda model: model.queue,
    ),
    (
        "headgate_execute_duration_seconds",
        "Execution time of the batch that a request was in.",
        SECOND_NS,
        lambda model: model.execute,
    ),
    (
        "headgate_deadline_slack_seconds",
        "Time left until the deadline when a request was answered; negative if it was late.",
        SECOND_NS,
        lambda model: model.slack,
    ),
    (
        "headgate_batch_size",
        "Items in the batch that a request was in, counted once per request.",
        1,
        lambda model: model.batch,
    ),
)


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
        yield InfoMetricFamily(
            "headgate_build",
            "Versions of Headgate and Python.",
            {"version": __version__, "python": python_version()},
        )
        yield self._requests()
        yield self._responses()
        yield self._rejections()
        yield self._faults()
        yield from self._objectives()
        yield from self._histograms()
        yield from self._cold_starts()
        yield from self._gauges()

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "headgate_requests",
            "Requests that have ended, by outcome.",
            labels=("model", "tier", "class", "outcome"),
        )
        # Including counters that are still zero, because a rate needs an initial value.
        counts = Counter[tuple[str, ...]]()
        for model in self._metrics.models:
            for outcome_name in OUTCOME_NAMES:
                counts[model.name, model.tier, CLASS_NAMES[1], outcome_name] = 0
        for count, model, _, _, priority_class, outcome in self._metrics.counted():
            counts[model.name, model.tier, priority_class, OUTCOME_NAMES[outcome]] += count
        return _filled(family, counts.items())

    def _responses(self) -> Metric:
        family = CounterMetricFamily(
            "headgate_responses",
            "Responses of the front ends, by protocol, status and reason; 499: client gone.",
            labels=("protocol", "code", "reason"),
        )
        return _filled(family, self._metrics.responses.counted())

    def _faults(self) -> Metric:
        family = CounterMetricFamily(
            "headgate_internal_errors",
            "Defects of the server or of a policy that serving has survived, by kind.",
            labels=("kind",),
        )
        return _filled(family, (((kind,), count) for kind, count in self._metrics.faults.items()))

    def _rejections(self) -> Metric:
        family = CounterMetricFamily(
            "headgate_admission_rejections",
            "Requests rejected at admission, by reason.",
            labels=("model", "reason"),
        )
        counts = Counter[tuple[str, ...]]()
        for model in self._metrics.models:
            for reason in REJECTIONS:
                counts[model.name, reason] = 0
        for count, model, _, reason, _, outcome in self._metrics.counted():
            if outcome == Outcome.REJECTED:
                counts[model.name, reason] += count
        return _filled(family, counts.items())

    def _objectives(self) -> Iterator[Metric]:
        attained = Counter[tuple[str, ...]]()
        missed = Counter[tuple[str, ...]]()
        for count, model, tenant, _, _, outcome in self._metrics.counted():
            if outcome != Outcome.CANCELLED:
                # Both counters exist from the first request, because a ratio needs both.
                attained[model.name, tenant] += count if outcome == Outcome.MET else 0
                missed[model.name, tenant] += count if outcome != Outcome.MET else 0
        for name, help_text, counts in (
            ("attained", "Requests answered by their deadline.", attained),
            (
                "missed",
                "Requests that were late, rejected, expired or failed; not cancelled ones.",
                missed,
            ),
        ):
            family = CounterMetricFamily(
                f"headgate_slo_{name}", help_text, labels=("model", "tenant")
            )
            yield _filled(family, counts.items())
        gauge = GaugeMetricFamily("headgate_slo_seconds", "Latency SLO.", labels=("model",))
        for model in self._metrics.models:
            if model.slo_ns != NEVER_NS:
                gauge.add_metric((model.name,), model.slo_ns / SECOND_NS)
        yield gauge

    def _histograms(self) -> Iterator[Metric]:
        for name, help_text, unit, of in _HISTOGRAMS:
            family = HistogramMetricFamily(name, help_text, labels=("model",))
            for model in self._metrics.models:
                _add_histogram(family, model.name, of(model), unit)
            yield family

    def _cold_starts(self) -> Iterator[Metric]:
        labels = ("function",)
        count = CounterMetricFamily(
            "headgate_cold_starts", "Cold starts of instances.", labels=labels
        )
        duration = HistogramMetricFamily(
            "headgate_cold_start_duration_seconds",
            "Duration of cold starts.",
            labels=labels,
        )
        for function, histogram in self._metrics.starts.items():
            count.add_metric((function,), int(histogram.counts.sum()))
            _add_histogram(duration, function, histogram, SECOND_NS)
        yield count
        yield duration

    def _gauges(self) -> Iterator[Metric]:
        now_ns = self._metrics.now_ns()
        gauges = self._read_gauges()
        arrival_rps = {model.name: model.arrival_rps(now_ns) for model in self._metrics.models}
        for name, help_text, label, values in (
            ("queue_depth", "Requests waiting in queues.", "model", gauges.queue_depth),
            ("inflight", "Requests accepted and not yet settled.", "model", gauges.inflight),
            ("arrival_rps", "Arrivals per second, mean of the last 10 s.", "model", arrival_rps),
            (
                "prediction_error_seconds",
                "Recent mean of execution time minus predicted time of batches.",
                "function",
                gauges.prediction_error_s,
            ),
        ):
            gauge = GaugeMetricFamily(f"headgate_{name}", help_text, labels=(label,))
            yield _filled(gauge, (((key,), value) for key, value in values.items()))
        replicas = GaugeMetricFamily(
            "headgate_replicas", "Instances, by state.", labels=("function", "state")
        )
        yield _filled(replicas, gauges.replicas.items())
        cost = CounterMetricFamily(
            "headgate_cost_usd",
            "Cost, by basis: usage, idle time of nodes, or instances kept warm.",
            labels=("model", "tenant", "tier", "basis"),
        )
        yield _filled(cost, gauges.cost_usd.items())
        if gauges.faas_pools:
            yield from _faas_pool_families(gauges.faas_pools)


def _faas_pool_families(pools: Mapping[str, FaasPoolGauges]) -> Iterator[Metric]:
    for name, help_text, values in (
        (
            "breaker_state",
            "State of the circuit breaker of a pay-per-call pool: 0 closed, 1 open, 2 half-open.",
            {pool: pool_gauges.breaker for pool, pool_gauges in pools.items()},
        ),
        (
            "open",
            "Whether the pool can take a call now: breaker, back-off and budgets allow it.",
            {pool: int(not pool_gauges.blocked_by) for pool, pool_gauges in pools.items()},
        ),
        (
            "inflight",
            "Calls in flight to the pool.",
            {pool: s.in_flight for pool, s in pools.items()},
        ),
    ):
        gauge = GaugeMetricFamily(f"headgate_spill_{name}", help_text, labels=("pool",))
        yield _filled(gauge, (((pool,), value) for pool, value in values.items()))
    closed = GaugeMetricFamily(
        "headgate_spill_closed",
        "Whether this reason blocks calls to the pool now.",
        labels=("pool", "reason"),
    )
    spent = CounterMetricFamily(
        "headgate_spill_spent_usd",
        "Spending that counts against the budgets: calls, and instances kept warm.",
        labels=("pool",),
    )
    calls = CounterMetricFamily(
        "headgate_spill_calls",
        "Calls to the pool that have ended, by outcome.",
        labels=("pool", "outcome"),
    )
    pings = CounterMetricFamily(
        "headgate_spill_pings",
        "Calls to the pool that only kept an instance warm.",
        labels=("pool",),
    )
    for pool, pool_gauges in pools.items():
        for reason in CALL_BLOCKS:
            closed.add_metric((pool, reason), int(pool_gauges.blocked_by == reason))
        spent.add_metric((pool,), pool_gauges.spent_usd)
        pings.add_metric((pool,), pool_gauges.pings)
        for outcome, count in pool_gauges.calls.items():
            calls.add_metric((pool, outcome), count)
    yield closed
    yield spent
    yield calls
    yield pings


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily,
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _add_histogram(
    family: HistogramMetricFamily, label: str, histogram: Histogram, unit: int
) -> None:
    buckets = [
        ("+Inf" if bound == inf else repr(bound), float(count))
        for bound, count in histogram.cumulative(unit=unit)
    ]
    family.add_metric((label,), buckets, histogram.total / unit)
