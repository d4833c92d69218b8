"""Every request to FaaS: one platform instance per request in flight.

The other extreme of the hybrid of SageMaker and Lambda (HiPS 2021): no node is rented, every
request is paid per call, and a request that finds no warm instance waits for a cold start. Requests
that the platform throttles, or that arrive while its circuit breaker or budget blocks calls, are
queued and retried. Exceptions are functions that run on no FaaS platform and requests that exceed
its payload limit: nodes serve both. `warm_instances` of each function are kept warm.

Cost per decision: O(1).

>>> from headgate.policies import find_policy
>>> find_policy("serverless_only").config(warm_instances=2).warm_instances
2
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from headgate.core.policy import NOT_NEGATIVE, Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.pools.concurrency import ThresholdLimits
from headgate.policies._hybrid import ThresholdRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `serverless_only`."""

    # FaaS instances kept warm, per function.
    warm_instances: int = field(default=0, metadata=NOT_NEGATIVE)


@final
class ServerlessOnly(ThresholdRouter):
    """Routes every task to FaaS."""

    def __init__(self, context: Context, config: Config) -> None:
        limits = ThresholdLimits(context.view.app)
        super().__init__(context, config, limits, warm_instances=config.warm_instances)

    def uses_nodes(self, function_id: int) -> bool:
        return not self.targets.faas[function_id]


POLICY = PolicyKind(
    ServerlessOnly,
    Config,
    Capabilities(mixed_pools=True, serverless=True, needs_serverless=True),
)
