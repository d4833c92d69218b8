"""Endpoints of SageMaker, and of whatever speaks like it: Open Inference Protocol in JSON.

SageMaker lets no header of ours through: deadline and trace travel in its custom attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from time import monotonic_ns
from typing import Any, Final, Protocol, final

from botocore.exceptions import ClientError
from msgspec import Struct
from msgspec.json import Decoder, Encoder

from headgate.config.providers import Provider
from headgate.core.actions import (
    EvictWeights,
    LoadWeights,
    PlacedAction,
    StartInstance,
    StopInstance,
)
from headgate.core.events import InstanceStarted, InstanceStopped, WeightsEvicted, WeightsLoaded
from headgate.core.model import App, Function
from headgate.functions.error_text import error_text, sendable
from headgate.functions.tensor import ITEM_BYTES, Signature, Tensor, TensorSpec
from headgate.live.deployment import NodeSpec
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError as NotSendable
from headgate.live.gateway.oip import json as oip
from headgate.live.gateway.oip.json import memoryview_of, pack_strings, split
from headgate.live.ipc.messages import TaskInputs, TaskResult
from headgate.live.pools.aws_client import classify_error, first_line, status_of
from headgate.live.pools.remote_pool import (
    CallResult,
    Done,
    Failed,
    Refused,
    RemoteCall,
    RemoteCallListener,
    RemotePool,
)
from headgate.live.pools.validation import error_status

# Requests that go together as one, and answers that are cut apart again, by items.


def concatenate(works: Sequence[TaskInputs]) -> list[Tensor] | None:
    """Return the inputs of one request for all items; None if they are not alike."""
    if len(works) == 1:
        return works[0].inputs
    likenesses = {
        tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in work.inputs)
        for work in works
    }
    counts = all(tensor.shape[:1] == (work.items,) for work in works for tensor in work.inputs)
    if len(likenesses) > 1 or not counts:
        return None
    items = sum(work.items for work in works)
    return [
        Tensor(
            tensor.name,
            tensor.datatype,
            (items, *tensor.shape[1:]),
            memoryview(b"".join(memoryview_of(work.inputs[place]) for work in works)),
        )
        for place, tensor in enumerate(works[0].inputs)
    ]


def split_by_items(outputs: Sequence[Tensor], items: Sequence[int]) -> list[list[Tensor]]:
    """Return the outputs of each request, which have so many items. Raises `ValueError`.

    >>> tensor = Tensor("y", "UINT8", (3,), memoryview(b"abc"))
    >>> [bytes(part[0].data) for part in split_by_items([tensor], [1, 2])]
    [b'a', b'bc']
    """
    if len(items) == 1:
        return [list(outputs)]
    parts: list[list[Tensor]] = [[] for _ in items]
    for tensor in outputs:
        if tensor.shape[:1] != (sum(items),):
            raise ValueError(f"output {tensor.name!r} is {list(tensor.shape)} for {sum(items)}")
        at = 0
        for part, count in zip(parts, items, strict=True):
            shape = (count, *tensor.shape[1:])
            part.append(Tensor(tensor.name, tensor.datatype, shape, _rows(tensor, at, count)))
            at += count
    return parts


def _rows(tensor: Tensor, at: int, count: int) -> memoryview:
    data = memoryview_of(tensor)
    if tensor.datatype == "BYTES":
        width = prod(tensor.shape[1:])
        return memoryview(pack_strings(split(data)[at * width : (at + count) * width]))
    width = len(data) // tensor.shape[0]
    return data[at * width : (at + count) * width]


THROTTLES: Final = (429, 503)
MODEL_ERROR: Final = 424
UNSURE: Final = "unsure"
_JSON: Final = "application/json"


@final
class SageMakerEndpoints:
    """Calls the endpoints of one pool's nodes. Everything here blocks; nothing of it raises."""

    def __init__(self, client: Any, provider: Provider, first_node_id: int) -> None:
        self._client = client  # boto3 has no types
        self._provider = provider
        self._first_node_id = first_node_id

    def call(self, errand: RemoteCall) -> CallResult:
        """Have a batch run: as one request, or one by one where that is not possible or breaks."""
        began_ns = monotonic_ns()
        works = errand.works
        inputs = concatenate(works)
        fate: CallResult | list[TaskResult] = Failed("")
        if inputs is not None:
            fate = self._ask(errand, works, inputs)
        if len(works) > 1 and (inputs is None or isinstance(fate, Failed) or _has_errors(fate)):
            fate = self._ask_each(errand)
        if isinstance(fate, list):
            return Done(fate, monotonic_ns() - began_ns)
        return fate

    def ping(self, function: str, node_id: int, signature: Signature) -> str:
        """Ask an endpoint for something small; return why it seems not to be there, if so."""
        example = [_example(spec) for spec in signature.inputs]
        target = self._target(function, node_id)
        try:
            body = _encode_inputs(example)
            self._client.invoke_endpoint(EndpointName=target, ContentType=_JSON, Body=body)
        except ClientError as error:
            status = status_of(error)
            said = str(error)
            is_missing = status == 400 and ("not found" in said or "no model" in said)
            is_there = status == MODEL_ERROR or (status == 400 and not is_missing)
            return "" if is_there else f"{target}: {first_line(error)}"
        except Exception as error:  # of any kind: AWS's client is not ours
            return f"{target}: {first_line(error)}"
        return ""

    def _target(self, function: str, node_id: int | None) -> str:
        number = 1 + (node_id or 0) - self._first_node_id
        return self._provider.target_of(function, number)

    def _ask_each(self, errand: RemoteCall) -> CallResult | list[TaskResult]:
        results: list[TaskResult] = []
        for work in errand.works:
            fate = self._ask(errand, [work], work.inputs)
            if not isinstance(fate, list):
                return fate
            results += fate
        return results

    def _ask(
        self, errand: RemoteCall, works: list[TaskInputs], inputs: list[Tensor]
    ) -> CallResult | list[TaskResult]:
        try:
            response = self._client.invoke_endpoint(
                EndpointName=self._target(errand.function, errand.node_id),
                ContentType=_JSON,
                Accept=_JSON,
                Body=_encode_inputs(inputs),
                **_attributes(errand),
            )
            body: bytes = response["Body"].read()
        except NotSendable as problem:
            return [TaskResult(work.task_id, [], problem.message, 400) for work in works]
        except ClientError as error:
            return _error_results(error, works)
        except Exception as error:  # of any kind: AWS's client is not ours
            return classify_error(error, throttles=THROTTLES)
        try:
            parts = split_by_items(_decode_outputs(body), [work.items for work in works])
        except (ValueError, RecursionError, NotSendable) as error:
            return Failed(f"its answer is not understood: {error_text(error)}")
        return [
            TaskResult(work.task_id, outputs, is_unsure=any(map(_is_unsure, outputs)))
            for work, outputs in zip(works, parts, strict=True)
        ]


@final
class _Response(Struct, gc=False):
    outputs: list[oip.InputJson]


def _attributes(errand: RemoteCall) -> dict[str, str]:
    """What travels beside the body. A far end may give up at `timeout_ms`, as its sender does."""
    attributes = []
    left_ms = errand.left_ms(monotonic_ns())
    if left_ms is not None:
        name = "timeout_ms" if errand.gives_up else "deadline_ms"
        attributes.append(f"{name}={max(1.0, left_ms):.3f}")
    if errand.traceparent is not None:
        attributes.append(f"traceparent={errand.traceparent}")
    if errand.tenant is not None:
        attributes.append(f"tenant={errand.tenant}")
    return {"CustomAttributes": ";".join(attributes)} if attributes else {}


def _error_results(error: ClientError, works: list[TaskInputs]) -> CallResult | list[TaskResult]:
    """An error that is about the request is its result: it would come again."""
    status = status_of(error)
    said = error.response.get("Error", {}).get("Message") or error_text(error)
    if status == MODEL_ERROR:
        status = error_status(error.response.get("OriginalStatusCode", 500))
        said = error.response.get("OriginalMessage") or said
    fate = classify_error(error, throttles=THROTTLES)
    if isinstance(fate, Refused) or not 400 <= status < 500:
        return Failed(sendable(str(said))) if isinstance(fate, Failed) else fate
    return [TaskResult(work.task_id, [], sendable(str(said)), status) for work in works]


def _has_errors(fate: CallResult | list[TaskResult]) -> bool:
    return isinstance(fate, list) and any(result.error for result in fate)


def _is_unsure(tensor: Tensor) -> bool:
    is_boolean = tensor.name == UNSURE and tensor.datatype == "BOOL"
    return is_boolean and any(memoryview_of(tensor))


def _example(spec: TensorSpec) -> Tensor:
    """Zeros, and 1 where a dimension may have any size."""
    shape = tuple(1 if size < 0 else size for size in spec.shape)
    count = 1
    for size in shape:
        count *= size
    data = bytes(count * (ITEM_BYTES[spec.datatype] or 4))  # of no letters, behind its length
    return Tensor(spec.name, spec.datatype, shape, memoryview(data))


def _encode_inputs(inputs: list[Tensor]) -> bytes:
    return _ENCODER.encode({"inputs": [oip.output(tensor) for tensor in inputs]})


def _decode_outputs(body: bytes) -> list[Tensor]:
    limits = GatewayConfig()
    return [oip.tensor(output, limits) for output in _DECODER.decode(body).outputs]


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(_Response)


# A node that is an endpoint: it is there when it answers, and nothing has to be loaded onto it.


RETRY_S: Final = 0.5


class NodeListener(RemoteCallListener, Protocol):
    """Who hears of nodes that come and go."""

    def node_joined(self, place: NodeSpec) -> None:
        """It is there, or there again, empty."""

    def node_lost(self, place: NodeSpec) -> None:
        """It is gone; what it was running ends in events of its own."""


Ping = Callable[[str, int, Signature], str]


@final
class EndpointNode:
    """Carries out the orders for one node of an outpost."""

    def __init__(
        self,
        place: NodeSpec,
        app: App,
        signatures: Sequence[Signature],
        outpost: RemotePool,
        ping: Ping,
        listener: NodeListener,
    ) -> None:
        self.place = place
        self.outpost = outpost
        self._app = app
        self._signatures = signatures
        self._ping = ping
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._is_up = False
        self._starting: dict[int, Function] = {}  # by instance

    def concatenate(self) -> None:
        """Be there. Whether anybody answers shows when something is started."""
        self._is_up = True
        self._listener.node_joined(self.place)

    def order(self, action: PlacedAction) -> None:
        """Carry out any order but to run a batch."""
        listener = self._listener
        if isinstance(action, StartInstance):
            function_id = self._app.variants[action.variant_id].function_id
            self._starting[action.instance_id] = self._app.functions[function_id]
            self._try(action.instance_id)
        elif isinstance(action, StopInstance):
            self._starting.pop(action.instance_id, None)
            listener.reported(InstanceStopped(action.instance_id, "stopped"))
        elif isinstance(action, LoadWeights):
            listener.reported(WeightsLoaded(action.instance_id))
        elif isinstance(action, EvictWeights):
            listener.reported(WeightsEvicted(action.instance_id))

    def gone(self, errand: RemoteCall) -> None:
        """Nobody is there: the node is lost until somebody answers again."""
        if self._is_up:
            self._is_up = False
            self._starting.clear()
            self._listener.node_lost(self.place)
            function_id = self._app.variants[errand.variant_id].function_id
            self._look_again(self._app.functions[function_id])

    # --- asking whether it is there ------------------------------------------------------------

    def _try(self, instance_id: int) -> None:
        function = self._starting.get(instance_id)
        if function is not None:
            self._ask(function, partial(self._tried, instance_id))

    def _tried(self, instance_id: int, problem: str) -> None:
        if instance_id not in self._starting:
            return  # nobody wants it any more
        if problem:
            self.outpost.warn(f"{self.place.name} does not answer yet: {problem}")
            self._loop.call_later(RETRY_S, self._try, instance_id)
            return
        del self._starting[instance_id]
        self._listener.reported(InstanceStarted(instance_id, self.place.id))

    def _look_again(self, function: Function) -> None:
        self._ask(function, partial(self._looked, function))

    def _looked(self, function: Function, problem: str) -> None:
        if problem:
            self._loop.call_later(RETRY_S, self._look_again, function)
        else:
            self.join()

    def _ask(self, function: Function, then: Callable[[str], None]) -> None:
        threads = self.outpost.threads
        if not threads.free:
            self._loop.call_later(RETRY_S, self._ask, function, then)
            return
        signature = self._signatures[function.id]
        threads.do(partial(self._ping, function.name, self.place.id, signature), then)
