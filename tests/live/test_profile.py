"""`headgate profile`, with real processes on real cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from onnx_file import write_linear

from headgate.cli.main import cli
from headgate.profiling.profile_file import read_profile
from headgate.profiling.profiler import usable_cores

CODE = '''
import os
import time
from pathlib import Path

import numpy as np

from headgate.functions import Model


class Sleeps(Model):
    """Says where it runs; takes 5 ms and 5 ms more for every item."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def load(self):
        print("not for the profiler")
        time.sleep(0.05)
        self.held = bytearray(80 << 20)
        cores = f"{os.sched_getaffinity(0)} {os.environ['OMP_NUM_THREADS']}\\n"
        with Path(WRITTEN).open("a") as file:
            file.write(cores)

    def predict(self, batch):
        time.sleep(0.005 + 0.005 * len(batch["x"]))
        return {"y": batch["x"]}


class OneByOne(Sleeps):
    batches = False


class Breaks(Sleeps):
    def predict(self, batch):
        raise RuntimeError("no weights")


class Dies(Sleeps):
    def predict(self, batch):
        os.abort()


class Mute(Sleeps):
    inputs = {}
'''


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    source = CODE.replace("WRITTEN", repr(str(tmp_path / "cores.txt")))
    (tmp_path / "sleeps.py").write_text(source)
    return tmp_path


def run(function: str, *arguments: str, **declared: object) -> Result:
    spec = {
        "functions": {"f": {"code": f"sleeps:{function}", "batch_max": 4, **declared}},
        "slo": {"latency": "30s"},
        "pools": {"local": {"tier": "dedicated"}},
    }
    Path("app.yaml").write_text(json.dumps(spec))
    result = CliRunner().invoke(cli, ["profile", "app.yaml", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def profile(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(Path("profile.json").read_text())


GRID = ("--cores", "1", "--concurrency", "1,3", "--budget", "15s", "--precision", "20%")
# The first grid point is measured whatever the budget is.
ONE = ("--cores", "1", "--concurrency", "1", "--batch", "1", "--budget", "1s")


def test_function_is_measured_on_its_cores(directory: Path) -> None:
    """Times, threads, cold start and memory are those of the model; the file says how they were
    measured.
    """
    result = run("Sleeps", *GRID)
    document = profile(result)
    found = read_profile(directory / "profile.json")
    assert {(p.cores, p.concurrency, p.batch) for p in found.points} == {
        (1, 1, 1),
        (1, 3, 1),
        (1, 1, 4),
        (1, 3, 4),
    }
    assert 10 <= found.time_ms(1, 1) < 25 <= found.time_ms(1, 1, batch=4)
    assert found.time_ms(1, 3) < 2 * found.time_ms(1, 1)  # sleeping needs no core
    assert found.cold_start is not None and found.cold_start.load_ms >= 50
    assert found.cold_start.fetch_ms < found.cold_start.process_ms
    assert found.peak_memory_bytes is not None and found.peak_memory_bytes > 80 << 20
    assert set((directory / "cores.txt").read_text().splitlines()) == {f"{{{usable_cores()[0]}}} 1"}
    assert document["settings"]["precision"] == 0.2
    assert document["machine"]["cores"] == len(usable_cores())
    assert document["at"].endswith("+00:00")
    assert "can serve 3 or more at once within 30 s at p99." in result.stdout
    assert (directory / "profile.png").exists()


def test_onnx_file_is_fetched_from_its_store(directory: Path) -> None:
    (directory / "store").mkdir()
    write_linear(directory / "store" / "linear.onnx")
    result = run("", *ONE, "--store", "store", code=None, model="linear.onnx")
    document = profile(result)
    assert document["cold_start"]["fetch_ms"] > 0
    assert not (directory / "linear.onnx").exists()
    assert document["settings"]["store"] == "store"


def test_code_is_fetched_from_its_store(directory: Path) -> None:
    (directory / "store").mkdir()
    (directory / "sleeps.py").rename(directory / "store" / "sleeps.py")
    assert profile(run("Sleeps", *ONE, "--store", "store"))["cold_start"]["fetch_ms"] > 0


def test_unmeasured_points_are_reported(directory: Path) -> None:
    """A thousand clients with two responses each, after 10 ms or more each time, in 15 s."""
    result = run("Sleeps", *GRID, "--concurrency", "1,1000")
    assert {each["concurrency"] for each in profile(result)["skipped"]} == {1_000}
    assert "Out of time: 2 grid points were not measured" in result.stdout


def test_unbatched_model_is_measured_with_single_items(directory: Path) -> None:
    result = run("OneByOne", *GRID)
    assert {each["batch"] for each in profile(result)["points"]} == {1}
    assert "one item at a time" in result.stdout


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("Nobody", (), "f: code: 'sleeps:Nobody': cannot be imported"),
        ("Breaks", (), "f: RuntimeError: no weights"),
        ("Dies", (), "f: the probe process exited with SIGABRT"),
        ("Mute", (), "f: has no example input"),
        ("OneByOne", ("--batch", "2"), "--batch: accepts single items only (allowed: 1)"),
        ("Sleeps", ("--store", "nowhere"), "--store: 'nowhere': is not a directory"),
    ],
)
def test_measurement_error_is_one_line(
    directory: Path, function: str, arguments: tuple[str, ...], problem: str
) -> None:
    result = run(function, *ONE, *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr and result.stderr.count("\n") == 1
    assert not (directory / "profile.json").exists()
