"""One step of a curve: a load in an open loop, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headgate.bench.live.process import Running
from headgate.core.clock import SECOND_NS
from headgate.load import (
    LoadOptions,
    LoadResult,
    LoadSummary,
    Trouble,
    run_open_loop,
    summarise_load,
)
from headgate.workload import poisson


@dataclass(frozen=True, slots=True)
class Step:
    """One load and what came of it, as clients saw it."""

    load: float  # in capacities
    summary: LoadSummary
    has_one_answer_each: bool
    memory_mib: tuple[float, float, float]  # before, at most, after


def take_step(
    server: Running, load: float, capacity_rps: float, seconds: float, options: LoadOptions
) -> Step:
    """Ask for so many times the capacity. The same load comes at the same times to everybody."""
    arrivals = poisson(load * capacity_rps, round(seconds * SECOND_NS), seed=round(10 * load))
    before_mib = server.memory_mib()
    seen_mib = [before_mib]
    result = run_open_loop(
        server.url,
        arrivals,
        options,
        on_standing=lambda _: seen_mib.append(server.memory_mib()),
    )
    memory_mib = (before_mib, max(seen_mib), server.memory_mib())
    return Step(load, summarise_load(result), _has_one_answer_each(result), memory_mib)


def _has_one_answer_each(result: LoadResult) -> bool:
    """Whether no answer is missing; that there are no more than that, the log must tell."""
    return bool(np.all((result.trouble == Trouble.NONE) & (result.status > 0)))
