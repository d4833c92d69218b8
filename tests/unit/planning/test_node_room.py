"""What a node holds: resident instances of several functions, and how many of each."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.config import from_spec
from headgate.core.model import App
from headgate.planning.pools.node_room import is_scarce, replicas_of, resident_holdings, room_of


def app_of(functions: dict[str, Any], **pool: Any) -> App:
    pools = {"gpu": {"slots": 8, "cpus": 8, "gpu_share": "7/7", "compute": "resident", **pool}}
    return from_spec(
        {"functions": functions, "pools": pools, "slo": {"latency": "1s"}}, "a test"
    ).app


SMALL_OR_LARGE = {
    "cpus": 1,
    "gpu_share": "1/7",
    "exec_time": "100ms",
    "shapes": [{"cpus": 1, "gpu_share": "5/7", "exec_time": "40ms"}],
}


def held(app: App) -> list[tuple[int, int]]:
    """Shape and number of instances of each function."""
    holdings = resident_holdings(app, app.pools[0])
    return [(each.shape_id, each.replicas) for each in holdings.values()]


def test_the_slower_function_gets_what_is_left() -> None:
    """One instance of g does 100 per second, so f grows to 6/7: six small ones do 60."""
    g = {"cpus": 1, "gpu_share": "1/7", "exec_time": "10ms"}
    assert held(app_of({"f": SMALL_OR_LARGE, "g": g})) == [(0, 6), (0, 1)]


def test_the_larger_shape_where_slots_are_few() -> None:
    """With two slots, one large instance and a small one of g."""
    g = {"cpus": 1, "gpu_share": "1/7", "exec_time": "10ms"}
    assert held(app_of({"f": SMALL_OR_LARGE, "g": g}, slots=2))[0] == (1, 1)


def test_no_plan_where_not_all_fit_or_compute_is_not_resident() -> None:
    large = {"cpus": 1, "gpu_share": "4/7", "exec_time": "10ms"}
    assert held(app_of({"f": large, "g": large})) == []
    assert held(app_of({"f": SMALL_OR_LARGE}, compute="per_batch")) == []


def test_nothing_is_divided_where_starts_take_no_time_and_slots_are_few() -> None:
    functions = dict.fromkeys(("f", "g", "h"), SMALL_OR_LARGE)
    assert held(app_of(functions, slots=2)) == []
    slow = {name: {**f, "cold_start": "1s"} for name, f in functions.items()}
    assert len(held(app_of(slow, slots=2))) == 3


@pytest.mark.parametrize(("compute", "expected"), [("resident", 4 / 7), ("per_batch", 0.0)])
def test_the_room_of_an_instance(compute: str, expected: float) -> None:
    large = {"cpus": 1, "gpu_share": "4/7", "exec_time": "10ms"}
    app = app_of({"f": large, "g": large}, compute=compute)
    (pool,), (variant, other) = app.pools, app.variants
    assert room_of(pool, variant, 0) == pytest.approx(expected)
    assert is_scarce(pool, [(variant, 0), (other, 0)]) == (compute == "resident")


def test_as_many_instances_as_compute_and_room_allow() -> None:
    app = app_of({"f": SMALL_OR_LARGE}, compute="per_batch")
    (pool,), (variant,) = app.pools, app.variants
    assert replicas_of(pool, variant, 8, 0.0, 1.0) == 7  # sevenths
    assert replicas_of(pool, variant, 4, 0.0, 1.0) == 4  # lanes
    assert replicas_of(pool, variant, 8, 0.25, 0.5) == 3  # memory
    assert replicas_of(pool, variant, 8, 0.25, -0.5) == 1
