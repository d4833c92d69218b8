"""Forward to FaaS what an instance would serve late; size the fleet by the newsvendor rule.

Spandana (arXiv 2606.30533, 2026) separates the objective from the cost. Per request, a small
controller beside each instance predicts the response time at its concurrency, corrected by the
ratio of observed to profiled times, and forwards requests that would be late to FaaS. Per planning
interval, an allocator sets the number of instances from instance price, FaaS price and volatility.
The paper's abstract gives no formula, so the rule is inferred, the newsvendor's: with the demand of
the last `window_ns` in buckets, one more instance is added while its rent is less than the calls
that it alone would save. Volatile demand leaves the last instance mostly idle, so fewer pay off;
steady demand keeps it busy, so more do.

`usable` is the share of its capacity that an instance is expected to use, since requests do not
arrive evenly within a bucket; `safety` above 1 favours instances over FaaS; `hold_ns` keeps an
instance that a single plan does not include. Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("spandana").config(window_ns=10**11).safety
1.0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from headgate.core.clock import MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.model import Variant
from headgate.core.policy import NOT_NEGATIVE, POSITIVE, SHARE, Capabilities, Context, PolicyKind
from headgate.core.records import STAGES_MAX, Batch, Node, Task
from headgate.core.states import BatchState
from headgate.planning.forecast import QuantileTracker
from headgate.planning.pools.concurrency import shares_of_remaining_path
from headgate.planning.pools.targets import NodeTarget, newsvendor_nodes
from headgate.policies._hybrid import AutoscalingConfig, AutoscalingRouter


@dataclass(frozen=True)
class Config(AutoscalingConfig):
    """Settings of `spandana`."""

    # History of demand that sets the number of instances.
    window_ns: int = field(default=10 * MINUTE_NS, metadata=POSITIVE)
    # Interval within which demand is assumed to be even.
    bucket_ns: int = field(default=5 * SECOND_NS, metadata=POSITIVE)
    plan_every_ns: int = field(default=30 * SECOND_NS, metadata=POSITIVE)
    usable: float = field(default=0.9, metadata=POSITIVE)  # share of an instance's capacity
    # Factor on the price of a call: above 1 favours instances.
    safety: float = field(default=1.0, metadata=POSITIVE)
    # How long an instance that no longer pays off is kept.
    hold_ns: int = field(default=0, metadata=NOT_NEGATIVE)
    nodes_min: int = field(default=0, metadata=NOT_NEGATIVE)  # minimum number of instances
    # Quantile of the ratio of observed to expected times.
    correction_quantile: float = field(default=0.99, metadata=SHARE)


@final
class Spandana(AutoscalingRouter):
    """A prediction per request, and the newsvendor rule per plan."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(
            context,
            config,
            bucket_ns=config.bucket_ns,
            window_ns=config.window_ns,
            nodes_min=config.nodes_min,
            plan_every_ns=config.plan_every_ns,
        )
        self._config = config
        self._plans_held = config.hold_ns // config.plan_every_ns + 1
        self._shares = [shares_of_remaining_path(pipeline) for pipeline in self.view.app.pipelines]
        self._corrections = [
            QuantileTracker(config.correction_quantile) for _ in self.view.app.variants
        ]
        # By node id and batch id: the largest concurrency during the batch, itself included.
        self._peak_concurrency: dict[int, dict[int, int]] = {}

    def admits(self, task: Task, node: Node, variant: Variant) -> bool:
        if not self.is_below_threshold(task, node, variant):
            return False
        deadline_ns = task.request.deadline_ns
        if deadline_ns == NEVER_NS:
            return True
        share = self._shares[task.request.pipeline.id][task.id % STAGES_MAX]
        allowed_ns = (deadline_ns - self.view.now_ns) * share - 2 * node.pool.network_ns
        expected_ns = variant.profile.time_ns(task.request.items, node.running + 1)
        correction = max(1.0, self._corrections[variant.id].value) * self._config.margin
        return expected_ns * correction <= allowed_ns

    def on_sent(self, batch: Batch, node: Node) -> None:
        peaks = self._peak_concurrency.setdefault(node.id, {})
        peaks[batch.id] = 0
        for batch_id, most in peaks.items():
            peaks[batch_id] = max(most, node.running)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.node is None:
            return
        most = self._peak_concurrency.get(batch.node.id, {}).pop(batch.id, 0)
        if most and batch.state == BatchState.FINISHED:
            expected_ns = batch.variant.profile.time_ns(batch.items, most)
            own_ns = took_ns - 2 * batch.pool.network_ns
            self._corrections[batch.variant.id].observe(own_ns / max(1, expected_ns))

    def count_for(self, target: NodeTarget, buckets: list[float]) -> int | None:
        bucket_s = self.bucket_ns / 1e9
        count = newsvendor_nodes(
            buckets,
            node_takes=self._config.usable * target.rate_per_s * bucket_s,
            node_usd=target.usd_per_s * bucket_s,
            spill_usd=self._config.safety * self.targets.spill_usd(target.variant.function_id),
            most=target.pool.nodes,
        )
        return self.hold_max(target, count, self._plans_held)


POLICY = PolicyKind(Spandana, Config, Capabilities(mixed_pools=True, serverless=True))
