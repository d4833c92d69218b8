"""`headgate whatif`: predictions from an event log, which the simulator has written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import yaml
from cli_rig import headgate, write

from headgate.cli.app_loading import load_app, select_policy, shared_by_gateways
from headgate.cli.calibration import read_calibrated
from headgate.cli.options import WorkloadOptions
from headgate.cli.simulation import run
from headgate.cli.workload import choose_workload
from headgate.config import from_spec
from headgate.core.actions import Action
from headgate.core.clock import NEVER_NS
from headgate.core.event_log import LogHeader, LogWriter, json_lines, read_log
from headgate.core.events import Event, Refusal, RequestArrived, RequestCancelled
from headgate.core.records import STAGES_MAX
from headgate.sim.interfaces import Observer

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
    patient = ("--set", "functions.bert.batch_max=16", "--set", "slo.latency=300ms")
    larger = whatif(log, "--rate-scale", 4, *patient, "--runs", 1)
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


def test_batches_that_the_profile_does_not_have_are_named(tmp_path: Path) -> None:
    """In proportion to one alone they gain nothing, so that the prediction does not change."""
    log = tmp_path / "day.log"
    app = APP.replace("bert: {exec_time: {1: 20ms, 4: 50ms}}", "bert: {exec_time: 20ms}")
    headgate("simulate", write(tmp_path / "app.yaml", app), "--duration", "2s", "--log", log)
    for name, line in (
        ("bert", "2 to 9 of bert takes 20ms, like one alone, so nothing is gained"),
        ("resnet", "9 of resnet takes 2.142858ms, like the last one"),
    ):
        found = whatif(log, "--set", f"functions.{name}.batch_max=9", "--runs", 1)
        assert found["unseen"][0] == f"assumed: each further item of batches of {line}"


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
    ended = headgate("whatif", tmp_path / "one_of_two.log")
    assert "the log of one of 2 gateways" in ended.err
    assert "(allowed: the logs of all gateways)" in ended.err


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


TWO = """
functions:
  f: {exec_time: 20ms, pools: [gpu, cloud]}
slo: {latency: 200ms}
pools:
  gpu: {nodes: 2, price: $1.20/h}
  cloud: {tier: serverless, memory: 1GB, price: $0.00001/GB-s, concurrency: 8}
workload:
  duration: 20s
  arrivals: [{pipeline: f, process: "poisson:rate=60/s"}]
simulation:
  service_times: {distribution: uniform, cv: 0.1, scale: {f: 1.5}}
"""


@pytest.mark.parametrize(
    ("event", "calls"),
    [
        (["BatchRefused", Refusal.GONE], 2),
        (["BatchRefused", Refusal.THROTTLED], 2),
        (["BatchFailed", "Unhandled"], 2),
        (["BatchLost", False], 2),
        (["BatchRefused", Refusal.TOO_LARGE], 0),
        (None, 0),
    ],
)
def test_an_outage_of_a_platform_is_named(
    tmp_path: Path, event: list[object] | None, calls: int
) -> None:
    """Calls that are refused or fail are not simulated: the prediction has none of their misses."""
    log = tmp_path / "day.log"
    app = write(tmp_path / "app.yaml", TWO)
    headgate("simulate", app, "--duration", "5s", "--policy", "threshold", "--log", log)
    if event is not None:
        write(log, _with_ends(log.read_text(), event))
    told = [line for line in whatif(log, "--runs", 1)["unseen"] if "circuit breaker" in line]
    assert told == (
        [
            "assumed: cloud takes every call within its limits, so its circuit breaker stays "
            f"closed (calls of the log that were refused, failed or lost: {calls})"
        ]
        if calls
        else []
    )


def _with_ends(text: str, event: list[object]) -> str:
    """The first two calls of the log end in this event."""
    calls: list[int] = []
    lines = text.splitlines()
    for number, line in enumerate(lines[1:], start=1):
        entry = json.loads(line)
        if not isinstance(entry, list) or not isinstance(entry[0], int):
            continue
        calls += [each[1] for each in entry[3] if each[0] == "Dispatch" and each[6] is None]
        if entry[2][0] == "BatchFinished" and entry[2][1] in calls[:2]:
            lines[number] = json.dumps([*entry[:2], [event[0], entry[2][1], *event[1:]], entry[3]])
    assert len(calls) > 2
    return "\n".join(lines) + "\n"


class LogsObserver(Observer):
    """Writes a log per gateway."""

    def __init__(self, streams: Sequence[TextIO], header: LogHeader) -> None:
        self._events = [0 for _ in streams]
        self._writers = [
            LogWriter(_renumbering(stream), replace(header, index=index, peers=len(streams)))
            for index, stream in enumerate(streams)
        ]

    def on_event(self, now_ns: int, scheduler: int, event: Event, actions: list[Action]) -> None:
        self._writers[scheduler].write(self._events[scheduler], now_ns, event, actions)
        self._events[scheduler] += 1

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _renumbering(stream: TextIO) -> Callable[[object], None]:
    """Numbers the requests from 0 on in each log, as the gateways of a server do."""
    emit = json_lines(stream)
    numbers: dict[int, int] = {}

    def emit_renumbered(content: Any) -> None:
        if isinstance(content, list):
            for each in (content[2], *content[3]):
                if each[0] == "RequestArrived":
                    numbers[each[1]] = len(numbers)
                if each[0] in ("RequestArrived", "Settle"):
                    each[1] = numbers[each[1]]
                elif each[0] == "Dispatch":
                    tasks = [divmod(id, STAGES_MAX) for id in each[3]]
                    each[3] = [STAGES_MAX * numbers[number] + stage for number, stage in tasks]
        emit(content)

    return emit_renumbered


@pytest.fixture(name="logs", scope="module")
def make_logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The logs of two gateways that shared two nodes and a platform."""
    folder = tmp_path_factory.mktemp("gateways")
    app = str(write(folder / "app.yaml", TWO))
    whole = load_app(app)
    policy = select_policy(whole, app, None, {})
    config = from_spec(shared_by_gateways(whole, policy.kind.capabilities, 2), app)
    workload = choose_workload(config, app, WorkloadOptions(), 0)
    paths = [folder / "run-0.log", folder / "run-1.log"]
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("w")) for path in paths]
        header = LogHeader(config.spec, policy.name, policy.settings, 0)
        observer = LogsObserver(streams, header)
        run(config, policy, workload, seed=0, gateways=2, platforms=whole.app, observer=observer)
        observer.close()
    return paths


def test_the_logs_of_several_gateways_are_read_as_one(logs: list[Path]) -> None:
    """As many gateways are simulated, on nodes that both had, and with the whole platform."""
    found = headgate("whatif", *logs, "--json").json
    was, predicted = found["was"], found["predicted"]
    alone = [read_calibrated(log).columns for log in logs]
    assert was["requests"] == sum(len(each.requests) for each in alone) > 1_000
    assert min(len(each.requests) for each in alone) > 400
    read = read_calibrated(*logs)
    assert read.gateways == 2
    assert len(read.columns.batches) == sum(len(each.batches) for each in alone)
    assert read.results[0].mean == pytest.approx(1.5, rel=0.03)
    assert (np.diff(read.columns.requests.arrival_ns) >= 0).all()
    assert (read.columns.requests.finished_ns < NEVER_NS).all()
    (cloud,) = (pool.faas for pool in read.config.app.pools if pool.faas is not None)
    assert cloud.concurrency_max == 8
    assert predicted["requests"]["value"] == was["requests"]
    assert predicted["in_time"]["value"] == pytest.approx(was["in_time"], abs=0.02)
    assert predicted["p50_ms"]["value"] == pytest.approx(was["p50_ms"], rel=0.1)
    changed = headgate("whatif", *logs, "--workers", 4, "--runs", 1, "--json").json
    assert changed["predicted"]["p95_ms"]["value"] < predicted["p95_ms"]["value"]


def test_gateways_may_have_the_measurements_of_different_workers(
    logs: list[Path], tmp_path: Path
) -> None:
    """What was measured, and not declared, differs after a reload; then the first log's counts."""
    changed: list[str] = []
    for number, path in enumerate(logs):
        header, *rest = path.read_text().splitlines()
        content = json.loads(header)
        for function in content["app"]["functions"].values():
            function.update(code="module:name", exec_time_estimated=True)
            function["exec_time"] = [f"{(5 + number) * (1 + size)}ms" for size in range(8)]
        changed.append(write(tmp_path / path.name, "\n".join([json.dumps(content), *rest]) + "\n"))
    assert headgate("calibrate", *changed, "--json").json["batches"] > 100


def test_logs_of_several_gateways_that_do_not_belong_together(
    logs: list[Path], log: Path, tmp_path: Path
) -> None:
    def error(*paths: Path | str, policy: str | None = None) -> str:
        ended = headgate("whatif", *paths, *(("--policy", policy) if policy else ()))
        assert ended.code == 2 and len(ended.err.strip().splitlines()) == 1
        return ended.err

    assert "the log of one of 2 gateways" in error(logs[1])
    assert f"is the log of the same gateway as {logs[0]}" in error(logs[0], logs[0])
    lines = log.read_text().splitlines()
    other = {**json.loads(lines[0]), "index": 1}
    write(tmp_path / "other.log", "\n".join([json.dumps(other), *lines[1:]]) + "\n")
    assert "is of another application" in error(logs[0], tmp_path / "other.log")
    many: list[Path] = []
    for path in logs:
        header, *rest = path.read_text().splitlines()
        changed = {**json.loads(header), "peers": 3}
        many.append(tmp_path / path.name)
        write(many[-1], "\n".join([json.dumps(changed), *rest]) + "\n")
    assert "these are the logs of 2 of 3 gateways" in error(*many)
    assert "policy spock does not support several gateways" in error(*logs, policy="spock")
    bad = write(tmp_path / "bad.log", _with_unknown_pipeline(logs[1]))
    assert f"{bad}:" in (found := error(logs[0], bad)) and "pipeline: 7: does not exist" in found


def _with_unknown_pipeline(path: Path) -> str:
    """The log, but with a request of a pipeline that does not exist."""
    lines = path.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if '"RequestArrived"' in line and n > 50)
    entry = json.loads(lines[at])
    entry[2][2] = 7
    return "\n".join([*lines[:at], json.dumps(entry), *lines[at + 1 :]]) + "\n"


def test_calibration_from_several_gateways_names_them(logs: list[Path], tmp_path: Path) -> None:
    app, trace = tmp_path / "day.yaml", tmp_path / "day.csv"
    out = headgate("calibrate", *logs, "--out", app, "--trace", trace).out
    assert f"headgate simulate {app} --trace {trace} --gateways 2" in " ".join(out.split())
    again = headgate("simulate", app, "--trace", trace, "--gateways", 2, "--json").json
    assert (
        again["requests"]
        == headgate("whatif", *logs, "--runs", 1, "--json").json["was"]["requests"]
    )
