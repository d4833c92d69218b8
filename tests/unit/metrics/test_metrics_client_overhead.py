"""Client-side overhead on top of the latency that the Scheduler sees."""

from __future__ import annotations

import numpy as np
from metrics_runs import Row, make_run

from headgate.core.clock import MILLISECOND_NS
from headgate.core.states import Outcome
from headgate.metrics.columns import with_client_overhead


def test_client_overhead_makes_requests_late() -> None:
    rows = [Row(0, 10, 99), Row(0, 10, 90), Row(0, None, 0, Outcome.REJECTED)]
    requests = make_run(rows).requests
    shifted = with_client_overhead(requests, 2 * MILLISECOND_NS)
    assert shifted.outcome.tolist() == [Outcome.LATE, Outcome.MET, Outcome.REJECTED]
    assert (shifted.finished_ns // MILLISECOND_NS).tolist() == [101, 92, 2]
    assert requests.outcome.tolist() == [Outcome.MET, Outcome.MET, Outcome.REJECTED]


def test_client_overheads_differ_between_requests() -> None:
    requests = make_run([Row(0, 10, 90), Row(0, 10, 90)]).requests
    shifted = with_client_overhead(requests, np.array([1, 30]) * MILLISECOND_NS)
    assert (shifted.finished_ns // MILLISECOND_NS).tolist() == [91, 120]
    assert shifted.outcome.tolist() == [Outcome.MET, Outcome.LATE]
