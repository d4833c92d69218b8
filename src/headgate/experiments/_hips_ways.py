"""The policies that are compared: labels, settings, and the machines that each may use."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.experiments._hips_plan import Plan
from headgate.experiments._hips_run import Case, Way
from headgate.experiments._hips_workload import LEAST, MOST, Phase, period_of
from headgate.experiments._hips_world import Setting, characterise

DEDICATED: Final = "dedicated_only"
AUTOSCALE: Final = "autoscale"
NIMBLE: Final = "autoscale, nimble"
SERVERLESS: Final = "serverless_only"
THRESHOLD: Final = "threshold"
WARM: Final = "threshold, kept warm"
HEADGATE: Final = "headgate"
_INSTANCES_MAX: Final = 4  # as many as hold 20 requests at once within the paper's objectives


def cases_of(setting: Setting, plan: Plan, course: tuple[Phase, ...]) -> list[Case]:
    """Every policy, with the plan's threshold where it has one."""
    threshold = ("threshold", plan.threshold)
    target = ("target", _target(setting, plan))
    quickly = (("plan_every_ns", 10 * SECOND_NS), ("out_after", 1), ("out_cooldown_ns", 0))
    one = plan.world
    several = replace(one, instances_max=_INSTANCES_MAX)
    return [
        Case(setting, way, world, course)
        for way, world in (
            (Way(DEDICATED, "dedicated_only"), one),
            (Way(AUTOSCALE, "autoscale", (target,)), several),
            (Way(NIMBLE, "autoscale", (target, *quickly)), several),
            (Way(SERVERLESS, "serverless_only"), one),
            (Way(THRESHOLD, "threshold", (threshold,)), one),
            (Way(WARM, "threshold", (threshold, ("warm_functions", MOST - plan.threshold))), one),
            (Way(HEADGATE, "headgate"), one),
        )
    ]


def _target(setting: Setting, plan: Plan) -> float:
    """Return what share of its time an instance is to be busy, so that peaks are in time.

    It may get as many requests per wave as the threshold says when there are most of them, and
    the mean, by which the autoscaler goes, is below that in proportion.
    """
    busy_ms = characterise(setting.source).time_ms(setting.cores, max(1, plan.threshold))
    mean_over_most = (LEAST + MOST) / 2 / MOST
    return busy_ms * 1e6 / period_of(setting.sla_ms) * mean_over_most
