"""INFless: instances of each stage with the largest batches that its rate fills in time.

Yang et al., "INFless: A Native Serverless System for Low-Latency, High-Throughput Inference"
(ASPLOS 2022), as the ESG paper (HPDC 2024) frames it for pipelines: every stage has a fixed part of
the objective, its SLO here, and is scaled for itself. Rules marked [own] are ours, where it leaves
one open; those of the base (`_replicas.py`) are ours as well.

- A configuration of batch 1 is feasible if its time t is within the SLO. One of a larger batch b is
  feasible if t is within half of it: one batch runs while the next is filled. Then a batch waits
  for SLO - t at most; at b/t items per second (r_up) there is no pause, and below b/(SLO - t)
  (r_low) batches are not filled in time. The grid of batches is 1, 2, 4, ... Rates are not rounded
  [own: a batch may take seconds].
- Every second the rate R of each stage is compared with what its instances can serve: R_max, the
  sum of all r_up, and R_min, that of all r_low. R is the mean over `window_ns` [own].
- R > R_max: scale out for the residual rate R - R_max. A configuration can be used if r_low is
  within the residual rate, or its batch is 1 [own]. The score decides: throughput per resource,
  over the part that the instance leaves of what is left of its node. The paper tries batch sizes
  from the largest on, because there a larger batch has more throughput per resource; where it needs
  a larger shape to be in time it may have less, so the score decides between batch sizes as well
  [own]. Prices weigh the resources [own: the paper weighs them by their peak rates, but cost is
  what is compared], so throughput per resource is one over the cost of an item. The part that is
  left counts as at least `left_over_min` [own: an instance that fills its node would beat any
  other]. Warm instances come first [own].
- alpha R_min + (1 - alpha) R_max <= R: each instance is given the rate r_up - (R_max - R) /
  (R_max - R_min) (r_up - r_low).
- R below that: instances are released, the least efficient first, while the others can serve R
  [own: which, and when to stop].
- Requests are given to instances in proportion to their rates, but not tied to them [own]: an
  instance takes the oldest that wait, as many as it was given, when these fill a batch or the
  oldest has waited for the instance's limit. What has waited for every limit may be taken by any.

Keep-alive is `keep_alive_ns`, in place of the paper's histograms of idle times [own]. Where compute
is resident, a `utilisation` above the default costs less and hits less.
Cost per decision: O(instances of the stage); every second O(all instances), and for each one that
is started O(configurations of the stage x free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("infless").config().alpha
0.8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.policy import POSITIVE, Capabilities, Context, PolicyKind, bounded
from headgate.core.records import Node
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.rivals.replicas import RatedConfig, Replica, rated
from headgate.policies._replicas import ReplicaConfig, ReplicaPolicy, StageReplicas

_SINGLE_RATE_MIN: Final = 1.0  # r_low of batch 1, in items per second


@dataclass(frozen=True)
class Config(ReplicaConfig):
    """Settings of `infless`."""

    # Weight of R_min in the rate below which instances are released.
    alpha: float = field(default=0.8, metadata=bounded(ge=0, lt=1))
    interval_ns: int = field(default=SECOND_NS, metadata=POSITIVE)  # of the monitor
    window_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)  # of the mean rate
    left_over_min: float = field(default=0.9, metadata=POSITIVE)  # in the score of a placement


@final
class Infless(ReplicaPolicy):
    """Scales every stage by residual rates, and batches with a limit on waiting."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(
            context,
            config,
            interval_ns=config.interval_ns,
            window_ns=config.window_ns,
        )
        self._alpha = config.alpha
        self._left_over_min = config.left_over_min

    def rate_configs(
        self, configs: Sequence[StageConfig], budget_ns: int | None
    ) -> Iterator[RatedConfig]:
        """Yield the feasible configurations, with r_up, r_low and the limit on waiting."""
        for config in configs:
            if budget_ns is None:
                yield rated(config)
            elif config.batch == 1:
                if config.time_ns <= budget_ns:
                    rating = rated(config)
                    rate_min = min(_SINGLE_RATE_MIN, rating.rate_max)
                    yield rated(config, rate_min=rate_min)
            elif 2 * config.time_ns <= budget_ns:
                wait_ns = budget_ns - config.time_ns
                rate_min = config.batch * SECOND_NS / wait_ns
                yield rated(config, rate_min=rate_min, wait_ns=wait_ns)

    def choose(
        self, stage: StageReplicas, missing: float, items: int
    ) -> tuple[RatedConfig, Node] | None:
        """The best score, of the configurations whose batches the residual rate fills."""
        variants = self.view.app.variants
        usable = [
            rating
            for rating in stage.ratings
            if (rating.config.batch == 1 or rating.rate_min <= missing)
            and variants[rating.config.build].items_max(rating.config.shape_id) >= items
        ]
        best: tuple[RatedConfig, Node] | None = None
        best_rank = (False, 0.0, 0, 0.0)
        for rating, node, is_warm in self.books.rooms(usable):
            config, left_over = rating.config, self.books.left_over(node, rating.config)
            rank = (is_warm, self._score(config, left_over), config.batch, -left_over)
            if best is None or rank > best_rank:
                best, best_rank = (rating, node), rank
        return best

    def _score(self, config: StageConfig, left_over: float) -> float:
        """Throughput per resource over the part of what is left of the node that stays free."""
        return 1 / (max(1, config.cost) * max(self._left_over_min, left_over))

    def scale(self, demands: Mapping[StageReplicas, float]) -> None:
        """Scale out for residual rates; release what is below the band."""
        self.scale_out([each for each, rate in demands.items() if rate > each.rate_max], demands)
        for stage, rate in demands.items():
            self._release(stage, rate)
            self._set_shares(stage, rate)

    def _release(self, stage: StageReplicas, rate: float) -> None:
        """Release instances, the least efficient first, while the others can serve the rate."""
        for replica in sorted(stage.replicas, key=lambda each: -each.config.cost):
            rate_max = stage.rate_max
            floor = self._alpha * stage.rate_min + (1 - self._alpha) * rate_max
            if rate >= floor:
                return
            if rate <= rate_max - replica.rating.rate_max:
                self.remove_replica(stage, replica)

    def _set_shares(self, stage: StageReplicas, rate: float) -> None:
        """Give each instance the rate that the load split says."""
        rate_min, rate_max = stage.rate_min, stage.rate_max
        span = rate_max - rate_min
        part = min(1.0, max(0.0, (rate_max - rate) / span)) if span > 0 else 0.0
        for replica in stage.replicas:
            rating = replica.rating
            replica.set_share(rating.rate_max - part * (rating.rate_max - rating.rate_min))

    def share_out(self, stage: StageReplicas, items: int) -> None:
        """Give the items to the instance that has had the least of its share so far."""
        ready = [replica for replica in stage.replicas if self.is_ready(replica)]
        total = sum([replica.share for replica in ready])
        if not total:
            return
        for replica in ready:
            replica.fall_behind(items * replica.share / total)
        max(ready, key=lambda each: each.lag).give(items)

    def on_taken(self, stage: StageReplicas) -> None:
        """Take back from instances what they were given and others took."""
        excess = sum(each.credit for each in stage.replicas) - stage.items_waiting
        for replica in sorted(stage.replicas, key=lambda each: -each.credit):
            if excess <= 0:
                return
            excess -= replica.take_back(excess)

    def available(self, stage: StageReplicas, replica: Replica) -> int:
        """What was given to an instance, and what was given to none."""
        given = sum(each.credit for each in stage.replicas)
        return replica.credit + stage.items_waiting - given


POLICY = PolicyKind(Infless, Config, Capabilities(batches=True, mixed_pools=True))
