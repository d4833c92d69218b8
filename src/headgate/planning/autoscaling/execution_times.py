"""Distributions of execution times: log-normal, or empirical where that does not fit.

Execution times of a model vary little: inputs have a fixed size and control flow does not depend on
them. What is left is log-normal (Swayam, Middleware 2017), but only a test of the samples can say
so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import erfc, exp, fsum, inf, isfinite, log, pi, sqrt
from statistics import NormalDist
from typing import Final, Protocol, final

from headgate.core.errors import ConfigError

# Anderson and Darling's statistic for a normal distribution with estimated mean and variance, with
# Stephens' correction for small samples, is above this for 1 % of the samples from a normal one.
GOODNESS_MAX: Final = 1.035
_QUANTILES: Final = 32  # that stand for an empirical distribution


class ExecutionTimes(Protocol):
    """A distribution of execution times, in seconds."""

    @property
    def mean_s(self) -> float:
        """The mean."""

    @property
    def cv(self) -> float:
        """The standard deviation over the mean."""

    def share_within(self, limit_s: float) -> float:
        """Return P(C <= limit)."""

    def points(self, limit_s: float) -> Sequence[tuple[float, float]]:
        """Return times up to the limit with weights that add up to `share_within(limit_s)`."""

    def residual_beyond(self, time_s: float) -> float:
        """Return the probability that an execution seen at a random time has this much to go."""


@final
@dataclass(frozen=True, slots=True)
class LogNormalTimes:
    """Log-normal execution times.

    >>> times = LogNormalTimes(0.1, 0.5)
    >>> round(times.share_within(0.2), 4), round(times.quantile(0.99), 4)
    (0.9558, 0.2684)
    """

    mean_s: float
    cv: float
    _mu: float = field(init=False, repr=False)
    _sigma: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_positive("mean execution time", self.mean_s)
        if not (isfinite(self.cv) and self.cv >= 0.0):
            raise ConfigError("must not be negative", key="cv", value=self.cv)
        # A spread this small is that of one value, without the special cases of a zero.
        sigma = max(sqrt(log(1.0 + self.cv * self.cv)), 1e-6)
        object.__setattr__(self, "_sigma", sigma)
        object.__setattr__(self, "_mu", log(self.mean_s) - sigma * sigma / 2.0)

    def quantile(self, share: float) -> float:
        """Return the time that this share of the executions do not exceed."""
        return exp(self._mu + self._sigma * _NORMAL.inv_cdf(share))

    def share_within(self, limit_s: float) -> float:
        """Return P(C <= limit)."""
        return 1.0 - _normal_beyond(self._z(limit_s))

    def points(self, limit_s: float) -> list[tuple[float, float]]:
        """Return times up to the limit with weights: Gauss and Legendre's rule, in log(C).

        What is summed over them changes fast near the limit, where little time is left to wait, so
        points are dense there: quadratically in the distance.
        """
        low, high = -_Z_MAX, self._z(limit_s)
        if high <= low:
            return []
        is_cut = high < _Z_MAX
        width = min(high, _Z_MAX) - low
        scale = width / sqrt(2.0 * pi)
        found = []
        for place, weight in _LEGENDRE:
            if is_cut:
                z = high - width * place * place
                weight *= 2.0 * place
            else:
                z = low + width * place
            found.append((exp(self._mu + self._sigma * z), weight * scale * exp(-0.5 * z * z)))
        return found

    def residual_beyond(self, time_s: float) -> float:
        """Return the probability that an execution seen at a random time has this much to go."""
        z = self._z(time_s)
        rest = self.mean_s * _normal_beyond(z - self._sigma) - time_s * _normal_beyond(z)
        return max(0.0, rest / self.mean_s)

    def _z(self, time_s: float) -> float:
        return (log(time_s) - self._mu) / self._sigma if time_s > 0.0 else -inf


@final
class EmpiricalTimes:
    """Execution times as they were seen.

    >>> times = EmpiricalTimes([0.1, 0.1, 0.4])
    >>> round(times.mean_s, 3), round(times.share_within(0.2), 3)
    (0.2, 0.667)
    """

    __slots__ = ("_ordered_s", "_rests_s", "cv", "mean_s")

    def __init__(self, samples_s: Sequence[float]) -> None:
        """Sort the samples. Raises `ConfigError` without any, or if one is not positive."""
        if not samples_s:
            raise ConfigError("needs at least one sample", key="execution times")
        for each in samples_s:
            require_positive("execution time", each)
        self._ordered_s = sorted(samples_s)
        # The sum of all times from each place on.
        self._rests_s = [*accumulate(reversed(self._ordered_s), initial=0.0)][::-1]
        count = len(self._ordered_s)
        self.mean_s = fsum(self._ordered_s) / count
        squares = fsum((each - self.mean_s) ** 2 for each in self._ordered_s) / count
        self.cv = sqrt(squares) / self.mean_s

    def share_within(self, limit_s: float) -> float:
        """Return P(C <= limit). O(log n)."""
        return bisect_right(self._ordered_s, limit_s) / len(self._ordered_s)

    def points(self, limit_s: float) -> list[tuple[float, float]]:
        """Return 32 quantiles of the times up to the limit, dense near the limit as above."""
        below = bisect_right(self._ordered_s, limit_s)
        if below == 0:
            return []
        scale = 2.0 * below / len(self._ordered_s) / _QUANTILES
        found = []
        for number in range(_QUANTILES):
            place = (number + 0.5) / _QUANTILES
            found.append((self._ordered_s[int(below * (1.0 - place * place))], scale * place))
        return found

    def residual_beyond(self, time_s: float) -> float:
        """Return the probability that an execution seen at a random time has this much to go."""
        first = bisect_right(self._ordered_s, time_s)
        longer = len(self._ordered_s) - first
        return max(0.0, (self._rests_s[first] - longer * time_s) / self._rests_s[0])


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """A distribution fitted to samples, and how well a log-normal one fits."""

    times: ExecutionTimes
    goodness: float  # Anderson and Darling's statistic of log(C); smaller is better
    is_lognormal: bool  # `goodness` is at most `GOODNESS_MAX`; else the times are empirical


def fit_execution_times(samples_s: Sequence[float]) -> FittedTimes:
    """Return a log-normal distribution if it passes the test, else the empirical one.

    With few samples the test rarely rejects, and the log-normal one is the better guess of a tail
    that was not seen; with many samples what the test rejects is seen well enough to be used as it
    is. Raises `ConfigError` without a sample, or if a time is not positive. O(n log n).

    >>> samples = [LogNormalTimes(0.1, 0.25).quantile((i + 0.5) / 200) for i in range(200)]
    >>> fitted = fit_execution_times(samples)
    >>> fitted.is_lognormal, round(fitted.times.mean_s, 3), round(fitted.times.cv, 2)
    (True, 0.1, 0.25)
    >>> fit_execution_times([0.1] * 90 + [0.5] * 10).is_lognormal
    False
    """
    empirical = EmpiricalTimes(samples_s)
    logs = sorted(log(each) for each in samples_s)
    count = len(logs)
    mean = fsum(logs) / count
    variance = fsum((each - mean) ** 2 for each in logs) / max(1, count - 1)
    if variance < 1e-12:
        return FittedTimes(LogNormalTimes(empirical.mean_s, 0.0), 0.0, is_lognormal=True)
    goodness = _anderson_darling([(each - mean) / sqrt(variance) for each in logs])
    if goodness > GOODNESS_MAX:
        return FittedTimes(empirical, goodness, is_lognormal=False)
    fitted = LogNormalTimes(exp(mean + variance / 2.0), sqrt(exp(variance) - 1.0))
    return FittedTimes(fitted, goodness, is_lognormal=True)


def _anderson_darling(normalised: Sequence[float]) -> float:
    """Return the statistic for sorted values of estimated mean and variance (Stephens 1974)."""
    count = len(normalised)
    total = 0.0
    for i, each in enumerate(normalised):
        below = max(_normal_beyond(-each), 1e-300)
        above = max(_normal_beyond(normalised[count - 1 - i]), 1e-300)
        total += (2 * i + 1) * (log(below) + log(above))
    statistic = -count - total / count
    return statistic * (1.0 + 0.75 / count + 2.25 / count**2)


def _normal_beyond(z: float) -> float:
    return 0.5 * erfc(z / sqrt(2.0))


def require_positive(key: str, value: float) -> None:
    """Raise `ConfigError` unless a value is positive and finite."""
    if not (isfinite(value) and value > 0.0):
        raise ConfigError("must be more than zero", key=key, value=value)


_NORMAL: Final = NormalDist()
_Z_MAX: Final = 5.0  # standard deviations; what is beyond does not count
# Nodes and weights of Gauss and Legendre's rule on (0, 1).
_LEGENDRE: Final = (
    (0.006858095651593787, 0.01755973016587587),
    (0.03578255816821324, 0.04007904357987999),
    (0.08639934246511749, 0.06075928534395166),
    (0.1563535475941573, 0.07860158357909681),
    (0.242375681820923, 0.09276919873896894),
    (0.3404438155360551, 0.1025992318606479),
    (0.4459725256463282, 0.107631926731579),
    (0.5540274743536718, 0.107631926731579),
    (0.6595561844639448, 0.1025992318606479),
    (0.757624318179077, 0.09276919873896894),
    (0.8436464524058427, 0.07860158357909681),
    (0.9136006575348825, 0.06075928534395166),
    (0.9642174418317868, 0.04007904357987999),
    (0.9931419043484062, 0.01755973016587587),
)
