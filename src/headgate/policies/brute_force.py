"""Brute force: `esg` with a look at every path instead of a search, for small pipelines.

What the search of "ESG" (HPDC 2024) is compared with there: at every stage all combinations of
configurations of this stage and those that follow in its group are looked at, and the `paths_max`
cheapest ones that are in time make the list; the fastest one if none is. Everything else is as in
`esg`: the queues, the groups and their shares of the time left, and the dispatch.

Combinations are reported as work, one unit each, for which the simulator charges `per_work_unit`
of time. For each number of items that may wait, all paths are listed once, by cost, and the list is
kept: a run takes less time than it is charged for. A pipeline with a stage that has
more than `combinations_max` combinations is a `ConfigError`.
Cost per decision: at most O(combinations) for each queue, then O(`paths_max` x free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("brute_force").config().combinations_max
20000
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Final, final

from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind, bounded
from headgate.core.records import Task
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.frontier.slo_split import GROUP_MAX, shares_of_rest
from headgate.planning.rivals.esg_search import PathTable
from headgate.policies._stages import Path, StagePolicy, StageQueue, within_batches

_PATHS_KEPT_MAX: Final = 2_000_000  # in all lists: 32 MB


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `brute_force`."""

    paths_max: int = field(default=5, metadata=bounded(ge=1))  # configurations on the list
    group_max: int = field(default=GROUP_MAX, metadata=bounded(ge=1))  # stages combined
    combinations_max: int = field(default=20_000, metadata=bounded(ge=1))  # of a decision
    margin: float = field(default=0.02, metadata=bounded(ge=0, lt=1))  # of the time left
    prewarm: bool = True  # start successors on the node of their predecessor


@final
class BruteForce(StagePolicy):
    """A queue per stage of each pipeline, planned by looking at every path."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, prewarms=config.prewarm, margin=config.margin)
        self._paths_max = config.paths_max
        # By pipeline id and stage: the candidates of the stage and those behind it in its group,
        # and their share of the time left.
        self._rests: list[list[tuple[list[list[StageConfig]], float]]] = []
        # By pipeline id, stage, smallest and largest batch.
        self._tables: dict[tuple[int, int, int, int], PathTable] = {}
        self._paths_kept = 0
        for graph, candidates in zip(self.graphs, self.candidates, strict=True):
            rests = [
                ([candidates[index] for index in share.stages], share.part)
                for share in shares_of_rest(graph, candidates, group_max=config.group_max)
            ]
            for name, (rest, _) in zip(graph.names, rests, strict=True):
                count = prod(map(len, rest))
                if count > config.combinations_max:
                    raise ConfigError(
                        f"stage {name}: {count} combinations of configurations",
                        key="policy.combinations_max",
                        value=config.combinations_max,
                        allowed=f"{count} or more, a smaller policy.group_max, or another policy",
                    )
            self._rests.append(rests)

    def paths_for(self, queue: StageQueue, head: Task) -> list[Path]:
        """The cheapest of all paths within this group's share of the time that is left."""
        rest, share = self._rests[queue.pipeline_id][queue.index]
        items, items_max = head.request.items, queue.batch_max(head)
        key = (queue.pipeline_id, queue.index, items, items_max)
        table = self._tables.get(key)
        if table is None:
            table = PathTable(within_batches(rest, items, items_max))
            self._paths_kept += len(table)
            if self._paths_kept > _PATHS_KEPT_MAX:
                self._tables.clear()
                self._paths_kept = len(table)
            self._tables[key] = table
        self.orders.report_work(len(table))
        found = table.cheapest(self.budget_ns(head.request, share), self._paths_max)
        return [path[:2] for path in found]


POLICY = PolicyKind(BruteForce, Config, Capabilities(batches=True, mixed_pools=True))
