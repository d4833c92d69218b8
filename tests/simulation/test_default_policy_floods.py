"""The default policy in random worlds at low load, to which a tenant is added that floods them.

Each world is one of the regret search, at no more than 0.4 of its capacity. The flood is for one of
its pipelines, two to ten times what the nodes can do, with the deadline and the priority that its
client likes to claim. Its weight is that of the lightest client, so what all others offer is within
their shares, and they should hardly notice.
"""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest

from headgate.core.clock import SECOND_NS
from headgate.core.states import Outcome
from headgate.lab.regret.worlds import LoadedWorld, World, draw_world
from headgate.policies import find_policy
from headgate.sim.run import Setup, simulate

from .worlds import MOST_URGENT, ClaimingSender, Score, Stream

pytestmark = pytest.mark.long

FLOOD = "flood"
LOAD_MAX = 0.4
REQUESTS_MAX = 20_000  # of a flood
REQUESTS_MIN = 50  # of a class that is judged
WARM_UP = 0.1
SEEDS = (1940191, 1940195, 1940227, 1940211, 1940235, 1940276, 1940340, 1940351)


@pytest.mark.parametrize("seed", SEEDS)
def test_tenants_within_their_shares_hardly_notice_a_flood(seed: int) -> None:
    before, beside = attainments(seed)
    assert before, "no class has enough requests"
    for name, share in before.items():
        assert beside[name] >= 0.88 * share, name


def attainments(seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """By client and pipeline: the part in time without the flood, and beside it."""
    plain = draw_world(seed)
    loaded = plain.load()
    assert loaded.load <= LOAD_MAX
    rng, spec = Random(seed), deepcopy(plain.spec)
    weights = [client.get("weight", 1) for client in spec["clients"].values()]
    spec["clients"][FLOOD] = {"weight": min(weights)}
    flooded = World(spec, seed).load()
    return _run(loaded, None), _run(flooded, _flood(flooded, rng))


def _flood(world: LoadedWorld, rng: Random) -> Stream:
    arrivals, duration_s = world.arrivals, world.window_ns / SECOND_NS
    pipeline = arrivals.pipelines[rng.choice(arrivals.pipeline.tolist())]
    count = sum(arrivals.pipelines[index] == pipeline for index in arrivals.pipeline)
    times = rng.choice([2.0, 5.0, 10.0]) / max(world.load, 0.05)
    slo = next(p.slo for p in world.app.pipelines if p.name == pipeline)
    return Stream(
        f"poisson:rate={min(REQUESTS_MAX, times * count) / duration_s}/s",
        pipeline,
        FLOOD,
        priority=rng.choice([MOST_URGENT, 0]),
        timeout_s=rng.choice([0.0, 5.0, 30.0]) * slo.latency_ns / SECOND_NS,
        begins_s=rng.choice([0.0, 0.1]) * duration_s,
    )


def _run(world: LoadedWorld, flood: Stream | None) -> dict[str, float]:
    setup = Setup(
        world.app,
        find_policy("headgate"),
        seed=world.seed,
        truth=world.truth,
        limit_ns=world.window_ns,
    )
    senders = []
    if flood is not None:
        arrivals = flood.arrivals(world.window_ns / SECOND_NS, world.seed)
        senders.append(ClaimingSender(world.config, flood, arrivals))
    run = simulate(setup, world.arrivals, clients=senders, window_ns=world.window_ns)
    score, requests, shares = Score(run), run.requests, {}
    for client in run.clients:
        for pipeline in run.pipelines:
            judged = score.rows(pipeline, client) & score.settled_rows(WARM_UP)
            judged &= requests.deadline_ns < world.window_ns
            if client != FLOOD and judged.sum() >= REQUESTS_MIN:
                met = (requests.outcome == Outcome.MET) & judged
                shares[f"{client}/{pipeline}"] = int(met.sum()) / int(judged.sum())
    return shares
