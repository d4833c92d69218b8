"""The Prometheus exposition, parsed by the official parsers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from metrics_rig import READINGS, SLO_NS, ended_call, full_metrics, small_app
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from headgate.core.states import Outcome
from headgate.live.telemetry.metrics import Metrics
from headgate.live.telemetry.prometheus import Exposition

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(metrics: Metrics, accept: str = "") -> Samples:
    text, media_type = Exposition(metrics, lambda: READINGS).text(accept)
    is_open = "openmetrics" in media_type
    assert is_open == bool(accept)
    parse = parse_open if is_open else parse_text
    families: Iterable[Metric] = parse(text.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return a sample. `class` is a keyword of Python: it is written `class_`."""
    wanted = {key.rstrip("_"): label for key, label in labels.items()}
    return samples[name, frozenset(wanted.items())]


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_requests_by_label(accept: str) -> None:
    got = scraped(full_metrics(), accept)

    def requests(class_: str, outcome: str, model: str = "resnet") -> float:
        labels = {"model": model, "tier": "dedicated", "class": class_, "outcome": outcome}
        return value(got, "headgate_requests_total", **labels)

    assert [requests("default", o) for o in ("met", "late", "rejected", "expired")] == [1, 1, 1, 0]
    assert requests("urgent", "expired") == 1
    assert requests("default", "cancelled", "echo") == 1
    rejections = "headgate_admission_rejections_total"
    assert value(got, rejections, model="resnet", reason="overloaded") == 1
    assert value(got, rejections, model="echo", reason="infeasible") == 0
    assert value(got, "headgate_slo_attained_total", model="resnet", tenant="ann") == 1
    assert value(got, "headgate_slo_missed_total", model="resnet", tenant="ann") == 2
    assert value(got, "headgate_slo_attained_total", model="resnet", tenant="bob") == 0
    assert ("headgate_slo_missed_total", frozenset({("model", "echo"), ("tenant", "bob")})) not in (
        got
    ), "a cancelled request is nobody's miss"


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_times_are_in_seconds_and_the_slo_is_a_bound(accept: str) -> None:
    """Both were answered after 90 ms.

    One had 100 ms, with 10 left; the other 50, and was 40 late.
    """
    got = scraped(full_metrics(), accept)

    def buckets(metric: str, *bounds: str) -> list[float]:
        name = f"headgate_{metric}_bucket"
        return [value(got, name, model="resnet", le=bound) for bound in bounds]

    assert buckets("request_duration_seconds", "0.08", "0.09", "0.1", "+Inf") == [0, 2, 2, 2]
    assert value(got, "headgate_request_duration_seconds_sum", model="resnet") == 0.18
    assert buckets("queue_duration_seconds", "0.01", "0.02", "0.06") == [0, 1, 2]
    assert buckets("execute_duration_seconds", "0.02", "0.03") == [0, 2]
    assert buckets("deadline_slack_seconds", "-0.05", "-0.025", "0.005", "0.01") == [0, 1, 1, 2]
    assert buckets("batch_size", "1.0", "3.0", "4.0") == [1, 1, 2]
    assert value(got, "headgate_slo_seconds", model="resnet") == SLO_NS / 1e9


def test_gauges_and_other_families() -> None:
    got = scraped(full_metrics(), OPEN_METRICS)
    assert value(got, "headgate_queue_depth", model="resnet") == 3
    assert value(got, "headgate_inflight", model="resnet") == 5
    assert value(got, "headgate_replicas", function="resnet", state="ready") == 2
    error = {"function": "resnet", "variant": "resnet-cpu"}
    assert value(got, "headgate_prediction_error_seconds", **error) == -0.001
    cost = {"model": "resnet", "tenant": "ann", "tier": "dedicated", "basis": "usage"}
    assert value(got, "headgate_cost_usd_total", **cost) == 0.25
    assert value(got, "headgate_admission_margin", model="resnet") == 1.5
    assert value(got, "headgate_events_ignored_total") == 7
    assert value(got, "headgate_cold_starts_total", function="resnet") == 1
    starts = "headgate_cold_start_duration_seconds_bucket"
    assert [value(got, starts, function="resnet", le=le) for le in ("0.5", "1.0")] == [0, 1]
    assert any(name == "headgate_build_info" for name, _ in got)
    assert any(name == "process_resident_memory_bytes" for name, _ in got)


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_promises(accept: str) -> None:
    """Of ann's requests one was met, one expired and one was rejected; bob's was late."""
    metrics = full_metrics()
    for reason in ("overloaded", "overloaded", "a reason of the policy's own"):
        metrics.would_reject(ended_call(Outcome.MET), reason)
    got = scraped(metrics, accept)
    names = ("headgate_admitted_total", "headgate_admitted_kept_total")
    assert [value(got, name, model="resnet", tenant="ann") for name in names] == [2, 1]
    assert [value(got, name, model="resnet", tenant="bob") for name in names] == [1, 0]
    would_reject = "headgate_admission_would_reject_total"
    assert value(got, would_reject, model="resnet", reason="overloaded") == 2
    assert value(got, would_reject, model="resnet", reason="a reason of the policy's own") == 1
    assert value(got, would_reject, model="echo", reason="overloaded") == 0
    assert value(got, "headgate_admission_rejections_total", model="echo", reason="infeasible") == 0


@pytest.mark.parametrize(
    ("status", "expected"), [(400, [1, 1]), (500, [2, 1])], ids=["decode", "predict"]
)
def test_what_decode_refuses_breaks_no_promise(status: int, expected: list[int]) -> None:
    """Otherwise any client could set off an alert on the promises that are kept."""
    metrics = Metrics(small_app())
    metrics.settled(ended_call(Outcome.MET))
    failed = ended_call(Outcome.FAILED, execute_ms=1)
    failed.error, failed.status = "two columns, please", status
    metrics.settled(failed)
    got = scraped(metrics)
    names = ("headgate_admitted_total", "headgate_admitted_kept_total")
    assert [value(got, name, model="resnet", tenant="ann") for name in names] == expected
    labels = {"model": "resnet", "tier": "dedicated", "class": "default", "outcome": "failed"}
    assert value(got, "headgate_requests_total", **labels) == 1


def test_idle_gateway_exposes_zeros() -> None:
    """A rate over a counter that appears only with its first event misses that event."""
    got = scraped(Metrics(small_app()))
    met = {"model": "echo", "tier": "dedicated", "class": "default", "outcome": "met"}
    assert value(got, "headgate_requests_total", **met) == 0
    assert all(math.isfinite(each) for each in got.values())


def test_hostile_names_are_escaped() -> None:
    """Names come from users: quotes, newlines and backslashes are escaped."""
    metrics = Metrics(small_app())
    reason = 'say "no"\n\\'
    metrics.settled(ended_call(Outcome.REJECTED, reason=reason))
    name = "headgate_admission_rejections_total"
    assert value(scraped(metrics), name, model="resnet", reason=reason) == 1
    assert value(scraped(metrics, OPEN_METRICS), name, model="resnet", reason=reason) == 1


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_responses_by_protocol_status_and_reason(accept: str) -> None:
    metrics = full_metrics()
    for _ in range(2):
        metrics.responses.count("http", 413, "too_large")
    for number in range(100):  # made-up reasons create no time series
        metrics.responses.count("http", 500, f"made up {number}")
        metrics.fault(f"kind {number}")
    got = scraped(metrics, accept)

    def answers(protocol: str, code: str, reason: str) -> float:
        labels = {"protocol": protocol, "code": code, "reason": reason}
        return value(got, "headgate_responses_total", **labels)

    assert answers("http", "429", "rate_limited") == 1
    assert answers("http", "413", "too_large") == 2
    assert answers("http", "500", "other") == 100
    assert answers("http", "200", "") == 0
    assert answers("grpc", "OK", "") == 1
    kinds = [labels for name, labels in got if name == "headgate_internal_errors_total"]
    assert len(kinds) == 65 and value(got, "headgate_internal_errors_total", kind="policy") == 1
    assert value(got, "headgate_internal_errors_total", kind="other") == 37


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=\x00\xff",
        "application/openmetrics-text;q=many",
        ",;=,application/openmetrics-text;q=-1;;",
        "text/plain;q=nan" * 100,
    ],
)
def test_invalid_accept_header(accept: str) -> None:
    text, media_type = Exposition(Metrics(small_app())).text(accept)
    assert text and media_type in (
        "text/plain; version=0.0.4; charset=utf-8",
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
    )
