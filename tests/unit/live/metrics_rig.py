"""A small application and settled requests of it, for tests of metrics and traces."""

from __future__ import annotations

from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import (
    App,
    Client,
    Function,
    Pipeline,
    Pool,
    Profile,
    Slo,
    Stage,
    Tier,
    Variant,
)
from headgate.core.states import Outcome, Rejection, Settlement
from headgate.live.call import Call
from headgate.live.telemetry.metrics import GaugeSnapshot, Metrics

SLO_NS = 100 * MILLISECOND_NS
MODELS, TENANTS = ("resnet", "echo"), ("ann", "bob")
READINGS = GaugeSnapshot(
    queue_depth={"resnet": 3},
    inflight={"resnet": 5},
    replicas={("resnet", "ready"): 2},
    prediction_error_s={("resnet", "resnet-cpu"): -0.001},
    cost_usd={("resnet", "ann", "dedicated", "usage"): 0.25},
    admission_margin={"resnet": 1.5},
    events_ignored=7,
)


def small_app() -> App:
    """`resnet` with an SLO and `echo` without, for the tenants `ann` and `bob`."""
    functions = tuple(
        Function(i, name, (Variant(i, f"{name}-cpu", i, (0,), Profile((MILLISECOND_NS,))),))
        for i, name in enumerate(MODELS)
    )
    return App(
        functions,
        (
            Pipeline(0, MODELS[0], (Stage(functions[0]),), Slo(SLO_NS)),
            Pipeline(1, MODELS[1], (Stage(functions[1]),)),
        ),
        (Pool(0, "cpu", Tier.DEDICATED),),
        tuple(Client(id, name) for id, name in enumerate(TENANTS)),
    )


def ended_call(
    outcome: int,
    *,
    at_ms: int = 1_000,
    queue_ms: int = 0,
    execute_ms: int = 0,
    batch_items: int = 1,
    reason: str = "",
    priority: int = 0,
    deadline_ms: int = 0,
    model: str = "resnet",
    tenant: str = "ann",
) -> Call:
    """Return a settled request that arrived at a time; with an execution time of 0 it was never
    run.
    """
    deadline_ns = (at_ms + deadline_ms) * MILLISECOND_NS if deadline_ms else 0
    call = Call(
        MODELS.index(model),
        [],
        1,
        lambda _: None,
        client_id=TENANTS.index(tenant),
        priority=priority,
        deadline_ns=deadline_ns,
    )
    call.arrived_ns = at_ms * MILLISECOND_NS
    call.settlement = Settlement(outcome, reason)
    if execute_ms:
        call.began_ns = call.arrived_ns + queue_ms * MILLISECOND_NS
        call.ended_ns = call.began_ns + execute_ms * MILLISECOND_NS
        call.batch_items = batch_items
    return call


def full_metrics() -> Metrics:
    """Return metrics in which every family has a value; gauges are those of `READINGS`."""
    metrics = Metrics(small_app(), lambda: 1_090 * MILLISECOND_NS)
    metrics.settled(ended_call(Outcome.MET, queue_ms=20, execute_ms=30, batch_items=4))
    metrics.settled(
        ended_call(Outcome.LATE, queue_ms=60, execute_ms=30, deadline_ms=50, tenant="bob")
    )
    metrics.settled(ended_call(Outcome.REJECTED, reason=Rejection.OVERLOADED))
    metrics.settled(ended_call(Outcome.EXPIRED, priority=-3))
    metrics.settled(ended_call(Outcome.CANCELLED, model="echo", tenant="bob"))
    metrics.cold_started("resnet", 700 * MILLISECOND_NS)
    metrics.responses.count("http", 429, "rate_limited")
    metrics.responses.count("grpc", "OK", "")
    metrics.fault("policy")
    return metrics
