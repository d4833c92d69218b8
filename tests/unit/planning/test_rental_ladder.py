"""How many nodes are worth their rent beside a pay-per-call platform.

A node has done ten requests a second, a call costs 1 and a second of a node 4: a node is worth
having from four requests a second on. It boots for 100 s, which costs 400.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.clock import SECOND_NS
from headgate.core.model import Pool, Tier
from headgate.planning.autoscaling.rent_or_call import NodeDemand, OwnNodes, RentalLadder

S = SECOND_NS


POOL = Pool(0, "rented", Tier.DEDICATED, nodes=3, is_elastic=True)


def make_demand(allowed_s: int = 1, interval_s: float = 0.1) -> NodeDemand:
    return NodeDemand(POOL, 0, interval_s * S, allowed_s * S, 0.0, 1.0)


DEMAND = make_demand()


def make_ladder(count: int = 3, *, standing: int = 0, boot_s: int = 100) -> RentalLadder:
    return RentalLadder(
        count, standing=standing, rent_usd_per_s=4.0, boot_ns=boot_s * S, memory_ns=1_800 * S
    )


def drive(
    ladder: RentalLadder, from_s: int, seconds: int, rate_per_s: int, demand: NodeDemand = DEMAND
) -> list[int]:
    """Evenly spaced arrivals; what is wanted, second by second."""
    desired = []
    for second in range(from_s, from_s + seconds):
        for number in range(rate_per_s):
            ladder.on_arrival(second * S + number * S // rate_per_s, demand, 1)
        desired.append(ladder.desired_nodes((second + 1) * S))
    return desired


def test_it_begins_with_those_that_stand() -> None:
    assert make_ladder(standing=2).desired_nodes(0) == 2


def test_without_demand_no_node_is_rented() -> None:
    """Also before the first request."""
    ladder = make_ladder(standing=2)
    assert drive(ladder, 0, 600, 0)[-1] == 0


def test_a_node_is_taken_when_it_would_have_saved_enough_and_not_before() -> None:
    """At 8 per second it saves 4 a second, and the change is worth some part of 400."""
    desired = drive(make_ladder(), 0, 300, 8)
    assert desired[0] == 0
    assert desired[-1] == 1
    assert desired == sorted(desired)


def test_below_what_pays_none_is_taken() -> None:
    assert set(drive(make_ladder(), 0, 1_200, 3)) == {0}


def test_as_many_as_pay() -> None:
    """25 per second fill two nodes, and half of a third, which pays. 22 leave it a fifth."""
    assert drive(make_ladder(5), 0, 1_200, 25)[-1] == 3
    assert drive(make_ladder(5), 0, 1_200, 22)[-1] == 2


def test_no_more_than_there_are() -> None:
    assert drive(make_ladder(2), 0, 1_200, 60)[-1] == 2


def test_a_node_that_saves_nothing_is_released_after_a_while() -> None:
    desired = drive(make_ladder(standing=1), 0, 600, 0)
    assert desired[0] == 1
    assert desired[-1] == 0


def test_a_short_lull_is_sat_out() -> None:
    """To give back and take again would cost a boot."""
    ladder = make_ladder(standing=1)
    desired = drive(ladder, 0, 60, 8) + drive(ladder, 60, 10, 0) + drive(ladder, 70, 60, 8)
    assert set(desired) == {1}


def held_s(ladder: RentalLadder, from_s: int) -> int:
    """How long a node is held once nothing comes."""
    seconds = 0
    while drive(ladder, from_s + seconds, 1, 0)[0]:
        seconds += 1
    return seconds


def test_a_node_that_was_missed_soon_is_held_for_longer_the_next_time() -> None:
    """The load is gone for long enough that the node goes, and is back at once."""
    ladder = make_ladder(1, standing=1)
    drive(ladder, 0, 300, 10)
    first_s = held_s(ladder, 300)
    drive(ladder, 300 + first_s, 600, 10)
    assert ladder.desired_nodes((900 + first_s) * S) == 1
    assert held_s(ladder, 900 + first_s) > 2 * first_s


def test_a_node_that_was_not_missed_goes_as_before() -> None:
    ladder = make_ladder(1, standing=1)
    drive(ladder, 0, 300, 10)
    first_s = held_s(ladder, 300)
    drive(ladder, 5_000, 600, 10)
    assert held_s(ladder, 5_600) == pytest.approx(first_s, abs=5)


def test_it_says_whether_a_node_could_serve_a_request() -> None:
    """A node is done with ten within a second; the eleventh would be late."""
    ladder = make_ladder(1)
    assert [ladder.on_arrival(0, DEMAND, 1) for _ in range(11)] == [True] * 10 + [False]


def test_functions_share_a_node() -> None:
    """Two kinds of requests of which none alone is worth a node: three and two of ten a second."""
    other = make_demand(allowed_s=3)
    ladder = make_ladder()
    for second in range(600):
        drive(ladder, second, 1, 3)
        for number in range(2):
            ladder.on_arrival(second * S + number * S // 2, other, 1)
    assert ladder.desired_nodes(600 * S) == 1
    assert drive(make_ladder(), 0, 600, 3)[-1] == 0
    assert drive(make_ladder(), 0, 600, 2, other)[-1] == 0


def test_nodes_of_our_own_take_what_they_can_do_in_time() -> None:
    own, demand = OwnNodes(), make_demand(interval_s=0.4)
    assert [own.on_arrival(0, demand, 1) for _ in range(3)] == [True, True, False]
    assert own.on_arrival(S, demand, 1)


def test_a_booting_node_is_not_released() -> None:
    """The load ends when the node is rented; the next decision is made after its boot."""
    ladder = make_ladder(boot_s=100)
    taken_s = 0
    while ladder.desired_nodes(taken_s * S) == 0:
        drive(ladder, taken_s, 1, 10)
        taken_s += 1
    assert set(drive(ladder, taken_s, 99, 0)) == {1}
    assert drive(ladder, taken_s + 99, 100, 0)[-1] == 0


def test_bursts_are_no_reason_to_hurry() -> None:
    """As many requests, six a second or sixty every ten; a node could serve all of them."""
    steady, bursty, patient = make_ladder(1), make_ladder(1), make_demand(allowed_s=10)
    assert drive(steady, 0, 100, 6, patient)[-1] == 1
    for second in range(0, 100, 10):
        desired = drive(bursty, second, 1, 60, patient) + drive(bursty, second + 1, 9, 0)
        assert set(desired) == {0}


@settings(max_examples=50, deadline=None)
@given(rates=st.lists(st.integers(0, 30), max_size=40), standing=st.integers(0, 3))
def test_the_number_is_always_possible(rates: list[int], standing: int) -> None:
    ladder = make_ladder(3, standing=standing, boot_s=1)
    for second, rate_per_s in enumerate(rates):
        assert all(0 <= desired <= 3 for desired in drive(ladder, second, 1, rate_per_s))


def test_to_ask_twice_changes_nothing() -> None:
    once, twice = make_ladder(), make_ladder()
    for second in range(200):
        drive(twice, second, 1, 8)
        assert drive(once, second, 1, 8)[0] == twice.desired_nodes((second + 1) * S)
