"""A function in the probe process: its cold start, and calls of it.

A cold start may include fetching the model from a store: a directory, or an S3 bucket.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path, PurePosixPath
from time import monotonic_ns
from typing import Any, Final, final

import msgspec

from headgate.core.errors import ConfigError
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.loader import build_model
from headgate.functions.measure import Measurement, MeasureRequest, example_call, measure
from headgate.planning.capacity.latency_model import ColdStart
from headgate.profiling.probe_client import ProbeTask, Started

OBJECTS_MAX: Final = 10_000  # fetched from a bucket


@final
class ProbedFunction:
    """A model that was loaded as a platform instance loads it, and called once.

    `started` has the durations of the parts of that cold start.
    """

    def __init__(self, task: ProbeTask, ready_ns: int) -> None:
        if task.model is not None and task.code is None:
            # What `load` would import counts as import time. `load` reports a missing module.
            with suppress(ImportError):
                import_module("onnxruntime")
        imported_ns = monotonic_ns()
        if task.store is not None:
            task = _fetch_model(task, task.store)
        fetched_ns = monotonic_ns()
        model = build_model(task, task.base, task.function, len(task.cores))
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
        cold_start = ColdStart(
            process_ms=0.0,
            # Building the model imports the user's module.
            imports_ms=(imported_ns - ready_ns + built_ns - fetched_ns) / 1e6,
            fetch_ms=(fetched_ns - imported_ns) / 1e6,
            load_ms=(loaded_ns - built_ns) / 1e6,
            first_call_ms=(monotonic_ns() - called_ns) / 1e6,
        )
        self.started = Started(ready_ns, cold_start, model.batches)

    def measure(self, request: MeasureRequest) -> Measurement:
        """Return the response times seen by closed-loop clients."""
        return measure(example_call(self._runner, self._example, request.batch), request)


def _fetch_model(task: ProbeTask, store: str) -> ProbeTask:
    """Fetch the model (or the whole store, for code) and return a task that loads the copy."""
    if task.model is None:
        fetch(store, None, Path(task.copy))
        sys.path.insert(0, task.base)  # for modules that are not in the store
        return msgspec.structs.replace(task, base=task.copy)
    name = Path(task.model).name if Path(task.model).is_absolute() else task.model
    fetch(store, name, Path(task.copy))
    return msgspec.structs.replace(task, base=task.copy, model=name)


def fetch(store: str, name: str | None, target: Path) -> None:
    """Copy the file `name` from the store into the directory `target`; everything if None.

    A store is a directory or "s3://bucket/prefix", or the path of the file itself. Raises
    `ConfigError` if it does not exist.
    """
    if store.startswith("s3://"):
        _fetch_objects(store, name, target)
        return
    source = Path(store)
    if name is None:
        if not source.is_dir():
            raise ConfigError("is not a directory", where="--store", value=store)
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    if source.is_dir():
        source = source / name
    if not source.is_file():
        raise ConfigError("does not exist", where="--store", value=str(source))
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target / name)


# `Any` below: boto3 is an optional dependency, and creates its classes at run time.


def _fetch_objects(store: str, name: str | None, target: Path) -> None:
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    if not bucket:
        allowed = "s3://bucket/prefix"
        raise ConfigError("names no bucket", where="--store", value=store, allowed=allowed)
    client, failures = _client()
    try:
        for key, path in _object_keys(client, bucket, prefix.rstrip("/"), name).items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, key, str(target / path))
    except failures as error:
        problem = f"cannot be fetched: {error}"
        raise ConfigError(problem, where="--store", value=store) from None


def _object_keys(client: Any, bucket: str, prefix: str, name: str | None) -> dict[str, str]:
    """Return the object keys to fetch, each with its path below the target."""
    if name is not None:
        is_file_name = PurePosixPath(prefix).suffix == PurePosixPath(name).suffix != ""
        return {prefix if is_file_name else f"{prefix}/{name}".lstrip("/"): name}
    under = f"{prefix}/" if prefix else ""
    listed = client.list_objects_v2(Bucket=bucket, Prefix=under, MaxKeys=1000)
    keys: dict[str, str] = {}
    while True:
        for entry in listed.get("Contents", ()):
            path = entry["Key"].removeprefix(under)
            if path and not path.endswith("/") and ".." not in PurePosixPath(path).parts:
                keys[entry["Key"]] = path
        if not listed.get("IsTruncated") or len(keys) >= OBJECTS_MAX:
            break
        listed = client.list_objects_v2(
            Bucket=bucket, Prefix=under, ContinuationToken=listed["NextContinuationToken"]
        )
    if not keys:
        raise ConfigError("is empty", where="--store", value=f"s3://{bucket}/{prefix}")
    return keys


def _client() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return an S3 client, and the exceptions it raises."""
    try:
        boto3 = import_module("boto3")
        exceptions = import_module("botocore.exceptions")
    except ImportError:
        problem = "s3:// needs boto3: pip install 'headgate[aws]'"
        raise ConfigError(problem, where="--store") from None
    failures = (exceptions.BotoCoreError, exceptions.ClientError, OSError)
    try:
        return boto3.client("s3"), failures
    except failures as error:
        raise ConfigError(f"S3 cannot be used: {error}", where="--store") from None
