"""A call: one request of a client, from the moment it is understood to its answer.

Front ends (HTTP, gRPC) make calls and hand them to the runtime; the runtime fills in how they ended
and gives them back through `on_answer`, exactly once, unless the front end has withdrawn the call
or answered it at its own deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from headgate.functions.tensor import Tensor

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
        "gives_up",
        "inputs",
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
        gives_up: bool = False,
    ) -> None:
        self.pipeline_id = pipeline_id
        self.inputs = inputs
        self.items = items
        self.on_answer = on_answer
        self.client_id = client_id
        self.priority = priority  # smaller is more urgent; 0 is usual
        self.deadline_ns = deadline_ns  # on the machine's monotonic clock; 0: the objective's
        self.gives_up = gives_up  # nobody wants the answer after the deadline
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
