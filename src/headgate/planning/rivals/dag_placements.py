"""Placements of whole pipelines on resource types, and what is promised on which node.

The two halves of admission control for DAGs (Berkeley thesis EECS-2022-88, chapter 4) that are
arithmetic alone. *Before the first request*, `DagPlacements` finds the placements of a pipeline's
functions on pools that no other placement beats in both latency and cost. *At every request*,
`NodeReservations` has what is promised on each node as intervals on its lanes (a lane is one batch
at a time), and finds the earliest gap for one more. A `Calendar` would not do: it has the sum of
what is due by a time, on a whole pool, and a reservation here is a time on a node.

Reservations are kept in order, not to the nanosecond. If what runs takes longer than promised,
everything behind it on its lane is pushed back, and new requests see that.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from operator import attrgetter
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.model import App, Pipeline, Variant
from headgate.core.records import Batch, Node, Task
from headgate.core.states import BATCH_FINISHED
from headgate.planning.frontier.candidates import node_candidates, pipeline_graph
from headgate.planning.frontier.configs import StageConfig, cost_units
from headgate.planning.frontier.pipeline import PipelineFrontier

_EXAMINED_MAX: Final = 256  # reservations of a lane: behind more of them, no gap is looked for
_USD_MAX: Final = 1_000.0  # a larger cost objective is no limit
_COST_MAX: Final = 2**62
_FORGET_NS: Final = 10 * SECOND_NS


@final
class DagPlacements:
    """The placements of a pipeline on pools that no other beats in latency and cost.

    Of the r**n maps from n functions to r resource types, those on the Pareto curve; they are
    composed rather than enumerated (`frontier.pareto`), which gives the same set. Optimistic as in
    the thesis: every function is loaded, and runs at once, alone, one item at a time.
    Raises `ConfigError` if a function runs on no node.
    """

    def __init__(self, app: App, pipeline: Pipeline) -> None:
        configs = [
            [config for config in each if config.batch == 1 and config.shape_id == 0]
            for each in node_candidates(app, pipeline)
        ]
        curve = PipelineFrontier(pipeline_graph(pipeline), configs).whole
        stages = range(len(pipeline.stages))
        # One list per objective, each sorted by it. On a Pareto curve one is the other reversed.
        self.times_ns: list[int] = curve.times_ns
        self.costs: list[int] = curve.costs[::-1]
        self.placements: list[tuple[StageConfig, ...]] = []
        for index in range(len(curve)):
            by_stage = curve.configs_at(index)
            self.placements.append(tuple(by_stage[stage] for stage in stages))

    def satisfying(self, latency_ns: int, cost_usd: float, items: int) -> range:
        """The placements that meet both objectives on an idle system. O(log placements).

        The thesis says union; only the intersection satisfies both.
        """
        limit = _COST_MAX if cost_usd > _USD_MAX else cost_units(cost_usd / items)
        fast = bisect_right(self.times_ns, latency_ns)  # the first ones are fast enough
        cheap = bisect_right(self.costs, limit)  # and the last ones cheap enough
        return range(len(self.costs) - cheap, fast)


@final
class Reservation:
    """Time on a lane of a node: for a batch of tasks, or for loading a variant (no tasks)."""

    __slots__ = ("duration_ns", "is_running", "lane", "node", "start_ns", "tasks", "variant")

    def __init__(
        self, node: Node, variant: Variant, tasks: list[Task], start_ns: int, duration_ns: int
    ) -> None:
        self.node = node
        self.variant = variant
        self.tasks = tasks
        self.start_ns = start_ns
        self.duration_ns = duration_ns
        self.lane = 0
        self.is_running = False

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    def narrow(self, tasks: list[Task]) -> None:
        """Only these tasks remain in the batch."""
        self.tasks = tasks


@final
class NodeReservations:
    """The reservations of every node, in order of their starts."""

    def __init__(self) -> None:
        self.lanes: dict[int, list[list[Reservation]]] = {}  # by node id

    def add_node(self, node: Node) -> None:
        """Begin the lanes of a node that joined."""
        self.lanes[node.id] = [[] for _ in range(node.slots)]

    def drop_node(self, node: Node) -> list[Reservation]:
        """Forget the lanes of a node that is lost; return what was promised and does not run."""
        lanes = self.lanes.pop(node.id, [])
        return [each for lane in lanes for each in lane if not each.is_running]

    def reserve(
        self, now_ns: int, node: Node, variant: Variant, tasks: list[Task], times: tuple[int, int]
    ) -> Reservation:
        """Reserve the earliest gap on a node. `times` are when it can begin, and how long it takes.

        O(reservations of the node).
        """
        ready_ns, duration_ns = times
        best_ns, best_lane = -1, 0
        for number, lane in enumerate(self.lanes[node.id]):
            start_ns = _gap_ns(lane, now_ns, max(now_ns, ready_ns), duration_ns)
            if best_ns < 0 or start_ns < best_ns:
                best_ns, best_lane = start_ns, number
        reservation = Reservation(node, variant, tasks, best_ns, duration_ns)
        reservation.lane = best_lane
        self.restore(reservation)
        return reservation

    def restore(self, reservation: Reservation) -> None:
        """Put a reservation back where it was removed."""
        lane = self.lanes[reservation.node.id][reservation.lane]
        insort(lane, reservation, key=attrgetter("start_ns"))

    def remove(self, reservation: Reservation) -> None:
        """Take a reservation out, if its node is still there."""
        lanes = self.lanes.get(reservation.node.id)
        if lanes is not None and reservation in lanes[reservation.lane]:
            lanes[reservation.lane].remove(reservation)

    def begin(self, reservation: Reservation, now_ns: int) -> None:
        """What was reserved runs now: it is the first of its lane, whenever it was promised."""
        self.remove(reservation)
        reservation.start_ns = now_ns
        reservation.is_running = True
        lane = self.lanes[reservation.node.id][reservation.lane]
        lane.insert(0, reservation)

    def change_lane(self, reservation: Reservation) -> None:
        """Move a reservation to a lane of its node that has nothing to do; there must be one."""
        self.remove(reservation)
        lanes = self.lanes[reservation.node.id]
        reservation.lane = next(number for number, lane in enumerate(lanes) if not lane)
        self.restore(reservation)

    def promised_ns(self, node: Node, now_ns: int) -> int:
        """Time of a node's lanes that is promised or running."""
        return sum(
            max(0, each.end_ns - now_ns) if each.is_running else each.duration_ns
            for lane in self.lanes[node.id]
            for each in lane
        )


def _gap_ns(lane: list[Reservation], now_ns: int, ready_ns: int, duration_ns: int) -> int:
    """When a lane has the earliest gap of a length, from `ready_ns` on."""
    free_ns = now_ns
    is_short = len(lane) <= _EXAMINED_MAX
    for each in lane:
        if each.is_running:
            free_ns = max(free_ns, each.end_ns)
            continue
        start_ns = max(free_ns, each.start_ns)  # later than promised, if the lane is behind
        if is_short and max(free_ns, ready_ns) + duration_ns <= start_ns:
            break
        free_ns = start_ns + each.duration_ns
    return max(free_ns, ready_ns)


@final
class RecentRatios:
    """By variant: the largest recent ratio of measured to profiled time, of the last few batches.

    Clockwork (OSDI 2020) predicts by the largest of the last ten. What is older than ten seconds is
    forgotten, or a function that one slow batch made infeasible would never be tried again.
    """

    def __init__(self, app: App, window: int) -> None:
        self._ratios: list[deque[tuple[int, float]]] = [
            deque(maxlen=max(1, window)) for _ in app.variants
        ]
        self._is_used = window > 0

    def observe(self, now_ns: int, batch: Batch, took_ns: int, *, slots: int) -> None:
        """A batch has ended that ran, without a load, beside at most so many others."""
        if self._is_used and batch.state == BATCH_FINISHED:
            expected_ns = duration_ns(batch.variant, batch.items, slots, batch.pool.network_ns)
            ratio = took_ns / max(1, expected_ns)
            self._ratios[batch.variant.id].append((now_ns, ratio))

    def factor(self, now_ns: int, variant: Variant) -> float:
        """The factor on profiled times; 1 if nothing recent is known."""
        ratios = self._ratios[variant.id]
        while ratios and ratios[0][0] < now_ns - _FORGET_NS:
            ratios.popleft()
        return max([ratio for _, ratio in ratios], default=1.0)


def duration_ns(variant: Variant, items: int, slots: int, network_ns: int) -> int:
    """How long a batch holds its slot, by the profile, on a node whose slots are all taken."""
    exec_ns = variant.exec_ns(items) * variant.profile.slowdown_at(slots)
    return int(exec_ns) + 2 * network_ns
