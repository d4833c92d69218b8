"""The spillway: the way out to a pool that is paid by the call, and what closes it.

One per serverless pool, behind every policy. Three things close it, each for its own time: a
circuit breaker that leaves a failing platform alone, a back-off from a platform that refuses, and
budgets that money cannot run past. Instances that are kept warm are paid from the same budgets.
Pure, like all of the core: time is an argument, so what it did in a live incident can be replayed.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.model import FaasPlatform, Pool, Variant
from headgate.core.states import BatchState

DAY_NS: Final = 24 * 60 * MINUTE_NS
# Of a budget, so much may be spent on keeping instances warm. One that is warm and may not be
# called is of no use, so the rest is for calls.
WARM_SHARE_MAX: Final = 0.5
_WARM_LASTS_S: Final = 3_600  # and no more than would last for so long of a day's budget
# What is kept warm is looked at once a minute, so money for longer than that is set aside.
_SET_ASIDE_NS: Final = 2 * MINUTE_NS


class BreakerState:
    """Whether a platform is trusted."""

    CLOSED: Final = 0  # the circuit: calls flow
    OPEN: Final = 1  # too many failed in a row: left alone
    HALF_OPEN: Final = 2  # a few at a time, twice as many with each that succeeds


class Closed:
    """Why no call may go out: the words that metrics and health show. Empty: one may."""

    NOT: Final = ""
    BREAKER: Final = "breaker"
    BACKOFF: Final = "backoff"
    BUDGET: Final = "budget"


BREAKER_NAMES: Final = ("closed", "open", "half_open")
CLOSED_REASONS: Final = (Closed.BREAKER, Closed.BACKOFF, Closed.BUDGET)


@final
class SpendLimit:
    """Money for each minute, or for each day: what is spent of it in the present one."""

    def __init__(self, usd: float, length_ns: int) -> None:
        self.usd = usd
        self.length_ns = length_ns
        self._began_ns = 0
        self._spent_usd = 0.0

    def began_ns(self, now_ns: int) -> int:
        """When the present minute or day began."""
        return now_ns - now_ns % self.length_ns

    def ends_ns(self, now_ns: int) -> int:
        """When it is over and the next budget is there."""
        return self.began_ns(now_ns) + self.length_ns

    def spent_usd(self, now_ns: int) -> float:
        """What was spent in it."""
        return self._spent_usd if self._began_ns == self.began_ns(now_ns) else 0.0

    def spend(self, now_ns: int, usd: float) -> None:
        """Take note of a bill."""
        spent_usd = self.spent_usd(now_ns)
        self._began_ns = self.began_ns(now_ns)
        self._spent_usd = spent_usd + usd


@final
class WarmTarget:
    """So many instances of a variant that a policy wants to have kept warm."""

    def __init__(self, variant: Variant, count: int, is_provisioned: bool) -> None:
        self.variant = variant
        self.count = count
        self.is_provisioned = is_provisioned


@final
class CircuitBreaker:
    """Counts what is out, what failed and what was spent."""

    def __init__(self, pool: Pool, platform: FaasPlatform) -> None:
        self.pool = pool
        self.platform = platform
        self.in_flight = 0
        self.breaker = BreakerState.CLOSED
        self._guard = pool.breaker
        # The circuit breaker. Only calls that were sent since it was last half-open tell anything
        # about the platform as it is now: older ones change nothing when they come back.
        self._failures = 0  # in a row
        self._openings = 0  # in a row
        self._rest_ns = pool.breaker.cooldown_ns
        self._rests_until_ns = 0
        self._half_open_ns = 0
        self._trials = 0  # calls that are out, of those sent since
        self._trials_max = 0
        # The back-off.
        self._refusals = 0  # in a row, at different times
        self._backs_off_until_ns = 0
        # The budgets; one without a limit is not there.
        day = SpendLimit(pool.breaker.usd_per_day, DAY_NS)
        minute = SpendLimit(pool.breaker.usd_per_minute, MINUTE_NS)
        self._day = day
        self._budgets = [budget for budget in (minute, day) if budget.usd < inf]
        self._reserved_usd = 0.0  # what calls that are out may cost
        self._spent_usd = 0.0
        # Instances that are kept warm: what is wanted, and what is granted of it, by variant id.
        self.wishes: dict[int, WarmTarget] = {}
        self._granted: dict[int, tuple[int, bool]] = {}
        self._granted_usd_per_s = 0.0  # is being paid,
        self._paid_until_ns = 0  # and until then it is paid
        self._promised_usd_per_s = 0.0  # may have to be paid soon
        self._warm_day = SpendLimit(WARM_SHARE_MAX * pool.breaker.usd_per_day, DAY_NS)
        self._none_warm_until_ns = 0  # the day's budget is spent; 0: it is not
        self._granted_after = 0  # openings of the breaker in a row, when wishes were last granted
        self._is_short = False  # fewer are granted than could be, for lack of money just then

    # --- calls ---------------------------------------------------------------------------------

    def allows_call(self, now_ns: int) -> bool:
        """Whether one more call may go out."""
        return self.closed_by(now_ns) == Closed.NOT

    def closed_by(self, now_ns: int) -> str:
        """What keeps calls from going out: one of `Closed`."""
        if self.breaker != BreakerState.CLOSED and (
            now_ns < self._rests_until_ns
            or (self.breaker == BreakerState.HALF_OPEN and self._trials >= self._trials_max)
        ):
            return Closed.BREAKER
        if now_ns < self._backs_off_until_ns:
            return Closed.BACKOFF
        for budget in self._budgets:
            if self._is_spent(budget, now_ns):
                return Closed.BUDGET
        return Closed.NOT

    def wakes_ns(self, now_ns: int) -> int:
        """When to look again, because something may have ended by itself; 0: nothing will."""
        until_ns = max(self._rests_until_ns, self._backs_off_until_ns)
        for budget in self._budgets:
            if self._is_spent(budget, now_ns):
                until_ns = max(until_ns, budget.ends_ns(now_ns))
        warm_ns = self._none_warm_until_ns
        if self._granted_usd_per_s > 0.0 and self._day.usd < inf:
            warm_ns = now_ns - now_ns % MINUTE_NS + MINUTE_NS
        if until_ns <= now_ns or now_ns < warm_ns < until_ns:
            until_ns = warm_ns
        return until_ns if until_ns > now_ns else 0

    def sent(self, now_ns: int, may_take_ns: int) -> None:
        """A call goes out. What it may cost is reserved until it comes back."""
        self.to_half_open(now_ns)
        self.in_flight += 1
        self._trials += 1
        self._reserved_usd += self.platform.usd(may_take_ns)

    def ended(self, now_ns: int, state: int, sent_ns: int, may_take_ns: int) -> None:
        """A call has come back, this way or that: it costs what it took, refused it cost nothing.

        What was reserved beyond that can be spent again.
        """
        self.in_flight -= 1
        self._reserved_usd -= self.platform.usd(may_take_ns)
        if self.in_flight == 0:
            self._reserved_usd = 0.0  # exactly, whatever was rounded
        is_current = sent_ns >= self._half_open_ns
        if is_current:
            self._trials -= 1
        if state != BatchState.REFUSED:
            self._spend(now_ns, self.platform.usd(now_ns - sent_ns))
            if is_current and state == BatchState.FINISHED:
                self._succeeded()
            elif is_current:
                self._failed(now_ns)

    def refused(self, now_ns: int, backoff_ns: int, sent_ns: int, *, is_gone: bool) -> None:
        """A call never ran: leave the platform alone, twice as long each time in a row.

        One that is not even there has failed.
        """
        if is_gone and sent_ns >= self._half_open_ns:
            self._failed(now_ns)
        if now_ns < self._backs_off_until_ns or now_ns < self._rests_until_ns:
            return  # it was out already when another one was refused
        longest_ns = max(backoff_ns, self._guard.cooldown_ns)
        wait_ns = min(backoff_ns << min(self._refusals, 30), longest_ns)
        self._backs_off_until_ns = now_ns + wait_ns
        self._refusals += 1

    # --- the circuit breaker -------------------------------------------------------------------

    def to_half_open(self, now_ns: int) -> None:
        """Try a platform again that was left alone for long enough."""
        if self.breaker == BreakerState.OPEN and now_ns >= self._rests_until_ns:
            self.breaker = BreakerState.HALF_OPEN
            self._half_open_ns = now_ns
            self._trials = 0
            self._trials_max = 1

    def _succeeded(self) -> None:
        self._failures = 0
        self._refusals = 0
        if self.breaker != BreakerState.HALF_OPEN:
            return
        self._trials_max *= 2
        if self._trials_max >= self.platform.concurrency_max:
            self.breaker = BreakerState.CLOSED
            self._openings = 0
            self._rest_ns = self._guard.cooldown_ns

    def _failed(self, now_ns: int) -> None:
        self._failures += 1
        if self.breaker == BreakerState.OPEN:
            return  # it was out already when the breaker opened
        if self.breaker == BreakerState.CLOSED and self._failures < self._guard.failure_threshold:
            return
        self.breaker = BreakerState.OPEN
        self._openings += 1
        self._rests_until_ns = now_ns + self._rest_ns
        self._rest_ns = min(2 * self._rest_ns, self._guard.cooldown_max_ns)

    # --- money ---------------------------------------------------------------------------------

    def spent_usd(self, now_ns: int) -> float:
        """What was spent here ever, as far as we can see it: calls, and instances kept warm."""
        unpaid_ns = now_ns - self._paid_until_ns
        return self._spent_usd + self._granted_usd_per_s * unpaid_ns / SECOND_NS

    def _is_spent(self, budget: SpendLimit, now_ns: int) -> bool:
        """Whether nothing is left for calls."""
        return self._committed_usd(budget, now_ns) + self._reserved_usd >= budget.usd

    def _committed_usd(self, budget: SpendLimit, now_ns: int) -> float:
        """What is spent, and what is set aside for instances that are kept warm."""
        since_ns = max(self._paid_until_ns, budget.began_ns(now_ns))
        ahead_ns = min(_SET_ASIDE_NS, budget.ends_ns(now_ns) - now_ns)
        warm_usd = self._granted_usd_per_s * (now_ns - since_ns)
        warm_usd += self._promised_usd_per_s * ahead_ns
        return budget.spent_usd(now_ns) + warm_usd / SECOND_NS

    def _spend(self, now_ns: int, usd: float) -> None:
        self._spent_usd += usd
        for budget in self._budgets:
            budget.spend(now_ns, usd)

    # --- instances that are kept warm ----------------------------------------------------------

    def wish(self, variant: Variant, count: int, is_provisioned: bool) -> None:
        """Have so many instances of a variant kept warm, as far as that can be: see `grant`."""
        self.wishes[variant.id] = WarmTarget(variant, count, is_provisioned)

    def is_grant_due(self, now_ns: int) -> bool:
        """Whether what is granted may have to change although the wishes have not."""
        if self._granted_after != self._failed_openings() or self._is_short:
            return True
        if self._none_warm_until_ns:
            return now_ns >= self._none_warm_until_ns
        return self._is_day_over_budget(now_ns)

    def grant(self, now_ns: int) -> list[WarmTarget]:
        """Return what is to be kept warm from now on, where that changes; it is paid from now on.

        Calls that only keep instances warm wait until the breaker is closed. Provisioned instances
        take long to come back, so they stay until the platform has failed its trial, too; there
        will be no more of them before the breaker is closed. Both end until the next day when the
        day's budget is spent, or their share of it. A minute's budget bounds how many there are; it
        is over before an instance would go, so none is withdrawn when it is spent.
        """
        self._pay(now_ns)
        self._granted_after = self._failed_openings()
        self._is_short = False
        wanted = self._payable()
        self._promised_usd_per_s = self._sum_usd_per_s(wanted)
        if now_ns >= self._none_warm_until_ns:
            is_over = self._is_day_over_budget(now_ns)
            self._none_warm_until_ns = self._day.ends_ns(now_ns) if is_over else 0
        if self._none_warm_until_ns:
            self._promised_usd_per_s = 0.0
        changes: list[WarmTarget] = []
        for wish in wanted:
            before = self._granted.get(wish.variant.id, (0, False))
            wish.count = self._possible(now_ns, wish, before)
            after = (wish.count, wish.is_provisioned and wish.count > 0)
            if before != after:
                self._granted[wish.variant.id] = after
                usd = self._first_round_usd(wish, wish.count, before)
                self._spend(now_ns, usd)
                self._warm_day.spend(now_ns, usd)
                changes.append(WarmTarget(wish.variant, wish.count, after[1]))
        self._granted_usd_per_s = self._sum_usd_per_s(wanted)
        return changes

    def _failed_openings(self) -> int:
        """How often in a row the breaker has opened; 0 while it is closed."""
        return 0 if self.breaker == BreakerState.CLOSED else self._openings

    def _is_day_over_budget(self, now_ns: int) -> bool:
        """Whether the day's budget is spent, or what of it is for instances that are kept warm.

        What calls that are out may cost does not count: it may come back, and what was withdrawn
        for it would have to be ordered again.
        """
        if self._day.usd == inf:
            return False
        return (
            self._committed_usd(self._day, now_ns) >= self._day.usd
            or self._committed_usd(self._warm_day, now_ns) >= self._warm_day.usd
        )

    def _pay(self, now_ns: int) -> None:
        """Book what was kept warm until now."""
        rate = self._granted_usd_per_s / SECOND_NS
        self._spent_usd += rate * (now_ns - self._paid_until_ns)
        for budget in [*self._budgets, self._warm_day]:
            since_ns = max(self._paid_until_ns, budget.began_ns(now_ns))
            budget.spend(now_ns, rate * (now_ns - since_ns))
        self._paid_until_ns = now_ns

    def _payable(self) -> list[WarmTarget]:
        """What is wanted, in the order of the wishes, as far as its share of the budgets lasts."""
        left_usd_per_s = min(
            WARM_SHARE_MAX * self._guard.usd_per_minute / (MINUTE_NS / SECOND_NS),
            self._warm_day.usd / _WARM_LASTS_S,
        )
        payable: list[WarmTarget] = []
        for wanted in self.wishes.values():
            wish = WarmTarget(wanted.variant, wanted.count, wanted.is_provisioned)
            usd_per_s = self._usd_per_s(wish)
            if usd_per_s > left_usd_per_s:
                wish.count = int(wish.count * left_usd_per_s / usd_per_s)
                usd_per_s = self._usd_per_s(wish)
            left_usd_per_s -= usd_per_s
            payable.append(wish)
        return payable

    def _possible(self, now_ns: int, wish: WarmTarget, before: tuple[int, bool]) -> int:
        """How many of a payable wish may be kept warm just now."""
        count = wish.count
        already = before[0] if before[1] == wish.is_provisioned else 0
        if self._none_warm_until_ns:
            return 0
        if self.breaker != BreakerState.CLOSED:
            is_withdrawn = not wish.is_provisioned or self._openings > 1
            return 0 if is_withdrawn else min(count, already)
        if wish.is_provisioned:
            return count
        left_usd = self._warm_day.usd - self._committed_usd(self._warm_day, now_ns)
        for budget in self._budgets:
            room_usd = budget.usd - self._committed_usd(budget, now_ns) - self._reserved_usd
            left_usd = min(left_usd, room_usd)
        # More of them cost money at once. Where that is not there, there are fewer for now.
        while count > already and self._first_round_usd(wish, count, before) > left_usd:
            count = already + (count - already) // 2
            self._is_short = True
        return count

    def _sum_usd_per_s(self, wishes: list[WarmTarget]) -> float:
        total = 0.0
        for wish in wishes:
            total += self._usd_per_s(wish)
        return total

    def _usd_per_s(self, wish: WarmTarget) -> float:
        """What it costs to keep a wish."""
        platform = self.platform
        if wish.is_provisioned:
            return wish.count * platform.provisioned_usd_per_gb_s * platform.gigabytes
        if platform.ping_every_ns == 0:  # where none stays, calling keeps none
            return 0.0
        return wish.count * platform.usd(platform.ping_ns) / (platform.ping_every_ns / SECOND_NS)

    def _first_round_usd(self, wish: WarmTarget, count: int, before: tuple[int, bool]) -> float:
        """What it costs at once: all are called, and those that are not there are started."""
        platform = self.platform
        if wish.is_provisioned or count == 0 or platform.ping_every_ns == 0:
            return 0.0
        new = max(0, count - (0 if before[1] else before[0]))
        start_ns = wish.variant.profile.cold_start_ns if platform.bills_cold_start else 0
        called_usd = (count - new) * platform.usd(platform.ping_ns)
        return called_usd + new * platform.usd(platform.ping_ns + start_ns)
