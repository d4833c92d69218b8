"""From tensors to a call: what every front end checks before the runtime sees a request.

Free of any protocol: what is wrong is raised as `RequestError` with HTTP's status, and a front end
that speaks something else maps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call, FrontEndApi, GatewayPhase, ServedModel
from headgate.live.gateway.errors import RequestError


def find_model(serving: FrontEndApi, name: str, version: str = "") -> ServedModel:
    """The model that a request names. Raises `RequestError` (404; 503 while it is starting)."""
    model = serving.models.get(name)
    if model is None:
        if serving.phase is GatewayPhase.STARTING:
            raise _starting()
        raise RequestError(404, f"there is no model {name[:200]!r}", reason="unknown_model")
    if version and version != "1":
        raise RequestError(
            404, f"model {name!r} has no version {version[:40]!r}", reason="unknown_model"
        )
    return model


def check_open(serving: FrontEndApi) -> None:
    """See that new requests are taken. Raises `RequestError` (503)."""
    phase = serving.phase
    if phase is GatewayPhase.STARTING:
        raise _starting()
    if phase is GatewayPhase.DRAINING:
        raise RequestError(503, "the server is leaving", reason="draining")


def make_call(
    model: ServedModel,
    inputs: list[Tensor],
    on_answer: Callable[[Call], None],
    *,
    now_ns: int,
    timeout_ns: int = 0,
    client_id: int = 0,
    priority: int = 0,
) -> Call:
    """A call that the model can be asked, its inputs in the model's order.

    `timeout_ns` is what the client will wait; 0 leaves it to the objective. The bytes of each input
    are taken to agree with its shape already. Raises `RequestError`.
    """
    if model.inputs:
        inputs = _as_declared(model.inputs, inputs)
    else:
        _check_names(inputs)
    call = Call(
        model.pipeline.id,
        inputs,
        _items(model, inputs) if model.batches else 1,
        on_answer,
        client_id=client_id,
        priority=priority,
        deadline_ns=now_ns + timeout_ns if timeout_ns else 0,
        is_hard=timeout_ns > 0,
    )
    call.arrived_ns = now_ns
    return call


def check_outputs(model: ServedModel, names: Sequence[str]) -> None:
    """See that the model has the outputs that are asked for. Raises `RequestError`."""
    if len(set(names)) != len(names):
        raise RequestError(400, "an output is asked for twice")
    if not model.outputs:
        return
    known = [spec.name for spec in model.outputs]
    for name in names:
        if name not in known:
            raise RequestError(
                400, f"{model.name!r} has no output {name[:80]!r}; it has {', '.join(known)}"
            )


def _starting() -> RequestError:
    return RequestError(503, "the server is starting", reason="starting")


def _as_declared(specs: tuple[TensorSpec, ...], inputs: list[Tensor]) -> list[Tensor]:
    if len(specs) != len(inputs):
        inputs = _in_order(specs, inputs)
    for index, spec in enumerate(specs):
        tensor = inputs[index]
        if spec.name != tensor.name:
            return _as_declared(specs, _in_order(specs, inputs))
        if spec.datatype != tensor.datatype:
            raise RequestError(
                400, f"input {spec.name!r} is {tensor.datatype}; {spec.datatype} is expected"
            )
        if spec.shape != tensor.shape:
            _check_shape(spec, tensor.shape)
    return inputs


def _in_order(specs: tuple[TensorSpec, ...], inputs: list[Tensor]) -> list[Tensor]:
    _check_names(inputs)
    by_name = {tensor.name: tensor for tensor in inputs}
    for spec in specs:
        if spec.name not in by_name:
            raise RequestError(400, f"input {spec.name!r} is missing")
    if len(inputs) > len(specs):
        known = [spec.name for spec in specs]
        name = next(name for name in by_name if name not in known)
        raise RequestError(400, f"there is no input {name[:80]!r}; there is {', '.join(known)}")
    return [by_name[spec.name] for spec in specs]


def _check_names(inputs: list[Tensor]) -> None:
    if not inputs:
        raise RequestError(400, "there are no inputs")
    if len({tensor.name for tensor in inputs}) != len(inputs):
        raise RequestError(400, "an input is given twice")


def _check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    is_right = len(shape) == len(spec.shape)
    if is_right:
        for expected, size in zip(spec.shape, shape, strict=True):
            if expected != size and expected != -1:
                is_right = False
    if not is_right:
        raise RequestError(
            400,
            f"input {spec.name!r} has the shape {list(shape)}; {list(spec.shape)} is expected "
            "(-1: any)",
        )


def _items(model: ServedModel, inputs: list[Tensor]) -> int:
    items = 0
    for tensor in inputs:
        if not tensor.shape:
            raise RequestError(
                400, f"input {tensor.name!r} needs a first dimension, which counts items"
            )
        if items and tensor.shape[0] != items:
            raise RequestError(400, "the first dimensions of the inputs differ; they count items")
        items = tensor.shape[0]
        if not items:
            raise RequestError(400, f"input {tensor.name!r} has no items")
    if items > model.items_max:
        raise RequestError(
            413, f"{items} items in one request; {model.name!r} takes at most {model.items_max}"
        )
    return items
