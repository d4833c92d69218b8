"""`AppConfig`, an application file as loaded, and the options it has beside the core's records.

The core's records (functions, pools, pipelines, clients, limits) are made in `build`. Here is what
the core does not know: the policy and its settings, the workload and the ground truth of
simulations, how the application is served, and what each client may do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, Literal

from headgate.config.errors import FieldReader, unknown_name_error
from headgate.config.schema import (
    ClientSpec,
    ServeSpec,
    ServiceTimesSpec,
    SimulationSpec,
    WorkloadSpec,
)
from headgate.core import units
from headgate.core.errors import ConfigError
from headgate.core.model import App, Client, Pipeline

EXECUTION_TIMEOUT_NS_MIN: Final = 100_000_000  # less, and a worker would die before it is up
BODY_BYTES_MAX: Final = 1 << 30  # no message between processes is longer
SHARED_BYTES_MIN: Final = 64 << 10
SHARED_BYTES_MAX: Final = 64 << 30
LOG_BYTES_MIN: Final = 64 << 10  # each segment has the whole header
LOG_BYTES_MAX: Final = 1 << 40
MEMORY_BYTES_MAX: Final = 1 << 40


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
    observed: tuple[tuple[float, ...], ...]  # by function id: equally likely factors, if observed
    decision_ns: int
    per_work_unit_ns: int
    client_overhead_ns: int  # time of a request outside of the Scheduler's sight


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the application is served. Files are relative to the application's directory."""

    host: str
    port: int  # 0: any free port
    grpc_port: int | None  # None: gRPC is not served
    tls_certificate: str | None  # None: not encrypted
    tls_key: str | None  # None: the key is in the file of the certificate
    log: str | None
    lame_duck_ns: int
    drain_ns: int
    deadline_max_ns: int
    execution_timeout_ns: int
    body_bytes_max: int
    connections_max: int
    shared_memory_bytes: int
    overload_status: Literal[429, 503]
    log_size_bytes: int  # of a segment of the event log
    log_age_ns: int
    log_keep: int  # older segments that are kept
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]
    access_log: bool
    expose_errors: bool
    response_bytes_max: int
    memory_bytes_max: int


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client authenticates, and its rate and concurrency limits. None is no limit."""

    client_id: int
    key_sha256: str | None  # in hexadecimal digits; None: the client has no key
    rate_per_s: float | None
    burst: int
    concurrency: int | None


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
    serve: ServeOptions
    tenants: tuple[ClientOptions, ...]  # by client id; empty if the file names no clients
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
        raise ConfigError(
            "is not a name",
            where=where,
            key="policy.name",
            value=name,
            allowed="the name of a policy, such as headgate",
        )
    return PolicyOptions(name, {key: value for key, value in spec.items() if key != "name"})


def default_workload(spec: WorkloadSpec, app: App, where: str) -> DefaultWorkload:
    """Return the arrival streams, bound to their pipelines and clients. Raises `ConfigError`."""
    pipelines = {pipeline.name: pipeline for pipeline in app.pipelines}
    clients = {client.name: client for client in app.clients}
    streams: list[ArrivalStream] = []
    for index, body in enumerate(spec.arrivals):
        reader = FieldReader(body, where, f"workload.arrivals[{index}]")
        pipeline = pipelines[reader.one_of("pipeline", "pipeline", pipelines)]
        if body.client is None:
            client = app.clients[0]
        else:
            client = clients[reader.one_of("client", "client", clients)]
        streams.append(ArrivalStream(pipeline, client, body.process))
    duration_ns = FieldReader(spec, where, "workload").positive_ns("duration")
    return DefaultWorkload(duration_ns, tuple(streams))


def simulation_options(spec: SimulationSpec, app: App, where: str) -> SimulationOptions:
    """Return the ground truth and the overheads. Raises `ConfigError`."""
    times = FieldReader(spec.service_times, where, "simulation.service_times")
    overheads = FieldReader(spec.overheads, where, "simulation.overheads")
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
    return SimulationOptions(
        distribution=times.spec.distribution,
        cv=times.spec.cv,
        scale=tuple(scale.get(name, 1.0) for name in names),
        observed=tuple(observed.get(name, (1.0,)) for name in names) if observed else (),
        decision_ns=overheads.duration_ns("decision"),
        per_work_unit_ns=overheads.duration_ns("per_work_unit"),
        client_overhead_ns=overheads.duration_ns("client_overhead"),
    )


def serve_options(spec: ServeSpec, where: str) -> ServeOptions:
    """Return how the application is served. Raises `ConfigError`."""
    reader = FieldReader(spec, where, "serve")
    for name in ("host", "tls_certificate", "tls_key", "log"):
        if getattr(spec, name) == "":
            raise reader.error(name, "is empty")
    if spec.tls_key is not None and spec.tls_certificate is None:
        raise reader.error(
            "tls_key", "is given without a certificate", allowed="only with tls_certificate"
        )
    execution_timeout_ns = reader.duration_ns("execution_timeout")
    if execution_timeout_ns < EXECUTION_TIMEOUT_NS_MIN:
        allowed = f"{units.format_duration(EXECUTION_TIMEOUT_NS_MIN)} or longer"
        raise reader.error("execution_timeout", "is too short", allowed=allowed)
    return ServeOptions(
        host=spec.host,
        port=spec.port,
        grpc_port=spec.grpc_port,
        tls_certificate=spec.tls_certificate,
        tls_key=spec.tls_key,
        log=spec.log,
        lame_duck_ns=reader.duration_ns("lame_duck"),
        drain_ns=reader.duration_ns("drain"),
        deadline_max_ns=reader.positive_ns("deadline_max"),
        execution_timeout_ns=execution_timeout_ns,
        body_bytes_max=_bounded_bytes(reader, "body_max", 1, BODY_BYTES_MAX),
        connections_max=spec.connections_max,
        shared_memory_bytes=_bounded_bytes(
            reader, "shared_memory", SHARED_BYTES_MIN, SHARED_BYTES_MAX
        ),
        overload_status=spec.overload_status,
        log_size_bytes=_bounded_bytes(reader, "log_size", LOG_BYTES_MIN, LOG_BYTES_MAX),
        log_age_ns=reader.duration_or_never_ns("log_age"),
        log_keep=spec.log_keep,
        log_level=spec.log_level,
        log_format=spec.log_format,
        access_log=spec.access_log,
        expose_errors=spec.expose_errors,
        response_bytes_max=_bounded_bytes(reader, "response_max", 1, BODY_BYTES_MAX),
        memory_bytes_max=_bounded_bytes(reader, "memory_max", 1, MEMORY_BYTES_MAX),
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


def client_options(specs: Mapping[str, ClientSpec], where: str) -> tuple[ClientOptions, ...]:
    """Return the options of each client, by its id; empty if no clients are named."""
    owners: dict[str, str] = {}
    options: list[ClientOptions] = []
    for id, (name, spec) in enumerate(specs.items()):
        reader = FieldReader(spec, where, f"clients.{name}")
        if spec.key is not None and owners.setdefault(spec.key, name) != name:
            problem = f"is also the key of {owners[spec.key]}"
            raise reader.error("key", problem, allowed="a different key for each client")
        options.append(
            ClientOptions(
                client_id=id,
                key_sha256=None if spec.key is None else spec.key.removeprefix("sha256:"),
                rate_per_s=None if spec.rate is None else reader.positive_rate_per_s("rate"),
                burst=spec.burst,
                concurrency=spec.concurrency,
            )
        )
    return tuple(options)


def _check_cv(reader: FieldReader[ServiceTimesSpec]) -> None:
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


def _bounded_bytes(reader: FieldReader[ServeSpec], name: str, minimum: int, maximum: int) -> int:
    size_bytes = reader.size_bytes(name)
    if not minimum <= size_bytes <= maximum:
        problem = "is too small" if size_bytes < minimum else "is too large"
        allowed = f"{units.format_size(minimum)} to {units.format_size(maximum)}"
        raise reader.error(name, problem, allowed=allowed)
    return size_bytes
