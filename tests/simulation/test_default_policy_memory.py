"""The default policy where a node cannot hold all functions.

Worlds in which a function that is scarce was evicted, or a function that needs its node lost it.
"""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.sim.ground_truth import GroundTruthConfig

from .worlds import SEEDS, Stream, run_world

pytestmark = pytest.mark.long

TRUTH = GroundTruthConfig("lognormal", cv=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_hold_two_of_three_functions(seed: int) -> None:
    """All nodes hold the first two at first, and the third has half of the work.

    It needs nodes, and must take them from the first function, which has little load, and not from
    the second, which has as much as the third.
    """
    cold = {"cold_start": "100ms", "swap_in": "30ms"}
    config = declare(
        functions={
            "light": {"exec_time": "5ms", "memory": "2GB", "prewarm_nodes": 10, **cold},
            "second": {"exec_time": "25ms", "memory": "1GB", "prewarm_nodes": 10, **cold},
            "third": {"exec_time": "30ms", "memory": "4GB", **cold},
        },
        pools={"gpu": {"nodes": 10, "memory": "6GB"}},
        pipelines={
            "chain": {
                "stages": {
                    "a": {"function": "third"},
                    "b": {"function": "light", "after": ["a"]},
                    "c": {"function": "second", "after": ["a"]},
                },
                "slo": {"latency": "300ms"},
            }
        },
    )
    streams = (Stream("poisson:rate=400/s", "chain"),)
    score = run_world(config, streams, 20.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s() >= 120.0  # of 166/s
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_function_with_another_pool_leaves_a_node_to_one_without(seed: int) -> None:
    """A start of the first takes longer than its objective: where it runs, it has to stay."""
    first = {"exec_time": "50ms", "memory": "1GB", "cold_start": "900ms", "pools": ["fast"]}
    second = {
        "fast": {"exec_time": "50ms", "memory": "2GB", "cold_start": "90ms", "pools": ["fast"]},
        "slow": {"exec_time": "200ms", "memory": "2GB", "cold_start": "90ms", "pools": ["slow"]},
    }
    config = declare(
        functions={"first": first, "second": {"variants": second}},
        pools={"fast": {"nodes": 1, "memory": "2GB"}, "slow": {"nodes": 4, "memory": "2GB"}},
        slo={"latency": "600ms"},
    )
    streams = (Stream("poisson:rate=10/s", "first"), Stream("poisson:rate=10/s", "second"))
    score = run_world(config, streams, 60.0, policy="headgate", seed=seed, truth=TRUTH)
    for pipeline in ("first", "second"):
        assert score.kept(pipeline) >= 0.99
        assert score.attainment(pipeline) >= 0.9
