"""Crash markers: files in the run directory that name the function a worker was loading when it
died.

Loading or measuring a function may kill the whole process without a chance to report: a
segmentation fault, `os._exit`, the watchdog, the memory limit. Therefore a worker creates a marker
before it loads or measures a function and removes it afterwards. When the worker dies, the
supervisor finds the marker, can name the function, and marks it as a suspect. From then on no
worker loads the function in its own process until a trial load in a separate process has succeeded.

Measured times are stored there as well, so that a restarted worker need not measure again and
serves sooner.

Markers are advisory. If they cannot be written, everything else works as usual.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Final, final

LOAD: Final = "load"
MEASURE: Final = "measure"
STEPS: Final = (LOAD, MEASURE)


@final
class CrashMarkers:
    """The markers of one process group."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @contextmanager
    def during(self, step: str, node_id: int, variant_id: int) -> Iterator[None]:
        """Hold a marker for the duration of a step."""
        path = self._run_dir / f"{step}-{node_id}-{variant_id}-{get_ident()}.marker"
        with suppress(OSError):
            path.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()

    def is_new_failure(self, failure: str) -> bool:
        """Whether no worker of the group has reported this failure before."""
        digest = sha256(failure.encode("utf-8", "replace")).hexdigest()[:32]
        try:
            os.close(os.open(self._run_dir / f"failure-{digest}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def read_measured(self, node_id: int, variant_id: int) -> tuple[int, ...] | None:
        """Return the times that an earlier process of this node measured, if any."""
        try:
            return tuple(map(int, self._measured_path(node_id, variant_id).read_text().split()))
        except (OSError, ValueError):
            return None

    def write_measured(self, node_id: int, variant_id: int, exec_ns: tuple[int, ...]) -> None:
        """Store measured times for later processes of this node."""
        _write(self._measured_path(node_id, variant_id), " ".join(map(str, exec_ns)))

    def suspect_reason(self, step: str, variant_id: int) -> str:
        """Return why a step is suspect: its last failure; empty if it is not."""
        try:
            return self._suspect_path(step, variant_id).read_text("utf-8")
        except OSError:
            return ""

    def mark_suspect(self, step: str, variant_id: int, reason: str) -> None:
        """Record that a step must not be tried in the process of a worker."""
        _write(self._suspect_path(step, variant_id), reason)

    def clear_suspect(self, step: str, variant_id: int) -> None:
        """Record that a step has succeeded after all."""
        with suppress(OSError):
            self._suspect_path(step, variant_id).unlink()

    def take_interrupted(self, node_id: int) -> list[tuple[str, int]]:
        """Return the steps that a dead worker was in, with variant ids; remove their markers."""
        interrupted: set[tuple[str, int]] = set()
        for step in STEPS:
            for path in self._run_dir.glob(f"{step}-{node_id}-*.marker"):
                interrupted.add((step, int(path.name.split("-")[2])))
                with suppress(OSError):
                    path.unlink()
        return sorted(interrupted)

    def _suspect_path(self, step: str, variant_id: int) -> Path:
        return self._run_dir / f"suspect-{step}-{variant_id}"

    def _measured_path(self, node_id: int, variant_id: int) -> Path:
        return self._run_dir / f"measured-{node_id}-{variant_id}"


def _write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees all of it or nothing."""
    draft = path.with_suffix(f".{os.getpid()}-{get_ident()}")
    with suppress(OSError):
        draft.write_text(text, "utf-8")
        draft.rename(path)
