"""An instance keeps what it can still answer in time; how many there are is a matter of price.

Spandana (arXiv 2606.30533, 2026) separates the objective from the cost. Per request, a small
controller beside each instance predicts the response in the company it has, corrected by how
observed times compare with the profile, and forwards to functions what would be late. Per planning
interval, an allocator sets the number of instances from instance price, function price and
volatility. The paper's abstract gives no formula, so the rule is inferred, the balance of the
newsvendor: with the demand of the last `window_ns` in buckets, one more instance is added while its
rent is less than the calls that it alone would save. Volatile demand leaves the last instance idle
for most of the time, so fewer pay; steady demand keeps it busy, so more do.

`usable` is how much of its capacity an instance is expected to use, given that requests do not
arrive evenly within a bucket; `safety` above 1 favours instances over functions; `hold_ns` keeps an
instance that one plan does not want. Cost per decision: O(nodes).

>>> from headgate.policies import find_policy
>>> find_policy("spandana").config(window_ns=10**11).safety
1.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from headgate.core.clock import MINUTE_NS, NEVER_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.model import Variant
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.core.records import STAGES_MAX, Batch, Node, Task
from headgate.core.states import BatchState
from headgate.planning.concurrency import Thresholds, shares_of_rest
from headgate.planning.latency_predictor import QuantileTracker
from headgate.planning.rent_or_call import newsvendor_nodes
from headgate.planning.targets import NodeOption, Targets
from headgate.policies._hybrid import AutoscalingRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `spandana`."""

    window_ns: int = 10 * MINUTE_NS  # of demand that the number of instances is taken from
    bucket_ns: int = 5 * SECOND_NS  # time over which demand is taken to be even
    plan_every_ns: int = 30 * SECOND_NS
    usable: float = 0.9  # of an instance's capacity
    safety: float = 1.0  # on what a call costs: above 1 is in favour of instances
    hold_ns: int = 0  # how long an instance is kept that does not seem to pay
    nodes_min: int = 0  # instances that are never given up
    correction_quantile: float = 0.99  # of observed over expected time
    margin: float = 1.0  # on predicted times
    packs: bool = False  # fill one node before the next, instead of the least loaded first
    warm_functions: int = 0  # that are kept ready, of each function

    def __post_init__(self) -> None:
        for key in ("window_ns", "bucket_ns", "plan_every_ns", "usable", "safety", "margin"):
            if getattr(self, key) <= 0:
                raise ConfigError("must be positive", key=key, value=getattr(self, key))
        for key in ("hold_ns", "nodes_min", "warm_functions"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        if not 0 < self.correction_quantile < 1:
            value = self.correction_quantile
            raise ConfigError("must lie between 0 and 1", key="correction_quantile", value=value)


@final
class Spandana(AutoscalingRouter):
    """A prediction per request, and a balance per plan."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        thresholds = Thresholds(app, config.margin)
        super().__init__(
            context,
            config,
            thresholds,
            Targets(app, thresholds),
            bucket_ns=config.bucket_ns,
            window_ns=max(config.window_ns, config.bucket_ns),
            nodes_min=config.nodes_min,
            packs=config.packs,
            warm_functions=config.warm_functions,
        )
        self.plan_every_ns = config.plan_every_ns
        self._config = config
        self._plans_held = config.hold_ns // config.plan_every_ns + 1
        self._shares = [shares_of_rest(pipeline) for pipeline in app.pipelines]
        self._corrections = [QuantileTracker(config.correction_quantile) for _ in app.variants]
        # By node id, by batch id: the most that ran beside it, itself included.
        self._company: dict[int, dict[int, int]] = {}

    # --- per request ---------------------------------------------------------------------------

    def keeps(self, task: Task, node: Node, variant: Variant) -> bool:
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

    def sent(self, batch: Batch, node: Node) -> None:
        company = self._company.setdefault(node.id, {})
        company[batch.id] = 0
        for batch_id, most in company.items():
            company[batch_id] = max(most, node.running)

    def on_batch_ended(self, batch: Batch, took_ns: int) -> None:
        if batch.node is None:
            return
        most = self._company.get(batch.node.id, {}).pop(batch.id, 0)
        if most and batch.state == BatchState.FINISHED:
            expected_ns = batch.variant.profile.time_ns(batch.items, most)
            own_ns = took_ns - 2 * batch.pool.network_ns
            self._corrections[batch.variant.id].see(own_ns / max(1, expected_ns))

    # --- per plan ------------------------------------------------------------------------------

    def count_for(self, lot: NodeOption, buckets: list[float]) -> int | None:
        bucket_s = self.bucket_ns / 1e9
        count = newsvendor_nodes(
            buckets,
            node_takes=self._config.usable * lot.rate_per_s * bucket_s,
            node_usd=lot.usd_per_s * bucket_s,
            spill_usd=self._config.safety * self.tiers.spill_usd(lot.variant.function_id),
            most=lot.pool.nodes,
        )
        return self.most_of(lot, count, self._plans_held)


POLICY = PolicyKind(Spandana, Config, Capabilities(mixed_pools=True, serverless=True))
