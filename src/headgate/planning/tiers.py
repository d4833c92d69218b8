"""Where a function can run and at what price: nodes by the hour, or platforms by the call.

A *lot* is a kind of node that a function can be rented on: a variant in a dedicated pool. An
*outlet* is a way to a platform: a variant in a serverless pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import final

from headgate.core.model import App, Function, Pool, Variant
from headgate.core.records import Task
from headgate.core.view import View
from headgate.planning.concurrency import Thresholds, rate_per_s


@dataclass(frozen=True)
class Lot:
    """A function on nodes of one dedicated pool."""

    variant: Variant
    pool: Pool
    threshold: int  # requests at once that are in time; at least 1 if there is no other place
    rate_per_s: float  # what one node answers at that
    usd_per_s: float  # of one node

    @property
    def usd_per_request(self) -> float:
        """On a node that is always full."""
        return self.usd_per_s / self.rate_per_s if self.rate_per_s else inf


@dataclass(frozen=True)
class Outlet:
    """A function on a platform that is paid by the call."""

    variant: Variant
    pool: Pool
    usd_per_request: float  # of one item, when it need not be started


@final
class Tiers:
    """By function: its lots, those to be rented first, and its outlets, both cheapest first."""

    def __init__(self, app: App, thresholds: Thresholds) -> None:
        self.outlets = [tuple(_outlets(app, function)) for function in app.functions]
        self.lots = [
            tuple(_lots(app, function, thresholds, bool(self.outlets[function.id])))
            for function in app.functions
        ]

    def can_spill(self, view: View, task: Task) -> bool:
        """Whether a call of any platform can carry a task. O(outlets)."""
        for outlet in self.outlets[task.function.id]:
            if view.fits_call(task, outlet.pool, outlet.variant):
                return True
        return False

    def open_outlet(self, view: View, task: Task) -> Outlet | None:
        """The cheapest platform that takes a task just now. O(outlets)."""
        for outlet in self.outlets[task.function.id]:
            if (
                view.is_pool_open(outlet.pool.id)
                and _has_place(view, outlet.pool)
                and view.fits_call(task, outlet.pool, outlet.variant)
            ):
                return outlet
        return None

    def elastic_lot(self, function_id: int) -> Lot | None:
        """The kind of node to rent for a function: the cheapest per request of those in time."""
        return next((lot for lot in self.lots[function_id] if lot.pool.is_elastic), None)

    def spill_usd(self, function_id: int) -> float:
        """What a call costs on the cheapest platform; infinite where there is none."""
        return min((outlet.usd_per_request for outlet in self.outlets[function_id]), default=inf)


def _has_place(view: View, pool: Pool) -> bool:
    """Whether the platform would not throttle us for what we have out ourselves."""
    spillway, platform = view.spillways[pool.id], pool.serverless
    assert spillway is not None
    assert platform is not None
    return spillway.in_flight < platform.concurrency_max


def _outlets(app: App, function: Function) -> list[Outlet]:
    found: list[Outlet] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.serverless is not None and variant is not None:
            usd = pool.serverless.usd(variant.profile.time_ns(1))
            found.append(Outlet(variant, pool, usd))
    return sorted(found, key=lambda outlet: (outlet.usd_per_request, outlet.pool.id))


def _lots(app: App, function: Function, thresholds: Thresholds, has_outlet: bool) -> list[Lot]:
    found: list[Lot] = []
    for pool in app.pools:
        variant = app.variants_on(pool.id)[function.id]
        if pool.serverless is None and variant is not None:
            threshold = max(thresholds.of(variant, pool), 0 if has_outlet else 1)
            rate = rate_per_s(variant.profile, threshold)
            found.append(Lot(variant, pool, threshold, rate, pool.usd_per_hour / 3_600))
    # What is late even alone comes last, however cheap.
    return sorted(found, key=lambda lot: (not lot.rate_per_s, lot.usd_per_request, lot.pool.id))
