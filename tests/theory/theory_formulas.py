"""Queueing formulas that simulations are held against.

Names follow Kendall: arrivals / service times / servers, M for memoryless, D for deterministic,
G for general, PS for processor sharing. `service_s` is the mean service time; the load is
`rate_per_s * service_s`, the mean number of servers that work. A queue whose load reaches its
servers grows without end, so its mean wait is infinite.
"""

from __future__ import annotations

import math

from headgate.planning.autoscaling.waiting_time import erlang_c


def mmc_wait_s(servers: int, rate_per_s: float, service_s: float) -> float:
    """Return the mean wait, before service begins, of M/M/servers."""
    load = rate_per_s * service_s
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (servers - load)


def mmc_wait_quantile_s(
    servers: int, rate_per_s: float, service_s: float, quantile: float
) -> float:
    """Return the wait that a share `quantile` of the requests of M/M/servers do not exceed."""
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
    """
    load = rate_per_s * service_s
    if load >= 1.0:
        return math.inf
    return load * service_s * (1.0 + cv * cv) / (2.0 * (1.0 - load))


def mg1_ps_sojourn_s(rate_per_s: float, service_s: float, own_s: float | None = None) -> float:
    """Return the mean time in M/G/1-PS of a request that would take `own_s` if it were alone.

    It depends on the service times of the others through their mean only. Without `own_s`, the
    mean over all requests.
    """
    load = rate_per_s * service_s
    if load >= 1.0:
        return math.inf
    return (service_s if own_s is None else own_s) / (1.0 - load)
