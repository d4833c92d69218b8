"""Hooks that raise: their task fails, the rest of the event is handled, then `handle` raises."""

from __future__ import annotations

import pytest

from headgate.core.actions import Action, Dispatch, ReportFault, SetTimer, Settle
from headgate.core.clock import MILLISECOND_NS, MINUTE_NS
from headgate.core.errors import PolicyError
from headgate.core.event_log import Wire, to_wire
from headgate.core.events import (
    BatchFinished,
    Event,
    InstanceStarted,
    NodeJoined,
    RequestArrived,
    TimerFired,
)
from headgate.core.model import Stage
from headgate.core.policy import Context, PolicyConfig, PolicyKind
from headgate.core.records import Node, Request, Task
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Failure, Outcome, Settlement

from .rig import wires
from .sample_apps import Fifo, make_app, make_function

FAILED = (Outcome.FAILED, Failure.POLICY_FAULT)
OFFER, FORGOTTEN = ("offer_again", 0), ("forgotten", 0)


class Slips(Fifo):
    """Raises at a given hook: `(hook, id of the task or node it is about)`."""

    def __init__(self, context: Context, config: PolicyConfig) -> None:
        super().__init__(context, config)
        self.slips: set[tuple[str, int]] = set()
        self.illegal: list[Task] = []

    def _slip(self, hook: str, id: int) -> None:
        if (hook, id) in self.slips:
            raise KeyError(id)

    def on_arrival(self, request: Request) -> None:
        self._slip("on_arrival", request.id)

    def on_task_ready(self, task: Task) -> None:
        self._slip("on_task_ready", task.id)
        super().on_task_ready(task)

    def on_task_withdrawn(self, task: Task) -> None:
        self._slip("on_task_withdrawn", task.id)

    def on_capacity(self, node: Node) -> None:
        self._slip("on_capacity", node.id)
        if self.illegal:
            tasks, self.illegal = self.illegal, []
            self.queue = [task for task in self.queue if task not in tasks]
            self.orders.dispatch(tasks, node)
        super().on_capacity(node)


def make(*slips: tuple[str, int], nodes: int = 1, stages: int = 1) -> tuple[Scheduler, Slips]:
    functions = [make_function(i) for i in range(stages)]
    chain = [Stage(f, (f.id - 1,) if f.id else ()) for f in functions]
    scheduler = Scheduler(make_app(*functions, stages=chain), PolicyKind(Slips), validate=True)
    assert isinstance(scheduler.policy, Slips)
    for node_id in range(nodes):
        scheduler.handle(0, NodeJoined(node_id, 0, f"n{node_id}"))
    scheduler.policy.slips = set(slips)
    return scheduler, scheduler.policy


def faulty(scheduler: Scheduler, now_ns: int, event: Event, match: str = "raised") -> list[Wire]:
    """What is to be done, all the same, after an event in which a hook raised."""
    with pytest.raises(PolicyError, match=match) as caught:
        scheduler.handle(now_ns, event)
    return [to_wire(action) for action in caught.value.actions if isinstance(action, Action)]


def settled(actions: list[Wire]) -> dict[object, tuple[object, object]]:
    return {wire[1]: (wire[2], wire[3]) for wire in actions if wire[0] == "Settle"}


def test_a_request_that_admission_stumbles_over_fails() -> None:
    scheduler, _ = make(("on_arrival", 0))
    assert faulty(scheduler, 1, RequestArrived(0, 0)) == wires(
        ReportFault("on_arrival", "KeyError"), Settle(0, Settlement(*FAILED))
    )
    assert scheduler.handle(2, RequestArrived(1, 0))  # the next is served
    assert scheduler.view.policy_faults == 1


def test_the_error_has_its_cause_and_says_which_hook() -> None:
    scheduler, _ = make(("on_arrival", 0))
    with pytest.raises(PolicyError, match=r"^on_arrival raised KeyError: 0$") as caught:
        scheduler.handle(1, RequestArrived(0, 0))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_task_that_the_policy_did_not_take_fails() -> None:
    scheduler, _ = make(("on_task_ready", 0))
    actions = faulty(scheduler, 1, RequestArrived(0, 0))
    assert settled(actions) == {0: FAILED}
    assert scheduler.view.requests == {}


def test_the_others_of_the_batch_go_on_and_the_slot_is_free() -> None:
    """Three in one batch; the policy stumbles over the second stage of the one in the middle."""
    scheduler, policy = make(nodes=0, stages=2)
    for request_id in range(3):
        scheduler.handle(0, RequestArrived(request_id, 0))
    policy.illegal = list(policy.queue)  # legal for once: all three together
    scheduler.handle(0, NodeJoined(0, 0, "n0"))
    scheduler.handle(1, InstanceStarted(0, 0))
    policy.slips = {("on_task_ready", 257)}
    actions = faulty(scheduler, 2, BatchFinished(0))
    assert settled(actions) == {1: FAILED}
    sent = [wire[3] for wire in actions if wire[0] == "Dispatch"]
    assert sent == [[1]]  # the second stage of the first request has the node now
    assert [request.tasks[1].state for request in scheduler.view.requests.values()] == [2, 1]
    assert scheduler.view.nodes[0].running == 2  # that batch, and its instance that starts


def test_what_an_illegal_order_was_about_fails_and_nothing_else() -> None:
    """The policy has taken two tasks out of its queue, and they may not run together."""
    scheduler, policy = make(nodes=0)
    for request_id in range(3):
        scheduler.handle(0, RequestArrived(request_id, 0))
    policy.illegal = [policy.queue[0], policy.queue[0]]
    actions = faulty(scheduler, 1, NodeJoined(0, 0, "n0"), match="a task is in a batch twice")
    assert actions[:1] == wires(ReportFault("on_capacity", "a task is in a batch twice"))
    assert settled(actions) == {0: FAILED}
    assert list(scheduler.view.requests) == [1, 2]


def test_a_task_that_was_sent_out_all_the_same_is_left_alone() -> None:
    class SendsThenSlips(Slips):
        def on_task_ready(self, task: Task) -> None:
            Fifo.on_task_ready(self, task)
            raise KeyError(task.id)

    scheduler = Scheduler(make_app(), PolicyKind(SendsThenSlips), validate=True)
    scheduler.handle(0, NodeJoined(0, 0, "n0"))
    actions = faulty(scheduler, 1, RequestArrived(0, 0))
    assert [wire[0] for wire in actions] == [
        "StartInstance", "Dispatch", "ReportFault", "SetTimer", "SetTimer"
    ]  # fmt: skip
    scheduler.handle(2, InstanceStarted(0, 0))
    assert scheduler.handle(10, BatchFinished(0))


def test_several_faults_in_one_event_are_all_in_it() -> None:
    scheduler, _ = make(("on_task_ready", 0), ("on_task_withdrawn", 0))
    actions = faulty(scheduler, 1, RequestArrived(0, 0), match="on_task_ready raised")
    assert actions == wires(
        ReportFault("on_task_ready", "KeyError"),
        Settle(0, Settlement(*FAILED)),
        ReportFault("on_task_withdrawn", "KeyError"),
    )
    assert scheduler.view.policy_faults == 2


def test_capacity_that_a_fault_left_unused_is_offered_again() -> None:
    scheduler, policy = make(nodes=0)
    scheduler.handle(0, RequestArrived(0, 0))
    policy.slips = {("on_capacity", 0)}
    actions = faulty(scheduler, 1, NodeJoined(0, 0, "n0"))
    assert actions == wires(
        ReportFault("on_capacity", "KeyError"),
        SetTimer(OFFER, 1 + 100 * MILLISECOND_NS),
        SetTimer(FORGOTTEN, 1 + MINUTE_NS),
    )
    policy.slips.clear()
    sent = scheduler.handle(1 + 100 * MILLISECOND_NS, TimerFired(OFFER))
    assert any(isinstance(action, Dispatch) for action in sent)


def test_what_the_policy_has_forgotten_fails_in_the_end() -> None:
    """It waits at the fault and is still waiting, never sent out, a minute later."""
    scheduler, policy = make(nodes=0)
    scheduler.handle(0, RequestArrived(0, 0))
    policy.slips = {("on_capacity", 0)}
    faulty(scheduler, 1, NodeJoined(0, 0, "n0"))
    policy.slips.clear()
    policy.queue.clear()  # lost
    actions = scheduler.handle(1 + MINUTE_NS, TimerFired(FORGOTTEN))
    assert settled([to_wire(action) for action in actions]) == {0: FAILED}


def test_who_has_been_sent_out_since_is_not_forgotten() -> None:
    scheduler, policy = make(nodes=0)
    scheduler.handle(0, RequestArrived(0, 0))
    policy.slips = {("on_capacity", 0)}
    faulty(scheduler, 1, NodeJoined(0, 0, "n0"))
    policy.slips.clear()
    scheduler.handle(2, TimerFired(OFFER))  # too early, so ignored
    scheduler.handle(1 + 100 * MILLISECOND_NS, TimerFired(OFFER))
    assert scheduler.handle(1 + MINUTE_NS, TimerFired(FORGOTTEN)) == []
    assert list(scheduler.view.requests) == [0]


def test_who_comes_after_a_fault_may_wait_for_long() -> None:
    scheduler, _ = make(("on_arrival", 1), nodes=0)
    scheduler.handle(0, RequestArrived(0, 0))
    faulty(scheduler, 1, RequestArrived(1, 0))
    scheduler.handle(2, RequestArrived(2, 0))
    late = scheduler.handle(1 + MINUTE_NS, TimerFired(FORGOTTEN))
    assert settled([to_wire(action) for action in late]) == {0: FAILED}
    for minute in range(2, 100):
        scheduler.handle(minute * MINUTE_NS, RequestArrived(minute + 1, 0))
        assert FORGOTTEN not in scheduler.view.timers
    assert list(scheduler.view.requests) == list(range(2, 101))


def test_who_waits_at_a_later_fault_is_checked_after_that() -> None:
    """0 came before the first fault, 2 before the second and 4 after both."""
    scheduler, _ = make(("on_arrival", 1), ("on_arrival", 3), nodes=0)
    left = []
    for request_id in range(5):
        event = RequestArrived(request_id, 0)
        if request_id in (1, 3):
            faulty(scheduler, request_id, event)
        else:
            scheduler.handle(request_id, event)
    for _ in range(2):
        due_ns = scheduler.view.timers[FORGOTTEN]
        scheduler.handle(due_ns, TimerFired(FORGOTTEN))
        left.append(list(scheduler.view.requests))
    assert left == [[2, 4], [4]]
    assert FORGOTTEN not in scheduler.view.timers
