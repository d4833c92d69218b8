"""Everything to functions: an instance of the platform for every request in flight.

The other extreme of the hybrid of SageMaker and Lambda (HiPS 2021): no instance is rented, every
request is paid by the call, and each that finds no warm function waits for a cold start. What the
platform throttles, or what comes while the way to it is closed, waits and is tried again. A
function that runs on no platform is an exception, and so is a request that no call can carry: both
are served by the nodes that can run them. With `warm_functions` so many are always kept ready.

Cost per decision: O(1).

>>> from headgate.policies import find_policy
>>> find_policy("serverless_only").config(warm_functions=2).warm_functions
2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from headgate.core.errors import ConfigError
from headgate.core.policy import Capabilities, Context, PolicyConfig, PolicyKind
from headgate.planning.concurrency import Thresholds
from headgate.planning.targets import Targets
from headgate.policies._hybrid import ThresholdRouter


@dataclass(frozen=True)
class Config(PolicyConfig):
    """Settings of `serverless_only`."""

    warm_functions: int = 0  # that are kept ready, of each function

    def __post_init__(self) -> None:
        if self.warm_functions < 0:
            raise ConfigError(
                "must not be negative", key="warm_functions", value=self.warm_functions
            )


@final
class ServerlessOnly(ThresholdRouter):
    """A way out, and nothing else."""

    def __init__(self, context: Context, config: Config) -> None:
        app = context.view.app
        thresholds = Thresholds(app)
        tiers = Targets(app, thresholds)
        super().__init__(context, config, thresholds, tiers, warm_functions=config.warm_functions)

    def rents(self, function_id: int) -> bool:
        return not self.tiers.outlets[function_id]


POLICY = PolicyKind(ServerlessOnly, Config, Capabilities(mixed_pools=True, serverless=True))
