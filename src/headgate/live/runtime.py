"""The runtime of a gateway, between the front ends that submit calls and the workers that run them.

It executes the actions of the driver. Tensors never enter the Scheduler: the runtime keeps them and
moves them as the Scheduler decides. Large outputs of a stage for the next one are references: they
stay in the memory of the worker that wrote them (`ipc.node_memory`).

Other gateways may use the same workers. What that means here:

- A worker that connects may hold instances already. They are part of the event that its node has
  joined, because a policy may start what it misses as soon as it has a node.
- Workers tell of instances that other gateways start and stop, at any time: also before there is a
  Scheduler, which is built only when every function has been measured. Such events wait.
- A start that names no node goes to the supervisor, whose Broker grants one. The worker then tells
  of an instance that appeared, with an id of ours: it is the one that we wait for.
- How many gateways there are comes from the supervisor (`GatewaysChanged`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, final

from headgate.core.actions import (
    Action,
    Dispatch,
    KeepWarm,
    PlacedAction,
    ReportWouldReject,
    Settle,
    StartInstance,
    StopInstance,
)
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.event_log import to_wire
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    GatewaysChanged,
    InstanceAppeared,
    InstanceStarted,
    InstanceStopped,
    InstanceUseChanged,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestArrived,
    RequestCancelled,
    WeightsEvicted,
)
from headgate.core.model import App, Function
from headgate.core.records import STAGES_MAX
from headgate.core.states import InstanceState, Outcome, Settlement
from headgate.core.view import View
from headgate.functions.lambda_payload import TOO_LARGE, body_bytes
from headgate.functions.tensor import Signature, TaskInputs
from headgate.live.call import CANNOT_LOAD, INTERNAL, Call, GatewayPhase, ServedModel, StageOutputs
from headgate.live.cost_accounting import CostAccounting, breakers
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.driver import Driver, EventLogTask, Membership, make_scheduler
from headgate.live.ipc.control_channel import ControlLink
from headgate.live.ipc.messages import BatchRan, MeasuredFunction, PresentInstance, RunBatch
from headgate.live.ipc.worker_link import WorkerLink, WorkerLinks
from headgate.live.model_registry import (
    LoadsNeeded,
    check_loads,
    inspect_remote_only,
    remote_only,
    served_models,
    signatures,
    with_measured_profiles,
    with_siblings,
)
from headgate.live.pools.registry import RemotePools
from headgate.live.pools.remote_pool import make_remote_call
from headgate.live.telemetry.metrics import GaugeSnapshot, Metrics
from headgate.system.busy_poll import BusyPoll
from headgate.system.threads import run_in_daemon_thread

if TYPE_CHECKING:
    from headgate.live.telemetry.spans import SpanTracer

_LOG: Final = logging.getLogger(__name__)
_INTERNAL: Final = Settlement(Outcome.FAILED, INTERNAL)
_RESTARTS: Final = Settlement(Outcome.FAILED, "the gateway restarts", retry_ns=SECOND_NS)


@final
class Runtime:
    """Serves one application: a `FrontEndApi`, `ActionExecutor`, `WorkerLinksListener` and
    `NodeListener`.
    """

    def __init__(
        self,
        run_dir: Path,
        deployment: Deployment,
        *,
        arena_bytes: int,
        log_path: Path | None,
        is_log_required: bool = True,
        loads_needed: LoadsNeeded = "none",
        metrics: Metrics,
        tracer: SpanTracer | None = None,
        membership: Membership = Membership(),  # noqa: B008
    ) -> None:
        self.phase = GatewayPhase.STARTING
        self.control: ControlLink | None = None  # to the supervisor
        self.models: Mapping[str, ServedModel] = {}
        self._config = deployment.load()
        self._metrics = metrics
        self._tracer = tracer
        # By starting instance: its function, since when, and its node if we have picked that.
        self._starts: dict[int, tuple[str, int, int | None]] = {}
        self._index = membership.index
        self._gateways = membership.count  # that serve, this one included
        self._costs = CostAccounting(self._config.app, self._config.serve.gateways)
        self._event_log = EventLogTask(log_path, self._config.serve, is_required=is_log_required)
        self._worker_links = WorkerLinks(
            run_dir, deployment.nodes, self, arena_bytes=arena_bytes, count_fault=metrics.fault
        )
        self._measured: dict[str, MeasuredFunction] = {}  # by name of the variant
        self._signatures: list[Signature] = []  # by function id
        self._loads_needed = loads_needed
        self._base = deployment.base
        self._own_nodes = len(deployment.nodes)
        self._links: dict[int, WorkerLink] = {}  # by node id
        # Events of workers that the Scheduler does not know yet: other gateways have caused them.
        self._early: list[tuple[WorkerLink, Event]] = []
        self._worker_pids: dict[int, int] = {}  # by node id
        self._remote_pools: RemotePools | None = None  # set once the Scheduler is built
        self._driver: Driver | None = None
        self._calls: dict[int, Call] = {}  # open calls by request id
        self._stage_outputs = StageOutputs(self._config.app, self._signatures)
        # By batch: its variant, items and shape.
        self._in_flight: dict[int, tuple[int, int, int]] = {}
        self._next_id = 0
        # The payload size of a request matters only if there is a FaaS pool.
        pools = self._config.app.pools
        self._has_platforms = any(pool.faas is not None for pool in pools)
        self._drained: asyncio.Event | None = None
        self._may_spin = deployment.may_spin(self._config.serve.gateways)
        self._busy_poll = BusyPoll(asyncio.get_running_loop(), self._should_spin)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inspection: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect to the workers; `phase` says when the runtime is ready."""
        self._worker_links.start()
        if remote_only(self._config):
            self._inspection = asyncio.create_task(self._inspect_remote_only())

    async def _inspect_remote_only(self) -> None:
        """Inspect functions that no worker loads, in a thread: it may take a while."""
        inspect = partial(inspect_remote_only, self._config, self._base)
        try:
            self._add_measured(await run_in_daemon_thread(inspect))
        except Exception as error:  # the application cannot be served
            self.abort(error)

    async def drain(self, limit_s: float) -> int:
        """Accept no new calls and finish the open ones; return how many did not finish in time."""
        self.phase = GatewayPhase.DRAINING
        if self._calls:
            self._drained = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), limit_s)
        return len(self._calls)

    async def stop(self) -> None:
        """Disconnect from the workers and close the event log."""
        if self._driver is not None:
            self._driver.stop()
        await self._worker_links.stop()
        if self._remote_pools is not None:
            await self._remote_pools.stop()
        self.failure.cancel()
        if self._inspection is not None:
            self._inspection.cancel()
        self._event_log.close()

    @property
    def app(self) -> App:
        return self._config.app

    def problem(self, model: ServedModel) -> str:
        for stage in model.pipeline.stages:
            problem = self._load_problem(stage.function) or self._no_worker_problem(stage.function)
            if problem:
                is_all = stage.function.name == model.name
                return problem if is_all else f"function {stage.function.name} {problem}"
        return ""

    def _load_problem(self, function: Function) -> str:
        """Return why a function cannot be loaded, if the Scheduler has marked it unloadable."""
        view = None if self._driver is None else self._driver.scheduler.view
        if view is None or function.id not in view.unloadable:
            return ""
        failures = [view.load_failures.get(variant.id) for variant in function.variants]
        reasons = [failure.reason for failure in failures if failure is not None]
        return f"{CANNOT_LOAD}{reasons[0] if reasons else 'unknown error'}"

    def _no_worker_problem(self, function: Function) -> str:
        pool_ids = {link.node.pool_id for link in self._links.values()}
        if self._remote_pools is not None:
            pool_ids.update(self._remote_pools.pools_up())
        is_runnable = any(not pool_ids.isdisjoint(v.pool_ids) for v in function.variants)
        return "" if is_runnable else "has no worker to run on"

    def gauge_snapshot(self) -> GaugeSnapshot:
        view = None if self._driver is None else self._driver.scheduler.view
        gauges = self._costs.gauge_snapshot(view, list(self._calls.values()), self._remote_pools)
        if self._driver is None or view is None:
            return gauges
        margins = self._driver.scheduler.policy.admission_margins
        pipelines = self._driver.scheduler.app.pipelines
        by_model = {pipelines[id].name: margin for id, margin in enumerate(margins)}
        kept_bytes = self._worker_links.memories.kept_bytes()
        return replace(
            gauges,
            admission_margin=by_model,
            stage_output_bytes=kept_bytes,
            events_ignored=view.events_ignored,
        )

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers, the latest of each node."""
        return list(self._worker_pids.values())

    def breakers(self) -> Mapping[str, str]:
        return {} if self._driver is None else breakers(self._driver.scheduler.view)

    def now_ns(self) -> int:
        return monotonic_ns()

    def submit(self, call: Call) -> None:
        assert self._driver is not None, "front ends reject calls until the runtime is ready"
        request_id = self._next_id
        self._next_id = request_id + 1
        call.request_id = request_id
        self._calls[request_id] = call
        if self._tracer is not None:
            try:
                self._tracer.begin(call)
            except Exception:
                _LOG.exception("a call could not be traced", extra=_log_extra(call))
                self._metrics.fault("trace")
        self._driver.post(
            RequestArrived(
                request_id,
                call.pipeline_id,
                call.client_id,
                call.items,
                call.priority,
                call.deadline_ns,
                call.is_hard,
                body_bytes([call.inputs]) if self._has_platforms else 0,
                call.cost_usd,
                call.client_request_id.decode("latin-1"),
            )
        )

    def cancel(self, call: Call) -> None:
        call.on_answer = lambda call: None
        if self._driver is not None and call.request_id in self._calls:
            self._driver.post(RequestCancelled(call.request_id))

    def settle(self, now_ns: int, action: Settle) -> None:
        call = self._calls.pop(action.request_id, None)
        if call is not None:  # else it was answered already, after a fault
            self._complete(call, action.settlement)

    def count_would_reject(self, action: ReportWouldReject) -> None:
        call = self._calls.get(action.request_id)
        if call is not None:  # else it was answered already, after a fault
            self._metrics.would_reject(call, action.reason)

    def _complete(self, call: Call, settlement: Settlement) -> None:
        """Count and answer a call exactly once, whatever raises on the way."""
        self._stage_outputs.end(call)
        call.settlement = settlement
        try:
            self._metrics.settled(call)
            if self._tracer is not None:
                self._tracer.end(call)
        except Exception:
            _LOG.exception("a call could not be counted", extra=_log_extra(call))
            self._metrics.fault("metrics")
        try:
            call.on_answer(call)
        except Exception:
            _LOG.exception("a call could not be answered", extra=_log_extra(call))
            self._metrics.fault("answer")
            call.settlement, call.error = _INTERNAL, ""
            with suppress(Exception):  # `on_answer` answers only if it has not done so
                call.on_answer(call)
        if self._drained is not None and not self._calls:
            self._drained.set()

    def open_requests(self) -> Collection[int]:
        return self._calls.keys()

    def fail(self, request_ids: Collection[int]) -> None:
        for request_id in request_ids:
            call = self._calls.pop(request_id, None)
            if call is not None:
                _LOG.error("a call is answered with 500", extra=_log_extra(call))
                call.error = ""
                self._complete(call, _INTERNAL)

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        assert self._driver is not None and self._remote_pools is not None
        link = None if action.node_id is None else self._links.get(action.node_id)
        run_remotely = (
            None if link else self._remote_pools.runner_of(action.pool_id, action.node_id)
        )
        if link is None and run_remotely is None:
            self._driver.post(BatchRefused(action.batch_id, Refusal.GONE))
            return
        tasks: list[TaskInputs] = []
        for task_id in action.task_ids:
            call = self._calls.get(task_id // STAGES_MAX)
            if call is None:
                continue  # answered already, after a fault
            call.sent_ns = now_ns
            call.batch_items = action.items
            inputs = self._stage_outputs.inputs(call, task_id % STAGES_MAX)
            task = TaskInputs(task_id, call.items, inputs)
            if call.is_id_given and link is not None:  # remote pools do not take part
                task.run_once_key = self._run_once_key(call, task_id % STAGES_MAX)
            tasks.append(task)
        if not tasks:
            self._driver.post(BatchRefused(action.batch_id, Refusal.CANCELLED))
            return
        self._in_flight[action.batch_id] = (action.variant_id, action.items, action.shape_id)
        try:
            if link is not None:
                assert action.instance_id is not None
                batch_id, variant_id, items = action.batch_id, action.variant_id, action.items
                instance_id, shape_id = action.instance_id, action.shape_id
                link.run(RunBatch(batch_id, variant_id, instance_id, items, tasks, shape_id))
            else:
                assert run_remotely is not None
                view = self._driver.scheduler.view
                run_remotely(now_ns, make_remote_call(view, action, tasks, self._calls))
        except BaseException:
            self._in_flight.pop(action.batch_id, None)
            raise
        if link is not None and self._should_spin():
            self._busy_poll.sent(now_ns)

    def _run_once_key(self, call: Call, stage_index: int) -> bytes:
        """Return what identifies a stage of a request that must not run twice; else nothing."""
        pipeline = self.app.pipelines[call.pipeline_id]
        stage = pipeline.stages[stage_index]
        if stage.function.is_idempotent:
            return b""
        client = self.app.clients[call.client_id].name
        names = "\0".join((client, pipeline.name, stage.function.name, str(stage_index)))
        return names.encode() + b"\0" + call.client_request_id

    def _should_spin(self) -> bool:
        """Whether exactly one request is in flight, so that busy polling pays off."""
        return self._may_spin and len(self._calls) == 1

    def execute(self, action: PlacedAction) -> None:
        assert self._driver is not None
        link = None if action.node_id is None else self._links.get(action.node_id)
        if link is not None:
            link.send_action(to_wire(action))
        elif action.node_id is None and self._is_granted(action):
            assert self.control is not None
            self.control.send(action)
        elif self._remote_pools is not None and self._remote_pools.execute(action):
            return
        elif isinstance(action, StartInstance | StopInstance):
            self._driver.post(InstanceStopped(action.instance_id, "the worker is disconnected"))
            return
        if isinstance(action, StartInstance):  # it has been sent, and ends in an event
            function_id = self.app.variants[action.variant_id].function_id
            name = self.app.functions[function_id].name
            self._starts[action.instance_id] = (name, monotonic_ns(), action.node_id)

    def _is_granted(self, action: PlacedAction) -> bool:
        """Whether a Broker picks the node that an action is for: the supervisor has it."""
        if self.control is None or not isinstance(action, StartInstance | StopInstance):
            return False
        assert self._driver is not None
        instance = self._driver.scheduler.view.instances.get(action.instance_id)
        return instance is not None and instance.pool.faas is None

    def keep_warm(self, action: KeepWarm) -> None:
        assert self._remote_pools is not None
        self._remote_pools.keep_warm(action)

    def abort(self, error: BaseException) -> None:
        """Answer all open calls with 503 and stop, after an error that waiting cannot mend."""
        if self.phase is not GatewayPhase.STARTING:
            self.phase = GatewayPhase.DRAINING
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.error = ""
            self._complete(call, _RESTARTS)
        if not self.failure.done():
            self.failure.set_exception(error)

    def on_worker_joined(self, link: WorkerLink) -> None:
        self._links[link.node.id] = link
        self._worker_pids[link.node.id] = link.hello.pid
        if self._driver is not None:
            self._join(link)
        self._add_measured(link.hello.functions)

    def _join(self, link: WorkerLink) -> None:
        # Those that are starting appear when they have started.
        present = [each for each in link.hello.instances if each.stage in ("ready", "evicted")]
        self.on_node_joined(link.node, present)
        assert self._driver is not None
        for each in present:
            if each.stage == "evicted":
                self._driver.post(WeightsEvicted(each.id))
            if not each.is_in_use:
                self._driver.post(InstanceUseChanged(each.id, False))
        problems = {each.function: each.problem for each in link.hello.functions}
        for variant in self.app.variants:
            problem = problems.get(variant.name)
            if problem:
                self._driver.post(LoadFailed(variant.id, link.node.id, problem))
        early = [event for sender, event in self._early if sender is link]
        self._early = [entry for entry in self._early if entry[0] is not link]
        for event in early:
            self.on_worker_event(link, event)

    def _add_measured(self, functions: list[MeasuredFunction]) -> None:
        """Add measured functions; build the Scheduler once every variant is known."""
        for measured in functions:
            known = self._measured.get(measured.function)
            if known is None or (known.problem and not measured.problem):
                self._measured[measured.function] = measured
        is_complete = all(v.name in self._measured for v in self.app.variants)
        if self._driver is None and is_complete:
            try:
                self._start_scheduler()
            except Exception as error:  # the application cannot be served
                self.abort(error)

    def on_node_joined(self, node: NodeSpec, present: Sequence[PresentInstance] = ()) -> None:
        assert self._driver is not None
        flat = tuple(id for each in present for id in (each.id, each.variant_id, each.shape_id))
        self._driver.post(NodeJoined(node.id, node.pool_id, node.name, flat))
        self._costs.on_node_joined(node.id, node.pool_id)

    def _start_scheduler(self) -> None:
        """Build the Scheduler from the measured application, and connect the nodes to it."""
        check_loads(self.app, self._measured, self._loads_needed)
        self._measured = with_siblings(self._config, self._measured)
        self._config = with_measured_profiles(
            self._config, self._measured, "the application, as measured"
        )
        app = self._config.app
        self._costs = CostAccounting(app, self._config.serve.gateways)
        self._signatures[:] = signatures(app, self._measured)
        self._stage_outputs = StageOutputs(app, self._signatures)
        self._remote_pools = RemotePools(
            self._config,
            self,
            self._costs,
            self._metrics.cold_started,
            self._signatures,
            first_node_id=self._own_nodes,
        )
        scheduler, header = make_scheduler(self._config, self._index)
        record, loop = self._event_log.begin(header), asyncio.get_running_loop()
        serve = self._config.serve
        self._driver = Driver(
            scheduler,
            self,
            loop,
            record=record,
            count_fault=self._metrics.fault,
            recheck_s=(serve.deadline_max_ns + serve.execution_timeout_ns) / 1e9,
        )
        if self._gateways != serve.gateways:
            self._driver.post(GatewaysChanged(self._gateways))
        for link in self._links.values():
            self._join(link)
        self._remote_pools.join()
        self.models = served_models(app, self._measured)
        loop.call_soon(self._update_phase)

    def keeps_on_node(self, task_id: int, is_unsure: bool) -> bool:
        call = self._calls.get(task_id // STAGES_MAX)
        # Outputs of a call that has ended are not copied either: they are dropped.
        return call is None or self._stage_outputs.is_read_later(
            call, task_id % STAGES_MAX, is_unsure=is_unsure
        )

    def on_batch_ran(self, pool_id: int, message: BatchRan) -> None:
        assert self._driver is not None
        if self._may_spin:
            self._busy_poll.answered(monotonic_ns())
        unsure: list[int] = []
        failed: list[int] = []
        failed_requests: set[int] = set()
        too_large: list[int] = []  # results that the payload limit of a platform excluded
        is_platform = self.app.pools[pool_id].faas is not None
        for result in message.results:
            call = self._calls.get(result.task_id // STAGES_MAX)
            if call is None:
                continue  # cancelled or answered
            call.began_ns = message.began_ns
            call.ended_ns = message.ended_ns
            try:
                self._costs.on_call_ran(call, pool_id)
                if not result.error:
                    self._stage_outputs.store(call, result.task_id % STAGES_MAX, result.outputs)
            except Exception:
                _LOG.exception("a result could not be stored", extra=_log_extra(call))
                self._metrics.fault("result")
                result.error, result.status = "internal error of the gateway", 500
            if result.error and is_platform and result.status == TOO_LARGE:
                too_large.append(result.task_id)
            elif result.error:
                if call.request_id not in failed_requests:  # the Scheduler names its first failure
                    call.error = result.error
                    call.status = result.status
                failed_requests.add(call.request_id)
                failed.append(result.task_id)
            elif result.is_unsure:
                unsure.append(result.task_id)
        self._driver.post(
            BatchFinished(message.batch_id, tuple(unsure), tuple(failed), tuple(too_large))
        )
        variant_id, items, shape_id = self._in_flight.pop(message.batch_id, (None, 0, 0))
        if variant_id is not None:
            took_ns = message.ended_ns - message.began_ns
            self._costs.on_batch_ran(variant_id, items, shape_id, took_ns)

    def on_worker_event(self, link: WorkerLink, event: Event) -> None:
        """Handle an event of a worker: about a batch of ours, or an instance of whomever."""
        if self._driver is None or self._links.get(link.node.id) is not link:
            self._early.append((link, event))
            return
        if isinstance(event, InstanceAppeared):
            instance = self._driver.scheduler.view.instances.get(event.instance_id)
            if instance is not None:
                # The supervisor has started it for us, on a node that the Broker picked.
                event = InstanceStarted(event.instance_id, event.node_id)
        self.on_event(event)

    def on_control(self, message: Event | Action) -> None:
        """Handle a message of the supervisor."""
        if isinstance(message, GatewaysChanged):
            self._gateways = message.count
        if self._driver is not None and isinstance(message, Event):
            self.on_event(message)

    def on_event(self, event: Event) -> None:
        assert self._driver is not None
        self._driver.post(event)
        self._in_flight.pop(getattr(event, "batch_id", -1), None)
        if isinstance(event, InstanceStarted | InstanceStopped):
            start = self._starts.pop(event.instance_id, None)
            if start is not None and isinstance(event, InstanceStarted):
                self._metrics.cold_started(start[0], monotonic_ns() - start[1])
        if self.phase is GatewayPhase.STARTING:
            asyncio.get_running_loop().call_soon(self._update_phase)

    def on_function_loaded(self, measured: MeasuredFunction) -> None:
        """Update the signature of a function that has loaded after earlier failures."""
        self._measured[measured.function] = measured
        if self._driver is None:
            return
        app = self._config.app
        try:
            self.models = served_models(app, self._measured)
            self._signatures[:] = signatures(app, self._measured)
        except ConfigError as error:  # its signature does not match its pipeline
            _LOG.error("%s", error)

    def _update_phase(self) -> None:
        """Become ready once every function has an instance past starting, or cannot be loaded."""
        if self._driver is None or self.phase is not GatewayPhase.STARTING:
            return
        view = self._driver.scheduler.view
        stages = [stage for model in self.models.values() for stage in model.pipeline.stages]
        if stages and all(
            self._load_problem(stage.function)
            or not (self._no_worker_problem(stage.function) or _is_starting(view, stage.function))
            for stage in stages
        ):
            self.phase = GatewayPhase.READY

    def on_worker_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        """Report the batches of a disconnected worker as lost and its node as gone."""
        self._early = [entry for entry in self._early if entry[0] is not link]
        if self._links.get(link.node.id) is not link:
            return  # it never joined
        del self._links[link.node.id]
        if self._driver is None:
            return
        self._log_lost(link, batch_ids)
        for batch_id in batch_ids:
            self._in_flight.pop(batch_id, None)
            self._driver.post(BatchLost(batch_id, link.hello.runs_functions))
        self.on_node_lost(link.node)

    def _log_lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        """Log which functions a lost worker was running: the supervisor, which logs why it died,
        does not know.
        """
        variants = {self._in_flight[id][0] for id in batch_ids if id in self._in_flight}
        if variants and self._driver is not None and not self._driver.is_stopped:
            names = " and ".join(repr(self.app.variants[id].name) for id in sorted(variants))
            _LOG.warning("worker %s was lost while running %s", link.node.name, names)

    def on_node_lost(self, node: NodeSpec) -> None:
        """Remove a node. Its running batches end in events of their own."""
        assert self._driver is not None
        self._driver.post(NodeLost(node.id))
        self._costs.on_node_lost(node.id)
        # No event tells of the instances that were starting there.
        self._starts = {id: start for id, start in self._starts.items() if start[2] != node.id}


def _is_starting(view: View, function: Function) -> bool:
    """Whether all instances of a function are still starting.

    False without any instance: the policy starts one when it is needed. Those that wait for a node
    at the Broker, while every node of their pool holds an instance, are not starting.
    """
    free_pools = {node.pool.id for node in view.nodes.values() if not node.instances}
    states = [
        instance.state
        for instance in view.instances.values()
        if instance.variant.function_id == function.id
        and (instance.node is not None or instance.pool.id in free_pools)
    ]
    return bool(states) and all(state == InstanceState.STARTING for state in states)


def _log_extra(call: Call) -> dict[str, object]:
    """Return the fields of a log record about a call: its ids for clients and in event logs."""
    name = call.client_request_id.decode("latin-1")
    number = f"number {call.request_id}"
    return {"request_id": f"{name}, {number}" if name else number}
