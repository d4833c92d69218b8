"""How many nodes an objective needs, and how soon a change of the rate is followed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.model import Slo
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.fleet_size import FleetSize, FleetSizes, consistent_mean
from headgate.planning.autoscaling.response_time import least_backends
from headgate.planning.autoscaling.waiting_time import GlobalQueue

S = SECOND_NS
EXEC_NS = S // 2
SLO = Slo(5 * EXEC_NS, 0.99, rate_tolerance=2.0)


def make_fleet(slo: Slo = SLO, *, ready_after_ns: int = 5 * S, concurrency: int = 1) -> FleetSize:
    return FleetSize(
        100,
        standing=5,
        slo=slo,
        exec_ns=EXEC_NS,
        concurrency=concurrency,
        ready_after_ns=ready_after_ns,
    )


def drive(
    fleet: FleetSize, from_s: int, seconds: int, rate_per_s: int, gateways: int = 1
) -> list[int]:
    """How many nodes are wanted at the end of each second of a constant rate."""
    wanted = []
    for second in range(from_s, from_s + seconds):
        for number in range(rate_per_s):
            fleet.on_arrival(second * S + number * S // rate_per_s, 1, gateways)
        wanted.append(fleet.desired_nodes((second + 1) * S, gateways))
    return wanted


def test_it_begins_with_what_stands() -> None:
    assert make_fleet().desired_nodes(0) == 5


def test_without_a_tolerance_it_is_what_the_rate_needs_for_good() -> None:
    """10 per second of half a second each are 5 Erlangs."""
    slo = replace(SLO, rate_tolerance=1.0)
    least = least_backends(LogNormalTimes(0.5, 0.3), 10.0, slo, GlobalQueue()).backends
    assert drive(make_fleet(slo), 0, 60, 10)[-1] == least == 6


def test_a_tolerance_is_for_the_time_until_more_nodes_are_ready() -> None:
    """At twice the rate 10 Erlangs: 11 nodes for good, fewer until more are there.

    In 8 s, 5 of set-up and 3 to notice, 80 s of work arrive, with a deviation of 6.6 s. The last
    of it may end 2 s after that: 9 nodes do 90 s, and 0.4 s of what arrives is above that on
    average. With 8 nodes it would be 2.6 s, more than 1 % of the work.
    """
    assert least_backends(LogNormalTimes(0.5, 0.3), 10.0, SLO, GlobalQueue()).backends == 11
    assert drive(make_fleet(), 0, 60, 10)[-1] == 9
    assert drive(make_fleet(ready_after_ns=0), 0, 60, 10)[-1] == 7
    assert drive(make_fleet(ready_after_ns=100 * S), 0, 60, 10)[-1] == 10


def test_a_node_that_runs_several_at_once_counts_for_as_many() -> None:
    assert drive(make_fleet(concurrency=4), 0, 60, 10)[-1] == 3


def test_a_rise_is_followed_within_seconds_and_a_fall_after_the_hold() -> None:
    fleet = make_fleet()
    assert drive(fleet, 0, 60, 10)[-1] == 9
    up = drive(fleet, 60, 30, 20)
    assert up[3] >= 16
    down = drive(fleet, 90, 70, 10)
    assert down[3] == up[-1]
    assert down[-1] == 9


def test_a_part_of_the_arrivals_says_less_about_the_rate_of_all() -> None:
    """80 per second, counted by one gateway, or 10 of them by one of eight."""
    alone = drive(make_fleet(), 0, 60, 80)[-1]
    shared = drive(make_fleet(), 0, 60, 10, gateways=8)[-1]
    assert alone < shared <= 1.1 * alone


def test_a_part_of_the_arrivals_is_counted_for_longer() -> None:
    """Poisson arrivals at 8 per second, of which each of 8 gateways receives one.

    What a gateway wants varies less than it would if it looked at a minute, as one alone does.
    """
    ranges = []
    for gateways in (1, 8):
        rng, fleet = Random(7), make_fleet()
        wanted: list[int] = []
        for second in range(3_000):
            for _ in range(sum(rng.random() < 0.001 for _ in range(1_000))):
                fleet.on_arrival(second * S, 1 if gateways == 8 else 8, gateways)
            if second >= 1_024:
                wanted.append(fleet.desired_nodes((second + 1) * S, gateways))
        ranges.append(max(wanted) - min(wanted))
    assert ranges[1] < 0.6 * ranges[0]


def test_after_a_change_of_their_number_gateways_remember_the_rate_of_all() -> None:
    """20 per second of each of 4 gateways, then 40 of each of 2."""
    fleet = make_fleet()
    before = drive(fleet, 0, 300, 20, gateways=4)[-1]
    after = drive(fleet, 300, 60, 40, gateways=2)
    assert all(abs(wanted - before) <= 2 for wanted in after)


def test_after_the_last_arrival_nothing_is_wanted() -> None:
    fleet = make_fleet()
    drive(fleet, 0, 60, 10)
    assert fleet.desired_nodes(200 * S) == 0


def test_what_comes_at_once_is_no_rate_where_it_can_wait() -> None:
    """12 in a second, then none: for 2.5 s to answer in they are 6 per second, for 60 s few."""
    wanted = []
    for latency_s in (2.5, 60.0):
        fleet = make_fleet(Slo(int(latency_s * S), 0.99))
        for second in range(40):
            fleet.on_arrival(second * S, 0 if second < 39 else 12)
        wanted.append(fleet.desired_nodes(40 * S))
    assert wanted == [4, 1]


def test_those_with_more_time_need_no_nodes_for_being_urgent() -> None:
    """One per second is urgent; four have a minute, and fill the nodes that are there."""
    alone, urgent, patient = make_fleet(), make_fleet(), make_fleet(replace(SLO, latency_ns=60 * S))
    sizes = FleetSizes({60 * S: patient, SLO.latency_ns: urgent})
    for second in range(64):
        alone.on_arrival(second * S, 5)
        sizes.on_arrival(second * S, SLO.latency_ns, 1)
        sizes.on_arrival(second * S, 60 * S, 4)
    together = alone.desired_nodes(64 * S)
    assert sizes.desired_nodes(64 * S) == patient.desired_nodes(64 * S) < together
    assert urgent.desired_nodes(64 * S) < together


def test_what_has_no_objective_counts_for_those_that_have_most_time() -> None:
    fleet, other = make_fleet(), make_fleet()
    sizes = FleetSizes({SLO.latency_ns: fleet, 2 * SLO.latency_ns: other})
    for second in range(64):
        sizes.on_arrival(second * S, NEVER_NS, 10)
    assert fleet.desired_nodes(64 * S) == 5  # as at the beginning
    assert other.desired_nodes(64 * S) > 5


def test_no_more_than_there_are() -> None:
    assert drive(make_fleet(), 0, 10, 1_000)[-1] == 100


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_over_the_whole_window(seed: int) -> None:
    """Poisson counts of mean 9: the mean of 64 of them, and in rare cases of fewer."""
    rng = Random(seed)
    counts = [float(sum(rng.random() < 0.009 for _ in range(1_000))) for _ in range(1_064)]
    found = [consistent_mean(counts[end - 64 : end])[0] for end in range(64, 1_064)]
    far = sum(abs(each - 9.0) > 1.5 for each in found)  # four deviations of the longest window
    assert far <= 30


def test_few_values_are_enough() -> None:
    assert consistent_mean([4.0]) == (4.0, 1)
    assert consistent_mean([4.0, 6.0]) == (5.0, 2)
