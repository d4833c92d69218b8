"""Make the models of the examples: `python make_models.py`. Needs onnx and onnxruntime.

The filters of the convolutions are random and stay as they are; what they give is averaged over the
picture. Only the last layer of each model is fitted, to 1,500 pictures, by ridge regression. That
takes a minute, and is enough to tell patterns apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from pictures import CLASSES, SIZE, Labels, pictures

HERE = Path(__file__).parent
PIXELS = SIZE // 2  # of each side, after the first stage
SURE = 0.8  # a probability from which on the small model of the cascade is sure
RIDGE = 1e-3  # of the regression, in variances of a feature
SHARPNESS = 10.0  # from the output of the regression, about 0 to 1, to the exponent of softmax
TRAINING_SEED, TEST_SEED = 1, 2

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Body:
    """Convolutions: (filters, size, stride) of each; the input is shrunk by `shrink` first."""

    layers: tuple[tuple[int, int, int], ...]
    shrink: int
    seed: int


FEATURES = Body(((32, 5, 2), (64, 3, 2), (128, 3, 1)), 1, 10)
SMALL = Body(((16, 5, 2), (32, 3, 2)), 2, 11)
LARGE = Body(((32, 5, 2), (64, 3, 1), (128, 3, 2)), 1, 12)
EDGES = Body(((32, 3, 2), (64, 3, 2), (64, 3, 1)), 1, 13)
SHAPES = Body(((32, 7, 2), (64, 5, 1)), 2, 14)
TEXTURE = Body(((32, 5, 2), (64, 3, 1), (64, 3, 1)), 2, 15)
VOTES = ("by_edges", "by_shapes", "by_texture")


def main() -> None:
    """Write all models beside this file, and print how good they are."""
    write("resize", *_resize())
    images, labels = pictures(1_500, TRAINING_SEED)
    pixels = run("resize", {"image": images})["pixels"]
    test_images, test_labels = pictures(500, TEST_SEED)
    test = run("resize", {"image": test_images})["pixels"]
    nodes, weights = _body(FEATURES, "features")
    write("features", nodes, weights, [_pixels()], [_floats("features", 2 * 128)])
    features = run("features", {"pixels": pixels})["features"]
    head = fit(features, labels)
    nodes, weights = _head(head, "features", "probabilities")
    outputs = [_floats("probabilities", len(CLASSES)), _label()]
    write("classify", nodes, weights, [_floats("features", 2 * 128)], outputs)
    _whole("small", SMALL, pixels, labels, "probabilities", is_cascade=True)
    _whole("large", LARGE, pixels, labels, "probabilities")
    _whole("edges", EDGES, pixels, labels, "by_edges", has_label=False)
    _whole("shapes", SHAPES, pixels, labels, "by_shapes", has_label=False)
    _whole("texture", TEXTURE, pixels, labels, "by_texture", has_label=False)
    write("vote", *_vote())
    evaluate(test, test_labels)


def evaluate(pixels: Floats, labels: Labels) -> None:
    """Print the share of pictures that each way tells apart."""
    features = run("features", {"pixels": pixels})["features"]
    small = run("small", {"pixels": pixels})
    large = run("large", {"pixels": pixels})["label"]
    votes: dict[str, NDArray[np.generic]] = {}
    for name in ("edges", "shapes", "texture"):
        votes |= run(name, {"pixels": pixels})
    found = {
        "series": run("classify", {"features": features})["label"],
        "edges alone": votes["by_edges"].argmax(1),
        "shapes alone": votes["by_shapes"].argmax(1),
        "texture alone": votes["by_texture"].argmax(1),
        "ensemble": run("vote", votes)["label"],
        "small alone": small["label"],
        "large alone": large,
        "cascade": np.where(small["unsure"], large, small["label"]),
    }
    for name, label in found.items():
        print(f"{name:13} {(label == labels).mean():.1%}")
    print(f"the small model is unsure of {small['unsure'].mean():.0%}")


def fit(features: Floats, labels: Labels) -> Floats:
    """Return the weights of the last layer, the bias in the last row."""
    mean, spread = features.mean(0, np.float64), features.std(0, np.float64) + 1e-9
    x = (features - mean) / spread
    wanted = np.eye(len(CLASSES))[labels]
    share = wanted.mean(0)
    ridge = RIDGE * len(x) * np.eye(len(x.T))
    weights = np.linalg.solve(x.T @ x + ridge, x.T @ (wanted - share)) / spread[:, None]
    return np.vstack([weights, share - mean @ weights]).astype(np.float32)


def run(name: str, inputs: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
    """Run a model that has been written, a hundred pictures at a time."""
    session = onnxruntime.InferenceSession(HERE / f"{name}.onnx")
    names = [output.name for output in session.get_outputs()]
    count = len(next(iter(inputs.values())))
    parts = [
        session.run(names, {key: value[at : at + 100] for key, value in inputs.items()})
        for at in range(0, count, 100)
    ]
    return {key: np.concatenate([part[at] for part in parts]) for at, key in enumerate(names)}


def write(
    name: str,
    nodes: Sequence[NodeProto],
    weights: dict[str, NDArray[np.generic]],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> None:
    constants = [numpy_helper.from_array(value, key) for key, value in weights.items()]
    graph = helper.make_graph(list(nodes), name, list(inputs), list(outputs), constants)
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, HERE / f"{name}.onnx")


Graph = tuple[list[NodeProto], dict[str, NDArray[np.generic]]]


def _whole(
    name: str,
    body: Body,
    pixels: Floats,
    labels: Labels,
    output: str,
    *,
    is_cascade: bool = False,
    has_label: bool = True,
) -> None:
    """Write a model that takes pixels and gives probabilities."""
    nodes, weights = _body(body, "features")
    width = 2 * body.layers[-1][0]
    write(name, nodes, weights, [_pixels()], [_floats("features", width)])
    head = fit(run(name, {"pixels": pixels})["features"], labels)
    head_nodes, head_weights = _head(head, "features", output, has_label=has_label)
    outputs = [_floats(output, len(CLASSES))]
    if has_label:
        outputs.append(_label())
    if is_cascade:
        head_nodes += [
            helper.make_node("ReduceMax", [output], ["best"], axes=[1], keepdims=0),
            helper.make_node("Less", ["best", "sure"], ["unsure"]),
        ]
        head_weights["sure"] = np.array(SURE, np.float32)
        outputs.append(helper.make_tensor_value_info("unsure", TensorProto.BOOL, ["n"]))
    write(name, nodes + head_nodes, weights | head_weights, [_pixels()], outputs)


def _resize() -> tuple[
    list[NodeProto],
    dict[str, NDArray[np.generic]],
    list[onnx.ValueInfoProto],
    list[onnx.ValueInfoProto],
]:
    """Bytes in rows to numbers around zero in planes, of half the size."""
    nodes = [
        helper.make_node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["numbers"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "AveragePool", ["planes"], ["halved"], kernel_shape=[2, 2], strides=[2, 2]
        ),
        helper.make_node("Sub", ["halved", "middle"], ["centred"]),
        helper.make_node("Mul", ["centred", "scale"], ["pixels"]),
    ]
    weights: dict[str, NDArray[np.generic]] = {
        "middle": np.array(127.5, np.float32),
        "scale": np.array(1 / 64, np.float32),
    }
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", SIZE, SIZE, 3])
    return nodes, weights, [image], [_pixels()]


def _vote() -> tuple[
    list[NodeProto],
    dict[str, NDArray[np.generic]],
    list[onnx.ValueInfoProto],
    list[onnx.ValueInfoProto],
]:
    nodes = [
        helper.make_node("Mean", list(VOTES), ["probabilities"]),
        helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=0),
    ]
    given = [_floats(name, len(CLASSES)) for name in VOTES]
    return nodes, {}, given, [_floats("probabilities", len(CLASSES)), _label()]


def _body(body: Body, output: str) -> Graph:
    """Random convolutions; the mean of each filter's result over the picture, and its spread."""
    rng = np.random.default_rng(body.seed)
    nodes: list[NodeProto] = []
    weights: dict[str, NDArray[np.generic]] = {}
    last, channels = "pixels", 3
    if body.shrink > 1:
        shape = [body.shrink] * 2
        nodes.append(
            helper.make_node("AveragePool", [last], ["shrunk"], kernel_shape=shape, strides=shape)
        )
        last = "shrunk"
    for number, (filters, size, stride) in enumerate(body.layers):
        weight = rng.standard_normal((filters, channels, size, size), dtype=np.float32)
        if not number:  # edges and not colours: no filter sees an even surface
            weight -= weight.mean(axis=(2, 3), keepdims=True)
        weights[f"w{number}"] = weight * np.float32(np.sqrt(2 / (channels * size * size)))
        inputs, strides, pads = [last, f"w{number}"], [stride] * 2, [size // 2] * 4
        nodes.append(helper.make_node("Conv", inputs, [f"c{number}"], strides=strides, pads=pads))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"]))
        last, channels = f"r{number}", filters
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["mean"]),
        helper.make_node("Mul", [last, last], ["squares"]),
        helper.make_node("GlobalAveragePool", ["squares"], ["power"]),
        helper.make_node("Sqrt", ["power"], ["spread"]),
        helper.make_node("Concat", ["mean", "spread"], ["both"], axis=1),
        helper.make_node("Flatten", ["both"], [output]),
    ]
    return nodes, weights


def _head(weights: Floats, given: str, output: str, *, has_label: bool = True) -> Graph:
    nodes = [
        helper.make_node("MatMul", [given, "head"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], [output], axis=1),
    ]
    if has_label:
        nodes.append(helper.make_node("ArgMax", [output], ["label"], axis=1, keepdims=0))
    return nodes, {"head": SHARPNESS * weights[:-1], "bias": SHARPNESS * weights[-1]}


def _pixels() -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", 3, PIXELS, PIXELS])


def _floats(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])


def _label() -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info("label", TensorProto.INT64, ["n"])


if __name__ == "__main__":
    main()
