"""From tensors to a call: the checks that every front end makes before it submits a request.

Independent of protocols: errors are raised as `RequestError` with an HTTP status, which front ends
of other protocols map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call, FrontEndApi, GatewayPhase, ServedModel
from headgate.live.gateway.errors import RequestError, draining


def find_model(api: FrontEndApi, name: str, version: str = "") -> ServedModel:
    """The model of that name. Raises `RequestError` (404; 503 while the server is starting)."""
    model = api.models.get(name)
    if model is None:
        if api.phase is GatewayPhase.STARTING:
            raise _starting()
        raise RequestError(404, f"the model {name[:200]!r} does not exist", reason="unknown_model")
    if version and version != "1":
        raise RequestError(
            404, f"the model {name!r} has no version {version[:40]!r}", reason="unknown_model"
        )
    return model


def check_open(api: FrontEndApi) -> None:
    """Raise `RequestError` (503) unless the server accepts new requests."""
    phase = api.phase
    if phase is GatewayPhase.STARTING:
        raise _starting()
    if phase is GatewayPhase.DRAINING:
        raise draining()


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
    """A call of the model, with inputs that fit it, in the model's order.

    `timeout_ns` is the client's; 0 leaves the deadline to the model's objective. The bytes of each
    input must agree with its shape already. Raises `RequestError`.
    """
    if model.inputs:
        inputs = _fitted(model.inputs, inputs)
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
    """Raise `RequestError` (400) unless the model has the requested outputs, each only once."""
    if len(set(names)) != len(names):
        raise RequestError(400, "an output is requested twice")
    if not model.outputs:
        return
    known = [spec.name for spec in model.outputs]
    for name in names:
        if name not in known:
            raise RequestError(
                400, f"{model.name!r} has no output {name[:80]!r}; its outputs: {', '.join(known)}"
            )


def _starting() -> RequestError:
    return RequestError(503, "the server is starting", reason="starting")


def _fitted(specs: tuple[TensorSpec, ...], inputs: list[Tensor]) -> list[Tensor]:
    if len(specs) != len(inputs):
        inputs = _in_order(specs, inputs)
    for index, spec in enumerate(specs):
        tensor = inputs[index]
        if spec.name != tensor.name:
            return _fitted(specs, _in_order(specs, inputs))
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
        raise RequestError(
            400, f"the model has no input {name[:80]!r}; its inputs: {', '.join(known)}"
        )
    return [by_name[spec.name] for spec in specs]


def _check_names(inputs: list[Tensor]) -> None:
    if not inputs:
        raise RequestError(400, "the request has no inputs")
    if len({tensor.name for tensor in inputs}) != len(inputs):
        raise RequestError(400, "an input is given twice")


def _check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    fits = len(shape) == len(spec.shape)
    if fits:
        for expected, size in zip(spec.shape, shape, strict=True):
            if expected != size and expected != -1:
                fits = False
    if not fits:
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
            raise RequestError(400, "the inputs differ in their first dimension (items)")
        items = tensor.shape[0]
        if not items:
            raise RequestError(400, f"input {tensor.name!r} has no items")
    if items > model.items_max:
        raise RequestError(
            413, f"the request has {items} items; {model.name!r} accepts at most {model.items_max}"
        )
    return items
