"""A function in the probe process, without the process."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns

import pytest

from headgate.core.errors import ConfigError
from headgate.functions.measure import MeasureRequest
from headgate.profiling.probe_client import ProbeTask
from headgate.profiling.probed_function import ProbedFunction

CODE = """
from headgate.functions import Model


class Doubles(Model):
    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        return {"y": batch["x"] * 2}


class Lies(Doubles):
    outputs = {"y": "FP64[-1]"}


class Mute(Doubles):
    inputs = {}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "probed_code.py").write_text(CODE)
    return str(tmp_path)


def probed(name: str, base: str) -> ProbedFunction:
    return ProbedFunction(ProbeTask("f", None, f"probed_code:{name}", {}, base), monotonic_ns())


def test_function_is_started_and_measured(base: str) -> None:
    function = probed("Doubles", base)
    started = function.started
    assert started.batches
    cold = started.cold_start
    assert min(cold.imports_ms, cold.load_ms, cold.first_call_ms) > 0
    found = function.measure(MeasureRequest(2, 3, 0.05, 10))
    assert found.samples >= 2
    assert 0 < found.p50_ms <= found.p95_ms <= found.p99_ms


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Lies", "TypeError: output 'y' is FP32"),  # checked as on a worker
        ("Mute", "f: has no example input"),
    ],
)
def test_function_that_cannot_be_measured(name: str, problem: str, base: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        probed(name, base)
