"""ESG: at every stage the cheapest configurations for the rest of a pipeline in the time left.

Hui, Xu, Guo and Shen, "ESG: Pipeline-Conscious Efficient Scheduling of DNN Workflows on Serverless
Platforms with Shareable GPUs" (HPDC 2024). Rules marked [own] are ours, where it leaves one open.

- Every stage of every pipeline has a queue, the oldest request first. Queues are served in turn.
- *ESG_1Q* plans a queue, whatever is free: A* with the time blade and the cost blade finds the
  `paths_max` cheapest choices of variant, pool, shape and batch size for this stage and those that
  follow in its group; the fastest one if none is in time. A batch is no larger than the number of
  items that wait, and none waits for more [own].
- The dominator tree distributes the objective over groups of at most `group_max` stages. At each
  stage the time that the oldest request has left is distributed anew over the groups ahead.
- *ESG_Dispatch* (`policies/_stages.py`) takes the first configuration of the list that fits a free
  node: by warm instances, by locality, by the function's home node. A queue for which nothing fits
  is rechecked, and then takes the smallest shape. Successors are started ahead.

Expansions are reported as work, for which the simulator charges `per_work_unit` of time. Where no
pool has a price, all nodes cost the same. The time to move data is not planned for.
Cost per decision: a search for each queue, then O(`paths_max` x free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("esg").config().group_max
3
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind, bounded
from headgate.core.records import Task
from headgate.planning.frontier.configs import InfeasibleError, StageConfig
from headgate.planning.frontier.slo_split import GROUP_MAX, shares_of_rest
from headgate.planning.rivals.esg_search import EsgSearch
from headgate.policies._stages import Path, StagePolicy, StageQueue, within_batches


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `esg`."""

    paths_max: int = field(default=5, metadata=bounded(ge=1))  # K: configurations on the list
    group_max: int = field(default=GROUP_MAX, metadata=bounded(ge=1))  # stages searched together
    expansions_max: int = field(default=20_000, metadata=bounded(ge=1))  # of a search
    margin: float = field(default=0.02, metadata=bounded(ge=0, lt=1))  # of the time left
    prewarm: bool = True  # start successors on the node of their predecessor


@final
class _GroupRest:
    """A stage with those behind it in its group: their candidates, searches and share of time."""

    def __init__(self, rest: list[list[StageConfig]], share: float) -> None:
        self.share = share  # of the time left that these stages may take
        self._rest = rest
        self._searches: dict[tuple[int, int], EsgSearch] = {}  # by smallest and largest batch

    def search(self, items: int, items_max: int) -> EsgSearch:
        """The search over batches of `items` to `items_max`; later stages may have only larger."""
        key = (items, items_max)
        search = self._searches.get(key)
        if search is None:
            search = EsgSearch(within_batches(self._rest, items, items_max))
            self._searches[key] = search
        return search


@final
class Esg(StagePolicy):
    """A queue per stage of each pipeline, planned by ESG_1Q and sent by ESG_Dispatch."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, prewarms=config.prewarm, margin=config.margin)
        self._paths_max = config.paths_max
        self._expansions_max = config.expansions_max
        self._rests: list[list[_GroupRest]] = []  # by pipeline id and stage
        for graph, candidates in zip(self.graphs, self.candidates, strict=True):
            shares = shares_of_rest(graph, candidates, group_max=config.group_max)
            self._rests.append(
                [
                    _GroupRest([candidates[index] for index in share.stages], share.part)
                    for share in shares
                ]
            )

    def paths_for(self, queue: StageQueue, head: Task) -> list[Path]:
        """ESG_1Q: the cheapest paths within this group's share of the time that is left."""
        rest = self._rests[queue.pipeline_id][queue.index]
        search = rest.search(head.request.items, queue.batch_max(head))
        budget_ns = self.budget_ns(head.request, rest.share)
        try:
            found = search.search(budget_ns, self._paths_max, expansions_max=self._expansions_max)
        except InfeasibleError:
            self.orders.report_work(1)
            return [search.fastest.configs[:2]]
        self.orders.report_work(found.expansions)
        return [path.configs[:2] for path in found.paths] or [search.fastest.configs[:2]]


POLICY = PolicyKind(Esg, Config, Capabilities(batches=True, mixed_pools=True))
