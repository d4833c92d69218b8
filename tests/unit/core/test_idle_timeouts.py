"""The timeouts of an instance: that of its pool, or it leaves service and later retires."""

from __future__ import annotations

from dataclasses import replace

from headgate.core.backend import Backend, Ended, IdleTimer
from headgate.core.clock import NEVER_NS
from headgate.core.model import Pool

from .test_backend import batch, cancel, make_backend, start, told, variants


def make_retiring(pool: Pool, unused_ns: int = 10, retire_ns: int = 30) -> Backend:
    """A backend with instance 0, of a variant with two timeouts; 1 has those of the pool."""
    first, *others = variants()
    timed = replace(first, unused_after_ns=unused_ns, retire_after_ns=retire_ns)
    backend = Backend(pool, (timed, *others))
    assert told(backend, start(0)) == ["begin start 0"]
    return backend


def test_an_instance_leaves_service_and_then_retires() -> None:
    backend = make_retiring(Pool(0, "gpu"))
    assert told(backend, Ended(start(0)), now_ns=5) == ["timer 0 at 15"]
    expected = ["0 not in use", "timer 0 at 45"]
    assert told(backend, IdleTimer(0, 15), now_ns=15) == expected
    assert told(backend, IdleTimer(0, 45), now_ns=45) == ["0 not in use for too long"]
    assert not backend.instances


def test_a_batch_puts_an_instance_back_into_service_at_once() -> None:
    """The timer that is set meanwhile finds that it has been used, and waits for the rest."""
    backend = make_retiring(Pool(0, "gpu"))
    told(backend, Ended(start(0)), now_ns=0)
    told(backend, IdleTimer(0, 10), now_ns=10)
    assert told(backend, batch(0), now_ns=20) == ["begin batch 0", "0 in use"]
    assert told(backend, batch(1), now_ns=21) == ["batch 1 busy"]
    assert told(backend, Ended(batch(0)), now_ns=35) == []  # one timer is enough
    assert told(backend, IdleTimer(0, 40), now_ns=40) == ["timer 0 at 45"]
    assert told(backend, IdleTimer(0, 45), now_ns=45) == ["0 not in use", "timer 0 at 75"]


def test_a_timer_does_nothing_while_an_instance_works_and_its_end_sets_another() -> None:
    backend = make_retiring(Pool(0, "gpu"))
    told(backend, Ended(start(0)), now_ns=0)
    assert told(backend, batch(0), IdleTimer(0, 10), now_ns=10) == ["begin batch 0"]
    assert told(backend, Ended(batch(0)), now_ns=11) == ["timer 0 at 21"]


def test_a_held_batch_counts_as_use_when_it_begins() -> None:
    """The node is busy with another instance, so the batch waits for a slot."""
    backend = make_retiring(Pool(0, "gpu", queue_max=1))
    told(backend, Ended(start(0)), start(1), Ended(start(1)), now_ns=0)
    told(backend, IdleTimer(0, 10), now_ns=10)
    assert told(backend, batch(0, 1), batch(1), now_ns=11) == ["begin batch 0"]
    assert told(backend, IdleTimer(0, 40), now_ns=40) == []
    assert told(backend, Ended(batch(0, 1)), now_ns=50) == ["begin batch 1", "0 in use"]


def test_an_instance_may_leave_service_and_never_retire() -> None:
    backend = make_retiring(Pool(0, "gpu", idle_timeout_ns=3), retire_ns=NEVER_NS)
    told(backend, Ended(start(0)), now_ns=0)
    assert told(backend, IdleTimer(0, 10), now_ns=10) == ["0 not in use"]
    told(backend, start(1), now_ns=11)  # another variant has the timeout of the pool
    assert told(backend, Ended(start(1)), now_ns=12) == ["timer 1 at 15"]
    assert told(backend, IdleTimer(1, 15), now_ns=15) == ["1 idle for too long"]


def test_an_instance_waits_for_one_idle_timer_however_often_it_is_used() -> None:
    backend = make_backend(Pool(0, "gpu", idle_timeout_ns=1_000))
    assert told(backend, start(0), Ended(start(0))) == ["begin start 0", "timer 0 at 1000"]
    for at_ns in range(1, 1_000):
        effects = told(backend, batch(at_ns), Ended(batch(at_ns)), now_ns=at_ns)
        assert effects == [f"begin batch {at_ns}"]
    assert told(backend, IdleTimer(0, 1_000), now_ns=1_000) == ["timer 0 at 1999"]
    assert told(backend, IdleTimer(0, 1_999), now_ns=1_999) == ["0 idle for too long"]


def test_an_idle_timer_that_is_early_waits_for_the_rest_beside_a_held_batch() -> None:
    """The batch waits for the slot, and is cancelled: the instance stops when it would have."""
    backend = make_backend(Pool(0, "gpu", idle_timeout_ns=10, queue_max=1))
    told(backend, start(0), Ended(start(0)))
    told(backend, batch(0), Ended(batch(0)), now_ns=5)
    told(backend, start(1), now_ns=6)
    assert told(backend, batch(1), IdleTimer(0, 10), now_ns=10) == ["timer 0 at 15"]
    assert told(backend, cancel(1), now_ns=11) == ["batch 1 cancelled"]
    assert told(backend, IdleTimer(0, 15), now_ns=15) == ["0 idle for too long"]
