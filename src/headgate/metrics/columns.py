"""The columns of a run: one row per request, per span of work, per resource.

The simulator, the load generator and the reader of event logs fill them; summaries, reports and
traces read them. Times are nanoseconds since the start of the run; `NEVER_NS` means "never".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.clock import NEVER_NS
from headgate.core.states import Outcome

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]

NOWHERE: Final = -1  # the pool of a request that never ran, and the node of one that ran on FaaS


class SpanKind:
    """The kind of work of a span."""

    START: Final = 0  # starting an instance: process, imports, weights
    LOAD: Final = 1  # swapping weights from host memory to the device
    RUN: Final = 2  # running a batch


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """One row per request, in order of request id."""

    arrival_ns: Int64
    started_ns: Int64  # when the first work for it began (a cold start is work)
    finished_ns: Int64  # when it was settled, whatever the outcome
    deadline_ns: Int64
    outcome: Int8
    pipeline: Int32  # index into `RunColumns.pipelines`
    client: Int32  # index into `RunColumns.clients`
    attempts: Int32  # batches it was part of
    cold: Int8  # 1 if it waited for an instance to start
    pool: Int32  # index into `RunColumns.pools`: where its last batch ran, or NOWHERE
    node: Int32  # index into `RunColumns.resources`: where its last batch ran, or NOWHERE
    would_reject: Int8  # 1 if the policy rejected it while admission was only observed

    def __len__(self) -> int:
        return len(self.arrival_ns)


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """One row per span of work on a node, in order of the ends. Empty if not recorded."""

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
    """The use and the cost of one node, or of one serverless pool."""

    name: str
    pool: str
    tier: str
    up_ns: int  # time in service (for a serverless pool: the sum over its instances)
    busy_ns: int  # time at work, divided by the slots of a node
    cold_starts: int
    loads: int
    usage_usd: float  # cost of the busy time alone
    allocation_usd: float  # cost of everything that was held, idle or not
    is_rented_at_start: bool = False  # rented at time 0, so without a boot; elastic nodes only


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """The life and the cost of one instance, where its pool has a price of compute."""

    id: int
    node: int
    variant: int
    shape: int
    start_ns: int  # when its start began
    end_ns: int  # when it was gone, or the end of the run
    batches: int
    usage_usd: float  # cost of the compute that its batches used
    allocation_usd: float  # cost of the compute that it held


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Everything about one run that summaries and reports need."""

    requests: RequestColumns
    spans: SpanColumns
    resources: tuple[ResourceUse, ...]
    pipelines: tuple[str, ...]
    functions: tuple[str, ...]
    clients: tuple[str, ...]
    pools: tuple[str, ...]
    window_ns: int  # end of the arrivals; goodput counts responses inside [0, window_ns)
    end_ns: int  # time of the last event
    # By pipeline: the policy's `admission_margins` at the end; empty if it keeps none.
    admission_margins: tuple[float, ...] = ()
    instances: tuple[InstanceUse, ...] = ()  # of pools with a price of compute
    work: int = 0  # units of work that the policy reported, for example expansions of a search


# By column: the type code, and the value where nothing is known.
REQUEST_CODES: Final[Mapping[str, tuple[str, int]]] = {
    "arrival_ns": ("q", NEVER_NS),
    "started_ns": ("q", NEVER_NS),
    "finished_ns": ("q", NEVER_NS),
    "deadline_ns": ("q", NEVER_NS),
    "outcome": ("b", Outcome.CANCELLED),
    "pipeline": ("i", 0),
    "client": ("i", 0),
    "attempts": ("i", 0),
    "cold": ("b", 0),
    "pool": ("i", NOWHERE),
    "node": ("i", NOWHERE),
    "would_reject": ("b", 0),
}
_TYPE_CODES: Final = {"Int64": "q", "Int32": "i", "Int8": "b"}


def column_codes(columns: type[DataclassInstance]) -> dict[str, str]:
    """Return the type code of each column, for `array`.

    >>> column_codes(SpanColumns)["start_ns"]
    'q'
    """
    return {column.name: _TYPE_CODES[str(column.type)] for column in fields(columns)}


SPAN_CODES: Final = column_codes(SpanColumns)


def build_requests(arrival_ns: ArrayLike, **known: ArrayLike) -> RequestColumns:
    """Return the columns of requests. A column that is not known has its default throughout."""
    count = len(np.asarray(arrival_ns))
    columns = {
        name: np.broadcast_to(np.array(default, code), count)
        for name, (code, default) in REQUEST_CODES.items()
    }
    for name, values in {"arrival_ns": arrival_ns, **known}.items():
        columns[name] = np.asarray(values, REQUEST_CODES[name][0])
    return RequestColumns(**columns)


def build_spans(**known: ArrayLike) -> SpanColumns:
    """Return the columns of spans: all of them, or no span."""
    return SpanColumns(
        **{name: np.asarray(known.get(name, ()), code) for name, code in SPAN_CODES.items()}
    )


def with_client_overhead(requests: RequestColumns, overhead_ns: int | Int64) -> RequestColumns:
    """Return the columns with every request ending `overhead_ns` later, and LATE where it then is.

    One overhead for all requests, or one for each.

    The overhead is the time before a request reaches the Scheduler and after its response leaves.
    Deadlines stay, because the objective of a client counts from when it sends its request.
    """
    finished_ns = np.where(
        requests.finished_ns == NEVER_NS, NEVER_NS, requests.finished_ns + overhead_ns
    )
    is_late = (requests.outcome == Outcome.MET) & (finished_ns > requests.deadline_ns)
    outcome = np.where(is_late, Outcome.LATE, requests.outcome).astype(np.int8)
    return replace(requests, finished_ns=finished_ns, outcome=outcome)
