"""Concurrency limits: how many batches of a variant a node of a pool runs at once.

`ConcurrencyLimits` is the one notion of it, computed once per (pool, variant). `KneeLimits` is what
the `headgate` policy and its autoscaler use: no more than adds throughput. `ThresholdLimits` is the
rule of "Hybrid Serving" (HiPS 2021): the largest concurrency whose response time is within the
objective. `FixedLimits` is a number that was set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from typing import final

from headgate.core.clock import NEVER_NS
from headgate.core.model import UNLIMITED, App, Function, Pipeline, Pool, Profile, Variant
from headgate.planning.constants import BATCH_SHARE, EQUAL_SHARE, KNEE_THROUGHPUT, LATENCY_SHARE
from headgate.planning.frontier.candidates import visits


class ConcurrencyLimits:
    """How many batches of a variant a node of a pool runs at once, by (pool, variant).

    Never more than the node has slots, nor than one instance runs (`Variant.concurrency`); of what
    is left, each subclass has its own rule for what the objective allows.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], int] = {}  # by pool id, variant id and items

    def limit(self, pool: Pool, variant: Variant, items: int = 1) -> int:
        """The limit for requests of `items` items; 0: a single one misses its objective. O(1)."""
        key = (pool.id, variant.id, items)
        limit = self._known.get(key)
        if limit is None:
            most = min(pool.slots, variant.concurrency)
            limit = self._known[key] = min(most, self._allowed(pool, variant, items, most))
        return limit

    def _allowed(self, pool: Pool, variant: Variant, items: int, most: int) -> int:
        """The largest concurrency by the rule; `most` is as far as it need be tried."""
        raise NotImplementedError


@final
class KneeLimits(ConcurrencyLimits):
    """The knee of throughput within the tightest objective of the function: at least 1.

    For a function without an objective `default_ns` is assumed. The number of items has no effect.
    """

    def __init__(self, app: App, default_ns: int = NEVER_NS) -> None:
        super().__init__()
        self._app = app
        self._latency_ns = [
            default_ns if ns == NEVER_NS else ns for ns in tightest_objectives_ns(app)
        ]
        self._budgets_ns = budgets_ns(app)
        self._visits = [0.0 for _ in app.functions]  # per request of every pipeline
        # By function id: the pipelines with an objective that use it, and its stages there.
        self._uses: list[list[tuple[Pipeline, list[int]]]] = [[] for _ in app.functions]
        for pipeline in app.pipelines:
            stages_of: dict[int, list[int]] = {}
            for index, often in enumerate(visits(pipeline)):
                function_id = pipeline.stages[index].function.id
                self._visits[function_id] += often
                stages_of.setdefault(function_id, []).append(index)
            if pipeline.slo.latency_ns < NEVER_NS:
                for function_id, stages in stages_of.items():
                    self._uses[function_id].append((pipeline, stages))

    def _allowed(self, pool: Pool, variant: Variant, items: int, most: int) -> int:
        return knee_concurrency(variant.profile, most, self._latency_ns[variant.function_id])

    def node_limit(self, pool: Pool, variants: Sequence[Variant], gateways: int = 1) -> int:
        """How many batches, of any of these variants, a node of a pool runs at once.

        Batches and concurrency compete for the time that a stage has. The limit is the smallest
        concurrency within 3 % of the best throughput of the mix: of as many requests of every
        pipeline. Variants that would be late at a concurrency count as lost. A variant counts by
        the part of its function's capacity that the pool has: what runs elsewhere in most cases
        must not limit what can run here only. One limit
        for all: a variant with a lower limit than others on its node would wait for the node to
        empty. It is no more than all of them together may run, in one instance each where a node
        has no several. Where batches have shapes, these say what runs beside each other, and there
        is no limit.
        """
        together = sum(variant.concurrency for variant in variants)
        most = pool.slots if has_replicas(pool, gateways) else max(1, min(pool.slots, together))
        if any(variant.more_shapes for variant in variants):
            return most
        least_ns = 0.0  # time that the mix takes of a node, each variant at its best concurrency
        taken_ns = [0.0 for _ in range(most)]  # by concurrency: of what is in time
        kept_ns = [0.0 for _ in range(most)]  # likewise: of `least_ns`
        for variant in variants:
            rates = [self._rate(pool, variant, index + 1) for index in range(most)]
            part = pool.nodes * max(rates) / self._capacity(variant.function_id)
            often = part * self._visits[variant.function_id]
            least_ns += often / max(rates)
            for index, rate in enumerate(rates):
                if rate > 0.0:
                    taken_ns[index] += often / rate
                    kept_ns[index] += often / max(rates)
        scores = [
            (kept / least_ns) * (kept / taken) if taken > 0.0 else 0.0
            for kept, taken in zip(kept_ns, taken_ns, strict=True)
        ]
        enough = KNEE_THROUGHPUT * max(scores)
        return next(index + 1 for index, score in enumerate(scores) if score >= enough)

    def _capacity(self, function_id: int) -> float:
        """Items of a function per nanosecond, if every pool ran nothing else."""
        capacity = 0.0
        for pool in self._app.pools:
            variant = self._app.variants_on(pool.id)[function_id]
            if variant is None:
                continue
            if pool.faas is not None:
                capacity += pool.faas.concurrency_max * self._rate(pool, variant, 1)
            else:
                rates = [self._rate(pool, variant, index + 1) for index in range(pool.slots)]
                capacity += pool.nodes * max(rates)
        return capacity

    def _rate(self, pool: Pool, variant: Variant, concurrency: int) -> float:
        """Items per nanosecond of a node at a concurrency, in batches that leave time to wait.

        None are in time where neighbours make a pipeline of the function too slow.
        """
        profile, network_ns = variant.profile, 2 * pool.network_ns
        slowdown = _slowdown(pool, variant, concurrency)
        if concurrency > 1 and slowdown > 1.0 and self._is_late(pool, variant, concurrency):
            return 0.0
        if len(profile.slowdown) > 1:
            concurrency = min(concurrency, variant.concurrency)
        allowed_ns = BATCH_SHARE * self._budgets_ns[variant.function_id] - network_ns
        items = max(1, bisect_right(profile.exec_ns, allowed_ns / slowdown))
        return concurrency * items / max(1.0, profile.exec_ns[items - 1] * slowdown + network_ns)

    def _is_late(self, pool: Pool, variant: Variant, concurrency: int) -> bool:
        """Whether a concurrency leaves a pipeline of the variant's function no time to wait.

        All its stages count, for what one takes longer another may take less. One that is late
        even without neighbours is no reason to have none.
        """
        for pipeline, stages in self._uses[variant.function_id]:
            least_ns = self._path_ns(pool, pipeline, stages, 1)
            path_ns = self._path_ns(pool, pipeline, stages, concurrency)
            if path_ns > LATENCY_SHARE * pipeline.slo.latency_ns >= LATENCY_SHARE * least_ns:
                return True
        return False

    def _path_ns(
        self, pool: Pool, pipeline: Pipeline, stages: Sequence[int], concurrency: int
    ) -> float:
        """Time of the longest path through some stages of a function that runs on a pool.

        The nodes of the pool run as much at once, and other stages run wherever they are fastest.
        """
        times_ns = []
        for index, stage in enumerate(pipeline.stages):
            elsewhere_ns = inf
            if index not in stages:
                elsewhere_ns = self._elsewhere_ns(pool, stage.function)
            variant = self._app.variants_on(pool.id)[stage.function.id]
            if variant is not None:
                slowdown = _slowdown(pool, variant, concurrency)
                time_ns = variant.profile.exec_ns[0] * slowdown + 2 * pool.network_ns
                elsewhere_ns = min(elsewhere_ns, time_ns)
            times_ns.append(elsewhere_ns)
        to_ns, from_ns = pipeline.longest_to(times_ns), pipeline.longest_from(times_ns)
        return max(to_ns[index] + from_ns[index] - times_ns[index] for index in stages)

    def _elsewhere_ns(self, pool: Pool, function: Function) -> float:
        """The shortest time of a function on other pools than one, network included."""
        return min(
            (
                variant.profile.exec_ns[0] + 2 * self._app.pools[id].network_ns
                for variant in function.variants
                for id in variant.pool_ids
                if id != pool.id
            ),
            default=inf,
        )


def _slowdown(pool: Pool, variant: Variant, concurrency: int) -> float:
    """By how much a variant is slower where so many batches run on each node of a pool."""
    if len(variant.profile.slowdown) > 1:
        concurrency = min(concurrency, variant.concurrency)
    slowdown = variant.profile.slowdown_at(concurrency)
    if pool.host is not None:
        together = max(1, pool.nodes) * concurrency
        slowdown *= pool.host.slowdown(together * variant.wanted_cpu_milli())
    return slowdown


@final
class ThresholdLimits(ConcurrencyLimits):
    """The largest concurrency within the latency budget of the stage: "Hybrid Serving" (HiPS 2021).

    The time to the node and back counts; `margin` is a factor on the times of the profile.
    """

    def __init__(self, app: App, margin: float = 1.0) -> None:
        super().__init__()
        self._budgets_ns = budgets_ns(app)
        self._margin = margin

    def _allowed(self, pool: Pool, variant: Variant, items: int, most: int) -> int:
        budget_ns = self._budgets_ns[variant.function_id]
        if budget_ns == NEVER_NS:
            return most
        allowed_ns = (budget_ns - 2 * pool.network_ns) / self._margin
        return largest_concurrency(variant.profile, allowed_ns, most, items)


@final
class FixedLimits(ConcurrencyLimits):
    """The same number for every variant, set by hand; 0: as many as slots and instances allow."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def _allowed(self, pool: Pool, variant: Variant, items: int, most: int) -> int:
        return self._count or most


def has_replicas(pool: Pool, gateways: int = 1) -> bool:
    """Whether a node of a pool may be given several instances of a variant.

    Only where shapes say how much of a node a batch takes: elsewhere the declared concurrency of an
    instance is the only statement about it. Where several gateways rent nodes, a Broker gives each
    instance a node of its own.
    """
    has_limit = pool.cpu_milli < UNLIMITED or 0 < pool.gpu_sevenths < UNLIMITED
    return has_limit and pool.faas is None and not (pool.is_elastic and gateways > 1)


def largest_concurrency(profile: Profile, allowed_ns: float, most: int, items: int = 1) -> int:
    """The largest concurrency, up to `most`, with every response within `allowed_ns`; 0 if none.

    O(the result).

    >>> largest_concurrency(Profile((36,), slowdown=(1.0, 2.0, 3.0)), allowed_ns=200, most=20)
    5
    """
    concurrency = 0
    while concurrency < most and profile.time_ns(items, concurrency + 1) <= allowed_ns:
        concurrency += 1
    return concurrency


def knee_concurrency(profile: Profile, slots: int, latency_ns: int) -> int:
    """Concurrency at the throughput knee.

    The smallest number of concurrent batches that reaches 97 % of the node's best throughput with
    latency within 70 % of the SLO; the rest of the SLO is for queueing and for variance. Where two
    batches take twice as long as one, they should run one after the other: the first is done early,
    and the choice of the next one stays open.

    >>> knee_concurrency(Profile(exec_ns=(10,)), slots=4, latency_ns=100)
    4
    >>> knee_concurrency(Profile(exec_ns=(10,), slowdown=(1.0, 2.0, 3.0)), slots=3, latency_ns=100)
    1
    >>> knee_concurrency(Profile(exec_ns=(10,), slowdown=(1.0, 1.2, 1.5)), slots=3, latency_ns=100)
    3
    """
    if len(profile.slowdown) == 1:
        return slots
    most_ns = LATENCY_SHARE * latency_ns
    allowed = [c for c in range(1, slots + 1) if profile.time_ns(1, c) <= most_ns] or [1]
    throughputs = {c: c / profile.slowdown_at(c) for c in allowed}
    enough = KNEE_THROUGHPUT * max(throughputs.values())
    return next(c for c in allowed if throughputs[c] >= enough)


def rate_per_s(profile: Profile, concurrency: int) -> float:
    """Requests of one item that a node answers per second at a concurrency.

    >>> rate_per_s(Profile((50_000_000,), slowdown=(1.0, 1.6)), concurrency=2)
    25.0
    """
    return concurrency / max(1, profile.time_ns(1, concurrency)) * 1e9 if concurrency else 0.0


def tightest_objectives_ns(app: App) -> list[int]:
    """Tightest latency objective of the pipelines of each function, by function id.

    The objective of a whole pipeline, not divided; `NEVER_NS` without any.
    """
    objectives = [NEVER_NS for _ in app.functions]
    for pipeline in app.pipelines:
        for stage in pipeline.stages:
            id = stage.function.id
            objectives[id] = min(objectives[id], pipeline.slo.latency_ns)
    return objectives


def budgets_ns(app: App, alone_ns: Sequence[int] | None = None) -> list[int]:
    """Latency budget of one stage of each function, by function id.

    A pipeline's objective is divided in proportion to isolated execution times along the critical
    path through the stage. The tightest of all pipelines counts; `NEVER_NS` without any objective.
    The times are those of each function's reference, or `alone_ns`, by function id.
    """
    if alone_ns is None:
        alone_ns = [function.reference_exec_ns for function in app.functions]
    budgets = [NEVER_NS for _ in app.functions]
    for pipeline in app.pipelines:
        if pipeline.slo.latency_ns == NEVER_NS:
            continue
        times_ns = [float(alone_ns[stage.function.id]) for stage in pipeline.stages]
        to_ns, from_ns = pipeline.longest_to(times_ns), pipeline.longest_from(times_ns)
        for index, stage in enumerate(pipeline.stages):
            path_ns = to_ns[index] + from_ns[index] - times_ns[index]  # the stage is in both
            share = times_ns[index] / max(1.0, path_ns)
            id = stage.function.id
            budgets[id] = min(budgets[id], int(pipeline.slo.latency_ns * share))
    return budgets


def allowed_ns_of(pipeline: Pipeline, index: int, alone_ns: int) -> int | None:
    """Time that a stage may take, waiting included, where it takes `alone_ns` by itself.

    None if the pipeline cannot be in time then; `NEVER_NS` without an objective. As in admission, a
    part of the time is divided equally among the stages, the rest by their fastest times.
    """
    latency_ns = pipeline.slo.latency_ns
    if latency_ns == NEVER_NS:
        return NEVER_NS
    others_ns, _ = longest_path_ns(pipeline, index)
    if alone_ns + others_ns > latency_ns:
        return None
    waits_ns = EQUAL_SHARE * latency_ns / len(pipeline.stages)
    others_ns, path_ns = longest_path_ns(pipeline, index, waits_ns)
    return max(int(latency_ns * (1.0 - others_ns / path_ns)), alone_ns)


def longest_path_ns(pipeline: Pipeline, index: int, waits_ns: float = 0.0) -> tuple[float, float]:
    """The longest path through a stage, each at its fastest after a wait: without it, and with."""
    times_ns = [
        waits_ns + min(variant.profile.exec_ns[0] for variant in stage.function.variants)
        for stage in pipeline.stages
    ]
    to_ns, from_ns = pipeline.longest_to(times_ns), pipeline.longest_from(times_ns)
    path_ns = to_ns[index] + from_ns[index] - times_ns[index]
    return path_ns - times_ns[index], path_ns


def shares_of_remaining_path(pipeline: Pipeline) -> list[float]:
    """By stage: the share of the time left at its start that the stage may use for itself."""
    times_ns = [float(stage.function.reference_exec_ns) for stage in pipeline.stages]
    paths_ns = pipeline.longest_from(times_ns)
    return [own_ns / max(1.0, path_ns) for own_ns, path_ns in zip(times_ns, paths_ns, strict=True)]
