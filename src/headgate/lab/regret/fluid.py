"""The fluid bound of a world: the most value that any policy could serve, as a linear programme.

Work is a fluid: batches are full, no capacity is lost between them, and deadlines, cold starts,
memory and the order of arrivals are left out. So no policy can serve more, and the bound is loose
where objectives forbid full batches or where bursts are short.

The variables are the share of each class that is served and, by build, pool and shape, the share of
the pool's time that the build takes. Three things limit a pool of nodes. *Time*: a batch that
shares a node with others takes `slowdown(c) / c` of the node, at the best c. *Slots*: a batch holds
its slot while it is on the network as well, and one build may hold only as many slots of a node as
the instances that fit its memory run batches. *Compute*: just as long, a batch holds the CPUs and
the GPU share of its shape; batches of one instance share them where compute is resident. A FaaS
pool is limited by its concurrency alone.

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
from headgate.core.model import UNLIMITED, App, Compute, Pipeline, Pool, Variant
from headgate.planning.frontier.candidates import visits

Floats = NDArray[np.float64]

_TOLERANCE: Final = 1e-9
_PIVOTS_MAX: Final = 20_000  # far more than any programme here needs
_FILL_STEPS: Final = 40  # halvings when the level of a max-min share is searched for


def maximise(gain: Floats, rows: Floats, limits: Floats) -> tuple[float, Floats]:
    """Return the largest `gain @ x` with `rows @ x <= limits` and `x >= 0`, and that x.

    Needs `limits >= 0`, so that x = 0 is feasible. Raises `ValueError` if it is unbounded.
    Bland's rule: ties cause no cycles.

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


def item_ns(variant: Variant, shape_id: int = 0, batch_max: int | None = None) -> float:
    """Time of one item in a full batch, alone on its node."""
    times_ns = variant.shapes[shape_id].exec_ns[:batch_max]
    return min(time_ns / (index + 1) for index, time_ns in enumerate(times_ns))


def node_work_ns(
    variant: Variant, pool: Pool, batch_max: int | None = None, shape_id: int = 0
) -> float:
    """Time of a node, or of an instance of a FaaS pool, that one item in a full batch takes."""
    exec_ns = item_ns(variant, shape_id, batch_max)
    if pool.faas is not None:
        return exec_ns
    together = range(1, pool.slots + 1)
    return exec_ns * min(variant.profile.slowdown_at(count) / count for count in together)


def slot_work_ns(
    variant: Variant,
    pool: Pool,
    scale: float = 1.0,
    batch_max: int | None = None,
    shape_id: int = 0,
) -> float:
    """Time for which one item in a full batch holds its slot, divided by the slots of the node."""
    times_ns = variant.shapes[shape_id].exec_ns[:batch_max]
    held_ns = min(
        (time_ns * scale + 2 * pool.network_ns) / (index + 1)
        for index, time_ns in enumerate(times_ns)
    )
    return held_ns / pool.slots


def compute_parts(variant: Variant, pool: Pool, shape_id: int) -> tuple[float, float]:
    """The parts of a node's CPUs and of its GPU that a running batch holds; 0: no limit."""
    if pool.faas is not None:
        return 0.0, 0.0
    shape = variant.shapes[shape_id].shape
    sharers = variant.concurrency if pool.compute == Compute.RESIDENT else 1
    cpu = shape.cpu_milli / pool.cpu_milli if 0 < pool.cpu_milli < UNLIMITED else 0.0
    gpu = shape.gpu_sevenths / pool.gpu_sevenths if 0 < pool.gpu_sevenths < UNLIMITED else 0.0
    return cpu / sharers, gpu / sharers


def shapes_on(variant: Variant, pool: Pool) -> list[int]:
    """The shapes of a variant for which a node of a pool has room; a call has the first one."""
    if pool.faas is not None:
        return [0]
    return [id for id, times in enumerate(variant.shapes) if pool.has_room_for(times.shape)]


def held_work_ns(variant: Variant, pool: Pool, shape_id: int) -> float:
    """Time of a node that one item in a full batch takes by what it holds most of."""
    part = max(compute_parts(variant, pool, shape_id))
    return max(node_work_ns(variant, pool, None, shape_id), part * item_ns(variant, shape_id))


def item_usd(variant: Variant, pool: Pool) -> float:
    """Cost of one item in a full batch and the cheapest shape, if no idle time is paid for."""
    if pool.faas is None:
        return min(
            held_work_ns(variant, pool, shape_id) / HOUR_NS * pool.usd_per_hour
            + _compute_usd(variant, pool, shape_id)
            for shape_id in shapes_on(variant, pool)
        )
    profile = variant.profile
    return min(
        pool.faas.usd(time_ns) / (index + 1) for index, time_ns in enumerate(profile.exec_ns)
    )


def _compute_usd(variant: Variant, pool: Pool, shape_id: int) -> float:
    """Cost of the compute that one item in a full batch holds while it runs."""
    times = variant.shapes[shape_id]
    sharers = variant.concurrency if pool.compute == Compute.RESIDENT else 1
    return min(
        pool.compute_usd(times.shape, time_ns) / (index + 1) / sharers
        for index, time_ns in enumerate(times.exec_ns)
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
            works_ns = [held_work_ns(v, pool, i) for v, pool in places for i in shapes_on(v, pool)]
            total += count * min(works_ns) / SECOND_NS
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
    """A variable: the share of a pool's time that one build takes for one class, in a shape."""

    owner: int  # index of the class
    variant: Variant
    pool: Pool
    shape_id: int
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
        self._shaped = [(v, pool, id) for v, pool in self._places for id in shapes_on(v, pool)]

    def capacity(self, mix: Sequence[Demand]) -> float:
        """How many times the whole mix can be served."""
        need = sum((self._need(demand) for demand in mix), np.zeros(len(self._app.functions)))
        columns = self._useful(
            [_Column(0, v, pool, id, v.items_max(id)) for v, pool, id in self._shaped]
        )
        rows, limits = self._constraints([need], columns)
        gain = np.zeros(rows.shape[1])
        gain[0] = 1.0
        return maximise(gain, rows, limits)[0]

    def best(
        self,
        classes: Sequence[Demand],
        values: Sequence[float],
        *,
        minds_deadlines: bool = False,
        shortest: float = 1.0,
    ) -> float:
        """The most value that can be served, if each item of class i is worth `values[i]`.

        With `minds_deadlines` a class uses only the builds, the shapes and the batch sizes with
        which a request is in time if it never waits and if every batch takes no more than
        `shortest` times its expected time. That bound is tighter, and holds as far as no batch is
        faster than that.
        """
        offered = np.array([d.items * v for d, v in zip(classes, values, strict=True)])
        total = float(offered.sum())
        if not total:
            return 0.0
        columns = [
            column
            for index, demand in enumerate(classes)
            for column in self._useful(
                list(self._columns(index, demand.pipeline, shortest if minds_deadlines else None))
            )
        ]
        rows, limits = self._constraints([self._need(demand) for demand in classes], columns)
        # No class is served more than once.
        caps = np.eye(len(classes), rows.shape[1])
        gain = np.zeros(rows.shape[1])
        gain[: len(classes)] = offered / total
        limits = np.append(limits, np.ones(len(classes)))
        return maximise(gain, np.vstack((rows, caps)), limits)[0] * total

    def _columns(self, owner: int, pipeline: Pipeline, shortest: float | None) -> Iterator[_Column]:
        slack_ns = {} if shortest is None else self._slack_ns(pipeline, shortest)
        for variant, pool, shape_id in self._shaped:
            batch_max = variant.items_max(shape_id)
            if shortest is not None:
                within_ns = slack_ns.get(variant.function_id, -1.0)
                batch_max = self._batch_max(variant, pool, shape_id, within_ns, shortest)
            if batch_max:
                yield _Column(owner, variant, pool, shape_id, batch_max)

    def _useful(self, columns: list[_Column]) -> list[_Column]:
        """The columns of one class, without shapes that another one of the build replaces."""
        uses = [self._uses(column) for column in columns]
        useful: list[int] = []
        taken: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        for index in sorted(range(len(columns)), key=uses.__getitem__):
            column, own = columns[index], uses[index]
            others = taken.setdefault((column.variant.id, column.pool.id), [])
            if not any(all(o <= u for o, u in zip(other, own, strict=True)) for other in others):
                others.append(own)
                useful.append(index)
        return [columns[index] for index in sorted(useful)]

    def _uses(self, column: _Column) -> tuple[float, ...]:
        """What one item takes of each thing that limits a pool, in time of a node."""
        variant, pool, batch_max = column.variant, column.pool, column.batch_max
        scale = self._scale[variant.function_id]
        cpu, gpu = compute_parts(variant, pool, column.shape_id)
        node_ns = node_work_ns(variant, pool, batch_max, column.shape_id) * scale
        slot_ns = slot_work_ns(variant, pool, scale, batch_max, column.shape_id)
        held_ns = slot_ns * pool.slots
        return node_ns, slot_ns, cpu * held_ns, gpu * held_ns

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
        """What the columns use of each thing that they share: time, slots, compute, instances."""
        uses = [self._uses(column) for column in columns]
        for pool in self._app.pools:
            yield [float(column.pool.id == pool.id) for column in columns]
            for kind in () if pool.faas is not None else (1, 2, 3):
                row = [
                    use[kind] / use[0] if column.pool.id == pool.id else 0.0
                    for column, use in zip(columns, uses, strict=True)
                ]
                if any(row):
                    yield row
        for variant, pool in self._places:
            if pool.faas is None and (batches := _batches_max(variant, pool)) < pool.slots:
                part = batches / pool.slots  # of the slots, that one build may hold
                yield [
                    use[1] / use[0] / part
                    if (column.variant.id, column.pool.id) == (variant.id, pool.id)
                    else 0.0
                    for column, use in zip(columns, uses, strict=True)
                ]

    def _slack_ns(self, pipeline: Pipeline, shortest: float) -> dict[int, float]:
        """By function id: the time that its stage may take if all others are as fast as can be.

        A stage of a cascade takes no time from the others, because it may be skipped.
        """
        fastest = [
            0.0
            if stage.only_if_unsure
            else min(
                v.exec_ns(1, id) * self._scale[v.function_id] * shortest + 2 * pool.network_ns
                for v, pool, id in self._shaped
                if v.function_id == stage.function.id
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

    def _batch_max(
        self, variant: Variant, pool: Pool, shape_id: int, within_ns: float, shortest: float
    ) -> int:
        """The largest batch that ends within a time; 0 if not even one item does."""
        factor = self._scale[variant.function_id] * shortest
        return sum(
            1
            for time_ns in variant.shapes[shape_id].exec_ns
            if time_ns * factor + 2 * pool.network_ns <= within_ns
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
        """The shares, with the rising ones raised to the highest level that can be served."""
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
        work_ns = node_work_ns(column.variant, pool, column.batch_max, column.shape_id)
        return lanes * self._duration_ns / (work_ns * self._scale[column.variant.function_id])


def _batches_max(variant: Variant, pool: Pool) -> int:
    """Batches of a variant that a node runs at once, by the instances that its memory holds."""
    memory_bytes = variant.profile.memory_bytes
    instances = max(1, pool.memory_bytes // memory_bytes) if memory_bytes else pool.slots
    return min(pool.slots, instances * variant.concurrency)


def _raised(shares: Sequence[float], index: int, offered: float) -> list[float]:
    """The shares with a little more for one class: a thousandth of what it offers."""
    raised = list(shares)
    raised[index] = min(offered, raised[index] + offered / 1_000)
    return raised
