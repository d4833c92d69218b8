"""The runtime of a gateway: between front ends, which bring calls, and workers, which run them.

It is the hands of the driver: it keeps the tensors, which never enter the Scheduler, and moves them
where the Scheduler says. A pipeline's intermediate results come back here and go out again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Final, final

from headgate.app import LoadedApp, make_config
from headgate.core.actions import Dispatch, PlacedAction, Settle, StartInstance, StopInstance
from headgate.core.events import (
    BatchFinished,
    BatchLost,
    BatchRefused,
    Event,
    InstanceStarted,
    InstanceStopped,
    NodeJoined,
    NodeLost,
    Refusal,
    RequestArrived,
    RequestCancelled,
)
from headgate.core.lifecycle import InstanceState
from headgate.core.log import LogHeader
from headgate.core.model import App
from headgate.core.records import STAGES_MAX
from headgate.core.rng import stream
from headgate.core.scheduler import Scheduler
from headgate.core.wire import to_wire
from headgate.functions.tensor import Signature, Tensor
from headgate.live.accounts import Accounts
from headgate.live.assignment import Assignment
from headgate.live.call import Call
from headgate.live.catalogue import catalogue, signatures
from headgate.live.crew import Crew
from headgate.live.driver import Driver
from headgate.live.event_log import EventLog
from headgate.live.facts import with_facts
from headgate.live.link import Link
from headgate.live.messages import FunctionFacts, Ran, Run, Work
from headgate.live.metrics.readings import Readings
from headgate.live.serving import Model, Phase
from headgate.live.vigil import Vigil
from headgate.policies import find_policy

FLUSH_EVERY_S: Final = 0.25


@final
class Runtime:
    """Serves one application; an implementation of `Serving`."""

    def __init__(
        self,
        run_dir: Path,
        assignment: Assignment,
        *,
        arena_bytes: int,
        log_path: Path | None,
        complain: Callable[[str], None],
        submitted: Callable[[Call], None] | None,
        settled: Callable[[Call], None],
        started: Callable[[str, int], None],
    ) -> None:
        self.phase = Phase.STARTING
        self.models: Mapping[str, Model] = {}
        self._loaded = assignment.load()
        self._submitted = submitted
        self._settled = settled
        self._started = started
        self._starts: dict[int, tuple[str, int]] = {}  # by instance on its way: of what, and since
        self._accounts = Accounts(self._loaded.app)
        self._log_path = log_path
        self._log: EventLog | None = None
        self._complain = complain
        self._crew = Crew(
            run_dir, assignment.nodes, self, arena_bytes=arena_bytes, complain=complain
        )
        self._facts: dict[str, FunctionFacts] = {}
        self._signatures: list[Signature] = []
        self._links: dict[int, Link] = {}  # by node id
        self._driver: Driver | None = None
        self._calls: dict[int, Call] = {}  # by request id: open
        self._results: dict[int, dict[int, list[Tensor]]] = {}  # of stages, where there are several
        self._variants_out: dict[int, tuple[int, int]] = {}  # by batch: its variant and items
        self._next_id = 0
        self._idle: asyncio.Event | None = None
        self._vigil = Vigil(asyncio.get_running_loop(), self._is_alone)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flusher: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Look for the workers; `phase` says when it is ready."""
        self._crew.start()

    async def drain(self, limit_s: float) -> int:
        """Take no more, finish what is open; return how many were not finished in time."""
        self.phase = Phase.DRAINING
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
        self.failure.cancel()
        if self._flusher is not None:
            self._flusher.cancel()
        if self._log is not None:
            self._log.close()

    async def _flush_log(self, log: EventLog) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            log.flush()

    # --- what front ends ask (`Serving`) -------------------------------------------------------

    @property
    def app(self) -> App:
        """What is served."""
        return self._loaded.app

    def is_ready(self, model: Model) -> bool:
        """Whether there are workers, and none of its functions is only just being started."""
        return all(self._is_up(stage.function.id) for stage in model.pipeline.stages)

    def _is_up(self, function_id: int) -> bool:
        if self._driver is None or not self._links:
            return False
        states = [
            instance.state
            for instance in self._driver.scheduler.view.instances.values()
            if instance.variant.function_id == function_id
        ]
        # Where nothing has been started, the policy will, when it is needed.
        return not states or any(state != InstanceState.STARTING for state in states)

    def readings(self) -> Readings:
        """What is true just now, for whoever scrapes."""
        view = None if self._driver is None else self._driver.scheduler.view
        return self._accounts.readings(view, list(self._calls.values()))

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
            self._submitted(call)
        self._driver.post(
            RequestArrived(
                request_id,
                call.pipeline_id,
                call.client_id,
                call.items,
                call.priority,
                call.deadline_ns,
                call.gives_up,
            )
        )

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more."""
        call.on_answer = _nobody
        if self._driver is not None and call.request_id in self._calls:
            self._driver.post(RequestCancelled(call.request_id))

    # --- what the Scheduler says (`Hands`) -----------------------------------------------------

    def settle(self, now_ns: int, action: Settle) -> None:
        """Give a call back to its front end."""
        call = self._calls.pop(action.request_id)
        if self._results:
            self._results.pop(action.request_id, None)
        call.outcome = action.outcome
        call.reason = action.reason
        call.predicted_ns = action.predicted_ns
        call.retry_ns = action.retry_ns
        self._settled(call)
        call.on_answer(call)
        if self._idle is not None and not self._calls:
            self._idle.set()

    def dispatch(self, now_ns: int, action: Dispatch) -> None:
        """Send a batch to its worker, with its tensors."""
        assert self._driver is not None
        link = None if action.node_id is None else self._links.get(action.node_id)
        if link is None or action.instance_id is None:
            self._driver.post(BatchRefused(action.batch_id, Refusal.GONE))
            return
        works: list[Work] = []
        for task_id in action.task_ids:
            call = self._calls[task_id // STAGES_MAX]
            call.sent_ns = now_ns
            call.batch_items = action.items
            works.append(Work(task_id, call.items, self._inputs(call, task_id % STAGES_MAX)))
        self._variants_out[action.batch_id] = (action.variant_id, action.items)
        link.run(
            Run(
                action.batch_id,
                action.variant_id,
                action.instance_id,
                action.items,
                action.earliest_ns,
                action.latest_ns,
                works,
            )
        )
        if self._is_alone():
            self._vigil.keep(now_ns)

    def _is_alone(self) -> bool:
        """Whether there is one request, and nothing else to do than to wait for it."""
        return len(self._calls) == 1

    def _inputs(self, call: Call, stage_index: int) -> list[Tensor]:
        """What a stage reads, in a list of its own: the call's tensors, or what came before."""
        stage = self.app.pipelines[call.pipeline_id].stages[stage_index]
        if not stage.after:
            tensors = call.inputs
        else:
            results = self._results[call.request_id]
            tensors = [t for index in stage.after for t in results.get(index, ())]
        wanted = self._signatures[stage.function.id].inputs
        if len(wanted) == len(tensors) or not wanted:
            return list(tensors)
        names = {spec.name for spec in wanted}
        return [tensor for tensor in tensors if tensor.name in names]

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
        elif isinstance(action, StartInstance | StopInstance):
            self._driver.post(InstanceStopped(action.instance_id, "the worker is gone"))

    def failed(self, error: BaseException) -> None:
        """Something is wrong that waiting will not mend."""
        if not self.failure.done():
            self.failure.set_exception(error)

    # --- what workers say ----------------------------------------------------------------------

    def joined(self, link: Link) -> None:
        """A worker is there, or there again."""
        for facts in link.hello.facts:
            self._facts.setdefault(facts.function, facts)
        self._links[link.place.id] = link
        if self._driver is not None:
            self._welcome(link)
        elif all(v.name in self._facts for v in self.app.variants):
            self._begin()

    def _welcome(self, link: Link) -> None:
        assert self._driver is not None
        place = link.place
        self._accounts.node_joined(place.id, place.pool_id)
        self._driver.post(NodeJoined(place.id, place.pool_id, place.name))

    def _begin(self) -> None:
        """Everything is known that the Scheduler is built of."""
        self._loaded = with_facts(self._loaded, self._facts, "the application, as measured")
        app = self._loaded.app
        self._accounts = Accounts(app)
        self._signatures = signatures(app, self._facts)
        self._driver = self._make_driver(self._loaded)
        for link in self._links.values():
            self._welcome(link)
        self.models = catalogue(app, self._facts)
        asyncio.get_running_loop().call_soon(self._look_ready)

    def _make_driver(self, loaded: LoadedApp) -> Driver:
        choice = loaded.policy
        kind = find_policy(choice.name)
        config = make_config(kind.config, choice.settings, "policy")
        seed = 0
        scheduler = Scheduler(loaded.app, kind, config, rng=stream(seed, "policy/0"))
        if self._log_path is not None:
            header = LogHeader(loaded.spec, choice.name, choice.settings, seed)
            self._log = EventLog(self._log_path, header, complain=self._complain)
            self._flusher = asyncio.create_task(self._flush_log(self._log))
        record = None if self._log is None else self._log.record
        loop = asyncio.get_running_loop()
        return Driver(scheduler, self, loop, record=record, complain=self._complain)

    def ran(self, link: Link, message: Ran) -> None:
        """A batch has come back; keep what its tasks gave."""
        assert self._driver is not None
        unsure: list[int] = []
        broken: list[int] = []
        for result in message.results:
            call = self._calls.get(result.task_id // STAGES_MAX)
            if call is None:
                continue  # nobody waits for it any more
            call.began_ns = message.began_ns
            call.ended_ns = message.ended_ns
            self._accounts.call_ran(call, link.place.pool_id)
            if result.error:
                call.error = result.error
                call.status = result.status
                broken.append(result.task_id)
            else:
                self._keep(call, result.task_id % STAGES_MAX, result.outputs)
                if result.is_unsure:
                    unsure.append(result.task_id)
        variant_id, items = self._variants_out.pop(message.batch_id, (None, 0))
        if variant_id is not None:
            self._accounts.batch_ran(variant_id, items, message.ended_ns - message.began_ns)
        self._driver.post(BatchFinished(message.batch_id, tuple(unsure), tuple(broken)))

    def _keep(self, call: Call, stage_index: int, outputs: list[Tensor]) -> None:
        pipeline = self.app.pipelines[call.pipeline_id]
        if len(pipeline.stages) == 1:
            call.outputs = outputs
            return
        results = self._results.setdefault(call.request_id, {})
        results[stage_index] = outputs
        # What is answered, should nothing follow: results that no stage has used yet.
        used = {before for index in results for before in pipeline.stages[index].after}
        call.outputs = [t for index in results if index not in used for t in results[index]]

    def reported(self, event: Event) -> None:
        """Something else has happened at a worker."""
        assert self._driver is not None
        self._driver.post(event)
        if isinstance(event, InstanceStarted | InstanceStopped):
            start = self._starts.pop(event.instance_id, None)
            if start is not None and isinstance(event, InstanceStarted):
                self._started(start[0], monotonic_ns() - start[1])
        if self.phase is Phase.STARTING:
            asyncio.get_running_loop().call_soon(self._look_ready)

    def _look_ready(self) -> None:
        is_up = self.models and all(self.is_ready(model) for model in self.models.values())
        if self.phase is Phase.STARTING and is_up:
            self.phase = Phase.READY

    def lost(self, link: Link, batch_ids: list[int]) -> None:
        """A worker is gone, and what it was running."""
        if self._links.get(link.place.id) is link:
            del self._links[link.place.id]
        if self._driver is None:
            return
        for batch_id in batch_ids:
            self._variants_out.pop(batch_id, None)
            self._driver.post(BatchLost(batch_id))
        self._accounts.node_lost(link.place.id)
        self._driver.post(NodeLost(link.place.id))


def _nobody(call: Call) -> None:
    """Who hears of a call that was withdrawn."""
