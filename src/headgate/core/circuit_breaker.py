"""Circuit breaker, back-off and spend limits in front of a pay-per-call (FaaS) pool.

Every serverless pool has one `CircuitBreaker`, whatever the policy. Three things block calls:

- the breaker: it opens after N consecutive failures, half-opens after a cool-down that doubles each
  time, and doubles the number of calls allowed in flight per success until it closes;
- a back-off after the platform has refused (throttled) a call;
- spend limits per minute and per day.

Instances that are kept warm are paid from the same spend limits. Like all of the core, the breaker
reads no clock: time is an argument, so its behaviour in a live incident can be replayed.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from headgate.core.clock import MINUTE_NS, SECOND_NS
from headgate.core.model import FaasPlatform, Pool, Variant
from headgate.core.states import BatchState

DAY_NS: Final = 24 * 60 * MINUTE_NS
# Largest share of a budget that may be spent on keeping instances warm. The rest is for calls: a
# warm instance that may not be called is useless.
WARM_SHARE_MAX: Final = 0.5
# Keep no more instances warm than the warm share of the daily budget pays for this long.
_WARM_DAY_BUDGET_LASTS_S: Final = 3_600
# Keep-warm spending is reviewed once a minute, so more than a minute of it is committed ahead.
_WARM_COMMITMENT_NS: Final = 2 * MINUTE_NS


class BreakerState:
    """The three states of a circuit breaker."""

    CLOSED: Final = 0  # calls flow
    OPEN: Final = 1  # too many consecutive failures: no calls until the cool-down has elapsed
    HALF_OPEN: Final = 2  # a few probe calls at a time, twice as many after each success


class CallBlock:
    """Why no call may be sent, in the words of metrics and health checks; empty if one may."""

    NONE: Final = ""
    BREAKER: Final = "breaker"
    BACKOFF: Final = "backoff"
    BUDGET: Final = "budget"


BREAKER_STATE_NAMES: Final = ("closed", "open", "half_open")
CALL_BLOCKS: Final = (CallBlock.BREAKER, CallBlock.BACKOFF, CallBlock.BUDGET)


@final
class SpendLimit:
    """A budget in dollars per period (a minute or a day), and the spend in the current period."""

    def __init__(self, usd: float, period_ns: int) -> None:
        self.usd = usd
        self.period_ns = period_ns
        self._period_start_ns = 0  # of the period that `_spent_usd` belongs to
        self._spent_usd = 0.0

    def period_start_ns(self, now_ns: int) -> int:
        """When the current period began."""
        return now_ns - now_ns % self.period_ns

    def period_end_ns(self, now_ns: int) -> int:
        """When the current period ends and the budget is available again."""
        return self.period_start_ns(now_ns) + self.period_ns

    def spent_usd(self, now_ns: int) -> float:
        """Dollars spent in the current period."""
        return self._spent_usd if self._period_start_ns == self.period_start_ns(now_ns) else 0.0

    def spend(self, now_ns: int, usd: float) -> None:
        """Add to the spend of the current period."""
        spent_usd = self.spent_usd(now_ns)
        self._period_start_ns = self.period_start_ns(now_ns)
        self._spent_usd = spent_usd + usd


@final
class WarmTarget:
    """How many instances of a variant are to be kept warm, and by which means."""

    def __init__(self, variant: Variant, count: int, is_provisioned: bool) -> None:
        self.variant = variant
        self.count = count
        self.is_provisioned = is_provisioned


@final
class CircuitBreaker:
    """Decides whether a call may be sent, from the calls in flight, the failures and the spend."""

    def __init__(self, pool: Pool, platform: FaasPlatform) -> None:
        self.pool = pool
        self.platform = platform
        self.in_flight = 0
        self.state = BreakerState.CLOSED
        self._config = pool.breaker
        # The circuit breaker. Only calls sent since the breaker was last half-open say anything
        # about the platform as it is now, so the results of older calls change nothing.
        self._failures = 0  # consecutive
        self._openings = 0  # consecutive: since the breaker was last closed
        self._cooldown_ns = pool.breaker.cooldown_ns
        self._open_until_ns = 0
        self._half_open_ns = 0
        self._probes = 0  # calls in flight that were sent since `_half_open_ns`
        self._probes_max = 0
        # The back-off.
        self._refusals = 0  # consecutive, at different times
        self._backoff_until_ns = 0
        # The spend limits; an unlimited budget is left out.
        day = SpendLimit(pool.breaker.usd_per_day, DAY_NS)
        minute = SpendLimit(pool.breaker.usd_per_minute, MINUTE_NS)
        self._day = day
        self._budgets = [budget for budget in (minute, day) if budget.usd < inf]
        self._reserved_usd = 0.0  # upper bound on the cost of the calls in flight
        self._spent_usd = 0.0
        # Warm instances by variant id: what the policy requested, and what of it is granted.
        self.warm_targets: dict[int, WarmTarget] = {}
        self._granted: dict[int, tuple[int, bool]] = {}  # (count, is_provisioned)
        self._granted_usd_per_s = 0.0  # cost of the granted instances
        self._paid_until_ns = 0  # that cost is booked up to this instant
        self._planned_usd_per_s = 0.0  # cost of all that the budgets can pay for, granted or not
        self._warm_day = SpendLimit(WARM_SHARE_MAX * pool.breaker.usd_per_day, DAY_NS)
        self._warm_suspended_until_ns = 0  # not 0: the daily budget is spent, nothing is kept warm
        self._openings_at_grant = 0  # consecutive openings when targets were last granted
        self._is_underfunded = False  # fewer are granted than the breaker allows: no money for more

    def allows_call(self, now_ns: int) -> bool:
        """Whether one more call may be sent."""
        return self.blocked_by(now_ns) == CallBlock.NONE

    def blocked_by(self, now_ns: int) -> str:
        """What blocks calls: one of `CallBlock`."""
        if self.state != BreakerState.CLOSED and (
            now_ns < self._open_until_ns
            or (self.state == BreakerState.HALF_OPEN and self._probes >= self._probes_max)
        ):
            return CallBlock.BREAKER
        if now_ns < self._backoff_until_ns:
            return CallBlock.BACKOFF
        for budget in self._budgets:
            if self._is_spent(budget, now_ns):
                return CallBlock.BUDGET
        return CallBlock.NONE

    def next_check_ns(self, now_ns: int) -> int:
        """When a cool-down, a back-off or a budget period ends; 0 if there is nothing to wait for.

        The caller sets a timer for that time and then checks this breaker again.
        """
        until_ns = max(self._open_until_ns, self._backoff_until_ns)
        for budget in self._budgets:
            if self._is_spent(budget, now_ns):
                until_ns = max(until_ns, budget.period_end_ns(now_ns))
        warm_ns = self._warm_suspended_until_ns
        if self._granted_usd_per_s > 0.0 and self._day.usd < inf:
            warm_ns = now_ns - now_ns % MINUTE_NS + MINUTE_NS
        if until_ns <= now_ns or now_ns < warm_ns < until_ns:
            until_ns = warm_ns
        return until_ns if until_ns > now_ns else 0

    def on_sent(self, now_ns: int, may_take_ns: int) -> None:
        """Record a call that is sent. Its largest possible cost is reserved until it ends."""
        self.to_half_open(now_ns)
        self.in_flight += 1
        self._probes += 1
        self._reserved_usd += self.platform.usd(may_take_ns)

    def on_ended(self, now_ns: int, state: int, sent_ns: int, may_take_ns: int) -> None:
        """Record how a call ended: it costs the time it took, or nothing if it was refused.

        The rest of the amount that was reserved for it becomes available again.
        """
        self.in_flight -= 1
        self._reserved_usd -= self.platform.usd(may_take_ns)
        if self.in_flight == 0:
            self._reserved_usd = 0.0  # exactly: drops the rounding errors
        is_current = sent_ns >= self._half_open_ns
        if is_current:
            self._probes -= 1
        if state != BatchState.REFUSED:
            self._spend(now_ns, self.platform.usd(now_ns - sent_ns))
            if is_current and state == BatchState.FINISHED:
                self._succeeded()
            elif is_current:
                self._failed(now_ns)

    def on_refused(self, now_ns: int, backoff_ns: int, sent_ns: int, *, is_gone: bool) -> None:
        """Back off from a platform that refused a call, twice as long for each refusal in a row.

        If the platform is not there at all (`is_gone`), that also counts as a failure.
        """
        if is_gone and sent_ns >= self._half_open_ns:
            self._failed(now_ns)
        if now_ns < self._backoff_until_ns or now_ns < self._open_until_ns:
            return  # the call was in flight already when another one was refused
        longest_ns = max(backoff_ns, self._config.cooldown_ns)
        wait_ns = min(backoff_ns << min(self._refusals, 30), longest_ns)
        self._backoff_until_ns = now_ns + wait_ns
        self._refusals += 1

    def to_half_open(self, now_ns: int) -> None:
        """Half-open the breaker if it is open and its cool-down has elapsed."""
        if self.state == BreakerState.OPEN and now_ns >= self._open_until_ns:
            self.state = BreakerState.HALF_OPEN
            self._half_open_ns = now_ns
            self._probes = 0
            self._probes_max = 1

    def _succeeded(self) -> None:
        self._failures = 0
        self._refusals = 0
        if self.state != BreakerState.HALF_OPEN:
            return
        self._probes_max *= 2
        if self._probes_max >= self.platform.concurrency_max:
            self.state = BreakerState.CLOSED
            self._openings = 0
            self._cooldown_ns = self._config.cooldown_ns

    def _failed(self, now_ns: int) -> None:
        self._failures += 1
        if self.state == BreakerState.OPEN:
            return  # the call was in flight already when the breaker opened
        if self.state == BreakerState.CLOSED and self._failures < self._config.failure_threshold:
            return
        self.state = BreakerState.OPEN
        self._openings += 1
        self._open_until_ns = now_ns + self._cooldown_ns
        self._cooldown_ns = min(2 * self._cooldown_ns, self._config.cooldown_max_ns)

    def spent_usd(self, now_ns: int) -> float:
        """Total spend on this pool as far as we can compute it: calls and warm instances."""
        unpaid_ns = now_ns - self._paid_until_ns
        return self._spent_usd + self._granted_usd_per_s * unpaid_ns / SECOND_NS

    def _is_spent(self, budget: SpendLimit, now_ns: int) -> bool:
        """Whether the budget has nothing left for calls."""
        return self._committed_usd(budget, now_ns) + self._reserved_usd >= budget.usd

    def _committed_usd(self, budget: SpendLimit, now_ns: int) -> float:
        """The spend of the period, plus what is committed to instances that are kept warm."""
        since_ns = max(self._paid_until_ns, budget.period_start_ns(now_ns))
        ahead_ns = min(_WARM_COMMITMENT_NS, budget.period_end_ns(now_ns) - now_ns)
        warm_usd = self._granted_usd_per_s * (now_ns - since_ns)
        warm_usd += self._planned_usd_per_s * ahead_ns
        return budget.spent_usd(now_ns) + warm_usd / SECOND_NS

    def _spend(self, now_ns: int, usd: float) -> None:
        self._spent_usd += usd
        for budget in self._budgets:
            budget.spend(now_ns, usd)

    def set_warm_target(self, variant: Variant, count: int, is_provisioned: bool) -> None:
        """Request warm instances of a variant. `grant` decides how many of them there are."""
        self.warm_targets[variant.id] = WarmTarget(variant, count, is_provisioned)

    def is_grant_due(self, now_ns: int) -> bool:
        """Whether the granted instances may have to change although the targets have not."""
        if self._openings_at_grant != self._failed_openings() or self._is_underfunded:
            return True
        if self._warm_suspended_until_ns:
            return now_ns >= self._warm_suspended_until_ns
        return self._is_day_over_budget(now_ns)

    def grant(self, now_ns: int) -> list[WarmTarget]:
        """Return the changes to what is kept warm from now on, and book its cost from now on.

        Ping calls, which only keep instances warm, stop until the breaker is closed. Provisioned
        instances take long to come back, so they stay until the half-open probe has failed as well;
        none are added before the breaker is closed. Both kinds are suspended until the next day
        when the daily budget, or the warm share of it, is spent. The minute's budget limits how
        many instances there are. Nothing is withdrawn when it is spent, because the minute is over
        before an idle instance would go.
        """
        self._pay(now_ns)
        self._openings_at_grant = self._failed_openings()
        self._is_underfunded = False
        affordable = self._affordable()
        self._planned_usd_per_s = self._sum_usd_per_s(affordable)
        if now_ns >= self._warm_suspended_until_ns:
            is_over = self._is_day_over_budget(now_ns)
            self._warm_suspended_until_ns = self._day.period_end_ns(now_ns) if is_over else 0
        if self._warm_suspended_until_ns:
            self._planned_usd_per_s = 0.0
        changes: list[WarmTarget] = []
        for target in affordable:
            before = self._granted.get(target.variant.id, (0, False))
            target.count = self._grantable(now_ns, target, before)
            after = (target.count, target.is_provisioned and target.count > 0)
            if before != after:
                self._granted[target.variant.id] = after
                usd = self._first_ping_usd(target, target.count, before)
                self._spend(now_ns, usd)
                self._warm_day.spend(now_ns, usd)
                changes.append(WarmTarget(target.variant, target.count, after[1]))
        self._granted_usd_per_s = self._sum_usd_per_s(affordable)
        return changes

    def _failed_openings(self) -> int:
        """How often the breaker has opened since it was last closed; 0 while it is closed."""
        return 0 if self.state == BreakerState.CLOSED else self._openings

    def _is_day_over_budget(self, now_ns: int) -> bool:
        """Whether the daily budget, or the warm share of it, is spent.

        What is reserved for calls in flight does not count: part of it may become available again,
        and instances withdrawn because of it would have to be ordered again.
        """
        if self._day.usd == inf:
            return False
        return (
            self._committed_usd(self._day, now_ns) >= self._day.usd
            or self._committed_usd(self._warm_day, now_ns) >= self._warm_day.usd
        )

    def _pay(self, now_ns: int) -> None:
        """Book the cost of the warm instances up to now."""
        rate = self._granted_usd_per_s / SECOND_NS
        self._spent_usd += rate * (now_ns - self._paid_until_ns)
        for budget in [*self._budgets, self._warm_day]:
            since_ns = max(self._paid_until_ns, budget.period_start_ns(now_ns))
            budget.spend(now_ns, rate * (now_ns - since_ns))
        self._paid_until_ns = now_ns

    def _affordable(self) -> list[WarmTarget]:
        """The targets that the warm share of the budgets pays for, in the order they were set."""
        left_usd_per_s = min(
            WARM_SHARE_MAX * self._config.usd_per_minute / (MINUTE_NS / SECOND_NS),
            self._warm_day.usd / _WARM_DAY_BUDGET_LASTS_S,
        )
        payable: list[WarmTarget] = []
        for requested in self.warm_targets.values():
            target = WarmTarget(requested.variant, requested.count, requested.is_provisioned)
            usd_per_s = self._usd_per_s(target)
            if usd_per_s > left_usd_per_s:
                target.count = int(target.count * left_usd_per_s / usd_per_s)
                usd_per_s = self._usd_per_s(target)
            left_usd_per_s -= usd_per_s
            payable.append(target)
        return payable

    def _grantable(self, now_ns: int, target: WarmTarget, before: tuple[int, bool]) -> int:
        """How many instances of an affordable target may be kept warm now."""
        count = target.count
        already = before[0] if before[1] == target.is_provisioned else 0
        if self._warm_suspended_until_ns:
            return 0
        if self.state != BreakerState.CLOSED:
            is_withdrawn = not target.is_provisioned or self._openings > 1
            return 0 if is_withdrawn else min(count, already)
        if target.is_provisioned:
            return count
        left_usd = self._warm_day.usd - self._committed_usd(self._warm_day, now_ns)
        for budget in self._budgets:
            room_usd = budget.usd - self._committed_usd(budget, now_ns) - self._reserved_usd
            left_usd = min(left_usd, room_usd)
        # Adding instances costs money at once. Where the budgets lack it, add fewer for now.
        while count > already and self._first_ping_usd(target, count, before) > left_usd:
            count = already + (count - already) // 2
            self._is_underfunded = True
        return count

    def _sum_usd_per_s(self, targets: list[WarmTarget]) -> float:
        total = 0.0
        for target in targets:
            total += self._usd_per_s(target)
        return total

    def _usd_per_s(self, target: WarmTarget) -> float:
        """Running cost of a target."""
        platform = self.platform
        if target.is_provisioned:
            return target.count * platform.provisioned_usd_per_gb_s * platform.gigabytes
        if platform.ping_every_ns == 0:  # no keep-alive: pings keep nothing warm
            return 0.0
        return target.count * platform.usd(platform.ping_ns) / (platform.ping_every_ns / SECOND_NS)

    def _first_ping_usd(self, target: WarmTarget, count: int, before: tuple[int, bool]) -> float:
        """Cost of the first round of pings: every instance is called, new ones start cold."""
        platform = self.platform
        if target.is_provisioned or count == 0 or platform.ping_every_ns == 0:
            return 0.0
        new = max(0, count - (0 if before[1] else before[0]))
        start_ns = target.variant.profile.cold_start_ns if platform.bills_cold_start else 0
        called_usd = (count - new) * platform.usd(platform.ping_ns)
        return called_usd + new * platform.usd(platform.ping_ns + start_ns)
