"""Handmade runs for checkers: events with their actions, and the columns of a run."""

from __future__ import annotations

from headgate.core.actions import Action, Dispatch, Settle
from headgate.core.events import BatchFinished, Event, RequestArrived, TimerFired
from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import Settlement
from headgate.metrics.columns import ResourceUse, RunColumns, SpanKind, build_requests, build_spans
from headgate.sim.checkers import Checker

# Functions 0 and 1; pipeline 0 is a chain of both, 1 and 2 are cascades: 0, then 1 if unsure.
_PROFILE = Profile((10, 15), memory_bytes=60)
F0, F1 = (
    Function(i, f"f{i}", (Variant(i, f"v{i}", i, (0,), _PROFILE, concurrency=2),)) for i in range(2)
)
APP = App(
    (F0, F1),
    (
        Pipeline(0, "chain", (Stage(F0), Stage(F1, (0,))), Slo(100)),
        Pipeline(1, "cascade", (Stage(F0), Stage(F1, (0,), only_if_unsure=True)), Slo(100)),
    ),
    (Pool(0, "gpu", nodes=2, slots=2, memory_bytes=100, host_memory_bytes=60),),
)

Entry = tuple[int, Event, list[Action]]  # time, event, and the actions it led to
Span = tuple[int, int, int, int, int]  # node, start_ns, end_ns, batch, items


def arrives(request_id: int = 0, pipeline: int = 0) -> Entry:
    return (0, RequestArrived(request_id, pipeline), [])


def sends(batch_id: int, *task_ids: int, now_ns: int = 1, variant: int = 0) -> Entry:
    dispatch = Dispatch(batch_id, variant, list(task_ids), len(task_ids), 0, 0, 0)
    return (now_ns, TimerFired(("tick", 0)), [dispatch])


def finishes(batch_id: int, *unsure: int) -> Entry:
    return (20, BatchFinished(batch_id, unsure), [])


def settles(outcome: int, request_id: int = 0, now_ns: int = 50) -> Entry:
    return (now_ns, TimerFired(("tick", 0)), [Settle(request_id, Settlement(outcome))])


def does(*actions: Action, now_ns: int = 1) -> Entry:
    return (now_ns, TimerFired(("tick", 0)), list(actions))


def columns(
    *spans: Span,
    finished_ns: tuple[int, ...] = (),
    outcome: int = 0,
    kinds: tuple[int, ...] | None = None,
) -> RunColumns:
    """Return columns of requests that arrived at 0, with deadline 100, and of batches that ran."""
    count = len(finished_ns)
    node, start_ns, end_ns, batch, items = zip(*spans, strict=True) if spans else ((),) * 5
    return RunColumns(
        requests=build_requests(
            [0] * count,
            started_ns=[0] * count,
            finished_ns=finished_ns,
            deadline_ns=[100] * count,
            outcome=[outcome] * count,
        ),
        spans=build_spans(
            node=node,
            function=[0] * len(node),
            kind=[SpanKind.RUN] * len(node) if kinds is None else kinds,
            start_ns=start_ns,
            end_ns=end_ns,
            batch=batch,
            items=items,
        ),
        resources=tuple(ResourceUse(f"gpu{i}", "gpu", "gpu", 0, 0, 0, 0, 0.0, 0.0) for i in (1, 2)),
        pipelines=("chain", "cascade"),
        functions=("f0", "f1"),
        clients=("client",),
        pools=("gpu",),
        window_ns=100,
        end_ns=1_000,
    )


def violations(checker: Checker, *entries: Entry, run: RunColumns | None = None) -> str:
    """Show the entries, and the columns, to a checker; return its violations."""
    for now_ns, event, actions in entries:
        checker.on_event(now_ns, 0, event, actions)
    if run is not None:
        checker.finish(run)
    return "\n".join(checker.violations)
