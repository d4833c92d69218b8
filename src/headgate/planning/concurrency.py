"""How many requests a node may hold at once and still answer each of them in time.

The rule of "Hybrid Serving" (HiPS 2021): the largest concurrency whose response time, as it was
measured, is within the objective.
"""

from __future__ import annotations

from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App, Pipeline, Pool, Profile, Variant


def largest_concurrency(profile: Profile, allowed_ns: float, most: int, items: int = 1) -> int:
    """The largest number at once, up to `most`, that all end within `allowed_ns`; 0 if not even 1.

    O(the answer).

    >>> largest_concurrency(Profile((36,), slowdown=(1.0, 2.0, 3.0)), allowed_ns=200, most=20)
    5
    """
    concurrency = 0
    while concurrency < most and profile.time_ns(items, concurrency + 1) <= allowed_ns:
        concurrency += 1
    return concurrency


def rate_per_s(profile: Profile, concurrency: int) -> float:
    """Requests of one item that a node answers per second while so many share it.

    >>> rate_per_s(Profile((50_000_000,), slowdown=(1.0, 1.6)), concurrency=2)
    25.0
    """
    return concurrency / max(1, profile.time_ns(1, concurrency)) * 1e9 if concurrency else 0.0


def budgets_ns(app: App) -> list[int]:
    """By function: how long one stage of it may take, so that its pipelines are in time.

    A pipeline's objective is shared out in proportion to lone times along the longest path through
    the stage. The tightest of all pipelines counts; `NEVER_NS` without any objective.
    """
    budgets = [NEVER_NS for _ in app.functions]
    for pipeline in app.pipelines:
        if pipeline.slo.latency_ns == NEVER_NS:
            continue
        through_ns = _longest_through_ns(pipeline)
        for stage, path_ns in zip(pipeline.stages, through_ns, strict=True):
            share = stage.function.reference_exec_ns / max(1, path_ns)
            id = stage.function.id
            budgets[id] = min(budgets[id], int(pipeline.slo.latency_ns * share))
    return budgets


def shares_of_rest(pipeline: Pipeline) -> list[float]:
    """By stage: which part of the time that is left when it begins it may take for itself."""
    rests_ns = _longest_ns(pipeline, pipeline.successors)
    lone_ns = [stage.function.reference_exec_ns for stage in pipeline.stages]
    return [own / max(1, rest) for own, rest in zip(lone_ns, rests_ns, strict=True)]


def _longest_through_ns(pipeline: Pipeline) -> list[int]:
    """By stage: the length of the longest path that leads through it."""
    before_ns = _longest_ns(pipeline, tuple(stage.after for stage in pipeline.stages))
    after_ns = _longest_ns(pipeline, pipeline.successors)
    return [
        before + after - stage.function.reference_exec_ns
        for before, after, stage in zip(before_ns, after_ns, pipeline.stages, strict=True)
    ]


def _longest_ns(pipeline: Pipeline, neighbours: tuple[tuple[int, ...], ...]) -> list[int]:
    """By stage: the longest path that begins with it, in the direction of these neighbours."""
    known: dict[int, int] = {}

    def longest(index: int) -> int:
        if index not in known:
            beyond_ns = max((longest(i) for i in neighbours[index]), default=0)
            known[index] = beyond_ns + pipeline.stages[index].function.reference_exec_ns
        return known[index]

    return [longest(index) for index in range(len(pipeline.stages))]


@final
class Thresholds:
    """The largest concurrency of each variant on each pool, from its profile or as it was set.

    `margin` multiplies the profile's times. `fixed` overrides all of it, within what a node has.
    """

    def __init__(self, app: App, margin: float = 1.0, fixed: int = 0) -> None:
        self._budgets_ns = budgets_ns(app)
        self._margin = margin
        self._fixed = fixed
        self._known: dict[tuple[int, int, int], int] = {}

    def of(self, variant: Variant, pool: Pool, items: int = 1) -> int:
        """How many at once, of requests with so many items; 0: not even one is in time. O(1)."""
        key = (variant.id, pool.id, items)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._work_out(variant, pool, items)
        return found

    def _work_out(self, variant: Variant, pool: Pool, items: int) -> int:
        most = min(pool.slots, variant.concurrency)
        if self._fixed:
            return min(self._fixed, most)
        budget_ns = self._budgets_ns[variant.function_id]
        if budget_ns == NEVER_NS:
            return most
        allowed_ns = (budget_ns - 2 * pool.network_ns) / self._margin
        return largest_concurrency(variant.profile, allowed_ns, most, items)


# How many had better run at once on a node where company slows everybody down.


_GIVEN: Final = 0.97  # of the best pace, for an earlier answer
_OF_LATENCY: Final = 0.7  # the rest is for waiting, and for those that take longer than others


def knee_concurrency(profile: Profile, slots: int, latency_ns: int) -> int:
    """The fewest at once that get about as much done as any number does, each within its time.

    Where two take twice as long as one, they had better take turns: then the first is done early,
    and who comes next can still be decided otherwise.

    >>> knee_concurrency(Profile(exec_ns=(10,)), slots=4, latency_ns=100)
    4
    >>> knee_concurrency(Profile(exec_ns=(10,), slowdown=(1.0, 2.0, 3.0)), slots=3, latency_ns=100)
    1
    >>> knee_concurrency(Profile(exec_ns=(10,), slowdown=(1.0, 1.2, 1.5)), slots=3, latency_ns=100)
    3
    """
    if len(profile.slowdown) == 1:
        return slots
    most_ns = _OF_LATENCY * latency_ns
    allowed = [c for c in range(1, slots + 1) if profile.time_ns(1, c) <= most_ns] or [1]
    paces = {c: c / profile.slowdown_at(c) for c in allowed}
    enough = _GIVEN * max(paces.values())
    return next(c for c in allowed if paces[c] >= enough)
