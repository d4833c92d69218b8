"""Rent-or-call as ski rental: how many nodes are worth their rent.

Demand is divided into levels: the first node takes as much as one node can, the second what exceeds
that, and so on. Each level can be served by a rented node or by calls, and switching to the node
costs a boot. For each level (marginal node) we accumulate regret: the cost that the other option
would have saved since the regret was last zero. We switch when regret exceeds a fraction of the
cost of one boot. The fraction to start grows with the index of dispersion of arrivals: with steady
arrivals a rise of demand is a signal, with bursty ones it may be noise. The fraction to stop grows
if the node was needed again within 15 minutes of its last release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from headgate.core.clock import SECOND_NS
from headgate.core.model import Pool
from headgate.planning.constants import (
    DISPERSION_WINDOW_NS,
    NEEDED_AGAIN_NS,
    START_REGRET,
    STOP_REGRET,
    STOP_REGRET_MAX,
    STOP_REGRET_STEP,
)
from headgate.planning.forecast import Dispersion

_OFF: Final = 0
_BOOTING: Final = 1
_ON: Final = 2


@final
class RentalLevel:
    """One marginal node: the demand it would serve, and whether to rent it."""

    __slots__ = (
        "_boots_until_ns",
        "_regret_usd",
        "_released_ns",
        "_state",
        "_stop_regret",
        "free_ns",
        "saved_usd",
    )

    def __init__(self, *, is_on: bool) -> None:
        self.saved_usd = 0.0  # by what it would have served since the last update
        self.free_ns = 0.0  # when the (virtual) node is free
        self._state = _ON if is_on else _OFF
        self._regret_usd = 0.0  # what the other option would have saved since it was last 0
        self._boots_until_ns = 0
        self._released_ns = -NEEDED_AGAIN_NS
        self._stop_regret = STOP_REGRET

    @property
    def is_wanted(self) -> bool:
        """Whether to rent the node."""
        return self._state != _OFF

    @property
    def is_idle(self) -> bool:
        """Whether the node is not rented, nothing called for it, and no regret is left to decay.

        An interval leaves such a level as it is: no rent is smaller than nothing saved.
        """
        return not self.saved_usd and self._state == _OFF and not self._regret_usd

    def should_switch(
        self, now_ns: int, saved_usd: float, rent_usd: float, boot_usd: float, burstiness: float
    ) -> bool:
        """Accumulate the regret of an interval that ends now, and return whether to switch.

        `saved_usd` is the cost of the calls that the node would have saved, `rent_usd` its rent.
        """
        if self._state == _BOOTING:
            if now_ns < self._boots_until_ns:
                return False
            self._state = _ON
        gained_usd = rent_usd - saved_usd if self._state == _ON else saved_usd - rent_usd
        self._regret_usd = max(0.0, self._regret_usd + gained_usd)
        threshold = self._stop_regret if self._state == _ON else START_REGRET * burstiness
        return self._regret_usd > threshold * boot_usd

    def switch(self, now_ns: int, boot_ns: int) -> None:
        """Switch between renting and calling; a rented node is usable after its boot."""
        self._regret_usd = 0.0
        if self._state == _ON:
            self._state = _OFF
            self._released_ns = now_ns
            return
        self._state = _BOOTING
        self._boots_until_ns = now_ns + boot_ns
        if now_ns - self._released_ns < NEEDED_AGAIN_NS:
            self._stop_regret = min(STOP_REGRET_STEP * self._stop_regret, STOP_REGRET_MAX)
        else:
            self._stop_regret = max(self._stop_regret / STOP_REGRET_STEP, STOP_REGRET)


@final
@dataclass(frozen=True, slots=True)
class NodeDemand:
    """What a request of one item of a stage asks of a node of a pool."""

    pool: Pool
    function_id: int
    interval_ns: float  # of the node's time
    allowed_ns: int  # for waiting and service
    tail_ns: float  # service time that the interval does not have: its batch is done later
    saved_usd: float  # if a rented node serves it


@final
class OwnNodes:
    """The nodes of a pool that are not rented, as one queue that all functions share."""

    def __init__(self) -> None:
        self._free_ns = 0.0

    def on_arrival(self, now_ns: int, demand: NodeDemand, items: float) -> bool:
        """Record an arrival; whether the nodes could serve it in time."""
        done_ns = max(now_ns, self._free_ns) + demand.interval_ns * items
        if done_ns > now_ns + demand.allowed_ns - demand.tail_ns:
            return False
        self._free_ns = done_ns
        return True


@final
class RentalLadder:
    """The number of nodes worth their rent. O(levels) per arrival and per `desired_nodes`.

    A node takes the requests that it can finish within the time that they have, one after the
    other; the others go to the next level.
    """

    def __init__(
        self, count: int, *, standing: int, rent_usd_per_s: float, boot_ns: int, memory_ns: int
    ) -> None:
        self._levels = [RentalLevel(is_on=number < standing) for number in range(count)]
        self._rent_usd_per_s = rent_usd_per_s
        self._boot_ns = boot_ns
        self._dispersion = Dispersion(DISPERSION_WINDOW_NS, memory_ns)
        self._updated_ns: int | None = None
        self._wanted = min(standing, count)

    def on_arrival(self, now_ns: int, demand: NodeDemand, items: float, gateways: int = 1) -> bool:
        """Record an arrival, admitted or not; whether a node could serve it in time.

        The other gateways are taken to receive one each.
        """
        if self._updated_ns is None:
            self._updated_ns = now_ns
        self._dispersion.observe(now_ns, items)
        is_taken = [self._fill(now_ns, demand, items) for _ in range(gateways)]
        return is_taken[-1]

    def _fill(self, now_ns: int, demand: NodeDemand, items: float) -> bool:
        work_ns = demand.interval_ns * items
        latest_ns = now_ns + demand.allowed_ns - demand.tail_ns
        for level in self._levels:
            done_ns = max(now_ns, level.free_ns) + work_ns
            if done_ns <= latest_ns:
                level.free_ns = done_ns
                level.saved_usd += items * demand.saved_usd
                return True
        return False

    def desired_nodes(self, now_ns: int) -> int:
        """How many nodes to rent now; arrivals were counted for all gateways."""
        if self._updated_ns is not None and now_ns > self._updated_ns:
            self._update(now_ns, now_ns - self._updated_ns)
        self._updated_ns = now_ns
        return self._wanted

    def _update(self, now_ns: int, elapsed_ns: int) -> None:
        rent_usd = self._rent_usd_per_s * elapsed_ns / SECOND_NS
        boot_usd = self._rent_usd_per_s * self._boot_ns / SECOND_NS
        burstiness = max(1.0, self._dispersion.value)
        for level in self._levels:
            if level.is_idle:  # most levels, most of the time
                continue
            saved_usd, level.saved_usd = level.saved_usd, 0.0
            if level.should_switch(now_ns, saved_usd, rent_usd, boot_usd, burstiness):
                level.switch(now_ns, self._boot_ns)
                self._wanted += 1 if level.is_wanted else -1
