"""Response times under a load balancer, and the least number of backends that meets an SLO.

The resource estimation of Swayam (Middleware 2017): execution times C are log-normal, the wait W
depends on the load balancer (`waiting_time`), and a model needs the least n with
P(W + C <= RT_max) >= SL_min at U times the predicted rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, fsum, isfinite, log, sqrt
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError, InvariantError
from headgate.core.model import Slo
from headgate.planning.autoscaling.execution_times import ExecutionTimes
from headgate.planning.autoscaling.waiting_time import LoadBalancer

BACKENDS_MAX: Final = 10_000  # beyond this an SLO counts as out of reach
# Load per backend from which waits count as endless: nearer to 1 they are beyond any limit, and
# beyond what floating point tells apart.
_SATURATED: Final = 1.0 - 1e-6


def attainment(
    times: ExecutionTimes,
    rate_per_s: float,
    limit_s: float,
    balancer: LoadBalancer,
    backends: int,
) -> float:
    """Return P(W + C <= limit) at a rate: the convolution of the wait and the execution.

    >>> from headgate.planning.autoscaling.execution_times import LogNormalTimes
    >>> from headgate.planning.autoscaling.waiting_time import GlobalQueue
    >>> times = LogNormalTimes(0.1, 0.25)
    >>> [round(attainment(times, 100.0, 0.3, GlobalQueue(), n), 3) for n in (10, 11, 12)]
    [0.0, 0.983, 1.0]
    """
    if rate_per_s * times.mean_s >= backends * _SATURATED:
        return 0.0
    within = times.share_within(limit_s)
    if rate_per_s <= 0.0:
        return within
    wait = balancer.wait(times, rate_per_s, backends, limit_s)
    late = fsum(
        weight * wait.beyond(max(0.0, limit_s - time_s)) for time_s, weight in times.points(limit_s)
    )
    return max(0.0, within - late)


@dataclass(frozen=True, slots=True)
class BackendEstimate:
    """How many backends an SLO needs."""

    backends: int | None  # None: no number of backends meets the SLO
    attainment: float  # P(response <= RT_max) with them; with endless many if there are none
    erlangs: float  # the offered load at U times the predicted rate


def least_backends(
    times: ExecutionTimes,
    rate_per_s: float,
    slo: Slo,
    balancer: LoadBalancer,
    *,
    guess: int | None = None,
) -> BackendEstimate:
    """Return the least n with P(W + C <= RT_max) >= SL_min at U times the predicted rate.

    RT_max, SL_min and U are `slo.latency_ns`, `slo.quantile` and `slo.rate_tolerance`. A rate of
    zero needs no backend. `guess`, such as the last estimate, makes the search shorter and does not
    change its result. Raises `ConfigError` for a limit below the mean execution time, a share
    outside (0, 1), a tolerance below 1 or a negative rate.

    >>> from headgate.planning.autoscaling.execution_times import LogNormalTimes
    >>> from headgate.planning.autoscaling.waiting_time import GlobalQueue, RandomRetry
    >>> times, slo = LogNormalTimes(0.1, 0.25), Slo(500_000_000, 0.99, rate_tolerance=2.0)
    >>> least_backends(times, 100.0, slo, RandomRetry(probe_delay_s=0.001)).backends
    22
    >>> least_backends(LogNormalTimes(0.4, 1.0), 100.0, slo, GlobalQueue()).backends is None
    True
    """
    check_slo(times, slo)
    if not (isfinite(rate_per_s) and rate_per_s >= 0.0):
        raise ConfigError("must not be negative", key="rate_per_s", value=rate_per_s)
    limit_s = slo.latency_ns / SECOND_NS
    rate_per_s *= slo.rate_tolerance
    erlangs = rate_per_s * times.mean_s
    best = times.share_within(limit_s)
    if erlangs == 0.0:
        return BackendEstimate(0, best, erlangs)
    if best < slo.quantile:
        return BackendEstimate(None, best, erlangs)
    known: dict[int, float] = {}

    def excess(backends: int) -> float:
        """Logarithm of the misses over those that the SLO allows: nearly linear in n."""
        if backends not in known:
            share = attainment(times, rate_per_s, limit_s, balancer, backends)
            known[backends] = share
        missed = max(1.0 - known[backends], 1e-12)
        return log(missed / (1.0 - slo.quantile))

    low = int(erlangs)  # the largest number that is known not to be enough
    found = _least(excess, low, guess if guess is not None and guess > low else _guess(erlangs))
    if found is None:
        return BackendEstimate(None, best, erlangs)
    return BackendEstimate(found, known[found], erlangs)


def check_slo(times: ExecutionTimes, slo: Slo) -> None:
    """Raise `ConfigError` unless the parts of an SLO make sense for these execution times.

    >>> from headgate.planning.autoscaling.execution_times import LogNormalTimes
    >>> check_slo(LogNormalTimes(0.5, 0.1), Slo(400_000_000))
    Traceback (most recent call last):
    headgate.core.errors.ConfigError: slo.latency: 0.4: is below the mean execution time ...
    """
    limit_s = slo.latency_ns / SECOND_NS
    if limit_s < times.mean_s:
        raise ConfigError(
            "is below the mean execution time",
            key="slo.latency",
            value=limit_s,
            allowed=f"at least {times.mean_s:.6g} s",
        )
    if not 0.0 < slo.quantile < 1.0:
        raise ConfigError(
            "is no share", key="slo.quantile", value=slo.quantile, allowed="between 0 and 1"
        )
    if not (isfinite(slo.rate_tolerance) and slo.rate_tolerance >= 1.0):
        raise ConfigError(
            "is below 1", key="slo.rate_tolerance", value=slo.rate_tolerance, allowed="at least 1"
        )


def _least(excess: Callable[[int], float], low: int, start: int) -> int | None:
    """Return the least number above `low` without an excess; None above `BACKENDS_MAX`.

    `excess` falls with the number, nearly in a line: regula falsi, and bisection where that is
    slow. `low` is known not to be enough.
    """
    high = 0  # 0: not known
    low_excess = high_excess = 0.0  # an excess of 0 is that of no low number: not known
    slope = -2.0 / sqrt(low + 1.0)  # a guess, until two points are known
    number = max(low + 1, start)
    for tried in range(64):
        value = excess(number)
        if value <= 0.0:
            high, high_excess = number, value
        else:
            low, low_excess = number, value
        if high == low + 1:
            return high
        if high == 0:
            number += max(1, ceil(-1.2 * value / slope), tried * tried)
            if number > BACKENDS_MAX:
                return None
        elif tried > 6:
            number = (low + high) // 2
        elif low_excess == 0.0:
            number = max(low + 1, high - max(1, int(value / slope)))
        else:
            part = low_excess / (low_excess - high_excess)
            number = min(max(low + 1, low + ceil((high - low) * part)), high - 1)
    raise InvariantError("the search for the least number of backends does not end")


def _guess(load: float) -> int:
    return int(load + sqrt(load)) + 1
