"""What ran, and what it costs to have run: one record per run, to the millisecond."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, final

import msgspec


class BillingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a function, whether it ended well or not. Times are in milliseconds.

    `init_ms` is there for the run that an instance was started for, and 0 for all others. A run
    that AWS would not charge for (a refusal) leaves no record.
    """

    request_id: str
    function: str
    version: str
    memory_mb: int
    started_s: float  # seconds since 1970
    init_ms: float
    duration_ms: float
    billed_ms: int
    is_cold: bool
    is_provisioned: bool
    error: str = ""  # its type, as the client sees it
    instance: int = 0  # the process that ran it

    @property
    def gb_s(self) -> float:
        """Gigabytes of memory times seconds, which is what has a price."""
        return self.memory_mb / 1024 * self.billed_ms / 1000


def billed_ms(init_ms: float, duration_ms: float) -> int:
    """Every millisecond that was begun, and at least one.

    >>> billed_ms(0, 1.2), billed_ms(99.5, 0.5), billed_ms(0, 0)
    (2, 100, 1)
    """
    return max(1, math.ceil(round(init_ms + duration_ms, 6)))


@final
class BillingLog:
    """All records of a platform: at hand, and in a file as lines of JSON.

    Written by the thread of the platform alone; `records` may be asked for by any.
    """

    def __init__(self, path: Path, records_max: int) -> None:
        self.path = path
        self._records: deque[BillingRecord] = deque(maxlen=records_max)
        self._file: IO[bytes] = path.open("ab")

    def add(self, record: BillingRecord) -> None:
        """Enter a record. It is in the file when this returns."""
        self._records.append(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def records(self, function: str | None = None) -> list[BillingRecord]:
        """The latest records, in the order in which the runs ended; the file has all of them."""
        # Copied in one step first: the other thread may add to them meanwhile.
        return [each for each in list(self._records) if function in (None, each.function)]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_bill(path: Path) -> list[BillingRecord]:
    """The records that a platform has left in a file."""
    decoder = msgspec.json.Decoder(BillingRecord)
    return decoder.decode_lines(path.read_bytes())


def gb_s(records: Iterable[BillingRecord]) -> float:
    """What they come to, in gigabyte-seconds."""
    return sum(record.gb_s for record in records)
