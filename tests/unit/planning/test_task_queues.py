"""The queues of the default policy: their order, what leaves them early, the heads of a pool."""

from __future__ import annotations

from random import Random

import pytest

from headgate.core.model import Function, Pipeline, Profile, Stage, Variant
from headgate.core.records import Request, Task
from headgate.core.states import TaskState
from headgate.planning.dispatch.task_queues import EdfQueue, Heads, Key, urgency

FUNCTION = Function(0, "f", (Variant(0, "f", 0, (0,), Profile((1_000,))),))
PIPELINE = Pipeline(0, "p", (Stage(FUNCTION),))


def make_task(number: int, items: int = 1, *, client: int = 0, priority: int = 0) -> Task:
    (task,) = Request(number, PIPELINE, client, items, priority, 0, 10**9).tasks
    task.state = TaskState.READY
    return task


def withdraw(queue: EdfQueue, task: Task) -> None:
    task.state = TaskState.DROPPED
    queue.withdraw(task)


@pytest.mark.parametrize("seed", range(30))
def test_the_most_urgent_task_that_waits_is_the_head(seed: int) -> None:
    """Random arrivals, withdrawals and departures, against a list that is sorted each time."""
    rng, queue = Random(seed), EdfQueue(0)
    waiting: list[tuple[Key, Task]] = []
    for number in range(400):
        choice = rng.random()
        if choice < 0.5:
            task = make_task(number, rng.randint(1, 4))
            key = (rng.randint(-1, 1), rng.randint(0, 50), task.id, rng.randint(0, 50))
            waiting.append((key, task))
            is_first = queue.push(key, task)
            assert is_first == (queue.head_key() is key)  # it may be behind one that was withdrawn
        elif waiting and choice < 0.75:
            _, task = waiting.pop(rng.randrange(len(waiting)))
            withdraw(queue, task)
        elif waiting:
            waiting.sort(key=lambda entry: entry[0])
            assert queue.head() is waiting[0][1]
            assert queue.pop() is waiting.pop(0)[1]
        first = min(waiting, key=lambda entry: entry[0], default=None)
        head = queue.head()
        assert (None if head is None else (queue.head_key(), head)) == first
        assert queue.items == sum(task.request.items for _, task in waiting)


@pytest.mark.parametrize("seed", range(30))
def test_a_client_orders_its_own_tasks_and_moves_nobody_elses(seed: int) -> None:
    """The places of a client stay where they are; its tasks take them by priority, then by key."""
    rng, queue = Random(seed), EdfQueue(0)
    waiting: list[tuple[Key, Task]] = []
    for number in range(40):
        client = rng.randrange(3)
        priority = 0 if client == 0 else rng.choice((0, 0, -2, 3))
        task = make_task(number, client=client, priority=priority)
        waiting.append(((0, rng.randint(0, 99), task.id, 0), task))
        queue.push(*waiting[-1])
    expected: list[Task] = []
    by_client: dict[int, list[Task]] = {}
    for _, task in sorted(waiting, key=lambda entry: (entry[1].request.priority, entry[0])):
        by_client.setdefault(task.request.client, []).append(task)
    for _, task in sorted(waiting, key=lambda entry: entry[0]):
        expected.append(by_client[task.request.client].pop(0))
    order = []
    while queue.head() is not None:
        order.append(queue.pop())
    assert order == expected


@pytest.mark.parametrize("priority", [0, -1])
def test_withdrawn_tasks_do_not_pile_up_behind_a_head_that_stays(priority: int) -> None:
    queue = EdfQueue(0)
    tasks = [make_task(number, priority=priority) for number in range(1_000)]
    for task in tasks:
        queue.push((0, 0, task.id, 0), task)
    for task in tasks[1:]:
        withdraw(queue, task)
    assert queue.items == 1
    assert len(queue._heap) <= 2


@pytest.mark.parametrize("seed", range(30))
def test_the_heads_of_a_pool_forget_no_queue(seed: int) -> None:
    """What one of two pools takes, or what is withdrawn, changes the heads of the other."""
    rng = Random(seed)
    pools, queues = (Heads(), Heads()), [EdfQueue(number) for number in range(5)]
    waiting: list[list[Task]] = [[] for _ in queues]
    for number in range(500):
        queue = rng.choice(queues)
        choice = rng.random()
        if choice < 0.5:
            task = make_task(number)
            queue.push((0, rng.randint(0, 30), task.id, rng.randint(0, 30)), task)
            waiting[queue.id].append(task)
            for heads in pools:
                heads.push(queue)
        elif choice < 0.7 and waiting[queue.id]:
            task = rng.choice(waiting[queue.id])
            waiting[queue.id].remove(task)
            withdraw(queue, task)
            for heads in pools:
                heads.push(queue)
        else:
            heads = rng.choice(pools)
            found = heads.first()
            filled = [q for q in queues if waiting[q.id]]
            if not filled:
                assert found is None
                continue
            assert found is not None
            keys = {q.id: q.head_key() for q in filled if q.head() is not None}
            assert keys[found.id] == min(keys.values(), key=urgency)
            waiting[found.id].remove(found.pop())
            for heads in pools:
                heads.push(found)


def test_heads_do_not_grow_while_nobody_asks() -> None:
    """A pool without a free node: each arrival is more urgent than the last."""
    heads, queue = Heads(), EdfQueue(0)
    for number in range(5_000):
        task = make_task(number)
        queue.push((0, -number, task.id, -number), task)
        heads.push(queue)
    assert len(heads.entries) < 100
    assert heads.first() is queue
    heads.remove(queue)
    assert heads.first() is None


def test_a_queue_that_is_put_back_is_found_again() -> None:
    heads, queue, task = Heads(), EdfQueue(0), make_task(0)
    queue.push((0, 0, task.id, 0), task)
    heads.push(queue)
    heads.push(queue)
    assert heads.first() is queue
    heads.remove(queue)
    assert heads.first() is None
    heads.push(queue)
    assert heads.first() is queue
