"""The application file, as structures: what may be written where, and what is assumed otherwise.

These mirror the YAML one to one and know nothing of the core. Quantities stay the text that was
written (`5ms`, `$1.20/h`), so that a declaration goes to a log and comes back unchanged. The
descriptions end up in the JSON Schema, which editors show beside the key.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

# What the parts of the application file are made of: kinds of values, and no room for others.


Name = Annotated[
    str,
    # The look-ahead is for a trailing line break, which `$` alone would let pass.
    Meta(title="name", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$(?!\n)", examples=["resnet", "m-2"]),
]
Duration = Annotated[str | Literal[0], Meta(title="duration", examples=["5ms", "1.5s", "10min"])]
Size = Annotated[str, Meta(title="size", examples=["100MB", "16GiB"])]
Share = Annotated[str, Meta(title="share of a GPU", examples=["3/7", "7/7"])]
Price = Annotated[str, Meta(title="price", examples=["$1.20/h", "$0.20/1M"])]
Dollars = Annotated[str, Meta(title="sum of money", examples=["$10", "$0.05"])]
Percentage = Annotated[str | float, Meta(title="percentage", examples=["99%", 0.99])]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Cpus = Annotated[float, Meta(ge=0, le=1_000_000)]
BatchSize = Annotated[
    str, Meta(title="batch size", pattern=r"^[1-9][0-9]{0,3}$(?!\n)", examples=["1", "8"])
]
HashedKey = Annotated[
    str,
    Meta(title="hashed key", pattern=r"^sha256:[0-9a-f]{64}$(?!\n)", examples=["sha256:..."]),
]
Factor = Annotated[float, Meta(gt=0, le=1_000_000)]
Execution = Duration | tuple[Duration, ...] | dict[BatchSize, Duration]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all parts of the file have in common: nothing in them is ignored."""


# Pools in the application file, as structures: see `headgate.config.schema`.


class BreakerSpec(Section, frozen=True):
    """What keeps a serverless pool from doing harm."""

    failures: Annotated[
        Count, Meta(description="In a row: then the platform is left alone for a while.")
    ] = 5
    rest: Annotated[
        Duration, Meta(description="For so long at first, and twice as long each time it fails.")
    ] = "5s"
    rest_max: Annotated[Duration, Meta(description="And no longer than that.")] = "60s"
    budget_per_minute: Annotated[
        Dollars | None, Meta(description="What may be spent there: $0.05. Default: no limit.")
    ] = None
    budget_per_day: Annotated[
        Dollars | None, Meta(description="Likewise: $10. Default: no limit.")
    ] = None


class PoolSpec(Section, frozen=True):
    """Places of one tier that are alike."""

    tier: Annotated[
        Literal["dedicated", "gpu", "serverless"],
        Meta(description="What kind of place it is."),
    ] = "gpu"
    memory: Annotated[
        Size, Meta(description="Of one node's device, or `unlimited`; of one serverless instance.")
    ] = "unlimited"
    price: Annotated[
        Price | None, Meta(description="Of one node: $1.20/h. Serverless: $0.0000166667/GB-s.")
    ] = None
    network: Annotated[Duration, Meta(description="One way from the gateway.")] = 0
    bandwidth: Annotated[
        str,
        Meta(
            title="bandwidth",
            examples=["10GB/s", "unlimited"],
            description="Between nodes.",
        ),
    ] = "unlimited"
    # To serve it, and not only to simulate it:
    provider: Annotated[
        Literal["local", "lambda", "sagemaker"] | None,
        Meta(
            description="Who runs it: workers on this machine, functions of AWS Lambda (a "
            "serverless pool) or endpoints of SageMaker. Default: local, where it has nodes."
        ),
    ] = None
    target: Annotated[
        str | None,
        Meta(
            description="The Lambda function (name, name:alias or ARN) or the SageMaker endpoint. "
            "{function} stands for what is called, {node} for the number of the node."
        ),
    ] = None
    endpoint_url: Annotated[
        str | None, Meta(description="Where that platform is asked. Default: at AWS.")
    ] = None
    region: Annotated[
        str | None, Meta(description="Of AWS. Default: as AWS's own settings have it.")
    ] = None
    # Not for serverless pools:
    nodes: Annotated[Count, Meta(description="How many.")] = 1
    slots: Annotated[Count, Meta(description="Batches a node runs at once.")] = 1
    queue: Annotated[
        CountOrZero, Meta(description="Batches a node holds back while its slots are taken.")
    ] = 0
    cpus: Annotated[Cpus | None, Meta(description="Of one node. Default: not a limit.")] = None
    gpu_share: Annotated[
        Share | None,
        Meta(description="Of one node. Default: no limit; 0/7 in a dedicated pool."),
    ] = None
    host_memory: Annotated[Size, Meta(description="Where evicted weights may wait.")] = "0B"
    idle_timeout: Annotated[
        Duration, Meta(description="An instance idle for so long retires, or `never`.")
    ] = "never"
    elastic: Annotated[
        bool, Meta(description="Nodes are taken, and paid for, only while they hold something.")
    ] = False
    boot: Annotated[Duration, Meta(description="How long it takes to take one of those.")] = 0
    # For serverless pools only:
    concurrency: Annotated[Count, Meta(description="Instances at most.")] = 1_000
    burst: Annotated[Count, Meta(description="Instances that can be started at once.")] = 1_000
    starts_rate: Annotated[
        str,
        Meta(title="rate", examples=["100/s"], description="How fast that burst is refilled."),
    ] = "100/s"
    keep_alive: Annotated[Duration, Meta(description="How long an idle instance stays.")] = "10min"
    request_price: Annotated[Price | None, Meta(description="Of one call: $0.20/1M.")] = None
    billing_step: Annotated[Duration, Meta(description="Running time is rounded up to it.")] = "1ms"
    max_age: Annotated[
        Duration, Meta(description="An instance this old is not used again, or `never`.")
    ] = "never"
    bills_start: Annotated[bool, Meta(description="Whether the cold start is on the bill.")] = True
    provision: Annotated[
        Duration, Meta(description="How long it takes until provisioned instances are there.")
    ] = "60s"
    provisioned_price: Annotated[
        Price | None, Meta(description="Of a provisioned instance: $0.0000041667/GB-s.")
    ] = None
    provisioned_run_price: Annotated[
        Price | None, Meta(description="And while it runs: $0.0000097222/GB-s.")
    ] = None
    guard: BreakerSpec = BreakerSpec()


__all__ = [
    "AppSpec",
    "BreakerSpec",
    "ClientSpec",
    "FunctionSpec",
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


# The JSON Schema of the application file, for editors and for other tools.
#
# `schema.json` beside this file is generated: `headgate schema > src/headgate/config/schema.json`.


def json_schema() -> dict[str, object]:
    """Return the schema that every application file conforms to.

    It knows shapes and ranges. What relates one part of the file to another (a stage and its
    function, say) is checked on loading only.
    """
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, **msgspec.json.schema(AppSpec)}
    return msgspec.json.decode(msgspec.json.encode(schema), type=dict[str, object])


def schema_text() -> str:
    """Return the content of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"
