"""Markers: files in the run directory that say what a worker is doing, should it die of that.

A function that is loaded or measured may end its whole process, in ways that leave no time for a
word: a segmentation fault, `os._exit`, the watchdog, the memory limit. So a worker leaves a marker
before it loads or measures a function and removes it afterwards. When the worker dies, its
supervisor finds the marker, can name the function, and leaves a marker of its own: from then on the
function is a suspect, and no worker loads it in its own process before a trial has gone well.

What was measured is left there, too: a worker that is started again need not measure it again, and
serves sooner.

All of this is advice. Where it cannot be written, everything else goes on.
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
    """The markers of one generation of workers."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    # --- what a worker says --------------------------------------------------------------------

    @contextmanager
    def during(self, step: str, node_id: int, variant_id: int) -> Iterator[None]:
        """Leave a marker for as long as a step takes."""
        path = self._run_dir / f"{step}-{node_id}-{variant_id}-{get_ident()}.marker"
        with suppress(OSError):
            path.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()

    def is_new_failure(self, failure: str) -> bool:
        """Whether no worker has met this failure before."""
        digest = sha256(failure.encode("utf-8", "replace")).hexdigest()[:32]
        try:
            os.close(os.open(self._run_dir / f"seen-{digest}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def read_measured(self, node_id: int, variant_id: int) -> tuple[int, ...] | None:
        """Return what this worker measured before it was started again, if it did."""
        try:
            return tuple(map(int, self._measured_path(node_id, variant_id).read_text().split()))
        except (OSError, ValueError):
            return None

    def write_measured(self, node_id: int, variant_id: int, exec_ns: tuple[int, ...]) -> None:
        """Leave what was measured for whoever comes after."""
        _write(self._measured_path(node_id, variant_id), " ".join(map(str, exec_ns)))

    # --- suspects ------------------------------------------------------------------------------

    def suspect_reason(self, step: str, variant_id: int) -> str:
        """Return what happened when a step was last tried; nothing if that went well."""
        try:
            return self._suspect_path(step, variant_id).read_text("utf-8")
        except OSError:
            return ""

    def mark_suspect(self, step: str, variant_id: int, reason: str) -> None:
        """Remember that a step must not be tried in a worker's own process."""
        _write(self._suspect_path(step, variant_id), reason)

    def clear_suspect(self, step: str, variant_id: int) -> None:
        """A step went well after all."""
        with suppress(OSError):
            self._suspect_path(step, variant_id).unlink()

    # --- what a supervisor finds ---------------------------------------------------------------

    def take_interrupted(self, node_id: int) -> list[tuple[str, int]]:
        """Return what a worker was doing when it died, as (step, variant id); and forget it."""
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
    """Write a file so that whoever reads it reads all of it."""
    draft = path.with_suffix(f".{os.getpid()}-{get_ident()}")
    with suppress(OSError):
        draft.write_text(text, "utf-8")
        draft.rename(path)
