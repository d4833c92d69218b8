"""`headgate simulate`: its output, its inputs and the files it writes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_rig import APP, EXAMPLES, KAAS, headgate, write

KEYS = {
    *("requests", "met", "late", "rejected", "expired", "failed", "cancelled"),
    *("slo_attainment", "goodput_rps", "p50_ms", "p99_ms", "mean_wait_ms", "cold_starts"),
    *("cost_usd", "sim_requests_per_s", "seed", "policy"),
}
BERT = ("--arrivals", "deterministic:rate=10/s,pipeline=bert")


def test_json_has_the_summary() -> None:
    ended = headgate("simulate", KAAS, "--duration", "2", "--json")
    assert (ended.code, ended.err) == (0, "")
    found = ended.json
    assert set(found) >= KEYS
    assert (found["policy"], found["seed"]) == ("balance", 0)
    outcomes = ("met", "late", "rejected", "expired", "failed", "cancelled")
    assert sum(found[outcome] for outcome in outcomes) == found["requests"] > 500
    assert found["sim_requests_per_s"] > 0


def test_misses_at_the_start_are_named(tmp_path: Path) -> None:
    """Two requests come while the first instance starts; without its cold start all are in time."""
    text = "functions: {bert: {exec_time: 5ms, cold_start: 250ms}}\nslo: {latency: 200ms}\n"
    arrivals = ("--arrivals", "deterministic:rate=20/s", "--duration", "1s", "--policy", "balance")
    out = headgate("simulate", write(tmp_path / "app.yaml", text), *arrivals).out
    late = re.search(r"^late +(\d+)", out, re.MULTILINE)
    assert late is not None
    assert f"{late[1]} of the {late[1]} misses are of requests that arrived before" in out
    warm = write(tmp_path / "warm.yaml", text.replace("250ms", "0s"))
    assert "misses are" not in headgate("simulate", warm, *arrivals).out


def test_a_command_to_type_has_its_file_in_quotes(tmp_path: Path) -> None:
    log = tmp_path / "a day.log"
    out = headgate("simulate", KAAS, "--duration", "100ms", "--log", log).out
    assert f"replay with: headgate replay '{log}'" in out


def test_nan_is_null() -> None:
    nobody = ("--arrivals", "poisson:rate=0.001/h,pipeline=bert", "--duration", "1ms")
    found = headgate("simulate", KAAS, *nobody, "--json").json
    assert (found["requests"], found["p99_ms"], found["slo_attainment"]) == (0, None, None)
    table = headgate("simulate", KAAS, *nobody).out
    assert re.search("SLO attainment +- ", table) and "100.00" not in table


def test_rates_of_a_closed_loop_are_over_the_time_it_took() -> None:
    """A hundred requests take seconds, and the hour in which they could have been sent no time."""
    loop = "closed:clients=2,requests=100,pipeline=bert"
    found = headgate("simulate", KAAS, "--arrivals", loop, "--duration", "1h", "--json").json
    assert found["requests"] == 100
    assert found["throughput_rps"] == pytest.approx(1e5 / found["makespan_ms"], rel=0.01)
    assert found["window_ms"] == pytest.approx(found["makespan_ms"], rel=0.01)
    timed = headgate("simulate", KAAS, "--arrivals", loop, "--duration", "100ms", "--json").json
    assert (timed["requests"] < 100, timed["window_ms"]) == (True, 100.0)


def test_the_seed_determines_the_result() -> None:
    def simulate(seed: int) -> dict[str, Any]:
        found = headgate("simulate", KAAS, "--duration", "1", "--seed", seed, "--json").json
        del found["sim_requests_per_s"]
        return dict(found)

    assert simulate(1) == simulate(1)
    assert simulate(1)["mean_wait_ms"] != simulate(2)["mean_wait_ms"]


def test_streams_of_the_same_kind_are_independent(tmp_path: Path) -> None:
    """Two Poisson streams of one seed must not bring their requests at the same instants."""
    stream = "{pipeline: bert, process: 'poisson:rate=20/s'}"
    workload = f"workload: {{duration: 2s, arrivals: [{stream}, {stream}]}}\n"
    app = write(tmp_path / "app.yaml", APP + workload)
    log = tmp_path / "run.log"
    headgate("simulate", app, "--log", log)
    entries = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    arrivals = [entry[1] for entry in entries if entry[2][0] == "RequestArrived"]
    assert len(set(arrivals)) == len(arrivals) > 40


def test_settings_of_the_file_and_of_the_command_line(tmp_path: Path) -> None:
    app = write(tmp_path / "app.yaml", APP.replace(": balance", ": {name: mlfq, bucket_ratio: 4}"))
    own = headgate("simulate", app, *BERT, "--duration", "1", "--json").json
    assert (own["policy"], own["settings"]) == ("mlfq", {"bucket_ratio": 4})
    options = ("--set", "bucket_ratio=8", "--set", "clairvoyant=true", *BERT, "--json")
    given = headgate("simulate", app, *options, "--duration", "1").json
    assert given["settings"] == {"bucket_ratio": 8, "clairvoyant": True}
    other = headgate("simulate", app, *BERT, "--duration", "1", "--policy", "srtf", "--json").json
    assert (other["policy"], other["settings"]) == ("srtf", {})


def test_requests_are_announced_to_a_clairvoyant_policy(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    common = ("simulate", KAAS, "--duration", "100ms", "--policy", "srtf", "--log", log)
    headgate(*common, "--set", "clairvoyant=true")
    assert '["RequestAnnounced"' in log.read_text()
    headgate(*common)
    assert '["RequestAnnounced"' not in log.read_text()


def test_a_trace_by_name_cut_to_a_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{second}.5,bert\n" for second in range(10))
    write(tmp_path / "ten.csv", f"time,pipeline\n{rows}")
    common = ("simulate", KAAS, "--trace", "ten", "--json")
    assert headgate(*common, "--traces", tmp_path).json["requests"] == 10
    monkeypatch.setenv("HEADGATE_TRACES", str(tmp_path))
    assert headgate(*common, "--duration", "4").json["requests"] == 4
    assert headgate(*common, "--duration", "1h").json["requests"] == 10


def test_a_trace_in_the_file(tmp_path: Path) -> None:
    """The pipeline and client of the stream replace those of the trace."""
    trace = write(tmp_path / "t.csv", "time,pipeline\n0.5,other\n0.7,another\n")
    stream = f"workload: {{arrivals: [{{pipeline: bert, process: 'trace:{trace}'}}]}}\n"
    found = headgate("simulate", write(tmp_path / "app.yaml", APP + stream), "--json").json
    assert [(p["name"], p["requests"]) for p in found["pipelines"]] == [("resnet", 0), ("bert", 2)]


def test_an_unsorted_trace_can_be_sorted(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", "time,pipeline\n1.0,bert\n0.5,resnet\n")
    assert headgate("simulate", KAAS, "--trace", trace, "--sort", "--json").json["met"] == 2


def test_any_pipeline_in_a_trace_stands_for_the_only_one(tmp_path: Path) -> None:
    app = "functions: {f: {exec_time: 5ms}}\npools: {gpu: {}}\n"
    trace = write(tmp_path / "t.csv", "time,pipeline,client\n0.5,a,x\n0.7,b,y\n")
    found = headgate("simulate", write(tmp_path / "app.yaml", app), "--trace", trace, "--json").json
    assert [(p["name"], p["requests"]) for p in found["pipelines"]] == [("f", 2)]


def test_several_arrivals_and_closed_loops_together() -> None:
    options = ("--arrivals", "closed:clients=3,pipeline=bert,client=language", *BERT)
    found = headgate("simulate", KAAS, *options, "--duration", "2", "--json").json
    by_client = {client["name"]: client["requests"] for client in found["clients"]}
    assert by_client["vision"] == 20  # who is not named is the first client
    assert by_client["language"] > 200  # 3 clients that wait 20 ms each, and 10 ms at first
    assert found["window_ms"] == 2_000


def test_a_pipeline_with_overheads_and_random_service_times() -> None:
    app = EXAMPLES / "ensemble.yaml"
    found = headgate("simulate", app, "--duration", "1", "--validate", "--json").json
    assert found["requests"] > 20
    assert found["failed"] == 0


def test_an_application_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module:app` is found in the working directory."""
    functions, pools = {"f": {"exec_time": "5ms"}}, {"gpu": {"nodes": 2}}
    source = f"from headgate.config import declare\napp = declare({functions}, {pools})\n"
    write(tmp_path / "declared_here.py", source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    options = ("--arrivals", "poisson:rate=50/s", "--duration", "1", "--json")
    assert headgate("simulate", "declared_here:app", *options).json["met"] > 10


def test_the_report(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "report"
    ended = headgate("simulate", KAAS, "--duration", "1", "--report", directory)
    assert f"report: {directory / 'report.html'}" in ended.out
    written = {path.name for path in directory.iterdir()}
    assert {"report.html", "summary.json", "trace.json", "schedule.png"} <= written
    meta = json.loads((directory / "summary.json").read_text())["meta"]
    assert (meta["policy"], meta["seed"]) == ("balance", 0)


def test_tables_without_colour() -> None:
    ended = headgate("simulate", KAAS, "--duration", "1")
    assert ended.err == ""
    assert "\x1b" not in ended.out
    for title in ("SLO attainment", "Pipelines", "Clients", "Resources", "simulated in "):
        assert title in ended.out
    assert all(line == line.rstrip() for line in ended.out.splitlines())


def test_observed_admission_counts_what_it_would_reject(tmp_path: Path) -> None:
    """Under five times its capacity: rejected where enforced, counted and run where observed."""
    app = write(
        tmp_path / "app.yaml",
        "functions: {f: {exec_time: 10ms}}\npools: {gpu: {tier: gpu}}\nslo: {latency: 50ms}\n",
    )
    load = ("--arrivals", "poisson:rate=500/s,pipeline=f", "--duration", "1", "--json")
    enforced = headgate("simulate", app, *load).json
    assert enforced["rejected"] > 100 and enforced["would_reject"] == 0
    log = tmp_path / "run.log"
    observed = headgate("simulate", app, *load, "--admission", "observe", "--log", log).json
    assert (observed["rejected"], observed["requests"]) == (0, enforced["requests"])
    assert observed["would_reject"] == observed["pipelines"][0]["would_reject"] > 100
    assert observed["admitted_kept"] < 0.5 < enforced["admitted_kept"]
    replayed = headgate("replay", log, "--json")
    assert replayed.code == 0, replayed.err
    text = headgate("simulate", app, *load[:-1], "--admission", "observe").out
    assert "would reject" in text


def test_several_gateways_share_the_load_and_the_log_is_that_of_the_first(tmp_path: Path) -> None:
    app, log = EXAMPLES / "frontends.yaml", tmp_path / "run.log"
    run = ("simulate", app, "--duration", "3s", "--json")
    alone = headgate(*run, "--log", log).json
    all_arrivals = log.read_text().count('"RequestArrived"')
    shared = headgate(*run, "--gateways", 3, "--log", log).json
    assert alone["requests"] == shared["requests"] == shared["met"]
    assert 0 < log.read_text().count('"RequestArrived"') < all_arrivals / 2
    assert '"index":0,"peers":3' in log.read_text().splitlines()[0]
    assert headgate("replay", log, "--json").json["is_identical"]


def test_the_concurrency_of_a_platform_is_divided_among_gateways_and_not_lost(
    tmp_path: Path,
) -> None:
    """Calls of 100 ms, 30 per second: three of four at once, of which each gateway has one."""
    app = write(
        tmp_path / "app.yaml",
        """
        functions: {f: {exec_time: 100ms, pools: [cloud]}}
        pools:
          cloud: {tier: serverless, memory: 1GB, price: $0.00001/GB-s, concurrency: 4}
        """,
    )
    run = ("simulate", app, "--arrivals", "deterministic:rate=30/s", "--duration", "3s", "--json")
    log = tmp_path / "run.log"
    found = headgate(*run, "--gateways", 4, "--log", log).json
    assert found["met"] == found["requests"]
    assert found["makespan_ms"] < 6000  # with one call at a time, 9 s
    assert headgate("replay", log, "--json").json["is_identical"]


def test_a_policy_that_cannot_share_its_nodes_is_refused_for_several_gateways() -> None:
    ended = headgate("simulate", EXAMPLES / "frontends.yaml", "--policy", "srtf", "--gateways", 2)
    line = (
        "headgate: error: --gateways: 2: policy srtf does not support several gateways (allowed: 1"
    )
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(line)
