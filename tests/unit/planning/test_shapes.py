"""Shapes and sizes of batches: the cheapest in time, with the rest of the pipeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import final

import pytest
from planning_rig import MS, PlanningRig, make_app

from headgate.core.model import App, Pool, Profile, Shape, ShapeTimes
from headgate.core.records import Node, Task
from headgate.planning.constants import MARGIN_UNIT, SENT_MARGIN, Z_START
from headgate.planning.dispatch.shapes import ShapeChooser
from headgate.planning.frontier.candidates import planned_shapes, priced, stage_candidates
from headgate.planning.pools.build import Build

# One seventh of a GPU: 40 ms for one item, 10 ms more for each other one. Five: a quarter of that.
SMALL, LARGE = Shape(1_000, 1), Shape(1_000, 5)
SLOW = tuple(int((30 + 10 * items) * MS) for items in range(1, 9))
FAST = tuple(time // 4 for time in SLOW)
POOL = Pool(
    0, "gpu", nodes=2, slots=7, cpu_milli=16_000, gpu_sevenths=7, gpu_usd_per_hour=7.0
)  # fmt: skip
CHAIN = [(0, ()), (1, (0,))]


def shaped(app: App, pool: Pool = POOL) -> App:
    """The application with both shapes for every function, and several batches per instance."""
    for function in app.functions:
        (variant,) = function.variants
        object.__setattr__(
            function,
            "variants",
            (
                replace(
                    variant,
                    shape=SMALL,
                    concurrency=7,
                    more_shapes=(ShapeTimes(LARGE, FAST),),
                ),
            ),
        )
    return App(app.functions, app.pipelines, (pool,))


@final
class ShapesRig:
    """A chain of two functions, or one alone, whose batches run in two shapes."""

    def __init__(self, *, latency_ms: float, stages: int = 2, pool: Pool = POOL) -> None:
        profiles = [Profile(SLOW)] * stages
        pipelines = [CHAIN] if stages == 2 else None
        made = make_app(profiles, pool, latency_ms=latency_ms, pipelines=pipelines)
        self.rig = PlanningRig(shaped(made, pool))
        self.shapes = ShapeChooser(self.rig.view, self.rig.builds, self.rig.admission.budgets)
        self.latency_ms = latency_ms

    @property
    def build(self) -> Build:
        return self.rig.build(0)

    def ask(self, stage: int = 0) -> Task:
        return self.rig.ask(due_ms=self.latency_ms).tasks[stage]

    def choose(self, left_ms: float, waiting: int = 1) -> tuple[int, int] | None:
        choice = self.shapes.choose(self.build, self.ask(), waiting, left_ms * MS, 0.0)
        return None if choice is None else (choice.shape_id, choice.items)


def test_plans_reckon_with_the_cheapest_shape_within_the_objective() -> None:
    for latency_ms, shape_id in ((2_000, 0), (30, 1)):
        app = shaped(make_app([Profile(SLOW)] * 2, POOL, latency_ms=latency_ms, pipelines=[CHAIN]))
        assert set(planned_shapes(app).values()) == {shape_id}
    assert planned_shapes(make_app([Profile(SLOW)], POOL)) == {}


@pytest.mark.parametrize(
    ("left_ms", "choice"),
    [
        (81, (0, 1)),  # both stages in the small shape
        (51, (0, 1)),  # this one small, the next one large
        (49, (1, 1)),
        (19, None),
    ],
)
def test_a_stage_takes_the_cheapest_shape_with_which_the_rest_is_in_time(
    left_ms: float, choice: tuple[int, int] | None
) -> None:
    assert ShapesRig(latency_ms=200).choose(left_ms) == choice


def test_a_stage_keeps_a_margin_for_what_has_not_run_yet() -> None:
    """Both stages take as long as each other; how long they have waited makes no difference."""
    rig = ShapesRig(latency_ms=200)
    tasks = rig.rig.ask(due_ms=200).tasks
    for now_ms in (0, 150):
        rig.rig.view.now_ns = now_ms * MS
        for task, part in zip(tasks, (1.0, 0.5), strict=True):
            margin_ms = 200 - now_ms - rig.rig.admission.left_ns(task) / MS
            assert margin_ms == pytest.approx(part * 200 * SENT_MARGIN * Z_START * MARGIN_UNIT)


def test_a_batch_is_as_large_as_is_cheapest_in_the_time_left() -> None:
    rig = ShapesRig(latency_ms=1_000, stages=1)
    assert rig.choose(1_000, waiting=8) == (0, 8)
    assert rig.choose(60, waiting=8) == (1, 8)  # an eighth of five sevenths for 27 ms
    assert rig.choose(20, waiting=8) == (1, 4)


def test_only_what_a_node_has_room_for() -> None:
    rig = ShapesRig(latency_ms=1_000, stages=1)
    node = next(iter(rig.rig.view.nodes.values()))
    task = rig.ask()
    assert rig.shapes.choose(rig.build, task, 1, 30 * MS, 0.0, node) is not None
    node.gpu_sevenths_used = 3
    assert rig.shapes.choose(rig.build, task, 1, 30 * MS, 0.0, node) is None
    assert rig.shapes.fastest(rig.build, task, node) == 0
    node.gpu_sevenths_used = 7
    assert rig.shapes.fastest(rig.build, task, node) is None


def hold_ms(rig: ShapesRig, *, every_ms: float, left_ms: float, waiting: int = 1) -> float:
    """How long a batch waits for more, after many tasks have come at an interval."""
    for number in range(1_000):
        rig.rig.now_ns = int(number * every_ms * MS)
        rig.rig.view.now_ns = rig.rig.now_ns
        rig.shapes.observe(rig.build, 1)
    task, now_ns = rig.ask(), rig.rig.view.now_ns
    choice = rig.shapes.choose(rig.build, task, waiting, left_ms * MS, 0.0)
    assert choice is not None
    at_ns = rig.shapes.hold_until_ns(rig.build, task, waiting, left_ms * MS, 0.0, choice.cost)
    return max(0.0, (at_ns - now_ns) / MS)


def test_a_batch_waits_for_the_next_task_while_that_makes_it_cheaper() -> None:
    assert hold_ms(ShapesRig(latency_ms=1e6), every_ms=5, left_ms=200) == pytest.approx(5, rel=0.2)
    assert hold_ms(ShapesRig(latency_ms=1e6), every_ms=5, left_ms=21) == 0  # no time for it
    assert hold_ms(ShapesRig(latency_ms=1e6), every_ms=500, left_ms=200) == 0  # it comes too late
    assert hold_ms(ShapesRig(latency_ms=1e6), every_ms=5, left_ms=900, waiting=8) == 0  # it is full


def test_a_batch_waits_for_nothing_where_idle_compute_is_paid_for() -> None:
    by_node = replace(POOL, gpu_usd_per_hour=0.0, usd_per_hour=7.0)
    assert hold_ms(ShapesRig(latency_ms=1e6, pool=by_node), every_ms=5, left_ms=200) == 0


def test_a_task_joins_a_batch_where_that_costs_it_less_than_to_run_alone() -> None:
    rig = ShapesRig(latency_ms=1_000)
    choice = rig.shapes.choose(rig.build, rig.ask(), 4, 1_000 * MS, 0.0)
    assert choice is not None and choice.items == 4
    assert rig.shapes.gains(rig.build, rig.ask(), 1_000 * MS, 0.0, choice)
    # The batch takes 70 ms: with 75 the next stage has no time left.
    assert not rig.shapes.gains(rig.build, rig.ask(), 75 * MS, 0.0, choice)


def test_a_batch_that_came_out_smaller_is_no_slower() -> None:
    rig = ShapesRig(latency_ms=1_000, stages=1)
    choice = rig.shapes.choose(rig.build, rig.ask(), 8, 60 * MS, 0.0)
    assert choice is not None and choice.shape_id == 1
    # Two items take 50 ms in the small shape, and the eight would have taken 27.
    assert rig.shapes.refine(rig.build, rig.ask(), 2, 60 * MS, 0.0, None, choice) == 1


def test_what_follows_is_stretched_by_what_was_observed() -> None:
    rig = ShapesRig(latency_ms=200)
    assert rig.choose(51) == (0, 1)
    for _ in range(50):
        rig.rig.build(1).observe(1, 2 * SLOW[0])
    assert rig.choose(51) == (1, 1)  # the next stage takes twice as long


def test_a_plan_takes_the_size_and_shape_of_least_work_that_fit_a_window() -> None:
    build = ShapesRig(latency_ms=1_000, stages=1).build
    for _ in range(400):
        build.learn_mix(1, 1)  # the GPU is what limits
    assert build.plan_within(1, 1_000 * MS, 0.0) == (2, 0)  # batches may grow to two
    assert build.plan_within(1, 45 * MS, 0.0) == (2, 1)  # 31 ms of a seventh an item, alone 40
    assert build.plan_within(1, 11 * MS, 0.0) == (1, 1)
    assert build.plan_within(1, 5 * MS, 0.0) is None


def test_work_is_counted_in_the_compute_that_is_scarce() -> None:
    """A batch in the large shape takes 1 of 16 CPUs and 5 of 7 parts of the GPU."""
    build = ShapesRig(latency_ms=1_000, stages=1).build
    assert build.weight_of(1) < 5.0
    for _ in range(400):
        build.learn_mix(1, 1)
    assert build.weight_of(1) == pytest.approx(5.0)
    assert build.weight_of(0) == pytest.approx(1.0)


RANDOM_SHAPES = (Shape(1_000, 1), Shape(4_000, 1), Shape(1_000, 4), Shape(8_000, 7))


def random_rig(rng: Random, stages: int) -> PlanningRig:
    """A chain of functions with random times in four shapes, and batches of up to four items."""
    pool = replace(POOL, cpu_usd_per_hour=0.5, bytes_per_s=0.0)
    chain = [(index, tuple(range(max(0, index - 1), index))) for index in range(stages)]
    app = make_app([Profile(SLOW[:4])] * stages, pool, latency_ms=1e6, pipelines=[chain])
    for function in app.functions:
        tables = []
        for shape in RANDOM_SHAPES:
            step = rng.randint(1, 5)
            first = rng.randint(1, 60)
            tables.append(ShapeTimes(shape, tuple(int((first + step * i) * MS) for i in range(4))))
        variant = replace(
            function.variants[0],
            profile=Profile(tables[0].exec_ns),
            shape=tables[0].shape,
            concurrency=7,
            more_shapes=tuple(tables[1:]),
        )
        object.__setattr__(function, "variants", (variant,))
    return PlanningRig(App(app.functions, app.pipelines, (pool,)))


def by_brute_force(
    rig: PlanningRig, stage: int, items: int, left_ns: int, room: Shape, ratios: list[float]
) -> int | None:
    """The least cost of a batch and all behind it, of all combinations that are in time."""
    app = priced(rig.view.app)
    size = 1 << (items - 1).bit_length()  # what follows is in batches of up to so many
    lists = []
    for number, function in enumerate(app.functions[stage:]):
        candidates = [c for c in stage_candidates(app, function) if c.batch <= size]
        if number == 0:
            candidates = [
                c
                for c in candidates
                if c.batch == items
                and c.cpu_milli <= room.cpu_milli
                and c.gpu_sevenths <= room.gpu_sevenths
            ]
        ratio = ratios[stage + number]
        lists.append([(round(c.time_ns * ratio), round(c.cost * ratio)) for c in candidates])
    costs = [
        sum(cost for _, cost in chosen)
        for chosen in product(*lists)
        if sum(time_ns for time_ns, _ in chosen) <= left_ns
    ]
    return min(costs, default=None)


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_is_the_cheapest_of_all_combinations_that_are_in_time(seed: int) -> None:
    rng, answers = Random(seed), 0
    rig = random_rig(rng, 3)
    shapes = ShapeChooser(rig.view, rig.builds, rig.admission.budgets)
    ratios = [1.0, 1.0, 1.0]
    node = Node(0, "n", POOL, ())
    for number in range(120):
        if number == 60:  # one function is found to take twice as long, another half as long
            ratios = [1.0, 2.0, 0.5]
            for index, ratio in enumerate(ratios):
                rig.build(index).ratio = ratio
                shapes.on_observed(rig.build(index))
        stage, items = rng.randrange(3), rng.randint(1, 4)
        room = Shape(1_000 * rng.choice((1, 4, 8, 16)), rng.choice((1, 3, 5, 7)))
        node.cpu_milli_used = POOL.cpu_milli - room.cpu_milli
        node.gpu_sevenths_used = POOL.gpu_sevenths - room.gpu_sevenths
        left_ns = rng.randint(1, 250 * MS)
        task = rig.ask(items=items, due_ms=1e6).tasks[stage]
        found = shapes.choose(rig.build(stage), task, items, left_ns, 0.0, node)
        least = by_brute_force(rig, stage, items, left_ns, room, ratios)
        assert (None if found is None else found.cost) == least
        answers += found is not None
    assert 20 < answers < 115


def test_only_what_has_drifted_far_is_built_anew() -> None:
    """What follows takes twice as long: the first stage has to be faster for it."""
    rig = ShapesRig(latency_ms=200)
    assert rig.choose(81) == (0, 1)
    second = rig.rig.build(1)
    second.ratio = 1.05  # within the spread: what follows is stretched
    rig.shapes.on_observed(second)
    assert rig.choose(83) == (0, 1)
    second.ratio = 2.0
    rig.shapes.on_observed(second)
    assert [rig.choose(left_ms) for left_ms in (121, 61, 59)] == [(0, 1), (0, 1), (1, 1)]
