"""A reference FIFO queue, computed without events: an independent check of the event loop.

First come, first served, on identical servers: the recursions of Lindley (one server) and of Kiefer
and Wolfowitz (several). No event queue, no Scheduler, no policy: no code is shared with the
simulator that it checks.
"""

from __future__ import annotations

import numpy as np

from headgate.metrics.columns import Int64


def fifo_starts_ns(arrival_ns: Int64, service_ns: Int64, servers: int) -> Int64:
    """Return the start time of each request; arrivals and service times in order of arrival.

    The last axis is the requests; axes before it are independent runs. With one server the
    computation is three passes over the columns; with several it is a loop over the requests.

    >>> arrivals, services = np.array([0, 1, 2, 3]), np.array([5, 5, 1, 1])
    >>> fifo_starts_ns(arrivals, services, servers=1).tolist()
    [0, 5, 10, 11]
    >>> fifo_starts_ns(arrivals, services, servers=2).tolist()
    [0, 1, 5, 6]
    """
    assert arrival_ns.shape == service_ns.shape, (arrival_ns.shape, service_ns.shape)
    assert servers >= 1, servers
    if servers == 1:
        return _one_server(arrival_ns, service_ns)
    return _many_servers(arrival_ns, service_ns, servers)


def _one_server(arrival_ns: Int64, service_ns: Int64) -> Int64:
    # A request begins when all work before it since the server was last idle is done. So on a
    # clock that counts only work, each begins at the latest arrival up to its own.
    work_ns = np.cumsum(service_ns, axis=-1) - service_ns
    starts_ns: Int64 = np.maximum.accumulate(arrival_ns - work_ns, axis=-1) + work_ns
    return starts_ns


def _many_servers(arrival_ns: Int64, service_ns: Int64, servers: int) -> Int64:
    starts_ns = np.empty_like(arrival_ns)
    free_ns = np.zeros((*arrival_ns.shape[:-1], servers), dtype=np.int64)  # when each is next free
    for index in range(arrival_ns.shape[-1]):
        first = free_ns.argmin(axis=-1, keepdims=True)
        begins_ns = np.maximum(
            arrival_ns[..., index, None], np.take_along_axis(free_ns, first, axis=-1)
        )
        starts_ns[..., index] = begins_ns[..., 0]
        np.put_along_axis(free_ns, first, begins_ns + service_ns[..., index, None], axis=-1)
    return starts_ns
