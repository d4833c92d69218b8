"""The parameter grid of each baseline policy, and the selection of its best settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.lab.experiments.hybrid_renting.environment import TRACES, TraceScenario
from headgate.lab.harness import Case, PolicyCase, RunResult, Setting, Settings

ATTAINED: Final = 0.99

Axis = tuple[Settings, ...]


def _axis(key: str, *values: Setting) -> Axis:
    """Return one setting with the values of the grid."""
    return tuple(((key, value),) for value in values)


def _seconds(key: str, *values_s: int) -> Axis:
    return _axis(key, *(value_s * SECOND_NS for value_s in values_s))


# The defaults are the intervals of the cloud service; these are shorter than any service offers.
_FAST: Final[Settings] = (
    ("window_ns", 30 * SECOND_NS),
    ("plan_every_ns", 10 * SECOND_NS),
    ("out_after", 1),
    ("in_after", 12),
    ("out_cooldown_ns", 0),
    ("in_cooldown_ns", 0),
)
# Five concurrent requests meet the SLO only at mean times, so some are late. With this margin the
# limit is four.
_MARGIN: Final = _axis("margin", 1.2)
# Functions that are kept warm, as `headgate` does by itself; with 32 all are dearer on every trace.
_WARM: Final = _axis("warm_instances", 0, 4, 8, 16)

_GRIDS: Final[Mapping[str, tuple[Axis, ...]]] = {
    "dedicated_only": (_axis("nodes", 0, 8, 9, 10, 12, 16), _axis("concurrency_max", 1)),
    "autoscale": (
        _axis("target", 0.5, 0.7),
        ((), _FAST),
        _axis("nodes_min", 1, 8, 12),
        _axis("concurrency_max", 1),
    ),
    "serverless_only": (_WARM,),
    "threshold": (_axis("nodes", 0, 1, 2, 3, 4, 6, 8), _axis("threshold", 3, 4, 5), _WARM),
    "spock": (
        _axis("is_predictive", False, True),
        _axis("target", 0.8, 1.0),
        _seconds("window_ns", 120, 300),
        _seconds("hold_ns", 0, 60),
        _MARGIN,
        _WARM,
    ),
    "mark": (
        _axis("forecast", "max", "mean"),
        _seconds("memory_ns", 60, 300),
        _axis("headroom", 1.0, 1.1),
        _axis("plans_held", 1, 6),
        _seconds("plan_every_ns", 10),
        _MARGIN,
        _WARM,
    ),
    "spandana": (
        _seconds("window_ns", 180, 300, 600),
        _seconds("bucket_ns", 2, 5),
        _seconds("plan_every_ns", 10),
        _axis("safety", 0.8, 0.9, 1.0),
        _WARM,
    ),
}

# The settings that the sweep selects, so that the quick form need not repeat the sweep.
BEST: Final[tuple[PolicyCase, ...]] = (
    PolicyCase.of("dedicated_only", nodes=10, concurrency_max=1),
    PolicyCase("autoscale", (("target", 0.7), *_FAST, ("nodes_min", 12), ("concurrency_max", 1))),
    PolicyCase.of("serverless_only", warm_instances=0),
    PolicyCase.of("threshold", nodes=0, threshold=4, warm_instances=8),
    PolicyCase.of(
        "spock",
        is_predictive=False,
        target=1.0,
        window_ns=300 * SECOND_NS,
        hold_ns=0,
        margin=1.2,
        warm_instances=8,
    ),
    PolicyCase.of(
        "mark",
        forecast="mean",
        memory_ns=300 * SECOND_NS,
        headroom=1.1,
        plans_held=1,
        plan_every_ns=10 * SECOND_NS,
        margin=1.2,
        warm_instances=8,
    ),
    PolicyCase.of(
        "spandana",
        window_ns=300 * SECOND_NS,
        bucket_ns=2 * SECOND_NS,
        plan_every_ns=10 * SECOND_NS,
        safety=0.8,
        warm_instances=8,
    ),
)


def variants_of(name: str) -> list[PolicyCase]:
    """Return a baseline policy with all settings of its grid.

    >>> len(variants_of("serverless_only")), variants_of("dedicated_only")[1].settings_text
    (4, 'nodes=8 concurrency_max=1')
    """
    return [PolicyCase(name, tuple(chain(*parts))) for parts in product(*_GRIDS[name])]


def sweep_cases(directory: Path | None) -> list[Case[TraceScenario]]:
    """Return the cases of the sweep: every variant of every baseline, on every trace."""
    return [
        Case(policy, TraceScenario(trace, directory))
        for name in _GRIDS
        for policy in variants_of(name)
        for trace in TRACES
    ]


def best_variants(
    runs: Mapping[Case[TraceScenario], Sequence[RunResult]], limits_usd: Mapping[str, float]
) -> tuple[PolicyCase, ...]:
    """Return the best variant of each baseline, one for all traces.

    The best variant reaches the attainment goal on the most traces; ties go to the lowest mean cost
    relative to the clairvoyant's cost (`limits_usd`, by trace).
    """
    by_policy: dict[PolicyCase, list[tuple[float, float]]] = {}
    for case, results in runs.items():
        attainment = fmean(one.attainment for one in results)
        cost = fmean(one.cost_usd for one in results) / limits_usd[case.scenario.trace.name]
        by_policy.setdefault(case.policy, []).append((attainment, cost))

    def sort_key(policy: PolicyCase) -> tuple[int, float]:
        return (
            sum(attainment < ATTAINED for attainment, _ in by_policy[policy]),
            fmean(cost for _, cost in by_policy[policy]),
        )

    names = dict.fromkeys(policy.name for policy in by_policy)
    return tuple(
        min((policy for policy in by_policy if policy.name == name), key=sort_key) for name in names
    )


def tuned_per_trace(
    runs: Mapping[Case[TraceScenario], Sequence[RunResult]],
) -> dict[str, tuple[PolicyCase, float]]:
    """Return, by trace, the cheapest variant of all that reaches the goal there, and its cost."""
    found: dict[str, tuple[PolicyCase, float]] = {}
    for case, results in runs.items():
        trace, cost_usd = case.scenario.trace.name, fmean(one.cost_usd for one in results)
        is_good = fmean(one.attainment for one in results) >= ATTAINED
        if is_good and (trace not in found or cost_usd < found[trace][1]):
            found[trace] = (case.policy, cost_usd)
    return found
