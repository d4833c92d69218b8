"""No policy keeps withdrawn tasks in its queue while nothing can be served."""

from __future__ import annotations

from collections import deque
from dataclasses import is_dataclass

import pytest

from headgate.core.actions import Dispatch, Settle, StartInstance
from headgate.core.clock import MILLISECOND_NS
from headgate.core.events import InstanceStarted, NodeJoined, RequestArrived, RequestCancelled
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Stage, Variant
from headgate.core.rng import stream
from headgate.core.scheduler.scheduler import Scheduler
from headgate.core.states import Outcome
from headgate.policies import find_policy, policy_names

MS = MILLISECOND_NS


def make_scheduler(policy: str) -> Scheduler:
    """One function, which nothing can run: there is no node."""
    profile = Profile((10 * MS,))
    function = Function(0, "f0", (Variant(0, "v0", 0, (0,), profile),))
    app = App((function,), (Pipeline(0, "p0", (Stage(function),)),), (Pool(0, "gpu", nodes=1),))
    return Scheduler(app, find_policy(policy), rng=stream(7, "policy/0"))


def held(thing: object, visited: set[int]) -> int:
    """How many things can be reached: what a policy's memory grows with."""
    if id(thing) in visited or is_dataclass(thing) or callable(thing):
        return 0
    if isinstance(thing, int | float | str | None):
        return 1
    visited.add(id(thing))
    if isinstance(thing, dict):
        return sum(held(key, visited) + held(value, visited) for key, value in thing.items())
    if isinstance(thing, list | tuple | set | deque):
        return 1 + sum(held(item, visited) for item in thing)
    names = {n for cls in type(thing).__mro__ for n in getattr(cls, "__slots__", ())}
    names |= vars(thing).keys() if hasattr(thing, "__dict__") else set()
    return 1 + sum(held(getattr(thing, name), visited) for name in names if hasattr(thing, name))


@pytest.mark.parametrize("policy", policy_names())
def test_cancelled_tasks_are_not_kept(policy: str) -> None:
    """20,000 come and are cancelled, while one waits at the head and ten behind it."""
    scheduler = make_scheduler(policy)
    for request_id in range(11):
        scheduler.handle(0, RequestArrived(request_id, 0))
    before = held(scheduler.policy, set())
    for request_id in range(11, 20_011):
        scheduler.handle(request_id, RequestArrived(request_id, 0))
        scheduler.handle(request_id, RequestCancelled(request_id))
    assert len(scheduler.view.requests) == 11
    assert held(scheduler.policy, set()) < 4 * before + 1_000


@pytest.mark.parametrize("policy", policy_names())
def test_those_that_still_wait_are_served_in_their_order(policy: str) -> None:
    """Every second one is withdrawn; the first of the others has the node when there is one."""
    scheduler = make_scheduler(policy)
    ordered = []  # a start that names no node is ordered before there is one
    for request_id in range(100):
        ordered += scheduler.handle(request_id, RequestArrived(request_id, 0))
    for request_id in range(0, 100, 2):
        (settle,) = scheduler.handle(200, RequestCancelled(request_id))
        assert isinstance(settle, Settle)
        assert settle.settlement.outcome == Outcome.CANCELLED
    actions = scheduler.handle(300, NodeJoined(0, 0, "gpu1"))
    if not any(isinstance(action, Dispatch) for action in actions):
        # The policy sends nothing to an instance before it has started.
        (start,) = [a for a in (*ordered, *actions) if isinstance(a, StartInstance)]
        actions = scheduler.handle(301, InstanceStarted(start.instance_id, 0))
    assert [a.task_ids for a in actions if isinstance(a, Dispatch)] == [[256]]
