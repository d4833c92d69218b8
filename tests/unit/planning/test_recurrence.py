"""Steps of the load that recur are known before they come; where nothing recurs, nothing is."""

from __future__ import annotations

from random import Random

import pytest
from test_fleet_size import S, make_fleet

from headgate.planning.forecast import Recurrence


def observe(levels: list[float]) -> list[float]:
    """What is expected at each second of the 8 s that follow it."""
    recurrence, expected = Recurrence(8 * S), []
    for now_s, level in enumerate(levels):
        recurrence.observe(now_s * S, level)
        expected.append(recurrence.highest_ahead())
    return expected


def test_a_step_is_expected_from_its_third_time_on() -> None:
    """Steps at 40, 100, 160 and 220: 8 before the last two of them, not before the first two."""
    levels = [40.0 if now % 60 >= 40 else 5.0 for now in range(240)]
    expected = observe(levels)
    for step, is_known in ((40, False), (100, False), (160, True), (220, True)):
        assert (max(expected[step - 8 : step]) == 40.0) is is_known
        assert max(expected[step - 20 : step - 9]) in (0.0, 5.0)


def test_the_end_of_a_season_is_expected_too() -> None:
    levels = [40.0 if now % 60 >= 40 else 5.0 for now in range(250)]
    assert observe(levels)[241:] == [5.0] * 9


@pytest.mark.parametrize(("period_s", "ahead_s"), [(60, 4), (1800, 8), (24 * 3600, 180)])
def test_a_longer_set_up_time_lets_longer_periods_be_known(period_s: int, ahead_s: int) -> None:
    """A step in the last tenth of a period, whose level is seen every 5 s."""
    recurrence = Recurrence(ahead_s * S)
    begin_s = 3 * period_s - period_s // 10
    for now_s in range(0, begin_s, 5):
        recurrence.observe(now_s * S, 30.0 if now_s % period_s >= 0.9 * period_s else 3.0)
    assert recurrence.highest_ahead() == 30.0


@pytest.mark.parametrize("seed", range(6))
def test_chance_hardly_ever_recurs(seed: int) -> None:
    """Bursts of a minute on average after five on average, for three hours: what was expected
    without need is little beside the bursts themselves.
    """
    rng = Random(seed)
    levels: list[float] = []
    while len(levels) < 3 * 3600:
        levels += [1.0] * int(rng.expovariate(1 / 300)) + [4.0] * int(rng.expovariate(1 / 60))
    pairs = zip(observe(levels), levels, strict=True)
    assert sum(max(0.0, expected - level) for expected, level in pairs) <= 0.02 * sum(levels)


def test_nodes_are_wanted_before_a_step_that_recurs() -> None:
    """At 4 and at 20 per second, of half a second each; 8 s are the set-up and time to notice."""
    fleet, wanted = make_fleet(), []
    for now_s in range(170):
        per_s = 20 if now_s % 60 >= 40 else 4
        for number in range(per_s):
            fleet.on_arrival(now_s * S + number * S // per_s, 1)
        wanted.append(fleet.desired_nodes((now_s + 1) * S))
    assert wanted[99] < wanted[110] == wanted[158] > wanted[140]
