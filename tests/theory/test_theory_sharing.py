"""Processor sharing: a node with many slots that slows down in proportion to concurrency."""

from __future__ import annotations

import pytest
from theory_formulas import mg1_ps_sojourn_s
from theory_systems import SERVICE_NS, SERVICE_S, assert_mean, run, sojourns_s

from headgate.core.model import App, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.policies import find_policy
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import mix, named, poisson

SLOTS = 200  # so many that nobody ever waits for one


def shared(*exec_ns: int) -> App:
    """Functions of these lengths on one processor-sharing node."""
    slowdown = tuple(float(count) for count in range(1, SLOTS + 1))
    functions = tuple(
        Function(
            id,
            f"f{id}",
            (Variant(id, f"f{id}", id, (0,), Profile((each_ns,), slowdown), concurrency=SLOTS),),
        )
        for id, each_ns in enumerate(exec_ns)
    )
    pipelines = tuple(Pipeline(f.id, f.name, (Stage(f),)) for f in functions)
    return App(functions, pipelines, (Pool(0, "server", slots=SLOTS),))


@pytest.mark.parametrize(
    "truth",
    [
        GroundTruthConfig("exponential"),
        GroundTruthConfig("exact"),
        GroundTruthConfig("lognormal", cv=2.0),
    ],
    ids=["exponential", "exact", "lognormal"],
)
def test_the_mean_time_does_not_depend_on_the_distribution(truth: GroundTruthConfig) -> None:
    rate_per_s = 0.6 / SERVICE_S
    done = run(shared(SERVICE_NS), rate_per_s, 40_000, truth)
    assert_mean(sojourns_s(done), mg1_ps_sojourn_s(rate_per_s, SERVICE_S))


def test_all_requests_are_slowed_down_alike() -> None:
    """A request four times as long takes four times as long, whatever it shares the server with."""
    duration_ns = 60 * 1_000_000_000
    short = named(poisson(300.0, duration_ns, seed=1), pipeline="f0")
    long = named(poisson(75.0, duration_ns, seed=2), pipeline="f1")
    app = shared(SERVICE_NS, 4 * SERVICE_NS)
    done = simulate(Setup(app, find_policy("balance")), mix([short, long]))
    mean_s = (300.0 * SERVICE_S + 75.0 * 4 * SERVICE_S) / 375.0
    for pipeline, own_s in enumerate((SERVICE_S, 4 * SERVICE_S)):
        mine = done.requests.pipeline == pipeline
        assert_mean(sojourns_s(done)[mine], mg1_ps_sojourn_s(375.0, mean_s, own_s))
