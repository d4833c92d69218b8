"""Pools in the application file, as structures: see `headgate.app.spec`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headgate.app.section import (
    Count,
    CountOrZero,
    Cpus,
    Dollars,
    Duration,
    Price,
    Section,
    Share,
    Size,
)


class GuardSpec(Section, frozen=True):
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
    guard: GuardSpec = GuardSpec()
