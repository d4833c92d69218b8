"""`policies`, `schema`, `check` and the help."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from cli_rig import APP, EXAMPLES, KAAS, headgate, write

import headgate as package
from headgate.cli.app_loading import check_support
from headgate.config import from_spec
from headgate.config.reference import json_schema
from headgate.core.errors import ConfigError
from headgate.policies import find_policy, policies_for, policy_names

TWO_POOLS = """
functions: {small: {exec_time: 5ms, memory: 1GB}, large: {exec_time: 20ms, memory: 30GB}}
pools: {cheap: {memory: 16GB}, dear: {memory: 80GB}}
workload: {duration: 1s, arrivals: [{pipeline: large, process: "deterministic:rate=5/s"}]}
"""


def test_policies() -> None:
    found = headgate("policies", "--json").json
    assert [policy["name"] for policy in found] == policy_names()
    mlfq = next(policy for policy in found if policy["name"] == "mlfq")
    assert mlfq["settings"] == {"bucket_ratio": 2.0, "clairvoyant": False}
    assert mlfq["bounds"] == {"bucket_ratio": "above 1"}
    assert mlfq["capabilities"]["clairvoyance"] is True
    assert mlfq["about"].startswith("Multi-level queues")
    shown = headgate("policies").out
    assert all(policy["about"] in shown for policy in found)
    assert "settings clairvoyant=false, bucket_ratio=2.0 (above 1)" in shown


def test_init_suggests_a_command_for_a_shell(tmp_path: Path) -> None:
    ended = headgate("init", tmp_path / "my models")
    assert f"  cd '{tmp_path / 'my models'}'\n" in ended.out


def test_schema() -> None:
    assert json.loads(headgate("schema").out) == json_schema()


@pytest.mark.parametrize("name", ["kaas", "ensemble", "burst"])
def test_the_examples_are_valid(name: str) -> None:
    app = EXAMPLES / f"{name}.yaml"
    ended = headgate("check", app)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(f"{app} is valid\n")
    found = headgate("check", app, "--json").json
    assert from_spec(found["spec"], "spec").app.functions


def test_a_function_that_not_all_nodes_can_run(tmp_path: Path) -> None:
    """Only policies with the capability `mixed_pools` accept such an application."""
    app = write(tmp_path / "app.yaml", TWO_POOLS)
    ended = headgate("simulate", app, "--policy", "srtf")
    message = (
        "functions.large: policy srtf does not support a function that the nodes of pool cheap"
    )
    assert (ended.code, ended.err.startswith(f"headgate: error: {app}: {message}")) == (2, True)
    assert "(allowed: affinity" in ended.err
    assert headgate("simulate", app, "--policy", "affinity", "--json").json["met"] == 5
    assert "affinity" in headgate("compare", app, "--json").json["policies"]
    assert "srtf" not in headgate("check", app, "--json").json["policies"]


def test_check_shows_shapes_where_there_are_any(tmp_path: Path) -> None:
    app = tmp_path / "app.yaml"
    function = "{exec_time: 5ms, cpus: 1, shapes: [{cpus: 2, exec_time: 3ms}]}"
    app.write_text(f"functions: {{f: {function}}}\npools: {{gpu: {{compute: resident}}}}\n")
    text = headgate("check", app).out
    assert " shapes " in text and "resident" in text
    app.write_text("functions: {f: {exec_time: 5ms}}\n")
    text = headgate("check", app).out
    assert " shapes " not in text and "per_batch" not in text


def test_every_policy_supports_an_application_or_says_why_not(tmp_path: Path) -> None:
    for example in ("kaas", "ensemble", "burst"):
        spec = headgate("check", EXAMPLES / f"{example}.yaml", "--json").json["spec"]
        app = from_spec(spec, example).app
        for name in policy_names():
            if name in policies_for(app):
                check_support(app, name, find_policy(name), example)
            else:
                with pytest.raises(ConfigError, match=f"policy {name} (does not support|needs)"):
                    check_support(app, name, find_policy(name), example)


def test_help_lists_every_command() -> None:
    first, second = ["bench", "check", "compare", "fuzz"], ["policies", "replay", "reproduce"]
    commands = [*first, *second, "schema", "simulate"]
    for arguments in ([], ["--help"]):
        ended = headgate(*arguments)
        assert ended.code == 0
        assert all(f"\n  {command} " in ended.out for command in commands)
    for command in commands:
        assert headgate(command, "--help").out.startswith(f"Usage: headgate {command} ")


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    assert package.__version__ == project["version"]
    assert headgate("--version").out == f"headgate {package.__version__}\n"


def test_check_lists_the_policies_that_support_the_application() -> None:
    ended = headgate("check", EXAMPLES / "burst.yaml")
    assert ended.code == 0
    line = next(line for line in ended.out.splitlines() if "threshold" in line)
    assert "headgate" in line
    assert "srtf" not in line  # it knows of no function platforms


def test_the_schema_is_json_with_and_without_the_option() -> None:
    assert headgate("schema", "--json").json == headgate("schema").json


def test_check_finds_a_trace_in_the_given_directory(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", "time\n0.5\n")
    stream = "workload: {arrivals: [{pipeline: bert, process: 'trace:t'}]}\n"
    app = write(tmp_path / "app.yaml", APP + stream)
    assert headgate("check", app).code == 2
    assert headgate("check", app, "--traces", tmp_path).code == 0
    assert headgate("check", KAAS).code == 0


def test_check_shows_objectives_of_cost_where_there_are_any(tmp_path: Path) -> None:
    text = "functions: {f: {exec_time: 5ms}}\nslo: {latency: 1s, cost: $2.5/1M}\n"
    assert "$2.5/1M" in headgate("check", write(tmp_path / "app.yaml", text)).out
    free = write(tmp_path / "free.yaml", text.replace(", cost: $2.5/1M", ""))
    assert "cost" not in headgate("check", free).out
