"""What a front end may know of the runtime and ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from headgate.core.model import App, Pipeline
from headgate.functions.tensor import TensorSpec
from headgate.live.call import Call


class Phase(Enum):
    """Where a gateway is in its life."""

    STARTING = "starting"  # alive, not ready
    READY = "ready"
    LEAVING = "leaving"  # says it is not ready, and serves still: balancers need time to notice
    DRAINING = "draining"  # takes no more; what it has is finished


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline as clients see it."""

    name: str
    pipeline: Pipeline
    platform: str
    inputs: tuple[TensorSpec, ...]  # none: the function looks at whatever it is given by itself
    outputs: tuple[TensorSpec, ...]
    batches: bool  # the first dimension counts items
    items_max: int  # of one request


def without_details(problem: str) -> str:
    """Return a problem as anybody may see it: of an exception, its type and not what it says.

    >>> without_details("cannot be loaded: OSError: there is no secret/weights")
    'cannot be loaded: OSError'
    """
    before, found, reason = problem.partition(CANNOT_LOAD)
    kind = reason.partition(":")[0]
    if not found:
        return problem
    return f"{before}{CANNOT_LOAD}{kind if kind.isidentifier() else 'unknown error'}"


CANNOT_LOAD: Final = "cannot be loaded: "


class Serving(Protocol):
    """The runtime, as front ends see it. Everything here runs on the gateway's one event loop."""

    @property
    def phase(self) -> Phase:
        """Where it is in its life."""

    @property
    def app(self) -> App:
        """What is served. Clients are the tenants."""

    @property
    def models(self) -> Mapping[str, Model]:
        """By name; empty while it is starting."""

    def problem(self, model: Model) -> str:
        """Why a model cannot be asked just now; nothing if it is ready."""

    def now_ns(self) -> int:
        """The machine's monotonic clock, which deadlines are on."""

    def submit(self, call: Call) -> None:
        """Have it answered: `call.on_answer(call)` is called later, once, never from within."""

    def cancel(self, call: Call) -> None:
        """Nobody waits for the answer any more: `on_answer` is not called."""
