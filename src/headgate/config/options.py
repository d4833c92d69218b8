"""An application as loaded: the core's records, and the choices made beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, Literal

from headgate.config.errors import FieldReader, unknown_name_error
from headgate.config.schema import ClientSpec, ServeSpec, SimulationSpec, TruthSpec, WorkloadSpec
from headgate.core import units
from headgate.core.errors import ConfigError
from headgate.core.model import App, Client, Pipeline


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Which policy is to decide. Its settings are checked by the policy (`make_config`)."""

    name: str
    settings: dict[str, object]


@dataclass(frozen=True, slots=True)
class VariantSource:
    """What a variant really is, where it can be served and not only simulated."""

    model: str | None  # an ONNX file, or
    code: str | None  # module:name
    options: Mapping[str, object]  # keyword arguments of what `code` names
    batch: int  # the largest to measure
    is_measured: bool  # how long it takes was not declared: a worker finds out


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """Requests of one client for one pipeline; `spec` is for `headgate.workload`."""

    pipeline: Pipeline
    client: Client
    spec: str


@dataclass(frozen=True, slots=True)
class DeclaredWorkload:
    """What to send when nothing else is asked for."""

    duration_ns: int
    streams: tuple[ArrivalStream, ...]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What only the simulator may know: the truth behind the profiles, and what deciding costs."""

    distribution: str  # "exact", "exponential", "lognormal", "uniform" or "observed"
    cv: float  # standard deviation over mean; 0 unless lognormal or uniform
    scale: tuple[float, ...]  # by function id: true mean over profile
    observed: tuple[tuple[float, ...], ...]  # likewise: values that are equally likely, if observed
    decision_ns: int
    per_work_unit_ns: int
    request_ns: int  # what a request takes outside of the Scheduler's sight


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the application is served. Files are relative to the application's directory."""

    host: str
    port: int  # 0: any that is free
    grpc_port: int | None  # None: there is no gRPC
    tls_certificate: str | None  # None: not encrypted
    tls_key: str | None  # None: it is in the file of the certificate
    log: str | None
    lame_duck_ns: int
    drain_ns: int
    timeout_ns: int
    hang_ns: int
    body_bytes: int
    connections: int
    shared_memory_bytes: int
    overload_status: Literal[429, 503]
    log_size_bytes: int  # of a segment of the event log
    log_age_ns: int
    log_keep: int  # older segments that are kept
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]
    access_log: bool
    expose_errors: bool
    answer_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client shows who it is, and how much it may ask for. None is no limit."""

    client_id: int
    key_sha256: str | None  # in hexadecimal digits; None: it has no key
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
    workload: DeclaredWorkload
    simulation: SimulationOptions
    sources: tuple[VariantSource | None, ...]  # by variant id
    serve: ServeOptions
    tenants: tuple[ClientOptions, ...]  # by client id: who may ask; none if none are named
    spec: dict[str, object]

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The variants whose times nobody has declared: those in `app` are a guess.

        A worker measures them when it starts. A simulation of them would be made up.
        """
        pairs = zip(self.app.variants, self.sources, strict=True)
        return tuple(v.name for v, source in pairs if source is not None and source.is_measured)


# Policy, workload and simulation: the choices of an application file beside its records.


def policy_options(spec: str | dict[str, Any], where: str) -> PolicyOptions:
    """Return the policy's name and its settings, which are not looked at here."""
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


def declared_workload(spec: WorkloadSpec, app: App, where: str) -> DeclaredWorkload:
    """Return the streams of arrivals, bound to their pipelines and clients."""
    pipelines = {pipeline.name: pipeline for pipeline in app.pipelines}
    clients = {client.name: client for client in app.clients}
    streams: list[ArrivalStream] = []
    for index, body in enumerate(spec.arrivals):
        entry = FieldReader(body, where, f"workload.arrivals[{index}]")
        pipeline = pipelines[entry.one_of("pipeline", "pipeline", pipelines)]
        if body.client is None:
            client = app.clients[0]
        else:
            client = clients[entry.one_of("client", "client", clients)]
        streams.append(ArrivalStream(pipeline, client, body.spec))
    duration_ns = FieldReader(spec, where, "workload").positive_ns("duration")
    return DeclaredWorkload(duration_ns, tuple(streams))


def simulation_options(spec: SimulationSpec, app: App, where: str) -> SimulationOptions:
    """Return the truth and the overheads."""
    truth = FieldReader(spec.truth, where, "simulation.truth")
    overheads = FieldReader(spec.overheads, where, "simulation.overheads")
    _check_cv(truth)
    names = [function.name for function in app.functions]
    scale, observed = spec.truth.scale, spec.truth.observed
    for key, named in (("scale", scale), ("observed", observed)):
        for name in named:
            if name not in names:
                raise unknown_name_error("function", name, names, where=where, key=truth.path(key))
    if (spec.truth.distribution == "observed") != bool(observed):
        verb = "means nothing to" if observed else "is needed by"
        raise truth.error("observed", f"{verb} the distribution {spec.truth.distribution}")
    return SimulationOptions(
        distribution=spec.truth.distribution,
        cv=spec.truth.cv,
        scale=tuple(scale.get(name, 1.0) for name in names),
        observed=tuple(observed.get(name, (1.0,)) for name in names) if observed else (),
        decision_ns=overheads.duration_ns("decision"),
        per_work_unit_ns=overheads.duration_ns("per_work_unit"),
        request_ns=overheads.duration_ns("request"),
    )


def _check_cv(entry: FieldReader[TruthSpec]) -> None:
    distribution, cv = entry.spec.distribution, entry.spec.cv
    if distribution in ("exact", "exponential", "observed"):
        if cv != 0:
            raise entry.error("cv", f"means nothing to {distribution}", allowed="0")
    elif cv == 0:
        raise entry.error("cv", f"{distribution} needs it", allowed="above 0")
    elif distribution == "uniform" and cv > 1 / sqrt(3):
        # A uniform distribution this wide around its mean would reach below zero.
        raise entry.error("cv", "is too wide for uniform", allowed="up to 0.577")


# What `headgate serve` needs, from the application file: `serve` and `clients`.


HANG_NS_MIN: Final = 100_000_000  # less, and a worker would end itself before it is up
BODY_BYTES_MAX: Final = 1 << 30  # no message between processes is longer
SHARED_BYTES_MIN: Final = 64 << 10
SHARED_BYTES_MAX: Final = 64 << 30
LOG_BYTES_MIN: Final = 64 << 10  # each segment has the whole header
LOG_BYTES_MAX: Final = 1 << 40
MEMORY_BYTES_MAX: Final = 1 << 40


def serve_options(spec: ServeSpec, where: str) -> ServeOptions:
    """Return how the application is served."""
    entry = FieldReader(spec, where, "serve")
    for name in ("host", "tls_certificate", "tls_key", "log"):
        if getattr(spec, name) == "":
            raise entry.error(name, "is empty")
    if spec.tls_key is not None and spec.tls_certificate is None:
        raise entry.error("tls_key", "has no certificate", allowed="only with tls_certificate")
    hang_ns = entry.duration_ns("hang")
    if hang_ns < HANG_NS_MIN:
        allowed = f"{units.format_duration(HANG_NS_MIN)} or longer"
        raise entry.error("hang", "is too short", allowed=allowed)
    return ServeOptions(
        host=spec.host,
        port=spec.port,
        grpc_port=spec.grpc_port,
        tls_certificate=spec.tls_certificate,
        tls_key=spec.tls_key,
        log=spec.log,
        lame_duck_ns=entry.duration_ns("lame_duck"),
        drain_ns=entry.duration_ns("drain"),
        timeout_ns=entry.positive_ns("timeout"),
        hang_ns=hang_ns,
        body_bytes=_bounded_bytes(entry, "body", 1, BODY_BYTES_MAX),
        connections=spec.connections,
        shared_memory_bytes=_bounded_bytes(
            entry, "shared_memory", SHARED_BYTES_MIN, SHARED_BYTES_MAX
        ),
        overload_status=spec.overload_status,
        log_size_bytes=_bounded_bytes(entry, "log_size", LOG_BYTES_MIN, LOG_BYTES_MAX),
        log_age_ns=entry.duration_or_never_ns("log_age"),
        log_keep=spec.log_keep,
        log_level=spec.log_level,
        log_format=spec.log_format,
        access_log=spec.access_log,
        expose_errors=spec.expose_errors,
        answer_bytes=_bounded_bytes(entry, "answer", 1, BODY_BYTES_MAX),
        memory_bytes=_bounded_bytes(entry, "memory", 1, MEMORY_BYTES_MAX),
    )


def without_keys(spec: Mapping[str, object]) -> dict[str, object]:
    """Return an application as plain data without the hashes of its clients' keys.

    For an event log, which is kept, copied and sent around: no decision depends on a key.
    """
    clients = spec.get("clients")
    if not isinstance(clients, Mapping):
        return dict(spec)
    kept = {name: {**client, "key": None} for name, client in clients.items()}
    return {**spec, "clients": kept}


def declared_clients(specs: Mapping[str, ClientSpec], where: str) -> tuple[ClientOptions, ...]:
    """Return what each client may do, by its id; none if none are named."""
    owners: dict[str, str] = {}
    choices: list[ClientOptions] = []
    for id, (name, spec) in enumerate(specs.items()):
        entry = FieldReader(spec, where, f"clients.{name}")
        if spec.key is not None and owners.setdefault(spec.key, name) != name:
            problem = f"is the key of {owners[spec.key]}, too"
            raise entry.error("key", problem, allowed="a key of its own")
        choices.append(
            ClientOptions(
                client_id=id,
                key_sha256=None if spec.key is None else spec.key.removeprefix("sha256:"),
                rate_per_s=None if spec.rate is None else entry.positive_rate_per_s("rate"),
                burst=spec.burst,
                concurrency=spec.concurrency,
            )
        )
    return tuple(choices)


def _bounded_bytes(entry: FieldReader[ServeSpec], name: str, least: int, most: int) -> int:
    size_bytes = entry.size_bytes(name)
    if not least <= size_bytes <= most:
        problem = "is too small" if size_bytes < least else "is too large"
        allowed = f"{units.format_size(least)} to {units.format_size(most)}"
        raise entry.error(name, problem, allowed=allowed)
    return size_bytes
