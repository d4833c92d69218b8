"""Waiting time before execution, under each way to choose a backend.

A backend executes one request at a time, and requests arrive as a Poisson process. In what follows
times are in units of the mean execution time, and a = rate x mean is the offered load in Erlangs.
The wait is finite only for n > a.

*Global queue*: M/G/n, first come first served. A request waits with the probability of M/M/n,
Erlang's C, and then as one of M/G/1 whose server is n times as fast; exact for exponential times.

*Partitioned*: every frontend has backends of its own: as many smaller global queues.

*Random with busy-retry*: a request asks a random backend; a busy one refuses, and after the probe
delay d the request asks another one. The probes of a request are not independent trials, because a
system that was full a moment ago still is. Its wait is the survival of a request in a system whose
state changes meanwhile. The state is j, the number of requests in the system; k of them execute,
j - k wait between two probes and n - k backends are idle. Probes are fast beside executions, so k
follows j: refused arrivals make pairs of a waiting request and an idle backend at the rate k^2 / n,
and probes join them, at the rate (j - k) (n - k) / ((n - 1) d). The mean number of pairs in such an
equilibrium is a ratio of Bessel functions, by Amos' bound 2 p / (x + 1/2 + sqrt((x + 3/2)^2 + 4 p))
with p = k^2 d (n - 1) / n and x = |n - j|. Then j is a birth-death process, during which a waiting
request starts at the rate log((n - 1) / (k - 1)) / d. Below saturation it is the process of
infinitely many servers, which knows execution times by their mean only; in saturation departures
are less random than those of exponential times, and j diffuses (1 + cv^2) / 2 as fast;
in between the weight is dk/dj. The tail of W is that of a Markov chain with killing, a mixture of
exponentials, of which a Gauss quadrature with few terms stands for all: Lanczos' method on the
inverse of the generator, which finds the slow terms first. There is no fitted constant.

*Join-idle-queue*: an idle backend if there is one, else the queue of a random one. *Power of d*:
the shortest queue of d random backends. The wait is the residual execution of one request and the
executions of those that queue before.

`headgate reproduce swayam-estimator` compares all of them with simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import Final, Protocol, final

from headgate.core.errors import ConfigError
from headgate.planning.autoscaling.execution_times import ExecutionTimes, require_positive


class WaitTail(Protocol):
    """The distribution of a wait."""

    def beyond(self, time_s: float) -> float:
        """Return P(W > time), for a time of at least 0."""


class LoadBalancer(Protocol):
    """What decides which backend executes a request."""

    def wait(
        self, times: ExecutionTimes, rate_per_s: float, backends: int, horizon_s: float
    ) -> WaitTail:
        """Return the wait before the execution, at its best for times about `horizon_s`.

        The offered load is below `backends`.
        """


@final
@dataclass(frozen=True, slots=True)
class GlobalQueue:
    """One queue for all backends, first come first served: no load balancer waits less."""

    def wait(
        self, times: ExecutionTimes, rate_per_s: float, backends: int, horizon_s: float
    ) -> WaitTail:
        """Return the wait of M/G/n."""
        return SharedQueueTail(times, rate_per_s * times.mean_s, backends)


@final
@dataclass(frozen=True, slots=True)
class Partitioned:
    """Frontends with backends and a queue of their own, and with equal shares of the requests.

    Backends are dealt out in turn. Where there are fewer of them than frontends, only as many
    frontends take requests.
    """

    frontends: int

    def __post_init__(self) -> None:
        if self.frontends < 1:
            raise ConfigError("must be at least 1", key="frontends", value=self.frontends)

    def wait(
        self, times: ExecutionTimes, rate_per_s: float, backends: int, horizon_s: float
    ) -> WaitTail:
        """Return the wait at a random frontend."""
        parts = min(self.frontends, backends)
        least, larger = divmod(backends, parts)
        load = rate_per_s * times.mean_s / parts
        tails = [(1.0 - larger / parts, SharedQueueTail(times, load, least))]
        if larger:
            tails.append((larger / parts, SharedQueueTail(times, load, least + 1)))
        return MixedTail(tuple(tails))


@final
@dataclass(frozen=True, slots=True)
class RandomRetry:
    """A random backend; if it is busy it refuses, and another is asked after the probe delay."""

    probe_delay_s: float

    def __post_init__(self) -> None:
        require_positive("probe_delay_s", self.probe_delay_s)

    def wait(
        self, times: ExecutionTimes, rate_per_s: float, backends: int, horizon_s: float
    ) -> WaitTail:
        """Return the time until a probe finds an idle backend.

        With a single backend there is no other to ask, and its queue is that of M/G/1.
        """
        if backends == 1:
            return GlobalQueue().wait(times, rate_per_s, backends, horizon_s)
        chain = _RetryChain(
            rate_per_s * times.mean_s,
            (1.0 + times.cv * times.cv) / 2.0,
            self.probe_delay_s / times.mean_s,
            backends,
        )
        terms = []
        for weight, decay in chain.survival(horizon_s / times.mean_s):
            decay /= times.mean_s
            # Probes end at multiples of the delay: the tail of the wait is a stair. An exponential
            # with the same mean begins to fall about half a step later.
            fall = max(decay * self.probe_delay_s, 1e-9)
            later = 0.5 if fall < 1e-3 else 1.0 / (1.0 - exp(-fall)) - 1.0 / fall
            terms.append((weight, decay, later * self.probe_delay_s))
        return ExponentialTail(tuple(terms))


@final
@dataclass(frozen=True, slots=True)
class JoinIdleQueue:
    """An idle backend if there is one, else the queue of a random backend."""

    def wait(
        self, times: ExecutionTimes, rate_per_s: float, backends: int, horizon_s: float
    ) -> WaitTail:
        """Return the wait behind a random queue, if all backends are busy.

        A backend with a queue stays busy, so the others are a smaller loss system, and whom it
        refuses makes the queues. The number that queues is a birth-death process. A request that
        finds all busy also finds those at its backend that came in the same spell.
        """
        load = rate_per_s * times.mean_s
        # Behind more, nobody is in time.
        longest = min(int(horizon_s / times.mean_s) + 2, _QUEUE_MAX)
        ahead = _join_idle_queues(backends, load, longest)
        spell = ahead[0] * load / backends * _busy_spell(backends, load)
        if ahead[1] < spell:
            ratio = spell / ahead[0]
            ahead = [max(each, ahead[0] * ratio**i) for i, each in enumerate(ahead)]
        return QueueTail(times, tuple([each for each in ahead if each > _NEGLIGIBLE]))


@final
@dataclass(frozen=True, slots=True)
class PowerOfD:
    """The shortest queue of `choices` random backends."""

    choices: int = 2

    def __post_init__(self) -> None:
        if self.choices < 2:
            raise ConfigError("must be at least 2", key="choices", value=self.choices)

    def wait(
        self, times: ExecutionTimes, rate_per_s: float, backends: int, horizon_s: float
    ) -> WaitTail:
        """Return the wait behind the shortest queue, by the mean field of many backends.

        A share s(i) of the backends has at least i requests. s(1) is the load; s(2) follows from a
        queue whose arrivals depend on its length, exactly; and beyond, s(i + 1) is proportional to
        s(i)^d, as for exponential times (Mitzenmacher 2001).
        """
        load = rate_per_s * times.mean_s / backends
        first = load
        second = _second_share(load, times.cv, self.choices)
        ratio = second / first**self.choices
        ahead = [first**self.choices]
        share = second
        while share**self.choices > _NEGLIGIBLE and len(ahead) < _QUEUE_MAX:
            ahead.append(share**self.choices)
            share = ratio * share**self.choices
        return QueueTail(times, tuple(ahead))


@final
@dataclass(frozen=True, slots=True)
class QueueTail:
    """The wait behind one execution in progress and i queued ones, by the chance of each i."""

    times: ExecutionTimes
    ahead: tuple[float, ...]  # P(busy and at least i queue before)

    def beyond(self, time_s: float) -> float:
        """Return P(W > time)."""
        total = 0.0
        mean_s = self.times.mean_s
        deviation_s = mean_s * self.times.cv
        ahead = (*self.ahead, 0.0)
        for queued, chance in enumerate(self.ahead):
            left_s = time_s - queued * mean_s
            spread_s = deviation_s * sqrt(queued)
            if left_s + spread_s <= 0.0:
                total += chance  # whoever waits behind as many or more waits longer
                break
            # The sum of the queued executions, by two points at its standard deviation.
            late = self._residual_beyond(left_s - spread_s)
            if queued:
                late = 0.5 * (late + self._residual_beyond(left_s + spread_s))
            total += (chance - ahead[queued + 1]) * late
        return total

    def _residual_beyond(self, time_s: float) -> float:
        return 1.0 if time_s <= 0.0 else self.times.residual_beyond(time_s)


@final
class SharedQueueTail:
    """The wait of M/G/n, first come first served.

    A request waits with the probability of M/M/n, and then as long as one of M/G/1 whose server is
    n times as fast: for a residual execution, and behind others for as much again (Pollaczek and
    Khinchine). The second part is taken from the tail for large t, of Cramer and Lundberg.
    """

    __slots__ = ("_decay", "_load", "_points", "_scale", "_since", "_times", "_waits")

    def __init__(self, times: ExecutionTimes, load: float, backends: int) -> None:
        self._times = times
        self._load = load / backends
        self._waits = erlang_c(backends, load)
        self._scale = backends / times.mean_s
        if self._load < _STABLE_MAX:
            self._decay, factor = _cramer_lundberg(self._load, times.cv)
            self._since = max(0.0, log(factor) / self._decay)
            self._points = [(each / times.mean_s, weight) for each, weight in times.points(inf)]

    def beyond(self, time_s: float) -> float:
        """Return P(W > time)."""
        if self._load >= _STABLE_MAX:
            return 1.0
        time = time_s * self._scale
        behind = 0.0
        whole = self._area(time)
        for execution, weight in self._points:
            behind += weight * (whole - self._area(time - execution) if execution < time else whole)
        residual = self._times.residual_beyond(time * self._times.mean_s) if time > 0.0 else 1.0
        return self._waits * min(1.0, residual + self._load * behind)

    def _area(self, time: float) -> float:
        """Return the integral of the tail for large t from 0 to a time."""
        if time <= self._since:
            return time
        return self._since + (1.0 - exp(-self._decay * (time - self._since))) / self._decay


@final
@dataclass(frozen=True, slots=True)
class MixedTail:
    """The wait at one of several places, each with its share of the requests."""

    parts: tuple[tuple[float, WaitTail], ...]

    def beyond(self, time_s: float) -> float:
        """Return P(W > time)."""
        return sum([share * tail.beyond(time_s) for share, tail in self.parts])


@final
@dataclass(frozen=True, slots=True)
class ExponentialTail:
    """P(W > t) as a sum of exponentials: weights, decays per second, and where each begins."""

    terms: tuple[tuple[float, float, float], ...]

    def beyond(self, time_s: float) -> float:
        """Return P(W > time)."""
        total = 0.0
        for weight, decay, since_s in self.terms:
            total += weight * exp(-decay * (time_s - since_s)) if time_s > since_s else weight
        return total


@final
class _RetryChain:
    """The Markov chain of random dispatch with busy-retry, in units of the mean execution time.

    Its states are numbers of requests in the system, on a grid as fine as their own spread asks
    for. Between neighbours on the grid the chain moves such that its stationary distribution and
    its diffusion are those of the birth-death process; with steps of 1 it is that process.
    """

    __slots__ = ("_links", "_masses", "_refusals", "_starts")

    def __init__(self, load: float, spread: float, delay: float, backends: int) -> None:
        """Build the chain. `spread` is (1 + cv^2) / 2."""
        self._refusals: list[float] = []  # probability that a probe is refused, by state
        self._starts: list[float] = []  # rate at which a waiting request starts
        deviation = sqrt(load)
        step = max(1.0, _STEP * deviation)
        state = max(0.0, float(int(load - 3.0 * deviation)))
        others = backends - 1.0  # who refused is not asked at once again
        full = float(backends)
        retried = delay * others / backends
        slow = 1e-3 * load  # rates are kept positive where drift exceeds diffusion
        levels: list[float] = []  # logarithms of the stationary density
        links: list[float] = []  # logarithms of the flow between neighbours
        steps: list[float] = [step]
        level = top = last_up = last_down = 0.0
        while True:
            executing = min(state, full)
            excess = abs(full - state)
            for _ in range(2):
                pairs = executing * executing * retried
                fewer = 2.0 * pairs / (excess + 0.5 + sqrt((excess + 1.5) ** 2 + 4.0 * pairs))
                executing = max(min(state, full) - fewer, 0.0)
            drift = load - executing
            idle = full - executing
            free = idle / (idle + state - executing + 2.0 * delay * executing)  # dk/dj
            diffusion = (load + executing) * (spread + (1.0 - spread) * free)
            up = log(max(0.5 * (diffusion + drift), slow))
            down = log(max(0.5 * (diffusion - drift), slow))
            if levels:
                # The sum of log(up(i) / down(i + 1)) over the step, both taken as linear in i.
                rise = 0.5 * ((step + 1.0) * last_up + (step - 1.0) * up)
                rise -= 0.5 * ((step - 1.0) * last_down + (step + 1.0) * down)
                links.append(level + 0.5 * (rise + last_up + down) - log(step))
                level += rise
                steps.append(step)
            last_up, last_down = up, down
            levels.append(level)
            self._refusals.append(executing / backends)
            busy = max((executing - 1.0) / others, 1e-3)
            self._starts.append(-log(busy) / delay)
            if level > top:
                top = level
            elif level < top - _LEVELS and state > load:
                break
            if state > backends and state > load + 2.0 * deviation:
                step *= _STRETCH  # far above saturation the chain is a plain geometric tail
            state += step
        steps.append(step)
        masses = [
            exp(each - top) * 0.5 * (steps[i] + steps[i + 1]) for i, each in enumerate(levels)
        ]
        scale = 1.0 / sum(masses)
        self._masses = [each * scale for each in masses]
        self._links = [exp(each - top) * scale for each in links]

    def survival(self, horizon: float) -> list[tuple[float, float]]:
        """Return weights and decays of P(wait > t): the best for times about `horizon`.

        With v(t) the probabilities to wait on from each state, M v' = -(L + M S) v, where M are the
        masses, L the flows between neighbours and S the rates to start. Lanczos' method on the
        inverse of M^-1 (L + M S) + 1 / horizon, in the inner product of M, begins with the square
        root of the refusals of the first probe.
        """
        shift = 1.0 / horizon
        masses, links = self._masses, self._links
        pivots: list[float] = []
        ratios: list[float] = []
        before = carried = 0.0
        for mass, start, link in zip(masses, self._starts, [*links, 0.0], strict=True):
            pivot = mass * (start + shift) + link + before - carried
            ratio = link / pivot
            pivots.append(1.0 / pivot)
            ratios.append(ratio)
            before, carried = link, link * ratio
        at_once = sum([mass * each for mass, each in zip(masses, self._refusals, strict=True)])
        norm = 1.0 / sqrt(at_once)
        vector = [sqrt(each) * norm for each in self._refusals]
        older: list[float] = []
        diagonal: list[float] = []
        beside: list[float] = []
        beta = 0.0
        while True:
            weighted = [mass * each for mass, each in zip(masses, vector, strict=True)]
            solved = _solve(weighted, pivots, ratios)
            alpha = sum([one * other for one, other in zip(weighted, solved, strict=True)])
            diagonal.append(alpha)
            if len(diagonal) == _TERMS:
                break
            rest = [each - alpha * old for each, old in zip(solved, vector, strict=True)]
            if older:
                rest = [each - beta * old for each, old in zip(rest, older, strict=True)]
            beta = sqrt(sum([mass * each * each for mass, each in zip(masses, rest, strict=True)]))
            if beta < 1e-9 * diagonal[0]:
                break  # fewer terms are exact
            beside.append(beta)
            older, vector = vector, [each / beta for each in rest]
        found = _gauss(diagonal, beside)
        return [(at_once * weight, 1.0 / node - shift) for node, weight in found if node > 0.0]


def _cramer_lundberg(load: float, cv: float) -> tuple[float, float]:
    """Return decay and factor of P(W > t) / P(W > 0) of M/G/1 for large t, of gamma times.

    The decay s solves load (E exp(s C) - 1) = s, by Newton's method from above, where the function
    is convex. Both are 1 - load and 1 for exponential times.

    >>> [round(each, 3) for each in _cramer_lundberg(0.25, 0.0)]  # M/D/1
    [2.337, 1.891]
    """
    square = max(cv * cv, 1e-6)
    decay = min(2.0 * (1.0 - load) / (load * (1.0 + square)), 2.0 - 2.0 * log(load), 0.999 / square)
    for _ in range(_ROUNDS_MAX):
        moment = (1.0 - decay * square) ** (-1.0 / square)
        slope = load * moment / (1.0 - decay * square) - 1.0
        step = (load * (moment - 1.0) - decay) / slope
        decay -= step
        if step < 1e-6 * decay:
            break
    return decay, (1.0 - load) / (load * slope)


def _solve(right: list[float], pivots: list[float], ratios: list[float]) -> list[float]:
    """Solve a symmetric tridiagonal system, factored into inverse pivots and ratios."""
    solved: list[float] = []
    value = ratio = 0.0
    for each, pivot, following in zip(right, pivots, ratios, strict=True):
        value = each + ratio * value
        solved.append(value * pivot)
        ratio = following
    value = 0.0
    for i in range(len(solved) - 1, -1, -1):
        value = solved[i] + ratios[i] * value
        solved[i] = value
    return solved


def _gauss(diagonal: Sequence[float], beside: Sequence[float]) -> list[tuple[float, float]]:
    """Return nodes and weights of the Gauss quadrature of a Jacobi matrix (Golub and Welsch).

    By the implicit QL method; the weights are the squared first parts of the eigenvectors.

    >>> [(round(node, 6), round(weight, 6)) for node, weight in _gauss([0.0, 0.0], [1.0])]
    [(-1.0, 0.5), (1.0, 0.5)]
    """
    size = len(diagonal)
    d, e = list(diagonal), [*beside, 0.0]
    first = [1.0] + [0.0] * (size - 1)
    for low in range(size):
        for _ in range(_SWEEPS_MAX):
            high = low
            while high < size - 1 and abs(e[high]) > 1e-10 * (abs(d[high]) + abs(d[high + 1])):
                high += 1
            if high == low:
                break
            g = (d[low + 1] - d[low]) / (2.0 * e[low])
            r = sqrt(g * g + 1.0)
            g = d[high] - d[low] + e[low] / (g + (r if g >= 0.0 else -r))
            s = c = 1.0
            p = 0.0
            for i in range(high - 1, low - 1, -1):
                f, b = s * e[i], c * e[i]
                r = sqrt(f * f + g * g)
                e[i + 1] = r
                s, c = f / r, g / r
                g = d[i + 1] - p
                r = (d[i] - g) * s + 2.0 * c * b
                p = s * r
                d[i + 1] = g + p
                g = c * r - b
                first[i], first[i + 1] = (
                    c * first[i] - s * first[i + 1],
                    s * first[i] + c * first[i + 1],
                )
            d[low] -= p
            e[low] = g
            e[high] = 0.0
    return [(node, part * part) for node, part in zip(d, first, strict=True)]


def _join_idle_queues(backends: int, load: float, longest: int) -> list[float]:
    """Return P(all busy and at least i requests queue at a random backend), for i to `longest`.

    With q requests in queues, whose lengths are geometric, s = q n / (n + q) backends have one; the
    others are all busy with Erlang's B of n - s servers. At that rate requests join queues, and at
    the rate s they leave them.
    """
    blocked = [1.0]  # Erlang's B by the number of servers
    for servers in range(1, backends + 1):
        blocked.append(load * blocked[-1] / (servers + load * blocked[-1]))
    ahead = [0.0] * (longest + 1)
    total, chance, most = 0.0, 1.0, 1.0
    queued = 0.0
    while chance > _NEGLIGIBLE * most:
        # Long queues change little from one number to the next: several at a time.
        step = 1.0 + queued // 16.0
        total += step * chance
        busy = step * chance * _all_busy(queued, blocked)
        ratio = queued / (backends + queued)
        for i in range(longest + 1):
            ahead[i] += busy
            busy *= ratio
            if busy < _NEGLIGIBLE * most:
                break
        middle = queued + 0.5 * (step + 1.0)
        with_queue = middle * backends / (backends + middle)
        chance *= (load * _all_busy(middle - 1.0, blocked) / with_queue) ** step
        most = max(most, chance)
        queued += step
    return [each / total for each in ahead]


def _all_busy(queued: float, blocked: Sequence[float]) -> float:
    """Return Erlang's B of the backends without a queue, between whole numbers by a line."""
    backends = len(blocked) - 1
    servers = backends * backends / (backends + queued)
    whole = int(servers)
    if whole == backends:
        return blocked[backends]
    return blocked[whole] + (servers - whole) * (blocked[whole + 1] - blocked[whole])


def _busy_spell(servers: int, load: float) -> float:
    """Return for how long all were busy, seen back from an arrival that finds them so.

    Times are discounted by the chance that a request still waits, exp(-t): the resolvent of the
    loss system at 1, by the transforms of the first passages from i to i + 1 busy servers.
    """
    passage = load / (load + 1.0)
    for busy in range(1, servers):
        passage = load / (load + busy + 1.0 - busy * passage)
    return 1.0 / (1.0 + servers - servers * passage)


def _second_share(load: float, cv: float, choices: int) -> float:
    """Return the share of backends with two requests or more under power of d.

    The rate of the services that begin with one request times the mean time until another comes or
    the service ends is the share of backends with exactly one. Services are gamma-distributed.
    """
    square = max(cv * cv, 1e-6)
    first = load
    second = load * first**choices
    for _ in range(_ROUNDS_MAX):
        rate = load * (first**choices - second**choices) / (first - second)
        alone = (1.0 + rate * square) ** (-1.0 / square)  # no arrival during a service
        one = load * (1.0 - first**choices) * (1.0 - alone) / (rate * alone)
        found = min(max(first - one, 1e-9), 0.999 * first)
        is_close = abs(found - second) < 1e-3 * second
        second = 0.5 * (second + found)
        if is_close:
            break
    return second


# Of the chain of retries. Finer grids and more terms change no estimate of the table by more
# than 1 % of its misses.
_STEP: Final = 0.5  # of the grid, in standard deviations of the load
_STRETCH: Final = 1.2
_LEVELS: Final = 15.0  # the chain ends where its density is exp(-15) of its maximum
_TERMS: Final = 4
_SWEEPS_MAX: Final = 50
_ROUNDS_MAX: Final = 30  # of a fixed point
_NEGLIGIBLE: Final = 1e-6
_STABLE_MAX: Final = 1.0 - 1e-9  # load beyond which the rate of decay is lost in rounding
_QUEUE_MAX: Final = 40


def erlang_b(servers: int, load: float) -> float:
    """Return the share of requests that are blocked in a loss system: M/G/servers/servers.

    By the recursion on the number of servers, which neither over- nor underflows: O(servers).

    >>> round(erlang_b(10, 8.0), 4)
    0.1217
    """
    assert servers >= 0, servers
    assert load >= 0.0, load
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked


def erlang_c(servers: int, load: float) -> float:
    """Return the share of requests that must wait: M/M/servers.

    >>> round(erlang_c(8, 6.4), 4)
    0.4576
    >>> erlang_c(1, 0.7)
    0.7
    """
    assert servers >= 1, servers
    if load >= servers:
        return 1.0
    blocked = erlang_b(servers, load)
    return servers * blocked / (servers - load * (1.0 - blocked))
