"""The models of the benchmark, and their throughput with bare ONNX Runtime.

The convolutional models cost the same per item at any batch size; `slow` takes about 20 ms. The
wide model reads about 50 MB of weights per batch, whatever its size, so a batch of eight costs
little more than one item.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SHAPES: Final = {"echo": (8,), "cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}
_FILTERS: Final = ((32, 2), (64, 1), (64, 2), (128, 2))  # (filters, stride) per layer
_SLOW_FILTERS: Final = ((64, 1),) * 11
_WIDTHS: Final = (256, 2048, 2048, 2048, 2048, 8)


@dataclass(frozen=True, slots=True)
class BareOnnxRuntime:
    """Measurement of ONNX Runtime on one core, without a server."""

    model: str
    batch: int
    items_per_s: float
    p50_ms: float  # of a batch


def example(model: str) -> Floats:
    """Return the item that all peers are sent."""
    return np.random.default_rng(3).random((1, *SHAPES[model]), dtype=np.float32)


def write_models(directory: Path) -> None:
    """Write the ONNX files, with fixed seeds."""
    import onnx  # noqa: PLC0415  # optional dependency

    directory.mkdir(parents=True, exist_ok=True)
    onnx.save(_convolutional("cnn", _FILTERS), directory / "cnn.onnx")
    onnx.save(_wide(), directory / "wide.onnx")
    onnx.save(_convolutional("slow", _SLOW_FILTERS), directory / "slow.onnx")


def model_bytes(model: str, directory: Path) -> int:
    """Return the file size of a model; the echo has no file."""
    path = directory / f"{model}.onnx"
    return path.stat().st_size if path.exists() else 0


def expected(model: str, directory: Path) -> list[float]:
    """Return the correct output for the example."""
    x = example(model)
    y = x if model == "echo" else _session(model, directory).run(None, {"x": x})[0]
    return [float(value) for value in np.ravel(y)]


def measure_bare(model: str, batch: int, directory: Path, seconds: float) -> BareOnnxRuntime:
    """Run batches with bare ONNX Runtime for some seconds."""
    session = _session(model, directory)
    x = np.repeat(example(model), batch, axis=0)
    session.run(None, {"x": x})
    took_s: list[float] = []
    end_s = perf_counter() + seconds
    while not took_s or perf_counter() < end_s:
        begin_s = perf_counter()
        session.run(None, {"x": x})
        took_s.append(perf_counter() - begin_s)
    return BareOnnxRuntime(model, batch, batch * len(took_s) / sum(took_s), median(took_s) * 1e3)


def _session(model: str, directory: Path) -> Any:  # onnxruntime has no types
    import onnxruntime  # noqa: PLC0415  # optional dependency

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    path = str(directory / f"{model}.onnx")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _convolutional(name: str, layers: tuple[tuple[int, int], ...]) -> Any:
    from onnx import helper  # noqa: PLC0415

    rng = np.random.default_rng(1)
    nodes, weights, last, channels = [], {}, "x", 3
    for layer, (filters, stride) in enumerate(layers):
        size = (filters, channels, 3, 3)
        weights[f"w{layer}"] = _scaled(rng, size, channels * 9)
        inputs = [last, f"w{layer}"]
        strides = [stride, stride]
        nodes.append(helper.make_node("Conv", inputs, [f"c{layer}"], pads=[1] * 4, strides=strides))
        last, channels = f"r{layer}", filters
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [last]))
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"]))
    weights["last"] = _scaled(rng, (channels, 10), channels)
    nodes.append(helper.make_node("MatMul", ["flat", "last"], ["y"]))
    return _model(name, nodes, weights, 10)


def _wide() -> Any:
    from onnx import helper  # noqa: PLC0415

    rng = np.random.default_rng(2)
    nodes, weights, last = [], {}, "x"
    for layer, size in enumerate(pairwise(_WIDTHS)):
        weights[f"w{layer}"] = _scaled(rng, size, size[0])
        is_last = layer == len(_WIDTHS) - 2
        product = "y" if is_last else f"m{layer}"
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [product]))
        if not is_last:
            last = f"r{layer}"
            nodes.append(helper.make_node("Relu", [product], [last]))
    return _model("wide", nodes, weights, _WIDTHS[-1])


def _scaled(rng: np.random.Generator, size: tuple[int, ...], inputs: int) -> Floats:
    """Return random weights with He initialisation, which preserves the variance of a signal."""
    return rng.standard_normal(size, dtype=np.float32) * np.float32(np.sqrt(2 / inputs))


def _model(name: str, nodes: list[Any], weights: dict[str, Floats], outputs: int) -> Any:
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    float32 = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", float32, ["n", *SHAPES[name]])],
        [helper.make_tensor_value_info("y", float32, ["n", outputs])],
        [numpy_helper.from_array(weight, key) for key, weight in weights.items()],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9)
