"""`AppConfig`, an application file as loaded, and the options it has beside the core's records.

The core's records (functions, pools, pipelines, clients, limits) are made in `build`. Here is what
the core does not know: the policy and its settings, the workload and the ground truth of
simulations, how the application is served, and what each client may do; and the check for
objectives, of latency and of cost, that no placement can meet. Whether one placement can meet both
is a question for the frontier of the pipeline, which `headgate.planning` has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

from headgate.config.decoding import Located
from headgate.config.providers import Provider
from headgate.config.schema import (
    ClientSpec,
    ServeSpec,
    ServiceTimesSpec,
    SimulationSpec,
    WorkloadSpec,
)
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.core.model import App, Client, Function, Pipeline
from headgate.core.units import format_duration

_ROUNDING: Final = 1e-9  # relative error of a sum of floats, at most


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The policy and its settings, which the policy checks itself (`make_config`)."""

    name: str
    settings: dict[str, object]


@dataclass(frozen=True, slots=True)
class VariantSource:
    """What a worker loads to serve a variant: an ONNX file or Python code."""

    model: str | None  # an ONNX file, or
    code: str | None  # module:name
    options: Mapping[str, object]  # keyword arguments of what `code` names
    batch_max: int  # largest batch to measure
    is_measured: bool  # `exec_time` is not given, so a worker measures it


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """Requests of one client for one pipeline; `headgate.workload` reads the arrival `process`."""

    pipeline: Pipeline
    client: Client
    process: str


@dataclass(frozen=True, slots=True)
class DefaultWorkload:
    """The workload of the application file, for when the command line gives none."""

    duration_ns: int
    streams: tuple[ArrivalStream, ...]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What only the simulator may know: ground truth of service times, and overheads."""

    distribution: str  # "exact", "exponential", "lognormal", "uniform" or "observed"
    cv: float  # coefficient of variation; 0 unless lognormal or uniform
    scale: tuple[float, ...]  # by function id: actual mean over profile
    # By function id, if observed: batch sizes, and the equally likely factors from each on.
    observed: tuple[tuple[tuple[int, tuple[float, ...]], ...], ...]
    decision_ns: int
    per_work_unit_ns: int
    arrival_ns: int  # by which an arriving request lengthens the batches on nodes
    refusal_ns: int  # and a refused one besides
    # Equally likely times of a request outside of the Scheduler's sight.
    client_overheads_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AppConfig:
    """Everything that an application file says.

    `spec` is the file as plain data (JSON can carry it) with every default filled in: `from_spec`
    makes the same application of it, also after a default has changed. The order of its keys
    counts, because ids follow it: do not sort them.
    """

    app: App
    policy: PolicyOptions
    workload: DefaultWorkload
    simulation: SimulationOptions
    sources: tuple[VariantSource | None, ...]  # by variant id
    serve: ServeSpec
    providers: tuple[Provider | None, ...]  # by pool id; None: the pool is only simulated
    tenants: tuple[ClientSpec, ...]  # by client id; empty if the file names no clients
    spec: dict[str, object]

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The variants without a known execution time: the times in `app` are placeholders.

        A worker measures them when it starts. A simulation of them would be made up.
        """
        pairs = zip(self.app.variants, self.sources, strict=True)
        return tuple(v.name for v, source in pairs if source is not None and source.is_measured)


def policy_options(spec: str | dict[str, Any], where: str) -> PolicyOptions:
    """Return the policy's name and its settings, which are not checked here."""
    if isinstance(spec, str):
        return PolicyOptions(spec, {})
    name = spec.get("name")
    if not isinstance(name, str):
        allowed = "the name of a policy, such as headgate"
        raise ConfigError(
            "is not a name", where=where, key="policy.name", value=name, allowed=allowed
        )
    return PolicyOptions(name, {key: value for key, value in spec.items() if key != "name"})


def default_workload(spec: WorkloadSpec, app: App, where: str) -> DefaultWorkload:
    """Return the arrival streams, bound to their pipelines and clients. Raises `ConfigError`."""
    pipelines = {pipeline.name: pipeline for pipeline in app.pipelines}
    clients = {client.name: client for client in app.clients}
    streams: list[ArrivalStream] = []
    for index, body in enumerate(spec.arrivals):
        reader = Located(body, where, f"workload.arrivals[{index}]")
        pipeline = pipelines[reader.one_of("pipeline", "pipeline", pipelines)]
        if body.client is None:
            client = app.clients[0]
        else:
            client = clients[reader.one_of("client", "client", clients)]
        streams.append(ArrivalStream(pipeline, client, body.process))
    return DefaultWorkload(spec.duration_ns, tuple(streams))


def simulation_options(spec: SimulationSpec, app: App, where: str) -> SimulationOptions:
    """Return the ground truth and the overheads. Raises `ConfigError`."""
    times = Located(spec.service_times, where, "simulation.service_times")
    _check_cv(times)
    names = [function.name for function in app.functions]
    scale, observed = times.spec.scale, times.spec.observed
    for key, factors in (("scale", scale), ("observed", observed)):
        for name in factors:
            if name not in names:
                raise unknown_name_error("function", name, names, where=where, key=times.path(key))
    if (times.spec.distribution == "observed") != bool(observed):
        verb = "is not used by" if observed else "is required by"
        raise times.error("observed", f"{verb} the distribution {times.spec.distribution}")
    overheads_ns = spec.overheads.client_overhead_ns
    return SimulationOptions(
        distribution=times.spec.distribution,
        cv=times.spec.cv,
        scale=tuple(scale.get(name, 1.0) for name in names),
        observed=tuple(_by_size(observed.get(name, (1.0,))) for name in names) if observed else (),
        decision_ns=spec.overheads.decision_ns,
        per_work_unit_ns=spec.overheads.per_work_unit_ns,
        arrival_ns=spec.overheads.arrival_ns,
        refusal_ns=spec.overheads.refusal_ns,
        client_overheads_ns=overheads_ns if isinstance(overheads_ns, tuple) else (overheads_ns,),
    )


def _by_size(
    factors: tuple[float, ...] | Mapping[str, tuple[float, ...]],
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    if isinstance(factors, tuple):
        return ((1, factors),)
    return tuple(sorted((int(size), each) for size, each in factors.items()))


def check_serve(spec: ServeSpec, where: str) -> None:
    """Raise `ConfigError` if settings of `serve:` contradict each other."""
    if spec.tls_key is not None and spec.tls_certificate is None:
        raise Located(spec, where, "serve").error(
            "tls_key", "is given without a certificate", allowed="only with tls_certificate"
        )


def without_keys(spec: Mapping[str, object]) -> dict[str, object]:
    """Return an application as plain data without the hashes of its clients' keys.

    For an event log, which is kept, copied and sent around. No decision depends on a key.
    """
    clients = spec.get("clients")
    if not isinstance(clients, Mapping):
        return dict(spec)
    kept = {name: {**client, "key": None} for name, client in clients.items()}
    return {**spec, "clients": kept}


def check_clients(specs: Mapping[str, ClientSpec], where: str) -> None:
    """Raise `ConfigError` if two clients have the same key, or one a burst and no rate."""
    owners: dict[str, str] = {}
    for name, spec in specs.items():
        if spec.burst is not None and spec.rate_per_s is None:
            raise Located(spec, where, f"clients.{name}").error(
                "burst", "is given without a rate", allowed="only with rate"
            )
        if spec.key is not None and owners.setdefault(spec.key, name) != name:
            problem = f"is also the key of {owners[spec.key]}"
            raise Located(spec, where, f"clients.{name}").error(
                "key", problem, allowed="a different key for each client"
            )


def _check_cv(reader: Located[ServiceTimesSpec]) -> None:
    distribution, cv = reader.spec.distribution, reader.spec.cv
    if distribution in ("exact", "exponential", "observed"):
        if cv != 0:
            raise reader.error("cv", f"is not used by the distribution {distribution}", allowed="0")
    elif cv == 0:
        problem = f"must be set for the distribution {distribution}"
        raise reader.error("cv", problem, allowed="above 0")
    elif distribution == "uniform" and cv > 1 / sqrt(3):
        # A uniform distribution this wide around its mean would reach below zero.
        raise reader.error("cv", "is too large for uniform", allowed="up to 0.577")


def unreachable_objectives(config: AppConfig, where: str) -> list[ConfigError]:
    """Return an error for each objective that no placement can meet, even without the other one.

    A request takes at least as long as its critical path: each stage a batch of one on the fastest
    variant, plus the network delay both ways, on an idle and warm system. It costs at least what
    its stages do on the cheapest variants, in the batches with which an item costs least. A stage
    that was never measured, or that does not always run, counts as zero.
    """
    times_ns = [_shortest_ns(config, function) for function in config.app.functions]
    cheapest = [_cheapest(config, function) for function in config.app.functions]
    errors = []
    for pipeline in config.app.pipelines:
        stages_ns = [0 if s.only_if_unsure else times_ns[s.function.id] for s in pipeline.stages]
        path = [
            (pipeline.stages[index].function.name, stages_ns[index])
            for index in pipeline.critical_path(stages_ns)
        ]
        if pipeline.slo.latency_ns < sum(time_ns for _, time_ns in path):
            errors.append(_latency_error(config, pipeline, path, where))
        places = [cheapest[s.function.id] for s in pipeline.stages if not s.only_if_unsure]
        least_usd = sum(usd for _, usd in places)
        if pipeline.slo.cost_usd < least_usd * (1 - _ROUNDING):
            errors.append(_cost_error(config, pipeline, places, where))
    return errors


def cascades_beyond_objectives(config: AppConfig) -> list[str]:
    """Return a sentence for each pipeline that is in time only if its cascade ends early.

    Its objective can be met, by requests that do not need the last stages.
    """
    times_ns = [_shortest_ns(config, function) for function in config.app.functions]
    sentences = []
    for pipeline in config.app.pipelines:
        stages_ns = [times_ns[stage.function.id] for stage in pipeline.stages]
        always_ns = [
            0 if stage.only_if_unsure else time_ns
            for stage, time_ns in zip(pipeline.stages, stages_ns, strict=True)
        ]
        total_ns, latency_ns = max(pipeline.longest_to(stages_ns)), pipeline.slo.latency_ns
        if max(pipeline.longest_to(always_ns)) <= latency_ns < total_ns:
            total, latency = format_duration(int(total_ns)), format_duration(latency_ns)
            sentences.append(
                f"pipelines.{pipeline.name}: a request that needs every stage takes {total} or "
                f"more, beyond the objective of {latency}; policies that promise a time reject all"
            )
    return sentences


def least_factor(config: AppConfig, function: Function) -> float:
    """Return the least that the times of a function may be of its profile, at most 1."""
    simulation = config.simulation
    factor = simulation.scale[function.id]
    if simulation.observed:
        factor *= min(min(factors) for _, factors in simulation.observed[function.id])
    return min(1.0, factor)


def slo_key(config: AppConfig, pipeline: Pipeline) -> str:
    """Return the key of the section that has the objective of a pipeline."""
    sections = config.spec["pipelines"]
    section = sections.get(pipeline.name) if isinstance(sections, dict) else None
    has_own = isinstance(section, dict) and section.get("slo") is not None
    return f"pipelines.{pipeline.name}.slo" if has_own else "slo"


def _shortest_ns(config: AppConfig, function: Function) -> int:
    """The shortest time of one item on any variant, in any shape, if the profiles are right.

    The network is included.
    """
    app, simulation = config.app, config.simulation
    factor = simulation.scale[function.id]
    if simulation.observed:
        factor *= min(simulation.observed[function.id][0][1])
    return min(
        0
        if variant.name in config.unmeasured
        else int(min(times.exec_ns[0] for times in variant.shapes) * min(1.0, factor))
        + 2 * min(app.pools[pool_id].network_ns for pool_id in variant.pool_ids)
        for variant in function.variants
    )


def _cheapest(config: AppConfig, function: Function) -> tuple[str, float]:
    """Return where an item of a function costs least, as `function on pool`, and that cost."""
    app, factor = config.app, min(1.0, config.simulation.scale[function.id])
    if config.simulation.observed:
        factor *= min(min(factors) for _, factors in config.simulation.observed[function.id])
    candidates = [
        (
            0.0
            if variant.name in config.unmeasured
            else app.pools[pool_id].batch_usd(times.shape, int(exec_ns * factor)) / (index + 1),
            f"{function.name} on {app.pools[pool_id].name}",
        )
        for variant in function.variants
        for pool_id in variant.pool_ids
        for times in variant.shapes
        for index, exec_ns in enumerate(times.exec_ns)
    ]
    usd, name = min(candidates)
    return name, usd


def _latency_error(
    config: AppConfig, pipeline: Pipeline, path: list[tuple[str, int]], where: str
) -> ConfigError:
    total = format_duration(sum(time_ns for _, time_ns in path))
    steps = " -> ".join(f"{name} {format_duration(time_ns)}" for name, time_ns in path if time_ns)
    return ConfigError(
        f"is below the critical path of pipeline {pipeline.name}, {total}: {steps}",
        where=where,
        key=f"{slo_key(config, pipeline)}.latency",
        value=format_duration(pipeline.slo.latency_ns),
        allowed=f"{total} or longer",
    )


def _cost_error(
    config: AppConfig, pipeline: Pipeline, places: list[tuple[str, float]], where: str
) -> ConfigError:
    total = f"${sum(usd for _, usd in places) * 1e6:.6g}/1M"
    steps = ", ".join(f"{name} ${usd * 1e6:.6g}/1M" for name, usd in places)
    return ConfigError(
        f"is below the cheapest placement of pipeline {pipeline.name}, {total}: {steps}",
        where=where,
        key=f"{slo_key(config, pipeline)}.cost",
        value=f"${pipeline.slo.cost_usd * 1e6:.6g}/1M",
        allowed=f"{total} or more",
    )
