"""A call: one client request, from the end of parsing to its response; and the interface between
front ends and the runtime.

Front ends (HTTP, gRPC) create calls and submit them to the runtime. The runtime fills in the result
and returns each call through `on_answer` exactly once, unless the front end has cancelled the call
or has answered it at its own deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, final

from msgspec import Struct

from headgate.core.model import App, Pipeline, Stage
from headgate.core.states import Outcome, Settlement
from headgate.functions.tensor import Signature, Tensor, TensorSpec

INTERNAL: Final = "internal"  # the reason after a defect of the gateway
FUNCTION_REFUSED: Final = "function_refused"  # the reason where `decode` refuses an input
CANNOT_LOAD: Final = "cannot be loaded: "


@final
class Call(Struct, eq=False):
    """The parameters of a client request, and later its result."""

    pipeline_id: int
    inputs: list[Tensor]
    items: int
    on_answer: Callable[[Call], None]
    client_id: int = 0
    priority: int = 0  # smaller is more urgent; 0 is the default
    deadline_ns: int = 0  # on the monotonic clock; 0: derived from the SLO
    is_hard: bool = False  # the response is worthless after the deadline
    cost_usd: float = 0.0  # the most that it may cost; 0: the SLO says
    trace: object = None  # the span of this call, if tracing is enabled
    client_request_id: bytes = b""  # the `X-Request-Id` of the client, or the one assigned to it
    is_idempotent: bool = True  # all functions of its pipeline are
    is_id_given: bool = False  # by the client, which may send the request again with this id
    # Timestamps of the execution, on the monotonic clock; 0: not reached.
    request_id: int = -1
    arrived_ns: int = 0
    sent_ns: int = 0  # last dispatched
    began_ns: int = 0  # execution began on the worker
    ended_ns: int = 0  # execution ended on the worker
    batch_items: int = 0  # items in the batch, those of this call included
    # The result; `settlement` is None until there is one.
    settlement: Settlement | None = None
    outputs: list[Tensor] = []  # a new one for each: a struct copies its defaults
    error: str = ""  # error message of the function
    status: int = 500  # HTTP status of that error: 400 client error, 500 function error

    @property
    def is_refused(self) -> bool:
        """Whether it failed because a function refused its input: the error is the client's."""
        settlement = self.settlement
        if settlement is None or settlement.outcome != Outcome.FAILED:
            return False
        return bool(self.error) and self.status < 500


class GatewayPhase(Enum):
    """Lifecycle of a gateway."""

    STARTING = "starting"  # alive, not ready
    READY = "ready"
    LAME_DUCK = "shutting down"  # not ready but still serving: load balancers need time to notice
    DRAINING = "draining"  # accepts no new requests and finishes the open ones


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pipeline as clients see it."""

    name: str
    pipeline: Pipeline
    platform: str
    inputs: tuple[TensorSpec, ...]  # empty: the function checks its inputs itself
    outputs: tuple[TensorSpec, ...]
    batches: bool  # the first dimension counts items
    items_max: int  # per request
    is_idempotent: bool = True  # a request that may have run can be sent again


def without_details(problem: str) -> str:
    """Remove the message of an exception from a problem and keep its type: safe for any client.

    >>> without_details("cannot be loaded: OSError: there is no secret/weights")
    'cannot be loaded: OSError'
    """
    before, separator, reason = problem.partition(CANNOT_LOAD)
    kind = reason.partition(":")[0]
    if not separator:
        return problem
    return f"{before}{CANNOT_LOAD}{kind if kind.isidentifier() else 'unknown error'}"


class FrontEndApi(Protocol):
    """The runtime, as front ends see it. All methods run on the one event loop of the gateway."""

    @property
    def phase(self) -> GatewayPhase:
        """The current lifecycle phase."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """Served models by name; empty while the gateway is starting."""

    def problem(self, model: ServedModel) -> str:
        """Return why a model cannot serve requests now; empty if it can."""

    def breakers(self) -> Mapping[str, str]:
        """Return the state of each pay-per-call pool's circuit breaker, and why, by pool name."""

    def now_ns(self) -> int:
        """Return the time on the monotonic clock, which deadlines refer to."""

    def submit(self, call: Call) -> None:
        """Run a call. `call.on_answer(call)` is called once, later, never from within `submit`."""

    def cancel(self, call: Call) -> None:
        """Cancel a call: `on_answer` will not be called."""


def problems(runtime: FrontEndApi) -> dict[str, str]:
    """Return why models cannot serve requests now, by name, without details of exceptions."""
    by_name = {name: runtime.problem(model) for name, model in runtime.models.items()}
    return {name: without_details(problem) for name, problem in by_name.items() if problem}


def server_problem(runtime: FrontEndApi) -> str:
    """Return why load balancers should not send requests to this server; empty if it is ready."""
    if runtime.phase is not GatewayPhase.READY:
        return f"the server is {runtime.phase.value}"
    model_problems = problems(runtime)
    return f"not ready: {', '.join(model_problems)}" if model_problems else ""


def model_problem(runtime: FrontEndApi, model: ServedModel, *, in_full: bool) -> str:
    """Return why a model cannot serve requests now; empty if it can.

    `in_full` includes the messages of exceptions, for clients that may see them.
    """
    if runtime.phase is not GatewayPhase.READY:
        return f"the server is {runtime.phase.value}"
    problem = runtime.problem(model)
    return problem if in_full else without_details(problem)


def stages_before(pipeline: Pipeline, index: int) -> list[int]:
    """Return all stages that a stage waits for, also through others, the latest first."""
    found = set(pipeline.stages[index].after)
    for stage in range(index - 1, -1, -1):  # stages are in topological order
        if stage in found:
            found.update(pipeline.stages[stage].after)
    return sorted(found, reverse=True)


@final
class StageOutputs:
    """Stores the outputs of stages while their request is open, and finds the inputs of the next.

    A stage gets what the stages right before it output. An input that none of them outputs comes
    from the latest stage before those that does, or from the request: the large model of a cascade
    gets what the small one got, which did not have to pass it on.
    """

    def __init__(self, app: App, signatures: Sequence[Signature]) -> None:
        self._pipelines = app.pipelines
        # By pipeline id and stage: all stages that it waits for, and those that wait for it.
        self._before = [[stages_before(p, i) for i in range(len(p.stages))] for p in app.pipelines]
        self._behind = [
            [
                [later for later in range(len(row)) if index in row[later]]
                for index in range(len(row))
            ]
            for row in self._before
        ]
        self._signatures = signatures  # by function id
        self._by_request: dict[int, dict[int, list[Tensor]]] = {}  # then by stage

    def inputs(self, call: Call, stage_index: int) -> list[Tensor]:
        """Return a new list of the inputs of a stage: the call's, or outputs of earlier stages."""
        stage = self._pipelines[call.pipeline_id].stages[stage_index]
        if not stage.after:
            tensors = call.inputs
        else:
            results = self._by_request[call.request_id]
            tensors = [t for index in stage.after for t in results.get(index, ())]
        wanted = self._signatures[stage.function.id].inputs
        if not wanted or (not stage.after and len(wanted) == len(tensors)):
            return list(tensors)
        names = {spec.name for spec in wanted}
        inputs = [tensor for tensor in tensors if tensor.name in names]
        if len(inputs) < len(names) and stage.after:
            inputs += self._earlier(call, stage_index, names.difference(t.name for t in inputs))
        return inputs

    def _earlier(self, call: Call, stage_index: int, names: set[str]) -> list[Tensor]:
        """Return the tensors of these names that stages before the last ones output, or the
        request has.
        """
        results = self._by_request[call.request_id]
        found: dict[str, Tensor] = {}
        for index in self._before[call.pipeline_id][stage_index]:
            for tensor in results.get(index, ()):
                if tensor.name in names:
                    found.setdefault(tensor.name, tensor)
        for tensor in call.inputs:
            if tensor.name in names:
                found.setdefault(tensor.name, tensor)
        return list(found.values())

    def _input_names(self, stage: Stage) -> set[str]:
        return {spec.name for spec in self._signatures[stage.function.id].inputs}

    def store(self, call: Call, stage_index: int, outputs: list[Tensor]) -> None:
        """Store the outputs of a stage, and drop those that only this stage had yet to read."""
        pipeline = self._pipelines[call.pipeline_id]
        if len(pipeline.stages) == 1:
            call.outputs = outputs
            return
        results = self._by_request.setdefault(call.request_id, {})
        results[stage_index] = outputs
        for index in self._before[pipeline.id][stage_index]:
            if results.get(index) and not self._is_read(pipeline, results, index):
                results[index] = []

    def _is_read(self, pipeline: Pipeline, results: Mapping[int, list[Tensor]], index: int) -> bool:
        """Whether a stage may still read the outputs of one that is finished and not the last."""
        if not all(successor in results for successor in pipeline.successors[index]):
            return True
        left = [later for later in self._behind[pipeline.id][index] if later not in results]
        names = {tensor.name for tensor in results[index]} if left else set()
        return any(not names.isdisjoint(self._input_names(pipeline.stages[id])) for id in left)

    def is_read_later(self, call: Call, stage_index: int, *, is_unsure: bool) -> bool:
        """Whether another stage will read the outputs of a stage that has just finished."""
        pipeline = self._pipelines[call.pipeline_id]
        return any(
            is_unsure or not pipeline.stages[index].only_if_unsure
            for index in pipeline.successors[stage_index]
        )

    def end(self, call: Call) -> None:
        """A request has ended: its response are the outputs that no finished stage has consumed."""
        results = self._by_request.pop(call.request_id, None)
        if results is not None:
            stages = self._pipelines[call.pipeline_id].stages
            used = {before for index in results for before in stages[index].after}
            call.outputs = [t for index in results if index not in used for t in results[index]]
