"""The least number of backends for an SLO, and the waits that it follows from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.errors import ConfigError
from headgate.core.model import Slo
from headgate.planning.autoscaling.execution_times import EmpiricalTimes, LogNormalTimes
from headgate.planning.autoscaling.response_time import attainment, least_backends
from headgate.planning.autoscaling.waiting_time import (
    GlobalQueue,
    JoinIdleQueue,
    LoadBalancer,
    Partitioned,
    PowerOfD,
    RandomRetry,
    SharedQueueTail,
    erlang_c,
)

BALANCERS: tuple[LoadBalancer, ...] = (
    GlobalQueue(),
    Partitioned(4),
    JoinIdleQueue(),
    PowerOfD(2),
    RandomRetry(0.001),
    RandomRetry(0.005),
)
TIMES = LogNormalTimes(0.1, 0.25)


def slo(limit_s: float, share: float = 0.99, tolerance: float = 1.0) -> Slo:
    return Slo(round(limit_s * 1e9), share, rate_tolerance=tolerance)


@pytest.mark.parametrize("balancer", BALANCERS, ids=repr)
@pytest.mark.parametrize("load", [0.05, 0.9, 1.5, 7.3, 40.0, 160.0])
def test_the_least_number_is_the_least(balancer: LoadBalancer, load: float) -> None:
    """One backend fewer misses the SLO, whatever the search began with."""
    rate = load / TIMES.mean_s
    found = least_backends(TIMES, rate, slo(0.4), balancer)
    assert found.backends is not None
    assert found.attainment >= 0.99
    assert found.erlangs == pytest.approx(load)
    assert attainment(TIMES, rate, 0.4, balancer, found.backends) == found.attainment
    assert attainment(TIMES, rate, 0.4, balancer, found.backends - 1) < 0.99
    for guess in (1, found.backends, 3 * found.backends):
        again = least_backends(TIMES, rate, slo(0.4), balancer, guess=guess)
        assert again.backends == found.backends


@given(
    st.sampled_from(BALANCERS),
    st.floats(0.1, 60.0),
    st.floats(0.0, 1.2),
    st.floats(1.5, 12.0),
    st.floats(0.5, 0.999),
)
@settings(max_examples=150, deadline=None)
def test_more_is_never_worse(
    balancer: LoadBalancer, load: float, cv: float, limit: float, share: float
) -> None:
    """A stricter SLO or a tolerated surge needs as many backends or more."""
    times = LogNormalTimes(0.1, cv)
    rate = load / times.mean_s
    limit_s = limit * times.mean_s
    base = least_backends(times, rate, slo(limit_s, share), balancer)
    if base.backends is None:
        return
    later = least_backends(times, rate, slo(1.2 * limit_s, share), balancer)
    assert later.backends is not None and later.backends <= base.backends
    surge = least_backends(times, rate, slo(limit_s, share, 1.5), balancer)
    direct = least_backends(times, 1.5 * rate, slo(limit_s, share), balancer)
    assert surge == direct
    if not isinstance(balancer, Partitioned):  # whose smallest part decides, and may get smaller
        assert surge.backends is None or surge.backends >= base.backends


def test_the_global_queue_of_exponential_times_is_exact() -> None:
    """Samples at the quantiles of the exponential distribution: P(W > t) = C exp(-(n - a) t)."""
    count = 20_000
    times = EmpiricalTimes([-0.1 * math.log(1.0 - (i + 0.5) / count) for i in range(count)])
    for load, backends in ((0.5, 1), (3.0, 4), (20.0, 23)):
        wait = GlobalQueue().wait(times, load / 0.1, backends, 1.0)
        for time_s in (0.0, 0.02, 0.1, 0.3):
            expected = erlang_c(backends, load) * math.exp(-(backends - load) * time_s / 0.1)
            assert wait.beyond(time_s) == pytest.approx(expected, rel=0.05, abs=1e-5)


def test_deterministic_times_wait_as_in_the_formula_of_erlang() -> None:
    """M/D/1 at load 1/4: P(W <= t) = (1 - load) exp(load t) up to one execution."""
    wait = GlobalQueue().wait(LogNormalTimes(1.0, 0.0), 0.25, 1, 2.0)
    for time_s in (0.2, 0.5, 0.8):
        assert wait.beyond(time_s) == pytest.approx(1.0 - 0.75 * math.exp(0.25 * time_s), abs=0.02)


def test_partitions_wait_longer_than_one_queue_and_random_dispatch_between() -> None:
    """The order of the slides' figure, at 15 Erlangs and the 99th percentile."""
    found = [
        least_backends(LogNormalTimes(0.15, 0.5), 100.0, slo(0.5), balancer).backends
        for balancer in (GlobalQueue(), RandomRetry(0.005), Partitioned(8))
    ]
    assert found == [17, 19, 26]


def test_a_wait_is_a_tail() -> None:
    """From at most 1 down to nothing, and without end where a part has too much to do."""
    for balancer in BALANCERS:
        wait = balancer.wait(TIMES, 100.0, 13, 1.0)
        shares = [wait.beyond(0.01 * i) for i in range(300)]
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert all(later <= share + 1e-12 for share, later in pairwise(shares))
        assert shares[-1] < 1e-6
    overloaded = Partitioned(8).wait(TIMES, 100.0, 15, 1.0)
    assert overloaded.beyond(1e6) == pytest.approx(1 / 8)  # 1.25 Erlangs at a single backend


def test_probes_of_one_request_are_not_independent() -> None:
    """A wait of 14 probes at load 0.63 is far likelier than 14 trials would make it."""
    times = LogNormalTimes(1.0, 0.1)
    wait = RandomRetry(0.05).wait(times, 80.0, 127, 2.0)
    assert wait.beyond(0.7) > 2.0 * (80 / 127) ** 15


def test_a_long_probe_delay_costs_backends() -> None:
    rates = [
        least_backends(TIMES, 400.0, slo(0.5), RandomRetry(0.1 * delay)).backends or 0
        for delay in (0.001, 0.01, 0.05, 0.2, 2.0)
    ]
    assert rates == sorted(rates)
    # Without a delay there is still no order among those that wait.
    global_queue = least_backends(TIMES, 400.0, slo(0.5), GlobalQueue()).backends
    assert global_queue is not None and rates[0] in (global_queue, global_queue + 1)
    assert rates[-1] > rates[0] + 10


def test_what_no_number_of_backends_can_meet_is_said() -> None:
    """One execution in a hundred takes longer than five means, where cv is 1."""
    times = LogNormalTimes(0.1, 1.0)
    for balancer in BALANCERS:
        found = least_backends(times, 50.0, slo(0.5, 0.999), balancer)
        assert found.backends is None
        assert found.attainment == times.share_within(0.5) < 0.999


def test_without_a_limit_the_load_alone_counts() -> None:
    for balancer in (*BALANCERS[:1], *BALANCERS[2:]):
        assert least_backends(TIMES, 105.0, Slo(), balancer).backends == 11


def test_no_requests_need_no_backend() -> None:
    assert least_backends(TIMES, 0.0, slo(0.5), GlobalQueue()).backends == 0


def test_empirical_times_need_what_the_distribution_needs() -> None:
    samples = [TIMES.quantile((i + 0.5) / 5000) for i in range(5000)]
    for balancer in BALANCERS:
        expected = least_backends(TIMES, 200.0, slo(0.3), balancer).backends
        assert expected is not None
        found = least_backends(EmpiricalTimes(samples), 200.0, slo(0.3), balancer).backends
        assert found is not None and abs(found - expected) <= 1


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (
            slo(0.09),
            "slo.latency: 0.09: is below the mean execution time (allowed: at least 0.1 s)",
        ),
        (slo(0.5, 0.0), "slo.quantile: 0.0: is no share (allowed: between 0 and 1)"),
        (slo(0.5, 1.0), "slo.quantile: 1.0: is no share (allowed: between 0 and 1)"),
        (slo(0.5, 0.99, 0.9), "slo.rate_tolerance: 0.9: is below 1 (allowed: at least 1)"),
        (slo(0.5, 0.99, math.nan), "slo.rate_tolerance: nan: is below 1 (allowed: at least 1)"),
    ],
)
def test_bad_input_is_one_line(objective: Slo, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        least_backends(TIMES, 10.0, objective, GlobalQueue())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: least_backends(TIMES, -1.0, slo(0.5), GlobalQueue()),
            "rate_per_s: -1.0: must not be negative",
        ),
        (lambda: RandomRetry(0.0), "probe_delay_s: 0.0: must be more than zero"),
        (lambda: PowerOfD(1), "choices: 1: must be at least 2"),
        (lambda: Partitioned(0), "frontends: 0: must be at least 1"),
        (lambda: LogNormalTimes(0.0, 0.1), "mean execution time: 0.0: must be more than zero"),
        (lambda: LogNormalTimes(1.0, -0.1), "cv: -0.1: must not be negative"),
    ],
)
def test_bad_parameters_are_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_a_load_that_only_rounding_keeps_below_one_is_never_in_time() -> None:
    """The rate at which the tail decays is 0 there, as far as floats tell."""
    tail = SharedQueueTail(LogNormalTimes(0.1, 0.5), load=2.0 * (1.0 - 2e-15), backends=2)
    assert tail.beyond(1e6) == 1.0


def test_a_guess_that_is_far_too_high_is_no_matter() -> None:
    """As after a fall of the rate. The search went down in small steps, and gave up."""
    times, slo = LogNormalTimes(0.01, 0.2), Slo(50_000_000, 0.99)
    without = least_backends(times, 1.0, slo, GlobalQueue())
    assert least_backends(times, 1.0, slo, GlobalQueue(), guess=5_000) == without
