"""How each contestant is sent the same tensor, and whether its answer is the right one."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from headgate.bench.live.models import Floats
from headgate.load import Body
from headgate.load.payload import JSON_HEADERS

_TOLERANCE: Final = 1e-3


def make_request(kind: str, x: Floats) -> Body:
    """Return the request that carries `x`, which holds one item."""
    return _KINDS[kind](x)


def is_right(content: bytes, expected: list[float]) -> bool:
    """Tell whether the answer holds these numbers: as its last bytes, or as a list in its JSON."""
    size = 4 * len(expected)
    if len(content) >= size:
        raw = np.frombuffer(content[-size:], "<f4")
        if np.isfinite(raw).all() and np.allclose(raw, expected, atol=_TOLERANCE):
            return True
    try:
        document = json.loads(content)
    except ValueError:
        return False
    return any(
        len(found) == len(expected) and np.allclose(found, expected, atol=_TOLERANCE)
        for found in _lists(document)
    )


def _lists(document: object) -> Iterator[list[float]]:
    """Every list of numbers in it, flattened."""
    if isinstance(document, Mapping):
        for value in document.values():
            yield from _lists(value)
    elif isinstance(document, list):
        if document and all(isinstance(item, int | float) for item in document):
            yield document
        for item in document:
            yield from _lists(item)


def _values(x: Floats) -> Body:
    return _json({"values": x.ravel().tolist()})


def _raw(x: Floats) -> Body:
    return Body(x.tobytes(), {"Content-Type": "application/octet-stream"})


def _base64(x: Floats) -> Body:
    return _json({"b64": _text(x)})


def _base64_list(x: Floats) -> Body:
    return _json({"b64": [_text(x)]})


def _instances(x: Floats) -> Body:
    return _json({"instances": [{"b64": _text(x)}]})


def _oip(x: Floats) -> Body:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    return _json({"inputs": [tensor]})


def _oip_base64(x: Floats) -> Body:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": [_text(x)]}
    return _json({"inputs": [tensor]})


def _oip_binary(x: Floats) -> Body:
    size = {"binary_data_size": x.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": size}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Body(head + x.tobytes(), headers)


def _json(document: object) -> Body:
    return Body(json.dumps(document).encode(), JSON_HEADERS)


def _text(x: Floats) -> str:
    return b64encode(x.tobytes()).decode()


_KINDS: Final[Mapping[str, Callable[[Floats], Body]]] = MappingProxyType(
    {
        "values": _values,
        "raw": _raw,
        "base64": _base64,
        "base64_list": _base64_list,
        "instances": _instances,
        "oip": _oip,
        "oip_base64": _oip_base64,
        "oip_binary": _oip_binary,
    }
)
