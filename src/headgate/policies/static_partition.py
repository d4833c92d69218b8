"""Models pinned to backends: each model has its share of the nodes, for good.

The slides' starting point of Swayam (Middleware 2017), and a baseline of autoscaling. Each model
has as many nodes of its pool as every other, from the beginning, whatever its load is. One that has
too few keeps its requests waiting, or prunes them, while nodes of the others are idle. If there are
more models than nodes, the requests of the last ones are rejected. A node that is lost is replaced;
where instances retire by timeouts, those of a model start again with its next request.

Several gateways share the nodes of a model as in `swayam`: by random dispatch with retries.

Cost per decision: O(nodes of the model).

>>> from headgate.policies import find_policy
>>> find_policy("static_partition").config().nodes_per_model  # an equal share
0
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.policy import (
    NOT_NEGATIVE,
    POSITIVE,
    Capabilities,
    Context,
    Plan,
    PolicyConfig,
    PolicyKind,
)
from headgate.core.records import Request, Task
from headgate.core.states import REQUEST_OPEN, Outcome, Rejection, Settlement
from headgate.policies._frontend import Frontend


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `static_partition`."""

    # Nodes of each model, at most; 0: an equal share of those of its pool.
    nodes_per_model: int = field(default=0, metadata=NOT_NEGATIVE)
    plan_every_ns: int = field(default=SECOND_NS, metadata=POSITIVE)  # lost nodes are replaced
    # From a probe of a busy backend to the next one, the way there and back included.
    probe_delay_ns: int = field(default=MILLISECOND_NS, metadata=NOT_NEGATIVE)


@final
class StaticPartition(Frontend):
    """Keeps the number of backends of every model constant."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config, config.probe_delay_ns)
        self.plan_every_ns = config.plan_every_ns
        self._counts: list[int] = []  # by function id
        models = Counter(fleet.home.id for fleet in self.fleets)  # by pool id
        seen: Counter[int] = Counter()
        for fleet in self.fleets:
            home = fleet.home
            share, rest = divmod(home.nodes, models[home.id])
            count = share + (seen[home.id] < rest)
            seen[home.id] += 1
            self._counts.append(min(config.nodes_per_model or count, count))
        self.order_first(self._counts)
        self._has_arrivals = [False] * len(self.fleets)  # since the last plan

    def used(self, function_id: int) -> int:
        return max(1, self._counts[function_id])

    def on_arrival(self, request: Request) -> None:
        for stage in request.pipeline.stages:
            self._has_arrivals[stage.function.id] = True
            if request.state == REQUEST_OPEN and not self._counts[stage.function.id]:
                self.orders.reject(request, Settlement(Outcome.REJECTED, Rejection.UNAVAILABLE))

    def on_task_ready(self, task: Task) -> None:
        if self._counts[task.function.id]:
            super().on_task_ready(task)
        else:  # admission is only observed
            self.orders.expire(task.request, "its model has no node")

    def plan(self) -> Plan:
        counts: list[int] = []
        for fleet, count in zip(self.fleets, self._counts, strict=True):
            self.prune_waiting(fleet)
            function_id = fleet.build.function_id
            is_needed = self._has_arrivals[function_id] or fleet.waiting or fleet.probing
            counts.append(count if is_needed else 0)
            self._has_arrivals[function_id] = False
        return self.plan_for(counts)


POLICY = PolicyKind(StaticPartition, Config, Capabilities(pipelines=False, multi_gateway=True))
