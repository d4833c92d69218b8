"""Nodes of an elastic pool: rented, and paid for, only while they hold an instance.

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
Step = tuple[int, str]  # (time in ms, "start" or "stop")


def rental_policy(*steps: Step) -> PolicyKind:
    """Return a policy that starts and stops an instance at these times, on the first node."""

    class RentalPolicy(Policy):
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

    return PolicyKind(RentalPolicy)


def serve(
    times_ms: tuple[int, ...], *steps: Step, pool: Pool = ELASTIC, faults: tuple[Fault, ...] = ()
) -> tuple[list[float], float, RunColumns]:
    """Return the time of each request, the paid time of the first node in ms, and the columns."""
    app = make_app(start_ms=5, pools=(pool,))
    columns, _ = run(app, at_ms(*times_ms), *faults, policy=rental_policy(*steps))
    return waits_ms(columns), columns.resources[0].up_ns / MS, columns


def test_a_node_rented_later_boots_before_its_first_start() -> None:
    waits, _, _ = serve((20,))
    assert waits == [100 + 5 + 10]


def test_a_node_rented_at_time_zero_skips_boot() -> None:
    """A run begins with a warm fleet."""
    waits, _, _ = serve((1,), (0, "start"))
    assert waits == [10.0]


def test_a_node_rented_at_time_zero_skips_boot_despite_network_delay() -> None:
    """The network takes 3 ms; a request sent right after the start finds the node ready."""
    waits, _, _ = serve((0, 50), (0, "start"), pool=replace(ELASTIC, network_ns=3 * MS))
    assert waits == [16.0, 16.0]


def test_a_node_rented_after_time_zero_boots_despite_network_delay() -> None:
    waits, _, _ = serve((1,), pool=replace(ELASTIC, network_ns=3 * MS))
    assert waits == [3 + 100 + 5 + 10 + 3]


def test_a_node_that_is_rented_again_boots_again() -> None:
    waits, _, columns = serve((1, 200), (0, "start"), (50, "stop"))
    assert waits == [10.0, 115.0]
    assert columns.resources[0].cold_starts == 2


def test_a_node_whose_instance_is_replaced_at_once_does_not_boot_again() -> None:
    """As `View.start_ns` has it, by which policies promise: the node is never given back."""
    waits, paid_ms, columns = serve((1, 51), (0, "start"), (50, "stop"), (50, "start"))
    assert waits == [10.0, 4 + 10]
    assert columns.resources[0].cold_starts == 2
    assert paid_ms == columns.end_ns / MS


def test_a_node_is_paid_for_only_while_it_is_rented() -> None:
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


def test_a_node_that_is_never_rented_costs_nothing() -> None:
    _, _, columns = serve((20,), pool=replace(ELASTIC, nodes=2))
    first, second = columns.resources
    assert first.up_ns == columns.end_ns - 20 * MS
    assert (second.up_ns, second.allocation_usd) == (0, 0.0)


def test_a_node_that_is_not_elastic_is_paid_for_throughout() -> None:
    _, paid_ms, columns = serve((20,), pool=replace(ELASTIC, is_elastic=False))
    assert paid_ms == columns.end_ns / MS


def test_a_node_stopped_during_boot_is_paid_until_it_is_released() -> None:
    """A boot that has begun is completed: a start in progress is not interrupted."""
    _, paid_ms, _ = serve((1_000,), (20, "start"), (50, "stop"))
    _, later_ms, _ = serve((1_000,))
    assert 30 <= paid_ms - later_ms <= 105


def test_a_draining_node_is_paid_until_its_work_ends() -> None:
    _, paid_ms, _ = serve((100, 1_000), (0, "start"), (105, "stop"))
    _, later_ms, _ = serve((1_000,))
    assert paid_ms - later_ms == 110


def test_a_crash_ends_the_rental() -> None:
    """The node crashes at 30, rejoins at 60, and is rented again at 200."""
    crash = Fault("crash", 30 * MS, until_ns=60 * MS, node=0)
    _, paid_ms, columns = serve((1, 200), (0, "start"), faults=(crash,))
    assert paid_ms == 30 + (columns.end_ns / MS - 200)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=30))
def test_paid_time_is_the_time_between_renting_and_releasing(steps: list[tuple[int, bool]]) -> None:
    """Also if it is rented twice, or released twice."""
    rental, now_ns, paid_ns, is_rented = NodeRental(ELASTIC), 0, 0, False
    for length_ns, is_begin in steps:
        now_ns += length_ns
        paid_ns += length_ns if is_rented else 0
        (rental.begin if is_begin else rental.end)(now_ns)
        is_rented = is_begin
        assert rental.paid_ns(now_ns) == paid_ns


def test_a_start_during_boot_waits_for_the_rest_of_the_boot() -> None:
    rental = NodeRental(ELASTIC)
    rental.begin(10 * MS)
    rental.begin(60 * MS)  # a second function
    assert rental.ready_after_ns(60 * MS, 5 * MS) == 55 * MS
    assert rental.ready_after_ns(200 * MS, 5 * MS) == 5 * MS
