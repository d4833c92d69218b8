"""The profile file: a characterisation, and how it came about."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from headgate.core.errors import ConfigError
from headgate.planning.characterisation import Characterisation
from headgate.profiling.bounds import check_bounds
from headgate.profiling.machine import Machine
from headgate.profiling.profiler import Measured, Settings


def to_document(
    measured: Measured, settings: Settings, machine: Machine, *, at: str, by: str | None = None
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
