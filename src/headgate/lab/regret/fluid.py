"""The fluid bound of a world: the most value that any policy could serve, as a linear programme.

Work is a fluid: batches are full, no capacity is lost between them, and deadlines, cold starts,
memory and the order of arrivals are left out. So no policy can serve more, and the bound is loose
where objectives forbid full batches or where bursts are short.

The variables are the share of each class that is served and, by build and pool, the share of the
pool's time that the build takes. Two things limit a pool of nodes. *Compute*: a batch that shares a
node with others takes `slowdown(c) / c` of the node, at the best c. *Slots*: a batch holds its slot
while it is on the network as well, and one build may hold only as many slots of a node as an
instance runs batches. A FaaS pool is limited by its concurrency alone.

The programme has a row per class and function and per thing that is shared, all of the form "at
most", and serving nothing satisfies it. So the simplex method needs no first phase, and a dense
tableau of a few dozen rows is all there is to it: no solver is needed as a dependency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import HOUR_NS, SECOND_NS
from headgate.core.model import App, Pipeline, Pool, Variant
from headgate.planning.frontier.candidates import visits

Floats = NDArray[np.float64]

_TOLERANCE: Final = 1e-9
_PIVOTS_MAX: Final = 20_000  # far more than any programme here needs
_FILL_STEPS: Final = 40  # halvings when the level of a max-min share is searched for


def maximise(gain: Floats, rows: Floats, limits: Floats) -> tuple[float, Floats]:
    """Return the largest `gain @ x` with `rows @ x <= limits` and `x >= 0`, and that x.

    Needs `limits >= 0`, so that x = 0 is feasible. Raises `ValueError` if there is no largest.
    Bland's rule: no cycles, whatever the ties.

    >>> rows, limits = np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([4.0, 3.0])
    >>> value, x = maximise(np.array([3.0, 2.0]), rows, limits)
    >>> value, x.tolist()
    (11.0, [3.0, 1.0])
    """
    assert (limits >= 0).all(), "x = 0 must be feasible"
    count, width = rows.shape
    table = np.zeros((count + 1, width + count + 1))
    table[:count, :width] = rows
    table[:count, width : width + count] = np.eye(count)
    table[:count, -1] = limits
    table[count, :width] = -gain
    basis = list(range(width, width + count))
    for _ in range(_PIVOTS_MAX):
        entering = np.flatnonzero(table[count, :-1] < -_TOLERANCE)
        if not len(entering):
            x = np.zeros(width + count)
            x[basis] = table[:count, -1]
            return float(table[count, -1]), x[:width]
        _pivot(table, basis, int(entering[0]))
    raise AssertionError("the simplex method has not ended")


def _pivot(table: Floats, basis: list[int], column: int) -> None:
    """Bring a column into the basis, in place of the row that limits it first."""
    entries = table[:-1, column]
    candidates = np.flatnonzero(entries > _TOLERANCE)
    if not len(candidates):
        raise ValueError("the linear programme has no largest value")
    ratios = table[candidates, -1] / entries[candidates]
    ties = candidates[ratios <= ratios.min() + _TOLERANCE]
    row = min((int(tie) for tie in ties), key=lambda tie: basis[tie])
    table[row] /= table[row, column]
    others = table[:, column].copy()
    others[row] = 0.0
    table -= np.outer(others, table[row])
    np.maximum(table[:-1, -1], 0.0, out=table[:-1, -1])  # rounding must not leave the feasible set
    basis[row] = column


def node_work_ns(variant: Variant, pool: Pool, batch_max: int | None = None) -> float:
    """Compute of one item in a full batch: time of a node, or of an instance of a FaaS pool."""
    profile = variant.profile
    times_ns = profile.exec_ns[:batch_max]
    exec_ns = min(time_ns / (index + 1) for index, time_ns in enumerate(times_ns))
    if pool.faas is not None:
        return exec_ns
    together = range(1, pool.slots + 1)
    return exec_ns * min(profile.slowdown_at(count) / count for count in together)


def slot_work_ns(
    variant: Variant, pool: Pool, scale: float = 1.0, batch_max: int | None = None
) -> float:
    """Time for which one item in a full batch holds its slot, divided by the slots of the node."""
    times_ns = variant.profile.exec_ns[:batch_max]
    held_ns = min(
        (time_ns * scale + 2 * pool.network_ns) / (index + 1)
        for index, time_ns in enumerate(times_ns)
    )
    return held_ns / pool.slots


def item_usd(variant: Variant, pool: Pool) -> float:
    """Cost of one item in a full batch, if nothing is paid for idle time."""
    if pool.faas is None:
        return node_work_ns(variant, pool) / HOUR_NS * pool.usd_per_hour
    profile = variant.profile
    return min(
        pool.faas.usd(time_ns) / (index + 1) for index, time_ns in enumerate(profile.exec_ns)
    )


def item_value(app: App, pipeline: Pipeline) -> float:
    """Value of one item of a request: its cost at the cheapest build of each stage.

    Where a build costs nothing, the value is the time that the builds take, in seconds.
    """
    is_free = any(
        item_usd(variant, app.pools[pool_id]) == 0
        for variant in app.variants
        for pool_id in variant.pool_ids
    )
    total = 0.0
    for stage, count in zip(pipeline.stages, visits(pipeline), strict=True):
        places = [
            (v, app.pools[pool_id]) for v in stage.function.variants for pool_id in v.pool_ids
        ]
        if is_free:
            total += count * min(node_work_ns(v, pool) for v, pool in places) / SECOND_NS
        else:
            total += count * min(item_usd(v, pool) for v, pool in places)
    return total


@dataclass(frozen=True, slots=True)
class Demand:
    """The items that one class, a tenant's requests for a pipeline, offers in a time."""

    pipeline: Pipeline
    items: float


@dataclass(frozen=True, slots=True)
class _Column:
    """A variable: the share of a pool's compute that one build takes for one class."""

    owner: int  # index of the class
    variant: Variant
    pool: Pool
    batch_max: int


@final
class FluidModel:
    """What the pools of an application can serve in a time.

    `scale` is the true over the profiled time by function id: the bound is on what could be
    served, not on what the profiles promise.
    """

    def __init__(self, app: App, duration_ns: float, scale: Sequence[float] = ()) -> None:
        self._app = app
        self._duration_ns = duration_ns
        self._scale = [*scale, *(1.0 for _ in app.functions[len(scale) :])]
        self._places = [(v, app.pools[i]) for v in app.variants for i in v.pool_ids]

    def capacity(self, mix: Sequence[Demand]) -> float:
        """How many times the whole mix can be served."""
        need = sum((self._need(demand) for demand in mix), np.zeros(len(self._app.functions)))
        columns = [_Column(0, v, pool, v.profile.items_max) for v, pool in self._places]
        rows, limits = self._constraints([need], columns)
        gain = np.zeros(rows.shape[1])
        gain[0] = 1.0
        return maximise(gain, rows, limits)[0]

    def best(
        self, classes: Sequence[Demand], values: Sequence[float], *, minds_deadlines: bool = False
    ) -> float:
        """The most value that can be served, if each item of class i is worth `values[i]`.

        With `minds_deadlines` a class uses only the builds, and the batch sizes, with which a
        request is in time if it never waits. That bound is tighter, and holds for exact times only.
        """
        offered = np.array([d.items * v for d, v in zip(classes, values, strict=True)])
        total = float(offered.sum())
        if not total:
            return 0.0
        columns = [
            column
            for index, demand in enumerate(classes)
            for column in self._columns(index, demand.pipeline, minds_deadlines=minds_deadlines)
        ]
        rows, limits = self._constraints([self._need(demand) for demand in classes], columns)
        # No class is served more than once.
        caps = np.eye(len(classes), rows.shape[1])
        gain = np.zeros(rows.shape[1])
        gain[: len(classes)] = offered / total
        limits = np.append(limits, np.ones(len(classes)))
        return maximise(gain, np.vstack((rows, caps)), limits)[0] * total

    def _columns(
        self, owner: int, pipeline: Pipeline, *, minds_deadlines: bool
    ) -> Iterator[_Column]:
        slack_ns = self._slack_ns(pipeline) if minds_deadlines else {}
        for variant, pool in self._places:
            batch_max = variant.profile.items_max
            if minds_deadlines:
                within_ns = slack_ns.get(variant.function_id, -1.0)
                batch_max = self._batch_max(variant, pool, within_ns)
            if batch_max:
                yield _Column(owner, variant, pool, batch_max)

    def _constraints(
        self, needs: Sequence[Floats], columns: Sequence[_Column]
    ) -> tuple[Floats, Floats]:
        """Rows and limits. Variables: the share served of each class, then one per column."""
        width = len(needs) + len(columns)
        rows: list[Floats] = []
        for owner, need in enumerate(needs):
            for function_id in np.flatnonzero(need):
                row = np.zeros(width)
                row[owner] = 1.0
                for at, column in enumerate(columns, len(needs)):
                    if column.owner == owner and column.variant.function_id == function_id:
                        row[at] = -self._items_max(column) / need[function_id]
                rows.append(row)
        limits = [0.0 for _ in rows]
        for groups in self._shared(columns):
            row = np.zeros(width)
            row[len(needs) :] = groups
            rows.append(row)
            limits.append(1.0)
        return np.array(rows), np.array(limits)

    def _shared(self, columns: Sequence[_Column]) -> Iterator[list[float]]:
        """What the columns use of each thing that they share: compute, slots, instances."""
        for pool in self._app.pools:
            yield [float(column.pool.id == pool.id) for column in columns]
            if pool.faas is None:
                yield [
                    self._slot_share(column) if column.pool.id == pool.id else 0.0
                    for column in columns
                ]
        for variant, pool in self._places:
            if pool.faas is None and variant.concurrency < pool.slots:
                part = variant.concurrency / pool.slots  # of the slots, that one build may hold
                yield [
                    self._slot_share(column) / part
                    if (column.variant.id, column.pool.id) == (variant.id, pool.id)
                    else 0.0
                    for column in columns
                ]

    def _slack_ns(self, pipeline: Pipeline) -> dict[int, float]:
        """By function id: the time that its stage may take if all others are as fast as can be."""
        fastest = [
            min(
                v.profile.exec_ns[0] * self._scale[v.function_id]
                + 2 * self._app.pools[pool_id].network_ns
                for v in stage.function.variants
                for pool_id in v.pool_ids
            )
            for stage in pipeline.stages
        ]
        until, onwards = pipeline.longest_to(fastest), pipeline.longest_from(fastest)
        slack_ns: dict[int, float] = {}
        for index, stage in enumerate(pipeline.stages):
            others_ns = until[index] + onwards[index] - 2 * fastest[index]
            own_ns = pipeline.slo.latency_ns - others_ns
            slack_ns[stage.function.id] = max(own_ns, slack_ns.get(stage.function.id, 0.0))
        return slack_ns

    def _batch_max(self, variant: Variant, pool: Pool, within_ns: float) -> int:
        """The largest batch that ends within a time; 0 if not even one item does."""
        scale = self._scale[variant.function_id]
        return sum(
            1
            for time_ns in variant.profile.exec_ns
            if time_ns * scale + 2 * pool.network_ns <= within_ns
        )

    def max_min_shares(
        self, classes: Sequence[Demand], values: Sequence[float], weights: Sequence[float]
    ) -> list[float]:
        """By class, the value of its weighted max-min fair share (progressive filling).

        All classes are served at the same level, value per weight, which rises; a class that is
        served whole, or that can have no more, keeps what it has while the others rise on.
        """
        offered = [d.items * v for d, v in zip(classes, values, strict=True)]
        shares = [0.0 for _ in classes]
        rising = {index for index, value in enumerate(offered) if value > 0}
        while rising:
            shares = self._risen(classes, values, weights, shares, rising)
            stuck = {
                i
                for i in rising
                if shares[i] >= offered[i] * (1 - 1e-6)
                or not self._is_feasible(classes, values, _raised(shares, i, offered[i]))
            }
            rising -= stuck or rising
        return shares

    def _risen(
        self,
        classes: Sequence[Demand],
        values: Sequence[float],
        weights: Sequence[float],
        shares: Sequence[float],
        rising: set[int],
    ) -> list[float]:
        """The shares with those that rise at the highest level that can be served."""
        offered = [d.items * v for d, v in zip(classes, values, strict=True)]

        def at(level: float) -> list[float]:
            return [
                min(offered[i], level * weights[i]) if i in rising else share
                for i, share in enumerate(shares)
            ]

        low, high = 0.0, max(offered[i] / weights[i] for i in rising)
        if self._is_feasible(classes, values, at(high)):
            return at(high)
        for _ in range(_FILL_STEPS):
            middle = (low + high) / 2
            if self._is_feasible(classes, values, at(middle)):
                low = middle
            else:
                high = middle
        return at(low)

    def _is_feasible(
        self, classes: Sequence[Demand], values: Sequence[float], shares: Sequence[float]
    ) -> bool:
        mix = [
            Demand(demand.pipeline, share / value)
            for demand, value, share in zip(classes, values, shares, strict=True)
            if share > 0
        ]
        return not mix or self.capacity(mix) >= 1.0

    def _need(self, demand: Demand) -> Floats:
        """Items by function that serving a class takes."""
        need = np.zeros(len(self._app.functions))
        for stage, count in zip(demand.pipeline.stages, visits(demand.pipeline), strict=True):
            need[stage.function.id] += count * demand.items
        return need

    def _items_max(self, column: _Column) -> float:
        """Items that the whole pool computes in the time if it runs nothing else."""
        pool = column.pool
        lanes = pool.nodes if pool.faas is None else pool.faas.concurrency_max
        work_ns = node_work_ns(column.variant, pool, column.batch_max)
        return lanes * self._duration_ns / (work_ns * self._scale[column.variant.function_id])

    def _slot_share(self, column: _Column) -> float:
        """Share of the pool's slots that those items hold."""
        variant, pool, batch_max = column.variant, column.pool, column.batch_max
        scale = self._scale[variant.function_id]
        held_ns = slot_work_ns(variant, pool, scale, batch_max)
        return held_ns / (node_work_ns(variant, pool, batch_max) * scale)


def _raised(shares: Sequence[float], index: int, offered: float) -> list[float]:
    """The shares with a little more for one class: a thousandth of what it offers."""
    raised = list(shares)
    raised[index] = min(offered, raised[index] + offered / 1_000)
    return raised
