"""The lifecycles, as tables: which state may follow which.

States are small integers in namespaces rather than `Enum` members because they are compared
several times per request (an `Enum` attribute costs 100 ns a look on CPython 3.11, and a compiled
build turns these into constants). The tables below are the single statement of what is legal:
`validate` mode checks every change against them and the diagrams in the documents are drawn from
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


class RequestState:
    """A request is open until it is settled with its one outcome."""

    OPEN: Final = 0
    SETTLED: Final = 1


class TaskState:
    """One stage of one request."""

    BLOCKED: Final = 0  # predecessors are not done
    READY: Final = 1  # may be dispatched
    RUNNING: Final = 2  # at least one attempt is out
    DONE: Final = 3
    SKIPPED: Final = 4  # a cascade ended before it
    DROPPED: Final = 5  # its request was settled without it; an attempt may still be out
    HELD: Final = 6  # lost with its worker: in quarantine until it is its turn to run alone


class InstanceState:
    """A function on a node."""

    STARTING: Final = 0
    IDLE: Final = 1
    BUSY: Final = 2
    DRAINING: Final = 3  # ordered to stop; may be finishing its last batches
    GONE: Final = 4


class Residency:
    """Where the weights of an instance are."""

    NOWHERE: Final = 0
    HOST: Final = 1
    DEVICE: Final = 2


class NodeState:
    """A node is there or it is not."""

    DOWN: Final = 0
    UP: Final = 1


class BatchState:
    """An order to run, until the one event that ends it."""

    IN_FLIGHT: Final = 0
    FINISHED: Final = 1
    FAILED: Final = 2  # it ran and broke
    REFUSED: Final = 3  # it never ran
    LOST: Final = 4  # nobody knows


Table = Mapping[int, tuple[int, ...]]

REQUEST_TABLE: Final[Table] = {
    RequestState.OPEN: (RequestState.SETTLED,),
    RequestState.SETTLED: (),
}
TASK_TABLE: Final[Table] = {
    TaskState.BLOCKED: (TaskState.READY, TaskState.SKIPPED, TaskState.DROPPED),
    TaskState.READY: (TaskState.RUNNING, TaskState.DROPPED),
    TaskState.RUNNING: (TaskState.READY, TaskState.HELD, TaskState.DONE, TaskState.DROPPED),
    TaskState.HELD: (TaskState.READY, TaskState.DROPPED),
    TaskState.DONE: (),
    TaskState.SKIPPED: (),
    TaskState.DROPPED: (),
}
INSTANCE_TABLE: Final[Table] = {
    InstanceState.STARTING: (
        InstanceState.IDLE,
        InstanceState.BUSY,
        InstanceState.DRAINING,
        InstanceState.GONE,
    ),
    InstanceState.IDLE: (InstanceState.BUSY, InstanceState.DRAINING, InstanceState.GONE),
    InstanceState.BUSY: (InstanceState.IDLE, InstanceState.DRAINING, InstanceState.GONE),
    InstanceState.DRAINING: (InstanceState.GONE,),
    InstanceState.GONE: (),
}
RESIDENCY_TABLE: Final[Table] = {
    Residency.NOWHERE: (Residency.DEVICE,),
    Residency.HOST: (Residency.DEVICE, Residency.NOWHERE),
    Residency.DEVICE: (Residency.HOST, Residency.NOWHERE),
}
NODE_TABLE: Final[Table] = {
    NodeState.DOWN: (NodeState.UP,),
    NodeState.UP: (NodeState.DOWN,),
}
BATCH_TABLE: Final[Table] = {
    BatchState.IN_FLIGHT: (
        BatchState.FINISHED,
        BatchState.FAILED,
        BatchState.REFUSED,
        BatchState.LOST,
    ),
    BatchState.FINISHED: (),
    BatchState.FAILED: (),
    BatchState.REFUSED: (),
    BatchState.LOST: (),
}


def state_names(states: type) -> dict[int, str]:
    """Map the states of one of the namespaces above to their names.

    >>> state_names(NodeState)
    {0: 'DOWN', 1: 'UP'}
    """
    return {value: name for name, value in vars(states).items() if name.isupper()}


def is_legal(table: Table, before: int, after: int) -> bool:
    """Whether a thing may go from one state to the other (staying is always legal)."""
    return before == after or after in table[before]


# The six ways a request can end, every request in exactly one, and why some are turned away.


class Outcome:
    """Small integers rather than an `Enum`: they live in columns and on the hot path."""

    MET: Final = 0  # answered by its deadline
    LATE: Final = 1  # answered, but after its deadline
    REJECTED: Final = 2  # turned away at admission
    EXPIRED: Final = 3  # admitted, then given up: pruned or timed out while it waited
    FAILED: Final = 4  # admitted, then broken: no attempt succeeded and none may be made
    CANCELLED: Final = 5  # withdrawn by its client


class Rejection:
    """Why a request is turned away: the words that clients, logs and metrics see."""

    OVERLOADED: Final = "overloaded"  # it would be late behind what is here already
    UNFAIR: Final = "over_fair_share"  # its client has more than its share here already
    INFEASIBLE: Final = "infeasible"  # it would be late even alone: more capacity will not help
    UNAVAILABLE: Final = "unavailable"  # nothing that could run it is there just now
    FULL: Final = "too_many_open"  # a bound of the Scheduler's
    LOAD_FAILED: Final = "load_failed"  # a function that it needs cannot be loaded just now
    TOO_LARGE: Final = "too_large"  # no platform can carry it, and there is no other place for it


class Failure:
    """Why what was admitted could not be run: words in the reason of a FAILED request."""

    LOST: Final = "lost"  # nobody knows whether it ran, and it may not be repeated
    KILLED_WORKER: Final = "its worker died while running it alone"
    REFUSED: Final = "refused too often"
    POLICY_FAULT: Final = "policy fault"  # a hook of the policy raised an exception over it
    TOO_LARGE: Final = "too_large"  # as of a rejection, but found out only when it was run


OUTCOME_NAMES: Final = ("met", "late", "rejected", "expired", "failed", "cancelled")
