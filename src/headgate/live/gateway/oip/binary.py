"""Triton's extension for binary tensors: raw elements that follow the JSON, in its order.

A header says how long the JSON is; each input says how many of the bytes after it are its own. A
request can have some inputs this way and others in the JSON.
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
from headgate.live.gateway.oip.json import OutputWanted, check_bytes, check_strings, count_of

LENGTH_HEADER: Final = b"inference-header-content-length"
_DIGITS: Final = re.compile(rb"[0-9]{1,12}")
_NOTHING: Final = memoryview(b"")


def json_bytes(text: bytes, body_bytes: int) -> int:
    """How many bytes of the body are JSON, by the header's word. Raises `RequestError` (400)."""
    if not _DIGITS.fullmatch(text) or int(text) > body_bytes:
        raise RequestError(
            400,
            f"the length of the JSON is given as {text[:40].decode('latin-1')!r}; "
            f"the body has {body_bytes} bytes",
        )
    return int(text)


def tensors(
    read: ParsedRequest, limits: GatewayConfig, rest: memoryview = _NOTHING
) -> list[Tensor]:
    """The inputs of a request, `rest` being what follows its text. Raises `RequestError` (400)."""
    made = []
    at = strings = 0
    for given, data in zip(read.request.inputs, read.data, strict=True):
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
            count = count_of(given.shape, given.name, limits.dims_max, limits.elements_max)
            check_bytes(data, given.name, given.datatype, count)
        if given.datatype == "BYTES":
            strings += prod(given.shape)
            check_strings(strings)
        made.append(Tensor(given.name, given.datatype, given.shape, data))
    if at != len(rest):
        raise RequestError(400, f"{len(rest) - at} bytes follow the inputs and belong to none")
    return made


def is_wanted(wanted: OutputWanted, by_default: bool) -> bool:
    """Whether an output is to be sent raw. Raises `RequestError` (400) for what cannot be done."""
    if not wanted.parameters:
        return by_default
    for unknown in ("classification", "shared_memory_region"):
        if unknown in wanted.parameters:
            raise RequestError(400, f"output {wanted.name!r}: {unknown} is not offered")
    return bool_parameter(wanted.parameters, "binary_data", by_default)


def bool_parameter(parameters: Mapping[str, object] | None, name: str, by_default: bool) -> bool:
    """A parameter that is true or false. Raises `RequestError` (400) if it is neither."""
    value = parameters.get(name, by_default) if parameters else by_default
    if not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false")
    return value
