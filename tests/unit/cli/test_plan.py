"""`headgate plan`: its explanation, the file it writes, and its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_rig import headgate, write

from headgate.planning.capacity.latency_model import Characterisation, ColdStart

APP = """
functions: {recommend: {exec_time: 30ms}}
slo: {latency: 150ms}
workload:
  duration: 120s
  arrivals: [{pipeline: recommend, process: "stepped:rates=20/s+80/s,every=20s"}]
"""
POOLS = """
pools:
  machine: {tier: dedicated, nodes: 1, cpus: 8, memory: 16GB, price: $0.41/h}
  lambda:
    tier: serverless
    memory: 6656MiB
    price: $0.0000166667/GB-s
    circuit_breaker: {failure_threshold: 7}
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    """An application with the profile of the paper beside it."""
    measured = replace(
        Characterisation.surrogate(),
        function="recommend",
        cold_start=ColdStart(300, 1200, 400, 500, 126),
        peak_memory_bytes=300 << 20,
    )
    write(tmp_path / "app.profile.json", json.dumps(measured.to_json()))
    return write(tmp_path / "app.yaml", APP)


def planned(app: str, *arguments: object) -> Any:
    ended = headgate("plan", app, *arguments, "--json")
    assert ended.err == ""
    return ended.json


def test_the_plan_is_explained(app: str) -> None:
    ended = headgate("plan", app)
    assert (ended.code, ended.err) == (0, "")
    for text in (
        "Take ",
        "per 1,000 requests",
        "Expected by formulas: no request waits, each call of a ramp-up is cold, and times",
        "requests/s on average",
        "at once take",
        "More than 6656 MiB does not pay for a function",
        "and is 35 % cheaper per second",
        "1024 MiB is the cheapest size",
        "costs as much as functions at",
        "A cold start adds 2.5 s",
        "ml.c5.9xlarge*",
        "Assumed: boot_time, network_delay, provisioning_time.",
    ):
        assert text in ended.out, text


def test_the_plan_as_json(app: str) -> None:
    found = planned(app, "--instance", "ml.c5.large", "--instance", "ml.c5.2xlarge")
    assert [(row["name"], row["threshold"]) for row in found["instances"]] == [
        ("ml.c5.large", 4),
        ("ml.c5.2xlarge", 5),
    ]
    assert found["knee_cores"] == 4
    mix = found["mix"]
    assert found["is_enough"] is True
    assert mix["attainment"] >= 0.99
    assert mix["function_memory_mib"] == 6656
    assert mix["usd_per_1k"] <= found["functions_alone"]["usd_per_1k"]
    assert {fact["confidence"] for fact in found["prices"]} >= {"read", "assumed"}


def test_what_the_prediction_assumes_without_functions(app: str) -> None:
    line = planned(app, "--no-functions")["explanation"][1]
    assert line.startswith("Expected by formulas: a request that finds all instances full is late,")
    assert line.count("function") == 0


def test_the_load_of_the_command_line(app: str) -> None:
    found = planned(app, "--arrivals", "closed:clients=5+20,every=10s")
    assert found["load"]["peak_clients"] == 20
    found = planned(app, "--arrivals", "closed:clients=10,think=1s")
    assert found["load"]["rate_per_s"] == pytest.approx(10 / 1.026)
    found = planned(app, "--arrivals", "deterministic:rate=2/s", "--duration", "1h")
    assert found["load"]["peak_per_s"] == pytest.approx(2.0)
    assert found["mix"]["instances"] == 0  # so little is for functions


def test_the_size_of_functions(app: str) -> None:
    assert planned(app, "--size", "cheapest")["mix"]["function_memory_mib"] == 1024
    assert planned(app, "--size", "2GiB")["mix"]["function_memory_mib"] == 2048
    assert planned(app, "--no-functions")["mix"]["function_memory_mib"] is None
    ended = headgate("plan", app, "--size", "100MiB")
    assert ended.code == 2
    assert "--size: '100MiB': is not an available size" in ended.err


def test_prices_of_the_user(app: str, tmp_path: Path) -> None:
    rack = "instances: {rack: {cpus: 8, memory: 64GB, price: $0.01/h}}"
    prices = write(tmp_path / "own.yaml", f"title: ours\nas_of: '2026-01-02'\n{rack}\n")
    found = planned(app, "--prices", prices)
    assert [row["name"] for row in found["instances"]] == ["rack"]
    assert found["mix"]["instance"] == "rack"


def test_needs_more_capacity(app: str) -> None:
    """Too little capacity is no error: the plan says how many more, and exits with 1."""
    short = ("--no-functions", "--instance", "ml.c5.large", "--instances-max")
    ended = headgate("plan", app, *short, 2)
    assert ended.code == 1
    assert "Needs more capacity: 2 x ml.c5.large" in ended.out
    more = planned(app, *short, 2)["instances_short"]
    assert f"It takes {more} more ml.c5.large than the limit of 2." in ended.out
    assert headgate("plan", app, *short, 2 + more).code == 0
    assert headgate("plan", app, *short, 1 + more).code == 1


def test_not_feasible_at_any_scale(app: str) -> None:
    write(Path(app), APP.replace("150ms", "20ms"))
    ended = headgate("plan", app)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "not feasible at any scale: the objective is 20 ms at 99 %" in ended.err
    assert "an isolated request takes at least 28 ms" in ended.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--instance", "ml.c5.huge"), "'ml.c5.huge': unknown instance type"),
        (("--profile", "none.json"), "none.json: cannot be read"),
        (("--prices", "none.yaml"), "none.yaml: cannot be read"),
        (("--arrivals", "poisson:rate=0.000001/s"), "no requests for recommend"),
        (("--write", "/dev/null/x"), "--write"),
    ],
)
def test_bad_input_is_one_line(app: str, arguments: tuple[str, ...], problem: str) -> None:
    ended = headgate("plan", app, *arguments)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert problem in ended.err


def test_an_unknown_instance_type_is_refused(app: str) -> None:
    ended = headgate("plan", app, "--instance", "ml.c5.huge")
    assert "(allowed: c5.large, c5.xlarge, " in ended.err
    assert "ml.c5.2xlarge" in ended.err


def test_a_profile_of_another_function(app: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.json", json.dumps(Characterisation.surrogate().to_json()))
    ended = headgate("plan", app, "--profile", other)
    assert ended.code == 2
    assert "'recommender': unknown function, did you mean recommend?" in ended.err
    text = write(tmp_path / "text.json", "no profile")
    assert "text.json: is not JSON" in headgate("plan", app, "--profile", text).err
    Path(app).with_suffix(".profile.json").unlink()
    assert "app.profile.json: there is no profile" in headgate("plan", app).err


def test_no_objective(app: str) -> None:
    write(Path(app), APP.replace("{latency: 150ms}", "{quantile: 90%}"))
    assert "pipelines.recommend.slo: has no latency" in headgate("plan", app).err


def test_the_declared_pools_are_evaluated(app: str) -> None:
    write(Path(app), APP + POOLS)
    ended = headgate("plan", app)
    assert "As declared, 1 x machine with its functions would meet " in ended.out
    write(Path(app), APP + POOLS.partition("  lambda")[0])
    ended = headgate("plan", app)
    assert "As declared, 1 x machine would meet " in ended.out
    assert "it needs more capacity, " in ended.out


def test_the_planned_application_can_be_checked_and_simulated(app: str, tmp_path: Path) -> None:
    """The pools keep their names and the keys that the plan does not set."""
    write(Path(app), APP + POOLS)
    out = tmp_path / "planned.yaml"
    found = planned(app, "--instance", "ml.*", "--write", out)
    assert headgate("check", out).code == 0
    spec = headgate("check", out, "--json").json["spec"]
    machine, functions = spec["pools"]["machine"], spec["pools"]["lambda"]
    assert machine["nodes"] == found["mix"]["instances"]
    assert machine["slots"] == found["mix"]["threshold"]
    assert functions["memory"] == "6656MiB"
    assert functions["circuit_breaker"]["failure_threshold"] == 7
    variants = spec["functions"]["recommend"]["variants"]
    assert variants["machine"]["slowdown"][:3] == [1.0, 2.0, 3.0]
    assert variants["lambda"]["cold_start"] == "2.499s"
    ended = headgate("simulate", out, "--policy", "threshold", "--duration", "1s", "--json")
    assert ended.json["requests"] > 0


def test_the_workload_is_written_too(app: str, tmp_path: Path) -> None:
    out = tmp_path / "planned.yaml"
    load = ("--arrivals", "poisson:rate=2/s", "--duration", "1h")
    headgate("plan", app, *load, "--write", out)
    workload = headgate("check", out, "--json").json["spec"]["workload"]
    assert workload["duration"] == "1h"
    assert [stream["process"] for stream in workload["arrivals"]] == ["poisson:rate=2/s"]


def test_inputs_are_not_overwritten(app: str) -> None:
    before = Path(app).read_text()
    assert headgate("plan", app, "--write", app).code == 2
    assert Path(app).read_text() == before


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("points", 3, "concurrency"), 10**9, "points[3].concurrency: 1000000000: is out of range"),
        (("points", 3, "cores"), 1e-300, "points[3].cores: 1e-300: is out of range"),
        (("points", 3, "p99_ms"), 1e300, "points[3].p99_ms: 1e+300: is out of range"),
        (("cold_start", "load_ms"), -1.0, "cold_start.load_ms: -1.0: is out of range"),
        (("peak_memory_bytes",), -1, "peak_memory_bytes: -1: is out of range"),
        (("points", 3, "batch"), "x", "Expected `int`, got `str` - at `$.points[3].batch`"),
    ],
)
def test_a_missing_profile(
    app: str, tmp_path: Path, path: tuple[str | int, ...], value: object, problem: str
) -> None:
    """The profile is refused before anything iterates over every concurrency up to a billion."""
    document = json.loads(Path(app).with_suffix(".profile.json").read_text())
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    damaged = write(tmp_path / "damaged.json", json.dumps(document))
    ended = headgate("plan", app, "--profile", damaged)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert problem in ended.err


def test_a_profile_with_an_endless_number(app: str, tmp_path: Path) -> None:
    deep = write(tmp_path / "deep.json", "[" * 100_000)
    assert "deep.json: is not JSON: " in headgate("plan", app, "--profile", deep).err


def test_a_workload_without_requests(app: str) -> None:
    ended = headgate("plan", app, "--arrivals", "closed:clients=0")
    assert ended.code == 2
    assert "has no requests for recommend" in ended.err


def test_a_price_list_is_not_overwritten(app: str, tmp_path: Path) -> None:
    own = 'title: t\nas_of: "2026-01-02"\ninstances: {n: {cpus: 8, memory: unlimited, price: $1/h}}'
    prices, out = write(tmp_path / "own.yaml", own), tmp_path / "planned.yaml"
    ended = headgate("plan", app, "--prices", prices, "--write", prices)
    assert "would be overwritten" in ended.err
    found = planned(app, "--prices", prices, "--no-functions", "--write", out)
    assert found["mix"]["instances"] > 0
    assert headgate("check", out, "--json").json["spec"]["pools"]["n"]["memory"] == "unlimited"


def with_noise(app: str, concurrencies: set[int], low: float, high: float) -> None:
    """Give the rows at these concurrencies intervals that are wide, around any old median."""
    path = Path(app).with_suffix(".profile.json")
    measured = Characterisation.from_json(json.loads(path.read_text(encoding="utf-8")))
    points = tuple(
        replace(
            p, p50_ms=1.0, mean_ms=1.0, p95_ms=1.0, p99_ms=1.0, p50_low_ms=low, p50_high_ms=high
        )
        if p.concurrency in concurrencies
        else p
        for p in measured.points
    )
    path.write_text(json.dumps(replace(measured, points=points).to_json()), encoding="utf-8")


def test_rows_that_are_noise_are_not_planned_with(app: str) -> None:
    """Rows of 1 ms at every number of cores would let any machine hold more requests."""
    arguments = ("--instance", "ml.c5.2xlarge")
    before = planned(app, *arguments)
    with_noise(app, {6, 7, 8}, low=0.4, high=1.5)
    after = planned(app, *arguments)
    assert after["instances"][0]["threshold"] == before["instances"][0]["threshold"] == 5
    assert after["explanation"][:-1] == before["explanation"]
    (line,) = (each for each in headgate("plan", app).out.split("\n- ") if "Left out" in each)
    assert " ".join(line.split()).startswith(
        "Left out 15 of 100 rows of the profile, whose intervals are wider than their medians: "
        "1 core, 6 at once, batch 1 (p50 1 ms, 400 µs to 1.5 ms); 1 core, 7 at once, batch 1"
    )
    assert "and 10 more." in line


def test_rows_with_an_interval_that_says_something_are_planned_with(app: str) -> None:
    with_noise(app, {6, 7, 8}, low=0.6, high=1.5)
    found = planned(app, "--instance", "ml.c5.2xlarge")
    assert not any("Left out" in line for line in found["explanation"])
    assert found["instances"][0]["threshold"] > 5


def test_a_profile_that_is_nearly_all_noise(app: str) -> None:
    path = Path(app).with_suffix(".profile.json")
    measured = Characterisation.from_json(json.loads(path.read_text(encoding="utf-8")))
    few = replace(measured, points=tuple(p for p in measured.points if p.cores == 8)[:4])
    path.write_text(json.dumps(few.to_json()), encoding="utf-8")
    with_noise(app, {3, 4}, low=0.1, high=9.0)
    assert planned(app)["explanation"][-1].endswith(
        "That leaves 2, too few to fit a surface: measure again on a quiet machine."
    )
    with_noise(app, {1, 2}, low=0.1, high=9.0)
    ended = headgate("plan", app)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"headgate: error: {path}: is all noise: no row of batch 1 has")
    assert len(ended.err.splitlines()) == 1
