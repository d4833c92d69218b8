"""An application as loaded: the core's records, and the choices made beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headgate.core.model import App, Client, Pipeline


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Which policy is to decide. Its settings are checked by the policy (`make_config`)."""

    name: str
    settings: dict[str, object]


@dataclass(frozen=True, slots=True)
class Source:
    """What a variant really is, where it can be served and not only simulated."""

    model: str | None  # an ONNX file, or
    code: str | None  # module:name
    options: Mapping[str, object]  # keyword arguments of what `code` names
    batch: int  # the largest to measure
    is_measured: bool  # how long it takes was not declared: a worker finds out


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """Requests of one client for one pipeline; `spec` is for `headgate.workload`."""

    pipeline: Pipeline
    client: Client
    spec: str


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """What to send when nothing else is asked for."""

    duration_ns: int
    streams: tuple[StreamChoice, ...]


@dataclass(frozen=True, slots=True)
class SimulationChoice:
    """What only the simulator may know: the truth behind the profiles, and what deciding costs."""

    distribution: str  # "exact", "exponential", "lognormal", "uniform" or "observed"
    cv: float  # standard deviation over mean; 0 unless lognormal or uniform
    scale: tuple[float, ...]  # by function id: true mean over profile
    observed: tuple[tuple[float, ...], ...]  # likewise: values that are equally likely, if observed
    decision_ns: int
    per_work_unit_ns: int
    request_ns: int  # what a request takes outside of the Scheduler's sight


@dataclass(frozen=True, slots=True)
class ServeChoice:
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
class ClientChoice:
    """How a client shows who it is, and how much it may ask for. None is no limit."""

    client_id: int
    key_sha256: str | None  # in hexadecimal digits; None: it has no key
    rate_per_s: float | None
    burst: int
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class LoadedApp:
    """Everything that an application file says.

    `spec` is the file as plain data (JSON can carry it) with every default filled in: `from_spec`
    makes the same application of it, also after a default has changed. The order of its keys
    counts, because ids follow it: do not sort them.
    """

    app: App
    policy: PolicyChoice
    workload: WorkloadChoice
    simulation: SimulationChoice
    sources: tuple[Source | None, ...]  # by variant id
    serve: ServeChoice
    tenants: tuple[ClientChoice, ...]  # by client id: who may ask; none if none are named
    spec: dict[str, object]

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The variants whose times nobody has declared: those in `app` are a guess.

        A worker measures them when it starts. A simulation of them would be made up.
        """
        pairs = zip(self.app.variants, self.sources, strict=True)
        return tuple(v.name for v, source in pairs if source is not None and source.is_measured)
