"""A call: one request of a client, from the moment it is understood to its answer.

Front ends (HTTP, gRPC) make calls and hand them to the runtime; the runtime fills in how they ended
and gives them back through `on_answer`, exactly once, unless the front end has withdrawn the call
or answered it at its own deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, final

from headgate.core.model import App, Pipeline
from headgate.functions.tensor import Tensor, TensorSpec

INTERNAL: Final = "internal"  # the reason of a call that failed by a mistake of the gateway


@final
class Call:
    """What was asked for, and then what became of it."""

    __slots__ = (
        "arrived_ns",
        "batch_items",
        "began_ns",
        "client_id",
        "client_request_id",
        "deadline_ns",
        "ended_ns",
        "error",
        "inputs",
        "is_hard",
        "items",
        "on_answer",
        "outcome",
        "outputs",
        "pipeline_id",
        "predicted_ns",
        "priority",
        "reason",
        "request_id",
        "retry_ns",
        "sent_ns",
        "status",
        "trace",
    )

    def __init__(
        self,
        pipeline_id: int,
        inputs: list[Tensor],
        items: int,
        on_answer: Callable[[Call], None],
        *,
        client_id: int = 0,
        priority: int = 0,
        deadline_ns: int = 0,
        is_hard: bool = False,
    ) -> None:
        self.pipeline_id = pipeline_id
        self.inputs = inputs
        self.items = items
        self.on_answer = on_answer
        self.client_id = client_id
        self.priority = priority  # smaller is more urgent; 0 is usual
        self.deadline_ns = deadline_ns  # on the machine's monotonic clock; 0: the objective's
        self.is_hard = is_hard  # nobody wants the answer after the deadline
        self.trace: object = None  # the span of this call, where tracing is on
        self.client_request_id = b""  # what the client calls it (`X-Request-Id`), or was told to
        # How it went. Times are on the machine's monotonic clock; 0: never.
        self.request_id = -1
        self.arrived_ns = 0
        self.sent_ns = 0  # last handed to a worker
        self.began_ns = 0  # the worker began to run it
        self.ended_ns = 0  # the worker had run it
        self.batch_items = 0  # items that ran together, its own among them
        # How it ended: `outcome` is one of `Outcome`.
        self.outcome: int | None = None
        self.reason = ""
        self.predicted_ns = 0
        self.retry_ns = 0
        self.outputs: list[Tensor] = []
        self.error = ""  # what the function said when it could not do it
        self.status = 500  # and whose fault that was: 400 the client's, 500 its own


# What a front end may know of the runtime and ask of it.


class GatewayPhase(Enum):
    """Where a gateway is in its life."""

    STARTING = "starting"  # alive, not ready
    READY = "ready"
    LEAVING = "leaving"  # says it is not ready, and serves still: balancers need time to notice
    DRAINING = "draining"  # takes no more; what it has is finished


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pipeline as clients see it."""

    name: str
    pipeline: Pipeline
    platform: str
    inputs: tuple[TensorSpec, ...]  # none: the function looks at whatever it is given by itself
    outputs: tuple[TensorSpec, ...]
    batches: bool  # the first dimension counts items
    items_max: int  # of one request


def without_details(problem: str) -> str:
    """Return a problem as anybody may see it: of an exception, its type and not what it says.

    >>> without_details("cannot be loaded: OSError: there is no secret/weights")
    'cannot be loaded: OSError'
    """
    before, found, reason = problem.partition(CANNOT_LOAD)
    kind = reason.partition(":")[0]
    if not found:
        return problem
    return f"{before}{CANNOT_LOAD}{kind if kind.isidentifier() else 'unknown error'}"


CANNOT_LOAD: Final = "cannot be loaded: "


class FrontEndApi(Protocol):
    """The runtime, as front ends see it. Everything here runs on the gateway's one event loop."""

    @property
    def phase(self) -> GatewayPhase:
        """Where it is in its life."""

    @property
    def app(self) -> App:
        """What is served. Clients are the tenants."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """By name; empty while it is starting."""

    def problem(self, model: ServedModel) -> str:
        """Why a model cannot be asked just now; nothing if it is ready."""

    def now_ns(self) -> int:
        """The machine's monotonic clock, which deadlines are on."""

    def submit(self, call: Call) -> None:
        """Have it answered: `call.on_answer(call)` is called later, once, never from within."""

    def cancel(self, call: Call) -> None:
        """Nobody waits for the answer any more: `on_answer` is not called."""


# Whether the server and its models are ready, and why not, in words that anybody may see.


def problems(serving: FrontEndApi) -> dict[str, str]:
    """Why models cannot be asked just now, by name."""
    found = {name: serving.problem(model) for name, model in serving.models.items()}
    return {name: without_details(problem) for name, problem in found.items() if problem}


def server_problem(serving: FrontEndApi) -> str:
    """Why balancers should send nothing here just now; nothing if everything can be asked."""
    if serving.phase is not GatewayPhase.READY:
        return f"the server is {serving.phase.value}"
    broken = problems(serving)
    return f"not ready: {', '.join(broken)}" if broken else ""


def model_problem(serving: FrontEndApi, model: ServedModel, *, in_full: bool) -> str:
    """Why a model cannot be asked just now; nothing if it is ready.

    `in_full`: with what an exception says, for clients that are to see such things.
    """
    if serving.phase is not GatewayPhase.READY:
        return f"the server is {serving.phase.value}"
    problem = serving.problem(model)
    return problem if in_full else without_details(problem)
