"""The default policy in worlds of kinds that the regret search does not draw."""

from __future__ import annotations

import pytest

from headgate.config import declare

from .worlds import SEEDS, Stream, run_world

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cold_start_of_a_platform_is_no_execution_time(seed: int) -> None:
    """Bursts beside two nodes. A cold call is in time, but not one that takes as long again.

    The first calls are cold. If their times were those of the function itself, no later call would
    be promised one that starts an instance, and most of each burst would be refused.
    """
    config = declare(
        functions={"f": {"exec_time": "80ms", "cold_start": "800ms", "memory": "1GB"}},
        pools={
            "nodes": {"nodes": 2},
            "platform": {"tier": "serverless", "memory": "2GB", "concurrency": 100},
        },
        slo={"latency": "1s"},
    )
    bursts = Stream("mmpp:rates=5/s+150/s,stay=20s+4s", "f")
    score = run_world(config, (bursts,), 120.0, policy="headgate", seed=seed)
    assert score.attainment("f") >= 0.99
