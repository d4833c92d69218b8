"""What `headgate serve --gateways N` changes in the application that each gateway serves."""

from __future__ import annotations

import pytest

from headgate.cli.commands.serve import _shared_by_gateways
from headgate.config import AppConfig, declare, from_spec
from headgate.core.errors import ConfigError


def config(policy: str) -> AppConfig:
    return declare(
        functions={"f": {"exec_time": "1ms", "pools": ["cpu", "faas"]}},
        pools={
            "cpu": {"tier": "dedicated", "slots": 2},
            "queued": {"tier": "dedicated", "queue_max": 9},
            "faas": {
                "tier": "serverless",
                "memory": "1GB",
                "price": "$0.00001/GB-s",
                "concurrency": 10,
                "budget": {"per_minute": "$0.06"},
            },
        },
        policy=policy,
        serve={"gateways": 3},
    )


def test_nodes_queue_and_budgets_are_divided() -> None:
    shared = from_spec(_shared_by_gateways(config("round_robin"), "app"), "app")
    by_name = {pool.name: pool for pool in shared.app.pools}
    assert [by_name[name].queue_max for name in ("cpu", "queued")] == [4, 9]
    platform = by_name["faas"]
    assert platform.faas is not None
    assert platform.faas.concurrency_max == 3
    assert platform.breaker.usd_per_minute == pytest.approx(0.02)


@pytest.mark.parametrize("policy", ["headgate", "swayam"])
def test_policy_that_is_made_for_refusals_gets_them(policy: str) -> None:
    shared = from_spec(_shared_by_gateways(config(policy), "app"), "app")
    assert [pool.queue_max for pool in shared.app.pools[:2]] == [0, 9]


def test_policy_that_scales_by_what_it_sees_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"app: policy: 'autoscale': cannot be run by 3 gateways"):
        _shared_by_gateways(config("autoscale"), "app")
