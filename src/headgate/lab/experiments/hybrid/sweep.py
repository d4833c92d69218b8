"""The settings that each rival is tried with, and which of them is its best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.lab.experiments.hybrid.environment import TRACES
from headgate.lab.experiments.hybrid.run import HybridCase, HybridPolicyCase, HybridResult, Setting

ATTAINED: Final = 0.99

Settings = tuple[tuple[str, Setting], ...]
Axis = tuple[Settings, ...]


def _axis(key: str, *values: Setting) -> Axis:
    """Return one setting with the values that are tried."""
    return tuple(((key, value),) for value in values)


def _seconds(key: str, *values_s: int) -> Axis:
    return _axis(key, *(value_s * SECOND_NS for value_s in values_s))


# The service's own pace is the default; this one is more nimble than can be bought.
_NIMBLE: Final[Settings] = (
    ("window_ns", 30 * SECOND_NS),
    ("plan_every_ns", 10 * SECOND_NS),
    ("out_after", 1),
    ("in_after", 12),
    ("out_cooldown_ns", 0),
    ("in_cooldown_ns", 0),
)
# Five at once are just in time at mean times, so some are late. This margin makes it four.
_MARGIN: Final = _axis("margin", 1.2)

_GRIDS: Final[Mapping[str, tuple[Axis, ...]]] = {
    "dedicated_only": (_axis("nodes", 0, 8, 9, 10, 12, 16), _axis("concurrency_max", 1)),
    "autoscale": (
        _axis("target", 0.5, 0.7),
        ((), _NIMBLE),
        _axis("nodes_min", 1, 8, 12),
        _axis("concurrency_max", 1),
    ),
    "serverless_only": (),
    "threshold": (_axis("nodes", 0, 1, 2, 3, 4, 6, 8), _axis("threshold", 3, 4, 5)),
    "spock": (
        _axis("is_predictive", False, True),
        _axis("target", 0.8, 1.0),
        _seconds("window_ns", 120, 300),
        _seconds("hold_ns", 0, 60),
        _MARGIN,
    ),
    "mark": (
        _axis("forecast", "max", "mean"),
        _seconds("memory_ns", 60, 300),
        _axis("headroom", 1.0, 1.1),
        _axis("plans_held", 1, 6),
        _seconds("plan_every_ns", 10),
        _MARGIN,
    ),
    "spandana": (
        _seconds("window_ns", 180, 300, 600),
        _seconds("bucket_ns", 2, 5),
        _seconds("plan_every_ns", 10),
        _axis("safety", 0.8, 0.9, 1.0),
    ),
}

# What the sweep chooses, so that the quick form need not repeat it.
BEST: Final[tuple[HybridPolicyCase, ...]] = (
    HybridPolicyCase("dedicated_only", (("nodes", 10), ("concurrency_max", 1))),
    HybridPolicyCase(
        "autoscale", (("target", 0.7), *_NIMBLE, ("nodes_min", 12), ("concurrency_max", 1))
    ),
    HybridPolicyCase("serverless_only"),
    HybridPolicyCase("threshold", (("nodes", 0), ("threshold", 4))),
    HybridPolicyCase(
        "spock",
        (
            ("is_predictive", False),
            ("target", 1.0),
            ("window_ns", 300 * SECOND_NS),
            ("hold_ns", 0),
            ("margin", 1.2),
        ),
    ),
    HybridPolicyCase(
        "mark",
        (
            ("forecast", "mean"),
            ("memory_ns", 300 * SECOND_NS),
            ("headroom", 1.1),
            ("plans_held", 1),
            ("plan_every_ns", 10 * SECOND_NS),
            ("margin", 1.2),
        ),
    ),
    HybridPolicyCase(
        "spandana",
        (
            ("window_ns", 300 * SECOND_NS),
            ("bucket_ns", 2 * SECOND_NS),
            ("plan_every_ns", 10 * SECOND_NS),
            ("safety", 0.9),
        ),
    ),
)


def forms_of(policy: str) -> list[HybridPolicyCase]:
    """Return the forms in which a rival is tried.

    >>> len(forms_of("serverless_only")), forms_of("dedicated_only")[1].settings
    (1, 'nodes=8 concurrency_max=1')
    """
    return [HybridPolicyCase(policy, tuple(chain(*parts))) for parts in product(*_GRIDS[policy])]


def sweep_cases(directory: Path | None) -> list[HybridCase]:
    """Return all that is to be tried: every form of every rival, on every trace."""
    return [
        HybridCase(form, trace, directory)
        for policy in _GRIDS
        for form in forms_of(policy)
        for trace in TRACES
    ]


def best_forms(
    runs: Mapping[HybridCase, Sequence[HybridResult]], limits_usd: Mapping[str, float]
) -> tuple[HybridPolicyCase, ...]:
    """Return the best form of each rival: one for all traces.

    It attains what is asked for on as many traces as any, and of those that do, costs least over
    the clairvoyant's cost (`limits_usd`, by trace) on average.
    """
    by_form: dict[HybridPolicyCase, list[tuple[float, float]]] = {}
    for case, results in runs.items():
        attainment = fmean(one.attainment for one in results)
        cost = fmean(one.cost_usd for one in results) / limits_usd[case.trace.name]
        by_form.setdefault(case.form, []).append((attainment, cost))

    def badness(form: HybridPolicyCase) -> tuple[int, float]:
        return (
            sum(attainment < ATTAINED for attainment, _ in by_form[form]),
            fmean(cost for _, cost in by_form[form]),
        )

    policies = dict.fromkeys(form.policy for form in by_form)
    return tuple(
        min((form for form in by_form if form.policy == policy), key=badness) for policy in policies
    )
