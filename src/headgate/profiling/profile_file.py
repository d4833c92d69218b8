"""The profile file: a characterisation, and how it came about."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from headgate.core.errors import ConfigError
from headgate.planning.latency_model import Characterisation
from headgate.profiling.machine import Machine
from headgate.profiling.profiler import ProfileResult, ProfilerSettings

# What a measurement can be: a file of somebody's may say anything, and planners believe it.


# Wider than anything real, and narrow enough for what computes with it (steps of concurrency and
# batch are gone through one by one).
_POINTS_MAX: Final = 1_000
_COUNT_MAX: Final = 1_000
_TIME_MS_MAX: Final = 1e8  # more than a day
_OF_POINTS: Final[dict[str, tuple[float, float]]] = {
    "cores": (0.001, 10_000),
    "concurrency": (1, _COUNT_MAX),
    "batch": (1, _COUNT_MAX),
    "mean_ms": (1e-6, _TIME_MS_MAX),
    "p50_ms": (1e-6, _TIME_MS_MAX),
    "p95_ms": (1e-6, _TIME_MS_MAX),
    "p99_ms": (1e-6, _TIME_MS_MAX),
    "samples": (0, 2**63),
}
_PARTS_OF_START: Final = ("process_ms", "imports_ms", "fetch_ms", "load_ms", "first_call_ms")
_MEMORY_BYTES_MAX: Final = 10**18


def check_bounds(found: Characterisation, where: str) -> Characterisation:
    """Return what was found, unless no machine measures that. Raises `ConfigError`."""
    if len(found.points) > _POINTS_MAX:
        allowed = f"up to {_POINTS_MAX:,}"
        raise ConfigError(f"holds {len(found.points):,} points", where=where, allowed=allowed)
    for index, point in enumerate(found.points):
        for name, (least, most) in _OF_POINTS.items():
            _check(getattr(point, name), least, most, where, f"points[{index}].{name}")
    if found.cold_start is not None:
        for name in _PARTS_OF_START:
            value = getattr(found.cold_start, name)
            _check(value, 0, _TIME_MS_MAX, where, f"cold_start.{name}")
    _check(found.peak_memory_bytes or 0, 0, _MEMORY_BYTES_MAX, where, "peak_memory_bytes")
    return found


def _check(value: float, least: float, most: float, where: str, key: str) -> None:
    if not least <= value <= most:  # which also is so for NaN
        allowed = f"{least:,} to {most:,.0f}"
        raise ConfigError("cannot be", where=where, key=key, value=value, allowed=allowed)


def to_document(
    measured: ProfileResult,
    settings: ProfilerSettings,
    machine: Machine,
    *,
    at: str,
    by: str | None = None,
) -> dict[str, object]:
    """Return what a profile file holds: `at` says when it was measured, `by` who did it."""
    return {
        **measured.characterisation.to_json(),
        "cold_starts": measured.starts,
        "at": at,
        "by": by,
        "machine": asdict(machine),
        "settings": asdict(settings),
        "took_s": round(measured.took_s, 3),
        "skipped": [asdict(place) for place in measured.skipped],
    }


def read_profile(path: Path) -> Characterisation:
    """Read a profile file. Raises `ConfigError` if it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is no JSON: {error}", where=str(path)) from None
    return check_bounds(Characterisation.from_json(document, str(path)), str(path))
