"""The pipelines of `examples/images`: each answers as its models do, one after the other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Served, until

onnxruntime = pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parents[2] / "examples" / "images"
COUNT = 60


@pytest.fixture(scope="module")
def images() -> tuple[Any, Any]:
    """Pictures that no model was fitted to, and their classes."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(EXAMPLE))
    module = import_module("pictures")
    monkeypatch.undo()
    found, labels = module.pictures(COUNT, seed=5)
    return found, labels


def run(name: str, **inputs: Any) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(EXAMPLE / f"{name}.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def series(pixels: Any) -> Any:
    return run("classify", features=run("features", pixels=pixels)["features"])["label"]


def parallel(pixels: Any) -> Any:
    votes = run("edges", pixels=pixels) | run("shapes", pixels=pixels)
    return run("vote", **votes)["label"]


def cascade(pixels: Any) -> Any:
    small = run("small", pixels=pixels)
    return np.where(small["unsure"], run("large", pixels=pixels)["label"], small["label"])


def ask(served: Served, image: Any) -> dict[str, Any]:
    """Return the outputs for one picture, which is sent as binary data."""
    data = image.tobytes()
    tensor = {
        "name": "image",
        "datatype": "UINT8",
        "shape": [1, *image.shape],
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    connection = served.connect()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", "/v2/models/pictures/infer", head + data, headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, body
    return {output["name"]: output["data"] for output in body["outputs"]}


@pytest.mark.parametrize("expected", [series, parallel, cascade], ids=lambda way: str(way.__name__))
def test_pipeline_answers_as_its_models_do(
    tmp_path: Path, images: tuple[Any, Any], expected: Any
) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    pictures, labels = images
    wanted = expected(run("resize", image=pictures)["pixels"])
    assert (wanted == labels).mean() > 0.8
    app = f"{expected.__name__}.yaml"
    with Served(tmp_path, "--slo", "60s", app=app) as served:
        answers = [ask(served, picture) for picture in pictures]
        assert [answer["label"][0] for answer in answers] == wanted.tolist()
        assert until(lambda: "headgate_stage_output_bytes 0.0" in served.get("/metrics")[1])
    # The small model is sure of some, and the large one says nothing about being sure.
    ends = {"unsure" in answer for answer in answers}
    assert ends == ({True, False} if expected is cascade else {False})


@pytest.mark.parametrize("name", ["series", "parallel", "cascade"])
def test_pipeline_can_be_simulated_and_planned(name: str) -> None:
    app = str(EXAMPLE / f"{name}.yaml")
    for command in (["simulate", app, "--duration", "2s"], ["plan", app]):
        done = subprocess.run(
            [sys.executable, "-m", "headgate", *command, "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)
