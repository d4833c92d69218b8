"""What a live log says about the truth behind the profiles, in the words of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.model import App, Profile
from headgate.metrics.from_log import BatchColumns

VALUES_MAX: Final = 100
_FACTOR_MAX: Final = 1e6  # as the application file has it


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """How long the batches of a function really took, over what its profile says."""

    function: str
    batches: int
    mean: float
    p50: float
    p99: float
    factors: tuple[float, ...]  # equally likely values that say the same


def calibrate(app: App, batches: BatchColumns) -> list[CalibrationResult]:
    """Return the truth about every function that ran.

    What waited for a cold start or did not run to its end says nothing about running times.
    """
    factor, function = _factors(app, batches)
    is_evidence = (batches.cold == 0) & (batches.finished == 1)
    found: list[CalibrationResult] = []
    for each in app.functions:
        own = np.sort(factor[is_evidence & (function == each.id)])
        if len(own):
            p50, p99 = np.quantile(own, (0.5, 0.99), method="inverted_cdf")
            values = quantile_bin_means(own)
            found.append(
                CalibrationResult(each.name, len(own), own.mean(), float(p50), float(p99), values)
            )
    return found


def quantile_bin_means(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the means of equal shares of sorted values: few, with the mean of them all.

    Points of the quantile function would not do: the last of them would be the worst value ever
    seen, and stand for a whole share.

    >>> quantile_bin_means(np.array([1.0, 2.0, 4.0]))
    (1.0, 2.0, 4.0)
    """
    edges = np.linspace(0.0, len(values), min(len(values), VALUES_MAX) + 1)
    # The integral of the step function that the values are, at the edges of the shares.
    sums = np.interp(edges, np.arange(len(values) + 1), np.concatenate(([0.0], values.cumsum())))
    means = np.diff(sums) / np.diff(edges)
    return tuple(float(f"{mean:.4g}") for mean in means)


def calibrated(
    spec: Mapping[str, object], truths: list[CalibrationResult], request_ns: int = 0
) -> dict[str, object]:
    """Return an application file, as plain data, whose simulation is what was seen.

    `request_ns` is what no log can see of a request. Overheads of deciding are part of the times
    of batches already, so they are 0.
    """
    changed = deepcopy(dict(spec))
    changed["simulation"] = {
        "service_times": {
            "distribution": "observed",
            "observed": {truth.function: list(truth.factors) for truth in truths},
        },
        "overheads": {"client_overhead": f"{request_ns}ns"},
    }
    return changed


def _factors(app: App, batches: BatchColumns) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return observed over expected time and the function, by batch."""
    functions = np.array([variant.function_id for variant in app.variants], np.int32)
    expected_ns = np.array(
        [
            _expected_ns(app.variants[variant].profile, items)
            for variant, items in zip(batches.variant.tolist(), batches.items.tolist(), strict=True)
        ],
        np.int64,
    )
    took_ns = batches.ended_ns - batches.sent_ns
    factor = np.clip(took_ns / np.maximum(expected_ns, 1), 1 / _FACTOR_MAX, _FACTOR_MAX)
    return factor, functions[batches.variant]


def _expected_ns(profile: Profile, items: int) -> int:
    return profile.exec_ns[min(max(items, 1), profile.items_max) - 1]
