"""Cost objectives in random cases full of faults: every request ends, and no check fails."""

from __future__ import annotations

from random import Random

import pytest

from headgate.core.actions import Action, Settle
from headgate.core.events import Event
from headgate.core.model import Slo
from headgate.core.states import Outcome, Rejection, Settlement
from headgate.policies import find_policy
from headgate.sim import fuzz
from headgate.sim.interfaces import Observer


class Settlements(Observer):
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.all: list[Settlement] = []

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.all += [action.settlement for action in actions if isinstance(action, Settle)]


def test_every_request_ends_whatever_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objectives range from what nothing costs to what everything costs."""
    rng = Random(0)

    def limited(latency_ns: int, *, is_hard: bool) -> Slo:
        return Slo(latency_ns, is_hard=is_hard, cost_usd=10 ** rng.uniform(-9, -4))

    monkeypatch.setattr(fuzz, "Slo", limited)
    settlements = Settlements()
    for seed in range(30):
        fuzz.run_case(find_policy("headgate"), seed, settlements)
    refused = [each for each in settlements.all if each.reason == Rejection.OVER_COST]
    assert len(refused) > 50
    assert all(0 < each.objective_usd < each.predicted_usd for each in refused)
    assert all(each.retry_ns == 0 for each in refused)
    assert sum(each.outcome == Outcome.MET for each in settlements.all) > 50
