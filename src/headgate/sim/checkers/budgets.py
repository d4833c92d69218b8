"""The checker of money: nobody spends by the call, or on instances kept warm, beyond a budget."""

from __future__ import annotations

from typing import Final, final

from headgate.core.actions import Action, Dispatch, KeepWarm
from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.events import (
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    TimerFired,
)
from headgate.core.model import App, Pool, Serverless
from headgate.core.spillway import DAY_NS
from headgate.sim.checkers.checker import Checker

_ROUNDING: Final = 1e-9


@final
class _Account:
    """What one Scheduler has spent in one pool in the present minute, or the present day."""

    def __init__(self, platform: Serverless, usd: float, length_ns: int) -> None:
        self.usd = usd
        self.length_ns = length_ns
        self._platform = platform
        self._began_ns = 0
        self._spent_usd = 0.0
        self._warm: dict[int, tuple[int, bool]] = {}  # by variant id
        self._paid_until_ns = 0

    def spend(self, now_ns: int, usd: float) -> None:
        """Pay for what is kept warm until now, and for something else."""
        began_ns = now_ns // self.length_ns * self.length_ns
        if began_ns != self._began_ns:
            self._began_ns, self._spent_usd = began_ns, 0.0
        unpaid_ns = now_ns - max(began_ns, self._paid_until_ns)
        self._spent_usd += usd + self._warm_usd_per_s() * unpaid_ns / SECOND_NS
        self._paid_until_ns = now_ns

    def keep_warm(self, now_ns: int, order: KeepWarm) -> None:
        """Something else is kept warm from now on; what is called is called at once."""
        is_called = not order.is_provisioned and self._platform.ping_every_ns > 0
        pings = order.count if is_called else 0
        self.spend(now_ns, pings * self._platform.usd(self._platform.ping_ns))
        self._warm[order.variant_id] = (order.count, order.is_provisioned)

    def spent_usd(self, now_ns: int) -> float:
        """What was spent until now."""
        self.spend(now_ns, 0.0)
        return self._spent_usd

    def _warm_usd_per_s(self) -> float:
        platform, total_usd = self._platform, 0.0
        for count, is_provisioned in self._warm.values():
            if is_provisioned:
                total_usd += count * platform.provisioned_usd_per_gb_s * platform.gigabytes
            elif platform.ping_every_ns:
                every_s = platform.ping_every_ns / SECOND_NS
                total_usd += count * platform.usd(platform.ping_ns) / every_s
        return total_usd


@final
class Budgets(Checker):
    """A call goes out only while there is money left, less what those that are out may cost.

    So a minute, or a day, costs no more than its budget, one call, and what calls took longer than
    they should have.
    """

    def __init__(self, app: App) -> None:
        super().__init__()
        self._app = app
        self._accounts: dict[tuple[int, int], list[_Account]] = {}  # by Scheduler and pool id
        # By batch id: its Scheduler, its pool, when it was sent and what it may cost.
        self._out: dict[int, tuple[int, Pool, int, float]] = {}

    def note_event(self, now_ns: int, scheduler: int, event: Event) -> None:
        """A call that has ended is paid for; one that was refused is free."""
        if isinstance(event, BatchFinished | BatchFailed | BatchLost | BatchRefused):
            self._end(now_ns, event.batch_id, is_free=isinstance(event, BatchRefused))
        elif isinstance(event, TimerFired) and event.key[0] == "lost":
            self._end(now_ns, event.key[1], is_free=False)

    def note_action(self, now_ns: int, scheduler: int, action: Action) -> None:
        """See that there is money for a call."""
        if isinstance(action, KeepWarm):
            for account in self._accounts_of(scheduler, self._app.pools[action.pool_id]):
                account.keep_warm(now_ns, action)
        elif isinstance(action, Dispatch) and action.node_id is None:
            pool = self._app.pools[action.pool_id]
            mine = [usd for by, at, _, usd in self._out.values() if by == scheduler and at is pool]
            for account in self._accounts_of(scheduler, pool):
                spent_usd = account.spent_usd(now_ns) + sum(mine)
                if spent_usd >= account.usd * (1 + _ROUNDING):
                    said = f"${spent_usd} of ${account.usd} are spent"
                    self.blame(now_ns, f"batch {action.batch_id} is sent, and {said}")
            usd = self._may_cost_usd(action, pool)
            self._out[action.batch_id] = (scheduler, pool, now_ns, usd)

    def _end(self, now_ns: int, batch_id: int, *, is_free: bool) -> None:
        found = self._out.pop(batch_id, None)
        if found is not None and not is_free:
            scheduler, pool, sent_ns, _ = found
            assert pool.serverless is not None
            for account in self._accounts_of(scheduler, pool):
                account.spend(now_ns, pool.serverless.usd(now_ns - sent_ns))

    def _may_cost_usd(self, order: Dispatch, pool: Pool) -> float:
        platform, profile = pool.serverless, self._app.variants[order.variant_id].profile
        assert platform is not None
        exec_ns = profile.exec_ns[order.items - 1]
        return platform.usd(profile.start_ns + exec_ns + 2 * pool.network_ns)

    def _accounts_of(self, scheduler: int, pool: Pool) -> list[_Account]:
        found = self._accounts.get((scheduler, pool.id))
        if found is None:
            assert pool.serverless is not None
            found = self._accounts[scheduler, pool.id] = [
                _Account(pool.serverless, pool.guard.usd_per_minute, MINUTE_NS),
                _Account(pool.serverless, pool.guard.usd_per_day, DAY_NS),
            ]
        return found
