"""Independent checkers of a run: they see only its events, actions and columns.

They know the rules that every run must keep, and nothing of the Scheduler's internals, so that an
error in the Scheduler cannot hide itself.
"""

from headgate.core.clock import NEVER_NS
from headgate.core.model import App
from headgate.sim.checkers.batches import (
    AttemptLimits,
    BatchLimits,
    Completions,
    ComputeLimits,
    Exclusivity,
    Executions,
    LiveTargets,
    Memory,
)
from headgate.sim.checkers.checker import EVENTS_MAX, Checker, Checkers, Clock
from headgate.sim.checkers.limits import Budgets, StartBackoff, SuspectTasks
from headgate.sim.checkers.requests import (
    Conservation,
    Deadlines,
    HardDeadlines,
    ObservedAdmission,
    Stages,
    Starvation,
)

__all__ = [
    "AttemptLimits",
    "BatchLimits",
    "Budgets",
    "Checker",
    "Checkers",
    "Clock",
    "Completions",
    "ComputeLimits",
    "Conservation",
    "Deadlines",
    "Exclusivity",
    "Executions",
    "HardDeadlines",
    "LiveTargets",
    "Memory",
    "ObservedAdmission",
    "Stages",
    "StartBackoff",
    "Starvation",
    "SuspectTasks",
    "all_checkers",
]


def all_checkers(
    app: App,
    *,
    allows_duplicates: bool = False,
    allows_losses: bool = False,
    has_decision_cost: bool = False,
    is_drained: bool = False,
    limit_ns: int = NEVER_NS,
    wait_max_ns: int | None = None,
    events_max: int = EVENTS_MAX,
) -> Checkers:
    """Return all checkers, as lenient as the faults of the run demand.

    `allows_duplicates`: completions may be reported twice. `allows_losses`: completions may never
    be reported. `has_decision_cost`: decisions take time, so that events and actions cross.
    `is_drained`: the run went on until nothing was in flight, or to `limit_ns`. `wait_max_ns`: no
    request may wait longer than this for its first dispatch. `events_max`: a run of more events is
    taken to be in an endless loop and is stopped.
    """
    checkers: list[Checker] = [
        Clock(events_max),
        Conservation(has_decision_cost=has_decision_cost),
        Deadlines(app, has_decision_cost=has_decision_cost),
        ObservedAdmission(app),
        Stages(app),
        Completions(
            allows_duplicates=allows_duplicates,
            allows_losses=allows_losses,
            has_decision_cost=has_decision_cost,
            is_drained=is_drained,
            limit_ns=limit_ns,
        ),
        AttemptLimits(app),
        BatchLimits(app),
        Budgets(app),
        Executions(app),
        LiveTargets(),
        Exclusivity(app),
        ComputeLimits(app),
        Memory(app),
        StartBackoff(app),
        SuspectTasks(app),
    ]
    if not has_decision_cost:
        checkers.append(HardDeadlines(app))
    if wait_max_ns is not None:
        checkers.append(Starvation(wait_max_ns))
    return Checkers(checkers)
