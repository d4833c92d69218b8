"""Triton's binary tensor extension: raw elements of inputs follow the JSON, in its order.

A header gives the length of the JSON, and each input the number of its bytes after the JSON. A
request may send some inputs this way and others in the JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Final

from headgate.functions.tensor import Tensor
from headgate.live.gateway.codec.text import ParsedRequest
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.json import (
    RequestedOutput,
    check_bytes,
    check_strings,
    element_count,
)

LENGTH_HEADER: Final = b"inference-header-content-length"
_DIGITS: Final = re.compile(rb"[0-9]{1,12}")
_NOTHING: Final = memoryview(b"")


def json_bytes(text: bytes, body_bytes: int) -> int:
    """The length of a body's JSON, from the header's text. Raises `RequestError` (400)."""
    if not _DIGITS.fullmatch(text) or int(text) > body_bytes:
        raise RequestError(
            400,
            f"the length of the JSON cannot be {text[:40].decode('latin-1')!r}: "
            f"the body has {body_bytes} bytes",
        )
    return int(text)


def tensors(
    parsed: ParsedRequest, limits: GatewayConfig, rest: memoryview = _NOTHING
) -> list[Tensor]:
    """The inputs of a request; `rest` is what follows its text. Raises `RequestError` (400)."""
    inputs = []
    at = strings = 0
    for given, data in zip(parsed.request.inputs, parsed.data, strict=True):
        size = given.parameters.get("binary_data_size") if given.parameters else None
        if size is None:
            if data is None:
                raise RequestError(400, f"input {given.name!r} has no data")
        elif data is not None:
            raise RequestError(400, f"input {given.name!r} has both data and binary_data_size")
        elif type(size) is not int or not 0 <= size <= len(rest) - at:
            raise RequestError(
                400,
                f"input {given.name!r}: binary_data_size is {str(size)[:40]}; "
                f"{len(rest) - at} bytes are left",
            )
        else:
            data = rest[at : at + size]
            at += size
            count = element_count(given.shape, given.name, limits.dims_max, limits.elements_max)
            check_bytes(data, given.name, given.datatype, count)
        if given.datatype == "BYTES":
            strings += prod(given.shape)
            check_strings(strings)
        inputs.append(Tensor(given.name, given.datatype, given.shape, data))
    if at != len(rest):
        raise RequestError(400, f"{len(rest) - at} bytes after the JSON belong to no input")
    return inputs


def is_binary(output: RequestedOutput, by_default: bool) -> bool:
    """Whether an output is requested as raw bytes. Raises `RequestError` (400)."""
    if not output.parameters:
        return by_default
    for unsupported in ("classification", "shared_memory_region"):
        if unsupported in output.parameters:
            raise RequestError(400, f"output {output.name!r}: {unsupported} is not supported")
    return bool_parameter(output.parameters, "binary_data", by_default)


def bool_parameter(parameters: Mapping[str, object] | None, name: str, by_default: bool) -> bool:
    """The value of a boolean parameter. Raises `RequestError` (400) if it is not one."""
    value = parameters.get(name, by_default) if parameters else by_default
    if not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false")
    return value
