"""FaST-GShare: pods of each stage in the most efficient configuration, scaled with a band.

Gu et al., "FaST-GShare: Enabling Efficient Spatio-Temporal GPU Sharing in Serverless Computing for
Deep Learning Inference" (ICPP 2023), as the ESG paper (HPDC 2024) frames it for pipelines: every
stage has a fixed part of the objective, its SLO here, and is scaled for itself. A pod has a share
of a GPU. Rules marked [own] are ours, where it leaves one open; those of the base (`_replicas.py`)
are ours as well. In the paper's public code the autoscaler is not complete, so the numbers below
are indicative.

- Every 10 s the rate of each stage is compared with the nominal capacity of its pods. Nothing
  happens while they differ by less than 20 % of the capacity. Nominal is what a pod serves at
  `utilisation` [own: a stage that lacks 20 % of what it could serve without a pause never
  recovers].
- Up: as many pods of p_eff as the missing rate fills, p_eff being the configuration with the most
  throughput per resource; the rest is for a pod of p_ideal, of the configurations that cover the
  rest the one that takes least [own: in the paper the one with the least capacity, which is the
  same on its grid; here it may take many CPUs to no purpose]. Prices weigh the resources, as they
  do in `infless` [own]. Where neither fits a node, the most efficient one that does is taken [own].
- Down: whole pods are removed while the others cover the rate, the least efficient first. If it is
  still below the band, a pod that p_ideal could replace for less is replaced [own].
- A pod goes to the node where it leaves the least of what is left: best fit, in place of packing
  rectangles of time and share, because a share is not divided in time here [own]. Nodes with a
  warm instance come first [own].
- An idle pod takes what waits, up to its batch: the one with the most throughput of those that take
  at most half of the SLO, or one item in all of it [own: a batch runs while the next one waits].

Cost per decision: O(pods of the stage); every 10 s O(all pods), and for each one that is started
O(configurations of the stage x free nodes).

>>> from headgate.policies import find_policy
>>> find_policy("fast_gshare").config().band
0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from headgate.core.clock import SECOND_NS
from headgate.core.policy import NOT_NEGATIVE, POSITIVE, Capabilities, Context, PolicyKind
from headgate.core.records import Node
from headgate.planning.frontier.configs import StageConfig
from headgate.planning.rivals.replicas import RatedConfig, rated
from headgate.policies._replicas import ReplicaConfig, ReplicaPolicy, StageReplicas


@dataclass(frozen=True)
class Config(ReplicaConfig):
    """Settings of `fast_gshare`."""

    interval_ns: int = field(default=10 * SECOND_NS, metadata=POSITIVE)  # between comparisons
    # Lower than in `infless`, because demand may exceed the capacity by the band.
    utilisation: float = field(default=0.4, metadata=POSITIVE)
    # Part of the capacity by which the rate may differ from it.
    band: float = field(default=0.2, metadata=NOT_NEGATIVE)


@final
class FastGshare(ReplicaPolicy):
    """Scales every stage in steps, by its missing or excess rate."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(
            context,
            config,
            interval_ns=config.interval_ns,
            window_ns=config.interval_ns,
        )
        self._band = config.band

    def rate_configs(
        self, configs: Sequence[StageConfig], budget_ns: int | None
    ) -> Iterable[RatedConfig]:
        """Return, for each shape, the batch with the most throughput that is in time."""
        best: dict[tuple[int, int, int], RatedConfig] = {}
        for config in configs:
            runs = 1 if config.batch == 1 else 2
            if budget_ns is None or runs * config.time_ns <= budget_ns:
                shape = (config.build, config.place, config.shape_id)
                rating = rated(config)
                if shape not in best or rating.rate_max > best[shape].rate_max:
                    best[shape] = rating
        return best.values()

    def choose(
        self, stage: StageReplicas, missing: float, items: int
    ) -> tuple[RatedConfig, Node] | None:
        """p_eff while the missing rate fills it, then p_ideal; on the node that it fits best."""
        variants = self.view.app.variants
        able = [
            rating
            for rating in stage.ratings
            if variants[rating.config.build].items_max(rating.config.shape_id) >= items
        ]
        efficient = min(able, key=lambda each: each.config.cost, default=None)
        is_rest = efficient is not None and missing < efficient.rate_max
        best: tuple[RatedConfig, Node] | None = None
        best_rank = (False, 0.0, False, 0.0)
        for rating, node, is_warm in self.books.rooms(able):
            is_ideal = is_rest and rating.rate_max >= missing
            price = _price(rating) if is_ideal else float(rating.config.cost)
            rank = (not is_ideal, price, not is_warm, self.books.left_over(node, rating.config))
            if best is None or rank < best_rank:
                best, best_rank = (rating, node), rank
        return best

    def scale(self, demands: Mapping[StageReplicas, float]) -> None:
        """Add and remove pods of the stages that are outside of the band."""
        lacking = [
            stage
            for stage, demand in demands.items()
            if demand - stage.rate_max > self._band * stage.rate_max
        ]
        self.scale_out(lacking, demands)
        for stage, demand in demands.items():
            if stage.rate_max - demand > self._band * stage.rate_max:
                self._scale_in(stage, demand)

    def _scale_in(self, stage: StageReplicas, demand: float) -> None:
        """Remove pods while the others cover the rate; replace one that is too large."""
        for replica in sorted(stage.replicas, key=lambda each: -each.config.cost):
            if demand <= stage.rate_max - replica.rating.rate_max:
                self.remove_replica(stage, replica)
        for replica in list(stage.replicas):
            missing = demand - (stage.rate_max - replica.rating.rate_max)
            ideal = _ideal(stage.ratings, missing)
            if ideal is not None and _price(ideal) < (1 - self._band) * _price(replica.rating):
                self.remove_replica(stage, replica)
                if not self.add_replica(stage, missing):
                    self.restore_replica(stage, replica)
                return


def _ideal(ratings: Sequence[RatedConfig], rate: float) -> RatedConfig | None:
    """p_ideal: of the configurations that cover a rate, the one that takes least."""
    return min([each for each in ratings if each.rate_max >= rate], key=_price, default=None)


def _price(rating: RatedConfig) -> float:
    """What a pod costs per second in which it is never idle."""
    return rating.config.cost * rating.rate_max


POLICY = PolicyKind(FastGshare, Config, Capabilities(batches=True, mixed_pools=True))
