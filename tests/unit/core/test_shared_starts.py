"""Several gateways order the same instance on a node: it is started once."""

from __future__ import annotations

from headgate.core.actions import StartInstance
from headgate.core.backend import Ended
from headgate.core.model import Pool

from .test_backend import batch, make_backend, ready, stop, told


def nth(instance_id: int, number: int = 1) -> StartInstance:
    """The start of one of several gateways that may all order the same, of variant 0."""
    return StartInstance(instance_id, 0, 0, 0, 0, number)


def test_of_gateways_that_order_the_same_one_is_served() -> None:
    """The others wait for its end; their batches go to the instance that there is."""
    backend = make_backend(Pool(0, "gpu", slots=4))
    assert told(backend, nth(10), nth(20), batch(1, 20), nth(30)) == ["begin start 10"]
    assert told(backend, Ended(nth(10))) == [
        "batch 1 gone",
        "20 another gateway has ordered it",
        "30 another gateway has ordered it",
    ]
    assert told(backend, nth(40)) == ["40 another gateway has ordered it"]
    assert told(backend, nth(50, 2)) == ["begin start 50"]
    assert list(backend.instances) == [10, 50]


def test_a_start_that_waits_for_that_of_another_gateway_keeps_nobody_waiting() -> None:
    backend = make_backend(Pool(0, "gpu", slots=3))
    ready(backend, 1)
    told(backend, nth(10), nth(20))
    assert told(backend, batch(1, 1)) == ["begin batch 1"]


def test_if_the_start_of_another_gateway_fails_the_next_one_begins() -> None:
    backend = make_backend(Pool(0, "gpu", slots=4))
    told(backend, nth(10), nth(20), nth(30))
    assert told(backend, Ended(nth(10), has_failed=True)) == ["begin start 20"]
    assert told(backend, stop(30)) == ["30 stopped"]
    assert told(backend, Ended(nth(20))) == []
