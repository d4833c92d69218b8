"""How far frontends agree on the number of backends, and what it costs that they do not.

Each frontend of `swayam` computes n from its own slice of the load. A single frontend that sees
everything is the measure: backend-time and compliance are compared with its own. Then something
goes wrong in the middle third of the time: a frontend is killed, and its clients go to the others,
which learn of it at once, or after a minute, so that their F is wrong by one; or backends are
killed. Killed frontends and backends come back, empty, at the end of that third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, final

from headgate.core.clock import MINUTE_NS
from headgate.lab.experiments import Check, Row
from headgate.lab.experiments.autoscaling.environment import (
    FRONTENDS,
    SERVICES,
    SETUPS_S,
    ServiceScenario,
)
from headgate.lab.experiments.autoscaling.runs import (
    SAMPLE_NS,
    ServiceRun,
    service_run,
    swayam_case,
)
from headgate.policies.swayam import Swayam
from headgate.sim.engine import Engine
from headgate.sim.faults import Fault, FaultAction, FaultPlan

ALONE: Final = "one frontend"
TOGETHER: Final = "8 frontends"
KILLED: Final = "a frontend killed"
WRONG: Final = "F wrong by one for a minute"
BACKENDS_KILLED: Final = "5 backends killed"
CONDITIONS: Final = (ALONE, TOGETHER, KILLED, WRONG, BACKENDS_KILLED)

_SERVICE: Final = "diurnal"
_LOADED: Final = 6.0  # times the load of the service, so that several backends are in use
_QUICK_LOADED: Final = 2.0
_KILLED_BACKENDS: Final = 5
_DURATION_NS: Final = 30 * MINUTE_NS
_QUICK_NS: Final = 5 * MINUTE_NS
_SPREAD_MAX: Final = 2.0  # backends, mean of largest less smallest
_GOAL: Final = "a goal of this project"
_SLIDES: Final = "Swayam, slides"


@dataclass(frozen=True, slots=True)
class AgreementCase:
    """A condition under which the frontends are compared."""

    condition: str
    duration_ns: int
    load_factor: float


@dataclass(frozen=True, slots=True)
class AgreementRun:
    """A run, and n of every frontend that was alive, at every sample."""

    run: ServiceRun
    needs: tuple[tuple[int, ...], ...]

    @property
    def spread(self) -> float:
        """The largest n of a frontend less the smallest, on average over time."""
        return fmean(max(each) - min(each) for each in self.needs)

    @property
    def largest(self) -> float:
        """The largest n of a frontend, on average over time."""
        return fmean(max(each) for each in self.needs)

    @property
    def mean(self) -> float:
        return fmean(fmean(each) for each in self.needs)


@final
class NeedsSampler(FaultAction):
    """Changes nothing: reads n of every frontend, where a fault could be."""

    __slots__ = ("samples",)

    def __init__(self) -> None:
        self.samples: list[tuple[int, ...]] = []

    def apply(self, engine: Engine, now_ns: int) -> None:
        gateways = engine.gateways
        policies = [gateways.schedulers[index].policy for index in gateways.alive()]
        self.samples.append(tuple(p.needs[0] for p in policies if isinstance(p, Swayam)))


def agreement_cases(*, is_quick: bool) -> list[AgreementCase]:
    """Return every condition; the quick form is short."""
    size = (_QUICK_NS, _QUICK_LOADED) if is_quick else (_DURATION_NS, _LOADED)
    return [AgreementCase(condition, *size) for condition in CONDITIONS]


def run_agreement(case: AgreementCase, seed: int) -> AgreementRun:
    """Run a condition. For worker processes."""
    sampler = NeedsSampler()
    third_ns = case.duration_ns // 3
    samples = [(at_ns, sampler) for at_ns in range(MINUTE_NS, case.duration_ns, SAMPLE_NS)]
    plan = FaultPlan(_faults(case.condition, third_ns, 2 * third_ns))
    service = next(service for service in SERVICES if service.name == _SERVICE)
    scenario = ServiceScenario(
        service,
        SETUPS_S[0],
        duration_ns=case.duration_ns,
        frontends=1 if case.condition == ALONE else FRONTENDS,
        retires=True,
        load_factor=case.load_factor,
        faults=tuple(sorted([*samples, *plan.actions()], key=lambda pair: pair[0])),
        membership_delay_ns=MINUTE_NS if case.condition == WRONG else 0,
    )
    columns = scenario.environment(seed).simulate(swayam_case(service), seed)
    return AgreementRun(service_run(columns, case.duration_ns), tuple(sampler.samples))


def _faults(condition: str, begin_ns: int, end_ns: int) -> tuple[Fault, ...]:
    if condition in (KILLED, WRONG):
        return (Fault("crash_gateway", begin_ns, until_ns=end_ns, gateway=0),)
    if condition == BACKENDS_KILLED:  # the first ones in the common order: those in use
        nodes = range(_KILLED_BACKENDS)
        return tuple(Fault("crash", begin_ns, until_ns=end_ns, node=node) for node in nodes)
    return ()


def agreement_rows(runs: Mapping[AgreementCase, Sequence[AgreementRun]]) -> list[Row]:
    """Return a row per condition."""
    alone = next(each[0] for case, each in runs.items() if case.condition == ALONE)
    return [
        {
            "frontends": case.condition,
            "n, mean": each[0].mean,
            "n, largest frontend": each[0].largest,
            "spread of n": each[0].spread,
            "within RT_max %": 100 * each[0].run.met,
            "SLA met % of minutes": 100 * each[0].run.compliance,
            "backend-time / one frontend": each[0].run.used_ns / alone.run.used_ns,
        }
        for case, each in runs.items()
    ]


def agreement_checks(runs: Mapping[AgreementCase, Sequence[AgreementRun]]) -> list[Check]:
    """Return whether frontends agree, and whether what goes wrong is absorbed."""
    of = {case.condition: each[0] for case, each in runs.items()}
    spread = of[TOGETHER].spread
    worst = min(CONDITIONS[2:], key=lambda condition: of[condition].run.compliance)
    lost = of[TOGETHER].run.compliance - of[worst].run.compliance
    minutes = round(lost * len(of[TOGETHER].run.windows))
    return [
        Check(
            "8 frontends agree on n: the largest less the smallest, mean",
            _SLIDES,
            f"at most {_SPREAD_MAX:g}",
            round(spread, 2),
            spread <= _SPREAD_MAX,
        ),
        Check(
            "minutes of the SLA that a killed frontend, a wrong F or killed backends cost, at most",
            _GOAL,
            "at most 2",
            f"{minutes} ({worst})",
            minutes <= 2,
        ),
    ]
