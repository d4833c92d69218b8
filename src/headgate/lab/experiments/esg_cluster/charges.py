"""What planning is charged in the ESG experiment, in simulated time.

`headgate bench planner` measures both tables in these cells; its last table in docs/frontier.md has
the same numbers, which a test compares. INFless's set, which the benchmark does not measure, is
charged as the measured one.

- `esg` and `orion` are charged their searches, each at the price of its own expansions. What else a
  Scheduler does for an event is not charged to them, nor to `aquatope`, which decides nothing.
- The others report no work. They are charged all that a Scheduler does for an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headgate.core.clock import MICROSECOND_NS
from headgate.lab.experiments.esg_cluster.environment import CELLS, ClusterScenario
from headgate.lab.experiments.esg_cluster.profiles import MEASURED, RECALLED

ByCell = Mapping[str, tuple[float, float, float]]  # by profile set, then in the order of `CELLS`

EXPANSION_US: Final[Mapping[str, ByCell]] = {
    "esg": {MEASURED: (2.8, 2.9, 2.9), RECALLED: (2.5, 3, 3.1)},
    "orion": {MEASURED: (4.9, 4.6, 4.7), RECALLED: (3.2, 3.8, 4.6)},
}
EVENT_US: Final[Mapping[str, ByCell]] = {
    "headgate": {MEASURED: (83.4, 103.2, 161.1), RECALLED: (120.8, 149.1, 176.3)},
    "infless": {MEASURED: (21.7, 29.1, 34.6), RECALLED: (72.6, 141.9, 101)},
    "fast_gshare": {MEASURED: (19.6, 23.8, 29.3), RECALLED: (74, 114.5, 56.8)},
}


def expansion_ns(policy: str, scenario: ClusterScenario) -> int:
    """Return what a policy is charged for each expansion that it reports."""
    return _in_cell(EXPANSION_US, policy, scenario)


def event_ns(policy: str, scenario: ClusterScenario) -> int:
    """Return what a policy is charged for each event, besides its expansions."""
    return _in_cell(EVENT_US, policy, scenario)


def _in_cell(charges: Mapping[str, ByCell], policy: str, scenario: ClusterScenario) -> int:
    measured = charges.get(policy)
    if measured is None:
        return 0
    by_cell = measured[RECALLED if scenario.profiles == RECALLED else MEASURED]
    return round(by_cell[CELLS.index(scenario.cell)] * MICROSECOND_NS)
