"""Parts of the command line that are easier to test alone."""

from __future__ import annotations

import statistics
from math import nan

import pytest

from headgate.cli.commands.compare import seeds_json
from headgate.cli.options import duration_ns, setting
from headgate.cli.simulation import ground_truth_config
from headgate.config import declare
from headgate.metrics.summary import Summary, summarise
from headgate.metrics.table import render, rows_table
from headgate.policies import find_policy
from headgate.sim.ground_truth import GroundTruth
from headgate.sim.run import Setup, simulate
from headgate.workload import poisson


@pytest.mark.parametrize(
    "truth",
    [
        {"distribution": "uniform", "cv": 0.3},
        {"distribution": "lognormal", "cv": 0.3},
        {"distribution": "exponential"},
    ],
)
def test_service_times_have_the_declared_distribution(truth: dict[str, object]) -> None:
    """`cv` is the coefficient of variation, whatever parameter the distribution takes."""
    config = declare({"f": {"exec_time": "1s"}}, {"gpu": {}}, simulation={"service_times": truth})
    drawn = GroundTruth(ground_truth_config(config.simulation), seed=1)
    times_s = [drawn.exec_ns(config.app.variants[0], 1) / 1e9 for _ in range(20_000)]
    assert statistics.fmean(times_s) == pytest.approx(1.0, rel=0.03)
    assert statistics.stdev(times_s) == pytest.approx(float(str(truth.get("cv", 1.0))), rel=0.03)


def test_rows_with_different_keys_are_one_table() -> None:
    rows = [{"name": "a", "wait_ms": 1.5}, {"name": "b", "is_cold": True, "wait_ms": nan}]
    lines = [line.split() for line in render(rows_table(rows)).splitlines()]
    assert lines[0] == ["name", "wait", "ms", "is", "cold"]
    assert lines[2:] == [["a", "1.5", "-"], ["b", "-", "yes"]]


def test_a_mean_over_seeds_leaves_out_nan() -> None:
    """A seed without any response has no latency; the others still do."""
    config = declare({"f": {"exec_time": "5ms"}}, {"gpu": {}})
    setup = Setup(config.app, find_policy("balance"))

    def run(rate_per_s: float) -> Summary:
        return summarise(simulate(setup, poisson(rate_per_s, 10**9, seed=1)))

    busy, idle = run(50.0), run(1e-6)
    found = seeds_json([busy, idle])
    assert found["p99_ms"] == {
        "mean": busy.p99_ms,
        "half_interval": pytest.approx(nan, nan_ok=True),
    }


def test_numbers_with_exponents_are_numbers() -> None:
    """To YAML 1.1, 1e308 is text; what is quoted stays text."""
    assert duration_ns("1e3") == duration_ns("1000s") == duration_ns("+1000.0")
    assert setting("x=1e308") == ("x", 1e308)
    assert setting("x='1e3'") == ("x", "1e3")
    assert setting("x=e3") == ("x", "e3")
