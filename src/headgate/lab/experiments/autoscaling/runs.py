"""Runs of the Swayam experiment: what policies and oracles use, and when they meet the SLA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import Final

import numpy as np

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.states import Outcome
from headgate.lab.experiments.autoscaling.environment import (
    RETIRE_AFTER_NS,
    SERVICE_LEVEL,
    UNUSED_AFTER_NS,
    Service,
    ServiceScenario,
)
from headgate.lab.experiments.autoscaling.oracles import (
    BackendUse,
    Int64,
    lazy_release,
    lazy_release_bound_ns,
    peak_bound,
    zero_setup,
)
from headgate.lab.harness import Bools, Case, Floats, PolicyCase
from headgate.metrics.columns import RunColumns

ServiceCase = Case[ServiceScenario]
SWAYAM: Final = "swayam"  # the policy whose backends leave by themselves
LONG_TIMEOUT_NS: Final = 10 * MINUTE_NS  # of ClairA2, to show what its timeout costs
WINDOW_NS: Final = MINUTE_NS  # in each of which the SLA is met or not
SAMPLE_NS: Final = 10 * SECOND_NS  # between the times at which backends are counted


@dataclass(frozen=True, slots=True, eq=False)
class ServiceRun:
    """A run of a policy."""

    requests: int
    met: float  # share of the requests within RT_max
    late: float  # share that was executed and late; the rest was rejected or expired
    windows: Floats  # by minute, the share of its requests within RT_max; NaN without requests
    used_ns: int  # backend-time
    backends: Int64  # at every sample
    peak: int
    setups: int  # backends that were set up, those at the start included

    @property
    def compliance(self) -> float:
        """Share of the time in which the SLA is met: of the minutes with requests."""
        counted = self.windows[~np.isnan(self.windows)]
        return float((counted >= SERVICE_LEVEL).mean()) if len(counted) else nan


@dataclass(frozen=True, slots=True, eq=False)
class OracleRun:
    """The oracles on the requests of a service, and the bounds below them."""

    requests: int
    erlangs: float  # mean load
    work_ns: int  # what ClairA1 uses
    lazy_ns: int  # what ClairA2 uses
    lazy_bound_ns: int
    lazier_ns: int  # what ClairA2 uses with the long timeout
    peak: int  # of ClairA1
    peak_bound: int
    lazy_peak: int
    lazy_setups: int
    backends: Int64  # of ClairA2 at every sample
    demand: Floats  # load around every sample, in Erlangs


def swayam_case(service: Service) -> PolicyCase:
    """Return `swayam` for a service.

    The window of the regression is the cheapest of one, three and five minutes on two services: a
    frontend sees about one request per second.
    """
    return PolicyCase.of(SWAYAM, window_ns=3 * MINUTE_NS, probe_delay_ns=service.probe_delay_ns)


def run_service(case: ServiceCase, seed: int) -> ServiceRun:
    """Run a policy on a service. For worker processes."""
    scenario = replace(case.scenario, retires=case.policy.name == SWAYAM)
    columns = scenario.environment(seed).simulate(case.policy, seed)
    return service_run(columns, scenario.duration_ns)


def service_run(columns: RunColumns, duration_ns: int) -> ServiceRun:
    """Return what is measured in a run."""
    requests = columns.requests
    is_met = requests.outcome == Outcome.MET
    use = BackendUse(
        np.array([use.start_ns for use in columns.instances], dtype=np.int64),
        np.array([use.end_ns for use in columns.instances], dtype=np.int64),
    )
    return ServiceRun(
        requests=len(requests),
        met=float(is_met.mean()),
        late=float((requests.outcome == Outcome.LATE).mean()),
        windows=window_shares(requests.arrival_ns, is_met, duration_ns),
        used_ns=use.total_ns,
        backends=use.at(_samples_ns(duration_ns)),
        peak=use.peak,
        setups=len(use.starts_ns),
    )


def _samples_ns(duration_ns: int) -> Int64:
    """Return the times at which backends are counted: in the middle of equal steps."""
    return np.arange(0, duration_ns, SAMPLE_NS) + SAMPLE_NS // 2


def window_shares(arrivals_ns: Int64, is_met: Bools, duration_ns: int) -> Floats:
    """Return the share of requests within RT_max by window of arrival; NaN without requests.

    >>> arrivals_ns = np.array([0, 1, WINDOW_NS, 3 * WINDOW_NS])
    >>> window_shares(arrivals_ns, np.array([True, False, True, True]), 4 * WINDOW_NS).tolist()
    [0.5, 1.0, nan, 1.0]
    """
    count = -(-duration_ns // WINDOW_NS)
    numbers = arrivals_ns // WINDOW_NS
    all_requests = np.bincount(numbers, minlength=count)
    met = np.bincount(numbers, weights=is_met, minlength=count)
    shares: Floats = np.full(count, nan)
    np.divide(met, all_requests, out=shares, where=all_requests > 0)
    return shares


def run_oracles(scenario: ServiceScenario, seed: int) -> OracleRun:
    """Run both oracles on the arrivals of a service. For worker processes."""
    arrivals_ns, exec_ns = scenario.arrivals(seed).times_ns, scenario.exec_ns(seed)
    requests = (arrivals_ns, exec_ns, scenario.service.response_max_ns)
    timeout_ns = UNUSED_AFTER_NS + RETIRE_AFTER_NS
    exact = zero_setup(*requests)
    lazy = lazy_release(*requests, setup_ns=scenario.setup_ns, timeout_ns=timeout_ns)
    samples_ns = _samples_ns(scenario.duration_ns)
    in_sample = np.bincount(arrivals_ns // SAMPLE_NS, weights=exec_ns, minlength=len(samples_ns))
    return OracleRun(
        requests=len(arrivals_ns),
        erlangs=int(exec_ns.sum()) / scenario.duration_ns,
        work_ns=exact.total_ns,
        lazy_ns=lazy.total_ns,
        lazy_bound_ns=lazy_release_bound_ns(
            *requests, setup_ns=scenario.setup_ns, timeout_ns=timeout_ns
        ),
        lazier_ns=lazy_release(
            *requests, setup_ns=scenario.setup_ns, timeout_ns=LONG_TIMEOUT_NS
        ).total_ns,
        peak=exact.peak,
        peak_bound=peak_bound(*requests),
        lazy_peak=lazy.peak,
        lazy_setups=len(lazy.starts_ns),
        backends=lazy.at(samples_ns),
        demand=in_sample / SAMPLE_NS,
    )
