"""What `headgate serve --gateways N` changes in the application that each gateway serves."""

from __future__ import annotations

import pytest

from headgate.cli.app_loading import check_gateways, select_policy, shared_by_gateways
from headgate.config import AppConfig, declare, from_spec
from headgate.core.errors import ConfigError
from headgate.policies import find_policy


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


def shared(policy: str) -> AppConfig:
    """The application as each of the three gateways serves it."""
    app = config(policy)
    return from_spec(shared_by_gateways(app, find_policy(policy).capabilities, 3), "app")


def test_nodes_queue_and_budgets_are_divided() -> None:
    by_name = {pool.name: pool for pool in shared("round_robin").app.pools}
    assert [by_name[name].queue_max for name in ("cpu", "queued")] == [4, 9]
    platform = by_name["faas"]
    assert platform.faas is not None
    assert platform.faas.concurrency_max == 3
    assert platform.breaker.usd_per_minute == pytest.approx(0.02)


@pytest.mark.parametrize("policy", ["headgate", "swayam"])
def test_policy_that_is_made_for_refusals_gets_them(policy: str) -> None:
    assert [pool.queue_max for pool in shared(policy).app.pools[:2]] == [0, 9]


def test_policy_that_scales_by_what_it_sees_is_refused() -> None:
    selected = select_policy(config("autoscale"), "app", None, {})
    problem = "app: serve.gateways: 3: policy autoscale does not support several gateways"
    with pytest.raises(ConfigError, match=problem):
        check_gateways(selected, 3, "app", "serve.gateways")
