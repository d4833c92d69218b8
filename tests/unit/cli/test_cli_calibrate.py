"""`headgate calibrate`: from an event log to an application that simulates it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli_rig import headgate, rotated, write

from headgate.cli.simulation import ground_truth_config
from headgate.config import declare
from headgate.sim.ground_truth import GroundTruth

APP = """
functions:
  resnet: {exec_time: 5ms, cold_start: 20ms}
  bert: {exec_time: {1: 20ms, 4: 50ms}, prewarm_nodes: 1}
slo: {latency: 100ms}
pools: {gpu: {nodes: 2}}
clients: {alice: {}, bob: {}}
policy: {name: headgate, default_deadline_factor: 8.0}
workload:
  duration: 5s
  arrivals:
  - {pipeline: resnet, client: bob, process: "poisson:rate=80/s"}
  - {pipeline: bert, process: "poisson:rate=40/s"}
simulation:
  service_times: {distribution: uniform, cv: 0.2, scale: {bert: 1.25}}
"""


@pytest.fixture(name="log")
def make_log(tmp_path: Path) -> Path:
    """A log whose actual service times differ from the profiles."""
    log = tmp_path / "day.log"
    headgate("simulate", write(tmp_path / "app.yaml", APP), "--log", log)
    return log


def test_service_times_are_calibrated_from_the_log(log: Path) -> None:
    found = headgate("calibrate", log, "--json").json
    assert found["requests"] > 500
    resnet, bert = found["functions"]
    assert (resnet["function"], bert["function"]) == ("resnet", "bert")
    assert resnet["mean"] == pytest.approx(1.0, rel=0.03)
    assert bert["mean"] == pytest.approx(1.25, rel=0.03)
    assert max(bert["factors"]["1"]) == pytest.approx(1.25 * (1 + 0.2 * 3**0.5), rel=0.03)
    assert len(bert["factors"]["1"]) <= 100


def test_an_application_without_requests_is_no_suggestion(tmp_path: Path) -> None:
    """As of a server: its file has no workload, so a simulation needs the requests of the log."""
    app = write(tmp_path / "app.yaml", APP.partition("workload:")[0])
    arrivals = ("--arrivals", "poisson:rate=50/s,pipeline=resnet", "--duration", "1s")
    log, out = tmp_path / "served.log", tmp_path / "out.yaml"
    headgate("simulate", app, *arrivals, "--log", log)
    ended = headgate("calibrate", log, "--out", out)
    assert "try it" not in ended.out
    assert f"written: {out}; to simulate it, write the requests of the log: --trace" in ended.out
    trace = tmp_path / "out.csv"
    ended = headgate("calibrate", log, "--out", out, "--trace", trace)
    assert f"try it: headgate simulate {out} --trace {trace}" in ended.out
    assert headgate("simulate", out, "--trace", trace).code == 0


def test_the_calibrated_application_simulates_the_log(log: Path, tmp_path: Path) -> None:
    """Other factors are drawn, so the numbers differ a little."""
    app, trace = tmp_path / "day.yaml", tmp_path / "day.csv"
    ended = headgate("calibrate", log, "--out", app, "--trace", trace, "--client-overhead", "0.5ms")
    assert f"headgate simulate {app} --trace {trace}" in ended.out
    before = headgate("simulate", tmp_path / "app.yaml", "--json").json
    after = headgate("simulate", app, "--trace", trace, "--json").json
    assert after["requests"] == before["requests"]
    assert after["settings"] == {"default_deadline_factor": 8.0}
    assert after["p50_ms"] == pytest.approx(before["p50_ms"] + 0.5, rel=0.1)
    assert after["slo_attainment"] == pytest.approx(before["slo_attainment"], abs=0.02)
    by_client = {row["name"]: row["requests"] for row in after["clients"]}
    assert by_client == {row["name"]: row["requests"] for row in before["clients"]}


def test_the_calibrated_file_has_no_defaults(log: Path, tmp_path: Path) -> None:
    headgate("calibrate", log, "--out", tmp_path / "day.yaml")
    written = yaml.safe_load((tmp_path / "day.yaml").read_text())
    assert written["functions"]["resnet"] == {"exec_time": "5ms", "cold_start": "20ms"}
    assert set(written["simulation"]) == {"service_times"}
    assert "serve" not in written


def test_starts_take_as_long_as_in_the_log(log: Path, tmp_path: Path) -> None:
    """Not as long as the header says: a live worker has loaded its functions before the log."""
    header, *lines = log.read_text().splitlines()
    slower = json.loads(header)
    slower["app"]["functions"]["resnet"]["cold_start"] = "3s"
    write(tmp_path / "live.log", "\n".join([json.dumps(slower), *lines]) + "\n")
    headgate("calibrate", tmp_path / "live.log", "--out", tmp_path / "day.yaml")
    written = yaml.safe_load((tmp_path / "day.yaml").read_text())
    assert written["functions"]["resnet"]["cold_start"] == "20ms"


def test_observed_factors_are_drawn_equally_often() -> None:
    truth = {"distribution": "observed", "observed": {"f": [0.5, 1.0, 3.0, 3.5]}}
    config = declare(
        {"f": {"exec_time": "1s"}, "g": {"exec_time": "1s"}},
        {},
        simulation={"service_times": truth},
    )
    drawn, again = (GroundTruth(ground_truth_config(config.simulation), seed=5) for _ in range(2))
    f, g = config.app.variants
    times = [drawn.exec_ns(f, 1) for _ in range(10_000)]
    assert times == [again.exec_ns(f, 1) for _ in range(10_000)]
    counts = [times.count(round(factor * 1e9)) for factor in (0.5, 1.0, 3.0, 3.5)]
    assert sum(counts) == 10_000
    assert all(2_300 < count < 2_700 for count in counts)
    assert drawn.exec_ns(g, 1) == 1_000_000_000


def test_observed_factors_depend_on_the_batch_size() -> None:
    """A size that is not given has the factors of the next smaller one, or else of the first."""
    observed = {"f": {2: [3.0], 4: [0.5]}}
    config = declare(
        {"f": {"exec_time": ["1s"] * 6}},
        {},
        simulation={"service_times": {"distribution": "observed", "observed": observed}},
    )
    drawn = GroundTruth(ground_truth_config(config.simulation), seed=5)
    times_s = [drawn.exec_ns(config.app.variants[0], items) / 1e9 for items in range(1, 7)]
    assert times_s == [3.0, 3.0, 3.0, 0.5, 0.5, 0.5]


def test_client_overheads_are_drawn_for_each_request(log: Path, tmp_path: Path) -> None:
    app, trace = tmp_path / "day.yaml", tmp_path / "day.csv"
    spread = {}
    for overhead in ("2ms", "1ms,3ms"):
        headgate("calibrate", log, "--out", app, "--trace", trace, "--client-overhead", overhead)
        spread[overhead] = headgate("simulate", app, "--trace", trace, "--json").json
    same, two = spread.values()
    assert two["mean_ms"] == pytest.approx(same["mean_ms"], rel=0.05)
    assert two["p99_ms"] != same["p99_ms"]


def test_bad_input(log: Path, tmp_path: Path) -> None:
    assert "would be overwritten" in headgate("calibrate", log, "--trace", log).err
    both = tmp_path / "both"
    assert "--trace: " in headgate("calibrate", log, "--out", both, "--trace", both).err
    assert not both.exists()
    assert "--client-overhead" in headgate("calibrate", log, "--client-overhead", "fast").err
    ended = headgate("calibrate", log, "--out", tmp_path / "nowhere" / "app.yaml")
    assert (ended.code, "--out" in ended.err) == (2, True)
    lines = log.read_text().splitlines()
    write(tmp_path / "short.log", "\n".join(lines[:2]) + "\n")
    ended = headgate("calibrate", tmp_path / "short.log")
    assert (ended.code, "nothing to calibrate with" in ended.err) == (2, True)
    arrived = next(json.loads(line) for line in lines[1:] if '"RequestArrived"' in line)
    arrived[0], arrived[2][2] = 0, 77
    write(tmp_path / "lies.log", f"{lines[0]}\n{json.dumps(arrived)}\n")
    ended = headgate("calibrate", tmp_path / "lies.log")
    assert (ended.code, "lies.log:2: pipeline: 77: does not exist" in ended.err) == (
        2,
        True,
    )


@pytest.mark.parametrize("keep", [1_000, 3])
def test_the_remaining_segments_of_a_rotated_log_are_read(log: Path, keep: int) -> None:
    path = rotated(log, size_bytes=15_000, keep=keep)
    whole = headgate("calibrate", log, "--json").json
    found = headgate("calibrate", path, "--json").json
    if keep == 1_000:
        assert {**found, "log": ""} == {**whole, "log": ""}
        return
    assert 0 < found["requests"] < whole["requests"]
    assert "are gone, and with that the first" in found["missing"]
    assert "are gone, and with that the first" in headgate("calibrate", path).out
    assert found["functions"][0]["mean"] == pytest.approx(1.0, rel=0.1)
