"""Worlds with shapes that the regret search found, made small: each was lost for one cause.

The numbers are the seeds of `headgate fuzz --regret --worlds shapes`.
"""

from __future__ import annotations

from typing import Any, Final

from headgate.lab.regret.scores import Judge, Score
from headgate.lab.regret.worlds import World
from headgate.policies import find_policy

SCATTERED: Final = {"service_times": {"distribution": "lognormal", "cv": 0.1}}


def run(
    functions: dict[str, Any],
    pools: dict[str, Any],
    rates: dict[str, int],
    duration: str,
    **sections: Any,
) -> Score:
    """What the default policy reaches with Poisson arrivals of each pipeline, per second."""
    arrivals = [{"pipeline": p, "process": f"poisson:rate={r}/s"} for p, r in rates.items()]
    spec = {
        "functions": functions,
        "pools": pools,
        "workload": {"duration": duration, "arrivals": arrivals},
        "simulation": SCATTERED,
        **sections,
    }
    return Judge(World(spec, 1).load()).run(find_policy("headgate"))


def test_a_node_holds_several_instances_that_run_one_batch_each() -> None:
    """Seven instances of a seventh of the GPU; with one, a node served a seventh (world 0)."""
    function = {
        "cpus": 1,
        "gpu_share": "1/7",
        "exec_time": "35ms",
        "cold_start": "490ms",
        "prewarm_nodes": 1,
        "shapes": [{"cpus": 8, "gpu_share": "7/7", "exec_time": "24ms"}],
    }
    pools = {"gpu": {"slots": 8, "cpus": 8, "gpu_share": "7/7"}}
    score = run({"f": function}, pools, {"f": 400}, "10s", slo={"latency": "975ms"})
    assert score.share > 0.9
    assert score.keeps


def test_a_faster_shape_is_promised_where_the_cheapest_starts_too_late() -> None:
    """Four CPUs take twice as long as eight, which is a little less work (world 46)."""
    function = {
        "cpus": 4,
        "exec_time": {1: "3.7ms", 32: "50ms"},
        "concurrency": 8,
        "shapes": [{"cpus": 8, "exec_time": {1: "1.96ms", 32: "26.6ms"}}],
    }
    pools = {"cpu": {"nodes": 8, "slots": 8, "cpus": 8, "cpu_price": "$0.05/h"}}
    score = run({"f": function}, pools, {"f": 12_000}, "400ms", slo={"latency": "12ms"})
    assert score.share_in_time > 0.65
    assert score.keeps


def test_batches_of_a_resident_instance_share_its_compute() -> None:
    """An instance that holds the whole GPU and runs eight batches at once (world 18)."""
    function = {"cpus": 4, "gpu_share": "7/7", "exec_time": "66ms", "concurrency": 8}
    pools = {"gpu": {"slots": 8, "cpus": 4, "gpu_share": "7/7", "compute": "resident"}}
    score = run({"f": function}, pools, {"f": 240}, "10s", slo={"latency": "440ms"})
    assert score.share > 0.9
    assert score.keeps


def test_resident_functions_take_shapes_that_fit_a_node_together() -> None:
    """A function in its cheapest shape left the other no room, and was never idle (world 51)."""
    functions = {
        "f": {
            "cpus": 1,
            "gpu_share": "7/7",
            "exec_time": "40ms",
            "concurrency": 16,
            "shapes": [{"cpus": 14, "gpu_share": "1/7", "exec_time": "60ms"}],
        },
        "g": {"cpus": 2, "gpu_share": "2/7", "exec_time": "16ms", "concurrency": 16},
    }
    pools = {"gpu": {"slots": 16, "cpus": 16, "gpu_share": "7/7", "compute": "resident"}}
    score = run(functions, pools, {"f": 100, "g": 120}, "12s", slo={"latency": "400ms"})
    assert score.share > 0.9
    assert score.counts
    assert score.keeps


def test_resident_compute_goes_to_the_function_that_limits_a_pipeline() -> None:
    """One slow function beside a fast one: it needs the larger part of a node (world 44)."""
    functions = {
        "slow": {
            "cpus": 2,
            "exec_time": "470ms",
            "cold_start": "2s",
            "prewarm_nodes": 2,
            "shapes": [
                {"cpus": 4, "exec_time": "300ms"},
                {"cpus": 8, "exec_time": "190ms"},
            ],
        },
        "fast": {"cpus": 2, "exec_time": "35ms", "cold_start": "1s", "prewarm_nodes": 2},
    }
    pools = {"cpu": {"nodes": 2, "slots": 8, "cpus": 16, "compute": "resident"}}
    stages = {"s": {"function": "slow"}, "t": {"function": "fast", "after": ["s"]}}
    score = run(
        functions,
        pools,
        {"p": 20},
        "120s",
        pipelines={"p": {"stages": stages, "slo": {"latency": "4s"}}},
    )
    assert score.share > 0.8
    assert score.keeps


def test_a_shape_that_wastes_half_a_node_is_not_planned_with() -> None:
    """A node has 4/7 of a GPU once, and the whole of it is faster by a third (world 2)."""
    function = {
        "cpus": 1,
        "gpu_share": "4/7",
        "exec_time": "68ms",
        "concurrency": 8,
        "shapes": [{"cpus": 4, "gpu_share": "7/7", "exec_time": "46ms"}],
    }
    pools = {"gpu": {"slots": 16, "cpus": 4, "gpu_share": "7/7", "compute": "per_instance"}}
    score = run({"f": function}, pools, {"f": 60}, "30s", slo={"latency": "900ms"})
    # The bound is a fluid: 7/4 of the small shape in 68 ms, where all of it in 46 ms is best.
    assert score.share > 0.95 * (1 / 46) / (7 / 4 / 68)
    assert score.keeps


def test_what_starts_at_once_may_take_the_place_of_what_is_idle() -> None:
    """Three functions, a node that holds two, and two slots: an eviction costs nothing (5)."""
    functions = {
        name: {"cpus": 16, "exec_time": {1: "10ms", 8: "50ms"}, "concurrency": 2}
        for name in ("f", "g", "h")
    }
    pools = {"cpu": {"slots": 2, "cpus": 32, "compute": "resident"}}
    rates = dict.fromkeys(functions, 100)
    score = run(functions, pools, rates, "10s", slo={"latency": "600ms"})
    assert score.share > 0.8
    assert score.counts
    assert score.keeps


def test_a_rented_node_holds_several_instances_that_run_one_batch_each() -> None:
    """Seven instances of a seventh of the GPU, where plans ordered one per node (world 50058)."""
    function = {
        "cpus": 1,
        "gpu_share": "1/7",
        "exec_time": "35ms",
        "cold_start": "490ms",
        "prewarm_nodes": 2,
        "shapes": [{"cpus": 8, "gpu_share": "7/7", "exec_time": "24ms"}],
    }
    pool = {"nodes": 2, "slots": 8, "cpus": 8, "gpu_share": "7/7", "elastic": True}
    pools = {"gpu": {**pool, "boot_time": "1s", "idle_timeout": "5s", "price": "$1/h"}}
    score = run({"f": function}, pools, {"f": 800}, "20s", slo={"latency": "975ms"})
    assert score.share > 0.9
    assert score.keeps
    # One node serves 200 requests per second: the other one is not rented for those.
    light = run({"f": function}, pools, {"f": 100}, "60s", slo={"latency": "975ms"})
    assert light.keeps
    assert light.cost_usd < 1.2 * 60 / 3_600


def test_best_effort_leaves_promised_work_the_room_that_it_waits_for() -> None:
    """A stage of half a node, beside best effort that takes every CPU that is free (50023)."""
    functions = {
        "wide": {
            "cpus": 8,
            "exec_time": "14ms",
            "concurrency": 8,
            "shapes": [{"cpus": 4, "exec_time": "15ms"}],
        },
        "narrow": {
            "cpus": 1,
            "exec_time": "300ms",
            "concurrency": 8,
            "shapes": [{"cpus": 2, "exec_time": "200ms"}],
        },
    }
    pools = {"cpu": {"nodes": 2, "slots": 8, "cpus": 8}}
    pipelines = {
        "soon": {"stages": {"s": {"function": "wide"}}, "slo": {"latency": "300ms"}},
        "any": {"stages": {"s": {"function": "narrow"}}},
    }
    score = run(functions, pools, {"soon": 60, "any": 100}, "20s", pipelines=pipelines)
    assert score.share > 0.9
    assert score.keeps
    assert score.serves_best_effort
