"""Queueing systems as applications, and the comparison of a simulation with a formula."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.core.policy import PolicyKind
from headgate.metrics.columns import RunColumns
from headgate.metrics.confidence import Interval, mean_interval
from headgate.policies import find_policy
from headgate.sim.ground_truth import GroundTruthConfig
from headgate.sim.run import Setup, simulate
from headgate.workload import poisson

SERVICE_S = 0.001
SERVICE_NS = MILLISECOND_NS


def system(servers: int, exec_ns: int = SERVICE_NS) -> App:
    """One function on servers that run one request at a time and start for nothing."""
    function = Function(0, "f", (Variant(0, "f", 0, (0,), Profile(exec_ns=(exec_ns,))),))
    pipeline = Pipeline(0, "f", (Stage(function),))
    return App((function,), (pipeline,), (Pool(0, "server", nodes=servers),))


def run(
    app: App,
    rate_per_s: float,
    requests: int,
    truth: GroundTruthConfig,
    *,
    policy: PolicyKind | None = None,
    seed: int = 1,
) -> RunColumns:
    """Poisson arrivals of about this many requests."""
    arrivals = poisson(rate_per_s, int(requests / rate_per_s * SECOND_NS), seed=seed)
    setup = Setup(app, policy or find_policy("balance"), truth=truth, seed=seed)
    return simulate(setup, arrivals)


def waits_s(run: RunColumns) -> NDArray[np.float64]:
    """How long each request waited for service to begin."""
    return (run.requests.started_ns - run.requests.arrival_ns) / SECOND_NS


def sojourns_s(run: RunColumns) -> NDArray[np.float64]:
    """How long each request was in the system."""
    return (run.requests.finished_ns - run.requests.arrival_ns) / SECOND_NS


def assert_mean(series: NDArray[np.floating] | NDArray[np.bool_], expected: float) -> None:
    """The formula lies in the 99.9 % interval of the series, and the interval says something."""
    interval = batch_means(series, 20, level=0.999)
    assert interval.low <= expected <= interval.high, (interval, expected)
    assert interval.high - interval.low < 0.4 * expected, ("tells nothing", interval, expected)


def batch_means(series: ArrayLike, batches: int, level: float) -> Interval:
    """The mean of an autocorrelated series, with the interval of the batch-means method.

    Successive latencies of one run are correlated, so treating them as independent would give far
    too narrow an interval; means of long batches are nearly independent. Values that do not fill a
    batch are left out at the front, where the run is still warming up.
    """
    values = np.asarray(series, dtype=np.float64)
    assert 2 <= batches <= len(values), "needs at least two batches of at least one value"
    spare = len(values) % batches
    means = values[spare:].reshape(batches, -1).mean(axis=1)
    return mean_interval([float(mean) for mean in means], level)
