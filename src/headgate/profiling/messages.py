"""What the profiler and its probe say to each other: a line of JSON each time."""

from __future__ import annotations

from typing import final

from msgspec import Struct


@final
class Task(Struct, frozen=True):
    """What a probe is to measure. It is also a `functions.source.Source`."""

    function: str
    model: str | None
    code: str | None
    options: dict[str, object]
    base: str  # the application's directory
    cores: list[int] = []  # to stay on
    store: str | None = None  # where the model is fetched from first
    copy: str = ""  # an empty directory to fetch it into


@final
class Started(Struct, frozen=True):
    """The function is loaded and was called once. Times are monotonic, or lengths, in ns."""

    ready_ns: int  # when the process ran its first line
    imports_ns: int
    fetch_ns: int
    load_ns: int
    first_call_ns: int
    batches: bool  # whether several items can go together


@final
class Wish(Struct, frozen=True):
    """One place to measure at, and when that is enough."""

    concurrency: int
    batch: int
    length_s: float
    precision: float  # of the median: half its confidence interval over itself
    samples_min: int


@final
class Found(Struct, frozen=True):
    """What was measured there, in ms."""

    mean: float
    p50: float
    p95: float
    p99: float
    samples: int
    p50_low: float | None
    p50_high: float | None


@final
class Answer(Struct, omit_defaults=True):
    """From the probe: one of these."""

    started: Started | None = None
    found: Found | None = None
    peak_bytes: int = 0  # the most memory that the process held until now
    error: str = ""
