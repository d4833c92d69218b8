"""Trace files: rows as text from CSV, gzipped CSV or Parquet, and typed columns of them.

Every layout (`headgate.workload.readers`) reads its files through this module, so each layout may
come in each format, and errors of a file (missing, truncated, not text) are reported in one place.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Final, TextIO, TypeVar

import numpy as np

from headgate.core.clock import NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import is_log
from headgate.core.units import DURATION_NS
from headgate.workload.arrivals import (
    DEFAULT_NAME,
    Arrivals,
    Int32,
    Int64,
    RequestTerms,
    constant_column,
    take_rows,
)
from headgate.workload.generators import Draw, Float64, Spacing

Row = tuple[int, list[str]]  # the last line of the row (Parquet: as if the header were line 1)
Value = TypeVar("Value", int, float)

SUFFIXES: Final = (".csv.gz", ".csv", ".parquet")
_BATCH_ROWS: Final = 4096
_INT32_MAX: Final = 2**31 - 1
_PRIORITY_MIN: Final = -(2**31)  # those above the default, 0, are negative
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace. Each layout uses the options that apply to it; defaults suit all."""

    step_ns: int | None = None  # length of a step; None: that of the layout
    seed: int = 0  # for the position of arrivals inside a step
    spacing: Spacing = "uniform"
    draw: Draw | None = None  # how a rate becomes a count; None: by the name of the column
    sort: bool = False  # accept rows that are not in order of time
    time_column: str | None = None  # None: the first column of a known name


def read_header(path: Path) -> tuple[str, ...]:
    """Return the names of the columns, stripped and in lower case; duplicates are an error."""
    if is_log(path):
        allowed = f"a trace; `headgate calibrate {path} --trace trace.csv` makes one of it"
        raise ConfigError("is an event log", where=str(path), allowed=allowed)
    names = tuple(name.strip().lower() for name in next(read_rows(path))[1])
    for name, times in Counter(names).items():
        if name and times > 1:
            raise ConfigError("appears twice", where=str(path), key="columns", value=name)
    return names


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the header, then each row; all have the same number of cells.

    Raises ConfigError, with the line, if the file is missing, empty, unreadable or truncated. Blank
    lines are allowed at the end only: elsewhere they would hide a missing step.
    """
    rows = _parquet_rows(path) if path.name.endswith(".parquet") else _csv_rows(path)
    width = 0
    blank_line = 0
    for line, cells in rows:
        width = width or len(cells)
        if not cells:
            blank_line = blank_line or line
        elif blank_line or len(cells) != width:
            where = f"{path}:{blank_line or line}"
            count = 0 if blank_line else len(cells)
            raise ConfigError(f"the row has {count} cells, the header {width}", where=where)
        else:
            yield line, cells
    if not width:
        raise ConfigError("is empty", where=str(path))


def _csv_rows(path: Path) -> Iterator[Row]:
    line = 0
    try:
        with _open_text(path) as file:
            reader = csv.reader(file)
            for cells in reader:
                line = reader.line_num
                yield line, cells
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip stream is truncated or damaged ({error})"
        raise ConfigError(problem, where=f"{path}:{line + 1}") from None
    except UnicodeDecodeError:  # in a block that was read ahead, so the line is not known
        raise ConfigError("is not text in UTF-8", where=str(path)) from None
    except csv.Error as error:
        raise ConfigError(f"is not CSV ({error})", where=f"{path}:{line + 1}") from None
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(path)) from None


def _open_text(path: Path) -> TextIO:
    # utf-8-sig: the byte order mark of spreadsheets is not part of the first column's name.
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        pyarrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        problem = "Parquet needs pyarrow: pip install headgate[parquet]"
        raise ConfigError(problem, where=str(path)) from None
    if not path.is_file():
        raise ConfigError("no such file", where=str(path))
    try:
        with parquet.ParquetFile(path) as file:
            yield 1, list(file.schema_arrow.names)
            line = 2
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                columns = [column.cast(pyarrow.string()).to_pylist() for column in batch.columns]
                for cells in zip(*columns, strict=True):
                    yield line, ["" if cell is None else cell for cell in cells]
                    line += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot be read as Parquet ({reason})", where=str(path)) from None


@dataclass(frozen=True, slots=True)
class TraceTable:
    """Some columns of a trace file, as text, by name. Cells are checked when they are parsed."""

    path: Path
    cells: dict[str, list[str]]

    def __len__(self) -> int:
        return len(next(iter(self.cells.values())))

    def numbers(self, column: str) -> Float64:
        """Return a column of finite numbers that are not negative."""
        return np.fromiter(self._parsed(column, parse_number), np.float64, len(self))

    def times_ns(self, column: str) -> Int64:
        """Return a column of times or durations, exact to the nanosecond.

        Numbers are in the unit at the end of the column's name (`arrival_ms`), or else in seconds;
        or all cells are ISO 8601 dates (in UTC unless they have an offset, to the microsecond).
        """
        unit_ns = DURATION_NS.get(column.rpartition("_")[2], SECOND_NS)
        is_dated = ":" in self.cells[column][0]
        parse = _parse_date if is_dated else partial(_parse_ticks, unit_ns=unit_ns)
        return np.fromiter(self._parsed(column, parse), np.int64, len(self))

    def arrivals(
        self,
        times_ns: Int64,
        *,
        pipeline: str | None = None,
        client: str | None = None,
        items: str | None = None,
        priority: str | None = None,
        terms: RequestTerms | None = None,
    ) -> Arrivals:
        """Return one arrival per row, in order of time, with the values of these columns.

        `terms` are by row. The window ends just after the last arrival.
        """
        rows = np.argsort(times_ns, kind="stable")
        pipeline_column, pipelines = self._names(pipeline)
        client_column, clients = self._names(client)
        sizes = None if items is None else self._whole(items, 1)[rows]
        priorities = None if priority is None else self._whole(priority, _PRIORITY_MIN)[rows]
        return Arrivals(
            times_ns[rows],
            int(times_ns[rows[-1]]) + 1,
            take_rows(pipeline_column, rows),
            take_rows(client_column, rows),
            pipelines,
            clients,
            sizes,
            priorities,
            None if terms is None else terms.rows(rows),
        )

    def error(self, row: int, column: str, problem: str) -> ConfigError:
        """Return the error of one cell, with its line, for which the file is read again."""
        line = next(islice(read_rows(self.path), row + 1, None))[0]
        where, value = f"{self.path}:{line}", self.cells[column][row]
        return ConfigError(problem, where=where, key=column, value=value)

    def _whole(self, column: str, least: int) -> Int32:
        parse = partial(_parse_whole, least=least)
        return np.fromiter(self._parsed(column, parse), np.int32, len(self))

    def _names(self, column: str | None) -> tuple[Int32, tuple[str, ...]]:
        if column is None:
            return constant_column(len(self)), (DEFAULT_NAME,)
        return index_names(self.cells[column])

    def _parsed(self, column: str, parse: Callable[[str], Value]) -> Iterator[Value]:
        for row, text in enumerate(self.cells[column]):
            try:
                yield parse(text)
            except ValueError as error:
                raise self.error(row, column, str(error)) from None


def read_table(path: Path, columns: Iterable[str]) -> TraceTable:
    """Read these columns of a file, which must have them and at least one row."""
    header = read_header(path)
    cells: dict[str, list[str]] = {column: [] for column in columns}
    for column in cells:
        if column not in header:
            allowed = ", ".join(header[:20])
            raise ConfigError("no such column", where=str(path), key=column, allowed=allowed)
    sinks = [(header.index(column), cells[column].append) for column in cells]
    for _, row in islice(read_rows(path), 1, None):
        for index, append in sinks:
            append(row[index])
    if not next(iter(cells.values())):
        raise ConfigError("has a header but no rows", where=str(path))
    return TraceTable(path, cells)


def first_of(candidates: Iterable[str], columns: Iterable[str]) -> str | None:
    present = set(columns)
    return next((name for name in candidates if name in present), None)


def index_names(names: Iterable[str]) -> tuple[Int32, tuple[str, ...]]:
    """Return names as indices into the distinct names, which are in order of appearance.

    >>> index_names(["b", "a", "b"])
    (array([0, 1, 0], dtype=int32), ('b', 'a'))
    """
    index: dict[str, int] = {}
    column = np.array([index.setdefault(name, len(index)) for name in names], dtype=np.int32)
    return (constant_column(len(column)) if len(index) == 1 else column), tuple(index)


def parse_number(text: str) -> float:
    """Return a finite number that is not negative, or raise ValueError with the problem."""
    number = _parse_finite(text)
    if number < 0:
        raise ValueError("must not be negative")
    return number


def _parse_finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _parse_whole(text: str, least: int) -> int:
    number = _parse_finite(text)
    if not number.is_integer() or not least <= number <= _INT32_MAX:
        raise ValueError(f"is not a whole number from {least} to {_INT32_MAX}")
    return int(number)


def _parse_ticks(text: str, unit_ns: int) -> int:
    # Decimal, not float: seconds since 1970 as a float are precise to 240 ns only.
    try:
        number = Decimal(text)
        is_negative, is_huge = number < 0, number >= NEVER_NS // unit_ns
    except InvalidOperation:  # not a number, or the text "nan"
        raise ValueError("is not a number") from None
    if is_negative:
        raise ValueError("must not be negative")
    if is_huge:
        raise ValueError("is more than 292 years")
    return int((number * unit_ns).to_integral_value())


def _parse_date(text: str) -> int:
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("is not a date like 2023-11-16 18:15:46.680") from None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    if date < _EPOCH:
        raise ValueError("must not be before 1970")
    instant_ns = (date - _EPOCH) // timedelta(microseconds=1) * 1000
    if instant_ns >= NEVER_NS:
        raise ValueError("is more than 292 years after 1970")
    return instant_ns
