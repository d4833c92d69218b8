"""The states of requests, tasks, instances, nodes and batches, with tables of legal transitions.

States are small integers in namespaces rather than `Enum` members, because they are compared
several times per request: an `Enum` attribute costs 100 ns per lookup on CPython 3.11, and a
compiled build turns these integers into constants. The tables are the single definition of what is
legal: `validate` mode checks what tasks and instances do against them, and the diagrams in the
documentation are generated from them.

The module also defines how a request ends: the six outcomes, of which every request gets exactly
one, the reasons for which requests are rejected or fail, and the `Settlement` that has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final


class RequestState:
    """A request is open until it is settled with exactly one outcome."""

    OPEN: Final = 0
    SETTLED: Final = 1


class TaskState:
    """One stage of one request."""

    BLOCKED: Final = 0  # predecessors are not done
    READY: Final = 1  # may be dispatched
    RUNNING: Final = 2  # at least one attempt is in flight
    DONE: Final = 3
    SKIPPED: Final = 4  # a cascade ended before it
    DROPPED: Final = 5  # its request was settled without it; an attempt may still be in flight
    HELD: Final = 6  # lost with its worker: in quarantine until its turn to run alone


class InstanceState:
    """A variant of a function on a node."""

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
    """Whether a node is part of the fleet."""

    DOWN: Final = 0
    UP: Final = 1


class BatchState:
    """A batch is in flight until the one event that ends it."""

    IN_FLIGHT: Final = 0
    FINISHED: Final = 1
    FAILED: Final = 2  # it ran and failed, for one of its tasks at least
    REFUSED: Final = 3  # it never ran
    LOST: Final = 4  # it is unknown whether it ran


Table = Mapping[int, tuple[int, ...]]

REQUEST_TABLE: Final[Table] = {RequestState.OPEN: (RequestState.SETTLED,), RequestState.SETTLED: ()}
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
NODE_TABLE: Final[Table] = {NodeState.DOWN: (NodeState.UP,), NodeState.UP: (NodeState.DOWN,)}
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


class Outcome:
    """How a request ended. Integers, not an `Enum`: they are stored in columns and on hot paths."""

    MET: Final = 0  # answered by its deadline
    LATE: Final = 1  # answered after its deadline
    REJECTED: Final = 2  # rejected at admission
    EXPIRED: Final = 3  # admitted, then dropped: pruned, or past its hard deadline in the queue
    FAILED: Final = 4  # admitted, but no attempt succeeded and none may be made
    CANCELLED: Final = 5  # cancelled by its client


class Rejection:
    """Why a request was rejected, in the words of clients, logs and metrics."""

    OVERLOADED: Final = "overloaded"  # predicted to miss its deadline behind the present queue
    UNFAIR: Final = "over_fair_share"  # it would take what other clients or pipelines may claim
    INFEASIBLE: Final = "infeasible"  # late even on an idle system: more capacity will not help
    # The placements that are in time cost more than the objective, even on an idle system.
    OVER_COST: Final = "over_cost"
    UNAVAILABLE: Final = "unavailable"  # no node or platform that could run it is available
    FULL: Final = "too_many_open"  # `Limits.open_requests_max` is reached
    LOAD_FAILED: Final = "load_failed"  # a function that it needs cannot be loaded
    TOO_LARGE: Final = "too_large"  # it exceeds the payload limit of every pool that could run it


DEADLINE_EXCEEDED: Final = "deadline_exceeded"  # the reason of what expired, or was late in vain


class Failure:
    """Why an admitted request failed: words in the reason of a FAILED request."""

    LOST: Final = "lost"  # unknown whether it ran, and it may not be retried
    KILLED_WORKER: Final = "its worker died while running it alone"
    REFUSED: Final = "refused too often"
    POLICY_FAULT: Final = "policy fault"  # a hook of the policy raised an exception about it
    TOO_LARGE: Final = "too_large"  # like the rejection, but found only when the task was run
    GATEWAY_CRASHED: Final = "its gateway crashed"  # recorded by who observes the crash


OUTCOME_NAMES: Final = ("met", "late", "rejected", "expired", "failed", "cancelled")

# Hot paths import these: interpreted code reads a global many times faster than a class attribute.
TASK_BLOCKED: Final = TaskState.BLOCKED
TASK_READY: Final = TaskState.READY
TASK_RUNNING: Final = TaskState.RUNNING
TASK_DONE: Final = TaskState.DONE
REQUEST_OPEN: Final = RequestState.OPEN
REQUEST_SETTLED: Final = RequestState.SETTLED
BATCH_IN_FLIGHT: Final = BatchState.IN_FLIGHT
BATCH_FINISHED: Final = BatchState.FINISHED
INSTANCE_STARTING: Final = InstanceState.STARTING
INSTANCE_IDLE: Final = InstanceState.IDLE
INSTANCE_BUSY: Final = InstanceState.BUSY
INSTANCE_GONE: Final = InstanceState.GONE
ON_HOST: Final = Residency.HOST
ON_DEVICE: Final = Residency.DEVICE
NODE_UP: Final = NodeState.UP
OUTCOME_MET: Final = Outcome.MET


@final
@dataclass(frozen=True)
class Settlement:
    """How a request ended: the record that goes from the Scheduler to the client as it is.

    The action `Settle`, the event log, the recorder of the simulator and the live gateway carry the
    record whole, so a field that is added here needs no further code on the way. Fields have
    defaults: a policy gives those that it knows.
    """

    outcome: int
    reason: str = ""
    predicted_ns: int = 0  # latency that a rejected request would have had; 0: unknown
    retry_ns: int = 0  # delay after which to retry; 0: unknown, or do not retry
    stage: str = ""  # the stage that failed, of a pipeline with several
    # Of a rejected request, as far as the policy knows; 0 and empty: it does not.
    predicted_usd: float = 0.0  # what it would have cost
    margin_ns: int = 0  # kept between a prediction and the deadline, so that promises are kept
    accepted_ns: int = 0  # a latency objective that would have been accepted: about the least
    accepted_usd: float = 0.0  # a cost objective that would have been
    short_of: str = ""  # the pool that is short, and for how long from now
    short_ns: int = 0
    objective_ns: int = 0  # the latency that it was allowed; 0: any
    objective_usd: float = 0.0  # and the cost


# The settlements of most requests are made once.
MET: Final = Settlement(Outcome.MET)
LATE: Final = Settlement(Outcome.LATE)
LATE_IN_VAIN: Final = Settlement(Outcome.LATE, DEADLINE_EXCEEDED)  # its deadline was hard
