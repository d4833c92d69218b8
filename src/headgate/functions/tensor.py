"""Tensors between processes, and what a function takes and gives: the tensors of one task.

A tensor is a name, a datatype, a shape, and elements as raw bytes.

Gateways, workers and clients exchange tensors; only functions see arrays. Elements are row-major
and little-endian. Each element of `BYTES` is preceded by its length in four bytes, as in the binary
extension of the Open Inference Protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias, final

from msgspec import Struct

from headgate.core.errors import ConfigError

# The output, a boolean for each item, with which a function asks a cascade for its next stage.
UNSURE: Final = "unsure"
# Bytes per element of each datatype of the protocol; elements of `BYTES` vary in length.
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1,
        **{f"{kind}{8 * size}": size for kind in ("UINT", "INT") for size in (1, 2, 4, 8)},
        **{f"FP{8 * size}": size for size in (2, 4, 8)},
        "BF16": 2,
        "BYTES": 0,
    }
)


# Whose memory a `Block` is in. Any other number is the id that a gateway gave to the memory of one
# of its workers.
SENDERS: Final = 0
RECEIVERS: Final = 1


@final
class Block(Struct, array_like=True, frozen=True, gc=False):
    """The location of elements in shared memory, by default in that of the sender."""

    offset: int
    size: int
    memory: int = SENDERS


@final
class Tensor(Struct, array_like=True, gc=False):
    """One input or output. The order of fields is the format between processes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | Block


@final
class TaskInputs(Struct, array_like=True, gc=False):
    """One task of a batch, with its inputs.

    A task with a `run_once_key` does not run if one with the same key has begun before.
    """

    task_id: int
    items: int
    inputs: list[Tensor]
    run_once_key: bytes = b""


@final
class TaskResult(Struct, array_like=True, gc=False):
    """The result of one task: outputs, or an error with its status (400 client error, 500 function
    error, 503 it did not run because it had begun before).
    """

    task_id: int
    outputs: list[Tensor]
    error: str = ""
    status: int = 200
    is_unsure: bool = False


@final
class TensorSpec(Struct, array_like=True, frozen=True):
    """An input or output of a function. A dimension of -1 may have any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@final
class Signature(Struct, array_like=True, frozen=True):
    """The inputs and outputs of a function.

    No inputs means that the function checks them itself. `batches` means that the first dimension
    of every input and output counts items, so that requests can be batched.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    batches: bool = True
    platform: str = "python"


# Specs of tensors as a model declares them: text by name, as in `{"image": "FP32[-1, 3]"}`, or
# `TensorSpec`s.
TensorSpecsLike: TypeAlias = Mapping[str, str] | Sequence[TensorSpec]


def parse_specs(specs_like: TensorSpecsLike, where: str) -> tuple[TensorSpec, ...]:
    """Return specs in full form. `where` is named in errors.

    >>> parse_specs({"image": "UINT8[-1, 224, 224, 3]"}, "Cat.inputs")
    (TensorSpec(name='image', datatype='UINT8', shape=(-1, 224, 224, 3)),)
    """
    if isinstance(specs_like, Mapping):
        return tuple(_parse_spec(name, text, where) for name, text in specs_like.items())
    specs = tuple(specs_like)
    names = [spec.name for spec in specs if isinstance(spec, TensorSpec)]
    if len(set(names)) != len(specs):
        raise ConfigError("must be TensorSpecs with distinct names", where=where, value=specs_like)
    for spec in specs:
        _check(spec, where)
    return specs


def format_spec(spec: TensorSpec) -> str:
    """Return a spec in text form.

    >>> format_spec(TensorSpec("image", "FP32", (-1, 3)))
    'FP32[-1, 3]'
    """
    return f"{spec.datatype}[{', '.join(map(str, spec.shape))}]"


def shapes_match(given: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two shapes are compatible; -1 is any size.

    >>> shapes_match((4, 3), (-1, 3)), shapes_match((4, 3), (-1,)), shapes_match((-1, 3), (-1, 5))
    (True, False, False)
    """
    if len(given) != len(wanted):
        return False
    # A loop, because a generator is slower and this runs per request.
    for one, other in zip(given, wanted, strict=True):
        if one != other and one >= 0 and other >= 0:
            return False
    return True


def _parse_spec(name: str, text: object, where: str) -> TensorSpec:
    matched = _SPEC.fullmatch(text) if isinstance(text, str) else None
    if matched is None:
        problem, allowed = "is not a tensor spec", '"FP32[-1, 3]", "INT64[]"'
        raise ConfigError(problem, where=where, key=name, value=text, allowed=allowed)
    datatype, dimensions = matched.groups()
    shape = tuple(int(size) for size in dimensions.split(",") if size.strip())
    spec = TensorSpec(name, datatype, shape)
    _check(spec, where)
    return spec


def _check(spec: TensorSpec, where: str) -> None:
    name, datatype, shape = spec.name, spec.datatype, spec.shape
    if not isinstance(name, str) or not name.isprintable():
        raise ConfigError("is not a valid name", where=where, value=name, allowed="printable text")
    if datatype not in ITEM_BYTES:
        problem, allowed = "is not a datatype", ", ".join(ITEM_BYTES)
        raise ConfigError(problem, where=where, key=name, value=datatype, allowed=allowed)
    if any(size < -1 for size in shape):
        problem, allowed = "has a negative size", "-1: any"
        raise ConfigError(problem, where=where, key=name, value=shape, allowed=allowed)


_SPEC: Final = re.compile(r"\s*([A-Z]+[0-9]*)\s*\[\s*((?:-?\d+\s*(?:,\s*-?\d+\s*)*)?)\]\s*")
