"""How long requests took in a live run, so that its simulation knows what it could not know before.

A profile is measured without a gateway, and with nobody else on the machine. What a worker and the
way to it add, and what functions that share a core do to each other, stands in the log.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headgate.app import from_spec
from headgate.core.clock import MILLISECOND_NS
from headgate.core.log import read_log
from headgate.core.model import Profile
from headgate.metrics.columns import Int64
from headgate.metrics.logged import read_columns

_CALLS_MIN: Final = 10  # fewer say nothing


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, that has the machine to itself, or that calls a function."""

    machine_ms: float
    call_ms: float


def read_times(log: Path, before: Times) -> Times:
    """Return what a log says; what it does not say stays as it was `before`."""
    header, entries = read_log(log)
    with closing(entries):
        app = from_spec(header.app, str(log)).app
        batches = read_columns(entries, app).batches
    machine = next(v for v in app.variants if app.pools[v.pool_ids[0]].serverless is None)
    is_call = batches.variant != machine.id
    is_usual = (batches.finished == 1) & (batches.cold == 0)
    calls_ns = (batches.ended_ns - batches.sent_ns)[is_call & is_usual]
    rows = ~is_call
    machine_ns = alone_ns(machine.profile, batches.sent_ns[rows], batches.ended_ns[rows])
    return Times(
        machine_ns / MILLISECOND_NS if rows.any() else before.machine_ms,
        float(calls_ns.mean()) / MILLISECOND_NS if len(calls_ns) >= _CALLS_MIN else before.call_ms,
    )


def alone_ns(profile: Profile, began_ns: Int64, ended_ns: Int64) -> float:
    """Return how long a request would take alone, from when requests ran that shared a machine.

    While n run, each is slowed down by the profile's factor for n, so that n / factor of a lone
    request is done in the time of one; all of them together are as many as there were.

    >>> profile = Profile((10,), slowdown=(1.0, 2.0))
    >>> alone_ns(profile, np.array([0, 0]), np.array([24, 24]))
    12.0
    """
    instants_ns = np.concatenate((began_ns, ended_ns))
    changes = np.repeat((1, -1), (len(began_ns), len(ended_ns)))
    order = np.argsort(instants_ns, kind="stable")
    running = np.cumsum(changes[order])[:-1]
    lengths_ns = np.diff(instants_ns[order])
    most = int(running.max(initial=0))
    alone = profile.exec_ns[0]
    factors = np.array([1.0, *(profile.time_ns(1, n) / alone for n in range(1, most + 1))])
    done_ns = (lengths_ns * running / factors[running]).sum()
    return float(done_ns) / max(1, len(began_ns))
