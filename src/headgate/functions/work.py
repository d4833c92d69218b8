"""Work that goes to a function elsewhere, and what became of it."""

from __future__ import annotations

from typing import Protocol, final

from msgspec import Struct

from headgate.functions.tensor import Tensor


class AnyWork(Protocol):
    """One request for a function, whoever keeps it."""

    task_id: int
    items: int
    inputs: list[Tensor]


@final
class Work(Struct, gc=False):
    """One request for a function."""

    task_id: int
    items: int
    inputs: list[Tensor]


@final
class Result(Struct, gc=False):
    """What became of it: outputs, or an error and whose it is (400 or 500)."""

    task_id: int
    outputs: list[Tensor]
    error: str = ""
    status: int = 200
    is_unsure: bool = False
