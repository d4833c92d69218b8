"""What policies have in common that rent as many nodes as the load of late seems to need."""

from __future__ import annotations

from collections import deque

from headgate.core.lifecycle import NodeState
from headgate.core.policy import Context, PolicyConfig
from headgate.core.records import Task
from headgate.planning.concurrency import Thresholds
from headgate.planning.hybrid import Hybrid
from headgate.planning.rates import ArrivalCounts
from headgate.planning.tiers import Lot, Tiers


class Elastic(Hybrid):
    """Counts what arrives of each function; asks `count_for` how many nodes that needs.

    Arrivals are counted in requests of one item: larger ones count for as much as they take.
    Until the first bucket of time is over, the fleet stays as it is.
    """

    def __init__(
        self,
        context: Context,
        config: PolicyConfig,
        thresholds: Thresholds,
        tiers: Tiers,
        *,
        bucket_ns: int,
        window_ns: int,
        nodes_min: int = 0,
        packs: bool = False,
        warm_functions: int = 0,
    ) -> None:
        super().__init__(
            context, config, thresholds, tiers, packs=packs, warm_functions=warm_functions
        )
        functions = self.view.app.functions
        self.bucket_ns = bucket_ns
        self._arrivals = [ArrivalCounts(bucket_ns, window_ns) for _ in functions]
        self._nodes_min = nodes_min
        self._plans: dict[tuple[int, int], deque[int]] = {}

    def count_for(self, lot: Lot, buckets: list[float]) -> int | None:
        """How many nodes of the lot this demand is worth; None: as many as before."""
        raise NotImplementedError

    def on_task_ready(self, task: Task) -> None:
        """Count it; then as ever."""
        exec_ns = task.function.variants[0].profile.exec_ns
        weight = exec_ns[min(task.request.items, len(exec_ns)) - 1] / max(1, exec_ns[0])
        self._arrivals[task.function.id].see(self.view.now_ns, weight)
        super().on_task_ready(task)

    def resize(self) -> None:
        """Want what is worth it, and never less than the minimum."""
        for function in self.view.app.functions:
            lot = self.tiers.elastic_lot(function.id)
            if lot is None or not self.rents(function.id):
                continue
            buckets = self.demand(function.id)
            count = self.count_for(lot, buckets) if buckets else None
            if count is not None:
                self.want(lot, max(count, self._nodes_min))

    def demand(self, function_id: int) -> list[float]:
        """What arrived in each bucket, oldest first, less what nodes that are ours anyway take."""
        buckets = self._arrivals[function_id].buckets(self.view.now_ns)
        rates = {lot.pool.id: lot.rate_per_s for lot in self.tiers.lots[function_id]}
        taken_per_s = sum(
            rates.get(node.pool.id, 0.0)
            for node in self.view.nodes.values()
            if node.state == NodeState.UP and not node.pool.is_elastic
        )
        if taken_per_s == 0.0:
            return buckets
        return [max(0.0, amount - taken_per_s * self.bucket_ns / 1e9) for amount in buckets]

    def mean_per_s(self, buckets: list[float]) -> float:
        """The mean rate of these buckets."""
        return sum(buckets) / (len(buckets) * self.bucket_ns) * 1e9

    def most_of(self, lot: Lot, count: int, plans: int) -> int:
        """Remember a plan; the largest of the last `plans`, this one included."""
        key = (lot.variant.id, lot.pool.id)
        history = self._plans.setdefault(key, deque(maxlen=max(1, plans)))
        history.append(count)
        return max(history)

    def wanted_of(self, lot: Lot) -> int:
        """How many instances of the lot are wanted so far."""
        return self.wanted.get((lot.variant.id, lot.pool.id), 0)
