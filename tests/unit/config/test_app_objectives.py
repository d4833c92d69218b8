"""Objectives that nothing can meet: alone (critical path, cheapest placement), or together."""

from __future__ import annotations

from itertools import permutations

import pytest

from headgate.cli.app_loading import easily_overlooked, objective_errors
from headgate.config import from_spec
from headgate.config.options import unreachable_objectives
from headgate.core.errors import ConfigError

FUNCTIONS = {
    "a": {"exec_time": "5ms", "cold_start": "10s"},
    "b": {"exec_time": "7ms"},
    "c": {"exec_time": "1ms"},
}
STAGES: dict[str, dict[str, object]] = {
    "first": {"function": "a"},
    "beside": {"function": "c"},
    "last": {"function": "b", "after": ["first", "beside"]},
}


def problems(latency: str, **sections: object) -> list[str]:
    spec = {
        "functions": FUNCTIONS,
        "pools": {"cpu": {"tier": "dedicated"}},
        "pipelines": {"p": {"stages": STAGES}},
        "slo": {"latency": latency},
        **sections,
    }
    return [str(problem) for problem in unreachable_objectives(from_spec(spec, "app.yaml"), "it")]


def test_the_critical_path_counts_and_cold_starts_do_not() -> None:
    assert problems("11.9ms") == [
        "it: slo.latency: '11.9ms': is below the critical path of pipeline p, 12ms: "
        "a 5ms -> b 7ms (allowed: 12ms or longer)"
    ]
    assert problems("12ms") == problems("never") == []


@pytest.mark.parametrize("order", list(permutations(STAGES)))
def test_stages_may_be_in_any_order(order: tuple[str, ...]) -> None:
    stages = {name: STAGES[name] for name in order}
    (problem,) = problems("5ms", pipelines={"p": {"stages": stages}})
    assert "12ms: a 5ms -> b 7ms" in problem


def test_the_objective_of_a_pipeline_is_named_by_its_own_key() -> None:
    pipelines = {
        "tight": {"function": "b", "slo": {"latency": "1ms"}},
        "loose": {"function": "b"},
    }
    (problem,) = problems("1s", pipelines=pipelines)
    assert problem.startswith("it: pipelines.tight.slo.latency: '1ms': is below the critical path")


def test_the_fastest_shape_counts() -> None:
    shapes = [{"cpus": 4, "exec_time": "2ms"}, {"cpus": 2, "exec_time": "3ms"}]
    functions = {**FUNCTIONS, "b": {"exec_time": "7ms", "cpus": 1, "shapes": shapes}}
    assert problems("7ms", functions=functions) == []
    (problem,) = problems("6.9ms", functions=functions)
    assert "7ms: a 5ms -> b 2ms" in problem


def test_the_fastest_variant_counts_with_network_delay_both_ways() -> None:
    functions = {
        "f": {
            "variants": {
                "near": {"exec_time": "9ms", "pools": ["near"]},
                "far": {"exec_time": "2ms", "pools": ["far"]},
            }
        }
    }
    pools = {"near": {"tier": "dedicated"}, "far": {"tier": "dedicated", "network_delay": "3ms"}}
    sections = {"functions": functions, "pools": pools, "pipelines": {"p": {"function": "f"}}}
    (problem,) = problems("7.9ms", **sections)
    assert "8ms: f 8ms" in problem
    assert problems("8ms", **sections) == []


def test_optional_and_unmeasured_stages_count_as_zero() -> None:
    stages = {
        "a": {"function": "a"},
        "b": {"function": "b", "after": ["a"], "only_if_unsure": True},
    }
    assert problems("5ms", pipelines={"p": {"stages": stages}}) == []
    unknown = {**FUNCTIONS, "a": {"model": "a.onnx"}}
    assert problems("8ms", functions=unknown) == []
    (problem,) = problems("6ms", functions=unknown)
    assert problem.endswith("8ms: c 1ms -> b 7ms (allowed: 8ms or longer)")


@pytest.mark.parametrize(
    "truth",
    [
        {"scale": {"a": 0.5, "b": 0.5}},
        {"distribution": "observed", "observed": {"a": [0.5, 2.0], "b": [0.5]}},
    ],
)
def test_service_times_faster_than_the_profile_are_taken_into_account(
    truth: dict[str, object],
) -> None:
    assert problems("6ms", simulation={"service_times": truth}) == []
    assert len(problems("5.9ms", simulation={"service_times": truth})) == 1


def test_the_cheapest_placement_counts_in_the_cheapest_batch() -> None:
    """A millisecond costs $1/1M: a is $5, b in a batch of two is $7.5, and stage c is a again."""
    sections = {
        "functions": {"a": {"exec_time": "5ms"}, "b": {"exec_time": ["10ms", "15ms"]}},
        "pools": {"gpu": {"price": "$3.60/h"}, "dear": {"price": "$36/h"}},
        "pipelines": {
            "p": {"stages": {"x": {"function": "a"}, "y": {"function": "b", "after": ["x"]}}}
        },
    }
    assert problems("1s", slo={"cost": "$12/1M"}, **sections) == [
        "it: slo.cost: '$12/1M': is below the cheapest placement of pipeline p, $12.5/1M: "
        "a on gpu $5/1M, b on gpu $7.5/1M (allowed: $12.5/1M or more)"
    ]
    for cost in ("$12.5/1M", "unlimited"):
        assert problems("1s", slo={"cost": cost}, **sections) == []


def test_a_batch_pays_for_its_part_of_a_node() -> None:
    sections = {"functions": {"a": {"exec_time": "5ms"}}, "pipelines": {"p": {"function": "a"}}}
    pools = {"gpu": {"price": "$3.60/h", "slots": 5}}
    assert problems("1s", pools=pools, slo={"cost": "$1/1M"}, **sections) == []
    (problem,) = problems("1s", pools=pools, slo={"cost": "$0.9/1M"}, **sections)
    assert "pipeline p, $1/1M: a on gpu $1/1M" in problem


SIDES = {
    "cpu": {"exec_time": "100ms", "pools": ["cpu"]},
    "gpu": {"exec_time": "10ms", "pools": ["gpu"]},
}
CHAIN: dict[str, dict[str, object]] = {
    "a": {"function": "f"},
    "b": {"function": "f", "after": ["a"]},
}
# On the CPUs a stage is $10/1M, on the GPUs $100/1M.
TWO_POOLS: dict[str, object] = {
    "functions": {"f": {"variants": SIDES}},
    "pools": {"cpu": {"tier": "dedicated", "price": "$0.36/h"}, "gpu": {"price": "$36/h"}},
    "pipelines": {"p": {"stages": CHAIN}},
}


def joint_problems(latency: str, cost: str, **sections: object) -> list[str]:
    spec = {**TWO_POOLS, "slo": {"latency": latency, "cost": cost}, **sections}
    return [str(problem) for problem in objective_errors(from_spec(spec, "app.yaml"), "it")]


def test_objectives_that_can_only_be_met_each_alone() -> None:
    """One stage on a GPU takes 110 ms and costs $110/1M; two are faster, none is cheaper."""
    assert joint_problems("50ms", "$115/1M") == [
        "it: slo: '50ms and $115/1M': no placement meets both "
        "(allowed: 50ms with $200/1M, or $115/1M with 110ms)"
    ]
    for latency, cost in (
        ("50ms", "$200/1M"),
        ("110ms", "$115/1M"),
        ("110ms", "$110/1M"),
        ("200ms", "$20/1M"),
        ("never", "$20/1M"),
        ("20ms", "unlimited"),
    ):
        assert joint_problems(latency, cost) == [], (latency, cost)


# A millisecond costs $1/1M: 10 alone on the fast pool, 4 in a full batch, and 5 on the slow one.
BATCHES: dict[str, object] = {
    "functions": {
        "f": {
            "variants": {
                "fast": {"exec_time": {1: "10ms", 16: "64ms"}, "pools": ["fast"]},
                "slow": {"exec_time": "500ms", "pools": ["slow"]},
            }
        }
    },
    "pools": {"fast": {"price": "$3.60/h"}, "slow": {"price": "$0.036/h"}},
    "pipelines": {"p": {"function": "f"}},
}
NOT_ALONE = (
    "; a shared batch costs each request less, but policies that promise a cost do not count on "
    "others to share it, and reject all"
)


@pytest.mark.parametrize(
    ("latency", "cost", "problem"),
    [
        (
            "never",
            "$4.5/1M",
            "slo.cost: '$4.5/1M': is below the cheapest placement of pipeline p, $5/1M: "
            "f on slow $5/1M (allowed: $5/1M or more)",
        ),
        (
            "100ms",
            "$6/1M",
            "slo: '100ms and $6/1M': no placement meets both "
            "(allowed: 100ms with $10/1M, or $6/1M with 500ms)",
        ),
        ("100ms", "$10/1M", None),
        ("never", "$5/1M", None),
        ("100ms", "unlimited", None),
        ("never", "$3/1M", None),  # an error: not even in a full batch
    ],
)
def test_costs_that_only_a_shared_batch_can_meet(
    latency: str, cost: str, problem: str | None
) -> None:
    """A policy that promises a cost promises it to a request that nobody joins."""
    config = from_spec({**BATCHES, "slo": {"latency": latency, "cost": cost}}, "app.yaml")
    assert easily_overlooked(config) == ([] if problem is None else [problem + NOT_ALONE])
    assert bool(list(objective_errors(config, "it"))) == (cost == "$3/1M")


def test_what_is_wrong_alone_is_not_reported_again_as_a_pair() -> None:
    for latency, cost, key in (("19ms", "$20/1M", "slo.latency"), ("20ms", "$19/1M", "slo.cost")):
        (problem,) = joint_problems(latency, cost)
        assert problem.startswith(f"it: {key}: "), problem


def test_a_pair_is_named_by_the_key_of_its_pipeline() -> None:
    pipelines = {"p": {"stages": CHAIN, "slo": {"latency": "50ms", "cost": "$20/1M"}}}
    (problem,) = joint_problems("1s", "$1/1k", pipelines=pipelines)
    assert problem.startswith("it: pipelines.p.slo: '50ms and $20/1M': no placement")


def test_what_is_not_known_counts_in_favour_of_a_pair() -> None:
    once = {"a": CHAIN["a"], "b": {**CHAIN["b"], "only_if_unsure": True}}
    assert joint_problems("10ms", "$100/1M", pipelines={"p": {"stages": once}}) == []
    (problem,) = joint_problems("10ms", "$99/1M", pipelines={"p": {"stages": once}})
    assert "10ms with $100/1M, or $99/1M with 100ms" in problem
    unknown = {**SIDES, "gpu": {"model": "a.onnx", "pools": ["gpu"]}}
    assert joint_problems("1ms", "$1/1M", functions={"f": {"variants": unknown}}) == []
    faster = {"service_times": {"scale": {"f": 0.25}}}
    assert joint_problems("50ms", "$5/1M", simulation=faster) == []


def test_batches_count_in_pairs_with_their_own_time() -> None:
    """Two to a batch are cheaper and slower: $7.5/1M in 15 ms, or $10/1M in 10 ms."""
    sections = {
        "functions": {"f": {"exec_time": ["10ms", "15ms"]}},
        "pools": {"gpu": {"price": "$3.60/h"}},
        "pipelines": {"p": {"function": "f"}},
    }
    (problem,) = joint_problems("14ms", "$9/1M", **sections)
    assert "14ms with $10/1M, or $9/1M with 15ms" in problem
    assert joint_problems("15ms", "$9/1M", **sections) == []


def test_a_cost_that_is_negative_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slo\.cost: '\$-1/1M': must not be negative"):
        problems("1s", slo={"cost": "$-1/1M"})
