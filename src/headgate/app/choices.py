"""Policy, workload and simulation: the choices of an application file beside its records."""

from __future__ import annotations

from math import sqrt
from typing import Any

from headgate.app.entry import Entry
from headgate.app.loaded import PolicyChoice, SimulationChoice, StreamChoice, WorkloadChoice
from headgate.app.names import unknown
from headgate.app.spec import SimulationSpec, TruthSpec, WorkloadSpec
from headgate.core.errors import ConfigError
from headgate.core.model import App


def choose_policy(spec: str | dict[str, Any], where: str) -> PolicyChoice:
    """Return the policy's name and its settings, which are not looked at here."""
    if isinstance(spec, str):
        return PolicyChoice(spec, {})
    name = spec.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            "is not a name",
            where=where,
            key="policy.name",
            value=name,
            allowed="the name of a policy, such as headgate",
        )
    return PolicyChoice(name, {key: value for key, value in spec.items() if key != "name"})


def choose_workload(spec: WorkloadSpec, app: App, where: str) -> WorkloadChoice:
    """Return the streams of arrivals, bound to their pipelines and clients."""
    pipelines = {pipeline.name: pipeline for pipeline in app.pipelines}
    clients = {client.name: client for client in app.clients}
    streams: list[StreamChoice] = []
    for index, body in enumerate(spec.arrivals):
        entry = Entry(body, where, f"workload.arrivals[{index}]")
        pipeline = pipelines[entry.one_of("pipeline", "pipeline", pipelines)]
        if body.client is None:
            client = app.clients[0]
        else:
            client = clients[entry.one_of("client", "client", clients)]
        streams.append(StreamChoice(pipeline, client, body.spec))
    duration_ns = Entry(spec, where, "workload").positive_ns("duration")
    return WorkloadChoice(duration_ns, tuple(streams))


def choose_simulation(spec: SimulationSpec, app: App, where: str) -> SimulationChoice:
    """Return the truth and the overheads."""
    truth = Entry(spec.truth, where, "simulation.truth")
    overheads = Entry(spec.overheads, where, "simulation.overheads")
    _check_cv(truth)
    names = [function.name for function in app.functions]
    scale, observed = spec.truth.scale, spec.truth.observed
    for key, named in (("scale", scale), ("observed", observed)):
        for name in named:
            if name not in names:
                raise unknown("function", name, names, where=where, key=truth.path(key))
    if (spec.truth.distribution == "observed") != bool(observed):
        verb = "means nothing to" if observed else "is needed by"
        raise truth.error("observed", f"{verb} the distribution {spec.truth.distribution}")
    return SimulationChoice(
        distribution=spec.truth.distribution,
        cv=spec.truth.cv,
        scale=tuple(scale.get(name, 1.0) for name in names),
        observed=tuple(observed.get(name, (1.0,)) for name in names) if observed else (),
        decision_ns=overheads.duration_ns("decision"),
        per_work_unit_ns=overheads.duration_ns("per_work_unit"),
        request_ns=overheads.duration_ns("request"),
    )


def _check_cv(entry: Entry[TruthSpec]) -> None:
    distribution, cv = entry.spec.distribution, entry.spec.cv
    if distribution in ("exact", "exponential", "observed"):
        if cv != 0:
            raise entry.error("cv", f"means nothing to {distribution}", allowed="0")
    elif cv == 0:
        raise entry.error("cv", f"{distribution} needs it", allowed="above 0")
    elif distribution == "uniform" and cv > 1 / sqrt(3):
        # A uniform distribution this wide around its mean would reach below zero.
        raise entry.error("cv", "is too wide for uniform", allowed="up to 0.577")
