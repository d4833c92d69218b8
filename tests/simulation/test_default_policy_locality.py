"""The default policy where moving the output of a stage to another node takes time."""

from __future__ import annotations

import pytest

from headgate.config import AppConfig, declare
from headgate.core.clock import SECOND_NS
from headgate.sim.faults import Fault, FaultPlan
from headgate.sim.ground_truth import GroundTruthConfig

from .worlds import SEEDS, Stream, run_world

TRUTH = GroundTruthConfig("lognormal", cv=0.1)


def two_stages(**pool: object) -> AppConfig:
    """Two stages of 10 ms. To move the output of the first takes 20 ms."""
    return declare(
        functions={
            "a": {"exec_time": {1: "10ms", 4: "20ms"}, "output": "20MB"},
            "b": {"exec_time": {1: "10ms", 4: "20ms"}},
        },
        pools={"cpu": {"nodes": 4, "bandwidth": "1GB/s", **pool}},
        pipelines={
            "p": {
                "stages": {"a": {"function": "a"}, "b": {"function": "b", "after": ["a"]}},
                "slo": {"latency": "60ms"},
            },
        },
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stage_runs_where_its_input_is(seed: int) -> None:
    """On any free node half of the requests would be refused: moving takes as long as running."""
    streams = (Stream("poisson:rate=160/s", "p"),)
    score = run_world(two_stages(), streams, 10.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("p") >= 150.0
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_form_on_the_node_that_has_their_inputs(seed: int) -> None:
    """At 2.5 times what single requests allow, batches of those with inputs on one node do most."""
    streams = (Stream("poisson:rate=500/s", "p"),)
    score = run_world(two_stages(), streams, 10.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.goodput_per_s("p") >= 220.0  # on any free node: 130
    assert score.kept() >= 0.98


def test_an_input_is_moved_where_its_node_is_busy_for_longer() -> None:
    """One node has the input and runs another function for a second: a second node runs the stage.

    Step 1: at 0 s a request for `p` runs stage `a` on one of two nodes, 10 ms. Step 2: at 5 ms the
    other node begins a second of `slow`. Step 3: at 8 ms one more `slow` is promised the first
    node. The last stage must not wait for it.
    """
    config = declare(
        functions={
            "a": {"exec_time": "10ms", "output": "20MB"},
            "b": {"exec_time": "10ms"},
            "slow": {"exec_time": "1s"},
        },
        pools={"cpu": {"nodes": 2, "bandwidth": "1GB/s"}},
        pipelines={
            "p": {
                "stages": {"a": {"function": "a"}, "b": {"function": "b", "after": ["a"]}},
                "slo": {"latency": "100ms"},
            },
            "s": {"stages": {"s": {"function": "slow"}}, "slo": {"latency": "10s"}},
        },
    )
    streams = (Stream((0.0,), "p"), Stream((0.005, 0.008), "s"))
    score = run_world(config, streams, 3.0, policy="headgate", seed=1)
    assert score.kept() == 1.0
    assert score.admitted() == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_outlive_the_node_that_has_their_inputs(seed: int) -> None:
    """Of four nodes one is gone for a second: what waited for it runs elsewhere."""
    crash = FaultPlan((Fault("crash", at_ns=2 * SECOND_NS, until_ns=3 * SECOND_NS, node=1),))
    streams = (Stream("poisson:rate=120/s", "p"),)
    score = run_world(
        two_stages(),
        streams,
        6.0,
        policy="headgate",
        seed=seed,
        truth=TRUTH,
        faults=crash,
    )
    assert score.attainment("p") >= 0.97
