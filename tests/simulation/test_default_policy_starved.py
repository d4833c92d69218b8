"""The default policy where a class of requests could be kept from its share by more than its load.

Small forms of worlds in which the regret search found a class below half of its fair share while
some rival gave every class that.
"""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.sim.ground_truth import GroundTruthConfig

from .worlds import SEEDS, Stream, run_world

pytestmark = pytest.mark.long

TRUTH = GroundTruthConfig("lognormal", cv=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_starved_class_leaves_nothing_to_others(seed: int) -> None:
    """Seed 700255. Batches of 16 take 10 s, so a node serves 1.6/s; each class should have half.

    One class can wait for 9 s beside such a batch, the other for 43 s. In so little time, a part
    that is left to others is what the first needs.
    """
    config = declare(
        functions={"f": {"exec_time": {1: "2s", 16: "10s"}}},
        pools={"gpu": {"nodes": 1}},
        pipelines={
            "urgent": {"stages": {"s": {"function": "f"}}, "slo": {"latency": "19s"}},
            "patient": {"stages": {"s": {"function": "f"}}, "slo": {"latency": "53s"}},
        },
    )
    streams = (Stream("poisson:rate=1.4/s", "urgent"), Stream("poisson:rate=2.4/s", "patient"))
    score = run_world(config, streams, 1600.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("urgent") >= 0.5
    assert score.goodput_per_s() >= 1.5
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_patient_requests_wait_where_urgent_ones_are_starved(seed: int) -> None:
    """Seed 700182. The bulk takes a seventh of the node in batches of 16, most of it one by one.

    A node that begins one whenever it is idle is hardly ever free when an urgent request comes.
    """
    config = declare(
        functions={
            "first": {"exec_time": "25ms"},
            "second": {"exec_time": "45ms"},
            "bulk": {"exec_time": {1: "100ms", 16: "250ms"}},
        },
        pools={"gpu": {"nodes": 1}},
        pipelines={
            "urgent": {
                "stages": {"a": {"function": "first"}, "b": {"function": "second", "after": ["a"]}},
                "slo": {"latency": "190ms"},
            },
            "patient": {"stages": {"s": {"function": "bulk"}}, "slo": {"latency": "6s"}},
        },
    )
    streams = (Stream("poisson:rate=10/s", "urgent"), Stream("poisson:rate=9/s", "patient"))
    score = run_world(config, streams, 200.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("urgent") >= 5.0
    assert score.goodput_per_s("patient") >= 8.5
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stage_that_can_be_a_call_leaves_the_node_to_one_that_cannot(seed: int) -> None:
    """Seed 700283. The first stage runs on the node alone, with 3.6/s in full batches.

    The second would take two fifths of the node's time, and a platform has nothing else to do.
    """
    second = {
        "node": {"exec_time": {1: "600ms", 4: "730ms"}, "pools": ["gpu"]},
        "call": {"exec_time": {1: "160ms", 4: "250ms"}, "cold_start": "400ms", "pools": ["cloud"]},
    }
    config = declare(
        functions={
            "first": {"exec_time": {1: "1.5s", 16: "4.4s"}, "pools": ["gpu"]},
            "second": {"variants": second},
        },
        pools={
            "gpu": {"nodes": 1},
            "cloud": {"tier": "serverless", "memory": "1GiB", "concurrency": 9},
        },
        pipelines={
            "chain": {
                "stages": {"a": {"function": "first"}, "b": {"function": "second", "after": ["a"]}},
                "slo": {"latency": "13s"},
            }
        },
    )
    streams = (Stream("poisson:rate=6/s", "chain"),)
    score = run_world(config, streams, 400.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("chain") >= 2.4
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_wait_for_one_stage_leaves_the_others_the_time_they_take(seed: int) -> None:
    """Seed 700317. The second and third stage share a node, in batches of 11 to 15 s.

    In proportion to the waits that are found there, the first would have less time than it takes.
    """
    config = declare(
        functions={
            "short": {"exec_time": "4s", "pools": ["front"]},
            "long": {"exec_time": {1: "11s", 8: "15s"}, "pools": ["back"]},
        },
        pools={"front": {"nodes": 8}, "back": {"nodes": 1}},
        pipelines={
            "chain": {
                "stages": {
                    "a": {"function": "short"},
                    "b": {"function": "long", "after": ["a"]},
                    "c": {"function": "long", "after": ["b"]},
                },
                "slo": {"latency": "60s"},
            }
        },
    )
    streams = (Stream("poisson:rate=0.09/s", "chain"),)
    score = run_world(config, streams, 10_000.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.attainment("chain") >= 0.68
    assert score.kept() >= 0.99
