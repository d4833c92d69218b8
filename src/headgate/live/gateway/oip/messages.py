"""The bodies of the Open Inference Protocol in JSON, as records that msgspec reads and writes.

They are apart from the code that reads them, which is compiled where there is a compiled build: no
compiled class extends `Struct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, final

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
]
Dimension = Annotated[int, Meta(ge=0, lt=1 << 62)]
# Only the types that the protocol defines: arbitrary nesting would be slow to decode.
Parameters = dict[str, bool | int | float | str | None]
JsonArray = Annotated[Raw, Meta(extra_json_schema={"type": "array"})]  # left as text
# Parameters of a requested output: extensions that would change what it is, and are not served.
UNSUPPORTED_OF_OUTPUTS: Final = ("classification", "shared_memory_region")
VERSION: Final = "1"  # models are not versioned, but clients expect a version


@final
class InputJson(Struct, gc=False):
    """One input of a request."""

    name: str
    shape: Annotated[tuple[Dimension, ...], Meta(extra_json_schema={"maxItems": 8})]
    datatype: Datatype
    data: JsonArray | UnsetType = UNSET
    parameters: Parameters | None = None


@final
class RequestedOutput(Struct, gc=False):
    """One output that a request asks for."""

    name: str
    parameters: Parameters | None = None


@final
class InferRequest(Struct, gc=False):
    """The body of an inference request."""

    inputs: Annotated[list[InputJson], Meta(extra_json_schema={"minItems": 1})]
    id: str = ""
    parameters: Parameters | None = None
    outputs: list[RequestedOutput] | None = None


@final
class OutputJson(Struct, gc=False, omit_defaults=True):
    """One output of a response: its elements, or the number of raw bytes after the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: Sequence[Any] | JsonArray | UnsetType = UNSET


@final
class InferResponse(Struct, gc=False, omit_defaults=True):
    """The body of an inference response."""

    model_name: str
    outputs: list[OutputJson]
    model_version: str = ""
    id: str = ""
