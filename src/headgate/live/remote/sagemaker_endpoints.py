"""Endpoints of SageMaker, and of whatever speaks like it: Open Inference Protocol in JSON.

SageMaker lets no header of ours through: deadline and trace travel in its custom attributes.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, Final, final

from botocore.exceptions import ClientError
from msgspec import Struct
from msgspec.json import Decoder, Encoder

from headgate.app.providers import Provider
from headgate.functions.tensor import ITEM_BYTES, Signature, Tensor, TensorSpec
from headgate.functions.words import sendable, words
from headgate.live.gateway import oip
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.elements import memoryview_of
from headgate.live.gateway.refusal import Refused as NotSendable
from headgate.live.messages import Result, Work
from headgate.live.remote.errand import Errand
from headgate.live.remote.fate import Done, Failed, Fate, Refused
from headgate.live.remote.joint import cut, join
from headgate.live.remote.judgement import first_line, judge, status_of
from headgate.live.remote.validation import error_status

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

    def call(self, errand: Errand) -> Fate:
        """Have a batch run: as one request, or one by one where that is not possible or breaks."""
        began_ns = monotonic_ns()
        works = errand.works
        inputs = join(works)
        fate: Fate | list[Result] = Failed("")
        if inputs is not None:
            fate = self._ask(errand, works, inputs)
        if len(works) > 1 and (inputs is None or isinstance(fate, Failed) or _is_broken(fate)):
            fate = self._ask_each(errand)
        if isinstance(fate, list):
            return Done(fate, monotonic_ns() - began_ns)
        return fate

    def ping(self, function: str, node_id: int, signature: Signature) -> str:
        """Ask an endpoint for something small; return why it seems not to be there, if so."""
        example = [_example(spec) for spec in signature.inputs]
        target = self._target(function, node_id)
        try:
            body = _encoded(example)
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

    def _ask_each(self, errand: Errand) -> Fate | list[Result]:
        results: list[Result] = []
        for work in errand.works:
            fate = self._ask(errand, [work], work.inputs)
            if not isinstance(fate, list):
                return fate
            results += fate
        return results

    def _ask(self, errand: Errand, works: list[Work], inputs: list[Tensor]) -> Fate | list[Result]:
        try:
            response = self._client.invoke_endpoint(
                EndpointName=self._target(errand.function, errand.node_id),
                ContentType=_JSON,
                Accept=_JSON,
                Body=_encoded(inputs),
                **_attributes(errand),
            )
            body: bytes = response["Body"].read()
        except NotSendable as problem:
            return [Result(work.task_id, [], problem.message, 400) for work in works]
        except ClientError as error:
            return _errors(error, works)
        except Exception as error:  # of any kind: AWS's client is not ours
            return judge(error, throttles=THROTTLES)
        try:
            parts = cut(_decoded(body), [work.items for work in works])
        except (ValueError, RecursionError, NotSendable) as error:
            return Failed(f"its answer is not understood: {words(error)}")
        return [
            Result(work.task_id, outputs, is_unsure=any(map(_is_unsure, outputs)))
            for work, outputs in zip(works, parts, strict=True)
        ]


@final
class _Response(Struct, gc=False):
    outputs: list[oip.InputJson]


def _attributes(errand: Errand) -> dict[str, str]:
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


def _errors(error: ClientError, works: list[Work]) -> Fate | list[Result]:
    """An error that is about the request is its result: it would come again."""
    status = status_of(error)
    said = error.response.get("Error", {}).get("Message") or words(error)
    if status == MODEL_ERROR:
        status = error_status(error.response.get("OriginalStatusCode", 500))
        said = error.response.get("OriginalMessage") or said
    fate = judge(error, throttles=THROTTLES)
    if isinstance(fate, Refused) or not 400 <= status < 500:
        return Failed(sendable(str(said))) if isinstance(fate, Failed) else fate
    return [Result(work.task_id, [], sendable(str(said)), status) for work in works]


def _is_broken(fate: Fate | list[Result]) -> bool:
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


def _encoded(inputs: list[Tensor]) -> bytes:
    return _ENCODER.encode({"inputs": [oip.output(tensor) for tensor in inputs]})


def _decoded(body: bytes) -> list[Tensor]:
    limits = GatewayConfig()
    return [oip.tensor(output, limits) for output in _DECODER.decode(body).outputs]


_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(_Response)
