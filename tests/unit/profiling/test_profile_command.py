"""`headgate profile` without measuring: CSV import and invalid input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headgate.cli.main import cli
from headgate.core.errors import ConfigError
from headgate.profiling.profile_file import read_profile

SIMULATED = """
functions: {resnet: {exec_time: 5ms}}
pools: {gpu: {nodes: 1}}
"""
SERVED = """
functions: {one: {code: "f:F"}, two: {code: "f:F"}}
pools: {local: {tier: dedicated}}
"""
TABLE = "function,cores,concurrency,p50_ms\na,1,1,10\na,1,2,20\na,2,1,6\na,2,2,11\n"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simulated.yaml").write_text(SIMULATED)
    (tmp_path / "served.yaml").write_text(SERVED)
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["profile", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_import_writes_profile_and_figure(directory: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("--import", "table.csv", "--slo", "15ms", "--out", "a.json")
    assert result.exit_code == 0
    assert "One core can serve 1 at once within 15 ms at p99." in result.stdout
    assert read_profile(directory / "a.json").time_ms(2, 2) == 11.0
    assert (directory / "a.png").read_bytes().startswith(b"\x89PNG")


def test_json_output_equals_profile_file(directory: Path) -> None:
    result = run("--import", "table.csv", "--author", "us", "--json")
    content = json.loads(result.stdout)
    assert content == json.loads((directory / "profile.json").read_text())
    assert content["schema"] == "headgate-profile/1"
    assert (content["imported"], content["by"]) == (["table.csv"], "us")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "needs an application or tables"),
        (("served.yaml", "--import", "table.csv"), "not both"),
        (("missing.yaml",), "missing.yaml"),
        (("simulated.yaml",), "no function with `model` or `code`"),
        (
            ("served.yaml",),
            "--function: is required: the application has several functions (allowed: one, two)",
        ),
        (("served.yaml", "--function", "ones"), "unknown function, did you mean one?"),
        (
            ("served.yaml", "--function", "one", "--cores", "0"),
            "--cores: '0': is not a list of counts",
        ),
        (
            ("served.yaml", "--function", "one", "--batch", "1,x"),
            "--batch: '1,x': is not a list of counts",
        ),
        (("served.yaml", "--function", "one", "--budget", "0s"), "--budget: '0s': must be longer"),
        (("served.yaml", "--function", "one", "--budget", "60"), "--budget: '60': needs a unit"),
        (("served.yaml", "--function", "one", "--precision", "0%"), "--precision: '0%'"),
        (("--import", "missing.csv"), "missing.csv: cannot be read"),
        (("--import", "other.csv"), "other.csv: has the wrong columns: a, b"),
        (("--import", "table.csv", "--function", "b"), "unknown function"),
        (("--import", "table.csv", "--out", "no/profile.json"), "--out: 'no/profile.json'"),
        (("--import", "table.csv", "--out", "table.csv"), "would be overwritten"),
        (
            ("--import", "table.csv", "--out", "a.png"),
            "--out: 'a.png': is also the file of the plot",
        ),
        (("--import", "table.csv", "--out", "a", "--figure", "a"), "is also the file of the plot"),
        (("served.yaml", "--function", "one", "--store", ""), "--store: '': is empty"),
    ],
)
def test_bad_input_is_one_line(directory: Path, arguments: tuple[str, ...], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("headgate: error: ") and result.stderr.count("\n") == 1
    assert problem in result.stderr


def test_unavailable_cores_are_rejected(directory: Path) -> None:
    there = len(os.sched_getaffinity(0))
    result = run("served.yaml", "--function", "one", "--cores", f"1,{there + 1}")
    assert result.exit_code == 2
    assert f"--cores: {there + 1}: this machine has" in result.stderr
    assert "(allowed: 1 to " in result.stderr


def test_invalid_profile_file_is_rejected(directory: Path) -> None:
    for name, problem in (("none.json", "cannot be read"), ("table.csv", "is not JSON")):
        with pytest.raises(ConfigError, match=problem):
            read_profile(directory / name)
