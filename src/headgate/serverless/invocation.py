"""One call of a function, and how it ended."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import msgspec

from headgate.serverless.function import FunctionVersion


@dataclass(frozen=True, slots=True)
class Invocation:
    """What is to run, with what. The id is the same for every try of an event."""

    function: FunctionVersion
    arn: str
    payload: bytes
    client_context: str = ""  # JSON
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def trace(self) -> str:
        """A trace id of the kind that AWS gives: the platform traces nothing itself."""
        digits = self.id.replace("-", "")
        return f"Root=1-{int(time.time()):08x}-{digits[:24]};Parent={digits[16:]};Sampled=0"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended, as far as the instance that was to run it knows.

    With `has_run` false, the instance has died before it could be given the call, which is free
    to run elsewhere. `error_type` is empty if all went well.
    """

    payload: bytes = b""
    error_type: str = ""
    has_run: bool = True
    started_s: float = 0.0  # seconds since 1970
    init_ms: float = 0.0
    duration_ms: float = 0.0
    is_cold: bool = False
    log: bytes = b""


def failure(kind: str, message: str) -> bytes:
    """What a client reads of a failure that the function did not report itself."""
    return msgspec.json.encode({"errorType": kind, "errorMessage": message})


def error_type_of(payload: bytes) -> str:
    """The type of error that a runtime has reported."""
    try:
        return msgspec.json.decode(payload, type=_Reported).errorType or "Unknown"
    except msgspec.DecodeError:
        return "Unknown"


class _Reported(msgspec.Struct):
    errorType: str = ""
