"""Scores and references of the regret search, in worlds whose results are known by hand."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import pytest

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.policy import PolicyKind
from headgate.core.states import Outcome
from headgate.lab.regret.references import QUEUE_BATCHES, REFERENCE, REFERENCES, Config
from headgate.lab.regret.scores import Judge, Kept, Score, wilson_upper
from headgate.lab.regret.worlds import World
from headgate.metrics.columns import RunColumns, build_requests, build_spans
from headgate.sim.run import Setup, simulate


def world_of(
    functions: dict[str, Any],
    pools: dict[str, Any],
    arrivals: list[dict[str, Any]],
    duration: str = "10s",
    **sections: Any,
) -> Judge:
    workload = {"duration": duration, "arrivals": arrivals}
    spec = {"functions": functions, "pools": pools, "workload": workload, **sections}
    return Judge(World(spec, 0).load())


def one_node(rate: int, slo: str = "100ms", **sections: Any) -> Judge:
    """One node of 10 ms per request, so 100 per second."""
    arrivals = [{"pipeline": "f", "process": f"deterministic:rate={rate}/s"}]
    return world_of(
        {"f": {"exec_time": "10ms"}}, {"gpu": {}}, arrivals, slo={"latency": slo}, **sections
    )


def run_of(judge: Judge, outcome: list[int], took_ns: int = SECOND_NS // 100) -> RunColumns:
    """A made-up run: every request starts on arrival and ends after a fixed time."""
    arrivals = judge.world.arrivals
    latency_ns = judge.world.app.pipelines[0].slo.latency_ns
    requests = build_requests(
        arrivals.times_ns,
        started_ns=arrivals.times_ns,
        finished_ns=arrivals.times_ns + took_ns,
        deadline_ns=arrivals.times_ns + latency_ns,
        outcome=outcome,
    )
    return RunColumns(
        requests, build_spans(), (), ("f",), ("f",), ("client",), ("gpu",), 10**10, 10**10
    )


def run(judge: Judge, **settings: Any) -> Score:
    return judge.run(REFERENCE, Config(**settings))


def test_wilson() -> None:
    """From tables: 95 of 100 has the interval 0.8882 to 0.9785."""
    assert wilson_upper(95, 100) == pytest.approx(0.9785, abs=1e-4)
    assert wilson_upper(0, 10) == pytest.approx(0.2775, abs=1e-4)


def test_a_quantile_fails_only_beyond_chance() -> None:
    assert not Kept("p", 0.99, 100, 98).fails  # the interval ends at 0.9945
    assert Kept("p", 0.99, 10_000, 9_800).fails
    nothing = Kept("p", 0.99, 0, 0)
    assert not nothing.fails
    assert isnan(nothing.share)


def test_goodput_leaves_out_the_first_tenth_and_what_ends_later() -> None:
    """10 per second for 10 s, all met after 10 ms: 90 arrive in the last nine seconds."""
    judge = one_node(10)
    score = judge.score(run_of(judge, [Outcome.MET] * 100))
    assert score.share == pytest.approx(1.0)
    late_end = judge.score(run_of(judge, [Outcome.MET] * 100, took_ns=SECOND_NS + 1))
    assert late_end.share == pytest.approx(80 / 90)  # those of the last second end outside
    half = judge.score(run_of(judge, [Outcome.MET, Outcome.LATE] * 50))
    assert half.share == pytest.approx(0.5)


def test_kept_is_of_the_admitted_whose_deadline_is_inside() -> None:
    """The last request, due after the window, is not counted; a rejected one is not admitted."""
    judge = one_node(10)
    outcomes = [Outcome.MET] * 98 + [Outcome.LATE] * 2
    (kept,) = judge.score(run_of(judge, outcomes)).kept
    assert (kept.admitted, kept.met) == (90, 88)
    outcomes = [Outcome.REJECTED] * 97 + [Outcome.EXPIRED, Outcome.FAILED, Outcome.MET]
    (kept,) = judge.score(run_of(judge, outcomes)).kept
    assert (kept.admitted, kept.met) == (3, 1)


def test_an_open_request_is_not_kept() -> None:
    judge = one_node(10)
    whole = run_of(judge, [Outcome.MET] * 100)
    finished_ns = whole.requests.finished_ns.copy()
    finished_ns[50] = NEVER_NS
    open_ = replace(whole, requests=replace(whole.requests, finished_ns=finished_ns))
    (kept,) = judge.score(open_).kept
    assert (kept.admitted, kept.met) == (90, 89)


def test_the_bound_of_an_overloaded_node() -> None:
    """300 per second where 100 can be served: the bound is a third of what is offered."""
    judge = one_node(300)
    assert judge.score(run_of(judge, [Outcome.MET] * 3_000)).share == pytest.approx(3.0, abs=0.01)


def test_who_starves_a_class_does_not_count() -> None:
    """Each of two tenants has half of the node as its share: 50 per second, and must have 25."""
    arrivals = [
        {"pipeline": "f", "client": name, "process": "deterministic:rate=100/s"}
        for name in ("a", "b")
    ]
    judge = world_of(
        {"f": {"exec_time": "10ms"}},
        {"gpu": {}},
        arrivals,
        slo={"latency": "100ms"},
        clients={"a": {}, "b": {}},
    )
    assert list(judge.fair_shares.values()) == pytest.approx([judge.bound / 2] * 2, rel=1e-3)

    def served(of_a: int, of_b: int) -> Score:
        """Serve so many of every twenty requests of either tenant; they alternate."""
        rows = np.arange(2_000)
        turn, is_a = rows // 2 % 20, rows % 2 == 0
        is_met = np.where(is_a, turn < of_a, turn < of_b)
        outcome = np.where(is_met, Outcome.MET, Outcome.REJECTED).tolist()
        return judge.score(run_of(judge, outcome))

    assert served(10, 10).counts
    assert served(15, 6).counts
    unfair = served(19, 1)
    assert not unfair.counts
    assert unfair.starved == ("b/f",)


def test_best_effort_share() -> None:
    """Under EDF without admission, requests without an objective go last: here, never."""
    arrivals = [
        {"pipeline": "f", "process": "deterministic:rate=101/s"},
        {"pipeline": "bulk", "process": "deterministic:rate=100/s"},
    ]
    pipelines = {
        "f": {"function": "f", "slo": {"latency": "1s"}},
        "bulk": {"function": "f"},
    }
    judge = world_of({"f": {"exec_time": "10ms"}}, {"gpu": {}}, arrivals, pipelines=pipelines)
    last = run(judge, order="edf")
    assert last.best_effort < 0.05
    assert not last.serves_best_effort
    fifo = run(judge)
    assert fifo.best_effort == pytest.approx(0.5, abs=0.05)
    assert fifo.serves_best_effort


def test_best_effort_that_is_rejected_counts_as_waiting() -> None:
    """Otherwise a policy could get rid of requests without an objective by rejecting them all."""
    arrivals = [
        {"pipeline": "f", "process": "deterministic:rate=10/s"},
        {"pipeline": "bulk", "process": "deterministic:rate=10/s"},
    ]
    pipelines = {"f": {"function": "f", "slo": {"latency": "1s"}}, "bulk": {"function": "f"}}
    judge = world_of({"f": {"exec_time": "10ms"}}, {"gpu": {}}, arrivals, pipelines=pipelines)
    world = judge.world
    is_bulk = world.arrivals.pipeline == 1
    requests = build_requests(
        world.arrivals.times_ns,
        started_ns=np.where(is_bulk, NEVER_NS, world.arrivals.times_ns),
        finished_ns=world.arrivals.times_ns,
        deadline_ns=np.where(is_bulk, NEVER_NS, world.arrivals.times_ns + SECOND_NS),
        outcome=np.where(is_bulk, Outcome.REJECTED, Outcome.MET),
        pipeline=is_bulk,
    )
    names = (("f", "bulk"), ("f",), ("client",), ("gpu",))
    score = judge.score(RunColumns(requests, build_spans(), (), *names, 10**10, 10**10))
    assert score.best_effort == 0.0
    assert not score.serves_best_effort
    assert score.share == pytest.approx(1.0)


def test_a_batch_that_ends_the_waiting_counts_for_best_effort() -> None:
    """One request a second waits for 100 ms, and ends when nobody waits: 10 per second of 100."""
    arrivals = [
        {"pipeline": "f", "process": "deterministic:rate=10/s"},
        {"pipeline": "bulk", "process": "deterministic:rate=1/s"},
    ]
    pipelines = {"f": {"function": "f", "slo": {"latency": "1s"}}, "bulk": {"function": "f"}}
    judge = world_of({"f": {"exec_time": "10ms"}}, {"gpu": {}}, arrivals, pipelines=pipelines)
    times_ns = judge.world.arrivals.times_ns
    is_bulk = judge.world.arrivals.pipeline == 1
    started_ns = np.where(is_bulk, times_ns + SECOND_NS // 10, times_ns)
    requests = build_requests(
        times_ns,
        started_ns=started_ns,
        finished_ns=started_ns + SECOND_NS // 100,
        deadline_ns=np.where(is_bulk, NEVER_NS, times_ns + SECOND_NS),
        outcome=np.full(len(times_ns), Outcome.MET),
        pipeline=is_bulk,
    )
    names = (("f", "bulk"), ("f",), ("client",), ("gpu",))
    score = judge.score(RunColumns(requests, build_spans(), (), *names, 10**10, 10**10))
    assert score.best_effort == pytest.approx(0.1, rel=0.15)
    assert score.serves_best_effort


def test_best_effort_that_never_waits_is_not_judged() -> None:
    judge = one_node(10)
    score = run(judge)
    assert isnan(score.best_effort)
    assert score.serves_best_effort


def test_cost_is_that_of_the_window() -> None:
    """Nodes that are held cost until the end of the window, even where requests are open."""
    arrivals = [{"pipeline": "f", "process": "deterministic:rate=300/s"}]
    judge = world_of(
        {"f": {"exec_time": "10ms"}}, {"gpu": {"price": "$3600/h"}}, arrivals, slo={"latency": "1s"}
    )
    assert run(judge).cost_usd == pytest.approx(10.0, rel=0.01)


def test_edf_without_admission_collapses_under_overload() -> None:
    judge = one_node(300)
    assert run(judge, order="edf").share < 0.05
    assert run(judge, queue_batches=4).share > 0.95


def test_the_bound_of_the_queue() -> None:
    """FIFO with a bound of n batches: a request waits for at most n others and the running one."""
    judge = one_node(300, slo="55ms")
    short, long = run(judge, queue_batches=4), run(judge, queue_batches=8)
    assert short.share > 0.95
    assert short.keeps
    assert long.share < 0.05  # all wait for 80 ms
    assert not long.keeps


def test_batches_fill_and_items_count() -> None:
    """Batches of 4 in 20 ms: 200 items per second, in requests of two items each."""
    arrivals = [{"pipeline": "f", "process": "deterministic:rate=300/s,items=2"}]
    judge = world_of(
        {"f": {"exec_time": {1: "8ms", 4: "20ms"}}}, {"gpu": {}}, arrivals, slo={"latency": "1s"}
    )
    assert run(judge, queue_batches=4).share == pytest.approx(1.0, abs=0.03)


def test_the_fastest_build_alone() -> None:
    """A build of 1 s cannot be in time, and ruins what goes there; the fast one alone keeps all."""
    variants = {
        "slow": {"pools": ["cpu"], "exec_time": "1s"},
        "fast": {"pools": ["gpu"], "exec_time": "10ms"},
    }
    arrivals = [{"pipeline": "f", "process": "poisson:rate=80/s"}]
    judge = world_of(
        {"f": {"variants": variants}},
        {"cpu": {"nodes": 9}, "gpu": {}},
        arrivals,
        slo={"latency": "500ms"},
    )
    assert run(judge, order="edf", fastest_only=True).kept_overall > 0.99
    assert run(judge, order="edf").kept_overall < 0.95


def test_references_call_faas_pools_and_load_weights() -> None:
    """A reference uses what nodes there are, then calls, up to the concurrency limit."""
    variants = {
        "node": {"pools": ["gpu"], "exec_time": "10ms", "cold_start": "50ms"},
        "call": {"pools": ["faas"], "exec_time": "20ms", "cold_start": "50ms", "memory": "1GB"},
    }
    faas = {"tier": "serverless", "memory": "1GB", "concurrency": 3}
    arrivals = [{"pipeline": "f", "process": "poisson:rate=400/s"}]
    judge = world_of(
        {"f": {"variants": variants, "prewarm_nodes": 1}},
        {"gpu": {}, "faas": faas},
        arrivals,
        slo={"latency": "1s"},
    )
    assert run(judge, queue_batches=4).share == pytest.approx(1.0, abs=0.05)


def test_references_run_cascades() -> None:
    """Stages that are skipped never come, so they must not count as waiting."""
    stages = {
        "small": {"function": "f"},
        "large": {
            "function": "f",
            "after": ["small"],
            "only_if_unsure": True,
            "unsure_probability": "10%",
        },
    }
    pipelines = {"p": {"stages": stages, "slo": {"latency": "1s"}}}
    arrivals = [{"pipeline": "p", "process": "poisson:rate=50/s"}]
    judge = world_of({"f": {"exec_time": "5ms"}}, {"gpu": {}}, arrivals, pipelines=pipelines)
    assert run(judge, queue_batches=4).share > 0.95


def test_the_references_are_five_bounds_and_two_others() -> None:
    assert [c.queue_batches for c in REFERENCES.values() if c.order == "fifo"] == [*QUEUE_BATCHES]
    assert QUEUE_BATCHES == (1, 2, 4, 8, 16)
    assert [c.fastest_only for c in REFERENCES.values() if c.order == "edf"] == [False, True]


@pytest.mark.parametrize("config", REFERENCES.values(), ids=list(REFERENCES))
def test_a_reference_settles_every_request(config: Config) -> None:
    """Run to the end, with all invariants checked after each event."""
    kind: PolicyKind = REFERENCE
    spec = {
        "functions": {
            "f": {"exec_time": {1: "10ms", 4: "20ms"}, "cold_start": "50ms", "memory": "1GB"},
            "g": {"exec_time": "10ms", "cold_start": "20ms", "memory": "1GB"},
        },
        "pools": {"gpu": {"nodes": 2, "memory": "1GB"}},
        "slo": {"latency": "100ms", "hard_deadline": True},
        "workload": {
            "duration": "2s",
            "arrivals": [{"pipeline": name, "process": "poisson:rate=150/s"} for name in "fg"],
        },
    }
    world = World(spec, 3).load()
    setup = Setup(world.app, kind, config, seed=3, validate=True)
    columns = simulate(setup, world.arrivals)
    assert len(columns.requests) == len(world.arrivals)
    assert (columns.requests.finished_ns < NEVER_NS).all()
