"""What the user declares: functions, pipelines, objectives and pools.

These records never change during a run. They carry small integer ids (their place in the `App`)
because the hot path and the logs speak in ids; names are for people.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from headgate.core.clock import NEVER_NS


class Tier:
    """What kind of place a pool is."""

    DEDICATED: Final = 0  # machines that are ours while we pay for them
    GPU: Final = 1  # accelerators, shareable in sevenths
    SERVERLESS: Final = 2  # functions: the pool picks or starts an instance per request


LAMBDA_PAYLOAD_BYTES_MAX: Final = 6 << 20  # of one call of AWS Lambda, each way
PREWARM_ALL_NODES: Final = 1_000_001  # more nodes than there can be
TIER_NAMES: Final = ("dedicated", "gpu", "serverless")


@dataclass(frozen=True)
class Shape:
    """Compute that one running batch of an instance holds (its *active* resources).

    Memory is not here: it is held while the weights are loaded (*resident*), so it belongs to the
    `Profile`. That difference is what separates a GPU in a container from kernels as a service.
    """

    cpu_milli: int = 0
    gpu_sevenths: int = 0


@dataclass(frozen=True)
class Profile:
    """What is known, in advance, about one variant of a function."""

    exec_ns: tuple[int, ...]  # exec_ns[b - 1] is the time of a batch of b items
    slowdown: tuple[float, ...] = (1.0,)  # slowdown[c - 1] when c batches share the node
    cold_start_ns: int = 0  # cold start: process, imports, weights
    swap_in_ns: int = 0  # swap-in: weights from host memory to the device
    memory_bytes: int = 0  # held while the weights are on the device
    output_bytes: int = 0  # size of the result of one item

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
        """How much longer everything takes while `concurrency` batches share the node.

        Beyond the table capacity is taken to be used up: one more slows all in proportion. A
        table of one entry says that company does no harm.
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
    """One way to run a function: a build of it, in a shape, on certain pools."""

    id: int
    name: str
    function_id: int
    pool_ids: tuple[int, ...]
    profile: Profile
    shape: Shape = Shape()
    concurrency: int = 1  # batches one instance runs at the same time


@dataclass(frozen=True)
class Function:
    """A model or a step that can be loaded and run."""

    id: int
    name: str
    variants: tuple[Variant, ...]
    is_idempotent: bool = True  # may be run again when nobody knows whether it ran
    prewarm_nodes: int = 0  # nodes that are to hold it before anybody asks

    @property
    def reference_exec_ns(self) -> int:
        """Expected time of one item on the first variant: the policies' notion of its length."""
        return self.variants[0].profile.exec_ns[0]


@dataclass(frozen=True)
class Slo:
    """A latency target with its quantile."""

    latency_ns: int = NEVER_NS
    quantile: float = 0.99
    rate_tolerance: float = (
        1.0  # still to be met when the rate rises to this multiple of the forecast
    )
    is_hard: bool = False  # a request still waiting at its deadline is expired

    def deadline_ns(self, arrival_ns: int) -> int:
        """When a request that arrives then must be answered."""
        return NEVER_NS if self.latency_ns == NEVER_NS else arrival_ns + self.latency_ns


@dataclass(frozen=True)
class Stage:
    """One function of a pipeline and the stages it waits for."""

    function: Function
    after: tuple[int, ...] = ()
    # A cascade: this stage runs only for items that the stages before it were unsure about.
    only_if_unsure: bool = False
    unsure_probability: float = 1.0


@dataclass(frozen=True)
class Pipeline:
    """A directed acyclic graph of stages under one objective."""

    id: int
    name: str
    stages: tuple[Stage, ...]
    slo: Slo = Slo()
    successors: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        successors: list[list[int]] = [[] for _ in self.stages]
        for index, stage in enumerate(self.stages):
            for before in stage.after:
                successors[before].append(index)
        object.__setattr__(self, "successors", tuple(tuple(s) for s in successors))


@dataclass(frozen=True)
class FaasPlatform:
    """What a function platform promises and charges."""

    memory_bytes: int
    concurrency_max: int = 1_000
    burst_concurrency: int = 1_000  # instances that can be started at once
    burst_refill_per_s: float = 100.0  # refill of that burst
    keep_alive_ns: int = 600_000_000_000
    age_max_ns: int = NEVER_NS  # an instance this old is not used again, however busy it was
    usd_per_gb_s: float = 0.0
    usd_per_request: float = 0.0
    billing_step_ns: int = 1_000_000
    bills_cold_start: bool = True  # whether the cold start is on the bill
    # Instances that are kept ready for us, and what that costs while they wait and while they run.
    provisioning_ns: int = 60_000_000_000  # until they are there
    provisioned_usd_per_gb_s: float = 0.0
    provisioned_run_usd_per_gb_s: float = 0.0
    ping_ns: int = 20_000_000  # how long a call takes that only keeps its instance awake
    payload_bytes_max: int = LAMBDA_PAYLOAD_BYTES_MAX  # that a call can carry, each way

    @property
    def gigabytes(self) -> float:
        """Memory of one instance, as prices have it."""
        return self.memory_bytes / (1 << 30)

    @property
    def ping_every_ns(self) -> int:
        """How often an instance must be called to stay."""
        return self.keep_alive_ns // 2

    def usd(self, length_ns: int, *, is_provisioned: bool = False) -> float:
        """What one call of this length costs.

        >>> round(FaasPlatform(1 << 30, usd_per_gb_s=2.0, usd_per_request=1.0).usd(1_500_000), 6)
        1.004
        """
        steps = -(-length_ns // self.billing_step_ns)
        rate = self.provisioned_run_usd_per_gb_s if is_provisioned else self.usd_per_gb_s
        billed_s = steps * self.billing_step_ns / 1e9
        return billed_s * self.gigabytes * rate + self.usd_per_request


@dataclass(frozen=True)
class BreakerConfig:
    """What keeps a pool that is paid by the call from doing harm."""

    failure_threshold: int = 5  # in a row; then it is left alone
    cooldown_ns: int = (
        5_000_000_000  # for so long at first, and twice as long each time it fails again
    )
    cooldown_max_ns: int = 60_000_000_000
    usd_per_minute: float = inf
    usd_per_day: float = inf


@dataclass(frozen=True)
class Pool:
    """Places of one tier that are alike. A serverless pool has no nodes of its own."""

    id: int
    name: str
    tier: int = Tier.GPU
    nodes: int = 1
    slots: int = 1  # batches a node runs at once: 1 is exclusive
    queue_max: int = 0  # batches a node may hold back while its slots are taken
    cpu_milli: int = NEVER_NS  # compute of one node; NEVER_NS is "not a limit"
    gpu_sevenths: int = NEVER_NS
    memory_bytes: int = NEVER_NS  # device memory of one node
    host_memory_bytes: int = 0  # where evicted weights may wait
    idle_timeout_ns: int = NEVER_NS  # an instance idle for so long retires itself
    is_elastic: bool = False  # nodes are taken, and paid for, only while they hold something
    boot_ns: int = 0  # to take one of those, before anything can start on it
    usd_per_hour: float = 0.0  # of one node
    network_ns: int = 0  # one way, gateway to node
    bytes_per_s: float = 0.0  # between nodes; 0 is "instantly"
    faas: FaasPlatform | None = None
    breaker: BreakerConfig = BreakerConfig()


@dataclass(frozen=True)
class Limits:
    """Bounds that the Scheduler holds for every policy. Reaching one is an outcome."""

    attempts_max: int = 3  # runs of one task, failed and lost ones counted
    refusals_max: int = 64  # times one task may be turned away before it fails
    backoff_ns: int = 1_000_000  # how long a place that refused is left alone
    timeout_factor: float = 0.0  # give a batch up after this multiple of what such take; 0 is never
    open_requests_max: int = 10_000_000
    timeout_floor_ns: int = 1_000_000_000  # a batch is given up no sooner than this
    start_backoff_ns: int = 1_000_000_000  # until a variant whose start failed is tried again
    start_backoff_max_ns: int = 60_000_000_000  # it doubles with each failure, up to this


@dataclass(frozen=True)
class Client:
    """Somebody who sends requests and is accounted for them."""

    id: int
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class App:
    """Everything that is declared: the whole configuration of a Scheduler but its policy."""

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

    def variants_on(self, pool_id: int) -> tuple[Variant | None, ...]:
        """For each function, the variant that runs on this pool (the first one), or None."""
        return tuple(
            next((v for v in function.variants if pool_id in v.pool_ids), None)
            for function in self.functions
        )
