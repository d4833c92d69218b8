"""The fluid bound against worlds computed by hand; the simplex method against another solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headgate.config import from_spec
from headgate.core.clock import SECOND_NS
from headgate.core.model import App
from headgate.core.rng import stream
from headgate.lab.regret.fluid import Demand, FluidModel, item_value, maximise
from headgate.lab.regret.worlds import draw_world
from headgate.planning.frontier.candidates import visits


def app_of(functions: dict[str, Any], pools: dict[str, Any], **sections: Any) -> App:
    return from_spec({"functions": functions, "pools": pools, **sections}, "a test").app


def per_second(app: App, pipeline: int = 0) -> float:
    """Requests per second that the whole fleet serves of one pipeline."""
    return FluidModel(app, SECOND_NS).capacity([Demand(app.pipelines[pipeline], 1.0)])


@pytest.mark.parametrize("seed", range(60))
def test_the_simplex_method_agrees_with_another_solver(seed: int) -> None:
    """Random programmes, half of their limits 0 so that many corners coincide."""
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(seed)
    count, width = rng.integers(2, 9), rng.integers(2, 9)
    rows = rng.integers(-3, 5, (count, width)).astype(float)
    limits = rng.integers(0, 2, count) * rng.integers(1, 9, count).astype(float)
    rows = np.vstack((rows, np.ones(width)))  # bounded, so that there is a largest value
    limits = np.append(limits, 10.0)
    gain = rng.integers(-2, 6, width).astype(float)
    value, x = maximise(gain, rows, limits)
    expected = optimize.linprog(-gain, A_ub=rows, b_ub=limits)
    assert value == pytest.approx(-expected.fun, abs=1e-7)
    assert (x >= 0).all()
    assert (rows @ x <= limits + 1e-7).all()
    assert gain @ x == pytest.approx(value, abs=1e-7)


def test_a_programme_without_a_largest_value_is_refused() -> None:
    with pytest.raises(ValueError, match="no largest"):
        maximise(np.array([1.0]), np.array([[-1.0]]), np.array([1.0]))


def test_full_batches_on_every_node() -> None:
    """Two nodes, batches of 4 in 20 ms: 400 items per second."""
    app = app_of({"f": {"exec_time": {1: "8ms", 4: "20ms"}}}, {"gpu": {"nodes": 2}})
    assert per_second(app) == pytest.approx(400)


def test_every_stage_is_served_as_often_as_its_pipeline() -> None:
    """A diamond of 20 ms stages on two nodes: 80 ms of work, so 25 per second."""
    stages = {
        "a": {"function": "f"},
        "b": {"function": "f", "after": ["a"]},
        "c": {"function": "f", "after": ["a"]},
        "d": {"function": "f", "after": ["b", "c"]},
    }
    app = app_of(
        {"f": {"exec_time": "20ms"}}, {"gpu": {"nodes": 2}}, pipelines={"p": {"stages": stages}}
    )
    assert per_second(app) == pytest.approx(25)


def test_a_cascade_counts_by_its_probability() -> None:
    """10 ms, and 40 ms for a quarter of the requests: 20 ms each on average."""
    stages = {
        "small": {"function": "small"},
        "large": {
            "function": "large",
            "after": ["small"],
            "only_if_unsure": True,
            "unsure_probability": "25%",
        },
    }
    functions = {"small": {"exec_time": "10ms"}, "large": {"exec_time": "40ms"}}
    app = app_of(functions, {"gpu": {}}, pipelines={"p": {"stages": stages}})
    assert visits(app.pipelines[0]) == [1.0, 0.25]
    assert per_second(app) == pytest.approx(50)


def test_builds_of_different_speed_add_up() -> None:
    """10 ms on one GPU and 1 s on nine CPUs: 100 and 9 per second."""
    variants = {
        "fast": {"pools": ["gpu"], "exec_time": "10ms"},
        "slow": {"pools": ["cpu"], "exec_time": "1s"},
    }
    pools = {"gpu": {"nodes": 1}, "cpu": {"nodes": 9}}
    assert per_second(app_of({"f": {"variants": variants}}, pools)) == pytest.approx(109)


def test_a_batch_holds_its_slot_while_it_is_on_the_network() -> None:
    """20 ms of execution and 40 ms each way: 100 ms per batch, four nodes, 40 per second."""
    app = app_of({"f": {"exec_time": "20ms"}}, {"gpu": {"nodes": 4, "network_delay": "40ms"}})
    assert per_second(app) == pytest.approx(40)


@pytest.mark.parametrize(
    ("slowdown", "expected"),
    [
        ([1, 1, 1, 1], 400),  # no interference: four at once
        ([1, 2, 3, 4], 100),  # a node that is shared is no faster
        ([1, 1.5, 3, 6], 100 * 2 / 1.5),  # two at once are best
    ],
)
def test_a_node_is_shared_at_its_best_concurrency(slowdown: list[float], expected: float) -> None:
    function = {"exec_time": "10ms", "slowdown": slowdown, "concurrency": 4}
    assert per_second(app_of({"f": function}, {"gpu": {"slots": 4}})) == pytest.approx(expected)


@pytest.mark.parametrize(("memory", "expected"), [("1GB", 100), ("2GB", 200), ("9GB", 400)])
def test_the_instances_of_a_node_run_only_so_many_batches(memory: str, expected: float) -> None:
    """Four slots, and instances of 1 GB that run one batch at a time."""
    functions = {name: {"exec_time": "10ms", "memory": "1GB"} for name in ("f", "g")}
    app = app_of(functions, {"gpu": {"slots": 4, "memory": memory}})
    assert per_second(app) == pytest.approx(expected)
    both = [Demand(pipeline, 1.0) for pipeline in app.pipelines]
    assert FluidModel(app, SECOND_NS).capacity(both) == pytest.approx(min(200, expected))


SHAPES: dict[str, Any] = {
    "cpus": 1,
    "gpu_share": "1/7",
    "exec_time": "30ms",
    "concurrency": 16,
    "shapes": [{"cpus": 4, "gpu_share": "4/7", "exec_time": "10ms"}],
}


def shared(**pool: Any) -> App:
    return app_of({"f": SHAPES}, {"gpu": {"slots": 16, "cpus": 32, "gpu_share": "7/7", **pool}})


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ({}, 7 / 0.030),  # seven of 1/7: the large shape would take 4/7 of 10 ms
        ({"cpus": 4}, 4 / 0.030),  # four of one CPU; a large one takes all four
        ({"slots": 2}, 1 / 3 / 0.030 + 5 / 3 / 0.010),  # a mix is best
        ({"network_delay": "15ms"}, 7 / 0.060),  # compute is held on the network too
        ({"compute": "resident"}, 16 / 0.010),  # one instance runs 16 batches in its share
    ],
)
def test_shapes_share_the_compute_of_a_node(pool: dict[str, Any], expected: float) -> None:
    """With two slots: of x small and y large ones, x + 4 y <= 7 and x + y <= 2."""
    assert per_second(shared(**pool)) == pytest.approx(expected, rel=1e-3)


def test_cpus_and_gpus_are_two_limits() -> None:
    """One function needs CPUs and the other the GPU: neither takes anything from the other."""
    functions = {
        "f": {"exec_time": "10ms", "cpus": 4, "concurrency": 8},
        "g": {"exec_time": "10ms", "gpu_share": "7/7", "concurrency": 8},
    }
    app = app_of(functions, {"gpu": {"slots": 8, "cpus": 4, "gpu_share": "7/7"}})
    both = [Demand(pipeline, 1.0) for pipeline in app.pipelines]
    assert FluidModel(app, SECOND_NS).capacity(both) == pytest.approx(100)


def test_a_bound_that_minds_deadlines_leaves_out_slow_shapes() -> None:
    """Within 20 ms only the large shape ends: 7/4 of them; with scattered times the small one."""
    app = app_of(
        {"f": SHAPES},
        {"gpu": {"slots": 16, "cpus": 32, "gpu_share": "7/7"}},
        slo={"latency": "20ms"},
    )
    model, classes = FluidModel(app, SECOND_NS), [Demand(app.pipelines[0], 1_000.0)]
    assert model.best(classes, [1.0], minds_deadlines=True) == pytest.approx(7 / 4 / 0.010)
    scattered = model.best(classes, [1.0], minds_deadlines=True, shortest=0.65)
    assert scattered == pytest.approx(model.best(classes, [1.0])) == pytest.approx(7 / 0.030)


def test_a_cascade_that_may_be_skipped_takes_no_time_from_other_stages() -> None:
    """The first stage has the whole 50 ms, because the second one may not run."""
    stages = {
        "a": {"function": "f"},
        "b": {
            "function": "g",
            "after": ["a"],
            "only_if_unsure": True,
            "unsure_probability": "50%",
        },
    }
    functions = {"f": {"exec_time": {1: "10ms", 2: "20ms", 4: "40ms"}}, "g": {"exec_time": "15ms"}}
    app = app_of(
        functions, {"gpu": {}}, pipelines={"p": {"stages": stages, "slo": {"latency": "50ms"}}}
    )
    model, classes = FluidModel(app, SECOND_NS), [Demand(app.pipelines[0], 1_000.0)]
    assert model.best(classes, [1.0], minds_deadlines=True) == pytest.approx(
        model.best(classes, [1.0])
    )


def test_the_value_of_a_shape_is_what_it_holds() -> None:
    """A seventh of a node of $7/h for 36 ms, and of a GPU of $14/h: 3e-5 dollars."""
    function = {"exec_time": "36ms", "gpu_share": "1/7"}
    pools = {"gpu": {"slots": 16, "gpu_share": "7/7", "price": "$7/h", "gpu_price": "$14/h"}}
    app = app_of({"f": function}, pools)
    assert item_value(app, app.pipelines[0]) == pytest.approx(3e-5)


def test_faas_is_limited_by_its_concurrency() -> None:
    pools = {"faas": {"tier": "serverless", "memory": "1GB", "concurrency": 5}}
    function = {"exec_time": "100ms", "memory": "1GB"}
    assert per_second(app_of({"f": function}, pools)) == pytest.approx(50)


def test_the_true_times_bound_and_not_the_profiled_ones() -> None:
    app = app_of({"f": {"exec_time": "10ms"}}, {"gpu": {}})
    model = FluidModel(app, SECOND_NS, scale=(2.0,))
    assert model.capacity([Demand(app.pipelines[0], 1.0)]) == pytest.approx(50)


def test_the_best_value_under_overload() -> None:
    """One node for a second; f is worth 3 per 10 ms and g 1: all of f, then what fits of g."""
    functions = {"f": {"exec_time": "10ms"}, "g": {"exec_time": "10ms"}}
    app = app_of(functions, {"gpu": {}})
    classes = [Demand(app.pipelines[0], 60.0), Demand(app.pipelines[1], 80.0)]
    best = FluidModel(app, SECOND_NS).best(classes, [3.0, 1.0])
    assert best == pytest.approx(60 * 3 + 40 * 1)


def test_no_more_is_served_than_is_offered() -> None:
    app = app_of({"f": {"exec_time": "10ms"}}, {"gpu": {}})
    model = FluidModel(app, SECOND_NS)
    assert model.best([Demand(app.pipelines[0], 30.0)], [2.0]) == pytest.approx(60)
    assert model.best([Demand(app.pipelines[0], 0.0)], [2.0]) == 0.0


def test_a_bound_that_minds_deadlines() -> None:
    """Within 21 ms there are batches of 3, but neither those of 4 nor the slow build."""
    variants = {
        "fast": {"pools": ["gpu"], "exec_time": {1: "10ms", 2: "20ms", 4: "22ms"}},
        "slow": {"pools": ["cpu"], "exec_time": "30ms"},
    }
    pools: dict[str, Any] = {"gpu": {}, "cpu": {}}
    app = app_of({"f": {"variants": variants}}, pools, slo={"latency": "21ms"})
    model, classes = FluidModel(app, SECOND_NS), [Demand(app.pipelines[0], 1_000.0)]
    assert model.best(classes, [1.0]) == pytest.approx(4 / 0.022 + 1 / 0.030)
    assert model.best(classes, [1.0], minds_deadlines=True) == pytest.approx(3 / 0.021)


def test_max_min_shares_of_equal_classes() -> None:
    """100 per second for three classes: one offers less than its third and the others share it."""
    app = app_of({"f": {"exec_time": "10ms"}}, {"gpu": {}})
    classes = [Demand(app.pipelines[0], items) for items in (20.0, 500.0, 70.0)]
    shares = FluidModel(app, SECOND_NS).max_min_shares(classes, [1.0] * 3, [1.0] * 3)
    assert shares == pytest.approx([20, 40, 40], rel=1e-3)
    weighted = FluidModel(app, SECOND_NS).max_min_shares(classes, [1.0] * 3, [1.0, 3.0, 1.0])
    assert weighted == pytest.approx([20, 60, 20], rel=1e-3)


def test_a_class_with_a_bottleneck_of_its_own_leaves_the_rest_to_others() -> None:
    """G has a pool of 10 per second to itself; f is not held back by it."""
    functions = {
        "f": {"exec_time": "10ms", "pools": ["one"]},
        "g": {"exec_time": "100ms", "pools": ["two"]},
    }
    app = app_of(functions, {"one": {}, "two": {}})
    classes = [Demand(pipeline, 1_000.0) for pipeline in app.pipelines]
    shares = FluidModel(app, SECOND_NS).max_min_shares(classes, [1.0, 1.0], [1.0, 1.0])
    assert shares == pytest.approx([100, 10], rel=1e-3)


def test_the_value_of_a_request_is_its_cost_at_the_cheapest_build() -> None:
    """36 ms on a node of $1/h cost 1e-5 dollars; 100 ms on one of $0.1/h cost less."""
    variants = {
        "fast": {"pools": ["gpu"], "exec_time": {1: "36ms", 2: "40ms"}},
        "slow": {"pools": ["cpu"], "exec_time": "100ms"},
    }
    pools = {"gpu": {"price": "$1/h"}, "cpu": {"price": "$0.1/h"}}
    app = app_of({"f": {"variants": variants}}, pools)
    assert item_value(app, app.pipelines[0]) == pytest.approx(0.1 * 0.1 / 3600)
    unpriced = app_of({"f": {"variants": variants}}, {"gpu": {}, "cpu": {}})
    assert item_value(unpriced, unpriced.pipelines[0]) == pytest.approx(0.02)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_of_drawn_worlds_are_consistent(seed: int) -> None:
    """Shares that are fair can be served, so they are worth no more than the best."""
    world = draw_world(stream(seed, "bounds").randrange(10_000)).load()
    app = world.app
    classes = [Demand(pipeline, 1_000.0) for pipeline in app.pipelines]
    values = [item_value(app, pipeline) for pipeline in app.pipelines]
    model = FluidModel(app, world.window_ns, world.truth.scale)
    best = model.best(classes, values)
    shares = model.max_min_shares(classes, values, [1.0] * len(classes))
    assert sum(shares) <= best * (1 + 1e-6)
    assert model.capacity(classes) * best > 0
    mean = min(1.0, model.capacity(classes)) * sum(1_000.0 * value for value in values)
    assert mean <= best * (1 + 1e-6)
