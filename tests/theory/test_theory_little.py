"""Little's law: the mean number in the system is the arrival rate times the mean time in it."""

from __future__ import annotations

import pytest
from theory_systems import SERVICE_S, run, sojourns_s, system

from headgate.core.actions import Action, Settle
from headgate.core.clock import SECOND_NS
from headgate.core.events import Event, RequestArrived
from headgate.metrics.confidence import mean_interval
from headgate.policies import find_policy, policy_names
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.interfaces import Observer
from headgate.sim.run import Setup, simulate
from headgate.workload import poisson


class _Census(Observer):
    """Counts who is in the system from what passes the seam, not from what was recorded."""

    def __init__(self) -> None:
        self.present = 0
        self.area_ns = 0  # the integral of the number present
        self._since_ns = 0

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self.area_ns += self.present * (now_ns - self._since_ns)
        self._since_ns = now_ns
        self.present += isinstance(event, RequestArrived)
        self.present -= sum(isinstance(action, Settle) for action in actions)


@pytest.mark.parametrize("policy", policy_names())
def test_on_every_path(policy: str) -> None:
    """On a path that begins and ends empty the law is exact, whatever the policy."""
    census = _Census()
    arrivals = poisson(3_000.0, SECOND_NS, seed=3)
    setup = Setup(system(4), find_policy(policy), truth=GroundTruthConfig("exponential"), seed=3)
    done = simulate(setup, arrivals, observer=census)
    assert census.present == 0
    assert len(done.requests) == len(arrivals)
    assert census.area_ns == round(sojourns_s(done).sum() * SECOND_NS)


def test_in_the_mean() -> None:
    """Over seeds, M/M/1 holds rho / (1 - rho) requests."""
    load = 0.6
    numbers = []
    for seed in range(10):
        done = run(system(1), load / SERVICE_S, 10_000, GroundTruthConfig("exponential"), seed=seed)
        numbers.append(float(sojourns_s(done).sum() * SECOND_NS / done.end_ns))
    interval = mean_interval(numbers, level=0.99)
    assert interval.low <= load / (1 - load) <= interval.high, interval
    assert interval.high - interval.low < 0.3 * load / (1 - load)
