"""What requests carry: made up from what a model says that it takes, or read from a file.

The Open Inference Protocol has tensors as JSON, and as raw bytes after it (the binary extension).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import numpy as np

from headgate.core.errors import ConfigError
from headgate.functions.tensor import ITEM_BYTES
from headgate.load.address import Address, Body
from headgate.load.exchange import exchange

_DTYPES: Final = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES"),
)
_ELEMENTS_MAX: Final = 64 << 20
JSON_HEADERS: Final = {"Content-Type": "application/json"}


class InputSpec(msgspec.Struct, frozen=True):
    """One input of a model, as its metadata describe it."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class _Metadata(msgspec.Struct):
    inputs: tuple[InputSpec, ...] = ()


def fetch_inputs(address: Address, model: str) -> tuple[InputSpec, ...]:
    """Ask the server what a model takes."""
    path = address.model_path(model)
    where = f"http{'s' if address.is_secure else ''}://{address.authority}{path}"
    try:
        status, content = exchange(address, "GET", path)
    except OSError as error:
        raise ConfigError(f"cannot be reached: {error}", where=where) from None
    if status != 200:
        text = content[:200].decode(errors="replace").strip()
        raise ConfigError(f"answers {status}: {text}", where=where)
    try:
        inputs = msgspec.json.decode(content, type=_Metadata).inputs
    except msgspec.DecodeError as error:
        raise ConfigError(f"are no metadata of a model: {error}", where=where) from None
    if not inputs:
        problem = "does not say what inputs it takes"
        raise ConfigError(problem, where=where, allowed="--payload FILE")
    return inputs


def make_body(
    inputs: Sequence[InputSpec], items: int, rng: Random, *, is_binary: bool = False
) -> Body:
    """Return tensors of the right shape: fractions in [0, 1), integers 0 or 1, texts of a digit.

    A dimension of -1 is `items` if it comes first, and 1 elsewhere.

    >>> make_body([InputSpec("x", "INT32", (-1, 2))], 1, Random(0)).content[:52]
    b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1'
    """
    generator = np.random.default_rng(rng.getrandbits(64))
    described: list[dict[str, object]] = []
    raw: list[bytes] = []
    for spec in inputs:
        shape = _shape(spec, items)
        values = _values(spec, shape, generator)
        tensor: dict[str, object] = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
        if is_binary:
            raw.append(_raw(values))
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            tensor["data"] = _plain(values)
        described.append(tensor)
    document: dict[str, object] = {"inputs": described}
    if not is_binary:
        return Body(_json(document), JSON_HEADERS)
    document["parameters"] = {"binary_data_output": True}
    head = _json(document)
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Body(b"".join((head, *raw)), headers)


def read_body(path: Path) -> Body:
    """Return a file as it is: JSON if that is what it holds, else bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(problem, where="--payload", value=str(path)) from None
    try:
        json.loads(content)
    except ValueError:
        return Body(content, {"Content-Type": "application/octet-stream"})
    return Body(content, JSON_HEADERS)


def _shape(spec: InputSpec, items: int) -> list[int]:
    shape = [1 if size == -1 else size for size in spec.shape]
    if spec.shape and spec.shape[0] == -1:
        shape[0] = items
    elif items > 1:
        problem = f"takes no requests of {items} items"
        raise ConfigError(problem, key=f"input {spec.name}", value=list(spec.shape))
    if min(shape, default=1) < 0 or np.prod(shape, dtype=float) > _ELEMENTS_MAX:
        raise ConfigError("has no usable shape", key=f"input {spec.name}", value=list(spec.shape))
    return shape


def _values(
    spec: InputSpec, shape: list[int], generator: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if spec.datatype not in _DTYPES:
        problem = "no such tensors can be made up"
        allowed = f"{', '.join(_DTYPES)}, or --payload FILE"
        key = f"input {spec.name}"
        raise ConfigError(problem, key=key, value=spec.datatype, allowed=allowed)
    if spec.datatype.startswith("FP"):
        width = ITEM_BYTES[spec.datatype]
        return generator.random(shape).astype(f"<f{width}")
    # Integers are often positions in some table, and every table has two.
    bits = generator.integers(0, 2, shape)
    if spec.datatype == "BYTES":
        return bits.astype("S1")
    if spec.datatype == "BOOL":
        return bits.astype(bool)
    kind = "u" if spec.datatype.startswith("U") else "i"
    return bits.astype(f"<{kind}{ITEM_BYTES[spec.datatype]}")


def _raw(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    if values.dtype.kind != "S":
        return values.tobytes()
    texts = [bytes(text) for text in values.ravel().tolist()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _plain(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> list[object]:
    flat: list[object] = values.ravel().tolist()
    if values.dtype.kind == "S":
        return [text.decode() if isinstance(text, bytes) else text for text in flat]
    return flat


def _json(document: dict[str, object]) -> bytes:
    return msgspec.json.encode(document)
