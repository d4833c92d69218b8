"""The application file, as structures: what may be written where, and what is assumed otherwise.

These mirror the YAML one to one and know nothing of the core. Quantities stay the text that was
written (`5ms`, `$1.20/h`), so that a declaration goes to a log and comes back unchanged. The
descriptions end up in the JSON Schema, which editors show beside the key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from headgate.app.pool_spec import GuardSpec, PoolSpec
from headgate.app.section import (
    Count,
    CountOrZero,
    Cpus,
    Duration,
    Execution,
    Factor,
    HashedKey,
    Name,
    Percentage,
    Port,
    Section,
    Share,
    Size,
)

__all__ = [
    "AppSpec",
    "ClientSpec",
    "FunctionSpec",
    "GuardSpec",
    "LimitsSpec",
    "OverheadsSpec",
    "PipelineSpec",
    "PoolSpec",
    "Section",
    "ServeSpec",
    "SimulationSpec",
    "SloSpec",
    "StageSpec",
    "StreamSpec",
    "TruthSpec",
    "VariantSpec",
    "WorkloadSpec",
]


class VariantSpec(Section, frozen=True):
    """One build of a function: how long it takes and what it holds."""

    exec: Annotated[
        Execution | None,
        Meta(
            description="Time of one batch: of one item; or a list by batch size; or a map by "
            "batch size, interpolated in between."
        ),
    ] = None
    start: Annotated[Duration, Meta(description="Cold start: process, imports, weights.")] = 0
    load: Annotated[Duration, Meta(description="Swap-in of weights from host memory.")] = 0
    memory: Annotated[Size, Meta(description="Held while the weights are on the device.")] = "0B"
    output: Annotated[Size, Meta(description="Size of the result of one item.")] = "0B"
    slowdown: Annotated[
        tuple[Annotated[float, Meta(ge=1, le=1_000_000)], ...],
        Meta(min_length=1, description="Factor on `exec` when 1, 2, ... batches share a node."),
    ] = (1.0,)
    concurrency: Annotated[Count, Meta(description="Batches one instance runs at a time.")] = 1
    cpus: Annotated[Cpus, Meta(description="CPUs a running batch holds.")] = 0.0
    gpu_share: Annotated[Share, Meta(description="Sevenths of a GPU a running batch holds.")] = (
        "0/7"
    )
    pools: Annotated[
        tuple[str, ...] | None,
        Meta(description="Where it may run. Default: every pool that can hold it."),
    ] = None

    # To serve it, and not only to simulate it:
    model: Annotated[
        str | None, Meta(description="An ONNX file, relative to the application file.")
    ] = None
    code: Annotated[
        str | None,
        Meta(description="A class or function of Python, module:name, found beside the file."),
    ] = None
    # `Any`: what a class of the user's takes is its own business.
    options: Annotated[
        dict[str, Any], Meta(description="Keyword arguments of the class that `code` names.")
    ] = field(default_factory=dict)
    batch: Annotated[
        Annotated[int, Meta(ge=1, le=1_024)],
        Meta(description="Largest batch in items, where `exec` is left to be measured."),
    ] = 16


class FunctionSpec(VariantSpec, frozen=True):
    """A model or a step: one build of it, or several under `variants`."""

    warm: Annotated[
        CountOrZero | None,
        Meta(
            description="Nodes that are to hold it before anybody asks for it. Default: every "
            "node that has room for what is served, none for what is only simulated."
        ),
    ] = None

    idempotent: Annotated[
        bool, Meta(description="It may be run again when nobody knows whether it ran.")
    ] = True
    variants: Annotated[
        dict[Name, VariantSpec],
        Meta(description="Builds of this function. The first one is the reference."),
    ] = field(default_factory=dict)


class SloSpec(Section, frozen=True):
    """An objective for one pipeline."""

    latency: Annotated[Duration, Meta(description="Deadline after arrival, or `never`.")] = "never"
    quantile: Annotated[Percentage, Meta(description="Part of requests that must meet it.")] = "99%"
    burst: Annotated[
        float,
        Meta(ge=1, le=1_000_000, description="Multiple of the forecast rate still to be served."),
    ] = 1.0
    gives_up: Annotated[
        bool, Meta(description="A request still waiting at its deadline is expired.")
    ] = False


class StageSpec(Section, frozen=True):
    """One function of a pipeline and the stages it waits for."""

    function: Annotated[str, Meta(description="The function that runs.")]
    after: Annotated[tuple[str, ...], Meta(description="Stages it waits for.")] = ()
    only_if_unsure: Annotated[
        bool, Meta(description="A cascade: runs only if the stages before it were unsure.")
    ] = False
    unsure_probability: Annotated[
        Percentage, Meta(description="How often they are unsure, as far as is known.")
    ] = "100%"


class PipelineSpec(Section, frozen=True):
    """Either one `function`, or `stages`."""

    function: Annotated[str | None, Meta(description="The only stage.")] = None
    stages: Annotated[
        dict[Name, StageSpec] | None, Meta(description="A directed acyclic graph of functions.")
    ] = None
    slo: Annotated[SloSpec | None, Meta(description="Default: the `slo` of the file.")] = None


class ClientSpec(Section, frozen=True):
    """Somebody who sends requests: a tenant."""

    key: Annotated[
        HashedKey | None, Meta(description="The hash of its API key, as `headgate key` prints it.")
    ] = None
    rate: Annotated[
        str | None,
        Meta(title="rate", examples=["100/s"], description="Requests it may send. Default: any."),
    ] = None
    burst: Annotated[Count, Meta(description="Requests it may send at once within `rate`.")] = 100
    concurrency: Annotated[
        Count | None, Meta(description="Requests it may have open. Default: any number.")
    ] = None

    weight: Annotated[
        float, Meta(gt=0, le=1_000_000, description="Share under policies that are fair.")
    ] = 1.0


class LimitsSpec(Section, frozen=True):
    """Bounds that hold under every policy. Reaching one is an outcome."""

    attempts: Annotated[Count, Meta(description="Runs of one task.")] = 3
    refusals: Annotated[
        CountOrZero, Meta(description="Times a task may be turned away before it fails.")
    ] = 64
    backoff: Annotated[
        Duration, Meta(description="How long a place that refused is left alone.")
    ] = "1ms"
    lost_after: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Give a run up after this multiple of the time that such runs take by "
            "their profile or took lately, and no sooner than 1s; 0 is never.",
        ),
    ] = 0.0
    open_requests: Annotated[
        int, Meta(ge=1, le=1_000_000_000, description="Admitted and not settled.")
    ] = 10_000_000


class StreamSpec(Section, frozen=True):
    """One stream of arrivals."""

    pipeline: Annotated[str, Meta(description="What is asked for.")]
    spec: Annotated[str, Meta(description="When: poisson:rate=50/s, or a trace.")]
    client: Annotated[str | None, Meta(description="Who asks. Default: the first client.")] = None


class WorkloadSpec(Section, frozen=True):
    """What `headgate simulate` sends when it is not told otherwise."""

    duration: Annotated[Duration, Meta(description="Arrivals stop then.")] = "60s"
    arrivals: Annotated[tuple[StreamSpec, ...], Meta(description="Streams.")] = ()


class TruthSpec(Section, frozen=True):
    """How long things really take, which nobody knows in advance."""

    distribution: Annotated[
        Literal["exact", "exponential", "lognormal", "uniform", "observed"],
        Meta(description="Of the true time around its mean; `observed`: as it was seen live."),
    ] = "exact"
    cv: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="Standard deviation over mean, for `lognormal` and `uniform`.",
        ),
    ] = 0.0
    scale: Annotated[
        dict[str, Factor],
        Meta(description="True mean over profile, by function. Default: 1."),
    ] = field(default_factory=dict)
    observed: Annotated[
        dict[str, Annotated[tuple[Factor, ...], Meta(min_length=1, max_length=10_000)]],
        Meta(
            description="For `observed`: true time over profile, by function, in values that are "
            "equally likely, as headgate calibrate finds them. Default: 1."
        ),
    ] = field(default_factory=dict)


class OverheadsSpec(Section, frozen=True):
    """What deciding and answering cost, in simulated time."""

    decision: Annotated[Duration, Meta(description="Per event.")] = 0
    per_work_unit: Annotated[
        Duration, Meta(description="Per unit of work that the policy reports.")
    ] = 0
    request: Annotated[
        Duration,
        Meta(description="Per request, before it arrives and after it is settled: for its client."),
    ] = 0


class SimulationSpec(Section, frozen=True):
    """What only the simulator needs."""

    truth: TruthSpec = TruthSpec()
    overheads: OverheadsSpec = OverheadsSpec()


class ServeSpec(Section, frozen=True):
    """What only `headgate serve` needs. Options of the command line go before these."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="For HTTP; 0 is any that is free.")] = 8080
    grpc_port: Annotated[Port | None, Meta(description="For gRPC. Default: none is served.")] = None
    tls_certificate: Annotated[
        str | None, Meta(description="File with the certificate chain (PEM).")
    ] = None
    tls_key: Annotated[str | None, Meta(description="File with its private key (PEM).")] = None
    log: Annotated[str | None, Meta(description="File for the event log.")] = None
    lame_duck: Annotated[
        Duration, Meta(description="Told to end, it says it is not ready and serves for so long.")
    ] = "5s"
    drain: Annotated[
        Duration, Meta(description="And then finishes what it has, for so long at most.")
    ] = "20s"
    timeout: Annotated[
        Duration, Meta(description="The longest deadline that a client may ask for.")
    ] = "60s"
    hang: Annotated[
        Duration, Meta(description="A batch that runs for so long has hung: its worker is ended.")
    ] = "60s"
    body: Annotated[Size, Meta(description="The largest request.")] = "64MiB"
    connections: Annotated[Count, Meta(description="Open at once.")] = 4_096
    shared_memory: Annotated[
        Size, Meta(description="For tensors between gateway and worker, each way.")
    ] = "64MiB"
    overload_status: Annotated[
        Literal[429, 503], Meta(description="Status of what is turned away under load.")
    ] = 429
    log_size: Annotated[
        Size, Meta(description="The event log is rotated when its newest segment is so large.")
    ] = "256MiB"
    log_age: Annotated[Duration, Meta(description="Or so old. `never`: only when it is large.")] = (
        "24h"
    )
    log_keep: Annotated[
        CountOrZero, Meta(description="Older segments that are kept; those before are deleted.")
    ] = 8
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="What is said on stderr: this and whatever is more serious."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="How: for people, or an object per line.")
    ] = "text"
    access_log: Annotated[bool, Meta(description="Say there, too, how each request ended.")] = False
    expose_errors: Annotated[
        bool, Meta(description="Tell clients the text of a function's exception.")
    ] = False
    answer: Annotated[Size, Meta(description="The largest answer.")] = "64MiB"
    memory: Annotated[
        Size,
        Meta(
            description="For bodies, tensors and answers that the gateway holds for all clients "
            "together; at least twice `body`. Each client has a share of its own."
        ),
    ] = "512MiB"


class AppSpec(Section, frozen=True):
    """A Headgate application."""

    functions: Annotated[dict[Name, FunctionSpec], Meta(description="What can be run.")]
    pools: Annotated[
        dict[Name, PoolSpec],
        Meta(description="Where it can run. Default: one dedicated node, called `local`."),
    ] = field(default_factory=dict)
    pipelines: Annotated[
        dict[Name, PipelineSpec],
        Meta(description="What can be asked for. Default: each function by itself."),
    ] = field(default_factory=dict)
    slo: Annotated[SloSpec | None, Meta(description="The objective of pipelines without one.")] = (
        None
    )
    clients: Annotated[
        dict[Name, ClientSpec], Meta(description="Default: one, called `client`.")
    ] = field(default_factory=dict)
    limits: LimitsSpec = LimitsSpec()
    # `Any`: a policy's settings are its own business, and msgspec has no name for "plain data".
    policy: Annotated[
        str | dict[str, Any],
        Meta(description="Its name, or a map with `name` and the policy's settings."),
    ] = "headgate"
    serve: ServeSpec = ServeSpec()
    workload: WorkloadSpec = WorkloadSpec()
    simulation: SimulationSpec = SimulationSpec()
