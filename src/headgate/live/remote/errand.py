"""An errand: a batch on its way to a place that somebody else runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from headgate.core.actions import Dispatch
from headgate.core.clock import MILLISECOND_NS, NEVER_NS
from headgate.core.records import STAGES_MAX
from headgate.core.view import View
from headgate.live.call import Call
from headgate.live.messages import Work

Shares: TypeAlias = tuple[tuple[int, int, int], ...]  # pipeline, client and items of each request


@final
@dataclass(frozen=True, slots=True)
class Errand:
    """What is to be run, by when, and on whose behalf."""

    batch_id: int
    variant_id: int
    function: str
    pool_id: int
    node_id: int | None
    works: list[Work]
    deadline_ns: int  # of the one request among them that has the most time
    gives_up: bool  # nobody wants any of it after that
    traceparent: str | None
    tenant: str | None
    shares: Shares

    def left_ms(self, now_ns: int) -> float | None:
        """How long until the deadline; None: there is none."""
        if self.deadline_ns >= NEVER_NS:
            return None
        return (self.deadline_ns - now_ns) / MILLISECOND_NS


def make_errand(
    view: View, action: Dispatch, works: list[Work], calls: Mapping[int, Call]
) -> Errand:
    """Return a dispatched batch as an errand. Calls are by request id, and open."""
    app = view.app
    asked = [calls[task_id // STAGES_MAX] for task_id in action.task_ids]
    ids = {call.request_id for call in asked}
    requests = [view.requests[id] for id in ids if id in view.requests]
    tenants = {call.client_id for call in asked}
    return Errand(
        action.batch_id,
        action.variant_id,
        app.functions[app.variants[action.variant_id].function_id].name,
        action.pool_id,
        action.node_id,
        works,
        max((request.deadline_ns for request in requests), default=NEVER_NS),
        bool(requests) and all(request.gives_up for request in requests),
        traceparent_of(asked),
        app.clients[tenants.pop()].name if len(tenants) == 1 else None,
        tuple((call.pipeline_id, call.client_id, call.items) for call in asked),
    )


def traceparent_of(calls: Sequence[Call]) -> str | None:
    """Return where the first call that is traced stands in its trace, as headers have it."""
    for call in calls:
        trace = call.trace
        if isinstance(trace, bytes):
            return trace.decode("ascii", "replace")
        context_of = getattr(trace, "get_span_context", None)  # OpenTelemetry's, where it is on
        if context_of is not None:
            context = context_of()
            flags = int(context.trace_flags)
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
    return None
