"""The benchmark of decisions: its driver is a correct one, and only `handle` is timed."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from headgate.core.actions import Action
from headgate.core.states import Outcome
from headgate.lab.bench import _decision_driver as driver_module
from headgate.lab.bench import decisions
from headgate.lab.bench._decision_driver import (
    FLEETS,
    WEIGHTS,
    DecisionCase,
    Fleet,
    TimedDriver,
    Timings,
    Weights,
    make_app,
    measure,
)
from headgate.policies import find_policy

STATES = list(product(FLEETS, WEIGHTS))


def run_driver(case: DecisionCase, policy: str, events: int) -> TimedDriver:
    """Run with all invariants of the Scheduler checked after every event."""
    driver = TimedDriver(case, find_policy(policy), validate=True)
    driver.join_nodes()
    driver.load_weights()
    driver.send_requests()
    driver.run(events)
    return driver


@pytest.mark.parametrize("policy", ["balance", "headgate", "mlfq", "srtf"])
@pytest.mark.parametrize(("fleet", "weights"), STATES)
def test_the_driver_is_correct(fleet: Fleet, weights: Weights, policy: str) -> None:
    """Every request is answered in time or still open, and no event was a surprise."""
    case = DecisionCase(4, 12, 0 if fleet == "idle" else 20, stages=2, fleet=fleet, weights=weights)
    driver = run_driver(case, policy, 1_500)
    view = driver.scheduler.view
    assert set(driver.outcomes) == {Outcome.MET}
    assert driver.outcomes[Outcome.MET] + len(view.requests) == len(driver.timings.arrivals)
    assert view.events_ignored == view.policy_faults == 0
    in_flight = sum(len(batch.tasks) for batch in view.batches.values())
    assert driver.waiting == len(view.requests) - in_flight
    if weights == "pressure":
        assert all(node.memory_used_bytes <= node.pool.memory_bytes for node in view.nodes.values())
        assert driver.timings.others[-1] > 0


@pytest.mark.parametrize("policy", ["balance", "headgate"])
def test_two_runs_are_alike(policy: str) -> None:
    case = DecisionCase(4, 12, 20, stages=2, weights="pressure")
    first, second = (run_driver(case, policy, 800) for _ in range(2))
    assert first.now_ns == second.now_ns
    assert first.outcomes == second.outcomes
    assert len(first.timings.completions) == len(second.timings.completions)


def test_weights_are_resident_on_every_node_before_the_first_request() -> None:
    driver = run_driver(DecisionCase(3, 5), "balance", 0)
    nodes = driver.scheduler.view.nodes.values()
    assert all(set(node.instances) == set(range(5)) for node in nodes)
    halves = run_driver(DecisionCase(4, 6, fleet="split"), "balance", 0)
    held = [set(node.instances) for node in halves.scheduler.view.nodes.values()]
    assert held == [{0, 2, 4}] * 2 + [{1, 3, 5}] * 2


def test_under_pressure_a_node_is_full_from_the_start() -> None:
    driver = run_driver(DecisionCase(3, 20, weights="pressure"), "balance", 0)
    for node in driver.scheduler.view.nodes.values():
        assert node.memory_used_bytes == node.pool.memory_bytes == len(node.instances) == 4


def test_a_busy_fleet_has_its_queue_and_an_idle_one_has_none() -> None:
    busy = measure(DecisionCase(5, 10, 200), find_policy("headgate"), events=500)
    assert 180 <= busy.waiting <= 220
    idle = measure(DecisionCase(5, 10, fleet="idle"), find_policy("headgate"), events=500)
    assert idle.waiting <= 2
    assert idle.arrivals
    assert idle.completions


@pytest.mark.parametrize("stages", [1, 4])
def test_every_node_works_where_each_holds_some_of_many_functions(stages: int) -> None:
    """The most urgent tasks may wait for other nodes than the one that is free.

    With 100 nodes and 100 functions all of them stood idle, beside 1,400 requests, for ever.
    """
    case = DecisionCase(60, 60, 600, stages=stages, weights="pressure")
    driver = TimedDriver(case, find_policy("headgate"))
    driver.join_nodes()
    driver.load_weights()
    driver.send_requests()
    while not driver.is_steady:
        driver.run(100)
    free = []
    for _ in range(20):
        driver.run(50)
        free.append(len(driver.scheduler.view.free_nodes))
    assert sum(free) / len(free) <= 0.05 * 60


def test_in_a_split_fleet_one_half_is_free_while_the_other_has_a_queue() -> None:
    driver = run_driver(DecisionCase(20, 10, 100, fleet="split"), "headgate", 3_000)
    free = driver.scheduler.view.free_nodes.values()
    assert {node.pool.id for node in free} == {1}
    assert len(free) >= 5
    assert driver.waiting >= 90


def test_chains_stay_within_their_half_and_have_stages_of_different_functions() -> None:
    for pipeline in make_app(DecisionCase(4, 8, stages=3, fleet="split")).pipelines:
        functions = [stage.function.id for stage in pipeline.stages]
        assert functions[0] == pipeline.id
        assert len(set(functions)) == 3
        assert len({id % 2 for id in functions}) == 1


def test_only_handle_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this clock a look takes 1 and carrying out an action 1,000, which must not count."""
    now = 0
    carry_out = TimedDriver._carry_out

    def look() -> int:
        nonlocal now
        now += 1
        return now

    def carry_out_slowly(driver: TimedDriver, action: Action) -> None:
        nonlocal now
        now += 1_000
        carry_out(driver, action)

    monkeypatch.setattr(driver_module, "perf_counter_ns", look)
    monkeypatch.setattr(TimedDriver, "_carry_out", carry_out_slowly)
    timings = run_driver(DecisionCase(2, 3, 5), "balance", 300).timings
    assert set(timings.together + timings.others) == {1}
    assert now > 1_000 * len(timings.arrivals)


def fake_measure(us: float, waiting_share: float = 1.0) -> object:
    def measured(case: DecisionCase, kind: object) -> Timings:
        ns = int(us * 1_000)
        return Timings([ns, ns], [3 * ns], [7 * ns], int(waiting_share * case.waiting), 5)

    return measured


@pytest.mark.parametrize(
    ("us", "share", "failing"), [(15.0, 1.0, 0), (50.0, 1.0, 6), (101.0, 1.0, 12), (15.0, 0.5, 8)]
)
def test_checks_compare_medians_with_the_budget(
    monkeypatch: pytest.MonkeyPatch, us: float, share: float, failing: int
) -> None:
    """A queue that could not be filled in time fails its check, however fast decisions are."""
    monkeypatch.setattr(decisions, "measure", fake_measure(us, share))
    result = decisions.run(progress=lambda _: None)
    assert len(result.checks) == 12
    assert len(result.failing) == failing
    (row,) = (
        row
        for row in result.rows
        if (row["over"], row["nodes"], row["fleet"], row["weights"])
        == ("nodes", 1_000, "busy", "pressure")
    )
    assert (row["arrival_us"], row["completion_us"], row["other_us"]) == (us, 3 * us, 7 * us)
    assert row["median_us"] == us


def test_the_growth_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(decisions, "measure", fake_measure(15.0))
    result = decisions.run(progress=lambda _: None, policy="balance", out=tmp_path)
    assert result.figures == (tmp_path / "decisions-balance.png",)
    assert result.figures[0].stat().st_size > 10_000


def test_every_case_is_measured_once_and_is_possible() -> None:
    cases = decisions.all_cases()
    assert len(cases) == len(set(cases))
    assert all(case.is_possible for case in cases)
    assert DecisionCase(1_000, 1_000, 10_000, fleet="split", weights="pressure") in cases
    assert all(case.waiting == 0 for case in cases if case.fleet == "idle")
