"""Calibration of the simulator: true service times over profiled ones, from a live event log."""

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
_FACTOR_MAX: Final = 1e6  # the limit of the application file


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The measured service times of one function, divided by those of its profile."""

    function: str
    batches: int
    mean: float
    p50: float
    p99: float
    factors: tuple[float, ...]  # the distribution, as equally likely values


def calibrate(app: App, batches: BatchColumns) -> list[CalibrationResult]:
    """Return the calibration of every function that ran.

    Batches that waited for a cold start or did not finish say nothing about service times, and
    are left out.
    """
    factor, function = _factors(app, batches)
    is_usable = (batches.cold == 0) & (batches.finished == 1)
    results: list[CalibrationResult] = []
    for candidate in app.functions:
        own = np.sort(factor[is_usable & (function == candidate.id)])
        if len(own):
            p50, p99 = (float(q) for q in np.quantile(own, (0.5, 0.99), method="inverted_cdf"))
            values = quantile_bin_means(own)
            results.append(
                CalibrationResult(candidate.name, len(own), own.mean(), p50, p99, values)
            )
    return results


def quantile_bin_means(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the means of equal shares of sorted values: at most `VALUES_MAX`, same overall mean.

    Points of the quantile function would not do: the last of them would be the worst value
    observed, and would represent a whole share.

    >>> quantile_bin_means(np.array([1.0, 2.0, 4.0]))
    (1.0, 2.0, 4.0)
    """
    edges = np.linspace(0.0, len(values), min(len(values), VALUES_MAX) + 1)
    # The integral of the step function of the values, at the edges of the shares.
    sums = np.interp(edges, np.arange(len(values) + 1), np.concatenate(([0.0], values.cumsum())))
    means = np.diff(sums) / np.diff(edges)
    return tuple(float(f"{mean:.4g}") for mean in means)


def calibrated(
    spec: Mapping[str, object], results: list[CalibrationResult], request_ns: int = 0
) -> dict[str, object]:
    """Return a copy of an application file whose simulation has the measured service times.

    `request_ns` is the client-side overhead, which no log contains. The cost of decisions is part
    of the batch times already, so the overheads of decisions are 0.
    """
    calibrated_spec = deepcopy(dict(spec))
    calibrated_spec["simulation"] = {
        "service_times": {
            "distribution": "observed",
            "observed": {result.function: list(result.factors) for result in results},
        },
        "overheads": {"client_overhead": f"{request_ns}ns"},
    }
    return calibrated_spec


def _factors(app: App, batches: BatchColumns) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return, per batch, its measured over its expected time, and its function."""
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
