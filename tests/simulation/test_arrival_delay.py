"""Arrivals that take CPU time from batches: in the simulator, and how a log tells.

A request takes 10 ms, and each that arrives meanwhile makes that 1 ms more, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headgate.core.model import ONE_CPU_MILLI, Host, Pool
from headgate.metrics.arrival_delay import delay_per_arrival_ns, without_arrivals
from headgate.metrics.from_log import LogColumnsReader, LoggedColumns
from headgate.policies import find_policy
from headgate.sim.faults import Fault
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import Arrivals, gamma, poisson

from .apps import CLOUD, GPU, MS, RecordingObserver, at_ms, make_app, run, waits_ms
from .policies import SPILL

S = 1_000 * MS
LAPTOP = Host(0, "laptop", 2 * ONE_CPU_MILLI)


@pytest.mark.parametrize(
    ("pool", "slowdown", "times_ms", "expected_ms"),
    [
        (GPU, (1.0,), (0, 4), [11.0, 17.0]),
        (GPU, (1.0,), (0, 4, 5), [12.0, 18.0, 27.0]),
        (GPU, (1.0,), (0, 10), [10.0, 10.0]),  # it has ended when the other arrives
        (replace(GPU, nodes=2), (1.0,), (0, 4, 5), [12.0, 11.0, 17.0]),  # the third waits until 12
        (replace(GPU, host=LAPTOP), (1.0,), (0, 4), [11.0, 17.0]),
        # From 4 on both run at half speed: the first has 6 ms of work left and the delay.
        (replace(GPU, slots=2), (1.0, 2.0), (0, 4), [18.0, 17.0]),
    ],
)
def test_an_arrival_lengthens_the_batches_that_run(
    pool: Pool, slowdown: tuple[float, ...], times_ms: Sequence[int], expected_ms: list[float]
) -> None:
    app = make_app(pools=(pool,), slowdown=slowdown, concurrency=2)
    columns, _ = run(app, at_ms(*times_ms), arrival_ns=MS)
    assert waits_ms(columns) == expected_ms


def test_calls_and_starts_are_not_lengthened() -> None:
    """The first runs on the node and is 2 ms longer, the others are calls."""
    columns, _ = run(make_app(pools=(GPU, CLOUD)), at_ms(0, 4, 5), policy=SPILL, arrival_ns=MS)
    assert waits_ms(columns) == [12.0, 10.0, 10.0]
    columns, _ = run(make_app(start_ms=20), at_ms(0, 4), arrival_ns=MS)
    assert waits_ms(columns) == [30.0, 36.0]


def test_a_batch_that_was_lengthened_is_lost_with_its_node() -> None:
    crash = Fault("crash", 8 * MS, until_ns=100 * MS, node=0)
    columns, _ = run(make_app(), at_ms(0, 4), crash, arrival_ns=MS)
    assert waits_ms(columns)[0] == 8.0


def logged(
    arrivals: Arrivals, arrival_ns: int, *, nodes: int = 2, distribution: str = "exponential"
) -> LoggedColumns:
    """Columns of a simulated log, with service times that scatter widely."""
    app = make_app(pools=(replace(GPU, nodes=nodes),))
    observer = RecordingObserver()
    truth = GroundTruthConfig(distribution, cv=0.3)
    setup = Setup(app, find_policy("balance"), truth=truth, arrival_ns=arrival_ns)
    simulate(setup, arrivals, observer=observer)
    reader = LogColumnsReader(app)
    for now_ns, event, actions in observer.entries:
        reader.read(now_ns, event, actions)
    return reader.columns()


BURSTS = gamma(60.0, 2.0, 120 * S, seed=3)


def test_a_log_tells_how_long_the_delay_is() -> None:
    columns = logged(BURSTS, MS, distribution="lognormal")
    assert delay_per_arrival_ns(columns) == pytest.approx(MS, rel=0.1)


@pytest.mark.parametrize("arrivals", [poisson(60.0, 120 * S, seed=3), BURSTS])
def test_longer_batches_see_more_arrivals_without_a_delay(arrivals: Arrivals) -> None:
    """Where times scatter, a regression of times on arrivals finds milliseconds."""
    columns = logged(arrivals, 0)
    batches = columns.batches
    took_ns = batches.ended_ns - batches.sent_ns
    times_ns = columns.requests.arrival_ns
    seen = np.searchsorted(times_ns, batches.ended_ns) - np.searchsorted(times_ns, batches.sent_ns)
    assert np.polyfit(seen, took_ns, 1)[0] > MS
    assert delay_per_arrival_ns(columns) == 0


def test_nothing_is_found_without_batches_or_requests() -> None:
    empty = LogColumnsReader(make_app()).columns()
    assert delay_per_arrival_ns(empty) == 0
    assert len(without_arrivals(empty, MS).batches) == 0
    alone = logged(at_ms(*range(0, 3_000, 100)), MS)
    assert delay_per_arrival_ns(alone) == 0


def test_times_without_arrivals_are_those_of_the_profile() -> None:
    columns = logged(poisson(60.0, 120 * S, seed=3), MS, distribution="exact")
    batches = columns.batches
    assert (batches.alone_ns > 10 * MS).any()
    assert set(without_arrivals(columns, MS).batches.alone_ns.tolist()) == {10 * MS}
