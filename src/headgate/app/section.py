"""What the parts of the application file are made of: kinds of values, and no room for others."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Name = Annotated[
    str,
    # The look-ahead is for a trailing line break, which `$` alone would let pass.
    Meta(title="name", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$(?!\n)", examples=["resnet", "m-2"]),
]
Duration = Annotated[str | Literal[0], Meta(title="duration", examples=["5ms", "1.5s", "10min"])]
Size = Annotated[str, Meta(title="size", examples=["100MB", "16GiB"])]
Share = Annotated[str, Meta(title="share of a GPU", examples=["3/7", "7/7"])]
Price = Annotated[str, Meta(title="price", examples=["$1.20/h", "$0.20/1M"])]
Dollars = Annotated[str, Meta(title="sum of money", examples=["$10", "$0.05"])]
Percentage = Annotated[str | float, Meta(title="percentage", examples=["99%", 0.99])]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Cpus = Annotated[float, Meta(ge=0, le=1_000_000)]
BatchSize = Annotated[
    str, Meta(title="batch size", pattern=r"^[1-9][0-9]{0,3}$(?!\n)", examples=["1", "8"])
]
HashedKey = Annotated[
    str,
    Meta(title="hashed key", pattern=r"^sha256:[0-9a-f]{64}$(?!\n)", examples=["sha256:..."]),
]
Factor = Annotated[float, Meta(gt=0, le=1_000_000)]
Execution = Duration | tuple[Duration, ...] | dict[BatchSize, Duration]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all parts of the file have in common: nothing in them is ignored."""
