"""Unmeasured functions are not simulated, and unreachable objectives are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import EXAMPLES, headgate, write

from headgate.core.event_log import read_log

UNMEASURED = """
functions:
  known: {exec_time: 3ms}
  new: {model: new.onnx, batch_max: 4}
pools: {cpu: {tier: dedicated}}
policy: balance
workload: {duration: 1s, arrivals: [{pipeline: new, process: "deterministic:rate=20/s"}]}
"""
IMPOSSIBLE = """
functions: {a: {exec_time: 5ms}, b: {exec_time: 7ms}}
pipelines: {p: {stages: {b: {function: b, after: [a]}, a: {function: a}}}}
slo: {latency: 10ms}
pools: {cpu: {tier: dedicated}}
workload: {duration: 1s, arrivals: [{pipeline: p, process: "deterministic:rate=20/s"}]}
"""
PROBLEM = (
    "slo.latency: '10ms': is below the critical path of pipeline p, 12ms: a 5ms -> b 7ms "
    "(allowed: 12ms or longer)\n"
)


@pytest.fixture
def unmeasured(tmp_path: Path) -> str:
    return write(tmp_path / "app.yaml", UNMEASURED)


def test_check_lists_unmeasured_functions(unmeasured: str) -> None:
    ended = headgate("check", unmeasured)
    assert ended.code == 0
    row = next(line for line in ended.out.splitlines() if line.startswith("new "))
    assert "not measured" in row
    assert "10ms" not in ended.out
    assert "not measured: new; headgate serve measures at start" in ended.out
    assert headgate("check", unmeasured, "--json").json["unmeasured"] == ["new"]
    known = headgate("check", EXAMPLES / "kaas.yaml")
    assert "not measured" not in known.out


def test_check_names_models_that_are_not_there(unmeasured: str, tmp_path: Path) -> None:
    ended = headgate("check", unmeasured)
    assert ended.code == 0, "it can be simulated"
    assert "not found: new.onnx; headgate serve needs these files" in ended.out
    assert headgate("check", unmeasured, "--json").json["models_not_found"] == ["new.onnx"]
    write(tmp_path / "new.onnx", "")
    assert "not found" not in headgate("check", unmeasured).out
    assert headgate("check", unmeasured, "--json").json["models_not_found"] == []


def test_check_names_code_that_is_not_there(tmp_path: Path) -> None:
    names = ["here:F", "pack.inner:F", "pack.none:F", "nowhere:F", "headgate.functions:Model"]
    functions = ", ".join(f"f{at}: {{code: '{name}'}}" for at, name in enumerate(names))
    app = write(tmp_path / "app.yaml", f"functions: {{{functions}}}")
    write(tmp_path / "here.py", "raise SystemExit('imported')")
    (tmp_path / "pack").mkdir()
    write(tmp_path / "pack" / "inner.py", "")
    assert headgate("check", app, "--json").json["code_not_found"] == ["pack.none:F", "nowhere:F"]
    assert "not found: pack.none:F, nowhere:F; headgate serve" in headgate("check", app).out


def test_check_names_a_batch_max_that_does_not_count(tmp_path: Path) -> None:
    text = "functions: {f: {code: 'json:loads', exec_time: 30ms, batch_max: 8}}"
    app = write(tmp_path / "app.yaml", text)
    why = (
        "functions.f: batch_max 8 counts only where times are measured; exec_time has those of "
        "batches of up to 1"
    )
    assert why in " ".join(headgate("check", app).out.split())
    for change in ("", "exec_time: {1: 30ms, 8: 60ms}"):
        write(tmp_path / "app.yaml", text.replace("exec_time: 30ms", change or "memory: 1MB"))
        assert "counts only" not in headgate("check", app).out


def test_check_refuses_gateways_that_the_policy_cannot_share_pools_with(tmp_path: Path) -> None:
    text = "functions: {f: {exec_time: 3ms}}\npolicy: affinity\nserve: {gateways: 2}"
    ended = headgate("check", write(tmp_path / "app.yaml", text))
    assert ended.code == 2
    assert "serve.gateways: 2: policy affinity does not support several gateways" in ended.err
    assert headgate("check", write(tmp_path / "app.yaml", text.replace("2}", "1}"))).code == 0


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_unmeasured_functions_are_not_simulated(unmeasured: str, command: str) -> None:
    ended = headgate(command, unmeasured)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"headgate: error: {unmeasured}: functions.new.exec_time: is not known: nobody has "
        f"measured it (allowed: exec_time: 5ms (run `headgate profile {unmeasured} --function "
        "new`), or --assume-exec-time 5ms)\n"
    )


def test_the_command_that_measures_names_a_function_where_there_are_several(
    unmeasured: str, tmp_path: Path
) -> None:
    """Without its name the command asks for one."""
    assert f"headgate profile {unmeasured} --function new now" in headgate("check", unmeasured).out
    alone = write(tmp_path / "alone.yaml", "functions: {new: {model: new.onnx}}")
    assert f"headgate profile {alone} now" in headgate("check", alone).out


def test_variants_are_named_with_their_function(tmp_path: Path) -> None:
    text = UNMEASURED.replace(
        "new: {model: new.onnx, batch_max: 4}", "new: {variants: {v: {code: m:F}}}"
    )
    ended = headgate("simulate", write(tmp_path / "app.yaml", text))
    assert "functions.new.variants.v.exec_time: is not known" in ended.err


def test_an_assumed_execution_time_is_used_and_shown(unmeasured: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    ended = headgate("simulate", unmeasured, "--assume-exec-time", "30ms", "--log", log)
    assert ended.code == 0, ended.err
    assert "assumed, because nobody has measured it: new 30ms" in ended.out
    header, entries = read_log(log)
    entries.close()
    assert isinstance(header.app["functions"], dict)
    assert header.app["functions"]["new"]["exec_time"] == ["30ms"] * 4
    output = headgate("simulate", unmeasured, "--assume-exec-time", "30ms", "--json").json
    assert output["assumed_exec_time"] == {"new": "30ms"}
    assert output["p50_ms"] >= 30
    compared = headgate(
        *("compare", unmeasured, "--policies", "balance", "--assume-exec-time", "30ms", "--json")
    )
    assert compared.json["assumed_exec_time"] == {"new": "30ms"}
    assert compared.json["runs"][0]["p50_ms"] == output["p50_ms"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("soon", "is not a number with a unit"), ("0s", "must be longer than zero")],
)
def test_an_assumed_execution_time_is_a_duration(unmeasured: str, text: str, message: str) -> None:
    ended = headgate("simulate", unmeasured, "--assume-exec-time", text)
    assert ended.code == 2
    assert ended.err.startswith(f"headgate: error: --assume-exec-time: {text!r}: {message}")


def test_check_refuses_an_unreachable_objective(tmp_path: Path) -> None:
    app = write(tmp_path / "app.yaml", IMPOSSIBLE)
    ended = headgate("check", app)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"headgate: error: {app}: {PROBLEM}"


def test_simulate_warns_of_an_unreachable_objective(tmp_path: Path) -> None:
    app = write(tmp_path / "app.yaml", IMPOSSIBLE)
    ended = headgate("simulate", app, "--json")
    assert ended.code == 0
    assert ended.err == f"headgate: warning: {app}: {PROBLEM}"
    assert ended.json["slo_attainment"] == 0.0
    assert headgate("compare", app, "--policies", "headgate").err == ended.err


def test_simulate_warns_of_limits_that_only_a_server_has(tmp_path: Path) -> None:
    """Ten times the rate of the client, and all of it is served: the gateway would refuse most."""
    text = """
functions: {f: {exec_time: 1ms}}
slo: {latency: 50ms}
clients: {a: {rate: 5/s}, b: {concurrency: 1}, c: {weight: 2}}
workload: {duration: 1s, arrivals: [{pipeline: f, client: a, process: "deterministic:rate=50/s"}]}
"""
    app = write(tmp_path / "app.yaml", text)
    limits = "rate and concurrency limit clients of headgate serve; a simulation ignores them"
    ended = headgate("simulate", app, "--json")
    assert (ended.code, ended.err) == (0, f"headgate: warning: {app}: clients: a, b: {limits}\n")
    assert ended.json["slo_attainment"] == 1.0


def test_pools_on_which_no_function_runs_are_named(tmp_path: Path) -> None:
    """The function is larger than a call of the platform: spillover that never happens."""
    text = """
functions: {f: {exec_time: 1ms, memory: 2GB}}
slo: {latency: 50ms}
pools: {cpu: {tier: dedicated}, faas: {tier: serverless, memory: 1769MiB}}
workload: {duration: 1s, arrivals: [{pipeline: f, process: "deterministic:rate=50/s"}]}
"""
    app = write(tmp_path / "app.yaml", text)
    why = "pools.faas: no function runs on it; each needs more than it has, or names other pools"
    ended = headgate("check", app)
    assert (ended.code, ended.err) == (0, "")
    assert why in " ".join(ended.out.split())
    ended = headgate("simulate", app)
    assert (ended.code, ended.err) == (0, f"headgate: warning: {app}: {why}\n")
    app = write(tmp_path / "app.yaml", text.replace("2GB", "1GB"))
    assert "no function runs" not in headgate("check", app).out
    assert headgate("simulate", app).err == ""


def test_cascades_that_are_in_time_only_if_they_end_early_are_named(tmp_path: Path) -> None:
    """The second stage hardly ever runs, but a promise has to hold if it does."""
    text = """
functions: {f: {exec_time: 100ms}}
pipelines:
  q:
    stages:
      a: {function: f}
      b: {function: f, after: [a], only_if_unsure: true, unsure_probability: 1%}
    slo: {latency: 150ms}
pools: {cpu: {nodes: 1}}
workload: {duration: 1s, arrivals: [{pipeline: q, process: "deterministic:rate=1/s"}]}
"""
    app = write(tmp_path / "app.yaml", text)
    why = "pipelines.q: a request that needs every stage takes 200ms or more, beyond the objective"
    ended = headgate("check", app)
    assert (ended.code, ended.err) == (0, "")
    assert why in " ".join(ended.out.split())
    assert why in headgate("simulate", app).err
    app = write(tmp_path / "app.yaml", text.replace("150ms", "200ms"))
    assert headgate("simulate", app).err == ""


def test_objectives_that_cannot_be_met_together_are_reported_the_same_way(tmp_path: Path) -> None:
    """12 ms cost $12/1M, and 14 ms with two to a batch of the second stage $9.5/1M."""
    text = IMPOSSIBLE.replace("b: {exec_time: 7ms}", "b: {exec_time: [7ms, 9ms]}")
    text = text.replace("latency: 10ms", "latency: 13ms, cost: $10/1M")
    app = write(tmp_path / "app.yaml", text.replace("dedicated", "dedicated, price: $3.60/h"))
    problem = (
        f"{app}: slo: '13ms and $10/1M': no placement meets both "
        "(allowed: 13ms with $12/1M, or $10/1M with 14ms)\n"
    )
    ended = headgate("check", app)
    assert (ended.code, ended.out, ended.err) == (2, "", f"headgate: error: {problem}")
    ended = headgate("simulate", app, "--json")
    assert (ended.code, ended.err) == (0, f"headgate: warning: {problem}")
