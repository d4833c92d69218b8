"""The schema of the application file: which keys exist, their types, defaults and descriptions.

The sections of the file, in the order in which they are declared below:

- `functions`: models and processing steps, with execution times or with something to serve.
- `pools`: the machines and serverless platforms that functions run on.
- `pipelines`: what clients request, a function or a graph of functions.
- `slo`: the objective of pipelines that have none of their own.
- `clients`: who sends requests, with keys, limits and weights.
- `limits`: bounds that hold under every policy.
- `policy`: the name of the scheduling policy and its settings, which the policy itself checks.
- `serve`: settings of `headgate serve` only.
- `workload`, `simulation`: settings of `headgate simulate` only.

The structs mirror the YAML one to one and know nothing of the core. Quantities stay the text that
was written (`5ms`, `$1.20/h`), so that an application goes to an event log and comes back
unchanged. Maxima end in `_max`. The descriptions end up in the JSON Schema; an editor shows one of
them at a time, so each is a sentence that stands alone.

`schema.json` beside this file is generated: `headgate schema > src/headgate/config/schema.json`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

__all__ = [
    "AppSpec",
    "BreakerSpec",
    "BudgetSpec",
    "ClientSpec",
    "FunctionSpec",
    "LimitsSpec",
    "OverheadsSpec",
    "PipelineSpec",
    "PoolSpec",
    "Section",
    "ServeSpec",
    "ServiceTimesSpec",
    "SimulationSpec",
    "SloSpec",
    "StageSpec",
    "StreamSpec",
    "VariantSpec",
    "WorkloadSpec",
    "json_schema",
    "schema_text",
]

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
ExecTime = Duration | tuple[Duration, ...] | dict[BatchSize, Duration]


def json_schema() -> dict[str, object]:
    """Return the JSON Schema that every application file conforms to.

    It knows shapes and ranges. What relates one part of the file to another (a stage and its
    function, say) is checked on loading only.
    """
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, **msgspec.json.schema(AppSpec)}
    return msgspec.json.decode(msgspec.json.encode(schema), type=dict[str, object])


def schema_text() -> str:
    """Return the content of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the application file. An unknown key is an error, never ignored."""


class VariantSpec(Section, frozen=True):
    """One implementation of a function: its execution times and the resources it needs."""

    exec_time: Annotated[
        ExecTime | None,
        Meta(
            description="Execution time of a batch: one time for a single item, a list of times by "
            "batch size, or a map from batch size to time, interpolated linearly in between."
        ),
    ] = None
    cold_start: Annotated[
        Duration,
        Meta(description="Cold start time of an instance: process, imports and weights."),
    ] = 0
    swap_in: Annotated[
        Duration, Meta(description="Time to load the weights from host memory onto the device.")
    ] = 0
    memory: Annotated[
        Size, Meta(description="Device memory that an instance holds while its weights are loaded.")
    ] = "0B"
    output: Annotated[Size, Meta(description="Size of the result of one item.")] = "0B"
    slowdown: Annotated[
        tuple[Annotated[float, Meta(ge=1, le=1_000_000)], ...],
        Meta(
            min_length=1,
            description="Factors on `exec_time` when 1, 2, 3, ... batches run on a node at once.",
        ),
    ] = (1.0,)
    concurrency: Annotated[
        Count, Meta(description="Largest number of batches that one instance runs at once.")
    ] = 1
    cpus: Annotated[Cpus, Meta(description="CPUs that a running batch occupies.")] = 0.0
    gpu_share: Annotated[
        Share, Meta(description="Share of a GPU, in sevenths, that a running batch occupies.")
    ] = "0/7"
    pools: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Pools that the function may run on. Default: every pool with enough "
            "resources."
        ),
    ] = None

    # To serve it, and not only to simulate it:
    model: Annotated[
        str | None,
        Meta(description="Path of an ONNX file, relative to the application file."),
    ] = None
    code: Annotated[
        str | None,
        Meta(
            description="Python class or function, as module:name. The module is looked up beside "
            "the application file."
        ),
    ] = None
    # `Any`: what a class of the user's takes is its own business.
    options: Annotated[
        dict[str, Any], Meta(description="Keyword arguments of the class that `code` names.")
    ] = field(default_factory=dict)
    batch_max: Annotated[
        Annotated[int, Meta(ge=1, le=1_024)],
        Meta(
            description="Largest batch, in items, that a worker measures where `exec_time` is not "
            "given."
        ),
    ] = 16


class FunctionSpec(VariantSpec, frozen=True):
    """A model or a processing step, with one implementation or several under `variants`."""

    prewarm_nodes: Annotated[
        CountOrZero | None,
        Meta(
            description="Number of nodes that load the function before its first request. Default: "
            "every node with room if the function has `model` or `code`, otherwise none."
        ),
    ] = None

    idempotent: Annotated[
        bool,
        Meta(
            description="Whether a batch of the function may run again when it is unknown whether "
            "it ran."
        ),
    ] = True
    variants: Annotated[
        dict[Name, VariantSpec],
        Meta(description="Implementations of the function. The first one is the reference."),
    ] = field(default_factory=dict)


class BreakerSpec(Section, frozen=True):
    """The circuit breaker of a serverless pool."""

    failure_threshold: Annotated[
        Count, Meta(description="Consecutive failures that open the circuit breaker.")
    ] = 5
    cooldown: Annotated[
        Duration,
        Meta(
            description="First cool-down of an open circuit breaker. The cool-down doubles each "
            "time the trial call after it fails."
        ),
    ] = "5s"
    cooldown_max: Annotated[
        Duration, Meta(description="Maximum cool-down of the circuit breaker.")
    ] = "60s"


class BudgetSpec(Section, frozen=True):
    """How much a serverless pool may cost, for calls and for instances that are kept warm."""

    per_minute: Annotated[
        Dollars | None,
        Meta(description="Maximum spend on the pool per minute: $0.05. Default: no limit."),
    ] = None
    per_day: Annotated[
        Dollars | None,
        Meta(description="Maximum spend on the pool per day: $10. Default: no limit."),
    ] = None


class PoolSpec(Section, frozen=True):
    """A pool: identical nodes, or one serverless platform."""

    tier: Annotated[
        Literal["dedicated", "gpu", "serverless"],
        Meta(
            description="Kind of pool: machines without a GPU, machines with a GPU, or functions "
            "paid per call."
        ),
    ] = "gpu"
    memory: Annotated[
        Size,
        Meta(
            description="Device memory of one node, or `unlimited`. In a serverless pool: memory "
            "of one instance."
        ),
    ] = "unlimited"
    price: Annotated[
        Price | None,
        Meta(
            description="Price of one node: $1.20/h. In a serverless pool: price of execution, "
            "$0.0000166667/GB-s."
        ),
    ] = None
    network_delay: Annotated[
        Duration, Meta(description="One-way network delay between the gateway and the pool.")
    ] = 0
    bandwidth: Annotated[
        str,
        Meta(
            title="bandwidth",
            examples=["10GB/s", "unlimited"],
            description="Network bandwidth between two nodes.",
        ),
    ] = "unlimited"
    # To serve it, and not only to simulate it:
    provider: Annotated[
        Literal["local", "lambda", "sagemaker"] | None,
        Meta(
            description="Who runs the pool: workers on this machine, AWS Lambda (serverless pools "
            "only) or SageMaker endpoints. Default: local; a serverless pool is only simulated."
        ),
    ] = None
    target: Annotated[
        str | None,
        Meta(
            description="Lambda function (name, name:alias or ARN) or SageMaker endpoint to call. "
            "{function} stands for the function's name, {node} for the number of the node."
        ),
    ] = None
    endpoint_url: Annotated[
        str | None,
        Meta(description="URL of the provider's API. Default: the provider's own, at AWS."),
    ] = None
    region: Annotated[
        str | None,
        Meta(description="AWS Region of the provider. Default: as configured for the AWS SDK."),
    ] = None
    # Not for serverless pools:
    nodes: Annotated[Count, Meta(description="Number of nodes.")] = 1
    slots: Annotated[
        Count, Meta(description="Largest number of batches that a node runs at once.")
    ] = 1
    queue_max: Annotated[
        CountOrZero,
        Meta(description="Largest number of batches queued on a node while its slots are busy."),
    ] = 0
    cpus: Annotated[
        Cpus | None, Meta(description="CPUs of one node. Default: CPUs are no limit.")
    ] = None
    gpu_share: Annotated[
        Share | None,
        Meta(
            description="GPU share of one node, in sevenths. Default: no limit; 0/7 in a dedicated "
            "pool."
        ),
    ] = None
    host_memory: Annotated[
        Size, Meta(description="Host memory of one node that caches weights evicted from a device.")
    ] = "0B"
    idle_timeout: Annotated[
        Duration, Meta(description="Idle time after which an instance stops, or `never`.")
    ] = "never"
    elastic: Annotated[
        bool,
        Meta(
            description="Whether nodes are rented on demand and paid for only while they hold an "
            "instance."
        ),
    ] = False
    boot_time: Annotated[Duration, Meta(description="Boot time of a rented node.")] = 0
    # For serverless pools only:
    concurrency: Annotated[
        Count, Meta(description="Concurrency limit: largest number of instances at once.")
    ] = 1_000
    burst_concurrency: Annotated[
        Count,
        Meta(description="Number of instances that can start at once before the burst limit."),
    ] = 1_000
    burst_refill: Annotated[
        str,
        Meta(
            title="rate",
            examples=["100/s"],
            description="Rate at which the burst limit on instance starts refills.",
        ),
    ] = "100/s"
    keep_alive: Annotated[
        Duration, Meta(description="Time that the platform keeps an idle instance.")
    ] = "10min"
    request_price: Annotated[
        Price | None, Meta(description="Price of one call, besides its execution: $0.20/1M.")
    ] = None
    billing_step: Annotated[
        Duration, Meta(description="Execution time is billed in multiples of this, rounded up.")
    ] = "1ms"
    age_max: Annotated[
        Duration,
        Meta(description="Maximum age of an instance. An older one is not reused. Or `never`."),
    ] = "never"
    bill_cold_start: Annotated[
        bool, Meta(description="Whether the platform bills the cold start of an instance.")
    ] = True
    provisioning_time: Annotated[
        Duration,
        Meta(description="Time until requested provisioned concurrency is ready."),
    ] = "60s"
    provisioned_price: Annotated[
        Price | None,
        Meta(description="Price of provisioned concurrency, used or not: $0.0000041667/GB-s."),
    ] = None
    provisioned_run_price: Annotated[
        Price | None,
        Meta(description="Price of execution on provisioned concurrency: $0.0000097222/GB-s."),
    ] = None
    circuit_breaker: BreakerSpec = BreakerSpec()
    budget: BudgetSpec = BudgetSpec()


class SloSpec(Section, frozen=True):
    """The service-level objective of a pipeline."""

    latency: Annotated[
        Duration, Meta(description="Deadline of a request after its arrival, or `never`.")
    ] = "never"
    quantile: Annotated[
        Percentage, Meta(description="Share of requests that must meet the deadline.")
    ] = "99%"
    rate_tolerance: Annotated[
        float,
        Meta(
            ge=1,
            le=1_000_000,
            description="Multiple of the forecast request rate that must still be served in time.",
        ),
    ] = 1.0
    hard_deadline: Annotated[
        bool,
        Meta(description="Whether a request that still waits at its deadline is dropped."),
    ] = False


class StageSpec(Section, frozen=True):
    """A stage of a pipeline: a function, and the stages that run before it."""

    function: Annotated[str, Meta(description="Name of the function that the stage runs.")]
    after: Annotated[
        tuple[str, ...], Meta(description="Stages that must finish before this stage.")
    ] = ()
    only_if_unsure: Annotated[
        bool,
        Meta(
            description="For a cascade: the stage runs only if a stage before it was unsure of its "
            "result."
        ),
    ] = False
    unsure_probability: Annotated[
        Percentage,
        Meta(description="Estimated probability that an `only_if_unsure` stage runs."),
    ] = "100%"


class PipelineSpec(Section, frozen=True):
    """What clients request: one `function`, or a graph of `stages`."""

    function: Annotated[
        str | None, Meta(description="Function of a pipeline that has a single stage.")
    ] = None
    stages: Annotated[
        dict[Name, StageSpec] | None,
        Meta(description="Stages of the pipeline: a directed acyclic graph of functions."),
    ] = None
    slo: Annotated[
        SloSpec | None,
        Meta(
            description="Objective of the pipeline. Default: the `slo` at the top level of the "
            "file."
        ),
    ] = None


class ClientSpec(Section, frozen=True):
    """A client (tenant) that sends requests."""

    key: Annotated[
        HashedKey | None,
        Meta(description="Hash of the client's API key, as `headgate key` prints it."),
    ] = None
    rate: Annotated[
        str | None,
        Meta(
            title="rate",
            examples=["100/s"],
            description="Rate limit of the client. Default: no limit.",
        ),
    ] = None
    burst: Annotated[
        Count, Meta(description="Requests that the client may send at once within its `rate`.")
    ] = 100
    concurrency: Annotated[
        Count | None,
        Meta(description="Largest number of open requests of the client. Default: no limit."),
    ] = None

    weight: Annotated[
        float,
        Meta(
            gt=0, le=1_000_000, description="Weight of the client under policies with fair shares."
        ),
    ] = 1.0


class LimitsSpec(Section, frozen=True):
    """Limits that hold under every policy. A request that reaches one fails or is rejected."""

    attempts_max: Annotated[
        Count, Meta(description="Maximum number of executions of one task.")
    ] = 3
    refusals_max: Annotated[
        CountOrZero,
        Meta(description="Number of times a node may refuse a task before the task fails."),
    ] = 64
    backoff: Annotated[
        Duration, Meta(description="Back-off of a node or pool after it refused a batch.")
    ] = "1ms"
    timeout_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Timeout of a batch, as a multiple of its expected time (by profile or by "
            "recent batches, whichever is longer), and at least 1s. 0: no timeout.",
        ),
    ] = 0.0
    open_requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000_000,
            description="Maximum number of requests that are admitted and not yet completed.",
        ),
    ] = 10_000_000


class StreamSpec(Section, frozen=True):
    """A stream of simulated requests."""

    pipeline: Annotated[str, Meta(description="Pipeline that the requests are for.")]
    process: Annotated[
        str, Meta(description="Arrival process: poisson:rate=50/s, or a trace (trace:FILE).")
    ]
    client: Annotated[
        str | None,
        Meta(description="Client that sends the requests. Default: the first client."),
    ] = None


class WorkloadSpec(Section, frozen=True):
    """The workload that `headgate simulate` uses unless the command line gives another."""

    duration: Annotated[Duration, Meta(description="Time after which arrivals stop.")] = "60s"
    arrivals: Annotated[tuple[StreamSpec, ...], Meta(description="Streams of requests.")] = ()


class ServiceTimesSpec(Section, frozen=True):
    """Ground truth of the simulation: actual service times, which no policy knows in advance."""

    distribution: Annotated[
        Literal["exact", "exponential", "lognormal", "uniform", "observed"],
        Meta(
            description="Distribution of actual service times around their mean. `observed`: the "
            "factors under `observed`."
        ),
    ] = "exact"
    cv: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="Coefficient of variation of service times, for the distributions "
            "`lognormal` and `uniform`.",
        ),
    ] = 0.0
    scale: Annotated[
        dict[str, Factor],
        Meta(description="Actual mean service time over the profile's, by function. Default: 1."),
    ] = field(default_factory=dict)
    observed: Annotated[
        dict[str, Annotated[tuple[Factor, ...], Meta(min_length=1, max_length=10_000)]],
        Meta(
            description="For the distribution `observed`: equally likely values of the actual "
            "service time divided by the profile's, by function, as `headgate calibrate` finds "
            "them. Default: 1."
        ),
    ] = field(default_factory=dict)


class OverheadsSpec(Section, frozen=True):
    """Overheads of the scheduler and of the client's side, in simulated time."""

    decision: Annotated[
        Duration, Meta(description="Time that the scheduler takes for each event.")
    ] = 0
    per_work_unit: Annotated[
        Duration,
        Meta(description="Time that the scheduler takes for each unit of work a policy reports."),
    ] = 0
    client_overhead: Annotated[
        Duration,
        Meta(
            description="Time that a request takes before it reaches the scheduler and after it is "
            "completed: part of the latency that the client measures."
        ),
    ] = 0


class SimulationSpec(Section, frozen=True):
    """Settings of `headgate simulate`."""

    service_times: ServiceTimesSpec = ServiceTimesSpec()
    overheads: OverheadsSpec = OverheadsSpec()


class ServeSpec(Section, frozen=True):
    """Settings of `headgate serve`. Options of the command line take precedence."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port. 0: any free port.")] = 8080
    grpc_port: Annotated[
        Port | None, Meta(description="gRPC port. Default: gRPC is not served.")
    ] = None
    tls_certificate: Annotated[
        str | None, Meta(description="File with the TLS certificate chain (PEM).")
    ] = None
    tls_key: Annotated[
        str | None,
        Meta(
            description="File with the private key (PEM). Default: the key is in the file of the "
            "certificate."
        ),
    ] = None
    log: Annotated[str | None, Meta(description="File for the event log.")] = None
    lame_duck: Annotated[
        Duration,
        Meta(description="On SIGTERM, report not-ready but keep serving for this long."),
    ] = "5s"
    drain: Annotated[
        Duration,
        Meta(
            description="On SIGTERM, after `lame_duck`: stop accepting requests and wait at most "
            "this long for open ones."
        ),
    ] = "20s"
    deadline_max: Annotated[
        Duration, Meta(description="Longest deadline that a client may ask for.")
    ] = "60s"
    execution_timeout: Annotated[
        Duration,
        Meta(
            description="Execution timeout of a batch. A worker whose batch runs longer is killed "
            "and restarted."
        ),
    ] = "60s"
    body_max: Annotated[Size, Meta(description="Largest request body.")] = "64MiB"
    connections_max: Annotated[
        Count, Meta(description="Maximum number of open connections, for HTTP and gRPC each.")
    ] = 4_096
    shared_memory: Annotated[
        Size,
        Meta(
            description="Shared memory for tensors between the gateway and a worker, in each "
            "direction."
        ),
    ] = "64MiB"
    overload_status: Annotated[
        Literal[429, 503],
        Meta(description="HTTP status of requests that are rejected because of overload."),
    ] = 429
    log_size: Annotated[
        Size,
        Meta(description="Size of the newest segment at which the event log is rotated."),
    ] = "256MiB"
    log_age: Annotated[
        Duration,
        Meta(
            description="Age of the newest segment at which the event log is rotated. `never`: "
            "rotate by size only."
        ),
    ] = "24h"
    log_keep: Annotated[
        CountOrZero,
        Meta(description="Number of older event log segments to keep; the rest are deleted."),
    ] = 8
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe level of messages that are logged on stderr."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="Format of messages on stderr: text, or one JSON object per line."),
    ] = "text"
    access_log: Annotated[
        bool, Meta(description="Whether each request is logged on stderr with its outcome.")
    ] = False
    expose_errors: Annotated[
        bool,
        Meta(description="Whether clients see the text of an exception that a function raises."),
    ] = False
    response_max: Annotated[Size, Meta(description="Largest response body.")] = "64MiB"
    memory_max: Annotated[
        Size,
        Meta(
            description="Memory budget of the gateway for request bodies, tensors and responses "
            "of all clients together; at least twice `body_max`. Each client has a share of its "
            "own."
        ),
    ] = "512MiB"


class AppSpec(Section, frozen=True):
    """A Headgate application."""

    functions: Annotated[
        dict[Name, FunctionSpec], Meta(description="Models and processing steps, by name.")
    ]
    pools: Annotated[
        dict[Name, PoolSpec],
        Meta(
            description="Pools of nodes or serverless platforms that functions run on, by name. "
            "Default: one dedicated node in a pool called `local`."
        ),
    ] = field(default_factory=dict)
    pipelines: Annotated[
        dict[Name, PipelineSpec],
        Meta(
            description="What clients can request, by name. Default: one pipeline for each "
            "function."
        ),
    ] = field(default_factory=dict)
    slo: Annotated[
        SloSpec | None,
        Meta(description="Objective of every pipeline that has no `slo` of its own."),
    ] = None
    clients: Annotated[
        dict[Name, ClientSpec],
        Meta(description="Clients (tenants), by name. Default: one client, called `client`."),
    ] = field(default_factory=dict)
    limits: LimitsSpec = LimitsSpec()
    # `Any`: a policy's settings are its own business, and msgspec has no name for "plain data".
    policy: Annotated[
        str | dict[str, Any],
        Meta(
            description="Name of the scheduling policy, or a map with its `name` and its settings."
        ),
    ] = "headgate"
    serve: ServeSpec = ServeSpec()
    workload: WorkloadSpec = WorkloadSpec()
    simulation: SimulationSpec = SimulationSpec()
