"""A Scheduler under a policy with a queue per stage, driven by events; instances start at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from headgate.config import make_config
from headgate.core.actions import Action, Dispatch, Settle, StartInstance
from headgate.core.clock import MILLISECOND_NS
from headgate.core.events import Event, InstanceStarted, NodeJoined, RequestArrived
from headgate.core.model import (
    App,
    Compute,
    Function,
    Pipeline,
    Pool,
    Profile,
    Shape,
    ShapeTimes,
    Slo,
    Stage,
    Variant,
)
from headgate.core.scheduler.scheduler import Scheduler
from headgate.policies import find_policy

MS: Final = MILLISECOND_NS
# In shape 0 an item costs 20 ms x 1/7 of a GPU, in shape 1 10 ms x 3/7: faster and dearer. A batch
# of two costs less per item in either.
SMALL: Final = Shape(1_000, 1)
LARGE: Final = Shape(1_000, 3)
SMALL_NS: Final = (20 * MS, 30 * MS)
LARGE_NS: Final = (10 * MS, 15 * MS)


def make_function(
    id: int,
    *,
    name: str = "",
    cold_start_ns: int = 0,
    memory_bytes: int = 0,
    concurrency: int = 8,
) -> Function:
    profile = Profile(SMALL_NS, cold_start_ns=cold_start_ns, memory_bytes=memory_bytes)
    more = (ShapeTimes(LARGE, LARGE_NS),)
    variant = Variant(id, f"v{id}", id, (0,), profile, SMALL, concurrency, more)
    return Function(id, name or f"f{id}", (variant,))


def chain_app(
    functions: list[Function],
    slo_ms: int,
    *,
    nodes: int = 1,
    slots: int = 8,
    gpu_sevenths: int = 7,
    memory_bytes: int = 100,
    compute: int = Compute.PER_BATCH,
) -> App:
    """A pipeline of the functions in a row, on one pool whose GPUs have a price."""
    chain = tuple(Stage(f, (f.id - 1,) if f.id else ()) for f in functions)
    slo = Slo(slo_ms * MS) if slo_ms else Slo()
    pool = Pool(
        0, "gpu", nodes=nodes, slots=slots, cpu_milli=16_000, gpu_sevenths=gpu_sevenths,
        compute=compute, memory_bytes=memory_bytes, gpu_usd_per_hour=7.0,
    )  # fmt: skip
    return App(tuple(functions), (Pipeline(0, "p", chain, slo),), (pool,))


class StageRig:
    """A chain of functions on one pool; `sent` has every dispatch."""

    def __init__(
        self,
        functions: list[Function],
        slo_ms: int,
        *,
        policy: str = "esg",
        settings: Mapping[str, object] | None = None,
        nodes: int = 1,
        slots: int = 8,
        gpu_sevenths: int = 7,
        memory_bytes: int = 100,
        compute: int = Compute.PER_BATCH,
    ) -> None:
        app = chain_app(
            functions, slo_ms, nodes=nodes, slots=slots, gpu_sevenths=gpu_sevenths,
            memory_bytes=memory_bytes, compute=compute,
        )  # fmt: skip
        kind = find_policy(policy)
        given = dict(settings or {})
        if any(each.name == "margin" for each in fields(kind.config)):
            given.setdefault("margin", 0.0)  # so that times of tests are exact
        config = make_config(kind.config, given, "test")
        self.scheduler = Scheduler(app, kind, config, validate=True)
        self.sent: list[Dispatch] = []
        self.started: list[StartInstance] = []
        self.settled: dict[int, int] = {}
        for node_id in range(nodes):
            self.at(0, NodeJoined(node_id, 0, f"n{node_id}"))

    def at(self, now_ms: int, event: Event) -> list[Dispatch]:
        """Handle an event, and start what it starts; the dispatches that it led to."""
        before = len(self.sent)
        events = [event]
        while events:
            for action in self.scheduler.handle(now_ms * MS, events.pop(0)):
                events += self._carry_out(action)
        return self.sent[before:]

    def _carry_out(self, action: Action) -> list[Event]:
        if isinstance(action, Dispatch):
            self.sent.append(action)
        elif isinstance(action, Settle):
            self.settled[action.request_id] = action.settlement.outcome
        elif isinstance(action, StartInstance):
            self.started.append(action)
            assert action.node_id is not None
            return [InstanceStarted(action.instance_id, action.node_id)]
        return []

    def arrive(self, now_ms: int, request_id: int, items: int = 1) -> list[Dispatch]:
        return self.at(now_ms, RequestArrived(request_id, 0, items=items))
