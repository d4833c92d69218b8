"""What a run leaves behind, as columns: one row per request, per span of work, per resource.

The simulator and the live runtime fill these; summaries, reports and traces read them. Times are
nanoseconds since the start of the run; `NEVER_NS` stands for "it did not happen".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.clock import NEVER_NS
from headgate.core.states import Outcome

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]


class SpanKind:
    """What a node was doing during a span."""

    START: Final = 0  # starting an instance: process, imports, weights
    LOAD: Final = 1  # swapping weights from host memory to the device
    RUN: Final = 2  # running a batch


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """One row per request, in order of request id."""

    arrival_ns: Int64
    started_ns: Int64  # when a worker first began to work for it (a cold start is work)
    finished_ns: Int64  # when it was settled, whatever the outcome
    deadline_ns: Int64
    outcome: Int8
    pipeline: Int32  # index into `RunColumns.pipelines`
    client: Int32  # index into `RunColumns.clients`
    attempts: Int32  # batches it was sent out in
    cold: Int8  # 1 when it waited for an instance to start

    def __len__(self) -> int:
        return len(self.arrival_ns)


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """One row per span of work on a node, in order of its end. Empty when not recorded."""

    node: Int32  # index into `RunColumns.resources`
    function: Int32  # index into `RunColumns.functions`
    kind: Int8
    start_ns: Int64
    end_ns: Int64
    batch: Int64  # batch id; for a start or a load, the instance id
    items: Int32

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """What one node, or one serverless pool, was used for and what it cost."""

    name: str
    pool: str
    tier: str
    up_ns: int  # how long it was there (for a serverless pool: the sum over its instances)
    busy_ns: int  # how long it worked, per unit of its own concurrency
    cold_starts: int
    loads: int
    usage_usd: float  # paying only for what ran
    allocation_usd: float  # paying for what was held, idle or not


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Everything that reports need about one run."""

    requests: RequestColumns
    spans: SpanColumns
    resources: tuple[ResourceUse, ...]
    pipelines: tuple[str, ...]
    functions: tuple[str, ...]
    clients: tuple[str, ...]
    window_ns: int  # arrivals stop here; goodput counts answers inside [0, window_ns)
    end_ns: int  # the last event


# What lies outside of the Scheduler's sight: a client sends earlier and hears later.


def with_client_overhead(requests: RequestColumns, overhead_ns: int) -> RequestColumns:
    """Return the columns with every end later by that much: what was just in time is late then.

    Deadlines stay, because a client's objective counts from when it sent its request.
    """
    finished_ns = np.where(
        requests.finished_ns == NEVER_NS, NEVER_NS, requests.finished_ns + overhead_ns
    )
    is_late = (requests.outcome == Outcome.MET) & (finished_ns > requests.deadline_ns)
    outcome = np.where(is_late, Outcome.LATE, requests.outcome).astype(np.int8)
    return replace(requests, finished_ns=finished_ns, outcome=outcome)
