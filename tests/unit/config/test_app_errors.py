"""Every kind of mistake gives one line with the file, the key, the value and what is allowed."""

from __future__ import annotations

import datetime

import pytest

from headgate.config import from_spec
from headgate.core.errors import ConfigError

CLIENT_KEYS = "key, rate, burst, concurrency, weight"
COUNT = "a whole number from 1 to 1000000"
DURATION = "a duration such as 5ms, 1.5s, 10min"
UNITS = "ns, us, ms, s, min, h, d"
EXEC = "5ms, [5ms, 6ms], {1: 5ms, 8: 20ms}"
BATCH_SIZE = "a batch size such as 1, 8"
NAME = "a name such as resnet, m-2"
INT64 = f"{-(2**63) + 1} to {2**63 - 1}"
ONE_OF_BOTH = "either function or stages"
A = {"function": "a"}


def spec_with(path: str, value: object) -> dict[str, object]:
    """Return a valid specification but for one value."""
    spec: dict[str, object] = {
        "functions": {"a": {"exec": "5ms"}, "b": {"exec": "6ms"}},
        "pools": {
            "gpu": {"memory": "16GB", "gpu_share": "4/7", "cpus": 2},
            "lambda": {"tier": "serverless", "memory": "2GB"},
        },
    }
    section = spec
    *parents, last = path.split(".")
    for name in parents:
        inner = section.setdefault(name, {})
        assert isinstance(inner, dict)
        section = inner
    section[last] = value
    return spec


def line_of(path: str, value: object) -> str:
    """Return what is said about that value."""
    with pytest.raises(ConfigError) as caught:
        from_spec(spec_with(path, value), "app.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "said", "allowed"),
    [
        ("pools.gpu.nodes", 0, "0: does not fit", COUNT),
        ("pools.gpu.slots", -1, "-1: does not fit", COUNT),
        ("pools.gpu.nodes", "4", "'4': is text", COUNT),
        ("pools.gpu.nodes", 2.5, "2.5: does not fit", COUNT),
        ("pools.gpu.nodes", None, "is empty", COUNT),
        ("pools.gpu.nodes", True, "True: is true or false", COUNT),
        ("pools.gpu.memory", 100, "100: is a number", "a size such as 100MB, 16GiB"),
        ("pools.gpu.tier", "cpu", "'cpu': does not fit", "dedicated, gpu, serverless"),
        ("pools.gpu.tier", "remote", "'remote': does not fit", "dedicated, gpu, serverless"),
        ("functions", {}, "is empty", "at least one"),
        ("functions", [], "is a list", "a map"),
        ("functions.a.slowdown", [], "is an empty list", "a list"),
        ("functions.a.start", 5, "5: is a number", DURATION),
        ("clients.bob", None, "is empty", f"a map with the keys {CLIENT_KEYS}"),
        ("clients.bob.weight", 0, "0: does not fit", "a number above 0 to 1000000"),
        ("policy", 4, "4: is a number", "text or a map"),
        ("functions", {"a b": A}, "'a b': cannot be a key here", NAME),
        ("functions", {"a\n": A}, "'a\\n': cannot be a key here", NAME),
        ("slo", {True: 1}, "a key is True", "text (in quotes, if YAML reads it otherwise)"),
        ("slo.burst", float("nan"), "is not a finite number of 64 bits", INT64),
        pytest.param("slo.burst", 10**5000, "is not a finite number of 64 bits", INT64, id="huge"),
        (
            "slo.latency",
            datetime.date(2024, 1, 1),
            "is a date, which has no place here",
            "text (in quotes), a number, true, false, a list, a map",
        ),
    ],
)
def test_wrong_shapes(path: str, value: object, said: str, allowed: str) -> None:
    assert line_of(path, value) == f"app.yaml: {path}: {said} (allowed: {allowed})"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "pools.gpu.nodez",
            "pools.gpu: 'nodez': unknown key, did you mean nodes? (allowed: tier, ",
        ),
        ("polcy", "'polcy': unknown key, did you mean policy? (allowed: functions, pools, "),
        ("limits.zzz", "limits: 'zzz': unknown key (allowed: attempts, refusals, backoff, "),
        (
            "slo.cost",
            "slo: 'cost': unknown key, objectives for cost are not supported yet (allowed: lat",
        ),
    ],
)
def test_an_unknown_key_is_told_the_known_ones(path: str, line: str) -> None:
    assert line_of(path, 1).startswith(f"app.yaml: {line}")


@pytest.mark.parametrize(
    ("name", "value", "said", "allowed"),
    [
        ("exec", None, "is missing", EXEC),
        ("exec", [], "is missing", EXEC),
        ("exec", "5", "'5': needs a unit", UNITS),
        ("exec", "0s", "'0s': must be longer than zero", "5ms, 1us"),
        ("exec", {0: "5ms"}, "'0': cannot be a key here", BATCH_SIZE),
        ("exec", {-1: "5ms"}, "'-1': cannot be a key here", BATCH_SIZE),
        ("exec", {2: "5ms"}, "has no time for a batch of 1", "{1: 5ms, 8: 20ms}"),
        ("slowdown", [2, 3], "begins with 2 for a batch alone on its node", "1.0 there"),
        ("cpus", 0.0001, "0.0001: is finer than a thousandth of a CPU", "2, 0.5, 0.125"),
        ("gpu_share", "1/3", "'1/3': is not a share of a GPU", "0/7, 1/7, ... 7/7"),
        ("pools", ["gpus"], "'gpus': unknown pool, did you mean gpu?", "gpu, lambda"),
        ("pools", ["gpu", "gpu"], "names pool gpu twice", "each once"),
        ("pools", [], "names no pool", "one or more, or no `pools` at all for every pool"),
        ("memory", "9e20TB", "'9e20TB': is too large", "up to 1000000TB"),
        (
            "memory",
            "20GB",
            "'20GB': fits no pool",
            "at most memory 16GB on gpu, memory 2GB on lambda",
        ),
        (
            "gpu_share",
            "5/7",
            "'5/7': fits no pool",
            "at most gpu_share 4/7 on gpu, gpu_share 0/7 on lambda",
        ),
    ],
)
def test_functions(name: str, value: object, said: str, allowed: str) -> None:
    expected = f"app.yaml: functions.a.{name}: {said} (allowed: {allowed})"
    assert line_of(f"functions.a.{name}", value) == expected


@pytest.mark.parametrize(
    ("body", "said", "allowed"),
    [
        ({"exec": ["5ms", 4]}, "exec[1]: 4: is a number", DURATION),
        ({"exec": {1: "5ms", 8: "x"}}, "exec.8: 'x': is not a number with a unit", UNITS),
        (
            {"exec": "5ms", "slowdown": [1, 0.5]},
            "slowdown[1]: 0.5: does not fit",
            "a number from 1 to 1000000",
        ),
        (
            {"exec": "5ms", "memory": "4GB", "pools": ["gpu", "lambda"]},
            "memory: '4GB': does not fit every pool it names",
            "at most memory 2GB on lambda",
        ),
        (
            {"exec": "5ms", "cpus": 3, "pools": ["gpu"]},
            "cpus: 3.0: fits no pool",
            "at most cpus 2 on gpu",
        ),
        ({"variants": {"x": {}}}, "variants.x.exec: is missing", EXEC),
        (
            {"memory": "1GB", "variants": {"x": {"exec": "5ms"}}},
            "memory: '1GB': belongs into each of the variants",
            "variants, idempotent",
        ),
    ],
)
def test_whole_functions(body: object, said: str, allowed: str) -> None:
    expected = f"app.yaml: functions.a.{said} (allowed: {allowed})"
    assert line_of("functions.a", body) == expected


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("gpu.burst", 3, "3: is only for serverless pools (allowed: bandwidth, boot, cpus, "),
        ("lambda.nodes", 3, "3: a serverless pool has no nodes (allowed: bandwidth, "),
        ("lambda.memory", "unlimited", "'unlimited': a serverless pool needs a size here (allowed"),
        ("lambda.price", "$1/h", "'$1/h': unknown unit '/h' (allowed: /GB-s, /GB-h)"),
        ("lambda.starts_rate", "0/s", "'0/s': must be more than zero (allowed: 100/s, 30/min)"),
        ("gpu.price", "1.20", "'1.20': a price starts with $ (allowed: $0.50/h, $0.50/min, "),
        ("gpu.bandwidth", "10GB", "'10GB': is not a bandwidth (allowed: 10GB/s, 100MB/s, "),
        ("gpu.memory", "0B", "'0B': must be more than zero (allowed: 16GB, unlimited)"),
        ("gpu.idle_timeout", 0, "0: must be longer than zero (allowed: 5ms, 10min)"),
    ],
)
def test_pools(path: str, value: object, line: str) -> None:
    assert line_of(f"pools.{path}", value).startswith(f"app.yaml: pools.{path}: {line}")


@pytest.mark.parametrize(
    ("stages", "said", "allowed"),
    [
        ({"x": {"function": "c"}}, ".x.function: 'c': unknown function", "a, b"),
        ({"x": {"after": []}}, ".x.function: is missing", "text"),
        ({"x": {**A, "after": ["z"]}}, ".x.after: 'z': unknown stage", "x"),
        (
            {"x": A, "y": {**A, "after": ["x", "x"]}},
            ".y.after: names stage x twice",
            "each once",
        ),
        (
            {"x": {**A, "after": ["y"]}, "y": {**A, "after": ["x"]}, "z": A},
            ": wait for each other: x -> y -> x",
            "no cycles",
        ),
        ({"x": {**A, "after": ["x"]}}, ": wait for each other: x -> x", "no cycles"),
        ({f"s{i}": A for i in range(256)}, ": has 256 stages", "at most 255"),
        (
            {"x": {**A, "only_if_unsure": True}},
            ".x.only_if_unsure: True: there is none before it to be unsure",
            "a stage with `after`",
        ),
        (
            {"x": {**A, "unsure_probability": "30%"}},
            ".x.unsure_probability: '30%': it runs always",
            "a stage with `only_if_unsure: true`",
        ),
    ],
)
def test_stages(stages: object, said: str, allowed: str) -> None:
    key = "pipelines.p.stages"
    assert line_of(key, stages) == f"app.yaml: {key}{said} (allowed: {allowed})"


@pytest.mark.parametrize(
    ("path", "value", "said", "allowed"),
    [
        ("pipelines.p", {}, "must say what to run, once", ONE_OF_BOTH),
        ("pipelines.p", {**A, "stages": {"s": A}}, "must say what to run, once", ONE_OF_BOTH),
        ("pipelines.p.slo.quantile", 0, "0.0: is a certainty", "above 0% and below 100%"),
        ("slo.quantile", "100%", "'100%': is a certainty", "above 0% and below 100%"),
        ("slo.quantile", 1.5, "1.5: is more than one", "0% to 100%"),
        ("slo.latency", "0s", "'0s': must be longer than zero", "5ms, 10min"),
        ("limits.backoff", "-1ms", "'-1ms': must not be negative", UNITS),
        ("policy.name", 3, "3: is not a name", "the name of a policy, such as headgate"),
        ("workload.duration", 0, "0: must be longer than zero", "5ms, 10min"),
        ("simulation.truth.cv", 1, "1.0: means nothing to exact", "0"),
        ("simulation.truth.scale", {"z": 1}, "'z': unknown function", "a, b"),
        ("simulation.truth.observed", {"z": [1]}, "'z': unknown function", "a, b"),
    ],
)
def test_other_sections(path: str, value: object, said: str, allowed: str) -> None:
    assert line_of(path, value) == f"app.yaml: {path}: {said} (allowed: {allowed})"


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ({"distribution": "lognormal"}, "0.0: lognormal needs it (allowed: above 0)"),
        (
            {"distribution": "uniform", "cv": 0.6},
            "0.6: is too wide for uniform (allowed: up to 0.577)",
        ),
    ],
)
def test_distributions(truth: object, said: str) -> None:
    assert line_of("simulation.truth", truth) == f"app.yaml: simulation.truth.cv: {said}"


@pytest.mark.parametrize(
    ("stream", "line"),
    [
        ({"pipeline": "a"}, "spec: is missing (allowed: text)"),
        ({"pipeline": "c", "spec": ""}, "pipeline: 'c': unknown pipeline (allowed: a, b)"),
        (
            {"pipeline": "a", "spec": "", "client": "z"},
            "client: 'z': unknown client (allowed: client)",
        ),
    ],
)
def test_streams(stream: object, line: str) -> None:
    assert line_of("workload.arrivals", [stream]) == f"app.yaml: workload.arrivals[0].{line}"


def test_a_key_given_as_a_number_and_as_text_is_there_twice() -> None:
    line = line_of("functions.a.exec", {1: "5ms", "1": "6ms"})
    assert line == "app.yaml: functions.a.exec: '1': is there twice"


def test_a_structure_that_contains_itself_is_refused() -> None:
    settings: dict[str, object] = {"name": "balance"}
    settings["again"] = settings
    assert "is too large or contains itself" in line_of("policy", settings)


def test_budgets_and_rests_of_a_guard() -> None:
    """A budget is plain dollars; a rest cannot be longer than the longest."""
    pool: dict[str, object] = {"tier": "serverless", "memory": "1GB"}
    spec = {"functions": {"a": {"exec": "5ms"}}, "pools": {"s": pool}}
    pool["guard"] = {"budget_per_day": "$10", "budget_per_minute": "$0.05"}
    guard = from_spec(spec, "app.yaml").app.pools[0].breaker
    assert (guard.usd_per_day, guard.usd_per_minute) == (10.0, 0.05)
    for written, line in (
        ({"budget_per_day": "$10/1k"}, "budget_per_day: '$10/1k': unknown unit '/1k' (allowed: $1"),
        (
            {"budget_per_day": 10},
            "budget_per_day: 10: is a number (allowed: a sum of money such as",
        ),
        ({"rest": "9s", "rest_max": "5s"}, "rest: '9s': is longer than `rest_max` (allowed: up to"),
    ):
        pool["guard"] = written
        with pytest.raises(ConfigError) as caught:
            from_spec(spec, "app.yaml")
        assert str(caught.value).startswith(f"app.yaml: pools.s.guard.{line}")
