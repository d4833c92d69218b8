"""Models that users write, and how they are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headgate.core.errors import ConfigError
from headgate.functions import Model, OnnxModel, TensorSpec, function
from headgate.functions.arrays import concatenate, item_count, split
from headgate.functions.loader import build_model
from headgate.functions.model import signature_of
from headgate.functions.tensor import parse_specs


@dataclass(frozen=True)
class Source:
    """The source of a function."""

    model: str | None = None
    code: str | None = None
    options: dict[str, object] = field(default_factory=dict)


def onnx_file(path: Path, type: int, shape: Sequence[str | int]) -> OnnxModel:
    """A file whose outputs are its inputs."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return graph_file(path, [node], shape, shape, type=type)


def graph_file(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    taken: Sequence[str | int | None],
    given: Sequence[str | int | None],
    constants: Mapping[str, Any] | None = None,
    *,
    type: int = TensorProto.FLOAT,
) -> OnnxModel:
    """A file that computes y of x."""
    ends = [helper.make_tensor_value_info("x", type, taken)]
    results = [helper.make_tensor_value_info("y", type, given)]
    known = [onnx.numpy_helper.from_array(np.array(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "graph", ends, results, known)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return OnnxModel(path)


def test_python_function_is_a_model() -> None:
    @function
    def total(a, b, scale=1):  # type: ignore[no-untyped-def]
        return (a + b) * scale

    model = total(scale=2)
    assert isinstance(model, Model)
    assert total.__name__ == "total"
    batch = model.decode({"a": np.array([1]), "b": np.array([2])})
    assert model.encode(model.predict(batch)) == {"output": np.array([6])}
    with pytest.raises(ValueError, match="expects the inputs a, b; got a"):
        model.decode({"a": np.array([1])})
    with pytest.raises(ConfigError, match="total: size: is not an option of the function"):
        total(size=1)


def test_what_takes_no_inputs_is_not_loaded(tmp_path: Path) -> None:
    """No request could call it: each has an input."""

    @function
    def constant(scale=1):  # type: ignore[no-untyped-def]
        return np.array([scale])

    with pytest.raises(ConfigError, match="constant: takes no inputs, and every request has one"):
        constant().load()

    @function
    def anything(**arrays):  # type: ignore[no-untyped-def]
        return arrays

    anything().load()
    value = onnx.numpy_helper.from_array(np.array([1], np.float32))
    node = helper.make_node("Constant", [], ["y"], value=value)
    ends = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    graph = helper.make_graph([node], "constant", [], ends)
    opsets = [helper.make_opsetid("", 18)]
    path = tmp_path / "a.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    with pytest.raises(ConfigError, match=r"a\.onnx: takes no inputs, and every request has one"):
        OnnxModel(path).load()


def test_several_outputs_are_named_in_order() -> None:
    @function(inputs={"x": "INT64[-1]"}, outputs={"less": "INT64[-1]", "more": "INT64[-1]"})
    def around(x):  # type: ignore[no-untyped-def]
        return x - 1, x + 1

    model = around()
    assert model.predict({"x": np.array([5])}) == {"less": np.array([4]), "more": np.array([6])}
    assert [spec.name for spec in signature_of(model).outputs] == ["less", "more"]


def test_inputs_must_be_parameters() -> None:
    with pytest.raises(ConfigError, match="must have exactly its inputs as parameters"):

        @function(inputs={"y": "FP32[-1]"})
        def wrong(x):  # type: ignore[no-untyped-def]
            return x

    @function
    def anything(**arrays):  # type: ignore[no-untyped-def]
        return arrays

    assert anything().predict(anything().decode({"z": np.array([1])})) == {"z": np.array([1])}


@pytest.mark.parametrize("text", ["FP32", "FP32[a]", "FP32[1,,2]", "FP33[1]", "FP32[-2]", 7])
def test_invalid_specs_are_one_line(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^Cat\.inputs: image: "):
        parse_specs({"image": text}, "Cat.inputs")  # type: ignore[dict-item]


def test_batched_model_must_count_items() -> None:
    class Fixed(Model):
        inputs = (TensorSpec("x", "FP32", (1, 3)),)

    with pytest.raises(ConfigError, match="does not count items"):
        signature_of(Fixed())
    Fixed.batches = False
    assert not signature_of(Fixed()).batches


def test_example_is_zeros() -> None:
    class Loose(Model):
        inputs = {"x": "FP16[-1, 3, -1]", "t": "BYTES[-1]"}  # noqa: RUF012

    example = Loose().example()
    assert example is not None
    assert example["x"].shape == (1, 3, 1)
    assert example["t"].tolist() == [b""]
    assert Model().example() is None


def test_nested_batches_are_concatenated_and_split() -> None:
    parts: list[dict[str, Any]] = [
        {"x": np.array([[i] * 2] * i), "name": [str(i)] * i} for i in (1, 2, 3)
    ]
    joined = concatenate(parts)
    assert item_count(joined) == 6
    for part, back in zip(parts, split(joined, [1, 2, 3]), strict=True):
        assert isinstance(back, dict)
        assert np.array_equal(back["x"], part["x"])
        assert back["name"] == part["name"]


@pytest.mark.parametrize("thing", [None, 7, {}, np.array(7), {"a": [1], "b": [1, 2]}])
def test_values_that_are_not_batches(thing: object) -> None:
    with pytest.raises(ValueError):
        item_count(thing)


def test_onnx_file_has_its_signature(tmp_path: Path) -> None:
    model = onnx_file(tmp_path / "a.onnx", TensorProto.FLOAT16, ["n", 2, "m"])
    model.load()
    signature = signature_of(model)
    assert signature.inputs == (TensorSpec("x", "FP16", (-1, 2, -1)),)
    assert signature.batches
    assert signature.platform == "onnxruntime_onnx"
    sent = np.ones((3, 2, 1), np.float16)
    assert np.array_equal(model.predict(model.decode({"x": sent}))["y"], sent)
    model.unload()


def test_onnx_file_of_fixed_size_is_unbatched(tmp_path: Path) -> None:
    model = onnx_file(tmp_path / "a.onnx", TensorProto.INT64, [1, 2])
    model.load()
    assert not signature_of(model).batches


DOUBLE = [helper.make_node("Add", ["x", "x"], ["y"])]
SOFTMAX = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
SOME_ROWS = [helper.make_node("Compress", ["x", "keep"], ["y"], axis=0)]
RUNNING_SUM = [helper.make_node("CumSum", ["x", "axis"], ["y"])]
RUNNING_SUM_BACK = [helper.make_node("CumSum", ["x", "axis"], ["y"], reverse=1)]
AXIS: dict[str, Any] = {"axis": np.int64(0)}
FIRST_OF_TWO: dict[str, Any] = {"keep": [True, False]}


@pytest.mark.parametrize(
    ("nodes", "taken", "given", "constants", "problem"),
    [
        (DOUBLE, ["batch", 2], ["batch", 2], {}, ""),
        (DOUBLE, ["unk__6", 2], ["unk__7", 2], {}, ""),  # as tf2onnx names them
        (DOUBLE, [None, 2], [None, 2], {}, ""),  # as sklearn-onnx does
        (DOUBLE, ["batch_size", 2], ["Batch", 2], {}, ""),
        (DOUBLE, ["batch", 2, "h", "w"], ["batch", 2, "h", "w"], {}, ""),
        (SOFTMAX, ["seq", 1], ["seq", 1], {}, "a row of output 'y' depends on the other rows"),
        (SOFTMAX, ["batch", 2], ["batch", 2], {}, "depends on the other rows"),
        (RUNNING_SUM, ["n"], ["n"], AXIS, "depends on the other rows"),
        (RUNNING_SUM_BACK, ["n"], ["n"], AXIS, "depends on the other rows"),
        (SOME_ROWS, ["height", 4], ["detections", 4], FIRST_OF_TWO, "detections, height"),
        (SOME_ROWS, ["n", 4], ["n", 4], FIRST_OF_TWO, "not as many rows as the inputs"),
    ],
)
def test_onnx_file_is_batched_if_its_rows_do_not_depend_on_each_other(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    nodes: list[onnx.NodeProto],
    taken: list[str | int | None],
    given: list[str | int | None],
    constants: dict[str, Any],
    problem: str,
) -> None:
    model = graph_file(tmp_path / "a.onnx", nodes, taken, given, constants)
    model.load()
    assert signature_of(model).batches == (not problem)
    assert len(caplog.records) == bool(problem)
    assert problem in caplog.text
    assert not problem or "a.onnx: requests are not batched: " in caplog.text


@pytest.mark.parametrize(("name", "batches"), [("batch", True), ("n", False)])
def test_onnx_file_that_cannot_be_tried_out_is_batched_if_it_says_so(
    tmp_path: Path, name: str, batches: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weights = {"w": np.ones((7, 2), np.float32)}  # nothing says that rows have 7 elements
    model = graph_file(tmp_path / "a.onnx", nodes, [name, None], [name, None], weights)
    model.load()
    assert signature_of(model).batches == batches
    assert not capfd.readouterr().err  # where ONNX Runtime reports runs that fail


def test_application_says_whether_an_onnx_file_is_batched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph_file(tmp_path / "a.onnx", SOFTMAX, ["n", 2], ["n", 2])
    for batches in (True, False):
        source = Source(model="a.onnx", options={"batches": batches})
        model = build_model(source, str(tmp_path), "app")
        model.load()
        assert signature_of(model).batches == batches
    assert not caplog.records
    with pytest.raises(ConfigError, match="batches: 1: must be true or false"):
        build_model(Source(model="a.onnx", options={"batches": 1}), str(tmp_path), "app")


def test_onnx_file_with_text(tmp_path: Path) -> None:
    model = onnx_file(tmp_path / "a.onnx", TensorProto.STRING, ["n"])
    model.load()
    answer = model.predict(model.decode({"x": np.array(["ä".encode()], object)}))
    assert answer["y"].tolist() == ["ä"]


def test_missing_or_broken_onnx_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.onnx: does not exist"):
        OnnxModel(tmp_path / "none.onnx").load()
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\0\1")
    with pytest.raises(ConfigError, match=r"broken\.onnx: cannot be loaded"):
        OnnxModel(broken).load()
    with pytest.raises(ConfigError, match="threads: 0: must be at least 1"):
        OnnxModel(broken, threads=0)


def test_missing_onnx_runtime_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx_file(tmp_path / "a.onnx", TensorProto.INT64, ["n"])
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'headgate\[onnx\]'"):
        model.load()


def test_model_is_found_in_the_directory_of_the_application(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", ["elsewhere"])
    (tmp_path / "found_code.py").write_text(
        "from headgate.functions import Model\n"
        "class Scale(Model):\n"
        "    def __init__(self, factor=1): self.factor = factor\n"
        "def plain(x): return x\n"
        "number = 7\n"
    )
    base = str(tmp_path)
    model = build_model(Source(code="found_code:Scale", options={"factor": 3}), base, "app")
    assert getattr(model, "factor") == 3  # noqa: B009
    assert type(build_model(Source(code="found_code:plain"), base, "app")).__name__ == "plain"
    assert isinstance(build_model(Source(model="m.onnx"), base, "app"), OnnxModel)
    for code, problem in {
        "found_code:number": "is neither a Model nor a function",
        "found_code:none": "cannot be imported: AttributeError",
        "no_such_module:x": "cannot be imported: ModuleNotFoundError",
        "found code": "is not the name of a class",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            build_model(Source(code=code), base, "app")
    with pytest.raises(ConfigError, match="cannot be created: TypeError"):
        build_model(Source(code="found_code:Scale", options={"nothing": 1}), base, "app")
    with pytest.raises(ConfigError, match="has neither model nor code"):
        build_model(Source(), base, "app")
