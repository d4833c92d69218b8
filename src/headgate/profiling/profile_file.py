"""The profile file: a characterisation with its settings and machine, and plausibility checks.

Planners rely on a profile, and a file may contain anything, so its values are checked.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from headgate.core.errors import ConfigError
from headgate.planning.latency_model import Characterisation
from headgate.profiling.machine import Machine
from headgate.profiling.profiler import ProfileResult, ProfilerSettings

# Bounds are wider than any real measurement, and narrow enough for planners, which iterate over
# every concurrency and batch size.
_POINTS_MAX: Final = 1_000
_COUNT_MAX: Final = 1_000
_TIME_MS_MAX: Final = 1e8  # more than a day
_POINT_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "cores": (0.001, 10_000),
    "concurrency": (1, _COUNT_MAX),
    "batch": (1, _COUNT_MAX),
    "mean_ms": (1e-6, _TIME_MS_MAX),
    "p50_ms": (1e-6, _TIME_MS_MAX),
    "p95_ms": (1e-6, _TIME_MS_MAX),
    "p99_ms": (1e-6, _TIME_MS_MAX),
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
