"""Orion: one search over all stages when a request arrives; its configurations are kept.

Mahgoub and others, "ORION and the Three Rights: Sizing, Bundling, and Prewarming for Serverless
DAGs" (OSDI 2022), as the comparison in "ESG" (HPDC 2024) frames it: a best-first search for the
configurations of the whole pipeline once, at its first function, with a limit on the time of the
search. Recalled from both; rules marked [own] are ours.

- When a request arrives, `planning/rivals/orion_search.py` finds the cheapest configurations of
  all stages with which the request is in time. When it has made `expansions_max` expansions it goes
  on from the fastest that it has found, by the step that is fastest, until it is in time; without
  `goes_on` it settles for the fastest so far. That module says what of it is Orion's.
- Batches are planned no larger than the items that wait at the first stage now, the request's own
  included [own: no one knows what will wait at later stages].
- The configurations stay as they are, whatever happens. A batch runs in that of its oldest
  request, with as many items as wait, up to the planned batch size: it may turn out smaller.
- Dispatch is that of `esg` (`policies/_stages.py`): warm instances, locality, home nodes, a recheck
  list. The smallest shape is taken where the planned one fits nowhere twice in a row. Successors
  are started ahead when their predecessor is dispatched [own: Orion delays such starts; bundling
  of parallel branches is left out].

Expansions are reported as work, for which the simulator charges `per_work_unit` of time. Equal
questions have equal answers, so answers are kept; their expansions are reported every time, as the
search would be made for every request. The time to move data is not planned for.
Cost per decision: a search at arrival, then O(free nodes) for each queue.

>>> from headgate.policies import find_policy
>>> find_policy("orion").config(expansions_max=100).expansions_max
100
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind, bounded
from headgate.core.records import Request, Task
from headgate.core.states import Settlement
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.rivals.orion_search import OrionSearch, SizingPlan
from headgate.policies._stages import Path, StagePolicy, StageQueue, planned_path, within_batches

_PLANS_KEPT_MAX: Final = 10_000


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `orion`."""

    expansions_max: int = field(default=1_000, metadata=bounded(ge=1))  # of a search
    goes_on: bool = True  # at the limit, by steps of lowest latency until the plan is in time
    margin: float = field(default=0.02, metadata=bounded(ge=0, lt=1))  # of the time left
    prewarm: bool = True  # start successors on the node of their predecessor


@final
class Orion(StagePolicy):
    """Plans every request once, at its arrival."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, prewarms=config.prewarm, margin=config.margin)
        self._expansions_max = config.expansions_max
        self._goes_on = config.goes_on
        self._plans: dict[int, tuple[StageConfig, ...]] = {}  # by request id, of open requests
        # By pipeline id, smallest and largest batch; and then also by time left.
        self._searches: dict[tuple[int, int, int], OrionSearch] = {}
        self._found: dict[tuple[int, int, int, int], SizingPlan] = {}

    def on_arrival(self, request: Request) -> None:
        waiting = max(
            queue.waiting() for queue in self.queues[request.pipeline.id] if not queue.after
        )
        budget_ns = self.budget_ns(request)
        key = (request.pipeline.id, request.items, waiting + request.items)
        found = self._found.get((*key, budget_ns))
        if found is None:
            found = self._search(key).search(
                budget_ns, expansions_max=self._expansions_max, goes_on=self._goes_on
            )
            if len(self._found) >= _PLANS_KEPT_MAX:
                self._found.clear()
            self._found[*key, budget_ns] = found
        self.orders.report_work(found.expansions)
        self._plans[request.id] = found.configs

    def _search(self, key: tuple[int, int, int]) -> OrionSearch:
        search = self._searches.get(key)
        if search is None:
            pipeline_id, items, items_max = key
            stages = within_batches(self.candidates[pipeline_id], items, items_max)
            search = self._searches[key] = OrionSearch(self.graphs[pipeline_id], stages)
        return search

    def on_settled(self, request: Request, settlement: Settlement) -> None:
        self._plans.pop(request.id, None)

    def plan_of(self, request: Request) -> tuple[StageConfig, ...]:
        """The configurations of an open request, by stage."""
        return self._plans[request.id]

    def paths_for(self, queue: StageQueue, head: Task) -> list[Path]:
        """The plan of the oldest request, and nothing else."""
        return [planned_path(queue, self._plans[head.request.id])]


POLICY = PolicyKind(Orion, Config, Capabilities(batches=True, mixed_pools=True))
