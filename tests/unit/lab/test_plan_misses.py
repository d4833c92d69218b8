"""Misses of plans made at arrival: none on an idle node, and one test for each reason."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import (
    App,
    Compute,
    Function,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Variant,
)
from headgate.lab.harness import Environment, PolicyCase
from headgate.lab.plan_misses import REASONS, PlanMisses
from headgate.metrics.columns import RunColumns
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup
from headgate.workload import poisson
from headgate.workload.arrivals import arrivals_at

MS = MILLISECOND_NS
ORION = PolicyCase.of("orion")


CHAIN = ((), (0,))
FORK = ((), (0,), (0,))


def make_app(
    slo_ms: int,
    after: tuple[tuple[int, ...], ...] = CHAIN,
    *,
    gpu_sevenths: int = 7,
    compute: int = Compute.PER_BATCH,
) -> App:
    """Stages of 20 ms in 1/7 of a GPU or 10 ms in 3/7; the latter costs more."""
    functions = []
    for id in range(len(after)):
        profile = Profile((20 * MS, 30 * MS))
        more = (ShapeTimes(Shape(1_000, 3), (10 * MS, 15 * MS)),)
        variant = Variant(id, f"v{id}", id, (0,), profile, Shape(1_000, 1), 8, more)
        functions.append(Function(id, f"f{id}", (variant,)))
    pool = Pool(
        0, "gpu", slots=8, cpu_milli=16_000, gpu_sevenths=gpu_sevenths, compute=compute,
        gpu_usd_per_hour=1.0,
    )  # fmt: skip
    stages = tuple(Stage(f, before) for f, before in zip(functions, after, strict=True))
    return App(tuple(functions), (Pipeline(0, "p", stages, Slo(slo_ms * MS)),), (pool,))


def make_environment(app: App, *times_ms: int, truth: str = "exact") -> Environment:
    times_ns = np.array([MS * at_ms for at_ms in times_ms], dtype=np.int64)
    arrivals = arrivals_at(times_ns, int(times_ns[-1]) + SECOND_NS)
    return Environment(app, arrivals, GroundTruthConfig(truth))


def counts(misses: PlanMisses) -> list[tuple[int, dict[str, int]]]:
    return [(stage.dispatches, dict(stage.reasons)) for stage in misses.stages[0]]


def fixed(first: str, second: str) -> PolicyCase:
    """`aquatope` with these configurations of the two stages."""
    return PolicyCase.of(
        "aquatope", configs=(f"p f0: v0 on gpu, {first}", f"p f1: v1 on gpu, {second}")
    )


def simulate_with_misses(
    environment: Environment, policy: PolicyCase, seed: int
) -> tuple[RunColumns, PlanMisses]:
    kind, config = policy.build()
    misses = PlanMisses(Setup(environment.app, kind, config, seed=seed))
    return environment.simulate(policy, seed, observer=misses), misses


@pytest.mark.parametrize("slo_ms", [100, 45, 35, 25, 5])
@pytest.mark.parametrize("compute", [Compute.PER_BATCH, Compute.PER_INSTANCE])
@pytest.mark.parametrize("after", [CHAIN, FORK])
def test_a_plan_on_an_idle_node_never_misses(
    after: tuple[tuple[int, ...], ...], compute: int, slo_ms: int
) -> None:
    """One request at a time, and times as in the profile: what was planned is called for.

    Both branches of the fork are dispatched at once: 4/7 of a GPU are free before the second one,
    and 1/7 after it.
    """
    environment = make_environment(make_app(slo_ms, after, compute=compute), 0, 1_000, 2_000)
    _, misses = simulate_with_misses(environment, ORION, 0)
    assert counts(misses) == [(3, {})] * len(after)
    assert misses.miss_rate == 0.0


def test_the_run_is_as_without_counting() -> None:
    arrivals = poisson(60.0, SECOND_NS, seed=1)
    environment = Environment(make_app(60), arrivals, GroundTruthConfig("exponential"))
    run, misses = simulate_with_misses(environment, ORION, 0)
    plain = environment.simulate(ORION, 0)
    assert run.requests.finished_ns.tolist() == plain.requests.finished_ns.tolist()
    assert 0.0 < misses.miss_rate < 1.0
    assert misses.miss_rate == pytest.approx(sum(misses.rate_of(reason) for reason in REASONS))


def test_a_batch_that_is_not_there_is_a_miss() -> None:
    """Planned for two, and every request comes alone. Where two wait at once it is a hit."""
    policy = fixed("shape 0, batch 2", "shape 0, batch 1")
    _, misses = simulate_with_misses(make_environment(make_app(100), 0, 1_000), policy, 0)
    assert counts(misses) == [(2, {"batch": 2}), (2, {})]
    busy = make_app(400, gpu_sevenths=1)  # one batch at a time: the second and third wait
    _, misses = simulate_with_misses(make_environment(busy, 0, 1, 2), policy, 0)
    assert counts(misses)[0] == (2, {"batch": 1})


def test_a_batch_that_is_not_there_is_the_last_of_the_reasons() -> None:
    """The large shape costs more than needed, for whatever batch; only one item ever waits."""
    policy = fixed("shape 1, batch 2", "shape 0, batch 2")
    _, misses = simulate_with_misses(make_environment(make_app(100), 0, 1_000), policy, 0)
    assert counts(misses) == [(2, {"cost": 2}), (2, {"batch": 2})]


def test_a_shape_for_which_there_is_no_room_is_a_miss() -> None:
    """3/7 of a GPU are planned. The first two requests leave 1/7, which the third one takes."""
    policy = fixed("shape 1, batch 1", "shape 1, batch 1")
    environment = make_environment(make_app(15), 0, 1, 2, 3)
    _, misses = simulate_with_misses(environment, policy, 0)
    assert misses.stages[0][0].reasons["room"] > 0


def test_a_plan_for_which_time_is_short_is_a_miss() -> None:
    """45 ms for two small shapes of 20: if the first takes above 25, the second is to be large."""
    times_ms = range(0, 40_000, 1_000)
    environment = make_environment(make_app(45), *times_ms, truth="exponential")
    run, misses = simulate_with_misses(environment, ORION, 3)
    first, second = misses.stages[0]
    assert not first.reasons
    assert set(second.reasons) == {"late"}
    assert 0 < second.reasons.total() < second.dispatches == len(run.requests)


def test_a_plan_that_buys_time_it_does_not_need_is_a_miss() -> None:
    policy = fixed("shape 1, batch 1", "shape 0, batch 1")
    _, misses = simulate_with_misses(make_environment(make_app(100), 0, 1_000), policy, 0)
    assert counts(misses) == [(2, {"cost": 2}), (2, {})]


def test_what_is_late_in_any_case_should_be_fast() -> None:
    policy = fixed("shape 0, batch 1", "shape 1, batch 1")
    _, misses = simulate_with_misses(make_environment(make_app(5), 0), policy, 0)
    assert counts(misses) == [(1, {"late": 1}), (1, {})]


def test_a_policy_that_plans_at_every_stage_has_no_plan_to_miss() -> None:
    environment = make_environment(make_app(100), 0)
    with pytest.raises(ConfigError, match=r"esg plans nothing at arrival \(allowed: aquatope, or"):
        simulate_with_misses(environment, PolicyCase.of("esg"), 0)
