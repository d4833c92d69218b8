"""The runtime of a gateway: between front ends, which bring calls, and workers, which run them.

It is the hands of the driver: it keeps the tensors, which never enter the Scheduler, and moves them
where the Scheduler says. A pipeline's intermediate results come back here and go out again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Final, final

from headgate.core.actions import (
    Dispatch,
    KeepWarm,
    PlacedAction,
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
    InstanceStarted,
    InstanceStopped,
    LoadFailed,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestArrived,
    RequestCancelled,
)
from headgate.core.model import App, Function, Variant
from headgate.core.records import STAGES_MAX
from headgate.core.states import InstanceState, Outcome
from headgate.core.view import View
from headgate.functions.lambda_payload import TOO_LARGE, body_bytes
from headgate.functions.tensor import Signature
from headgate.live.busy_poll import BusyPoll
from headgate.live.call import CANNOT_LOAD, INTERNAL, Call, GatewayPhase, ServedModel
from headgate.live.cost_accounting import CostAccounting, breakers
from headgate.live.deployment import Deployment, NodeSpec
from headgate.live.driver import Driver, EventLogTask, Fault, make_scheduler, no_fault
from headgate.live.ipc.messages import BatchRan, MeasuredFunction, RunBatch, TaskInputs
from headgate.live.ipc.worker_link import WorkerLink, WorkerLinks
from headgate.live.model_registry import (
    LoadsNeeded,
    catalogue,
    check_loads,
    look_up,
    remote_only,
    signatures,
    with_measured_profiles,
    with_siblings,
)
from headgate.live.pools.registry import RemotePools
from headgate.live.pools.remote_pool import make_errand
from headgate.live.stage_outputs import StageOutputs
from headgate.live.telemetry.metrics import GaugeSnapshot

_LOG: Final = logging.getLogger(__name__)


@final
class Runtime:
    """Serves one application; an implementation of `FrontEndApi`."""

    def __init__(
        self,
        run_dir: Path,
        assignment: Deployment,
        *,
        arena_bytes: int,
        log_path: Path | None,
        is_log_required: bool = True,
        loads_needed: LoadsNeeded = "none",
        submitted: Callable[[Call], None] | None,
        settled: Callable[[Call], None],
        started: Callable[[str, int], None],
        fault: Fault = no_fault,
    ) -> None:
        """`fault` counts what should never happen, by kind."""
        self.phase = GatewayPhase.STARTING
        self.models: Mapping[str, ServedModel] = {}
        self._loaded = assignment.load()
        self._submitted = submitted
        self._settled = settled
        self._started = started
        self._starts: dict[int, tuple[str, int]] = {}  # by instance on its way: of what, and since
        self._accounts = CostAccounting(self._loaded.app)
        self._recording = EventLogTask(log_path, self._loaded.serve, is_required=is_log_required)
        self._fault = fault
        self._crew = WorkerLinks(
            run_dir, assignment.nodes, self, arena_bytes=arena_bytes, fault=fault
        )
        self._facts: dict[str, MeasuredFunction] = {}  # by name of the variant
        self._signatures: list[Signature] = []  # by function id
        self._loads_needed = loads_needed
        self._base = assignment.base
        self._local_nodes = len(assignment.nodes)
        self._links: dict[int, WorkerLink] = {}  # by node id
        self._worker_ids: dict[int, int] = {}  # process ids, by node id
        self._outposts: RemotePools | None = None  # there once everything is known
        self._driver: Driver | None = None
        self._calls: dict[int, Call] = {}  # by request id: open
        self._findings = StageOutputs(self._loaded.app, self._signatures)
        self._variants_out: dict[int, tuple[int, int]] = {}  # by batch: its variant and items
        self._next_id = 0
        # What a call of a platform must be able to carry matters only where there is one.
        pools = self._loaded.app.pools
        self._has_platforms = any(pool.faas is not None for pool in pools)
        self._idle: asyncio.Event | None = None
        self._vigil = BusyPoll(asyncio.get_running_loop(), self._is_alone)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._looking: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Look for the workers; `phase` says when it is ready."""
        self._crew.start()
        if remote_only(self._loaded):
            self._looking = asyncio.create_task(self._look_elsewhere())

    async def _look_elsewhere(self) -> None:
        """Find out about functions that no worker of ours will look at; that may take a while."""
        loop = asyncio.get_running_loop()
        try:
            self._know(await loop.run_in_executor(None, look_up, self._loaded, self._base))
        except Exception as error:  # that cannot be served
            self.failed(error)

    async def drain(self, limit_s: float) -> int:
        """Take no more, finish what is open; return how many were not finished in time."""
        self.phase = GatewayPhase.DRAINING
        if self._calls:
            self._idle = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit_s)
        return len(self._calls)

    async def stop(self) -> None:
        """Leave the workers and close the log."""
        if self._driver is not None:
            self._driver.stop()
        await self._crew.stop()
        if self._outposts is not None:
            await self._outposts.stop()
        self.failure.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._recording.close()

    # --- what front ends ask (`FrontEndApi`)
    # -------------------------------------------------------

    @property
    def app(self) -> App:
        """What is served."""
        return self._loaded.app

    def problem(self, model: ServedModel) -> str:
        """Why a model cannot be asked just now; nothing if it is ready."""
        for stage in model.pipeline.stages:
            problem = self._load_problem(stage.function) or self._absence(stage.function)
            if problem:
                is_all = stage.function.name == model.name
                return problem if is_all else f"function {stage.function.name} {problem}"
        return ""

    def _load_problem(self, function: Function) -> str:
        """Why nobody can load a function, if the Scheduler waits for that to change."""
        view = None if self._driver is None else self._driver.scheduler.view
        if view is None or function.id not in view.unloadable:
            return ""
        failures = [view.load_failures.get(variant.id) for variant in function.variants]
        reasons = [failure.reason for failure in failures if failure is not None]
        return f"{CANNOT_LOAD}{reasons[0] if reasons else 'unknown error'}"

    def _absence(self, function: Function) -> str:
        return "" if self._variants_here(function) else "has no worker to run on"

    def _variants_here(self, function: Function) -> list[Variant]:
        """The builds of a function that there is a worker or a platform for."""
        pool_ids = {link.place.pool_id for link in self._links.values()}
        if self._outposts is not None:
            pool_ids.update(self._outposts.by_pool)
        return [v for v in function.variants if not pool_ids.isdisjoint(v.pool_ids)]

    def readings(self) -> GaugeSnapshot:
        """What is true just now, for whoever scrapes."""
        view = None if self._driver is None else self._driver.scheduler.view
        return self._accounts.readings(view, list(self._calls.values()), self._outposts)

    def worker_ids(self) -> list[int]:
        """Process ids of the workers, the last one of each node."""
        return list(self._worker_ids.values())

    def breakers(self) -> Mapping[str, str]:
        """The state of each breaker, by pool that is paid by the call."""
        return {} if self._driver is None else breakers(self._driver.scheduler.view)

    def now_ns(self) -> int:
        """The machine's monotonic clock."""
        return monotonic_ns()

    def submit(self, call: Call) -> None:
        """Have a call answered."""
        assert self._driver is not None, "front ends turn calls away until it is ready"
        request_id = self._next_id
        self._next_id = request_id + 1
        call.request_id = request_id
        self._calls[request_id] = call
        if self._submitted is not None:
            try:
                self._submitted(call)
            except Exception:
                _LOG.exception("a call is not traced", extra=_about(call))
                self._fault("trace")
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
            )
        )

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more."""
        call.on_answer = _nobody
        if self._driver is not None and call.request_id in self._calls:
            self._driver.post(RequestCancelled(call.request_id))

    # --- what the Scheduler says (`ActionExecutor`)
    # -----------------------------------------------------

    def settle(self, now_ns: int, action: Settle) -> None:
        """Give a call back to its front end."""
        call = self._calls.pop(action.request_id, None)
        if call is None:
            return  # it was answered when something went wrong
        call.outcome = action.outcome
        call.reason = action.reason
        call.predicted_ns = action.predicted_ns
        call.retry_ns = action.retry_ns
        self._give_back(call)

    def _give_back(self, call: Call) -> None:
        """Have a call answered, once, whatever goes wrong on the way."""
        self._findings.forget(call.request_id)
        try:
            self._settled(call)
        except Exception:
            _LOG.exception("a call is not counted", extra=_about(call))
            self._fault("metrics")
        try:
            call.on_answer(call)
        except Exception:
            _LOG.exception("a call could not be answered", extra=_about(call))
            self._fault("answer")
            _fail(call, INTERNAL)
            with suppress(Exception):  # which answers unless it has
                call.on_answer(call)
        if self._idle is not None and not self._calls:
            self._idle.set()

    def open_requests(self) -> Collection[int]:
        """The requests that have no answer yet."""
        return self._calls.keys()

    def fail(self, request_ids: Collection[int]) -> None:
        """Answer those of them that have no answer yet: 500, a mistake of ours."""
        for request_id in request_ids:
            call = self._calls.pop(request_id, None)
            if call is not None:
                _LOG.error("a call is answered with 500", extra=_about(call))
                _fail(call, INTERNAL)
                self._give_back(call)

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        """Send a batch to its worker or its outpost, with its tensors."""
        assert self._driver is not None and self._outposts is not None
        link = None if action.node_id is None else self._links.get(action.node_id)
        outpost = None if link else self._outposts.outpost(action.pool_id, action.node_id)
        if link is None and outpost is None:
            self._driver.post(BatchRefused(action.batch_id, Refusal.GONE))
            return
        works: list[TaskInputs] = []
        for task_id in action.task_ids:
            call = self._calls.get(task_id // STAGES_MAX)
            if call is None:
                continue  # it was answered when something went wrong
            call.sent_ns = now_ns
            call.batch_items = action.items
            inputs = self._findings.inputs(call, task_id % STAGES_MAX)
            works.append(TaskInputs(task_id, call.items, inputs))
        if not works:
            self._driver.post(BatchRefused(action.batch_id, Refusal.CANCELLED))
            return
        self._variants_out[action.batch_id] = (action.variant_id, action.items)
        try:
            if link is not None:
                self._send(link, action, works)
            else:
                assert outpost is not None
                view = self._driver.scheduler.view
                outpost.send(now_ns, make_errand(view, action, works, self._calls))
        except BaseException:
            self._variants_out.pop(action.batch_id, None)
            raise
        if link is not None and self._is_alone():
            self._vigil.keep(now_ns)

    def _send(self, link: WorkerLink, action: Dispatch, works: list[TaskInputs]) -> None:
        assert action.instance_id is not None
        link.run(
            RunBatch(
                action.batch_id,
                action.variant_id,
                action.instance_id,
                action.items,
                works,
            )
        )

    def _is_alone(self) -> bool:
        """Whether there is one request, and nothing else to do than to wait for it."""
        return len(self._calls) == 1

    def order(self, action: PlacedAction) -> None:
        """Send a worker any other order."""
        assert self._driver is not None
        link = None if action.node_id is None else self._links.get(action.node_id)
        if link is not None:
            link.order(to_wire(action))
            if isinstance(action, StartInstance):
                function_id = self.app.variants[action.variant_id].function_id
                name = self.app.functions[function_id].name
                self._starts[action.instance_id] = (name, monotonic_ns())
        elif self._outposts is not None and self._outposts.order(action):
            return
        elif isinstance(action, StartInstance | StopInstance):
            self._driver.post(InstanceStopped(action.instance_id, "the worker is gone"))

    def keep_warm(self, action: KeepWarm) -> None:
        """Have a platform keep instances ready from now on."""
        assert self._outposts is not None
        self._outposts.keep_warm(action)

    def failed(self, error: BaseException) -> None:
        """Something is wrong that waiting will not mend: answer what is open with 503, and end."""
        if self.phase is not GatewayPhase.STARTING:
            self.phase = GatewayPhase.DRAINING
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            _fail(call, "the gateway begins anew")
            call.retry_ns = SECOND_NS
            self._give_back(call)
        if not self.failure.done():
            self.failure.set_exception(error)

    # --- what workers say ----------------------------------------------------------------------

    def joined(self, link: WorkerLink) -> None:
        """A worker is there, or there again."""
        self._links[link.place.id] = link
        self._worker_ids[link.place.id] = link.hello.pid
        if self._driver is not None:
            self._join(link)
        self._know(link.hello.facts)

    def _join(self, link: WorkerLink) -> None:
        self.node_joined(link.place)
        assert self._driver is not None
        problems = {facts.function: facts.problem for facts in link.hello.facts if facts.problem}
        for variant in self.app.variants:
            if variant.name in problems:
                problem = problems[variant.name]
                self._driver.post(LoadFailed(variant.id, link.place.id, problem))

    def _know(self, found: list[MeasuredFunction]) -> None:
        """Learn about functions; when something is known of all, begin."""
        for facts in found:
            known = self._facts.get(facts.function)
            if known is None or (known.problem and not facts.problem):
                self._facts[facts.function] = facts
        if self._driver is None and all(v.name in self._facts for v in self.app.variants):
            try:
                self._begin()
            except Exception as error:  # that cannot be served
                self.failed(error)

    def node_joined(self, place: NodeSpec) -> None:
        """A node is there, or there again, empty."""
        assert self._driver is not None
        self._driver.post(NodeJoined(place.id, place.pool_id, place.name))
        self._accounts.node_joined(place.id, place.pool_id)

    def _begin(self) -> None:
        """Everything is known that the Scheduler is built of."""
        check_loads(self.app, self._facts, self._loads_needed)
        self._facts = with_siblings(self._loaded, self._facts)
        self._loaded = with_measured_profiles(
            self._loaded, self._facts, "the application, as measured"
        )
        app = self._loaded.app
        self._accounts = CostAccounting(app)
        self._signatures[:] = signatures(app, self._facts)
        self._findings = StageOutputs(app, self._signatures)
        self._outposts = RemotePools(
            self._loaded,
            self,
            self._accounts,
            self._started,
            self._signatures,
            first_node_id=self._local_nodes,
        )
        scheduler, header = make_scheduler(self._loaded)
        record, loop = self._recording.begin(header), asyncio.get_running_loop()
        serve = self._loaded.serve
        self._driver = Driver(
            scheduler,
            self,
            loop,
            record=record,
            fault=self._fault,
            suspect_s=(serve.deadline_max_ns + serve.execution_timeout_ns) / 1e9,
        )
        for link in self._links.values():
            self._join(link)
        self._outposts.join()
        self.models = catalogue(app, self._facts)
        loop.call_soon(self._look_ready)

    def ran(self, link: WorkerLink, message: BatchRan) -> None:
        """A batch has come back from a worker."""
        self.ran_at(link.place.pool_id, message)

    def ran_at(self, pool_id: int, message: BatchRan) -> None:
        """A batch has come back; keep what its tasks gave."""
        assert self._driver is not None
        unsure: list[int] = []
        broken: list[int] = []
        too_large: list[int] = []  # answers that a platform could not carry
        is_platform = self.app.pools[pool_id].faas is not None
        for result in message.results:
            call = self._calls.get(result.task_id // STAGES_MAX)
            if call is None:
                continue  # nobody waits for it any more
            call.began_ns = message.began_ns
            call.ended_ns = message.ended_ns
            try:
                self._accounts.call_ran(call, pool_id)
                if not result.error:
                    self._findings.keep(call, result.task_id % STAGES_MAX, result.outputs)
            except Exception:
                _LOG.exception("a result could not be kept", extra=_about(call))
                self._fault("result")
                result.error, result.status = "the gateway made a mistake", 500
            if result.error and is_platform and result.status == TOO_LARGE:
                too_large.append(result.task_id)
            elif result.error:
                call.error = result.error
                call.status = result.status
                broken.append(result.task_id)
            elif result.is_unsure:
                unsure.append(result.task_id)
        self._driver.post(
            BatchFinished(message.batch_id, tuple(unsure), tuple(broken), tuple(too_large))
        )
        variant_id, items = self._variants_out.pop(message.batch_id, (None, 0))
        if variant_id is not None:
            self._accounts.batch_ran(variant_id, items, message.ended_ns - message.began_ns)

    def reported(self, event: Event) -> None:
        """Something else has happened at a worker or an outpost."""
        assert self._driver is not None
        self._driver.post(event)
        self._variants_out.pop(getattr(event, "batch_id", -1), None)
        if isinstance(event, InstanceStarted | InstanceStopped):
            start = self._starts.pop(event.instance_id, None)
            if start is not None and isinstance(event, InstanceStarted):
                self._started(start[0], monotonic_ns() - start[1])
        if self.phase is GatewayPhase.STARTING:
            asyncio.get_running_loop().call_soon(self._look_ready)

    def learned(self, facts: MeasuredFunction) -> None:
        """A function that could not be loaded can be by now, and what it takes is known."""
        self._facts[facts.function] = facts
        if self._driver is None:
            return
        app = self._loaded.app
        try:
            self.models = catalogue(app, self._facts)
            self._signatures[:] = signatures(app, self._facts)
        except ConfigError as error:  # it does not fit into its pipeline
            _LOG.error("%s", error)

    def _look_ready(self) -> None:
        """Be ready once no function is only just being started, but for those that cannot be."""
        if self._driver is None or self.phase is not GatewayPhase.STARTING:
            return
        view = self._driver.scheduler.view
        stages = [stage for model in self.models.values() for stage in model.pipeline.stages]
        if stages and all(
            self._load_problem(stage.function)
            or not (self._absence(stage.function) or _is_starting(view, stage.function))
            for stage in stages
        ):
            self.phase = GatewayPhase.READY

    def lost(self, link: WorkerLink, batch_ids: list[int]) -> None:
        """A worker is gone, and what it was running."""
        if self._links.get(link.place.id) is link:
            del self._links[link.place.id]
        if self._driver is None:
            return
        for batch_id in batch_ids:
            self._variants_out.pop(batch_id, None)
            self._driver.post(BatchLost(batch_id))
        self.node_lost(link.place)

    def node_lost(self, place: NodeSpec) -> None:
        """A node is gone; what it was running ends in events of its own."""
        assert self._driver is not None
        self._driver.post(NodeLost(place.id))
        self._accounts.node_lost(place.id)


def _is_starting(view: View, function: Function) -> bool:
    """Whether all instances of a function are only just being started.

    Where nothing has been started, the policy will start something when it is needed.
    """
    states = [
        instance.state
        for instance in view.instances.values()
        if instance.variant.function_id == function.id
    ]
    return bool(states) and all(state == InstanceState.STARTING for state in states)


def _nobody(call: Call) -> None:
    """Who hears of a call that was withdrawn."""


def _about(call: Call) -> dict[str, object]:
    """What a message about a call says beside itself: who it is for clients and in event logs."""
    name = call.client_request_id.decode("latin-1")
    number = f"number {call.request_id}"
    return {"request_id": f"{name}, {number}" if name else number}


def _fail(call: Call, reason: str) -> None:
    """Have a call end as one that could not be run."""
    call.outcome = Outcome.FAILED
    call.reason = reason
    call.error = ""
