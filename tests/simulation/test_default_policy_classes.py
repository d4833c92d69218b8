"""The default policy where requests with little time wait beside others that have much.

Work that is due later is behind a request, and must not count against it, wherever the policy asks
what has to run before the request; nor must a build count that is never in time.
"""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.sim.ground_truth import GroundTruthConfig

from .worlds import MOST_URGENT, SEEDS, Stream, run_world

pytestmark = pytest.mark.long

TRUTH = GroundTruthConfig("lognormal", cv=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_patient_calls_of_a_platform_do_not_shut_out_urgent_ones(seed: int) -> None:
    """Two calls run at a time, 20 a second; most of what is offered may wait for a minute.

    When the patient calls that wait fill more than the urgent ones can wait for, urgent ones go
    before them.
    """
    config = declare(
        functions={"f": {"exec_time": "100ms", "cold_start": "1s", "memory": "1GB"}},
        pools={
            "cloud": {
                "tier": "serverless",
                "memory": "1GB",
                "concurrency": 2,
                "price": "$0.00002/GB-s",
            }
        },
        pipelines={
            "patient": {"stages": {"s": {"function": "f"}}, "slo": {"latency": "60s"}},
            "urgent": {"stages": {"s": {"function": "f"}}, "slo": {"latency": "500ms"}},
        },
    )
    streams = (Stream("poisson:rate=18/s", "patient"), Stream("poisson:rate=4/s", "urgent"))
    score = run_world(config, streams, 300.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("urgent") >= 3.5
    assert score.goodput_per_s() >= 18.5
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_patient_requests_do_not_shut_out_urgent_ones_of_a_function_on_few_nodes(seed: int) -> None:
    """Each of two nodes holds one of two functions, and a start takes longer than an objective.

    What waits for the node of the first function, mostly for a minute, is not in the way of those
    that cannot wait.
    """
    cold = {"memory": "1GB", "cold_start": "2s", "prewarm_nodes": 1}
    config = declare(
        functions={
            "first": {"exec_time": "50ms", **cold},
            "second": {"exec_time": "50ms", **cold},
        },
        pools={"gpu": {"nodes": 2, "memory": "1GB"}},
        pipelines={
            "patient": {"stages": {"s": {"function": "first"}}, "slo": {"latency": "60s"}},
            "urgent": {"stages": {"s": {"function": "first"}}, "slo": {"latency": "500ms"}},
            "other": {"stages": {"s": {"function": "second"}}, "slo": {"latency": "500ms"}},
        },
    )
    streams = (
        Stream("poisson:rate=18/s", "patient"),
        Stream("poisson:rate=4/s", "urgent"),
        Stream("poisson:rate=14/s", "other"),
    )
    score = run_world(config, streams, 300.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("urgent") >= 3.5
    assert score.goodput_per_s("other") >= 13.0
    assert score.goodput_per_s() >= 31.0
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_time_is_not_given_to_a_stage_for_work_that_can_wait(seed: int) -> None:
    """A pipeline of two stages, the second on a node with a long queue of patient requests.

    The second stage goes before them. Were the pipeline's time given to it for all that waits
    there, nothing would be left for the first stage.
    """
    config = declare(
        functions={
            "first": {"exec_time": "100ms", "pools": ["front"]},
            "second": {"exec_time": "50ms", "pools": ["back"]},
        },
        pools={"front": {"nodes": 4}, "back": {"nodes": 1}},
        pipelines={
            "patient": {"stages": {"s": {"function": "second"}}, "slo": {"latency": "60s"}},
            "urgent": {
                "stages": {"a": {"function": "first"}, "b": {"function": "second", "after": ["a"]}},
                "slo": {"latency": "500ms"},
            },
        },
    )
    streams = (Stream("poisson:rate=18/s", "patient"), Stream("poisson:rate=4/s", "urgent"))
    score = run_world(config, streams, 300.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("urgent") >= 3.5
    assert score.goodput_per_s() >= 18.5
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_no_time_is_given_to_a_stage_for_a_build_that_is_never_in_time(seed: int) -> None:
    """The second stage is a call of 100 ms, or 20 s on a node, where it is never in time.

    Were the pipeline's time divided as if it ran on the node, none would be left for the first.
    """
    config = declare(
        functions={
            "first": {"exec_time": "300ms", "memory": "1GB", "pools": ["front"]},
            "second": {
                "variants": {
                    "slow": {"exec_time": "20s", "memory": "1GB", "pools": ["back"]},
                    "call": {"exec_time": "100ms", "memory": "1GB", "pools": ["cloud"]},
                }
            },
        },
        pools={
            "front": {"nodes": 20},
            "back": {"nodes": 1},
            "cloud": {
                "tier": "serverless",
                "memory": "1GB",
                "concurrency": 1,
                "price": "$0.00002/GB-s",
            },
        },
        pipelines={
            "chain": {
                "stages": {
                    "a": {"function": "first"},
                    "b": {"function": "second", "after": ["a"]},
                },
                "slo": {"latency": "2s"},
            }
        },
    )
    streams = (Stream("poisson:rate=20/s", "chain"),)
    score = run_world(config, streams, 100.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s() >= 9.0  # of 10/s
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gain", [0.95, 0.97, 1.0])
def test_batches_that_hardly_pay_keep_no_urgent_requests_out(seed: int, gain: float) -> None:
    """A tenant floods with the deadline of a minute beside one that has 300 ms and little load.

    What is admitted of the flood is to run in the batch of an urgent request that waits already. If
    that batch is sent without it, it is due in a minute again, and not for ever overdue: its work
    was booked before all that is urgent, and three quarters of the urgent requests were refused.
    """
    per_item_ms = (10.7, 10.9, 10.7 * gain)
    exec_time = {n: f"{int(1e3 * n * ms)}us" for n, ms in zip((1, 2, 4), per_item_ms, strict=True)}
    config = declare(
        functions={"f": {"exec_time": exec_time}},
        pools={"gpu": {"nodes": 1, "network_delay": "50us"}},
        clients={"quiet": {}, "flood": {}},
        slo={"latency": "300ms"},
    )
    flood = Stream("poisson:rate=500/s", "f", "flood", priority=MOST_URGENT, timeout_s=60.0)
    streams = (Stream("poisson:rate=10/s", "f", "quiet", begins_s=2.0), flood)
    score = run_world(config, streams, 30.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.attainment(client="quiet", warm_up=0.0) >= 0.99
