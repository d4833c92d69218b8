"""The messages of the Open Inference Protocol's gRPC service, built at run time.

`MESSAGES` describes them as a `.proto` file would. Names and numbers are the protocol's. The
classes live in a descriptor pool of their own: a client library in the same process has messages of
the same names, and one pool cannot hold both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE: Final = "inference"
SERVICE: Final = "inference.GRPCInferenceService"
METHODS: Final = (
    *("ServerLive", "ServerReady", "ModelReady"),
    *("ServerMetadata", "ModelMetadata", "ModelInfer"),
)

MESSAGES: Final[Mapping[str, str]] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": """
        string name = 1
        string version = 2""",
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": """
        string name = 1
        string version = 2
        repeated string extensions = 3""",
    "ModelMetadataRequest": """
        string name = 1
        string version = 2""",
    "ModelMetadataResponse": """
        string name = 1
        repeated string versions = 2
        string platform = 3
        repeated ModelMetadataResponse.TensorMetadata inputs = 4
        repeated ModelMetadataResponse.TensorMetadata outputs = 5""",
    "ModelMetadataResponse.TensorMetadata": """
        string name = 1
        string datatype = 2
        repeated int64 shape = 3""",
    "InferParameter": """
        oneof bool bool_param = 1
        oneof int64 int64_param = 2
        oneof string string_param = 3
        oneof double double_param = 4
        oneof uint64 uint64_param = 5""",
    "InferTensorContents": """
        repeated bool bool_contents = 1
        repeated int32 int_contents = 2
        repeated int64 int64_contents = 3
        repeated uint32 uint_contents = 4
        repeated uint64 uint64_contents = 5
        repeated float fp32_contents = 6
        repeated double fp64_contents = 7
        repeated bytes bytes_contents = 8""",
    "ModelInferRequest": """
        string model_name = 1
        string model_version = 2
        string id = 3
        map InferParameter parameters = 4
        repeated ModelInferRequest.InferInputTensor inputs = 5
        repeated ModelInferRequest.InferRequestedOutputTensor outputs = 6
        repeated bytes raw_input_contents = 7""",
    "ModelInferRequest.InferInputTensor": """
        string name = 1
        string datatype = 2
        repeated int64 shape = 3
        map InferParameter parameters = 4
        one InferTensorContents contents = 5""",
    "ModelInferRequest.InferRequestedOutputTensor": """
        string name = 1
        map InferParameter parameters = 2""",
    "ModelInferResponse": """
        string model_name = 1
        string model_version = 2
        string id = 3
        map InferParameter parameters = 4
        repeated ModelInferResponse.InferOutputTensor outputs = 5
        repeated bytes raw_output_contents = 6""",
    "ModelInferResponse.InferOutputTensor": """
        string name = 1
        string datatype = 2
        repeated int64 shape = 3
        map InferParameter parameters = 4
        one InferTensorContents contents = 5""",
}


@final
class Messages:
    """The message classes by name, and the pool with their descriptors and the service's."""

    def __init__(self) -> None:
        self.pool = DescriptorPool()
        self.pool.AddSerializedFile(describe().SerializeToString())
        self._classes = {
            name: GetMessageClass(self.pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
            for name in MESSAGES
        }

    # `Any`: the classes are made at run time, so a type checker cannot know their fields.
    def __getitem__(self, name: str) -> Any:
        return self._classes[name]


def describe() -> FileDescriptorProto:
    """The file descriptor that a compiler would generate."""
    file = FileDescriptorProto(
        name="headgate/open_inference.proto", package=PACKAGE, syntax="proto3"
    )
    messages: dict[str, DescriptorProto] = {}
    for name, fields in MESSAGES.items():  # a message precedes those nested in it
        outer, _, own = name.rpartition(".")
        message = messages[outer].nested_type.add() if outer else file.message_type.add()
        message.name = own
        messages[name] = message
        for rule, kind, field, number in _parsed(fields):
            _add_field(message, name, rule, kind, field, number)
    service = file.service.add(name=SERVICE.removeprefix(f"{PACKAGE}."))
    for method in METHODS:
        service.method.add(
            name=method,
            input_type=f".{PACKAGE}.{method}Request",
            output_type=f".{PACKAGE}.{method}Response",
        )
    return file


def _parsed(fields: str) -> Iterator[tuple[str, str, str, int]]:
    """Rule, type, name and number of each line.

    >>> list(_parsed("repeated int64 shape = 3"))
    [('repeated', 'int64', 'shape', 3)]
    """
    for line in fields.split("\n"):
        if line.strip():
            match = re.fullmatch(r"\s*(?:(repeated|oneof|map|one) )?([\w.]+) (\w+) = (\d+)", line)
            assert match is not None, line
            yield match[1] or "", match[2], match[3], int(match[4])


def _add_field(
    message: DescriptorProto, outer: str, rule: str, kind: str, name: str, number: int
) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if rule == "map":
        _set_type(field, f"{outer}.{_add_entry(message, name, kind)}")
    else:
        _set_type(field, kind)
    if rule in ("map", "repeated"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    elif rule == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0


def _add_entry(message: DescriptorProto, name: str, kind: str) -> str:
    """A map from strings is a repeated message of key and value."""
    entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
    entry.options.map_entry = True
    for number, (part, part_kind) in enumerate((("key", "string"), ("value", kind)), 1):
        field = entry.field.add(name=part, number=number)
        field.label = FieldDescriptorProto.LABEL_OPTIONAL
        _set_type(field, part_kind)
    return entry.name


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    scalar = _SCALARS.get(kind)
    if scalar is None:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    else:
        field.type = scalar


_SCALARS: Final[Mapping[str, FieldDescriptorProto.Type.ValueType]] = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}
