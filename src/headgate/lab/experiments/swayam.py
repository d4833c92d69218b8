"""Distributed, model-driven autoscaling: the evaluation of the Swayam paper.

Fifteen services of log-normal execution times, five with generated arrivals and ten with windows of
public traces (`autoscaling.environment`), each for three hours on up to 100 backends, with set-up
times of 5 and 10 s. RT_max is five mean execution times, to be met by 99 % of the requests, also
at twice the predicted rate. Backend-time is compared with that of the clairvoyant autoscalers of
the paper (`autoscaling.oracles`). A request that still waits after RT_max is dropped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.model import Slo
from headgate.lab.experiments import Known, Progress, Result
from headgate.lab.experiments.autoscaling.agreement import (
    agreement_cases,
    agreement_checks,
    agreement_rows,
    run_agreement,
)
from headgate.lab.experiments.autoscaling.environment import (
    BACKENDS,
    SERVICE_LEVEL,
    SERVICES,
    SETUPS_S,
    ServiceScenario,
)
from headgate.lab.experiments.autoscaling.results import (
    OURS,
    REACTIVE,
    STATIC,
    ServiceTables,
    timeline_figure,
    usage_figure,
)
from headgate.lab.experiments.autoscaling.runs import (
    ServiceCase,
    run_oracles,
    run_service,
    swayam_case,
)
from headgate.lab.figures import write_figures
from headgate.lab.harness import PolicyCase, over_seeds
from headgate.planning.autoscaling.execution_times import LogNormalTimes
from headgate.planning.autoscaling.response_time import least_backends
from headgate.planning.autoscaling.waiting_time import RandomRetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "swayam"
TITLE = "Distributed, model-driven autoscaling: SLA compliance and backend-time"
_PAGE: Final = "docs/papers/swayam.md"
KNOWN: Final = (
    Known("swayam uses up to 27 % less backend-time than ClairA2", _PAGE),
    Known("services on which swayam meets the SLA 96 % of the time or less", _PAGE, ("long",)),
)

_QUICK: Final = ("bursts", "diurnal", "step")
_QUICK_NS: Final = 15 * MINUTE_NS
_DRAWN: Final = ("step", "surges", "bursts")  # services whose timelines are drawn


def run(*, quick: bool, out: Path | None, progress: Progress, jobs: int = 2) -> Result:
    """Run every policy and the oracles on every service."""
    named = os.environ.get("HEADGATE_TRACES")
    scenarios = _scenarios(Path(named) if named else None, is_quick=quick, progress=progress)
    progress(f"oracles, then policies, on {len(scenarios)} services and set-up times")
    oracles = over_seeds(run_oracles, scenarios, 1, is_parallel=not quick, processes=jobs)
    cases = [ServiceCase(policy, each) for each in scenarios for policy in policies(each)]
    runs = over_seeds(run_service, cases, 1, is_parallel=not quick, processes=jobs)
    tables = ServiceTables(runs, oracles)
    progress("agreement of frontends")
    agreed = over_seeds(
        run_agreement,
        agreement_cases(is_quick=quick),
        1,
        is_parallel=not quick,
        processes=jobs,
    )
    return Result(
        NAME,
        [*tables.rows(), *agreement_rows(agreed)],
        [*tables.checks(), *agreement_checks(agreed)],
        write_figures(out, NAME, lambda: _figures(tables)),
    )


def policies(scenario: ServiceScenario) -> list[PolicyCase]:
    """Return the policies for a service, with their settings.

    `swayam`, the static partition and `headgate` have as many frontends as the scenario, and
    `headgate` is tried with one that sees everything too. The reactive autoscaler has its
    documented target, and half of it, which leaves room for twice the rate. A static partition is
    as large as the busiest minute needs, in hindsight.
    """
    probe_delay_ns = scenario.service.probe_delay_ns
    return [
        swayam_case(scenario.service),
        PolicyCase.of(
            STATIC, nodes_per_model=_peak_backends(scenario), probe_delay_ns=probe_delay_ns
        ),
        PolicyCase(REACTIVE),
        PolicyCase.of(REACTIVE, f"{REACTIVE}, target 0.35", target=0.35),
        PolicyCase(OURS),
        PolicyCase(OURS, title=f"{OURS}, one gateway", sees_all=True),
    ]


def _peak_backends(scenario: ServiceScenario) -> int:
    """Return how many backends the busiest minute needs."""
    service = scenario.service
    counts = np.bincount(scenario.arrivals(0).times_ns // MINUTE_NS)
    times = LogNormalTimes(service.exec_ns / SECOND_NS, service.cv)
    objective = Slo(service.response_max_ns, SERVICE_LEVEL)
    balancer = RandomRetry(service.probe_delay_ns / SECOND_NS)
    needed = least_backends(times, float(counts.max()) / 60, objective, balancer).backends
    assert needed is not None, "RT_max is far above every execution time"
    return min(needed, BACKENDS)


def _scenarios(
    directory: Path | None, *, is_quick: bool, progress: Progress
) -> list[ServiceScenario]:
    """Return every service with every set-up time; without traces, those that are generated."""
    if is_quick:
        chosen = [service for service in SERVICES if service.name in _QUICK]
        return [ServiceScenario(each, SETUPS_S[0], duration_ns=_QUICK_NS) for each in chosen]
    services = [service for service in SERVICES if directory is not None or not service.file]
    if directory is None:
        progress("without the services on public traces (HEADGATE_TRACES)")
    return [
        ServiceScenario(service, setup_s, directory) for service in services for setup_s in SETUPS_S
    ]


def _figures(tables: ServiceTables) -> dict[str, Figure]:
    figures = {"usage": usage_figure(tables)}
    for table in tables.tables:
        name, setup_s = table.scenario.service.name, table.scenario.setup_s
        if name in _DRAWN and setup_s == SETUPS_S[0]:
            figures[name] = timeline_figure(table, tables.policies)
    return figures
