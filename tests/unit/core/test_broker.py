"""The Broker: which request gets the next node of a shared pool."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.core.backend import Broker


def make_broker(*node_ids: int, waiting_max: int = 1_000) -> Broker:
    broker = Broker(waiting_max)
    for node_id in node_ids:
        broker.node_joined(node_id)
    return broker


def granted(broker: Broker) -> list[tuple[int, int]]:
    """(instance, node) of every grant."""
    return [(grant.instance_id, grant.node_id) for grant in broker.grants()]


def test_nodes_go_out_in_turn_longest_free_first() -> None:
    broker = make_broker(7, 3)
    assert not broker.request(0, function_id=0)
    assert not broker.request(1, function_id=0)
    assert granted(broker) == [(0, 7), (1, 3)]
    assert granted(broker) == []


def test_who_finds_no_node_waits_for_the_next() -> None:
    broker = make_broker(0)
    for instance_id in range(3):
        assert not broker.request(instance_id, function_id=0)
    assert granted(broker) == [(0, 0)]
    broker.node_freed(0)
    assert granted(broker) == [(1, 0)]
    broker.node_joined(5)
    assert granted(broker) == [(2, 5)]


def test_a_function_that_holds_fewer_nodes_goes_first() -> None:
    """A greedy one asks for everything; another that comes last is served next."""
    broker = make_broker(0, 1)
    for instance_id in range(4):
        broker.request(instance_id, function_id=0)
    broker.request(4, function_id=1)
    assert granted(broker) == [(0, 0), (4, 1)]
    broker.node_freed(0)
    assert granted(broker) == [(1, 0)]


def test_when_enough_wait_others_are_denied() -> None:
    broker = make_broker(0, waiting_max=1)
    assert not broker.request(0, function_id=0)
    assert granted(broker) == [(0, 0)]
    assert not broker.request(1, function_id=0)
    assert broker.request(2, function_id=0) == "the pool is exhausted"
    broker.node_joined(1)
    assert not broker.request(3, function_id=0)  # there is a node again


def test_the_nth_instance_of_a_function_is_started_once() -> None:
    """Whoever asks first gets it; nodes that are held and requests that wait both count."""
    broker = make_broker(0, 1)
    assert not broker.request(0, function_id=0, nth=1)
    assert broker.request(100, function_id=0, nth=1) == "another gateway has ordered it"
    assert granted(broker) == [(0, 0)]
    assert broker.request(101, function_id=0, nth=1)
    assert not broker.request(102, function_id=0, nth=2)
    assert not broker.request(103, function_id=1, nth=1)
    assert not broker.request(1, function_id=0, nth=4)  # it has two; this is its third, and waits
    assert granted(broker) == [(103, 1)]
    assert broker.request(2, function_id=0, nth=3)
    broker.withdraw(1)
    assert not broker.request(3, function_id=0, nth=3)
    broker.node_lost(0)
    assert not broker.request(4, function_id=0, nth=3)


def test_a_node_that_joins_twice_is_granted_once() -> None:
    broker = make_broker(0)
    broker.request(0, function_id=0)
    broker.request(1, function_id=0)
    assert granted(broker) == [(0, 0)]
    broker.node_joined(0)
    assert granted(broker) == []


def test_who_has_left_waits_no_more() -> None:
    broker = make_broker()
    for instance_id in (5, 100, 6):
        broker.request(instance_id, function_id=0)
    assert broker.withdraw_all(range(100)) == [5, 6]
    broker.node_joined(0)
    assert granted(broker) == [(100, 0)]


def test_who_withdraws_gets_nothing() -> None:
    broker = make_broker()
    broker.request(0, function_id=0)
    broker.request(1, function_id=0)
    broker.withdraw(0)
    broker.withdraw(9)  # never asked
    broker.node_joined(0)
    assert granted(broker) == [(1, 0)]


def test_a_node_that_is_lost_is_neither_free_nor_held() -> None:
    broker = make_broker(0, 1)
    broker.request(0, function_id=0)
    assert granted(broker) == [(0, 0)]
    broker.node_lost(0)
    broker.node_freed(0)  # the news of its instance comes late
    broker.node_lost(1)
    broker.request(1, function_id=0)
    assert granted(broker) == []
    broker.node_joined(0)
    assert granted(broker) == [(1, 0)]


def test_a_node_that_was_not_granted_cannot_be_released() -> None:
    broker = make_broker(0)
    broker.node_freed(0)
    broker.request(0, function_id=0)
    broker.request(1, function_id=0)
    assert granted(broker) == [(0, 0)]


STEPS = st.lists(st.tuples(st.sampled_from(("ask", "join", "free", "lose")), st.integers(0, 4)))


@given(STEPS)
def test_a_node_is_never_granted_twice(steps: list[tuple[str, int]]) -> None:
    """In every sequence: a held node is not granted, and an instance gets one node."""
    broker = make_broker()
    up: set[int] = set()
    held: dict[int, int] = {}
    served: set[int] = set()
    for number, (step, node_id) in enumerate(steps):
        if step == "ask":
            broker.request(number, function_id=node_id)
        elif step == "join" and node_id not in up:
            up.add(node_id)
            broker.node_joined(node_id)
        elif step == "free":
            held.pop(node_id, None)
            broker.node_freed(node_id)
        elif step == "lose":
            up.discard(node_id)
            held.pop(node_id, None)
            broker.node_lost(node_id)
        for instance_id, granted_id in granted(broker):
            assert granted_id in up
            assert granted_id not in held
            assert instance_id not in served
            held[granted_id] = instance_id
            served.add(instance_id)
