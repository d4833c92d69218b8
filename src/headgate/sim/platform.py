"""A simulated function platform: a serverless pool that picks or starts its own instances.

An instance per concurrent request; the one used last is reused first; idle ones vanish after
keep-alive; starts draw from a burst that refills at a rate; beyond the concurrency limit, or with
the burst spent, a request is throttled. Billing is by GB-second of start and execution, rounded up
to the platform's step, plus a price per request.
"""

from __future__ import annotations

from typing import final

from headgate.core.actions import Dispatch
from headgate.core.events import BatchFinished, BatchRefused, Rank, Refusal
from headgate.core.model import App, Pool, Serverless
from headgate.metrics.columns import SpanKind
from headgate.sim.agenda import Agenda, Happening
from headgate.sim.cascade import has_cascades, unsure_tasks
from headgate.sim.node import Report
from headgate.sim.recorder import Recorder
from headgate.sim.truth import Truth

_BYTES_PER_GB = 1024**3


@final
class Invocation(Happening):
    """A batch that runs on the platform."""

    __slots__ = ("began_ns", "order", "platform", "start_ns")

    def __init__(self, platform: Platform, order: Dispatch, began_ns: int, start_ns: int) -> None:
        self.platform = platform
        self.order = order
        self.began_ns = began_ns
        self.start_ns = start_ns


@final
class Platform:
    """One serverless pool."""

    def __init__(
        self,
        id: int,
        pool: Pool,
        spec: Serverless,
        app: App,
        agenda: Agenda,
        truth: Truth,
        recorder: Recorder,
    ) -> None:
        self.id = id  # its row among the resources of the run
        self.pool = pool
        self._spec = spec
        self._app = app
        self._agenda = agenda
        self._truth = truth
        self._recorder = recorder
        self._has_cascades = has_cascades(app)
        self._idle_since_ns: dict[int, list[int]] = {}  # by variant id, a stack
        self._running = 0
        self._tokens = float(spec.burst)
        self._refilled_ns = 0
        self.throttles = 0  # faults in force
        self.busy_ns = 0
        self.up_ns = 0
        self.cold_starts = 0
        self.throttled = 0
        self.cost_usd = 0.0

    def take(self, now_ns: int, order: Dispatch) -> None:
        """Run a batch on an idle instance or a new one, or refuse it: too late, or throttled."""
        if now_ns > order.latest_ns:
            self._report(now_ns, Report(BatchRefused(order.batch_id, Refusal.LATE)))
            return
        idle = self._idle_since_ns.setdefault(order.variant_id, [])
        while idle and now_ns - idle[0] > self._spec.keep_alive_ns:
            self.up_ns += self._spec.keep_alive_ns
            del idle[0]
        is_full = self._running >= self._spec.concurrency_max or self.throttles > 0
        if is_full or not (idle or self._may_start(now_ns)):
            self.throttled += 1
            self._report(now_ns, Report(BatchRefused(order.batch_id, Refusal.THROTTLED)))
            return
        start_ns = 0
        if idle:
            self.up_ns += now_ns - idle.pop()
        else:
            start_ns = self._start(order)
        self._running += 1
        self._recorder.began(now_ns, order.task_ids)
        if start_ns:
            self._recorder.waits_for_start(now_ns, order.task_ids)
        variant = self._app.variants[order.variant_id]
        length_ns = start_ns + self._truth.exec_ns(variant, order.items)
        if order.moved_bytes and self.pool.bytes_per_s > 0:
            length_ns += int(order.moved_bytes / self.pool.bytes_per_s * 1e9)
        invocation = Invocation(self, order, now_ns, start_ns)
        self._agenda.push(now_ns + length_ns, Rank.COMPLETION, invocation)

    def end(self, now_ns: int, invocation: Invocation) -> BatchFinished:
        """A batch has run: its instance is idle, and the bill is written."""
        order = invocation.order
        self._running -= 1
        self._idle_since_ns[order.variant_id].append(now_ns)
        length_ns = now_ns - invocation.began_ns
        self.busy_ns += length_ns
        self.up_ns += length_ns
        spec = self._spec
        steps = -(-length_ns // spec.billing_step_ns)
        gigabytes = spec.memory_bytes / _BYTES_PER_GB
        billed_s = steps * spec.billing_step_ns / 1e9
        self.cost_usd += billed_s * gigabytes * spec.usd_per_gb_s + spec.usd_per_request
        function_id = self._app.variants[order.variant_id].function_id
        began_ns = invocation.began_ns
        if invocation.start_ns:
            ready_ns = began_ns + invocation.start_ns
            self._recorder.span(
                self.id, function_id, SpanKind.START, began_ns, ready_ns, order.batch_id, 0
            )
            began_ns = ready_ns
        self._recorder.span(
            self.id, function_id, SpanKind.RUN, began_ns, now_ns, order.batch_id, order.items
        )
        if not self._has_cascades:
            return BatchFinished(order.batch_id)
        unsure = unsure_tasks(self._app, self._recorder, order.task_ids)
        return BatchFinished(order.batch_id, unsure)

    def _may_start(self, now_ns: int) -> bool:
        spec = self._spec
        elapsed_s = (now_ns - self._refilled_ns) / 1e9
        self._tokens = min(float(spec.burst), self._tokens + elapsed_s * spec.starts_per_s)
        self._refilled_ns = now_ns
        return self._tokens >= 1.0

    def _start(self, order: Dispatch) -> int:
        self._tokens -= 1.0
        self.cold_starts += 1
        variant = self._app.variants[order.variant_id]
        return variant.profile.start_ns

    def _report(self, now_ns: int, report: Report) -> None:
        self._agenda.push(now_ns + self.pool.network_ns, Rank.COMPLETION, report)
