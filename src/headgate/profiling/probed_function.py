"""A function in the probe process: its cold start, and calls of it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from time import monotonic_ns
from typing import final

import msgspec

from headgate.core.errors import ConfigError
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.loader import build_model
from headgate.functions.measure import Measurement, MeasureRequest, example_call, measure
from headgate.profiling.model_store import fetch
from headgate.profiling.probe_client import ProbeTask, Started


@final
class ProbedFunction:
    """A model that was loaded as a platform instance loads it, and called once.

    `started` has the durations of the parts of that cold start.
    """

    def __init__(self, task: ProbeTask, ready_ns: int) -> None:
        if task.model is not None and task.code is None:
            _import_early("onnxruntime")
        imported_ns = monotonic_ns()
        if task.store is not None:
            task = _fetch_model(task, task.store)
        fetched_ns = monotonic_ns()
        model = build_model(task, task.base, task.function)
        built_ns = monotonic_ns()
        model.load()
        loaded_ns = monotonic_ns()
        self._runner = BatchRunner(task.function, model, is_idempotent=True)
        example = self._runner.example()
        if example is None:
            raise ConfigError(
                "has no example input to measure with",
                where=task.function,
                allowed="`inputs`, or an `example` method",
            )
        self._example = example
        called_ns = monotonic_ns()
        example_call(self._runner, example, 1)()
        self.started = Started(
            ready_ns=ready_ns,
            # Building the model imports the user's module.
            imports_ns=imported_ns - ready_ns + built_ns - fetched_ns,
            fetch_ns=fetched_ns - imported_ns,
            load_ns=loaded_ns - built_ns,
            first_call_ns=monotonic_ns() - called_ns,
            batches=model.batches,
        )

    def measure(self, request: MeasureRequest) -> Measurement:
        """Return the response times seen by closed-loop clients."""
        return measure(example_call(self._runner, self._example, request.batch), request)


def _import_early(name: str) -> None:
    """Import what `load` would import, so that it counts as import time.

    A missing module is ignored here: `load` reports it.
    """
    try:
        import_module(name)
    except ImportError:
        return


def _fetch_model(task: ProbeTask, store: str) -> ProbeTask:
    """Fetch the model (or the whole store, for code) and return a task that loads the copy."""
    if task.model is None:
        fetch(store, None, Path(task.copy))
        sys.path.insert(0, task.base)  # for modules that are not in the store
        return msgspec.structs.replace(task, base=task.copy)
    name = Path(task.model).name if Path(task.model).is_absolute() else task.model
    fetch(store, name, Path(task.copy))
    return msgspec.structs.replace(task, base=task.copy, model=name)
