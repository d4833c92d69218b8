"""`headgate whatif`: predictions from an event log, which the simulator has written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_rig import headgate, write

from headgate.cli.calibration import read_calibrated
from headgate.core.event_log import read_log
from headgate.core.events import RequestArrived, RequestCancelled

APP = """
functions:
  resnet: {exec_time: {1: 5ms, 8: 20ms}, cold_start: 20ms}
  bert: {exec_time: {1: 20ms, 4: 50ms}}
slo: {latency: 100ms}
pools: {gpu: {nodes: 1, price: $1.20/h}}
clients: {alice: {}, bob: {}}
workload:
  duration: 15s
  arrivals:
  - {pipeline: resnet, client: bob, process: "poisson:rate=30/s,priority=0+3"}
  - {pipeline: bert, client: alice, process: "poisson:rate=10/s"}
simulation:
  service_times: {distribution: uniform, cv: 0.2, scale: {bert: 1.25}}
"""
FIGURES = ["requests", "in_time", "p50_ms", "p95_ms", "p99_ms", "refused", "cost_usd"]


@pytest.fixture(name="log", scope="module")
def make_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log whose actual service times differ from the profiles."""
    folder = tmp_path_factory.mktemp("whatif")
    log = folder / "day.log"
    headgate("simulate", write(folder / "app.yaml", APP), "--log", log)
    return log


def whatif(log: Path, *arguments: object) -> Any:
    return headgate("whatif", log, *arguments, "--json").json


def test_without_a_change_the_log_itself_is_predicted(log: Path) -> None:
    found = whatif(log)
    was, predicted = found["was"], found["predicted"]
    assert list(was) == list(predicted) == FIGURES
    assert predicted["requests"]["value"] == was["requests"] > 400
    assert predicted["in_time"]["value"] == pytest.approx(was["in_time"], abs=0.02)
    assert predicted["p50_ms"]["value"] == pytest.approx(was["p50_ms"], rel=0.1)
    assert predicted["cost_usd"]["value"] == pytest.approx(was["cost_usd"], rel=0.01)
    for each in predicted.values():
        assert each["low"] <= each["value"] * 1.000001 and each["value"] <= each["high"] * 1.000001
    assert found["self_check"] == dict.fromkeys(FIGURES[1:-1], True)


def test_the_figures_are_those_of_the_run_that_wrote_the_log(log: Path) -> None:
    was = whatif(log, "--runs", 1)["was"]
    ran = headgate("simulate", log.parent / "app.yaml", "--json").json
    assert (was["requests"], was["refused"]) == (ran["requests"], ran["rejected"])
    assert was["in_time"] == ran["slo_attainment"]
    assert (was["p50_ms"], was["p99_ms"]) == (ran["p50_ms"], ran["p99_ms"])
    assert was["cost_usd"] == pytest.approx(ran["cost_usd"])


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        (["--workers", 2], {"pools": {"gpu": {"nodes": 2}}}),
        (["--set", "pools.gpu.nodes=3"], {"pools": {"gpu": {"nodes": 3}}}),
        (["--policy", "balance"], {"policy": "balance"}),
        (["--set", "slo.latency=50ms"], {"slo": {"latency": "50ms"}}),
    ],
)
def test_a_change_is_simulated_as_the_calibrated_application_with_it(
    log: Path, tmp_path: Path, arguments: list[object], change: dict[str, object]
) -> None:
    app, trace = tmp_path / "day.yaml", tmp_path / "day.csv"
    headgate("calibrate", log, "--out", app, "--trace", trace)
    spec = yaml.safe_load(app.read_text())
    for key, value in change.items():
        spec[key] = {**spec[key], **value} if key == "slo" else value  # type: ignore[dict-item]
        if key == "pools":
            spec[key] = {"gpu": {"price": "$1.20/h", **value["gpu"]}}  # type: ignore[index]
    direct = headgate(
        "simulate",
        write(tmp_path / "changed.yaml", yaml.safe_dump(spec)),
        "--trace",
        trace,
        "--json",
    ).json
    found = whatif(log, *arguments, "--runs", 1)["predicted"]
    assert found["p50_ms"]["value"] == direct["p50_ms"]
    assert found["p99_ms"]["value"] == direct["p99_ms"]
    assert found["in_time"]["value"] == direct["slo_attainment"]
    assert found["refused"]["value"] == direct["rejected"]
    assert found["cost_usd"]["value"] == direct["cost_usd"]


@pytest.mark.parametrize("scale", [0.4, 2.0, 2.5])
def test_the_rate_is_scaled(log: Path, scale: float) -> None:
    found = whatif(log, "--rate-scale", scale, "--runs", 1, "--workers", 3)
    assert found["predicted"]["requests"]["value"] == pytest.approx(
        scale * found["was"]["requests"], abs=2
    )


def test_what_was_never_seen_is_named(log: Path) -> None:
    assert whatif(log, "--runs", 1)["unseen"] == []
    (line,) = whatif(log, "--workers", 2, "--runs", 1)["unseen"]
    assert line == "assumed: 2 nodes of gpu (the log has 1), none of which slows another down"
    larger = whatif(log, "--rate-scale", 4, "--set", "functions.bert.batch_max=16", "--runs", 1)
    sizes = read_calibrated(log).results[1].sizes
    assert any(
        line.startswith("assumed: batches of")
        and line.endswith(f"of bert (the log has 1 to {sizes[-1]})")
        for line in larger["unseen"]
    )
    out = headgate("whatif", log, "--workers", 2, "--runs", 1).out
    assert line in out.splitlines()


def test_a_batch_limit_cuts_or_extends_the_profile(log: Path) -> None:
    alone = whatif(log, "--rate-scale", 3, "--set", "functions.resnet.batch_max=1", "--runs", 1)
    both = whatif(log, "--rate-scale", 3, "--runs", 1)
    assert alone["predicted"]["refused"]["value"] > both["predicted"]["refused"]["value"]


def test_the_table_says_how_well_the_log_is_predicted(log: Path) -> None:
    out = headgate("whatif", log, "--runs", 2).out
    assert "predicted without a change" in out
    assert "self-check: what was lies in the intervals of" in out
    changed = headgate("whatif", log, "--policy", "balance", "--runs", 2).out
    assert "predicted with policy balance" in changed and "self-check" not in changed


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "functions.bert.batch_most=4"], "unknown key, did you mean batch_max?"),
        (["--set", "functions.bart.batch_max=4"], "'bart': unknown key, did you mean bert?"),
        (["--set", "slo.latency.x=4"], "has no keys of its own below slo.latency"),
        (["--set", "functions.bert.batch_max=0"], "functions.bert.batch_max: 0: is not valid"),
        (["--set", "patience=4"], "unknown setting"),
        (["--policy", "balanced"], "unknown policy, did you mean balance?"),
        (["--rate-scale", "0"], "--rate-scale"),
        *((["--rate-scale", x], "--rate-scale: ") for x in ("nan", "inf", "1e12")),
        (
            ["--workers", "2", "--set", "pools.gpu.nodes=3"],
            "--workers: 2: cannot be given together",
        ),
        (["--workers", "0"], "--workers"),
    ],
)
def test_bad_changes_are_reported_in_one_line(
    log: Path, arguments: list[str], problem: str
) -> None:
    ended = headgate("whatif", log, *arguments)
    assert ended.code == 2
    assert problem in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_which_pool_has_the_workers(log: Path, tmp_path: Path) -> None:
    header, *lines = log.read_text().splitlines()
    two = json.loads(header)
    two["app"]["pools"]["cpu"] = two["app"]["pools"]["gpu"]
    write(tmp_path / "two.log", "\n".join([json.dumps(two), *lines]) + "\n")
    ended = headgate("whatif", tmp_path / "two.log", "--workers", 2)
    assert (ended.code, "--set pools.gpu.nodes=2, --set pools.cpu.nodes=2" in ended.err) == (
        2,
        True,
    )
    two["peers"] = 2
    write(tmp_path / "one_of_two.log", "\n".join([json.dumps(two), *lines]) + "\n")
    assert "the log of one of 2 gateways" in headgate("whatif", tmp_path / "one_of_two.log").err


def test_requests_keep_what_they_asked_for(log: Path, tmp_path: Path) -> None:
    """Deadlines, priorities, costs and cancellations reach the Scheduler of a simulation."""
    own = tmp_path / "own.log"
    write(own, "\n".join(_with_terms(log.read_text().splitlines())) + "\n")
    app, trace = tmp_path / "own.yaml", tmp_path / "own.csv"
    headgate("calibrate", own, "--out", app, "--trace", trace)
    assert "own_deadlines" in headgate("calibrate", own, "--json").json
    read = read_calibrated(own)
    again = tmp_path / "again.log"
    headgate("simulate", app, "--trace", trace, "--log", again)
    _, entries = read_log(again)
    arrived, cancelled, arrived_ns = {}, {}, {}
    for entry in entries:
        if isinstance(entry.event, RequestArrived):
            arrived[entry.event.request_id] = entry.event
            arrived_ns[entry.event.request_id] = entry.now_ns
        elif isinstance(entry.event, RequestCancelled):
            request_id = entry.event.request_id
            cancelled[request_id] = entry.now_ns - arrived_ns[request_id]
    assert len(arrived) == len(read.columns.requests)
    assert arrived[2].deadline_ns - arrived_ns[2] == 70_000_000 and arrived[2].is_hard
    assert not arrived[3].is_hard
    assert (arrived[2].cost_usd, arrived[2].payload_bytes) == (0.25, 4_096)
    assert [arrived[n].priority for n in range(50)] == read.columns.priority[:50].tolist()
    assert cancelled == {4: 1_000_000}
    assert whatif(own, "--runs", 1)["predicted"]["requests"]["value"] == len(arrived)


def _with_terms(lines: list[str]) -> list[str]:
    """Request 2 gets a deadline, a cost and a size; request 4 is cancelled after 1 ms."""
    changed = lines[:1]
    shift = 0
    for line in lines[1:]:
        entry = json.loads(line)
        if isinstance(entry, list) and isinstance(entry[0], int):
            entry[0] += shift
            event = entry[2]
            if event[:2] == ["RequestArrived", 2]:
                event[6:] = [entry[1] + 70_000_000, True, 4_096, 0.25]
            changed.append(json.dumps(entry))
            if event[:2] == ["RequestArrived", 4]:
                shift += 1
                cancel = [entry[0] + 1, entry[1] + 1_000_000, ["RequestCancelled", 4], []]
                changed.append(json.dumps(cancel))
        else:
            changed.append(line)
    return changed
