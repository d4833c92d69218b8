"""How many nodes `headgate` rents: those that requests need, and none that help nobody."""

from __future__ import annotations

import pytest

from headgate.config import declare

from .worlds import Score, Stream, run_world

over_seeds = pytest.mark.parametrize("seed", [7001, 7002])


def nodes_up(score: Score) -> float:
    """Nodes on average, those that are not rented included."""
    return sum(use.up_ns for use in score.columns.resources) / score.columns.end_ns


@over_seeds
def test_nodes_are_rented_for_the_time_on_the_network_too(seed: int) -> None:
    """A node is taken for 240 ms by a request of 100 ms: 34 per second need 9 nodes, not 5."""
    config = declare(
        functions={"f": {"exec_time": "100ms", "cold_start": "450ms"}},
        pools={
            "rented": {"nodes": 12, "elastic": True, "boot_time": "1s", "network_delay": "70ms"}
        },
        slo={"latency": "3s"},
    )
    streams = (Stream("poisson:rate=34/s", "f"),)
    score = run_world(config, streams, 100.0, policy="headgate", seed=seed)
    assert score.attainment() >= 0.99
    assert nodes_up(score) <= 11.0


@over_seeds
def test_no_nodes_are_rented_on_which_every_request_is_late(seed: int) -> None:
    """Beside a node of 75 ms, nodes to rent of 3.7 s: within 1.2 s they answer nothing."""
    config = declare(
        functions={
            "f": {
                "prewarm_nodes": 2,
                "variants": {
                    "fast": {"pools": ["own"], "exec_time": "75ms"},
                    "slow": {"pools": ["rented"], "exec_time": "3.7s"},
                },
            }
        },
        pools={
            "own": {"nodes": 1},
            "rented": {"nodes": 2, "elastic": True, "boot_time": "1s", "idle_timeout": "2s"},
        },
        slo={"latency": "1.2s"},
    )
    streams = (Stream("poisson:rate=26/s", "f"),)
    score = run_world(config, streams, 60.0, policy="headgate", seed=seed)
    assert score.goodput_per_s() >= 12.5
    assert nodes_up(score) <= 1.2
