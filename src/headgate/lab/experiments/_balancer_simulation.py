"""Simulations of load balancers before backends that execute one request at a time.

A reference for `headgate.planning.autoscaling.waiting_time`, and nothing more: Poisson arrivals,
log-normal execution times, a fixed number of backends.

A request that waited w misses a limit with probability P(C > limit - w), because its own execution
does not depend on its wait. The mean of that over the requests is a better estimate than counting
misses: what the execution times alone contribute is exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain
from math import log, log1p, sqrt
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.planning.autoscaling.execution_times import LogNormalTimes

BATCH: Final = 5_000  # requests
BATCHES_MIN: Final = 5
GROUPS_MAX: Final = 20  # of batches, whose means give the standard error
# Standard errors between a measured share and a limit that make it certain; more while the error
# itself is known from few batches.
SIGMAS: Final = 3.0
SIGMAS_EARLY: Final = 6.0

Waits = Iterator[list[float]]  # of one batch of requests after the other, without end


@final
class Draws:
    """Random numbers of one simulation, drawn in chunks."""

    def __init__(self, rate_per_s: float, times: LogNormalTimes, seed: Sequence[int]) -> None:
        rng = np.random.default_rng(list(seed))
        sigma = sqrt(np.log(1.0 + times.cv * times.cv))
        mu = float(np.log(times.mean_s)) - sigma * sigma / 2.0
        self.gaps = _endless(lambda: rng.exponential(1.0 / rate_per_s, _CHUNK))
        self.executions = _endless(lambda: rng.lognormal(mu, sigma, _CHUNK))
        self.uniform = _endless(lambda: rng.random(_CHUNK))


Balancer = Callable[[Draws, int], Waits]


def random_retry(delay: float) -> Balancer:
    """A random backend; if it is busy, another after the delay."""
    return lambda draws, backends: _RandomRetry(draws, backends, delay).waits()


@final
class _RandomRetry:
    """Backends that refuse while they are busy, and the requests that probe them.

    Near saturation nearly all probes fail, hundreds for each request, and they are skipped: while
    nothing else happens, each probe finds an idle backend with the same probability, so the number
    of failed ones is geometric. The next request to probe follows from the phase of its probes
    within the delay, which does not change while it waits.
    """

    def __init__(self, draws: Draws, backends: int, delay: float) -> None:
        self._executions, self._uniform, self._gaps = draws.executions, draws.uniform, draws.gaps
        self._backends = backends
        self._delay = delay
        self._idle_since = [-delay] * backends
        self._idle = list(range(backends))  # in random order
        self._busy: list[tuple[float, int]] = []  # a heap
        self._phases: list[float] = []  # of the requests that wait, sorted
        self._arrivals: list[float] = []  # of these requests, in the same order
        self._turn = self._phase = 0.0  # now is their sum
        self._arrival = next(self._gaps)  # the next one

    def waits(self) -> Waits:
        """Yield the waits of one batch of requests after the other."""
        while True:
            waits: list[float] = []
            while len(waits) < BATCH:
                event = min(self._arrival, self._busy[0][0]) if self._busy else self._arrival
                if self._phases and self._idle and self._probe(event, waits):
                    continue
                self._phase = event % self._delay
                self._turn = event - self._phase
                if event < self._arrival:
                    self._end(event)
                else:
                    self._arrive(event, waits)
            yield waits

    def _probe(self, event: float, waits: list[float]) -> bool:
        """Have the next probe that finds an idle backend; False if the event is before it."""
        idle, phases = self._idle, self._phases
        failed, others = 0, max(self._backends - 1, 1)
        if len(idle) < others:
            failed = int(log(1.0 - next(self._uniform)) / log1p(-len(idle) / others))
        turns, place = divmod(bisect_right(phases, self._phase) + failed, len(phases))
        now = self._turn + turns * self._delay + phases[place]
        if now >= event:
            return False
        self._turn, self._phase = self._turn + turns * self._delay, phases[place]
        if not self._has_just_refused(idle[-1], now):
            del phases[place]
            waits.append(now - self._arrivals.pop(place))
            heappush(self._busy, (now + next(self._executions), idle.pop()))
        return True

    def _has_just_refused(self, backend: int, now: float) -> bool:
        """Whether the backend refused the probe before this one, and so is not asked now.

        It is among the idle ones only if it has become idle since then.
        """
        return (
            self._idle_since[backend] > now - self._delay
            and self._backends > 1
            and next(self._uniform) * (self._backends - len(self._idle) + 1) < 1.0
        )

    def _end(self, now: float) -> None:
        """An execution ends: its backend is idle."""
        _, backend = heappop(self._busy)
        self._idle_since[backend] = now
        self._idle.insert(int(next(self._uniform) * (len(self._idle) + 1)), backend)

    def _arrive(self, now: float, waits: list[float]) -> None:
        """A request arrives: a random backend takes it, or it waits."""
        self._arrival += next(self._gaps)
        if next(self._uniform) * self._backends < len(self._idle):
            waits.append(0.0)
            heappush(self._busy, (now + next(self._executions), self._idle.pop()))
        else:
            place = bisect_right(self._phases, self._phase)
            self._phases.insert(place, self._phase)
            self._arrivals.insert(place, now)


def global_queue(draws: Draws, backends: int) -> Waits:
    """One queue, first come first served."""
    return partitioned(1)(draws, backends)


def partitioned(frontends: int) -> Balancer:
    """A queue for each frontend; backends are dealt out in turn, requests at random."""

    def simulate(draws: Draws, backends: int) -> Waits:
        gaps, executions, uniform = draws.gaps, draws.executions, draws.uniform
        parts = min(frontends, backends)
        queues = [[0.0] * ((backends + parts - 1 - part) // parts) for part in range(parts)]
        now = 0.0
        while True:
            waits: list[float] = []
            for _ in range(BATCH):
                now += next(gaps)
                queue = queues[int(next(uniform) * parts)] if parts > 1 else queues[0]
                start = max(now, queue[0])
                heapreplace(queue, start + next(executions))
                waits.append(start - now)
            yield waits

    return simulate


def join_idle_queue(draws: Draws, backends: int) -> Waits:
    """An idle backend if there is one, else a random queue."""
    gaps, executions, uniform = draws.gaps, draws.executions, draws.uniform
    busy_until = [0.0] * backends
    idle = list(range(backends))
    busy: list[tuple[float, int]] = []  # a heap; an entry may be out of date, and too early
    now = 0.0
    while True:
        waits: list[float] = []
        for _ in range(BATCH):
            now += next(gaps)
            while busy and busy[0][0] <= now:
                _, backend = heappop(busy)
                if busy_until[backend] <= now:
                    idle.append(backend)
                else:
                    heappush(busy, (busy_until[backend], backend))
            if idle:
                # Which one does not matter: they are alike.
                backend = idle.pop()
                busy_until[backend] = now + next(executions)
                heappush(busy, (busy_until[backend], backend))
                waits.append(0.0)
            else:
                backend = int(next(uniform) * backends)
                waits.append(busy_until[backend] - now)
                busy_until[backend] += next(executions)
        yield waits


def power_of_d(choices: int) -> Balancer:
    """The shortest queue of some random backends."""

    def simulate(draws: Draws, backends: int) -> Waits:
        gaps, executions, uniform = draws.gaps, draws.executions, draws.uniform
        departures: list[deque[float]] = [deque() for _ in range(backends)]
        tried = min(choices, backends)
        now = 0.0
        while True:
            waits: list[float] = []
            for _ in range(BATCH):
                now += next(gaps)
                chosen: list[int] = []
                while len(chosen) < tried:
                    backend = int(next(uniform) * backends)
                    if backend not in chosen:
                        chosen.append(backend)
                for backend in chosen:
                    queue = departures[backend]
                    while queue and queue[0] <= now:
                        queue.popleft()
                shortest = min((departures[backend] for backend in chosen), key=len)
                start = shortest[-1] if shortest else now
                shortest.append(start + next(executions))
                waits.append(start - now)
            yield waits

    return simulate


@final
class MissEstimate:
    """Shares of requests that miss each of several limits, as exact as they are asked to be."""

    def __init__(
        self,
        balancer: Balancer,
        rate_per_s: float,
        times: LogNormalTimes,
        backends: int,
        limits: Sequence[float],
        seed: Sequence[int],
        *,
        batches_max: int,
    ) -> None:
        """Simulate a warm-up and a few batches; `batches_max` is 5 times a power of 2."""
        self._waits = balancer(Draws(rate_per_s, times, (*seed, backends)), backends)
        self._beyond = [_Beyond(times, limit) for limit in limits]
        self._batches: list[list[float]] = []  # by batch, the share that misses each limit
        self._batches_max = batches_max
        for _ in range(_WARM_UP):
            next(self._waits)
        self.extend(BATCHES_MIN)

    @property
    def requests(self) -> int:
        """The number of requests so far."""
        return BATCH * len(self._batches)

    def extend(self, batches: int) -> None:
        """Simulate until there are as many batches."""
        while len(self._batches) < batches:
            waits = np.array(next(self._waits))
            self._batches.append([beyond.mean(waits) for beyond in self._beyond])

    def misses(self, limit: int) -> tuple[float, float]:
        """Return the share that misses a limit, by its place, and its standard error."""
        values = [batch[limit] for batch in self._batches]
        # Neighbouring batches are not independent where the load is close to the capacity.
        groups = min(len(values), GROUPS_MAX)
        means = np.array(values).reshape(groups, -1).mean(axis=1)
        return float(means.mean()), float(means.std(ddof=1)) / sqrt(groups)

    def is_met(self, limit: int, allowed: float) -> bool:
        """Return whether no more than `allowed` miss a limit.

        Simulates on until that is certain, up to a maximum.
        """
        while True:
            share, error = self.misses(limit)
            sigmas = SIGMAS if len(self._batches) >= GROUPS_MAX else SIGMAS_EARLY
            is_certain = abs(share - allowed) > sigmas * error
            if is_certain or len(self._batches) >= self._batches_max:
                return share <= allowed
            self.extend(2 * len(self._batches))


def wait_quantile(
    balancer: Balancer,
    rate_per_s: float,
    times: LogNormalTimes,
    backends: int,
    quantile: float,
    batches: int,
    seed: Sequence[int],
) -> float:
    """Return a quantile of the waits."""
    waits = balancer(Draws(rate_per_s, times, (*seed, backends)), backends)
    for _ in range(_WARM_UP):
        next(waits)
    return float(np.quantile(np.concatenate([next(waits) for _ in range(batches)]), quantile))


@final
class _Beyond:
    """P(C > limit - wait) by interpolation of a table."""

    def __init__(self, times: LogNormalTimes, limit: float) -> None:
        self._waits = np.linspace(0.0, limit, _TABLE)
        self._shares = [1.0 - times.share_within(limit - wait) for wait in self._waits.tolist()]

    def mean(self, waits: NDArray[np.float64]) -> float:
        return float(np.interp(waits, self._waits, self._shares).mean())


def _endless(chunk: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    def chunks() -> Iterator[list[float]]:
        while True:
            yield chunk().tolist()

    return chain.from_iterable(chunks())


_WARM_UP: Final = 2  # batches
_CHUNK: Final = 10_000
_TABLE: Final = 4_001
