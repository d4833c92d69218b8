"""The schema of the application file: which keys exist, their types, bounds, defaults and meaning.

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

The structs mirror the YAML one to one and know nothing of the core. A field is declared once: the
loader, the JSON Schema, the options of the command line and the tables of the documents follow
from its type and its `Meta`, and the code that uses it reads the struct. A quantity is a number in
the unit of the field's name, and its key in the file has no unit: `drain_ns` is `drain: 20s`.
Maxima end in `_max`. The descriptions end up in the JSON Schema; an editor shows one of them at a
time, so each is a sentence that stands alone.
"""

from __future__ import annotations

import re
from math import inf
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from headgate.config.quantities import (
    BytesPerS,
    CpuMilli,
    DurationNs,
    GpuSevenths,
    PositiveNs,
    PositiveOrNeverNs,
    RatePerS,
    Share,
    SizeBytes,
    SizeOrUnlimitedBytes,
    Usd,
    UsdPerGbS,
    UsdPerHour,
    UsdPerRequest,
    UsdPerRequestOrUnlimited,
)
from headgate.core.clock import HOUR_NS, MILLISECOND_NS, MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.model import UNLIMITED

Name = Annotated[
    str,
    # The look-ahead is for a trailing line break, which `$` alone would let pass.
    Meta(title="name", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$(?!\n)", examples=["resnet", "m-2"]),
]
Text = Annotated[str, Meta(min_length=1)]
Price = Annotated[str, Meta(title="price", examples=["$1.20/h", "$0.20/1M"])]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
BatchSize = Annotated[
    str, Meta(title="batch size", pattern=r"^[1-9][0-9]{0,3}$(?!\n)", examples=["1", "8"])
]
HashedKey = Annotated[
    str, Meta(title="hashed key", pattern=r"^sha256:[0-9a-f]{64}$(?!\n)", examples=["sha256:..."])
]
Factor = Annotated[float, Meta(gt=0, le=1_000_000)]
Factors = Annotated[tuple[Factor, ...], Meta(min_length=1, max_length=10_000)]
ExecTimeNs = PositiveNs | tuple[PositiveNs, ...] | dict[BatchSize, PositiveNs]

BATCH_MAX: Final = 16  # by default
_EXECUTION_TIMEOUT_NS_MIN: Final = 100_000_000  # less, and a worker would die before it is up
_MESSAGE_BYTES_MAX: Final = 1 << 30  # no message between processes is longer
_LOG_BYTES_MIN: Final = 64 << 10  # each segment has the whole header


def about(description: str, **bounds: float) -> Any:
    """Describe a field, in a sentence that stands alone, and bound it: ge, gt, le, lt."""
    return Meta(description=description, **bounds)  # type: ignore[call-overload]


def _key(name: str) -> str:
    """Return the key in the file of a field: its name without the unit.

    >>> _key("drain_ns"), _key("body_bytes_max"), _key("rate_per_s")
    ('drain', 'body_max', 'rate')
    """
    return re.sub("_(ns|bytes|per_s)(?=_max$|$)", "", name)


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_key):
    """A section of the application file. An unknown key is an error, never ignored."""


class ShapeSpec(Section, frozen=True):
    """A shape in which an implementation of a function can run."""

    exec_time_ns: Annotated[
        ExecTimeNs, about("Execution time of a batch in this shape, in any form of `exec_time`.")
    ]
    cpu_milli: Annotated[CpuMilli, about("CPUs of the shape.")] = field(default=0, name="cpus")
    gpu_sevenths: Annotated[GpuSevenths, about("Share of a GPU, in sevenths, of the shape.")] = (
        field(default=0, name="gpu_share")
    )


class VariantSpec(Section, frozen=True):
    """One implementation of a function: its execution times and the resources it needs."""

    exec_time_ns: Annotated[
        ExecTimeNs | None,
        about(
            "Execution time of a batch: one time for a single item, a list of times by "
            "batch size, or a map from batch size to time, interpolated linearly in between."
        ),
    ] = None
    exec_time_estimated: Annotated[
        bool,
        about(
            "Whether `exec_time` may be far off. Requests that it rules out are then tried now and "
            "then. Times that a worker measures when it starts are such estimates."
        ),
    ] = False
    cold_start_ns: Annotated[
        DurationNs, about("Cold start time of an instance: process, imports and weights.")
    ] = 0
    swap_in_ns: Annotated[
        DurationNs, about("Time to load the weights from host memory onto the device.")
    ] = 0
    unused_after_ns: Annotated[
        PositiveOrNeverNs,
        about("Idle time after which an instance is no longer in use, or `never`."),
    ] = NEVER_NS
    retire_after_ns: Annotated[
        PositiveOrNeverNs,
        about("Time after which an instance that is not in use stops, or `never`."),
    ] = NEVER_NS
    memory_bytes: Annotated[
        SizeBytes, about("Device memory that an instance holds while its weights are loaded.")
    ] = 0
    output_bytes: Annotated[SizeBytes, about("Size of the result of one item.")] = 0
    slowdown: Annotated[
        tuple[Annotated[float, Meta(ge=1, le=1_000_000)], ...],
        Meta(
            min_length=1,
            description="Factors on `exec_time` when 1, 2, 3, ... batches run on a node at once.",
        ),
    ] = (1.0,)
    interference: Annotated[
        dict[Name, Factor],
        about(
            "Factors on `exec_time` while a batch of another function runs on the same node, by "
            "function. Several factors multiply. Default: 1."
        ),
    ] = field(default_factory=dict)
    concurrency: Annotated[
        Count, about("Largest number of batches that one instance runs at once.")
    ] = 1
    cpu_milli: Annotated[CpuMilli, about("CPUs that a running batch occupies.")] = field(
        default=0, name="cpus"
    )
    gpu_sevenths: Annotated[
        GpuSevenths, about("Share of a GPU, in sevenths, that a running batch occupies.")
    ] = field(default=0, name="gpu_share")
    shapes: Annotated[
        tuple[ShapeSpec, ...],
        about(
            "Further shapes that a policy may choose, each with its execution times. `cpus`, "
            "`gpu_share` and `exec_time` of the function are its first shape.",
        ),
    ] = ()
    pools: Annotated[
        tuple[str, ...] | None,
        about("Pools that the function may run on. Default: every pool with enough resources."),
    ] = None

    # To serve it, and not only to simulate it:
    model: Annotated[
        str | None, about("Path of an ONNX file, relative to the application file.")
    ] = None
    code: Annotated[
        str | None,
        about(
            "Python class or function, as module:name. The module is looked up beside "
            "the application file."
        ),
    ] = None
    # `Any`: what a class of the user's takes is its own business.
    options: Annotated[
        dict[str, Any], about("Keyword arguments of the class that `code` names.")
    ] = field(default_factory=dict)
    batch_max: Annotated[
        int,
        about(
            "Largest batch, in items, that a worker measures where `exec_time` is not given.",
            ge=1,
            le=1_024,
        ),
    ] = BATCH_MAX


class FunctionSpec(VariantSpec, frozen=True):
    """A model or a processing step, with one implementation or several under `variants`."""

    prewarm_nodes: Annotated[
        CountOrZero | None,
        about(
            "Number of nodes that load the function before its first request. Default: "
            "every node with room if the function has `model` or `code`, otherwise none."
        ),
    ] = None

    idempotent: Annotated[
        bool,
        about("Whether a batch of the function may run again when it is unknown whether it ran."),
    ] = True
    variants: Annotated[
        dict[Name, VariantSpec],
        about("Implementations of the function. The first one is the reference."),
    ] = field(default_factory=dict)


class BreakerSpec(Section, frozen=True):
    """The circuit breaker of a serverless pool."""

    failure_threshold: Annotated[
        Count, about("Consecutive failures that open the circuit breaker.")
    ] = 5
    cooldown_ns: Annotated[
        PositiveNs,
        about(
            "First cool-down of an open circuit breaker. The cool-down doubles each "
            "time the trial call after it fails."
        ),
    ] = 5 * SECOND_NS
    cooldown_max_ns: Annotated[PositiveNs, about("Maximum cool-down of the circuit breaker.")] = (
        MINUTE_NS
    )


class BudgetSpec(Section, frozen=True):
    """How much a serverless pool may cost, for calls and for instances that are kept warm."""

    usd_per_minute: Annotated[
        Usd | None, about("Maximum spend on the pool per minute: $0.05. Default: no limit.")
    ] = field(default=None, name="per_minute")
    usd_per_day: Annotated[
        Usd | None, about("Maximum spend on the pool per day: $10. Default: no limit.")
    ] = field(default=None, name="per_day")


class FaasTerms(Section, frozen=True):
    """Limits and prices of a serverless platform, besides its price of execution."""

    concurrency_max: Annotated[
        Count, about("Concurrency limit: largest number of instances at once.")
    ] = field(default=1_000, name="concurrency")
    burst_concurrency: Annotated[
        Count, about("Number of instances that can start at once before the burst limit.")
    ] = 1_000
    burst_refill_per_s: Annotated[
        RatePerS, about("Rate at which the burst limit on instance starts refills.")
    ] = 100.0
    keep_alive_ns: Annotated[
        DurationNs, about("Time that the platform keeps an idle instance.")
    ] = 10 * MINUTE_NS
    usd_per_request: Annotated[
        UsdPerRequest | None, about("Price of one call, besides its execution: $0.20/1M.")
    ] = field(default=None, name="request_price")
    billing_step_ns: Annotated[
        PositiveNs, about("Execution time is billed in multiples of this, rounded up.")
    ] = MILLISECOND_NS
    age_max_ns: Annotated[
        PositiveOrNeverNs,
        about("Maximum age of an instance. An older one is not reused. Or `never`."),
    ] = NEVER_NS
    bills_cold_start: Annotated[
        bool, about("Whether the platform bills the cold start of an instance.")
    ] = field(default=True, name="bill_cold_start")
    provisioning_ns: Annotated[
        DurationNs, about("Time until requested provisioned concurrency is ready.")
    ] = field(default=MINUTE_NS, name="provisioning_time")
    provisioned_usd_per_gb_s: Annotated[
        UsdPerGbS | None,
        about("Price of provisioned concurrency, used or not: $0.0000041667/GB-s."),
    ] = field(default=None, name="provisioned_price")
    provisioned_run_usd_per_gb_s: Annotated[
        UsdPerGbS | None,
        about("Price of execution on provisioned concurrency: $0.0000097222/GB-s."),
    ] = field(default=None, name="provisioned_run_price")


class PoolSpec(FaasTerms, frozen=True):
    """A pool: identical nodes, or one serverless platform."""

    tier: Annotated[
        Literal["dedicated", "gpu", "serverless"],
        about(
            "Kind of pool: machines without a GPU, machines with a GPU, or functions paid per call."
        ),
    ] = "gpu"
    memory_bytes: Annotated[
        SizeOrUnlimitedBytes,
        about(
            "Device memory of one node, or `unlimited`. In a serverless pool: memory "
            "of one instance."
        ),
    ] = UNLIMITED
    price: Annotated[
        Price | None,
        about(
            "Price of one node: $1.20/h. In a serverless pool: price of execution, "
            "$0.0000166667/GB-s."
        ),
    ] = None
    network_ns: Annotated[
        DurationNs, about("One-way network delay between the gateway and the pool.")
    ] = field(default=0, name="network_delay")
    bytes_per_s: Annotated[BytesPerS, about("Network bandwidth between two nodes.")] = field(
        default=0.0, name="bandwidth"
    )
    host: Annotated[
        str | None,
        about(
            "Machine of `hosts` that the nodes, or the functions, of the pool run on. "
            "Default: each has CPUs of its own."
        ),
    ] = None
    # To serve it, and not only to simulate it:
    provider: Annotated[
        Literal["local", "lambda", "sagemaker", "ray"] | None,
        about(
            "Who runs the pool: workers on this machine, AWS Lambda (serverless pools only), "
            "SageMaker endpoints or Ray. Default: local; a serverless pool is only simulated."
        ),
    ] = None
    address: Annotated[
        str | None,
        about(
            "Ray cluster of the pool: host:port of its head, or `auto` for the cluster that this "
            "machine is part of. Default: an embedded Ray of one node is started."
        ),
    ] = None
    target: Annotated[
        str | None,
        about(
            "Lambda function (name, name:alias or ARN) or SageMaker endpoint to call. "
            "{function} stands for the function's name, {node} for the number of the node."
        ),
    ] = None
    endpoint_url: Annotated[
        str | None, about("URL of the provider's API. Default: the provider's own, at AWS.")
    ] = None
    region: Annotated[
        str | None, about("AWS Region of the provider. Default: as configured for the AWS SDK.")
    ] = None
    # Not for serverless pools:
    nodes: Annotated[Count, about("Number of nodes.")] = 1
    slots: Annotated[Count, about("Largest number of batches that a node runs at once.")] = 1
    queue_max: Annotated[
        CountOrZero, about("Largest number of batches queued on a node while its slots are busy.")
    ] = 0
    cpu_milli: Annotated[
        CpuMilli | None, about("CPUs of one node. Default: CPUs are no limit.")
    ] = field(default=None, name="cpus")
    gpu_sevenths: Annotated[
        GpuSevenths | None,
        about("GPU share of one node, in sevenths. Default: no limit; 0/7 in a dedicated pool."),
    ] = field(default=None, name="gpu_share")
    compute: Annotated[
        Literal["per_batch", "per_instance", "resident"],
        about(
            "When the shape of a batch is chosen, and what holds its CPUs and GPU share: chosen at "
            "dispatch and held by a running batch, chosen when an instance starts and held by its "
            "running batches, or held by an instance as long as it is loaded."
        ),
    ] = "per_batch"
    cpu_usd_per_hour: Annotated[
        UsdPerHour,
        about("Price of one CPU while it is held, besides that of the node: $0.04/h."),
    ] = field(default=0.0, name="cpu_price")
    gpu_usd_per_hour: Annotated[
        UsdPerHour,
        about("Price of a whole GPU while it is held, besides that of the node: $2.50/h."),
    ] = field(default=0.0, name="gpu_price")
    host_memory_bytes: Annotated[
        SizeBytes, about("Host memory of one node that caches weights evicted from a device.")
    ] = 0
    idle_timeout_ns: Annotated[
        PositiveOrNeverNs, about("Idle time after which an instance stops, or `never`.")
    ] = NEVER_NS
    is_elastic: Annotated[
        bool,
        about("Whether nodes are rented on demand and paid for only while they hold an instance."),
    ] = field(default=False, name="elastic")
    boot_ns: Annotated[DurationNs, about("Boot time of a rented node.")] = field(
        default=0, name="boot_time"
    )
    # For serverless pools only, besides the terms above:
    circuit_breaker: BreakerSpec = BreakerSpec()
    budget: BudgetSpec = BudgetSpec()


class HostSpec(Section, frozen=True):
    """A machine that pools share."""

    cpu_milli: Annotated[
        CpuMilli,
        Meta(gt=0),
        about("CPUs of the machine, which all that runs on its pools shares."),
    ] = field(name="cpus")


class SloSpec(Section, frozen=True):
    """The service-level objective of a pipeline."""

    latency_ns: Annotated[
        PositiveOrNeverNs, about("Deadline of a request after its arrival, or `never`.")
    ] = NEVER_NS
    quantile: Annotated[
        Share, about("Share of requests that must meet the deadline.", gt=0, lt=1)
    ] = 0.99
    rate_tolerance: Annotated[
        float,
        about(
            "Multiple of the forecast request rate that must still be served in time.",
            ge=1,
            le=1_000_000,
        ),
    ] = 1.0
    is_hard: Annotated[
        bool, about("Whether a request that still waits at its deadline is dropped.")
    ] = field(default=False, name="hard_deadline")
    cost_usd: Annotated[
        UsdPerRequestOrUnlimited,
        about("Largest cost of a request, of what its own batches hold while they run."),
    ] = field(default=inf, name="cost")


class StageSpec(Section, frozen=True):
    """A stage of a pipeline: a function, and the stages that run before it."""

    function: Annotated[str, about("Name of the function that the stage runs.")]
    after: Annotated[tuple[str, ...], about("Stages that must finish before this stage.")] = ()
    only_if_unsure: Annotated[
        bool,
        about("For a cascade: the stage runs only if the stages right before it were all unsure."),
    ] = False
    unsure_probability: Annotated[
        Share, about("Estimated probability that an `only_if_unsure` stage runs.")
    ] = 1.0


class PipelineSpec(Section, frozen=True):
    """What clients request: one `function`, or a graph of `stages`."""

    function: Annotated[str | None, about("Function of a pipeline that has a single stage.")] = None
    stages: Annotated[
        dict[Name, StageSpec] | None,
        about("Stages of the pipeline: a directed acyclic graph of functions."),
    ] = None
    slo: Annotated[
        SloSpec | None,
        about("Objective of the pipeline. Default: the `slo` at the top level of the file."),
    ] = None


class ClientSpec(Section, frozen=True):
    """A client (tenant) that sends requests."""

    key: Annotated[
        HashedKey | None, about("Hash of the client's API key, as `headgate key` prints it.")
    ] = None
    rate_per_s: Annotated[
        RatePerS | None, about("Rate limit of the client. Default: no limit.")
    ] = None
    burst: Annotated[
        Count | None,
        about(
            "Requests that the client may send at once within its `rate`. Default: those of one "
            "second of its `rate`, at least 1."
        ),
    ] = None
    concurrency: Annotated[
        Count | None, about("Largest number of open requests of the client. Default: no limit.")
    ] = None

    weight: Annotated[
        float, about("Weight of the client under policies with fair shares.", gt=0, le=1_000_000)
    ] = 1.0
    priority: Annotated[
        int,
        about(
            "Priority of the client's requests over those of other clients, where there is not "
            "room for all: smaller is more urgent. The priority that a client sends with a request "
            "orders its own requests only.",
            ge=-1_000_000,
            le=1_000_000,
        ),
    ] = 0


class LimitsSpec(Section, frozen=True):
    """Limits that hold under every policy. A request that reaches one fails or is rejected."""

    attempts_max: Annotated[Count, about("Maximum number of executions of one task.")] = 3
    refusals_max: Annotated[
        CountOrZero, about("Number of times a node may refuse a task before the task fails.")
    ] = 64
    backoff_ns: Annotated[
        DurationNs, about("Back-off of a node or pool after it refused a batch.")
    ] = MILLISECOND_NS
    timeout_factor: Annotated[
        float,
        about(
            "Timeout of a batch, as a multiple of its expected time (by profile or by "
            "recent batches, whichever is longer), and at least 1s. 0: no timeout.",
            ge=0,
            le=1_000_000,
        ),
    ] = 0.0
    open_requests_max: Annotated[
        int,
        about(
            "Maximum number of requests that are admitted and not yet completed.",
            ge=1,
            le=1_000_000_000,
        ),
    ] = 10_000_000
    admission: Annotated[
        Literal["enforce", "observe"],
        about(
            "Whether requests that the policy rejects are rejected (`enforce`), or only counted "
            "and run like admitted ones (`observe`)."
        ),
    ] = "enforce"


class StreamSpec(Section, frozen=True):
    """A stream of simulated requests."""

    pipeline: Annotated[str, about("Pipeline that the requests are for.")]
    process: Annotated[str, about("Arrival process: poisson:rate=50/s, or a trace (trace:FILE).")]
    client: Annotated[
        str | None, about("Client that sends the requests. Default: the first client.")
    ] = None


class WorkloadSpec(Section, frozen=True):
    """The workload that `headgate simulate` uses unless the command line gives another."""

    duration_ns: Annotated[PositiveNs, about("Time after which arrivals stop.")] = MINUTE_NS
    arrivals: Annotated[tuple[StreamSpec, ...], about("Streams of requests.")] = ()


class ServiceTimesSpec(Section, frozen=True):
    """Ground truth of the simulation: actual service times, which no policy knows in advance."""

    distribution: Annotated[
        Literal["exact", "exponential", "lognormal", "uniform", "observed"],
        about(
            "Distribution of actual service times around their mean. `observed`: the "
            "factors under `observed`."
        ),
    ] = "exact"
    cv: Annotated[
        float,
        about(
            "Coefficient of variation of service times, for the distributions "
            "`lognormal` and `uniform`.",
            ge=0,
            le=100,
        ),
    ] = 0.0
    scale: Annotated[
        dict[str, Factor],
        about("Actual mean service time over the profile's, by function. Default: 1."),
    ] = field(default_factory=dict)
    observed: Annotated[
        dict[str, Factors | Annotated[dict[BatchSize, Factors], Meta(min_length=1)]],
        about(
            "For the distribution `observed`: equally likely values of the actual "
            "service time divided by the profile's, by function, or by function and the batch "
            "size from which on they hold, as `headgate calibrate` finds them. Default: 1."
        ),
    ] = field(default_factory=dict)


class OverheadsSpec(Section, frozen=True):
    """Overheads of the scheduler and of the client's side, in simulated time."""

    decision_ns: Annotated[DurationNs, about("Time that the scheduler takes for each event.")] = 0
    per_work_unit_ns: Annotated[
        DurationNs, about("Time that the scheduler takes for each unit of work a policy reports.")
    ] = 0
    arrival_ns: Annotated[
        DurationNs,
        about(
            "Time that receiving a request takes from the batches on nodes: by so much each is "
            "longer for every request that arrives while it runs."
        ),
    ] = 0
    refusal_ns: Annotated[
        DurationNs, about("Time that refusing a request takes from them besides.")
    ] = 0
    client_overhead_ns: Annotated[
        DurationNs | Annotated[tuple[DurationNs, ...], Meta(min_length=1, max_length=10_000)],
        about(
            "Time that a request takes before it reaches the scheduler and after it is "
            "completed, part of the latency that the client measures: one, or equally likely ones."
        ),
    ] = 0


class SimulationSpec(Section, frozen=True):
    """Settings of `headgate simulate`."""

    service_times: ServiceTimesSpec = ServiceTimesSpec()
    overheads: OverheadsSpec = OverheadsSpec()


class ServeSpec(Section, frozen=True):
    """Settings of `headgate serve`. Options of the command line take precedence."""

    host: Annotated[Text, about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, about("HTTP port. 0: any free port.")] = 8080
    grpc_port: Annotated[Port | None, about("gRPC port. Default: gRPC is not served.")] = None
    gateways: Annotated[
        int,
        about("Number of gateway processes, which share the ports and the workers.", ge=1, le=32),
    ] = 1
    tls_certificate: Annotated[Text | None, about("File with the TLS certificate chain (PEM).")] = (
        None
    )
    tls_key: Annotated[
        Text | None,
        about(
            "File with the private key (PEM). Default: the key is in the file of the certificate."
        ),
    ] = None
    log: Annotated[Text | None, about("File for the event log.")] = None
    lame_duck_ns: Annotated[
        DurationNs, about("On SIGTERM, report not-ready but keep serving for this long.")
    ] = 5 * SECOND_NS
    drain_ns: Annotated[
        DurationNs,
        about(
            "On SIGTERM, after `lame_duck`: stop accepting requests and wait at most "
            "this long for open ones."
        ),
    ] = 20 * SECOND_NS
    deadline_max_ns: Annotated[PositiveNs, about("Longest deadline that a client may ask for.")] = (
        MINUTE_NS
    )
    execution_timeout_ns: Annotated[
        DurationNs,
        about(
            "Execution timeout of a batch. A worker whose batch runs longer is killed "
            "and restarted.",
            ge=_EXECUTION_TIMEOUT_NS_MIN,
        ),
    ] = MINUTE_NS
    body_bytes_max: Annotated[
        SizeBytes, about("Largest request body.", ge=1, le=_MESSAGE_BYTES_MAX)
    ] = 64 << 20
    connections_max: Annotated[
        Count, about("Maximum number of open connections, for HTTP and gRPC each.")
    ] = 4_096
    shared_memory_bytes: Annotated[
        SizeBytes,
        about(
            "Shared memory for tensors between the gateway and a worker, in each direction.",
            ge=64 << 10,
            le=64 << 30,
        ),
    ] = 64 << 20
    overload_status: Annotated[
        Literal[429, 503], about("HTTP status of requests that are rejected because of overload.")
    ] = 429
    log_size_bytes: Annotated[
        SizeBytes,
        about(
            "Size of the newest segment at which the event log is rotated.",
            ge=_LOG_BYTES_MIN,
            le=1 << 40,
        ),
    ] = 256 << 20
    log_age_ns: Annotated[
        PositiveOrNeverNs,
        about(
            "Age of the newest segment at which the event log is rotated. `never`: "
            "rotate by size only."
        ),
    ] = 24 * HOUR_NS
    log_keep: Annotated[
        CountOrZero, about("Number of older event log segments to keep; the rest are deleted.")
    ] = 8
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        about("Least severe level of messages that are logged on stderr."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        about("Format of messages on stderr: text, or one JSON object per line."),
    ] = "text"
    access_log: Annotated[
        bool, about("Whether each request is logged on stderr with its outcome.")
    ] = False
    expose_errors: Annotated[
        bool, about("Whether clients see the text of an exception that a function raises.")
    ] = False
    response_bytes_max: Annotated[
        SizeBytes, about("Largest response body.", ge=1, le=_MESSAGE_BYTES_MAX)
    ] = 64 << 20
    memory_bytes_max: Annotated[
        SizeBytes,
        about(
            "Memory budget of the gateway for request bodies, tensors and responses "
            "of all clients together. Less than twice `body_max` counts as that. Each client has "
            "a share of its own.",
            ge=1,
            le=1 << 40,
        ),
    ] = 512 << 20


class AppSpec(Section, frozen=True):
    """A Headgate application."""

    functions: Annotated[dict[Name, FunctionSpec], about("Models and processing steps, by name.")]
    pools: Annotated[
        dict[Name, PoolSpec],
        about(
            "Pools of nodes or serverless platforms that functions run on, by name. "
            "Default: one dedicated node in a pool called `local`."
        ),
    ] = field(default_factory=dict)
    hosts: Annotated[
        dict[Name, HostSpec],
        about("Machines whose CPUs several pools share, by name: a laptop that runs everything."),
    ] = field(default_factory=dict)
    pipelines: Annotated[
        dict[Name, PipelineSpec],
        about("What clients can request, by name. Default: one pipeline for each function."),
    ] = field(default_factory=dict)
    slo: Annotated[
        SloSpec | None, about("Objective of every pipeline that has no `slo` of its own.")
    ] = None
    clients: Annotated[
        dict[Name, ClientSpec],
        about("Clients (tenants), by name. Default: one client, called `client`."),
    ] = field(default_factory=dict)
    limits: LimitsSpec = LimitsSpec()
    # `Any`: a policy's settings are its own business, and msgspec has no name for "plain data".
    policy: Annotated[
        str | dict[str, Any],
        about("Name of the scheduling policy, or a map with its `name` and its settings."),
    ] = "headgate"
    serve: ServeSpec = ServeSpec()
    workload: WorkloadSpec = WorkloadSpec()
    simulation: SimulationSpec = SimulationSpec()
