"""Times that were only estimated: a request that they rule out is not refused for ever.

A server that starts on a busy machine measures its functions too slow. What is then refused never
runs, so nothing would ever correct it.
"""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.sim.ground_truth import GroundTruthConfig

from .worlds import SEEDS, Score, Stream, run_world


def run(
    factor: float, seed: int, *, estimated: bool, other: str | None = None, prewarmed: int = 1
) -> Score:
    """60 ms by the profile and an objective of 50 ms; a batch takes `factor` times the profile."""
    times = {"exec_time": "60ms", "exec_time_estimated": estimated, "cold_start": "200ms"}
    config = declare(
        functions={"f": {**times, "prewarm_nodes": prewarmed}},
        pools={"cpu": {"nodes": 1}},
        pipelines={
            "tight": {"stages": {"a": {"function": "f"}}, "slo": {"latency": "50ms"}},
            "loose": {"stages": {"a": {"function": "f"}}, "slo": {"latency": "500ms"}},
        },
    )
    streams = [Stream("poisson:rate=10/s", "tight")]
    if other is not None:
        streams.append(Stream(other, "loose"))
    truth = GroundTruthConfig("lognormal", cv=0.1, scale=(factor,))
    return run_world(config, streams, 120.0, policy="headgate", seed=seed, truth=truth)


@pytest.mark.parametrize("factor", [0.2, 0.01])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_disturbed_measurement_is_corrected(seed: int, factor: float) -> None:
    """However wrong it was: the first requests are tried, and the rest is served."""
    score = run(factor, seed, estimated=True)
    assert score.attainment("tight") >= 0.9
    assert score.kept("tight") >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_function_that_no_node_has_loaded_is_tried_too(seed: int) -> None:
    score = run(0.2, seed, estimated=True, prewarmed=0)
    assert score.attainment("tight") >= 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pool_that_is_never_idle(seed: int) -> None:
    """Twenty nodes, of which another function keeps twelve busy: a free one is enough to try."""
    estimate = {"exec_time": "60ms", "exec_time_estimated": True, "prewarm_nodes": 20}
    config = declare(
        functions={"f": estimate, "other": {"exec_time": "30ms", "prewarm_nodes": 20}},
        pools={"cpu": {"nodes": 20}},
        slo={"latency": "50ms"},
    )
    others = Stream("poisson:rate=400/s", "other")
    streams = (Stream("poisson:rate=10/s", "f", begins_s=1.0), others)
    truth = GroundTruthConfig("lognormal", cv=0.1, scale=(0.2, 1.0))
    score = run_world(config, streams, 30.0, policy="headgate", seed=seed, truth=truth)
    assert score.attainment("f") >= 0.9
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_measurement_is_tried_ever_less_often(seed: int) -> None:
    """Of 1,200 requests that are all late, few are tried: 0.1 s, 0.2 s, 0.4 s, ... apart."""
    score = run(1.0, seed, estimated=True)
    assert 3 <= score.admitted("tight") <= 14
    assert score.attainment("tight") == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_other_requests_confirm_an_estimate(seed: int) -> None:
    """What runs anyway says how long the function takes: nobody has to be late to find out."""
    score = run(1.0, seed, estimated=True, other="poisson:rate=5/s")
    assert score.admitted("tight") <= 3


@pytest.mark.parametrize("seed", SEEDS)
def test_declared_times_are_believed(seed: int) -> None:
    score = run(0.2, seed, estimated=False)
    assert score.admitted("tight") == 0
