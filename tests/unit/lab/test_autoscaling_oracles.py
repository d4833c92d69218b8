"""The clairvoyant autoscalers against exhaustive search and by hand, and the bounds below them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from headgate.core.errors import ConfigError
from headgate.lab.experiments.autoscaling.oracles import (
    BackendUse,
    Int64,
    lazy_release,
    lazy_release_bound_ns,
    peak_bound,
    zero_setup,
)


def _ints(*values: int) -> Int64:
    return np.array(values, dtype=np.int64)


def _random_case(seed: int, count: int) -> tuple[Int64, Int64, int]:
    rng = np.random.default_rng(seed)
    arrivals_ns = np.sort(rng.integers(0, 30, count))
    return arrivals_ns, rng.integers(1, 10, count), int(rng.integers(10, 20))


def _least_backends(arrivals_ns: Int64, exec_ns: Int64, response_max_ns: int) -> int:
    """The fewest backends with which all requests are in time, by trying every order.

    Backends are equal, so in the order of its starts any schedule can be moved to the left: the
    next request goes to the backend that is free first.
    """
    requests = list(zip(arrivals_ns.tolist(), exec_ns.tolist(), strict=True))
    for count in range(1, len(requests) + 1):
        for order in permutations(requests):
            free = [0] * count
            for arrival_ns, length_ns in order:
                first = min(range(count), key=free.__getitem__)
                free[first] = max(arrival_ns, free[first]) + length_ns
                if free[first] > arrival_ns + response_max_ns:
                    break
            else:
                return count
    raise AssertionError("as many backends as requests are always enough")


@pytest.mark.parametrize("seed", range(25))
def test_the_peak_is_between_the_bound_and_the_greedy_oracle(seed: int) -> None:
    case = _random_case(seed, count=6)
    least = _least_backends(*case)
    assert peak_bound(*case) <= least <= zero_setup(*case).peak


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_is_the_largest_ratio_of_work_to_time(seed: int) -> None:
    arrivals_ns, exec_ns, response_max_ns = _random_case(seed, count=40)
    ratios = [
        int(exec_ns[first : last + 1].sum())
        / int(arrivals_ns[last] + response_max_ns - arrivals_ns[first])
        for last in range(40)
        for first in range(last + 1)
    ]
    assert peak_bound(arrivals_ns, exec_ns, response_max_ns) == np.ceil(max(ratios) - 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_zero_setup_pays_for_the_work_and_is_in_time(seed: int) -> None:
    arrivals_ns, exec_ns, response_max_ns = _random_case(seed, count=60)
    use = zero_setup(arrivals_ns, exec_ns, response_max_ns)
    assert use.total_ns == exec_ns.sum()
    assert (use.starts_ns >= arrivals_ns).all()
    assert (use.ends_ns <= arrivals_ns + response_max_ns).all()
    assert use.peak >= peak_bound(arrivals_ns, exec_ns, response_max_ns)


@pytest.mark.parametrize("seed", range(10))
def test_lazy_release_pays_at_least_its_bound(seed: int) -> None:
    case = _random_case(seed, count=60)
    use = lazy_release(*case, setup_ns=7, timeout_ns=5)
    assert use.total_ns >= lazy_release_bound_ns(*case, setup_ns=7, timeout_ns=5)


@pytest.mark.parametrize("seed", range(10))
def test_without_set_up_and_timeout_both_oracles_pay_the_same(seed: int) -> None:
    case = _random_case(seed, count=60)
    use = lazy_release(*case, setup_ns=0, timeout_ns=0)
    assert use.total_ns == zero_setup(*case).total_ns


def test_a_request_starts_as_late_as_it_may_and_the_next_one_follows_it() -> None:
    """RT_max 50, both take 10: the first runs from 40 to 50, the second right behind it."""
    arrivals_ns, exec_ns = _ints(0, 10), _ints(10, 10)
    use = zero_setup(arrivals_ns, exec_ns, 50)
    assert (use.starts_ns.tolist(), use.ends_ns.tolist()) == ([40, 50], [50, 60])
    use = lazy_release(arrivals_ns, exec_ns, 50, setup_ns=5, timeout_ns=7)
    assert (use.starts_ns.tolist(), use.ends_ns.tolist()) == ([35], [67])


def test_lazy_release_uses_a_backend_again_until_it_times_out() -> None:
    """The backend is free at 50: it is idle for 20 until the second request, gone before the third.

    The third one arrives at 200, runs from 240 to 250 on a backend whose set-up began at 235.
    """
    use = lazy_release(_ints(0, 70, 200), _ints(10, 10, 10), 50, setup_ns=5, timeout_ns=20)
    assert (use.starts_ns.tolist(), use.ends_ns.tolist()) == ([35, 235], [100, 270])
    assert use.total_ns == 65 + 35
    assert use.at(_ints(34, 35, 99, 100, 240)).tolist() == [0, 1, 1, 0, 1]


def test_requests_that_cannot_wait_for_each_other_need_a_backend_each() -> None:
    case = (_ints(0, 0, 0), _ints(10, 10, 10), 10)
    assert (peak_bound(*case), zero_setup(*case).peak) == (3, 3)


def test_nothing_needs_nothing() -> None:
    assert peak_bound(_ints(), _ints(), 10) == 0
    assert zero_setup(_ints(), _ints(), 10).peak == 0
    assert lazy_release(_ints(), _ints(), 10, setup_ns=1, timeout_ns=1).total_ns == 0


def test_a_request_that_takes_longer_than_it_may_is_an_error() -> None:
    with pytest.raises(ConfigError, match="response_max_ns: 9: is shorter than a request"):
        zero_setup(_ints(0), _ints(10), 9)


def test_backends_that_follow_each_other_count_once() -> None:
    assert BackendUse(_ints(0, 10), _ints(10, 20)).peak == 1
