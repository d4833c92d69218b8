"""Profiles in files: those of `headgate profile` in JSON, and measured latencies in CSV (.csv.gz).

Planners rely on a profile, and a file may contain anything, so its values are checked.

In CSV, either a row is a grid point, with `cores` and a time (`p50_ms`, `median_ms` or `mean_ms`),
and optionally `function`, `device`, `concurrency`, `batch`, `p95_ms`, `p99_ms` and `samples`; or a
row is one call of a cloud function, with `lambda_memory_mb` and `infer_ms`, and optionally `model`,
`status` (only "ok" counts) and `suspect`.

The tables bundled with Headgate hold eight models, measured on the cores of a server.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Final, TypeAlias

import numpy as np

from headgate.core.errors import ConfigError, unknown_name_error
from headgate.planning.capacity.latency_model import Characterisation, Point
from headgate.profiling.profiler import Machine, ProfileResult, ProfilerSettings

LAMBDA_MB_PER_CORE: Final = 1769  # Lambda allots CPU time in proportion to memory
_BUNDLED_TABLES: Final = ("cpu_concurrency_latency.csv", "cpu_batch_latency.csv")
_MEDIANS: Final = ("p50_ms", "median_ms", "mean_ms")
_REQUIRED_COLUMNS: Final = (
    "cores and p50_ms, median_ms or mean_ms; or lambda_memory_mb and infer_ms"
)
_Key: TypeAlias = tuple[float, int, int]  # cores, concurrency, batch

# Bounds are wider than any real measurement, and narrow enough for planners, which iterate over
# every concurrency and batch size.
_POINTS_MAX: Final = 1_000
_COUNT_MAX: Final = 1_000
_TIME_MS_MAX: Final = 1e8  # more than a day
_POINT_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "cores": (0.001, 10_000),
    "concurrency": (1, _COUNT_MAX),
    "batch": (1, _COUNT_MAX),
    **dict.fromkeys(("mean_ms", "p50_ms", "p95_ms", "p99_ms"), (1e-6, _TIME_MS_MAX)),
    "samples": (0, 2**63),
}
_COLD_START_PARTS: Final = ("process_ms", "imports_ms", "fetch_ms", "load_ms", "first_call_ms")
_MEMORY_BYTES_MAX: Final = 10**18


def check_bounds(profile: Characterisation, where: str) -> Characterisation:
    """Return the profile. Raises `ConfigError` if its values are implausible."""
    if len(profile.points) > _POINTS_MAX:
        allowed = f"up to {_POINTS_MAX:,}"
        raise ConfigError(f"contains {len(profile.points):,} points", where=where, allowed=allowed)
    for index, point in enumerate(profile.points):
        for name, (least, most) in _POINT_BOUNDS.items():
            _check(getattr(point, name), least, most, where, f"points[{index}].{name}")
    if profile.cold_start is not None:
        for name in _COLD_START_PARTS:
            value = getattr(profile.cold_start, name)
            _check(value, 0, _TIME_MS_MAX, where, f"cold_start.{name}")
    _check(profile.peak_memory_bytes or 0, 0, _MEMORY_BYTES_MAX, where, "peak_memory_bytes")
    return profile


def _check(value: float, least: float, most: float, where: str, key: str) -> None:
    if not least <= value <= most:  # also true for NaN
        allowed = f"{least:,} to {most:,.0f}"
        raise ConfigError("is out of range", where=where, key=key, value=value, allowed=allowed)


def to_profile_json(
    result: ProfileResult,
    settings: ProfilerSettings,
    machine: Machine,
    *,
    at: str,
    by: str | None = None,
) -> dict[str, object]:
    """Return the content of a profile file: `at` is the time of measurement, `by` the author."""
    return {
        **result.characterisation.to_json(),
        "cold_starts": result.starts,
        "at": at,
        "by": by,
        "machine": asdict(machine),
        "settings": asdict(settings),
        "took_s": round(result.took_s, 3),
        "skipped": [asdict(grid_point) for grid_point in result.skipped],
    }


def read_profile(path: Path) -> Characterisation:
    """Read a profile file. Raises `ConfigError` if it is not valid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path)) from None
    return check_bounds(Characterisation.from_json(content, str(path)), str(path))


def read_tables(paths: Sequence[Path], function: str | None = None) -> Characterisation:
    """Return the characterisation of a function, which is optional if there is only one.

    If two tables have the same grid point, the first table counts. A row without a tail (p95, p99)
    gets one from the median ratio of tail to p50 in the other rows. Raises `ConfigError`.
    """
    rows = [row for path in paths for row in _read(path)]
    where = ", ".join(map(str, paths))
    name = _select_function(function, rows, where)
    selected = [row for row in rows if row.function in (name, None)]
    device = next((row.cells["device"] for row in selected if row.cells.get("device")), "unknown")
    times_by_point: dict[_Key, _Times] = {}
    for key, times in (*_grid_rows(selected), *_call_rows(selected)):
        times_by_point.setdefault(key, times)
    if not times_by_point:
        raise ConfigError(f"contains no times of {name}", where=where)
    return check_bounds(Characterisation(name, device, tuple(_points(times_by_point))), where)


@dataclass(frozen=True, slots=True)
class _Times:
    mean_ms: float
    p50_ms: float
    p95_ms: float | None
    p99_ms: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class _Row:
    where: str  # file and line
    cells: Mapping[str, str]

    @property
    def function(self) -> str | None:
        """The function of the row; None if the table does not name one."""
        return self.cells.get("function") or self.cells.get("model")

    def number(self, *columns: str) -> float | None:
        """Return the first of these columns that is not empty."""
        for column in columns:
            text = self.cells.get(column)
            if text:
                try:
                    value = float(text)
                except ValueError:
                    value = 0.0
                if not isfinite(value) or value <= 0:
                    problem = "must be a number above zero"
                    raise ConfigError(problem, where=self.where, key=column, value=text)
                return value
        return None

    def count(self, column: str) -> int:
        """Return a whole number; 1 if the column is empty."""
        value = self.number(column) or 1.0
        if value != int(value):
            problem = "must be a whole number"
            raise ConfigError(problem, where=self.where, key=column, value=self.cells[column])
        return int(value)


def _read(path: Path) -> list[_Row]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
        reader = csv.DictReader(text.splitlines(), restval="", restkey="")
        columns = set(reader.fieldnames or ())
        rows = [_Row(f"{path}:{reader.line_num}", cells) for cells in reader]
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise ConfigError(problem, where=str(path)) from None
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise ConfigError(f"is not CSV: {error}", where=str(path)) from None
    has_grid_columns = "cores" in columns and not columns.isdisjoint(_MEDIANS)
    if not has_grid_columns and not {"lambda_memory_mb", "infer_ms"} <= columns:
        header = ", ".join(map(str, reader.fieldnames or ())) or "none"
        problem = f"has the wrong columns: {header}"
        raise ConfigError(problem, where=str(path), allowed=_REQUIRED_COLUMNS)
    return rows


def _names(rows: Sequence[_Row]) -> list[str]:
    return list(dict.fromkeys(row.function for row in rows if row.function is not None))


def _select_function(function: str | None, rows: Sequence[_Row], where: str) -> str:
    names = _names(rows)
    if function is None:
        if len(names) != 1:
            problem = "contains several functions: select one" if names else "names no function"
            allowed = ", ".join(names) or "--function NAME"
            raise ConfigError(problem, where=where, key="--function", allowed=allowed)
        return names[0]
    if names and function not in names:
        raise unknown_name_error("function", function, names, where=where, key="--function")
    return function


def _grid_rows(rows: Iterable[_Row]) -> Iterator[tuple[_Key, _Times]]:
    for row in rows:
        cores, p50_ms = row.number("cores"), row.number(*_MEDIANS)
        if cores is None or p50_ms is None:
            continue
        times = _Times(
            mean_ms=row.number("mean_ms") or p50_ms,
            p50_ms=p50_ms,
            p95_ms=row.number("p95_ms"),
            p99_ms=row.number("p99_ms"),
            samples=row.count("samples") if row.cells.get("samples") else 0,
        )
        yield (cores, row.count("concurrency"), row.count("batch")), times


def _call_rows(rows: Iterable[_Row]) -> Iterator[tuple[_Key, _Times]]:
    by_memory: dict[float, list[float]] = {}
    for row in rows:
        memory_mb, time_ms = row.number("lambda_memory_mb"), row.number("infer_ms")
        is_ok, suspect = row.cells.get("status", "ok") == "ok", row.cells.get("suspect", "")
        if memory_mb is not None and time_ms is not None and is_ok and suspect in ("", "0"):
            by_memory.setdefault(memory_mb, []).append(time_ms)
    for memory_mb, times_ms in by_memory.items():
        p50_ms, p95_ms, p99_ms = np.quantile(times_ms, (0.5, 0.95, 0.99)).tolist()
        times = _Times(fmean(times_ms), p50_ms, p95_ms, p99_ms, len(times_ms))
        yield (memory_mb / LAMBDA_MB_PER_CORE, 1, 1), times


def _points(times_by_point: Mapping[_Key, _Times]) -> Iterator[Point]:
    known = times_by_point.values()
    p95 = median([t.p95_ms / t.p50_ms for t in known if t.p95_ms is not None] or [1.0])
    p99 = median([t.p99_ms / t.p50_ms for t in known if t.p99_ms is not None] or [p95])
    for (cores, concurrency, batch), times in sorted(times_by_point.items()):
        p95_ms = max(times.p50_ms, times.p95_ms or times.p50_ms * p95)
        p99_ms = max(p95_ms, times.p99_ms or times.p50_ms * p99)
        yield Point(
            cores, concurrency, batch, times.mean_ms, times.p50_ms, p95_ms, p99_ms, times.samples
        )


def bundled_profile(function: str) -> Characterisation:
    """Return a bundled characterisation. Raises `ConfigError` for an unknown function.

    >>> bundled_profile("recommender").time_ms(cores=2, concurrency=5)
    15.748
    """
    with ExitStack() as stack:
        return read_tables([_path(stack, name) for name in _BUNDLED_TABLES], function)


def _path(stack: ExitStack, name: str) -> Path:
    table = files("headgate").joinpath("data", "measured", name)
    return stack.enter_context(as_file(table))
