"""An ONNX file as a model. Its signature is read from the file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array
from headgate.functions.model import Model
from headgate.functions.tensor import ITEM_BYTES, TensorSpec


class OnnxModel(Model):
    """Runs an ONNX file on the CPU.

    Requests are batched if the first dimension of every input and output is symbolic. `threads`
    defaults to the number of cores that the process may use.
    """

    platform: ClassVar[str] = "onnxruntime_onnx"

    def __init__(self, path: str | Path, *, threads: int | None = None) -> None:
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ConfigError("must be at least 1", where=str(path), key="threads", value=threads)
        self._path = Path(path)
        self._threads = threads

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if it cannot be read."""
        self._session = _session(self._path, self._threads or len(os.sched_getaffinity(0)))
        self.inputs = _specs(self._session.get_inputs(), self._path)
        self.outputs = _specs(self._session.get_outputs(), self._path)
        self.batches = all(
            spec.shape and spec.shape[0] == -1 for spec in (*self.inputs, *self.outputs)
        )
        self._output_names = [spec.name for spec in self.outputs]
        self._string_inputs = [spec.name for spec in self.inputs if spec.datatype == "BYTES"]

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


# `Any` below: ONNX Runtime is an optional extra without types.


def _session(path: Path, threads: int) -> Any:
    if not path.is_file():
        raise ConfigError("does not exist", where=str(path))
    try:
        # By name, because it has no types; here, because it is an optional extra and slow to
        # import.
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        raise ConfigError(
            "needs ONNX Runtime: pip install 'headgate[onnx]'", where=str(path)
        ) from None
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
            raise ConfigError(
                "has an unsupported type", where=str(path), key=node.name, value=node.type,
                allowed=", ".join(_DATATYPES),
            )  # fmt: skip
        shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
        specs.append(TensorSpec(node.name, datatype, shape))
    return tuple(specs)


def _decoded(array: Array) -> Array:
    texts: Array = np.empty(array.size, object)
    for index, element in enumerate(array.reshape(-1).tolist()):
        texts[index] = element.decode()
    return texts.reshape(array.shape)


_ONNX_NAMES: Final = {"FP16": "float16", "FP32": "float", "FP64": "double", "BYTES": "string"}
_DATATYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        f"tensor({_ONNX_NAMES.get(name, name.lower())})": name
        for name in ITEM_BYTES
        if name != "BF16"  # NumPy, through which inputs come, has no such type
    }
)
