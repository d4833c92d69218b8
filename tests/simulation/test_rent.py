"""Nodes of an elastic pool: taken, and paid for, only while they hold something.

A request takes 10 ms, a start 5 ms, a boot 100 ms.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.clock import HOUR_NS
from headgate.core.model import Pool, Tier
from headgate.core.policy import Policy, PolicyKind
from headgate.core.records import Node, Task
from headgate.metrics.columns import RunColumns
from headgate.sim.faults import Fault
from headgate.sim.node import NodeRental

from .apps import GPU, MS, at_ms, make_app, run, waits_ms

ELASTIC = replace(GPU, tier=Tier.DEDICATED, is_elastic=True, boot_ns=100 * MS, usd_per_hour=3.6)
Step = tuple[int, str]  # at what time in ms; "start" or "stop"


def renter(*steps: Step) -> PolicyKind:
    """Takes and gives back the first node at these times; sends each task there when it may."""

    class Renter(Policy):
        def on_node_joined(self, node: Node) -> None:
            if node.id == self.view.now_ns == 0:
                for number, (at, _) in enumerate(steps):
                    if at == 0:
                        self.on_timer("step", number)
                    else:
                        self.orders.set_timer("step", at * MS, number)

        def on_timer(self, name: str, number: int) -> None:
            node = self.view.nodes[0]
            if steps[number][1] == "start":
                self.orders.start(self.view.app.variants[0], node)
            else:
                self.orders.stop(next(iter(node.instances.values())))

        def on_task_ready(self, task: Task) -> None:
            self.orders.dispatch([task], self.view.nodes[0])

        def on_capacity(self, node: Node) -> None:
            pass

    return PolicyKind(Renter)


def serve(
    times_ms: tuple[int, ...], *steps: Step, pool: Pool = ELASTIC, faults: tuple[Fault, ...] = ()
) -> tuple[list[float], float, RunColumns]:
    """How long each request took, and for how many ms the first node was paid."""
    app = make_app(start_ms=5, pools=(pool,))
    columns, _ = run(app, at_ms(*times_ms), *faults, policy=renter(*steps))
    return waits_ms(columns), columns.resources[0].up_ns / MS, columns


def test_a_node_that_is_taken_later_boots_before_it_starts() -> None:
    waits, _, _ = serve((20,))
    assert waits == [100 + 5 + 10]


def test_a_node_that_is_taken_at_the_very_beginning_is_there() -> None:
    """A run begins in the middle of things."""
    waits, _, _ = serve((1,), (0, "start"))
    assert waits == [10.0]


def test_also_where_the_order_takes_a_while_to_get_there() -> None:
    """Three ms to the node; a request that follows the order at once finds it ready."""
    waits, _, _ = serve((0, 50), (0, "start"), pool=replace(ELASTIC, network_ns=3 * MS))
    assert waits == [16.0, 16.0]


def test_what_is_ordered_a_moment_later_boots_though_the_way_is_long() -> None:
    waits, _, _ = serve((1,), pool=replace(ELASTIC, network_ns=3 * MS))
    assert waits == [3 + 100 + 5 + 10 + 3]


def test_a_node_that_is_given_back_and_taken_again_boots_again() -> None:
    waits, _, columns = serve((1, 200), (0, "start"), (50, "stop"))
    assert waits == [10.0, 115.0]
    assert columns.resources[0].cold_starts == 2


def test_a_node_is_paid_for_only_while_it_is_held() -> None:
    """From 20 to 400 and from 600 to 750, the boots included."""
    _, paid_ms, columns = serve(
        (150, 1_000),
        (20, "start"),
        (400, "stop"),
        (600, "start"),
        (750, "stop"),
    )
    end_ms = columns.end_ns / MS
    assert paid_ms == 380 + 150 + (end_ms - 1_000)
    rate_per_ms = 3.6 / HOUR_NS * MS
    assert columns.resources[0].allocation_usd == pytest.approx(paid_ms * rate_per_ms)


def test_one_that_is_never_taken_costs_nothing() -> None:
    _, _, columns = serve((20,), pool=replace(ELASTIC, nodes=2))
    first, second = columns.resources
    assert first.up_ns == columns.end_ns - 20 * MS
    assert (second.up_ns, second.allocation_usd) == (0, 0.0)


def test_a_node_that_is_not_elastic_is_paid_for_throughout() -> None:
    _, paid_ms, columns = serve((20,), pool=replace(ELASTIC, is_elastic=False))
    assert paid_ms == columns.end_ns / MS


def test_one_that_is_stopped_while_it_boots_is_paid_until_it_is_gone() -> None:
    """Whoever has begun to boot ends that first: a start under way is not broken off."""
    _, paid_ms, _ = serve((1_000,), (20, "start"), (50, "stop"))
    _, later_ms, _ = serve((1_000,))
    assert 30 <= paid_ms - later_ms <= 105


def test_one_that_ends_its_work_first_is_paid_until_then() -> None:
    _, paid_ms, _ = serve((100, 1_000), (0, "start"), (105, "stop"))
    _, later_ms, _ = serve((1_000,))
    assert paid_ms - later_ms == 110


def test_a_crash_ends_the_rent() -> None:
    """It crashes at 30, returns at 60, and is taken again at 200."""
    crash = Fault("crash", 30 * MS, until_ns=60 * MS, node=0)
    _, paid_ms, columns = serve((1, 200), (0, "start"), faults=(crash,))
    assert paid_ms == 30 + (columns.end_ns / MS - 200)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=30))
def test_the_rent_is_the_time_between_taking_and_giving_back(steps: list[tuple[int, bool]]) -> None:
    """Also where it is taken while it is held, or given back while it is not."""
    rent, now_ns, paid_ns, is_held = NodeRental(ELASTIC), 0, 0, False
    for length_ns, takes in steps:
        now_ns += length_ns
        paid_ns += length_ns if is_held else 0
        (rent.begin if takes else rent.end)(now_ns)
        is_held = takes
        assert rent.paid_ns(now_ns) == paid_ns


def test_what_starts_while_the_node_boots_waits_for_the_rest_of_it() -> None:
    rent = NodeRental(ELASTIC)
    rent.begin(10 * MS)
    rent.begin(60 * MS)  # a second function
    assert rent.ready_after_ns(60 * MS, 5 * MS) == 55 * MS
    assert rent.ready_after_ns(200 * MS, 5 * MS) == 5 * MS
