"""Runs batches on a loaded model.

Requests share a batch and nothing else: a bad request must not affect another. So each request is
decoded and encoded by itself, only requests with equal batch keys are concatenated, and if a
concatenated batch fails, its requests are run one by one, so that only the bad ones fail. If a
function is not idempotent, all requests of a failed `predict` fail together.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final, final

import numpy as np

from headgate.core.errors import error_text, sendable
from headgate.functions.arrays import (
    Array,
    batch_key,
    concatenate,
    item_count,
    split,
    to_array,
    to_tensor,
)
from headgate.functions.model import Model, signature_of
from headgate.functions.tensor import (
    UNSURE,
    TaskInputs,
    TaskResult,
    Tensor,
    TensorSpec,
    format_spec,
    shapes_match,
)

_LOG: Final = logging.getLogger(__name__)

TRACEBACK_INTERVAL_NS: Final = 100_000_000  # log rate limit: a client may cause failures on purpose


@final
@dataclass(slots=True)
class _DecodedTask:
    """A decoded request. Requests with equal `key` are concatenated."""

    index: int
    task: TaskInputs
    value: object
    key: Hashable


@final
class BatchRunner:
    """Runs batches on one loaded model."""

    def __init__(self, name: str, model: Model, *, is_idempotent: bool) -> None:
        self.name = name
        self.model = model
        self.signature = signature_of(model)  # after loading, because `load` may set it
        self._batches = self.signature.batches
        self._is_idempotent = is_idempotent
        self._inputs = {spec.name: spec for spec in self.signature.inputs}
        # The recent mean, updated by `BatchJob`; the initial guess is long.
        self.mean_exec_ns = 10_000_000.0
        self._next_log_ns = 0
        self._outputs = {spec.name: spec for spec in self.signature.outputs}

    def run(self, tasks: Sequence[TaskInputs]) -> list[TaskResult]:
        """Return the result of each task, in order. Never raises."""
        results: list[TaskResult | None] = [None] * len(tasks)
        groups: dict[Hashable, list[_DecodedTask]] = {}
        is_single = len(tasks) == 1 or not self._batches
        for index, task in enumerate(tasks):
            decoded = self._decode(index, task, is_single=is_single)
            if isinstance(decoded, TaskResult):
                results[index] = decoded
            else:
                groups.setdefault(decoded.key, []).append(decoded)
        for group in groups.values():
            self._predict(group, results)
        return [result for result in results if result is not None]

    def example(self) -> list[Tensor] | None:
        """Return the inputs of a request of one item; None if the model has none.

        Raises whatever the model raises.
        """
        arrays = self.model.example()
        if arrays is None:
            return None
        return [
            to_tensor(name, array, datatype=getattr(self._inputs.get(name), "datatype", ""))
            for name, array in arrays.items()
        ]

    def unload(self) -> None:
        """Unload the model. Nothing may run on it any more."""
        try:
            self.model.unload()
        except BaseException as error:  # a model may raise anything
            self.log_error(error)

    def _decode(
        self, index: int, task: TaskInputs, *, is_single: bool
    ) -> _DecodedTask | TaskResult:
        try:
            arrays = self._arrays(task)
        except Exception as error:
            problem = str(error) if isinstance(error, ValueError) else error_text(error)
            return _failure(task, problem, 400)
        try:
            value = self.model.decode(arrays)
        except BaseException as error:  # a model may raise anything
            return _failure(task, error_text(error), 400)
        if not self._batches:
            return _DecodedTask(index, task, value, index)
        try:
            items = item_count(value)
            key: Hashable = index if is_single else batch_key(value)
            hash(key)
        except ValueError as error:
            return _failure(task, f"the result of decode {error}", 500)
        except BaseException as error:  # a class of the model may raise anything
            return _failure(task, f"the result of decode is not a batch: {error_text(error)}", 500)
        if items != task.items:
            return _failure(task, f"decode returned {items} items for {task.items}", 500)
        return _DecodedTask(index, task, value, key)

    def _arrays(self, task: TaskInputs) -> dict[str, Array]:
        """Return the inputs, checked against the signature."""
        specs = self._inputs
        arrays: dict[str, Array] = {}
        for tensor in task.inputs:
            spec = specs.get(tensor.name)
            if specs:
                _check_input(tensor, spec)
            if tensor.name in arrays:
                raise ValueError(f"{tensor.name}: is sent twice")
            raw_bf16 = spec is not None and spec.datatype == "BF16"
            array = to_array(tensor, raw_bf16=raw_bf16)
            if self._batches and array.shape[:1] != (task.items,):
                raise ValueError(f"{tensor.name}: {list(array.shape)} for {task.items} items")
            arrays[tensor.name] = array
        if specs and len(arrays) != len(specs):
            missing = ", ".join(name for name in specs if name not in arrays)
            raise ValueError(f"{missing}: missing")
        return arrays

    def _predict(self, group: list[_DecodedTask], results: list[TaskResult | None]) -> None:
        """Run requests as one batch; if that fails and a retry is safe, one by one."""
        has_run = False
        parts: list[object] | None = None
        try:
            value = concatenate([decoded.value for decoded in group])
            has_run = True
            parts = self._split(self.model.predict(value), group)
        except BaseException as error:  # a model may raise anything
            if len(group) == 1 or (has_run and not self._is_idempotent):
                self.log_error(error)
                for decoded in group:
                    results[decoded.index] = _failure(decoded.task, error_text(error), 500)
                return
        for index, decoded in enumerate(group):
            if parts is None:
                self._predict([decoded], results)
            else:
                results[decoded.index] = self._encode(decoded.task, parts[index])

    def _split(self, result: object, group: list[_DecodedTask]) -> list[object]:
        """Split the result of a batch by request."""
        if not self._batches:
            return [result]
        try:
            return split(result, [decoded.task.items for decoded in group])
        except ValueError as error:
            raise ValueError(f"the result of predict {error}") from None

    def _encode(self, task: TaskInputs, part: object) -> TaskResult:
        try:
            arrays = self.model.encode(part)
            outputs = self._tensors(arrays, task.items)
            unsure = arrays.get(UNSURE)
            is_unsure = unsure is not None and unsure.dtype == np.bool_ and bool(unsure.any())
        except BaseException as error:  # a model may raise anything
            self.log_error(error)
            return _failure(task, error_text(error), 500)
        return TaskResult(task.task_id, outputs, is_unsure=is_unsure)

    def _tensors(self, arrays: object, items: int) -> list[Tensor]:
        """Return the outputs, checked against the signature."""
        if not isinstance(arrays, dict):
            raise TypeError(f"encode returned a {type(arrays).__name__}, not a dict of arrays")
        missing = [name for name in self._outputs if name not in arrays]
        if missing:
            raise ValueError(f"the output {missing[0]!r} is missing")
        tensors = []
        for name, array in arrays.items():
            if isinstance(array, np.generic):
                array = np.asarray(array)
            if not isinstance(name, str) or not isinstance(array, np.ndarray):
                raise TypeError(f"output {name!r} is a {type(array).__name__}, not an array")
            spec = self._outputs.get(name)
            if spec is None:
                tensors.append(to_tensor(sendable(name), array))
                continue
            tensor = to_tensor(spec.name, array, datatype=spec.datatype)
            if spec.datatype != tensor.datatype or not shapes_match(tensor.shape, spec.shape):
                actual = format_spec(TensorSpec(name, tensor.datatype, tensor.shape))
                raise TypeError(f"output {name!r} is {actual}, declared {format_spec(spec)}")
            if self._batches and tensor.shape[0] != items:
                raise ValueError(f"output {name!r} has {tensor.shape[0]} items for {items}")
            tensors.append(tensor)
        return tensors

    def log_error(self, error: BaseException) -> None:
        """Log a traceback, rate-limited; clients get only the error text."""
        now_ns = monotonic_ns()
        if now_ns < self._next_log_ns:
            return
        self._next_log_ns = now_ns + TRACEBACK_INTERVAL_NS
        _LOG.error("%s: %s", self.name, error_text(error), exc_info=error)


def _check_input(tensor: Tensor, spec: TensorSpec | None) -> None:
    if spec is None:
        raise ValueError(f"{tensor.name}: is not an input of the function")
    if tensor.datatype != spec.datatype:
        raise ValueError(f"{tensor.name}: is {tensor.datatype}, must be {spec.datatype}")
    if not shapes_match(tensor.shape, spec.shape):
        raise ValueError(f"{tensor.name}: is {list(tensor.shape)}, must be {list(spec.shape)}")


def _failure(task: TaskInputs, error: str, status: int) -> TaskResult:
    return TaskResult(task.task_id, [], sendable(error) or "unknown error", status)
