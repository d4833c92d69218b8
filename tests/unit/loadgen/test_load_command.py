"""`headgate load`: its output, its files, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from load_server import Response, serving

from headgate.cli.main import cli
from headgate.core.clock import SECOND_NS
from headgate.loadgen.loops import run_open_loop
from headgate.loadgen.requests import Body, LoadOptions
from headgate.loadgen.results import summarise_load
from headgate.workload import deterministic


def load(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli, ["load", *map(str, arguments)])


def test_output_has_outcomes_and_latencies() -> None:
    with serving(lambda number: Response(429 if number % 4 == 3 else 200)) as server:
        ended = load(
            server.url, "--model", "echo", "--arrivals", "deterministic:rate=100/s", "--duration", 1
        )
    assert ended.exit_code == 0, ended.output
    lines = {
        line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines() if line.strip()
    }
    assert lines["met"] == ["75", "75.00"]
    assert lines["rejected"][:1] == ["after"]
    assert "open loop" in ended.stdout
    assert "send lag" in ended.stdout


def test_json_and_report(tmp_path: Path) -> None:
    """The report is that of simulated runs, with the measurements of the client."""
    with serving() as server:
        ended = load(
            server.url,
            *("--model", "echo", "--binary", "--slo-ms", "60000", "--report", tmp_path / "out"),
            *("--arrivals", "deterministic:rate=50/s", "--duration", "0.2", "--json"),
        )
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert (found["requests"], found["met"]) == (10, 10)
    assert found["load"]["answers"] == {"200": 10}
    assert found["p99_ms"] >= found["p50_ms"] > 0
    assert (tmp_path / "out" / "report.html").exists()
    assert b'"binary_data_size":32' in server.bodies[0]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (429, 1), (500, 1)])
def test_exit_status_is_1_if_no_request_had_a_result(status: int, code: int) -> None:
    options = ("--arrivals", "deterministic:rate=50/s", "--duration", "0.1", "--json")
    with serving(lambda number: Response(status)) as server:
        ended = load(server.url, "--model", "echo", *options)
    assert (ended.exit_code, json.loads(ended.stdout)["requests"]) == (code, 5)


def test_a_closed_loop_warns() -> None:
    with serving() as server:
        ended = load(server.url, "--model", "echo", "--concurrency", 2, "--duration", "0.2")
    assert ended.exit_code == 0, ended.output
    assert "hides queueing" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "there are no requests to send"),
        (("--arrivals", "poisson:rate=1/s", "--concurrency", "1"), "cannot be given together"),
        (("--arrivals", "closed:clients=2"), "is a closed loop"),
        (("--arrivals", "poisson:rate=x"), "--arrivals"),
        (("--concurrency", "1", "--header", "nothing"), "is not a header"),
        (("--concurrency", "1", "--payload", "no/such/file"), "cannot be read"),
        (("--concurrency", "1", "--model", "m"), "cannot be reached"),
        *(
            (("--concurrency", "1", option, value), f"Invalid value for '{option}'")
            for option in ("--timeout-ms", "--slo-ms")
            for value in ("nan", "inf", "1e300", "0")
        ),
    ],
)
def test_bad_input_is_a_one_line_error(arguments: tuple[str, ...], problem: str) -> None:
    ended = load("http://127.0.0.1:1", *arguments)
    assert ended.exit_code == 2
    assert problem in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_one_process_sends_thousands_a_second() -> None:
    """Half a second at 4,000/s, all answered; benchmarks measure the latency."""
    body = Body(b'{"x":[1,2,3,4,5,6,7,8]}', {"Content-Type": "application/json"})
    with serving() as server:
        arrivals = deterministic(4_000, SECOND_NS // 2)
        result = run_open_loop(f"{server.url}/x", arrivals, LoadOptions(body=body))
    summary = summarise_load(result)
    assert summary.answers == {"200": 2_000}
