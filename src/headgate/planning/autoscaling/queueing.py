"""Queueing formulas, used by planning and as reference for the tests of the simulator.

Names follow Kendall: arrivals / service times / servers, M for memoryless, D for deterministic,
G for general, PS for processor sharing. `service_s` is the mean service time; the load is
`rate_per_s * service_s`, the mean number of servers that work. A queue whose load reaches its
servers grows without end, so its mean wait is infinite.
"""

from __future__ import annotations

import math


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


def mmc_wait_s(servers: int, rate_per_s: float, service_s: float) -> float:
    """Return the mean wait, before service begins, of M/M/servers.

    >>> round(mmc_wait_s(1, 0.5, 1.0), 6)  # half loaded: one service time
    1.0
    """
    load = rate_per_s * service_s
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (servers - load)


def mmc_wait_quantile_s(
    servers: int, rate_per_s: float, service_s: float, quantile: float
) -> float:
    """Return the wait that a share `quantile` of the requests of M/M/servers do not exceed.

    >>> mmc_wait_quantile_s(8, 1.0, 1.0, 0.5)  # most need not wait at all
    0.0
    """
    assert 0.0 <= quantile < 1.0, quantile
    load = rate_per_s * service_s
    if load >= servers:
        return math.inf
    waits = erlang_c(servers, load)
    if 1.0 - quantile >= waits:
        return 0.0
    return service_s / (servers - load) * math.log(waits / (1.0 - quantile))


def mg1_wait_s(rate_per_s: float, service_s: float, cv: float) -> float:
    """Return the mean wait of M/G/1, first come first served (Pollaczek and Khinchine).

    `cv` is the standard deviation of the service times over their mean: 1 is M/M/1, 0 is M/D/1.

    >>> mg1_wait_s(0.5, 1.0, cv=1.0), mg1_wait_s(0.5, 1.0, cv=0.0)
    (1.0, 0.5)
    """
    load = rate_per_s * service_s
    if load >= 1.0:
        return math.inf
    return load * service_s * (1.0 + cv * cv) / (2.0 * (1.0 - load))


def md1_wait_s(rate_per_s: float, service_s: float) -> float:
    """Return the mean wait of M/D/1: half that of M/M/1.

    >>> md1_wait_s(0.5, 1.0)
    0.5
    """
    return mg1_wait_s(rate_per_s, service_s, cv=0.0)


def mg1_ps_sojourn_s(rate_per_s: float, service_s: float, own_s: float | None = None) -> float:
    """Return the mean time in M/G/1-PS of a request that would take `own_s` if it were alone.

    It depends on the service times of the others through their mean only. Without `own_s`, the
    mean over all requests.

    >>> mg1_ps_sojourn_s(0.5, 1.0), mg1_ps_sojourn_s(0.5, 1.0, own_s=3.0)
    (2.0, 6.0)
    """
    load = rate_per_s * service_s
    if load >= 1.0:
        return math.inf
    return (service_s if own_s is None else own_s) / (1.0 - load)
