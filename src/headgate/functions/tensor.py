"""A tensor on its way: named, typed, shaped, and its elements as raw bytes.

Gateway, workers and clients exchange these; only a function sees arrays. Elements are row-major and
little-endian. Those of `BYTES` are each preceded by their length in four bytes, as the binary
extension of the Open Inference Protocol has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

from msgspec import Struct

# Bytes per element of each datatype of the protocol; those of `BYTES` differ in length.
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1,
        "UINT8": 1,
        "UINT16": 2,
        "UINT32": 4,
        "UINT64": 8,
        "INT8": 1,
        "INT16": 2,
        "INT32": 4,
        "INT64": 8,
        "FP16": 2,
        "FP32": 4,
        "FP64": 8,
        "BF16": 2,
        "BYTES": 0,
    }
)


@final
class Block(Struct, array_like=True, frozen=True, gc=False):
    """Where the elements lie in the sender's shared memory."""

    offset: int
    size: int


@final
class Tensor(Struct, array_like=True, gc=False):
    """One input or output. The order of fields is the format between processes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | Block


@final
class TensorSpec(Struct, array_like=True, frozen=True):
    """What a function expects or gives. A dimension of -1 may have any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@final
class Signature(Struct, array_like=True, frozen=True):
    """What a function takes and gives.

    No inputs at all means that it looks at whatever it is given by itself. `batches` says that the
    first dimension of every input and output counts items, so that requests can go together.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batches: bool = True
    platform: str = "python"
