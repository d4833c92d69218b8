"""The subject: a function started the way an instance of a platform starts it, and then called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import monotonic_ns
from typing import final

import msgspec

from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array
from headgate.functions.columns import join, split
from headgate.functions.model import Model
from headgate.functions.source import build_model
from headgate.profiling.clients import measure
from headgate.profiling.messages import Found, Started, Task, Wish
from headgate.profiling.store import fetch


@final
class Subject:
    """A loaded model that was called once. `started` says how long that took, in its parts."""

    def __init__(self, task: Task, ready_ns: int) -> None:
        if task.model is not None and task.code is None:
            _import_early("onnxruntime")
        imported_ns = monotonic_ns()
        if task.store is not None:
            task = _fetched(task, task.store)
        fetched_ns = monotonic_ns()
        self._model = build_model(task, task.base, task.function)
        built_ns = monotonic_ns()
        self._model.load()
        loaded_ns = monotonic_ns()
        self._example = _example(self._model, task.function)
        called_ns = monotonic_ns()
        self.call(1)
        self.started = Started(
            ready_ns=ready_ns,
            # What the user's module imports is found out where it is built.
            imports_ns=imported_ns - ready_ns + built_ns - fetched_ns,
            fetch_ns=fetched_ns - imported_ns,
            load_ns=loaded_ns - built_ns,
            first_call_ns=monotonic_ns() - called_ns,
            batches=self._model.batches,
        )

    def measure(self, wish: Wish) -> Found:
        """Return what clients that call it again and again have to wait."""
        return measure(self._caller(wish.batch), wish)

    def call(self, batch: int) -> None:
        """Send a batch through the model, each item from a request of its own."""
        self._caller(batch)()

    def _caller(self, batch: int) -> Callable[[], None]:
        model, example, lengths = self._model, self._example, [1] * batch

        def call() -> None:
            columns = [model.decode(dict(example)) for _ in range(batch)]
            answer = model.predict(join(columns))
            for part in split(answer, lengths) if model.batches else (answer,):
                model.encode(part)

        return call


def _import_early(name: str) -> None:
    """Import what `load` would, so that it counts as what it is. That may miss it; `load` says."""
    try:
        import_module(name)
    except ImportError:
        return


def _fetched(task: Task, store: str) -> Task:
    """Fetch the model, or all there is beside the code; the copy is what gets loaded."""
    if task.model is None:
        fetch(store, None, Path(task.copy))
        sys.path.insert(0, task.base)  # for what is not in the store
        return msgspec.structs.replace(task, base=task.copy)
    name = Path(task.model).name if Path(task.model).is_absolute() else task.model
    fetch(store, name, Path(task.copy))
    return msgspec.structs.replace(task, base=task.copy, model=name)


def _example(model: Model, function: str) -> dict[str, Array]:
    example = model.example()
    if example is None:
        raise ConfigError(
            "does not say what it takes: there is nothing to measure with",
            where=function,
            allowed="`inputs`, or an `example` method",
        )
    for array in example.values():
        array.flags.writeable = False  # as those of requests are
    return example
