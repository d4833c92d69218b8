"""Independent observers of a run. They know the rules, and nothing of the Scheduler's insides."""

from headgate.core.model import App
from headgate.sim.checkers.batches import AttemptLimits, BatchLimits, Causes, Executions
from headgate.sim.checkers.checker import EVENTS_MAX, Checker, Checkers, Clock
from headgate.sim.checkers.limits import Budgets, Starts, Suspects
from headgate.sim.checkers.nodes import Exclusivity, Memory, Presence
from headgate.sim.checkers.requests import Conservation, Deadlines, GivingUp, Stages, Starvation

__all__ = [
    "AttemptLimits",
    "BatchLimits",
    "Budgets",
    "Causes",
    "Checker",
    "Checkers",
    "Clock",
    "Conservation",
    "Deadlines",
    "Exclusivity",
    "Executions",
    "GivingUp",
    "Memory",
    "Presence",
    "Stages",
    "Starts",
    "Starvation",
    "Suspects",
    "all_checkers",
]


def all_checkers(
    app: App,
    *,
    duplicates: bool = False,
    losses: bool = False,
    thinks: bool = False,
    drained: bool = False,
    wait_max_ns: int | None = None,
    events_max: int = EVENTS_MAX,
) -> Checkers:
    """Return every checker there is, as lenient as the faults of the run demand.

    `duplicates`: completions may be told twice. `losses`: completions may never be told.
    `thinks`: decisions take time, so messages cross. `drained`: the run went on until nothing was
    in flight. `wait_max_ns`: no request may wait for longer than this for its first dispatch.
    `events_max`: a run of more events stands still, and is stopped.
    """
    checkers: list[Checker] = [
        Clock(events_max),
        Conservation(thinks=thinks),
        Deadlines(app, thinks=thinks),
        Stages(app),
        Causes(duplicates=duplicates, losses=losses, thinks=thinks, drained=drained),
        AttemptLimits(app),
        BatchLimits(app),
        Budgets(app),
        Executions(app),
        Presence(),
        Exclusivity(app),
        Memory(app),
        Starts(app),
        Suspects(app),
    ]
    if not thinks:
        checkers.append(GivingUp(app))
    if wait_max_ns is not None:
        checkers.append(Starvation(wait_max_ns))
    return Checkers(checkers)
