"""Figures 3 to 6 of the HiPS'21 paper: 2 cores, SLA of 200 ms, without and with functions.

The load is 5 to 20 concurrent requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headgate.lab.experiments import Known, Progress, Result
from headgate.lab.experiments.hybrid_waves.spill import FUNCTIONS_IN_TIME, run_on

NAME = "hybrid-200ms"
TITLE = "Bursts on 2 cores with an SLA of 200 ms, without functions and with them"
KNOWN: Final = (Known(FUNCTIONS_IN_TIME, "docs/papers/hybrid.md"),)


def run(*, quick: bool, out: Path | None, progress: Progress) -> Result:
    """Run every policy, on the surrogate and on the measured tables."""
    return run_on(2, NAME, (3, 4, 5, 6), quick=quick, out=out, progress=progress)
