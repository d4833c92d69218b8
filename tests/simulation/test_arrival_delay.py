"""Arrivals that take CPU time from batches: in the simulator, and how a log tells.

A request takes 10 ms, and each that arrives meanwhile makes that 1 ms more, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headgate.core.model import ONE_CPU_MILLI, Host, Pool
from headgate.core.states import Outcome
from headgate.metrics.from_log import (
    ArrivalDelays,
    LogColumnsReader,
    LoggedColumns,
    find_arrival_delays,
    without_arrivals,
)
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


def test_a_refusal_takes_more() -> None:
    """A third request would be late, behind the one that waits."""
    app = make_app(latency_ms=22)
    columns, _ = run(
        app, at_ms(0, 4, 5), policy=find_policy("headgate"), arrival_ns=MS, refusal_ns=MS // 2
    )
    assert columns.requests.outcome.tolist() == [Outcome.MET, Outcome.MET, Outcome.REJECTED]
    assert waits_ms(columns)[:2] == [12.5, 18.5]


def logged(
    arrivals: Arrivals,
    delays: ArrivalDelays,
    *,
    distribution: str = "lognormal",
    policy: str = "balance",
    latency_ms: int | None = None,
) -> LoggedColumns:
    """Columns of the log of a simulation on two nodes."""
    app = make_app(pools=(replace(GPU, nodes=2),), latency_ms=latency_ms)
    observer = RecordingObserver()
    setup = Setup(
        app,
        find_policy(policy),
        truth=GroundTruthConfig(distribution, cv=0.2),
        arrival_ns=delays.arrival_ns,
        refusal_ns=delays.refusal_ns,
    )
    simulate(setup, arrivals, observer=observer)
    reader = LogColumnsReader(app)
    for now_ns, event, actions in observer.entries:
        reader.read(now_ns, event, actions)
    return reader.columns()


STEADY, BURSTS = poisson(60.0, 120 * S, seed=3), gamma(60.0, 2.0, 120 * S, seed=3)
ONE_MS = ArrivalDelays(MS)


def test_a_log_tells_how_long_the_delay_is() -> None:
    found = find_arrival_delays(logged(BURSTS, ONE_MS))
    assert found.arrival_ns == pytest.approx(MS, rel=0.1)
    assert found.refusal_ns == 0


def test_a_log_tells_what_a_refusal_takes() -> None:
    delays = ArrivalDelays(MS // 2, MS)
    found = find_arrival_delays(logged(BURSTS, delays, policy="headgate", latency_ms=30))
    assert found.arrival_ns == pytest.approx(delays.arrival_ns, rel=0.2)
    assert found.refusal_ns == pytest.approx(delays.refusal_ns, rel=0.2)


@pytest.mark.parametrize("arrivals", [STEADY, BURSTS])
def test_longer_batches_see_more_arrivals_without_a_delay(arrivals: Arrivals) -> None:
    """Where times scatter, a regression of times on arrivals finds milliseconds."""
    columns = logged(arrivals, ArrivalDelays(), distribution="exponential")
    batches, times_ns = columns.batches, columns.requests.arrival_ns
    seen = np.searchsorted(times_ns, batches.ended_ns) - np.searchsorted(times_ns, batches.sent_ns)
    assert np.polyfit(seen, batches.ended_ns - batches.sent_ns, 1)[0] > MS
    assert find_arrival_delays(columns) == ArrivalDelays()


def test_nothing_is_found_without_batches_or_arrivals_beside_them() -> None:
    empty = LogColumnsReader(make_app()).columns()
    assert find_arrival_delays(empty) == ArrivalDelays()
    assert len(without_arrivals(empty, ONE_MS).batches) == 0
    alone = logged(at_ms(*range(0, 3_000, 100)), ONE_MS)
    assert find_arrival_delays(alone) == ArrivalDelays()


def test_times_without_arrivals_are_those_of_the_profile() -> None:
    columns = logged(STEADY, ONE_MS, distribution="exact")
    assert (columns.batches.alone_ns > 10 * MS).any()
    assert set(without_arrivals(columns, ONE_MS).batches.alone_ns.tolist()) == {10 * MS}
