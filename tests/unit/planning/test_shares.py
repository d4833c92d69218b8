"""Shares of a pool: max-min fairness, what is reserved for others, and who cannot wait."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from headgate.planning.admission.shares import ClassLoad, PoolShares

S = 1_000_000_000


def water_level(offered: list[float], weights: list[float], lanes: float) -> float:
    """The level up to which each is filled, per weight, by bisection: max-min fairness."""
    low, high = 0.0, 1e6
    for _ in range(100):
        level = (low + high) / 2
        used = sum(min(o, level * w) for o, w in zip(offered, weights, strict=True))
        low, high = (level, high) if used < lanes else (low, level)
    return high


def observe(
    shares: PoolShares,
    now_ns: int,
    key: tuple[int, int],
    objective_ns: float,
    window_ns: float,
    weight: float,
    work_ns: float,
    lanes: float,
    declared_ns: float,
) -> ClassLoad:
    """Record an arrival of a class, which may be its first."""
    load = shares.of_class(key)
    if load is None:
        load = ClassLoad(now_ns, objective_ns, objective_ns - window_ns, weight, declared_ns)
        shares.add(key, load)
    shares.observe(now_ns, load, work_ns, lanes, objective_ns)
    return load


def draw(rng: Random, lanes: int) -> tuple[PoolShares, list[ClassLoad], int]:
    """Classes of clients with one pipeline each, that have all arrived by now."""
    shares, now_ns = PoolShares(), 0
    arrivals = [
        (
            client,
            rng.uniform(1.0, 10.0) * S,
            rng.uniform(0.01, 1.0) * S,
            rng.choice((1.0, 2.0, 5.0)),
        )
        for client in range(rng.randint(1, 8))
    ]
    loads: list[ClassLoad] = []
    for client, objective_ns, window_ns, weight in arrivals:
        now_ns += rng.randint(0, S // 10)
        work_ns = rng.choice((0.01, 1.0, 20.0)) * S
        load = observe(
            shares,
            now_ns,
            (client, 0),
            objective_ns,
            window_ns,
            weight,
            work_ns,
            lanes,
            objective_ns,
        )
        loads.append(load)
    return shares, loads, now_ns


@pytest.mark.parametrize("seed", range(60))
def test_lanes_are_divided_max_min_fair_by_weight(seed: int) -> None:
    rng = Random(seed)
    lanes = rng.randint(1, 20)
    shares, loads, now_ns = draw(rng, lanes)
    offered = [load.offered(now_ns) for load in loads]
    weights = [load.weight for load in loads]
    level = water_level(offered, weights, lanes)
    for load, most, weight in zip(loads, offered, weights, strict=True):
        assert load.allotted == pytest.approx(min(most, level * weight), rel=1e-6)
        assert load.allotted <= load.entitled * (1 + 1e-9)
    assert sum(load.allotted for load in loads) == pytest.approx(min(lanes, sum(offered)))
    assert shares.is_contended == (len(loads) > 1 and sum(offered) > lanes)


def test_what_a_pipeline_of_a_client_leaves_is_for_its_other_pipelines_first() -> None:
    """Two clients have a lane each, and one of them offers 0.2 to a pipeline and 1.0 to another."""
    shares = PoolShares()
    little = observe(shares, 0, (0, 0), S, S, 1.0, 0.1 * S, 2, S)
    much = observe(shares, 0, (0, 1), S, S, 1.0, 0.5 * S, 2, S)
    flood = observe(shares, 0, (1, 0), S, S, 1.0, 5.0 * S, 2, S)
    offered = [load.offered(0) for load in (little, much, flood)]
    assert offered[0] < 0.5 < sum(offered[:2]) and offered[2] > 2.0
    assert little.allotted == pytest.approx(offered[0])
    assert much.allotted == pytest.approx(min(offered[1], 1.0 - offered[0]))
    assert flood.allotted == pytest.approx(2.0 - little.allotted - much.allotted)


@pytest.mark.parametrize("seed", range(60))
def test_reserved_is_what_others_with_shorter_objectives_will_bring(seed: int) -> None:
    rng = Random(seed)
    shares, loads, _ = draw(rng, rng.randint(1, 20))
    for _ in range(20):
        load, window_ns = rng.choice(loads), rng.uniform(0.0, 12.0) * S
        others = [o for o in loads if o is not load and o.objective_ns < window_ns]
        expected_ns = sum(o.allotted * (window_ns - o.objective_ns) for o in others)
        if shares.is_contended:  # less what is left of its own share, for its bursts
            expected_ns -= (load.entitled - load.allotted) * window_ns
        expected_ns = max(0.0, expected_ns)
        assert shares.reserved_ns(load, window_ns) == pytest.approx(expected_ns, abs=1.0)


@pytest.mark.parametrize("seed", range(60))
def test_blocked_are_those_with_shorter_windows(seed: int) -> None:
    rng = Random(seed)
    pool_lanes = rng.randint(1, 20)
    shares, loads, now_ns = draw(rng, pool_lanes)
    for _ in range(20):
        busy_ns = rng.uniform(0.0, 1.2) * S
        blocked = [load for load in loads if load.window_ns < busy_ns]
        lanes, window_ns = shares.blocked(now_ns, pool_lanes, busy_ns)
        assert lanes == pytest.approx(sum(load.allotted for load in blocked))
        assert window_ns == min((load.window_ns for load in blocked), default=busy_ns)


def test_nobody_is_blocked_who_has_been_silent_for_long() -> None:
    """No arrival tells of it: whoever asks does."""
    shares = PoolShares()
    load = observe(shares, 0, (0, 0), S, 0.1 * S, 1.0, 0.5 * S, 1, S)
    lanes, window_ns = shares.blocked(10 * S, 1.0, S)
    assert (lanes, window_ns) == (load.allotted, 0.1 * S)
    assert lanes > 0.0
    assert shares.blocked(30 * S, 1.0, S) == (0.0, S)


def test_a_silent_client_takes_nothing() -> None:
    """It was there once. An hour later all that it would be due is lent."""
    shares = PoolShares()
    quiet = observe(shares, 0, (0, 0), S, S, 1.0, 5.0 * S, 2, S)
    busy = observe(shares, 0, (1, 0), S, S, 1.0, 5.0 * S, 2, S)
    assert quiet.allotted == pytest.approx(1.0)
    for second in range(3_600, 3_800):
        busy = observe(shares, second * S, (1, 0), S, S, 1.0, 5.0 * S, 2, S)
    assert quiet.allotted == pytest.approx(0.0, abs=1e-6)
    assert busy.allotted == pytest.approx(2.0)
    assert shares.reserved_ns(busy, 10.0 * S) == pytest.approx(0.0, abs=1.0)


def test_many_pipelines_do_not_multiply_the_share_of_a_client() -> None:
    shares = PoolShares()
    loads = [observe(shares, 0, (0, number), S, S, 1.0, 9.0 * S, 4, S) for number in range(5)]
    other = observe(shares, 0, (1, 0), S, S, 1.0, 90.0 * S, 4, S)
    assert other.allotted == pytest.approx(2.0)
    assert sum(load.allotted for load in loads) == pytest.approx(2.0)


def test_a_share_binds_only_where_more_is_asked_for_than_there_is() -> None:
    shares = PoolShares()
    load = observe(shares, 0, (0, 0), S, S, 1.0, 0.1 * S, 1, S)
    load.tokens_ns = 0.0
    assert not shares.has_used_its_share(load, 0.1 * S)  # there is enough for all
    assert not shares.wants_more(load)
    load = observe(shares, 0, (0, 0), S, S, 1.0, 8.9 * S, 1, S)
    observe(shares, 0, (1, 0), S, S, 1.0, 9.0 * S, 1, S)
    assert shares.has_used_its_share(load, 0.1 * S)
    load = observe(shares, S, (0, 0), S, S, 1.0, 0.1 * S, 1, S)  # half a lane for a second
    assert not shares.has_used_its_share(load, 0.4 * S)
    assert shares.wants_more(load)
    assert shares.has_used_its_share(load, 0.7 * S)


def test_a_class_that_comes_has_its_share_at_once() -> None:
    shares = PoolShares()
    flood = observe(shares, 0, (0, 0), S, S, 1.0, 9.0 * S, 1, S)
    flood.tokens_ns -= 9.0 * S
    quiet = observe(shares, S, (1, 0), S, S, 1.0, 0.01 * S, 1, S)
    assert shares.is_contended
    assert shares.has_used_its_share(flood, 0.01 * S) and shares.wants_more(flood)
    assert not shares.has_used_its_share(quiet, 0.4 * S) and not shares.wants_more(quiet)


@pytest.mark.parametrize("refused_of_4", range(5))
def test_a_class_is_starved_that_is_admitted_much_less_than_it_is_allotted(
    refused_of_4: int,
) -> None:
    """Two classes offer two lanes each to three: each is allotted three quarters of what it offers.

    So it is starved with less than 9/16. Then it leaves nothing to others, and is known to those
    who can wait longer.
    """
    shares, now_ns = PoolShares(), 0
    for number in range(4_000):
        now_ns += S // 100
        for client, window_ns in ((0, 0.5 * S), (1, 0.9 * S)):
            load = observe(shares, now_ns, (client, 0), S, window_ns, 1.0, 0.02 * S, 3, float(S))
            if client == 0 and number % 4 < refused_of_4:
                load.on_refused(0.02 * S)
    starved = shares.of_class((0, 0))
    assert starved is not None and not load.is_starved and shares.wants_more(load)
    assert starved.is_starved == (refused_of_4 > 1)
    assert shares.wants_more(starved) == (refused_of_4 <= 1)
    assert shares.starved_window_ns == (0.5 * S if refused_of_4 > 1 else inf)
    now_ns += 100 * S
    assert shares.blocked(now_ns, 3, 10.0 * S) == (0.0, 10.0 * S)
    assert shares.starved_window_ns == inf  # nobody has sent anything for long


def test_a_class_that_has_no_time_to_wait_is_not_starved() -> None:
    """On an idle system its requests take all of their time: nobody else makes them late."""
    shares, now_ns = PoolShares(), 0
    for _ in range(300):
        now_ns += S // 100
        load = observe(shares, now_ns, (0, 0), S, 0.0, 1.0, 0.02 * S, 3, float(S))
        load.on_refused(0.02 * S)
    assert not load.is_starved
    assert shares.starved_window_ns == inf


@pytest.mark.parametrize("claimed_ns", [S // 2, S, 60 * S])
def test_a_claimed_deadline_does_not_hide_a_load(claimed_ns: int) -> None:
    """Five lanes of work are offered to one: that shows within an objective, whatever is claimed.

    What a class can save up does not grow with its claims either.
    """
    shares = PoolShares()
    for number in range(50):
        load = observe(
            shares, number * S // 50, (0, 0), claimed_ns, claimed_ns, 1.0, 0.1 * S, 1, float(S)
        )
    assert shares.is_contended
    assert load.offered(S) == pytest.approx(5.0 * 50 / 75, rel=0.05)
    assert load.tokens_ns <= 1.1 * S


def test_offered_load_is_work_over_time() -> None:
    load = ClassLoad(0, float(S), float(S), 1.0, float(S))
    for at_ns in range(0, 100 * S, S // 10):
        load.observe(at_ns, 0.25 * S, float(S))
    assert load.offered(100 * S) == pytest.approx(2.5, rel=0.02)
    assert load.offered(300 * S) < 0.01


def test_the_usual_load_is_that_of_quiet_times() -> None:
    """1.2 of two lanes for a while, then 6: what is usual stays."""
    shares, now_ns = PoolShares(), 0
    for work_s, arrivals in ((0.12, 2_000), (0.6, 300)):
        for _ in range(arrivals):
            now_ns += S // 10
            observe(shares, now_ns, (0, 0), S, S, 1.0, work_s * S, 2, S)
        assert shares.is_contended is (work_s > 0.2)
        assert shares.usual_lanes == pytest.approx(1.2, rel=0.3)


def test_the_objective_of_a_class_is_what_its_requests_have_of_late() -> None:
    """A client may claim another deadline for each: the first one binds those that follow no more.

    A class whose first request could wait for a minute was taken to wait for a minute for ever,
    and nothing was kept free for it.
    """
    shares = PoolShares()
    load = observe(shares, 0, (0, 0), 60.0 * S, 59.5 * S, 1.0, 0.1 * S, 1.0, float(S))
    assert shares.blocked(0, 1.0, 10.0 * S)[0] == 0.0
    for number in range(1, 200):
        now_ns = number * S // 10
        observe(shares, now_ns, (0, 0), float(S), 0.5 * S, 1.0, 0.1 * S, 1.0, float(S))
    assert load.objective_ns == pytest.approx(S, rel=0.01)
    assert load.window_ns == pytest.approx(0.5 * S, rel=0.02)
    lanes, window_ns = shares.blocked(now_ns, 1.0, 10.0 * S)
    assert (lanes, window_ns) == (load.allotted, load.window_ns)
