"""Model stores: a directory, or an S3 bucket."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final

from headgate.core.errors import ConfigError

OBJECTS_MAX: Final = 10_000


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
    _make_parents(target / name)
    shutil.copyfile(source, target / name)


# `Any` below: boto3 is an optional dependency, and creates its classes at run time.


def _fetch_objects(store: str, name: str | None, target: Path) -> None:
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    if not bucket:
        raise ConfigError(
            "names no bucket", where="--store", value=store, allowed="s3://bucket/prefix"
        )
    client, failures = _client()
    try:
        for key, path in _object_keys(client, bucket, prefix.rstrip("/"), name).items():
            _make_parents(target / path)
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


def _make_parents(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
