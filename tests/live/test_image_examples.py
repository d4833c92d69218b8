"""The pipelines of `examples/images`: each answers as its models do, one after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Served, run_json, until

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
    votes = [run(name, pixels=pixels) for name in ("edges", "shapes", "texture")]
    return run("vote", **votes[0], **votes[1], **votes[2])["label"]


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


def copy_example(folder: Path) -> None:
    """Copy the example, with objectives that a busy machine keeps."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    for app in folder.glob("*.yaml"):
        text = app.read_text(encoding="utf-8")
        app.write_text(text.replace("latency: 50ms", "latency: 60s"), encoding="utf-8")


@pytest.mark.parametrize("expected", [series, parallel, cascade], ids=lambda way: str(way.__name__))
def test_pipeline_answers_as_its_models_do(
    tmp_path: Path, images: tuple[Any, Any], expected: Any
) -> None:
    copy_example(tmp_path)
    pictures, labels = images
    wanted = expected(run("resize", image=pictures)["pixels"])
    assert (wanted == labels).mean() > 0.8
    app = f"{expected.__name__}.yaml"
    with Served(tmp_path, app=app) as served:
        answers = [ask(served, picture) for picture in pictures]
        assert [answer["label"][0] for answer in answers] == wanted.tolist()
        assert until(lambda: "headgate_stage_output_bytes 0.0" in served.get("/metrics")[1])
    # The small model is sure of some, and the large one says nothing about being sure.
    ends = {"unsure" in answer for answer in answers}
    assert ends == ({True, False} if expected is cascade else {False})


def test_the_ensemble_needs_all_three_votes(images: tuple[Any, Any]) -> None:
    """The combination is the mean of the three, and each decides some picture."""
    pixels = run("resize", image=images[0])["pixels"]
    votes: dict[str, Any] = {}
    for name in ("edges", "shapes", "texture"):
        votes |= run(name, pixels=pixels)
    joined = run("vote", **votes)
    assert np.allclose(joined["probabilities"], sum(votes.values()) / 3, atol=1e-6)
    for name in votes:
        others = sum(vote for other, vote in votes.items() if other != name)
        assert (others.argmax(1) != joined["label"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("expected", [parallel, cascade], ids=lambda way: str(way.__name__))
def test_every_answer_is_right_while_workers_are_killed(
    tmp_path: Path, images: tuple[Any, Any], expected: Any
) -> None:
    """Some outputs have no room on the node; workers die in all stages; none is wrong."""
    copy_example(tmp_path)
    pictures, _ = images
    wanted = expected(run("resize", image=pictures)["pixels"])
    app = tmp_path / f"{expected.__name__}.yaml"
    app.write_text(app.read_text() + "serve: {shared_memory: 1MiB}\nlimits: {admission: observe}\n")
    found: list[tuple[int, object]] = []
    is_over = threading.Event()
    with Served(tmp_path, app=app.name) as served:

        def ask_often(start: int) -> None:
            number = start
            while not is_over.is_set():
                with suppress(AssertionError):  # its worker was killed while running it alone
                    found.append((number, ask(served, pictures[number])["label"][0]))
                number = (number + 1) % COUNT

        threads = [threading.Thread(target=ask_often, args=(at,)) for at in range(0, COUNT, 8)]
        for thread in threads:
            thread.start()
        random = np.random.default_rng(1)
        for _ in range(8):
            time.sleep(random.uniform(0.5, 1.5))
            workers = served.workers()
            if workers:
                os.kill(workers[random.integers(len(workers))], signal.SIGKILL)
        is_over.set()
        for thread in threads:
            thread.join()
        assert until(lambda: "headgate_stage_output_bytes 0.0" in served.get("/metrics")[1])
    assert len(found) > COUNT
    assert [each for each in found if each[1] != wanted[each[0]]] == []


@pytest.mark.parametrize("name", ["series", "parallel", "cascade"])
def test_pipeline_can_be_simulated_and_planned(name: str) -> None:
    assert run_json(EXAMPLE, "simulate", f"{name}.yaml", "--duration", "2s")
    assert run_json(EXAMPLE, "plan", f"{name}.yaml")
