"""Figures 7 to 9 of the HiPS'21 paper: 8 cores, SLA of 150 ms, without and with functions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headgate.lab.experiments import Known, Progress, Result
from headgate.lab.experiments.hybrid_waves.spill import FUNCTIONS_IN_TIME, run_on

NAME = "hybrid-150ms"
TITLE = "Bursts on 8 cores with an SLA of 150 ms, without functions and with them"
KNOWN: Final = (Known(FUNCTIONS_IN_TIME, "docs/papers/hybrid.md"),)


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run every policy, on the surrogate and on the measured tables."""
    return run_on(8, NAME, (7, 8, 9), quick=quick, out=out, progress=progress)
