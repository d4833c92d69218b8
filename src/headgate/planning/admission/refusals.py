"""Refusals that help: why a request was refused, what would have been accepted, when to retry.

**What would have been accepted** is found by trying: with a longer deadline, or without a limit to
the cost, as if the request came with them now. A latency is first guessed from the backlog; what
does not fit is doubled, and what fits is narrowed down a little. So it is one that would have been
accepted, and about the least. Each trial takes as long as an admission, and under overload most
requests are refused: what was found holds for a moment, for other requests of the same kind that
are refused for the same reason. A moment is a part of the deadline; of what is infeasible, of the
latency that was found, for a deadline of no time may come at any rate.

**When to retry.** If a deadline later by d would have been accepted now, the same request fits in d
from now, provided that nobody else comes. But others were refused as well, and they will come back
when they are told to, beside what usually arrives. So every answer is booked: the refused requests
of a client get one time after the other, each later by the work of the one before over the part of
the pool that is usually left. The calendar itself has none of this: whoever does not come back
takes nothing from anybody. A request that is refused because batches take longer than their profile
says fits no sooner when others are done: it is told when the next one of its kind is tried.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.records import Request, Task
from headgate.core.states import Outcome, Rejection, Settlement
from headgate.core.view import View
from headgate.planning.admission.control import AdmissionControl
from headgate.planning.admission.cost_budgets import IdlePlan
from headgate.planning.constants import (
    EXCESS_HALVED,
    EXCESS_MIN,
    EXCESSES_TRIED,
    RETRIES_AWAITED,
    RETRY_HORIZON_NS,
    RETRY_SHARE_MIN,
)
from headgate.planning.pools.build import Build
from headgate.planning.pools.builds import Builds

_ANY_COST_USD: Final = 1e12  # an objective that no request exceeds


@final
class _Bookings:
    """When the refused requests of each client were told to come back to a pool."""

    __slots__ = ("next_ns", "offered_ns", "told_ns")

    def __init__(self) -> None:
        self.next_ns: dict[int, float] = {}  # by client id
        self.told_ns = 0  # when somebody was told a time last
        self.offered_ns = 0.0  # what had been offered to the pool by then


@final
class RetryTimes:
    """When refused requests were told to come back, by pool."""

    def __init__(self) -> None:
        self._bookings: dict[int, _Bookings] = {}  # by pool id

    def tell(
        self, now_ns: int, pool_id: int, client: int, earliest_ns: int, spacing_ns: float
    ) -> int:
        """The time from now after which a client should retry, and book it.

        Not before `earliest_ns`, and not before the client's retries that were booked already. A
        retry takes `spacing_ns` of the time that the clients which are told to come back share.
        """
        bookings = self._bookings.setdefault(pool_id, _Bookings())
        bookings.told_ns = now_ns
        clients = bookings.next_ns
        booked_ns = clients.get(client, 0.0)
        for each in [each for each, at_ns in clients.items() if at_ns <= now_ns]:
            del clients[each]
        at_ns = min(max(float(earliest_ns), booked_ns), float(now_ns + RETRY_HORIZON_NS))
        sharing = len(clients) + (client not in clients)
        clients[client] = at_ns + spacing_ns * sharing
        return int(at_ns) - now_ns

    def review(
        self, now_ns: int, pool_id: int, offered_ns: float, lanes: float, spacing_ns: float
    ) -> None:
        """Forget what is booked in a pool, if those who were told to come stay away.

        They do if nobody was refused while many of them fell due, and if what was offered to the
        pool meanwhile, admitted or not, is less than so many lanes can do. `offered_ns` is all that
        was ever offered to it.
        """
        bookings = self._bookings.setdefault(pool_id, _Bookings())
        quiet_ns = now_ns - bookings.told_ns
        is_little = offered_ns - bookings.offered_ns < lanes * quiet_ns
        if is_little and quiet_ns >= RETRIES_AWAITED * spacing_ns:
            bookings.next_ns.clear()
        bookings.offered_ns = offered_ns


@final
class _Acceptable:
    """What would have been accepted a moment ago, for requests of one client to one pipeline."""

    __slots__ = (
        "accepted_usd",
        "cost_usd",
        "due_ns",
        "items",
        "lanes",
        "made_ns",
        "margin_ns",
        "reach_ns",
        "reason",
        "short",
        "spacing_ns",
        "usd",
    )

    def __init__(self, made_ns: int, request: Request, reason: str, short: Build | None) -> None:
        self.made_ns = made_ns
        self.reason = reason
        self.items = request.items
        self.cost_usd = request.cost_usd
        self.short = short
        self.spacing_ns = 0.0  # between those who come back to its pool
        self.lanes = 0.0  # that are busy there if at least half of them come
        self.due_ns = 0  # the deadline that would have been accepted; 0: none was found
        self.margin_ns = 0
        self.reach_ns = 0  # the latency that it was found for, or the longest that was tried
        self.usd = 0.0  # the cost with that deadline
        self.accepted_usd = 0.0  # and what the deadline as it is would have cost

    def holds_for(self, request: Request, short: Build | None, now_ns: int) -> bool:
        """Whether it is young, and about such a request that lacks the same."""
        if request.items != self.items or request.cost_usd != self.cost_usd:
            return False
        is_infeasible = self.reason == Rejection.INFEASIBLE
        scale_ns = self.reach_ns if is_infeasible else request.deadline_ns - now_ns
        is_young = now_ns - self.made_ns <= EXCESS_MIN * min(scale_ns, RETRY_HORIZON_NS)
        return is_young and short is self.short

    def accepted_ns(self, now_ns: int, refused_ns: int) -> int:
        """The latency that would be accepted now, where this one is not; 0: none was found."""
        if not self.due_ns:
            return 0
        # If that was sooner, something has been admitted since.
        return max(self.due_ns - now_ns, refused_ns + int(EXCESS_MIN * refused_ns))


@final
class Refusals:
    """Explains why requests are not admitted."""

    def __init__(self, view: View, builds: Builds, admission: AdmissionControl) -> None:
        self._view = view
        self._builds = builds
        self._admission = admission
        self._retry_times = RetryTimes()
        # By client, pipeline and reason.
        self._answers: dict[tuple[int, int, str], _Acceptable] = {}

    def explain(self, request: Request) -> Settlement:
        """Why a request has just been refused, and what would have helped."""
        now_ns = self._view.now_ns
        self._admission.feasibility.try_for(request)
        has_deadline = request.deadline_ns < NEVER_NS
        objective_ns = request.deadline_ns - now_ns if has_deadline else 0
        objective_usd = request.cost_usd if request.cost_usd < inf else 0.0
        allowed_ns = request.deadline_ns - now_ns
        best_ns = int(self._builds.isolated_ns(request))
        if best_ns > allowed_ns:
            answer = self._answer(request, Rejection.INFEASIBLE, None, best_ns, best_ns)
            return Settlement(
                Outcome.REJECTED,
                Rejection.INFEASIBLE,
                predicted_ns=best_ns,
                predicted_usd=answer.usd,
                accepted_ns=answer.accepted_ns(now_ns, best_ns),
                objective_ns=objective_ns,
                objective_usd=objective_usd,
            )
        if request.cost_usd < inf and (plan := self._too_dear(request)) is not None:
            return self._over_cost(request, plan, objective_ns)
        task = request.tasks[self._admission.late_stage or 0]
        name = task.stage.name or task.function.name if len(request.tasks) > 1 else ""
        short = self._short(request, task)
        if (short is None or len(request.tasks) > 1) and not self._can_run_all(request):
            pools = [b.pool.name for b in self._builds.of_function[task.function.id][:1]]
            return Settlement(
                Outcome.REJECTED,
                Rejection.UNAVAILABLE,
                stage=name,
                short_of="".join(pools),
                objective_ns=objective_ns,
                objective_usd=objective_usd,
            )
        return self._overloaded(request, short, name, objective_ns)

    def _overloaded(
        self, request: Request, short: Build | None, stage: str, objective_ns: int
    ) -> Settlement:
        """The refusal of a request that a server with less to do would have admitted."""
        now_ns, allowed_ns = self._view.now_ns, request.deadline_ns - self._view.now_ns
        best_ns = int(self._builds.isolated_ns(request))
        is_unfair = self._admission.feasibility.was_share_used
        wait_ns = 0 if short is None else self._wait_ns(short)
        guess_ns = best_ns + wait_ns
        answer = self._answer(request, Rejection.OVERLOADED, short, allowed_ns, guess_ns)
        accepted_ns = answer.accepted_ns(now_ns, allowed_ns)
        retry_ns = max(wait_ns, accepted_ns - allowed_ns)
        if short is not None:
            spacing_ns, pool_id = answer.spacing_ns, short.pool.id
            offered_ns = self._admission.feasibility.offered_ns(pool_id)
            self._retry_times.review(now_ns, pool_id, offered_ns, answer.lanes, spacing_ns)
            retry_ns = self._retry_times.tell(
                now_ns, pool_id, request.client, now_ns + retry_ns, spacing_ns
            )
        predicted_ns = accepted_ns - answer.margin_ns if accepted_ns else best_ns + wait_ns
        if not accepted_ns and predicted_ns <= allowed_ns:
            # More time would not have helped: it would delay others, whose promises are kept.
            predicted_ns = 0
        return Settlement(
            Outcome.REJECTED,
            Rejection.UNFAIR if is_unfair else Rejection.OVERLOADED,
            predicted_ns,
            max(retry_ns, self._admission.probe_in_ns(request)),
            stage=stage,
            predicted_usd=answer.usd,
            margin_ns=answer.margin_ns,
            accepted_ns=accepted_ns,
            accepted_usd=answer.accepted_usd,
            short_of="" if short is None else short.pool.name,
            short_ns=wait_ns,
            objective_ns=objective_ns,
            objective_usd=request.cost_usd if request.cost_usd < inf else 0.0,
        )

    def _answer(
        self,
        request: Request,
        reason: str,
        short: Build | None,
        refused_ns: int,
        guess_ns: int,
    ) -> _Acceptable:
        """What would have been accepted: found now, or a moment ago.

        A latency of `refused_ns` would not; `guess_ns` might: 0 if none would.
        """
        now_ns, key = self._view.now_ns, (request.client, request.pipeline.id, reason)
        known = self._answers.get(key)
        if known is not None and known.holds_for(request, short, now_ns):
            return known
        answer = self._answers[key] = _Acceptable(now_ns, request, reason, short)
        if short is not None:
            self._space(answer, request, short)
        if guess_ns:
            self._find(answer, request, refused_ns, guess_ns)
        if request.cost_usd < inf and reason != Rejection.INFEASIBLE:
            allowed_ns = request.deadline_ns - now_ns
            usd = self._admission.try_out(request, allowed_ns, _ANY_COST_USD)
            answer.accepted_usd = usd or 0.0
        return answer

    def _over_cost(self, request: Request, plan: IdlePlan, objective_ns: int) -> Settlement:
        """The refusal of a request that can pay for nothing that is in time."""
        now_ns, allowed_ns = self._view.now_ns, request.deadline_ns - self._view.now_ns
        affordable = self._admission.budgets.fastest_plan(request)
        guess_ns = 0 if affordable is None else affordable.latency_ns
        answer = self._answer(request, Rejection.OVER_COST, None, allowed_ns, guess_ns)
        return Settlement(
            Outcome.REJECTED,
            Rejection.OVER_COST,
            predicted_ns=plan.latency_ns,
            predicted_usd=plan.usd,
            accepted_ns=answer.accepted_ns(now_ns, allowed_ns),
            accepted_usd=max(answer.accepted_usd, plan.usd),
            objective_ns=objective_ns,
            objective_usd=request.cost_usd,
        )

    def _too_dear(self, request: Request) -> IdlePlan | None:
        """The cheapest plan that is in time on an idle system, if it exceeds the cost objective.

        None if a plan within both objectives exists, or none is known to be in time.
        """
        budgets = self._admission.budgets
        left_ns = float(request.deadline_ns - self._view.now_ns)
        fastest = budgets.fastest_plan(request)
        if fastest is not None and fastest.latency_ns <= left_ns:
            return None
        return budgets.cheapest_plan(request, left_ns)

    def _find(self, answer: _Acceptable, request: Request, refused_ns: int, guess_ns: int) -> None:
        """Find a latency objective that would have been accepted, and the cost then.

        A shorter one, `refused_ns`, would not.
        """
        cost_usd = min(request.cost_usd, _ANY_COST_USD)
        low_ns = refused_ns
        least_ns = int(EXCESS_MIN * refused_ns)
        high_ns = max(guess_ns, low_ns + least_ns)
        usd: float | None = None
        for _ in range(EXCESSES_TRIED):
            answer.reach_ns = high_ns
            usd = self._admission.try_out(request, high_ns, cost_usd)
            if usd is not None:
                break
            low_ns, high_ns = high_ns, high_ns + 2 * (high_ns - refused_ns)
        if usd is None:
            return
        for _ in range(EXCESS_HALVED):
            if high_ns - low_ns <= least_ns:
                break
            middle_ns = (low_ns + high_ns) // 2
            found_usd = self._admission.try_out(request, middle_ns, cost_usd)
            if found_usd is None:
                low_ns = middle_ns
            else:
                high_ns, usd = middle_ns, found_usd
        answer.reach_ns, answer.usd = high_ns, usd
        answer.due_ns = answer.made_ns + high_ns
        answer.margin_ns = self._admission.margin_ns(request, high_ns)

    def _short(self, request: Request, task: Task) -> Build | None:
        """The build whose pool is short: of a stage that did not fit, the one that is free first.

        None if none of those that the request can pay for can run.
        """
        usable = [
            build
            for build in self._admission.budgets.affordable(task)
            if request.items <= build.items_max
            and self._builds.is_usable(build)
            and build.narrowest.lanes > 0
        ]
        if len(usable) == 1:
            return usable[0]
        return min(usable, key=self._wait_ns, default=None)

    def _wait_ns(self, build: Build) -> int:
        """How long what is promised keeps the lanes of a build busy."""
        calendar = build.narrowest
        return int((calendar.work_ns + calendar.busy_ns(self._view.now_ns)) / calendar.supply)

    def _space(self, answer: _Acceptable, request: Request, build: Build) -> None:
        """Set the time between those who come back: their work, over what is left of a pool."""
        now_ns, items, calendar = self._view.now_ns, request.items, build.narrowest
        window_ns = (request.deadline_ns - now_ns) / len(request.tasks)
        size = max(items, build.items_within(window_ns, 0.0))
        work_ns = build.lane_ns(size) / size * items * build.weight
        usual = self._admission.feasibility.usual_load(build.pool.id)
        left = max(RETRY_SHARE_MIN, 1.0 - usual)
        answer.spacing_ns = work_ns / (calendar.supply * left)
        answer.lanes = calendar.supply * (usual + left / 2)

    def _can_run_all(self, request: Request) -> bool:
        """Whether there is a build that can run, for each stage."""
        return all(
            any(self._builds.is_usable(b) for b in self._builds.of_function[task.function.id])
            for task in request.tasks
        )
