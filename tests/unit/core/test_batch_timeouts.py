"""Timeouts of batches: never below the floor, and adapted to observed times."""

from __future__ import annotations

from headgate.core.actions import SetTimer
from headgate.core.clock import HOUR_NS
from headgate.core.events import (
    BatchFinished,
    InstanceStarted,
    NodeJoined,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import Limits

from .rig import Rig, wires
from .sample_apps import make_app

LOST = ("lost", 0)


def limit_of(rig: Rig, now_ns: int, request_id: int) -> int:
    """How long the batch of a request that comes now is waited for."""
    (timer,) = (
        wire for wire in rig.at(now_ns, RequestArrived(request_id, 0)) if wire[0] == "SetTimer"
    )
    at_ns = timer[2]
    assert isinstance(at_ns, int)
    return at_ns - now_ns


def test_no_batch_times_out_within_the_floor(make_rig: type[Rig]) -> None:
    """The profile says 10 ns, and the round trip takes longer than that."""
    assert Limits().timeout_floor_ns == 10**9
    rig = make_rig(make_app(limits=Limits(timeout_factor=2.0)), nodes=1)
    assert rig.at(5, RequestArrived(0, 0))[-1:] == wires(SetTimer(LOST, 5 + 10**9))


def test_what_batches_really_took_counts(make_rig: type[Rig]) -> None:
    """They take 60 ns where the profile has 10: then 120 are waited for, not 20."""
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=70)
    rig = make_rig(make_app(limits=limits), nodes=1)
    assert limit_of(rig, 0, 0) == 70
    rig.at(0, InstanceStarted(0, 0))
    rig.at(60, BatchFinished(0))
    assert limit_of(rig, 100, 1) == 120


def test_a_batch_that_finishes_after_its_timeout_is_observed(make_rig: type[Rig]) -> None:
    """Else everything of a function that has become slow would be given up for ever."""
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=0, attempts_max=1)
    rig = make_rig(make_app(limits=limits), nodes=1)
    assert limit_of(rig, 0, 0) == 20
    rig.at(0, InstanceStarted(0, 0))
    rig.at(20, TimerFired(LOST))
    assert rig.view.requests == {}
    rig.at(300, BatchFinished(0))
    rig.at(300, BatchFinished(0))  # once
    rig.at(20_000_000, TimerFired(("unblock", 0)))
    assert limit_of(rig, 20_000_001, 1) == 600


def test_the_past_fades(make_rig: type[Rig]) -> None:
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=0)
    rig = make_rig(make_app(limits=limits), nodes=0)
    rig.at(0, NodeJoined(0, 0, "n0"))
    assert limit_of(rig, 0, 0) == 20
    rig.at(0, InstanceStarted(0, 0))
    rig.at(19, BatchFinished(0))
    now_ns, limits_ns = 100, []
    for request_id in range(1, 200):
        limits_ns.append(limit_of(rig, now_ns, request_id))
        rig.at(now_ns + 10, BatchFinished(request_id))
        now_ns += 100
    assert limits_ns[0] == 38
    assert limits_ns == sorted(limits_ns, reverse=True)
    assert limits_ns[-1] == 20


def hourly_limits(rig: Rig, *took_ns: int) -> list[int]:
    """The timeouts of batches that are sent an hour apart and take so long."""
    limits_ns = []
    for hour, length_ns in enumerate(took_ns):
        limits_ns.append(limit_of(rig, hour * HOUR_NS, hour))
        if hour == 0:
            rig.at(0, InstanceStarted(0, 0))
        rig.at(hour * HOUR_NS + length_ns, BatchFinished(hour))
    return limits_ns


def test_the_past_fades_with_time_where_batches_are_rare(make_rig: type[Rig]) -> None:
    """One batch took 9,000 times its profile, and the others what it says."""
    limits = Limits(timeout_factor=10_000.0, timeout_floor_ns=0)
    rig = make_rig(make_app(limits=limits), nodes=1)
    limits_ns = hourly_limits(rig, 90_000, *([10] * 99))
    assert limits_ns[:2] == [100_000, 900_000_000]
    assert limits_ns[1:] == sorted(limits_ns[1:], reverse=True)
    assert limits_ns[24] < 900_000_000 / 2**3
    assert limits_ns[90] == 100_000


def test_what_is_always_slow_is_waited_for_however_rare_it_is(make_rig: type[Rig]) -> None:
    limits = Limits(timeout_factor=2.0, timeout_floor_ns=70)
    rig = make_rig(make_app(limits=limits), nodes=1)
    assert hourly_limits(rig, *([60] * 50))[1:] == [120] * 49
    assert limit_of(rig, 10_000 * HOUR_NS, 50) == 120
