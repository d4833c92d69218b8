"""The default policy: admission, order, batching and placement."""

from __future__ import annotations

import pytest
from stage_rig import StageRig, make_function

from headgate.core.actions import Action, Dispatch, SetTimer, Settle, StartInstance
from headgate.core.event_log import to_wire
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    NodeJoined,
    Refusal,
    RequestArrived,
)
from headgate.core.model import App, Client, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome, Rejection, Settlement
from headgate.planning.dispatch.busy_nodes import TRY_AGAIN
from headgate.policies import find_policy

MS = 1_000_000


class Rig:
    """A Scheduler under `headgate`, with nodes that have joined at 0."""

    def __init__(
        self,
        *profiles: Profile,
        nodes: int = 1,
        latency_ms: float | None = None,
        clients: int = 1,
        gateways: int = 1,
    ) -> None:
        functions = tuple(
            Function(i, f"f{i}", (Variant(i, f"f{i}", i, (0,), profile),))
            for i, profile in enumerate(profiles)
        )
        slo = Slo() if latency_ms is None else Slo(latency_ns=int(latency_ms * MS))
        app = App(
            functions=functions,
            pipelines=tuple(Pipeline(f.id, f.name, (Stage(f),), slo) for f in functions),
            pools=(Pool(0, "gpu", nodes=nodes),),
            clients=tuple(Client(i, f"c{i}") for i in range(clients)),
        )
        policy = find_policy("headgate")
        self.scheduler = Scheduler(app, policy, peers=gateways, validate=True)
        self.requests = 0
        for node in range(nodes):
            self.at(0, NodeJoined(node, 0, f"gpu{node}"))

    def at(self, at_ms: float, event: Event) -> list[Action]:
        """What is done about an event. Starts that take no time are over at once."""
        now_ns = int(at_ms * MS)
        actions = self.scheduler.handle(now_ns, event)
        for action in actions:
            if isinstance(action, StartInstance) and action.node_id is not None:
                profile = self.scheduler.app.variants[action.variant_id].profile
                if profile.cold_start_ns == 0:
                    started = InstanceStarted(action.instance_id, action.node_id)
                    actions = actions + self.scheduler.handle(now_ns, started)
        return actions

    def ask(
        self,
        at_ms: float,
        pipeline: int = 0,
        *,
        client: int = 0,
        priority: int = 0,
        deadline_ms: float = 0,
    ) -> list[Action]:
        request_id = self.requests
        self.requests += 1
        deadline_ns = int(deadline_ms * MS)
        return self.at(
            at_ms, RequestArrived(request_id, pipeline, client, 1, priority, deadline_ns)
        )


def sent(actions: list[Action]) -> list[tuple[list[int], int | None]]:
    """Which requests went out together, and to which node."""
    dispatches = [a for a in actions if isinstance(a, Dispatch)]
    return [([task_id // 256 for task_id in d.task_ids], d.node_id) for d in dispatches]


def outcomes(actions: list[Action]) -> list[int]:
    return [a.settlement.outcome for a in actions if isinstance(a, Settle)]


TEN = Profile(exec_ns=(10 * MS,))
BATCHES = Profile(exec_ns=(10 * MS, 12 * MS, 14 * MS, 16 * MS))


def test_the_earliest_deadline_goes_first() -> None:
    rig = Rig(TEN, latency_ms=1_000)
    rig.ask(0)
    rig.ask(1, deadline_ms=500)
    rig.ask(2, deadline_ms=100)
    assert sent(rig.at(10, BatchFinished(0))) == [([2], 0)]
    assert sent(rig.at(20, BatchFinished(1))) == [([1], 0)]


def test_a_promise_binds_whatever_the_priority_of_later_requests() -> None:
    rig = Rig(TEN, latency_ms=1_000)
    rig.ask(0)
    rig.ask(1, deadline_ms=100)
    rig.ask(2, priority=-1, deadline_ms=900)
    assert sent(rig.at(10, BatchFinished(0))) == [([1], 0)]


def test_less_urgent_requests_leave_room_for_more_urgent_ones_of_their_client() -> None:
    """Without priorities as many are admitted as can be in time; after an urgent one, fewer."""
    admitted = []
    for priority in (0, -3):
        rig = Rig(TEN, latency_ms=200)
        rig.ask(0, priority=priority)
        admitted.append(sum(not outcomes(rig.ask(1)) for _ in range(30)))
    assert 0 < admitted[1] < admitted[0]
    assert not outcomes(rig.ask(1, priority=-3))


def test_without_objectives_the_short_go_first_but_the_long_do_not_starve() -> None:
    """Thirty lengths after arrival: the long one, 0 + 600, yields to short ones until 450."""
    rig = Rig(Profile(exec_ns=(5 * MS,)), Profile(exec_ns=(20 * MS,)))
    rig.ask(0)
    rig.ask(0, pipeline=1)
    rig.ask(4)
    assert sent(rig.at(5, BatchFinished(0))) == [([2], 0)]
    rig.ask(460)
    assert sent(rig.at(461, BatchFinished(1))) == [([1], 0)]


def test_a_single_request_does_not_wait_for_a_batch_to_fill() -> None:
    assert sent(Rig(BATCHES, latency_ms=100).ask(0)) == [([0], 0)]


def test_a_batch_is_as_large_as_the_slack_of_its_most_urgent_member_allows() -> None:
    """At 10 the most urgent has 20 ms left: three fit (14 ms, or 18.2 ms with the spread that is
    allowed for), four (16 and 20.8 ms) do not.
    """
    rig = Rig(BATCHES, latency_ms=1_000)
    rig.ask(0)
    for deadline_ms in (900, 30, 800, 700):
        rig.ask(1, deadline_ms=deadline_ms)
    assert sent(rig.at(10, BatchFinished(0))) == [([2, 4, 3], 0)]


def test_a_batch_is_no_larger_than_pays() -> None:
    """Twice as many take twice as long: the first would only wait for the last."""
    rig = Rig(Profile(exec_ns=(20 * MS, 40 * MS, 60 * MS, 80 * MS)), latency_ms=1_000)
    for _ in range(4):
        rig.ask(0)
    assert sent(rig.at(20, BatchFinished(0))) == [([1], 0)]


def test_without_an_objective_a_batch_is_as_large_as_pays() -> None:
    """The deadline that orders it has long passed when the batch before it ends."""
    rig = Rig(BATCHES)
    for _ in range(5):
        rig.ask(0)
    assert sent(rig.at(500, BatchFinished(0))) == [([1, 2, 3, 4], 0)]


def test_a_request_predicted_to_be_late_is_rejected_with_the_prediction() -> None:
    rig = Rig(TEN, latency_ms=27)
    assert [outcomes(rig.ask(0)) for _ in range(2)] == [[], []]
    (rejected,) = rig.ask(0)
    assert isinstance(rejected, Settle)
    # It would wait for 20 ms, and a little more if what runs takes longer than expected.
    settlement = rejected.settlement
    assert (settlement.outcome, settlement.reason) == (Outcome.REJECTED, Rejection.OVERLOADED)
    assert 28 * MS <= settlement.predicted_ns <= 36 * MS
    assert settlement.predicted_ns + settlement.margin_ns == settlement.accepted_ns > 27 * MS
    assert (settlement.objective_ns, settlement.short_of) == (27 * MS, "gpu")
    assert 20 * MS <= settlement.short_ns <= 23 * MS
    assert settlement.retry_ns >= settlement.accepted_ns - 27 * MS


def test_what_would_be_late_even_alone_is_infeasible() -> None:
    """No capacity helps, so there is no use in coming back."""
    rig = Rig(TEN, latency_ms=1_000)
    (rejected,) = rig.ask(0, deadline_ms=9)
    assert isinstance(rejected, Settle)
    settlement = rejected.settlement
    assert 10 * MS <= settlement.accepted_ns <= 11 * MS
    assert settlement == Settlement(
        Outcome.REJECTED,
        Rejection.INFEASIBLE,
        predicted_ns=10 * MS,
        accepted_ns=settlement.accepted_ns,
        objective_ns=9 * MS,
    )


def test_what_is_to_be_warm_is_started_when_a_node_joins() -> None:
    """Two nodes are to hold the first function, none the second: the third node stays empty."""
    warm = Function(0, "warm", (Variant(0, "warm", 0, (0,), TEN),), prewarm_nodes=2)
    cold = Function(1, "cold", (Variant(1, "cold", 1, (0,), TEN),))
    app = App((warm, cold), (Pipeline(0, "p", (Stage(warm),)),), (Pool(0, "gpu", nodes=3),))
    scheduler = Scheduler(app, find_policy("headgate"), validate=True)
    started = [scheduler.handle(0, NodeJoined(node, 0, f"gpu{node}")) for node in range(3)]
    assert [[to_wire(action) for action in actions] for actions in started] == [
        [["StartInstance", 0, 0, 0, 0, 0, 0]],
        [["StartInstance", 1, 0, 0, 1, 0, 0]],
        [],
    ]


def test_what_can_no_longer_be_in_time_stands_back() -> None:
    """The node was slower than the profile says: request 1 is lost, request 2 is not."""
    rig = Rig(TEN, latency_ms=100)
    rig.ask(0, deadline_ms=100)
    rig.ask(0, deadline_ms=27)
    rig.ask(0, deadline_ms=60)
    assert sent(rig.at(20, BatchFinished(0))) == [([2], 0)]
    assert sent(rig.at(40, BatchFinished(1))) == [([1], 0)]


def test_a_client_over_its_fair_share_is_rejected_before_the_others() -> None:
    """Client 0 asks for three times what the node can do, and client 1 for a third of it."""
    rig = Rig(TEN, latency_ms=200, clients=2)
    refused = [0, 0]
    for step in range(300):
        actions: list[Action] = []
        if running := list(rig.scheduler.view.batches):
            actions += rig.at(10 * step, BatchFinished(running[0]))
        for client in (0, 0, 0, 1) if step % 3 == 0 else (0, 0, 0):
            asked = rig.ask(10 * step, client=client)
            refused[client] += step > 100 and Outcome.REJECTED in outcomes(asked)
    assert refused[0] > 300
    assert refused[1] == 0


def test_a_node_that_holds_the_weights_is_preferred() -> None:
    """Node 0 was free first, but node 1 holds the function."""
    rig = Rig(Profile(exec_ns=(10 * MS,), cold_start_ns=50 * MS), TEN, nodes=2)
    rig.ask(0, pipeline=1)  # keeps node 0 busy
    rig.ask(0)  # starts on node 1
    rig.at(50, InstanceStarted(1, 1))
    rig.at(60, BatchFinished(1))
    rig.at(61, BatchFinished(0))
    assert sent(rig.ask(70)) == [([2], 1)]


def test_a_cold_start_is_not_paid_for_a_wait_that_is_shorter() -> None:
    """Node 0 will be free in 5 ms; starting on node 1 takes 50 ms."""
    rig = Rig(Profile(exec_ns=(10 * MS,), cold_start_ns=50 * MS), nodes=2)
    rig.ask(0)
    rig.at(50, InstanceStarted(0, 0))
    rig.at(60, BatchFinished(0))
    assert sent(rig.ask(100)) == [([1], 0)]
    assert sent(rig.ask(105)) == []
    assert sent(rig.at(110, BatchFinished(1))) == [([2], 0)]


def test_a_cold_start_is_paid_where_waiting_would_miss_the_deadline() -> None:
    rig = Rig(Profile(exec_ns=(100 * MS,), cold_start_ns=5 * MS), nodes=2, latency_ms=150)
    rig.ask(0)
    actions = rig.ask(1)
    assert [type(a) for a in actions] == [StartInstance, Dispatch]
    assert sent(actions) == [([1], 1)]


def test_only_what_competes_for_the_same_nodes_counts_as_the_queue() -> None:
    """A long queue for the CPU does not delay the GPU, and the GPU does not help the CPU."""
    slow = Function(0, "slow", (Variant(0, "slow", 0, (0,), TEN),))
    fast = Function(1, "fast", (Variant(1, "fast", 1, (1,), TEN),))
    slo = Slo(latency_ns=40 * MS)  # the third, done by 30 ms, has some to spare
    app = App(
        functions=(slow, fast),
        pipelines=tuple(Pipeline(f.id, f.name, (Stage(f),), slo) for f in (slow, fast)),
        pools=(Pool(0, "cpu"), Pool(1, "gpu", nodes=3)),
    )
    rig = Rig(TEN)
    rig.scheduler = Scheduler(app, find_policy("headgate"), validate=True)
    rig.at(0, NodeJoined(0, 0, "cpu"))
    for node in (1, 2, 3):
        rig.at(0, NodeJoined(node, 1, f"gpu{node}"))
    asked = [outcomes(rig.ask(0, pipeline=0)) for _ in range(5)]
    assert asked == [[], [], [], [Outcome.REJECTED], [Outcome.REJECTED]]
    assert outcomes(rig.ask(0, pipeline=1)) == []


def test_predictions_follow_what_is_observed() -> None:
    """Everything takes twice what the profile says: soon 30 ms are known to be too few for two.

    Alone it is admitted all the same: what was learnt can be unlearnt only so.
    """
    rig = Rig(TEN)
    now_ms = 0.0
    for number in range(60):
        rig.ask(now_ms)
        rig.at(now_ms + 20, BatchFinished(number))
        now_ms += 20
    assert outcomes(rig.ask(now_ms, deadline_ms=now_ms + 15)) == []
    assert outcomes(rig.ask(now_ms, deadline_ms=now_ms + 30)) == [Outcome.REJECTED]
    assert outcomes(rig.ask(now_ms, deadline_ms=now_ms + 60)) == []


def test_a_busy_node_is_asked_again_by_the_urgency_of_the_task_that_it_refused() -> None:
    """A request of 40 ms that may take 400 ms, and is all that its gateway has.

    If it has waited for long, it asks again so soon that it is likely to get the next free slot
    before the requests of others, which ask after half of a batch at most.
    """
    waits_ms = []
    for refused_ms in (1, 300):
        rig = Rig(Profile((40 * MS,)), latency_ms=400, gateways=2)
        (batch,) = (a for a in rig.ask(0) if isinstance(a, Dispatch))
        actions = rig.at(refused_ms, BatchRefused(batch.batch_id, Refusal.BUSY))
        (timer,) = (a for a in actions if isinstance(a, SetTimer) and a.key == (TRY_AGAIN, 0))
        waits_ms.append(timer.at_ns / MS - refused_ms)
    assert 10 < waits_ms[0] <= 25
    assert 0 < waits_ms[1] < 4


@pytest.mark.parametrize("slo_ms", [1_000, 45])
def test_a_task_in_quarantine_runs_in_its_fastest_shape(slo_ms: int) -> None:
    """The task that ran beside it when their node died is held until it ends.

    The small shape takes twice as long, and costs less. With 45 ms none of the two can be in time
    any more when the node dies after 40 ms, which is no reason to take the time of the other one.
    """
    rig = StageRig([make_function(0)], slo_ms, policy="headgate", nodes=2)
    together = rig.arrive(0, 0) + rig.arrive(0, 1)
    assert {(each.node_id, each.shape_id) for each in together} == {(0, 0)}
    assert sum(each.items for each in together) == 2
    again = [each for lost in together for each in rig.at(40, BatchLost(lost.batch_id))]
    assert [(each.node_id, each.shape_id, each.items) for each in again] == [(1, 1, 1)]
