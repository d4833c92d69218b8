"""A model: four methods around the code of an ML engineer.

    load      once, in the worker: weights, sessions, warm-up
    decode    the arrays of one request -> its part of the input of `predict`
    predict   a whole batch -> a whole batch
    encode    one request's part of that -> its output arrays

All but `predict` have a default. **The one rule:** what `decode` returns for a request of n items
is a batch of n: an array with n rows, a list of n, or a dict of those. Headgate concatenates what
`decode` returned for all requests of a batch, calls `predict` once, and splits its result, which
must be a batch of as many items, for `encode`. A model never sees where one request ends and the
next begins, and its result must not depend on it.

With `batches = False` the first dimension has no meaning, and `predict` gets one request at a time.
A Python function and an ONNX file are models, too.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, overload

import numpy as np

from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array, dtype_of
from headgate.functions.tensor import (
    ITEM_BYTES,
    Signature,
    TensorSpec,
    TensorSpecsLike,
    parse_specs,
)

_LOG: Final = logging.getLogger(__name__)


class Model:
    """Derive from this class, or decorate a Python function with `@function`.

    `inputs` and `outputs` are shown to clients, and requests are checked against them, as in
    `{"image": "FP32[-1, 3, 64, 64]"}`. Without them the model must check its inputs itself. They
    may also be set in `load`. Arrays are read-only and stay valid for as long as they are
    referenced. An array that is kept for long occupies shared memory that later requests need: copy
    it instead. Several threads use a model at the same time only if `concurrency` is above 1. A
    boolean output named `unsure` tells a cascade to run its next stage. A class whose constructor
    takes `threads` is told the CPUs that its function declares: one model is made for each number.

    >>> class Scale(Model):
    ...     inputs = {"x": "FP32[-1, 2]"}
    ...     outputs = {"y": "FP32[-1, 2]"}
    ...
    ...     def load(self):
    ...         self.factor = np.float32(3)
    ...
    ...     def predict(self, batch):
    ...         return {"y": batch["x"] * self.factor}
    >>> model = Scale()
    >>> model.load()
    >>> model.predict({"x": np.float32([[1, 2], [3, 4]])})
    {'y': array([[ 3.,  6.],
           [ 9., 12.]], dtype=float32)}
    """

    inputs: TensorSpecsLike = ()
    outputs: TensorSpecsLike = ()
    batches: bool = True
    platform: ClassVar[str] = "python"

    # `Any` below: the types between the methods are up to the model.

    def load(self) -> None:
        """Prepare to predict. Called once, in the worker, before all other methods."""

    def decode(self, inputs: dict[str, Array]) -> Any:
        """Return the part of one request in the input of `predict`.

        Exceptions are client errors.
        """
        return inputs

    def predict(self, batch: Any) -> Any:
        """Return the results of a batch, as a batch. Exceptions are errors of the model."""
        raise NotImplementedError(f"{type(self).__name__} has no predict")

    def encode(self, result: Any) -> dict[str, Array]:
        """Return the outputs of one request. A single array is the only output."""
        if isinstance(result, np.ndarray):
            names = [spec.name for spec in parse_specs(self.outputs, "outputs")]
            return {names[0] if len(names) == 1 else "output": result}
        outputs: dict[str, Array] = result
        return outputs

    def unload(self) -> None:
        """Release the resources of `load` that garbage collection does not."""

    def example(self) -> dict[str, Array] | None:
        """Return the inputs of a request of one item, for measurements; None if unknown.

        The default is zeros; dimensions of any size are 1.
        """
        specs = parse_specs(self.inputs, "inputs")
        if not specs:
            return None
        arrays: dict[str, Array] = {}
        for spec in specs:
            array = np.zeros(
                [1 if size < 0 else size for size in spec.shape], dtype_of(spec.datatype)
            )
            if spec.datatype == "BYTES":
                array.fill(b"")
            arrays[spec.name] = array
        return arrays


def signature_of(model: Model) -> Signature:
    """Return the signature of a loaded model. Raises `ConfigError` if its specs are invalid."""
    name = type(model).__name__
    inputs = parse_specs(model.inputs, f"{name}.inputs")
    outputs = parse_specs(model.outputs, f"{name}.outputs")
    allowed = "-1 there, or batches = False"
    for spec in (*inputs, *outputs):
        if model.batches and spec.shape[:1] != (-1,):
            problem, shape = "does not count items in its first dimension", spec.shape
            raise ConfigError(problem, where=name, key=spec.name, value=shape, allowed=allowed)
    return Signature(inputs, outputs, model.batches, model.platform)


# Takes arrays; returns an array, or a dict or tuple of arrays.
PythonFunction: TypeAlias = Callable[..., Any]


@overload
def function(python_function: PythonFunction, /) -> type[FunctionModel]: ...


@overload
def function(
    *, inputs: TensorSpecsLike = (), outputs: TensorSpecsLike = (), batches: bool = True
) -> Callable[[PythonFunction], type[FunctionModel]]: ...


def function(
    python_function: PythonFunction | None = None,
    /,
    *,
    inputs: TensorSpecsLike = (),
    outputs: TensorSpecsLike = (),
    batches: bool = True,
) -> type[FunctionModel] | Callable[[PythonFunction], type[FunctionModel]]:
    """Turn a Python function into a `Model`: its parameters are the inputs, by name.

    It returns the only output, or several as a dict or in the order of `outputs`. Parameters beyond
    the declared inputs are options, which the application file may set.

    >>> @function(inputs={"x": "FP32[-1]"}, outputs={"y": "FP32[-1]"})
    ... def scaled(x, factor=2):
    ...     return x * factor
    >>> import numpy as np
    >>> scaled(factor=3).predict({"x": np.float32([1, 2])})
    {'y': array([3., 6.], dtype=float32)}
    """
    if python_function is None:
        return lambda python_function: _model_of(python_function, inputs, outputs, batches)
    return _model_of(python_function, inputs, outputs, batches)


class FunctionModel(Model):
    """A Python function as a model. `@function` derives a class from it."""

    wrapped: ClassVar[PythonFunction]
    input_names: ClassVar[frozenset[str]]
    option_names: ClassVar[tuple[str, ...]]
    output_names: ClassVar[tuple[str, ...]]
    accepts_any_input: ClassVar[bool]  # inputs of any name

    def __init__(self, **options: object) -> None:
        for name in options:
            if name not in self.option_names:
                where, allowed = type(self).__name__, ", ".join(self.option_names) or "none"
                problem = "is not an option of the function"
                raise ConfigError(problem, where=where, key=name, allowed=allowed)
        self._options = options

    def load(self) -> None:
        """Raise `ConfigError` if the function takes no inputs."""
        if not self.input_names and not self.accepts_any_input:
            raise _no_inputs(type(self).__name__, "a parameter without a default")

    def decode(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs after checking their names."""
        if not self.accepts_any_input and inputs.keys() != self.input_names:
            given, wanted = ", ".join(inputs), ", ".join(sorted(self.input_names))
            raise ValueError(f"expects the inputs {wanted}; got {given or 'none'}")
        return inputs

    def predict(self, batch: dict[str, Array]) -> object:
        """Call the function."""
        return _name_outputs(type(self).wrapped(**batch, **self._options), self.output_names)


def _no_inputs(where: str, allowed: str) -> ConfigError:
    return ConfigError("takes no inputs, and every request has one", where=where, allowed=allowed)


def _model_of(
    python_function: PythonFunction,
    inputs: TensorSpecsLike,
    outputs: TensorSpecsLike,
    batches: bool,
) -> type[FunctionModel]:
    name = python_function.__name__
    declared_names = [spec.name for spec in parse_specs(inputs, f"{name}: inputs")]
    input_names, option_names, accepts_any_input = _parameters(python_function, declared_names)
    members = {
        "__doc__": python_function.__doc__,
        "__module__": python_function.__module__,
        "inputs": inputs,
        "outputs": outputs,
        "batches": batches,
        "wrapped": staticmethod(python_function),
        "input_names": input_names,
        "option_names": option_names,
        "output_names": tuple(spec.name for spec in parse_specs(outputs, f"{name}: outputs")),
        "accepts_any_input": accepts_any_input,
    }
    return type(name, (FunctionModel,), members)


def _parameters(
    python_function: PythonFunction, declared_names: list[str]
) -> tuple[frozenset[str], tuple[str, ...], bool]:
    """Return the names of inputs, the names of options, and whether inputs of any name are
    accepted.
    """
    parameters = inspect.signature(python_function).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepts_any_input = any(p.kind == p.VAR_KEYWORD for p in parameters)
    needed = declared_names or [p.name for p in by_name if p.default is p.empty]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in needed]
    unknown = set(needed) - {p.name for p in by_name}
    if missing or (unknown and not accepts_any_input):
        raise ConfigError(
            "must have exactly its inputs as parameters without a default",
            where=python_function.__name__,
            value=[p.name for p in by_name],
            allowed=", ".join(needed),
        )
    options = tuple(p.name for p in by_name if p.name not in needed)
    return frozenset(needed), options, accepts_any_input


def _name_outputs(result: object, names: tuple[str, ...]) -> object:
    if isinstance(result, dict):
        return result
    if not isinstance(result, tuple):
        return {names[0] if len(names) == 1 else "output": result}
    if len(result) != len(names):
        raise ValueError(f"returned {len(result)} outputs, but declares {len(names)}")
    return dict(zip(names, result, strict=True))


class OnnxModel(Model):
    """Runs an ONNX file on the CPU. The signature is read from the file.

    `batches` says whether the first dimension of every input and output counts items. By default,
    it does if it is of any size, and if a trial shows that rows do not depend on each other.
    `threads` are the CPUs that the function declares, or else the cores that the process may use.
    """

    platform: ClassVar[str] = "onnxruntime_onnx"

    def __init__(
        self, path: str | Path, *, threads: int | None = None, batches: bool | None = None
    ) -> None:
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ConfigError("must be at least 1", where=str(path), key="threads", value=threads)
        if batches is not None and not isinstance(batches, bool):
            raise ConfigError(
                "must be true or false", where=str(path), key="batches", value=batches
            )
        self._path = Path(path)
        self._threads = threads
        self._declared_batches = batches

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if it cannot be read, or takes no inputs."""
        self._session = _session(self._path, self._threads or len(os.sched_getaffinity(0)))
        self.inputs = inputs = _specs(self._session.get_inputs(), self._path)
        self.outputs = outputs = _specs(self._session.get_outputs(), self._path)
        if not inputs:
            raise _no_inputs(str(self._path), "a graph with an input")
        self._output_names = [spec.name for spec in outputs]
        self._string_inputs = [spec.name for spec in inputs if spec.datatype == "BYTES"]
        declared = self._declared_batches
        self.batches = self._counts_items(inputs, outputs) if declared is None else declared

    def decode(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs, with strings as `str`."""
        for name in self._string_inputs:
            inputs[name] = _decoded(inputs[name])
        return inputs

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Run the graph of the file."""
        outputs = self._session.run(self._output_names, batch)
        return dict(zip(self._output_names, outputs, strict=True))

    def unload(self) -> None:
        """Release the session."""
        del self._session

    def _counts_items(
        self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
    ) -> bool:
        """Whether the first dimensions count items; if they might and do not, the log says why."""
        if any(spec.shape[:1] != (-1,) for spec in (*inputs, *outputs)):
            return False
        firsts = [
            node.shape[0] for node in (*self._session.get_inputs(), *self._session.get_outputs())
        ]
        names = [first if isinstance(first, str) else None for first in firsts]
        # Those that fail are expected to: ONNX Runtime would log each as an error.
        quiet = import_module("onnxruntime").RunOptions()
        quiet.log_severity_level = 4

        def run(rows: dict[str, Array]) -> dict[str, Array]:
            found = self._session.run(self._output_names, rows, quiet)
            return dict(zip(self._output_names, found, strict=True))

        problem = _why_not_items(inputs, outputs, names, run)
        if problem:
            _warn_once(self._path, problem)
        return not problem


@cache  # a file is loaded again and again
def _warn_once(path: Path, problem: str) -> None:
    hint = "options: {batches: true} says that they may be, {batches: false} that they may not"
    _LOG.warning("%s: requests are not batched: %s; %s", path.name, problem, hint)


_Run: TypeAlias = Callable[[dict[str, Array]], Mapping[str, Array]]
_OTHER_SIZES: Final = (16, 1, 64, 1024)  # of the other dimensions of any size: what a graph takes
_ELEMENTS_MAX: Final = 4096  # in those dimensions: an image of 64 x 64
_TOLERANCE: Final = 0.01  # of the largest element: rounding, also that of FP16
_INDICES_SHARE: Final = 0.05  # of integers may differ: rounding may swap two classes or ranks


def _why_not_items(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    names: Sequence[str | None],
    run: _Run,
) -> str:
    """Return why the first dimensions of a file do not count items; empty if they do.

    The file does not say: that the dimension is of any size is also true of the tokens of a
    sentence. If it were taken for items there, the answer to a client would depend on the requests
    of others. The `names` of the first dimensions are no proof. Exporters make up names of their
    own ("unk__6", "s0", "Gemmoutput_dim_0"), others for inputs than for outputs, or give none. So
    the graph is run, on a row alone and on the same row among others: it must answer the same. The
    names decide only where they contradict each other, or where the graph cannot be run on what is
    made up here.
    """
    chosen = {name for name in names if name and not any(map(str.isdigit, name))}
    told = sorted({"batch" if "batch" in name.lower() else name for name in chosen})
    if len(told) > 1:
        return f"the first dimensions have different names: {', '.join(told)}"
    for size in _other_sizes(inputs):
        row, other = _rows(inputs, size)
        try:
            alone = run(row)
        except Exception:  # it raises many types of its own
            continue
        # After one and before one, which is equal to it: a graph may look in one direction only,
        # or for duplicates.
        batch = {name: np.concatenate((other[name], row[name], row[name])) for name in row}
        try:
            together = run(batch)
        except Exception:
            return "several rows fail where one does not"
        return _difference(outputs, alone, together)
    if told == ["batch"]:
        return ""
    return "it cannot be tried out with made-up inputs whether rows depend on each other"


def _other_sizes(inputs: Sequence[TensorSpec]) -> list[int]:
    free = max(spec.shape[1:].count(-1) for spec in inputs)
    return [size for size in _OTHER_SIZES if size**free <= _ELEMENTS_MAX] if free else [1]


def _rows(inputs: Sequence[TensorSpec], size: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return two rows that differ in every element. Of integers, 0 and 1 are most often valid."""
    random = np.random.default_rng(0)  # all workers have to find the same
    row: dict[str, Array] = {}
    other: dict[str, Array] = {}
    for spec in inputs:
        shape = (1, *(size if length < 0 else length for length in spec.shape[1:]))
        dtype = dtype_of(spec.datatype)
        if spec.datatype == "BYTES":
            row[spec.name], other[spec.name] = (
                np.full(shape, "a", dtype),
                np.full(shape, "b", dtype),
            )
            continue
        values = random.random(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        row[spec.name], other[spec.name] = values.astype(dtype), (1 - values).astype(dtype)
    return row, other


def _difference(
    outputs: Sequence[TensorSpec], alone: Mapping[str, Array], together: Mapping[str, Array]
) -> str:
    for spec in outputs:
        one, three = alone[spec.name], together[spec.name]
        if one.shape[:1] != (1,) or three.shape[:1] != (3,):
            return f"output {spec.name!r} has not as many rows as the inputs"
        if not all(_are_equal(one, three[at : at + 1]) for at in (1, 2)):
            return f"a row of output {spec.name!r} depends on the other rows"
    return ""


def _are_equal(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "iuf":
        return bool(np.array_equal(one, other))
    left, right = np.asarray(one, np.float64), np.asarray(other, np.float64)
    largest = np.abs(left, where=np.isfinite(left), out=np.zeros_like(left)).max(initial=0.0)
    is_close = np.isclose(left, right, rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)
    return bool(np.mean(~is_close) <= (0.0 if one.dtype.kind == "f" else _INDICES_SHARE))


# `Any` below: ONNX Runtime is an optional extra without types.


def _session(path: Path, threads: int) -> Any:
    if not path.is_file():
        raise ConfigError("does not exist", where=str(path))
    try:
        # By name, because it has no types; here, because it is optional and slow to import.
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        problem = "needs ONNX Runtime: pip install 'headgate[onnx]'"
        raise ConfigError(problem, where=str(path)) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads that spin while they wait would take CPU time from other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it raises many types of its own
        problem = str(error).replace("\n", " ")
        raise ConfigError(f"cannot be loaded: {problem}", where=str(path)) from None


def _specs(nodes: Sequence[Any], path: Path) -> tuple[TensorSpec, ...]:
    specs = []
    for node in nodes:
        datatype = _DATATYPES.get(node.type)
        if datatype is None:
            known, kind = ", ".join(_DATATYPES), node.type
            problem = "has an unsupported type"
            raise ConfigError(problem, where=str(path), key=node.name, value=kind, allowed=known)
        shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
        specs.append(TensorSpec(node.name, datatype, shape))
    return tuple(specs)


def _decoded(array: Array) -> Array:
    texts: Array = np.empty(array.size, object)
    for index, element in enumerate(array.reshape(-1).tolist()):
        texts[index] = element.decode()
    return texts.reshape(array.shape)


_ONNX_NAMES: Final = {"FP16": "float16", "FP32": "float", "FP64": "double", "BYTES": "string"}
_DATATYPES: Final[Mapping[str, str]] = {
    f"tensor({_ONNX_NAMES.get(name, name.lower())})": name
    for name in ITEM_BYTES
    if name != "BF16"  # NumPy, through which inputs come, has no such type
}
