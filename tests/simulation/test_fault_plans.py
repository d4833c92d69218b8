"""Fault plans: the effect of each kind of fault, random plans, and plans as JSON."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headgate.core.actions import StartInstance
from headgate.core.errors import ConfigError
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    RequestCancelled,
)
from headgate.core.model import Limits, Pool
from headgate.core.states import Outcome
from headgate.policies import find_policy
from headgate.sim.faults import KINDS, Fault, FaultPlan, random_plan, swizzle
from headgate.sim.run import Setup, simulate

from .apps import CLOUD, GPU, MS, at_ms, make_app, run, waits_ms
from .policies import SPILL

TWO = (Pool(0, "gpu", nodes=2),)


def test_a_crash_loses_batches_and_the_node_rejoins_empty() -> None:
    """A batch that begins at 5 is lost at 10 and fails, because it ran alone; the node is cold."""
    app = make_app(start_ms=5)
    columns, observer = run(app, at_ms(0, 20), Fault("crash", 10 * MS, until_ns=30 * MS, node=0))
    assert columns.requests.outcome.tolist() == [Outcome.FAILED, Outcome.MET]
    assert waits_ms(columns) == [10.0, 25.0]  # back at 30, 5 to start, 10 to run
    assert (observer.count(BatchLost), observer.count(NodeLost), observer.count(NodeJoined)) == (
        1,
        1,
        2,
    )


@pytest.mark.parametrize(("network_ms", "decision_ms"), [(3, 0), (0, 3), (3, 3)])
def test_a_start_on_its_way_to_a_node_is_lost_with_it(network_ms: int, decision_ms: int) -> None:
    """It arrives when the node is back, which starts only what is ordered anew."""
    app = make_app(start_ms=5, pools=(Pool(0, "gpu", network_ns=network_ms * MS),))
    crash = Fault("crash", 1 * MS, until_ns=2 * MS, node=0)
    columns, observer = run(app, at_ms(0), crash, decision_ns=decision_ms * MS)
    assert columns.requests.outcome.tolist() == [Outcome.MET]
    ordered = [action for action in observer.actions if isinstance(action, StartInstance)]
    started = [event for _, event in observer.events if isinstance(event, InstanceStarted)]
    assert [event.instance_id for event in started] == [ordered[-1].instance_id] != [0]


def test_overlapping_crashes_are_one_crash() -> None:
    columns, observer = run(
        make_app(),
        at_ms(0, 15, 25),
        Fault("crash", 20 * MS, until_ns=40 * MS, node=0),
        Fault("crash", 30 * MS, until_ns=60 * MS, node=0),
        Fault("crash", 60 * MS, until_ns=70 * MS, node=0),
    )
    assert waits_ms(columns) == [10.0, 5.0, 55.0]  # the second is lost at 20
    assert (observer.count(NodeLost), observer.count(NodeJoined)) == (1, 2)


def test_a_slow_node_takes_longer_for_jobs_it_begins() -> None:
    columns, _ = run(
        make_app(), at_ms(0, 20, 100), Fault("slow", 15 * MS, until_ns=25 * MS, node=0, factor=3.0)
    )
    assert waits_ms(columns) == [10.0, 30.0, 10.0]


def test_overlapping_slow_windows_multiply_and_end_exactly() -> None:
    columns, _ = run(
        make_app(),
        at_ms(1, 20, 100),
        Fault("slow", 0, until_ns=25 * MS, node=0, factor=0.3),
        Fault("slow", 10 * MS, until_ns=30 * MS, node=0, factor=0.7),
    )
    assert waits_ms(columns) == [3.0, 2.1, 10.0]


def test_a_lost_completion_times_out() -> None:
    """The batch ends at 10 unreported. At 20, twice the profiled time, it is dispatched again."""
    app = make_app(limits=Limits(timeout_factor=2.0, timeout_floor_ns=0))
    columns, observer = run(app, at_ms(0), Fault("lose", 5 * MS, until_ns=15 * MS, node=0))
    assert columns.requests.outcome.tolist() == [Outcome.MET]
    assert columns.requests.attempts.tolist() == [2]
    assert waits_ms(columns) == [31.0]  # 20, 1 until the node is tried again, 10 to run
    assert observer.count(BatchFinished) == 1


def test_a_duplicated_completion_counts_once() -> None:
    columns, observer = run(
        make_app(), at_ms(0, 20), Fault("duplicate", 5 * MS, until_ns=15 * MS, node=0)
    )
    assert waits_ms(columns) == [10.0, 10.0]
    assert observer.count(BatchFinished) == 3


def test_a_refused_batch_is_retried() -> None:
    columns, observer = run(make_app(), at_ms(5), Fault("refuse", 0, until_ns=7 * MS, node=0))
    assert waits_ms(columns) == [12.0]  # refused at 5 and 6, taken at 7
    assert observer.count(BatchRefused) == 2


def test_a_failed_batch_is_retried_while_attempts_are_left() -> None:
    app = make_app(limits=Limits(attempts_max=2))
    columns, observer = run(app, at_ms(0, 100), Fault("break", 5 * MS, until_ns=25 * MS, node=0))
    assert columns.requests.outcome.tolist() == [Outcome.FAILED, Outcome.MET]
    assert observer.count(BatchFailed) == 2


def test_a_failed_start_is_retried() -> None:
    app = make_app(start_ms=5, limits=Limits(start_backoff_ns=20 * MS))
    columns, observer = run(app, at_ms(0, 30), Fault("break_starts", 0, until_ns=8 * MS, node=0))
    assert (observer.count(InstanceStopped), observer.count(BatchRefused)) == (1, 1)
    assert columns.requests.outcome.tolist() == [Outcome.FAILED, Outcome.MET]
    assert waits_ms(columns) == [5.0, 10.0]  # fails at 5, tried again at 25, there at 30


def test_a_throttled_call_is_retried() -> None:
    app = make_app(pools=(GPU, CLOUD))
    columns, observer = run(
        app, at_ms(0, 1), Fault("throttle", 0, until_ns=3 * MS, pool=1), policy=SPILL
    )
    assert waits_ms(columns) == [10.0, 13.0]  # the second goes to the cloud, at 4: after 1 + 2
    assert observer.count(BatchRefused) == 2


def test_queued_and_running_requests_are_cancelled() -> None:
    columns, observer = run(make_app(), at_ms(0, 1, 50), Fault("cancel", 5 * MS, share=1.0))
    expected = [Outcome.CANCELLED, Outcome.CANCELLED, Outcome.MET]
    assert columns.requests.outcome.tolist() == expected
    assert observer.count(RequestCancelled) == 2


def test_a_share_of_the_open_requests_is_cancelled() -> None:
    columns, _ = run(make_app(), at_ms(*range(200)), Fault("cancel", 199 * MS, share=0.5))
    cancelled = int((columns.requests.outcome == Outcome.CANCELLED).sum())
    assert 60 <= cancelled <= 120  # about half of the 181 that are open


def test_a_burst_adds_requests() -> None:
    columns, _ = run(make_app(exec_ms=(10, 5)), at_ms(0), Fault("burst", MS, pipeline=1, count=3))
    assert columns.requests.pipeline.tolist() == [0, 1, 1, 1]
    assert waits_ms(columns) == [10.0, 14.0, 19.0, 24.0]


def test_a_wrong_profile_persists() -> None:
    app = make_app(exec_ms=(10, 10))
    columns, _ = run(
        app,
        at_ms(0, 20, 40),
        Fault("wrong_profile", 15 * MS, function=0, factor=1.5),
        Fault("wrong_profile", 16 * MS, function=1, factor=9.0),
    )
    assert waits_ms(columns) == [10.0, 15.0, 15.0]


def test_a_setup_can_be_run_again() -> None:
    """Fault actions hold no state: the effects of one run are not present in the next."""
    plan = FaultPlan(
        (
            Fault("slow", 0, until_ns=15 * MS, node=0, factor=2.0),
            Fault("wrong_profile", 0, function=0, factor=2.0),
            Fault("crash", 60 * MS, until_ns=70 * MS, node=0),
            Fault("cannot_load", 60 * MS, until_ns=75 * MS, function=0),
            Fault("poison", 85 * MS, share=1.0),
        )
    )
    setup = Setup(make_app(), find_policy("balance"), faults=plan.actions())
    first, second = (simulate(setup, at_ms(1, 50, 80)) for _ in range(2))
    assert waits_ms(first) == waits_ms(second)
    assert first.requests.outcome.tolist() == second.requests.outcome.tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "flood", "at_ns": 1}, "kind: 'flood': unknown kind of fault (allowed"),
        ({"kind": "cancel", "at_ns": 1}, "cancel.share: is missing"),
        ({"kind": "cancel", "at_ns": 1, "share": 0}, "cancel.share: 0: is out of range"),
        ({"kind": "cancel", "at_ns": 1, "share": 1.5}, "more than 0, at most 1"),
        ({"kind": "cancel", "at_ns": -1, "share": 1}, "at_ns: -1: must not be negative"),
        ({"kind": "crash", "at_ns": 5, "until_ns": 5, "node": 0}, "until_ns: 5: is out of range"),
        ({"kind": "crash", "at_ns": 5, "until_ns": 9, "node": -1}, "node: -1: is out of range"),
        ({"kind": "burst", "at_ns": 5, "pipeline": 0, "count": 0}, "count: 0: is out of range"),
        ({"kind": "burst", "at_ns": 5, "pipeline": 0, "count": 1, "node": 2}, "does not apply"),
    ],
)
def test_an_invalid_fault_is_a_one_line_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fault(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("crash", 0, until_ns=1, node=2), "faults[0].node: 2: does not exist"),
        (
            Fault("throttle", 0, until_ns=1, pool=0),
            "pool: 'gpu': is not a serverless pool",
        ),
        (Fault("throttle", 0, until_ns=1, pool=7), "faults[0].pool: 7: does not exist"),
        (Fault("burst", 0, pipeline=1, count=1), "faults[0].pipeline: 1: does not exist"),
        (Fault("crash_gateway", 0, until_ns=1, gateway=1), "gateway: 1: does not exist"),
        (
            Fault("wrong_profile", 0, function=1, factor=2.0),
            "function: 1: does not exist",
        ),
    ],
)
def test_a_plan_is_checked_against_the_application(fault: Fault, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan((fault,)).check(make_app(pools=TWO))
    assert message in str(caught.value)


def test_random_plans_end_in_time_and_have_valid_targets() -> None:
    app = make_app(pools=(Pool(0, "gpu", nodes=3), CLOUD), limits=Limits(timeout_factor=2.0))
    plans = [
        random_plan(app, 100 * MS, seed, intensity=2.0, gateways=2).check(app, gateways=2)
        for seed in range(200)
    ]
    assert all(plan.end_ns <= 100 * MS for plan in plans)
    assert frozenset().union(*(plan.kinds for plan in plans)) == KINDS.keys()
    assert len(set(plans)) > 150  # seeds differ


def test_the_same_seed_draws_the_same_plan() -> None:
    app = make_app(pools=TWO)
    assert random_plan(app, 100 * MS, 7) == random_plan(app, 100 * MS, 7)


def test_intensity_zero_draws_no_faults() -> None:
    assert not any(random_plan(make_app(), MS, seed, intensity=0.0).faults for seed in range(20))


def test_completions_are_lost_only_if_there_are_timeouts() -> None:
    kinds = [random_plan(make_app(), MS, seed, intensity=3.0).kinds for seed in range(100)]
    assert not any("lose" in plan_kinds for plan_kinds in kinds)


def test_a_swizzle_begins_one_by_one_and_ends_in_another_order() -> None:
    faults = swizzle("crash", list(range(8)), 0, 1_000, Random(1))
    begins = sorted(faults, key=lambda fault: fault.at_ns)
    ends = sorted(faults, key=lambda fault: fault.end_ns)
    assert max(f.at_ns for f in faults) < 500 <= min(f.end_ns for f in faults)
    assert [f.node for f in begins] != [f.node for f in ends]
    assert len({f.at_ns for f in faults}) == len(faults)
