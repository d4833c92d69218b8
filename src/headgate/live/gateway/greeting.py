"""What a gateway says when it is ready: what is served, and how to ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from headgate.functions.specs import write_spec
from headgate.live.serving import Model

_EXAMPLES: Final[dict[str, object]] = {"BYTES": "text", "BOOL": True, "FP32": 1.0, "FP64": 1.0}
_ELEMENTS_MAX: Final = 64  # of an example that people can read


def greeting(
    url: str, grpc: str, policy: str, models: list[Model], problems: Mapping[str, str]
) -> bytes:
    """One line of JSON, for the supervisor. `problems` are of models that are not ready."""
    asked = next((model for model in models if model.name not in problems), models[0])
    content = {
        "url": url,
        "grpc": grpc,
        "policy": policy,
        "models": [
            {"name": model.name, "signature": problems.get(model.name) or _signature(model)}
            for model in models
        ],
        "curl": _curl(url, asked),
    }
    return msgspec.json.encode(content) + b"\n"


def _signature(model: Model) -> str:
    """What goes in and what comes out, in one line."""
    inputs = ", ".join(f"{spec.name} {write_spec(spec)}" for spec in model.inputs)
    outputs = ", ".join(f"{spec.name} {write_spec(spec)}" for spec in model.outputs)
    return f"{inputs or 'any inputs'} -> {outputs or 'any outputs'}"


def _curl(url: str, model: Model) -> str:
    """A command that gets an answer of this model."""
    path = f"{url}/v2/models/{model.name}"
    small = all(_elements(spec.shape) <= _ELEMENTS_MAX for spec in model.inputs)
    if not model.inputs or not small:
        return f"curl {path}"
    inputs = [
        {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": [max(1, size) for size in spec.shape],
            "data": [_EXAMPLES.get(spec.datatype, 1)] * _elements(spec.shape),
        }
        for spec in model.inputs
    ]
    body = msgspec.json.encode({"inputs": inputs}).decode()
    return f"curl {path}/infer -d '{body}'"


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= max(1, size)
    return count
