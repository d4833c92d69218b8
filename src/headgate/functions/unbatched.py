"""Runs requests on a loaded model one by one: a FaaS instance has nothing to batch with."""

from __future__ import annotations

from typing import Final, Protocol, final

import numpy as np
from msgspec import Struct

from headgate.functions.arrays import Array, split, to_array, to_tensor
from headgate.functions.error_text import error_text, sendable
from headgate.functions.model import Model, signature_of
from headgate.functions.tensor import Tensor

UNSURE: Final = "unsure"


class AnyUnbatchedCall(Protocol):
    """One request for a function: any class with these attributes."""

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
    """The result of a request: outputs, or an error with its status (400 client error, 500 function
    error).
    """

    task_id: int
    outputs: list[Tensor]
    error: str = ""
    status: int = 200
    is_unsure: bool = False


@final
class UnbatchedRunner:
    """Runs requests on one loaded model. A bad request affects no other."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._signature = signature_of(model)  # after loading, because `load` may set it
        self._inputs = {spec.name: spec.datatype for spec in self._signature.inputs}
        self._outputs = {spec.name: spec.datatype for spec in self._signature.outputs}

    def run(self, call: AnyUnbatchedCall) -> UnbatchedResult:
        """Return the result of a request. Never raises."""
        try:
            value = self._model.decode(self._arrays(call))
        except Exception as error:  # a model may raise anything; here it is a client error
            return UnbatchedResult(call.task_id, [], error_text(error), 400)
        try:
            result = self._model.predict(value)
            part = split(result, [call.items])[0] if self._signature.batches else result
            arrays = self._model.encode(part)
            outputs = self._tensors(arrays)
            unsure = np.asarray(arrays.get(UNSURE, False))
            is_unsure = unsure.dtype == np.bool_ and bool(unsure.any())
        except Exception as error:  # a model may raise anything
            return UnbatchedResult(call.task_id, [], error_text(error), 500)
        return UnbatchedResult(call.task_id, outputs, is_unsure=is_unsure)

    def _arrays(self, call: AnyUnbatchedCall) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for tensor in call.inputs:
            wanted = self._inputs.get(tensor.name, "" if self._inputs else tensor.datatype)
            if wanted != tensor.datatype:
                must = f"must be {wanted}" if wanted else "is not an input of the function"
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
            raise ValueError(f"the output {missing[0]!r} is missing")
        return [
            to_tensor(sendable(name), np.asarray(array), datatype=self._outputs.get(name, ""))
            for name, array in arrays.items()
        ]
