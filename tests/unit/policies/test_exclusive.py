"""Stealing of nodes between queues, which depends on the ratio of their backlogs."""

from __future__ import annotations

import pytest

from headgate.config import make_config
from headgate.core.actions import Dispatch
from headgate.core.events import BatchFinished, InstanceStarted, NodeJoined, RequestArrived
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.core.scheduler.scheduler import Scheduler
from headgate.policies import find_policy

MS = 1_000_000


@pytest.mark.parametrize(("steal_factor", "served"), [(1.5, 1), (10.0, 0), (0.0, 0)])
def test_a_much_fuller_queue_takes_a_node_whose_owner_has_work_too(
    steal_factor: float, served: int
) -> None:
    """Function 1 has one node and four waiting, function 0 two nodes and one waiting.

    When a node of function 0 becomes free, queue 1 is eight times as full per node: enough for a
    factor of 1.5, too little for 10, and with 0 nobody steals.
    """
    functions = tuple(
        Function(i, f"f{i}", (Variant(i, f"f{i}", i, (0,), Profile(exec_ns=(10 * MS,))),))
        for i in range(2)
    )
    pipelines = tuple(Pipeline(f.id, f.name, (Stage(f),)) for f in functions)
    app = App(functions, pipelines, (Pool(0, "gpu", nodes=3),))
    kind = find_policy("exclusive")
    settings = {"steal_factor": steal_factor, "adapt_every": 0}
    config = make_config(kind.config, settings, "test")
    scheduler = Scheduler(app, kind, config, validate=True)
    for node in range(3):
        scheduler.handle(0, NodeJoined(node, 0, f"gpu{node}"))
    for request_id, pipeline in enumerate([1, 0, 0]):
        for action in scheduler.handle(0, RequestArrived(request_id, pipeline)):
            if isinstance(action, Dispatch):
                assert action.instance_id is not None
                assert action.node_id is not None
                scheduler.handle(0, InstanceStarted(action.instance_id, action.node_id))
    for request_id, pipeline in enumerate([1, 1, 1, 1, 0], start=3):
        scheduler.handle(1, RequestArrived(request_id, pipeline))
    actions = scheduler.handle(2, BatchFinished(1))
    (dispatch,) = [a for a in actions if isinstance(a, Dispatch)]
    assert dispatch.variant_id == served
