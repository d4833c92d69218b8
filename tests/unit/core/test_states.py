"""The tables of legal state transitions."""

from __future__ import annotations

import pytest

from headgate.core.states import (
    BATCH_TABLE,
    INSTANCE_TABLE,
    NODE_TABLE,
    REQUEST_TABLE,
    RESIDENCY_TABLE,
    TASK_TABLE,
    BatchState,
    InstanceState,
    NodeState,
    RequestState,
    Residency,
    Table,
    TaskState,
    state_names,
)

MACHINES = [
    (RequestState, REQUEST_TABLE, RequestState.OPEN, {RequestState.SETTLED}),
    (TaskState, TASK_TABLE, TaskState.BLOCKED, {3, 4, 5}),
    (InstanceState, INSTANCE_TABLE, InstanceState.STARTING, {InstanceState.GONE}),
    (BatchState, BATCH_TABLE, BatchState.IN_FLIGHT, {1, 2, 3, 4}),
    (NodeState, NODE_TABLE, NodeState.DOWN, set()),
    (Residency, RESIDENCY_TABLE, Residency.NOWHERE, set()),
]


@pytest.mark.parametrize(("states", "table", "first", "last"), MACHINES)
def test_every_state_is_in_its_table_and_can_be_reached(
    states: type, table: Table, first: int, last: set[int]
) -> None:
    names = state_names(states)
    assert sorted(names) == sorted(table) == list(range(len(names)))
    reached, frontier = {first}, [first]
    while frontier:
        for after in table[frontier.pop()]:
            if after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(names)
    assert {state for state, following in table.items() if not following} == last


def test_what_is_done_stays_done() -> None:
    assert TaskState.READY in TASK_TABLE[TaskState.RUNNING]
    assert TaskState.READY not in TASK_TABLE[TaskState.DONE]
    assert TaskState.RUNNING not in TASK_TABLE[TaskState.BLOCKED]
    assert InstanceState.IDLE not in INSTANCE_TABLE[InstanceState.DRAINING]


def test_names_are_for_people() -> None:
    assert state_names(TaskState)[TaskState.SKIPPED] == "SKIPPED"
