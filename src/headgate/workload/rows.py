"""The rows of a trace file as text, whatever the file's format: CSV, gzipped CSV or Parquet.

Every layout is read through here, so each of them can come in each format, and what can be wrong
with a file (missing, cut short, not text) is said in one place.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final, TextIO

from headgate.core.errors import ConfigError

Row = tuple[int, list[str]]  # the line it ends on (in Parquet: as if the header were line 1)

SUFFIXES: Final = (".csv.gz", ".csv", ".parquet")
_BATCH_ROWS: Final = 4096


def read_header(path: Path) -> tuple[str, ...]:
    """Return the names of the columns, stripped and in lower case; none may be there twice."""
    names = tuple(name.strip().lower() for name in next(read_rows(path))[1])
    for name, times in Counter(names).items():
        if name and times > 1:
            raise ConfigError("is there twice", where=str(path), key="columns", value=name)
    return names


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the header, then each row; all of one width.

    Raises ConfigError, at the row concerned, when the file is missing, empty, unreadable or cut
    short. Blank lines are allowed at the end only: elsewhere they would hide a lost step.
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
            found = 0 if blank_line else len(cells)
            raise ConfigError(f"the row has {found} cells, the header {width}", where=where)
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
        problem = f"the gzip stream is cut short or damaged ({error})"
        raise ConfigError(problem, where=f"{path}:{line + 1}") from None
    except UnicodeDecodeError:  # in a block read ahead, so nobody knows on which line
        raise ConfigError("is not text in UTF-8", where=str(path)) from None
    except csv.Error as error:
        raise ConfigError(f"is not CSV ({error})", where=f"{path}:{line + 1}") from None
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(path)) from None


def _open_text(path: Path) -> TextIO:
    # The byte order mark that spreadsheets write is no part of the first column's name.
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
