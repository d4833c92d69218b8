"""What stays of the instances that one gateway does not want, for others may."""

from __future__ import annotations

from headgate.core.clock import SECOND_NS
from headgate.planning.autoscaling.fleet_size import SurplusInstances

S = SECOND_NS


def make_surplus() -> SurplusInstances:
    """One of which an instance that stood has gone, and another was started since."""
    surplus = SurplusInstances(S)
    for present in (5, 4, 5):
        surplus.to_keep(-S, 5, present, 5, 0)
    return surplus


def test_surplus_instances_of_other_gateways_go_one_by_one_after_a_while() -> None:
    """Wanted are 4, and 6 are there: nobody wants two of them for five set-ups of a second."""
    surplus = make_surplus()
    assert [surplus.to_keep(at * S, 4, 6, 4, 0) for at in range(6)] == [6, 6, 6, 6, 6, 5]
    assert [surplus.to_keep(at * S, 4, 5, 4, 0) for at in range(6, 12)] == [5, 5, 5, 5, 5, 4]


def test_a_large_surplus_goes_at_once() -> None:
    assert make_surplus().to_keep(0, 4, 12, 4, 0) == 6


def test_what_is_wanted_again_stays() -> None:
    surplus = make_surplus()
    assert surplus.to_keep(0, 4, 5, 4, 0) == 5
    assert surplus.to_keep(4 * S, 5, 5, 4, 0) == 5
    assert surplus.to_keep(5 * S, 4, 5, 4, 0) == 5
    assert surplus.to_keep(6 * S, 5, 3, 4, 0) == 5


def test_what_stands_from_the_start_and_nobody_can_want_goes_at_once() -> None:
    assert SurplusInstances(S).to_keep(0, 1, 5, 2, 0) == 2


def test_none_goes_while_the_last_seconds_need_it() -> None:
    surplus = make_surplus()
    assert surplus.to_keep(0, 4, 9, 4, 8) == 8
    assert [surplus.to_keep(at * S, 4, 8, 4, 8) for at in range(1, 9)] == [8] * 8
    assert surplus.to_keep(9 * S, 4, 8, 4, 3) == 6
