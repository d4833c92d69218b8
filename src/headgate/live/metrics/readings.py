"""What is true at the moment of a scrape and is counted by nobody: the runtime is asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spill:
    """One pool that is paid by the call."""

    breaker: int  # `core.spillway.Breaker`
    closed_by: str  # `core.spillway.Closed`: what keeps calls from going out; empty: nothing
    in_flight: int
    calls: Mapping[str, int]  # ever, by how they ended
    pings: int  # ever, to keep instances ready
    spent_usd: float  # ever, as the budgets count it


@dataclass(frozen=True, slots=True)
class Readings:
    """One look at the runtime. What it does not know it leaves out."""

    queue_depth: Mapping[str, int] = field(default_factory=dict)  # by model: requests that wait
    inflight: Mapping[str, int] = field(default_factory=dict)  # by model: taken, not yet settled
    # By function and state (`core.lifecycle`): instances, whatever they are doing.
    replicas: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # By function: how far the time of its batches lately lay above what was predicted.
    prediction_error_s: Mapping[str, float] = field(default_factory=dict)
    # By model, tenant, tier and basis ("usage", "idle" or "warm"); only ever grows.
    cost_usd: Mapping[tuple[str, str, str, str], float] = field(default_factory=dict)
    spills: Mapping[str, Spill] = field(default_factory=dict)  # by pool
