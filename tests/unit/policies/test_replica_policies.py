"""What `infless` and `fast_gshare` have in common: no stage starves, instances follow replicas."""

from __future__ import annotations

from typing import Any

import pytest
from replica_rig import ReplicaRig, make_function

from headgate.core.errors import ConfigError
from headgate.core.events import BatchLost, InstanceStopped, NodeJoined, NodeLost
from headgate.core.model import Compute
from headgate.core.states import Outcome

both = pytest.mark.parametrize("policy", ["infless", "fast_gshare"])
SLOW: dict[str, Any] = {"interval": "100s", "first": "100s"}


@both
def test_a_stage_without_room_shares_a_node(policy: str) -> None:
    """1. One seventh of a GPU, and two stages. 2. Both are served, one after the other."""
    functions = [make_function(id, has_large=False) for id in range(2)]
    rig = ReplicaRig(policy, functions, 100, gpu_sevenths=1, **SLOW)
    (first,) = rig.arrive()
    (second,) = rig.finish(first)
    assert (first.variant_id, second.variant_id) == (0, 1)
    rig.finish(second)
    assert rig.settled == {0: Outcome.MET}


@both
def test_a_node_is_held_for_a_stage_that_cannot_start(policy: str) -> None:
    """Compute is resident, and there is room for one instance.

    1. The first stage runs a batch, and another waits. 2. The batch ends: the second stage has a
    task and no room. 3. The node is held for it: the waiting batch is not sent, and the idle
    instance makes way. 4. The second stage has sent its batch; then it is the first one's turn.
    """
    functions = [
        make_function(id, concurrency=1, has_large=False, memory_bytes=10) for id in range(2)
    ]
    rig = ReplicaRig(policy, functions, 0, gpu_sevenths=1, compute=Compute.RESIDENT, **SLOW)
    (first,) = rig.arrive()
    assert rig.arrive() == []
    ran = [first.variant_id]
    sent = rig.finish(first)
    while sent:
        assert len(sent) == 1
        ran.append(sent[0].variant_id)
        sent = rig.finish(sent[0])
    assert ran == [0, 1, 0, 1]
    assert rig.settled == {0: Outcome.MET, 1: Outcome.MET}


@both
def test_every_stage_scales_with_the_arrivals_of_its_pipeline(policy: str) -> None:
    """No task has reached the second stage yet, and it is scaled like the first one."""
    functions = [make_function(id, cold_start_ms=10_000) for id in range(2)]
    rig = ReplicaRig(policy, functions, 200, nodes=8, first="1s")
    for now_ms in range(0, 1_000, 5):
        rig.advance(now_ms)
        rig.arrive()
    rig.advance(1_000)
    assert rig.sent == []
    first, second = (rig.stage(index).rate_max for index in range(2))
    assert min(first, second) >= 200.0


@both
def test_a_backlog_is_demand(policy: str) -> None:
    """Nothing arrives any more, and what waits still keeps more than one replica."""
    rig = ReplicaRig(policy, [make_function(0, cold_start_ms=5_000)], 100, nodes=4, drain="1s")
    rig.arrive(100)
    rig.advance(1_000)
    assert rig.stage().rate_max >= 100.0


@both
def test_what_is_scarce_goes_to_the_stage_with_least_capacity_for_its_demand(policy: str) -> None:
    """1. The first stage has all there is. 2. The second one needs as much: it gets half."""
    functions = [make_function(id, has_large=False) for id in range(2)]
    rig = ReplicaRig(policy, functions, 100, gpu_sevenths=6, **SLOW)
    first, second = rig.stage(0), rig.stage(1)
    rig.policy.scale({first: 1e6, second: 0.0})
    assert (len(first.replicas), len(second.replicas)) == (6, 0)
    rig.policy.scale({first: 1e6, second: 1e6})
    assert (len(first.replicas), len(second.replicas)) == (3, 3)


@both
@pytest.mark.parametrize(("compute", "stops"), [(Compute.RESIDENT, 1), (Compute.PER_BATCH, 0)])
def test_spares_stop_where_they_cost_something(policy: str, compute: int, stops: int) -> None:
    """1. A request is served, and none follows. 2. Its instance is kept for a while."""
    rig = ReplicaRig(policy, [make_function(0)], 100, compute=compute, keep_alive="20s")
    (sent,) = rig.arrive()
    rig.finish(sent)
    rig.advance(19_000)
    assert rig.stopped == []
    rig.advance(60_000)
    assert len(rig.stopped) == stops
    (sent,) = rig.arrive()
    assert len(rig.started) == 1 + stops


@both
def test_a_spare_makes_way_for_another_function(policy: str) -> None:
    """Memory for one instance: that of the first function stops when the second is needed."""
    functions = [make_function(id, memory_bytes=60) for id in range(2)]
    rig = ReplicaRig(policy, functions, 100, **SLOW)
    (first,) = rig.arrive()
    (second,) = rig.finish(first)
    assert second.variant_id == 1
    assert [stop.instance_id for stop in rig.stopped] == [first.instance_id]


@both
def test_one_instance_serves_as_many_replicas_as_it_runs_batches(policy: str) -> None:
    """Seven replicas of a seventh each, on instances that run four batches at once."""
    functions = [make_function(0, concurrency=4, has_large=False)]
    rig = ReplicaRig(policy, functions, 20, **SLOW)
    for _ in range(7):
        rig.add(0.0)
    assert len(rig.started) == 2
    sent = rig.arrive(8)
    assert len(sent) == 7
    assert sorted(sum(each.instance_id == i for each in sent) for i in range(2)) == [3, 4]


@both
def test_nodes_that_join_start_what_is_pre_warmed(policy: str) -> None:
    """On the first two nodes of three, and again on a node that comes back."""
    rig = ReplicaRig(policy, [make_function(0, prewarm_nodes=2)], 100, nodes=3)
    assert [start.node_id for start in rig.started] == [0, 1]
    rig.handle(NodeLost(1))
    rig.handle(NodeJoined(1, 0, "n1"))
    assert [start.node_id for start in rig.started] == [0, 1, 1]


@both
def test_no_request_is_lost_when_a_node_dies(policy: str) -> None:
    """1. A node dies with its batches while others wait. 2. The other node serves all of them."""
    rig = ReplicaRig(policy, [make_function(0, has_large=False)], 0, nodes=2, **SLOW)
    for _ in range(9):
        rig.add(0.0)
    running = rig.arrive(12)
    assert {sent.node_id for sent in running} == {0, 1}
    dead = running[0].node_id
    assert dead is not None
    lost = [sent for sent in running if sent.node_id == dead]
    running = [sent for sent in running if sent.node_id != dead]
    running += rig.handle(NodeLost(dead))
    for sent in lost:
        running += rig.handle(BatchLost(sent.batch_id))
    while running:
        assert all(sent.node_id != dead for sent in running)
        running = running[1:] + rig.finish(running[0])
    assert rig.settled == dict.fromkeys(range(12), Outcome.MET)


@both
def test_a_start_that_fails_is_not_repeated_at_once(policy: str) -> None:
    """1. The start fails. 2. The core probes it after a back-off. 3. Then the task is sent."""
    rig = ReplicaRig(policy, [make_function(0, cold_start_ms=10)], 0, **SLOW)
    rig.arrive(2)
    rig._later.clear()
    rig.handle(InstanceStopped(rig.started[0].instance_id, "broken"))
    assert len(rig.started) == 1
    assert set(rig.settled.values()) == {Outcome.FAILED}
    rig.advance(2_000)
    assert len(rig.started) == 2
    (sent,) = rig.arrive()
    assert sent.instance_id == rig.started[1].instance_id


@both
def test_the_timer_ends_with_the_work(policy: str) -> None:
    rig = ReplicaRig(policy, [make_function(0)], 100)
    (sent,) = rig.arrive()
    rig.finish(sent)
    rig.advance(600_000)
    assert rig.scheduler.view.timers == {}
    (sent,) = rig.arrive()
    assert ("monitor", 0) in rig.scheduler.view.timers


@both
def test_a_stage_that_fits_no_pool_is_one_clear_line(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"stage f0: has no feasible configuration"):
        ReplicaRig(policy, [make_function(0, memory_bytes=101)], 0)
