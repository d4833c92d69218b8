"""Every error is one line with the file, the key, the value and what is allowed."""

from __future__ import annotations

import datetime

import pytest

from headgate.config import from_spec
from headgate.core.errors import ConfigError

CLIENT_KEYS = "key, rate, burst, concurrency, weight, priority"
PRIORITIES = "a whole number from -1000000 to 1000000"
COUNT = "a whole number from 1 to 1000000"
DURATION = "a duration such as 5ms, 1.5s, 10min"
UNITS = "ns, us, ms, s, min, h, d"
FRACTION = "0% to 100%, or 0 to 1, such as 99% or 0.99"
EXEC = "5ms, [5ms, 6ms], {1: 5ms, 8: 20ms}"
BATCH_SIZE = "a batch size such as 1, 8"
NAME = "a name such as resnet, m-2"
NOT_FINITE = "is not a finite number of 64 bits"
INT64 = f"{-(2**63) + 1} to {2**63 - 1}"
NOT_ONE = "must have exactly one of function and stages"
ONE_OF_BOTH = "either function or stages"
A = {"function": "a"}


def spec_with(path: str, value: object) -> dict[str, object]:
    """Return a valid specification but for one value."""
    spec: dict[str, object] = {
        "functions": {"a": {"exec_time": "5ms"}, "b": {"exec_time": "6ms"}},
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
    """Return the error line about that value."""
    with pytest.raises(ConfigError) as caught:
        from_spec(spec_with(path, value), "app.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message", "allowed"),
    [
        ("pools.gpu.nodes", 0, "0: is not valid", COUNT),
        ("pools.gpu.slots", -1, "-1: is not valid", COUNT),
        ("hosts.h.cpus", 0, "0: must be more than zero", "2, 0.5"),
        ("pools.gpu.nodes", "4", "'4': is text", COUNT),
        ("pools.gpu.nodes", 2.5, "2.5: is not valid", COUNT),
        ("pools.gpu.nodes", None, "is empty", COUNT),
        ("pools.gpu.nodes", True, "True: is true or false", COUNT),
        ("pools.gpu.memory", 100, "100: is a number", "a size such as 100MB, 16GiB"),
        ("pools.gpu.tier", "cpu", "'cpu': is not valid", "dedicated, gpu, serverless"),
        ("pools.gpu.tier", "remote", "'remote': is not valid", "dedicated, gpu, serverless"),
        ("functions", {}, "is empty", "at least one"),
        ("functions", [], "is a list", "a map"),
        ("functions.a.slowdown", [], "is an empty list", "a list"),
        ("functions.a.cold_start", 5, "5: is a number", DURATION),
        ("clients.bob", None, "is empty", f"a map with the keys {CLIENT_KEYS}"),
        ("clients.bob.weight", 0, "0: is not valid", "a number above 0 to 1000000"),
        ("clients.bob.priority", 1.5, "1.5: is not valid", PRIORITIES),
        ("clients.bob.priority", 10**7, "10000000: is not valid", PRIORITIES),
        ("limits.admission", "off", "'off': is not valid", "enforce, observe"),
        ("policy", 4, "4: is a number", "text or a map"),
        ("functions", {"a b": A}, "'a b': is not a valid key", NAME),
        ("functions", {"a\n": A}, "'a\\n': is not a valid key", NAME),
        (
            "slo",
            {True: 1},
            "has the key True, which is not text",
            "text (in quotes, if YAML reads it otherwise)",
        ),
        ("slo.rate_tolerance", float("nan"), NOT_FINITE, INT64),
        pytest.param("slo.rate_tolerance", 10**5000, NOT_FINITE, INT64, id="huge"),
        (
            "slo.latency",
            datetime.date(2024, 1, 1),
            "has the unsupported type date",
            "text (in quotes), a number, true, false, a list, a map",
        ),
    ],
)
def test_wrong_shapes(path: str, value: object, message: str, allowed: str) -> None:
    assert line_of(path, value) == f"app.yaml: {path}: {message} (allowed: {allowed})"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "pools.gpu.nodez",
            "pools.gpu: 'nodez': unknown key, did you mean nodes? (allowed: tier, ",
        ),
        ("polcy", "'polcy': unknown key, did you mean policy? (allowed: functions, pools, "),
        (
            "limits.zzz",
            "limits: 'zzz': unknown key (allowed: attempts_max, refusals_max, backoff, ",
        ),
    ],
)
def test_the_error_for_an_unknown_key_lists_the_known_ones(path: str, line: str) -> None:
    assert line_of(path, 1).startswith(f"app.yaml: {line}")


@pytest.mark.parametrize(
    ("name", "value", "message", "allowed"),
    [
        ("exec_time", None, "is missing", EXEC),
        ("exec_time", [], "is missing", EXEC),
        (
            "code",
            "sentiment",
            "'sentiment': does not name a module and what is in it",
            "module:name, such as sentiment:Sentiment",
        ),
        ("exec_time", "5", "'5': needs a unit", UNITS),
        ("exec_time", "0s", "'0s': must be more than zero", "5ms, 1.5s, 10min"),
        ("exec_time", {0: "5ms"}, "'0': is not a valid key", BATCH_SIZE),
        ("exec_time", {-1: "5ms"}, "'-1': is not a valid key", BATCH_SIZE),
        ("exec_time", {2: "5ms"}, "has no time for a batch of 1", "{1: 5ms, 8: 20ms}"),
        (
            "slowdown",
            [2, 3],
            "begins with 2, the factor of a batch alone on its node",
            "1.0 as the first factor",
        ),
        (
            "retire_after",
            "5s",
            "'5s': counts from when an instance is no longer in use",
            "together with unused_after",
        ),
        ("cpus", 0.0001, "0.0001: has more than three decimals", "2, 0.5, 0.125"),
        ("gpu_share", "1/3", "'1/3': is not a share of a GPU", "0/7, 1/7, ... 7/7"),
        ("pools", ["gpus"], "'gpus': unknown pool, did you mean gpu?", "gpu, lambda"),
        ("pools", ["gpu", "gpu"], "names pool gpu twice", "each name once"),
        ("pools", [], "names no pool", "one or more, or no `pools` at all for every pool"),
        ("memory", "9e20TB", "'9e20TB': is too large", "up to 1000000TB"),
        (
            "memory",
            "20GB",
            "'20GB': exceeds every pool",
            "at most memory 16GB on gpu, memory 2GB on lambda",
        ),
        (
            "gpu_share",
            "5/7",
            "'5/7': exceeds every pool",
            "at most gpu_share 4/7 on gpu, gpu_share 0/7 on lambda",
        ),
    ],
)
def test_functions(name: str, value: object, message: str, allowed: str) -> None:
    expected = f"app.yaml: functions.a.{name}: {message} (allowed: {allowed})"
    assert line_of(f"functions.a.{name}", value) == expected


@pytest.mark.parametrize(
    ("body", "message", "allowed"),
    [
        ({"exec_time": ["5ms", 4]}, "exec_time[1]: 4: is a number", DURATION),
        ({"exec_time": {1: "5ms", 8: "x"}}, "exec_time.8: 'x': is not a number with a unit", UNITS),
        (
            {"exec_time": "5ms", "slowdown": [1, 0.5]},
            "slowdown[1]: 0.5: is not valid",
            "a number from 1 to 1000000",
        ),
        (
            {"exec_time": "5ms", "memory": "4GB", "pools": ["gpu", "lambda"]},
            "memory: '4GB': exceeds a pool under `pools`",
            "at most memory 2GB on lambda",
        ),
        (
            {"exec_time": "5ms", "cpus": 3, "pools": ["gpu"]},
            "cpus: 3.0: exceeds every pool",
            "at most cpus 2 on gpu",
        ),
        (
            {"exec_time": "5ms", "shapes": [{"gpu_share": "8/7", "exec_time": "4ms"}]},
            "shapes[0].gpu_share: '8/7': is more than a whole GPU",
            "0/7, 1/7, ... 7/7",
        ),
        (
            {"exec_time": "5ms", "shapes": [{"cpus": 3, "exec_time": "4ms"}], "pools": ["gpu"]},
            "shapes[0].cpus: 3.0: exceeds every pool",
            "at most cpus 2 on gpu",
        ),
        (
            {
                "exec_time": "5ms",
                "shapes": [{"cpus": 2, "exec_time": "4ms"}, {"cpus": 2, "exec_time": "3ms"}],
            },
            "shapes[1].cpus: 2.0: repeats the shape of 2 CPUs and 0/7 of a GPU",
            "another cpus or gpu_share",
        ),
        (
            {"exec_time": "5ms", "shapes": [{"cpus": 2, "exec_time": {2: "4ms"}}]},
            "shapes[0].exec_time: has no time for a batch of 1",
            "{1: 5ms, 8: 20ms}",
        ),
        (
            {"exec_time": "5ms", "shapes": [{"cpus": 2}]},
            "shapes[0].exec_time: is missing",
            f"{DURATION} or a list or a map",
        ),
        (
            {"exec_time": "5ms", "gpu_share": "8/7"},
            "gpu_share: '8/7': is more than a whole GPU",
            "0/7, 1/7, ... 7/7",
        ),
        (
            {"exec_time": "5ms", "interference": {"bb": 1.2}},
            "interference: 'bb': unknown function, did you mean b?",
            "a, b",
        ),
        (
            {"exec_time": "5ms", "interference": {"b": 0}},
            "interference.b: 0: is not valid",
            "a number above 0 to 1000000",
        ),
        ({"variants": {"x": {}}}, "variants.x.exec_time: is missing", EXEC),
        (
            {"memory": "1GB", "variants": {"x": {"exec_time": "5ms"}}},
            "memory: '1GB': must be set in each variant instead",
            "variants, idempotent, prewarm_nodes",
        ),
    ],
)
def test_whole_functions(body: object, message: str, allowed: str) -> None:
    expected = f"app.yaml: functions.a.{message} (allowed: {allowed})"
    assert line_of("functions.a", body) == expected


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (
            "gpu.burst_concurrency",
            3,
            "3: is only for serverless pools (allowed: address, bandwidth, boot_time, compute, ",
        ),
        ("lambda.nodes", 3, "3: is not for serverless pools (allowed: address, age_max, "),
        ("lambda.memory", "unlimited", "'unlimited': must be a size in a serverless pool (allowed"),
        ("lambda.price", "$1/h", "'$1/h': unknown unit '/h' (allowed: /GB-s, /GB-h)"),
        ("lambda.burst_refill", "0/s", "'0/s': must be more than zero (allowed: 100/s)"),
        ("gpu.price", "1.20", "'1.20': a price starts with $ (allowed: $0.50/h, $0.50/min, "),
        ("gpu.bandwidth", "10GB", "'10GB': is not a bandwidth (allowed: 10GB/s, 100MB/s, "),
        ("gpu.memory", "0B", "'0B': must be more than zero (allowed: 100MB, 16GiB, unlimited)"),
        ("gpu.idle_timeout", 0, "0: must be more than zero (allowed: 5ms, 1.5s, 10min, never)"),
    ],
)
def test_pools(path: str, value: object, line: str) -> None:
    assert line_of(f"pools.{path}", value).startswith(f"app.yaml: pools.{path}: {line}")


@pytest.mark.parametrize(
    ("stages", "message", "allowed"),
    [
        ({"x": {"function": "c"}}, ".x.function: 'c': unknown function", "a, b"),
        ({"x": {"after": []}}, ".x.function: is missing", "text"),
        ({"x": {**A, "after": ["z"]}}, ".x.after: 'z': unknown stage", "x"),
        (
            {"x": A, "y": {**A, "after": ["x", "x"]}},
            ".y.after: names stage x twice",
            "each name once",
        ),
        (
            {"x": {**A, "after": ["y"]}, "y": {**A, "after": ["x"]}, "z": A},
            ": form a cycle: x -> y -> x",
            "no cycles",
        ),
        ({"x": {**A, "after": ["x"]}}, ": form a cycle: x -> x", "no cycles"),
        ({f"s{i}": A for i in range(256)}, ": has 256 stages", "at most 255"),
        (
            {"x": {**A, "only_if_unsure": True}},
            ".x.only_if_unsure: True: needs a stage before it",
            "a stage with `after`",
        ),
        (
            {"x": {**A, "unsure_probability": "30%"}},
            ".x.unsure_probability: '30%': is set for a stage that always runs",
            "a stage with `only_if_unsure: true`",
        ),
    ],
)
def test_stages(stages: object, message: str, allowed: str) -> None:
    key = "pipelines.p.stages"
    assert line_of(key, stages) == f"app.yaml: {key}{message} (allowed: {allowed})"


@pytest.mark.parametrize(
    ("path", "value", "message", "allowed"),
    [
        ("pipelines.p", {}, NOT_ONE, ONE_OF_BOTH),
        (
            "pipelines.p",
            {**A, "stages": {"s": A}},
            "must have exactly one of function and stages",
            ONE_OF_BOTH,
        ),
        ("pipelines.p.slo.quantile", 0, "0: is too small", "above 0% and below 100%"),
        ("slo.quantile", "100%", "'100%': is too large", "above 0% and below 100%"),
        ("slo.quantile", 1.5, "1.5: is more than one", FRACTION),
        ("slo.quantile", "p99", "'p99': is not a number with a unit", FRACTION),
        ("slo.latency", "0s", "'0s': must be more than zero", "5ms, 1.5s, 10min, never"),
        ("limits.backoff", "-1ms", "'-1ms': must not be negative", UNITS),
        ("policy.name", 3, "3: is not a name", "the name of a policy, such as headgate"),
        ("workload.duration", 0, "0: must be more than zero", "5ms, 1.5s, 10min"),
        ("simulation.service_times.cv", 1, "1.0: is not used by the distribution exact", "0"),
        ("simulation.service_times.scale", {"z": 1}, "'z': unknown function", "a, b"),
        ("simulation.service_times.observed", {"z": [1]}, "'z': unknown function", "a, b"),
    ],
)
def test_other_sections(path: str, value: object, message: str, allowed: str) -> None:
    assert line_of(path, value) == f"app.yaml: {path}: {message} (allowed: {allowed})"


@pytest.mark.parametrize(
    ("service_times", "message"),
    [
        (
            {"distribution": "lognormal"},
            "0.0: must be set for the distribution lognormal (allowed: above 0)",
        ),
        (
            {"distribution": "uniform", "cv": 0.6},
            "0.6: is too large for uniform (allowed: up to 0.577)",
        ),
    ],
)
def test_distributions(service_times: object, message: str) -> None:
    key = "simulation.service_times"
    assert line_of(key, service_times) == f"app.yaml: {key}.cv: {message}"


@pytest.mark.parametrize(
    ("stream", "line"),
    [
        ({"pipeline": "a"}, "process: is missing (allowed: text)"),
        ({"pipeline": "c", "process": ""}, "pipeline: 'c': unknown pipeline (allowed: a, b)"),
        (
            {"pipeline": "a", "process": "", "client": "z"},
            "client: 'z': unknown client (allowed: client)",
        ),
    ],
)
def test_streams(stream: object, line: str) -> None:
    assert line_of("workload.arrivals", [stream]) == f"app.yaml: workload.arrivals[0].{line}"


def test_a_key_given_as_a_number_and_as_text_is_a_duplicate() -> None:
    line = line_of("functions.a.exec_time", {1: "5ms", "1": "6ms"})
    assert line == "app.yaml: functions.a.exec_time: '1': is a duplicate key"


def test_a_structure_that_contains_itself_is_refused() -> None:
    settings: dict[str, object] = {"name": "balance"}
    settings["again"] = settings
    assert "is too large or contains itself" in line_of("policy", settings)


def test_budget_and_circuit_breaker_of_a_pool() -> None:
    """A budget is plain dollars; the first cool-down cannot be longer than the maximum."""
    pool: dict[str, object] = {"tier": "serverless", "memory": "1GB"}
    spec = {"functions": {"a": {"exec_time": "5ms"}}, "pools": {"s": pool}}
    pool["budget"] = {"per_day": "$10", "per_minute": "$0.05"}
    breaker = from_spec(spec, "app.yaml").app.pools[0].breaker
    assert (breaker.usd_per_day, breaker.usd_per_minute) == (10.0, 0.05)
    cooldowns = {"cooldown": "9s", "cooldown_max": "5s"}
    for key, written, line in (
        ("budget", {"per_day": "$10/1k"}, "per_day: '$10/1k': unknown unit '/1k' (allowed: $1"),
        ("budget", {"per_day": 10}, "per_day: 10: is a number (allowed: a sum of money such as"),
        (
            "circuit_breaker",
            cooldowns,
            "cooldown: '9s': is longer than `cooldown_max` (allowed: up to",
        ),
    ):
        pool.pop("budget", None)
        pool[key] = written
        with pytest.raises(ConfigError) as caught:
            from_spec(spec, "app.yaml")
        assert str(caught.value).startswith(f"app.yaml: pools.s.{key}.{line}")
