"""The part of a pool that one of several gateways counts on."""

from __future__ import annotations

import pytest

from headgate.planning.pools.calendar import Calendar
from headgate.planning.pools.node_lanes import GatewayShare, part_of

MS = 1_000_000
OBJECTIVE_MS = 100


def make_share(lanes: int = 4) -> tuple[GatewayShare, Calendar]:
    calendar = Calendar(OBJECTIVE_MS * MS, OBJECTIVE_MS * MS)
    calendar.resize(lanes)
    return GatewayShare(calendar, [], OBJECTIVE_MS * MS), calendar


def offer(share: GatewayShare, every_ms: int, *, until_ms: int, gateways: int = 8) -> None:
    """A request of 20 ms, every so often, all of them admitted."""
    for at_ms in range(0, until_ms, every_ms):
        share.observe(at_ms * MS, 20.0 * MS, gateways)
        share.on_admitted(at_ms * MS, 20.0 * MS)


@pytest.mark.parametrize("gateways", [1, 2, 8, 64])
def test_in_overload_all_parts_are_equal_and_add_up_to_the_pool(gateways: int) -> None:
    assert gateways * part_of(10.0, gateways) == pytest.approx(1.0)


def test_an_idle_pool_is_there_for_whoever_has_a_request() -> None:
    assert part_of(0.0, 8) == 1.0


def test_more_load_never_gives_a_larger_part() -> None:
    parts = [part_of(load / 100, 8) for load in range(101)]
    assert parts == sorted(parts, reverse=True)


def test_half_the_load_of_the_pool_leaves_the_rest_of_it() -> None:
    """One request of 20 ms every 80 ms on each of 8 gateways: 2 of 4 lanes, 1.75 by the others."""
    share, calendar = make_share()
    offer(share, 80, until_ms=8000)
    assert calendar.supply == pytest.approx(2.25, abs=0.5)


def test_two_requests_at_once_are_not_twice_the_load() -> None:
    """One lane, and on each of 8 gateways 20 ms of work every 400: then two come together."""
    share, calendar = make_share(lanes=1)
    offer(share, 400, until_ms=16_000)
    before = calendar.part
    for at_ms in (16_000, 16_020):
        share.observe(at_ms * MS, 20.0 * MS, 8)
    share.divide(16_020 * MS, 8)
    assert calendar.part == pytest.approx(before, abs=0.1)


def test_of_the_first_few_requests_the_load_is_hardly_known() -> None:
    """Two within 20 ms, and none before: no overload yet. Ten of them within 100 ms are one."""
    share, calendar = make_share(lanes=1)
    offer(share, 10, until_ms=20)
    assert calendar.part > 0.5
    share, calendar = make_share(lanes=1)
    offer(share, 10, until_ms=100)
    assert calendar.part == 1 / 8


def test_in_overload_a_gateway_counts_on_its_equal_part() -> None:
    share, calendar = make_share()
    offer(share, 10, until_ms=4000)
    assert calendar.supply == pytest.approx(0.5)


def test_a_gateway_that_dies_leaves_its_part_to_the_others() -> None:
    share, calendar = make_share()
    offer(share, 10, until_ms=4000)
    share.divide(4000 * MS, 4)
    assert calendar.supply == pytest.approx(1.0)
    share.divide(4000 * MS, 1)
    assert calendar.part == 1.0


def test_what_nobody_can_promise_is_left_to_all() -> None:
    """In overload, but everything was refused: so do the others, and the pool is idle."""
    share, calendar = make_share()
    for at_ms in range(0, 20_000, 10):
        share.observe(at_ms * MS, 20.0 * MS, 8)
    assert calendar.part == 1.0


def test_promises_that_are_broken_in_overload_make_the_part_smaller_until_they_are_kept() -> None:
    share, calendar = make_share()
    offer(share, 10, until_ms=4000)
    for _ in range(5):
        share.on_settled(0.01, was_kept=False)
    share.divide(4000 * MS, 8)
    assert calendar.supply == pytest.approx(0.5 / 1.5)
    for _ in range(1000):
        share.on_settled(0.01, was_kept=True)
    share.divide(4000 * MS, 8)
    assert calendar.supply == pytest.approx(0.5)


def test_promises_that_are_broken_without_overload_have_other_reasons() -> None:
    share, calendar = make_share()
    offer(share, 80, until_ms=8000)
    before = calendar.part
    share.on_settled(0.01, was_kept=False)
    share.divide(8000 * MS, 8)
    assert calendar.part == pytest.approx(before, abs=0.1)


def test_a_part_of_a_lane_is_waited_for() -> None:
    """Of half a lane, one batch of 20 ms can start within 20 ms, and two within 60."""
    _, calendar = make_share(lanes=1)
    calendar.share(0.5)
    assert not calendar.has_free_lane(0)
    assert not calendar.can_start(0, 19 * MS, 20.0 * MS, 1.0)
    assert calendar.can_start(0, 20 * MS, 20.0 * MS, 1.0)
    assert not calendar.can_start(0, 59 * MS, 20.0 * MS, 2.0)
    assert calendar.can_start(0, 60 * MS, 20.0 * MS, 2.0)


def test_a_batch_of_ours_that_ends_frees_no_more_than_our_part() -> None:
    _, calendar = make_share(lanes=1)
    calendar.share(0.5)
    calendar.occupy(10 * MS)
    assert not calendar.can_start(0, 29 * MS, 20.0 * MS, 1.0)
    assert calendar.can_start(0, 30 * MS, 20.0 * MS, 1.0)


def test_the_calendar_balances_with_a_part_of_its_time() -> None:
    """Of 8 lanes a gateway has 2: what fits 8 is too much."""
    _, calendar = make_share(lanes=8)
    bucket = calendar.bucket(0, 50 * MS)
    whole = calendar.slack(0, bucket)[1]
    calendar.share(0.25)
    assert calendar.slack(0, bucket)[1] == pytest.approx(whole / 4, rel=0.01)
