"""The messages of the Open Inference Protocol's gRPC service, from a compiled descriptor set.

`open_inference.proto` is the source, and `tools/grpc_messages.py` compiles it. The classes live in
a descriptor pool of their own: a client library in the same process has messages of the same names,
and one pool cannot hold both.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final, final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

COMPILED: Final = "open_inference.binpb"
SERVICE: Final = "inference.GRPCInferenceService"


@final
class Messages:
    """The message classes by name, and the pool with their descriptors and the service's."""

    def __init__(self) -> None:
        self.pool = DescriptorPool()
        compiled = files(__package__).joinpath(COMPILED).read_bytes()
        for file in FileDescriptorSet.FromString(compiled).file:
            self.pool.Add(file)
        service = self.pool.FindServiceByName(SERVICE)
        messages = [
            m for method in service.methods for m in (method.input_type, method.output_type)
        ]
        self._classes = {message.name: GetMessageClass(message) for message in messages}

    # `Any`: the classes are made at run time, so a type checker cannot know their fields.
    def __getitem__(self, name: str) -> Any:
        return self._classes[name]
