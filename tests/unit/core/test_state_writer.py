"""The writers of the Scheduler's state, tested through their internals."""

from __future__ import annotations

from headgate.core.events import BatchFinished, InstanceStarted, RequestArrived
from headgate.core.ids import IDS_PER_SCHEDULER
from headgate.core.model import Pool, Stage
from headgate.core.scheduler.state import InstanceWriter, StateWriter
from headgate.core.states import TaskState
from headgate.core.view import View

from .rig import Rig
from .sample_apps import Scripted, make_app, make_function


def test_ids_are_drawn_from_a_range_and_known_to_have_been_drawn() -> None:
    app = make_app()
    state = StateWriter(View(app), first_id=7)
    variant, pool = app.variants[0], app.pools[0]
    batches = [state.send([], [], 0, variant, None, None, pool) for _ in range(3)]
    assert [batch.id for batch in batches] == [7, 8, 9]
    assert [i for i in range(-3, 12) if state.has_issued_batch(i)] == [7, 8, 9]


def _residents(first_id: int, *, has_peers: bool) -> InstanceWriter:
    """Books in which one instance has been started."""
    view = View(make_app())
    instances = InstanceWriter(view, StateWriter(view, first_id), first_id)
    instances.has_peers = has_peers
    instances.start_instance(view.app.variants[0], view.app.pools[0], None)
    return instances


def test_without_peers_only_our_own_starts_were_instances() -> None:
    instances = _residents(0, has_peers=False)
    assert [i for i in range(-1, 3) if instances.has_issued_instance(i)] == [0]


def test_with_peers_theirs_may_be_any_but_ours_are_known() -> None:
    """Of our range we have drawn one; any of other ranges may be out there."""
    first, second = IDS_PER_SCHEDULER, 2 * IDS_PER_SCHEDULER
    instances = _residents(first, has_peers=True)
    candidates = (-1, 0, first - 1, first, first + 1, second - 1, second)
    issued = [i for i in candidates if instances.has_issued_instance(i)]
    assert issued == [0, first - 1, first, second]


def test_a_node_with_slots_left_stays_where_it_is_in_line(make_rig: type[Rig]) -> None:
    app = make_app(make_function(concurrency=9), pools=[Pool(0, "gpu", slots=3)])
    rig = make_rig(app, Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    assert list(rig.view.free_nodes) == [0, 1]
    rig.at(0, RequestArrived(1, 0))
    rig.order(0, lambda p: p.send(0, 256))
    assert list(rig.view.free_nodes) == [1]
    rig.at(1, InstanceStarted(0, 0))
    assert list(rig.view.free_nodes) == [1, 0]


def test_the_least_loaded_of_the_free_nodes_is_first(make_rig: type[Rig]) -> None:
    app = make_app(make_function(concurrency=9), pools=[Pool(0, "gpu", slots=4)])
    rig = make_rig(app, Scripted, nodes=2)
    rig.at(0, RequestArrived(0, 0))
    rig.order(0, lambda p: p.send(0, 0))
    first = rig.view.first_free(0)
    assert first is not None and first.id == 1


def test_a_task_is_found_in_every_batch_it_is_out_in(make_rig: type[Rig]) -> None:
    """Whichever of two copies ends, the other is found."""
    for ended, left in ((0, 1), (1, 0)):
        rig = make_rig(
            make_app(stages=[Stage(make_function()), Stage(make_function())]),
            Scripted,
            nodes=2,
        )
        rig.at(0, RequestArrived(0, 0))
        rig.order(0, lambda p: (p.send(0, 0), p.send(1, 0)))
        rig.at(1, BatchFinished(ended))
        assert list(rig.view.batches) == [left]
        assert rig.scripted.task(0).state == TaskState.DONE
        assert rig.scripted.task(0).copies_in_flight == 1
