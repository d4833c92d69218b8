"""The default policy in worlds that it was not grown on: every row of `worlds`, on fresh seeds.

No constant of the policy was chosen on these seeds. Each test runs its world as the row describes
it and compares all claims of the row with their bounds.
"""

from __future__ import annotations

import pytest

from . import worlds
from .worlds import SEEDS, Row

pytestmark = pytest.mark.long

POLICY = "headgate"
# The second seed makes sure that the first is no lucky one: that need not be asked all the time.
over_seeds = pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]
)


def check(row: Row, seed: int) -> None:
    failed = [claim for claim in row(POLICY, seed) if not claim.holds]
    assert not failed, "; ".join(
        f"{claim.what}: {claim.measured:.4g}, wanted {claim.wanted}" for claim in failed
    )


def test_every_row_has_a_test() -> None:
    assert len(worlds.ROWS) == sum(name.startswith("test_") for name in globals()) - 1


@over_seeds
def test_the_ensemble_at_six_times_its_load(seed: int) -> None:
    check(worlds.ensemble_with_right_profiles, seed)


@pytest.mark.slow
@over_seeds
def test_the_ensemble_with_bursts_and_a_wrong_profile(seed: int) -> None:
    check(worlds.ensemble_as_shipped, seed)


@over_seeds
def test_a_diamond_at_three_times_its_capacity(seed: int) -> None:
    check(worlds.diamond, seed)


@over_seeds
def test_a_chain_admits_what_its_last_stage_can_finish(seed: int) -> None:
    check(worlds.chain_with_a_narrow_end, seed)


@over_seeds
def test_a_slow_second_build_does_no_harm(seed: int) -> None:
    check(worlds.slow_second_build, seed)


@over_seeds
def test_bulk_with_a_long_deadline_does_not_shut_out_interactive_requests(seed: int) -> None:
    check(worlds.bulk_with_an_objective, seed)


@over_seeds
def test_best_effort_gets_what_is_left_and_a_small_share(seed: int) -> None:
    check(worlds.bulk_without_an_objective, seed)


@over_seeds
def test_an_urgent_header_does_not_turn_the_fair_share_round(seed: int) -> None:
    check(worlds.tenant_with_an_urgent_header, seed)


@over_seeds
def test_a_claimed_deadline_keeps_no_other_tenant_out(seed: int) -> None:
    check(worlds.tenant_that_claims_a_minute, seed)


@over_seeds
def test_a_tenant_that_begins_to_flood_keeps_no_other_out(seed: int) -> None:
    check(worlds.tenant_that_begins_to_flood, seed)


@over_seeds
def test_a_silent_second_client_changes_nothing(seed: int) -> None:
    check(worlds.silent_second_client, seed)


@over_seeds
def test_network_time_counts(seed: int) -> None:
    check(worlds.pool_behind_a_network, seed)


@pytest.mark.slow
@over_seeds
def test_the_order_of_stages_in_the_file_changes_nothing(seed: int) -> None:
    check(worlds.stages_in_another_order, seed)


@over_seeds
def test_requests_of_eight_items_rent_what_they_need(seed: int) -> None:
    check(worlds.large_requests_on_a_rented_pool, seed)


@over_seeds
def test_a_function_cannot_use_slots_beyond_its_concurrency(seed: int) -> None:
    check(worlds.concurrency_below_the_slots, seed)


@over_seeds
def test_starts_count_and_not_seconds_of_work(seed: int) -> None:
    check(worlds.starts_count, seed)


@over_seeds
def test_one_optimistic_profile_taxes_nobody_else(seed: int) -> None:
    check(worlds.one_optimistic_profile, seed)
