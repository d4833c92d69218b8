"""A dedicated pool that spills over to a FaaS platform."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.core.events import BatchRefused
from headgate.core.model import App, FaasPlatform, Pipeline, Pool, Stage
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.metrics.columns import NOWHERE, SpanKind

from .apps import CLOUD, GPU, MS, at_ms, make_app, run, waits_ms
from .policies import SPILL


def cloud(platform: FaasPlatform) -> Pool:
    """Return the serverless pool with another platform."""
    return replace(CLOUD, faas=platform)


def test_requests_without_a_free_node_spill_over() -> None:
    """Instances of the platform are started for one request each and reused for later ones."""
    app = make_app(start_ms=5, pools=(GPU, CLOUD))
    columns, _ = run(app, at_ms(0, 1, 2, 20), policy=SPILL)
    assert waits_ms(columns) == [15.0, 15.0, 15.0, 10.0]
    platform = columns.resources[1]
    assert (platform.name, platform.cold_starts) == ("cloud", 2)
    ran = columns.spans.node[columns.spans.kind == SpanKind.RUN].tolist()
    assert sorted(ran) == [0, 0, 1, 1]
    assert columns.pools == ("gpu", "cloud")
    assert columns.requests.pool.tolist() == [0, 1, 1, 0]
    assert columns.requests.node.tolist() == [0, NOWHERE, NOWHERE, 0]


def test_an_idle_faas_instance_is_reused_during_keep_alive() -> None:
    app = make_app(start_ms=5, pools=(GPU, cloud(FaasPlatform(1, keep_alive_ns=20 * MS))))
    busy = (0, 30, 60, 100)  # the node
    columns, _ = run(app, at_ms(*sorted((*busy, 1, 31, 101))), policy=SPILL)
    assert waits_ms(columns) == [15.0, 15.0, 10.0, 10.0, 10.0, 10.0, 15.0]
    assert columns.resources[1].cold_starts == 2


@pytest.mark.parametrize(
    "platform",
    [
        FaasPlatform(1, concurrency_max=2),
        FaasPlatform(1, burst_concurrency=2, burst_refill_per_s=0.0),
    ],
)
def test_beyond_its_limits_the_platform_throttles(platform: FaasPlatform) -> None:
    """Four requests at once on one node and two instances: the fourth waits for a free one."""
    app = make_app(pools=(GPU, cloud(platform)))
    columns, observer = run(app, at_ms(0, 0, 0, 0), policy=SPILL)
    assert waits_ms(columns) == [10.0, 10.0, 10.0, 20.0]
    assert observer.count(BatchRefused) > 0


def test_billing_rounds_gigabyte_seconds_up_and_adds_a_price_per_request() -> None:
    terms = FaasPlatform(
        memory_bytes=2 * 1024**3,
        usd_per_gb_s=0.5,
        usd_per_request=0.25,
        billing_step_ns=100 * MS,
    )
    app = make_app(exec_ms=(120,), start_ms=30, pools=(GPU, cloud(terms)))
    columns, _ = run(app, at_ms(0, 0), policy=SPILL)
    assert columns.resources[1].usage_usd == pytest.approx(0.2 * 2 * 0.5 + 0.25)


def test_network_delay_applies_in_both_directions() -> None:
    app = make_app(pools=(GPU, replace(CLOUD, network_ns=3 * MS)))
    columns, _ = run(app, at_ms(0, 0), policy=SPILL)
    assert waits_ms(columns) == [10.0, 16.0]


def test_a_cascade_continues_wherever_its_first_stage_ran() -> None:
    """Every first result is unsure, so both requests run the second stage, one in the cloud."""
    app = make_app(exec_ms=(10, 10), pools=(GPU, CLOUD))
    first, second = app.functions
    stages = (Stage(first), Stage(second, (0,), only_if_unsure=True))
    cascade = replace(app, pipelines=(Pipeline(0, "p0", stages),))
    columns, _ = run(cascade, at_ms(0, 0), policy=SPILL)
    assert columns.requests.attempts.tolist() == [2, 2]
    assert waits_ms(columns) == [20.0, 20.0]


class Split(Policy):
    """The first function on the node, the second on the platform."""

    def on_task_ready(self, task: Task) -> None:
        if task.function.id == 0:
            self.orders.dispatch([task], self.view.nodes[0])
        else:
            self.orders.dispatch_to_pool([task], self.view.app.pools[1])

    def on_capacity(self, node: Node) -> None:
        pass


def test_outputs_of_another_pool_are_transferred_to_the_platform() -> None:
    """The first result, 1 MB, is on the node; its transfer takes a millisecond at 1 GB/s."""
    app = make_app(exec_ms=(10, 10), pools=(GPU, replace(CLOUD, bytes_per_s=1e9)))
    variant = app.variants[0]
    large = replace(variant, profile=replace(variant.profile, output_bytes=10**6))
    first, second = replace(app.functions[0], variants=(large,)), app.functions[1]
    chain = Pipeline(0, "p0", (Stage(first), Stage(second, (0,))))
    moving = App((first, second), (chain,), app.pools, app.clients)
    columns, _ = run(moving, at_ms(0), policy=PolicyKind(Split))
    assert waits_ms(columns) == [21.0]
