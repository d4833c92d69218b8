"""Pipelines beside Ray Serve: the report from made-up measurements, and what servers are sent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headgate.config import load
from headgate.core.errors import ConfigError
from headgate.core.model import OBSERVE
from headgate.lab.bench import pipelines
from headgate.lab.bench.live.load_driver import LoadMeasurement
from headgate.lab.bench.live.server_process import read_peers

ROOT = Path(__file__).parents[3]
RAY = "Ray Serve"


def result_of(*rounds: tuple[float, float], errors: int = 0) -> pipelines.PipelinesResult:
    """Median latencies of Headgate and of Ray Serve, round by round, of models that take 1 ms."""
    result = pipelines.PipelinesResult("Headgate", (RAY,))
    for number, pair in enumerate(rounds):
        for peer, p50_ms in zip(("Headgate", RAY), pair, strict=True):
            for case in pipelines.CASES:
                busy = {
                    each: LoadMeasurement(100.0 * each, p50_ms, p50_ms, errors)
                    for each in pipelines.CONNECTIONS
                }
                single = LoadMeasurement(1e3 / p50_ms, p50_ms, 2 * p50_ms, 0)
                one = pipelines.CaseMeasurement(peer, case, number, 1.0, single, busy)
                result.measured.append(one)
    return result


def test_ratios_are_of_the_overhead_within_a_round() -> None:
    """The machine was ten times slower in the second round, models aside."""
    report = pipelines.report(result_of((1.5, 3.0), (6.0, 21.0), (1.5, 3.0)))
    assert [check.measured for check in report.failing] == []
    assert [check.measured for check in report.checks] == ["4.0x", "4.0x", "4.0x", 0]
    rows = [row for row in report.rows if row.get("pipeline") == pipelines.UNSURE]
    assert [(row["server"], row["overhead ms"]) for row in rows] == [("Headgate", 0.5), (RAY, 2.0)]


def test_less_than_half_the_overhead_is_asked_for() -> None:
    report = pipelines.report(result_of((2.0, 2.9)))
    assert [check.measured for check in report.failing] == ["1.9x"] * 3


def test_an_error_fails_its_check() -> None:
    report = pipelines.report(result_of((1.5, 3.0), errors=1))
    assert [check.claim for check in report.failing] == ["requests that were not answered with 200"]


def test_a_server_that_is_missing_fails_its_checks_with_the_reason() -> None:
    result = result_of((1.5, 3.0))
    result.missing[RAY] = "not installed: no such version"
    report = pipelines.report(result)
    assert [check.measured for check in report.failing] == ["not installed: no such version"] * 3
    assert {row["server"] for row in report.rows if "pipeline" in row} == {"Headgate"}
    assert {"server": RAY, "missing": "not installed: no such version"} in report.rows


def test_the_slowest_of_the_models_side_by_side_counts() -> None:
    times = {"resize": 1.0, "edges": 2.0, "shapes": 3.0, "texture": 2.5, "vote": 0.5}
    assert pipelines.critical_path_ms(pipelines.STEPS[pipelines.ENSEMBLE], times) == 4.5


def test_the_same_picture_for_every_server() -> None:
    case = pipelines.PictureCase(pipelines.SURE, np.zeros((1, 2, 2, 3), np.uint8), [0.5, 0.5])
    assert case.pipeline == "cascade"
    assert case.body("raw").content == bytes(12)
    body = case.body("oip_binary")
    size = int(body.headers["Inference-Header-Content-Length"])
    head = json.loads(body.content[:size])
    assert head["inputs"][0]["shape"] == [1, 2, 2, 3]
    assert body.content[size:] == bytes(12)


def test_each_server_has_both_pipelines() -> None:
    peers = read_peers(ROOT / pipelines.PEERS_FILE)
    assert [peer.name for peer in peers if peer.is_ours] == ["Headgate"]
    assert [peer.name for peer in peers if peer.group == peer.name] == ["Headgate", RAY]
    for peer in peers:
        assert list(peer.models) == ["ensemble", "cascade"]
        assert (peer.folder / "pipelines.py").exists() or peer.is_ours


def test_elsewhere_than_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=str(pipelines.PEERS_FILE)):
        pipelines.measure(print, rounds=1, seconds=1.0)
    assert list(tmp_path.iterdir()) == []


def test_the_applications_reject_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pipelines.write_apps(tmp_path)
    for name in ("ensemble", "cascade"):
        app = load(str(tmp_path / f"{name}-admitting.yaml")).app
        assert app.limits.admission == OBSERVE
        assert (tmp_path / "resize.onnx").exists()


def test_a_sure_picture_and_an_unsure_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(ROOT)
    models = pipelines.Models(pipelines.EXAMPLE)
    images = pipelines.example_pictures(pipelines.EXAMPLE / "pictures.py", 12)
    cases = pipelines.find_cases(models, images)
    assert [case.name for case in cases] == list(pipelines.CASES)
    assert all(sum(case.expected) == pytest.approx(1.0, abs=1e-3) for case in cases)
    assert max(cases[1].expected) >= 0.8  # what the small model calls sure
    values, took_ms = models.answer(pipelines.UNSURE, cases[2].image)
    assert values["unsure"].tolist() == [True]
    assert list(took_ms) == ["resize", "small", "large"]
