"""The paper's plan from the characterisation, and the policies compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.core.model import MIB
from headgate.lab.experiments._hybrid_app import lambda_offering
from headgate.lab.experiments.hips.environment import (
    LEAST,
    MOST,
    NETWORK_MS,
    QUANTILE,
    BurstPhase,
    BurstScenario,
    Setting,
)
from headgate.lab.harness import Case, PolicyCase
from headgate.planning.capacity.sizing import (
    SizeRow,
    cheapest_size,
    faas_sizes,
    knee_cores,
    knee_size,
    largest_concurrency,
)


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """The paper's two decisions, from response times measured in advance."""

    threshold: int
    knee_cores: float
    sizes: tuple[SizeRow, ...]  # of functions, smallest first
    selected: SizeRow | None  # the smallest about as fast as any; None: none meets the SLA
    cheapest: SizeRow | None  # of those that meet the SLA

    @property
    def memory_mb(self) -> int:
        """The selected function size, or the largest if none meets the SLA."""
        return (self.selected or self.sizes[-1]).memory_bytes // MIB


def plan_of(setting: Setting) -> PaperPlan:
    """Plan from the characterisation alone."""
    times = setting.times
    sizes = faas_sizes(times, lambda_offering(NETWORK_MS), setting.sla_ms, QUANTILE)
    return PaperPlan(
        threshold=largest_concurrency(times, setting.cores, setting.sla_ms, QUANTILE),
        knee_cores=knee_cores(times),
        sizes=tuple(sizes),
        selected=knee_size(sizes),
        cheapest=cheapest_size(sizes),
    )


# Labels of the policies compared.
DEDICATED: Final = "dedicated_only"
AUTOSCALE: Final = "autoscale"
FAST_AUTOSCALE: Final = "autoscale, fast"
THRESHOLD: Final = "threshold"
WARM: Final = "threshold, kept warm"
HEADGATE: Final = "headgate"
_INSTANCES_MAX: Final = 4  # enough for 20 concurrent requests within the paper's SLAs


def cases_of(
    setting: Setting, plan: PaperPlan, phases: tuple[BurstPhase, ...]
) -> dict[str, Case[BurstScenario]]:
    """Return a case per policy, with the planned threshold for policies that have one."""
    threshold, target = plan.threshold, _target(setting, plan)
    policies = (
        PolicyCase(DEDICATED),
        PolicyCase.of("autoscale", AUTOSCALE, target=target),
        PolicyCase.of(
            "autoscale",
            FAST_AUTOSCALE,
            target=target,
            plan_every_ns=10 * SECOND_NS,
            out_after=1,
            out_cooldown_ns=0,
        ),
        PolicyCase("serverless_only"),
        PolicyCase.of(THRESHOLD, threshold=threshold),
        PolicyCase.of("threshold", WARM, threshold=threshold, warm_instances=MOST - threshold),
        PolicyCase(HEADGATE),
    )
    one = BurstScenario(setting, plan.memory_mb, phases)
    several = BurstScenario(setting, plan.memory_mb, phases, instances_max=_INSTANCES_MAX)
    return {
        policy.label: Case(policy, several if policy.name == "autoscale" else one)
        for policy in policies
    }


def _target(setting: Setting, plan: PaperPlan) -> float:
    """Return the target utilisation of the autoscaler at which the largest waves meet the SLA.

    In the largest wave an instance may get as many requests as the threshold. The autoscaler sees
    the mean, which is lower by the ratio of mean to largest wave.
    """
    busy_ms = setting.times.time_ms(setting.cores, max(1, plan.threshold))
    mean_over_most = (LEAST + MOST) / 2 / MOST
    return busy_ms * 1e6 / setting.period_ns * mean_over_most
