"""The checkers of failed starts and of suspect tasks report violations and pass correct runs."""

from __future__ import annotations

from dataclasses import replace

from headgate.core.actions import Dispatch, StartInstance, StopInstance
from headgate.core.events import (
    BatchLost,
    BatchRefused,
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Refusal,
    TimerFired,
)
from headgate.core.model import Limits
from headgate.sim.checkers import Checker, StartBackoff, SuspectTasks

from .checker_runs import APP, Entry, does, finishes, violations

SLOW = replace(APP, limits=Limits(start_backoff_ns=100))


def joins(node_id: int = 0) -> Entry:
    return (0, NodeJoined(node_id, 0, f"gpu{node_id}"), [])


def starts(instance_id: int, now_ns: int, node_id: int | None = 0) -> Entry:
    return does(StartInstance(instance_id, 0, 0, node_id), now_ns=now_ns)


def fails(instance_id: int, now_ns: int) -> Entry:
    return (now_ns, InstanceStopped(instance_id, "broken"), [])


def started(instance_id: int, now_ns: int = 2) -> Entry:
    return (now_ns, InstanceStarted(instance_id, 0), [])


def barred(*entries: Entry) -> bool:
    return "while it is barred" in violations(StartBackoff(SLOW), joins(), *entries)


def test_a_failed_start_is_not_repeated_within_the_back_off() -> None:
    assert barred(starts(0, 1), fails(0, 5), starts(1, 104))
    assert not barred(starts(0, 1), fails(0, 5), starts(1, 105))
    assert barred((5, LoadFailed(0, 0, "broken"), []), starts(0, 6))


def test_a_probe_is_one_start() -> None:
    assert barred(starts(0, 1), fails(0, 5), starts(1, 105), starts(2, 106))
    assert barred(starts(0, 1), fails(0, 5), starts(1, 105), fails(1, 110), starts(2, 111))
    assert not barred(starts(0, 1), fails(0, 5), starts(1, 105), started(1, 110), starts(2, 111))
    died: Entry = (110, NodeLost(0), [])
    assert barred(starts(0, 1), fails(0, 5), starts(1, 105), died, starts(2, 111))


def test_stops_and_lost_nodes_are_not_failed_starts() -> None:
    """A cancelled start, one whose node the pool picks, one whose node died, and late reports."""
    cancelled = does(StopInstance(0, 0), now_ns=3)
    assert not barred(starts(0, 1), cancelled, fails(0, 5), starts(1, 6))
    assert not barred(starts(0, 1, node_id=None), fails(0, 5), starts(1, 6))
    assert not barred(starts(0, 1), (4, NodeLost(0), []), fails(0, 5), starts(1, 6))
    late: Entry = (5, LoadFailed(0, 0, "late"), [])
    assert not barred(starts(0, 1), started(0), late, starts(1, 6))
    everywhere: Entry = (105, TimerFired(("probe", 0)), [])
    assert not barred(starts(0, 1), fails(0, 5), everywhere, starts(1, 106))


def sends(batch_id: int, *task_ids: int, now_ns: int = 10, instance_id: int = 0) -> Entry:
    order = Dispatch(batch_id, 0, list(task_ids), len(task_ids), 0, 0, instance_id)
    return does(order, now_ns=now_ns)


def lost(batch_id: int, *, node_died: bool = True) -> Entry:
    return (15, BatchLost(batch_id, node_died), [])


def suspected(*entries: Entry) -> str:
    checker: Checker = SuspectTasks(APP)
    return violations(checker, joins(), starts(0, 1), started(0), *entries)


def test_a_task_that_was_alone_on_a_dead_node_never_runs_again() -> None:
    assert "runs again" in suspected(sends(0, 0), lost(0), sends(1, 0))
    assert suspected(sends(0, 0), lost(0, node_died=False), sends(1, 0)) == ""
    assert suspected(sends(0, 0, instance_id=7), lost(0), sends(1, 0)) == ""  # it had not begun


def test_tasks_of_one_batch_run_alone_after_a_crash() -> None:
    pair = (sends(0, 0, 256), lost(0))
    assert "not alone" in suspected(*pair, sends(1, 0, 512))
    assert suspected(*pair, sends(1, 0), finishes(1), sends(2, 256)) == ""
    assert "runs again" in suspected(*pair, sends(1, 0), lost(1), sends(2, 0))


def test_one_suspect_of_a_function_at_a_time() -> None:
    pair = (sends(0, 0, 256), lost(0))
    assert "not alone" in suspected(*pair, sends(1, 0), sends(2, 256))
    refused: Entry = (20, BatchRefused(1, Refusal.BUSY), [])
    assert suspected(*pair, sends(1, 0), refused, sends(2, 256)) == ""


def test_tasks_of_concurrent_batches_are_suspects_together() -> None:
    both = (sends(0, 0), sends(1, 256), lost(0), lost(1))
    assert suspected(*both, sends(2, 0), finishes(2), sends(3, 256)) == ""
    assert "not alone" in suspected(*both, sends(2, 0, 256))
