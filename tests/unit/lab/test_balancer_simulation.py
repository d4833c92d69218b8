"""The simulations of load balancers beside what is known exactly, and the estimates beside them."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from headgate.lab.bench import estimator
from headgate.lab.experiments import swayam_estimator
from headgate.lab.experiments._balancer_simulation import (
    BATCH,
    Balancer,
    Draws,
    MissEstimate,
    global_queue,
    join_idle_queue,
    partitioned,
    power_of_d,
    random_retry,
)
from headgate.lab.experiments.swayam_estimator import ComparedCell, Condition, compare
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.response_time import BackendEstimate

TIMES = LogNormalTimes(1.0, 0.5)


def mean_wait(balancer: Balancer, rate_per_s: float, backends: int) -> float:
    waits = balancer(Draws(rate_per_s, TIMES, (1, 2)), backends)
    return float(np.mean(list(islice(waits, 20))))


@pytest.mark.parametrize(
    ("balancer", "rate_per_s", "backends"),
    [
        (global_queue, 0.5, 1),
        (join_idle_queue, 0.5, 1),
        (power_of_d(2), 0.5, 1),
        (partitioned(3), 1.5, 3),
    ],
)
def test_single_queues_wait_as_pollaczek_and_khinchine_say(
    balancer: Balancer, rate_per_s: float, backends: int
) -> None:
    """With one backend per queue, every load balancer is M/G/1: Pollaczek and Khinchine."""
    load, cv = rate_per_s / backends, 0.5
    expected = load * (1 + cv * cv) / (2 * (1 - load))
    assert mean_wait(balancer, rate_per_s, backends) == pytest.approx(expected, rel=0.06)


def test_random_dispatch_waits_in_probes_and_nearly_as_one_queue() -> None:
    """Waits are multiples of the delay; the mean wait hardly depends on the order of service."""
    waits = next(random_retry(0.05)(Draws(3.0, TIMES, (3,)), 5))
    probes = np.array(waits) / 0.05
    assert np.allclose(probes, np.round(probes), atol=1e-6)
    assert probes.max() > 2
    fine = mean_wait(random_retry(0.001), 3.0, 4)  # vain probes cost nothing
    assert fine == pytest.approx(mean_wait(global_queue, 3.0, 4), rel=0.1)


def test_the_better_balanced_waits_less() -> None:
    means = [
        mean_wait(each, 10.0, 16)
        for each in (global_queue, random_retry(0.01), power_of_d(2), partitioned(8))
    ]
    assert means == sorted(means)


def test_misses_become_certain_or_end() -> None:
    """A share far from what is allowed needs few batches; one at the limit needs all."""
    far = MissEstimate(global_queue, 2.0, TIMES, 4, (2.0, 5.0), (5,), batches_max=20)
    assert far.is_met(1, 0.5) and not far.is_met(1, 1e-9)
    assert far.requests == 5 * BATCH
    share, error = far.misses(0)
    assert 0.0 < error < 0.1 * share
    assert share >= 1.0 - TIMES.share_within(2.0)
    assert far.is_met(0, share) in (True, False)
    assert far.requests == 20 * BATCH


def test_a_condition_is_compared_cell_by_cell() -> None:
    """Estimates of a small system are those of its simulation; and what no number meets is said."""
    cells = compare(Condition("random", 2.0, 0.25, 0.05), is_quick=True)
    assert [(cell.limit, cell.share) for cell in cells] == [(5.0, 0.95), (5.0, 0.99)]
    assert all(abs(cell.difference) <= 1 and cell.error < 1.0 for cell in cells)
    assert [ComparedCell(2.0, 0.9, *each).label for each in ((3, 3), (4, 3), (None, None))] == [
        "3",
        "4 (3)",
        "-",
    ]


def test_a_wrong_estimate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated minimum does not depend on the estimate that the walk begins with."""
    condition = Condition("global queue", 2.0, 0.25)
    right = [cell.simulated for cell in compare(condition, is_quick=True)]
    wrong = BackendEstimate(6, 1.0, 2.0)
    monkeypatch.setattr(swayam_estimator, "least_backends", lambda *_: wrong)
    cells = compare(condition, is_quick=True)
    assert [cell.simulated for cell in cells] == right == [3, 3]
    assert [cell.difference for cell in cells] == [3, 3]


def test_the_benchmark_measures_every_load_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "_LOADS", (2.0,))
    monkeypatch.setattr(estimator, "_CVS", (0.25,))
    result = estimator.run(progress=lambda _: None)
    assert len(result.rows) == 6
    assert all(row["median_ms"] for row in result.rows)
    assert len(result.checks) == 1
