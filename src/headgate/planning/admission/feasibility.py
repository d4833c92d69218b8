"""Feasibility: which build can run a stage in time, with everything that is promised already.

A stage fits a build if the calendar of the build's pool still balances with it. The build that
costs others least comes first, and calls of FaaS pools last. A class that has used its fair share
of a pool leaves some of the calendar to others.

How large the batch of a stage will be is not known when it is promised, and the calendar needs to
know how many batches must start. So a stage is tried in one way after the other:

1. In a batch that is in time whenever it begins (`_fit_build`): with `m` lanes one is free after
   `1/m` of the time of a batch, so a batch may take `m / (m + 1)` of the stage's time. Each stage
   counts as its part of such a batch, and as its part of one half as long if that does not fit.
2. In one batch with all that waits for the build (`_fit_next_batch`). The next lane may be free
   sooner than the first way allows for, and then a larger batch is in time for all. This is known
   only where nothing else waits for the lanes.
3. In one batch with stages of the same request that become ready with it (`_fit_beside`), where
   each alone would count as a batch of its own.

Where batches have a choice of shapes, that of the least work comes first, and then those which are
done in a part of the time (`_fit_shape`). A call starts at once, if the platform can (`_fit_call`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, final

from headgate.core.clock import NEVER_NS
from headgate.core.model import App
from headgate.core.records import Request, Task
from headgate.core.view import View
from headgate.planning.admission.cost_budgets import CostBudgets
from headgate.planning.admission.shares import ClassLoad, PoolShares
from headgate.planning.admission.spillover import Spillover
from headgate.planning.constants import (
    LEFT_BY_LARGE,
    LEFT_TO_OTHERS,
    PRICE_MIN,
)
from headgate.planning.frontier.candidates import visits
from headgate.planning.pools.build import Build, Promise
from headgate.planning.pools.builds import Builds
from headgate.planning.pools.node_lanes import PromisedStarts

_BATCH_TIMES: Final = (1.0, 0.5)  # parts of a window in which batches are tried
_SHAPE_TIMES: Final = (1.0, 0.7, 0.5, 0.35, 0.25)  # parts of a window in which shapes are tried
_DEFAULT_OBJECTIVE_NS: Final = 1e9  # where no pipeline has one, and clients claim deadlines
_ROUNDING: Final = 1.001  # of a length, so that it is enough after it was rounded down

_Choice = tuple[float, Build]  # the time that a stage takes on a build


@final
class Feasibility:
    """Finds the build that can run a stage, for the request at hand."""

    def __init__(
        self, view: View, builds: Builds, spillover: Spillover, budgets: CostBudgets
    ) -> None:
        self._budgets = budgets
        self._view = view
        self._builds = builds
        self._spillover = spillover
        self.shares = [PoolShares() for _ in view.app.pools]  # by pool id
        # By pool id: whether other pools could not run in time all that some function can run here.
        self._is_bound = [False for _ in view.app.pools]
        for build in builds.all:
            if not _has_others(build, builds):
                self._is_bound[build.pool.id] = True
        self._declared_ns = _declared_ns(view.app)  # by pipeline id
        # By pipeline id and stage: the probability that it runs, which is 1 but for cascades.
        self._visits = [visits(pipeline) for pipeline in view.app.pipelines]
        self._loads: dict[int, ClassLoad] = {}  # of the request at hand, by pool
        self._works: dict[int, float] = {}  # likewise: what it offers
        self._request: Request | None = None  # itself, if it is new
        self._elsewhere: dict[int, float] = {}  # likewise: what it offers to pools that come later
        self._offered: set[tuple[int, int]] = set()  # likewise: their ids, and its stages
        self._stage = 0  # likewise: the one that is fitted
        self._preferred: list[Build | None] = []  # likewise: the builds that it prefers, by stage
        self._stage_works: list[float] = []  # likewise: what its stages offer to their pools
        self._priority = 0  # likewise
        self._starts = PromisedStarts(view, builds.nodes)
        self.was_share_used = False  # the last request did not fit to leave others their shares
        self.is_trial = False  # what is fitted will not be promised, and is no demand

    def observe(self, request: Request) -> None:
        """A request is at hand: record what it offers to each pool that it prefers."""
        tasks, items, works, preferred = request.tasks, request.items, self._works, self._preferred
        self._priority = request.priority
        self._request = request
        self.was_share_used = False
        self._offered.clear()
        self._elsewhere.clear()
        works.clear()
        preferred.clear()
        self._stage_works.clear()
        stages, window_ns = len(tasks), float(request.deadline_ns - self._view.now_ns)
        for task, probability in zip(tasks, self._visits[request.pipeline.id], strict=True):
            builds = self._budgets.affordable(task)
            preferred.append(builds[0] if builds else None)
            work_ns = 0.0
            if builds:
                build = builds[0]
                size = build.items_within(window_ns / stages, 0.0)
                work_ns = build.lane_ns(size) / size * items * build.weight * probability
                self._builds.observe_load(build, work_ns)
                pool_id = build.pool.id
                works[pool_id] = works.get(pool_id, 0.0) + work_ns
            self._stage_works.append(work_ns)
        self._loads.clear()
        for pool_id, work_ns in works.items():
            self._loads[pool_id] = self._observe_class(request, pool_id, window_ns, work_ns)

    def _observe_class(
        self, request: Request, pool_id: int, window_ns: float, work_ns: float
    ) -> ClassLoad:
        """Record that the class of a request offers work to a pool."""
        now_ns, shares = self._view.now_ns, self.shares[pool_id]
        key = (request.client, request.pipeline.id)
        load = shares.of_class(key)
        if load is None:
            alone_ns = self._builds.isolated_ns(request)
            client = self._view.app.clients[request.client]
            declared_ns = self._declared_ns[request.pipeline.id]
            load = ClassLoad(
                now_ns, window_ns, alone_ns, client.weight, declared_ns, client.priority
            )
            shares.add(key, load)
        lanes = self._builds.calendars[pool_id].lanes / self._view.gateways
        shares.observe(now_ns, load, work_ns, lanes, window_ns, request.priority)
        return load

    def _offer(self, pool_id: int, work_ns: float) -> None:
        """Record that a stage which found no room where it prefers to run asks another pool.

        Without it what comes there from elsewhere would have no shares of the pool.
        """
        request, stage = self._request, self._stage
        if request is None or self.is_trial:
            return
        preferred = self._preferred[stage]
        if preferred is not None and preferred.pool.id == pool_id:
            return
        if (pool_id, stage) in self._offered:
            return
        self._offered.add((pool_id, stage))
        work_ns *= self._visits[request.pipeline.id][stage]
        window_ns = float(request.deadline_ns - self._view.now_ns)
        self._loads[pool_id] = self._observe_class(request, pool_id, window_ns, work_ns)
        self._elsewhere[pool_id] = self._elsewhere.get(pool_id, 0.0) + work_ns

    def usual_load(self, pool_id: int) -> float:
        """The part of a pool's lanes that what arrives takes while there is enough for all."""
        lanes = self._builds.calendars[pool_id].lanes
        return min(1.0, self.shares[pool_id].usual_lanes / max(1, lanes))

    def offered_ns(self, pool_id: int) -> float:
        """All the work that has been offered to a pool, admitted or not."""
        return self.shares[pool_id].offered_ns

    def on_booked(self, promise: Promise) -> None:
        """A stage of the request at hand is booked: so is the start that it needs."""
        if promise.needed_start_ns > 0:
            self._starts.book(promise.build, promise.start_ns, promise.needed_start_ns)

    def on_promised(self, promises: list[Promise]) -> None:
        """The request at hand was admitted: its class pays for it."""
        if self._view.gateways > 1:
            for pool_id, work_ns in self._works.items():
                self._builds.observe_admitted(pool_id, work_ns)
        for stage, promise in enumerate(promises):
            build, preferred = promise.build, self._preferred[stage]
            is_elsewhere = preferred is not None and build.pool is not preferred.pool
            if preferred is not None and is_elsewhere and build.warm_pool is None:
                self._loads[preferred.pool.id].on_placed_elsewhere(self._stage_works[stage])
            load = self._loads.get(build.pool.id)
            if promise.begin_ns == promise.start_ns:
                build.open_batch = promise  # others will join it
            elif build.open_batch is not None:
                build.open_batch.join(promise)
            if load is not None:
                load.tokens_ns -= promise.work_ns
            if build not in self._preferred:
                self._builds.observe_elsewhere(build, promise.base_ns)

    def on_refused(self) -> None:
        """The request at hand was not admitted."""
        for pool_id, load in self._loads.items():
            load.on_refused(self._works.get(pool_id, 0.0) + self._elsewhere.get(pool_id, 0.0))

    def on_admitted_before(self) -> None:
        """A request that was admitted is at hand again: its class owes nothing more."""
        self._loads.clear()
        self._request = None

    def try_for(self, request: Request) -> None:
        """What is tried next is tried for this request, though it may not have been observed.

        Its class is what it was, and that of the request before has nothing to do with it.
        """
        if self._request is request:
            return
        self.on_admitted_before()
        self._priority = request.priority
        self.was_share_used = False
        for pool_id, shares in enumerate(self.shares):
            load = shares.of_class((request.client, request.pipeline.id))
            if load is not None:
                self._loads[pool_id] = load

    def _latest_start_ns(self, request: Request, stage: int) -> int:
        """When a stage must start at its fastest for the request to be in time."""
        time_ns = self._builds.fastest_ns(request.tasks[stage].function.id, request.items)
        return int(self._builds.latest_ns(request, stage) - time_ns)

    def fit(
        self,
        request: Request,
        stage: int,
        ready_ns: int,
        due_ns: int,
        z: float,
        beside: Sequence[Promise] = (),
    ) -> Promise | None:
        """The promise of the cheapest build that can run a stage between two times; None: none can.

        `beside` is what is promised to stages of the same request that wait for nothing else. A
        request with a cost objective gets what it can pay for.
        """
        task = request.tasks[stage]
        self._stage = stage
        most_usd = self._budgets.left_usd(task)
        builds = self._builds.of_function[task.function.id]
        if len(builds) > 1:
            builds = self._ranked(task, due_ns - ready_ns)
        for build in builds:
            if request.items <= build.items_max and self._builds.is_usable(build):
                if most_usd < inf and build.usd(request.items) > most_usd:
                    continue
                if build.warm_pool is not None:
                    promise = self._fit_call(build, task, ready_ns, due_ns, z)
                    if promise is not None:
                        promise.usd = build.usd(request.items) if most_usd < inf else 0.0
                        return promise
                    continue
                # Calendars reckon from now on, but these become ready together: one after the other
                # must be done, and the first by so much sooner.
                sooner_ns = due_ns
                if beside:
                    sooner_ns -= _time_beside_ns(build, request.items, beside)
                if build.has_choice:
                    promise = self._fit_shape(
                        build, request.items, ready_ns, sooner_ns, z, most_usd
                    )
                    if promise is not None:
                        # The shape sets the latest start, and is not chosen yet.
                        promise.order_ns = self._latest_start_ns(request, stage)
                else:
                    promise = self._fit_build(build, request.items, ready_ns, sooner_ns, z)
                    if promise is None and beside:
                        promise = self._fit_beside(
                            build, request.items, ready_ns, due_ns, z, beside
                        )
                    if promise is not None and most_usd < inf:
                        promise.usd = build.usd(request.items)
                if promise is not None:
                    return promise
        return None

    def visits(self, request: Request, stage: int) -> float:
        """The probability that a stage runs."""
        return self._visits[request.pipeline.id][stage]

    def expect(self, request: Request, stage: int, promise: Promise) -> None:
        """Have no more booked for a stage that may not run than it takes on average."""
        probability = self.visits(request, stage)
        if probability < 1.0:
            promise.expect(probability)

    def _must_yield(self, pool_id: int, load: ClassLoad, work_ns: float) -> bool:
        """Whether the request at hand must leave room: to other classes, or to more urgent ones."""
        shares = self.shares[pool_id]
        if shares.has_used_its_share(load, work_ns):
            return True
        # Where others fill the calendar, a client within its share need not choose among its own.
        return load.has_more_urgent(self._priority) and not shares.has_share_to_spare(load)

    def _wants_more(self, pool_id: int) -> bool:
        """Whether the class of the request at hand offers more than its share of a pool."""
        load = self._loads.get(pool_id)
        return load is not None and self.shares[pool_id].wants_more(load)

    def _ranked(self, task: Task, window_ns: int) -> list[Build]:
        """The builds of a task, the one that costs others least first, and calls after nodes.

        The price of a pool's time is its backlog within the task's window: a task leaves a pool
        that is in demand to those that can run nowhere else. For their sake calls may come before
        its nodes.
        """
        builds = self._builds.of_function[task.function.id]
        has_call = builds[-1].warm_pool is not None
        items = task.request.items
        return sorted(
            builds,
            key=lambda build: (
                self._rank(build, has_call=has_call),
                self.cost(build, items, window_ns),
            ),
        )

    def _rank(self, build: Build, *, has_call: bool) -> int:
        """Nodes come before calls, and both before what has not enough time for its own.

        Last come rented nodes that the plan wants no more: they are idle sooner.
        """
        pool_id = build.pool.id
        if pool_id in self._builds.unwanted_pools:
            return 3
        if not has_call:
            return 0
        if self._is_bound[pool_id] and self.shares[pool_id].is_contended:
            return 2
        return 0 if build.warm_pool is None else 1

    def cost(self, build: Build, items: int, window_ns: int) -> float:
        """What a task costs others on a build: a part of its pool, at the price of the time."""
        calendar = build.narrowest
        if build.warm_pool is not None or calendar.lanes <= 0 or items > build.items_max:
            return inf
        backlog_ns = calendar.work_ns + calendar.busy_ns(self._view.now_ns)
        price = PRICE_MIN + backlog_ns / (calendar.supply * max(1, window_ns))
        return build.lane_ns(items) * build.weight / calendar.supply * price

    def _start_ns(self, build: Build, latest_ns: int) -> int | None:
        """Time that a batch which begins by `latest_ns` must wait for a node to hold the build.

        None if the nodes that hold it are full until then, and no other should.
        """
        if build.cold_start_ns == 0:
            return 0
        lanes = self._builds.lanes_by(build, latest_ns)
        if lanes == 0 and self._builds.must_leave_nodes(build):
            return build.cold_start_ns if self._builds.may_start_now(build) else None
        if 0 < lanes < build.calendar.lanes and self._is_full(build, lanes, latest_ns):
            return build.cold_start_ns if self._builds.may_start_now(build) else None
        # Where the pool has not enough for all, functions would evict each other all the time.
        is_contended = self.shares[build.pool.id].is_contended
        return self._builds.ready_in_ns(build, may_swap_in=not is_contended)

    def _is_full(self, build: Build, lanes: int, latest_ns: int) -> bool:
        """Whether the lanes of a build have no room until then."""
        left_ns = latest_ns - self._view.now_ns
        calendar, supply = build.calendar, lanes * build.calendar.part
        if build.pending_ns > supply * left_ns:
            now_ns = self._view.now_ns
            # What is due later waits: it does not fill the lanes until then.
            ahead_ns = calendar.slack(now_ns, calendar.bucket(now_ns, latest_ns))[0]
            if min(ahead_ns, build.pending_ns) > supply * left_ns:
                return True
        return self._builds.free_in_ns(build, left_ns) > left_ns

    def _fit_call(
        self, build: Build, task: Task, ready_ns: int, due_ns: int, z: float
    ) -> Promise | None:
        """The promise of a FaaS call; None if it would be late."""
        items = task.request.items
        if not self._view.fits_call(task, build.pool, build.variant):
            return None
        latest_ns = due_ns - int(build.cautious_ns(items, z))
        if latest_ns < ready_ns:
            return None
        size, base_ns, batches = self._marginal(build, items, due_ns - ready_ns, z)
        work_ns = int(base_ns * build.overrun)
        may_start, now_ns = self._budgets.allows_cold(task, build), self._view.now_ns
        bucket = build.calendar.bucket(now_ns, latest_ns)
        ahead_ns = build.calendar.slack(now_ns, bucket)[0]
        if not self._spillover.can_start_by(
            build, task, batches, latest_ns, ahead_ns, may_start=may_start, is_trial=self.is_trial
        ):
            return None
        if not self._balances(build, latest_ns, latest_ns, bucket, work_ns, batches, build.weight):
            return None
        return Promise(
            build, due_ns, latest_ns, latest_ns, bucket, work_ns, batches, items, size, int(base_ns)
        )

    def _marginal(
        self, build: Build, items: int, window_ns: float, z: float
    ) -> tuple[int, float, float]:
        """The largest batch for a window, and the work and the part of a batch that a task adds."""
        fitting, size = build.items_within(window_ns, z), build.likely_items()
        size = fitting if fitting < size else size
        size = items if items > size else size
        weight, filled = build.weight, build.pending_items % size
        if filled > 0 and filled + items <= size:
            added_ns = build.lane_ns(filled + items) - build.lane_ns(filled)
        else:
            added_ns = build.lane_ns(items)
        return fitting if fitting > items else items, added_ns * weight, weight * items / size

    def _fit_build(
        self, build: Build, items: int, ready_ns: int, due_ns: int, z: float
    ) -> Promise | None:
        """The promise of a build to run a stage between two times; None if it cannot.

        Where its place is promised to another one, it is done before that starts, or has a start of
        its own.
        """
        if build.cold_start_ns == 0:
            self._starts.forget_old(build.pool.id)
            return self._fit_within(build, items, ready_ns, due_ns, z, 0)
        start_ns = self._start_ns(build, due_ns - int(build.cautious_ns(items, z)))
        if start_ns is None:
            return None
        if self._builds.may_start_now(build):
            return self._fit_within(build, items, ready_ns, due_ns, z, start_ns)
        started_ns = self._starts.ready_by_ns(build)
        if started_ns is not None:
            promise = self._fit_within(build, items, max(ready_ns, started_ns), due_ns, z, 0)
            if promise is None and started_ns > ready_ns:  # the start may begin sooner
                promise = self._fit_within(build, items, ready_ns, due_ns, z, start_ns)
                if promise is not None:
                    promise.needed_start_ns = start_ns
            return promise
        if self._builds.has_instance(build):
            until_ns = self._starts.holds_until_ns(build)
            held_ns = min(due_ns, until_ns)
            started_ns = max(ready_ns, self._view.now_ns + start_ns)
            promise = self._fit_within(build, items, started_ns, held_ns, z, 0)
            if promise is not None or held_ns == due_ns:
                return promise
            start_ns = self._starts.reload_ns(build)
        return self._fit_within(build, items, ready_ns, due_ns, z, start_ns, start_ns)

    def _fit_within(
        self,
        build: Build,
        items: int,
        ready_ns: int,
        due_ns: int,
        z: float,
        start_ns: int,
        booked_ns: int = 0,
    ) -> Promise | None:
        """The same where a start takes so long, which takes `booked_ns` of a lane."""
        now_ns, calendar, narrowest = self._view.now_ns, build.calendar, build.narrowest
        alone_ns = build.cautious_ns(items, z) + start_ns
        if ready_ns + alone_ns > due_ns:
            return None
        window_ns = (due_ns - ready_ns) * narrowest.lanes / (narrowest.lanes + 1.0)
        is_idle = calendar.work_ns == 0 and narrowest.has_free_lane(now_ns)
        tried = 0
        for part in _BATCH_TIMES:
            size, base_ns, batches = self._marginal(build, items, part * window_ns, z)
            if size == tried or (tried > 0 and self._wants_more(build.pool.id)):
                break
            tried = size
            work_ns = base_ns * build.overrun
            # It will run with what waits already; with more, the batch starts sooner or is smaller.
            latest_ns = due_ns - int(alone_ns)
            if size > items and build.pending_items > 0:
                waiting = build.pending_items + items
                together_ns = build.cautious_ns(waiting if waiting < size else size, z)
                sooner_ns = due_ns - int(together_ns if together_ns > alone_ns else alone_ns)
                latest_ns = sooner_ns if sooner_ns >= ready_ns else latest_ns
            begin_ns = build.joined_ns(items, size, ready_ns, latest_ns)
            bucket = calendar.bucket(now_ns, begin_ns)
            if is_idle or self._balances(
                build, latest_ns, begin_ns, bucket, work_ns + booked_ns, batches, build.weight
            ):
                promise = Promise(
                    build, due_ns, latest_ns, begin_ns, bucket, int(work_ns), batches, items, size,
                    int(base_ns),
                )  # fmt: skip
                promise.order_ns = due_ns - int(alone_ns)
                promise.needed_start_ns = booked_ns
                return promise
        if ready_ns > now_ns or build.pending_items == 0:
            return None
        return self._fit_next_batch(build, items, due_ns, z, start_ns)

    def _fit_next_batch(
        self, build: Build, items: int, due_ns: int, z: float, start_ns: int
    ) -> Promise | None:
        """The promise to run in one batch with all that waits for a build; None if one is late."""
        waiting, calendar = build.pending_items + items, build.calendar
        if waiting > build.items_best or calendar.work_ns > build.pending_ns:
            return None
        time_ns = build.cautious_ns(waiting, z) + start_ns
        latest_ns = min(due_ns, *(promise.due_ns for promise in build.booked)) - int(time_ns)
        if not build.narrowest.can_start(self._view.now_ns, latest_ns, time_ns, 1.0):
            return None
        others = list(build.booked)
        promise = self._in_one_batch(build, items, due_ns, latest_ns, others)
        promise.order_ns = due_ns - int(build.cautious_ns(items, z)) - start_ns
        if not self._leaves_shares(
            build, latest_ns, promise.begin_ns, promise.bucket, promise.work_ns, build.weight
        ):
            return None
        if not self.is_trial:
            _have_in_one_batch(others, waiting, latest_ns)
        return promise

    def _fit_beside(
        self,
        build: Build,
        items: int,
        ready_ns: int,
        due_ns: int,
        z: float,
        beside: Sequence[Promise],
    ) -> Promise | None:
        """The promise to run in one batch with stages of the same request; None if it is late."""
        own = [promise for promise in beside if promise.build is build]
        together = items + sum(promise.items for promise in own)
        if not own or together > build.items_best:
            return None
        others = [promise for promise in beside if promise.build is not build]
        latest_ns = due_ns - int(build.cautious_ns(together, z))
        latest_ns -= _time_beside_ns(build, items, others)
        if latest_ns < ready_ns or (build.cold_start_ns > 0 and self._start_ns(build, latest_ns)):
            return None
        promise = self._in_one_batch(build, items, due_ns, latest_ns, own)
        if not self._balances(
            build,
            latest_ns,
            promise.begin_ns,
            promise.bucket,
            promise.work_ns,
            promise.batches,
            build.weight,
        ):
            return None
        _have_in_one_batch(own, together, latest_ns)
        return promise

    def _in_one_batch(
        self, build: Build, items: int, due_ns: int, latest_ns: int, others: Sequence[Promise]
    ) -> Promise:
        """The promise to run with others, in a batch that must start by `latest_ns`."""
        together = items + sum(promise.items for promise in others)
        base_ns = (build.lane_ns(together) - build.lane_ns(together - items)) * build.weight
        begin_ns = min(latest_ns, *(promise.start_ns for promise in others))
        bucket = build.calendar.bucket(self._view.now_ns, begin_ns)
        batches = build.weight * items / together
        return Promise(
            build, due_ns, latest_ns, begin_ns, bucket, int(base_ns * build.overrun), batches,
            items, together, int(base_ns),
        )  # fmt: skip

    def _fit_shape(
        self, build: Build, items: int, ready_ns: int, due_ns: int, z: float, most_usd: float
    ) -> Promise | None:
        """The same for a build whose batches have a choice of shapes.

        What takes the least work leaves the least time to wait. If it would have to start too soon,
        what is done in a part of the time is tried.
        """
        tried: list[tuple[int, int]] = []
        for part in _SHAPE_TIMES:
            found = build.plan_within(items, part * (due_ns - ready_ns), z, most_usd)
            if found is None:
                break
            if found not in tried:
                tried.append(found)
                promise = self._fit_plan(build, items, ready_ns, due_ns, z, *found)
                if promise is not None:
                    promise.usd = build.usd_in(items, *found)
                    return promise
        return None

    def _fit_plan(
        self,
        build: Build,
        items: int,
        ready_ns: int,
        due_ns: int,
        z: float,
        size: int,
        shape_id: int,
    ) -> Promise | None:
        """The promise to run a stage in a batch of a size and a shape."""
        now_ns, calendar = self._view.now_ns, build.calendar
        window_ns = due_ns - ready_ns
        time_ns = build.lane_ns_in(size, shape_id, z)
        start_ns = self._start_ns(build, due_ns - int(time_ns))
        if start_ns is None or start_ns + time_ns > window_ns:
            return None
        weight = build.weight_of(shape_id)
        base_ns = build.lane_ns_in(size, shape_id) * weight * items / size
        work_ns, batches = base_ns * build.overrun, weight * items / size
        latest_ns = due_ns - int(time_ns + start_ns)
        bucket = calendar.bucket(now_ns, latest_ns)
        is_idle = calendar.work_ns == 0 and build.narrowest.has_free_lane(now_ns)
        if not is_idle and not self._balances(
            build, latest_ns, latest_ns, bucket, work_ns, batches, weight
        ):
            return None
        return Promise(
            build, due_ns, latest_ns, latest_ns, bucket, int(work_ns), batches, items, size,
            int(base_ns),
        )  # fmt: skip

    def _balances(
        self,
        build: Build,
        latest_ns: int,
        begin_ns: int,
        bucket: int,
        work_ns: float,
        batches: float,
        weight: float,
    ) -> bool:
        """Whether a task can start by `latest_ns`, and everything promised for later still can.

        Its work is done at `begin_ns`, in this bucket of the calendar, with the batch that it
        joins, and delays what is due then.
        """
        now_ns, calendar = self._view.now_ns, build.calendar
        self._offer(build.pool.id, work_ns)
        default_ns = build.lane_ns(1)
        if build.own is not None:
            own_bucket = build.own.bucket(now_ns, begin_ns)
            own_work_ns, own_batches = work_ns / weight, batches / weight
            if not build.own.fits(
                now_ns, latest_ns, own_bucket, own_work_ns, own_batches, 1.0, default_ns
            ):
                return False
        if not calendar.fits(now_ns, latest_ns, bucket, work_ns, batches, weight, default_ns):
            return False
        return self._leaves_shares(build, latest_ns, begin_ns, bucket, work_ns, weight)

    def _leaves_shares(
        self,
        build: Build,
        latest_ns: int,
        begin_ns: int,
        bucket: int,
        work_ns: float,
        weight: float,
    ) -> bool:
        """Whether what the class of the request at hand must leave to others is left to them."""
        now_ns, calendar = self._view.now_ns, build.calendar
        load, shares = self._loads.get(build.pool.id), self.shares[build.pool.id]
        if load is None:
            return True
        if begin_ns != latest_ns:
            bucket = calendar.bucket(now_ns, latest_ns)
        covered_ns = calendar.covered_ns(bucket)
        left_ns = (latest_ns if latest_ns < covered_ns else covered_ns) - now_ns
        reserved_ns = shares.reserved_ns(load, left_ns)
        part = 0.0  # of the calendar that it leaves to others
        if self._must_yield(build.pool.id, load, work_ns):
            part = LEFT_TO_OTHERS
        elif build.warm_pool is None and shares.wants_more(load):
            part = LEFT_BY_LARGE  # calls start at once, and do not fill the calendar
        if part == 0.0 and reserved_ns <= 0.0:
            return True
        ahead_ns, slack_ns, _ = calendar.slack(now_ns, bucket)
        reserved_ns += part * max(0, slack_ns + ahead_ns)
        # Nobody who comes could start in less. What other gateways promise is not known here.
        is_alone = self._view.gateways == 1 and not shares.has_several
        if is_alone and not load.has_more_urgent(self._priority):
            reserved_ns = 0.0 if reserved_ns < build.lane_ns(1) * weight else reserved_ns
        if reserved_ns <= 0.0 or slack_ns >= work_ns + reserved_ns:
            return True
        # It would have fitted, and there are others.
        self.was_share_used = slack_ns >= work_ns and not is_alone
        return False


@final
class StageBuilds:
    """Chooses builds for the stages of a request together, so that all of them are in time.

    By the waits that are found, a pipeline's time is divided as if each stage ran where it ends
    first. Where two stages want the same fast pool, and it is full, such a division leaves neither
    of them the time of a slow build, whose pool may be idle. Here the builds come first: each stage
    has the one that costs others least, and while some path is late, the stage goes to a faster one
    that saves the most time, on all late paths, for what it costs. What time is left is for
    waiting. A stage that is due later costs others less: before then its pool has more time that is
    not booked.
    """

    def __init__(self, builds: Builds, feasibility: Feasibility) -> None:
        self._builds = builds
        self._feasibility = feasibility

    def lengths_ns(self, request: Request, allowed_ns: float, z: float) -> list[float] | None:
        """Lengths of the stages on the cheapest builds of nodes that are in time together.

        None if there are none, or if no stage has a choice.
        """
        functions = [self._builds.of_function[task.function.id] for task in request.tasks]
        if all(len(builds) == 1 for builds in functions):
            return None
        rows = [self._choices(task, allowed_ns, z) for task in request.tasks]
        if not all(rows) or max(map(len, rows)) == 1:
            return None
        pipeline = request.pipeline
        while True:
            lengths_ns = [row[-1][0] for row in rows]
            left_ns = allowed_ns - max(pipeline.longest_to(lengths_ns))
            if left_ns >= 0.0:
                break
            stage = self._to_hasten(request, rows, lengths_ns, allowed_ns)
            if stage is None:
                return None
            rows[stage].pop()
        each_ns = left_ns / max(pipeline.longest_to([1.0] * len(rows)))
        return [own_ns + each_ns for own_ns in lengths_ns]

    def _to_hasten(
        self,
        request: Request,
        rows: Sequence[Sequence[_Choice]],
        lengths_ns: Sequence[float],
        allowed_ns: float,
    ) -> int | None:
        """The late stage for which the next faster build saves most for what it costs more.

        None if each has its fastest. What runs seldom costs others little.
        """
        pipeline, items, cost = request.pipeline, request.items, self._feasibility.cost
        to_ns, from_ns = pipeline.longest_to(lengths_ns), pipeline.longest_from(lengths_ns)
        late_ends = [0] * len(rows)  # by stage: late ends of the pipeline that are due to it
        best: int | None = None
        most = -inf
        for stage in reversed(range(len(rows))):
            after = pipeline.successors[stage]
            is_late = to_ns[stage] > allowed_ns
            late_ends[stage] = sum([late_ends[i] for i in after]) if after else int(is_late)
            rest_ns = from_ns[stage] - lengths_ns[stage]  # what follows it
            if len(rows[stage]) == 1 or to_ns[stage] + rest_ns <= allowed_ns:
                continue
            (faster_ns, faster), (slower_ns, slower) = rows[stage][-2:]
            until_ns = int(allowed_ns - rest_ns)
            more = cost(faster, items, until_ns) - cost(slower, items, until_ns)
            more *= self._feasibility.visits(request, stage)
            saved_ns = late_ends[stage] * (slower_ns - faster_ns)
            gain = saved_ns / more if more > 0.0 else inf
            if gain > most:
                best, most = stage, gain
        return best

    def _choices(self, task: Task, window_ns: float, z: float) -> list[_Choice]:
        """The builds of nodes for a task, the fastest first, and each cheaper than all before."""
        items = task.request.items
        found: list[tuple[float, float, Build]] = []
        for build in self._builds.of_function[task.function.id]:
            is_node = build.warm_pool is None
            if is_node and items <= build.items_max and self._builds.is_usable(build):
                time_ns = _ROUNDING * build.cautious_ns(items, z)
                if build.cold_start_ns > 0:
                    time_ns += self._builds.ready_in_ns(build)
                found.append((time_ns, self._feasibility.cost(build, items, int(window_ns)), build))
        choices: list[_Choice] = []
        least = inf
        for time_ns, costs, build in sorted(found, key=_by_time):
            if costs < least:
                choices.append((time_ns, build))
                least = costs
        return choices


def _have_in_one_batch(promises: Sequence[Promise], items: int, latest_ns: int) -> None:
    """Have promised tasks run in one batch of so many items, which must start by `latest_ns`."""
    for promise in promises:
        promise.size = max(promise.size, items)
        promise.start_ns = min(promise.start_ns, latest_ns)


def _time_beside_ns(build: Build, items: int, beside: Sequence[Promise]) -> int:
    """Time that the lanes of a build need for what becomes ready together with a stage.

    What the build runs itself may be in the batch of the stage.
    """
    calendar, supply = build.calendar, max(1.0, build.calendar.supply)
    own_ns = others_ns = 0.0
    together = items
    for promise in beside:
        if promise.build is build:
            own_ns += promise.work_ns / supply
            together += promise.items
        elif promise.build.calendar is calendar:
            others_ns += promise.work_ns / supply
    if items < together <= build.items_best and not build.has_choice:
        own_ns = min(own_ns, build.lane_ns(together) - build.lane_ns(items))
    return int(own_ns + others_ns)


def _has_others(build: Build, builds: Builds) -> bool:
    """Whether other builds of its function can be in time, for all that it can run."""
    others = [
        other
        for other in builds.of_function[build.function_id]
        if other is not build and other.lane_ns(1) <= build.window_ns
    ]
    return sum(map(_rate, others)) >= _rate(build)


def _rate(build: Build) -> float:
    """Items that a pool can run of a build in a nanosecond, if it runs nothing else."""
    pool = build.pool
    lanes = build.lanes * pool.nodes if pool.faas is None else pool.faas.concurrency_max
    return lanes * build.items_best / build.lane_ns(build.items_best)


def _by_time(found: tuple[float, float, Build]) -> tuple[float, float]:
    return found[:2]


def _declared_ns(app: App) -> list[float]:
    """The objective of each pipeline; of one without, the longest of the others, or a default."""
    latencies_ns = [float(pipeline.slo.latency_ns) for pipeline in app.pipelines]
    longest_ns = max((ns for ns in latencies_ns if ns < NEVER_NS), default=_DEFAULT_OBJECTIVE_NS)
    return [min(ns, longest_ns) for ns in latencies_ns]
