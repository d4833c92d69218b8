"""Bad input is one line on stderr that says where, what and what is allowed; and exit status 2."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest
from cli_rig import APP, EXAMPLES, KAAS, headgate, write

ONE = """
functions: {resnet: {exec_time: 5ms}}
slo: {latency: 1s}
pools: {gpu: {nodes: 1}}
policy: balance
"""


def error_line(*arguments: object) -> str:
    """Run a command that must be refused, and return its error line."""
    ended = headgate(*arguments)
    lines = ended.err.splitlines()
    assert (ended.code, ended.out, len(lines)) == (2, "", 1), ended
    assert lines[0].startswith("headgate: error: ")
    return lines[0].removeprefix("headgate: error: ")


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("nodes: 2", "nodez: 2", "pools.gpu: 'nodez': unknown key, did you mean nodes?"),
        (
            "exec_time: 5ms",
            "exec_time: -5ms",
            "functions.resnet.exec_time: '-5ms': must not be negative",
        ),
        ("exec_time: 5ms", "exec_time: 5", "functions.resnet.exec_time: 5"),
        ("memory: 1GB", "memory: 99GB", "functions.bert.memory: '99GB': exceeds every pool"),
        (": balance", ": balanec", "policy: 'balanec': unknown policy, did you mean balance?"),
        (": balance", ": {name: balance, batch: 2}", "policy: 'batch': unknown setting"),
    ],
)
def test_the_application_file(tmp_path: Path, written: str, instead: str, message: str) -> None:
    app = write(tmp_path / "app.yaml", APP.replace(written, instead))
    for command in ("simulate", "compare", "check"):
        if command != "compare" or "policy" not in message:  # which brings its own
            line = error_line(command, app, *_some_arrivals(command))
            assert line.startswith(f"{app}: {message}"), line
            assert "(allowed: " in line


def _some_arrivals(command: str) -> list[str]:
    return [] if command == "check" else ["--arrivals", "poisson:rate=5/s,pipeline=resnet"]


def test_a_pipeline_with_a_cycle(tmp_path: Path) -> None:
    stages = "stages: {x: {function: bert, after: [y]}, y: {function: bert, after: [x]}}"
    app = write(tmp_path / "app.yaml", f"{APP}pipelines: {{p: {{{stages}}}}}\n")
    message = "pipelines.p.stages: form a cycle: x -> y -> x (allowed: no cycles)"
    assert error_line("simulate", app) == f"{app}: {message}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1.0,resnet\n0.5,resnet\n", ":3: time: '0.5': is earlier than the previous row"),
        ("1.0,resnet\n1.5", ":3: the row has 1 cells, the header 2"),
        ("-1.0,resnet\n", ":2: time: '-1.0': must not be negative"),
        ("1.0,vgg\n", ": pipeline: 'vgg': unknown pipeline (allowed: resnet, bert)"),
        ("", ": has a header but no rows"),
    ],
)
def test_a_trace(tmp_path: Path, rows: str, message: str) -> None:
    app = write(tmp_path / "app.yaml", APP)
    trace = write(tmp_path / "trace.csv", f"time,pipeline\n{rows}")
    assert error_line("simulate", app, "--trace", trace).startswith(f"{trace}{message}")


def test_a_compressed_trace_that_was_cut_off(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv.gz"
    rows = "".join(f"{second * 1.37},resnet\n" for second in range(5_000))
    trace.write_bytes(gzip.compress(f"time,pipeline\n{rows}".encode())[:-2_000])
    assert "truncated or damaged" in error_line("simulate", KAAS, "--trace", trace)


def test_a_trace_that_names_no_pipeline_where_there_are_several(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.csv", "time\n1.0\n")
    message = f"{trace}: pipeline: names no pipeline (allowed: resnet, bert)"
    assert error_line("simulate", KAAS, "--trace", trace) == message


def test_a_request_larger_than_any_batch(tmp_path: Path) -> None:
    """Such a request could never be dispatched, so it is refused at the start."""
    trace = write(tmp_path / "trace.csv", "time,pipeline,items\n1.0,resnet,3\n")
    line = error_line("simulate", KAAS, "--trace", trace)
    assert line.startswith(f"{trace}: items: 3: exceeds the largest batch of function resnet")


def test_no_requests_at_all(tmp_path: Path) -> None:
    app = write(tmp_path / "app.yaml", APP)
    line = error_line("simulate", app)
    assert line.startswith(f"{app}: workload.arrivals: there are no requests to send")
    assert "--trace FILE" in line


def test_arrivals_of_the_file(tmp_path: Path) -> None:
    stream = "workload: {arrivals: [{pipeline: bert, process: 'poison:rate=5/s'}]}"
    app = write(tmp_path / "app.yaml", f"{APP}{stream}\n")
    for command in ("simulate", "check"):
        message = f"{app}: workload.arrivals[0].process: 'poison': unknown kind of arrivals"
        assert error_line(command, app).startswith(message)


def test_names_that_are_written_must_exist_even_where_there_is_only_one(tmp_path: Path) -> None:
    """Any name in a trace stands for the only pipeline, but not a name on the command line."""
    app = write(tmp_path / "app.yaml", ONE)
    for kind in ("poisson:rate=5/s", "closed:clients=1"):
        for noun, known in (("pipeline", "resnet"), ("client", "client")):
            spec = f"{kind},{noun}=zz"
            message = f"{noun}: 'zz': unknown {noun} (allowed: {known})"
            assert (
                error_line("simulate", app, "--arrivals", spec) == f"--arrivals {spec}: {message}"
            )
        assert headgate("simulate", app, "--duration", "1", "--arrivals", kind).code == 0
    trace = write(tmp_path / "trace.csv", "time,pipeline\n1.0,zz\n")
    assert headgate("simulate", app, "--trace", trace).code == 0


@pytest.mark.parametrize("name", ["pipeline=resnet", "client=zz"])
def test_a_stream_that_contradicts_itself(tmp_path: Path, name: str) -> None:
    stream = f"workload: {{arrivals: [{{pipeline: bert, process: 'poisson:rate=5/s,{name}'}}]}}"
    app = write(tmp_path / "app.yaml", f"{APP}{stream}\n")
    noun, _, message = name.partition("=")
    where = f"{app}: workload.arrivals[0].process: {noun}: '{message}'"
    assert error_line("simulate", app).startswith(f"{where}: differs from the {noun} of the stream")


def test_a_log_does_not_overwrite_an_input(tmp_path: Path) -> None:
    """Nor by another name of the same file."""
    app = write(tmp_path / "app.yaml", APP)
    trace = write(tmp_path / "trace.csv", "time,pipeline\n1.0,resnet\n")
    (tmp_path / "link").symlink_to(trace)
    for log in (app, trace, tmp_path / "link"):
        line = error_line("simulate", app, "--trace", trace, "--log", log)
        assert line.startswith(f"--log: '{log}': is an input of the command")
    assert Path(trace).read_text(encoding="utf-8").startswith("time")
    assert Path(app).read_text(encoding="utf-8") == APP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "srft"], "--policy: 'srft': unknown policy, did you mean srtf?"),
        (["--arrivals", "poisson:rate=5"], "--arrivals: poisson.rate: '5': needs a unit"),
        (["--arrivals", "poisson:rate=5/s"], "--arrivals poisson:rate=5/s: pipeline: names no"),
        (["--trace", "a", "--arrivals", "b"], "--trace: 'a': cannot be given together"),
        (["--trace", "nosuch"], "--trace: trace: 'nosuch': no such file"),
        (["--traces", "/nosuch", "--trace", "t"], "/nosuch: no such directory of traces"),
        (["--set", "batch_max"], "--set: 'batch_max': is not a setting (allowed: KEY=VALUE)"),
        (["--set", "batch=2"], "--set: policy: 'batch': unknown setting"),
        (["--set", "batch_max=two"], "--set: policy.batch_max: 'two': is text"),
        (["--set", "batch_max=[2"], "--set: batch_max: '[2': is not YAML"),
        (["--duration", "0"], "--duration: '0': must be longer than zero"),
        (["--duration", "-5"], "--duration: '-5s': must not be negative"),
        (["--duration", "5 parsecs"], "--duration: '5 parsecs': "),
        (["--duration", "1e400s"], "--duration: '1e400s': has too many digits"),
        (["--seed", "-1"], "simulate: Invalid value for '--seed': -1"),
        (["--log", "/nosuch/run.log"], "--log: '/nosuch/run.log': cannot be written"),
        (["--report", f"{KAAS}/report"], f"--report: '{KAAS}/report': cannot be written"),
        (["--log", ""], "simulate: Invalid value for '--log': the name is empty."),
        (["--report", ""], "simulate: Invalid value for '--report': the name is empty."),
        (["--set", "batch_max=1e308"], "--set: policy.batch_max: is not a finite number"),
        (["--nosuch"], "simulate: No such option"),
        (["more"], "simulate: Got unexpected extra argument"),
    ],
)
def test_options(options: list[str], message: str) -> None:
    assert error_line("simulate", KAAS, *options).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulat"], "'simulat': unknown command, did you mean simulate? (allowed: bench, "),
        (["--nosuch"], "No such option"),
        (["simulate"], "simulate: Missing argument 'APP'."),
        (["simulate", "nosuch.yaml"], "nosuch.yaml: cannot be read: No such file or directory"),
        (["simulate", "no_such:app"], "no_such:app: cannot be imported: No module named"),
        (["compare", KAAS, "--policies", "a,b"], "--policies: 'a': unknown policy"),
        (["compare", KAAS, "--policies", "srtf,srtf"], "--policies: 'srtf': is named twice"),
        (["compare", KAAS, "--set", "batch_max=2"], "--set: 'batch_max': does not name its policy"),
        (["compare", KAAS, "--set", "lifo.x=2"], "--set: 'lifo': unknown policy"),
        (["replay", "nosuch.log"], "nosuch.log: cannot be read: No such file or directory"),
        (["replay", KAAS], f"{KAAS}:1: is not an event log (allowed: what `headgate serve --log"),
        (["compare", KAAS, "--policies", ","], "--policies: ',': names none (allowed: names of"),
        (["simulate", KAAS, "--duration", "0"], "--duration: '0': must be longer than zero (allow"),
        (["reproduce", "nosuch"], "experiment: 'nosuch': unknown experiment (allowed: "),
        (["reproduce", "kaas-traces", "--all"], "reproduce: Give a NAME or --all, not both."),
        (["bench", "nosuch"], "'nosuch': unknown benchmark (allowed: "),
        (["fuzz"], "fuzz: Missing option '--policy'."),
        (["demo"], "demo: Missing command. Try: headgate demo --help"),
        (["fuzz", "--policy", "nosuch"], "--policy: 'nosuch': unknown policy (allowed: "),
    ],
)
def test_commands(arguments: list[str], message: str) -> None:
    assert error_line(*arguments).startswith(message)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("raises", "raise ValueError('boom\\nand more')", "ValueError: boom and more"),
        ("unclosed", "app = (", "SyntaxError: '(' was never closed"),
        ("empty", "from headgate.config import declare\ndeclare({}, {})", "functions: is empty"),
        ("other", "other = 1", "has no attribute 'app'"),
    ],
)
def test_a_module_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, message: str
) -> None:
    """The user's own code failed, so the error names its line and there is no traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path / f"app_that_{name}.py", source)
    assert message in error_line("simulate", f"app_that_{name}:app")


def test_a_policy_that_does_not_support_the_application() -> None:
    app = str(EXAMPLES / "burst.yaml")
    line = error_line("simulate", app, "--policy", "balance")
    assert line.startswith(f"{app}: pools.lambda: policy balance does not support serverless pools")


def test_files_of_another_kind(tmp_path: Path) -> None:
    """What one command writes is given to another: one line of it says what to do."""
    log, trace = str(tmp_path / "run.log"), str(tmp_path / "trace.csv")
    headgate("simulate", KAAS, "--duration", "1s", "--log", log)
    headgate("calibrate", log, "--out", tmp_path / "app.yaml", "--trace", trace)
    assert error_line("simulate", log).startswith(f"{log}: is an event log (allowed: an applicat")
    line = error_line("simulate", KAAS, "--trace", log)
    assert line.startswith(f"{log}: is an event log (allowed: a trace; `headgate calibrate {log} ")
    assert error_line("replay", trace).startswith(f"{trace}:1: is not an event log")
    line = error_line("simulate", trace)
    assert line.startswith(f"{trace}: 'arrival_ns,") and len(line) < 600
    assert "(allowed: the number of a request" in error_line("replay", log, "--request", "9999999")


@pytest.mark.parametrize("command", ["simulate", "check"])
def test_a_policy_about_functions_where_there_are_none(tmp_path: Path, command: str) -> None:
    text = "functions: {f: {exec_time: 5ms}}\npools: {cpu: {}}\npolicy: serverless_only\n"
    app = write(tmp_path / "app.yaml", text)
    problem = "pools: policy serverless_only needs a serverless pool, and there is none"
    assert error_line(command, app).startswith(f"{app}: {problem} (allowed: a pool with `tier: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tls-certificate", "missing.pem"), "serve.tls_certificate: '{}/missing.pem': cannot"),
        (("--tls-certificate", "app.yaml"), "serve.tls_certificate: '{}/app.yaml': is not a cert"),
        (("--log", "app.yaml"), "app.yaml: --log: exists and is not an event log (allowed: a new"),
        (("--log", "."), ".: --log: is a directory"),
        (("--port", "-1"), "--port: -1: is not valid (allowed: a whole number from 0 to 65535)"),
        (("--policy", "srft"), "--policy: 'srft': unknown policy, did you mean srtf?"),
        (("--log", "missing/run.log"), "missing/run.log: --log: cannot be written: missing is not"),
    ],
)
def test_files_of_a_server_are_checked_before_models_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    """The model does not exist: had it been loaded, the error would be about it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "app.yaml", "functions: {f: {model: nosuch.onnx}}\n")
    assert message.format(tmp_path) in error_line("serve", "app.yaml", *options)


def test_check_reports_what_simulate_would(tmp_path: Path) -> None:
    """If the file names a policy; without one, a file that no policy supports is still valid."""
    text = (EXAMPLES / "burst.yaml").read_text(encoding="utf-8")
    app = write(tmp_path / "app.yaml", f"{text}policy: balance\n")
    assert error_line("check", app) == error_line("simulate", app)
