"""Runs requests on a loaded model one by one, for an instance that has no company to batch with."""

from __future__ import annotations

from typing import Final, Protocol, final

import numpy as np
from msgspec import Struct

from headgate.functions.arrays import Array, split, to_array, to_tensor
from headgate.functions.error_text import error_text, sendable
from headgate.functions.model import Model, signature_of
from headgate.functions.tensor import Tensor

# Work that goes to a function elsewhere, and what became of it.


class AnyUnbatchedCall(Protocol):
    """One request for a function, whoever keeps it."""

    task_id: int
    items: int
    inputs: list[Tensor]


@final
class UnbatchedCall(Struct, gc=False):
    """One request for a function."""

    task_id: int
    items: int
    inputs: list[Tensor]


@final
class UnbatchedResult(Struct, gc=False):
    """What became of it: outputs, or an error and whose it is (400 or 500)."""

    task_id: int
    outputs: list[Tensor]
    error: str = ""
    status: int = 200
    is_unsure: bool = False


UNSURE: Final = "unsure"


@final
class UnbatchedRunner:
    """One loaded model. What is wrong with one request changes no other."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._signature = signature_of(model)  # after loading: that may be when it is found out
        self._inputs = {spec.name: spec.datatype for spec in self._signature.inputs}
        self._outputs = {spec.name: spec.datatype for spec in self._signature.outputs}

    def run(self, call: AnyUnbatchedCall) -> UnbatchedResult:
        """Return what becomes of a request. Raises nothing."""
        try:
            value = self._model.decode(self._arrays(call))
        except Exception as error:  # whatever a model does: what it raises here is the client's
            return UnbatchedResult(call.task_id, [], error_text(error), 400)
        try:
            result = self._model.predict(value)
            part = split(result, [call.items])[0] if self._signature.batches else result
            arrays = self._model.encode(part)
            outputs = self._tensors(arrays)
            unsure = np.asarray(arrays.get(UNSURE, False))
            is_unsure = unsure.dtype == np.bool_ and bool(unsure.any())
        except Exception as error:  # whatever a model does
            return UnbatchedResult(call.task_id, [], error_text(error), 500)
        return UnbatchedResult(call.task_id, outputs, is_unsure=is_unsure)

    def _arrays(self, call: AnyUnbatchedCall) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for tensor in call.inputs:
            wanted = self._inputs.get(tensor.name, "" if self._inputs else tensor.datatype)
            if wanted != tensor.datatype:
                must = f"must be {wanted}" if wanted else "is no input of it"
                raise ValueError(f"{tensor.name}: is {tensor.datatype}, {must}")
            array = to_array(tensor, raw_bf16=wanted == "BF16")
            if self._signature.batches and array.shape[:1] != (call.items,):
                raise ValueError(f"{tensor.name}: {list(array.shape)} for {call.items} items")
            arrays[tensor.name] = array
        missing = [name for name in self._inputs if name not in arrays]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return arrays

    def _tensors(self, arrays: dict[str, Array]) -> list[Tensor]:
        missing = [name for name in self._outputs if name not in arrays]
        if missing:
            raise ValueError(f"there is no output {missing[0]!r}")
        return [
            to_tensor(sendable(name), np.asarray(array), datatype=self._outputs.get(name, ""))
            for name, array in arrays.items()
        ]
