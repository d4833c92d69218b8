"""What lies outside of the Scheduler's sight: a client sends earlier and hears later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headgate.core.clock import NEVER_NS
from headgate.core.outcome import Outcome
from headgate.metrics.columns import RequestColumns


def as_clients_see(requests: RequestColumns, overhead_ns: int) -> RequestColumns:
    """Return the columns with every end later by that much: what was just in time is late then.

    Deadlines stay, because a client's objective counts from when it sent its request.
    """
    finished_ns = np.where(
        requests.finished_ns == NEVER_NS, NEVER_NS, requests.finished_ns + overhead_ns
    )
    is_late = (requests.outcome == Outcome.MET) & (finished_ns > requests.deadline_ns)
    outcome = np.where(is_late, Outcome.LATE, requests.outcome).astype(np.int8)
    return replace(requests, finished_ns=finished_ns, outcome=outcome)
