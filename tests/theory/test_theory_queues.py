"""Systems with a known solution: the simulation agrees within its confidence interval."""

from __future__ import annotations

import numpy as np
import pytest
from theory_formulas import mg1_wait_s, mmc_wait_quantile_s, mmc_wait_s
from theory_systems import SERVICE_S, assert_mean, batch_means, run, system, waits_s

from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Node, Request, Task
from headgate.core.states import Outcome, Settlement
from headgate.metrics.confidence import mean_interval
from headgate.planning.autoscaling.waiting_time import erlang_b, erlang_c
from headgate.sim.ground_truth import GroundTruthConfig

EXPONENTIAL = GroundTruthConfig("exponential")
EXACT = GroundTruthConfig("exact")


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_mm1(load: float) -> None:
    rate_per_s = load / SERVICE_S
    done = run(system(1), rate_per_s, 100_000, EXPONENTIAL)
    assert_mean(waits_s(done), mmc_wait_s(1, rate_per_s, SERVICE_S))
    assert_mean(waits_s(done) > 0, load)  # whoever arrives finds the server busy with that chance


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_md1(load: float) -> None:
    rate_per_s = load / SERVICE_S
    done = run(system(1), rate_per_s, 80_000, EXACT)
    assert_mean(waits_s(done), mg1_wait_s(rate_per_s, SERVICE_S, cv=0.0))


@pytest.mark.parametrize("cv", [0.5, 1.2])
def test_mg1(cv: float) -> None:
    """Pollaczek and Khinchine: the wait grows with the variance of service."""
    rate_per_s = 0.5 / SERVICE_S
    done = run(system(1), rate_per_s, 100_000, GroundTruthConfig("lognormal", cv=cv))
    assert_mean(waits_s(done), mg1_wait_s(rate_per_s, SERVICE_S, cv))


@pytest.mark.parametrize(("servers", "load"), [(2, 1.4), (8, 6.4)])
def test_mmc(servers: int, load: float) -> None:
    """The share that waits is Erlang's C; the wait has the mean and the tail of M/M/c."""
    rate_per_s = load / SERVICE_S
    done = run(system(servers), rate_per_s, 250_000, EXPONENTIAL)
    assert_mean(waits_s(done) > 0, erlang_c(servers, load))
    assert_mean(waits_s(done), mmc_wait_s(servers, rate_per_s, SERVICE_S))
    p80_s = mmc_wait_quantile_s(servers, rate_per_s, SERVICE_S, 0.8)
    assert_mean(waits_s(done) > p80_s, 0.2)


class _Loss(Policy):
    """A loss system: a request that finds no free server is rejected."""

    def on_arrival(self, request: Request) -> None:
        if not self.view.free_nodes:
            self.orders.reject(request, Settlement(Outcome.REJECTED, "no server is free"))

    def on_task_ready(self, task: Task) -> None:
        self.orders.dispatch([task], next(iter(self.view.free_nodes.values())))

    def on_capacity(self, node: Node) -> None:
        pass


@pytest.mark.parametrize("truth", [EXPONENTIAL, EXACT], ids=["exponential", "exact"])
def test_erlang_b(truth: GroundTruthConfig) -> None:
    """The share turned away depends on service times through their mean alone."""
    servers, load = 5, 4.0
    done = run(system(servers), load / SERVICE_S, 60_000, truth, policy=PolicyKind(_Loss))
    assert_mean(done.requests.outcome == Outcome.REJECTED, erlang_b(servers, load))
    assert not np.any(waits_s(done)[done.requests.outcome == Outcome.MET])


def test_batch_means_are_wider_than_the_naive_interval_of_a_correlated_series() -> None:
    """A slow random walk back to 0: neighbours are alike, so few values are independent."""
    noise = np.random.default_rng(1).normal(size=20_000)
    series = np.zeros(20_000)
    for i in range(1, 20_000):
        series[i] = 0.95 * series[i - 1] + noise[i]
    naive, batched = mean_interval(series.tolist()), batch_means(series, 20, 0.95)
    assert batched.high - batched.low > 3 * (naive.high - naive.low)
    assert batched.low < 0.0 < batched.high
    assert batched.n == 20


def test_batches_leave_out_the_warm_up() -> None:
    """Seven values in three batches: the first one is left out."""
    interval = batch_means([1000.0, 1, 3, 2, 2, 0, 4], 3, 0.95)
    assert interval.mean == 2.0
