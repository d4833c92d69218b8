"""What a reader of traces may be told. Each layout uses what concerns it."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.workload.counts import Draw, Spread


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace; the defaults suit the layouts' own conventions."""

    step_ns: int | None = None  # length of a step; None: the layout's own
    seed: int = 0  # where inside its step an arrival falls
    spread: Spread = "uniform"
    draw: Draw | None = None  # how a rate becomes a count; None: by the column's name
    sort: bool = False  # accept rows that are not in order of time
    time_column: str | None = None  # None: the first known name
