"""An image pipeline of three stages with ONNX models, its profiles, and ways to configure it.

`resize` turns bytes into numbers and halves the size, `features` convolves, and `classify` is wide:
it reads about 75 MB of weights per batch, whatever its size, so batches pay there and nowhere else.
The weights are random, which costs as much as if they were fitted.

A *way* gives each stage a batch size and cores. The profiles are measured here, one process, the
cores pinned, with the loop that workers measure with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headgate.config import from_spec
from headgate.config.build import interpolated
from headgate.core.clock import MILLISECOND_NS
from headgate.core.model import App
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.measure import MeasureRequest, example_call, measure
from headgate.functions.model import OnnxModel
from headgate.planning.frontier.candidates import pipeline_frontier, stage_candidates
from headgate.planning.frontier.configs import StageConfig

STAGES: Final = ("resize", "features", "classify")
PIPELINE: Final = "pictures"
NODES: Final = 2
BATCHES: Final = (1, 2, 4, 8, 16, 32)
FRONTIER, FIXED, OWN = "frontier", "equal cores, batch 1", "each stage's optimum"

_SIZE: Final = 256
_PIXELS: Final = _SIZE // 2
_FILTERS: Final = ((32, 1), (64, 2), (128, 2))  # (filters, stride) per layer
_WIDTHS: Final = (128, 3072, 3072, 3072, 10)
_USD_PER_CORE_HOUR: Final = 0.04

Profiles = Mapping[str, Mapping[int, tuple[int, ...]]]  # by stage and cores: ns by batch size


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The largest batch of a stage, and its cores."""

    batch: int
    cores: int


Way = Mapping[str, StageChoice]  # by stage


def cores_per_worker() -> int:
    """Return the cores of each of two workers, with two left for the gateway and the clients
    where there are more than three.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores if cores < 4 else cores - 2) // NODES)


def core_counts(cores: int) -> list[int]:
    """Return the core counts that a stage may have: powers of two, and all.

    >>> core_counts(7)
    [1, 2, 4, 7]
    """
    return sorted({*(1 << power for power in range(cores.bit_length())), cores} - {0})


def measure_profiles(folder: Path, counts: Sequence[int], seconds: float) -> Profiles:
    """Measure all stages, each batch size for this long."""
    return {
        stage: {count: _measure(folder / f"{stage}.onnx", count, seconds) for count in counts}
        for stage in STAGES
    }


def fastest_ns(profiles: Profiles) -> int:
    """Return the time of a single request on idle workers, each stage at its fastest."""
    return sum(min(times[0] for times in by_cores.values()) for by_cores in profiles.values())


def choose_ways(profiles: Profiles, cores: int, slo_ns: int, plan_ns: int) -> dict[str, Way]:
    """Return the ways to compare, by name.

    The frontier plans a request within `plan_ns`, which leaves the rest of the objective for
    queueing. The optimum of a stage by itself is its cheapest configuration within the objective.
    """
    app = from_spec(_spec(profiles, cores, slo_ns), "the image pipeline").app
    plan = pipeline_frontier(app, app.pipelines[0]).plan(plan_ns)
    own = [_own_optimum(app, index, slo_ns) for index in range(len(STAGES))]
    return {
        FRONTIER: dict(zip(STAGES, map(_choice, plan.configs), strict=True)),
        FIXED: dict.fromkeys(STAGES, StageChoice(1, cores)),
        OWN: dict(zip(STAGES, map(_choice, own), strict=True)),
    }


def core_ns(profiles: Profiles, way: Way) -> float:
    """Return the core time of a request in full batches, by its profiles."""
    return sum(
        choice.cores * profiles[stage][choice.cores][choice.batch - 1] / choice.batch
        for stage, choice in way.items()
    )


def served_app(profiles: Profiles, way: Way, cores: int, slo_ns: int) -> dict[str, object]:
    """Return the application that serves the pipeline in one of the ways."""
    functions = {
        stage: {
            "model": f"{stage}.onnx",
            "options": {"threads": choice.cores},
            "cpus": choice.cores,
            "exec_time": [f"{t}ns" for t in profiles[stage][choice.cores][: choice.batch]],
        }
        for stage, choice in way.items()
    }
    return {**_pipeline(cores, slo_ns), "functions": functions, "serve": {"port": 0}}


def write_models(folder: Path) -> None:
    """Write the ONNX files, with fixed seeds."""
    import onnx  # noqa: PLC0415  # optional dependency

    for stage, model in (("resize", _resize()), ("features", _features()), ("classify", _wide())):
        onnx.save(model, folder / f"{stage}.onnx")


def _measure(path: Path, cores: int, seconds: float) -> tuple[int, ...]:
    """Return the times of all batch sizes, those in between interpolated."""
    with _pinned(cores):
        model = OnnxModel(path, threads=cores)
        model.load()
        runner = BatchRunner(path.stem, model, is_idempotent=True)
        example = runner.example()
        assert example is not None
        times_ns: dict[int, int] = {}
        for batch in BATCHES:
            call = example_call(runner, example, batch)
            call()
            p50_ms = measure(call, MeasureRequest(1, batch, seconds, 20)).p50_ms
            times_ns[batch] = max([round(p50_ms * 1e6), *times_ns.values()])  # monotone
    return interpolated(times_ns)


@contextmanager
def _pinned(count: int) -> Iterator[None]:
    """Run on this many cores: the highest numbers, which workers get first."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _own_optimum(app: App, index: int, slo_ns: int) -> StageConfig:
    candidates = stage_candidates(app, app.pipelines[0].stages[index].function)
    in_time = [config for config in candidates if config.time_ns <= slo_ns]
    return min(in_time, key=lambda config: (config.cost, config.time_ns))


def _choice(config: StageConfig) -> StageChoice:
    return StageChoice(config.batch, config.cpu_milli // 1000)


def _spec(profiles: Profiles, cores: int, slo_ns: int) -> dict[str, object]:
    """Return the application with all configurations that a stage may have."""
    functions = {}
    for stage, by_cores in profiles.items():
        shapes = [
            {"cpus": count, "exec_time": [f"{t}ns" for t in times]}
            for count, times in by_cores.items()
        ]
        functions[stage] = {**shapes[0], "shapes": shapes[1:]}
    return {**_pipeline(cores, slo_ns), "functions": functions}


def _pipeline(cores: int, slo_ns: int) -> dict[str, object]:
    stages: dict[str, object] = {STAGES[0]: {"function": STAGES[0]}}
    for before, stage in pairwise(STAGES):
        stages[stage] = {"function": stage, "after": [before]}
    pool = {
        "tier": "dedicated",
        "nodes": NODES,
        "cpus": cores,
        "slots": cores,
        "price": f"${cores * _USD_PER_CORE_HOUR:g}/h",
    }
    slo = {"latency": f"{slo_ns / MILLISECOND_NS:g}ms", "quantile": 0.95}
    return {
        "pipelines": {PIPELINE: {"stages": stages, "slo": slo}},
        "pools": {"workers": pool},
    }


# `Any` below: onnx is optional, and has no types where it is missing.


def _resize() -> Any:
    from onnx import TensorProto, helper  # noqa: PLC0415

    nodes = [
        helper.make_node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["numbers"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "AveragePool", ["planes"], ["halved"], kernel_shape=[2, 2], strides=[2, 2]
        ),
        helper.make_node("Div", ["halved", "scale"], ["pixels"]),
    ]
    weights = {"scale": np.array(255, np.float32)}
    given = helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", _SIZE, _SIZE, 3])
    return _model("resize", nodes, weights, given, ("pixels", 3, _PIXELS, _PIXELS))


def _features() -> Any:
    from onnx import TensorProto, helper  # noqa: PLC0415

    rng = np.random.default_rng(1)
    nodes, weights, last, channels = [], {}, "pixels", 3
    for layer, (filters, stride) in enumerate(_FILTERS):
        weights[f"w{layer}"] = _scaled(rng, (filters, channels, 3, 3), channels * 9)
        inputs, strides = [last, f"w{layer}"], [stride, stride]
        nodes.append(helper.make_node("Conv", inputs, [f"c{layer}"], pads=[1] * 4, strides=strides))
        last, channels = f"r{layer}", filters
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [last]))
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["features"]))
    shape = (3, _PIXELS, _PIXELS)
    given = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", *shape])
    return _model("features", nodes, weights, given, ("features", channels))


def _wide() -> Any:
    from onnx import TensorProto, helper  # noqa: PLC0415

    rng = np.random.default_rng(2)
    nodes, weights, last = [], {}, "features"
    for layer, size in enumerate(pairwise(_WIDTHS)):
        weights[f"w{layer}"] = _scaled(rng, size, size[0])
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        last = f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [last]))
    nodes.append(helper.make_node("Softmax", [last], ["probabilities"], axis=1))
    given = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", _WIDTHS[0]])
    return _model("classify", nodes, weights, given, ("probabilities", _WIDTHS[-1]))


def _scaled(rng: np.random.Generator, size: tuple[int, ...], inputs: int) -> NDArray[np.float32]:
    return rng.standard_normal(size, dtype=np.float32) * np.float32(np.sqrt(2 / inputs))


def _model(
    name: str,
    nodes: list[Any],
    weights: Mapping[str, NDArray[np.float32]],
    given: Any,
    output: tuple[str, *tuple[int, ...]],
) -> Any:
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    result = helper.make_tensor_value_info(output[0], TensorProto.FLOAT, ["n", *output[1:]])
    constants = [numpy_helper.from_array(weight, key) for key, weight in weights.items()]
    graph = helper.make_graph(nodes, name, [given], [result], constants)
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9)
