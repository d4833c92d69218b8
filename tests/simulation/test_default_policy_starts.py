"""The default policy where promised tasks need instances that have to start, or that others evict.

Found worlds of the regret search in which less than 95 % of what was admitted was in time.
"""

from __future__ import annotations

import pytest

from headgate.config import declare
from headgate.sim.ground_truth import GroundTruthConfig

from .worlds import SEEDS, Stream, run_world

pytestmark = pytest.mark.long

TRUTH = GroundTruthConfig("lognormal", cv=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_task_that_a_start_would_make_late_waits_for_a_node_that_holds_its_function(
    seed: int,
) -> None:
    """Seed 700349. Rented nodes hold the first two functions, or the third of best effort.

    A start of the second takes longer than its objective. Tasks went to nodes that had to start it,
    and were late, while others that hold it were free soon enough; and plans started on rented
    nodes what dispatch had evicted there.
    """
    config = declare(
        functions={
            "short": {"exec_time": "70ms", "memory": "1GB", "cold_start": "650ms"},
            "long": {"exec_time": "700ms", "memory": "1GB", "cold_start": "7s"},
            "bulk": {"exec_time": "500ms", "memory": "2GB", "cold_start": "2s"},
        },
        pools={
            "rented": {
                "nodes": 8, "elastic": True, "boot_time": "1s", "idle_timeout": "20s",
                "memory": "2.5GB", "price": "$0.5/h",
            }
        },
        pipelines={
            "promised": {
                "stages": {
                    "a": {"function": "long"},
                    "b": {"function": "short", "after": ["a"]},
                    "c": {"function": "long", "after": ["a"]},
                },
                "slo": {"latency": "6s"},
            },
            "best_effort": {
                "stages": {
                    "a": {"function": "bulk"},
                    "b": {"function": "long", "after": ["a"]},
                    "c": {"function": "bulk", "after": ["b"]},
                },
            },
        },
    )  # fmt: skip
    streams = (Stream("poisson:rate=2/s", "promised"), Stream("poisson:rate=1.5/s", "best_effort"))
    score = run_world(config, streams, 300.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.kept("promised") >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_promised_soon_stays_loaded_if_something_else_will_be_idle_in_time(
    seed: int,
) -> None:
    """Seed 700254. A node holds all functions but one of the three large ones.

    The first takes 2 s to load, the others a few milliseconds. While one of the others ran, the
    first was evicted for the third, though its next task was promised already.
    """
    config = declare(
        functions={
            "slow_start": {
                "exec_time": "200ms", "memory": "4GB", "cold_start": "5s", "swap_in": "2s",
            },
            "second": {
                "exec_time": "60ms", "memory": "3GB", "cold_start": "50ms", "swap_in": "15ms",
            },
            "third": {
                "exec_time": "20ms", "memory": "3GB", "cold_start": "60ms", "swap_in": "5ms",
            },
        },
        pools={"gpu": {"nodes": 1, "slots": 3, "memory": "9GB", "host_memory": "12GB"}},
        pipelines={
            "chain": {
                "stages": {
                    "a": {"function": "third"},
                    "b": {"function": "slow_start", "after": ["a"]},
                },
                "slo": {"latency": "900ms"},
            },
            "second": {"stages": {"a": {"function": "second"}}, "slo": {"latency": "1s"}},
        },
    )  # fmt: skip
    streams = (Stream("poisson:rate=4/s", "chain"), Stream("poisson:rate=3/s", "second"))
    score = run_world(config, streams, 120.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.kept() >= 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_takes_no_more_tasks_along_than_leave_it_in_time(seed: int) -> None:
    """Seed 720186. A call of 16 tasks takes five times as long as of one.

    Tasks were promised calls as if each were alone, and the calls were as large as could be in time
    if none took longer than expected: half of them do.
    """
    config = declare(
        functions={
            "f": {
                "exec_time": {"1": "33ms", "16": "183ms"}, "cold_start": "140ms", "pools": ["faas"],
            },
            "g": {
                "exec_time": {"1": "35ms", "4": "124ms"}, "cold_start": "760ms", "pools": ["faas"],
                "prewarm_nodes": 100,
            },
        },
        pools={
            "faas": {
                "tier": "serverless", "memory": "1GiB", "concurrency": 11, "price": "$0.001/GB-s",
                "network_delay": "4ms",
            }
        },
        pipelines={
            "pair": {
                "stages": {
                    "a": {"function": "f"},
                    "b": {"function": "f", "after": ["a"]},
                    "c": {"function": "f", "after": ["a"]},
                },
                "slo": {"latency": "660ms"},
            },
            "chain": {
                "stages": {
                    "a": {"function": "f"},
                    "b": {"function": "g"},
                    "c": {"function": "f", "after": ["b"]},
                },
                "slo": {"latency": "660ms"},
            },
        },
    )  # fmt: skip
    streams = (
        Stream("gamma:rate=120/s,cv=4", "pair"),
        Stream("poisson:rate=120/s", "chain"),
    )
    score = run_world(config, streams, 20.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.kept() >= 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_best_effort_that_keeps_all_nodes_busy_leaves_a_function_its_first_node(seed: int) -> None:
    """Seed 1000253. Nothing is promised to a function that no node holds, and no node is ever idle.

    What is refused has no task that would wait for a node, so the next one that is free starts the
    function.
    """
    config = declare(
        functions={
            "bulk": {"exec_time": "3ms", "cold_start": "30ms", "prewarm_nodes": 4},
            "promised": {"exec_time": "6ms", "cold_start": "12ms"},
        },
        pools={"cpu": {"nodes": 4}},
        pipelines={
            "bulk": {"stages": {"s": {"function": "bulk"}}},
            "promised": {"stages": {"s": {"function": "promised"}}, "slo": {"latency": "17ms"}},
        },
    )
    streams = (
        Stream("poisson:rate=2000/s", "bulk"),
        Stream("poisson:rate=200/s", "promised", begins_s=1.0),
    )
    score = run_world(config, streams, 5.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.attainment("promised") >= 0.95
    assert score.kept("promised") >= 0.99
    assert score.answered_per_s("bulk") >= 0.05 * 4 / 0.003


@pytest.mark.parametrize("seed", SEEDS)
def test_from_cold_each_function_starts_once_if_one_node_of_each_is_enough(seed: int) -> None:
    """The application of the README. Two nodes start two functions, one each, in 2 and 4 s.

    Whenever a task waited, the other node started its function, too, and served nothing meanwhile;
    what was admitted then was seconds late, for the node that starts something was taken for free.
    """
    config = declare(
        functions={
            "resnet": {"exec_time": {"1": "5ms", "8": "16ms"}, "cold_start": "2s"},
            "bert": {"exec_time": "18ms", "cold_start": "4s"},
        },
        pools={"gpu": {"nodes": 2}},
        slo={"latency": "100ms", "quantile": "99%"},
    )
    streams = (Stream("poisson:rate=100/s", "resnet"), Stream("gamma:rate=20/s,cv=2", "bert"))
    score = run_world(config, streams, 60.0, policy="headgate", seed=seed)
    assert score.attainment(warm_up=0.0) >= 0.935
    assert score.kept() >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_free_slot_starts_what_no_node_holds(seed: int) -> None:
    """Two functions on one node of four slots: the start of one does not wait for the other's."""
    config = declare(
        functions={
            "long": {"exec_time": "10ms", "cold_start": "8s"},
            "short": {"exec_time": "10ms", "cold_start": "4s"},
        },
        pools={"node": {"nodes": 1, "slots": 4}},
        slo={"latency": "100ms"},
    )
    streams = (Stream("poisson:rate=50/s", "long"), Stream("poisson:rate=20/s", "short"))
    score = run_world(config, streams, 40.0, policy="headgate", seed=seed)
    assert score.attainment("short") >= 0.85  # 0.9 without its start, 0.7 after the other's
    assert score.attainment("long") >= 0.75


@pytest.mark.parametrize("seed", SEEDS)
def test_stages_side_by_side_run_on_as_many_nodes_as_are_free(seed: int) -> None:
    """World 2000366: both become ready together, and the second of them is the more urgent one.

    The node that the first was offered took the second, which was then passed over: the first one
    waited beside nodes that did nothing.
    """
    config = declare(
        functions={"first": {"exec_time": "5ms"}, "twice": {"exec_time": "60ms"}},
        pools={"one": {"nodes": 1}, "many": {"nodes": 4}},
        pipelines={
            "fork": {
                "stages": {
                    "a": {"function": "first"},
                    "b": {"function": "twice", "after": ["a"]},
                    "c": {"function": "twice", "after": ["a"]},
                },
                "slo": {"latency": "100ms"},
            }
        },
    )
    streams = (Stream("poisson:rate=5/s", "fork"),)
    score = run_world(config, streams, 30.0, policy="headgate", seed=seed)
    assert score.attainment(warm_up=0.0) >= 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_all_nodes_of_a_pool_start_what_they_have_slots_for(seed: int) -> None:
    """World 2100060: a node runs one batch at once, and has slots for four.

    So a node that runs one still counts as free. Of those only the first few were asked: with more
    than 16 nodes, all others never held the function.
    """
    config = declare(
        functions={
            "linear": {"exec_time": "20ms", "concurrency": 4, "slowdown": [1.0, 2.0, 3.0, 4.0]}
        },
        pools={"nodes": {"nodes": 40, "slots": 4}},
        slo={"latency": "45ms"},
    )
    streams = (Stream("poisson:rate=1500/s", "linear"),)  # three quarters of the capacity
    score = run_world(config, streams, 3.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.attainment() >= 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_a_start_that_takes_longer_than_the_objective_begins_on_all_nodes(seed: int) -> None:
    """World 2100073: nodes that were starting did not count, so half of the others had to wait.

    The starts of a pool took four times as long as one start.
    """
    config = declare(
        functions={"slow_start": {"exec_time": "100ms", "cold_start": "4s"}},
        pools={"nodes": {"nodes": 16}},
        slo={"latency": "500ms"},
    )
    streams = (Stream("poisson:rate=120/s", "slow_start"),)
    score = run_world(config, streams, 12.0, policy="headgate", seed=seed, truth=TRUTH)
    assert score.attainment(warm_up=0.5) >= 0.97
