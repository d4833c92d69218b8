"""Billing: one record per run of a function, in milliseconds and gigabyte-seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, final

import msgspec


class BillingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a function, successful or failed.

    `init_ms` is the start time of the instance in its first (cold) run, and 0 in all later runs.
    Invocations that AWS would not charge for (those rejected before they run) leave no record.
    """

    request_id: str
    function: str
    version: str
    memory_mb: int
    started_s: float  # Unix time
    init_ms: float
    duration_ms: float
    billed_ms: int
    is_cold: bool
    is_provisioned: bool
    error: str = ""  # error type, as the client sees it
    instance: int = 0  # process ID of the instance

    @property
    def gb_s(self) -> float:
        """Gigabytes of memory times billed seconds, the unit that has a price."""
        return self.memory_mb / 1024 * self.billed_ms / 1000


def billed_ms(init_ms: float, duration_ms: float) -> int:
    """Return the billed duration: rounded up to a whole millisecond, at least 1.

    >>> billed_ms(0, 1.2), billed_ms(99.5, 0.5), billed_ms(0, 0)
    (2, 100, 1)
    """
    return max(1, math.ceil(round(init_ms + duration_ms, 6)))


@final
class BillingLog:
    """All billing records of a platform: in a JSON Lines file, and the latest in memory.

    Only the thread of the platform may add records; any thread may call `records`.
    """

    def __init__(self, path: Path, records_max: int) -> None:
        self.path = path
        self._records: deque[BillingRecord] = deque(maxlen=records_max)
        self._file: IO[bytes] = path.open("ab")

    def add(self, record: BillingRecord) -> None:
        """Append a record. It is in the file when this returns."""
        self._records.append(record)
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def records(self, function: str | None = None) -> list[BillingRecord]:
        """Return the latest records in the order in which the runs ended; the file has all."""
        # Copy in one atomic step first: the platform's thread may append meanwhile.
        return [each for each in list(self._records) if function in (None, each.function)]

    def close(self) -> None:
        self._file.close()


def read_billing_log(path: Path) -> list[BillingRecord]:
    """Read the records from a platform's billing file."""
    decoder = msgspec.json.Decoder(BillingRecord)
    return decoder.decode_lines(path.read_bytes())


def gb_s(records: Iterable[BillingRecord]) -> float:
    """Return the total gigabyte-seconds of billing records."""
    return sum(record.gb_s for record in records)
