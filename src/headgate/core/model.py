"""What the user declares: functions, pipelines, objectives, pools and prices.

These records never change during a run. They carry small integer ids (their index in the `App`),
because the hot path and the logs use ids; names are for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from headgate.core.clock import HOUR_NS, NEVER_NS


class Tier:
    """The kind of capacity that a pool offers."""

    DEDICATED: Final = 0  # machines that are paid for while we hold them
    GPU: Final = 1  # accelerators, shareable in sevenths
    SERVERLESS: Final = 2  # FaaS: the platform picks or starts an instance per call


LAMBDA_PAYLOAD_BYTES_MAX: Final = 6 << 20  # payload limit of an AWS Lambda call, each way
# No limit on a size, a share or a count: the largest integer that a compiled build keeps in a
# register.
UNLIMITED: Final = 2**62 - 1
ONE_CPU_MILLI: Final = 1_000
MIB: Final = 1 << 20
TIER_NAMES: Final = ("dedicated", "gpu", "serverless")


class Compute:
    """When a shape is chosen on the nodes of a pool, and while it is held."""

    PER_BATCH: Final = 0  # chosen at dispatch, held while the batch runs
    PER_INSTANCE: Final = 1  # chosen when an instance starts, held while a batch of it runs
    RESIDENT: Final = 2  # chosen when an instance starts, held while its weights are loaded


COMPUTE_NAMES: Final = ("per_batch", "per_instance", "resident")
ENFORCE: Final = "enforce"  # the values of `Limits.admission`
OBSERVE: Final = "observe"


@dataclass(frozen=True)
class Shape:
    """Compute that a running batch holds, or an instance where compute is resident (`Compute`).

    Memory is not part of it: memory is held while the weights are loaded, whatever the shape, so it
    belongs to the `Profile`.
    """

    cpu_milli: int = 0
    gpu_sevenths: int = 0

    @property
    def cores(self) -> int:
        """Its CPUs, a part of one counted as one: the threads that a batch may use.

        >>> Shape(cpu_milli=1500).cores
        2
        """
        return -(-self.cpu_milli // 1000)

    def __str__(self) -> str:
        return f"{self.cpu_milli / 1000:g} CPUs and {self.gpu_sevenths}/7 of a GPU"


@dataclass(frozen=True)
class ShapeTimes:
    """The execution times of a variant in one of its shapes."""

    shape: Shape
    exec_ns: tuple[int, ...]  # exec_ns[b - 1] is the time of a batch of b items


@dataclass(frozen=True)
class Profile:
    """The measured or declared performance of one variant of a function."""

    # exec_ns[b - 1] is the time of a batch of b items, in the variant's own shape.
    exec_ns: tuple[int, ...]
    slowdown: tuple[float, ...] = (1.0,)  # slowdown[c - 1] applies when c batches share the node
    cold_start_ns: int = 0  # process, imports, weights
    swap_in_ns: int = 0  # weights from host memory to the device
    memory_bytes: int = 0  # held while the weights are on the device
    output_bytes: int = 0  # size of the result of one item
    # Whether `exec_ns` may be far off, as when it was measured while the machine was busy.
    is_estimate: bool = False

    @property
    def items_max(self) -> int:
        """The largest batch this variant can run."""
        return len(self.exec_ns)

    def time_ns(self, items: int, concurrency: int = 1) -> int:
        """Expected time of a batch of `items` while `concurrency` batches share the node.

        >>> Profile(exec_ns=(10, 16), slowdown=(1.0, 1.5)).time_ns(2, concurrency=4)
        48
        """
        base_ns = self.exec_ns[items - 1]
        if concurrency <= 1:
            return base_ns
        return int(base_ns * self.slowdown_at(concurrency))

    def slowdown_at(self, concurrency: int) -> float:
        """Slowdown factor while `concurrency` batches share the node.

        Beyond the measured range we assume saturation: slowdown grows linearly with concurrency. A
        single entry means no interference.
        """
        slowdown = self.slowdown
        known = len(slowdown)
        if known == 1:
            return 1.0
        if concurrency <= known:
            return slowdown[concurrency - 1]
        return slowdown[known - 1] * concurrency / known


@dataclass(frozen=True)
class Variant:
    """A build of a function, for certain pools, with the shapes in which it runs.

    Its execution time is a table over shapes and batch sizes: `shapes[id].exec_ns[items - 1]`. The
    index of a shape is its id in orders, actions and logs. Weights are the same in every shape.

    >>> small, large = Shape(gpu_sevenths=1), Shape(gpu_sevenths=4)
    >>> more = (ShapeTimes(large, (6, 7)),)
    >>> variant = Variant(0, "v", 0, (0,), Profile((10, 19)), small, more_shapes=more)
    >>> [variant.exec_ns(2, shape_id) for shape_id in range(2)]
    [19, 7]
    """

    id: int
    name: str
    function_id: int
    pool_ids: tuple[int, ...]
    profile: Profile
    shape: Shape = Shape()  # its own shape, id 0: what runs where nobody chooses
    concurrency: int = 1  # batches one instance runs at the same time
    more_shapes: tuple[ShapeTimes, ...] = ()  # ids 1, 2, 3, ...
    # By function id: the measured factor on the time of a batch while one batch of that function
    # runs on the same node. Empty: no interference beside `Profile.slowdown`.
    interference: tuple[float, ...] = ()
    # An instance that is idle for `unused_after_ns` is no longer in use, and one that is not in use
    # for `retire_after_ns` stops. Without the first, `Pool.idle_timeout_ns` applies.
    unused_after_ns: int = NEVER_NS
    retire_after_ns: int = NEVER_NS
    shapes: tuple[ShapeTimes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = ShapeTimes(self.shape, self.profile.exec_ns)
        object.__setattr__(self, "shapes", (own, *self.more_shapes))

    def wanted_cpu_milli(self, shape_id: int = 0) -> int:
        """CPUs that a batch in a shape keeps busy: one, if the shape does not say."""
        return self.shapes[shape_id].shape.cpu_milli or ONE_CPU_MILLI

    def exec_ns(self, items: int, shape_id: int = 0) -> int:
        """Expected time of a batch in a shape, alone on its node."""
        return self.shapes[shape_id].exec_ns[items - 1]

    def items_max(self, shape_id: int = 0) -> int:
        """The largest batch that runs in a shape."""
        return len(self.shapes[shape_id].exec_ns)


@dataclass(frozen=True)
class Function:
    """A model, or any other step, that can be loaded and run."""

    id: int
    name: str
    variants: tuple[Variant, ...]
    is_idempotent: bool = True  # may be retried although it may have run
    prewarm_nodes: int = 0  # nodes that load it before the first request

    @property
    def reference_exec_ns(self) -> int:
        """Expected time of one item on the first variant: what policies take for its length."""
        return self.variants[0].profile.exec_ns[0]


@dataclass(frozen=True)
class Slo:
    """A latency objective at a quantile, and the largest cost of a request."""

    latency_ns: int = NEVER_NS
    quantile: float = 0.99
    rate_tolerance: float = 1.0  # the SLO holds up to this multiple of the forecast rate
    is_hard: bool = False  # a request that still waits at its deadline expires
    # Of what a request itself holds: its part of the nodes while its batches run, or its calls.
    cost_usd: float = inf

    def deadline_ns(self, arrival_ns: int) -> int:
        """Deadline of a request that arrives at `arrival_ns`."""
        return NEVER_NS if self.latency_ns == NEVER_NS else arrival_ns + self.latency_ns


@dataclass(frozen=True)
class Stage:
    """One function of a pipeline and the stages it waits for."""

    function: Function
    after: tuple[int, ...] = ()
    # A cascade: this stage runs only for requests whose previous stages were unsure.
    only_if_unsure: bool = False
    unsure_probability: float = 1.0
    name: str = ""  # unique within the pipeline, where it comes from a file


@dataclass(frozen=True)
class Pipeline:
    """A directed acyclic graph of stages under one SLO, in topological order.

    Raises `ValueError` if a stage precedes one that it waits for. The order of stages with no path
    between them decides ties, so whoever reads stages from a file must make it independent of the
    order in the file.
    """

    id: int
    name: str
    stages: tuple[Stage, ...]
    slo: Slo = Slo()
    successors: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        successors: list[list[int]] = [[] for _ in self.stages]
        for index, stage in enumerate(self.stages):
            for before in stage.after:
                if before >= index:
                    raise ValueError(f"pipeline {self.name}: stage {index} precedes stage {before}")
                successors[before].append(index)
        object.__setattr__(self, "successors", tuple(tuple(s) for s in successors))

    def longest_to(self, times: Sequence[float]) -> list[float]:
        """By stage: the length of the longest path that ends with it, given each stage's time."""
        lengths: list[float] = []
        for stage, time in zip(self.stages, times, strict=True):
            lengths.append(time + max([lengths[i] for i in stage.after], default=0.0))
        return lengths

    def longest_from(self, times: Sequence[float]) -> list[float]:
        """By stage: the length of the longest path that begins with it, given each stage's time."""
        lengths = list(times)
        for index in reversed(range(len(lengths))):
            lengths[index] += max([lengths[i] for i in self.successors[index]], default=0.0)
        return lengths

    def critical_path(self, times: Sequence[float]) -> list[int]:
        """The stages of the longest path, the first one first, given each stage's time.

        >>> f = Function(0, "f", ())
        >>> fork = Pipeline(0, "p", (Stage(f), Stage(f, (0,)), Stage(f, (0,)), Stage(f, (1, 2))))
        >>> fork.critical_path([1, 2, 5, 1]), fork.longest_to([1, 2, 5, 1])
        ([0, 2, 3], [1.0, 3.0, 6.0, 7.0])
        """
        lengths = self.longest_to(times)
        path: list[int] = []
        candidates: Sequence[int] = range(len(lengths))
        while candidates:
            last = max(candidates, key=lambda index: lengths[index])
            path.append(last)
            candidates = self.stages[last].after
        return path[::-1]


@dataclass(frozen=True)
class FaasPlatform:
    """Limits and prices of a FaaS platform at one memory size."""

    memory_bytes: int
    concurrency_max: int = 1_000
    burst_concurrency: int = 1_000  # instances that can be started at once
    burst_refill_per_s: float = 100.0  # instance starts per second that refill the burst
    keep_alive_ns: int = 600_000_000_000  # an instance idle for this long is removed
    age_max_ns: int = NEVER_NS  # an instance older than this is not used again
    usd_per_gb_s: float = 0.0
    usd_per_request: float = 0.0
    billing_step_ns: int = 1_000_000
    bills_cold_start: bool = True  # the cold start is billed like execution
    # Provisioned concurrency: instances kept warm by the platform, priced while idle and running.
    provisioning_ns: int = 60_000_000_000  # until a provisioned instance is ready
    provisioned_usd_per_gb_s: float = 0.0
    provisioned_run_usd_per_gb_s: float = 0.0
    ping_ns: int = 20_000_000  # duration of a call that only keeps its instance warm
    payload_bytes_max: int = LAMBDA_PAYLOAD_BYTES_MAX  # of a call, each way

    @property
    def gigabytes(self) -> float:
        """Memory of one instance in the unit of prices (2**30 bytes)."""
        return self.memory_bytes / (1 << 30)

    @property
    def ping_every_ns(self) -> int:
        """Interval of the ping calls that keep an instance warm; 0: pings keep nothing warm."""
        return self.keep_alive_ns // 2

    def usd(self, length_ns: int, *, is_provisioned: bool = False) -> float:
        """Cost of one call of this duration.

        >>> round(FaasPlatform(1 << 30, usd_per_gb_s=2.0, usd_per_request=1.0).usd(1_500_000), 6)
        1.004
        """
        steps = -(-length_ns // self.billing_step_ns)
        rate = self.provisioned_run_usd_per_gb_s if is_provisioned else self.usd_per_gb_s
        billed_s = steps * self.billing_step_ns / 1e9
        return billed_s * self.gigabytes * rate + self.usd_per_request


@dataclass(frozen=True)
class BreakerConfig:
    """Circuit breaker and spend limits of a pay-per-call pool."""

    failure_threshold: int = 5  # consecutive failures that open the breaker
    cooldown_ns: int = 5_000_000_000  # initial; it doubles each time the breaker opens again
    cooldown_max_ns: int = 60_000_000_000
    usd_per_minute: float = inf
    usd_per_day: float = inf


@dataclass(frozen=True)
class Host:
    """A machine whose CPUs are shared by all that runs on its pools."""

    id: int
    name: str
    cpu_milli: int

    def slowdown(self, wanted_milli: int) -> float:
        """By how much all is slower that wants so many CPUs together, and gets equal parts.

        >>> Host(0, "laptop", 2_000).slowdown(3_000)
        1.5
        """
        return max(1.0, wanted_milli / self.cpu_milli)


@dataclass(frozen=True)
class Pool:
    """Identical nodes of one tier. A serverless pool has no nodes of its own."""

    id: int
    name: str
    tier: int = Tier.GPU
    nodes: int = 1
    slots: int = 1  # batches a node runs at once: 1 is exclusive
    queue_max: int = 0  # batches a node may queue while its slots are taken
    cpu_milli: int = UNLIMITED  # compute of one node
    gpu_sevenths: int = UNLIMITED
    compute: int = Compute.PER_BATCH
    memory_bytes: int = UNLIMITED  # device memory of one node
    host_memory_bytes: int = 0  # host memory of one node for evicted weights
    idle_timeout_ns: int = NEVER_NS  # an instance that is idle for this long stops
    is_elastic: bool = False  # nodes are rented, and paid for, only while they hold an instance
    boot_ns: int = 0  # boot time of a rented node
    usd_per_hour: float = 0.0  # per node
    # Besides the node: per CPU and GPU that a batch, or where it is resident an instance, holds.
    cpu_usd_per_hour: float = 0.0
    gpu_usd_per_hour: float = 0.0
    network_ns: int = 0  # one way, gateway to node
    bytes_per_s: float = 0.0  # bandwidth between nodes; 0: transfers take no time
    faas: FaasPlatform | None = None
    breaker: BreakerConfig = BreakerConfig()
    host: Host | None = None  # None: every node, and every call, has CPUs of its own

    def has_room_for(self, shape: Shape) -> bool:
        """Whether an empty node has the compute of a shape."""
        return shape.cpu_milli <= self.cpu_milli and shape.gpu_sevenths <= self.gpu_sevenths

    def count_of(self, shape: Shape) -> int:
        """How many times an empty node has the compute of a shape; as often as slots, or less.

        >>> Pool(0, "gpu", slots=16, gpu_sevenths=7).count_of(Shape(gpu_sevenths=3))
        2
        """
        by_cpu = self.cpu_milli // shape.cpu_milli if shape.cpu_milli else self.slots
        by_gpu = self.gpu_sevenths // shape.gpu_sevenths if shape.gpu_sevenths else self.slots
        return min(self.slots, by_cpu, by_gpu)

    def part_of(self, shape: Shape) -> float:
        """The part of a node that a batch in a shape holds.

        >>> Pool(0, "gpu", slots=4, gpu_sevenths=7).part_of(Shape(gpu_sevenths=1))
        0.25
        """
        return max(
            1 / self.slots,
            shape.cpu_milli / max(1, self.cpu_milli),
            shape.gpu_sevenths / max(1, self.gpu_sevenths),
        )

    def batch_usd(self, shape: Shape, run_ns: int, start_ns: int = 0) -> float:
        """Cost of what a batch holds: its part of a node with the shape, or a call.

        `start_ns` is the cold start that the batch waits for.

        >>> Pool(0, "gpu", slots=2, usd_per_hour=3.6).batch_usd(Shape(), 1_000_000_000)
        0.0005
        """
        if self.faas is not None:
            return self.faas.usd(run_ns + (start_ns if self.faas.bills_cold_start else 0))
        held_ns = run_ns + start_ns
        node_usd = self.usd_per_hour * self.part_of(shape) * held_ns / HOUR_NS
        return node_usd + self.compute_usd(shape, held_ns)

    def compute_usd(self, shape: Shape, held_ns: int) -> float:
        """Cost of the compute of a shape, besides that of the node that has it.

        >>> pool = Pool(0, "gpu", cpu_usd_per_hour=1.0, gpu_usd_per_hour=7.0)
        >>> pool.compute_usd(Shape(500, 2), 3_600_000_000_000)
        2.5
        """
        cpu_usd = shape.cpu_milli / 1000 * self.cpu_usd_per_hour
        gpu_usd = shape.gpu_sevenths / 7 * self.gpu_usd_per_hour
        return (cpu_usd + gpu_usd) * (held_ns / HOUR_NS)


@dataclass(frozen=True)
class Limits:
    """Bounds that the Scheduler enforces for every policy. Reaching one is an outcome."""

    attempts_max: int = 3  # runs of one task, including failed and lost ones
    refusals_max: int = 64  # refusals of one task after which it fails
    backoff_ns: int = 1_000_000  # back-off from a node or pool that refused a batch
    timeout_factor: float = 0.0  # a batch times out after this multiple of its usual time; 0: never
    open_requests_max: int = 10_000_000
    timeout_floor_ns: int = 1_000_000_000  # lower bound on the timeout of a batch
    start_backoff_ns: int = 1_000_000_000  # initial back-off of a variant that failed to start
    start_backoff_max_ns: int = 60_000_000_000  # the back-off doubles per failure up to this
    # OBSERVE: a request that the policy rejects is reported and goes on as if it were admitted.
    admission: str = ENFORCE


@dataclass(frozen=True)
class Client:
    """A tenant: requests are accounted to it, and its weight sets its fair share.

    `priority` is what the operator declares, and the only priority that counts between clients:
    `Request.priority`, which the client chooses, orders the requests of that client alone.
    """

    id: int
    name: str
    weight: float = 1.0
    priority: int = 0  # smaller is more urgent


@dataclass(frozen=True)
class App:
    """Everything that is declared: the configuration of a Scheduler except its policy."""

    functions: tuple[Function, ...]
    pipelines: tuple[Pipeline, ...]
    pools: tuple[Pool, ...]
    clients: tuple[Client, ...] = (Client(0, "client"),)
    limits: Limits = Limits()
    variants: tuple[Variant, ...] = field(init=False)

    def __post_init__(self) -> None:
        variants = sorted((v for f in self.functions for v in f.variants), key=lambda v: v.id)
        if [v.id for v in variants] != list(range(len(variants))):
            raise ValueError("variant ids must be 0, 1, 2, ...")
        object.__setattr__(self, "variants", tuple(variants))

    def variants_in(self, pool_id: int) -> tuple[tuple[Variant, ...], ...]:
        """For each function, the variants that run on this pool, in the order declared."""
        return tuple(
            tuple(v for v in function.variants if pool_id in v.pool_ids)
            for function in self.functions
        )

    def variants_on(self, pool_id: int) -> tuple[Variant | None, ...]:
        """For each function, the variant that is fastest on this pool for one item, or None.

        It is the default of orders and queries that name only a function.
        """
        return tuple(
            min(variants, key=lambda v: v.profile.exec_ns[0], default=None)
            for variants in self.variants_in(pool_id)
        )


@dataclass(frozen=True)
class InstanceType:
    """A machine type that can be rented by the hour."""

    name: str
    cpus: float
    memory_bytes: int
    usd_per_hour: float
    boot_ns: int = 0  # from the order until an instance can be started on it
    network_ns: int = 0  # one way


@dataclass(frozen=True)
class FaasOffering:
    """A FaaS platform in a price list: memory sizes, each with CPU in proportion to its memory."""

    name: str
    terms: FaasPlatform  # prices and limits, at the largest size
    cpu_bytes: int  # the memory size that comes with one CPU
    sizes_bytes: tuple[int, ...]  # the memory sizes on offer, ascending
    network_ns: int = 0  # one way

    def cpus(self, memory_bytes: int) -> float:
        """CPUs of an instance of this memory size."""
        return memory_bytes / self.cpu_bytes

    def sized(self, memory_bytes: int) -> FaasPlatform:
        """The platform's terms at a memory size."""
        return replace(self.terms, memory_bytes=memory_bytes)
