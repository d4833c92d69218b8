"""Two minutes of the bursty load, request by request: what figures 3 to 9 show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.experiments._hips_plan import Plan
from headgate.experiments._hips_run import Requests, observe
from headgate.experiments._hips_ways import DEDICATED, THRESHOLD, cases_of
from headgate.experiments._hips_workload import Phase, wave_sizes, waves
from headgate.experiments._hips_world import (
    FUNCTION_POOL,
    INSTANCE_POOL,
    SURROGATE,
    Setting,
    build_scene,
)
from headgate.experiments.experiment import Row

SAMPLE_S: Final = 120
DRAWN: Final = (SURROGATE, "recommender")  # the sources that there are pictures of
_CALM_S: Final = 10


@dataclass(frozen=True, slots=True)
class Panel:
    """What one figure shows."""

    what: str
    requests: Requests


@dataclass(frozen=True, slots=True)
class Sample:
    """The load, and the three figures it leads to: the instance alone, helped, and its helpers."""

    setting: Setting
    wave_sizes: tuple[int, ...]
    period_s: float
    panels: tuple[Panel, Panel, Panel]


def take_sample(setting: Setting, plan: Plan) -> Sample:
    """Run a calm and some bursts, without functions and with them."""
    bursts_ns = (SAMPLE_S - _CALM_S) * SECOND_NS
    course = (Phase(_CALM_S * SECOND_NS, is_bursty=False), Phase(bursts_ns, is_bursty=True))
    cases = {case.way.label: case for case in cases_of(setting, plan, course)}
    period_ns = cases[DEDICATED].period_ns
    sizes = wave_sizes(course, period_ns, seed=0)
    seen = {}
    for label in (DEDICATED, THRESHOLD):
        scene = build_scene(setting, cases[label].world)
        seen[label] = observe(scene, cases[label].way, waves(sizes, period_ns), seed=0)[1]
    cores = f"{setting.cores} cores"
    panels = (
        Panel(f"{cores}, without functions", seen[DEDICATED]),
        Panel(f"{cores}, with functions", seen[THRESHOLD].on(INSTANCE_POOL)),
        Panel("functions", seen[THRESHOLD].on(FUNCTION_POOL)),
    )
    return Sample(setting, tuple(sizes), period_ns / SECOND_NS, panels)


def load_row(number: int, sample: Sample) -> Row:
    """Return the load in numbers."""
    sizes = sample.wave_sizes
    return {
        "figure": number,
        "waves": len(sizes),
        "every (s)": sample.period_s,
        "fewest at once": min(sizes),
        "mean": fmean(sizes),
        "most": max(sizes),
    }


def panel_rows(numbers: Sequence[int], sample: Sample) -> list[Row]:
    """Return the figures in numbers."""
    rows: list[Row] = []
    for number, panel in zip(numbers, sample.panels, strict=True):
        requests = panel.requests
        response_ms = requests.response_ms
        rows.append(
            {
                "figure": number,
                "source": sample.setting.source,
                "what": panel.what,
                "requests": len(response_ms),
                "shortest (ms)": float(response_ms.min()),
                "median": float(np.median(response_ms)),
                "longest": float(response_ms.max()),
                "late": int(np.count_nonzero(~requests.is_met)),
                "late by cold starts": int(np.count_nonzero(~requests.is_met & requests.is_cold)),
            }
        )
    return rows
