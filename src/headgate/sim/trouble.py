"""What a fault does to a run. `headgate.sim.faults` says when.

Troubles hold no state of a run, so that the same setup can be run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from headgate.core.rng import stream
from headgate.sim.engine import Engine
from headgate.sim.hooks import Trouble

# The counters of `SimNode` that stand for the faults in force on it.
COUNTERS: Final[Mapping[str, str]] = {
    "lose": "loses",
    "duplicate": "duplicates",
    "refuse": "refuses",
    "break": "breaks",
    "break_starts": "breaks_starts",
}


@final
class Condition(Trouble):
    """From now on so many faults of one kind are in force on one node, platform or function.

    It sets what is wrong rather than adding to it and taking away again, so that overlapping
    windows leave nothing behind: not even the rounding of a factor and its inverse.
    """

    __slots__ = ("_factor", "_in_force", "_kind", "_target")

    def __init__(self, kind: str, target: int, in_force: int, factor: float) -> None:
        self._kind = kind
        self._target = target
        self._in_force = in_force
        self._factor = factor  # all of them together

    def strike(self, engine: Engine, now_ns: int) -> None:
        """Let it happen."""
        if self._kind == "throttle":
            engine.platforms[self._target].throttles = self._in_force
            return
        if self._kind == "cannot_load":
            unloadable = engine.truth.unloadable
            (unloadable.add if self._in_force else unloadable.discard)(self._target)
            return
        node = engine.nodes[self._target]
        if self._kind == "slow":
            node.slow_factor = self._factor
        elif self._kind != "crash":
            setattr(node, COUNTERS[self._kind], self._in_force)
        elif self._in_force:
            engine.crash(now_ns, node)
        else:
            engine.join(now_ns, node)


@final
class Cancellations(Trouble):
    """Clients withdraw a share of the requests that are open."""

    __slots__ = ("_share",)

    def __init__(self, share: float) -> None:
        self._share = share

    def strike(self, engine: Engine, now_ns: int) -> None:
        """Let it happen."""
        rng = stream(now_ns, "cancellations")
        for request_id in engine.recorder.open_rows():
            if rng.random() < self._share:
                engine.cancel(now_ns, request_id)


@final
class Poison(Trouble):
    """A share of the requests that are open end whatever node runs them from now on."""

    __slots__ = ("_share",)

    def __init__(self, share: float) -> None:
        self._share = share

    def strike(self, engine: Engine, now_ns: int) -> None:
        """Let it happen."""
        rng = stream(now_ns, "poison")
        for request_id in engine.recorder.open_rows():
            if rng.random() < self._share:
                engine.killers.add(request_id)


@final
class Burst(Trouble):
    """So many more requests arrive at once, unless the run is over by then."""

    __slots__ = ("_count", "_pipeline")

    def __init__(self, pipeline: int, count: int) -> None:
        self._pipeline = pipeline
        self._count = count

    def strike(self, engine: Engine, now_ns: int) -> None:
        """Let it happen."""
        for _ in range(self._count):
            engine.submit(now_ns, self._pipeline, client=0)


@final
class WrongProfile(Trouble):
    """From now on a function takes so many times as long as it did, and nobody is told."""

    __slots__ = ("_factor", "_function")

    def __init__(self, function: int, factor: float) -> None:
        self._function = function
        self._factor = factor

    def strike(self, engine: Engine, now_ns: int) -> None:
        """Let it happen."""
        scale = engine.truth.scale
        scale.extend([1.0] * (self._function + 1 - len(scale)))
        scale[self._function] *= self._factor
