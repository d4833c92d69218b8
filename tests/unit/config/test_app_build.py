"""From an application file to the core's records."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headgate.config import AppConfig, ArrivalStream, declare
from headgate.core.clock import HOUR_NS, MILLISECOND_NS, NEVER_NS, SECOND_NS
from headgate.core.model import (
    COMPUTE_NAMES,
    Client,
    FaasPlatform,
    Function,
    Limits,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Tier,
    Variant,
)

MS = MILLISECOND_NS
GPU = {"gpu": {"tier": "gpu"}}


def function_of(body: object, pools: Mapping[str, object] = GPU) -> Function:
    return declare(functions={"f": body}, pools=pools).app.functions[0]


def test_the_defaults_of_the_file_are_those_of_the_core() -> None:
    """Defaults are in the schema and in the core; this keeps them the same."""
    app = declare(functions={"f": {"exec_time": "5ms"}}, pools=GPU).app
    assert app.pools == (Pool(0, "gpu"),)
    assert app.limits == Limits()
    assert app.clients == (Client(0, "client"),)
    assert app.pipelines[0].slo == Slo()
    expected = Variant(0, "f", 0, (0,), Profile((5 * MS,)))
    assert app.functions == (Function(0, "f", (expected,)),)
    lambda_pool = {"lambda": {"tier": "serverless", "memory": "2GB"}}
    app = declare(functions={"f": {"exec_time": "5ms"}}, pools=lambda_pool).app
    assert app.pools[0].faas == FaasPlatform(2 * 10**9)


@pytest.mark.parametrize(
    ("written", "times_ms"),
    [
        ("5ms", (5,)),
        (["5ms", "6ms", "8ms"], (5, 6, 8)),
        ({1: "5ms", 4: "20ms"}, (5, 10, 15, 20)),
        ({"4": "20ms", "1": "5ms", "2": "6ms"}, (5, 6, 13, 20)),
    ],
)
def test_execution_times(written: object, times_ms: tuple[int, ...]) -> None:
    profile = function_of({"exec_time": written}).variants[0].profile
    assert profile.exec_ns == tuple(time * MS for time in times_ms)


def test_all_fields_of_a_function_arrive() -> None:
    function = function_of(
        {
            "exec_time": "5ms",
            "cold_start": "2s",
            "swap_in": "1ms",
            "unused_after": "10s",
            "retire_after": "30s",
            "memory": "100MB",
            "output": "10kB",
            "slowdown": [1, 1.6],
            "concurrency": 2,
            "cpus": 1.5,
            "gpu_share": "3/7",
            "idempotent": False,
        }
    )
    profile = Profile((5 * MS,), (1.0, 1.6), 2 * SECOND_NS, MS, 10**8, 10**4)
    variant = Variant(
        0,
        "f",
        0,
        (0,),
        profile,
        Shape(1500, 3),
        2,
        unused_after_ns=10 * SECOND_NS,
        retire_after_ns=30 * SECOND_NS,
    )
    assert function == Function(0, "f", (variant,), is_idempotent=False)


def test_a_function_has_as_many_shapes_as_are_given() -> None:
    """Its own is the first; each has its own times, in any form, and its own largest batch."""
    function = function_of(
        {
            "exec_time": ["9ms", "16ms"],
            "cpus": 1,
            "gpu_share": "1/7",
            "shapes": [
                {"cpus": 1, "gpu_share": "3/7", "exec_time": {1: "5ms", 3: "7ms"}},
                {"cpus": 4, "gpu_share": "1/7", "exec_time": "8ms"},
            ],
        }
    )
    (variant,) = function.variants
    assert variant.shapes == (
        ShapeTimes(Shape(1_000, 1), (9 * MS, 16 * MS)),
        ShapeTimes(Shape(1_000, 3), (5 * MS, 6 * MS, 7 * MS)),
        ShapeTimes(Shape(4_000, 1), (8 * MS,)),
    )
    assert [variant.items_max(shape_id) for shape_id in range(3)] == [2, 3, 1]


def test_interference_is_by_function() -> None:
    app = declare(
        functions={
            "a": {"exec_time": "5ms", "interference": {"c": 1.3, "a": 0.9}},
            "b": {"exec_time": "5ms"},
            "c": {"exec_time": "5ms"},
        },
        pools=GPU,
    ).app
    assert [v.interference for v in app.variants] == [(0.9, 1.0, 1.3), (), ()]


def test_the_price_of_compute() -> None:
    pools = {"gpu": {"cpu_price": "$0.04/h", "gpu_price": "$2.80/h"}}
    (pool,) = declare(functions={"f": {"exec_time": "5ms"}}, pools=pools).app.pools
    assert pool.compute_usd(Shape(2_000, 3), HOUR_NS) == pytest.approx(0.08 + 1.2)


@pytest.mark.parametrize(("name", "kind"), [(n, k) for k, n in enumerate(COMPUTE_NAMES)])
def test_a_pool_says_when_a_shape_is_chosen(name: str, kind: int) -> None:
    app = declare(functions={"f": {"exec_time": "5ms"}}, pools={"gpu": {"compute": name}}).app
    assert app.pools[0].compute == kind


def test_variants_keep_their_order_and_are_numbered_through() -> None:
    app = declare(
        functions={
            "first": {"exec_time": "1ms"},
            "bert": {
                "variants": {
                    "gpu": {"pools": ["gpu"], "exec_time": "20ms"},
                    "cpu": {"pools": ["cpu"], "exec_time": "400ms"},
                }
            },
        },
        pools={"cpu": {"tier": "dedicated"}, "gpu": {}},
    ).app
    assert [(v.id, v.name, v.pool_ids) for v in app.variants] == [
        (0, "first", (0, 1)),
        (1, "bert/gpu", (1,)),
        (2, "bert/cpu", (0,)),
    ]
    assert app.functions[1].reference_exec_ns == 20 * MS


def test_a_function_runs_on_every_pool_with_enough_resources() -> None:
    """The memory of a serverless instance counts, and dedicated nodes have no GPU."""
    pools = {
        "big": {"memory": "16GB"},
        "small": {"memory": "1GB"},
        "lambda": {"tier": "serverless", "memory": "2GB"},
        "cpu": {"tier": "dedicated"},
    }
    assert function_of({"exec_time": "5ms", "memory": "2GB"}, pools).variants[0].pool_ids == (
        0,
        2,
        3,
    )
    assert function_of({"exec_time": "5ms", "gpu_share": "1/7"}, pools).variants[0].pool_ids == (
        0,
        1,
    )


def test_a_pool_of_nodes() -> None:
    pools = {
        "gpu": {
            "tier": "gpu",
            "nodes": 4,
            "slots": 2,
            "queue_max": 3,
            "cpus": 16,
            "gpu_share": "7/7",
            "memory": "16GB",
            "host_memory": "64GB",
            "idle_timeout": "10min",
            "price": "$1.20/h",
            "network_delay": "0.2ms",
            "bandwidth": "10GB/s",
        }
    }
    assert declare(functions={"f": {"exec_time": "5ms"}}, pools=pools).app.pools[0] == Pool(
        0,
        "gpu",
        tier=Tier.GPU,
        nodes=4,
        slots=2,
        queue_max=3,
        cpu_milli=16_000,
        gpu_sevenths=7,
        memory_bytes=16 * 10**9,
        host_memory_bytes=64 * 10**9,
        idle_timeout_ns=HOUR_NS // 6,
        usd_per_hour=1.2,
        network_ns=MS // 5,
        bytes_per_s=1e10,
    )


def test_a_serverless_pool_has_no_nodes() -> None:
    pools = {
        "lambda": {
            "tier": "serverless",
            "memory": "2GB",
            "concurrency": 50,
            "burst_concurrency": 20,
            "burst_refill": "60/min",
            "keep_alive": "5min",
            "price": "$0.0000166667/GB-s",
            "request_price": "$0.20/1M",
            "billing_step": "100ms",
        }
    }
    assert declare(functions={"f": {"exec_time": "5ms"}}, pools=pools).app.pools[0] == Pool(
        0,
        "lambda",
        tier=Tier.SERVERLESS,
        nodes=0,
        gpu_sevenths=0,
        memory_bytes=2 * 10**9,
        faas=FaasPlatform(
            2 * 10**9,
            50,
            20,
            1.0,
            HOUR_NS // 12,
            usd_per_gb_s=0.0000166667,
            usd_per_request=0.0000002,
            billing_step_ns=100 * MS,
        ),
    )


def load_pipelines() -> AppConfig:
    return declare(
        functions={"m1": {"exec_time": "5ms"}, "m2": {"exec_time": "9ms"}},
        pools=GPU,
        pipelines={
            "plain": {"function": "m2"},
            "cascade": {
                "stages": {
                    "b": {
                        "function": "m2",
                        "after": ["a"],
                        "only_if_unsure": True,
                        "unsure_probability": "30%",
                    },
                    "a": {"function": "m1"},
                },
                "slo": {
                    "latency": "50ms",
                    "quantile": "95%",
                    "rate_tolerance": 2,
                    "hard_deadline": True,
                },
            },
        },
        slo={"latency": "100ms"},
        clients={"alice": {"weight": 2}, "bob": {"priority": -3}},
        policy={"name": "edf", "batch_max": 8},
        workload={
            "duration": "2min",
            "arrivals": [
                {"pipeline": "cascade", "client": "bob", "process": "poisson:rate=50/s"},
                {"pipeline": "plain", "process": "x"},
            ],
        },
        simulation={
            "service_times": {"distribution": "lognormal", "cv": 0.1, "scale": {"m2": 1.2}},
            "overheads": {
                "decision": "5us",
                "per_work_unit": "100ns",
                "arrival": "0.2ms",
                "refusal": "0.4ms",
            },
        },
    )


def test_pipelines_and_their_objectives() -> None:
    """Stages may be written in any order; a pipeline without an objective has the file's."""
    app = load_pipelines().app
    m1, m2 = app.functions
    plain, cascade = app.pipelines
    assert plain.stages == (Stage(m2),)
    assert plain.slo == Slo(100 * MS)
    stages = (Stage(m1, name="a"), Stage(m2, (0,), True, 0.3, "b"))
    assert cascade.stages == stages  # in topological order, unlike in the file
    assert cascade.successors == ((1,), ())
    assert cascade.slo == Slo(50 * MS, 0.95, 2.0, True)


def test_policy_workload_and_simulation_options() -> None:
    config = load_pipelines()
    alice, bob = config.app.clients
    plain, cascade = config.app.pipelines
    assert (alice.weight, bob.weight) == (2.0, 1.0)
    assert (alice.priority, bob.priority) == (0, -3)
    assert (config.policy.name, config.policy.settings) == ("edf", {"batch_max": 8})
    assert config.workload.duration_ns == 120 * SECOND_NS
    assert config.workload.streams == (
        ArrivalStream(cascade, bob, "poisson:rate=50/s"),
        ArrivalStream(plain, alice, "x"),
    )
    simulation = config.simulation
    assert (simulation.distribution, simulation.cv) == ("lognormal", 0.1)
    assert simulation.scale == (1.0, 1.2)
    assert (simulation.decision_ns, simulation.per_work_unit_ns) == (5_000, 100)
    assert (simulation.arrival_ns, simulation.refusal_ns) == (200_000, 400_000)


def test_never_and_unlimited_may_be_written_out() -> None:
    pools = {"gpu": {"memory": "unlimited", "bandwidth": "unlimited", "idle_timeout": "never"}}
    app = declare(functions={"f": {"exec_time": "1ms"}}, pools=pools, slo={"latency": "never"}).app
    assert app.pools == (Pool(0, "gpu"),)
    assert app.pipelines[0].slo.latency_ns == NEVER_NS
